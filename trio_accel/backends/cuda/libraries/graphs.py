"""Graphs: chains of operations, captured from the other libraries and launched by the driver."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NoReturn

import attrs

from ...base import AccelError, AccelStream, InThread, LibraryError, NotSupportedError
from ...base.kernels import kernel
from ...base.ops import GraphRecipe, GraphSpec, OperationSpec, graph_recipe
from ..kit._call import Call
from ..kit._device import LibraryDevice
from ..kit._library import CudaLibrary
from ..runtime._capture import CaptureStream
from ..runtime._launch_cache import Call as GraphCall
from ..runtime._launch_cache import Key, LaunchCache
from ..runtime._stream import CudaStream

__all__ = ["GraphLibrary"]

_logger = logging.getLogger("trio_accel.devices")

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
        is_blocking: Whether one of them blocks when it is enqueued.
        due: Where it is to be captured before it is launched the next time, with the bytes of workspace that
            it needs.
    """

    recipe: GraphRecipe
    call: GraphCall
    is_captured: bool
    is_blocking: bool
    due: dict[Key, int] = attrs.field(factory=dict[Key, int], init=False)


@attrs.frozen(eq=False)
class _Captured:
    """A graph of the driver.

    Attributes:
        executable: The driver's handle.
        stream: What captured it.
        area: Where the workspace lies that it uses.
    """

    executable: object
    stream: CaptureStream
    area: tuple[int, int]


