"""Graphs: a chain of operations as one piece of work, and parts of it that run on a condition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...base import AccelStream, NotSupportedError
from ...base.contract.ops import BranchSpec, ChainSpec, GraphNode, GraphSpec, LoopSpec, OperationSpec
from ...base.gpu.graphs import CHAINS, AnyChain, Works, replay
from ...base.kit.kept_chains import BoundChain, KeptChains, with_words
from ...base.kit.kernels import KernelEntry, kernel
from ...base.kit.library import ComputingCall, ComputingDevice
from ..kit._library import CpuLibrary
from ..runtime._stream import check_usable


class GraphLibrary(CpuLibrary):
    """Runs recipes by the kernels of other libraries, which it opens in the stream's thread.

    Args:
        name: Name of the library.
        device: The device.
        kernels: None but its own.
    """

    def __init__(self, name: str, device: ComputingDevice, kernels: Mapping[str, KernelEntry]) -> None:
        super().__init__(name, device, kernels)
        self._libraries: dict[str, CpuLibrary] = {}
        known: Any = device
        self._chains = KeptChains(known.blocks, known.kept)

    @kernel(GraphSpec, backend="cpu")
    @kernel(BranchSpec, backend="cpu")
    @kernel(LoopSpec, backend="cpu")
    def _replay(self, spec: OperationSpec, call: ComputingCall) -> None:
        # All operations are prepared first, so that a refusal comes before anything is changed.
        self._prepared(self.name, spec, call)()

    @kernel(ChainSpec, backend="cpu")
    def _run_chain(self, spec: ChainSpec, call: ComputingCall) -> None:
        run = self._prepared(self.name, spec, call)
        if spec.given:
            call.array(spec.written[-1])[: len(spec.given)] = np.frombuffer(spec.given, np.uint8)
        run()
        if spec.words is not None:
            result = call.array(spec.result_at(), write=False)
            spec.words.view(np.uint8)[: len(result)] = result

    def _prepared(self, library: str, spec: OperationSpec, call: ComputingCall) -> Callable[[], None]:
        if not isinstance(spec, CHAINS):
            return self._library(library, call).call_of(spec, call.stream)
        works = self._works_of(spec, call)
        condition, count = [
            call.array(getattr(spec, name)) if hasattr(spec, name) else None
            for name in ("condition", "count")
        ]
        return partial(replay, spec, works, partial(_read, condition), partial(_write, count))

    def _works_of(self, spec: AnyChain, call: ComputingCall) -> Works:
        """Return the operations of a chain for its arrays; they are kept, as the same ones come again."""
        plan = self._chains.find(spec, call.stream)
        bound: BoundChain = plan.binding
        if bound.works is not None:
            works: Works = bound.works
            return works
        works = [(node.operation, self._work(node, one, call)) for node, one in bound.nodes]
        if not any(isinstance(one, CHAINS) for _, one in bound.nodes):
            bound.works = works
            plan.move("arm")
        return works

    def _work(self, node: GraphNode, spec: OperationSpec, call: ComputingCall) -> Callable[[], None]:
        """Return what runs an operation of a chain."""
        work = self._prepared(node.library, with_words(node, spec), call)
        if isinstance(spec, CHAINS) or not spec.descriptor().status:
            return work
        return partial(_run_again, self._library(node.library, call), node, spec, call.stream)

    def close(self) -> None:
        """Drop all chains."""
        self._chains.plans.close()
        super().close()

    def _library(self, name: str, call: ComputingCall) -> CpuLibrary:
        opened = self._libraries.get(name)
        if opened is None:
            made = call.device.open_library(name)
            if not isinstance(made, CpuLibrary):
                raise NotSupportedError(f"library {name!r} runs in no graph", backend="cpu")
            opened = self._libraries[name] = made
        return opened


def _run_again(library: CpuLibrary, node: GraphNode, spec: OperationSpec, stream: AccelStream) -> None:
    """Run an operation with status words of its own."""
    library.call_of(with_words(node, spec), stream)()


def _read(condition: Any) -> int:
    # A loop that never ends does so when its context is lost.
    check_usable()
    return int(condition.item())


def _write(count: Any, turns: int) -> None:
    count[...] = turns
