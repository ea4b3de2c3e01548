"""Reductions along axes, by the array API standard; statistics, and normalizations.

All of them take one axis, several, or None for all axes; without axes, ``axis=()``, each element is its own
group. `keepdims` leaves the reduced axes with one element. float16, bfloat16 and float32 are added and
multiplied in float64, complex64 in complex128, and the result is rounded once. The order of the elements
differs between devices and from NumPy's. Each device repeats its result for the same array.

If there is a NaN among the elements, it is the result of `max`, `min`, and all kinds of sums. `argmax` and
`argmin` return the first NaN. Without elements, `sum` and `count_nonzero` are 0, `prod` 1, `any` False, `all`
True, and `mean`, `var` and `std` NaN. The others refuse arrays without elements, before the launch.

Each statistic and each normalization is one launch, because they wait for memory. Functions with the prefix
``nan`` ignore NaN.
"""

from __future__ import annotations

import re
from typing import TypeAlias

from ..backends.base import DTypeLike
from ..devices import AccelRef, Operand
from ..expressions import Axis, ExpressionArgument, Out, expression, like, scaled, squares

__all__ = [
    "all",
    "any",
    "argmax",
    "argmin",
    "cosine_similarity",
    "count_nonzero",
    "kurtosis",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "max",
    "mean",
    "min",
    "nanargmax",
    "nanargmin",
    "nanmax",
    "nanmean",
    "nanmin",
    "nanprod",
    "nanstd",
    "nansum",
    "nanvar",
    "prod",
    "ptp",
    "rms_norm",
    "skew",
    "softmax",
    "std",
    "sum",
    "var",
    "zscore",
]

Dtype: TypeAlias = "DTypeLike | None"
"""A dtype; None for the usual one."""

# Without degrees of freedom it divides by zero, as NumPy does.
VARIANCE = (
    "a = mean(x); d = x - a; s = sum(real(d) * real(d) + imag(d) * imag(d)); "
    "v = where(n > correction, s / (n - correction), s / 0.0)"
)
"""The mean, ``a``, of each element how far it is from that, ``d``, and the variance, ``v``."""


def of_scaled(text: str) -> str:
    """Write an expression of ``x`` for elements scaled by ``q``, so that squares do not overflow."""
    return scaled("x", "u", "q") + re.sub(r"\bx\b", "u", text)


@expression(reduce="all")
async def all(x: Operand, axis: Axis = None, *, keepdims: bool = False, out: Out = None) -> AccelRef:
    """Return whether all elements along axes are true: NaN is, and so are no elements.

    Args:
        x: The array, of any dtype.
        axis: Axis or axes to reduce, from the end for negative ones; None for all.
        keepdims: Whether the reduced axes stay, with one element.
        out: Array to write to.

    Returns:
        Truth values.

    Raises:
        TypeError: `x` is not an array, or the result does not convert to the dtype of `out`.
        ValueError: An axis out of range, or `out` has another shape or shares memory with `x`.
        NotSupportedError: float8.
    """
    ...


@like(all, reduce="any")
def any() -> None:
    """Return whether any element along axes is true: NaN is, and of no elements none is.

    See `all` for arguments and errors.
    """


@expression(reduce="argmax")
async def argmax(x: Operand, axis: int | None = None, *, keepdims: bool = False, out: Out = None) -> AccelRef:
    """Find the place of the largest element along an axis: the first NaN, and the first of equal ones.

    Args:
        x: The array, of a dtype with an order.
        axis: Axis to search along; None for all elements in C order.
        keepdims: Whether the axis stays, with one element.
        out: Array to write to.

    Returns:
        Indices, of int64.

    Raises:
        TypeError: `x` is not an array, or is complex, several axes, or indices do not convert to the dtype of
            `out`.
        ValueError: No elements, an axis out of range, or `out` has another shape or shares memory with `x`.
        NotSupportedError: float8.
    """
    ...


@like(argmax, reduce="argmin")
def argmin() -> None:
    """Find the place of the smallest element along an axis: the first NaN, and the first of equal ones.

    See `argmax` for arguments and errors.
    """


@like(all, "x != 0", reduce="sum")
def count_nonzero() -> None:
    """Count the elements along axes that are not zero, as int64: NaN is not zero.

    See `all` for arguments and errors.
    """


