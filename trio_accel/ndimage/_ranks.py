"""Filters by order: the least, the largest and the middle element of a window; and the mean, which is made alike.

A window of one length is made of two of half of it, so a long one costs little more than a short one. Small
windows are sorted by a network of comparisons in the text of an expression. It has those comparisons alone that
the wanted element depends on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..actors import arguments_of
from ..arrays import concat, sort, stack
from ..backends.base import DType
from ..devices import AccelRef
from ..devices.base._refusals import whole
from ..devices.operations._calls import composed
from . import _windows as w
from ._windows import Mode, Modes, Numbers, Output

__all__ = [
    "maximum_filter", "maximum_filter1d", "median_filter", "minimum_filter", "minimum_filter1d",
    "percentile_filter", "rank_filter", "uniform_filter", "uniform_filter1d",
]  # fmt: skip

# Elements of a window that one launch combines, and that a network sorts: a text has a most length.
_SHORT, _SORTED = 12, 27
# Elements of windows that are sorted at a time.
_PIECE = 1 << 24


async def _combined(
    kind: str, views: Sequence[AccelRef], dtype: DType, divisor: float | None = None
) -> AccelRef:
    """Combine elements: add them up in the wide dtype, or find the least or the largest."""
    names, is_sum = [f"x{n}" for n in range(len(views))], kind == "uniform"
    given = [f"{w.wide_of(views[0])}({name})" for name in names] if is_sum else names
    text = f"y = {given[0]}" + "".join(
        f"; y = {f'y + {x}' if is_sum else f'{kind}(y, {x})'}" for x in given[1:]
    )
    if divisor is not None or (not is_sum and views[0].dtype is not dtype):
        text += f"; y = {w.stored('y' if divisor is None else 'y / n', dtype)}"
    more = [] if divisor is None else [divisor]
    made: AccelRef = await w.compute(f"{kind}_filter", text, (*names, *["n"] * len(more)), dtype)(
        *views, *more
    )
    return made


async def _windowed(
    kind: str, x: AccelRef, axis: int, size: int, shape: Sequence[int], dtype: DType, divisor: float | None
) -> AccelRef:
    """Combine windows along an axis of a padded array."""
    if size <= _SHORT:
        parts = [w.view(x, shape, w.spread(x, (axis,), (n,), 0)) for n in range(size)]
    else:
        half, wide = size // 2, DType(w.wide_of(x)) if kind == "uniform" else x.dtype
        longer = [extent + (size - half) * (one == axis) for one, extent in enumerate(shape)]
        halves = await _windowed(kind, x, axis, half, longer, wide, None)
        parts = [w.view(halves, shape, w.spread(x, (axis,), (start,), 0)) for start in (0, half)]
        parts += [w.view(x, shape, w.spread(x, (axis,), (size - 1,), 0))] * (size % 2)
    return await _combined(kind, parts, dtype, divisor)


async def _lines(
    kind: str,
    name: str,
    x: AccelRef,
    along: Sequence[int],
    rows: Sequence[Any],
    output: Output,
    cval: complex,
) -> AccelRef:
    """Combine windows along one axis after the other; rows have their sizes, modes and origins."""
    dtype, made = w.dtype_of(name, x, output, x.shape), x
    for axis, given, mode, origin in zip(along, *rows, strict=True):
        size = whole(name, "size", given)
        widths = w.spread(x, (axis,), (w.reach(name, size, origin),), (0, 0))
        if size > 1:
            wider = await w.padded(made, widths, [w.mode_of(name, mode)] * x.ndim, cval)
            divisor = float(size) if kind == "uniform" else None
            made = await _windowed(kind, wider, axis, size, x.shape, dtype, divisor)
    return await w.delivered(await w.converted(x, dtype) if made is x else made, output)


async def _filter1d(
    name: str, input: AccelRef, size: int, axis: int, output: Output, mode: Mode, cval: complex, origin: int
) -> AccelRef:
    x, kind, name = input, name.partition("_")[0], f"ndimage.{name}"
    return await _lines(kind, name, x, w.axes_of(name, x, axis), ([size], [mode], [origin]), output, cval)


@composed
async def uniform_filter1d(
    input: AccelRef, size: int, axis: int = -1, output: Output = None, mode: Mode = "reflect",
    cval: complex = 0.0, origin: int = 0,
) -> AccelRef:  # fmt: skip
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
    input: AccelRef, size: Numbers = 3, output: Output = None, mode: Modes = "reflect", cval: complex = 0.0,
    origin: Numbers = 0, *, axes: Numbers | None = None,
) -> AccelRef:  # fmt: skip
    """Compute means of windows, as `scipy.ndimage.uniform_filter` does.

    Args:
        input: The image.
        size: Elements of a window along all axes, or along each.
        output: See `Output`.
        mode: See `Mode`: for all axes, or for each.
        cval: The number beyond the edges, in ``"constant"``.
        origin: How far the window lies behind its place: for all axes, or for each.
        axes: Axes to filter along; None for all.

    Returns:
        See `uniform_filter1d`; it is rounded to its dtype after each axis.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `uniform_filter1d`.
    """
    name, given = "ndimage.uniform_filter", {"size": size, "mode": mode, "origin": origin}
    along = w.axes_of(name, input, axes)
    rows = [w.each(name, key, value, len(along)) for key, value in given.items()]
    return await _lines("uniform", name, input, along, rows, output, cval)


def _nth(name: str, rank: Any, count: int) -> int:
    """Find which element of a sorted window is wanted."""
    if "percentile" in name:
        if not -100 <= rank <= 100:
            raise ValueError(f"{name}: percentile must be from -100 to 100, got {rank}")
        return min(int(float(count) * (rank + 100 * (rank < 0)) / 100), count - 1)
    named = {"minimum": 0, "median": count // 2, "maximum": count - 1}
    found = named.get(name.removeprefix("ndimage.").partition("_")[0], rank)
    if not -count <= whole(name, "rank", found) < count:
        raise ValueError(
            f"{name}: rank must be from {-count} to {count - 1} for {count} elements, got {found}"
        )
    return int(found % count)


async def _ranked(
    name: str, input: AccelRef, rank: Any, size: Any, footprint: Any, output: Output, mode: Any, cval: Any,
    origin: Any, axes: object,
) -> AccelRef:  # fmt: skip
    """Find an element of each window by its order."""
    x, name = input, f"ndimage.{name}"
    along = w.axes_of(name, x, axes)
    if footprint is None and size is None:
        raise ValueError(f"{name}: size or footprint must say what a window is")
    sizes = [max(0, whole(name, "size", one)) for one in w.each(name, "size", size or 0, len(along))]
    window = np.ones(sizes, bool) if footprint is None else w.numbers(name, "footprint", footprint, "bool")
    if window.ndim != len(along) or not window.any():
        told = f"{len(along)} axes and an element that is true, got shape {window.shape}"
        raise ValueError(f"{name}: footprint must have {told}")
    modes, origins = (w.each(name, key, one, len(along)) for key, one in (("mode", mode), ("origin", origin)))
    nth, count = _nth(name, rank, int(window.sum())), int(window.sum())
    kind = {0: "minimum", count - 1: "maximum"}.get(nth, "")
    if kind and window.all():
        return await _lines(kind, name, x, along, (window.shape, modes, origins), output, cval)
    dtype = w.dtype_of(name, x, output, x.shape)
    if footprint is not None and along:
        # As of weights.
        along, modes, origins = map(list, zip(*sorted(zip(along, modes, origins, strict=True)), strict=True))
    widths = [w.reach(name, one, start) for one, start in zip(window.shape, origins, strict=True)]
    filled = w.spread(x, along, [w.mode_of(name, one) for one in modes], "nearest")
    wider = await w.padded(x, w.spread(x, along, widths, (0, 0)), filled, cval)
    views = [w.view(wider, x.shape, w.spread(x, along, place, 0)) for place in np.argwhere(window).tolist()]
    while kind and len(views) > w.MOST:
        views = [await _combined(kind, views[: w.MOST], wider.dtype), *views[w.MOST :]]
    if kind:
        made = await _combined(kind, views, dtype)
    elif count <= _SORTED:
        made = (await _network(count, nth, wider.dtype, dtype)(*views))[0]
    else:
        made = await w.converted(await _sorted(views, nth), dtype)
    return await w.delivered(made, output)


def _comparisons(count: int) -> Iterator[tuple[int, int]]:
    """Sort by pairs: K. Batcher's odd-even merge sort, 1968."""
    for p in (1 << n for n in range((count - 1).bit_length())):
        for k in (p >> n for n in range(p.bit_length())):
            for j in range(k % p, count - k, 2 * k):
                same = [i for i in range(j, min(j + k, count - k)) if i // (2 * p) == (i + k) // (2 * p)]
                yield from [(i, i + k) for i in same]


@functools.cache
def _network(count: int, nth: int, given: DType, dtype: DType) -> Any:
    needed, steps = {nth}, [f"y = {f'x{nth}' if given is dtype else w.stored(f'x{nth}', dtype)}"]
    for i, j in reversed(list(_comparisons(count))):
        least, largest = f"minimum(x{i}, x{j})", f"maximum(x{i}, x{j})"
        if {i, j} <= needed:
            steps.append(f"t = {least}; x{j} = {largest}; x{i} = t")
        elif i in needed or j in needed:
            steps.append(f"x{i} = {least}" if i in needed else f"x{j} = {largest}")
            needed |= {i, j}
    inputs = tuple([f"x{n}" for n in range(count)])
    return w.compute("rank_filter", "; ".join(reversed(steps)), inputs, dtype, ("y",))


async def _sorted(views: Sequence[AccelRef], nth: int) -> AccelRef:
    """Sort windows, as many at a time as memory holds."""
    rows = max(1, _PIECE // max(1, len(views) * math.prod(views[0].shape[1:])))
    parts: list[AccelRef] = []
    for start in range(0, views[0].shape[0], rows):
        windows = await sort(await stack([one[start : start + rows] for one in views], axis=-1))
        parts.append(await windows[..., nth].copy())
    return await concat(parts)


@composed
async def median_filter(
    input: AccelRef, size: Numbers | None = None, footprint: npt.ArrayLike | None = None, output: Output = None,
    mode: Modes = "reflect", cval: float = 0.0, origin: Numbers = 0, *, axes: Numbers | None = None,
) -> AccelRef:  # fmt: skip
    """Find the median of windows, as `scipy.ndimage.median_filter` does: of an even count the larger one.

    A window with NaN has NaN.

    Args:
        input: The image, real.
        size: Elements of a window along all axes, or along each.
        footprint: In place of it: which elements are in a window, on the host.
        output: See `Output`.
        mode: See `Mode`: for all axes, or for each.
        cval: The number beyond the edges, in ``"constant"``.
        origin: How far the window lies behind its place: for all axes, or for each.
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


async def _extreme(name: str, **given: Any) -> AccelRef:
    return await _ranked(name, rank=None, **given)


@arguments_of(median_filter, _extreme, "maximum_filter")
def maximum_filter() -> None:
    """Find the largest element of windows, as `scipy.ndimage.maximum_filter` does; see `median_filter`."""


@arguments_of(median_filter, _extreme, "minimum_filter")
def minimum_filter() -> None:
    """Find the least element of windows, as `scipy.ndimage.minimum_filter` does; see `median_filter`."""


@composed
async def rank_filter(
    input: AccelRef, rank: int, size: Numbers | None = None, footprint: npt.ArrayLike | None = None,
    output: Output = None, mode: Modes = "reflect", cval: float = 0.0, origin: Numbers = 0,
    *, axes: Numbers | None = None,
) -> AccelRef:  # fmt: skip
    """Find the element of windows at place `rank` of their order, as `scipy.ndimage.rank_filter` does.

    A negative `rank` counts from the end. All else is as of `median_filter`.
    """
    return await _ranked("rank_filter", input, rank, size, footprint, output, mode, cval, origin, axes)


@composed
async def percentile_filter(
    input: AccelRef, percentile: float, size: Numbers | None = None, footprint: npt.ArrayLike | None = None,
    output: Output = None, mode: Modes = "reflect", cval: float = 0.0, origin: Numbers = 0,
    *, axes: Numbers | None = None,
) -> AccelRef:  # fmt: skip
    """Find a percentile of windows, as `scipy.ndimage.percentile_filter` does: an element, never between two.

    A negative `percentile` is 100 more. All else is as of `median_filter`.
    """
    return await _ranked(
        "percentile_filter", input, percentile, size, footprint, output, mode, cval, origin, axes
    )
