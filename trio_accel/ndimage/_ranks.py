"""Filters by order: the least, the largest and the middle element of a window; and the mean, made alike.

A window is combined from two windows of half its length, so a long one costs little more than a short one.
Small windows are sorted by a network of comparisons in the source of an expression. It has only the
comparisons that the requested element depends on.
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
from ..devices import AccelRef, Operand, composed
from . import windows as w
from .windows import Mode, Modes, Numbers, Output

__all__ = [
    "maximum_filter",
    "maximum_filter1d",
    "median_filter",
    "minimum_filter",
    "minimum_filter1d",
    "percentile_filter",
    "rank_filter",
    "uniform_filter",
    "uniform_filter1d",
]

# Elements of a window that one launch combines, and that a network sorts: a text has a most length.
_MAX_COMBINED, _SORTED = 12, 27
# The most elements of a window to sort, and of all windows to sort at a time.
_MAX_SORTED, _CHUNK_ELEMENTS = 1 << 16, 1 << 24


async def _combined(kind: str, views: Sequence[AccelRef], dtype: DType, *divisor: float) -> AccelRef:
    """Combine elements: add them up in the wide dtype, or find the least or the largest."""
    names, wide = [f"x{n}" for n in range(len(views))], views[0].dtype.value
    text, step = "y = x0", f"; y = {kind}(y, {{}})"
    if kind == "uniform":
        wide = w.wide_of(views[0])
        text, step = f"y = {wide}(x0)", f"; y = y + {wide}({{}})"
    text += "".join(step.format(name) for name in names[1:])
    if divisor or wide != dtype:
        text += f"; y = {w.stored('y / n' if divisor else 'y', dtype)}"
    expression = w.compute(f"{kind}_filter", text, (*names, *["n"] * len(divisor)), dtype)
    return await expression(*views, *divisor)


async def _windowed(
    kind: str, x: AccelRef, axis: int, size: int, shape: Sequence[int], dtype: DType, *divisor: float
) -> AccelRef:
    """Combine windows along an axis of a padded array."""

    def part(array: AccelRef, start: int) -> AccelRef:
        return w.view(array, shape, w.spread(x, (axis,), (start,), 0))

    if size <= _MAX_COMBINED:
        return await _combined(kind, [part(x, n) for n in range(size)], dtype, *divisor)
    half, wide = size // 2, DType(w.wide_of(x)) if kind == "uniform" else x.dtype
    longer = [extent + (size - half) * (dim == axis) for dim, extent in enumerate(shape)]
    half_windows = await _windowed(kind, x, axis, half, longer, wide)
    parts = [part(half_windows, 0), part(half_windows, half), *[part(x, size - 1)] * (size % 2)]
    return await _combined(kind, parts, dtype, *divisor)


async def _filter1d(kind: str, axis: int, **arguments: Any) -> AccelRef:
    w.integer("size", arguments["size"])
    return await _ranked(kind, rank=None, footprint=None, axes=w.integer("axis", axis), **arguments)


@composed
async def uniform_filter1d(
    input: Operand,
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
        cval: The number outside of the edges, in ``"constant"``.
        origin: How far the window is shifted towards the begin.

    Returns:
        The means, in the dtype of `input`: of integers rounded towards zero.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `correlate`; or `size` is below 1.
    """
    arguments = input, None, w.integer("size", size), None, output, mode, cval, origin
    return await _ranked("uniform", *arguments, w.integer("axis", axis))


@arguments_of(uniform_filter1d, _filter1d, "maximum")
def maximum_filter1d() -> None:
    """Find the largest element of windows along an axis, as `scipy.ndimage.maximum_filter1d` does.

    A window with NaN has NaN. See `uniform_filter1d` for arguments and errors; complex numbers are refused.
    """


@arguments_of(uniform_filter1d, _filter1d, "minimum")
def minimum_filter1d() -> None:
    """Find the least element of windows along an axis; see `maximum_filter1d`."""


@composed
async def uniform_filter(
    input: Operand,
    size: Numbers = 3,
    output: Output = None,
    mode: Modes = "reflect",
    cval: complex = 0.0,
    origin: Numbers = 0,
    *,
    axes: Numbers | None = None,
) -> AccelRef:
    """Compute means of windows, as `scipy.ndimage.uniform_filter` does.

    Args:
        input: The image.
        size: Elements of a window along all axes, or along each.
        output: See `Output`.
        mode: See `Mode`: for all axes, or for each.
        cval: The number outside of the edges, in ``"constant"``.
        origin: How far the window is shifted towards the begin: for all axes, or for each.
        axes: Axes to filter along; None for all.

    Returns:
        See `uniform_filter1d`; it is rounded to its dtype after each axis.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `uniform_filter1d`.
    """
    return await _ranked("uniform", input, None, size, None, output, mode, cval, origin, axes)


