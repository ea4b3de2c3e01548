"""Graphs: a chain of operations as one piece of work."""

from __future__ import annotations

from functools import cache, partial

from ..base import AccelError, NotSupportedError
from ..base.kernels import kernel
from ..base.ops import GraphNode, GraphSpec, OperationSpec, graph_recipe
from .manifest import load_kernels
from .runtime._memory import CpuMemory
from .runtime._stream import Work

__all__ = ["replay"]

_kernels_of = cache(load_kernels)


@kernel(GraphSpec, backend="cpu")
def replay(spec: GraphSpec, memory: CpuMemory) -> Work:
    """Prepare a chain; its kernels are found and prepared in the stream's thread, as they may be imported."""
    return partial(_replay, spec, memory)


def _replay(spec: GraphSpec, memory: CpuMemory) -> None:
    recipe = graph_recipe(spec.recipe)
    nodes = list(zip(recipe.nodes, recipe.bind(spec.arrays), strict=True))
    # What is refused is refused before anything is changed.
    works = [_prepared(node, bound, memory) for node, bound in nodes]
    for number, ((node, _), work) in enumerate(zip(nodes, works, strict=True)):
        try:
            work()
        except AccelError as error:
            error.message = f"node {number} of the graph, {node.operation}: {error.message}"
            raise


def _prepared(node: GraphNode, spec: OperationSpec, memory: CpuMemory) -> Work:
    found = _kernels_of(node.library).get(type(spec))
    if found is None:
        raise NotSupportedError(
            f"the CPU backend's library {node.library!r} has no {type(spec).__name__}", backend="cpu"
        )
    return found(spec, memory)
