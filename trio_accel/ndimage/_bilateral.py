"""The bilateral filter: C. Tomasi and R. Manduchi, 1998."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from .. import arrays
from ..backends.base import DType, NotSupportedError, Strs
from ..devices import AccelRef, Operand, composed
from . import windows as w

__all__ = ["bilateral_filter"]

_FILLED = {
    "constant": "constant",
    "edge": "nearest",
    "symmetric": "reflect",
    "reflect": "mirror",
    "wrap": "wrap",
}
_INPUTS = "x", "high", "low", "deviation", "bins"


@composed
async def bilateral_filter(
    image: Operand,
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

    Weights are Gaussians of the distance and the difference. (scikit-image 0.26 takes distances from the
    wrong row of a table.)

    Args:
        image: An image of two axes, of float32 or float64.
        win_size: Elements of a window along an axis, odd; by default ``max(5, 2 * ceil(3 * sigma_spatial) +
            1)``.
        sigma_color: Standard deviation of differences; by default the image's.
        sigma_spatial: Standard deviation of distances, in elements.
        bins: The number of steps to which a difference is rounded down, up to the largest element.
        mode: The values outside of the edges, by `numpy.pad`'s names.
        cval: The number of ``"constant"``.
        channel_axis: None.

    Returns:
        The means, computed in float64, with the dtype of the image.

    Raises:
        TypeError: `image` is not an array of a device, or of another dtype: scikit-image would divide
            integers by the largest one.
        ValueError: Other than two axes, another mode, or a number out of range.
        NotSupportedError: An axis of channels.
    """
    x: Any = image
    w.axes_of(x, None)
    if channel_axis is not None:
        raise NotSupportedError("channel_axis must be None: filter each channel by itself")
    if x.dtype not in (DType.float32, DType.float64) or x.ndim != 2:
        details = f"got shape {x.shape} of {x.dtype}; divide integers, as by x / 255"
        raise TypeError(f"image must have two axes of float32 or float64, {details}")
    w.require(mode in _FILLED, f"mode must be one of {', '.join(_FILLED)}, got {mode!r}")
    spatial = w.real("sigma_spatial", sigma_spatial)
    is_right = spatial > 0 and w.integer("bins", bins) > 0
    is_right = is_right and (sigma_color is None or w.real("sigma_color", sigma_color) > 0)
    details = f"got {sigma_color}, {sigma_spatial} and {bins}"
    w.require(is_right, f"sigma_color, sigma_spatial and bins must be above 0, {details}")
    size = w.integer("win_size", window_size(win_size, spatial))
    w.require(0 < size < 1 << 10 and size % 2 == 1, f"win_size must be odd, and from 1 to 1023, got {size}")
    if not x.size:
        return await w.converted(x, x.dtype)
    half, high, low = size // 2, await arrays.max(x), await arrays.min(x)
    deviation: Any = await arrays.std(x) if sigma_color is None else float(sigma_color)
    shifted = await w.compute("bilateral_filter", "x - minimum(low, 0)", ("x", "low"))(x, low)
    wider = await w.padded(shifted, [(half, half)] * 2, [_FILLED[mode]] * 2, cval)
    offsets, sums = list(np.ndindex(size, size)), list[AccelRef]()
    for start in range(0, size * size, w.MAX_WINDOW_ELEMENTS):
        chunk = offsets[start : start + w.MAX_WINDOW_ELEMENTS]
        weights = [math.exp(-0.5 * (math.dist(offset, (half, half)) / spatial) ** 2) for offset in chunk]
        operands = [*sums, *[w.view(wider, x.shape, offset) for offset in chunk], *weights]
        expression = _weights(len(chunk), ("total0", "weight0")[: len(sums)])
        sums = await expression(shifted, high, low, deviation, float(bins), *operands)
    text = "where(high > low, total / weight + minimum(low, 0), x)"
    names = "total", "weight", "x", "low", "high"
    return await w.compute("bilateral_filter", text, names, x.dtype)(*sums, x, low, high)


def window_size(win_size: int | None, spatial: float) -> int:
    """Return the elements of a window along an axis."""
    return max(5, 2 * math.ceil(min(3 * spatial, 1e9)) + 1) if win_size is None else win_size


def _weights(count: int, partial_sums: Strs) -> Any:
    """Add up weighted elements, and weights."""
    text = "h = float64(high); scale = bins / (h - minimum(float64(low), 0)); g = h / bins; c = float64(x);"
    text += "v = -0.5 / (float64(deviation) * float64(deviation));"
    text += "total = total0; weight = weight0" if partial_sums else "total = 0.0 * c; weight = 0.0 * c"
    for n in range(count):
        text += f"; q = minimum(floor(abs(c - y{n}) * scale), bins - 1) * g; w = exp(q * q * v) * k{n}"
        text += f"; total = total + w * y{n}; weight = weight + w"
    inputs = (*_INPUTS, *partial_sums, *[f"{letter}{n}" for letter in "yk" for n in range(count)])
    return w.several("bilateral_filter", text, inputs, ("total", "weight"))
