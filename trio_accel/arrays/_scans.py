"""Sums and products up to each element, differences of neighbours, and reductions of segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from ..backends.base import DType, DTypeLike
from ..backends.base.contract.ops import Combination, Scan, ScanSpec, SegmentSpec
from ..devices import AccelRef, Operand, Planned, Planner, device_of, operation, operation_like
from ..devices.operations._calls import composed
from ..expressions import Elementwise, check_array, on_device, promoted_dtype
from ._actor import ArraysActor
from ._checks import axis_of, check_real, flag, summed_dtype, whole
from ._manipulation import concat

__all__ = [
    "cumulative_logsumexp", "cumulative_max", "cumulative_min", "cumulative_prod", "cumulative_sum", "diff",
    "segmented_reduce",
]  # fmt: skip


def _plan_scan(message: Any, planner: Planner, combine: Scan) -> Planned[AccelRef]:
    name, x = planner.name, planner.read("x", message.x)
    if message.axis is None and x.ndim != 1:
        raise ValueError(f"{name}: axis must be given for an array of shape {x.shape}, which is no vector")
    axis = axis_of(name, x, 0 if message.axis is None else message.axis)
    if combine in ("sum", "prod"):
        dtype = summed_dtype(name, x.dtype, message.dtype)
        more = flag(name, "include_initial", message.include_initial)
    else:
        check_real(name, x=x)
        more, dtype = False, x.dtype if combine != "logaddexp" or x.dtype.is_inexact else DType.float64
    if x.dtype.kind == "complex" and dtype.kind != "complex":
        raise TypeError(f"{name}: dtype must be complex for an array of {x.dtype}, got {dtype}")
    shape = (*x.shape[:axis], x.shape[axis] + more, *x.shape[axis + 1 :])
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
        axis: The axis, from the end for a negative one. It may be left out for a vector.
        dtype: Type that the elements are converted to before they are added. By default it is that of `x`;
            of whole numbers and truth values `int64`, of unsigned ones `uint64`.
        include_initial: Whether the result begins with 0, and has one more element along the axis.
        out: Array to write to; by default a new one.

    Returns:
        The sums.

    Raises:
        TypeError: There is no such dtype, or it is real and the array complex.
        ValueError: There is no such axis, or `out` has another shape or shares memory with `x`.
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
        axis: The axis, from the end for a negative one. It may be left out for a vector.
        dtype: Type that the elements are converted to before they are multiplied; see `cumulative_sum`.
        include_initial: Whether the result begins with 1, and has one more element along the axis.
        out: Array to write to; by default a new one.

    Returns:
        The products.

    Raises:
        TypeError: There is no such dtype, or it is real and the array complex.
        ValueError: There is no such axis, or `out` has another shape or shares memory with `x`.
        NotSupportedError: float8.
    """


@operation(actor=ArraysActor, plan=_of("max"))
async def cumulative_max(x: Operand, *, axis: int | None = None, out: AccelRef | None = None) -> AccelRef:
    """Find the largest of the elements up to each one along an axis, as `numpy.maximum.accumulate` does.

    From a NaN on, all are NaN.

    Args:
        x: The array, of a dtype that has an order.
        axis: The axis, from the end for a negative one. It may be left out for a vector.
        out: Array to write to; by default a new one.

    Returns:
        The largest elements, of the dtype of `x`.

    Raises:
        TypeError: `x` is complex.
        ValueError: There is no such axis, or `out` has another shape or shares memory with `x`.
        NotSupportedError: float8.
    """
    ...


@operation_like(cumulative_max, plan=_of("min"))
def cumulative_min() -> None:
    """Find the smallest of the elements up to each one along an axis.

    Arguments and errors are those of `cumulative_max`.
    """


@operation_like(cumulative_max, plan=_of("logaddexp"))
def cumulative_logsumexp() -> None:
    """Compute the logarithm of the sum of exponentials up to each element: `torch.logcumsumexp`.

    No exponential is too large or too small. It is computed in float64 and rounded to the dtype of `x`; the
    result of whole numbers is float64. Arguments and errors are those of `cumulative_max`.
    """


def _plan_segments(message: Any, planner: Planner) -> Planned[AccelRef]:
    name, x, offsets = planner.name, planner.read("x", message.x), planner.read("offsets", message.offsets)
    if x.ndim != 1 or offsets.ndim != 1 or not offsets.size:
        raise ValueError(
            f"{name}: x must be a vector, and offsets a vector of at least one, got shapes {x.shape} and "
            f"{offsets.shape}"
        )
    if offsets.dtype.kind not in ("int", "uint"):
        raise TypeError(f"{name}: offsets must be of whole numbers, got {offsets.dtype}")
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
        offsets: Whole numbers in ascending order, from 0 to the length of `x`: where each segment begins, and
            where the last one ends.
        op: ``"sum"``, ``"prod"``, ``"min"`` or ``"max"``.
        out: Vector to write to; by default a new one.

    Returns:
        One element for each segment. A sum of no elements is 0, a product 1.

    Raises:
        TypeError: `offsets` has no whole numbers, or the least of complex numbers is wanted.
        ValueError: An array is no vector, there is no such `op`, or `out` has another shape.
        LibraryError: Offsets descend or lead outside, or there is a segment of no elements of which the least
            or largest is wanted.
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
        n: How many times.
        prepend: Elements before those of `x` along the axis; they are joined first, see `concat`.
        append: Elements behind them.

    Returns:
        ``x[i + 1] - x[i]`` along the axis, which has so many elements fewer; a copy where `n` is 0.

    Raises:
        TypeError: `x` is of truth values, or `n` is no whole number.
        ValueError: There is no such axis, or `n` is negative.
        NotSupportedError: float8.
    """
    device = device_of("arrays.diff", x, prepend, append)
    if whole("arrays.diff", "n", n) < 0:
        raise ValueError(f"arrays.diff: n must not be negative, got {n}")
    if DType.of(x.dtype) is DType.bool:
        raise TypeError(
            "arrays.diff: x must be of numbers, got bool; logical_xor tells neighbours that differ"
        )
    given = {"prepend": prepend, "x": x, "append": append}
    parts = {name: one for name, one in given.items() if one is not None}
    if len(parts) > 1:
        check_array("arrays.diff", **parts)
        promoted_dtype("arrays.diff", {name: DType.of(one.dtype) for name, one in parts.items()})
        x = await concat([*parts.values()], axis=axis)
    ref = await device.put(x) if isinstance(x, np.ndarray) else on_device(x)
    ahead = (slice(None),) * axis_of("arrays.diff", ref.spec, axis)
    # Where no neighbours are left, there will be none.
    for _ in range(min(n, ref.shape[len(ahead)] + 1)):
        ref = await _DIFFERENCE(ref[(*ahead, slice(1, None))], ref[(*ahead, slice(None, -1))])
    return ref if n else await ref.copy()


_DIFFERENCE = cast("Elementwise[AccelRef]", Elementwise("x1 - x2", operation="arrays.diff"))
