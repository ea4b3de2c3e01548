"""Expressions along axes: reductions, and expressions of rows, which use the reduced values."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..backends.base import DType, DTypeLike, Ints, Strs
from ..backends.base import expressions as base
from ..backends.base.contract.ops import ExpressionSpec
from ..backends.base.expressions import COUNT, Argument, parse_reduction, parts_of
from ..devices import AccelRef, ArrayFunction, Call, Device, Planned, Planner, device_of
from ..devices.operations._plan_source import written
from ._arguments import (
    ARRAYS,
    ExpressionArgument,
    argument_of,
    axes_of,
    bind,
    broadcast,
    check_reduced,
    common,
    reduced,
    take,
)
from ._expression import Compute, Elementwise, Expression, Later

__all__ = ["Reduction", "scaled", "squares"]

_RESERVED = ("axis", "keepdims", "out")
# A launch makes a row by a block. Fewer rows than this, and longer ones, would leave most of a GPU idle for
# longer than two further launches take.
_FEW_ROWS, _LONG_ROW = 256, 1 << 17


class Reduction(Expression[AccelRef]):
    """An expression along axes: ``Reduction("x * y", "sum", ...)``, ``Reduction("x / sum(x)", ...)``.

    With `reduce`, the text makes values, and the result is their reduction, rounded once. Without,
    ``sum(...)`` and the other `REDUCTIONS` in the text are along the axes of the call, and their values
    broadcast back. The result has the shape of the arrays; or the reduced shape, if the last statement reads
    none of their elements. ``n`` is the number of reduced elements. Several results have one shape: that of
    the arrays, if any of them reads elements.

    It is one launch. But fewer than 256 rows of more than 131072 elements each take one launch for each
    reduction, and one for the result, so that the whole device works at each row.

    Args:
        text: The values to reduce, or statements with reductions.
        reduce: One of `REDUCTIONS`, or an expression of ``a`` and ``b``; None for statements.
        operation: Name of the operation, such as ``"jit.norm"``.
        post: Last step of the result, before it is rounded: an expression of ``a``, and of ``n``, the number
            of elements. Not allowed for a mean.
        identity: With an expression: the result of no elements.
        inputs: Names of the arguments, in order; None for the order in which the source reads them.
        dtype: Type that values are converted to before they are combined; None for NumPy's choice.
        **options: See `Expression`; with `outputs`, a call returns a tuple, and takes no `out`.

    Raises:
        ValueError: The expression contains something that is not allowed; the message shows the place.
        TypeError: Devices lack this dtype.

    Attributes:
        reduce: As it was given.
        post: As it was given.
        dtype: Type that values are converted to before they are combined.
    """

    __slots__ = ("_library", "_parts", "dtype", "post", "reduce")

    def __init__(
        self,
        text: str | base.ParsedExpression,
        reduce: str | None = None,
        *,
        operation: str,
        post: str | None = None,
        identity: complex | None = None,
        inputs: Sequence[str] | None = None,
        dtype: DTypeLike | None = None,
        **options: Any,
    ) -> None:
        self.reduce: str | None = reduce
        self.post: str | None = post
        self.dtype: DType | None = None if dtype is None else DType.of(dtype)
        names = None if inputs is None else tuple(inputs)
        if reduce is not None and isinstance(text, str):
            text = parse_reduction(text, reduce, identity=identity, post=post, inputs=names, dtype=self.dtype)
        super().__init__(text, operation=operation, inputs=inputs, axes=True, reserved=_RESERVED, **options)
        if not self.parsed.reductions:
            raise ValueError(f"the expression reduces nothing along axes: {text}")
        self._library: str = options.get("library", ARRAYS)
        self._parts = functools.lru_cache(256)(self._cut)
        self._asked = ArrayFunction(operation, self.compute)

    def __repr__(self) -> str:
        values = self.text.strip()
        description = values if self.reduce is None else f"{self.reduce} of {values}"
        return f"<Reduction {self.operation}({', '.join(self.inputs)}): {description}>"

    def compute(
        self,
        *arguments: ExpressionArgument,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        out: AccelRef | None = None,
        **named: ExpressionArgument,
    ) -> Compute[AccelRef]:
        """Make the message that computes it, in one launch: ``await device.ask(reduction.compute(...))``.

        Args:
            *arguments: Arrays and numbers, in the order of the inputs; arrays broadcast against each other.
            axis: Axis or axes to reduce; None for all.
            keepdims: Whether reduced axes stay, with one element, in a result of the reduced shape.
            out: Array to write to.
            **named: Arguments by their names.

        Raises:
            TypeError: There are too few or too many arguments, or one with an unknown name.
        """
        values = bind(self.operation, self.inputs, arguments, named, options=_RESERVED)
        check_reduced(self.operation, keepdims, out)
        if out is not None and not self._is_single:
            raise TypeError(f"{self.operation}: out is for one result, and it has {len(self.outputs)}")
        outs = (out, *[None] * (len(self.outputs) - 1))
        return self._message(self, values, outs, None, axis, keepdims)

    def __call__(
        self,
        *arguments: ExpressionArgument,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        out: AccelRef | None = None,
        **named: ExpressionArgument,
    ) -> Call[AccelRef]:
        """Compute it on the device of its arrays, once it is awaited.

        Sums and products of float16, bfloat16 and float32 are computed in float64, sums and products of
        complex64 in complex128, and rounded once. The order of the elements differs between devices and from
        NumPy's.

        Args:
            *arguments: Arrays and numbers, in the order of `inputs`; arrays broadcast against each other.
            axis: Axis or axes to reduce; None for all. ``argmin`` and ``argmax`` take one, or None.
            keepdims: Whether reduced axes stay, with one element.
            out: Array to write to; not for several results.
            **named: Arguments by their names.

        Returns:
            The result; the results, if outputs were named.

        Raises:
            TypeError: An argument is wrong, or there is no such reduction of these dtypes.
            ValueError: Shapes do not broadcast, an axis does not exist, or a reduction without an identity
                gets no elements.
            NotSupportedError: A dtype is float8.
        """
        keywords: dict[str, Any] = {**named, "axis": axis, "keepdims": keepdims, "out": out}
        return Call(self._asked, arguments, keywords)

    def plan(self, planner: Planner, message: Compute[AccelRef]) -> Planned[AccelRef]:
        """Validate the arguments of a call, and lower it; see `Operation.plan`."""
        name, out = planner.name, message.out[0]
        taken = take(planner, self.parsed, message.arguments)
        if not taken.arrays:
            raise TypeError(f"{name}: at least one argument must be an array")
        axes = axes_of(name, taken.shape, message.axis, is_one=self.parsed.is_index)
        resolved = self._known(taken.signature, *_dtypes_of(message.out))
        count = math.prod([taken.shape[axis] for axis in axes])
        taken.check_held(name, resolved.typed, count)
        shape = taken.shape
        if not resolved.is_whole:
            shape = reduced(shape, axes, keepdims=message.keepdims)
        if resolved.is_one_reduction:
            # Its kernels write elements without gaps.
            results = [planner.output(shape, resolved.dtypes[0], out)]
        elif out is None:
            results = [planner.output(shape, dtype) for dtype in resolved.dtypes]
        else:
            results = [written(planner, "out", out, (shape, resolved.dtypes[0]))[0]]
        if out is not None:
            arrays = zip(taken.array_names, taken.lying, strict=True)
            # With whole rows as the result, elements are written after the elements of their row were read.
            other_arrays = {
                name: array for name, array in arrays if not resolved.is_whole or array != results[0].spec
            }
            planner.distinct("out", results[0].spec, **other_arrays)
        if not count and not self.parsed.takes_nothing and 0 not in shape:
            raise ValueError(
                f"{name}: axes {axes} of shape {taken.shape} are empty, and the reduction has no identity"
            )
        specs = tuple([result.spec for result in results])
        spec = ExpressionSpec(resolved.program, axes, taken.arrays, (), specs, (), taken.scalars)
        # A call of several results is typed by its users.
        reply: Any = results[0] if self._is_single else tuple(results)
        return Planned(spec, reply)

    async def ask(self, message: Compute[AccelRef]) -> AccelRef:
        """Compute a message of `compute` on the device of its arrays, in several launches if that pays.

        Raises:
            TypeError: An argument is wrong, or a function does not support the dtypes.
            ValueError: Shapes do not broadcast, an axis does not exist, or a reduction without an identity
                gets no elements.
            NotSupportedError: A dtype is float8.
        """
        out = message.out[0]
        device = device_of(self.operation, *message.arguments, out)
        arrays = [argument for argument in message.arguments if isinstance(argument, (AccelRef, np.ndarray))]
        shape = common(self.operation, arrays)
        axes = axes_of(self.operation, shape, message.axis, is_one=self.parsed.is_index)
        count = math.prod([shape[axis] for axis in axes])
        if count <= _LONG_ROW or math.prod(shape) // count >= _FEW_ROWS:
            return await device.ask(message)
        arguments = [broadcast(argument, shape) for argument in message.arguments]
        signature = tuple(map(partial(argument_of, self.operation), self.inputs, arguments))
        resolved = self._known(signature, *_dtypes_of(message.out))
        *reductions, _ = self._parts(signature, *_dtypes_of(message.out))
        on_device = {
            name
            for name, argument in zip(self.inputs, arguments, strict=True)
            if isinstance(argument, AccelRef)
        }
        # A reduction of numbers, or of another reduction's result, counts elements that it does not read.
        if resolved.is_one_reduction or not all(
            on_device.intersection(reduction.inputs) for reduction in reductions
        ):
            return await device.ask(message)
        result: AccelRef = await self._in_steps(
            device, message, arguments, shape, resolved.is_whole, signature
        )
        return result

    async def _in_steps(
        self,
        device: Device,
        message: Compute[AccelRef],
        arguments: Sequence[ExpressionArgument],
        shape: Ints,
        is_whole: bool,
        signature: Strs,
    ) -> Any:
        """Compute it by a launch for each reduction, and one for the results."""
        out, axes = message.out[0], axes_of(self.operation, shape, message.axis)
        kept_shape = shape if is_whole else reduced(shape, axes, keepdims=True)
        result_shape = kept_shape if is_whole or message.keepdims else reduced(shape, axes)
        if out is not None and out.shape != result_shape:
            raise ValueError(f"{self.operation}: out must have shape {result_shape}, got shape {out.shape}")
        *reductions, elementwise = self._parts(signature, *_dtypes_of(message.out))
        count = math.prod([shape[axis] for axis in axes])
        values: dict[str, Any] = {COUNT: count, **dict(zip(self.inputs, arguments, strict=True))}
        for reduction in reductions:
            taken = [values[name] for name in reduction.inputs]
            (name,) = reduction.outputs
            values[name] = await reduction(*taken, axis=message.axis, keepdims=True)
        taken = [values[name] for name in elementwise.inputs]
        if out is not None:
            await elementwise(*taken, out=out if out.shape == kept_shape else out.reshape(kept_shape))
            return out
        # The result may only read numbers.
        results: Any = await device.ask(elementwise.compute(*taken, shape=kept_shape))
        several: Any = [results] if self._is_single else results
        reshaped: Any = [x if result_shape == kept_shape else x.reshape(result_shape) for x in several]
        return reshaped[0] if self._is_single else tuple(reshaped)

    def _cut(self, signature: Strs, *out: str | None) -> list[Any]:
        """Return a reduction for each of the expression's, and the expression that makes the results."""
        arguments = tuple(map(Argument.decode, signature))
        kinds = {name: argument.kind for name, argument in zip(self.inputs, arguments, strict=True)}
        expression, _ = self._widened(self.chosen(arguments), kinds)
        *reductions, final_part = parts_of(expression)
        named: dict[str, Any] = {"operation": self.operation, "library": self._library}
        dtypes = dict(zip(self.outputs, self._known(signature, *out).dtypes, strict=True))
        several: Any = None if self._is_single else self.outputs
        return [
            *[Reduction(part, **named) for part in reductions],
            Elementwise[Any](final_part, dtypes=dtypes, outputs=several, **named),
        ]


