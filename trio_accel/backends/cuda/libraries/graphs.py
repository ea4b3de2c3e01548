"""Graphs: chains of operations, captured from the other libraries and launched by the driver."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import attrs

from ...base import AccelStream, LibraryError
from ...base.graphs import CHAINS, Chain, ChainLibrary, ChainSpec, Works, run_works
from ...base.kernels import kernel
from ...base.ops import (
    ArraySpec,
    BranchSpec,
    GraphSpec,
    LoopSpec,
    OperationSpec,
)
from ..kit._device import LibraryDevice
from ..kit._library import CudaLibrary, KernelCall
from ..runtime._graphs import CaptureStream, Executable
from ..runtime._stream import CudaStream
from ._conditions import Conditions

__all__ = ["GraphLibrary"]


@attrs.frozen(eq=False)
class _Captured:
    """A graph of the driver.

    Attributes:
        executable: The graph to launch.
        stream: The stream that captured it.
        area: Address of the workspace that it uses.
    """

    executable: Executable
    stream: CaptureStream
    area: tuple[int, int]


class GraphLibrary(CudaLibrary, ChainLibrary):
    """Captures chains on streams of its own; parts that run on a condition are nodes of the driver's."""

    name = "graphs"
    most_plans: ClassVar[int] = 256

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._streams: dict[CudaStream, CaptureStream] = {}
        self._conditions = Conditions(device)

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        """Put an operation on a stream; see `KernelLibrary.enqueue`."""
        if not isinstance(spec, CHAINS) or type(stream) is not CudaStream:
            super().enqueue(spec, stream)
        elif stream.is_closed or self._context.is_lost or not self.launch_chain(spec, stream):
            chain: Chain | None = self._find_plan(spec)
            # In a thread of the engine, the device may be closed meanwhile.
            with stream.in_use() if chain is not None and chain.is_blocking else nullcontext():
                super().enqueue(spec, stream)

    @kernel(GraphSpec, backend="cuda", plan=ChainLibrary.plan_chain)
    @kernel(BranchSpec, backend="cuda", plan=ChainLibrary.plan_chain)
    @kernel(LoopSpec, backend="cuda", plan=ChainLibrary.plan_chain)
    def _replay(self, spec: ChainSpec, call: KernelCall) -> None:
        self.run_chain(spec, call.plan, call.stream)

    def _open(self, name: str) -> CudaLibrary:
        opened = self._device.open_library(name)
        assert isinstance(opened, CudaLibrary)  # as all of this backend
        return opened

    def _address(self, array: ArraySpec) -> int:
        return self._device.address(array)

    def _freed(self) -> int:
        return self._device.addresses.freed

    def _failure(self) -> Exception | None:
        self._context.look()
        return self._context.failure()

    def _workspace(self, stream: CudaStream) -> int:
        return self._device.arena.place(stream)[1]

    def _is_in_place(self, graph: _Captured) -> bool:
        return graph.area == self._device.arena.place(graph.stream)

    def _launch_graph(self, graph: _Captured) -> bool:
        return graph.stream.launch(graph.executable)

    def _discard(self, graph: _Captured) -> None:
        graph.stream.discard(graph.executable)

    def _read(self, condition: ArraySpec, stream: CudaStream) -> int:
        return self._conditions.read(condition, stream)

    def _write(self, count: ArraySpec, stream: CudaStream, turns: int) -> None:
        self._device.arrays.fill(stream, self._device.at(count), turns)

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
        self,
        stream: CudaStream,
        workspace: int,
        enqueue: Callable[[Any], None],
        *,
        has_conditions: bool,
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
        # D129: the needs of a part that has never run are unknown, so memory for it is taken in the capture.
        for _ in range(2 if has_conditions else 1):
            before = arena.place(capturing)
            executable = capturing.capture(enqueue, has_conditions=has_conditions)
            if arena.place(capturing) == before:
                return _Captured(executable, capturing, before)
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
