"""Statistics along axes: of elements that are not NaN, and moments. One launch each.

A function whose name begins with ``nan`` leaves NaN out.
"""

from __future__ import annotations

from ..devices import AccelRef, Operand
from ..expressions import Axis, Out, like, reduction, rows, scaled
from ._reductions import VARIANCE, Dtype, of_scaled

__all__ = [
    "kurtosis", "nanargmax", "nanargmin", "nanmax", "nanmean", "nanmin", "nanprod", "nanstd", "nansum",
    "nanvar", "ptp", "skew", "zscore",
]  # fmt: skip


# Numbers that are there, their count in the dtype of the elements, and how far each is from their mean.
_THERE = "k = where(x == x, x, 0); c = real(sum(where(x == x, 1, k)))"
_NAN_VARIANCE = (
    "d = where(x == x, {0} - sum({0}) / c, 0);"
    "v = where(c > correction, sum(real(d) * real(d) + imag(d) * imag(d)) / (c - correction), nan)"
)
# Equal elements differ from their mean by its rounding, all alike. What else they differ by counts as nothing
# if it is no more than a rounding, as in SciPy.
_IS_EQUAL = "m = mean(d); r = abs(2.220446049250313e-16 * a); e = v - real(m * conj(m)) <= r * r"
_MOMENTS = f"{VARIANCE.replace('correction', '0')}; {_IS_EQUAL}"
_KURTOSIS = f"{_MOMENTS}; y = where(e, nan, mean(d * d * d * d) / v / v - 3)"
_WIDE_KURTOSIS = f"{_MOMENTS}; z = d / sqrt(v); y = where(e, nan, mean(z * z * z * z) - 3)"
_SKEW = f"{_MOMENTS}; y = where(e, nan, mean(d * d * d) / v / sqrt(v))"
_WIDE_SKEW = f"{_MOMENTS}; z = d / sqrt(v); y = where(e, nan, mean(z * z * z))"
_ZSCORE = f"{VARIANCE}; {_IS_EQUAL}; y = d / where(e, nan, sqrt(v))"


@rows(_KURTOSIS, wide=of_scaled(_WIDE_KURTOSIS), precision="float64")
async def kurtosis(x: Operand, axis: Axis = 0, *, keepdims: bool = False, out: Out = None) -> AccelRef:
    """Compute the excess kurtosis along axes, as `scipy.stats.kurtosis` does: 0 of a normal distribution.

    It is computed in float64 and rounded once. It is NaN where all elements are equal, up to the rounding
    of their mean. Arguments and errors are those of `var`; complex numbers are refused.
    """
    ...


@rows("argmax(x == nanmax(x))", precision=None)
async def nanargmax(
    x: Operand, axis: int | None = None, *, keepdims: bool = False, out: Out = None
) -> AccelRef:
    """Find the place of the largest element along an axis that is not NaN; the first place where all are.

    Arguments and errors are those of `argmax`.
    """
    ...


@like(nanargmax, "argmax(x == nanmin(x))")
def nanargmin() -> None:
    """Find the place of the smallest element along an axis that is not NaN; the first place where all are.

    Arguments and errors are those of `argmax`.
    """


@reduction("nanmax")
async def nanmax(x: Operand, axis: Axis = None, *, keepdims: bool = False, out: Out = None) -> AccelRef:
    """Find the largest element along axes that is not NaN; NaN where all are.

    Arguments and errors are those of `max`.
    """
    ...


@rows(f"{_THERE}; y = sum(k) / c", precision="float64")
async def nanmean(x: Operand, axis: Axis = None, *, keepdims: bool = False, out: Out = None) -> AccelRef:
    """Compute the mean of the elements along axes that are not NaN; NaN where all are.

    Arguments and errors are those of `mean`.
    """
    ...


@like(nanmax, "nanmin")
def nanmin() -> None:
    """Find the smallest element along axes that is not NaN; NaN where all are.

    Arguments and errors are those of `max`.
    """


@reduction("prod", "where(x == x, x, 1)")
async def nanprod(
    x: Operand, axis: Axis = None, *, dtype: Dtype = None, keepdims: bool = False, out: Out = None
) -> AccelRef:
    """Multiply the elements along axes that are not NaN; 1 where all are.

    Arguments and errors are those of `sum`.
    """
    ...


@rows(
    f"{_THERE}; {_NAN_VARIANCE.format('k')}; y = sqrt(v)",
    wide=f"{_THERE}; {scaled('k', 'u', 'q')} {_NAN_VARIANCE.format('u')}; y = sqrt(v) / q",
    precision="float64",
)
async def nanstd(
    x: Operand, axis: Axis = None, *, correction: float = 0, keepdims: bool = False, out: Out = None
) -> AccelRef:
    """Compute the standard deviation of the elements along axes that are not NaN: the root of `nanvar`.

    Arguments and errors are those of `var`.
    """
    ...


@like(nanprod, "sum", "where(x == x, x, 0)")
def nansum() -> None:
    """Add the elements along axes that are not NaN; 0 where all are.

    Arguments and errors are those of `sum`.
    """


@like(nanstd, f"{_THERE}; {_NAN_VARIANCE.format('k')}; y = +v")
def nanvar() -> None:
    """Compute the variance of the elements along axes that are not NaN.

    It is NaN where there are no more of them than `correction`. Arguments and errors are those of `var`.
    """


@rows("max(x) - min(x)", precision=None)
async def ptp(x: Operand, axis: Axis = None, *, keepdims: bool = False, out: Out = None) -> AccelRef:
    """Compute how far the largest element along axes is from the smallest; whole numbers wrap around.

    Arguments and errors are those of `max`.
    """
    ...


@like(kurtosis, _SKEW, wide=of_scaled(_WIDE_SKEW))
def skew() -> None:
    """Compute the skewness along axes, as `scipy.stats.skew` does.

    It is computed in float64 and rounded once. It is NaN where all elements are equal, up to the rounding
    of their mean. Arguments and errors are those of `var`; complex numbers are refused.
    """


@rows(_ZSCORE, wide=of_scaled(_ZSCORE), precision="float64")
async def zscore(x: Operand, axis: Axis = 0, *, correction: float = 0, out: Out = None) -> AccelRef:
    """Compute how many standard deviations each element is from the mean along axes: `scipy.stats.zscore`.

    The shape stays. It is NaN where all elements are equal, up to the rounding of their mean. Arguments and
    errors are those of `std`.
    """
    ...