class GraphLibrary(CudaLibrary):
    """Replays chains by libraries of its own: at first one operation after the other.

    Once a chain has run some times at the same addresses, it is captured, in a thread. From then on it is
    launched as a graph. By then everything that it needs is loaded.
    """

    name = "graphs"
    most_plans: ClassVar[int] = 256

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._libraries: dict[str, CudaLibrary] = {self.name: self}
        self._streams: dict[CudaStream, CaptureStream] = {}
        self._cache: LaunchCache[_Captured] = LaunchCache(_may_go, _discard)
        self._cache.most = _MOST
        # The key of a chain that was asked for last.
        self._found: tuple[GraphSpec | None, int, CudaStream | None, Key | None] = (None, 0, None, None)
        # Where a chain was launched last.
        self._stream: CudaStream | None = None

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        """Open the libraries of a chain, and prepare its operations; later on capture it."""
        prepare = super().prepare(spec)
        if prepare is not None:
            # Also what is used first may block.
            return InThread(prepare)
        chain: _Chain | None = self._find_plan(spec) if isinstance(spec, GraphSpec) else None
        if chain is None:
            return None
        if chain.is_blocking:
            return InThread()
        return self._prepare_capture(chain, spec) if chain.due else None

    def _prepare_capture(self, chain: _Chain, spec: Any) -> Callable[[], None] | None:
        try:
            key = self._key(chain, spec, self._stream)
        except KeyError:
            # What it is to write has no memory yet.
            return None
        if key not in chain.due or not self._cache.has_room():
            return None
        return partial(self._in_context, self._capture, key, chain, spec)

    def _plan_chain(self, spec: GraphSpec) -> _Chain:
        recipe = graph_recipe(spec.recipe)
        is_captured, is_blocking = True, False
        for node, bound in zip(recipe.nodes, recipe.bind(spec.arrays), strict=True):
            library = self._library(node.library)
            if type(bound) not in library.operations:
                raise NotSupportedError(
                    f"{node.operation}: the CUDA backend's library {node.library!r} has no "
                    f"{type(bound).__name__}",
                    backend="cuda",
                )
            is_captured = is_captured and library.is_captured
            while (prepare := library.prepare(bound)) is not None:
                prepare()
                if isinstance(prepare, InThread):
                    is_blocking = True
                    break
        return _Chain(recipe, GraphCall(self), is_captured and not is_blocking, is_blocking)

    def _library(self, name: str) -> CudaLibrary:
        library = self._libraries.get(name)
        if library is None:
            opened = self._device.open_library(name)
            assert isinstance(opened, CudaLibrary)  # as all of this backend
            library = self._libraries[name] = opened
        return library

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        """Put an operation on a stream; see `KernelLibrary.enqueue`."""
        if (
            not isinstance(spec, GraphSpec)
            or type(stream) is not CudaStream
            or not self._launch(spec, stream)
        ):
            super().enqueue(spec, stream)

    def _launch(self, spec: GraphSpec, stream: CudaStream) -> bool:
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
        if captured.area != self._device.arena.place(captured.stream):
            # Another chain has needed more workspace.
            self._cache.remove(key)
            return False
        stream.begin_heavy()
        entry.last = stream.timeline.sequence
        if captured.stream.launch(captured.executable):
            return True
        chain.call.refuse(key)
        self._cache.remove(key)
        return False

    @kernel(GraphSpec, backend="cuda", plan=_plan_chain)
    def _replay(self, spec: GraphSpec, call: Call) -> None:
        chain: _Chain = call.plan
        self._enqueue_all(chain, spec, call.stream)
        if chain.is_captured and not call.stream.is_capturing:
            key = self._key(chain, spec, call.stream)
            if not chain.call.is_refused(key) and self._cache.is_due(key):
                self._note_due(chain, key)

    def _note_due(self, chain: _Chain, key: Key) -> None:
        """A chain has run often enough at a place: it is captured before it is launched there again."""
        if len(chain.due) >= _MOST_DUE:
            chain.due.clear()
        chain.due[key] = self._device.arena.place(key[1])[1]

    def _enqueue_all(self, chain: _Chain, spec: GraphSpec, stream: CudaStream) -> None:
        """Enqueue the operations of a chain, one after the other."""
        begun = False
        for node, bound in zip(chain.recipe.nodes, chain.recipe.bind(spec.arrays), strict=True):
            try:
                self._library(node.library).enqueue(bound, stream)
            except AccelError as error:
                error.message = f"{node.operation} in the graph: {error.message}"
                self._fail(error, stream, begun=begun)
                return
            except Exception as error:  # noqa: BLE001  # raised there, or the error of the operation
                self._fail(error, stream, begun=begun)
                return
            begun = True

    def _fail(self, error: Exception, stream: CudaStream, *, begun: bool) -> None:
        """An operation of a chain is refused: what is enqueued by now runs, and its memory is in use."""
        if not begun or stream.is_capturing or self._context.is_lost:
            raise error
        stream.after(partial(_raise, error))

    def _key(self, chain: _Chain, spec: GraphSpec, stream: CudaStream | None) -> Key:
        freed = self._device.addresses.freed
        at, when, where, key = self._found
        if at is not spec or when != freed or where is not stream or key is None:
            address = self._device.address
            key = chain.call, stream, *[address(array) for array in spec.arrays]
            # As long as nothing is freed, every block is where it was.
            self._found = spec, freed, stream, key
        return key

    def _capture(self, key: Key, chain: _Chain, spec: GraphSpec) -> None:
        """Capture a chain at the addresses of a key; without a graph it goes on as before."""
        workspace = chain.due.pop(key, 0)
        launching: CudaStream = key[1]
        stream = self._streams.get(launching)
        if stream is None:
            stream = self._streams[launching] = CaptureStream(launching, self._context)
        try:
            captured = self._captured(stream, workspace, partial(self._enqueue_all, chain, spec))
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
        self, stream: CaptureStream, workspace: int, enqueue: Callable[[CudaStream], None]
    ) -> _Captured:
        """Capture a chain. All memory that it needs is taken before: the driver refuses that meanwhile."""
        arena = self._device.arena
        arena.reserve(stream, workspace)
        for library in self._libraries.values():
            if library is not self:
                library.attach(stream)
        before = arena.place(stream)
        executable = stream.capture(enqueue)
        if arena.place(stream) != before:
            # What was captured first has an area that is given back by now.
            stream.discard(executable)
            raise LibraryError("its workspace has grown meanwhile", library=self.name, code="workspace")
        return _Captured(executable, stream, before)

    def _destroy(self) -> None:
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