@expression(
    "m = max(x); m = where(isfinite(m), m, 0.0); y = log(sum(exp(x - m))) + m", axes=True, precision="float32"
)
async def logsumexp(x: Operand, axis: Axis = None, *, keepdims: bool = False, out: Out = None) -> AccelRef:
    """Compute the logarithm of the exponentials' sum along axes, as `scipy.special.logsumexp` does.

    No intermediate result overflows, because the largest element is subtracted from all others first. It is
    one launch; see `softmax` for few long rows. Exponentials of float16 and bfloat16 are computed in float32.

    Args:
        x: The array, real. The result of integers is float64.
        axis: Axis or axes to reduce, from the end for negative ones; None for all.
        keepdims: Whether the reduced axes stay, with one element.
        out: Array to write to.

    Returns:
        The logarithms: ``-inf`` where all elements are.

    Raises:
        TypeError: `x` is not an array, or is complex, or the result does not convert to the dtype of `out`.
        ValueError: No elements, an axis out of range, or `out` has another shape or shares memory with `x`.
        NotSupportedError: float8.
    """
    ...


@like(all, reduce="max")
def max() -> None:
    """Find the largest element along axes; NaN if there is one.

    Args:
        x: The array, of a dtype with an order.
        axis: Axis or axes to reduce, from the end for negative ones; None for all.
        keepdims: Whether the reduced axes stay, with one element.
        out: Array to write to.

    Returns:
        The largest elements, with the dtype of `x`.

    Raises:
        TypeError: `x` is not an array, or is complex, or the result does not convert to the dtype of `out`.
        ValueError: No elements, an axis out of range, or `out` has another shape or shares memory with `x`.
        NotSupportedError: float8.
    """


@like(all, reduce="mean")
def mean() -> None:
    """Compute the mean of the elements along axes; NaN of no elements.

    It has the dtype of `x`, and float64 for integers and truth values, which are converted before they are
    added. See `all` for arguments and errors.
    """


@like(all, reduce="min")
def min() -> None:
    """Find the smallest element along axes; NaN if there is one.

    See `max` for arguments and errors.
    """


@expression(reduce="prod")
async def prod(
    x: Operand, axis: Axis = None, *, dtype: Dtype = None, keepdims: bool = False, out: Out = None
) -> AccelRef:
    """Multiply the elements of an array along axes; 1 of no elements.

    See `sum` for arguments and errors.
    """
    ...


@expression(
    f"{VARIANCE}; y = sqrt(v)", axes=True, wide=of_scaled(f"{VARIANCE}; y = sqrt(v) / q"), precision="float64"
)
async def std(
    x: Operand, axis: Axis = None, *, correction: float = 0, keepdims: bool = False, out: Out = None
) -> AccelRef:
    """Compute the standard deviation of the elements along axes: the root of `var`.

    See `var` for arguments and errors.
    """
    ...


@like(prod, reduce="sum")
def sum() -> None:
    """Add the elements of an array along axes; 0 of no elements.

    >>> import trio, numpy as np, trio_accel as ta
    >>> async def main() -> None:
    ...     async with ta.open_system("sums") as system, system.open_device("cpu") as device:
    ...         x = await device.put(np.arange(6, dtype=np.int8).reshape(2, 3))
    ...         total = await ta.arrays.sum(x, axis=1)
    ...         print(total.dtype, await total.to_host())
    >>> trio.run(main)
    int64 [ 3 12]

    Args:
        x: The array.
        axis: Axis or axes to add along, from the end for negative ones; None for all.
        dtype: Type that the elements are converted to before they are added. By default the dtype of `x`, but
            `int64` for integers and truth values, and `uint64` for unsigned integers.
        keepdims: Whether the added axes stay, with one element.
        out: Array to write to.

    Returns:
        The sums.

    Raises:
        TypeError: `x` is not an array, devices lack this dtype, or the sum does not convert to the dtype of
            `out`.
        ValueError: An axis out of range, or `out` has another shape or shares memory with `x`.
        NotSupportedError: float8.
    """