def _dtypes_of(out: Sequence[AccelRef | None]) -> list[str | None]:
    return [None if array is None else array.dtype.value for array in out]


_SCALE_DOWN_ABOVE, _SCALE_UP_BELOW, _STEP = 1e150, 1e-140, 2.0**600


class LaterReduction(Later, Reduction):
    """A `Reduction` that is parsed at its first use."""


def scaled(value: str, to: str, factor: str, *, raises: bool = True) -> str:
    """Write statements that scale the elements of rows so that their squares and sums do not overflow.

    The factor is a power of two, and 1 for almost all rows, so that no digit changes.

    Args:
        value: Name of the elements, of float64 or complex128.
        to: Name of the scaled elements.
        factor: Name of the factor.
        raises: Whether it also makes small elements larger.
    """
    total = f"{factor}_of"
    rise = f"where({total} < {_SCALE_UP_BELOW}, {_STEP}, 1.0)" if raises else "1.0"
    return (
        f"{total} = sum(abs({value})); {factor} = where({total} > {_SCALE_DOWN_ABOVE}, {1 / _STEP}, {rise});"
        f"{to} = {value} * {factor}; "
    )


def squares(name: str) -> str:
    """Write the squares of absolute values."""
    return f"real({name}) * real({name}) + imag({name}) * imag({name})"
