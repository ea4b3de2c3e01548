"""Loops of few iterations, written out (D187).

A C++ compiler makes vectors of the loop over elements only if no other loop is inside. The index of a loop
becomes a constant, so that ``x[(i(0) + k) % n]`` is read in order. Equal steps of iterations are made once.
Stores are not, because each of them has an effect, and neither are loads of elements that stores change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from ..contract.dtypes import DType
from ._expression import FUNCTIONS
from ._steps import TypedExpression, TypedStep

__all__ = ["unrolled"]

_MAX_ITERATIONS = 32
# A compiler takes about a second for 500 steps, and as long for an inlined function as for ten steps.
_MAX_STEPS, _STEPS_OF_FUNCTION = 500, 10
_INSTRUCTIONS = ("sqrt", "fabs", "copysign", "signbit", "rint", "reciprocal")
_INLINED = {"power", *(function.name for function in FUNCTIONS.values() if "int" not in function.kinds)}
_INLINED.difference_update(_INSTRUCTIONS)
# Bounds that depend on the index of another loop are made of these.
_FOLDED: Mapping[str, Callable[..., int]] = {
    "add": int.__add__,
    "subtract": int.__sub__,
    "multiply": int.__mul__,
    "cast": int,
}
_OF_LOOPS = ("carried", "break", "result")


class _StaysError(Exception):
    """A loop cannot be written out."""


class _Unroller:
    """Copies the steps of an expression.

    Args:
        steps: The steps.

    Attributes:
        steps: The copies.
        numbers: Their numbers, by the numbers of the steps.
    """

    def __init__(self, steps: Sequence[TypedStep]) -> None:
        self._old = steps
        self.steps: list[TypedStep] = []
        self.numbers: dict[int, int] = {}
        # Numbers of equal copies, by function, dtype, operands and value. A loop has entries of its own.
        self._found: dict[object, int] = {}
        self._cost = 0
        self._is_unrolling = False
        self._stored = {step.value for step in steps if step.function.startswith("store_")}

    def copy(self, numbers: range) -> None:
        """Copy steps, with their loops as they are or written out.

        Raises:
            _StaysError: These are steps of a loop that cannot be written out.
        """
        number = numbers.start
        while number < numbers.stop:
            step = self._old[number]
            if step.function == "fold":
                number = self._fold(number, int(step.value.real))
            elif step.function == "loop":
                number = self._loop(number, int(step.value.real))
            elif step.function == "carried" or (
                step.function == "result" and step.steps[1] not in self.numbers
            ):
                # A loop that stays makes a step of it.
                self.numbers[number] = self.numbers[step.steps[0]]
            else:
                self.numbers[number] = self._add(step)
            number += 1

    def _loop(self, number: int, end: int) -> int:
        if self._is_unrolling:
            self._write_out(number, end)
            return end
        saved_state = len(self.steps), self._cost, dict(self.numbers), dict(self._found)
        self._is_unrolling = True
        try:
            self._write_out(number, end)
        except _StaysError:
            self._is_unrolling = False
            count, self._cost, self.numbers, self._found = saved_state
            del self.steps[count:]
            self._keep(number, end)
        self._is_unrolling = False
        return end

    def _write_out(self, number: int, end: int) -> None:
        opener, body = self._old[number], range(number + 1, end)
        first, stop = (self.steps[self.numbers[bound]] for bound in opener.steps[:2])
        is_constant = first.function == stop.function == "constant"
        indices = range(int(first.value.real), int(stop.value.real)) if is_constant else range(0)
        has_break = any(self._old[inner].function == "break" for inner in body)
        if not is_constant or has_break or len(indices) > _MAX_ITERATIONS:
            raise _StaysError
        for index in indices:
            self.numbers[number] = self._add(TypedStep("constant", DType.int64, (), index))
            self.copy(body)
            if self._cost > _MAX_STEPS:
                raise _StaysError
            values = [self.numbers[value] for value in self._old[end].steps[1:]]
            self.numbers.update(zip(opener.steps[2:], values, strict=True))

    def _keep(self, number: int, end: int) -> None:
        opener, cache = self._old[number], self._found
        for variable in opener.steps[2:]:
            first = self.numbers[variable]
            self.numbers[variable] = self._new(TypedStep("carried", self._old[variable].dtype, (first,)))
        loop_number = self.numbers[number] = self._new(self._moved(opener))
        self._found = dict(cache)
        self.copy(range(number + 1, end))
        self._found = cache
        self.numbers[end] = self._new(self._moved(self._old[end]))
        self.steps[loop_number] = attrs.evolve(self.steps[loop_number], value=self.numbers[end])

    def _fold(self, number: int, end: int) -> int:
        """Copy the steps that combine two values as they are."""
        for inner in range(number, end + 1):
            self.numbers[inner] = self._new(self._moved(self._old[inner]))
            if self._old[inner].function in ("end", "folded"):
                begin = self.numbers[self._old[inner].steps[0]]
                self.steps[begin] = attrs.evolve(self.steps[begin], value=self.numbers[inner])
        return end

    def _moved(self, step: TypedStep) -> TypedStep:
        return attrs.evolve(step, steps=tuple(self.numbers[operand] for operand in step.steps))

    def _add(self, step: TypedStep) -> int:
        moved = self._moved(step)
        if moved.function in _OF_LOOPS or self._has_effects(moved):
            return self._new(moved)
        operands = [self.steps[operand] for operand in moved.steps]
        is_integer = all(operand.dtype is DType.int64 for operand in (moved, *operands))
        if (
            moved.function in _FOLDED
            and is_integer
            and all(operand.function == "constant" for operand in operands)
        ):
            value = _FOLDED[moved.function](*(int(operand.value.real) for operand in operands))
            if -1 << 63 <= value < 1 << 63:
                moved = TypedStep("constant", DType.int64, (), value)
        # Zeros of both signs are different values.
        key = moved.function, moved.dtype, moved.steps, repr(moved.value)
        if key not in self._found:
            self._found[key] = self._new(moved)
        return self._found[key]

    def _has_effects(self, step: TypedStep) -> bool:
        """Return whether a step changes elements, or loads elements that another step changes."""
        is_stored = step.function == "load" and step.value in self._stored
        return is_stored or step.function.startswith("store_")

    def _new(self, step: TypedStep) -> int:
        self.steps.append(step)
        self._cost += _STEPS_OF_FUNCTION if step.function in _INLINED else 1
        return len(self.steps) - 1


def unrolled(expression: TypedExpression) -> TypedExpression:
    """Write out the loops of at most 32 iterations between constants.

    Loops with a `break` stay, and loops with more steps than a compiler takes in a second.

    Args:
        expression: The expression.

    Returns:
        An expression with the same values.
    """
    if not any(step.function == "loop" for step in expression.steps):
        return expression
    unroller = _Unroller(expression.steps)
    unroller.copy(range(len(expression.steps)))
    return attrs.evolve(
        expression,
        steps=tuple(unroller.steps),
        outputs=tuple(unroller.numbers[number] for number in expression.outputs),
        bounds=tuple((unroller.numbers[number], dtype) for number, dtype in expression.bounds),
    )
