"""Steps of expressions: one list for elements, reductions, rows and scatters.

Each step has one dtype, and reads earlier steps of exactly the dtypes that its function takes. Conversions
are steps of their own, so backends need no type rules.

Loops are steps in the same list (D187). A step has the same number in all loops, and loop invariants come
before the loop. These steps belong to loops:

* ``carried`` (v): a variable with the first value v; in the loop, its value at the begin of an iteration.
* ``loop`` (a, b, c...): the steps from here to its ``end``, whose number is `TypedStep.value`, are the body.
  The value of the step is the index, from a on, below b. The variables c... change in the loop.
* ``break`` (l, q, v...): if q holds, the variables of loop l become these values, and the loop ends.
* ``end`` (l, v...): the variables of loop l become these values, all at once; then the next index follows.
* ``result`` (c, e): the value of variable c after the loop with the end e.

A program is a typed expression with these steps:

* ``reduce_sum`` (v): the sum of v over all elements along the operation's axes, in the dtype of the step;
  likewise ``prod``, ``min``, ``max``, ``nanmin``, ``nanmax``, ``any``, ``all``, ``argmin``, ``argmax``. The
  value has one element along these axes, so it broadcasts against elements.
* ``fold`` (v): a reduction by the steps up to its ``folded``, whose number is `TypedStep.value`.
* ``left`` (f), ``right`` (f): the two values that fold f combines.
* ``folded`` (f, w): the result of fold f, where w combines two values. Without elements, it is
  `TypedStep.value`.
* ``count``: the number of elements along the axes.
* ``store_set`` (v, index...): set an element of the argument `TypedStep.value` to v; likewise ``add``,
  ``multiply``, ``min``, ``max``.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TypeAlias, cast

import attrs
import numpy as np

from ..contract.dtypes import DType, Ints, Strs

__all__ = [
    "BY_PYTHON",
    "ArgumentType",
    "Pass",
    "TypedExpression",
    "TypedStep",
    "Weak",
    "by_python",
    "needed_steps",
    "why_outside",
]


class Weak(enum.Enum):
    """Type of a Python number: its kind counts, and its size does not."""

    int = "int"
    float = "float"
    complex = "complex"

    @property
    def carrier(self) -> DType:
        """The dtype in which it is computed until it meets an array."""
        return _CARRIERS[self]


ArgumentType: TypeAlias = DType | Weak
"""Type of an argument, or of a step: a Python number has a weak one."""

_CARRIERS = {Weak.int: DType.int64, Weak.float: DType.float64, Weak.complex: DType.complex128}


def _power(base: int, exponent: int) -> int:
    """Return a power, or a smaller number of more than 64 bits instead of a larger power."""
    return base**exponent if exponent < 64 or abs(base) < 2 else 1 << 64


# Python's own functions for integers.
BY_PYTHON: Mapping[str, Callable[..., int]] = {
    "add": int.__add__,
    "subtract": int.__sub__,
    "multiply": int.__mul__,
    "floor_divide": int.__floordiv__,
    "remainder": int.__mod__,
    "power": _power,
    "negative": int.__neg__,
    "positive": int.__pos__,
}


@attrs.frozen
class TypedStep:
    """One value of a typed expression.

    Attributes:
        function: ``"argument"``, ``"constant"``, ``"cast"``, ``"index"``, ``"load"``, another step that the
            module lists, or a name of `Function`.
        dtype: Type of the value.
        steps: Numbers of the steps that the value is computed from.
        value: The value of a constant; the argument's number for an argument or a load; the axis of an index;
            the number of a loop's end.
    """

    function: str
    dtype: DType
    steps: tuple[int, ...] = ()
    value: complex | int = 0

    @property
    def indices(self) -> Ints:
        """The indices of a load or a store."""
        return self.steps[1:] if self.function.startswith("store_") else self.steps

    @property
    def is_reduction(self) -> bool:
        """Whether the step reads all elements along the axes."""
        return self.function == "fold" or self.function.startswith("reduce_")


@attrs.frozen(eq=False)
class Pass:
    """A pass over all elements that computes several steps together.

    Attributes:
        numbers: The steps, in order.
        operands: The values that the pass of each reduction reads.
        last_uses: The values that each step of this pass is the last to read.
    """

    numbers: Sequence[int]
    operands: Mapping[int, Ints]
    last_uses: Mapping[int, Sequence[int]]


@attrs.frozen
class TypedExpression:
    """An expression for arguments of certain types.

    Attributes:
        steps: The values, each computed from earlier ones.
        outputs: Numbers of the steps that are results.
        bounds: Numbers of the integer steps that only depend on Python numbers, and the dtypes that they
            become: see `check_held`.
        elements: Numbers of the arguments that are read element by element.
        axes: The axes of indices, each once.
        loads: Numbers of the arguments that elements are loaded from, and the number of indices that each
            takes.
        checked: Names of the inputs for which an index outside of the array fails the operation. For other
            inputs, the nearest index inside is used.
    """

    steps: tuple[TypedStep, ...]
    outputs: Ints
    bounds: tuple[tuple[int, DType], ...] = ()
    elements: Ints = ()
    axes: Ints = ()
    loads: tuple[tuple[int, int], ...] = ()
    checked: Strs = ()

    @property
    def work(self) -> int:
        """How many steps an element takes; a loop counts as many."""
        return len(self.steps) + 1000 * any(step.function == "loop" for step in self.steps)

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """Dtypes of the results."""
        return tuple(self.steps[number].dtype for number in self.outputs)

    @functools.cached_property
    def passes(self) -> Mapping[int | None, Pass]:
        """The pass of each reduction by its number, and the last pass by None.

        The last pass makes the results, and all values with one element for each row. If it does not need the
        value of a step, only passes of reductions contain the step, so they can compute it piece by piece.
        """
        last_pass = _last_steps(self.steps, self.outputs)
        reductions = [number for number in last_pass if self.steps[number].is_reduction]
        pass_steps = {
            number: sorted(needed_steps(self.steps, self.steps[number].steps, last_pass))
            for number in reductions
        }
        operands = {number: _operands(self.steps, number, inside) for number, inside in pass_steps.items()}
        reduction_passes: dict[int | None, Pass] = {
            number: self._pass(inside, {}) for number, inside in pass_steps.items()
        }
        return reduction_passes | {None: self._pass(last_pass, operands)}

    def _pass(self, numbers: Sequence[int], operands: Mapping[int, Ints]) -> Pass:
        """Find the last uses of values. A loop reads its operands in each iteration, so until its end."""
        last_readers = dict[int, int]()
        loops: list[tuple[int, int]] = []
        for number in numbers:
            step = self.steps[number]
            loops = [loop for loop in loops if loop[1] >= number]
            if step.function in ("loop", "fold"):
                loops.append((number, int(step.value.real)))
            for used in operands.get(number, step.steps):
                last_readers[used] = next((end for begin, end in loops if used < begin), number)
        last_uses: dict[int, list[int]] = {}
        for used, number in last_readers.items():
            # Each iteration needs the variables of a loop again.
            if used not in self.outputs and self.steps[used].function not in ("loop", "carried"):
                last_uses.setdefault(number, []).append(used)
        return Pass(numbers, operands, last_uses)

    @functools.cached_property
    def reductions(self) -> Ints:
        """Numbers of the steps that read all elements along the axes."""
        return tuple([number for number, step in enumerate(self.steps) if step.is_reduction])

    def check_held(self, arguments: Mapping[int, complex], names: Sequence[str], count: int = 0) -> None:
        """Require that the dtypes hold the integers that only depend on Python numbers.

        Args:
            arguments: The Python numbers, by the numbers of the arguments.
            names: Names of the arguments.
            count: The number of elements that are reduced.

        Raises:
            ValueError: A dtype does not hold its integer, or an integer is divided by zero.
        """
        values = {number: count for number, step in enumerate(self.steps) if step.function == "count"}
        for number, dtype in self.bounds:
            value, step = self._integer_value(number, arguments, values), self.steps[number]
            values[number] = value
            is_argument = step.function == "argument"
            label = names[int(step.value.real)] if is_argument else "a number that is made of Python numbers,"
            if reason := why_outside(value, dtype):
                raise ValueError(f"{label} {reason}")

    def _integer_value(self, number: int, arguments: Mapping[int, complex], values: Mapping[int, int]) -> int:
        """Compute a step in Python. Its operands have bounds also, so they are found already."""
        step = self.steps[number]
        if number in values:
            return values[number]
        if step.function == "argument":
            return cast("int", arguments[int(step.value.real)])
        if step.function == "constant":
            return cast("int", step.value)
        operands = [self._integer_value(operand, arguments, values) for operand in step.steps]
        return operands[0] if step.function == "cast" else by_python(step.function, operands)


def _read_by(steps: Sequence[TypedStep], number: int) -> Sequence[int]:
    """Return the operands of a step; the end of a loop or fold reads all steps inside."""
    step = steps[number]
    return range(step.steps[0], number) if step.function in ("end", "folded") else step.steps


def needed_steps(steps: Sequence[TypedStep], numbers: Sequence[int], there: Container[int] = ()) -> set[int]:
    """Return all steps that some steps need, except steps of `there`, and except operands of reductions."""
    needed, todo = set[int](), list(numbers)
    while todo:
        number = todo.pop()
        if number not in needed and number not in there:
            needed.add(number)
            todo += () if steps[number].is_reduction else (*steps[number].steps, *_read_by(steps, number))
    return needed


def _last_steps(steps: Sequence[TypedStep], outputs: Sequence[int]) -> Sequence[int]:
    """Return the steps of the last pass in order; see `TypedExpression.passes`."""
    if not any(step.is_reduction for step in steps):
        return range(len(steps))
    is_varying = list[bool]()
    for number, step in enumerate(steps):
        reads_varying = any(is_varying[operand] for operand in step.steps) and not step.is_reduction
        is_varying.append(reads_varying or step.function in ("argument", "index", "load"))
        if step.function == "end":
            # A loop runs in one pass, so all of its steps vary if one does.
            loop_steps = [*steps[step.steps[0]].steps[2:], *range(step.steps[0], number + 1)]
            varies = any(is_varying[inner] for inner in loop_steps)
            for inner in loop_steps:
                is_varying[inner] = varies
    stores = [number for number, step in enumerate(steps) if step.function.startswith("store_")]
    last_pass = needed_steps(steps, [*outputs, *stores])
    return [
        number
        for number, step in enumerate(steps)
        if number in last_pass
        or not is_varying[number]
        or step.function == "argument"
        or (step.function == "result" and step.steps[1] in last_pass)
    ]


def _operands(steps: Sequence[TypedStep], number: int, inside: Sequence[int]) -> Ints:
    """Return the values from other passes that a reduction's pass reads, in order."""
    read = {*steps[number].steps}.union(*[_read_by(steps, inner) for inner in inside])
    return tuple(sorted(read.difference(inside)))


def by_python(function: str, operands: Sequence[int]) -> int:
    try:
        return BY_PYTHON[function](*operands)
    except ZeroDivisionError:
        raise ValueError("an integer is divided by zero") from None


def why_outside(value: int, dtype: DType) -> str:
    """Return why a dtype does not hold an integer, or an empty string if it does."""
    limits = np.iinfo(dtype.dtype)
    if limits.min <= value <= limits.max:
        return ""
    if value < 0 and dtype is DType.uint64:
        return f"{value} is negative, which neither uint64 nor a power of integers takes; use float64(...)"
    return f"{value} is outside {limits.min} to {limits.max}, which {dtype} holds"
