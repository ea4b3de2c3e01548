"""Repeated launches as CUDA graphs, which a replay does in less time, and graphs that a stream captures."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import attrs
from cuda.bindings import driver

from ...base import KeptCounts, NotSupportedError
from ...base.kit.captured_calls import CapturedLaunches, Key
from ...base.kit.fast_paths import current_fast_paths
from ...base.kit.kept_plans import KeptPlan
from ._context import CudaContext, is_sticky
from ._stream import CudaStream

MAX_GRAPHS = 128
"""So many are cached for a device. One takes 114 KiB of its memory."""

# The most nodes of one graph: for more there may be no memory yet.
_MOST_NODES = 2
# Capture mode: calls that must not be captured fail the capture if this thread makes them; other threads are
# free.
_MODE = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
# Kernels, and nodes that zero the counters of kernels that share their work out.
_NODES = frozenset(
    map(
        int,
        (driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL, driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET),
    )
)
_NON_BLOCKING = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)

# Memory for graphs that open devices have reserved, by number of the GPU: in a process they share its
# context.
_rooms: Counter[int] = Counter()
_warming = threading.Lock()


class Graphs:
    """The graphs of one device: captured at the third launch, and launched from then on.

    The driver waits for all running work when its memory for graphs has to grow. So the maximum number of
    graphs is made, and destroyed, before anything runs: that memory stays. A graph in flight keeps its part
    of it until it has ended, and is not evicted before.

    Args:
        context: The device's context.
        counts: Counts the graphs.
    """

    def __init__(self, context: CudaContext, counts: KeptCounts) -> None:
        self._context = context
        # No bound above 0 before `warm` has made the memory.
        self._captured = CapturedLaunches(counts, self._destroy, 0, _has_ended)
        self._stream: int | None = None
        self._is_warm = False
        # Held while a thread captures, or throws away. A launch does not wait for it.
        self._lock = threading.Lock()

    @property
    def room(self) -> int:
        """The most that there may be."""
        return self._captured.bound

    def __len__(self) -> int:
        """Return the number of graphs."""
        return len(self._captured.plans)

    def replay(self, key: Key, stream: CudaStream) -> bool:
        """Replay the graph of a key; return False without a graph.

        Raises:
            ContextPoisonedError: The context is lost.
        """
        plan: Any = self._captured.plans.get(key)
        if plan is None:
            return False
        # Work enqueued now is done with the stream's next number.
        plan.last = stream.timeline.sequence
        plan.is_used = True
        code = driver.cuGraphLaunch(plan.value, stream.native)[0]
        if code:
            self._give_up(plan, code)
            return False
        self._captured.counts.hits += 1
        return True

    def is_due(self, key: Key) -> bool:
        """Count a launch without a graph; returns whether `capture` is to follow instead of it."""
        return self._captured.is_due(key) and not self._lock.locked() and self._captured.has_room()

    def capture(self, key: Key, enqueue: Callable[[int], None]) -> bool:
        """Capture work, store its graph for a key, and launch it; return False if that is not possible.

        Args:
            key: Its capture was due just now.
            enqueue: Enqueues the work on a stream, by its handle; only kernels and nodes that set memory.

        Raises:
            ContextPoisonedError: The context is lost.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            # D39: on a stream of its own, so that no other use of the operation's stream is captured.
            assert self._stream is not None
            graph = self._capture(self._stream, enqueue)
            executable = None if graph is None else self._instantiate(graph)
            if executable is None:
                key[0].refuse(key)
                return False
            self._captured.record(key, executable, "arm")
        finally:
            self._lock.release()
        return self.replay(key, key[1])

    def warm(self, stream: int, enqueue: Callable[[int], None]) -> None:
        """Have the driver make the memory for all graphs, once; blocks, and nothing else should run.

        If the driver has no graphs, or no memory for them, there are fewer or none.

        Args:
            stream: Handle of a stream for this call only, with nothing on it.
            enqueue: Enqueues one or two kernels on it.

        Raises:
            ContextPoisonedError: The context is lost.
        """
        number = int(self._context.number)
        with _warming:
            if self._is_warm or not current_fast_paths().graphs:
                return
            # D39: `cuGraphInstantiate` waits for the whole device if the driver has to grow its memory for
            # graphs. So discarded graphs grow this memory now, while nothing runs.
            self._is_warm = True
            graph = self._capture_largest(stream, enqueue)
            executables: list[Any] = []
            try:
                while graph is not None and len(executables) < MAX_GRAPHS + _rooms[number]:
                    executable = self._take(driver.cuGraphInstantiate(graph, 0))
                    if executable is None:
                        break
                    executables.append(executable)
            finally:
                for executable in executables:
                    driver.cuGraphExecDestroy(executable)
                if graph is not None:
                    driver.cuGraphDestroy(graph)
            room = len(executables) - _rooms[number]
            if room > 0:
                # One of its own: no other use of an operation's stream meets a capture.
                self._stream = int(self._context.check(driver.cuStreamCreate(_NON_BLOCKING)))
                self._captured.bound = room
                _rooms[number] += room

    def drop(self, owner: object) -> None:
        """Throw away what calls of an owner made: it launches no more. The context is current."""
        with self._lock:
            self._captured.drop(lambda plan: plan.key[0].owner is owner)

    def close(self) -> None:
        """Discard everything; nothing is in flight any longer. The context is current, or dead."""
        with self._lock:
            self._captured.close()
            with _warming:
                _rooms[int(self._context.number)] -= self._captured.bound
            self._captured.bound = 0
            if self._stream is not None and not self._context.is_dead:
                driver.cuStreamDestroy(self._stream)
            self._stream = None

    def _capture_largest(self, stream: int, enqueue: Callable[[int], None]) -> Any:
        """Capture a graph of as many kernels as any may have: a call is enqueued twice if need be."""
        graph = self._capture(stream, enqueue)
        if graph is None or _count_nodes(graph) == _MOST_NODES:
            return graph
        driver.cuGraphDestroy(graph)

        def enqueue_twice(stream: int) -> None:
            enqueue(stream)
            enqueue(stream)

        return self._capture(stream, enqueue_twice)

    def _capture(self, stream: int, enqueue: Callable[[int], None]) -> Any:
        """Capture a graph of enqueued work; None if it is anything but a few kernels."""
        code = driver.cuStreamBeginCapture(stream, _MODE)[0]
        if code:
            return self._take((code, None))
        is_whole = False
        try:
            # If the call fails here, it fails again when it is launched without a graph.
            with suppress(Exception):
                enqueue(stream)
                is_whole = True
        finally:
            # Also end the capture when an interrupt ends the block, because later work would be captured
            # otherwise.
            graph = self._take(driver.cuStreamEndCapture(stream))
            if graph is not None and not (is_whole and 0 < _count_nodes(graph) <= _MOST_NODES):
                driver.cuGraphDestroy(graph)
                graph = None
        return graph

    def _instantiate(self, graph: Any) -> Any:
        """Return an executable graph, or None. The graph itself is no longer needed."""
        try:
            return self._take(driver.cuGraphInstantiate(graph, 0))
        finally:
            driver.cuGraphDestroy(graph)

    def _take(self, result: tuple[Any, ...]) -> Any:
        """Return the result of a call, or None where it failed.

        Raises:
            ContextPoisonedError: The context is lost.
        """
        if is_sticky(result[0]):
            self._context.check(result)
        return None if result[0] else result[1]

    def _give_up(self, plan: KeptPlan[Any], code: int) -> None:
        """Drop a refused graph: from now on its call is launched without one."""
        self._take((code, None))
        plan.key[0].refuse(plan.key)
        self._captured.end(plan)

    def _destroy(self, executable: Any) -> None:
        if not self._context.is_dead:
            driver.cuGraphExecDestroy(executable)


