"""Element-wise operations in a chain, fused with the expression that reads their results.

The result has the same bits. An intermediate result is converted to the dtype in which it would be stored,
and no backend contracts a product and a sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence

import trio

from ...backends.base.contract.ops import ExpressionSpec, GraphNode
from ...backends.base.expressions import (
    SCALAR_BYTES,
    EncodedProgram,
    decode_program,
    encode_program,
    joined_programs,
)

# Larger expressions take long to compile, and gain little.
_MOST_INPUTS, _MOST_STEPS = 16, 200
# A longer chain is not fused, because that would already take seconds.
_MOST_NODES = 1024
# A kernel takes 4096 bytes of arguments: for each array about 8 per axis, and the address.
_MOST_ARGUMENTS = 2048


def has_neighbours(nodes: Sequence[GraphNode], between: Collection[int], unjoined: frozenset[str]) -> bool:
    """Return whether `joined` may find operations to fuse; see there for the arguments."""
    uses, makers = _uses(nodes), _makers(nodes)
    places = range(len(nodes) if len(nodes) <= _MOST_NODES else 0)
    return any(_find_ahead(nodes, place, between, uses, makers, unjoined) is not None for place in places)


async def joined(
    nodes: Sequence[GraphNode], between: Collection[int], unjoined: frozenset[str]
) -> list[GraphNode]:
    """Fuse neighbouring expressions.

    Fusing two takes 0.3 to 4 ms, so there is a checkpoint after each.

    Args:
        nodes: The operations in order. Their arrays have block ids.
        between: The blocks of intermediate results, which nobody else reads.
        unjoined: See `AccelBackend.unjoined`.

    Returns:
        The operations. If exactly one other expression reads the result of an operation, element by element,
        the operation has become a part of that expression.
    """
    left = list(nodes)
    uses, makers = _uses(nodes), _makers(nodes)
    place = 0
    while place < len(left):
        found = _find_ahead(left, place, between, uses, makers, unjoined)
        made = None if found is None else _one(left[found], left[place])
        if found is None or made is None:
            place += 1
            continue
        left[place] = made
        del left[found]
        makers = _makers(left)
        place -= 1
        await trio.lowlevel.checkpoint()
    return left


def _uses(nodes: Sequence[GraphNode]) -> Counter[int]:
    """Count the operations that use each block."""
    return Counter(block for node in nodes for block in {*node.spec.blocks()[0], *node.spec.blocks()[1]})


def _makers(nodes: Sequence[GraphNode]) -> dict[int, int]:
    """Return the index of the operation that makes each block, among operations with one result."""
    return {made[0].block: place for place, node in enumerate(nodes) if len(made := node.spec.outputs()) == 1}


def _find_ahead(
    nodes: Sequence[GraphNode],
    place: int,
    between: Collection[int],
    uses: Mapping[int, int],
    makers: Mapping[int, int],
    unjoined: frozenset[str],
) -> int | None:
    """Return the first operation that can be fused into the operation at an index, which reads its result."""
    spec = nodes[place].spec
    if not isinstance(spec, ExpressionSpec) or not _may_be_joined(spec, unjoined):
        return None
    # A block with two users has only one maker, so other operations need not be checked.
    ahead = sorted({one for array in spec.arrays if (one := makers.get(array.block, place)) < place})
    return next(
        (
            one
            for one in ahead
            if _may_be_joined(nodes[one].spec, unjoined) and _goes_into(nodes, one, place, between, uses)
        ),
        None,
    )


def _may_be_joined(spec: object, unjoined: frozenset[str]) -> bool:
    """Return whether an operation is an expression with functions that give the same bits when fused."""
    if type(spec) is not ExpressionSpec:
        return False
    steps = decode_program(spec.program).program.steps if unjoined else ()
    return unjoined.isdisjoint(step.function for step in steps)


def _goes_into(
    nodes: Sequence[GraphNode], first: int, second: int, between: Collection[int], uses: Mapping[int, int]
) -> bool:
    """Return whether an expression can be fused into another expression that reads its result."""
    ahead, behind = nodes[first].spec, nodes[second].spec
    assert isinstance(behind, ExpressionSpec)  # the caller has tested it
    if type(ahead) is not ExpressionSpec:
        return False
    if (
        len(ahead.results) != 1
        or ahead.axes
        or behind.stored
        or nodes[first].library != nodes[second].library
    ):
        return False
    result = ahead.results[0]
    # Only the other expression reads it: the two uses are by its maker and by that expression.
    if result.block not in between or uses[result.block] != 2 or result not in behind.arrays:
        return False
    # Loaded elements must be in memory, which a fused operation does not write.
    if any(array.block == result.block for array in behind.loaded):
        return False
    if any(array.block == result.block and array != result for array in behind.arrays):
        return False
    # Its inputs must not change before the second operation.
    changed = {block for node in nodes[first + 1 : second + 1] for block in node.spec.blocks()[1]}
    is_whole = result.shape == behind.shape and changed.isdisjoint(ahead.blocks()[0])
    return is_whole and _keeps_order(ahead, behind)


def _keeps_order(ahead: ExpressionSpec, behind: ExpressionSpec) -> bool:
    """Return whether a reduction finds the first operation's arrays in the same order of elements.

    The strides of arrays determine the order in which a backend reduces. The result is contiguous.
    """
    program = decode_program(behind.program).program
    if not program.reductions:
        return True
    first = decode_program(ahead.program).program
    arrays = (*ahead.results, *ahead.arrays, *behind.arrays)
    return not (first.loads or first.axes) and all(array.is_contiguous for array in arrays)


def _keys(spec: ExpressionSpec, program: EncodedProgram) -> list[Hashable]:
    """Return the array or number of each argument, with the array from which it is loaded."""
    elements, loads = program.program.elements, dict(program.program.loads)
    arrays, loaded, scalars = iter(spec.arrays), iter(spec.loaded), 0
    keys: list[Hashable] = []
    for number, argument in enumerate(program.arguments):
        if argument.is_array:
            read = next(arrays) if number in elements else None
            keys.append((read, next(loaded)) if number in loads else read)
        else:
            keys.append(spec.scalars[scalars : scalars + SCALAR_BYTES])
            scalars += SCALAR_BYTES
    return keys


def _one(first: GraphNode, second: GraphNode) -> GraphNode | None:
    """Fuse two operations; return None if they are too large for one program."""
    ahead, behind = first.spec, second.spec
    assert isinstance(ahead, ExpressionSpec)  # the caller has tested it
    assert isinstance(behind, ExpressionSpec)
    programs = decode_program(ahead.program), decode_program(behind.program)
    keys = _keys(ahead, programs[0]), _keys(behind, programs[1])
    at = [number for number, key in enumerate(keys[1]) if key == ahead.results[0]]
    try:
        made = joined_programs(*programs, at=at, inputs=keys)
    except ValueError:
        return None
    specs = ahead, behind
    arrays = tuple([specs[which].arrays[place] for which, place in made.arrays])
    loaded = tuple([specs[which].loaded[place] for which, place in made.loaded])
    program = made.program.program
    count = len(arrays) + len(loaded) + len(behind.results)
    axes = max([array.ndim for array in (*arrays, *loaded, *behind.results)])
    is_large = len(program.steps) > _MOST_STEPS or len(made.program.arguments) > _MOST_INPUTS
    if is_large or program.checked or 8 * count * (axes + 2) > _MOST_ARGUMENTS:
        return None
    numbers = [
        specs[which].scalars[place * SCALAR_BYTES : (place + 1) * SCALAR_BYTES]
        for which, place in made.scalars
    ]
    text = encode_program(program, made.program.arguments, made.program.usual)
    spec = ExpressionSpec(text, behind.axes, arrays, loaded, behind.results, (), b"".join(numbers))
    return GraphNode(f"{first.operation}, {second.operation}", second.library, spec)
