"""Graphs: a chain of operations as one piece of work, and parts of it that run on a condition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from trio_accel.backends.base import AccelStream, NotSupportedError, ops
from trio_accel.backends.base.contract.ops import GraphNode, OperationSpec
from trio_accel.backends.base.gpu.graphs import CHAINS, replay
from trio_accel.backends.base.kit.kept_chains import KeptChains, with_words
from trio_accel.backends.base.kit.kernels import KernelEntry, kernel

from .._device import TorchDevice, TorchLibrary
from .._views import BITS, read, write
from ..manifest import BACKEND


class GraphLibrary(TorchLibrary):
    """Runs recipes by the kernels of other libraries, which it opens in the stream's thread."""

    def __init__(self, name: str, device: TorchDevice, kernels: Mapping[str, KernelEntry]) -> None:
        super().__init__(name, device, kernels)
        self._libraries: dict[str, TorchLibrary] = {}
        self._chains = KeptChains(device.blocks, device.plan_counts)

    @kernel(ops.GraphSpec, backend=BACKEND)
    @kernel(ops.BranchSpec, backend=BACKEND)
    @kernel(ops.LoopSpec, backend=BACKEND)
    def _replay(self, spec: OperationSpec, call: Any) -> None:
        # All operations are prepared first, so that a refusal comes before anything is changed.
        self._prepared(self.name, spec, call)()

    @kernel(ops.ChainSpec, backend=BACKEND)
    def _run_chain(self, spec: ops.ChainSpec, call: Any) -> None:
        run = self._prepared(self.name, spec, call)
        if spec.host_data:
            host_data = torch.from_numpy(np.frombuffer(bytearray(spec.host_data), np.uint8))
            view = call.device.view(spec.written[-1], BITS[1])
            view.at[: len(host_data)].copy_(host_data)
        run()
        if spec.words is not None:
            result = read(call, spec.result_at()).cpu().numpy()
            spec.words.view(np.uint8)[: len(result)] = result

    def _prepared(self, library: str, spec: OperationSpec, call: Any) -> Callable[[], None]:
        if not isinstance(spec, CHAINS):
            return self._library(library, call).call_of(spec, call.stream)
        works = self._works_of(spec, call)
        condition, count = getattr(spec, "condition", None), getattr(spec, "count", None)
        return partial(replay, spec, works, partial(_read, call, condition), partial(_write, call, count))

    def _works_of(self, spec: Any, call: Any) -> Any:
        """Return the operations of a chain for its arrays; they are kept, as the same ones come again."""
        plan = self._chains.find(spec, call.stream)
        bound = plan.binding
        if bound.works is not None:
            return bound.works
        works = [(node.operation, self._work(node, one, call)) for node, one in bound.nodes]
        if not any(isinstance(one, CHAINS) for _, one in bound.nodes):
            bound.works = works
            plan.move("arm")
        return works

    def _work(self, node: GraphNode, spec: OperationSpec, call: Any) -> Callable[[], None]:
        work = self._prepared(node.library, with_words(node, spec), call)
        if isinstance(spec, CHAINS) or not spec.descriptor().status:
            return work
        return partial(_run_again, self._library(node.library, call), node, spec, call.stream)

    def close(self) -> None:
        """Drop all chains."""
        self._chains.plans.close()
        super().close()

    def _library(self, name: str, call: Any) -> TorchLibrary:
        opened = self._libraries.get(name)
        if opened is None:
            made = call.device.open_library(name)
            if isinstance(made, GraphLibrary):
                raise NotSupportedError(f"library {name!r} runs in no graph", backend=BACKEND)
            opened = self._libraries[name] = made
        return opened


def _run_again(library: TorchLibrary, node: GraphNode, spec: OperationSpec, stream: AccelStream) -> None:
    """Run an operation with status words of its own."""
    library.call_of(with_words(node, spec), stream)()


def _read(call: Any, condition: Any) -> int:
    failure = call.stream.failure
    if failure is not None:
        # A loop that never ends does so when its context is lost.
        raise failure
    return int(read(call, condition).reshape(()).item())


def _write(call: Any, count: Any, turns: int) -> None:
    write(call, count, torch.tensor(turns, device=call.device.where))
