"""Expressions that are reduced along axes."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import attrs

from ..backends.base import DType, DTypeLike
from ..backends.base import expressions as base
from ..backends.base.contract.ops import ReductionSpec
from ..backends.base.contract.values import element
from ..backends.base.expressions import Argument, SpecializedReduction, TypedReduction
from ..devices import AccelRef, Call, Operation, Planned, Planner
from ..devices.operations._calls import Function
from ._arguments import (
    ARRAYS,
    ExpressionArgument,
    axes_of,
    bind,
    check_reduced,
    find_types,
    reduced,
    result_dtype,
    served_by,
    take,
)

__all__ = ["AlongAxes", "ComputeReduction", "Reduction"]

_RESERVED = ("axis", "keepdims", "out")


class AlongAxes(ABC):
    """The common part of reductions and expressions of rows: they make messages, and plan them.

    Attributes:
        operation: Name of the operation.
        inputs: Names of the arguments, in order.
    """

    __slots__ = ("_message", "inputs", "operation")

    inputs: tuple[str, ...]
    operation: str
    _message: type[ComputeReduction]

    @abstractmethod
    def plan(self, planner: Planner, message: ComputeReduction) -> Planned[AccelRef]:
        """Validate the arguments of a call, and lower it; see `Operation.plan`."""

    def compute(
        self,
        *arguments: ExpressionArgument,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        out: AccelRef | None = None,
        **named: ExpressionArgument,
    ) -> ComputeReduction:
        """Make the message that computes it, in one launch: ``await device.ask(reduction.compute(...))``.

        Args:
            *arguments: Arrays and numbers, in the order of the inputs; arrays broadcast against each other.
            axis: Axis or axes to reduce; None for all.
            keepdims: Whether reduced axes stay, with one element, in a result of the reduced shape.
            out: Array to write to.
            **named: Arguments by their names.

        Raises:
            TypeError: Too few or too many arguments, or one that there is not.
        """
        given = bind(self.operation, self.inputs, arguments, named, options=_RESERVED)
        check_reduced(self.operation, keepdims, out)
        return self._message(self, given, axis, keepdims, out)


class Reduction(AlongAxes):
    """A reduction of an expression over arrays: ``Reduction("x * y", "sum", ...)``.

    On CUDA it is compiled at its first call with certain dtypes and layouts; on the CPU, NumPy computes it.

    Args:
        text: The values to reduce: an expression with one result.
        reduce: One of `REDUCTIONS`, or an expression of ``a`` and ``b``.
        post: Last step of the result, before it is rounded: an expression of ``a``, and of ``n``, the count
            of elements. A mean has none.
        identity: With an expression: the result of no elements.
        inputs: Names of the arguments, in order; None for the order in which the text reads them.
        dtype: Type that values are converted to before they are combined; None for NumPy's choice.
        operation: Name of the operation, such as ``"jit.norm"``.
        library: Import path of the library actor that serves it.

    Raises:
        ValueError: The expression has something that is not allowed; the message shows where.
        TypeError: There is no such dtype.

    Attributes:
        operation: Name of the operation.
        inputs: Names of its arguments, in order.
    """

    __slots__ = ("_asked", "_dtype", "_known", "_reduction")

    def __init__(
        self,
        text: str,
        reduce: str = "sum",
        *,
        post: str | None = None,
        identity: complex | None = None,
        inputs: Sequence[str] | None = None,
        dtype: DTypeLike | None = None,
        operation: str,
        library: str = ARRAYS,
    ) -> None:
        self._reduction = base.Reduction.parse(
            text, reduce, identity=identity, post=post, inputs=None if inputs is None else tuple(inputs)
        )
        self.inputs: tuple[str, ...] = self._reduction.map.inputs
        reserved = [name for name in self.inputs if name in _RESERVED]
        if reserved:
            raise ValueError(f"an input cannot have the name {reserved[0]}: that is an argument of each call")
        self._dtype = None if dtype is None else DType.of(dtype)
        self._message = served_by(ComputeReduction, library)
        self.operation: str = operation
        self._asked = Function(operation, self.compute)
        # The key is the types of the arguments, and of a result that is given.
        self._known = functools.lru_cache(256)(self._find_types)

    def __repr__(self) -> str:
        how = self._reduction.name if self._reduction.combine is None else self._reduction.combine.text
        return f"<Reduction {self.operation}({', '.join(self.inputs)}): {how} of {self._reduction.map.text}>"

    def __call__(
        self,
        *arguments: ExpressionArgument,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        out: AccelRef | None = None,
        **named: ExpressionArgument,
    ) -> Call[AccelRef]:
        """Compute it on the device of its arrays, once it is awaited.

        Sums and products of float16, bfloat16 and float32 are made in float64, those of complex64 in
        complex128, and rounded once. The order of the elements differs between devices and from NumPy's.

        Args:
            *arguments: Arrays and numbers, in the order of `inputs`; arrays broadcast against each other.
            axis: Axis or axes to reduce; None for all. ``argmin`` and ``argmax`` take one, or None.
            keepdims: Whether reduced axes stay, with one element.
            out: Array to write to.
            **named: Arguments by their names.

        Returns:
            The result.

        Raises:
            TypeError: A wrong argument, or there is no such reduction of these dtypes.
            ValueError: Shapes that do not broadcast, an axis that there is not, or no elements where the
                reduction has no identity.
            NotSupportedError: float8.
        """
        given: dict[str, Any] = {**named, "axis": axis, "keepdims": keepdims, "out": out}
        return Call(self._asked, arguments, given)

    def plan(self, planner: Planner, message: ComputeReduction) -> Planned[AccelRef]:
        """Validate the arguments of a call, and lower it; see `Operation.plan`."""
        name = planner.name
        taken = take(planner, self._reduction.map, message.arguments)
        if not taken.arrays:
            raise TypeError(f"{name}: at least one argument must be an array")
        axes = axes_of(name, taken.shape, message.axis, is_one=self._reduction.is_index)
        specialized, text = self._known(
            taken.signature, None if message.out is None else message.out.dtype.value
        )
        taken.check_held(name, specialized.typed.map)
        if not self._reduction.takes_nothing and any(taken.shape[axis] == 0 for axis in axes):
            raise ValueError(f"{name}: there are no elements along axes {axes}, and it has no identity")
        shape = reduced(taken.shape, axes, keepdims=message.keepdims)
        out = planner.output(shape, specialized.typed.dtype, message.out)
        if message.out is not None:
            planner.distinct("out", out.spec, **dict(zip(taken.array_names, taken.lying, strict=True)))
        return Planned(ReductionSpec(text, axes, taken.arrays, out.spec, taken.scalars), out)

    def _find_types(self, signature: tuple[str, ...], out: str | None) -> tuple[SpecializedReduction, str]:
        given = dict(zip(self.inputs, map(Argument.decode, signature), strict=True))

        def of(arguments: tuple[Argument, ...]) -> TypedReduction:
            return SpecializedReduction(self._reduction, arguments, self._dtype, None).typed

        found = find_types(self.operation, of, given)
        if self._reduction.identity is not None:
            element(self.operation, "identity", self._reduction.identity, found.accumulator)
        wanted = None if out is None else DType(out)
        result = result_dtype(self.operation, "the result", found.dtype, None, wanted)
        specialized = SpecializedReduction(self._reduction, tuple(given.values()), self._dtype, result)
        return specialized, specialized.encode()


@attrs.frozen(eq=False)
class ComputeReduction(Operation[Any, AccelRef]):
    """One computation of a reduction; see `Reduction.compute`, which makes one.

    Attributes:
        reduction: The reduction.
        arguments: One for each of its inputs.
        axis: Axis or axes to reduce; None for all.
        keepdims: Whether reduced axes stay.
        out: Array to write to; None for a new one.
    """

    reduction: AlongAxes
    arguments: tuple[ExpressionArgument, ...]
    axis: int | Sequence[int] | None
    keepdims: bool
    out: AccelRef | None

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self.reduction.operation

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Find types and axes, and name the result."""
        return self.reduction.plan(planner, self)