@like(std, VARIANCE)
def var() -> None:
    """Compute the variance of the elements along axes: the mean square of their distances from the mean.

    It is computed in float64, in two passes over the elements and one launch; see `softmax` for few long
    rows. It has the dtype of `x`; the corresponding real dtype for complex numbers, and float64 for integers.

    Args:
        x: The array.
        axis: Axis or axes to reduce, from the end for negative ones; None for all.
        correction: Subtracted from the number of elements in the divisor: 1 for a sample's variance.
        keepdims: Whether the reduced axes stay, with one element.
        out: Array to write to.

    Returns:
        The variances. If `correction` is not below the number of elements, they are infinite, or NaN for 0.

    Raises:
        TypeError: `x` is not an array, or the result does not convert to the dtype of `out`.
        ValueError: An axis out of range, or `out` has another shape or shares memory with `x`.
        NotSupportedError: float8.
    """


# Numbers except NaN, their count in the dtype of the elements, and their distances from their mean.
_THERE = "k = where(x == x, x, 0); c = real(sum(where(x == x, 1, k)))"
_NAN_VARIANCE = (
    "d = where(x == x, {0} - sum({0}) / c, 0);"
    "v = where(c > correction, sum(real(d) * real(d) + imag(d) * imag(d)) / (c - correction), nan)"
)
# Equal elements differ from their mean by its rounding, all alike. Other differences are ignored if they do
# not exceed a rounding, as in SciPy.
_IS_EQUAL = "m = mean(d); r = abs(2.220446049250313e-16 * a); e = v - real(m * conj(m)) <= r * r"
_MOMENTS = f"{VARIANCE.replace('correction', '0')}; {_IS_EQUAL}"
_KURTOSIS = f"{_MOMENTS}; y = where(e, nan, mean(d * d * d * d) / v / v - 3)"
_WIDE_KURTOSIS = f"{_MOMENTS}; z = d / sqrt(v); y = where(e, nan, mean(z * z * z * z) - 3)"
_SKEW = f"{_MOMENTS}; y = where(e, nan, mean(d * d * d) / v / sqrt(v))"
_WIDE_SKEW = f"{_MOMENTS}; z = d / sqrt(v); y = where(e, nan, mean(z * z * z))"
_ZSCORE = f"{VARIANCE}; {_IS_EQUAL}; y = d / where(e, nan, sqrt(v))"


@expression(_KURTOSIS, axes=True, wide=of_scaled(_WIDE_KURTOSIS), precision="float64")
async def kurtosis(x: Operand, axis: Axis = 0, *, keepdims: bool = False, out: Out = None) -> AccelRef:
    """Compute the excess kurtosis along axes, as `scipy.stats.kurtosis` does: 0 of a normal distribution.

    It is computed in float64 and rounded once. It is NaN where all elements are equal, up to the rounding of
    their mean. See `var` for arguments and errors; complex numbers are refused.
    """
    ...


@expression("argmax(x == nanmax(x))", axes=True)
async def nanargmax(
    x: Operand, axis: int | None = None, *, keepdims: bool = False, out: Out = None
) -> AccelRef:
    """Find the place of the largest element along an axis, ignoring NaN; 0 if all are NaN.

    See `argmax` for arguments and errors.
    """
    ...


@like(nanargmax, "argmax(x == nanmin(x))")
def nanargmin() -> None:
    """Find the place of the smallest element along an axis, ignoring NaN; 0 if all are NaN.

    See `argmax` for arguments and errors.
    """


@expression(reduce="nanmax")
async def nanmax(x: Operand, axis: Axis = None, *, keepdims: bool = False, out: Out = None) -> AccelRef:
    """Find the largest element along axes, ignoring NaN; NaN if all are.

    See `max` for arguments and errors.
    """
    ...


@expression(f"{_THERE}; y = sum(k) / c", axes=True, precision="float64")
async def nanmean(x: Operand, axis: Axis = None, *, keepdims: bool = False, out: Out = None) -> AccelRef:
    """Compute the mean of the elements along axes, ignoring NaN; NaN if all are.

    See `mean` for arguments and errors.
    """
    ...


@like(nanmax, reduce="nanmin")
def nanmin() -> None:
    """Find the smallest element along axes, ignoring NaN; NaN if all are.

    See `max` for arguments and errors.
    """


