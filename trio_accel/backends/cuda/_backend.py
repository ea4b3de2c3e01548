"""The CUDA backend: NVIDIA's GPUs, by cuda-python and nvmath-python."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

from ..base import ChunkKeeper, DeviceInfo, NotSupportedError
from ._probe import DeviceFacts, probe

if TYPE_CHECKING:
    from ._device import CudaDevice

__all__ = ["CudaBackend"]


class CudaBackend:
    """Computes with NVIDIA's libraries. Nothing of CUDA is imported before a device is opened."""

    @property
    def name(self) -> str:
        """``"cuda"``."""
        return "cuda"

    @property
    def shares_memory_with_host(self) -> bool:
        """False: the host cannot address a GPU's memory."""
        return False

    @property
    def stops_when_lost(self) -> bool:
        """True: once the driver has reported a sticky code, nothing of the context writes any more."""
        return True

    @property
    def preload(self) -> tuple[str, ...]:
        """What takes most of a worker's start to import; none of it calls the driver."""
        return (
            "trio_accel.backends.cuda._device",
            "trio_accel.backends.cuda.kernels.memory",
            "trio_accel.backends.cuda.kernels.blas",
            "trio_accel.backends.cuda.kernels.fft",
            "trio_accel.backends.cuda.kernels.random",
            "trio_accel.backends.cuda.kernels.sparse",
            "cuda.core.utils",
        )

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """Describe the GPUs that can be used; asks the driver in a process of its own."""
        found = probe()
        return tuple(
            _info(index, facts) for index, facts in enumerate(found.devices) if facts.why_not is None
        )

    def unavailable_reason(self) -> str | None:
        """Why there is no GPU to use, and what to do about it."""
        return probe().reason

    def open_device(
        self, index: int, *, memory_limit: int | None, keeper: ChunkKeeper | None = None
    ) -> CudaDevice:
        """Open a device; see `AccelBackend.open_device`.

        Raises:
            ValueError: No device has that index, or the limit is negative.
            NotSupportedError: There is a keeper, and the device cannot export memory.
        """
        devices = {info.index: info for info in self.list_devices()}
        if index not in devices:
            names = ", ".join(info.name for info in devices.values()) or "none"
            raise ValueError(f"index: there is no device cuda:{index}; there is {names}")
        if memory_limit is not None and memory_limit < 0:
            raise ValueError(f"memory_limit: {memory_limit} is negative")
        info, facts = devices[index], probe().devices[index]
        if keeper is not None and not facts.keeps_memory:
            raise NotSupportedError(
                f"{facts.name} cannot export memory to other processes; use isolation='inline'",
                backend=self.name,
                device=info.name,
            )
        from ._device import CudaDevice

        limit = info.total_memory if memory_limit is None else memory_limit
        return CudaDevice(info, limit, facts.architecture, keeper)

    def prepare_worker(self) -> None:
        """Give every stream a queue of its own in the hardware: one that is held must not hold up others."""
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

    def map_host(self, descriptor: int, nbytes: int) -> NoReturn:
        """Refused: the host cannot address a GPU's memory."""
        raise NotSupportedError("the host cannot address the memory of a GPU", backend=self.name)


def _info(index: int, facts: DeviceFacts) -> DeviceInfo:
    return DeviceInfo(
        backend="cuda",
        index=index,
        description=facts.name,
        total_memory=facts.total_memory,
        compute_units=facts.multiprocessors,
        isolations=("process", "inline") if facts.keeps_memory else ("inline",),
        completion="adaptive",
        is_exclusive=facts.is_exclusive,
    )
