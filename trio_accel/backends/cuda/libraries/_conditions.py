"""Parts of graphs that run on a condition: set by kernels in a graph of the driver, else read by the host."""

from __future__ import annotations

import ctypes
import struct

from cuda.bindings import driver

from ...base.ops import ArraySpec, BranchSpec, LoopSpec
from ..kit._device import LibraryDevice
from ..runtime._kernels import Function
from ..runtime._stream import CudaStream

__all__ = ["Conditions"]

# As in conditions.cu: the handle of the condition, and a structure behind it.
_BRANCH = struct.Struct("<QQiiii")
_LOOP = struct.Struct("<QQQqQii")
_OFFSETS = (0, 8)
_STOP = struct.Struct("<i")


class Conditions:
    """Tells what runs on a condition, on the device and on the host.

    A loop in a graph of the driver may never end, and nothing else could end it in this process. So loops
    look at a word of the host's, which is set when the context counts as lost.
    """

    def __init__(self, device: LibraryDevice) -> None:
        self._device = device
        self._branch: Function | None = None
        self._loop: Function | None = None
        self._stop = 0

    def load(self) -> None:
        """Load the kernels; blocks. The context is current.

        Raises:
            Exception: They do not compile: NVRTC before CUDA 12.4 knows no conditions.
        """
        if self._loop is not None:
            return
        load = self._device.kernels.function
        self._branch = load("conditions", "set_branch", _BRANCH.size, _OFFSETS)
        self._stop = self._device.pinned.take(_STOP.size)
        self._tell_loops(0)
        self._device.context.before_loss(self.end_loops)
        self._device.end_loops.append(self.end_loops)
        self._loop = load("conditions", "set_loop", _LOOP.size, _OFFSETS)

    def end_loops(self) -> None:
        """Let no loop begin another turn; what they compute is lost."""
        self._tell_loops(1)

    def close(self) -> None:
        """Stop watching the context. Loops may still look at the word, which stays."""
        self._device.context.forget(self.end_loops)
        if self.end_loops in self._device.end_loops:
            self._device.end_loops.remove(self.end_loops)

    def _tell_loops(self, word: int) -> None:
        ctypes.memmove(self._stop, _STOP.pack(word), _STOP.size)

    def set_branch(self, stream: CudaStream, handle: int, spec: BranchSpec, number: int) -> None:
        """Enqueue that a condition is set if an operation of a number is to run."""
        assert self._branch is not None  # loaded by now
        address, dtype = self._device.address(spec.condition), spec.condition.dtype
        is_signed = dtype.kind == "int"
        values = handle, address, dtype.itemsize, is_signed, spec.is_test, number
        self._branch.run(stream.handle, 1, _BRANCH, *values, threads=1)

    def set_loop(self, stream: CudaStream, handle: int, spec: LoopSpec, *, is_begin: bool) -> None:
        """Enqueue that turns are counted, and a condition is set if there is to be another one."""
        assert self._loop is not None  # loaded by now
        address, itemsize = self._device.address(spec.condition), spec.condition.dtype.itemsize
        count = self._device.address(spec.count)
        values = handle, address, count, spec.limit, self._stop, itemsize, is_begin
        self._loop.run(stream.handle, 1, _LOOP, *values, threads=1)

    def read(self, condition: ArraySpec, stream: CudaStream) -> int:
        """Wait for a stream, and read a condition; blocks.

        Raises:
            ContextPoisonedError: The context is lost.
            RuntimeError: The stream is closed.
        """
        stream.check()
        pinned, check, nbytes = self._device.pinned, self._device.context.check, condition.dtype.itemsize
        host = pinned.take(nbytes)
        address = self._device.address(condition)
        check(driver.cuMemcpyDtoHAsync(host, address, nbytes, stream.handle))
        check(driver.cuStreamSynchronize(stream.handle))
        content = ctypes.string_at(host, nbytes)
        pinned.give_back(nbytes, host)
        return int.from_bytes(content, "little", signed=condition.dtype.kind == "int")
