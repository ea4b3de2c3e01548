"""Programs are built from expressions that were typed separately."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from ..contract.dtypes import DType, Ints
from ._steps import Step, TypedExpression

__all__ = ["Builder"]


class Builder:
    """Makes the steps of a program with these inputs. Expressions without loops share equal steps.

    Attributes:
        values: The results of earlier reductions by their names in later expressions.
    """

    def __init__(self, inputs: Sequence[str]) -> None:
        self.values: dict[str, int] = {}
        self._inputs = list(inputs)
        self._steps: list[Step] = []
        self._made: dict[tuple[object, ...], int] = {}

    def finish(self, result: int, elements: Ints) -> TypedExpression:
        """Return the program of one result, which reads elements of these arguments."""
        return TypedExpression(tuple(self._steps), (result,), elements=elements)

    def read(self, name: str, dtype: DType) -> int:
        """Return the value of an input, of an earlier reduction, or else the count."""
        if name in self._inputs:
            return self.step(Step("argument", dtype, (), self._inputs.index(name)))
        return self.values[name] if name in self.values else self.count()

    def copied(
        self,
        typed: TypedExpression,
        inputs: Sequence[str],
        read: Callable[[str, DType], int],
        *,
        is_apart: bool = False,
    ) -> list[int]:
        """Copy the steps of an expression, and return their numbers in the program.

        Args:
            typed: The expression.
            inputs: Names of its inputs.
            read: Returns the value of an input, by its name and dtype.
            is_apart: Whether the steps are inside of a fold, so that no step outside may share them.
        """
        is_apart |= any(step.function == "loop" for step in typed.steps)
        make, numbers = self.append if is_apart else self.step, list[int]()
        for step in typed.steps:
            if step.function == "argument":
                numbers.append(read(inputs[int(step.value.real)], step.dtype))
            else:
                numbers.append(make(attrs.evolve(step, steps=tuple([numbers[each] for each in step.steps]))))
        return numbers

    def count(self) -> int:
        """Make the number of elements that are reduced."""
        return self.step(Step("count", DType.int64))

    def cast(self, number: int, dtype: DType) -> int:
        """Convert a value, unless it has the dtype."""
        if self._steps[number].dtype is dtype:
            return number
        return self.step(Step("cast", dtype, (number,)))

    def step(self, step: Step) -> int:
        """Make a step, or return the number of an equal one."""
        # Zeros of both signs are different values.
        key = (step.function, step.dtype, step.steps, repr(step.value))
        if key not in self._made:
            self._made[key] = self.append(step)
        return self._made[key]

    def append(self, step: Step) -> int:
        """Make a step, even if an equal one exists. A loop or fold gets the number of its end."""
        self._steps.append(step)
        number = len(self._steps) - 1
        if step.function in ("end", "folded"):
            begin = step.steps[0]
            self._steps[begin] = attrs.evolve(self._steps[begin], value=number)
        return number
