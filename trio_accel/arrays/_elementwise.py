"""Functions that are computed for each element, by the array API standard: one expression each.

The page of the reference has what they have in common: promotion, `out`, errors, special values.
"""

from __future__ import annotations

from ..backends.base import DType
from ..devices import AccelRef
from ..expressions import Elementwise, ExpressionArgument, Out, expression

__all__ = [
    "abs", "acos", "acosh", "add", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and",
    "bitwise_invert", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "ceil",
    "clip", "conj", "copysign", "cos", "cosh", "divide", "equal", "exp", "expm1", "floor", "floor_divide",
    "greater", "greater_equal", "hypot", "imag", "isfinite", "isinf", "isnan", "less", "less_equal",
    "log", "log1p", "log2", "log10", "logaddexp", "logical_and", "logical_not", "logical_or",
    "logical_xor", "maximum", "minimum", "multiply", "negative", "nextafter", "not_equal", "positive",
    "pow", "real", "reciprocal", "remainder", "round", "sign", "signbit", "sin", "sinh", "sqrt", "square",
    "subtract", "tan", "tanh", "trunc", "where",
]  # fmt: skip


@expression("abs(x)")
async def abs(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the size of each element; of complex ones it is real.

    The least whole number of a signed dtype stays as it is: its size is too large for the dtype.
    """
    ...


@expression("arccos(x)")
async def acos(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the inverse cosine, from 0 to pi: NaN outside of -1 to 1.

    Complex ones have branch cuts on the real axis outside of -1 to 1.
    """
    ...


@expression("arccosh(x)")
async def acosh(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the inverse hyperbolic cosine, at least 0: NaN below 1.

    Complex ones have a branch cut on the real axis below 1.
    """
    ...


@expression("x1 + x2")
async def add(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Add two arrays, element by element; whole numbers that are too large wrap around."""
    ...


@expression("arcsin(x)")
async def asin(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the inverse sine, from -pi/2 to pi/2: NaN outside of -1 to 1.

    Complex ones have branch cuts on the real axis outside of -1 to 1.
    """
    ...


@expression("arcsinh(x)")
async def asinh(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the inverse hyperbolic sine.

    Complex ones have branch cuts on the imaginary axis outside of -1j to 1j.
    """
    ...


@expression("arctan(x)")
async def atan(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the inverse tangent, from -pi/2 to pi/2.

    Complex ones have branch cuts on the imaginary axis outside of -1j to 1j.
    """
    ...


@expression("arctan2(x1, x2)")
async def atan2(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the angle of the points (x2, x1), from -pi to pi; signs of zeros count."""
    ...


@expression("arctanh(x)")
async def atanh(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the inverse hyperbolic tangent: infinite at -1 and 1, NaN beyond.

    Complex ones have branch cuts on the real axis outside of -1 to 1.
    """
    ...


@expression("x1 & x2")
async def bitwise_and(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the bits that both arrays have, of whole numbers or truth values."""
    ...


@expression("~x")
async def bitwise_invert(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Invert all bits of whole numbers, or truth values."""
    ...


@expression("x1 << x2")
async def bitwise_left_shift(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Move the bits of whole numbers to the left; by the width of the dtype or more they are all gone."""
    ...


@expression("x1 | x2")
async def bitwise_or(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the bits that one of the arrays has, of whole numbers or truth values."""
    ...


@expression("x1 >> x2")
async def bitwise_right_shift(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Move the bits of whole numbers to the right, keeping the sign."""
    ...


@expression("x1 ^ x2")
async def bitwise_xor(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the bits that just one of the arrays has, of whole numbers or truth values."""
    ...


@expression("ceil(x)")
async def ceil(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Round up to whole numbers, of the same dtype."""
    ...


async def clip(
    x: ExpressionArgument,
    min: ExpressionArgument | None = None,
    max: ExpressionArgument | None = None,
    *,
    out: Out = None,
) -> AccelRef:
    """Bring elements between two bounds: NaN stays, and where `min` is above `max` there is `max`.

    Args:
        x: Real numbers.
        min: Least values, which are promoted with the elements; None for no such bound.
        max: Greatest values.
        out: Array to write to.

    Returns:
        The elements between the bounds; a copy if there are none.

    Raises:
        TypeError: Truth values or complex numbers.
    """
    for name, given in (("x", x), ("min", min), ("max", max)):
        dtype = DType.bool if isinstance(given, bool) else getattr(given, "dtype", None)
        if dtype is not None and DType.of(dtype).kind in ("bool", "complex"):
            raise TypeError(f"arrays.clip: {name} must be of real numbers, got {DType.of(dtype)}")
    bounds = {name: bound for name, bound in (("min", min), ("max", max)) if bound is not None}
    return await clips[tuple(bounds)](x, *bounds.values(), out=out)


clips: dict[tuple[str, ...], Elementwise[AccelRef]] = {
    bounds: Elementwise[AccelRef](
        text, inputs=("x", *bounds), operation="arrays.clip", promoted=("x", *bounds)
    )
    for bounds, text in (
        ((), "+x"),
        (("min",), "maximum(x, min)"),
        (("max",), "minimum(x, max)"),
        (("min", "max"), "clip(x, min, max)"),
    )
}


@expression("conj(x)")
async def conj(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the complex conjugate; real numbers stay."""
    ...


@expression("copysign(x1, x2)")
async def copysign(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Give the elements of the first array the signs of the second; a zero has one, too."""
    ...


@expression("cos(x)")
async def cos(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the cosine of angles in radians."""
    ...


@expression("cosh(x)")
async def cosh(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the hyperbolic cosine."""
    ...


@expression("x1 / x2")
async def divide(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Divide two arrays; whole numbers are divided as floating ones."""
    ...


@expression("x1 == x2")
async def equal(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Tell where two arrays are equal; NaN equals nothing."""
    ...


@expression("exp(x)")
async def exp(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the exponential function."""
    ...


@expression("expm1(x)")
async def expm1(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the exponential function minus 1, exact for small elements.

    Of a complex element whose result is nearly imaginary, the real part has fewer digits.
    """
    ...


@expression("floor(x)")
async def floor(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Round down to whole numbers, of the same dtype."""
    ...


@expression("x1 // x2")
async def floor_divide(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Divide two arrays, and round down.

    A whole number by zero is 0, as NumPy has it. Infinite numbers have the rounded quotient, as the standard
    prefers: 1 by minus infinity is -0, and infinity by 2 is infinity. NumPy has -1 and NaN.
    """
    ...


@expression("x1 > x2")
async def greater(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Tell where the first of two real arrays is greater."""
    ...


@expression("x1 >= x2")
async def greater_equal(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Tell where the first of two real arrays is greater, or both are equal."""
    ...


@expression("hypot(x1, x2)")
async def hypot(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the root of the sum of both squares, which may be too large themselves."""
    ...


@expression("imag(x)")
async def imag(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the imaginary part; of real numbers it is 0."""
    ...


@expression("isfinite(x)")
async def isfinite(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Tell where elements are neither infinite nor NaN; whole numbers always are finite."""
    ...


@expression("isinf(x)")
async def isinf(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Tell where elements, or a part of a complex one, are infinite."""
    ...


@expression("isnan(x)")
async def isnan(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Tell where elements, or a part of a complex one, are NaN."""
    ...


@expression("x1 < x2")
async def less(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Tell where the first of two real arrays is less."""
    ...


@expression("x1 <= x2")
async def less_equal(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Tell where the first of two real arrays is less, or both are equal."""
    ...


@expression("log(x)")
async def log(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the natural logarithm: minus infinity of 0, NaN below.

    Complex ones have a branch cut on the negative real axis, as those with other bases have.
    """
    ...


@expression("log1p(x)")
async def log1p(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the natural logarithm of 1 + x, exact for small elements.

    Complex ones have a branch cut on the real axis below -1.
    """
    ...


@expression("log2(x)")
async def log2(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the logarithm with base 2."""
    ...


@expression("log10(x)")
async def log10(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the logarithm with base 10."""
    ...


@expression("logaddexp(x1, x2)")
async def logaddexp(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute log(exp(x1) + exp(x2)), where the exponentials may be too large themselves."""
    ...


@expression("logical_and(x1, x2)")
async def logical_and(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Tell where both arrays are true; numbers are where they are not zero."""
    ...


@expression("logical_not(x)")
async def logical_not(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Tell where an array is not true."""
    ...


@expression("logical_or(x1, x2)")
async def logical_or(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Tell where one of the arrays is true."""
    ...


@expression("logical_xor(x1, x2)")
async def logical_xor(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Tell where just one of the arrays is true."""
    ...


@expression("maximum(x1, x2)")
async def maximum(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the larger of two real arrays' elements; NaN if one is."""
    ...


@expression("minimum(x1, x2)")
async def minimum(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the smaller of two real arrays' elements; NaN if one is."""
    ...


@expression("x1 * x2")
async def multiply(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Multiply two arrays, element by element; whole numbers that are too large wrap around."""
    ...


@expression("-x")
async def negative(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Negate each element; unsigned numbers wrap around."""
    ...


@expression("nextafter(x1, x2)")
async def nextafter(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the next number of the dtype from the first array's elements towards the second's."""
    ...


@expression("x1 != x2")
async def not_equal(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Tell where two arrays differ; NaN differs from everything."""
    ...


@expression("+x")
async def positive(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Copy an array of numbers."""
    ...


@expression("x1 ** x2")
async def pow(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Raise the elements of the first array to powers of the second.

    Of whole numbers, what is too large wraps around. A negative exponent in an array rounds the power towards
    zero, and as a Python number it is a `ValueError`.
    """
    ...


@expression("real(x)")
async def real(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the real part."""
    ...


@expression("reciprocal(x)")
async def reciprocal(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute 1 / x of floating and complex numbers."""
    ...


@expression("x1 % x2")
async def remainder(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the rest of `floor_divide`, with the sign of the divisor."""
    ...


@expression("round(x)")
async def round(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Round to the nearest whole number, of two the even one; of complex numbers both parts."""
    ...


@expression("sign(x)")
async def sign(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute -1, 0 or 1; of complex numbers x / abs(x), or 0."""
    ...


@expression("signbit(x)")
async def signbit(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Tell where the sign bit of floating numbers is set; a zero and NaN have one, too."""
    ...


@expression("sin(x)")
async def sin(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the sine of angles in radians."""
    ...


@expression("sinh(x)")
async def sinh(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the hyperbolic sine."""
    ...


@expression("sqrt(x)")
async def sqrt(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the square root: NaN for negative elements.

    Complex ones have a branch cut on the negative real axis.
    """
    ...


@expression("square(x)")
async def square(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Multiply each element by itself."""
    ...


@expression("x1 - x2")
async def subtract(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Subtract the second array from the first; whole numbers that are too large wrap around."""
    ...


@expression("tan(x)")
async def tan(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the tangent of angles in radians."""
    ...


@expression("tanh(x)")
async def tanh(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the hyperbolic tangent."""
    ...


@expression("trunc(x)")
async def trunc(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Round towards zero to whole numbers, of the same dtype."""
    ...


@expression("where(condition, x1, x2)", promoted=("x1", "x2"), truths=("condition",))
async def where(
    condition: ExpressionArgument, x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None
) -> AccelRef:
    """Take elements of `x1` where a condition is true, and of `x2` elsewhere; both are computed.

    Args:
        condition: Truth values.
        x1: Elements where the condition is true.
        x2: Elements elsewhere.
        out: Array to write to.
    """
    ...
