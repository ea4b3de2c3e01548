"""Operations for each element that follow one another in a chain, written as one expression.

What is computed has the same bits. A result in between is converted to the dtype that it would be stored in,
and no backend contracts a product and a sum.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import trio

from ...backends.base import expressions
from ...backends.base.contract.ops import ArraySpec, ElementwiseSpec, GraphNode
from ...backends.base.expressions import SCALAR_BYTES, Argument, Expression, SpecializedExpression, parse

# Larger expressions take long to compile, and gain little more.
_MOST_INPUTS, _MOST_CHARACTERS = 16, 2000
# A chain of more operations is left as it is: to join so many takes seconds already.
_MOST_NODES = 1024
# A kernel takes 4096 bytes of arguments: of each array some 8 for each axis, and the address.
_MOST_ARGUMENTS = 2048


def has_neighbours(nodes: Sequence[GraphNode], between: Collection[int], unjoined: frozenset[str]) -> bool:
    """Tell whether `joined` may find some to join; see there for the arguments."""
    uses, makers = _uses(nodes), _makers(nodes)
    places = range(len(nodes) if len(nodes) <= _MOST_NODES else 0)
    return any(_find_ahead(nodes, place, between, uses, makers, unjoined) is not None for place in places)


async def joined(
    nodes: Sequence[GraphNode], between: Collection[int], unjoined: frozenset[str]
) -> list[GraphNode]:
    """Join neighbours that are expressions.

    To join two takes 0.3 to 4 ms, so the loop turns after each.

    Args:
        nodes: The operations, in their order. Their arrays have ids of blocks.
        between: Blocks of results in between, which nobody sees.
        unjoined: See `AccelBackend.unjoined`.

    Returns:
        The operations: one whose result one other expression reads, element by element, is a part of that.
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
    """Find the place of the operation that makes each block, of those with one result."""
    return {made[0].block: place for place, node in enumerate(nodes) if len(made := node.spec.outputs()) == 1}


def _find_ahead(
    nodes: Sequence[GraphNode],
    place: int,
    between: Collection[int],
    uses: Mapping[int, int],
    makers: Mapping[int, int],
    unjoined: frozenset[str],
) -> int | None:
    """Find the first operation that may be computed where the one at a place reads its result."""
    spec = nodes[place].spec
    if not isinstance(spec, ElementwiseSpec) or not _may_be_joined(spec, unjoined):
        return None
    # A block that is used twice has one maker, so no other operation need be looked at.
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
    """Tell whether an operation is an expression whose functions have the same bits beside others."""
    if type(spec) is not ElementwiseSpec:
        return False
    steps = SpecializedExpression.decode(spec.expression).typed.steps if unjoined else ()
    return unjoined.isdisjoint(step.function for step in steps)


def _goes_into(
    nodes: Sequence[GraphNode], first: int, second: int, between: Collection[int], uses: Mapping[int, int]
) -> bool:
    """Tell whether an expression may be computed where another one reads its result."""
    ahead, behind = nodes[first].spec, nodes[second].spec
    assert isinstance(behind, ElementwiseSpec)  # as was found
    if type(ahead) is not ElementwiseSpec:
        return False
    if len(ahead.results) != 1 or nodes[first].library != nodes[second].library:
        return False
    result = ahead.results[0]
    # Only the other one reads it: two uses are that of its maker, and that.
    if result.block not in between or uses[result.block] != 2 or result not in behind.arrays:
        return False
    # Elements of it are loaded from memory, which is not written then.
    if any(array.block == result.block for array in behind.loaded):
        return False
    if any(array.block == result.block and array != result for array in behind.arrays):
        return False
    # Nothing that it reads is changed in between.
    changed = {block for node in nodes[first + 1 : second + 1] for block in node.spec.blocks()[1]}
    return result.shape == behind.shape and changed.isdisjoint(ahead.blocks()[0])


