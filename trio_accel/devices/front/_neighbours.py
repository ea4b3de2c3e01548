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


def has_neighbours(
    nodes: Sequence[GraphNode], intermediates: Collection[int], unjoined: frozenset[str]
) -> bool:
    """Return whether `joined` may find operations to fuse; see there for the arguments."""
    uses, makers = _uses(nodes), _makers(nodes)
    indexes = range(len(nodes) if len(nodes) <= _MOST_NODES else 0)
    return any(
        _find_ahead(nodes, index, intermediates, uses, makers, unjoined) is not None for index in indexes
    )


async def joined(
    nodes: Sequence[GraphNode], intermediates: Collection[int], unjoined: frozenset[str]
) -> list[GraphNode]:
    """Fuse neighbouring expressions.

    Fusing two takes 0.3 to 4 ms, so there is a checkpoint after each.

    Args:
        nodes: The operations in order. Their arrays have block ids.
        intermediates: The blocks of intermediate results, which nobody else reads.
        unjoined: See `AccelBackend.unjoined`.

    Returns:
        The operations. If exactly one other expression reads the result of an operation, element by element,
        the operation has become a part of that expression.
    """
    remaining = list(nodes)
    uses, makers = _uses(nodes), _makers(nodes)
    index = 0
    while index < len(remaining):
        producer = _find_ahead(remaining, index, intermediates, uses, makers, unjoined)
        fused = None if producer is None else _fuse(remaining[producer], remaining[index])
        if producer is None or fused is None:
            index += 1
            continue
        remaining[index] = fused
        del remaining[producer]
        makers = _makers(remaining)
        index -= 1
        await trio.lowlevel.checkpoint()
    return remaining


def _uses(nodes: Sequence[GraphNode]) -> Counter[int]:
    """Count the operations that use each block."""
    return Counter(block for node in nodes for block in {*node.spec.blocks()[0], *node.spec.blocks()[1]})


def _makers(nodes: Sequence[GraphNode]) -> dict[int, int]:
    """Return the index of the operation that makes each block, among operations with one result."""
    return {
        outputs[0].block: index
        for index, node in enumerate(nodes)
        if len(outputs := node.spec.outputs()) == 1
    }


def _find_ahead(
    nodes: Sequence[GraphNode],
    index: int,
    intermediates: Collection[int],
    uses: Mapping[int, int],
    makers: Mapping[int, int],
    unjoined: frozenset[str],
) -> int | None:
    """Return the first operation that can be fused into the operation at an index, which reads its result."""
    spec = nodes[index].spec
    if not isinstance(spec, ExpressionSpec) or not _may_be_joined(spec, unjoined):
        return None
    # A block with two users has only one maker, so other operations need not be checked.
    producers = sorted(
        {producer for array in spec.arrays if (producer := makers.get(array.block, index)) < index}
    )
    return next(
        (
            producer
            for producer in producers
            if _may_be_joined(nodes[producer].spec, unjoined)
            and _goes_into(nodes, producer, index, intermediates, uses)
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
    nodes: Sequence[GraphNode],
    first: int,
    second: int,
    intermediates: Collection[int],
    uses: Mapping[int, int],
) -> bool:
    """Return whether an expression can be fused into another expression that reads its result."""
    producer, consumer = nodes[first].spec, nodes[second].spec
    assert isinstance(consumer, ExpressionSpec)  # the caller has tested it
    if type(producer) is not ExpressionSpec:
        return False
    if (
        len(producer.results) != 1
        or producer.axes
        or consumer.stored
        or nodes[first].library != nodes[second].library
    ):
        return False
    result = producer.results[0]
    # Only the other expression reads it: the two uses are by its maker and by that expression.
    if result.block not in intermediates or uses[result.block] != 2 or result not in consumer.arrays:
        return False
    # Loaded elements must be in memory, which a fused operation does not write.
    if any(array.block == result.block for array in consumer.loaded):
        return False
    if any(array.block == result.block and array != result for array in consumer.arrays):
        return False
    # Its inputs must not change before the second operation.
    changed = {block for node in nodes[first + 1 : second + 1] for block in node.spec.blocks()[1]}
    is_whole = result.shape == consumer.shape and changed.isdisjoint(producer.blocks()[0])
    return is_whole and _keeps_order(producer, consumer)


def _keeps_order(producer: ExpressionSpec, consumer: ExpressionSpec) -> bool:
    """Return whether a reduction finds the first operation's arrays in the same order of elements.

    The strides of arrays determine the order in which a backend reduces. The result is contiguous.
    """
    program = decode_program(consumer.program).program
    if not program.reductions:
        return True
    first = decode_program(producer.program).program
    arrays = (*producer.results, *producer.arrays, *consumer.arrays)
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


def _fuse(first: GraphNode, second: GraphNode) -> GraphNode | None:
    """Fuse two operations; return None if they are too large for one program."""
    producer, consumer = first.spec, second.spec
    assert isinstance(producer, ExpressionSpec)  # the caller has tested it
    assert isinstance(consumer, ExpressionSpec)
    programs = decode_program(producer.program), decode_program(consumer.program)
    keys = _keys(producer, programs[0]), _keys(consumer, programs[1])
    positions = [number for number, key in enumerate(keys[1]) if key == producer.results[0]]
    try:
        fused = joined_programs(*programs, links=positions, inputs=keys)
    except ValueError:
        return None
    specs = producer, consumer
    arrays = tuple([specs[which].arrays[index] for which, index in fused.arrays])
    loaded = tuple([specs[which].loaded[index] for which, index in fused.loaded])
    program = fused.program.program
    count = len(arrays) + len(loaded) + len(consumer.results)
    axes = max([array.ndim for array in (*arrays, *loaded, *consumer.results)])
    is_large = len(program.steps) > _MOST_STEPS or len(fused.program.arguments) > _MOST_INPUTS
    if is_large or program.checked or 8 * count * (axes + 2) > _MOST_ARGUMENTS:
        return None
    numbers = [
        specs[which].scalars[index * SCALAR_BYTES : (index + 1) * SCALAR_BYTES]
        for which, index in fused.scalars
    ]
    text = encode_program(program, fused.program.arguments, fused.program.usual)
    spec = ExpressionSpec(text, consumer.axes, arrays, loaded, consumer.results, (), b"".join(numbers))
    return GraphNode(f"{first.operation}, {second.operation}", second.library, spec)