@expression("where(x == x, x, 1)", reduce="prod")
async def nanprod(
    x: Operand, axis: Axis = None, *, dtype: Dtype = None, keepdims: bool = False, out: Out = None
) -> AccelRef:
    """Multiply the elements along axes, ignoring NaN; 1 if all are.

    See `sum` for arguments and errors.
    """
    ...


@expression(
    f"{_THERE}; {_NAN_VARIANCE.format('k')}; y = sqrt(v)",
    axes=True,
    wide=f"{_THERE}; {scaled('k', 'u', 'q')} {_NAN_VARIANCE.format('u')}; y = sqrt(v) / q",
    precision="float64",
)
async def nanstd(
    x: Operand, axis: Axis = None, *, correction: float = 0, keepdims: bool = False, out: Out = None
) -> AccelRef:
    """Compute the standard deviation of the elements along axes, ignoring NaN: the root of `nanvar`.

    See `var` for arguments and errors.
    """
    ...


@like(nanprod, "where(x == x, x, 0)", reduce="sum")
def nansum() -> None:
    """Add the elements along axes, ignoring NaN; 0 if all are.

    See `sum` for arguments and errors.
    """


@like(nanstd, f"{_THERE}; {_NAN_VARIANCE.format('k')}; y = +v")
def nanvar() -> None:
    """Compute the variance of the elements along axes, ignoring NaN.

    It is NaN where there are no more of them than `correction`. See `var` for arguments and errors.
    """


@expression("max(x) - min(x)", axes=True)
async def ptp(x: Operand, axis: Axis = None, *, keepdims: bool = False, out: Out = None) -> AccelRef:
    """Compute how far the largest element along axes is from the smallest; integers wrap around.

    See `max` for arguments and errors.
    """
    ...


@like(kurtosis, _SKEW, wide=of_scaled(_WIDE_SKEW))
def skew() -> None:
    """Compute the skewness along axes, as `scipy.stats.skew` does.

    It is computed in float64 and rounded once. It is NaN where all elements are equal, up to the rounding of
    their mean. See `var` for arguments and errors; complex numbers are refused.
    """


@expression(_ZSCORE, axes=True, wide=of_scaled(_ZSCORE), precision="float64")
async def zscore(x: Operand, axis: Axis = 0, *, correction: float = 0, out: Out = None) -> AccelRef:
    """Compute how many standard deviations each element is from the mean along axes: `scipy.stats.zscore`.

    The shape stays. It is NaN where all elements are equal, up to the rounding of their mean. See `std` for
    arguments and errors.
    """
    ...


@expression(
    f"a = sqrt(sum({squares('x1')})); b = sqrt(sum({squares('x2')}));"
    "y = sum(conj(x1) * x2) / (maximum(a, eps) * maximum(b, eps))",
    axes=True,
    wide=scaled("x1", "u", "k")
    + scaled("x2", "v", "m")
    + f"a = sqrt(sum({squares('u')})); b = sqrt(sum({squares('v')}));"
    "y = sum(conj(u) * v) / maximum(a, eps * k) / maximum(b, eps * m)",
    precision="float64",
)
async def cosine_similarity(
    x1: Operand, x2: Operand, axis: Axis = -1, *, eps: float = 1e-8, keepdims: bool = False, out: Out = None
) -> AccelRef:
    """Compute the cosine of the angle between vectors, as `torch.nn.functional.cosine_similarity` does.

    The arrays broadcast against each other. The first of complex vectors is conjugated. It is computed in
    float64 and rounded once. See `softmax` for few long rows.

    Args:
        x1: Vectors.
        x2: Vectors.
        axis: Axis or axes that make a vector; None for all.
        eps: The least that each norm counts as, so that a vector of zeros has 0.
        keepdims: Whether those axes stay, with one element.
        out: Array to write to.

    Returns:
        The cosines.

    Raises:
        TypeError: An argument is not an array, or the result does not convert to the dtype of `out`.
        ValueError: Shapes that do not broadcast, an axis out of range, or `out` has another shape or shares
            memory with an argument.
        NotSupportedError: float8.
    """
    ...


