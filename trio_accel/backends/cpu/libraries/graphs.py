"""Graphs: a chain of operations as one piece of work, and parts of it that run on a condition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ...base import AccelError, NotSupportedError
from ...base.kernels import KernelEntry, kernel
from ...base.ops import BranchSpec, GraphSpec, LoopSpec, OperationSpec, graph_recipe
from ..kit._library import Call, CpuLibrary, HostDevice
from ..runtime._stream import check_usable

__all__ = ["GraphLibrary"]

_Work: TypeAlias = Callable[[], None]


class GraphLibrary(CpuLibrary):
    """Runs recipes by the kernels of other libraries, which it opens in the stream's thread.

    Args:
        name: Name of the library.
        device: The device.
        kernels: None but its own.
    """

    def __init__(self, name: str, device: HostDevice, kernels: Mapping[str, KernelEntry]) -> None:
        super().__init__(name, device, kernels)
        self._libraries: dict[str, CpuLibrary] = {}

    @kernel(GraphSpec, backend="cpu")
    @kernel(BranchSpec, backend="cpu")
    @kernel(LoopSpec, backend="cpu")
    def _replay(self, spec: OperationSpec, call: Call) -> None:
        # What is refused is refused before anything is changed.
        self._prepared(self.name, spec, call)()

    def _prepared(self, library: str, spec: OperationSpec, call: Call) -> _Work:
        if isinstance(spec, GraphSpec):
            return self._chain(spec, call)
        if isinstance(spec, BranchSpec):
            return self._branch(spec, call)
        if isinstance(spec, LoopSpec):
            return self._loop(spec, call)
        opened = self._libraries.get(library)
        if opened is None:
            made = call.device.open_library(library)
            if not isinstance(made, CpuLibrary):
                raise NotSupportedError(f"library {library!r} runs in no graph", backend="cpu")
            opened = self._libraries[library] = made
        return opened.call_of(spec, call.stream)

    def _chain(self, spec: GraphSpec, call: Call) -> _Work:
        works = self._works(spec, call)
        return lambda: _run_all(works)

    def _branch(self, spec: BranchSpec, call: Call) -> _Work:
        works, condition = self._works(spec, call), call.array(spec.condition)

        def work() -> None:
            number = spec.chosen(int(condition.item()))
            if 0 <= number < len(works):
                works[number][1]()

        return work

    def _loop(self, spec: LoopSpec, call: Call) -> _Work:
        works, condition, count = self._works(spec, call), call.array(spec.condition), call.array(spec.count)

        def work() -> None:
            turns = 0
            while turns < spec.limit and condition.item():
                # One that never ends does so when its context is lost.
                check_usable()
                _run_all(works)
                turns += 1
            count[...] = turns

        return work

    def _works(self, spec: GraphSpec | BranchSpec | LoopSpec, call: Call) -> list[tuple[str, _Work]]:
        """Names of the operations of a recipe, and the prepared operations, which may run more than once."""
        recipe = graph_recipe(spec.recipe)
        bound = zip(recipe.nodes, recipe.bind(spec.arrays), strict=True)
        return [(node.operation, self._prepared(node.library, one, call)) for node, one in bound]


def _run_all(works: list[tuple[str, _Work]]) -> None:
    for number, (name, work) in enumerate(works):
        try:
            work()
        except AccelError as error:
            error.message = f"node {number} of the graph, {name}: {error.message}"
            raise
