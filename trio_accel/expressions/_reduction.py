"""Expressions along axes: reductions, and expressions of rows, which go on with what was reduced."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from ..backends.base import DType, DTypeLike, Ints, Strs, element
from ..backends.base import expressions as base
from ..backends.base.contract.ops import ReductionSpec, RowsSpec
from ..backends.base.expressions import (
    COUNT,
    WIDE,
    Argument,
    Expression,
    RowExpression,
    SpecializedReduction,
    SpecializedRows,
    TypedReduction,
    TypedRows,
    found,
    pack_scalars,
    typed_rows,
)
from ..devices import AccelRef, Call, Function, Operation, Planned, Planner, device_of
from ..devices.operations._plan_source import written
from ._arguments import (
    ARRAYS,
    ExpressionArgument,
    Taken,
    argument_of,
    axes_of,
    bind,
    broadcast,
    check_reduced,
    common,
    find_types,
    reduced,
    result_dtype,
    served_by,
    take,
)
from ._elementwise import Elementwise

__all__ = [
    "AlongAxes", "ComputeReduction", "ComputeRows", "Reduction", "Rowwise", "scaled", "squares",
]  # fmt: skip

_RESERVED = ("axis", "keepdims", "out")


class AlongAxes(ABC):
    """The common part of reductions and expressions of rows: they make messages, and plan them.

    Attributes:
        operation: Name of the operation.
        inputs: Names of the arguments, in order.
    """

    __slots__ = ("_message", "inputs", "operation")

    inputs: Strs
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


def _take(planner: Planner, expression: Expression | RowExpression, message: ComputeReduction) -> Taken:
    """Take the arguments, of which one must be an array.

    Raises:
        TypeError: All are numbers, which have no axes.
    """
    taken = take(planner, expression, message.arguments)
    if not taken.arrays:
        raise TypeError(f"{planner.name}: at least one argument must be an array")
    return taken


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
        declared: Its expressions, parsed.
        dtype: Type that values are converted to before they are combined.
    """

    __slots__ = ("_asked", "_known", "declared", "dtype")

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
        self.declared: base.Reduction = base.Reduction.parse(
            text, reduce, identity=identity, post=post, inputs=None if inputs is None else tuple(inputs)
        )
        self.inputs: Strs = self.declared.map.inputs
        reserved = [name for name in self.inputs if name in _RESERVED]
        if reserved:
            raise ValueError(f"an input cannot have the name {reserved[0]}: that is an argument of each call")
        self.dtype: DType | None = None if dtype is None else DType.of(dtype)
        self._message = served_by(ComputeReduction, library)
        self.operation: str = operation
        self._asked = Function(operation, self.compute)
        # The key is the types of the arguments, and of a result that is given.
        self._known = functools.lru_cache(256)(self._find_types)

    def __repr__(self) -> str:
        how = self.declared.name if self.declared.combine is None else self.declared.combine.text
        values = self.declared.map.text.strip()
        return f"<Reduction {self.operation}({', '.join(self.inputs)}): {how} of {values}>"

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
        taken = _take(planner, self.declared.map, message)
        axes = axes_of(name, taken.shape, message.axis, is_one=self.declared.is_index)
        specialized, text = self._known(
            taken.signature, None if message.out is None else message.out.dtype.value
        )
        taken.check_held(name, specialized.typed.map)
        if not self.declared.takes_nothing and any(taken.shape[axis] == 0 for axis in axes):
            raise ValueError(f"{name}: there are no elements along axes {axes}, and it has no identity")
        shape = reduced(taken.shape, axes, keepdims=message.keepdims)
        out = planner.output(shape, specialized.typed.dtype, message.out)
        if message.out is not None:
            planner.distinct("out", out.spec, **dict(zip(taken.array_names, taken.lying, strict=True)))
        return Planned(ReductionSpec(text, axes, taken.arrays, out.spec, taken.scalars), out)

    def _find_types(self, signature: Strs, out: str | None) -> tuple[SpecializedReduction, str]:
        given = dict(zip(self.inputs, map(Argument.decode, signature), strict=True))

        def of(arguments: tuple[Argument, ...]) -> TypedReduction:
            return SpecializedReduction(self.declared, arguments, self.dtype, None).typed

        found = find_types(self.operation, of, given)
        if self.declared.identity is not None:
            element(self.operation, "identity", self.declared.identity, found.accumulator)
        wanted = None if out is None else DType(out)
        result = result_dtype(self.operation, "the result", found.dtype, None, wanted)
        specialized = SpecializedReduction(self.declared, tuple(given.values()), self.dtype, result)
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


