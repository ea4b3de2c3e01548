"""Sums and products up to each element, differences of neighbours, and reductions of segments."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

import numpy as np

from ..backends.base import DType, DTypeLike
from ..backends.base.contract.ops import ArraySpec, Combination, Scan, ScanSpec, SegmentSpec
from ..backends.base.expressions import evaluate, parse, typed
from ..devices import (
    AccelRef,
    Operand,
    Planned,
    Planner,
    composed,
    device_of,
    operation,
    operation_like,
)
from ..expressions import Elementwise, ExpressionArgument, check_array, on_device, promoted_dtype
from ._actor import ArraysActor
from ._checks import axis_of, bounded_integer, check_real, flag, placed, summed_dtype
from ._manipulation import concat

__all__ = [
    "cumulative_logsumexp",
    "cumulative_max",
    "cumulative_min",
    "cumulative_prod",
    "cumulative_sum",
    "diff",
    "linear_recurrence",
    "scan",
    "segmented_reduce",
]


def _plan_scan(message: Any, planner: Planner, combine: Scan) -> Planned[AccelRef]:
    name, x = planner.name, planner.read("x", message.x)
    axis = _axis(name, x, message.axis)
    if combine in ("sum", "prod"):
        dtype = summed_dtype(name, x.dtype, message.dtype)
        extra = flag(name, "include_initial", message.include_initial)
    else:
        check_real(name, x=x)
        extra, dtype = False, x.dtype if combine != "logaddexp" or x.dtype.is_inexact else DType.float64
    if x.dtype.kind == "complex" and dtype.kind != "complex":
        raise TypeError(f"{name}: dtype must be complex for an array of {x.dtype}, got {dtype}")
    shape = (*x.shape[:axis], x.shape[axis] + extra, *x.shape[axis + 1 :])
    out = planner.output(shape, dtype, message.out)
    planner.distinct("out", out.spec, x=x)
    return Planned(ScanSpec(combine, axis, x, out.spec), out)


def _of(combine: Scan) -> Callable[[Any, Planner], Any]:
    return lambda message, planner: _plan_scan(message, planner, combine)


@operation(actor=ArraysActor, plan=_of("sum"))
async def cumulative_sum(
    x: Operand,
    *,
    axis: int | None = None,
    dtype: DTypeLike | None = None,
    include_initial: bool = False,
    out: AccelRef | None = None,
) -> AccelRef:
    """Add the elements up to each one along an axis, as the array API standard's ``cumulative_sum`` does.

    float16, bfloat16 and float32 are added in float64, complex64 in complex128, and each sum is rounded once.

    Args:
        x: The array.
        axis: The axis, from the end for a negative one. It may be omitted for a vector.
        dtype: Type that the elements are converted to before they are added. By default the dtype of `x`, but
            `int64` for integers and truth values, and `uint64` for unsigned integers.
        include_initial: Whether the result begins with 0, and has one more element along the axis.
        out: Array to write to; by default a new one.

    Returns:
        The sums.

    Raises:
        TypeError: Devices lack this dtype, or it is real and the array complex.
        ValueError: The axis is out of range, or `out` has another shape or shares memory with `x`.
        NotSupportedError: float8.
    """
    ...


@operation_like(cumulative_sum, plan=_of("prod"))
def cumulative_prod() -> None:
    """Multiply the elements up to each one along an axis: the array API standard's ``cumulative_prod``.

    float16, bfloat16 and float32 are multiplied in float64, complex64 in complex128, and each product is
    rounded once.

    Args:
        x: The array.
        axis: The axis, from the end for a negative one. It may be omitted for a vector.
        dtype: Type that the elements are converted to before they are multiplied; see `cumulative_sum`.
        include_initial: Whether the result begins with 1, and has one more element along the axis.
        out: Array to write to; by default a new one.

    Returns:
        The products.

    Raises:
        TypeError: Devices lack this dtype, or it is real and the array complex.
        ValueError: The axis is out of range, or `out` has another shape or shares memory with `x`.
        NotSupportedError: float8.
    """


@operation(actor=ArraysActor, plan=_of("max"))
async def cumulative_max(x: Operand, *, axis: int | None = None, out: AccelRef | None = None) -> AccelRef:
    """Find the largest of the elements up to each one along an axis, as `numpy.maximum.accumulate` does.

    From a NaN on, all are NaN.

    Args:
        x: The array, of a dtype with an order.
        axis: The axis, from the end for a negative one. It may be omitted for a vector.
        out: Array to write to; by default a new one.

    Returns:
        The largest elements, with the dtype of `x`.

    Raises:
        TypeError: `x` is complex.
        ValueError: The axis is out of range, or `out` has another shape or shares memory with `x`.
        NotSupportedError: float8.
    """
    ...


@operation_like(cumulative_max, plan=_of("min"))
def cumulative_min() -> None:
    """Find the smallest of the elements up to each one along an axis.

    See `cumulative_max` for arguments and errors.
    """


@operation_like(cumulative_max, plan=_of("logaddexp"))
def cumulative_logsumexp() -> None:
    """Compute the logarithm of the exponentials' sum up to each element: `torch.logcumsumexp`.

    No exponential is too large or too small. It is computed in float64 and rounded to the dtype of `x`; the
    result of integers is float64. See `cumulative_max` for arguments and errors.
    """


def _plan_segments(message: Any, planner: Planner) -> Planned[AccelRef]:
    name, x, offsets = planner.name, planner.read("x", message.x), planner.read("offsets", message.offsets)
    if x.ndim != 1 or offsets.ndim != 1 or not offsets.size:
        raise ValueError(
            f"{name}: x must be a vector, and offsets a vector of at least one, got shapes {x.shape} and "
            f"{offsets.shape}"
        )
    if offsets.dtype.kind not in ("int", "uint"):
        raise TypeError(f"{name}: offsets must have an integer dtype, got {offsets.dtype}")
    is_order = message.op in ("min", "max")
    if is_order:
        check_real(name, x=x)
    out = planner.output(
        (offsets.size - 1,), x.dtype if is_order else summed_dtype(name, x.dtype, None), message.out
    )
    planner.distinct("out", out.spec, x=x, offsets=offsets)
    return Planned(SegmentSpec(message.op, x, offsets, out.spec, planner.status(1)), out)


@operation(actor=ArraysActor, plan=_plan_segments)
async def segmented_reduce(
    x: Operand, offsets: Operand, op: Combination = "sum", *, out: AccelRef | None = None
) -> AccelRef:
    """Reduce segments of a vector: result i is of ``x[offsets[i]:offsets[i + 1]]``.

    Sums and products have the dtypes of `cumulative_sum`. NaN is the least and the largest element.

    Args:
        x: The vector.
        offsets: Integers in ascending order, from 0 to the length of `x`: where each segment begins, and
            where the last one ends.
        op: ``"sum"``, ``"prod"``, ``"min"`` or ``"max"``.
        out: Vector to write to; by default a new one.

    Returns:
        One element for each segment. A sum of no elements is 0, a product 1.

    Raises:
        TypeError: `offsets` does not have integers, or complex numbers have no least one.
        ValueError: An array is not a vector, there is no such `op`, or `out` has another shape.
        LibraryError: Offsets descend or are out of range, or an empty segment has no least or largest
            element.
        NotSupportedError: float8.
    """
    ...


@composed
async def diff(
    x: Operand, *, axis: int = -1, n: int = 1, prepend: Operand | None = None, append: Operand | None = None
) -> AccelRef:
    """Subtract neighbours along an axis, as the array API standard's ``diff`` does: one launch for each time.

    Args:
        x: An array of numbers. Unsigned numbers wrap around.
        axis: The axis, from the end for a negative one.
        n: The number of subtractions.
        prepend: Elements before `x` along the axis; they are joined first, see `concat`.
        append: Elements after `x`.

    Returns:
        ``x[i + 1] - x[i]`` along the axis, which loses `n` elements. If `n` is 0, a copy of `x` alone, as
        NumPy returns.

    Raises:
        TypeError: `x` is of truth values, or `n` is not an integer.
        ValueError: The axis is out of range, or `n` is negative.
        NotSupportedError: float8.
    """
    device = device_of("arrays.diff", x, prepend, append)
    n = bounded_integer("arrays.diff", "n", n)
    if n < 0:
        raise ValueError(f"arrays.diff: n must not be negative, got {n}")
    if not n:
        ref = await device.put(x) if isinstance(x, np.ndarray) else on_device(x)
        axis_of("arrays.diff", ref.spec, axis)
        return await ref.copy()
    if DType.of(x.dtype) is DType.bool:
        raise TypeError(
            "arrays.diff: x must be of numbers, got bool; logical_xor tells neighbours that differ"
        )
    operands = {"prepend": prepend, "x": x, "append": append}
    parts = {name: operand for name, operand in operands.items() if operand is not None}
    if len(parts) > 1:
        check_array("arrays.diff", **parts)
        promoted_dtype("arrays.diff", {name: DType.of(array.dtype) for name, array in parts.items()})
        x = await concat([*parts.values()], axis=axis)
    ref = await device.put(x) if isinstance(x, np.ndarray) else on_device(x)
    leading = (slice(None),) * axis_of("arrays.diff", ref.spec, axis)
    # Once the axis is empty, it stays empty.
    for _ in range(min(n, ref.shape[len(leading)] + 1)):
        ref = await _DIFFERENCE(ref[(*leading, slice(1, None))], ref[(*leading, slice(None, -1))])
    return ref


_DIFFERENCE = cast("Elementwise[AccelRef]", Elementwise("x1 - x2", operation="arrays.diff"))


_Parts: TypeAlias = tuple[Any, ...]
# Elements on which an expression is tried: few, and such that sums and products of three are exact.
_TRIED: dict[str, tuple[complex, ...]] = {
    "bool": (False, True),
    "uint": (0, 1, 2, 3, 5),
    "int": (-3, -1, 0, 2, 5),
    "float": (-2.5, -0.75, 0.0, 0.5, 3.0),
    "complex": (-1.5 + 1j, 0.25j, 0.0, 2.0 - 0.5j),
}
_CLOSE = 1e-12


@functools.lru_cache(256)
def _combination(text: str, dtype: DType) -> Elementwise[AccelRef]:
    """Make the function that combines two elements.

    Raises:
        TypeError: The result has another dtype.
        ValueError: The text is wrong, or it is not associative.
    """
    function = Elementwise[AccelRef](text, inputs=("a", "b"), operation="arrays.scan")
    expression = parse(text, ("a", "b"))
    dtypes = typed(expression, (dtype, dtype)).dtypes
    if dtypes != (dtype,):
        raise TypeError(f"arrays.scan: {text!r} of two of {dtype} has the dtype {dtypes[0]}; cast x first")
    wide = {"float": DType.float64, "complex": DType.complex128}.get(dtype.kind, dtype)
    kind = typed(expression, (wide, wide))
    a, b, c = np.meshgrid(*(np.array(_TRIED[dtype.kind], wide.dtype),) * 3)
    (ab,), (bc,) = evaluate(kind, (a, b)), evaluate(kind, (b, c))
    (from_left,), (from_right,) = evaluate(kind, (ab, c)), evaluate(kind, (a, bc))
    close = _CLOSE if wide.is_inexact else 0
    bad = ~np.isclose(from_left, from_right, close, close, equal_nan=wide.is_inexact)
    if bad.any():
        a, b, c, from_left, from_right = (array[bad][0].item() for array in (a, b, c, from_left, from_right))
        raise ValueError(
            f"arrays.scan: {text!r} is not associative: for {a}, {b}, {c} it is {from_left} from the left, "
            f"and {from_right} from the right"
        )
    return function


async def prefixes(parts: _Parts, pair: Callable[[_Parts, _Parts], Awaitable[_Parts]], axis: int) -> AccelRef:
    """Combine the elements up to each one: pairs first, of which half as many are combined.

    Source: R. P. Brent and H. T. Kung, "A regular layout for parallel adders", 1982.

    Args:
        parts: Arrays that together are the elements, the last one their values; numbers are the same for all.
        pair: Combines two elements. It may get only the value of the first, and None for its other parts.
        axis: The axis, which has elements.
    """

    def part(several: _Parts, *bounds: int | None) -> _Parts:
        index = (*(slice(None),) * axis, slice(*bounds))
        return tuple([operand[index] if isinstance(operand, AccelRef) else operand for operand in several])

    value: AccelRef = parts[-1]
    count = value.shape[axis]
    out = await value.copy()
    if count > 1:
        odd = await prefixes(await pair(part(parts, 0, count - 1, 2), part(parts, 1, None, 2)), pair, axis)
        await part((out,), 1, None, 2)[0].assign(odd)
        if count > 2:
            preceding = (*(None,) * (len(parts) - 1), odd)
            combined = await pair(part(preceding, (count - 1) // 2), part(parts, 2, None, 2))
            await part((out,), 2, None, 2)[0].assign(combined[-1])
    return out


@composed
async def scan(text: str, x: Operand, *, axis: int | None = None) -> AccelRef:
    """Combine the elements up to each one along an axis by an expression: an inclusive scan.

    The expression combines ``a``, the result so far, and ``b``, the next element; see `jit.elementwise`. It
    must be associative, because pairs are combined first: in 2 log2(n) steps, in an order that only the
    length determines. This is checked on all triples of a few fixed elements with the kind of the dtype:
    exactly for integers and truth values, within 1e-12 in float64 or complex128 for others. An expression
    that passes may still fail to be associative elsewhere, because no NaN is among the elements.

    The largest element so far by magnitude, and the last element so far other than NaN:

    >>> import trio_accel as ta
    >>> ta.arrays.scan("a if abs(a) > abs(b) else b", x)  # doctest: +SKIP
    >>> ta.arrays.scan("where(isnan(b), a, b)", x)  # doctest: +SKIP

    Args:
        text: The expression, with the dtype of `x`.
        x: The array.
        axis: The axis, from the end for a negative one. It may be left out for a vector.

    Returns:
        An array with the shape and dtype of `x`.

    Raises:
        TypeError: The expression of two elements has another dtype.
        ValueError: The expression contains something that is not allowed, or is not associative, and the
            message shows the place; or the axis is out of range.
        NotSupportedError: float8.
    """
    [x] = await placed("arrays.scan", x=x)
    axis_index = _axis("arrays.scan", x, axis)
    combine = _combination(text, x.dtype)
    if not x.size:
        return await x.copy()

    async def pair(first: _Parts, second: _Parts) -> _Parts:
        return (await combine(*first, *second),)

    return await prefixes((x,), pair, axis_index)


@composed
async def linear_recurrence(
    a: ExpressionArgument, b: Operand, *, axis: int | None = None, initial: ExpressionArgument = 0
) -> AccelRef:
    """Compute ``y[k] = a[k] * y[k - 1] + b[k]`` along an axis: a linear recurrence of first order.

    Pairs of steps become one step, in 2 log2(n) of them, so products of neighbours in `a` must not overflow.
    An exponential average with weight ``w`` is ``linear_recurrence(1 - w, w * x, initial=first)``.

    A Kalman filter for a random walk has gains ``g`` that depend on no observation. It follows observations
    ``z``:

    >>> import trio_accel as ta
    >>> level = ta.arrays.linear_recurrence(1 - g, g * z, initial=z0)  # doctest: +SKIP

    Source: G. E. Blelloch, "Prefix sums and their applications", 1990, section 1.4.

    Args:
        a: Factors: a number, or an array that broadcasts with `b`.
        b: The array to add.
        axis: The axis of the result, from the end for a negative one. It may be omitted for a vector.
        initial: ``y[-1]``: a number, or an array that broadcasts with an element of `b` along the axis, and
            has one element there.

    Returns:
        An array of the shape that all broadcast to, and with the dtype of ``a * initial + b``.

    Raises:
        TypeError: None is on a device, or an argument is not an array or number.
        ValueError: The axis is out of range, or shapes do not broadcast.
        NotSupportedError: float8.
    """
    name = "arrays.linear_recurrence"
    [b] = await placed(name, b=b)
    is_array = isinstance(a, (AccelRef, np.ndarray))
    value = await _SAME(b, a, initial)
    axis_index = _axis(name, value, axis)
    if not value.size:
        return value
    factor: Any = await _SAME(a, value, initial) if is_array else a
    start = (*(slice(None),) * axis_index, slice(0, 1))
    first = await _NEXT(factor[start] if is_array else a, initial, value[start])
    if first.shape != value[start].shape:
        raise ValueError(f"{name}: initial must have length 1 along the axis, got {first.shape[axis_index]}")
    await value[start].assign(first)

    async def pair(earlier: _Parts, later: _Parts) -> _Parts:
        factors = earlier[0], later[0]
        both = None if earlier[0] is None else await _PRODUCT(*factors) if is_array else earlier[0] * later[0]
        return both, await _NEXT(later[0], earlier[1], later[1])

    return await prefixes((factor, value), pair, axis_index)


def _axis(name: str, x: AccelRef | ArraySpec, axis: int | None) -> int:
    if axis is None and x.ndim != 1:
        raise ValueError(f"{name}: axis must be given for an array of shape {x.shape}, which is not a vector")
    return axis_of(name, x, 0 if axis is None else axis)


_NEXT, _PRODUCT, _SAME = (
    Elementwise[AccelRef](text, inputs=inputs, operation="arrays.linear_recurrence")
    for text, inputs in (
        ("a * initial + b", ("a", "initial", "b")),
        ("one * two", ("one", "two")),
        # A copy with the dtype and shape of the result.
        ("where(True, b, b * a + initial)", ("b", "a", "initial")),
    )
)
