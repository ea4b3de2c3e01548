"""Graphs: chains of operations, captured from the other libraries and launched by the driver.

Parts of them may run on a condition: set by kernels in a graph of the driver, else read by the host.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import attrs

from ...base import LibraryError, kernel
from ...base.contract.ops import ArraySpec, BranchSpec, ChainSpec, GraphSpec, LoopSpec
from ...base.gpu.driver import KernelFunction
from ...base.gpu.graphs import AnyChain, ChainLibrary, Works, run_works
from ..kit._library import CudaLibrary, KernelCall, LibraryDevice, read_now
from ..runtime._graphs import CaptureStream, Executable
from ..runtime._stream import CudaStream

# The structure in conditions.cu: the handle of the condition, followed by another structure.
_BRANCH = struct.Struct("<QQiiii")
_LOOP = struct.Struct("<QQQqQii")
_OFFSETS = (0, 8)
_STOP = struct.Struct("<i")


class Conditions:
    """Selects the work that runs on a condition, on the device and on the host.

    A loop in a graph of the driver may never end, and nothing else could end it in this process. So loops
    read a word of host memory, which is set when the context counts as lost.
    """

    def __init__(self, device: LibraryDevice) -> None:
        self._device = device
        self._branch: KernelFunction | None = None
        self._loop: KernelFunction | None = None
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
        """Let no loop begin another turn; their results are lost."""
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


@attrs.frozen(eq=False)
class _Captured:
    """A graph of the driver.

    Attributes:
        executable: The graph to launch.
        stream: The stream that captured it.
        area: Address of the workspace that it uses.
        epoch: The epoch of its libraries; None where no event ends its use.
    """

    executable: Executable
    stream: CaptureStream
    area: tuple[int, int]
    epoch: int | None


class CudaGraphLibrary(ChainLibrary, CudaLibrary):
    """Captures chains on streams of its own; parts that run on a condition are nodes of the driver's."""

    name = "graphs"
    most_plans: ClassVar[int] = 256

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._streams: dict[CudaStream, CaptureStream] = {}
        self._conditions = Conditions(device)

    @kernel(GraphSpec, backend="cuda", plan=ChainLibrary.plan_chain)
    @kernel(ChainSpec, backend="cuda", plan=ChainLibrary.plan_chain)
    @kernel(BranchSpec, backend="cuda", plan=ChainLibrary.plan_chain)
    @kernel(LoopSpec, backend="cuda", plan=ChainLibrary.plan_chain)
    def _replay(self, spec: AnyChain, call: KernelCall) -> None:
        self.run_chain(spec, call.plan, call.stream)

    def _is_in_place(self, graph: _Captured) -> bool:
        is_there: bool = graph.area == self._device.arena.area_of(graph.stream)
        # A checked structure may have been forgotten since (D166).
        return is_there and (graph.epoch is None or graph.epoch == self._counted("epoch"))

    def _counted(self, name: Literal["epoch", "watched"]) -> int:
        return sum(getattr(library, name) for library in self._libraries.values())

    def _launch_graph(self, graph: _Captured) -> bool:
        return graph.stream.launch(graph.executable)

    def _discard(self, graph: _Captured) -> None:
        graph.stream.discard(graph.executable)

    def _read(self, condition: ArraySpec, stream: CudaStream) -> int:
        address, dtype = self._device.address(condition), condition.dtype
        content = read_now(self._device, stream, address, dtype.itemsize)
        return int.from_bytes(content, "little", signed=dtype.kind == "int")

    def _capture_parts(self, spec: BranchSpec | LoopSpec, works: Works, stream: CaptureStream) -> None:
        conditions = self._conditions
        if isinstance(spec, LoopSpec):
            handle = stream.condition()
            conditions.set_loop(stream, handle, spec, is_begin=True)
            with stream.part(handle, is_loop=True):
                run_works(works)
                conditions.set_loop(stream, handle, spec, is_begin=False)
            return
        handles = [stream.condition() for _ in works]
        # D129: all conditions are set first, as a part may change the array that the others are chosen by.
        for number, handle in enumerate(handles):
            conditions.set_branch(stream, handle, spec, number)
        for number, handle in enumerate(handles):
            with stream.part(handle, is_loop=False):
                run_works(works, [number])

    def _make_graph(
        self, stream: CudaStream, workspace: int, enqueue: Callable[[Any], None], *, has_conditions: bool
    ) -> _Captured:
        """Capture a chain. All memory that it needs is taken before: the driver refuses that meanwhile."""
        arena, capturing = self._device.arena, self._streams.get(stream)
        if capturing is None:
            capturing = self._streams[stream] = CaptureStream(stream, self._context)
        arena.reserve(capturing, workspace)
        for library in self._libraries.values():
            if library is not self:
                library.attach(capturing)
        if has_conditions:
            self._conditions.load()
        # D129: a part that has never run has unknown needs, so memory for it is taken in the capture.
        for _ in range(2 if has_conditions else 1):
            area = arena.area_of(capturing)
            epoch, watched = self._counted("epoch"), self._counted("watched")
            executable = capturing.capture(enqueue, has_conditions=has_conditions)
            if arena.area_of(capturing) == area:
                is_watched = self._counted("watched") != watched
                return _Captured(executable, capturing, area, epoch if is_watched else None)
            # The area of the first capture is given back by now.
            capturing.discard(executable)
        raise LibraryError("its workspace has grown meanwhile", library=self.name, code="workspace")

    def _destroy(self) -> None:
        self._conditions.close()
        self._close_libraries()
        for stream in self._streams.values():
            self._device.arena.drop(stream)
            stream.destroy()
        self._streams.clear()
