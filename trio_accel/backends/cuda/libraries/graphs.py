"""Graphs: chains of operations, captured from the other libraries and launched by the driver."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, NoReturn, TypeAlias

import attrs

from ...base import AccelError, AccelStream, InThread, LibraryError, NotSupportedError
from ...base.kernels import kernel
from ...base.launch_cache import GraphCall, Key, LaunchCache
from ...base.ops import (
    BranchSpec,
    GraphNode,
    GraphRecipe,
    GraphSpec,
    LoopSpec,
    OperationSpec,
    graph_recipe,
)
from ..kit._device import LibraryDevice
from ..kit._library import Call, CudaLibrary
from ..runtime._graphs import CaptureStream, Executable
from ..runtime._stream import CudaStream
from ._conditions import Conditions

__all__ = ["GraphLibrary"]

_logger = logging.getLogger("trio_accel.devices")

_ChainSpec: TypeAlias = "GraphSpec | BranchSpec | LoopSpec"
_CHAINS = (GraphSpec, BranchSpec, LoopSpec)

# Of all chains of a library, each at the addresses of one replay.
_MOST = 64
_MOST_DUE = 1024


@attrs.frozen(eq=False)
class _Chain:
    """The plan of a graph.

    Attributes:
        recipe: Its operations.
        call: By which its captured graphs are known.
        is_captured: Whether all of it can be captured.
        is_blocking: Whether one of them blocks when it is enqueued: a condition is read by the host then.
        has_conditions: Whether parts of it run on conditions.
        due: Where it is to be captured before it is launched the next time, with the bytes of workspace that
            it needs.
    """

    recipe: GraphRecipe
    call: GraphCall
    is_captured: bool
    is_blocking: bool
    has_conditions: bool
    due: dict[Key, int] = attrs.field(factory=dict[Key, int], init=False)


@attrs.frozen(eq=False)
class _Captured:
    """A graph of the driver.

    Attributes:
        executable: What is launched.
        stream: What captured it.
        area: Where the workspace lies that it uses.
    """

    executable: Executable
    stream: CaptureStream
    area: tuple[int, int]


_Bound: TypeAlias = tuple[GraphNode, OperationSpec]


class GraphLibrary(CudaLibrary):
    """Replays chains by libraries of its own: at first one operation after the other.

    Once a chain has run some times at the same addresses, it is captured, in a thread. From then on it is
    launched as a graph. By then everything that it needs is loaded.

    Parts that run on a condition are nodes of the driver's then. Before, and where the driver has none, the
    host waits for the condition and reads it, in a thread.
    """

    name = "graphs"
    most_plans: ClassVar[int] = 256

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._libraries: dict[str, CudaLibrary] = {self.name: self}
        self._streams: dict[CudaStream, CaptureStream] = {}
        self._cache: LaunchCache[_Captured] = LaunchCache(_may_go, _discard)
        self._cache.most = _MOST
        self._conditions = Conditions(device)
        # How many operations were enqueued.
        self._enqueued = 0
        # The key of a chain that was asked for last.
        self._found: tuple[_ChainSpec | None, int, CudaStream | None, Key | None] = (None, 0, None, None)
        # Where a chain was launched last.
        self._stream: CudaStream | None = None

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        """Open the libraries of a chain, and prepare its operations; later on capture it."""
        prepare = super().prepare(spec)
        if prepare is not None:
            # Also what is used first may block.
            return InThread(prepare)
        chain: _Chain | None = self._find_plan(spec) if isinstance(spec, _CHAINS) else None
        if chain is None:
            return None
        capture = self._prepare_capture(chain, spec) if chain.due else None
        if chain.is_blocking and (capture is not None or not self._is_cached(chain, spec)):
            return InThread(capture)
        return capture

    def _is_cached(self, chain: _Chain, spec: Any) -> bool:
        """Whether a chain will be launched as a graph."""
        try:
            entry = self._cache.entries.get(self._key(chain, spec, self._stream))
        except KeyError:
            return False
        return entry is not None and self._is_in_place(entry.value)

    def _is_in_place(self, captured: _Captured) -> bool:
        """Whether a graph uses workspace that is there: another chain may have needed more since."""
        return captured.area == self._device.arena.place(captured.stream)

    def _prepare_capture(self, chain: _Chain, spec: Any) -> Callable[[], None] | None:
        try:
            key = self._key(chain, spec, self._stream)
        except KeyError:
            # What it is to write has no memory yet.
            return None
        if key not in chain.due or not self._cache.has_room():
            return None
        return partial(self._in_context, self._capture, key, chain, spec)

    def _plan_chain(self, spec: _ChainSpec, device: LibraryDevice) -> _Chain:
        recipe = graph_recipe(spec.recipe)
        has_conditions = not isinstance(spec, GraphSpec)
        is_captured, is_blocking = True, has_conditions
        for node, bound in zip(recipe.nodes, recipe.bind(spec.arrays), strict=True):
            library = self._library(node.library)
            if bound.operation not in library.operations:
                raise NotSupportedError(
                    f"{node.operation}: the CUDA backend's library {node.library!r} has no "
                    f"{type(bound).__name__}",
                    backend="cuda",
                )
            if isinstance(bound, _CHAINS):
                part = self._chain_of(bound)
                is_captured, is_blocking = is_captured and part.is_captured, is_blocking or part.is_blocking
                has_conditions = has_conditions or part.has_conditions
                continue
            is_captured = is_captured and library.is_captured
            while (prepare := library.prepare(bound)) is not None:
                prepare()
                if isinstance(prepare, InThread):
                    is_captured, is_blocking = False, True
                    break
        return _Chain(recipe, GraphCall(self), is_captured, is_blocking, has_conditions)

    def _chain_of(self, spec: _ChainSpec) -> _Chain:
        """The plan of a chain in another one; it is made now if there is none any more."""
        found: _Chain | None = self._find_plan(spec)
        made: _Chain = found or self._make_plan(spec, self._kernel_of(spec))
        return made

    def _library(self, name: str) -> CudaLibrary:
        library = self._libraries.get(name)
        if library is None:
            opened = self._device.open_library(name)
            assert isinstance(opened, CudaLibrary)  # as all of this backend
            library = self._libraries[name] = opened
        return library

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        """Put an operation on a stream; see `KernelLibrary.enqueue`."""
        if not isinstance(spec, _CHAINS) or type(stream) is not CudaStream:
            super().enqueue(spec, stream)
        elif not self._launch(spec, stream):
            chain: _Chain | None = self._find_plan(spec)
            # In a thread of the engine, the device may be closed meanwhile.
            with stream.in_use() if chain is not None and chain.is_blocking else nullcontext():
                super().enqueue(spec, stream)

    def _launch(self, spec: _ChainSpec, stream: CudaStream) -> bool:
        """Launch what was captured of a chain, if anything was: for that no context need be current."""
        self._stream = stream
        if stream.is_closed or self._context.is_lost:
            return False
        chain: _Chain | None = self._find_plan(spec)
        if chain is None:
            return False
        key = self._key(chain, spec, stream)
        entry = self._cache.entries.get(key)
        if entry is None:
            return False
        captured = entry.value
        if not self._is_in_place(captured):
            self._cache.remove(key)
            return False
        entry.last = stream.timeline.sequence
        if captured.stream.launch(captured.executable):
            self._plans.note_launch(chain)
            return True
        chain.call.refuse(key)
        self._cache.remove(key)
        return False

    @kernel(GraphSpec, backend="cuda", plan=_plan_chain)
    @kernel(BranchSpec, backend="cuda", plan=_plan_chain)
    @kernel(LoopSpec, backend="cuda", plan=_plan_chain)
    def _replay(self, spec: _ChainSpec, call: Call) -> None:
        chain: _Chain = call.plan
        before, stream = self._enqueued, call.stream
        try:
            self._enqueue_chain(chain, spec, stream)
        except Exception as error:
            if self._enqueued == before or stream.is_capturing or self._context.is_lost:
                raise
            # What is enqueued by now runs, and its memory is in use.
            stream.after(partial(_raise, error))
            return
        if chain.is_captured and not stream.is_capturing:
            key = self._key(chain, spec, stream)
            if not chain.call.is_refused(key) and self._cache.is_due(key):
                self._note_due(chain, key)

    def _note_due(self, chain: _Chain, key: Key) -> None:
        """A chain has run often enough at a place: it is captured before it is launched there again."""
        if len(chain.due) >= _MOST_DUE:
            chain.due.clear()
        chain.due[key] = self._device.arena.place(key[1])[1]

    def _enqueue_chain(self, chain: _Chain, spec: _ChainSpec, stream: CudaStream) -> None:
        """Enqueue the operations of a chain, one after the other, or those that its condition chooses."""
        nodes = list(zip(chain.recipe.nodes, chain.recipe.bind(spec.arrays), strict=True))
        if isinstance(spec, GraphSpec):
            self._enqueue_nodes(nodes, stream)
        elif isinstance(stream, CaptureStream):
            self._capture_parts(spec, nodes, stream)
        elif isinstance(spec, BranchSpec):
            number = spec.chosen(self._conditions.read(spec.condition, stream))
            self._enqueue_nodes(nodes[number : number + 1] if number >= 0 else (), stream)
        else:
            turns = 0
            while turns < spec.limit and self._conditions.read(spec.condition, stream):
                self._enqueue_nodes(nodes, stream)
                turns += 1
            self._device.arrays.fill(stream, self._device.at(spec.count), turns)

    def _enqueue_nodes(self, nodes: Sequence[_Bound], stream: CudaStream) -> None:
        for node, bound in nodes:
            if isinstance(bound, _CHAINS):
                self._enqueue_chain(self._chain_of(bound), bound, stream)
                continue
            try:
                self._library(node.library).enqueue(bound, stream)
            except AccelError as error:
                error.message = f"{node.operation} in the graph: {error.message}"
                raise
            self._enqueued += 1

    def _capture_parts(
        self, spec: BranchSpec | LoopSpec, nodes: Sequence[_Bound], stream: CaptureStream
    ) -> None:
        """Capture what runs on a condition, which the device looks at by itself."""
        conditions = self._conditions
        if isinstance(spec, LoopSpec):
            handle = stream.condition()
            conditions.set_loop(stream, handle, spec, is_begin=True)
            with stream.part(handle, is_loop=True):
                self._enqueue_nodes(nodes, stream)
                conditions.set_loop(stream, handle, spec, is_begin=False)
            return
        handles = [stream.condition() for _ in nodes]
        # All of them first: a part may change what the others are chosen by.
        for number, handle in enumerate(handles):
            conditions.set_branch(stream, handle, spec, number)
        for handle, bound in zip(handles, nodes, strict=True):
            with stream.part(handle, is_loop=False):
                self._enqueue_nodes([bound], stream)

    def _key(self, chain: _Chain, spec: _ChainSpec, stream: CudaStream | None) -> Key:
        freed = self._device.addresses.freed
        at, when, where, key = self._found
        if at is not spec or when != freed or where is not stream or key is None:
            address = self._device.address
            key = chain.call, stream, *[address(array) for array in spec.arrays]
            # As long as nothing is freed, every block is where it was.
            self._found = spec, freed, stream, key
        return key

    def _capture(self, key: Key, chain: _Chain, spec: _ChainSpec) -> None:
        """Capture a chain at the addresses of a key; without a graph it goes on as before."""
        workspace = chain.due.pop(key, 0)
        launching: CudaStream = key[1]
        stream = self._streams.get(launching)
        if stream is None:
            stream = self._streams[launching] = CaptureStream(launching, self._context)
        try:
            enqueue = partial(self._enqueue_chain, chain, spec)
            captured = self._captured(stream, workspace, enqueue, has_conditions=chain.has_conditions)
        except Exception as error:
            # Also of a vendor's library: what it says of a call that it would not capture is no crash of it.
            self._context.look()
            failure = self._context.failure()
            if failure is not None:
                raise failure from error
            chain.call.refuse(key)
            self._cache.forget(key)
            _logger.info(
                "a graph of %d operations is replayed one by one: %s", len(chain.recipe.nodes), error
            )
            return
        self._cache.store(key, captured, launching.timeline.sequence)

    def _captured(
        self,
        stream: CaptureStream,
        workspace: int,
        enqueue: Callable[[CudaStream], None],
        *,
        has_conditions: bool,
    ) -> _Captured:
        """Capture a chain. All memory that it needs is taken before: the driver refuses that meanwhile."""
        arena = self._device.arena
        arena.reserve(stream, workspace)
        for library in self._libraries.values():
            if library is not self:
                library.attach(stream)
        if has_conditions:
            self._conditions.load()
        # Nobody knows what a part needs that has never run: for it, memory is taken meanwhile.
        for _ in range(2 if has_conditions else 1):
            before = arena.place(stream)
            executable = stream.capture(enqueue, has_conditions=has_conditions)
            if arena.place(stream) == before:
                return _Captured(executable, stream, before)
            # What was captured first has an area that is given back by now.
            stream.discard(executable)
        raise LibraryError("its workspace has grown meanwhile", library=self.name, code="workspace")

    def _destroy(self) -> None:
        self._conditions.close()
        self._cache.clear()
        for name, library in self._libraries.items():
            if name != self.name:
                library.close()
        for stream in self._streams.values():
            self._device.arena.drop(stream)
            stream.destroy()
        self._streams.clear()
        self._libraries.clear()


def _raise(error: Exception) -> NoReturn:
    raise error


def _may_go(key: Key, last: int) -> bool:
    """Whether a graph can be thrown away: the driver lets one in flight run to its end."""
    return True


def _discard(captured: _Captured) -> None:
    captured.stream.discard(captured.executable)
