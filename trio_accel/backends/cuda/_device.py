"""An open device of the CUDA backend."""

from __future__ import annotations

from functools import partial

import attrs
from cuda.bindings import driver

from ..base import (
    AccelStream,
    ArraySpec,
    ChunkKeeper,
    DeviceInfo,
    MemoryStatistics,
    NotSupportedError,
    Poison,
    Strs,
)
from ._installed import Installed
from .kit._library import CudaLibrary, LibraryDevice, ModuleLibrary
from .manifest import LIBRARIES
from .runtime._foreign import CudaLease, Lending, reserved_by_others
from .runtime._kernels import CudaFaults
from .runtime._signals import EventNotifier, StatusWords
from .runtime._stream import CudaHold, CudaStream

# The packages with the bindings of libraries.
_PACKAGES = ("cuda", "nvmath")


class CudaDevice(LibraryDevice):
    """A GPU: its context, its streams, and a share of its memory.

    Args:
        info: Description of the device.
        memory_limit: The most bytes that its blocks may take.
        architecture: Its compute capability, such as ``"90"``.
        installed: Names of the installed CUDA libraries.
        keeper: Gets the chunks of its blocks.
    """

    def __init__(
        self,
        info: DeviceInfo,
        memory_limit: int,
        architecture: str,
        installed: Installed,
        keeper: ChunkKeeper | None = None,
    ) -> None:
        super().__init__(info, memory_limit, architecture, keeper)
        self._installed = installed
        self._is_isolated = keeper is not None
        try:
            self._status_words = StatusWords(self.context)
            self._notifier = EventNotifier(info.name)
            self._faults = CudaFaults(self.context, self.kernels, self._status_words)
        except BaseException:
            self.context.release()
            raise
        self._lending = Lending(info, self.context, partial(self.open_stream, f"{info.name} leases"))
        self.context.before_loss(self._forget)

    @property
    def libraries(self) -> Strs:
        """Names of the libraries that can be used, sorted."""
        return self._installed.libraries

    def open_stream(self, name: str, priority: int = 0) -> CudaStream:
        """Make a stream; see `AccelDevice.open_stream`. An H200 has six priorities, 0 to 5."""
        self.check_open()
        stream = CudaStream(name, self.context, self._status_words, self._notifier, self._priority(priority))
        return self.add_stream(stream)

    def give_back(self, stream: CudaStream) -> None:
        """Release an ended stream, with the memory of its operations."""
        stream.destroy()
        if not self.context.is_dead:
            with self.context:
                self.arena.drop(stream)

    def open_library(self, name: str) -> CudaLibrary:
        """Load a library and make its handle; blocks.

        NVIDIA's libraries wait for the whole context when they load kernels, and launches of other libraries
        may wait with them (D50, D99).

        Raises:
            NotSupportedError: The library does not exist, or its files are not installed.
        """
        self.check_open()
        key, separator, argument = name.partition("?")
        if key not in LIBRARIES:
            with self.context:
                return ModuleLibrary(name, self, self.libraries)
        problem = self._installed.problem(key)
        if problem is not None:
            raise self._unsupported(problem)
        entry = LIBRARIES[key]
        try:
            with self.context:
                module = entry.load(__package__)
                # A program is made of the argument.
                library: CudaLibrary = getattr(module, entry.cls)(self, *([argument] if separator else []))
                # Libraries upload tables by the default stream and return before these have arrived.
                self.context.settle()
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in _PACKAGES:
                raise
            raise self._unsupported(
                f"library {name!r} needs {error.name}, which cannot be imported ({error}); reinstall it: "
                "pip install --force-reinstall --no-deps nvmath-python cuda-core"
            ) from error
        except Exception as error:
            # The library may have met what only the driver can name.
            self.context.detect_loss()
            failure = self.context.failure()
            if failure is None or error is failure:
                raise
            raise failure from error
        return library

    def _unsupported(self, text: str) -> NotSupportedError:
        return NotSupportedError(text, device=self.info.name, backend=self.info.backend)

    def spin(self, stream: AccelStream, block: int | None = None) -> CudaHold:
        """Hold a stream back by a kernel that does not end; see `AccelDevice.spin`."""
        if not isinstance(stream, CudaStream):
            raise TypeError(f"stream: the CUDA backend has its own streams, not {stream!r}")
        stream.check()
        return self._faults.spin(stream, (0, 0) if block is None else self.blocks.block(block))

    def poison(self, reason: str, how: Poison = "illegal_address", stream: AccelStream | None = None) -> None:
        """Make the context unusable; see `AccelDevice.poison`.

        A worker process runs a kernel with a fault. A process with other users of CUDA would lose CUDA by
        that, so there the context only counts as lost.
        """
        if self._is_isolated:
            self._faults.launch(how, stream if isinstance(stream, CudaStream) else None)
        else:
            self._notifier.defuse()
            self.context.lose(f"the context is lost: {reason}")

    def give_up(self, reason: str) -> None:
        """Count the context as lost; see `AccelDevice.give_up`."""
        self.context.lose(f"the context is lost: {reason}")

    @property
    def is_dead(self) -> bool:
        """Whether the driver has reported a sticky code; see `AccelDevice.is_dead`."""
        return self.context.is_dead

    def reaches(self, peer: DeviceInfo) -> bool:
        """Return whether the driver allows access from this GPU to another; see `AccelDevice.reaches`."""
        if self.info.index == peer.index:
            return True
        with self.context:
            numbers = [self.context.check(driver.cuDeviceGet(info.index)) for info in (self.info, peer)]
            return bool(self.context.check(driver.cuDeviceCanAccessPeer(*numbers)))

    def lend(self, array: ArraySpec, *, write: bool, stream: object = None) -> CudaLease:
        """Let other libraries of the process have an array; see `AccelDevice.lend`."""
        self.check_open()
        failure = self.context.failure()
        if failure is not None:
            raise failure
        return self._lending.lend(self.device_array(array), write=write, stream=stream)

    def memory(self) -> MemoryStatistics:
        """Count the memory."""
        statistics = super().memory()
        foreign = reserved_by_others(self.info.index)
        return attrs.evolve(statistics, foreign=foreign) if foreign else statistics

    def is_idle(self) -> bool:
        """Return whether the device is no longer in use, which includes its leases to the program."""
        return self._lending.is_idle and super().is_idle()

    def end(self, *, is_idle: bool) -> None:
        """Free everything; work on a stuck stream keeps its memory, and is not waited for."""
        if not is_idle:
            for end in self.end_loops:
                end()
            self._notifier.close(is_idle=False)
            return
        self.context.forget(self._forget)
        with self.context:
            self.graphs.close()
            self.arena.close()
            self.transfers.close()
            for stream in self.streams:
                # Streams go before the status words: each gives its word back.
                stream.destroy()
            self._notifier.close(is_idle=True)
            super().end(is_idle=True)
            if not self.context.is_dead:
                self.kernels.close()
            self._status_words.close()
            self.pinned.close()
        self.streams.clear()
        if not self.context.is_dead:
            self.context.release()

    def _forget(self) -> None:
        for stream in tuple(self.streams):
            stream.forget()

    def _priority(self, priority: int) -> int:
        """Return the driver's number of a priority: the more urgent, the smaller."""
        if not priority:
            return 0
        with self.context:
            lowest, highest = self.context.check(driver.cuCtxGetStreamPriorityRange())
        return max(int(highest), min(int(lowest), -priority))
