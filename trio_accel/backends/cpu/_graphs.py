"""Graphs: a chain of operations as one piece of work, and parts of it that run on a condition."""

from __future__ import annotations

from functools import cache, partial

from ..base import AccelError, NotSupportedError
from ..base.kernels import kernel
from ..base.ops import BranchSpec, GraphSpec, LoopSpec, OperationSpec, graph_recipe
from .manifest import load_kernels
from .runtime._memory import CpuMemory
from .runtime._stream import Work, check_usable

__all__ = ["replay"]

_kernels_of = cache(load_kernels)


@kernel(GraphSpec, backend="cpu")
@kernel(BranchSpec, backend="cpu")
@kernel(LoopSpec, backend="cpu")
def replay(spec: OperationSpec, memory: CpuMemory) -> Work:
    """Prepare a chain; its kernels are found and prepared in the stream's thread, as they may be imported."""
    return partial(_replay, spec, memory)


def _replay(spec: OperationSpec, memory: CpuMemory) -> None:
    # What is refused is refused before anything is changed.
    _prepared("graphs", spec, memory)()


def _chain(spec: GraphSpec, memory: CpuMemory) -> Work:
    return partial(_run_all, _works(spec, memory))


def _branch(spec: BranchSpec, memory: CpuMemory) -> Work:
    works, condition = _works(spec, memory), memory.view(spec.condition)

    def work() -> None:
        number = spec.chosen(int(condition.item()))
        if 0 <= number < len(works):
            works[number][1]()

    return work


def _loop(spec: LoopSpec, memory: CpuMemory) -> Work:
    works, condition, count = _works(spec, memory), memory.view(spec.condition), memory.view(spec.count)

    def work() -> None:
        turns = 0
        while turns < spec.limit and condition.item():
            # One that never ends does so when its context is lost.
            check_usable()
            _run_all(works)
            turns += 1
        count[...] = turns

    return work


def _run_all(works: list[tuple[str, Work]]) -> None:
    for number, (name, work) in enumerate(works):
        try:
            work()
        except AccelError as error:
            error.message = f"node {number} of the graph, {name}: {error.message}"
            raise


def _works(spec: GraphSpec | BranchSpec | LoopSpec, memory: CpuMemory) -> list[tuple[str, Work]]:
    """Names of the operations of a recipe, and the prepared operations, which may run more than once."""
    recipe = graph_recipe(spec.recipe)
    bound = zip(recipe.nodes, recipe.bind(spec.arrays), strict=True)
    return [(node.operation, _prepared(node.library, one, memory)) for node, one in bound]


def _prepared(library: str, spec: OperationSpec, memory: CpuMemory) -> Work:
    if isinstance(spec, GraphSpec):
        return _chain(spec, memory)
    if isinstance(spec, BranchSpec):
        return _branch(spec, memory)
    if isinstance(spec, LoopSpec):
        return _loop(spec, memory)
    found = _kernels_of(library).get(type(spec))
    if found is None:
        raise NotSupportedError(
            f"the CPU backend's library {library!r} has no {type(spec).__name__}", backend="cpu"
        )
    return found(spec, memory)
