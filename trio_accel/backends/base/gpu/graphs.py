"""Graphs on any backend: how a chain of operations is replayed, and on a GPU captured and launched as one."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn, TypeAlias

import attrs

from ..contract.errors import AccelError, NotSupportedError
from ..contract.ops import (
    ArraySpec,
    BranchSpec,
    ChainSpec,
    GraphNode,
    GraphRecipe,
    GraphSpec,
    LoopSpec,
    OperationSpec,
)
from ..contract.protocols import AccelStream, InThread
from ..kit.captured_calls import CapturedLaunches, GraphCall, Key
from ..kit.host import address_of
from ..kit.kept_chains import KeptChains, bound_nodes, with_words
from .library import EnqueuingLibrary

_logger = logging.getLogger("trio_accel.devices")

AnyChain: TypeAlias = "GraphSpec | ChainSpec | BranchSpec | LoopSpec"
Works: TypeAlias = Sequence[tuple[str, Callable[[], object]]]
"""Names of the operations of a chain, and what runs each, perhaps more than once."""

CHAINS = (GraphSpec, ChainSpec, BranchSpec, LoopSpec)
"""Specifications that hold a recipe."""

# The most graphs of a library's chains; each is captured at the addresses of one replay.
_MAX_GRAPHS = 128
_MOST_DUE = 1024


def replay(spec: AnyChain, works: Works, read: Callable[[], int], count: Callable[[int], object]) -> None:
    """Run a chain's operations in order, or those that its condition selects.

    Args:
        spec: The chain.
        works: Its operations.
        read: Reads the present value of the condition.
        count: Gets a loop's number of turns.

    Raises:
        AccelError: An operation failed; see `run_works`.
    """
    if isinstance(spec, BranchSpec):
        number = spec.chosen(read())
        if 0 <= number < len(works):
            run_works(works, [number])
    elif isinstance(spec, LoopSpec):
        turns = 0
        while turns < spec.limit and read():
            run_works(works)
            turns += 1
        count(turns)
    else:
        run_works(works, is_graph=isinstance(spec, GraphSpec))


def run_works(works: Works, numbers: Sequence[int] | None = None, *, is_graph: bool = True) -> None:
    """Run the operations of a chain in order: all, or those with certain numbers.

    Raises:
        AccelError: An operation failed; the message begins with its name, and its number in a graph.
    """
    for number in range(len(works)) if numbers is None else numbers:
        name, work = works[number]
        try:
            work()
        except AccelError as error:
            label = f"node {number} of the graph, {name}" if is_graph else name
            error.message, error.operation = f"{label}: {error.message}", error.operation or name
            raise


@attrs.frozen(eq=False)
class GraphPlan:
    """The plan of a graph.

    Attributes:
        recipe: Its operations.
        call: The call that identifies its captured graphs.
        is_captured: Whether the whole chain can be captured.
        is_blocking: Whether enqueuing an operation blocks, because the host then reads a condition.
        has_conditions: Whether parts of it run on conditions.
        due: The addresses at which it is to be captured before the next launch, with the pinned memory of its
            host arrays, and the bytes of workspace that it needs.
    """

    recipe: GraphRecipe
    call: GraphCall
    is_captured: bool
    is_blocking: bool
    has_conditions: bool
    due: dict[Key, tuple[int, int]] = attrs.field(factory=dict[Key, tuple[int, int]], init=False)


class ChainLibrary(EnqueuingLibrary[Any, Any]):
    """Replay of chains by its own libraries: at first one operation after the other.

    Base of a GPU's graph library, placed before the base of that backend's libraries. After a chain has run
    several times at the same addresses, a thread captures it, and from then on it is launched as a graph. By
    then everything that it needs is loaded.

    Then parts that run on a condition may be nodes of the driver's. Before, and if the driver has none, the
    host waits for the condition and reads it, in a thread.

    A vendor's library overrides the methods that raise `NotImplementedError` here. The attribute
    `is_capturing` of its streams reports whether enqueued work becomes part of a graph.
    """

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self._libraries: dict[str, Any] = {self.name: self}
        self._chains = KeptChains(device.blocks, device.plan_counts)
        # Any graph can be discarded at any time, because the driver lets a graph in flight run to its end.
        self._captured = CapturedLaunches(device.plan_counts, self._discard, _MAX_GRAPHS)
        # The number of enqueued operations.
        self._enqueued = 0
        # The last query for a key, and the key.
        self._found: tuple[AnyChain | None, int, Any, Key | None] = (None, 0, None, None)
        # The stream of the last launch.
        self._stream: Any = None

    def _open(self, name: str) -> Any:
        """Open a library of the backend for this library only; blocks."""
        return self._device.open_library(name)

    def _address(self, array: ArraySpec) -> int:
        """Return the address of an array; raise KeyError if its block has no memory yet."""
        return int(self._device.address(array))

    def _freed(self) -> int:
        """Return how often memory was freed: while the number is the same, no block has moved."""
        return int(self._device.blocks.freed)

    def _failure(self) -> Exception | None:
        """Return why the context is lost, or None."""
        self._device.context.detect_loss()
        failure: Exception | None = self._device.context.failure()
        return failure

    def _workspace(self, stream: Any) -> int:
        """Return the bytes of workspace that operations on a stream have had."""
        return int(self._device.arena.area_of(stream)[1])

    def _make_graph(
        self, stream: Any, workspace: int, enqueue: Callable[[Any], None], *, has_conditions: bool
    ) -> Any:
        """Capture the work that a function enqueues, to be launched on a stream; blocks."""
        raise NotImplementedError

    def _is_in_place(self, graph: Any) -> bool:
        """Return whether a graph's workspace is still valid, because another chain may have enlarged it."""
        raise NotImplementedError

    def _launch_graph(self, graph: Any) -> bool:
        """Launch a graph; return False if the driver refuses it."""
        raise NotImplementedError

    def _discard(self, graph: Any) -> None:
        """Give a graph back."""
        raise NotImplementedError

    def _capture_parts(self, spec: BranchSpec | LoopSpec, works: Works, stream: Any) -> None:
        """Capture the parts that run on a condition, which the device reads by itself."""
        raise NotImplementedError

    def _read(self, condition: ArraySpec, stream: Any) -> int:
        """Wait for a stream, and read a condition; blocks."""
        raise NotImplementedError

    def _write(self, count: ArraySpec, stream: Any, turns: int) -> None:
        """Enqueue that a count of turns is written."""
        self._device.arrays.fill(stream, self._device.device_array(count), turns)

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        """Put an operation on a stream; see `KernelLibrary.enqueue`."""
        on: Any = stream
        if not isinstance(spec, CHAINS) or type(stream) is not self.streams:
            super().enqueue(spec, stream)
        elif on.is_closed or self._device.context.is_lost or not self.launch_chain(spec, on):
            chain: GraphPlan | None = self._find_plan(spec)
            # In a thread of the engine, the device may be closed meanwhile.
            with on.in_use() if chain is not None and chain.is_blocking else nullcontext():
                super().enqueue(spec, stream)

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        """Open the libraries of a chain, and prepare its operations; later on capture it."""
        prepare = super().prepare(spec)
        if prepare is not None:
            # The first use of a library opens it, which may block.
            return InThread(prepare)
        if not isinstance(spec, CHAINS):
            return None
        chain: GraphPlan | None = self._find_plan(spec)
        if chain is None or not (chain.due or chain.is_blocking):
            return None
        try:
            key = self._key(chain, spec, self._stream)
        except KeyError:
            # Its outputs do not have memory yet.
            return InThread() if chain.is_blocking else None
        plan = self._captured.plans.get((*key, 0))
        capture = None
        if key in chain.due and self._captured.has_room():
            capture = partial(self._in_context, self._capture, key, chain, spec)
        # A launched graph does not block.
        is_captured = plan is not None and self._is_in_place(plan.value)
        return InThread(capture) if chain.is_blocking and (capture or not is_captured) else capture

    def plan_chain(self, spec: AnyChain, device: object) -> GraphPlan:
        """Open the libraries of a chain, and prepare its operations; blocks. The `plan` of its kernels.

        Raises:
            NotSupportedError: A library lacks an operation.
        """
        has_conditions = not isinstance(spec, (GraphSpec, ChainSpec))
        is_captured, is_blocking = True, has_conditions
        recipe = self._chains.recipe(spec.recipe)
        for node, bound in self._nodes(spec, None):
            library = self._library(node.library)
            if bound.operation not in library.operations:
                raise NotSupportedError(
                    f"{node.operation}: the {self.backend.upper()} backend's library {node.library!r} has no "
                    f"{type(bound).__name__}",
                    backend=self.backend,
                )
            if isinstance(bound, CHAINS):
                part = self._chain_of(bound)
                is_captured, is_blocking = is_captured and part.is_captured, is_blocking or part.is_blocking
                has_conditions = has_conditions or part.has_conditions
                continue
            # Status words are checked after each run.
            has_status = bound.descriptor().has_status
            is_captured = is_captured and library.captures(bound) and not has_status
            while (prepare := library.prepare(bound)) is not None:
                prepare()
                if isinstance(prepare, InThread):
                    is_captured, is_blocking = False, True
                    break
        return GraphPlan(recipe, GraphCall(self), is_captured, is_blocking, has_conditions)

    def _chain_of(self, spec: AnyChain) -> GraphPlan:
        """Return the plan of a chain within another one, and make it again if it was evicted."""
        cached: GraphPlan | None = self._find_plan(spec)
        plan: GraphPlan = cached or self._make_plan(spec, self._kernel_of(spec))
        return plan

    def _library(self, name: str) -> Any:
        library = self._libraries.get(name)
        if library is None:
            library = self._libraries[name] = self._open(name)
        return library

    def launch_chain(self, spec: AnyChain, stream: Any) -> bool:
        """Launch the captured graph of a chain, if there is one; no context need be current for that.

        Returns False where the chain is to be enqueued one by one, with its kernel.
        """
        self._stream = stream
        chain: GraphPlan | None = self._find_plan(spec)
        if chain is None:
            return False
        key = self._key(chain, spec, stream)
        # Take the pinned memory last, so that a refused chain takes none.
        host = _Host(spec, self._device)
        key = *key, host.address
        plan = self._captured.plans.get(key)
        if plan is not None and self._is_in_place(plan.value):
            plan.is_used = True
            host.fill()
            if self._launch_graph(plan.value):
                self._captured.counts.hits += 1
                self._plans.note_launch(chain)
                if host.address:
                    stream.after(host.end)
                return True
            chain.call.refuse(key)
        if plan is not None:
            self._captured.end(plan)
        host.give_back()
        return False

    def run_chain(self, spec: AnyChain, chain: GraphPlan, stream: Any) -> None:
        """Enqueue a chain one by one, and note it where it is to be captured the next time."""
        enqueued_before, host = self._enqueued, _Host(spec, self._device)
        host.fill()
        if host.address:
            # The piece is in use up to the next event, whatever is refused.
            stream.after(host.end)
        try:
            self._enqueue_chain(spec, stream, host.address)
        except Exception as error:
            if self._enqueued == enqueued_before or stream.is_capturing or self._failure() is not None:
                raise
            # The operations enqueued before the refusal will run, so their memory is in use.
            stream.after(partial(_raise, error))
            return
        if chain.is_captured and not stream.is_capturing:
            key = self._key(chain, spec, stream)
            full_key = *key, host.address
            if self._captured.is_due(full_key):
                if len(chain.due) >= _MOST_DUE:
                    chain.due.clear()
                chain.due[key] = host.address, self._workspace(stream)

    def _enqueue_chain(self, spec: AnyChain, stream: Any, host: int = 0) -> None:
        """Enqueue a chain's operations in order, or those that its condition selects.

        Args:
            spec: The chain.
            stream: The stream.
            host: Pinned memory for its host arrays; 0 without any.
        """
        works = [
            (node.operation, partial(self._enqueue_node, node, bound, stream))
            for node, bound in self._nodes(spec, stream)
        ]
        if stream.is_capturing and isinstance(spec, (BranchSpec, LoopSpec)):
            self._capture_parts(spec, works, stream)
            return
        condition: Any = getattr(spec, "condition", None)
        count: Any = getattr(spec, "count", None)
        request = spec if isinstance(spec, ChainSpec) else None
        if request is not None and request.host_data:
            stream.copy_in(self._address(request.written[-1]), host, len(request.host_data))
        replay(spec, works, partial(self._read, condition, stream), partial(self._write, count, stream))
        if request is not None and request.result and request.result[2]:
            result_address, result = host + _result_offset(request), request.result_at()
            stream.copy_out(result_address, self._address(result), request.result[2])

    def _nodes(self, spec: AnyChain, stream: Any) -> list[tuple[GraphNode, OperationSpec]]:
        """Return the operations of a chain, each with its specification for the arrays of this run."""
        if stream is None or stream.is_capturing:
            nodes = bound_nodes(self._chains.recipe(spec.recipe), spec.arrays)
        else:
            nodes = self._chains.find(spec, stream).binding.nodes
        return [(node, with_words(node, bound)) for node, bound in nodes]

    def _enqueue_node(self, node: GraphNode, bound: OperationSpec, stream: Any) -> None:
        if isinstance(bound, CHAINS):
            # The needs of its operations are prepared with its plan, which may have made way meanwhile.
            self._chain_of(bound)
            self._enqueue_chain(bound, stream)
        else:
            # The engine knows what the chain writes, but not when, among operations that look at it.
            for block in self._device.validated_blocks and bound.blocks()[1]:
                self._device.renew(block)
            self._library(node.library).enqueue(bound, stream)
            self._enqueued += 1

    def _key(self, chain: GraphPlan, spec: AnyChain, stream: Any) -> Key:
        freed = self._freed()
        cached_spec, cached_freed, cached_stream, key = self._found
        if cached_spec is not spec or cached_freed != freed or cached_stream is not stream or key is None:
            address = self._address
            key = chain.call, stream, *[address(array) for array in spec.arrays]
            self._found = spec, freed, stream, key
        return key

    def _capture(self, key: Key, chain: GraphPlan, spec: AnyChain) -> None:
        """Capture a chain at the addresses of a key; if that fails, the chain runs as before."""
        (host, workspace), launching = chain.due.pop(key, (0, 0)), key[1]
        key = *key, host
        try:
            enqueue = partial(self._enqueue_chain, spec, host=host)
            graph = self._make_graph(launching, workspace, enqueue, has_conditions=chain.has_conditions)
        except Exception as error:
            # Query the context even after an error of a vendor's library, because the refusal to capture a
            # call does not mean a crash.
            failure = self._failure()
            if failure is not None:
                raise failure from error
            chain.call.refuse(key)
            _logger.info(
                "a graph of %d operations is replayed one by one: %s", len(chain.recipe.nodes), error
            )
            return
        self._captured.record(key, graph, "arm")

    def _close_libraries(self) -> None:
        """Throw all graphs away, and close what was opened for them."""
        self._captured.close()
        self._chains.plans.close()
        for name, library in self._libraries.items():
            if name != self.name:
                library.close()
        self._libraries.clear()


