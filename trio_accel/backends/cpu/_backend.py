"""The CPU backend: one device, the processor that runs the program."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..base import AccelBackend, BackendReport, ChunkKeeper, DeviceInfo, DeviceReport, NotSupportedError
from ..base.device_info import choose
from ..base.host import (
    has_shared_memory,
    keep_freed_memory,
    map_shared,
    model_name,
    total_bytes,
    usable_cores,
)
from ..base.modules import import_ahead
from ._device import CpuDevice
from .manifest import LIBRARIES

__all__ = ["CpuBackend"]


class CpuBackend(AccelBackend):
    """Computes with NumPy and SciPy on streams that are threads. Always there."""

    @property
    def name(self) -> str:
        """``"cpu"``."""
        return "cpu"

    @property
    def shares_memory_with_host(self) -> bool:
        """True: it is the host's."""
        return True

    @property
    def preload(self) -> tuple[str, ...]:
        """The kernels of all libraries, with SciPy: most of a worker's start is to import them."""
        return tuple(f"{__package__}{entry.module}" for entry in LIBRARIES.values())

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """Describe the one device."""
        return (
            DeviceInfo(
                backend=self.name,
                index=0,
                description=model_name(),
                total_memory=total_bytes(),
                compute_units=usable_cores(),
                isolations=("inline", "process") if has_shared_memory() else ("inline",),
            ),
        )

    def describe(self) -> BackendReport:
        """Tell of the one device, which computes with packages that are always installed."""
        (info,) = self.list_devices()
        return BackendReport(
            name=self.name, devices=(DeviceReport(info=info, libraries=tuple(sorted(LIBRARIES))),)
        )

    def open_device(
        self, index: int, *, memory_limit: int | None, keeper: ChunkKeeper | None = None
    ) -> CpuDevice:
        """Open the device; blocks while NumPy's and SciPy's modules are imported, unless there is a keeper.

        Args:
            index: 0.
            memory_limit: The most bytes that its blocks may take; None for the machine's memory.
            keeper: Gets the chunks that blocks are placed in; see `AccelBackend.open_device`.

        Raises:
            ValueError: No device has that index, or the limit is negative.
            NotSupportedError: There is a keeper, and the system is not Linux.
        """
        info, limit = choose(self.list_devices(), self.name, index, memory_limit)
        if keeper is None:
            import_ahead(self.preload)
        else:
            _check_shared(info.name)
        return CpuDevice(info, limit, keeper)

    def prepare_worker(self) -> None:
        """Keep what kernels free for the next ones; see `keep_freed_memory`."""
        keep_freed_memory()

    def map_host(self, descriptor: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Map a chunk; see `AccelBackend.map_host`."""
        _check_shared(None)
        return map_shared(descriptor, nbytes)


def _check_shared(device: str | None) -> None:
    if not has_shared_memory():
        raise NotSupportedError(
            "the CPU backend has memory that outlives its process on Linux only (memfd);"
            " use isolation='inline' here",
            backend="cpu",
            device=device,
        )
