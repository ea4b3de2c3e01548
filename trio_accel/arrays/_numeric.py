"""Element-wise functions of NumPy, PyTorch and SciPy that the array API standard lacks: one expression each.

The page of the reference has what they have in common: promotion, `out`, errors. Special functions have the
names of `scipy.special`: float16 and bfloat16 are computed in float32 at least, and the result is rounded
once. Integers become float64. Complex numbers are refused.
"""

from __future__ import annotations

from functools import partial

from ..devices import AccelRef
from ..expressions import ExpressionArgument, Out, expression, like

__all__ = [
    "angle",
    "cbrt",
    "degrees",
    "digamma",
    "entr",
    "erf",
    "erfc",
    "erfcinv",
    "erfcx",
    "erfinv",
    "exp2",
    "expit",
    "fmax",
    "fmin",
    "fmod",
    "frac",
    "gamma",
    "gammaln",
    "gcd",
    "heaviside",
    "i0",
    "i1",
    "isclose",
    "lcm",
    "lerp",
    "log_expit",
    "log_ndtr",
    "logaddexp2",
    "logit",
    "ndtr",
    "ndtri",
    "radians",
    "rel_entr",
    "rsqrt",
    "sinc",
    "xlog1py",
    "xlogy",
]

CLOSE = (
    "y = abs(x1 - x2) <= atol + rtol * abs(x2) if isfinite(x1) and isfinite(x2)"
    " else x1 == x2 or equal_nan and x1 != x1 and x2 != x2"
)
"""Whether two elements are nearly equal, of numbers that are floating."""


# The smaller of two powers of 2, as a part of the larger one.
_RATIO = "r = exp2(where(x1 >= x2, x2 - x1, x1 - x2)); "


