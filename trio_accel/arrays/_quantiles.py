"""Medians and quantiles along axes: a sort, and one launch that takes two neighbours of each line."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt

from ..actors import arguments_of
from ..backends.base import DType
from ..backends.base.contract.values import check_plain
from ..devices import AccelRef, Operand
from ..devices.operations._calls import composed
from ..devices.operations._plan_source import refuse_value
from ..expressions import Elementwise, Reduction, axes_of, reduced
from ._checks import check_real, flag, placed
from ._sorting import sort
from ._views import moveaxis, reshape

__all__ = [
    "QuantileMethod", "median", "nanmedian", "nanpercentile", "nanquantile", "percentile", "quantile",
]  # fmt: skip

QuantileMethod: TypeAlias = Literal[
    "inverted_cdf", "averaged_inverted_cdf", "closest_observation", "interpolated_inverted_cdf", "hazen",
    "weibull", "linear", "median_unbiased", "normal_unbiased", "lower", "higher", "midpoint", "nearest",
]  # fmt: skip
"""How a quantile that is between two elements is found, by the names of `numpy.quantile`."""

# The formulas of each method: the place ``h`` of the share ``q`` among ``n`` elements, from 0 on, and the
# weight ``g`` of the element behind it (Hyndman and Fan, Sample Quantiles in Statistical Packages, 1996).
_BETWEEN = "g = h - floor(h)"
_PLACES: dict[str, str] = {
    "inverted_cdf": "h = ceil(n * q - 1); g = 0 * h",
    "averaged_inverted_cdf": "h = n * q - 1; g = where(h == floor(h), 0.5, 1)",
    "closest_observation": "h = n * q - 1.5; h = floor(h) + where(h == floor(h) and floor(h) % 2 == 1, 0, 1);"
    "g = 0 * h",
    "interpolated_inverted_cdf": f"h = n * q - 1; {_BETWEEN}",
    "hazen": f"h = n * q - 0.5; {_BETWEEN}",
    "weibull": f"h = (n + 1) * q - 1; {_BETWEEN}",
    "linear": f"h = (n - 1) * q; {_BETWEEN}",
    "median_unbiased": f"h = n * q + (1 / 3 + q / 3) - 1; {_BETWEEN}",
    "normal_unbiased": f"h = n * q + (3 / 8 + q / 4) - 1; {_BETWEEN}",
    "lower": "h = floor((n - 1) * q); g = 0 * h",
    "higher": "h = ceil((n - 1) * q); g = 0 * h",
    "midpoint": "h = (n - 1) * q; g = where(h == floor(h), 0, 0.5)",
    "nearest": "h = round((n - 1) * q); g = 0 * h",
}
# NaN comes last in a line. Elements that are equal may be infinite.
_TEXT = (
    "{places}; a = float64(s[i(1), int64(clip(floor(h), 0, n - 1))]);"
    "b = float64(s[i(1), int64(clip(floor(h) + 1, 0, n - 1))]); z = s[i(1), n - 1];"
    "y = where(z != z, nan, where(g == 0 or a == b, a, a * (1 - g) + b * g))"
)


@functools.cache
def _expression(name: str, method: str, dtype: DType) -> Elementwise[AccelRef]:
    text = _TEXT.format(places=_PLACES[method])
    return Elementwise(text, inputs=("s", "q", "n"), dtypes=dtype, operation=name)


@functools.cache
def _counting(name: str) -> Reduction:
    return Reduction("x == x", "sum", operation=name)


async def _quantiles(
    name: str, x: Operand, q: Any, axis: int | Sequence[int] | None, method: str, keepdims: bool
) -> AccelRef:
    is_taken = isinstance(cast("object", q), (int, float, Sequence, np.ndarray, np.generic))
    check_plain(f"{name}: q", q)
    try:
        shares = np.asarray(q if is_taken and not np.iscomplexobj(q) else [[]], np.float64)
    except (TypeError, ValueError):
        shares = np.zeros((0, 0))
    if shares.ndim > 1:
        raise TypeError(f"{name}: q must be a number or a sequence of numbers, got {type(q).__name__}")
    most = 100 if "percentile" in name else 1
    if not np.all((shares >= 0) & (shares <= most)):
        raise ValueError(f"{name}: q must be from 0 to {most}")
    shares = shares / most
    if method not in _PLACES:
        refuse_value(name, "method", get_args(QuantileMethod), method)
    [x] = await placed(name, x=x)
    check_real(name, x=x.spec)
    axes = axes_of(name, x.shape, axis)
    lines, n = reduced(x.shape, axes), math.prod(x.shape[one] for one in axes)
    kept = reduced(x.shape, axes, keepdims=flag(name, "keepdims", keepdims))
    dtype = x.dtype if x.dtype.kind == "float" else DType.float64
    if not n:
        return await x.device.full((*shares.shape, *kept), math.nan, dtype)
    last = moveaxis(x, axes, range(x.ndim - len(axes), x.ndim))
    s = await sort(await reshape(last, (math.prod(lines), n)))
    count = await _counting(name)(s, axis=1) if ".nan" in name else n
    made = _expression(name, method, dtype)
    found = await made(s, shares.reshape(-1, 1), count, shape=(shares.size, math.prod(lines)))
    return found.reshape((*shares.shape, *kept))


@composed
async def median(x: Operand, axis: int | Sequence[int] | None = None, *, keepdims: bool = False) -> AccelRef:
    """Find the element in the middle of those along axes; of two the mean. NaN if there is one.

    The elements are sorted, and what is found is computed in float64 and rounded once.

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
        The medians, of the dtype of `x`; float64 for whole numbers and truth values. NaN of no elements.

    Raises:
        TypeError: `x` is no array, or complex.
        ValueError: An axis that there is not.
        NotSupportedError: See `sort`.
    """
    return await _quantiles("arrays.median", x, 0.5, axis, "linear", keepdims)


@composed
async def nanmedian(
    x: Operand, axis: int | Sequence[int] | None = None, *, keepdims: bool = False
) -> AccelRef:
    """Find the element in the middle of those along axes that are not NaN; NaN where all are.

    Arguments and errors are those of `median`.
    """
    return await _quantiles("arrays.nanmedian", x, 0.5, axis, "linear", keepdims)


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

    The elements are sorted once for all shares. What is found is computed in float64 and rounded once.

    Args:
        x: The array, real.
        q: A share from 0 to 1, or several in a sequence, on the host.
        axis: Axis or axes; None for all.
        method: What is found between two elements; see `QuantileMethod`.
        keepdims: Whether the axes stay, with one element.

    Returns:
        The quantiles, of the dtype of `x`; float64 for whole numbers and truth values. Several shares
        are along a new first axis.

    Raises:
        TypeError: `x` is no array, or complex; or `q` is of no numbers.
        ValueError: An axis that there is not, a share that is not from 0 to 1, or another
            method.
        NotSupportedError: See `sort`.
    """
    return await _quantiles("arrays.quantile", x, q, axis, method, keepdims)


@arguments_of(quantile, _quantiles, "arrays.nanquantile")
def nanquantile() -> None:
    """Find quantiles of the elements along axes that are not NaN; NaN where all are.

    Arguments and errors are those of `quantile`.
    """


@arguments_of(quantile, _quantiles, "arrays.percentile")
def percentile() -> None:
    """Find quantiles of shares in percent, from 0 to 100.

    Arguments and errors are those of `quantile`.
    """


@arguments_of(quantile, _quantiles, "arrays.nanpercentile")
def nanpercentile() -> None:
    """Find quantiles of shares in percent, from 0 to 100, of the elements that are not NaN.

    Arguments and errors are those of `quantile`.
    """
