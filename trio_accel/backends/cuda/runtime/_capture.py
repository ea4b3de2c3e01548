"""Streams that capture graphs of any length, and what a graph may not have."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import attrs
from cuda.bindings import driver

from ...base import NotSupportedError
from ._context import CudaContext, is_sticky
from ._stream import CudaStream

__all__ = ["CaptureStream", "Executable"]

# What the thread does that must not be captured makes the capture fail; what others do is no concern of it.
_STRICT = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
# It may also take memory and load kernels: a part that runs on a condition may never have run before.
_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
# With edges, in the bindings for CUDA 12 too.
_add_node = getattr(driver, "cuGraphAddNode_v2", None) or driver.cuGraphAddNode
_IF = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
_WHILE = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
_NON_BLOCKING = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)


@attrs.frozen(eq=False)
class Executable:
    """A graph that can be launched.

    Attributes:
        handle: The driver's.
        graph: What it was made of, where that is kept: if parts of it run on conditions.
    """

    handle: Any
    graph: Any = None


class CaptureStream(CudaStream):
    """A stream that runs nothing: what is enqueued becomes a graph that is launched on another stream.

    Libraries take it for any stream. Memory that they need is taken in the order of the other stream, where
    the graph runs, and stays theirs: it is never idle, as nobody knows when a graph is launched again.

    Args:
        stream: Where its graphs are launched.
        context: The device's context, which is current.
    """

    is_capturing = True

    def __init__(self, stream: CudaStream, context: CudaContext) -> None:
        # Nothing of the base's: no event is recorded here, and nothing waited for.
        self._name = f"{stream.name} captures"
        self._context = context
        self.native = context.check(driver.cuStreamCreate(_NON_BLOCKING))
        self.handle = int(self.native)
        self._launches_on = stream
        self.timeline = stream.timeline
        self.is_closed = self.is_destroyed = False
        self._mode = _STRICT
        self._is_begun = False
        # What was captured first, once it has ended for a part that runs on a condition.
        self._root: Any = None

    @property
    def orders_memory(self) -> CudaStream:
        """Where its graphs are launched."""
        return self._launches_on

    def capture(self, enqueue: Callable[[CudaStream], None], *, has_conditions: bool = False) -> Executable:
        """Capture what a function enqueues here; returns a graph to be launched.

        What it needs must be loaded by now, unless it has parts that run on conditions.

        Raises:
            ContextPoisonedError: The context is lost.
            Exception: What the function raises, or the driver says; there is no graph.
        """
        check = self._context.check
        self._mode, self._root = _RELAXED if has_conditions else _STRICT, None
        check(driver.cuStreamBeginCapture(self.native, self._mode))
        self._is_begun, is_whole = True, False
        try:
            enqueue(self)
            is_whole = True
        finally:
            # Also where an interrupt ends it: what follows would be captured, too.
            ended: tuple[Any, Any] = (0, None)
            if self._is_begun:
                ended = driver.cuStreamEndCapture(self.native)
            graph, self._root = self._root or ended[1], None
            # Of one that the driver calls invalid, nobody knows whether it is still there.
            if not is_whole and not ended[0]:
                driver.cuGraphDestroy(graph)
        check(ended)
        try:
            handle = check(driver.cuGraphInstantiate(graph, 0))
        except BaseException:
            driver.cuGraphDestroy(graph)
            raise
        if has_conditions:
            return Executable(handle, graph)
        driver.cuGraphDestroy(graph)
        return Executable(handle)

    def condition(self) -> int:
        """Make the handle of a condition, for kernels that are captured next, and for `part`."""
        context = self._context.check(driver.cuCtxGetCurrent())
        graph, _ = self._captured()
        return int(self._context.check(driver.cuGraphConditionalHandleCreate(graph, context, 0, 0)))

    @contextmanager
    def part(self, condition: int, *, is_loop: bool) -> Generator[None, None, None]:
        """What is enqueued within runs if a condition is set; a loop, as long as it is.

        The driver has a graph of its own for it. What is captured so far ends, and goes on behind that.

        Raises:
            AccelError: The driver refuses it.
        """
        graph, before = self._captured()
        self._end()
        if self._root is None:
            self._root = graph
        node, body = self._add_part(graph, before, condition, is_loop=is_loop)
        self._begin(body, ())
        yield
        self._end()
        self._begin(graph, (node,))

    def _captured(self) -> tuple[Any, Sequence[Any]]:
        """The graph that is captured into, and what the next node will follow."""
        _, _, graph, nodes, *_, count = self._context.check(driver.cuStreamGetCaptureInfo(self.native))
        return graph, list(nodes or ())[: int(count)]

    def _begin(self, graph: Any, after: Sequence[Any]) -> None:
        edges = [driver.CUgraphEdgeData() for _ in after]
        self._context.check(
            driver.cuStreamBeginCaptureToGraph(self.native, graph, list(after), edges, len(after), self._mode)
        )
        self._is_begun = True

    def _end(self) -> None:
        self._is_begun = False
        self._context.check(driver.cuStreamEndCapture(self.native))

    def _add_part(
        self, graph: Any, after: Sequence[Any], condition: int, *, is_loop: bool
    ) -> tuple[Any, Any]:
        """Add a node with a graph that runs on a condition; returns both."""
        parameters = driver.CUgraphNodeParams()
        parameters.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        parameters.conditional.handle = condition
        parameters.conditional.type = _WHILE if is_loop else _IF
        parameters.conditional.size = 1
        parameters.conditional.ctx = self._context.check(driver.cuCtxGetCurrent())
        edges = [driver.CUgraphEdgeData() for _ in after]
        node = self._context.check(_add_node(graph, list(after), edges, len(after), parameters))
        # The driver's array of graphs lives as long as the node; the handle is copied.
        return node, driver.CUgraph(int(parameters.conditional.phGraph_out[0]))

    def launch(self, executable: Executable) -> bool:
        """Launch a graph on the other stream; returns False where the driver refuses it.

        Raises:
            ContextPoisonedError: The context is lost.
        """
        code = driver.cuGraphLaunch(executable.handle, self._launches_on.native)[0]
        if is_sticky(code):
            self._context.check((code,))
        return not code

    def discard(self, executable: Executable) -> None:
        """Give a graph back. One in flight runs to its end."""
        if not self._context.is_dead:
            driver.cuGraphExecDestroy(executable.handle)
            if executable.graph is not None:
                driver.cuGraphDestroy(executable.graph)

    def check(self) -> None:
        """Refuse what cannot be enqueued; see `CudaStream.check`."""
        failure = self._context.failure()
        if failure is not None:
            raise failure

    def refresh(self) -> int:
        """Nothing of it is ever done: what a graph uses is kept."""
        return -1

    def after(self, finisher: Callable[[], None]) -> NoReturn:
        """Refused: a graph has no events of ours.

        Raises:
            NotSupportedError: In any case.
        """
        raise NotSupportedError(
            "it does something on the host when it is complete, which a graph of the driver cannot",
            backend="cuda",
        )

    def destroy(self) -> None:
        """Give the stream back; the context is current, or dead."""
        if not self.is_destroyed:
            self.is_destroyed = True
            if not self._context.is_dead:
                with suppress(Exception):
                    driver.cuStreamDestroy(self.native)
