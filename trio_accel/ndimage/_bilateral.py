"""The bilateral filter: C. Tomasi and R. Manduchi, 1998."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import numpy as np

from ..arrays import max as max_of
from ..arrays import min as min_of
from ..arrays import std
from ..backends.base import DType, NotSupportedError
from ..devices import AccelRef
from ..devices.base._refusals import whole
from ..devices.operations._calls import composed
from ..expressions import Elementwise, intermediates
from ._windows import MOST, padded, taken, view

__all__ = ["bilateral_filter"]

_FILLED = {
    "constant": "constant", "edge": "nearest", "symmetric": "reflect", "reflect": "mirror", "wrap": "wrap",
}  # fmt: skip
_SHIFTED = Elementwise[AccelRef]("x - minimum(low, 0)", operation="ndimage.bilateral_filter")
_DIVIDED = Elementwise[AccelRef](
    "where(high > low, total / weight + minimum(low, 0), x)",
    inputs=("total", "weight", "x", "low", "high"),
    operation="ndimage.bilateral_filter",
)


@composed
async def bilateral_filter(
    image: AccelRef,
    win_size: int | None = None,
    sigma_color: float | None = None,
    sigma_spatial: float = 1,
    bins: int = 10000,
    mode: Literal["constant", "edge", "symmetric", "reflect", "wrap"] = "constant",
    cval: float = 0,
    *,
    channel_axis: int | None = None,
) -> AccelRef:
    """Smooth an image and keep its edges, as `skimage.restoration.denoise_bilateral` does of grey images.

    Args:
        image: An image of two axes, of float32 or float64.
        win_size: Elements of a window along an axis, odd; by default ``max(5, 2 * ceil(3 * sigma_spatial) + 1)``.
        sigma_color: Standard deviation of differences; by default that of the image.
        sigma_spatial: Standard deviation of distances, in elements.
        bins: Into how many steps a difference is rounded, up to the largest element.
        mode: What is beyond the edges, by `numpy.pad`'s names.
        cval: The number of ``"constant"``.
        channel_axis: None.

    Returns:
        The means, of the dtype of the image.

    Raises:
        TypeError: `image` is no array of a device, or of another dtype: scikit-image would divide whole numbers by the
            largest one.
        ValueError: Other than two axes, another mode, or a number out of range.
        NotSupportedError: An axis of channels.
    """
    name = "ndimage.bilateral_filter"
    [x] = taken(name, image=image)
    if channel_axis is not None:
        raise NotSupportedError(f"{name}: channel_axis must be None: filter each channel by itself")
    if x.dtype not in (DType.float32, DType.float64):
        raise TypeError(
            f"{name}: image must be of float32 or float64, got {x.dtype}; divide it, as by x / 255"
        )
    if x.ndim != 2:
        raise ValueError(f"{name}: image must have two axes, got shape {x.shape}")
    if mode not in _FILLED:
        raise ValueError(f"{name}: mode must be one of {', '.join(_FILLED)}, got {mode!r}")
    if (
        not sigma_spatial > 0
        or (sigma_color is not None and not sigma_color > 0)
        or whole(name, "bins", bins) < 1
    ):
        told = f"got {sigma_spatial}, {sigma_color} and {bins}"
        raise ValueError(f"{name}: sigma_spatial, sigma_color and bins must be above 0, {told}")
    size = (
        max(5, 2 * math.ceil(3 * sigma_spatial) + 1)
        if win_size is None
        else whole(name, "win_size", win_size)
    )
    if size < 1 or size % 2 == 0:
        raise ValueError(f"{name}: win_size must be odd and at least 1, got {win_size}")
    half = size // 2
    if not x.size:
        return await x.copy()
    with intermediates() as made:
        high, low = made(await max_of(x)), made(await min_of(x))
        deviation: Any = made(await std(x)) if sigma_color is None else float(sigma_color)
        shifted = made(await _SHIFTED(x=x, low=low))
        wider = made(await padded(shifted, [(half, half)] * 2, [_FILLED[mode]] * 2, cval))
        sums: list[AccelRef] = []
        places = list(np.ndindex(size, size))
        for start in range(0, len(places), MOST):
            here = places[start : start + MOST]
            spatial = [
                math.exp(-0.5 * (math.hypot(r - half, c - half) ** 2 / sigma_spatial**2)) for r, c in here
            ]
            views = [view(wider, x.shape, place) for place in here]
            expression = _weights(len(here), bool(sums))
            given = dict(
                zip(expression.inputs, (shifted, high, low, deviation, float(bins), *sums), strict=False)
            )
            sums = [made(one) for one in await expression(*given.values(), *views, *spatial)]
        return await _DIVIDED(*sums, x, low, high)


@functools.cache
def _weights(count: int, is_more: bool) -> Elementwise[tuple[AccelRef, ...]]:
    """Add up weighted elements, and weights. A difference is rounded down to one of a number of steps."""
    text = "h = float64(high); scale = bins / (h - minimum(float64(low), 0)); g = h / bins; x = float64(x);"
    text += "v = -0.5 / (float64(deviation) * float64(deviation));"
    text += "total = total0; weight = weight0" if is_more else "total = 0.0 * x; weight = 0.0 * x"
    for n in range(count):
        text += f"; q = minimum(floor(abs(x - y{n}) * scale), bins - 1) * g; w = exp(q * q * v) * k{n}"
        text += f"; total = total + w * y{n}; weight = weight + w"
    more = ("total0", "weight0") if is_more else ()
    inputs = [
        "x",
        "high",
        "low",
        "deviation",
        "bins",
        *more,
        *[f"{one}{n}" for one in "yk" for n in range(count)],
    ]
    return Elementwise(text, inputs=inputs, outputs=("total", "weight"), operation="ndimage.bilateral_filter")