@expression(
    f"d = x - mean(x); v = mean({squares('d')}); y = d / sqrt(v + eps) * weight + bias",
    axes=True,
    wide=f"{scaled('x', 'u', 'k', raises=False)} d = u - mean(u); v = mean({squares('d')});"
    "y = d / sqrt(v + eps * k * k) * weight + bias",
    precision="float64",
)
async def layer_norm(
    x: Operand,
    weight: ExpressionArgument = 1,
    bias: ExpressionArgument = 0,
    *,
    axis: Axis = -1,
    eps: float = 1e-5,
    out: Out = None,
) -> AccelRef:
    """Bring elements along axes to mean 0 and variance 1, then scale and shift them.

    That is ``(x - mean) / sqrt(var + eps) * weight + bias``. `torch.nn.functional.layer_norm` takes the
    shape of the last axes, as `normalized_shape`; here the axes are named, and `weight` and `bias` broadcast
    to `x`. It is computed in float64 and rounded once. See `softmax` for few long rows.

    Args:
        x: The array.
        weight: Factors, in an array or one for all.
        bias: Added after that.
        axis: Axis or axes of the mean and the variance; None for all.
        eps: Added to the variance.
        out: Array to write to; it may be `x`.

    Returns:
        An array with the shape of `x`, of the dtype that `x`, `weight` and `bias` are promoted to, at least a
        floating one.

    Raises:
        TypeError: `x` is not an array, or the result does not convert to the dtype of `out`.
        ValueError: Shapes that do not broadcast, an axis out of range, or `out` has another shape or shares
            memory with an argument that is not the same array.
        NotSupportedError: float8.
    """
    ...


@expression("d = x - max(x); y = d - log(sum(exp(d)))", axes=True, precision="float32")
async def log_softmax(x: Operand, axis: Axis = None, *, out: Out = None) -> AccelRef:
    """Compute the logarithm of the softmax along axes, as `scipy.special.log_softmax` does.

    Nothing is lost where the softmax is too small for its dtype. See `softmax` for arguments and errors.
    """
    ...


@expression(
    f"y = x / sqrt(mean({squares('x')}) + eps) * weight",
    axes=True,
    wide=scaled("x", "u", "k", raises=False) + f"y = u / sqrt(mean({squares('u')}) + eps * k * k) * weight",
    precision="float64",
)
async def rms_norm(
    x: Operand, weight: ExpressionArgument = 1, *, axis: Axis = -1, eps: float = 1e-6, out: Out = None
) -> AccelRef:
    """Divide elements by the root of their mean square along axes, then scale them.

    That is ``x / sqrt(mean(abs(x)**2) + eps) * weight``. See `layer_norm` for arguments and errors.
    """
    ...


@like(log_softmax, "e = exp(x - max(x)); y = e / sum(e)")
def softmax() -> None:
    """Compute exponentials, divided by their sum along axes, as `scipy.special.softmax` does.

    It is one launch: a row is read three times, of which the device's memory sees one as long as the row is
    in its caches. Fewer than 256 rows of more than 131072 elements each are made in three launches instead:
    one for each reduction and one for the result, so that the whole device makes a row. float16 and
    bfloat16 are computed in float32, the sum is made in float64, and the result is rounded once.

    >>> import trio, numpy as np, trio_accel as ta
    >>> async def main() -> None:
    ...     async with ta.open_system("odds") as system, system.open_device("cpu") as device:
    ...         x = await device.put(np.log([[1.0, 3.0], [2.0, 2.0]]))
    ...         print(await ta.arrays.softmax(x, axis=1).to_host())
    >>> trio.run(main)
    [[0.25 0.75]
     [0.5  0.5 ]]

    Args:
        x: The array, real. The result of integers is float64.
        axis: Axis or axes along which the results add up to 1; None for all.
        out: Array to write to; it may be `x`.

    Returns:
        An array with the shape of `x`. It is NaN along the axes where an element is NaN or infinite, or where
        all are ``-inf``.

    Raises:
        TypeError: `x` is not an array, or is complex, or the result does not convert to the dtype of `out`.
        ValueError: An axis out of range, or `out` has another shape or shares memory with `x` and is not the
            same array.
        NotSupportedError: float8.
    """
