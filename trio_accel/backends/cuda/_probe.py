"""Finds the CUDA devices of the machine, or the reason why none can be used, with the remedy.

A child process queries the driver, because the application must not call CUDA (D55). `ask` runs any function
of `_probe_process` in such a child; `probe` turns its answer into descriptions and reasons.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from ..base import DeviceInfo
from . import _probe_process

_PROGRAM = Path(_probe_process.__file__)
_MODULE = Path("/sys/module/nvidia/version")
_PROBE_TIMEOUT = 60.0  # seconds
_LOG_ADVICE = "see what `nvidia-smi` and the system's log say"
_OLDEST = 12000  # the driver's version, as CUDA encodes 12.0
_UUID_DIGITS = 32
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"
# The values of CUcomputemode.
_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_PROHIBITED, _EXCLUSIVE = 2, 3
# Advice for errors at the driver's start. "It" and "its" are the driver.
_ADVICE = {
    "CUDA_ERROR_STUB_LIBRARY": (
        "what was loaded is the toolkit's stub of it: take its folder `stubs` out of LD_LIBRARY_PATH"
    ),
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process has the GPU for itself, as `nvidia-smi` shows",
    "CUDA_ERROR_SYSTEM_NOT_READY": (
        "the system is not ready; with NVSwitch, start its manager: systemctl start nvidia-fabricmanager"
    ),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        "its libraries and its kernel module differ in version, as after an update: reboot"
    ),
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": (
        "CUDA's folder `compat` is in use and not made for this GPU: take it out of LD_LIBRARY_PATH"
    ),
    "CUDA_ERROR_UNKNOWN": f"load its kernel module anew, or reboot; {_LOG_ADVICE}",
}
# Errors that may disappear on their own.
_PASSING = {"CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA_ERROR_SYSTEM_NOT_READY"}


@attrs.frozen(kw_only=True)
class DeviceFacts:
    """The driver's facts about a device, for which it need not be open.

    Attributes:
        info: Description of the device.
        capability: Compute capability, such as ``(9, 0)``.
        mode: Compute mode, such as ``"exclusive process"``.
        keeps_memory: Whether memory can be exported as a descriptor, which worker processes require.
        why_not: The reason why the device cannot be used; None if it can.
    """

    info: DeviceInfo
    capability: tuple[int, int]
    mode: str
    keeps_memory: bool
    why_not: str | None

    @property
    def architecture(self) -> str:
        """Compute capability without the point, such as ``"90"``."""
        return "".join(map(str, self.capability))


@attrs.frozen(kw_only=True)
class ProbeResult:
    """The answer of `probe`.

    Attributes:
        version: CUDA version of the driver, such as ``(13, 0)``; None without a driver.
        devices: The devices, usable or not, by number.
        reason: The reason why no device is usable, and the remedy; None if any is usable.
        is_passing: Whether an obstacle of the driver or of any device may disappear on its own, so that
            another probe is worthwhile.
    """

    version: tuple[int, int] | None = None
    devices: Sequence[DeviceFacts] = ()
    reason: str | None = None
    is_passing: bool = False

    @property
    def driver(self) -> str | None:
        """The driver's version, if the system reports it, and its CUDA version; None without a driver."""
        if self.version is None:
            return None
        cuda = "CUDA " + ".".join(map(str, self.version))
        try:
            return f"{_MODULE.read_text(encoding='utf-8').strip()} ({cuda})"
        except OSError:
            return cuda


_answers: dict[tuple[str | None, ...], ProbeResult] = {}


def probe(*, is_worker: bool = False) -> ProbeResult:
    """Query the driver; blocks.

    Answers that cannot change are cached for each setting of the environment variables that select devices.

    Args:
        is_worker: Whether this process serves one device, and so may load the driver. Other processes use a
            child process.
    """
    key = (os.environ.get(_VISIBLE), os.environ.get(_ORDER))
    if key not in _answers:
        result = _probe(key[0], is_worker)
        if result.is_passing:
            return result
        _answers[key] = result
    return _answers[key]


def _probe(visible: str | None, is_worker: bool) -> ProbeResult:
    if sys.platform != "linux":
        return ProbeResult(reason=f"the CUDA backend runs on Linux, and this is {sys.platform}")
    if is_worker:
        return _interpret(_probe_process.probe(tries_contexts=False), visible)
    try:
        answer = ask("probe", {"tries_contexts": True})
    except ChildError as error:
        return ProbeResult(
            reason=f"a process that asked the NVIDIA driver for its GPUs {error}; {_LOG_ADVICE}"
        )
    return _interpret(answer, visible)


