"""Gradients of loads by gathers: where the index along each axis is that of the element, plus a constant.

A load ``x[i(0) + 1]`` adds its gradient to the element behind, so the gradient of an element is that of the
load before it. A gather adds in one order on each backend, and is several times as fast as a scatter. At the
edges an index is the nearest one, counts from the end, or wraps around by ``%``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import attrs

from ..backends.base.expressions import Step
from ._derive import Program

__all__ = ["Shift", "gather_text", "shifts_of"]

# A longer shift has more terms at the edge than a scatter takes time.
_MAX_SHIFT = 4

Term: TypeAlias = "tuple[str, str]"
"""An index along an axis of the gradient of a load, and the condition under which it is added."""


@attrs.frozen
class Shift:
    """How an index along an axis follows the index of the element.

    Attributes:
        by: The constant.
        wraps: Whether an index outside wraps around.
        is_low: Whether a negative one is 0, and does not count from the end.
        bounds: The numbers that the text takes for the extent, with what is added to them: the kind, the
            value, and the difference.
    """

    by: int
    wraps: bool = False
    is_low: bool = False
    bounds: tuple[tuple[str, int, int], ...] = ()

    def fits(self, extent: int, given: Sequence[Any]) -> bool:
        """Tell whether the numbers of a call are those of an extent."""
        values = [(value if kind == "constant" else given[value], more) for kind, value, more in self.bounds]
        is_known = all(type(value) is int and value == extent + more for value, more in values)
        return is_known and abs(self.by) <= extent

    def terms(self, axis: int) -> list[Term]:
        """Return the loads that have read an element."""
        here, extent, by = f"i({axis})", f"n{axis}", self.by
        if not by:
            return [(here, "")]
        if self.wraps or (by < 0 and not self.is_low):
            # A negative index counts from the end, as if it wrapped around.
            return [(f"({here} - {by}) % {extent}" if by > 0 else f"({here} + {-by}) % {extent}", "")]
        if by < 0:
            edge = [(f"{k}", f"({here} == 0)") for k in range(-by)]
            return [(f"{here} - {by}", f"({here} < {extent} + {by})"), *edge]
        edge = [(f"{extent} - {1 + k}", f"({here} == {extent} - 1)") for k in range(by)]
        return [(f"{here} - {by}", f"({here} >= {by})"), *edge]


def shifts_of(program: Program) -> tuple[Shift, ...] | None:
    """Return the shift of the index along each axis; None where one of them is not a shift."""
    found: list[Shift] = []
    for axis, number in enumerate(program.outputs[1:]):
        shift = _shift(program.steps, number, axis)
        if shift is None or abs(shift.by) > _MAX_SHIFT:
            return None
        found.append(shift)
    return tuple(found)


def _shift(steps: Sequence[Step], number: int, axis: int) -> Shift | None:
    step = steps[number]
    if step.function == "index":
        return Shift(0) if int(step.value.real) == axis else None
    if step.function not in ("add", "subtract", "remainder", "maximum", "minimum"):
        return None
    first, second = step.steps
    if step.function in ("add", "maximum", "minimum") and steps[first].function == "constant":
        first, second = second, first
    inner, other = _shift(steps, first, axis), _number(steps, second)
    is_known = inner is not None and other.function in ("constant", "argument")
    return _changed(inner, step.function, other) if inner is not None and is_known else None


def _changed(inner: Shift, function: str, other: Step) -> Shift | None:
    """Return a shift behind a function of it and a number."""
    value, is_constant = int(other.value.real), other.function == "constant"
    made: Shift | None = None
    if function == "remainder":
        if not inner.wraps and not inner.is_low:
            made = attrs.evolve(inner, wraps=True, bounds=((other.function, value, 0),))
    elif function == "minimum":
        # The number must be the last index, which is the nearest one anyway.
        if inner.by >= 0 and not inner.wraps:
            made = attrs.evolve(inner, bounds=(*inner.bounds, (other.function, value, -1)))
    elif is_constant and inner == Shift(inner.by):
        if function == "maximum":
            made = attrs.evolve(inner, is_low=True) if value == 0 else None
        else:
            made = Shift(inner.by + (value if function == "add" else -value))
    return made


def _number(steps: Sequence[Step], number: int) -> Step:
    """Return the step that a cast converts."""
    step = steps[number]
    return steps[step.steps[0]] if step.function == "cast" else step


def gather_text(loads: Sequence[tuple[str, Sequence[Shift]]]) -> str:
    """Write the sum of the gradients of loads, by the names of their values."""
    return "slope = " + " + ".join(itertools.chain.from_iterable(_terms(*load) for load in loads))


def _terms(name: str, shifts: Sequence[Shift]) -> Iterator[str]:
    for terms in itertools.product(*[shift.terms(axis) for axis, shift in enumerate(shifts)]):
        value = f"{name}[{', '.join(index for index, _ in terms)}]"
        condition = " and ".join(condition for _, condition in terms if condition)
        yield f"where({condition}, {value}, 0)" if condition else value
