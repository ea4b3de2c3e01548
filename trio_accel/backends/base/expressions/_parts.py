"""Expressions along axes, cut where something is reduced: then each reduction is a launch of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from ..contract.dtypes import Strs
from ._expression import (
    Apply,
    Break,
    ElementCount,
    ElementLoad,
    Loop,
    Name,
    Node,
    ParsedExpression,
    Reduce,
    Statement,
    assigned_in,
)
from ._parse import COUNT

__all__ = ["parts_of"]


def parts_of(expression: ParsedExpression) -> list[ParsedExpression]:
    """Cut an expression at its reductions.

    Args:
        expression: An expression along axes.

    Returns:
        An expression for each reduction, with its result as an input of the later ones, by the name of its
        output. The last expression has the element-wise results, with the element count as an input if it
        reads it.
    """
    statements, parts = list[Statement](), list[ParsedExpression]()
    for statement in expression.statements:
        match statement:
            case (name, Reduce()):
                parts.append(_part(expression, (*statements, statement), (name,), is_along=True))
            case _:
                statements.append(statement)
    counted = [_counted(statement) for statement in statements]
    parts.append(_part(expression, counted, expression.outputs, is_along=False))
    return parts


def _part(
    expression: ParsedExpression, statements: Sequence[Statement], outputs: Strs, *, is_along: bool
) -> ParsedExpression:
    """Return the statements that some names depend on as an expression."""
    needed, needed_statements = {*outputs}, list[Statement]()
    for statement in reversed(statements):
        assigned = set(assigned_in([statement]))
        if assigned & needed:
            needed_statements.append(statement)
            # The variables of a loop have values before it.
            needed = (needed if isinstance(statement, Loop) else needed - assigned) | set(_read(statement))
    original_inputs = [name for name in expression.inputs if name in needed]
    inputs = (*original_inputs, *sorted(needed - {*original_inputs}))
    return attrs.evolve(
        expression,
        inputs=inputs,
        outputs=outputs,
        statements=tuple(reversed(needed_statements)),
        elements=frozenset(inputs) - (expression.loads.keys() - expression.elements),
        loads={name: count for name, count in expression.loads.items() if name in inputs},
        reductions=tuple(
            [
                statement[1]
                for statement in needed_statements
                if isinstance(statement, tuple) and isinstance(statement[1], Reduce)
            ]
        ),
        is_along=is_along,
        options=("part", *outputs),
    )


def _read(statement: Statement) -> Iterator[str]:
    """Yield the names that a statement reads from before it."""
    match statement:
        case Loop():
            yield from (*_names(statement.start), *_names(statement.stop))
            inside = {statement.index}
            for inner in statement.body:
                yield from (name for name in _read(inner) if name not in inside)
                if isinstance(inner, tuple):
                    inside.add(inner[0])
        case Break():
            yield from _names(statement.condition)
        case (_, node):
            yield from _names(node)


def _names(node: Node) -> Iterator[str]:
    match node:
        case Name():
            yield node.name
        case Apply():
            for operand in node.arguments:
                yield from _names(operand)
        case ElementLoad():
            yield node.name
            for operand in node.indices:
                yield from _names(operand)
        case Reduce():
            yield from _names(node.value)
        case _:
            pass


def _counted(statement: Statement) -> Statement:
    """Return a statement that reads the count of elements as an input."""
    match statement:
        case Loop():
            over = [_of_input(bound) for bound in (statement.start, statement.stop)]
            body = tuple(map(_counted, statement.body))
            return attrs.evolve(statement, start=over[0], stop=over[1], body=body)
        case Break():
            return Break(_of_input(statement.condition))
        case (name, node):
            return name, _of_input(node)


def _of_input(node: Node) -> Node:
    match node:
        case ElementCount():
            return Name(COUNT, node.location)
        case Apply():
            return attrs.evolve(node, arguments=tuple(map(_of_input, node.arguments)))
        case ElementLoad():
            return attrs.evolve(node, indices=tuple(map(_of_input, node.indices)))
        case _:
            return node
