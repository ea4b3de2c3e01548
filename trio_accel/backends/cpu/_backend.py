"""The CPU backend: one device, the processor that runs the program."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..base import (
    AccelBackend,
    AccelStream,
    ArraySpec,
    BackendReport,
    CacheCounts,
    ChunkKeeper,
    DeviceInfo,
    DeviceReport,
    HostArray,
    LibraryUsage,
    NotSupportedError,
    Poison,
    Strs,
)
from ..base.contract.device_info import choose
from ..base.kit.device import BlockDevice
from ..base.kit.host import (
    has_shared_memory,
    keep_freed_memory,
    map_shared,
    model_name,
    total_bytes,
    usable_cores,
)
from ..base.kit.modules import import_ahead
from .compiled import _compiler
from .compiled._functions import VECTOR
from .kit._library import CpuLibrary
from .manifest import LIBRARIES, open_library
from .runtime._memory import CpuMemory, HostLease
from .runtime._stream import CpuFault, CpuHold, CpuStream


class CpuDevice(BlockDevice[CpuStream, HostArray, HostArray]):
    """The machine's processor and a share of its memory."""

    def __init__(self, info: DeviceInfo, memory_limit: int, keeper: ChunkKeeper | None = None) -> None:
        memory = CpuMemory(info.name, memory_limit, keeper)
        super().__init__(info, memory)
        self._fault = CpuFault(info.name)
        self._before = _compiler.counts.now()
        # See `ComputingDevice`; without a call in between.
        self.host_view: Callable[..., HostArray] = memory.view

    @property
    def libraries(self) -> Strs:
        """Names of the libraries, sorted."""
        return tuple(sorted(LIBRARIES))

    def open_stream(self, name: str, priority: int = 0) -> CpuStream:
        """Make a stream; its thread starts with the first work. Priorities have no effect on the CPU."""
        self.check_open()
        return self.add_stream(CpuStream(name, self._fault))

    def open_library(self, name: str) -> CpuLibrary:
        """Load a library; blocks while its modules are imported.

        Args:
            name: One of `libraries`, or the import path of a kernel module; a program has an argument.

        Raises:
            NotSupportedError: The library does not exist.
        """
        self.check_open()
        return open_library(name, self)

    def spin(self, stream: AccelStream, block: int | None = None) -> CpuHold:
        """Hold a stream back with an endless operation; see `AccelDevice.spin`."""
        if not isinstance(stream, CpuStream):
            raise TypeError(f"stream: the CPU backend has its own streams, not {stream!r}")
        return stream.hold(memory=None if block is None else self.blocks.block(block)[0])

    def poison(self, reason: str, how: Poison = "illegal_address", stream: AccelStream | None = None) -> None:
        """Make the context unusable; see `AccelDevice.poison`.

        Operations that have not run never do, events are done with the error, and no callback is called: as
        on a GPU with a lost context (D9).
        """

        def fail() -> None:
            self._fault.reason = reason

        if isinstance(stream, CpuStream):
            stream.enqueue(fail)
        else:
            fail()

    def give_up(self, reason: str) -> None:
        """Count the context as lost; see `AccelDevice.give_up`."""
        self._fault.reason = self._fault.reason or reason

    def usage(self) -> dict[str, LibraryUsage]:
        """Count expressions: plans are compiled ones, and NumPy computed what found none."""
        compilations, lookups = (
            now - then for now, then in zip(_compiler.counts.now(), self._before, strict=True)
        )
        return (
            {"arrays": LibraryUsage(CacheCounts(hits=max(0, lookups - compilations), created=compilations))}
            if lookups
            else {}
        )

    def reaches(self, peer: DeviceInfo) -> bool:
        """True: all of it is the machine's memory."""
        return True

    def lend(self, array: ArraySpec, *, write: bool, stream: object = None) -> HostLease:
        """Let the program have a host array over a block; see `AccelDevice.lend`."""
        return HostLease(self.host_view(array, write=write), stream=stream)

    def end(self, *, is_idle: bool) -> None:
        """Free everything: memory that a stuck stream still uses stays with its work until that ends."""
        super().end(is_idle=is_idle)
        if not is_idle:
            self.give_up("the device was closed")


class CpuBackend(AccelBackend):
    """Computes with NumPy and SciPy on streams that are threads. Always available."""

    @property
    def name(self) -> str:
        """``"cpu"``."""
        return "cpu"

    @property
    def shares_memory_with_host(self) -> bool:
        """True: it is host memory."""
        return True

    @property
    def preload(self) -> Strs:
        """The kernels of all libraries, with SciPy, because imports take most of a worker's start."""
        return tuple(f"{__package__}{entry.module}" for entry in LIBRARIES.values())

    @property
    def adds_in_order(self) -> bool:
        """True: elements are added one after another."""
        return True

    @property
    def unjoined(self) -> frozenset[str]:
        """Functions that have NumPy's bits by themselves, and our own bits in larger expressions (D188)."""
        return VECTOR

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
                is_accelerator=False,
            ),
        )

    def describe(self) -> BackendReport:
        """Describe the one device, which computes with packages that are always installed."""
        (info,) = self.list_devices()
        cxx_compiler = _compiler.compiler()
        evaluator = (
            "NumPy: there is no C++ compiler"
            if cxx_compiler is None
            else f"{cxx_compiler.title} ({_compiler.mode()})"
        )
        report = DeviceReport(
            info=info, libraries=tuple(sorted(LIBRARIES)), properties=(("expressions by", evaluator),)
        )
        return BackendReport(name=self.name, devices=(report,))

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
