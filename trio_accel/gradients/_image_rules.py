"""Gradients of orders and means of windows, and of interpolations of images."""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import arrays as _arrays
from .. import ndimage as _ndimage
from ..ndimage._bilateral import window_size
from ..ndimage._interpolation import rotation
from ._backward import RULES, Make, bound, is_operand, refuse
from ._elementwise import Rule
from ._field_rules import PAD_MODES, axes_of_filter, per_axis
from ._rules import composition

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
ndimage: Any = _ndimage


def _ranked(name: str) -> Make:
    """Make a rule of a filter that takes an element of each window by its order."""

    def compose(output: Any, mode: Any, origin: Any, size: Any, **named: Any) -> Any:
        if output is not None:
            raise refuse(f"ndimage.{name}", "output= changes an array or the dtype")
        x, footprint = named["input"], named.get("footprint")
        count = len(x.shape)
        axes = axes_of_filter(named)
        window = np.ones(per_axis(size, len(axes))) if footprint is None else np.asarray(footprint, bool)
        wide, rows = x, [per_axis(option, len(axes)) for option in (mode, origin)]
        for axis, n, axis_mode, start in zip(axes, window.shape, *rows, strict=True):
            widths = [(0, 0)] * count
            widths[axis] = n // 2 + start, n - 1 - n // 2 - start
            how = {"constant_values": named["cval"]} if PAD_MODES[axis_mode] == "constant" else {}
            wide = arrays.pad(wide, widths, mode=PAD_MODES[axis_mode], **how)
        views = arrays.sliding_window_view(wide, window.shape, axis=tuple(axes))
        flat = arrays.reshape(views, (*x.shape, window.size))
        chosen = arrays.take(flat, np.flatnonzero(window), axis=-1)
        return arrays.sort(chosen, axis=-1)[..., _rank(name, named, chosen.shape[-1])]

    return composition(compose)


