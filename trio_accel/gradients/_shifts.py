"""Gradients of loads by gathers, if the index along each axis is the element's index plus a constant.

A load ``x[i(0) + 1]`` adds its gradient to the next element, so the gradient of an element comes from the
load of the previous one. A gather adds in one order on each backend, and is several times as fast as a
scatter. At the edges an index is the nearest one, counts from the end, or wraps around by ``%``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import attrs

from ..backends.base import DType
from ..backends.base.expressions import TypedStep
from ..derivatives._derive import DerivedSteps

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
        is_low: Whether a negative index becomes 0, instead of counting from the end.
        is_high: Whether an index after the end becomes the last one.
        is_around: Whether extents are added, which is only allowed for an index that wraps around.
        bounds: The numbers that the source assumes to be the extent, plus a difference: the kind, the value,
            and the difference.
    """

    by: int
    wraps: bool = False
    is_low: bool = False
    is_high: bool = False
    is_around: bool = False
    bounds: tuple[tuple[str, int, int], ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether few loads have read an element."""
        return self.wraps or (not self.is_around and abs(self.by) <= _MAX_SHIFT)

    def fits(self, extent: int, operands: Sequence[Any]) -> bool:
        """Return whether the numbers of a call match an extent."""
        values = [
            (value if kind == "constant" else operands[value], offset) for kind, value, offset in self.bounds
        ]
        is_known = all(type(value) is int and value == extent + offset for value, offset in values)
        return is_known and (self.wraps or abs(self.by) <= extent)

    def terms(self, axis: int) -> list[Term]:
        """Return the loads that have read an element."""
        index, extent, by = f"i({axis})", f"n{axis}", self.by
        if not by:
            return [(index, "")]
        if self.wraps or (by < 0 and not self.is_low):
            # A negative index counts from the end, as if it wrapped around.
            return [(f"({index} - {by}) % {extent}" if by > 0 else f"({index} + {-by}) % {extent}", "")]
        if by < 0:
            edge = [(f"{k}", f"({index} == 0)") for k in range(-by)]
            return [(f"{index} - {by}", f"({index} < {extent} + {by})"), *edge]
        edge = [(f"{extent} - {1 + k}", f"({index} == {extent} - 1)") for k in range(by)]
        return [(f"{index} - {by}", f"({index} >= {by})"), *edge]


def shifts_of(program: DerivedSteps) -> tuple[Shift, ...] | None:
    """Return the shift of the index along each axis; None where one of them is not a shift."""
    shifts: list[Shift] = []
    axes = len(program.outputs) - 1
    for axis, number in enumerate(program.outputs[1:]):
        shift = _shift(program.steps, number, (axis, axis - axes))
        if shift is None or not shift.is_complete:
            return None
        shifts.append(shift)
    return tuple(shifts)


def _shift(steps: Sequence[TypedStep], number: int, axis: tuple[int, int]) -> Shift | None:
    """Return the shift of a step, by the number of its axis from the first one and from the last one."""
    step = steps[number]
    if step.function == "index":
        return Shift(0) if int(step.value.real) in axis else None
    if step.function not in ("add", "subtract", "remainder", "maximum", "minimum"):
        return None
    first, second = step.steps
    if step.function in ("add", "maximum", "minimum") and _number(steps, first) is not None:
        first, second = second, first
    inner, operand = _shift(steps, first, axis), _number(steps, second)
    return _changed(inner, step.function, *operand) if inner is not None and operand is not None else None


def _changed(inner: Shift, function: str, number: TypedStep, offset: int) -> Shift | None:
    """Return the shift for a function of a shift and a number, plus a constant."""
    value, is_constant = int(number.value.real), number.function == "constant"
    is_inside = inner.is_low or inner.is_high
    shift: Shift | None = None
    if function == "remainder":
        if not inner.wraps and not is_inside:
            shift = attrs.evolve(inner, wraps=True, bounds=(*inner.bounds, (number.function, value, -offset)))
    elif function == "minimum":
        # The number must be the last index, which is the nearest one anyway.
        if not inner.wraps and not inner.is_around:
            bound = (number.function, value, -1 - offset)
            shift = attrs.evolve(inner, is_high=True, bounds=(*inner.bounds, bound))
    elif function == "maximum":
        if not inner.wraps and not inner.is_around and is_constant and value == 0:
            shift = attrs.evolve(inner, is_low=True)
    elif not inner.wraps and not is_inside:
        if is_constant:
            shift = attrs.evolve(inner, by=inner.by + (value if function == "add" else -value))
        else:
            bounds = (*inner.bounds, (number.function, value, 0))
            by = inner.by + (offset if function == "add" else -offset)
            shift = attrs.evolve(inner, by=by, is_around=True, bounds=bounds)
    return shift


def _number(steps: Sequence[TypedStep], number: int) -> tuple[TypedStep, int] | None:
    """Return the two terms of a step that adds a constant to a constant or an argument."""
    step = steps[number]
    terms: tuple[TypedStep, int] | None = None
    if step.dtype is not DType.int64:
        return None
    if step.function in ("constant", "argument"):
        terms = step, 0
    elif step.function == "cast":
        terms = _number(steps, step.steps[0])
    elif step.function in ("add", "subtract"):
        first, second = (_number(steps, operand) for operand in step.steps)
        if first is not None and second is not None:
            if second[0].function == "constant":
                value = int(second[0].value.real)
                terms = first[0], first[1] + (value if step.function == "add" else -value)
            elif step.function == "add" and first[0].function == "constant":
                terms = second[0], second[1] + int(first[0].value.real)
    return terms


def gather_text(loads: Sequence[tuple[str, Sequence[Shift]]]) -> str:
    """Write the sum of the loads' gradients, given the names of their values."""
    return "slope = " + " + ".join(itertools.chain.from_iterable(_terms(*load) for load in loads))


def _terms(name: str, shifts: Sequence[Shift]) -> Iterator[str]:
    for terms in itertools.product(*[shift.terms(axis) for axis, shift in enumerate(shifts)]):
        value = f"{name}[{', '.join(index for index, _ in terms)}]"
        condition = " and ".join(condition for _, condition in terms if condition)
        yield f"where({condition}, {value}, 0)" if condition else value
