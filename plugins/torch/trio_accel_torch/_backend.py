"""The backend: finds PyTorch's devices without an import of PyTorch, and opens one."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from trio_accel.backends.base import (
    AccelBackend,
    AccelDevice,
    BackendReport,
    ChunkKeeper,
    DeviceInfo,
    DeviceReport,
    Isolation,
    NotSupportedError,
    Software,
    Strs,
)
from trio_accel.backends.base.contract.device_info import choose
from trio_accel.backends.base.kit.host import (
    has_shared_memory,
    keep_freed_memory,
    map_shared,
    model_name,
    total_bytes,
    usable_cores,
)

from . import _driver_check, _find_devices
from .manifest import BACKEND, LIBRARIES

_PATIENCE = 50.0


class TorchBackend(AccelBackend):
    """PyTorch's devices. A child process looks for them, and PyTorch is imported when one is opened."""

    def __init__(self) -> None:
        self._is_worker = False

    @property
    def name(self) -> str:
        """``"torch"``."""
        return BACKEND

    @property
    def shares_memory_with_host(self) -> bool:
        """Whether all devices are the processor, and other processes can map its memory."""
        devices = self._found.get("devices", ())
        return all(device["kind"] == "cpu" and not device["ends_with_process"] for device in devices)

    @property
    def preload(self) -> Strs:
        """PyTorch, and the kernels of all libraries."""
        return (f"{__package__}._device", *(entry.module for entry in LIBRARIES.values()))

    @property
    def driver_check(self) -> str | None:
        """A file that looks whether PyTorch has opened a card."""
        return _driver_check.__file__

    @functools.cached_property
    def _found(self) -> dict[str, Any]:
        if importlib.util.find_spec("torch") is None:
            return {"problem": "PyTorch is not installed: pip install torch"}
        if self._is_worker:
            return _find_devices.find()
        command = [sys.executable, _find_devices.__file__]
        try:
            done = subprocess.run(  # noqa: S603  # this interpreter and a file of this package
                command, capture_output=True, text=True, check=False, timeout=_PATIENCE
            )
        except subprocess.TimeoutExpired:
            return {"problem": f"PyTorch did not tell its devices within {_PATIENCE:g} s"}
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            return {"problem": f"PyTorch fails while it looks for devices: {last}"}
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """Find the devices of AMD, Intel and Apple, then those of NVIDIA, and then the processor."""
        return tuple(
            [self._info(index, device) for index, device in enumerate(self._found.get("devices", ()))]
        )

    def _info(self, index: int, device: dict[str, Any]) -> DeviceInfo:
        is_processor = device["kind"] == "cpu"
        isolations: tuple[Isolation, ...] = ("inline",)
        if has_shared_memory():
            # A lost context ends PyTorch's use of a card in its process.
            isolations = ("inline", "process") if is_processor else ("process", "inline")
        return DeviceInfo(
            backend=BACKEND,
            index=index,
            description=f"{model_name() if is_processor else device['name']} by PyTorch",
            total_memory=total_bytes() if is_processor else device["memory"],
            compute_units=usable_cores() if is_processor else device["units"],
            isolations=isolations,
            is_accelerator=not is_processor,
            keeps_memory=not device["ends_with_process"],
            runs_kernels=False,
        )

    def unavailable_reason(self, index: int | None = None) -> str | None:
        """Tell what is wrong with PyTorch."""
        problem: str | None = self._found.get("problem")
        return problem

    def describe(self) -> BackendReport:
        """Tell of the devices and of PyTorch."""
        reports = [
            DeviceReport(info=info, libraries=tuple(sorted(LIBRARIES))) for info in self.list_devices()
        ]
        software = Software(name="PyTorch", version=self._found.get("version"), source="wheel")
        problem = self.unavailable_reason()
        known = () if problem else (software,)
        return BackendReport(name=BACKEND, devices=tuple(reports), software=known, problem=problem)

    def open_device(
        self, index: int, *, memory_limit: int | None, keeper: ChunkKeeper | None = None
    ) -> AccelDevice:
        """Open a device; blocks while PyTorch is imported.

        Raises:
            ValueError: No device has that index, or the limit is negative.
            NotSupportedError: There is a keeper, and the memory ends with its process.
        """
        info, limit = choose(self.list_devices(), BACKEND, index, memory_limit)
        if keeper is not None and not info.keeps_memory:
            reason = f"the memory of {info.name} ends with its process"
            raise NotSupportedError(reason, backend=BACKEND, device=info.name)
        from ._device import TorchDevice

        found = self._found["devices"][index]
        where = f"{found['kind']}:{found['number']}"
        return TorchDevice(info, limit, keeper, where, is_worker=self._is_worker)

    def prepare_worker(self) -> None:
        """Look for devices in this process from now on: it has imported PyTorch already."""
        self._is_worker = True
        keep_freed_memory()

    def map_host(self, descriptor: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Map a chunk of the processor's memory; see `AccelBackend.map_host`."""
        if not self.shares_memory_with_host:
            raise NotSupportedError("the host cannot address the memory of these devices", backend=BACKEND)
        return map_shared(descriptor, nbytes)