def _nth(kind: str, rank: Any, count: int) -> int:
    """Find which element of a sorted window is wanted."""
    if kind == "percentile":
        w.require(-100 <= rank <= 100, f"percentile must be from -100 to 100, got {rank}")
        return min(int(float(count) * (rank + 100 * (rank < 0)) / 100), count - 1)
    named = {"uniform": 0, "minimum": 0, "median": count // 2, "maximum": count - 1}
    index = w.integer("rank", named.get(kind, rank))
    w.require(-count <= index < count, f"rank must be from {-count} to {count - 1}, got {index}")
    return index % count


async def _ranked(
    kind: str,
    input: Any,
    rank: Any,
    size: Any,
    footprint: Any,
    output: Output,
    mode: Any,
    cval: Any,
    origin: Any,
    axes: object,
) -> AccelRef:
    """Find an element of each window by its order, or the mean."""
    image, along = input, w.axes_of(input, axes)
    sizes = [
        w.integer("size", extent) for extent in w.per_axis("size", 0 if size is None else size, len(along))
    ]
    message = f"size must be at least 0, and a window has at most {_CHUNK_ELEMENTS} elements, got {sizes}"
    w.require(min(sizes, default=0) >= 0 and math.prod(sizes) <= _CHUNK_ELEMENTS, message)
    every = np.broadcast_to(True, sizes)
    window = every if footprint is None else w.numbers("footprint", footprint, "bool")
    message = f"size or footprint must say which elements of {len(along)} axes a window has"
    w.require(window.ndim == len(along) and window.any(), f"{message}, got shape {window.shape}")
    modes, origins = w.modes_of(mode, len(along)), w.origins_of(origin, window.shape)
    dtype, count = w.dtype_of(image, output, image.shape), int(window.sum())
    nth = _nth(kind, rank, count)
    combined = "uniform" if kind == "uniform" else {0: "minimum", count - 1: "maximum"}.get(nth, "")
    if combined and window.all():
        return await _separated(combined, image, output, cval, dtype, along, window.shape, modes, origins)
    w.require(
        count <= _MAX_SORTED, f"size or footprint must have at most {_MAX_SORTED} elements, got {count}"
    )
    if footprint is not None:
        along, modes, origins = w.in_order(along, modes, origins)
    views = await w.windows(image, along, window, origins, modes, cval)
    view_dtype = views[0].dtype
    while combined and len(views) > w.MAX_WINDOW_ELEMENTS:
        views = [
            await _combined(combined, views[: w.MAX_WINDOW_ELEMENTS], view_dtype),
            *views[w.MAX_WINDOW_ELEMENTS :],
        ]
    if combined:
        image = await _combined(combined, views, dtype)
    elif count <= _SORTED:
        [image] = await _network(count, nth, view_dtype, dtype)(*views)
    else:
        image = await w.converted(await _sorted(views, nth), dtype)
    return await w.delivered(image, output)


async def _separated(
    kind: str, x: AccelRef, output: Output, cval: Any, dtype: DType, *rows: Sequence[Any]
) -> AccelRef:
    """Combine windows along one axis after the other; each row has a parameter for each axis."""
    result = x
    for axis, n, filled, start in zip(*rows, strict=True):
        widths = w.spread(x, (axis,), (w.reach(n, start),), (0, 0))
        if n > 1:
            wider = await w.padded(result, widths, [filled] * x.ndim, cval)
            result = await _windowed(kind, wider, axis, n, x.shape, dtype, *[float(n)] * (kind == "uniform"))
    return await w.delivered(await w.converted(x, dtype) if result is x else result, output)


def _comparisons(count: int) -> Iterator[tuple[int, int]]:
    """Sort by pairs: K. Batcher's odd-even merge sort, 1968."""
    for p in (1 << n for n in range((count - 1).bit_length())):
        for k in (p >> n for n in range(p.bit_length())):
            for j in range(k % p, count - k, 2 * k):
                same = [i for i in range(j, min(j + k, count - k)) if i // (2 * p) == (i + k) // (2 * p)]
                yield from [(i, i + k) for i in same]


@functools.cache
def _network(count: int, nth: int, source_dtype: DType, dtype: DType) -> Any:
    needed, steps = {nth}, [f"y = {f'x{nth}' if source_dtype is dtype else w.stored(f'x{nth}', dtype)}"]
    for i, j in reversed(list(_comparisons(count))):
        smallest, largest = f"minimum(x{i}, x{j})", f"maximum(x{i}, x{j})"
        if {i, j} <= needed:
            steps.append(f"t = {smallest}; x{j} = {largest}; x{i} = t")
        elif i in needed or j in needed:
            steps.append(f"x{i} = {smallest}" if i in needed else f"x{j} = {largest}")
            needed |= {i, j}
    inputs = tuple([f"x{n}" for n in range(count)])
    return w.several("rank_filter", "; ".join(reversed(steps)), inputs, ("y",), dtype)


async def _sorted(views: Sequence[AccelRef], nth: int) -> AccelRef:
    """Sort windows, as many at a time as memory holds."""
    rows = max(1, _CHUNK_ELEMENTS // max(1, len(views) * math.prod(views[0].shape[1:])))
    parts: list[AccelRef] = []
    for start in range(0, views[0].shape[0], rows):
        windows = await sort(await stack([view[start : start + rows] for view in views], axis=-1))
        parts.append(await windows[..., nth].copy())
    return await concat(parts)


@composed
async def median_filter(
    input: Operand,
    size: Numbers | None = None,
    footprint: npt.ArrayLike | None = None,
    output: Output = None,
    mode: Modes = "reflect",
    cval: float = 0.0,
    origin: Numbers = 0,
    *,
    axes: Numbers | None = None,
) -> AccelRef:
    """Find the median of windows, as `scipy.ndimage.median_filter` does: of an even count the larger one.

    A window with NaN has NaN.

    Args:
        input: The image, real.
        size: Elements of a window along all axes, or along each.
        footprint: Replaces `size`: the elements of a window, on the host.
        output: See `Output`.
        mode: See `Mode`: for all axes, or for each.
        cval: The number outside of the edges, in ``"constant"``.
        origin: How far the window is shifted towards the begin: for all axes, or for each.
        axes: Axes to filter along; None for all.

    Returns:
        The elements, in the dtype of `input`.

    Raises:
        TypeError: `input` is not an array of a device, or is complex; or `footprint` is on a device.
        ValueError: There is no window, its origin is outside of it, an axis or mode is unknown, or `output`
            has another shape.
        NotSupportedError: float8.
    """
    return await _ranked("median", input, None, size, footprint, output, mode, cval, origin, axes)


async def _extreme(kind: str, **arguments: Any) -> AccelRef:
    return await _ranked(kind, rank=None, **arguments)


@arguments_of(median_filter, _extreme, "maximum")
def maximum_filter() -> None:
    """Find the largest element of windows, as `scipy.ndimage.maximum_filter` does; see `median_filter`."""


@arguments_of(median_filter, _extreme, "minimum")
def minimum_filter() -> None:
    """Find the least element of windows, as `scipy.ndimage.minimum_filter` does; see `median_filter`."""


@composed
async def rank_filter(
    input: Operand,
    rank: int,
    size: Numbers | None = None,
    footprint: npt.ArrayLike | None = None,
    output: Output = None,
    mode: Modes = "reflect",
    cval: float = 0.0,
    origin: Numbers = 0,
    *,
    axes: Numbers | None = None,
) -> AccelRef:
    """Find the element of windows at place `rank` of their order, as `scipy.ndimage.rank_filter` does.

    A negative `rank` counts from the end. All else is as of `median_filter`.
    """
    return await _ranked("rank", input, rank, size, footprint, output, mode, cval, origin, axes)


@composed
async def percentile_filter(
    input: Operand,
    percentile: float,
    size: Numbers | None = None,
    footprint: npt.ArrayLike | None = None,
    output: Output = None,
    mode: Modes = "reflect",
    cval: float = 0.0,
    origin: Numbers = 0,
    *,
    axes: Numbers | None = None,
) -> AccelRef:
    """Find a percentile of windows, as `scipy.ndimage.percentile_filter` does: an element, never between two.

    A negative `percentile` is 100 more. All else is as of `median_filter`.
    """
    return await _ranked("percentile", input, percentile, size, footprint, output, mode, cval, origin, axes)
