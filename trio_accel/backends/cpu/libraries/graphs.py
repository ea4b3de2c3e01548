"""The CPU's library of graphs: it runs a recorded chain of operations, a branch or a loop as one operation.

A recipe is bound to its arrays once; `KeptChains` caches the bindings. Each of its operations runs by the
kernel of its own library. The library also counts the quick runs of each recipe, so that the engine can
compute quick chains in place (`ComputesInPlace`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import thread_time_ns
from typing import Any

import numpy as np

from ...base import AccelStream, NotSupportedError
from ...base.contract.ops import BranchSpec, ChainSpec, GraphNode, GraphSpec, LoopSpec, OperationSpec
from ...base.gpu.graphs import CHAINS, AnyChain, Works, replay
from ...base.kit.kept_chains import BoundChain, KeptChains, bound_nodes, with_words
from ...base.kit.kernels import KernelEntry, kernel
from ...base.kit.library import ComputingCall, ComputingDevice
from ..kit._library import CpuLibrary
from ..runtime._stream import check_usable

_MAX_COUNTED = 1024  # recipes with a count of quick runs
# The turns of a loop until its operations are bound, which compiles them.
_MANY_TURNS = 200
_REMEMBERED, _SLOW = 64, 4  # the maximum count; the number of quick runs that a slow run undoes
# The libraries whose kernels any thread may call. Other libraries call a program's code, which may never
# return, or cache factors for the thread of a stream.
_ANYWHERE = frozenset(
    [
        "arrays",
        "blas",
        "blaslt",
        "dnn",
        "fft",
        "memory",
        "random",
        "solver",
        "tensor",
    ]
)


class CpuGraphLibrary(CpuLibrary):
    """Runs recipes by the kernels of other libraries, which it opens in the stream's thread.

    Args:
        name: Name of the library.
        device: The device.
        kernels: The kernels of this class.
    """

    def __init__(self, name: str, device: ComputingDevice, kernels: Mapping[str, KernelEntry]) -> None:
        super().__init__(name, device, kernels)
        self._libraries: dict[str, CpuLibrary] = {}
        # The number of quick runs of each recipe, reduced by slow runs.
        self._quick: dict[bytes, int] = {}
        # The number of turns of each loop.
        self._turns: dict[bytes, int] = {}
        self._limit = 0  # of a quick run, in nanoseconds of CPU time
        untyped_device: Any = device
        self._chains = KeptChains(untyped_device.blocks, untyped_device.plan_counts)

    @kernel(GraphSpec, backend="cpu")
    @kernel(BranchSpec, backend="cpu")
    @kernel(LoopSpec, backend="cpu")
    def _replay(self, spec: OperationSpec, call: ComputingCall) -> None:
        # This prepares all operations before it runs any, so that a refusal precedes every change.
        self._prepared(self.name, spec, call)()

    @kernel(ChainSpec, backend="cpu")
    def _run_chain(self, spec: ChainSpec, call: ComputingCall) -> None:
        run = self._prepared(self.name, spec, call)
        began = thread_time_ns()
        if spec.host_data:
            call.array(spec.written[-1])[: len(spec.host_data)] = np.frombuffer(spec.host_data, np.uint8)
        run()
        if spec.words is not None:
            result = call.array(spec.result_at(), write=False)
            spec.words.view(np.uint8)[: len(result)] = result
        quick = self._quick
        is_quick = thread_time_ns() - began < self._limit
        # A slow run undoes only some quick runs, because a machine is sometimes slow.
        runs = quick.get(spec.recipe, 0)
        quick[spec.recipe] = min(runs + 1, _REMEMBERED) if is_quick else max(runs - _SLOW, 0)
        if len(quick) > _MAX_COUNTED:
            quick.clear()

    def quick_runs(self, recipe: bytes, limit: int) -> int:
        """See `ComputesInPlace.quick_runs`."""
        self._limit = limit
        return self._quick.get(recipe, 0)

    def bind_chain(self, spec: ChainSpec, stream: AccelStream) -> Sequence[Callable[[], object]] | None:
        """See `ComputesInPlace.bind_chain`."""
        call = ComputingCall(self._run_chain, spec, None, self._device, stream)
        works: list[Callable[[], object]] = []
        for node, node_spec in bound_nodes(self._chains.recipe(spec.recipe), spec.arrays):
            if isinstance(node_spec, CHAINS) or node.library not in _ANYWHERE:
                return None
            library = self._library(node.library, call)
            has_status = node_spec.descriptor().has_status
            works.append(
                partial(_run_with_new_words, library, node, node_spec, stream)
                if has_status
                else library.bind(node_spec, stream)
            )
        return works

    def _prepared(self, library: str, spec: OperationSpec, call: ComputingCall) -> Callable[[], None]:
        if not isinstance(spec, CHAINS):
            return self._library(library, call).call_of(spec, call.stream)
        works = self._works_of(spec, call)
        run = _replayed(spec, works, call)
        return partial(self._run_loop, spec, call, run) if isinstance(spec, LoopSpec) else run

    def _run_loop(self, spec: LoopSpec, call: ComputingCall, run: Callable[[], object]) -> None:
        """Run a loop, by operations that are bound to its memory if it has had many turns."""
        turns = self._turns.get(spec.recipe, 0)
        (run if turns < _MANY_TURNS else self._bound(self.name, spec, call))()
        if len(self._turns) >= _MAX_COUNTED:
            self._turns.clear()
        self._turns[spec.recipe] = turns + int(call.array(spec.count, write=False).item())

    def _bound(self, library: str, spec: OperationSpec, call: ComputingCall) -> Callable[[], object]:
        """Return a function that runs an operation any number of times, while its memory exists."""
        if not isinstance(spec, CHAINS):
            return self._library(library, call).bind(spec, call.stream)
        works: list[tuple[str, Callable[[], object]]] = []
        for node, node_spec in self._chains.find(spec, call.stream).binding.nodes:
            has_status = not isinstance(node_spec, CHAINS) and bool(node_spec.descriptor().status)
            work = (
                self._work(node, node_spec, call)
                if has_status
                else self._bound(node.library, node_spec, call)
            )
            works.append((node.operation, work))
        return _replayed(spec, works, call)

    def _works_of(self, spec: AnyChain, call: ComputingCall) -> Works:
        """Return the operations of a chain for its arrays. They are cached, because the arrays recur."""
        plan = self._chains.find(spec, call.stream)
        bound: BoundChain = plan.binding
        if bound.works is not None:
            works: Works = bound.works
            return works
        works = [(node.operation, self._work(node, node_spec, call)) for node, node_spec in bound.nodes]
        if not any(isinstance(node_spec, CHAINS) for _, node_spec in bound.nodes):
            bound.works = works
            plan.move("arm")
        return works

    def _work(self, node: GraphNode, spec: OperationSpec, call: ComputingCall) -> Callable[[], None]:
        """Return the function that runs an operation of a chain.

        Raises:
            NotSupportedError: Its library cannot run in a graph, or lacks the operation or dtype.
            LibraryError: The operation is refused.
        """
        # An operation with status words is prepared here only to refuse it early.
        work = self._prepared(node.library, with_words(node, spec), call)
        if isinstance(spec, CHAINS) or not spec.descriptor().status:
            return work
        return partial(_run_with_new_words, self._library(node.library, call), node, spec, call.stream)

    def close(self) -> None:
        """Drop all chains."""
        self._chains.plans.close()
        super().close()

    def _library(self, name: str, call: ComputingCall) -> CpuLibrary:
        opened = self._libraries.get(name)
        if opened is None:
            library = call.device.open_library(name)
            if not isinstance(library, CpuLibrary):
                raise NotSupportedError(f"library {name!r} runs in no graph", backend="cpu")
            opened = self._libraries[name] = library
        return opened


def _run_with_new_words(
    library: CpuLibrary, node: GraphNode, spec: OperationSpec, stream: AccelStream
) -> None:
    """Run an operation with new status words, and not with the recipe's."""
    library.call_of(with_words(node, spec), stream)()


def _replayed(spec: AnyChain, works: Works, call: ComputingCall) -> Callable[[], None]:
    """Return a function that runs a chain's operations, by the condition and the count of this run."""
    condition, count = [
        call.array(getattr(spec, name)) if hasattr(spec, name) else None for name in ("condition", "count")
    ]
    return partial(replay, spec, works, partial(_read, condition), partial(_write, count))


def _read(condition: Any) -> int:
    # An infinite loop ends here when its context is lost.
    check_usable()
    return int(condition.item())


def _write(count: Any, turns: int) -> None:
    count[...] = turns