class _Host:
    """The host arrays for one run of a chain, in one piece of pinned memory.

    Attributes:
        address: The piece; results follow the given arrays. 0 for a chain without host arrays.
    """

    __slots__ = ("_device", "_nbytes", "_spec", "address")

    def __init__(self, spec: AnyChain, device: Any) -> None:
        self._spec: Any = spec
        self._device = device
        self._nbytes = 0
        if type(spec) is ChainSpec:
            self._nbytes = _result_offset(spec) + (spec.result[2] if spec.result else 0)
        self.address: int = device.pinned.take(self._nbytes) if self._nbytes else 0

    def fill(self) -> None:
        """Write what the device is to read."""
        if self.address:
            ctypes.memmove(self.address, self._spec.host_data, len(self._spec.host_data))

    def end(self) -> None:
        """Read what the device has written: it has passed the chain."""
        spec = self._spec
        words = spec.words
        if words is not None and words.size:
            ctypes.memmove(address_of(words), self.address + _result_offset(spec), spec.result[2])
        self.give_back()

    def give_back(self) -> None:
        """Give the piece back, which the device no longer uses."""
        if self.address:
            self._device.pinned.give_back(self._nbytes, self.address)


def _result_offset(spec: ChainSpec) -> int:
    """Return the offset of a chain's result in its pinned memory: after the given arrays, for any dtype."""
    return -(-len(spec.host_data) // 64) * 64


def _raise(error: Exception) -> NoReturn:
    raise error
