"""Which CUDA devices there are, or why there is none."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

__all__ = ["DeviceFacts", "Probe", "probe"]

_PROGRAM = Path(__file__).with_name("_probe_process.py")
_PATIENCE = 60.0
_LOOK = "look at `nvidia-smi` and the system's log"
_OLDEST = 12000
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PROHIBITED, _EXCLUSIVE = 2, 3


@attrs.frozen(kw_only=True)
class DeviceFacts:
    """What the driver tells of a device without a context.

    Attributes:
        name: The product.
        uuid: What NVML and other processes know it by, as hexadecimal digits.
        total_memory: Bytes.
        multiprocessors: How many it has.
        architecture: Compute capability without the point, such as ``"90"``.
        is_exclusive: Whether it takes the context of one process only.
        keeps_memory: Whether memory can be exported as a descriptor.
        why_not: Why it cannot be used; None if it can.
    """

    name: str
    uuid: str
    total_memory: int
    multiprocessors: int
    architecture: str
    is_exclusive: bool
    keeps_memory: bool
    why_not: str | None


@attrs.frozen(kw_only=True)
class Probe:
    """What was found.

    Attributes:
        version: CUDA version of the driver, such as ``"13.0"``; None without a driver.
        devices: By their number.
        reason: Why there is no device to use, and what to do about it; None if there is one.
    """

    version: str | None = None
    devices: Sequence[DeviceFacts] = ()
    reason: str | None = None


def probe() -> Probe:
    """Ask the driver, in a process of its own; blocks. Asked once for each setting of the environment."""
    return _probe(os.environ.get(_VISIBLE))


@functools.cache
def _probe(visible: str | None) -> Probe:
    if sys.platform != "linux":
        return Probe(reason=f"the CUDA backend runs on Linux, this is {sys.platform}")
    try:
        done = subprocess.run(  # noqa: S603  # a program of this package
            [sys.executable, "-I", "-S", str(_PROGRAM)],
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return Probe(reason=f"the NVIDIA driver did not answer within {_PATIENCE:g} s; {_LOOK}")
    except OSError as error:
        return Probe(reason=f"the NVIDIA driver could not be asked: {error}")
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        return Probe(
            reason=f"the process that asks the NVIDIA driver ended with code {done.returncode}"
            + (f": {words[-1]}" if words else "")
        )
    return _understood(json.loads(done.stdout), visible)


def _understood(answer: dict[str, Any], visible: str | None) -> Probe:
    if answer.get("error") == "no driver":
        return Probe(
            reason="there is no NVIDIA driver here (libcuda.so.1 was not found); it is installed with the "
            "system, and not by pip, and a container gets it from its host (docker run --gpus all)"
        )
    number = int(answer["version"])
    version = f"{number // 1000}.{number % 1000 // 10}"
    if "error" in answer:
        return Probe(version=version, reason=_refusal(answer, visible))
    too_old = _too_old(number, version)
    devices = tuple(_facts(device) for device in answer["devices"])
    if too_old is not None:
        return Probe(version=version, reason=too_old)
    usable = [device for device in devices if device.why_not is None]
    if usable:
        return Probe(version=version, devices=devices)
    if devices:
        return Probe(version=version, devices=devices, reason=devices[0].why_not)
    return Probe(version=version, reason=_none(visible))


def _refusal(answer: dict[str, Any], visible: str | None) -> str:
    name = str(answer["detail"])
    if name == "CUDA_ERROR_NO_DEVICE":
        return _none(visible)
    advice = {
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "driver and kernel module differ in version: reboot",
        "CUDA_ERROR_SYSTEM_NOT_READY": "start the fabric manager: systemctl start nvidia-fabricmanager",
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "take CUDA's compat folder out of LD_LIBRARY_PATH",
    }.get(name, _LOOK)
    return f"the NVIDIA driver does not start ({name}); {advice}"


def _none(visible: str | None) -> str:
    if visible is None:
        return "the NVIDIA driver sees no GPU; see whether `nvidia-smi` does, also outside of a container"
    return f"{_VISIBLE}={visible!r} shows the NVIDIA driver no GPU; unset it, or name one that is there"


def _too_old(number: int, version: str) -> str | None:
    bindings = metadata.version("cuda-bindings")
    major = int(bindings.partition(".")[0])
    if number < _OLDEST:
        return f"the NVIDIA driver is for CUDA {version}, and 12.0 is needed: install driver 525 or later"
    if number // 1000 < major:
        return (
            f"the NVIDIA driver is for CUDA {version}, and cuda-bindings {bindings} needs CUDA {major}: "
            "pip install trio-accel[cuda12], or install a newer driver"
        )
    return None


def _facts(device: dict[str, Any]) -> DeviceFacts:
    why_not = None
    if device["compute_mode"] == _PROHIBITED:
        why_not = f"{device['name']} is in compute mode 'prohibited' (nvidia-smi -c DEFAULT ends that)"
    elif device["has_virtual_memory"] != 1:
        why_not = f"{device['name']} has no virtual memory management, which arrays are placed by"
    return DeviceFacts(
        name=device["name"],
        uuid=device["uuid"],
        total_memory=device["total_memory"],
        multiprocessors=device["multiprocessors"],
        architecture=f"{device['major']}{device['minor']}",
        is_exclusive=device["compute_mode"] == _EXCLUSIVE,
        keeps_memory=device["has_descriptors"] == 1,
        why_not=why_not,
    )
