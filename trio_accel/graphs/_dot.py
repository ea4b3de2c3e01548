"""Recorded chains in the DOT language."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..backends.base.ops import ArraySpec, BranchSpec, GraphNode, GraphSpec, LoopSpec, graph_recipe

__all__ = ["dot_of"]


def dot_of(nodes: Sequence[GraphNode]) -> str:
    """A chain as a digraph: an edge leads to each operation that must follow because of an array."""
    return "\n".join(["digraph graph_of_operations {", '  node [shape="box"];', *_body(nodes, "n"), "}", ""])


def _body(nodes: Sequence[GraphNode], prefix: str) -> Iterator[str]:
    for number, node in enumerate(nodes):
        outs = ", ".join(f"{out.dtype} {out.shape}" for out in node.spec.outputs())
        # A name expression of a kernel may have both.
        name = node.operation.replace("\\", "\\\\").replace('"', '\\"')
        yield f'  {prefix}{number} [label="{name}\\n{outs}"];'
        if isinstance(node.spec, (GraphSpec, BranchSpec, LoopSpec)):
            yield f"  subgraph cluster_{prefix}{number} {{"
            yield from _body(graph_recipe(node.spec.recipe).nodes, f"{prefix}{number}_")
            yield "  }"
    for number, node in enumerate(nodes):
        for before in _followed(nodes[:number], node):
            yield f"  {prefix}{before} -> {prefix}{number};"


def _followed(earlier: Sequence[GraphNode], node: GraphNode) -> Iterator[int]:
    """Which earlier operations an operation must follow; not those that these follow by the same array."""
    reads, writes = list(node.spec.inputs()), list(node.spec.outputs())
    for number in reversed(range(len(earlier))):
        made, used = earlier[number].spec.outputs(), earlier[number].spec.inputs()
        if _meet(made, (*reads, *writes)) or _meet(used, writes):
            yield number
            # What this one overwrites in full, others have made for it.
            reads = [array for array in reads if array not in made]
            writes = [array for array in writes if array not in made]


def _meet(first: Sequence[ArraySpec], second: Sequence[ArraySpec]) -> bool:
    """Whether arrays of two operations may share an element."""
    return any(_overlap(one, other) for one in first for other in second)


def _overlap(one: ArraySpec, other: ArraySpec) -> bool:
    if one.block != other.block:
        return False
    (start, end), (first, last) = _reach(one), _reach(other)
    return start < last and first < end


def _reach(array: ArraySpec) -> tuple[int, int]:
    """The bytes between which the elements of an array lie."""
    if not array.size:
        return 0, 0
    reaches = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
    start = array.offset + sum(reach for reach in reaches if reach < 0)
    return start, array.offset + sum(reach for reach in reaches if reach > 0) + array.dtype.itemsize