def _interpret(answer: dict[str, Any], visible: str | None) -> ProbeResult:
    if answer.get("error") == "load":
        return ProbeResult(reason=_no_driver(answer["detail"]))
    number = int(answer["version"])
    version = (number // 1000, number % 1000 // 10) if number else None
    if "error" in answer:
        refusal = _refusal(answer["detail"], visible)
        return ProbeResult(version=version, reason=refusal, is_passing=answer["detail"] in _PASSING)
    if number < _OLDEST:
        return ProbeResult(version=version, reason=_too_old(version or (0, 0)))
    devices = tuple(_facts(*entry) for entry in enumerate(answer["devices"]))
    is_passing = any(device["context"] in _PASSING for device in answer["devices"])
    reason = devices[0].why_not if devices else _no_gpu_reason(visible)
    if any(device.why_not is None for device in devices):
        reason = None
    return ProbeResult(version=version, devices=devices, reason=reason, is_passing=is_passing)


def _no_driver(detail: str) -> str:
    if detail.startswith("libcuda.so.1: cannot open shared object file"):
        return (
            "there is no NVIDIA driver here (libcuda.so.1 was not found); it is installed with the system, "
            "and not by pip; a container gets it from its host (docker run --gpus all)"
        )
    return f"the NVIDIA driver cannot be loaded ({detail}); reinstall it"


def _refusal(name: str, visible: str | None) -> str:
    if name in ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_INVALID_DEVICE"):
        return _no_gpu_reason(visible)
    return f"the NVIDIA driver does not start ({name}): {_ADVICE.get(name, _LOG_ADVICE)}"


def _no_gpu_reason(visible: str | None) -> str:
    if visible is None:
        return "the NVIDIA driver finds no GPU; see whether `nvidia-smi` does, also outside of a container"
    setting = f"{_VISIBLE}={visible!r}"
    return f"the setting {setting} leaves the NVIDIA driver no GPU; unset it, or name one that is there"


def _too_old(version: tuple[int, int]) -> str:
    major, minor = version
    return f"the NVIDIA driver is for CUDA {major}.{minor}, and 12.0 is needed: install driver 525 or later"


def _facts(index: int, device: dict[str, Any]) -> DeviceFacts:
    keeps_memory = device["has_descriptors"] == 1
    return DeviceFacts(
        info=DeviceInfo(
            backend="cuda",
            index=index,
            description=device["name"],
            total_memory=device["total_memory"],
            compute_units=device["multiprocessors"],
            isolations=("process", "inline") if keeps_memory else ("inline",),
            completion="adaptive",
            is_exclusive=device["compute_mode"] == _EXCLUSIVE,
            uuid=_uuid(device["uuid"]),
        ),
        capability=(device["major"], device["minor"]),
        mode=_MODES.get(device["compute_mode"], "unknown"),
        keeps_memory=keeps_memory,
        why_not=_why_not(device),
    )


def _uuid(digits: str) -> str | None:
    """Format a UUID as `nvidia-smi` does; return None if the driver has not reported it."""
    if len(digits) != _UUID_DIGITS or not digits.strip("0"):
        return None
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _why_not(device: dict[str, Any]) -> str | None:
    name = device["name"]
    if device["compute_mode"] == _PROHIBITED:
        return f"the {name} is in compute mode 'prohibited'; nvidia-smi -c DEFAULT ends that"
    if device["context"] == "CUDA_ERROR_DEVICE_UNAVAILABLE":
        return taken(name)
    if device["context"] is not None:
        return f"the {name} takes no context ({device['context']}); {_LOG_ADVICE}"
    if device["has_virtual_memory"] != 1:
        return f"the {name} has no virtual memory management, which arrays are placed by"
    return None


def taken(name: str) -> str:
    """Return why a device in mode 'exclusive process' cannot be used."""
    return (
        f"the {name} is in compute mode 'exclusive process', and another process has it; `nvidia-smi` shows "
        "which, and nvidia-smi -c DEFAULT lets processes share it"
    )


_GRACE = 1.0  # seconds for a killed process to end
# Killed processes that have not ended, because they hang in the driver's kernel module.
_stuck: list[subprocess.Popen[bytes]] = []


class ChildError(Exception):
    """The child gave no result. The text states how it ended, as a clause without a subject."""


def ask(function: str, arguments: Mapping[str, object], path: Sequence[str] = ()) -> Any:
    """Call a function of `_probe_process` in a child process; blocks for up to a minute.

    Args:
        function: The name of the function.
        arguments: Its arguments by name, which JSON must be able to encode.
        path: The module search path, if the function imports packages; otherwise empty.

    Returns:
        The result of the function, decoded from JSON.

    Raises:
        ChildError: The child crashed, hung, could not be started, or printed no JSON.
    """
    # Run `site` only if packages are needed, because it adds their folders to the search path.
    command = [sys.executable, *(["-I"] if path else ["-I", "-S"]), str(_PROGRAM)]
    question = json.dumps([function, path, arguments]).encode()
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)  # noqa: S603  # our own
    except OSError as error:
        raise ChildError(f"could not be started ({error})") from error
    try:
        out, err = process.communicate(question, timeout=_PROBE_TIMEOUT)
    except subprocess.TimeoutExpired:
        _end(process)
        raise ChildError(f"did not answer within {_PROBE_TIMEOUT:g} s") from None
    except BaseException:
        _end(process)
        raise
    if process.returncode:
        raise ChildError(_how_it_ended(process.returncode, err))
    try:
        return json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        raise ChildError("gave no answer") from None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    if process.returncode is None:
        _stuck.append(process)


def _how_it_ended(code: int, err: bytes) -> str:
    words = err.decode(errors="replace").strip().splitlines()
    if code > 0:
        return f"ended with code {code}" + (f" ({words[-1]})" if words else "")
    try:
        return f"crashed ({signal.Signals(-code).name})"
    except ValueError:
        return f"crashed (signal {-code})"
