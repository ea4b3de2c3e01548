"""Special functions of each element, by the names that they have in `scipy.special`: one expression each.

Arguments and errors are those of the functions for each element. float16 and bfloat16 are computed in
float32 at least, and the result is rounded once. Whole numbers become float64. Complex numbers are refused.
"""

from __future__ import annotations

from functools import partial

from ..devices import AccelRef
from ..expressions import ExpressionArgument, Out, expression

__all__ = [
    "digamma", "entr", "erf", "erfc", "erfcinv", "erfcx", "erfinv", "expit", "gamma", "gammaln", "i0", "i1",
    "log_expit", "log_ndtr", "logit", "ndtr", "ndtri", "rel_entr", "xlog1py", "xlogy",
]  # fmt: skip

_expression = partial(expression, precision="float32")
# Its argument has more digits than float32, where the result is much more sensitive.
_TO_ERF = "t = x * -0.7071067811865476;"

# The recurrence to a number of 10 at least, and the asymptotic series there: its next term is below 1e-16. A
# negative number is reflected, by the cotangent of what is between it and the next whole number.
_DIGAMMA = (
    "a = where(x > 0, x, 1 - x); z = where(a < 10, a + 10, a); w = 1 / z / z;"
    f"s = where(a < 10, {' + '.join(f'1 / (a + {k})' for k in range(10))}, 0);"
    "p = log(z) - 0.5 / z - s - w * (1 / 12 - w * (1 / 120 - w * (1 / 252 - w * (1 / 240 - w * (1 / 132"
    " - w * (691 / 32760 - w / 12))))));"
    "t = x - round(x); y = where(x > 0, p, where(x == 0, -1 / x, where(t == 0, nan, p - pi / tan(pi * t))))"
)


@_expression(_DIGAMMA, precision="float64")
async def digamma(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the derivative of the logarithm of the gamma function: NaN at negative whole numbers.

    At 0 it is minus infinity. It is computed in float64. Near its zeros, such as 1.46, the absolute error is
    that of numbers of size 1.
    """
    ...


@_expression("y = where(x > 0, -x * log(x), where(x < 0, -inf, 0 * x))")
async def entr(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute ``-x * log(x)``, a term of an entropy: 0 at 0, and minus infinity below."""
    ...


@_expression("y = erf(x)")
async def erf(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the error function, from -1 to 1."""
    ...


@_expression("y = erfc(x)")
async def erfc(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute ``1 - erf(x)``, exact for large elements, whose results are small."""
    ...


@_expression("y = erfcinv(x)")
async def erfcinv(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the inverse of `erfc`: infinite at 0 and 2, NaN outside of them."""
    ...


@_expression("y = erfcx(x)")
async def erfcx(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute ``exp(x**2) * erfc(x)``, where one factor may be too large and the other too small."""
    ...


@_expression("y = erfinv(x)")
async def erfinv(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the inverse of `erf`: infinite at -1 and 1, NaN beyond."""
    ...


@_expression("e = exp(-abs(x)); y = where(x >= 0, 1, e) / (1 + e)")
async def expit(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute ``1 / (1 + exp(-x))``, the logistic function: `ta.nn.sigmoid` is the same."""
    ...


@_expression("y = tgamma(x)")
async def gamma(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the gamma function, ``(x - 1)!`` of whole numbers: NaN at negative ones."""
    ...


# CUDA's is plus infinity at minus infinity.
@_expression("y = where(x == -inf, x, lgamma(x))")
async def gammaln(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the logarithm of the size of the gamma function: `torch.lgamma`."""
    ...


@_expression("y = where(abs(x) == inf, abs(x), bessel_i0(x))")
async def i0(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the modified Bessel function of the first kind of order 0: infinite at infinities."""
    ...


@_expression("y = where(abs(x) == inf, x, bessel_i1(x))")
async def i1(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the modified Bessel function of the first kind of order 1: infinite at infinities."""
    ...


@_expression("y = minimum(x, 0) - log1p(exp(-abs(x)))")
async def log_expit(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the logarithm of `expit`, where that is too small for its dtype as well."""
    ...


@_expression(
    f"{_TO_ERF} y = where(x < -1, log(erfcx(maximum(t, 0)) / 2) - t * t, log1p(erfc(-t) / -2))",
    precision="float64",
)
async def log_ndtr(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the logarithm of `ndtr`, where that is too small for its dtype as well."""
    ...


@_expression("s = 2 * x - 1; y = where(abs(s) < 0.5, log1p(s) - log1p(-s), log(x / (1 - x)))")
async def logit(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute ``log(x / (1 - x))``, the inverse of `expit`: infinite at 0 and 1, NaN outside of them."""
    ...


@_expression(f"{_TO_ERF} y = 0.5 * erfc(t)", precision="float64")
async def ndtr(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the distribution function of the normal distribution: the share of numbers up to `x`."""
    ...


@_expression("y = erfcinv(2 * x) * -1.4142135623730951")
async def ndtri(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the inverse of `ndtr`: infinite at 0 and 1, NaN outside of them."""
    ...


# A quotient near 1 has lost digits of its logarithm, and one that is very large or small may be none.
@_expression(
    "r = x1 / x2; k = (r > 1e-30) and (r < 1e30);"
    "l = where((r > 0.5) and (r < 2), log1p((x1 - x2) / x2), log(where(k, r, x1)) - log(where(k, 1, x2)));"
    "y = where((x1 > 0) and (x2 > 0), x1 * l,"
    " where((x1 == 0) and (x2 >= 0), 0, where((x1 == x1) and (x2 == x2), inf, x1 + x2)))"
)
async def rel_entr(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute ``x1 * log(x1 / x2)``, a term of a relative entropy: 0 where `x1` is 0.

    It is infinite where an element is negative, or where only `x2` is 0.
    """
    ...


@_expression("y = where((x1 == 0) and (x2 == x2), 0, x1 * log1p(x2))")
async def xlog1py(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute ``x1 * log1p(x2)``, and 0 where `x1` is 0 and `x2` is not NaN."""
    ...


@_expression("y = where((x1 == 0) and (x2 == x2), 0, x1 * log(x2))")
async def xlogy(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute ``x1 * log(x2)``, and 0 where `x1` is 0 and `x2` is not NaN."""
    ...