class _Renamer(ast.NodeTransformer):
    """Gives values other names, and leaves those of functions."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:  # the module's
        """Rename a value."""
        return ast.Name(self._names.get(node.id, node.id), node.ctx)

    def visit_Call(self, node: ast.Call) -> ast.Call:  # the module's
        """Rename what a function is called with."""
        return ast.Call(node.func, [self.visit(each) for each in node.args], node.keywords)


class _Writer:
    """Collects the inputs of a joined expression.

    Attributes:
        inputs: How each name comes: its argument, its array and whether elements are loaded from it, or its
            number.
        statements: The assignments.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, tuple[Argument, ArraySpec | bytes, bool]] = {}
        self.statements: list[str] = []

    def write(
        self, spec: ElementwiseSpec, given: Mapping[ArraySpec, str]
    ) -> tuple[SpecializedExpression, list[str]]:
        """Write an expression with other names.

        Args:
            spec: The expression.
            given: Names of values that are known, by the arrays in which they would be.

        Returns:
            The expression, and the names of its results.
        """
        made = SpecializedExpression.decode(spec.expression)
        expression, names = made.expression, dict[str, str]()
        arrays, loaded, scalars = iter(spec.arrays), iter(spec.loaded), 0
        for name, argument in zip(expression.inputs, made.arguments, strict=True):
            if not argument.is_array:
                number = spec.scalars[scalars : scalars + SCALAR_BYTES]
                scalars += SCALAR_BYTES
                names[name] = self._input(argument, number, is_loaded=False)
                continue
            if name in expression.elements:
                array = next(arrays)
                names[name] = given.get(array) or self._input(argument, array, is_loaded=False)
            if name in expression.loads:
                at = self._input(argument, next(loaded), is_loaded=True)
                if names.setdefault(name, at) != at:
                    raise ValueError("an array is read by element, and elements are loaded from it")
        tree = ast.parse(expression.text.strip())
        # Indices of loops are names, too.
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                if node.id in expression.inputs:
                    raise ValueError("an input has another value later on")
                names.setdefault(node.id, f"t{len(self.statements)}_{len(names)}")
        names.setdefault(expression.outputs[0], f"t{len(self.statements)}_{len(names)}")
        renamed = _Renamer(names).visit(tree)
        text = ast.unparse(renamed)
        if isinstance(renamed.body[-1], ast.Expr):
            text = f"{names[expression.outputs[0]]} = {text}"
        self.statements.append(text)
        return made, [names[output] for output in expression.outputs]

    def _input(self, argument: Argument, value: ArraySpec | bytes, *, is_loaded: bool) -> str:
        given = argument, value, is_loaded
        for name, known in self.inputs.items():
            if known == given:
                return name
        name = f"x{len(self.inputs)}"
        self.inputs[name] = given
        return name


def _one(first: GraphNode, second: GraphNode) -> GraphNode | None:
    """Write two operations as one; None where that is too much for one expression."""
    ahead, behind = first.spec, second.spec
    assert isinstance(ahead, ElementwiseSpec)  # as was found
    assert isinstance(behind, ElementwiseSpec)
    result = ahead.results[0]
    dtype, writer = result.dtype.value, _Writer()
    if dtype not in expressions.FUNCTIONS:
        return None
    try:
        made, (name,) = writer.write(ahead, {})
        value = f"{name}_"
        writer.statements.append(f"{value} = {dtype}({name})")
        behind_made, outputs = writer.write(behind, {result: value})
        if made.is_checked or behind_made.is_checked:
            return None
        text = "\n".join(writer.statements)
        arrays = [*behind.results, *(value for _, value, _ in writer.inputs.values())]
        axes = max(len(array.shape) for array in arrays if isinstance(array, ArraySpec))
        is_large = len(text) > _MOST_CHARACTERS or len(writer.inputs) > _MOST_INPUTS
        if is_large or 8 * len(arrays) * (axes + 2) > _MOST_ARGUMENTS:
            return None
        expression: Expression = parse(text, tuple(writer.inputs), tuple(outputs))
    except (ValueError, SyntaxError):
        return None
    inputs = writer.inputs.values()
    whole = SpecializedExpression(expression, tuple([each for each, _, _ in inputs]), behind_made.dtypes)
    spec = ElementwiseSpec(
        whole.encode(),
        tuple([value for _, value, is_loaded in inputs if isinstance(value, ArraySpec) and not is_loaded]),
        tuple([value for _, value, is_loaded in inputs if isinstance(value, ArraySpec) and is_loaded]),
        behind.results,
        b"".join([value for _, value, _ in inputs if isinstance(value, bytes)]),
    )
    return GraphNode(f"{first.operation}, {second.operation}", second.library, spec)