def _rank(name: str, args: dict[str, Any], count: int) -> int:
    if "rank" in args:
        return int(args["rank"]) % count
    if "percentile" in args:
        share = args["percentile"] % 100 if args["percentile"] < 0 else args["percentile"]
        return count - 1 if share == 100 else int(count * share / 100)
    return {"minimum": 0, "maximum": count - 1}.get(name.partition("_")[0], count // 2)


def _separable(call: Any, g: Any) -> Iterator[Rule]:
    """Gradients of products with a matrix along each axis, which is made of unit vectors."""
    args = bound(call)
    if not isinstance(args["output"], (str, type(None))):
        raise refuse(call.function.name, "output= changes an array")
    x, name = args.pop("input"), call.function.name.partition(".")[2]
    count, args["output"] = len(x.shape), "float64"
    axes = [args.pop("axis") % count] if "axis" in args else range(count)

    def matrix(axis: int) -> Any:
        # The functions are linear, with real weights.
        zeros = arrays.zeros_like(g if g.dtype.kind != "complex" else arrays.real(g))
        vectors = arrays.reshape(zeros, (-1,))[:1] + np.eye(x.shape[axis])
        if "spline" in name:
            return ndimage.spline_filter1d(vectors, axis=0, **args)
        # The columns stay: they are shifted by 0, or zoomed by 1.
        moves = [per_axis(args[name], count)[axis], float(name == "zoom")]
        return getattr(ndimage, name)(vectors, **args | {name: moves, "cval": 0.0})

    def slope() -> Any:
        grad = g
        for axis in axes:
            turned = arrays.moveaxis(grad, axis, -1) @ matrix(axis).cast(g.dtype)
            grad = arrays.moveaxis(turned, -1, axis)
        return grad if grad.dtype == x.dtype else grad.cast(x.dtype)

    yield x, slope


def _interpolated(name: str, x: Any, points: Any, args: dict[str, Any]) -> Any:
    """Interpolate an image at coordinates by the elements around them."""
    order, mode = args["order"], args["mode"]
    if order > 1 or mode not in ("constant", "nearest"):
        raise refuse(name, "only order 0 and 1 have rules, with the modes 'constant' and 'nearest'")
    lib: Any = np if isinstance(points, np.ndarray) else arrays
    ends = [extent - 1 for extent in x.shape]
    inside = [lib.clip(points[axis], 0, end) for axis, end in enumerate(ends)]
    first = [lib.floor(coordinate if order else coordinate + 0.5) for coordinate in inside]
    total: Any = 0
    for corner in itertools.product((0, 1)[: order + 1], repeat=len(ends)):
        indices: list[Any] = []
        weight: Any = 1.0
        for coordinate, low, step, end in zip(inside, first, corner, ends, strict=True):
            index = lib.clip(low + step, 0, end)
            indices.append(index.astype("int64") if lib is np else index.cast("int64"))
            if order:
                weight = weight * (coordinate - low if step else 1 - (coordinate - low))
        total = total + arrays.gather_nd(x, tuple(indices)) * weight
    if mode == "constant":
        for axis, end in enumerate(ends):
            total = arrays.where((points[axis] < 0) | (points[axis] > end), args["cval"], total)
    return total


def _map_coordinates(coordinates: Any, **named: Any) -> Any:
    points = coordinates if is_operand(coordinates) else np.asarray(coordinates, float)
    return _interpolated("ndimage.map_coordinates", named["input"], points, named)


def _affine_transform(matrix: Any, offset: Any, output_shape: Any, **named: Any) -> Any:
    x, rows = named["input"], np.asarray(matrix, float)
    count = len(x.shape)
    starts = np.broadcast_to(np.asarray(offset, float), count)
    if rows.shape in ((count, count + 1), (count + 1, count + 1)):
        rows, starts = rows[:count, :count], rows[:count, count]
    rows = np.diag(rows) if rows.ndim == 1 else rows
    grid = np.indices(tuple(x.shape if output_shape is None else output_shape))
    points = np.tensordot(rows, grid, 1) + starts.reshape(-1, *(1,) * (grid.ndim - 1))
    return _interpolated("ndimage.affine_transform", x, points, named)


def _rotate(angle: float, axes: Any, reshape: bool, **named: Any) -> Any:
    x = named["input"]
    count = len(x.shape)
    plane = sorted(int(axis) % count for axis in axes)
    matrix, starts, shape = rotation(x.shape, angle, plane, reshape=reshape)
    rows, offset = np.eye(count), np.zeros(count)
    rows[np.ix_(plane, plane)], offset[plane] = matrix, starts
    grid = np.indices(tuple(shape))
    points = np.tensordot(rows, grid, 1) + offset.reshape(-1, *(1,) * count)
    return _interpolated("ndimage.rotate", x, points, named)


def _bilateral(
    image: Any,
    win_size: int | None,
    sigma_color: float | None,
    sigma_spatial: float,
    mode: str,
    cval: float,
    **_: Any,
) -> Any:
    """Weigh all windows, by differences that are not rounded to bins, because steps have no slope."""
    if 0 in image.shape:
        return image
    x, half = image.cast("float64"), window_size(win_size, sigma_spatial) // 2
    high, minimum = arrays.max(x), arrays.min(x)
    low, is_even = arrays.minimum(minimum, 0), high == minimum
    # An even image stays. Its own deviation of 0 would make quotients infinite.
    deviation = arrays.where(is_even, 1.0, arrays.std(x)) if sigma_color is None else float(sigma_color)
    shifted, span = x - low, arrays.where(is_even, 1.0, high - low)
    if mode == "constant":
        wide = arrays.pad(shifted, half, constant_values=cval)
    else:
        # A window may be wider than the image, which `arrays.pad` refuses.
        rows, columns = (np.pad(np.arange(extent), half, mode) for extent in x.shape)  # type: ignore[call-overload]
        wide = arrays.take(arrays.take(shifted, rows, axis=0), columns, axis=1)
    windows = arrays.sliding_window_view(wide, (2 * half + 1,) * 2)
    away = np.hypot(*(np.indices((2 * half + 1,) * 2) - half)) / sigma_spatial
    differences = arrays.minimum(arrays.abs(windows - shifted[..., None, None]) / span, 1) * high / deviation
    weights = arrays.exp(-0.5 * differences * differences) * np.exp(-0.5 * away * away)
    means = arrays.sum(windows * weights, axis=(-2, -1)) / arrays.sum(weights, axis=(-2, -1))
    return arrays.where(is_even, x, means + low).cast(image.dtype)


_RANKED = (
    "maximum_filter",
    "maximum_filter1d",
    "median_filter",
    "minimum_filter",
    "minimum_filter1d",
    "percentile_filter",
    "rank_filter",
)
RULES.update(
    {
        **{f"ndimage.{name}": _ranked(name) for name in _RANKED},
        **{f"ndimage.{name}": _separable for name in ("shift", "spline_filter", "spline_filter1d", "zoom")},
        "ndimage.bilateral_filter": composition(_bilateral),
        "ndimage.map_coordinates": composition(_map_coordinates),
        "ndimage.affine_transform": composition(_affine_transform),
        "ndimage.rotate": composition(_rotate),
    }
)
