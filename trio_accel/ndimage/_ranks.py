"""Filters by order: the least, the largest and the middle element of a window; and the mean, which is made alike.

A window of one length is made of two of half of it, so a long one costs little more than a short one. Small windows are
sorted by a network of comparisons in the text of an expression, of which only those are there that the element needs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..actors import arguments_of
from ..arrays import concat, sort, stack
from ..backends.base import DType
from ..devices import AccelRef
from ..devices.base._refusals import whole
from ..devices.operations._calls import composed
from ..expressions import Elementwise, intermediates
from ._windows import (
    MOST,
    Mode,
    Output,
    axes_of,
    converted,
    delivered,
    dtype_of,
    each,
    mode_of,
    numbers,
    padded,
    reach,
    spread,
    stored,
    taken,
    view,
    wide_of,
)

__all__ = [
    "maximum_filter", "maximum_filter1d", "median_filter", "minimum_filter", "minimum_filter1d",
    "percentile_filter", "rank_filter", "uniform_filter", "uniform_filter1d",
]  # fmt: skip

_Kind = Literal["minimum", "maximum", "uniform"]
# Elements of a window that are combined in one launch, and that a network sorts: its text has a most length.
_SHORT, _SORTED = 12, 27
# Elements of windows that are sorted at a time.
_PIECE = 1 << 24


@functools.cache
def _combined(kind: _Kind, count: int, wide: str, dtype: DType, is_mean: bool) -> Elementwise[AccelRef]:
    """Combine elements; what is wide enough stays as it is."""
    names = [f"x{n}" for n in range(count)]
    given = [f"{wide}({name})" for name in names] if kind == "uniform" else names
    text = f"y = {given[0]}" + "".join(
        f"; y = y + {one}" if kind == "uniform" else f"; y = {kind}(y, {one})" for one in given[1:]
    )
    text += f"; z = {'y' if wide == dtype else stored('y / n' if is_mean else 'y', dtype)}"
    inputs = [*names, "n"] if is_mean else names
    return Elementwise(text, inputs=inputs, dtypes=dtype, operation=f"ndimage.{kind}_filter")


async def _windowed(
    kind: _Kind, x: AccelRef, axis: int, size: int, shape: tuple[int, ...], dtype: DType, divisor: int = 0
) -> AccelRef:
    """Combine windows along an axis of a padded array."""
    # The least and the largest element are one of the array's own.
    wide = wide_of(x.dtype) if kind == "uniform" else x.dtype.value
    with intermediates() as made:

        def part(array: AccelRef, start: int) -> AccelRef:
            return view(array, shape, spread(x, (axis,), (start,), 0))

        if size <= _SHORT:
            parts = [part(x, n) for n in range(size)]
        else:
            half = size // 2
            longer = (*shape[:axis], shape[axis] + size - half, *shape[axis + 1 :])
            halves = made(await _windowed(kind, x, axis, half, longer, DType(wide)))
            parts = [part(halves, 0), part(halves, half), *[part(x, size - 1)] * (size % 2)]
        combined = _combined(kind, len(parts), wide, dtype, divisor > 0)
        return await combined(*parts, *[float(divisor)] * (divisor > 0))


async def _lines(
    kind: _Kind,
    name: str,
    x: AccelRef,
    sizes: Sequence[Any],
    output: Output,
    modes: Sequence[object],
    cval: complex,
    origins: Sequence[Any],
    along: Sequence[int],
) -> AccelRef:
    """Combine windows along one axis after the other."""
    dtype = dtype_of(name, x, output, x.shape, is_complex=x.dtype.kind == "complex")
    if kind != "uniform" and x.dtype.kind == "complex":
        raise TypeError(f"{name}: input must not be complex, which has no order; got {x.dtype}")
    with intermediates() as made:
        result = x
        for axis, given, mode, origin in zip(along, sizes, modes, origins, strict=True):
            size = whole(name, "size", given)
            widths = spread(x, (axis,), (reach(name, size, origin),), (0, 0))
            if size > 1:
                result = result if result is x else made(result)
                wider = await padded(result, widths, [mode_of(name, mode)] * x.ndim, cval)
                wider = wider if wider is result else made(wider)
                divisor = size if kind == "uniform" else 0
                result = await _windowed(kind, wider, axis, size, x.shape, dtype, divisor)
        return await delivered(await converted(dtype)(x) if result is x else result, output)


async def _filter1d(
    name: str, input: AccelRef, size: int, axis: int, output: Output, mode: Mode, cval: complex, origin: int
) -> AccelRef:
    kind: Any = name.partition("_")[0]
    name = f"ndimage.{name}"
    [x] = taken(name, input=input)
    return await _lines(kind, name, x, [size], output, [mode], cval, [origin], axes_of(name, x, axis))


@composed
async def uniform_filter1d(
    input: AccelRef,
    size: int,
    axis: int = -1,
    output: Output = None,
    mode: Mode = "reflect",
    cval: complex = 0.0,
    origin: int = 0,
) -> AccelRef:
    """Compute means of windows along an axis, as `scipy.ndimage.uniform_filter1d` does.

    Args:
        input: The image.
        size: Elements of a window.
        axis: The axis.
        output: See `Output`.
        mode: See `Mode`.
        cval: The number beyond the edges, in ``"constant"``.
        origin: How far the window lies behind its place.

    Returns:
        The means, in the dtype of `input`: of whole numbers rounded towards zero.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `correlate`; or `size` is below 1.
    """
    return await _filter1d("uniform_filter1d", input, size, axis, output, mode, cval, origin)


@arguments_of(uniform_filter1d, _filter1d, "maximum_filter1d")
def maximum_filter1d() -> None:
    """Find the largest element of windows along an axis, as `scipy.ndimage.maximum_filter1d` does.

    A window with NaN has NaN. Arguments and errors are those of `uniform_filter1d`; complex numbers are refused.
    """


@arguments_of(uniform_filter1d, _filter1d, "minimum_filter1d")
def minimum_filter1d() -> None:
    """Find the least element of windows along an axis; see `maximum_filter1d`."""


@composed
async def uniform_filter(
    input: AccelRef,
    size: int | Sequence[int] = 3,
    output: Output = None,
    mode: Mode | Sequence[Mode] = "reflect",
    cval: complex = 0.0,
    origin: int | Sequence[int] = 0,
    *,
    axes: int | Sequence[int] | None = None,
) -> AccelRef:
    """Compute means of windows, as `scipy.ndimage.uniform_filter` does.

    Args:
        input: The image.
        size: Elements of a window along all axes, or along each.
        output: See `Output`.
        mode: See `Mode`; for all axes, or for each.
        cval: The number beyond the edges, in ``"constant"``.
        origin: How far the window lies behind its place; for all axes, or for each.
        axes: Axes to filter along; None for all.

    Returns:
        See `uniform_filter1d`; it is rounded to its dtype after each axis.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `uniform_filter1d`.
    """
    name = "ndimage.uniform_filter"
    [x] = taken(name, input=input)
    along = axes_of(name, x, axes)
    given = {"size": size, "mode": mode, "origin": origin}
    sizes, modes, origins = (each(name, key, value, len(along)) for key, value in given.items())
    return await _lines("uniform", name, x, sizes, output, modes, cval, origins, along)


def _nth(name: str, rank: object, count: int) -> int:
    """Find which element of a sorted window is wanted."""
    if "median" in name:
        return count // 2
    if "percentile" in name:
        percentile: Any = rank
        percentile += 100 * (percentile < 0)
        if not 0 <= percentile <= 100:
            raise ValueError(f"{name}: percentile must be from -100 to 100, got {rank}")
        return min(int(float(count) * percentile / 100), count - 1)
    place = {"minimum": 0, "maximum": count - 1}.get(name.rpartition(".")[2].partition("_")[0])
    found = whole(name, "rank", rank) if place is None else place
    if not -count <= found < count:
        raise ValueError(
            f"{name}: rank must be from {-count} to {count - 1} for {count} elements, got {found}"
        )
    return found % count


async def _ranked(
    name: str,
    input: AccelRef,
    rank: object,
    size: Any,
    footprint: object,
    output: Output,
    mode: Any,
    cval: complex,
    origin: Any,
    axes: object,
) -> AccelRef:
    """Find an element of each window by its order."""
    name = f"ndimage.{name}"
    [x] = taken(name, input=input)
    if x.dtype.kind == "complex":
        raise TypeError(f"{name}: input must not be complex, which has no order; got {x.dtype}")
    along = axes_of(name, x, axes)
    modes, origins = each(name, "mode", mode, len(along)), each(name, "origin", origin, len(along))
    if footprint is None:
        if size is None:
            raise ValueError(f"{name}: size or footprint must say what a window is")
        window = np.ones(
            [max(whole(name, "size", one), 0) for one in each(name, "size", size, len(along))], bool
        )
    else:
        window = numbers(name, "footprint", footprint, "bool")
    if window.ndim != len(along) or not window.any():
        told = f"{len(along)} axes and an element that is true, got shape {window.shape}"
        raise ValueError(f"{name}: footprint must have {told}")
    count = int(window.sum())
    nth = _nth(name, rank, count)
    kind: Any = {0: "minimum", count - 1: "maximum"}.get(nth, "")
    if kind and window.all():
        return await _lines(kind, name, x, window.shape, output, modes, cval, origins, along)
    dtype = dtype_of(name, x, output, x.shape)
    pairs = [reach(name, one, start) for one, start in zip(window.shape, origins, strict=True)]
    filled = [mode_of(name, one) for one in modes]
    with intermediates() as made:
        wider = await padded(x, spread(x, along, pairs, (0, 0)), spread(x, along, filled, "nearest"), cval)
        wider = wider if wider is x else made(wider)
        views = [view(wider, x.shape, spread(x, along, place, 0)) for place in np.argwhere(window).tolist()]
        if kind:
            found: list[AccelRef] = []
            for start in range(0, count, MOST):
                here, is_last = [*found, *views[start : start + MOST]], start + MOST >= count
                combined = _combined(
                    kind, len(here), wider.dtype.value, dtype if is_last else wider.dtype, False
                )
                found = [await combined(*here) if is_last else made(await combined(*here))]
            return await delivered(found[0], output)
        if count <= _SORTED:
            [middle] = await _network(count, nth, wider.dtype, dtype)(*views)
            return await delivered(middle, output)
        return await delivered(await converted(dtype)(made(await _sorted(views, nth))), output)


def _comparisons(count: int) -> Iterator[tuple[int, int]]:
    """Sort by pairs: K. Batcher's odd-even merge sort, 1968."""
    for p in (1 << n for n in range((count - 1).bit_length())):
        for k in (p >> n for n in range(p.bit_length())):
            for j in range(k % p, count - k, 2 * k):
                for i in range(j, min(j + k, count - k)):
                    if i // (2 * p) == (i + k) // (2 * p):
                        yield i, i + k