# A launch makes a row by a block. Fewer rows than this, and longer ones, would leave most of a GPU idle for
# longer than two further launches take.
_FEW_ROWS, _LONG_ROW = 256, 1 << 17
_WIDEST = DType.float64, DType.complex128
_LARGE, _SMALL, _STEP = 1e150, 1e-140, 2.0**600


def scaled(value: str, to: str, factor: str, *, raises: bool = True) -> str:
    """Write statements that bring the elements of rows where neither squares nor sums of them overflow.

    The factor is a power of two, and 1 for almost all rows, so that no digit changes.

    Args:
        value: Name of the elements, of float64 or complex128.
        to: Name of what they become.
        factor: Name of the factor.
        raises: Whether it makes small elements larger, too.
    """
    total = f"{factor}_of"
    small = f"where({total} < {_SMALL}, {_STEP}, 1.0)" if raises else "1.0"
    return (
        f"{total} = sum(abs({value})); {factor} = where({total} > {_LARGE}, {1 / _STEP}, {small});"
        f"{to} = {value} * {factor}; "
    )


def squares(name: str) -> str:
    """Write the squares of absolute values."""
    return f"real({name}) * real({name}) + imag({name}) * imag({name})"


class Rowwise(AlongAxes):
    """An expression of rows: ``Rowwise("e = exp(x - max(x)); y = e / sum(e)", ["x"], ...)``.

    ``sum(...)`` and the other `REDUCTIONS` are along the axes of the call, and what they find broadcasts
    back. The result is of the shape of the arrays. Where the last statement reads none of their elements, it
    is of the reduced shape. ``n`` is the count of elements that are reduced.

    It is one launch. Fewer than 256 rows of more than 131072 elements each are made by one launch for each
    reduction, and one for the result: then a row is made by the whole device.

    Args:
        text: The statements; see `RowExpression.parse`.
        inputs: Names of the arguments, in order.
        precision: The least that arguments are computed in, ``"float32"`` or ``"float64"``. The result is
            rounded once, to the dtype that it would have without. None for the dtypes of the arguments, as
            `Elementwise` and `Reduction` compute.
        operation: Name of the operation, such as ``"arrays.softmax"``.
        library: Import path of the library actor that serves it.
        wide: The statements for arrays that are of float64 or complex128 themselves, where squares of others
            do not overflow; by default the same. Where `text` does not overflow, both make the same.

    Raises:
        ValueError: The expression has something that is not allowed.

    Attributes:
        operation: Name of the operation.
    """

    def __init__(
        self,
        text: str,
        inputs: Sequence[str],
        *,
        precision: str | None,
        operation: str,
        library: str = ARRAYS,
        wide: str | None = None,
    ) -> None:
        self._rows = RowExpression.parse(text, tuple(inputs))
        self._wide_text = wide
        if not self._rows.stages:
            raise ValueError(f"the expression of rows reduces nothing: {text}")
        self._is_index = any(stage.is_index for stage in self._rows.stages)
        self._wide: Mapping[str, DType] = {} if precision is None else WIDE[precision]
        self._library = library
        self._message = served_by(ComputeRows, library)
        self.operation: str = operation
        self.inputs: Strs = self._rows.inputs
        # The key is the types of the arguments, and of a result that is given.
        self.specialize: Callable[[Strs, DType | None], tuple[SpecializedRows, str]]
        self.specialize = functools.lru_cache(256)(self._specialized)
        self._steps = functools.lru_cache(256)(self._made_steps)

    @functools.cached_property
    def _wide_rows(self) -> RowExpression:
        # It is parsed at first use, as few programs use it and all import the package.
        text = self._wide_text
        return self._rows if text is None else RowExpression.parse(text, self._rows.inputs)

    async def ask(self, message: ComputeReduction) -> AccelRef:
        """Compute a message of `compute` on the device of its arrays, in steps where these pay.

        Raises:
            TypeError: A wrong argument, or a function has no such dtypes.
            ValueError: Shapes that do not broadcast, an axis that there is not, or no elements where a
                reduction has no identity.
            NotSupportedError: float8.
        """
        device = device_of(self.operation, *message.arguments, message.out)
        arrays = [each for each in message.arguments if isinstance(each, (AccelRef, np.ndarray))]
        shape = common(self.operation, arrays)
        axes = axes_of(self.operation, shape, message.axis, is_one=self._is_index)
        count = math.prod(shape[axis] for axis in axes)
        if count <= _LONG_ROW or math.prod(shape) // count >= _FEW_ROWS:
            return await device.ask(message)
        return await self._in_steps(message, shape, axes)

    async def _in_steps(self, message: ComputeReduction, shape: Ints, axes: Ints) -> AccelRef:
        """Compute it by a launch for each reduction, and one for the result."""
        given, out = [broadcast(each, shape) for each in message.arguments], message.out
        signature = tuple(map(partial(argument_of, self.operation), self._rows.inputs, given))
        reductions, last, is_whole = self._steps(signature, None if out is None else out.dtype)
        kept = shape if is_whole else reduced(shape, axes, keepdims=True)
        made = kept if is_whole or message.keepdims else reduced(shape, axes)
        if out is not None and out.shape != made:
            raise ValueError(f"{self.operation}: out must have shape {made}, got shape {out.shape}")
        values: dict[str, Any] = dict(zip(self._rows.inputs, given, strict=True))
        values[COUNT] = math.prod(shape[axis] for axis in axes)
        for number, reduction in enumerate(reductions):
            taken = [values[name] for name in reduction.inputs]
            values[found(number)] = await reduction(*taken, axis=message.axis, keepdims=True)
        taken = [values[name] for name in last.inputs]
        if out is not None:
            await last(*taken, out=out if out.shape == kept else out.reshape(kept))
            return out
        result = await last(*taken)
        return result if made == kept else result.reshape(made)

    def plan(self, planner: Planner, message: ComputeReduction) -> Planned[AccelRef]:
        """Validate the arguments of a call, and lower it; see `Operation.plan`."""
        name, out = planner.name, message.out
        taken = _take(planner, self._rows, message)
        axes = axes_of(name, taken.shape, message.axis, is_one=self._is_index)
        specialized, text = self.specialize(taken.signature, None if out is None else out.dtype)
        count = math.prod(taken.shape[axis] for axis in axes)
        for part, inputs in specialized.typed.parts:
            taken.check_held(name, part, inputs, {COUNT: count})
        arrays = dict(zip(taken.array_names, taken.lying, strict=True))
        shape = taken.shape
        if not specialized.is_whole:
            shape = reduced(shape, axes, keepdims=message.keepdims)
        made, _ = written(planner, "out", out, (shape, specialized.result))
        if specialized.is_whole:
            # Elements of the result are written when those of its row have been read.
            arrays = {name: array for name, array in arrays.items() if array != made.spec}
        if out is not None:
            planner.distinct("out", made.spec, **arrays)
        if not count and 0 not in shape and not specialized.takes_nothing:
            raise ValueError(f"{name}: there are no elements along axes {axes} of shape {taken.shape}")
        scalars = taken.scalars + pack_scalars([count], [DType.int64])
        return Planned(RowsSpec(text, axes, taken.arrays, made.spec, scalars), made)

    def chosen(self, arguments: Sequence[Argument]) -> RowExpression:
        """Return the statements for arguments of certain types."""
        is_wide = any(each.is_array and each.dtype in _WIDEST for each in arguments)
        return self._wide_rows if is_wide else self._rows

    def _specialized(self, signature: Strs, out: DType | None) -> tuple[SpecializedRows, str]:
        """Find the types: those that are computed in, and that of the result, which is NumPy's."""
        arguments = tuple(map(Argument.decode, signature))
        given = dict(zip(self._rows.inputs, arguments, strict=True))
        casts = {
            name: self._wide[each.dtype.value]
            for name, each in given.items()
            if each.is_array and each.dtype.value in self._wide
        }
        # Whole numbers are floating here: differences of unsigned ones would wrap around.
        wide = [
            each if name not in casts or each.dtype.is_inexact else Argument(casts[name], True)
            for name, each in given.items()
        ]

        def of(arguments: tuple[Argument, ...]) -> TypedRows:
            return typed_rows(self._rows, [each.kind for each in arguments])

        plain = find_types(self.operation, of, given, wide)
        result = result_dtype(self.operation, "the result", plain.dtype, None, out) or plain.dtype
        chosen = self.chosen(arguments)
        usual = None if chosen is self._rows else self._rows.widened(casts)
        specialized = SpecializedRows(chosen.widened(casts), arguments, result, usual)
        return specialized, specialized.encode()

    def _made_steps(
        self, signature: Strs, out: DType | None
    ) -> tuple[list[Reduction], Elementwise[AccelRef], bool]:
        """Return a reduction for each of the rows', what makes the result, and whether that is whole."""
        specialized, _ = self.specialize(signature, out)
        rows, named = specialized.rows, dict[str, Any](operation=self.operation, library=self._library)
        reductions = [
            Reduction(stage.map.text, stage.name, inputs=stage.map.inputs, **named) for stage in rows.stages
        ]
        last = Elementwise[AccelRef](
            rows.last.text, inputs=rows.last.inputs, dtypes=specialized.result, **named
        )
        return reductions, last, specialized.is_whole


class ComputeRows(ComputeReduction):
    """One computation of an expression of rows, which is its `reduction`; see `Rowwise.compute`."""

    __slots__ = ()
