"""Values that are combined with elements at computed places of an array."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, get_args

import attrs
import numpy as np

from ..backends.base import DType
from ..backends.base.contract.ops import Reduce, ScatterSpec
from ..backends.base.expressions import (
    Argument,
    ArgumentType,
    SpecializedExpression,
    TypedExpression,
    Weak,
    parse,
)
from ..devices import AccelRef, Call, Operation, Planned, Planner
from ..devices.operations._calls import Function
from ..devices.operations._plan_source import refuse_value
from ._arguments import ARRAYS, ExpressionArgument, find_types, served_by, take

__all__ = ["ComputeScatter", "Scatter"]

_RANKS = {"bool": 0, "int": 1, "uint": 1, "float": 2, "complex": 3}


class Scatter:
    """Elements of an array, changed in place: ``Scatter("x[i(0), indices]", "add", ...)``.

    Args:
        place: The element that a value is combined with: a load from the first input. An index outside of
            the array fails the operation with an `OutOfRangeError`.
        reduce: How the value is combined with it.
        inputs: Names of the array and of the indices, in order. The values come last.
        operation: Name of the operation, such as ``"arrays.put"``.
        library: Import path of the library actor that serves it.

    Attributes:
        operation: Name of the operation.
    """

    __slots__ = ("_asked", "_expression", "_known", "_message", "_reduce", "operation")

    def __init__(
        self, place: str, reduce: Reduce, *, inputs: Sequence[str], operation: str, library: str = ARRAYS
    ) -> None:
        if reduce not in get_args(Reduce):
            refuse_value(operation, "reduce", get_args(Reduce), reduce)
        outputs = "place", "value"
        self._expression = parse(f"place = {place}; value = values", (*inputs, "values"), outputs)
        self._reduce: Reduce = reduce
        self._message = served_by(ComputeScatter, library)
        self.operation: str = operation
        self._asked = Function(operation, self._compute)
        # The key is the types of the arguments.
        self._known = functools.cache(self._find_types)

    def __call__(self, x: AccelRef, *arguments: ExpressionArgument, shape: tuple[int, ...]) -> Call[AccelRef]:
        """Combine values with elements of an array, on its device, once it is awaited.

        Args:
            x: The array.
            *arguments: Arrays of indices, and then the values, which broadcast to a shape.
            shape: That shape.

        Returns:
            The array.

        Raises:
            TypeError: The values do not become elements of the array, or are not to be combined so.
            ValueError: Shapes that do not broadcast, or memory that the array shares with another argument.
            OutOfRangeError: An index is outside. The array is damaged then.
        """
        return Call(self._asked, (x, *arguments), {"shape": shape})

    def _compute(self, *arguments: ExpressionArgument, shape: tuple[int, ...]) -> ComputeScatter:
        return self._message(self, arguments, shape)

    def plan(self, planner: Planner, message: ComputeScatter) -> Planned[AccelRef]:
        """Validate the arguments of a call, and lower it; see `Operation.plan`."""
        x: Any = message.arguments[0]
        planner.update(self._expression.inputs[0], x)
        taken = take(planner, self._expression, message.arguments, message.shape)
        text, typed = self._known(taken.signature)
        taken.check_held(planner.name, typed)
        taken.check_places(planner.name, typed.axes)
        out = taken.loaded[0]
        planner.distinct(taken.loaded_names[0], out, **dict(zip(taken.array_names, taken.lying, strict=True)))
        return Planned(ScatterSpec(text, self._reduce, taken.arrays, out, taken.scalars), x)

    def _find_types(self, signature: tuple[str, ...]) -> tuple[str, TypedExpression]:
        operation, arguments = self.operation, tuple(map(Argument.decode, signature))
        dtype, kind = arguments[0].dtype, arguments[-1].kind
        if not _becomes(kind, dtype):
            told = f"a Python {kind.value}" if isinstance(kind, Weak) else f"of {kind}"
            how = f"np.{dtype}(...)" if isinstance(kind, Weak) else f'await values.cast("{dtype}")'
            raise TypeError(
                f"{operation}: values is {told}, which does not become {dtype} of x; convert it: {how}"
            )
        if self._reduce in ("min", "max") and dtype.kind == "complex":
            raise TypeError(f"{operation}: reduce={self._reduce!r}: {dtype} has no order")
        given = dict(zip(self._expression.inputs, arguments, strict=True))
        specialized = SpecializedExpression(self._expression, arguments, (None, dtype), is_checked=True)
        typed = find_types(operation, lambda each: attrs.evolve(specialized, arguments=each).typed, given)
        if kind is Weak.int and dtype.kind in ("int", "uint"):
            # A result is converted as an array is, which would wrap around.
            last = len(arguments) - 1
            [step] = [
                n for n, one in enumerate(typed.steps) if (one.function, one.value) == ("argument", last)
            ]
            typed = attrs.evolve(typed, bounds=(*typed.bounds, (step, dtype)))
        return specialized.encode(), typed


@attrs.frozen(eq=False)
class ComputeScatter(Operation[Any, AccelRef]):
    """One call of a `Scatter`.

    Attributes:
        scatter: It.
        arguments: The array, the indices, and the values.
        shape: The shape of the values.
    """

    scatter: Scatter
    arguments: tuple[ExpressionArgument, ...]
    shape: tuple[int, ...]

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self.scatter.operation

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Find types and places."""
        return self.scatter.plan(planner, self)


def _becomes(kind: ArgumentType, dtype: DType) -> bool:
    """Tell whether values become elements without loss of their kind."""
    if isinstance(kind, Weak):
        return _RANKS[kind.value] <= _RANKS[dtype.kind]
    return bool(np.can_cast(kind.dtype, dtype.dtype, "same_kind"))