@functools.cache
def _network(count: int, nth: int, given: DType, dtype: DType) -> Elementwise[tuple[AccelRef, ...]]:
    needed, steps = {nth}, list[str]()
    for i, j in reversed(list(_comparisons(count))):
        least, largest = f"minimum(x{i}, x{j})", f"maximum(x{i}, x{j})"
        if {i, j} <= needed:
            steps.append(f"t = {least}; x{j} = {largest}; x{i} = t")
        elif i in needed or j in needed:
            steps.append(f"x{i} = {least}" if i in needed else f"x{j} = {largest}")
            needed |= {i, j}
    value = f"x{nth}" if given is dtype else stored(f"x{nth}", dtype)
    text = "; ".join([*reversed(steps), f"y = {value}"])
    inputs = [f"x{n}" for n in range(count)]
    return Elementwise(text, inputs=inputs, outputs=("y",), dtypes=dtype, operation="ndimage.rank_filter")


async def _sorted(views: Sequence[AccelRef], nth: int) -> AccelRef:
    """Sort windows, as many at a time as memory holds."""
    rows = max(1, _PIECE // max(1, len(views) * math.prod(views[0].shape[1:])))
    parts: list[AccelRef] = []
    with intermediates() as made:
        for start in range(0, views[0].shape[0], rows):
            windows = made(await stack([one[start : start + rows] for one in views], axis=-1))
            parts.append(made(await sort(windows))[..., nth])
        return await concat(parts)


@composed
async def median_filter(
    input: AccelRef,
    size: int | Sequence[int] | None = None,
    footprint: npt.ArrayLike | None = None,
    output: Output = None,
    mode: Mode | Sequence[Mode] = "reflect",
    cval: float = 0.0,
    origin: int | Sequence[int] = 0,
    *,
    axes: int | Sequence[int] | None = None,
) -> AccelRef:
    """Find the median of windows, as `scipy.ndimage.median_filter` does: of an even count the larger one.

    A window with NaN has NaN.

    Args:
        input: The image, real.
        size: Elements of a window along all axes, or along each.
        footprint: In place of it: which elements are in a window.
        output: See `Output`.
        mode: See `Mode`; for all axes, or for each.
        cval: The number beyond the edges, in ``"constant"``.
        origin: How far the window lies behind its place; for all axes, or for each.
        axes: Axes to filter along; None for all.

    Returns:
        The elements, in the dtype of `input`.

    Raises:
        TypeError: `input` is no array of a device, or complex; or `footprint` is on a device.
        ValueError: There is no window, its origin is outside of it, an axis or mode that there is not, or `output`
            of another shape.
        NotSupportedError: float8.
    """
    return await _ranked("median_filter", input, None, size, footprint, output, mode, cval, origin, axes)


async def _extreme(
    name: str,
    input: AccelRef,
    size: Any,
    footprint: Any,
    output: Any,
    mode: Any,
    cval: Any,
    origin: Any,
    axes: Any,
) -> AccelRef:
    return await _ranked(name, input, None, size, footprint, output, mode, cval, origin, axes)


@arguments_of(median_filter, _extreme, "maximum_filter")
def maximum_filter() -> None:
    """Find the largest element of windows, as `scipy.ndimage.maximum_filter` does; see `median_filter`."""


@arguments_of(median_filter, _extreme, "minimum_filter")
def minimum_filter() -> None:
    """Find the least element of windows, as `scipy.ndimage.minimum_filter` does; see `median_filter`."""


@composed
async def rank_filter(
    input: AccelRef,
    rank: int,
    size: int | Sequence[int] | None = None,
    footprint: npt.ArrayLike | None = None,
    output: Output = None,
    mode: Mode | Sequence[Mode] = "reflect",
    cval: float = 0.0,
    origin: int | Sequence[int] = 0,
    *,
    axes: int | Sequence[int] | None = None,
) -> AccelRef:
    """Find an element of windows by its order, as `scipy.ndimage.rank_filter` does.

    Args:
        input: See `median_filter`.
        rank: Its place in the sorted window; from the end for a negative one.
        size: See `median_filter`.
        footprint: See `median_filter`.
        output: See `Output`.
        mode: See `Mode`.
        cval: See `median_filter`.
        origin: See `median_filter`.
        axes: See `median_filter`.

    Returns:
        See `median_filter`.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `median_filter`; or a rank that a window has not.
    """
    return await _ranked("rank_filter", input, rank, size, footprint, output, mode, cval, origin, axes)


@composed
async def percentile_filter(
    input: AccelRef,
    percentile: float,
    size: int | Sequence[int] | None = None,
    footprint: npt.ArrayLike | None = None,
    output: Output = None,
    mode: Mode | Sequence[Mode] = "reflect",
    cval: float = 0.0,
    origin: int | Sequence[int] = 0,
    *,
    axes: int | Sequence[int] | None = None,
) -> AccelRef:
    """Find a percentile of windows, as `scipy.ndimage.percentile_filter` does: an element, never between two.

    Args:
        input: See `median_filter`.
        percentile: From 0 to 100; 100 more than a negative one.
        size: See `median_filter`.
        footprint: See `median_filter`.
        output: See `Output`.
        mode: See `Mode`.
        cval: See `median_filter`.
        origin: See `median_filter`.
        axes: See `median_filter`.

    Returns:
        See `median_filter`.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `median_filter`; or a percentile out of range.
    """
    return await _ranked(
        "percentile_filter", input, percentile, size, footprint, output, mode, cval, origin, axes
    )