@expression("angle(x)")
async def angle(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the angle of complex numbers, from -pi to pi: 0 or pi of real ones."""
    ...


@like(angle, "cbrt(x)")
def cbrt() -> None:
    """Compute the cube root of real numbers."""


@like(angle, "x * 57.29577951308232")
def degrees() -> None:
    """Convert angles from radians to degrees."""


@like(angle, "exp2(x)")
def exp2() -> None:
    """Compute powers of 2."""


@expression("fmax(x1, x2)")
async def fmax(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the larger of two real arrays' elements; NaN only if both are."""
    ...


@like(fmax, "fmin(x1, x2)")
def fmin() -> None:
    """Compute the smaller of two real arrays' elements; NaN only if both are."""


@like(fmax, "fmod(x1, x2)")
def fmod() -> None:
    """Compute the remainder of a division rounded towards zero, with the sign of the dividend."""


@like(angle, "x - trunc(x)")
def frac() -> None:
    """Compute the fractional part, with the sign of `x`."""


@like(fmax, "gcd(x1, x2)")
def gcd() -> None:
    """Compute the greatest common divisor of integers; of 0 and a number its size."""


@expression("y = where(x1 == 0, x2, where(x1 == x1, x1 > 0, x1))", precision="float32")
async def heaviside(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute 0 where `x1` is negative, 1 where it is positive, and `x2` where it is 0."""
    ...


@expression(CLOSE, promoted=("x1", "x2"), precision="float32")
async def isclose(
    x1: ExpressionArgument,
    x2: ExpressionArgument,
    *,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
    out: Out = None,
) -> AccelRef:
    """Return where elements differ by at most ``atol + rtol * abs(x2)``.

    Integers are compared as float64, and float16 and bfloat16 as float32. Infinite elements must be equal.

    Args:
        x1: Elements.
        x2: Elements to compare with.
        rtol: Tolerance relative to `x2`.
        atol: Absolute tolerance.
        equal_nan: Whether NaN is close to NaN.
        out: Array to write to.
    """
    ...


@like(fmax, "lcm(x1, x2)")
def lcm() -> None:
    """Compute the least common multiple of integers, which wraps around; of 0 and a number it is 0."""


@expression(
    # Steps may overflow between numbers that do not.
    "d = x2 - x1; y = where(weight == 0 or x1 == x2, x1, where(weight == 1, x2, where(isfinite(d),"
    " where(weight < 0.5, x1 + weight * d, x2 - (1 - weight) * d), x1 * (1 - weight) + x2 * weight)))",
    precision="float32",
    slopes={"x1": "s = g * (1 - weight)", "x2": "s = g * weight", "weight": "s = g * (x2 - x1)"},
)
async def lerp(
    x1: ExpressionArgument, x2: ExpressionArgument, weight: ExpressionArgument, *, out: Out = None
) -> AccelRef:
    """Compute ``x1 + weight * (x2 - x1)``: just `x1` where the weight is 0, and `x2` where it is 1."""
    ...


@like(
    heaviside,
    "y = where(x1 == x2, x1 + 1, maximum(x1, x2) + log1p(exp2(-abs(x1 - x2))) * 1.4426950408889634)",
    slopes={
        "x1": f"{_RATIO}s = where((x1 == x2) and isinf(x1), 0.5 * g, g * where(x1 >= x2, 1, r) / (1 + r))",
        "x2": f"{_RATIO}s = where((x1 == x2) and isinf(x1), 0.5 * g, g * where(x1 >= x2, r, 1) / (1 + r))",
    },
)
def logaddexp2() -> None:
    """Compute log2(2**x1 + 2**x2), where the powers may be too large themselves."""


@like(angle, "x * 0.017453292519943295")
def radians() -> None:
    """Convert angles from degrees to radians."""


@expression("y = 1 / sqrt(x)", precision="float32")
async def rsqrt(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute 1 / sqrt(x), rounded once to the dtype of `x`; integers become float64."""
    ...


@like(
    rsqrt,
    "p = pi * where(x == 0, 1e-20, x); y = sin(p) / p",
    # Near 0 the difference has lost its digits, so a series is used.
    slopes={
        "x": "p = pi * x; q = p * p; r = -p / 3 * (1 - q / 10 * (1 - q / 28 * (1 - q / 54)));"
        "s = g * pi * where(abs(p) < 0.1, r, (cos(p) - sin(p) / p) / p)"
    },
)
def sinc() -> None:
    """Compute sin(pi * x) / (pi * x), and 1 at 0; integers become float64."""


_expression = partial(expression, precision="float32")
# Its argument has more digits than float32, where the result is much more sensitive.
_TO_ERF = "t = x * -0.7071067811865476;"

# The recurrence up to 10 at least, and the asymptotic series from there, whose next term is below 1e-16. A
# negative number is reflected, by the cotangent of its distance to the next integer.
_DIGAMMA = (
    "a = where(x > 0, x, 1 - x); z = where(a < 10, a + 10, a); w = 1 / z / z;"
    f"s = where(a < 10, {' + '.join(f'1 / (a + {k})' for k in range(10))}, 0);"
    "p = log(z) - 0.5 / z - s - w * (1 / 12 - w * (1 / 120 - w * (1 / 252 - w * (1 / 240 - w * (1 / 132"
    " - w * (691 / 32760 - w / 12))))));"
    "t = x - round(x); u = where(t == 0, 0.5, t);"
    "y = where(x > 0, p, where(x == 0, -1 / x, where(t == 0, nan, p - pi / tan(pi * u))))"
)


@_expression(_DIGAMMA, precision="float64")
async def digamma(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the derivative of the gamma function's logarithm: NaN at negative integers.

    At 0 it is minus infinity. It is computed in float64. Near its zeros, such as 1.46, the absolute error is
    the error of numbers of size 1.
    """
    ...


@_expression(
    "y = where(x > 0, -x * log(x), where(x < 0, -inf, 0 * x))", slopes={"x": "s = -g * (log(x) + 1)"}
)
async def entr(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute ``-x * log(x)``, a term of an entropy: 0 at 0, and minus infinity below."""
    ...


@like(entr, "y = erf(x)")
def erf() -> None:
    """Compute the error function, from -1 to 1."""


@like(entr, "y = erfc(x)")
def erfc() -> None:
    """Compute ``1 - erf(x)``, exact for large elements with small results."""


@like(entr, "y = erfcinv(x)")
def erfcinv() -> None:
    """Compute the inverse of `erfc`: infinite at 0 and 2, NaN outside of them."""


@like(entr, "y = erfcx(x)")
def erfcx() -> None:
    """Compute ``exp(x**2) * erfc(x)``, where one factor may be too large and the other too small."""


@like(entr, "y = erfinv(x)")
def erfinv() -> None:
    """Compute the inverse of `erf`: infinite at -1 and 1, NaN outside of these."""


@like(
    entr,
    "e = exp(where(x >= 0, -x, x)); y = where(x >= 0, 1, e) / (1 + e)",
    slopes={"x": "e = exp(where(x >= 0, -x, x)); s = g * (e / ((1 + e) * (1 + e)))"},
)
def expit() -> None:
    """Compute ``1 / (1 + exp(-x))``, the logistic function: `ta.nn.sigmoid` is the same."""


@like(entr, "y = tgamma(x)")
def gamma() -> None:
    """Compute the gamma function, ``(x - 1)!`` of integers: NaN at negative ones."""


# CUDA's is plus infinity at minus infinity.
@like(entr, "y = where(x == -inf, x, lgamma(x))")
def gammaln() -> None:
    """Compute the logarithm of the gamma function's size: `torch.lgamma`."""


@like(entr, "y = where(abs(x) == inf, abs(x), bessel_i0(x))")
def i0() -> None:
    """Compute the modified Bessel function of the first kind and order 0: infinite at infinities."""


@like(entr, "y = where(abs(x) == inf, x, bessel_i1(x))")
def i1() -> None:
    """Compute the modified Bessel function of the first kind and order 1: infinite at infinities."""


@like(
    entr,
    "y = minimum(x, 0) - log1p(exp(-abs(x)))",
    slopes={"x": "e = exp(where(x >= 0, -x, x)); s = g * (where(x >= 0, e, 1) / (1 + e))"},
)
def log_expit() -> None:
    """Compute the logarithm of `expit`, even if `expit` is too small for its dtype."""


@like(
    digamma,
    f"{_TO_ERF} y = where(x < -1, log(erfcx(maximum(t, 0)) / 2) - t * t, log1p(erfc(-t) / -2))",
    slopes={"x": "s = g * 0.7978845608028654 / erfcx(x * -0.7071067811865476)"},
)
def log_ndtr() -> None:
    """Compute the logarithm of `ndtr`, even if `ndtr` is too small for its dtype."""


@like(entr, "s = 2 * x - 1; y = where(abs(s) < 0.5, log1p(s) - log1p(-s), log(x / (1 - x)))")
def logit() -> None:
    """Compute ``log(x / (1 - x))``, the inverse of `expit`: infinite at 0 and 1, NaN outside of them."""


@like(digamma, f"{_TO_ERF} y = 0.5 * erfc(t)")
def ndtr() -> None:
    """Compute the distribution function of the normal distribution: the share of numbers up to `x`."""


@like(entr, "y = erfcinv(2 * x) * -1.4142135623730951")
def ndtri() -> None:
    """Compute the inverse of `ndtr`: infinite at 0 and 1, NaN outside of them."""


# A quotient near 1 has lost digits of its logarithm, and a quotient of extreme numbers may over- or
# underflow.
@_expression(
    "r = x1 / x2; k = (r > 1e-30) and (r < 1e30);"
    "l = where((r > 0.5) and (r < 2), log1p((x1 - x2) / x2), log(where(k, r, x1)) - log(where(k, 1, x2)));"
    "y = where((x1 > 0) and (x2 > 0), x1 * l,"
    " where((x1 == 0) and (x2 >= 0), 0, where((x1 == x1) and (x2 == x2), inf, x1 + x2)))",
    slopes={"x1": "s = g * (log(x1) - log(x2) + 1)", "x2": "s = -g * x1 / x2"},
)
async def rel_entr(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute ``x1 * log(x1 / x2)``, a term of a relative entropy: 0 where `x1` is 0.

    It is infinite where an element is negative, or where only `x2` is 0.
    """
    ...


@like(
    rel_entr,
    "y = where((x1 == 0) and (x2 == x2), 0, x1 * log1p(x2))",
    slopes={"x1": "s = where((x1 == 0) and (x2 <= -1), 0, g * log1p(x2))", "x2": "s = g * x1 / (x2 + 1)"},
)
def xlog1py() -> None:
    """Compute ``x1 * log1p(x2)``, and 0 where `x1` is 0 and `x2` is not NaN."""


@like(
    rel_entr,
    "y = where((x1 == 0) and (x2 == x2), 0, x1 * log(x2))",
    slopes={"x1": "s = where((x1 == 0) and (x2 <= 0), 0, g * log(x2))", "x2": "s = g * x1 / x2"},
)
def xlogy() -> None:
    """Compute ``x1 * log(x2)``, and 0 where `x1` is 0 and `x2` is not NaN."""
