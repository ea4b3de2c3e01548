"""Builds programs of typed steps, drops unneeded steps, and writes programs in the expression language.

A program is a list of `TypedStep`. Its module describes the steps of loops.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from ..backends.base import DType
from ..backends.base.expressions import TypedStep

__all__ = ["Builder", "alive", "text_of"]

# The steps of loops. None is shared, even if two are equal.
OF_LOOPS = frozenset({"carried", "loop", "break", "end", "result"})
# The functions of constants that `Builder` computes itself.
_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "negative": operator.neg,
}
_FOLDED: Mapping[tuple[str, DType], Callable[..., Any]] = {
    **{(name, dtype): f for name, f in _ARITHMETIC.items() for dtype in (DType.float64, DType.int64)},
    ("maximum", DType.int64): max,
}


class Builder:
    """Makes the steps of a program, but reuses an equal step of the same loop or of a loop around it.

    Attributes:
        steps: The steps so far; their numbers are indices of this list. The value of a ``loop`` is the number
            of its ``end``.
    """

    def __init__(self) -> None:
        self.steps: list[TypedStep] = []
        self._scopes: list[dict[tuple[object, ...], int]] = [{}]

    def step(self, function: str, dtype: DType, steps: Sequence[int] = (), value: Any = 0) -> int:
        """Return the number of a step with this value: a simpler one, an equal one, or a new one.

        Args:
            function: The function; see `TypedStep`.
            dtype: The dtype of the value.
            steps: The numbers of the operands.
            value: The step's constant, argument, axis or end; see `TypedStep`.
        """
        simple = self._simple(function, dtype, steps)
        if simple is not None:
            return simple
        # `repr` distinguishes 0.0 from -0.0.
        key = (function, dtype, tuple(steps), repr(value))
        for scope in self._scopes:
            if key in scope:
                return scope[key]
        number = self.new(function, dtype, steps, value)
        self._scopes[-1][key] = number
        return number

    def new(self, function: str, dtype: DType, steps: Sequence[int] = (), value: Any = 0) -> int:
        """Make a step without a search for an equal one. A loop opens a scope, and its end closes it."""
        self.steps.append(TypedStep(function, dtype, tuple(steps), value))
        number = len(self.steps) - 1
        if function == "loop":
            self._scopes.append({})
        elif function == "end":
            self._scopes.pop()
            self.steps[steps[0]] = attrs.evolve(self.steps[steps[0]], value=number)
        return number

    def constant(self, value: complex, dtype: DType) -> int:
        """Return the number of a constant."""
        return self.step("constant", dtype, (), value)

    def cast(self, number: int, dtype: DType) -> int:
        """Return the number of a step's value in a dtype: the step itself if it already has this dtype."""
        return number if self.steps[number].dtype is dtype else self.step("cast", dtype, (number,))

    def take(self, steps: Sequence[TypedStep], numbers: Iterable[int], copies: dict[int, int]) -> None:
        """Copy steps of another program.

        Args:
            steps: The other program.
            numbers: The numbers of the steps to copy, in order.
            copies: Maps numbers of the other program to numbers of this program. Mapped steps are not copied
                again, and the copies are added.
        """
        for number in numbers:
            if number not in copies:
                step = steps[number]
                make = self.new if step.function in OF_LOOPS else self.step
                copies[number] = make(step.function, step.dtype, [copies[n] for n in step.steps], step.value)

    def _simple(self, function: str, dtype: DType, steps: Sequence[int]) -> int | None:
        """Return an operand or a constant with the value of this step; None if the step is needed."""
        operands = [self.steps[number] for number in steps]
        if function == "where" and steps[1] == steps[2]:
            return steps[1]
        if function == "multiply" and dtype.kind == "float":
            for i, j in ((0, 1), (1, 0)):
                if operands[i].function == "constant" and operands[i].value == 1:
                    return steps[j]
        is_constant = all(step.function == "constant" for step in operands)
        if is_constant and (function, dtype) in _FOLDED:
            value = _FOLDED[function, dtype](*[step.value for step in operands])
            # Executors wrap integers around.
            if dtype is DType.float64 or -(1 << 63) <= value < 1 << 63:
                return self.constant(value, dtype)
        return None


