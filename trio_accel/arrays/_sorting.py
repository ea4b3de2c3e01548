"""Order of arrays: sorting, the largest elements, the search in sorted arrays, and functions made of these.

Medians and quantiles are a partial sort, and one launch that takes two neighbours of each line. Sets of
elements consist of sorts, searches and selections.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt

from ..actors import arguments_of
from ..backends.base import DType, HostArray, Ints, check_plain
from ..backends.base.contract.ops import ArraySpec, SearchSpec, SortSpec
from ..devices import (
    AccelRef,
    Operand,
    Planned,
    Planner,
    composed,
    operation,
    operation_like,
    refuse_value,
)
from ..expressions import Elementwise, Reduction, axes_of, promoted_dtype, reduced
from ._actor import ArraysActor
from ._checks import axis_of, bounded_integer, check_number, check_real, flag, placed
from ._indexing import take_along_axis
from ._manipulation import concat
from ._numeric import CLOSE
from ._selection import compress, unique_values
from ._views import moveaxis, reshape

__all__ = [
    "QuantileMethod",
    "TopKResult",
    "allclose",
    "argsort",
    "array_equal",
    "intersect1d",
    "isin",
    "lexsort",
    "median",
    "nanmedian",
    "nanpercentile",
    "nanquantile",
    "percentile",
    "quantile",
    "searchsorted",
    "setdiff1d",
    "setxor1d",
    "sort",
    "top_k",
    "union1d",
]


class TopKResult(NamedTuple):
    """The elements that come first, and where they were."""

    values: AccelRef
    indices: AccelRef


def _plan_sort(message: Any, planner: Planner, *, returns_indices: bool) -> Planned[AccelRef]:
    x, axis = _ordered(message, planner)
    out = planner.output(x.shape, DType.int64 if returns_indices else x.dtype, message.out)
    planner.distinct("out", out.spec, x=x)
    flag(planner.name, "stable", message.stable)
    descending = flag(planner.name, "descending", message.descending)
    values, indices = (None, out.spec) if returns_indices else (out.spec, None)
    return Planned(SortSpec(axis, descending, x, values, indices, ()), out)


def _plan_top_k(message: Any, planner: Planner) -> Planned[TopKResult]:
    x, axis = _ordered(message, planner)
    k, count = bounded_integer(planner.name, "k", message.k), x.shape[axis]
    if not 0 <= k <= count:
        raise ValueError(f"{planner.name}: k must be from 0 to the {count} elements along the axis, got {k}")
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    result = TopKResult(planner.output(shape, x.dtype), planner.output(shape, DType.int64))
    largest = flag(planner.name, "largest", message.largest)
    return Planned(SortSpec(axis, largest, x, result.values.spec, result.indices.spec, ()), result)


def _plan_search(message: Any, planner: Planner) -> Planned[AccelRef]:
    name = planner.name
    x1, x2 = planner.read("x1", message.x1), planner.read("x2", message.x2)
    sorter = None if message.sorter is None else planner.read("sorter", message.sorter)
    if x1.ndim != 1 or (sorter is not None and sorter.shape != x1.shape):
        sorter_text = "" if sorter is None else f" and sorter of shape {sorter.shape}"
        raise ValueError(
            f"{name}: x1 must be a vector, and sorter as long, got shape {x1.shape}{sorter_text}"
        )
    if sorter is not None and sorter.dtype.kind not in ("int", "uint"):
        raise TypeError(f"{name}: sorter must have an integer dtype, got {sorter.dtype}")
    check_real(name, x1=x1, x2=x2)
    out = planner.output(x2.shape, DType.int64, message.out)
    inputs = {"x1": x1, "x2": x2, **({} if sorter is None else {"sorter": sorter})}
    planner.distinct("out", out.spec, **inputs)
    return Planned(SearchSpec(message.side, x1, x2, sorter, out.spec, planner.status(1)), out)


def _ordered(message: Any, planner: Planner) -> tuple[ArraySpec, int]:
    """Take the array of a message, and its axis."""
    x = planner.read("x", message.x)
    check_real(planner.name, x=x)
    return x, axis_of(planner.name, x, message.axis)


@operation(actor=ArraysActor, plan=partial(_plan_sort, returns_indices=False))
async def sort(
    x: Operand, *, axis: int = -1, descending: bool = False, stable: bool = True, out: AccelRef | None = None
) -> AccelRef:
    """Sort along an axis, as the array API standard's ``sort`` does.

    NaN counts as larger than every number: it comes last, or first in descending order. Zeros of both signs
    are equal.

    Args:
        x: The array: real numbers or truth values.
        axis: The axis, from the end for a negative one.
        descending: Whether the largest come first.
        stable: Whether equal elements keep their order. They do in any case.
        out: Array of this shape and dtype to write to; by default a new one.

    Returns:
        The sorted elements.

    Raises:
        TypeError: The array is complex.
        ValueError: The axis is out of range, or `out` has another shape or shares memory with `x`.
        NotSupportedError: The device cannot sort; on CUDA it comes from the package ``cuda-cccl``.
    """
    ...


def _plan_partial(message: Any, planner: Planner) -> Planned[AccelRef]:
    x = planner.read("x", message.x)
    out = planner.output(x.shape, x.dtype)
    return Planned(SortSpec(x.ndim - 1, False, x, out.spec, None, message.kth), out)


@operation(actor=ArraysActor, plan=_plan_partial)
async def _sort_at(x: Operand, kth: Ints) -> AccelRef:
    """Sort along the last axis, as far as elements at some places take it; see `SortSpec.kth`."""
    ...


@operation_like(sort, plan=partial(_plan_sort, returns_indices=True))
def argsort() -> None:
    """Find the indices that sort along an axis, as the array API standard's ``argsort`` does.

    Args:
        x: The array; see `sort` for its order.
        axis: The axis, from the end for a negative one.
        descending: Whether the largest come first.
        stable: Whether equal elements keep their order. They do in any case.
        out: Array of this shape and int64 to write to; by default a new one.

    Returns:
        Indices along the axis, of int64.

    Raises:
        TypeError: The array is complex.
        ValueError: The axis is out of range, or `out` has another shape or shares memory with `x`.
        NotSupportedError: See `sort`.
    """


@composed
async def lexsort(keys: Sequence[Operand], *, axis: int = -1) -> AccelRef:
    """Find the indices that sort by several keys, as `numpy.lexsort` does: the last one counts first.

    There is a sort for each key.

    Args:
        keys: Arrays of one shape.
        axis: The axis, from the end for a negative one.

    Returns:
        Indices along the axis, of int64.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `argsort`; or no keys, or keys of several shapes.
    """
    placed_keys = await placed(
        "arrays.lexsort", **{f"keys[{number}]": key for number, key in enumerate(keys)}
    )
    if len({key.shape for key in placed_keys}) > 1:
        raise ValueError(
            f"arrays.lexsort: keys must be of one shape, got {[key.shape for key in placed_keys]}"
        )
    order = await argsort(placed_keys[0], axis=axis)
    for key in placed_keys[1:]:
        step = await argsort(await take_along_axis(key, order, axis), axis=axis)
        order = await take_along_axis(order, step, axis)
    return order


@operation(actor=ArraysActor, plan=_plan_top_k)
async def top_k(x: Operand, k: int, *, axis: int = -1, largest: bool = True) -> TopKResult:
    """Find the largest elements along an axis, in order, and where they are.

    Of equal elements, the first are taken. NaN counts as larger than every number.

    Args:
        x: The array: real numbers or truth values.
        k: How many: from 0 to the elements along the axis.
        axis: The axis, from the end for a negative one.
        largest: Whether the largest are wanted, which come in descending order. Otherwise the smallest, in
            ascending order.

    Returns:
        The elements, and their indices along the axis, of int64.

    Raises:
        TypeError: The array is complex, or `k` is not an integer.
        ValueError: The axis is out of range, or has fewer than `k` elements.
        NotSupportedError: See `sort`.
    """
    ...


@operation(actor=ArraysActor, plan=_plan_search)
async def searchsorted(
    x1: Operand,
    x2: Operand,
    *,
    side: Literal["left", "right"] = "left",
    sorter: Operand | None = None,
    out: AccelRef | None = None,
) -> AccelRef:
    """Find where values belong in a sorted vector, as the array API standard's ``searchsorted`` does.

    Args:
        x1: Vector in ascending order, NaN last.
        x2: The values. They are compared in their common type by NumPy's rules, but integers of 64 bits
            exactly.
        side: Whether before the equal elements (``"left"``), or after them (``"right"``).
        sorter: Indices that sort `x1`, such as the result of `argsort`.
        out: Array with the shape of `x2` and int64 to write to; by default a new one.

    Returns:
        For each value the index before which it keeps the vector in order, of int64.

    Raises:
        TypeError: An array is complex, or `sorter` does not have integers.
        ValueError: `x1` is not a vector, `sorter` has another length, or there is no such side.
        LibraryError: An index of `sorter` is out of range.
    """
    ...


QuantileMethod: TypeAlias = Literal[
    "inverted_cdf",
    "averaged_inverted_cdf",
    "closest_observation",
    "interpolated_inverted_cdf",
    "hazen",
    "weibull",
    "linear",
    "median_unbiased",
    "normal_unbiased",
    "lower",
    "higher",
    "midpoint",
    "nearest",
]
"""How a quantile that is between two elements is found, by the names of `numpy.quantile`."""

# The formulas of each method: the place ``h`` of the share ``q`` among ``n`` elements, from 0 on, and the
# weight ``g`` of the element after it (Hyndman and Fan, Sample Quantiles in Statistical Packages, 1996).
_FRACTION = "g = h - floor(h)"
_QUANTILE_FORMULAS: dict[str, str] = {
    "inverted_cdf": "h = ceil(n * q - 1); g = 0 * h",
    "averaged_inverted_cdf": "h = n * q - 1; g = where(h == floor(h), 0.5, 1)",
    "closest_observation": "h = n * q - 1.5; h = floor(h) + where(h == floor(h) and floor(h) % 2 == 1, 0, 1);"
    "g = 0 * h",
    "interpolated_inverted_cdf": f"h = n * q - 1; {_FRACTION}",
    "hazen": f"h = n * q - 0.5; {_FRACTION}",
    "weibull": f"h = (n + 1) * q - 1; {_FRACTION}",
    "linear": f"h = (n - 1) * q; {_FRACTION}",
    "median_unbiased": f"h = n * q + (1 / 3 + q / 3) - 1; {_FRACTION}",
    "normal_unbiased": f"h = n * q + (3 / 8 + q / 4) - 1; {_FRACTION}",
    "lower": "h = floor((n - 1) * q); g = 0 * h",
    "higher": "h = ceil((n - 1) * q); g = 0 * h",
    "midpoint": "h = (n - 1) * q; g = where(h == floor(h), 0, 0.5)",
    "nearest": "h = round((n - 1) * q); g = 0 * h",
}
# NaN is last in a line. Equal elements may be infinite.
_TEXT = (
    "{places}; a = float64(s[i(1), int64(clip(floor(h), 0, n - 1))]);"
    "b = float64(s[i(1), int64(clip(floor(h) + 1, 0, n - 1))]); z = s[i(1), n - 1];"
    "y = where(z != z, nan, where(g == 0 or a == b, a, a * (1 - g) + b * g))"
)


# More shares at once are found in sorted elements.
_FEW_SHARES = 8

_expression = functools.cache(Elementwise[AccelRef])
_reduction = functools.cache(Reduction)


async def _quantiles(
    name: str,
    x: Operand,
    axis: int | Sequence[int] | None,
    keepdims: bool,
    q: Any = 0.5,
    method: str = "linear",
) -> AccelRef:
    is_taken = isinstance(cast("object", q), (int, float, Sequence, np.ndarray, np.generic))
    check_plain(f"{name}: q", q)
    try:
        shares = np.asarray(q if is_taken and not np.iscomplexobj(q) else [[]], np.float64)
    except (TypeError, ValueError):
        shares = np.zeros((0, 0))
    if shares.ndim > 1:
        raise TypeError(f"{name}: q must be a number or a sequence of numbers, got {type(q).__name__}")
    limit = 100 if "percentile" in name else 1
    if not np.all((shares >= 0) & (shares <= limit)):
        raise ValueError(f"{name}: q must be from 0 to {limit}")
    shares = shares / limit
    if method not in _QUANTILE_FORMULAS:
        refuse_value(name, "method", get_args(QuantileMethod), method)
    [x] = await placed(name, x=x)
    check_real(name, x=x.spec)
    axes = axes_of(name, x.shape, axis)
    lines, n = reduced(x.shape, axes), math.prod(x.shape[dimension] for dimension in axes)
    result_shape = reduced(x.shape, axes, keepdims=flag(name, "keepdims", keepdims))
    dtype = x.dtype if x.dtype.kind == "float" else DType.float64
    if not n:
        return await x.device.full((*shares.shape, *result_shape), math.nan, dtype)
    moved = moveaxis(x, axes, range(x.ndim - len(axes), x.ndim))
    s = await _sort_at(await reshape(moved, (math.prod(lines), n)), _needed(name, shares, n))
    count = await _reduction("x == x", "sum", operation=name)(s, axis=1) if ".nan" in name else n
    text = _TEXT.format(places=_QUANTILE_FORMULAS[method])
    expression = _expression(text, inputs=("s", "q", "n"), dtypes=dtype.value, operation=name)
    quantiles = await expression(s, shares.reshape(-1, 1), count, shape=(shares.size, math.prod(lines)))
    return quantiles.reshape((*shares.shape, *result_shape))


def _needed(name: str, shares: HostArray, n: int) -> Ints:
    """Return the places that any method needs, and the last place, because NaN comes there."""
    if ".nan" in name or shares.size > _FEW_SHARES:
        return ()
    neighbours = np.floor(n * shares).astype(np.int64).reshape(-1, 1) + np.arange(-3, 3)
    return tuple(np.unique([*neighbours.clip(0, n - 1).flat, n - 1]).tolist())


@composed
async def median(x: Operand, axis: int | Sequence[int] | None = None, *, keepdims: bool = False) -> AccelRef:
    """Find the element in the middle of those along axes; of two the mean. NaN if there is one.

    The mean is computed in float64 and rounded once. Zeros of both signs are equal, so a median may be
    either.

    >>> import trio, numpy as np, trio_accel as ta
    >>> async def main() -> None:
    ...     async with ta.open_system("middle") as system, system.open_device("cpu") as device:
    ...         x = await device.put(np.array([[3.0, 9.0, 1.0], [4.0, np.nan, 5.0]]))
    ...         print(await ta.arrays.median(x, axis=1).to_host())
    >>> trio.run(main)
    [ 3. nan]

    Args:
        x: The array, real.
        axis: Axis or axes; None for all.
        keepdims: Whether these stay, with one element.

    Returns:
        The medians, with the dtype of `x`; float64 for integers and truth values. NaN of no elements.

    Raises:
        TypeError: `x` is not an array, or is complex.
        ValueError: An axis out of range.
        NotSupportedError: See `sort`.
    """
    return await _quantiles("arrays.median", x, axis, keepdims)


@arguments_of(median, _quantiles, "arrays.nanmedian")
def nanmedian() -> None:
    """Find the element in the middle of those along axes, ignoring NaN; NaN if all are.

    See `median` for arguments and errors.
    """


@composed
async def quantile(
    x: Operand,
    q: float | Sequence[float] | npt.NDArray[Any],
    axis: int | Sequence[int] | None = None,
    *,
    method: QuantileMethod = "linear",
    keepdims: bool = False,
) -> AccelRef:
    """Find what shares of the elements along axes are below, as `numpy.quantile` does. NaN if there is one.

    The elements are ordered once for all shares. The quantiles are computed in float64 and rounded once.

    Args:
        x: The array, real.
        q: A share from 0 to 1, or several in a sequence, on the host.
        axis: Axis or axes; None for all.
        method: How to find a quantile between two elements; see `QuantileMethod`.
        keepdims: Whether the axes stay, with one element.

    Returns:
        The quantiles, with the dtype of `x`; float64 for integers and truth values. Several shares are along
        a new first axis.

    Raises:
        TypeError: `x` is not an array, or is complex; or `q` does not consist of numbers.
        ValueError: An axis out of range, a share outside of 0 to 1, or an unknown method.
        NotSupportedError: See `sort`.
    """
    return await _quantiles("arrays.quantile", x, axis, keepdims, q, method)


@arguments_of(quantile, _quantiles, "arrays.nanquantile")
def nanquantile() -> None:
    """Find quantiles of the elements along axes, ignoring NaN; NaN if all are.

    See `quantile` for arguments and errors.
    """


@arguments_of(quantile, _quantiles, "arrays.percentile")
def percentile() -> None:
    """Find quantiles of shares in percent, from 0 to 100.

    See `quantile` for arguments and errors.
    """


@arguments_of(quantile, _quantiles, "arrays.nanpercentile")
def nanpercentile() -> None:
    """Find quantiles for shares in percent, from 0 to 100, ignoring NaN.

    See `quantile` for arguments and errors.
    """


# A load after the last element takes the last one, which is another one then.
_IS_MEMBER = Elementwise[AccelRef](
    "(x2[at] == x1) != others",
    inputs=("x2", "at", "x1", "others"),
    operation="arrays.isin",
)
_EQUAL = Reduction(
    "x1 == x2 or equal_nan and x1 != x1 and x2 != x2",
    "all",
    inputs=("x1", "x2", "equal_nan"),
    operation="arrays.array_equal",
)
_ALL_CLOSE = Reduction(
    f"{CLOSE}; z = all(y)",
    inputs=("x1", "x2", "rtol", "atol", "equal_nan"),
    precision="float32",
    operation="arrays.allclose",
)


@composed
async def array_equal(x1: Operand, x2: Operand, *, equal_nan: bool = False) -> bool:
    """Return whether two arrays have the same shape and the same elements: one launch, and the host reads it.

    Args:
        x1: An array.
        x2: Another one; dtypes are promoted as NumPy does.
        equal_nan: Whether NaN equals NaN.

    Returns:
        Whether they do.

    Raises:
        TypeError: An argument is not an array, or none is on a device.
        NotSupportedError: float8.
    """
    name = "arrays.array_equal"
    x1, x2 = await placed(name, x1=x1, x2=x2)
    if x1.shape != x2.shape:
        return False
    return bool(await (await _EQUAL(x1, x2, flag(name, "equal_nan", equal_nan))).item())


@composed
async def allclose(
    x1: Operand, x2: Operand, *, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """Return whether all elements are close, by the rule of `isclose`: one launch, and the host reads it.

    See `isclose` for arguments; at least one is an array of a device, and they broadcast.

    Returns:
        Whether they are.

    Raises:
        TypeError: An argument is not an array or number, or none is on a device.
        ValueError: The shapes do not broadcast.
        NotSupportedError: float8.
    """
    equal_nan = flag("arrays.allclose", "equal_nan", equal_nan)
    within = [
        float(check_number("arrays.allclose", argument, number, is_real=True))
        for argument, number in (("rtol", rtol), ("atol", atol))
    ]
    message = _ALL_CLOSE.compute(x1, x2, *within, equal_nan)
    return bool(await (await _ALL_CLOSE.ask(message)).item())


@composed
async def isin(x1: Operand, x2: Operand, *, invert: bool = False) -> AccelRef:
    """Return which elements are among others, as the array API standard's ``isin`` does: a sort and a search.

    Args:
        x1: Elements to look for.
        x2: Elements to search, of any shape. NaN is equal to nothing.
        invert: Whether to return which elements are missing instead.

    Returns:
        Truth values, with the shape of `x1`.

    Raises:
        TypeError: An argument is not an array, or is complex, or the standard has no promotion of both
            dtypes; but signed numbers are found among uint64.
        NotSupportedError: See `sort`.
    """
    x1, x2 = await placed("arrays.isin", x1=x1, x2=x2)
    invert = flag("arrays.isin", "invert", invert)
    check_real("arrays.isin", x1=x1.spec, x2=x2.spec)
    if {x1.dtype.kind, x2.dtype.kind} != {"int", "uint"}:
        promoted_dtype("arrays.isin", {"x1": x1.dtype, "x2": x2.dtype})
    if not x2.size:
        return await x1.device.full(x1.shape, invert, "bool")
    ordered = await sort(await reshape(x2, -1))
    return await _IS_MEMBER(ordered, await searchsorted(ordered, x1), x1, invert)


@composed
async def intersect1d(x1: Operand, x2: Operand) -> AccelRef:
    """Find the elements that both arrays have, each once and in ascending order.

    Args:
        x1: Elements, of any shape.
        x2: Elements, of any shape.

    Returns:
        A vector, with the dtype of `x1`. It is a view of an array as large as `x1`.

    Raises:
        TypeError, NotSupportedError: As of `isin` and `unique_values`.
    """
    x1, x2 = await placed("arrays.intersect1d", x1=x1, x2=x2)
    distinct = await unique_values(x1)
    return await compress(await isin(distinct, x2), distinct)


@composed
async def setdiff1d(x1: Operand, x2: Operand) -> AccelRef:
    """Find the elements of the first array that the second has not, each once and in ascending order.

    NaN is equal to nothing, so each one of the first is there. See `intersect1d` for arguments and errors.
    """
    x1, x2 = await placed("arrays.setdiff1d", x1=x1, x2=x2)
    distinct = await unique_values(x1)
    return await compress(await isin(distinct, x2, invert=True), distinct)


@composed
async def setxor1d(x1: Operand, x2: Operand) -> AccelRef:
    """Find the elements that just one of the arrays has, each once and in ascending order.

    See `intersect1d` for arguments and errors; the dtype is the promoted one.
    """
    x1, x2 = await placed("arrays.setxor1d", x1=x1, x2=x2)
    return await sort(await concat([await setdiff1d(x1, x2), await setdiff1d(x2, x1)]))


@composed
async def union1d(x1: Operand, x2: Operand) -> AccelRef:
    """Find the elements that one of the arrays has, each once and in ascending order.

    See `intersect1d` for arguments and errors; the dtype is the promoted one.
    """
    x1, x2 = await placed("arrays.union1d", x1=x1, x2=x2)
    return await unique_values(await concat([x1, x2], axis=None))
