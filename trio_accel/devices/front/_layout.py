"""The layout of a recording: the arrays of a replay, the result of its step, and its drawing."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, cast

import attrs

from ...backends.base.contract.ops import (
    ArraySpec,
    BranchSpec,
    GraphNode,
    GraphRecipe,
    GraphSpec,
    LoopSpec,
    graph_recipe,
    map_arrays,
)
from ..base._views import overlaps
from ..operations._ref import AccelRef
from ._recorder import Recorded

Use: TypeAlias = Literal["read", "update", "write", "none"]
"""The access of a graph to an array: an update reads and changes it, a write overwrites all of it."""

ReplyT = TypeVar("ReplyT")

ALIGNMENT = 256
_MAX_DEPTH = 64


@attrs.frozen(eq=False)
class Input:
    """An argument of a graph.

    Attributes:
        name: Its name in the step.
        spec: The layout that it must have.
        use: The access of the graph.
        block: Its placeholder block in the recording.
    """

    name: str
    spec: ArraySpec
    use: Use
    block: int


@attrs.frozen(eq=False)
class Constant:
    """An array that a graph uses without an argument.

    Attributes:
        name: Its use, for errors.
        ref: Its memory, or the part that the graph can use.
        use: The access of the graph.
    """

    name: str
    ref: AccelRef
    use: Use


@attrs.frozen(eq=False)
class GraphLayout:
    """The arrays of a graph in the order of the recipe's numbers, which is the order of their access.

    Written arrays are in this order: inputs, returned arrays, scratch memory.

    Attributes:
        inputs: The arguments, in order.
        constants: The other arrays of the device.
        output_sizes: The sizes of the arrays that each replay makes, by placeholder block.
        scratch: The bytes of the memory for intermediate results.
        recipe: The chain.
        positions: For each block: the position of the array that contains it, and the difference of their
            offsets.
    """

    inputs: tuple[Input, ...]
    constants: tuple[Constant, ...]
    output_sizes: Mapping[int, int]
    scratch: int
    recipe: GraphRecipe
    positions: Mapping[int, tuple[int, int]]


def lay_out(
    recorded: Recorded,
    arguments: Sequence[tuple[str, ArraySpec]],
    returned: Iterable[int],
    prefilled: Mapping[int, int] | None = None,
    retained: Iterable[int] = (),
) -> GraphLayout:
    """Assign positions to the arrays of a recorded chain.

    Args:
        recorded: The chain.
        arguments: The name and layout of each argument.
        returned: The blocks of the arrays that it returns.
        prefilled: The sizes of blocks that are filled before it runs, at the beginning of the scratch memory,
            by id.
        retained: The blocks of intermediate results that stay to the end, next to each other.
    """
    filled, start = dict[int, int](), 0
    for block, nbytes in (prefilled or {}).items():
        filled[block] = start
        start += aligned(nbytes)
    layouts = dict(zip(recorded.inputs, [spec for _, spec in arguments], strict=True))
    uses = _uses(recorded.nodes, layouts)
    inputs = tuple(
        Input(name, spec, uses.get(block, "none"), block)
        for block, (name, spec) in zip(recorded.inputs, arguments, strict=True)
    )
    constants = tuple(
        Constant(name, ref, uses.get(block, "none")) for block, (ref, name) in recorded.constants.items()
    )
    outputs = {
        block: recorded.output_sizes[block]
        for block in dict.fromkeys(returned)
        if block in recorded.output_sizes
    }
    positions: dict[int, tuple[int, int]] = {}
    for use in ("read", "update", "write"):
        for argument in inputs:
            if argument.use == use:
                positions[argument.block] = len(positions), -argument.spec.offset
        for constant in constants:
            if constant.use == use:
                positions[constant.ref.block.id] = len(positions), -constant.ref.spec.offset
    for block in outputs:
        positions[block] = len(positions), 0
    intermediates = {block: nbytes for block, nbytes in recorded.output_sizes.items() if block not in outputs}
    offsets, scratch = _share(recorded.nodes, intermediates, retained)
    position = len(positions)
    positions |= {block: (position, offset) for block, offset in filled.items()}
    positions |= {block: (position, start + offset) for block, offset in offsets.items()}
    recipe = GraphRecipe(_placed(node, positions) for node in recorded.nodes)
    return GraphLayout(inputs, constants, outputs, start + scratch, recipe, positions)


def aligned(nbytes: int) -> int:
    """Return the bytes that an array takes among others; even an empty array has a place."""
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT


def _uses(nodes: Iterable[GraphNode], layouts: Mapping[int, ArraySpec]) -> dict[int, Use]:
    """Determine the access of a chain to each block."""
    uses: dict[int, Use] = {}

    def note(array: ArraySpec, *, is_read: bool, is_written: bool) -> None:
        block = array.block
        previous = uses.get(block, "none")
        # After an overwrite, the chain reads only its own data.
        if previous in ("update", "write"):
            return
        base = layouts.get(block)
        is_whole = base is not None and attrs.evolve(base, block=block) == array
        if is_written and not is_read and is_whole and previous == "none":
            uses[block] = "write"
        else:
            uses[block] = "update" if is_written else "read"

    for node in nodes:
        described = node.spec.descriptor()
        for access in ("read", "update", "write"):
            for field in described.fields:
                if field.role.access == access:
                    is_read, is_written = access != "write", access != "read"
                    value: object = getattr(node.spec, field.name)
                    map_arrays(value, lambda array: note(array, is_read=is_read, is_written=is_written))  # noqa: B023
    return uses


def _share(
    nodes: Sequence[GraphNode], sizes: Mapping[int, int], retained: Iterable[int]
) -> tuple[dict[int, int], int]:
    """Place intermediate results in one memory, which results with separate lifetimes share.

    Operations of a graph run one after the other, so a result lives from its first use to its last (D167).
    Each gets the first gap between the results that live at the same time.

    Args:
        nodes: The operations.
        sizes: The sizes of the results, by block.
        retained: The results that stay to the end, next to each other.

    Returns:
        The offset of each used result, and the length of the memory.
    """
    spans: dict[int, tuple[int, int]] = {}
    for number, node in enumerate(nodes):
        for array in (*node.spec.inputs(), *node.spec.outputs()):
            if array.block in sizes:
                spans[array.block] = spans.get(array.block, (number, 0))[0], number
    # They are next to each other, in order.
    stay = {block: (0, len(nodes)) for block in retained if block in spans}
    offsets: dict[int, int] = {}
    # The living results, as last use, start and end; and the gaps between them, which do not touch.
    living: list[tuple[int, int, int]] = []
    gaps: list[tuple[int, int]] = []
    top = length = 0
    # The blocks are in the order of their first use.
    rest = {block: spans[block] for block in spans if block not in stay}
    for block, (first, last_use) in (stay | rest).items():
        while living and living[0][0] < first:
            _, start, end = heapq.heappop(living)
            top = _add_gap(gaps, start, end, top)
        nbytes, offset = aligned(sizes[block]), top
        for index, (start, end) in enumerate(gaps):
            if start + nbytes <= end:
                offset = start
                gaps[index : index + 1] = [(start + nbytes, end)] if start + nbytes < end else []
                break
        top = max(top, offset + nbytes)
        heapq.heappush(living, (last_use, offset, offset + nbytes))
        offsets[block], length = offset, max(length, top)
    return offsets, length


def _add_gap(gaps: list[tuple[int, int]], start: int, end: int, top: int) -> int:
    """Merge a gap with its neighbours; return the new end of the used memory."""
    index = bisect.bisect(gaps, (start, end))
    if index < len(gaps) and gaps[index][0] == end:
        _, end = gaps.pop(index)
    if index and gaps[index - 1][1] == start:
        index -= 1
        start, _ = gaps.pop(index)
    if end == top:
        return start
    gaps.insert(index, (start, end))
    return top


def _placed(node: GraphNode, positions: Mapping[int, tuple[int, int]]) -> GraphNode:
    """Return a node with positions in place of blocks."""

    def relocate(array: ArraySpec) -> ArraySpec:
        position, shift = positions[array.block]
        return attrs.evolve(array, block=position, offset=array.offset + shift)

    described = node.spec.descriptor()
    spec = described.make([map_arrays(value, relocate) for value in described.values(node.spec)])
    return attrs.evolve(node, spec=spec)


def dot_of(nodes: Sequence[GraphNode]) -> str:
    """Return a chain as a digraph, with an edge to each operation that must follow because of an array."""
    return "\n".join(["digraph graph_of_operations {", '  node [shape="box"];', *_body(nodes, "n"), "}", ""])


def _body(nodes: Sequence[GraphNode], prefix: str) -> Iterator[str]:
    for number, node in enumerate(nodes):
        outs = ", ".join(f"{out.dtype} {out.shape}" for out in node.spec.outputs())
        # The name expression of a kernel may contain both.
        name = node.operation.replace("\\", "\\\\").replace('"', '\\"')
        yield f'  {prefix}{number} [label="{name}\\n{outs}"];'
        if isinstance(node.spec, (GraphSpec, BranchSpec, LoopSpec)):
            yield f"  subgraph cluster_{prefix}{number} {{"
            yield from _body(graph_recipe(node.spec.recipe).nodes, f"{prefix}{number}_")
            yield "  }"
    for number, node in enumerate(nodes):
        for predecessor in _followed(nodes[:number], node):
            yield f"  {prefix}{predecessor} -> {prefix}{number};"


def _followed(earlier: Sequence[GraphNode], node: GraphNode) -> Iterator[int]:
    """Yield the operations that a node must follow, except operations that these follow by the same array."""
    reads, writes = list(node.spec.inputs()), list(node.spec.outputs())
    for number in reversed(range(len(earlier))):
        outputs, used = earlier[number].spec.outputs(), earlier[number].spec.inputs()
        if _meet(outputs, (*reads, *writes)) or _meet(used, writes):
            yield number
            # Earlier operations of the chain made the blocks that this operation overwrites completely.
            reads = [array for array in reads if array not in outputs]
            writes = [array for array in writes if array not in outputs]


def _meet(first: Sequence[ArraySpec], second: Sequence[ArraySpec]) -> bool:
    """Return whether arrays of two operations may share an element."""
    return any(overlaps(lhs, rhs) for lhs in first for rhs in second)


def map_refs(reply: ReplyT, function: Callable[[AccelRef], AccelRef]) -> ReplyT:
    """Replace each array of a reply.

    Raises:
        TypeError: The reply contains another object.
    """

    def map_leaf(value: object) -> AccelRef:
        if isinstance(value, AccelRef):
            return function(value)
        raise TypeError(
            "capture: the step must return arrays of the device, None, or tuples, lists and dictionaries of "
            f"these, got {type(value).__name__}"
        )

    return cast("ReplyT", map_tree(reply, map_leaf))


def leaves_of(value: object) -> list[Any]:
    """List the leaves of tuples, lists and dictionaries, except None."""
    leaves: list[Any] = []
    map_tree(value, leaves.append)
    return leaves


def map_tree(value: object, function: Callable[[Any], Any], depth: int = 0) -> Any:
    """Replace each leaf of tuples, lists and dictionaries, except None.

    Raises:
        ValueError: A list contains itself.
    """
    if value is None:
        return None
    if depth > _MAX_DEPTH:
        raise ValueError(f"results must be nested at most {_MAX_DEPTH} deep; does a list hold itself?")
    kind = cast("type[Any]", type(value))
    if isinstance(value, (tuple, list)):
        items = [map_tree(item, function, depth + 1) for item in cast("Sequence[Any]", value)]
        if kind is list:
            return items
        # A named tuple takes its items as separate arguments.
        return kind(*items) if hasattr(kind, "_fields") else tuple(items)
    if kind is dict:
        return {
            key: map_tree(item, function, depth + 1) for key, item in cast("dict[Any, Any]", value).items()
        }
    return function(value)