def _count_nodes(graph: Any) -> int:
    """Return the number of nodes, or one too many; 0 if there are other kinds of nodes."""
    code, nodes, count = driver.cuGraphGetNodes(graph, _MOST_NODES + 1)
    if code or any(int(driver.cuGraphNodeGetType(node)[1]) not in _NODES for node in nodes[:count]):
        return 0
    return int(count)


def _has_ended(plan: KeptPlan[Any]) -> bool:
    stream: CudaStream = plan.key[1]
    return stream.is_destroyed or stream.refresh() > plan.last


# It may also take memory and load kernels: a part that runs on a condition may never have run before.
# D129: stricter modes refuse to take memory in a capture.
_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
# This version takes edges; the bindings for CUDA 12 call it `_v2`.
_add_node = getattr(driver, "cuGraphAddNode_v2", None) or driver.cuGraphAddNode
_IF = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
_WHILE = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE


@attrs.frozen(eq=False)
class Executable:
    """A graph that can be launched.

    Attributes:
        handle: The driver's.
        graph: The captured graph, which is kept if parts of it run on conditions.
    """

    handle: Any
    graph: Any = None


class CaptureStream(CudaStream):
    """A stream that runs nothing: enqueued work becomes a graph, which is launched on another stream.

    Libraries take it for a usual stream. Memory that they need is taken in the order of the other stream,
    where the graph runs, and stays theirs: it is never idle, because a graph may be launched again at any
    time.

    Args:
        stream: The stream that its graphs are launched on.
        context: The device's context, which is current.
    """

    is_capturing = True

    def __init__(self, stream: CudaStream, context: CudaContext) -> None:
        # Nothing of the base's: no event is recorded here, and nothing waited for.
        self.name = f"{stream.name} captures"
        self._context = context
        self.native = context.check(driver.cuStreamCreate(_NON_BLOCKING))
        self.handle = int(self.native)
        self._launches_on = stream
        self.timeline = stream.timeline
        self.is_closed = self.is_destroyed = False
        self._mode = _MODE
        self._is_begun = False
        # The first section of a capture, which a conditional part interrupted.
        self._root: Any = None

    @property
    def orders_memory(self) -> CudaStream:
        """The stream on which its graphs are launched."""
        return self._launches_on

    def capture(self, enqueue: Callable[[CudaStream], None], *, has_conditions: bool = False) -> Executable:
        """Capture the work that a function enqueues here; return a graph to be launched.

        Its kernels must be loaded by now, unless it has parts that run on conditions.

        Raises:
            ContextPoisonedError: The context is lost.
            Exception: The error of the function or the driver; no graph is made.
        """
        check = self._context.check
        self._mode, self._root = _RELAXED if has_conditions else _MODE, None
        check(driver.cuStreamBeginCapture(self.native, self._mode))
        self._is_begun, is_whole = True, False
        try:
            enqueue(self)
            is_whole = True
        finally:
            # Also end the capture when an interrupt ends the block, because later work would be captured
            # otherwise.
            ended: tuple[Any, Any] = (0, None)
            if self._is_begun:
                ended = driver.cuStreamEndCapture(self.native)
            graph, self._root = self._root or ended[1], None
            # The driver does not report whether a capture that it calls invalid still exists.
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
    def part(self, condition: int, *, is_loop: bool) -> Generator[None]:
        """Capture a part that runs if a condition is set; a loop, as long as it is.

        The driver has a graph of its own for it. The capture so far ends, and continues after that.

        Raises:
            AccelError: The driver refuses it.
        """
        graph, dependencies = self._captured()
        self._end()
        if self._root is None:
            self._root = graph
        node, body = self._add_part(graph, dependencies, condition, is_loop=is_loop)
        self._begin(body, ())
        yield
        self._end()
        self._begin(graph, (node,))

    def _captured(self) -> tuple[Any, Sequence[Any]]:
        """Return the graph of the capture, and the nodes that the next node follows."""
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
        if not code:
            return True
        if is_sticky(code):
            self._context.check((code,))
        return False

    def discard(self, executable: Executable) -> None:
        """Give a graph back. One in flight runs to its end."""
        if not self._context.is_dead:
            driver.cuGraphExecDestroy(executable.handle)
            if executable.graph is not None:
                driver.cuGraphDestroy(executable.graph)

    def refresh(self) -> int:
        """Do nothing: memory that a graph uses is kept."""
        return -1

    def after(self, finisher: Callable[[], None]) -> NoReturn:
        """Raise, because a graph has no events of ours.

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
