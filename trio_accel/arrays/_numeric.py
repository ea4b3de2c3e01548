"""Functions of each element that NumPy or PyTorch have beyond the array API standard: one expression each.

The page of the reference has what they have in common: promotion, `out`, errors.
"""

from __future__ import annotations

from ..devices import AccelRef
from ..expressions import ExpressionArgument, Out, expression, like

__all__ = [
    "angle", "cbrt", "degrees", "exp2", "fmax", "fmin", "fmod", "frac", "gcd", "heaviside", "isclose", "lcm",
    "lerp", "logaddexp2", "radians", "rsqrt", "sinc",
]  # fmt: skip


CLOSE = (
    "y = abs(x1 - x2) <= atol + rtol * abs(x2) if isfinite(x1) and isfinite(x2)"
    " else x1 == x2 or equal_nan and x1 != x1 and x2 != x2"
)
"""Whether two elements are nearly equal, of numbers that are floating."""


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
    """Compute the rest of a division that is rounded towards zero; it has the sign of the dividend."""


@like(angle, "x - trunc(x)")
def frac() -> None:
    """Compute what is behind the point, with the sign of `x`."""


@like(fmax, "gcd(x1, x2)")
def gcd() -> None:
    """Compute the greatest common divisor of whole numbers; of 0 and a number its size."""


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
    """Tell where elements differ by at most ``atol + rtol * abs(x2)``.

    Whole numbers are compared as float64, and float16 and bfloat16 as float32. Infinite elements must be
    equal.

    Args:
        x1: Elements.
        x2: What they are compared with.
        rtol: Tolerance in relation to `x2`.
        atol: Absolute tolerance.
        equal_nan: Whether NaN is close to NaN.
        out: Array to write to.
    """
    ...


@like(fmax, "lcm(x1, x2)")
def lcm() -> None:
    """Compute the least common multiple of whole numbers, which wraps around; of 0 and a number it is 0."""


@expression(
    # Steps may overflow between numbers that do not.
    "d = x2 - x1; y = where(weight == 0 or x1 == x2, x1, where(weight == 1, x2, where(isfinite(d),"
    " where(weight < 0.5, x1 + weight * d, x2 - (1 - weight) * d), x1 * (1 - weight) + x2 * weight)))",
    precision="float32",
)
async def lerp(
    x1: ExpressionArgument, x2: ExpressionArgument, weight: ExpressionArgument, *, out: Out = None
) -> AccelRef:
    """Compute ``x1 + weight * (x2 - x1)``: just `x1` where the weight is 0, and `x2` where it is 1."""
    ...


@like(
    heaviside,
    "y = where(x1 == x2, x1 + 1, maximum(x1, x2) + log1p(exp2(-abs(x1 - x2))) * 1.4426950408889634)",
)
def logaddexp2() -> None:
    """Compute log2(2**x1 + 2**x2), where the powers may be too large themselves."""


@like(angle, "x * 0.017453292519943295")
def radians() -> None:
    """Convert angles from degrees to radians."""


@expression("y = 1 / sqrt(x)", precision="float32")
async def rsqrt(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute 1 / sqrt(x), rounded once to the dtype of `x`; whole numbers become float64."""
    ...


@like(rsqrt, "p = pi * where(x == 0, 1e-20, x); y = sin(p) / p")
def sinc() -> None:
    """Compute sin(pi * x) / (pi * x), and 1 at 0; whole numbers become float64."""
