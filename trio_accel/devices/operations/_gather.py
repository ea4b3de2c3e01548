"""Several calls as one: their results are returned together, and shared calls run once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeVar, cast, overload

from ...actors import named_arguments
from ..base._refusals import shown, what_to_do
from ._calls import Call, Operators, SpentCall
from ._chain import GATHER, Chain, arguments_of

__all__ = ["gather"]

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")


@overload
def gather() -> Call[tuple[()]]: ...
@overload
def gather(a: Operators[A], /) -> Call[tuple[A]]: ...
@overload
def gather(a: Operators[A], b: Operators[B], /) -> Call[tuple[A, B]]: ...
@overload
def gather(a: Operators[A], b: Operators[B], c: Operators[C], /) -> Call[tuple[A, B, C]]: ...
@overload
def gather(
    a: Operators[A], b: Operators[B], c: Operators[C], d: Operators[D], /
) -> Call[tuple[A, B, C, D]]: ...
@overload
def gather(
    a: Operators[A], b: Operators[B], c: Operators[C], d: Operators[D], e: Operators[E], /
) -> Call[tuple[A, B, C, D, E]]: ...
@overload
def gather(
    a: Operators[A], b: Operators[B], c: Operators[C], d: Operators[D], e: Operators[E], f: Operators[F], /
) -> Call[tuple[A, B, C, D, E, F]]: ...
@overload
def gather(*calls: Operators[T]) -> Call[tuple[T, ...]]: ...
@named_arguments
def gather(*calls: Any) -> Call[Any]:
    """Make one call of several, which returns all their results.

    The calls run as one request. A call that several of them use runs once, even if its own result is
    gathered too. Calls on several devices run as one request per device, at the same time. Cancellation,
    `retry` and errors work as for a chain: the first call that fails ends the request with its own error.

    Args:
        calls: The calls, each of which may be given more than once. An array on a device is returned as it
            is. Results may be arrays on the device, host arrays (``x.to_host()``), Python numbers
            (``x.item()``) and tuples.

    Returns:
        The results as a tuple, in the order of the calls; ``gather(...).to_host()`` copies all of them to
        the host.

    Raises:
        TypeError: An argument is neither a call nor an array on a device.
    """
    for number, call in enumerate(calls):
        if not isinstance(call, Operators):
            _refuse(number, calls)
    return Call(GATHER, calls)


def _refuse(number: int, calls: Sequence[Any]) -> NoReturn:
    """Refuse an argument."""
    arguments = list(calls)
    for argument in arguments:
        # The error is enough: no warning follows.
        if isinstance(argument, SpentCall):
            argument.close()
        elif isinstance(argument, (list, tuple, set, dict)):
            arguments += argument.values() if isinstance(argument, dict) else argument
    raise TypeError(f"gather: argument {number} must be a call{_refusal_ending(calls[number])}")


def _refusal_ending(value: object) -> str:
    """Return the rest of an argument's refusal."""
    kind: type[Any] = type(value)
    if isinstance(value, (list, tuple, set, Iterator)):
        return f", got a {kind.__name__}; pass its members one by one: ta.gather(*calls)"
    if isinstance(value, dict):
        return ", got a dict; pass its values one by one: ta.gather(*calls.values())"
    advice = what_to_do(value, is_array=False) or "; leave it out, because it needs no request"
    return f" or an AccelRef, got {shown(value)}{advice}"


def by_device(chain: Chain) -> list[tuple[Sequence[int], Call[Any]]]:
    """Split a chain that gathers calls into one for each device (D200).

    Returns:
        The chains, with the places of their calls among the gathered ones. Empty if a call uses arrays of
        several devices: then the chain runs, or is refused, as a whole.
    """
    tables: dict[int, set[object]] = {}
    *steps, gather_step = chain.steps
    for step in steps:
        block_tables = tables[id(step)] = set[object]()
        for argument in arguments_of(step):
            if id(argument) in tables:
                block_tables |= tables[id(argument)]
            elif isinstance(cast("object", argument), Operators):
                block_tables.add(argument.block.table)
        if len(block_tables) > 1:
            return []
    positions_by_table: dict[object, list[int]] = {}
    for position, argument in enumerate(gather_step.args):
        block_tables = tables[id(argument)] if id(argument) in tables else {argument.block.table}  # noqa: SIM401  # a call has none
        # A call without arrays runs with the first request.
        table = next(iter(block_tables or tables_of(chain)))
        positions_by_table.setdefault(table, []).append(position)
    for step in steps:
        step.__class__ = Call  # pyright: ignore[reportAttributeAccessIssue]  # each is used by one of them
    return [
        (positions, Call(GATHER, tuple([gather_step.args[position] for position in positions])))
        for positions in positions_by_table.values()
    ]


def tables_of(chain: Chain) -> list[object]:
    """List the tables of blocks that the arrays of a chain are in, each once."""
    return list(dict.fromkeys([ref.block.table for ref in chain.refs]))
