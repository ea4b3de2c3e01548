"""Gradients of window ranks, window means, and image interpolations."""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import arrays as _arrays
from .._names import later
from ._backward import RULES, bound, refuse
from ._elementwise import Rule
from ._rules import composition

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
ndimage = later("trio_accel.ndimage")
bilateral = later("trio_accel.ndimage._bilateral")


def _splines(call: Any, g: Any) -> Iterator[Rule]:
    """Gradients of products with a matrix along each axis, which is made of unit vectors."""
    args = bound(call)
    if not isinstance(args["output"], (str, type(None))):
        raise refuse(call.function.name, "output= changes an array")
    x = args.pop("input")
    count, args["output"] = len(x.shape), "float64"
    axes = [args.pop("axis") % count] if "axis" in args else range(count)

    def matrix(axis: int) -> Any:
        # The functions are linear, with real weights.
        zeros = arrays.zeros_like(g if g.dtype.kind != "complex" else arrays.real(g))
        vectors = arrays.reshape(zeros, (-1,))[:1] + np.eye(x.shape[axis])
        return ndimage.spline_filter1d(vectors, axis=0, **args)

    def slope() -> Any:
        grad = g
        for axis in axes:
            turned = arrays.moveaxis(grad, axis, -1) @ matrix(axis).cast(g.dtype)
            grad = arrays.moveaxis(turned, -1, axis)
        return grad if grad.dtype == x.dtype else grad.cast(x.dtype)

    yield x, slope


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
    x, half = image.cast("float64"), bilateral.window_size(win_size, sigma_spatial) // 2
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


RULES.update(
    {
        **{f"ndimage.{name}": _splines for name in ("spline_filter", "spline_filter1d")},
        "ndimage.bilateral_filter": composition(_bilateral),
    }
)