def alive(steps: Sequence[TypedStep], outputs: Sequence[int]) -> tuple[list[TypedStep], list[int]]:
    """Return the steps that results need, and the new numbers of the results.

    A loop needs its ``end`` and each ``break``.
    """
    ends = {step.steps[0]: n for n, step in enumerate(steps) if step.function == "end"}
    breaks: dict[int, list[int]] = {}
    for n, step in enumerate(steps):
        if step.function == "break":
            breaks.setdefault(step.steps[0], []).append(n)
    pending, live = list(outputs), set[int]()
    while pending:
        n = pending.pop()
        if n not in live:
            live.add(n)
            pending += [*steps[n].steps, *breaks.get(n, ())]
            if n in ends:
                pending.append(ends[n])
    order = sorted(live)
    new = {n: index for index, n in enumerate(order)}
    live_steps: list[TypedStep] = []
    for n in order:
        step = steps[n]
        value = new[ends[n]] if step.function == "loop" else step.value
        live_steps.append(
            TypedStep(step.function, step.dtype, tuple(new[operand] for operand in step.steps), value)
        )
    return live_steps, [new[n] for n in outputs]


def without_unchanged(
    steps: Sequence[TypedStep], outputs: Sequence[int]
) -> tuple[list[TypedStep], list[int]]:
    """Drop the variables of loops that no iteration changes, and the steps that no result needs.

    Returns:
        The other steps, and the new numbers of the results.
    """
    reduced, numbers = alive(steps, outputs)
    while same := _unchanged(reduced):
        changed = [_without_variables(step, number, reduced, same) for number, step in enumerate(reduced)]
        reduced, numbers = alive(changed, [_first(number, same) for number in numbers])
    return reduced, numbers


def _unchanged(steps: Sequence[TypedStep]) -> dict[int, int]:
    """Map each variable that its loop does not change, and its result, to the step of its first value."""
    unchanged = {carried for step in steps if step.function == "loop" for carried in step.steps[2:]}
    for step in steps:
        if step.function in ("break", "end"):
            variables = steps[step.steps[0]].steps[2:]
            values = step.steps[1 + (step.function == "break") :]
            unchanged -= {
                carried for carried, value in zip(variables, values, strict=True) if value != carried
            }
    same = {carried: steps[carried].steps[0] for carried in unchanged}
    ends = [
        number for number, step in enumerate(steps) if step.function == "result" and step.steps[0] in same
    ]
    return same | {number: same[steps[number].steps[0]] for number in ends}


def _first(number: int, same: Mapping[int, int]) -> int:
    """Return the step of a variable's first value, which may itself be an unchanged variable."""
    while number in same:
        number = same[number]
    return number


def _without_variables(
    step: TypedStep, number: int, steps: Sequence[TypedStep], same: Mapping[int, int]
) -> TypedStep:
    """Return a step without the variables in `same`, and with their first values as operands."""
    operands = list(step.steps)
    if step.function in ("loop", "break", "end"):
        first = 1 if step.function == "end" else 2
        loop = number if step.function == "loop" else operands[0]
        values = zip(operands[first:], steps[loop].steps[2:], strict=True)
        operands = [*operands[:first], *(value for value, carried in values if carried not in same)]
    return attrs.evolve(step, steps=tuple(_first(operand, same) for operand in operands))


