"""Expressions that change elements of an array in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import attrs
import numpy as np

from ..backends.base import DType, Ints, Strs
from ..backends.base.contract.ops import ExpressionSpec, Reduce
from ..backends.base.expressions import (
    Argument,
    ArgumentType,
    TypedExpression,
    Weak,
    encode_program,
    scatter_program,
    typed,
    unrolled,
)
from ..devices import AccelRef, ArrayFunction, Call, Planned, Planner
from ..devices.operations._plan_source import refuse_value
from ._arguments import ARRAYS, ExpressionArgument, find_types, take
from ._expression import Compute, Expression, KnownExpression

__all__ = ["Scatter"]


_RANKS = {"bool": 0, "int": 1, "uint": 1, "float": 2, "complex": 3}


class Scatter(Expression[AccelRef]):
    """Elements of an array, changed in place: ``Scatter("x[i(0), indices]", "add", ...)``.

    Args:
        target: The element that a value is combined with: a load from the first input. An index outside of
            the array fails the operation with an `OutOfRangeError`.
        reduce: How the value is combined with it.
        inputs: Names of the array and the indices, in order. The values come last.
        body: Statements before these, which assign names that `target` and `value` read.
        value: The value, an expression of the inputs and these names; None if the last argument has the
            values.
        operation: Name of the operation, such as ``"arrays.put"``.
        library: Import path of the library actor that serves it.
        is_checked: Whether an index outside fails the operation. Otherwise the nearest index inside is used,
            and a graph can contain the operation.
    """

    __slots__ = ("_has_values", "_reduce")

    def __init__(
        self,
        target: str,
        reduce: Reduce,
        *,
        inputs: Sequence[str],
        operation: str,
        library: str = ARRAYS,
        body: str = "",
        value: str | None = None,
        is_checked: bool = True,
    ) -> None:
        if reduce not in get_args(Reduce):
            refuse_value(operation, "reduce", get_args(Reduce), reduce)
        outputs = "place", "value"
        text = f"{body}\nplace = {target}\nvalue = {value or 'values'}"
        names = tuple(inputs) if value is not None else (*inputs, "values")
        super().__init__(
            text, operation=operation, library=library, inputs=names, outputs=outputs, is_checked=is_checked
        )
        self._has_values = value is None
        self._reduce: Reduce = reduce
        self._asked = ArrayFunction(operation, self._compute)

    def __call__(self, x: AccelRef, *arguments: ExpressionArgument, shape: Ints) -> Call[AccelRef]:
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

    def _compute(self, *arguments: ExpressionArgument, shape: Ints) -> Compute[AccelRef]:
        return self._message(self, arguments, (), shape)

    def plan(self, planner: Planner, message: Compute[AccelRef]) -> Planned[AccelRef]:
        """Validate the arguments of a call, and lower it; see `Operation.plan`."""
        x: Any = message.arguments[0]
        planner.update(self.inputs[0], x)
        # A second run writes the same values to the same places, if the operation reads nothing else there.
        other_blocks = [
            argument.block for argument in message.arguments[1:] if isinstance(argument, AccelRef)
        ]
        planner.is_overwriting = self._reduce in ("set", "min", "max") and x.block not in other_blocks
        taken = take(planner, self.parsed, message.arguments, message.shape)
        resolved = self.known_of(planner.name, taken, ())
        out = taken.loaded[0]
        planner.distinct(taken.loaded_names[0], out, **dict(zip(taken.array_names, taken.lying, strict=True)))
        spec = ExpressionSpec(resolved.program, (), taken.arrays, (), (), (out,), taken.scalars)
        return Planned(spec, x)

    def _find_types(self, signature: Strs, *_: str | None) -> KnownExpression:
        operation, arguments = self.operation, tuple(map(Argument.decode, signature))
        dtype, kind = arguments[0].dtype, arguments[-1].kind
        if self._has_values and not _becomes(kind, dtype):
            label = f"a Python {kind.value}" if isinstance(kind, Weak) else f"of {kind}"
            how = f"np.{dtype}(...)" if isinstance(kind, Weak) else f'await values.cast("{dtype}")'
            raise TypeError(
                f"{operation}: values is {label}, which does not become {dtype} of x; convert it: {how}"
            )
        if self._reduce in ("min", "max") and dtype.kind == "complex":
            raise TypeError(f"{operation}: reduce={self._reduce!r}: values of {dtype} cannot be compared")
        named_arguments = dict(zip(self.inputs, arguments, strict=True))

        def of(arguments: tuple[Argument, ...]) -> TypedExpression:
            kinds = tuple([argument.kind for argument in arguments])
            return unrolled(typed(self.parsed, kinds, (None, dtype), self._is_checked))

        expression = find_types(operation, of, named_arguments)
        program = scatter_program(expression, self._reduce)
        if self._has_values and kind is Weak.int and dtype.kind in ("int", "uint"):
            # A result is converted as an array is, which would wrap around.
            values_number = len(arguments) - 1
            [step] = [
                n
                for n, candidate in enumerate(expression.steps)
                if (candidate.function, candidate.value) == ("argument", values_number)
            ]
            program = attrs.evolve(program, bounds=(*program.bounds, (step, dtype)))
        return KnownExpression(
            encode_program(program, arguments), (), program, has_places=True, is_whole=True
        )


def _becomes(kind: ArgumentType, dtype: DType) -> bool:
    """Return whether values become elements without losing their kind."""
    if isinstance(kind, Weak):
        return _RANKS[kind.value] <= _RANKS[dtype.kind]
    return bool(np.can_cast(kind.dtype, dtype.dtype, "same_kind"))