def text_of(
    steps: Sequence[TypedStep],
    outputs: Mapping[str, int],
    arguments: Mapping[int, str],
    *,
    is_typed: bool,
    prefix: str = "t",
) -> str:
    """Write steps in the expression language, usually with a line for each step.

    Args:
        steps: The steps.
        outputs: The numbers of the results' steps, by the names of the results.
        arguments: The names of the arguments, by their numbers.
        is_typed: Whether constants and casts name their dtypes. Otherwise floating values and integer
            constants take their dtypes from the arguments, by NumPy's promotion.
        prefix: The beginning of the names of steps, so that the texts of several programs can be joined.
    """
    return _StepText(steps, arguments, is_typed, prefix).lines(outputs)


@attrs.define(eq=False)
class _StepText:
    """Writes the steps of a program: step n becomes the name ``t{n}``, if the prefix is ``t``."""

    steps: Sequence[TypedStep]
    arguments: Mapping[int, str]
    is_typed: bool
    prefix: str
    text_lines: list[str] = attrs.field(factory=list[str])
    depth: int = 0

    def lines(self, outputs: Mapping[str, int]) -> str:
        for number, step in enumerate(self.steps):
            self._write(number, step)
        for name, number in outputs.items():
            self._line(f"{name} = {self.prefix}{number}")
        return "\n".join(self.text_lines)

    def _line(self, text: str) -> None:
        self.text_lines.append("    " * self.depth + text)

    def _write(self, number: int, step: TypedStep) -> None:
        prefix = self.prefix
        operands = [f"{prefix}{operand}" for operand in step.steps]
        match step.function:
            case "loop":
                self._line(f"for {prefix}{number} in range({operands[0]}, {operands[1]}):")
                self.depth += 1
            case "end":
                self._assign(step.steps[0], operands[1:])
                self.depth -= 1
            case "break":
                # The variables change only if the loop ends here.
                carried = self.steps[step.steps[0]].steps[2:]
                values = [
                    f"where({operands[1]}, {v}, {prefix}{c})"
                    for v, c in zip(operands[2:], carried, strict=True)
                ]
                self._assign(step.steps[0], values)
                self._line(f"if {operands[1]}: break")
            case _:
                self._line(f"{prefix}{number} = {self._value(step, operands)}")

    def _assign(self, loop: int, values: Sequence[str]) -> None:
        """Assign to all variables of a loop at once, because values may read other variables."""
        carried = self.steps[loop].steps[2:]
        if not carried:
            # The body of a loop must not be empty.
            self._line(f"u{self.prefix}{loop} = 0")
        for index, value in enumerate(values):
            self._line(f"u{self.prefix}{loop}_{index} = {value}")
        for index, variable in enumerate(carried):
            self._line(f"{self.prefix}{variable} = u{self.prefix}{loop}_{index}")

    def _value(self, step: TypedStep, operands: Sequence[str]) -> str:
        name, inside = step.function, ", ".join(operands)
        if name in ("argument", "load"):
            argument = self.arguments[int(step.value.real)]
            return argument if name == "argument" else f"{argument}[{inside}]"
        if name == "constant":
            return self._constant(step)
        if name == "index":
            return f"i({step.value})"
        if name == "cast":
            is_explicit = self.is_typed or step.dtype.kind != "float"
            return f"{step.dtype.value}({inside})" if is_explicit else inside
        if name == "count":
            return "n"
        name = name.removeprefix("reduce_")
        return operands[0] if name in ("carried", "result") else f"{name}({inside})"

    def _constant(self, step: TypedStep) -> str:
        value: Any = step.value
        if step.dtype is DType.bool:
            return repr(bool(value))
        if step.dtype.kind == "complex":
            return f"{step.dtype.value}({complex(value)!r})"
        if step.dtype.kind == "float":
            number = float(value)
            text = "nan" if math.isnan(number) else repr(number) if math.isfinite(number) else str(number)
            return f"{step.dtype.value}({text})" if self.is_typed else text
        is_plain = step.dtype is DType.int64 or not self.is_typed
        return repr(int(value)) if is_plain else f"{step.dtype.value}({int(value)})"
