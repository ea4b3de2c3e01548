"""Element-wise functions of the array API standard: one expression each.

The page of the reference has what they have in common: promotion, `out`, errors, special values.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

from ..actors import binder
from ..backends.base.expressions import Argument
from ..devices import AccelRef, ArrayFunction, Call, called
from ..expressions import Elementwise, ExpressionArgument, Out, argument_of, expression, like

__all__ = [
    "abs",
    "acos",
    "acosh",
    "add",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "ceil",
    "clip",
    "conj",
    "copysign",
    "cos",
    "cosh",
    "divide",
    "equal",
    "exp",
    "expm1",
    "floor",
    "floor_divide",
    "greater",
    "greater_equal",
    "hypot",
    "imag",
    "isfinite",
    "isinf",
    "isnan",
    "less",
    "less_equal",
    "log",
    "log1p",
    "log2",
    "log10",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "multiply",
    "negative",
    "nextafter",
    "not_equal",
    "positive",
    "pow",
    "real",
    "reciprocal",
    "remainder",
    "round",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "subtract",
    "tan",
    "tanh",
    "trunc",
    "where",
]


ParametersP = ParamSpec("ParametersP")

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


def _clipping(
    function: Callable[ParametersP, Coroutine[Any, Any, AccelRef]],
) -> Callable[ParametersP, Call[AccelRef]]:
    """Declare a function that selects the expression by the given bounds."""
    bound = binder("arrays.clip", function)

    def message(*args: Any, **named: Any) -> Any:
        arguments = bound(args, named)
        out, x = arguments.pop("out"), arguments.pop("x")
        bounds = {name: value for name, value in arguments.items() if value is not None}
        for name, value in ({"x": x} | bounds).items():
            dtype = Argument.decode(argument_of("arrays.clip", name, value)).dtype
            if dtype.kind in ("bool", "complex"):
                raise TypeError(f"arrays.clip: {name} must be of real numbers, got {dtype}")
        return clips[tuple(bounds)].compute(x, *bounds.values(), out=out)

    declared: Any = wraps(function)(called(ArrayFunction("arrays.clip", message)))
    declared.message = message
    return declared  # type: ignore[no-any-return]  # it is the function


@expression("abs(x)")
async def abs(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the size of each element; of complex ones it is real.

    The least integer of a signed dtype stays as it is: its size is too large for the dtype.
    """
    ...


@like(abs, "arccos(x)")
def acos() -> None:
    """Compute the inverse cosine, from 0 to pi: NaN outside of -1 to 1.

    Complex ones have branch cuts on the real axis outside of -1 to 1.
    """


@like(abs, "arccosh(x)")
def acosh() -> None:
    """Compute the inverse hyperbolic cosine, at least 0: NaN below 1.

    Complex ones have a branch cut on the real axis below 1.
    """


@expression("x1 + x2")
async def add(x1: ExpressionArgument, x2: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Add two arrays, element by element; integers wrap around if the sum is too large."""
    ...


@like(abs, "arcsin(x)")
def asin() -> None:
    """Compute the inverse sine, from -pi/2 to pi/2: NaN outside of -1 to 1.

    Complex ones have branch cuts on the real axis outside of -1 to 1.
    """


@like(abs, "arcsinh(x)")
def asinh() -> None:
    """Compute the inverse hyperbolic sine.

    Complex ones have branch cuts on the imaginary axis outside of -1j to 1j.
    """


@like(abs, "arctan(x)")
def atan() -> None:
    """Compute the inverse tangent, from -pi/2 to pi/2.

    Complex ones have branch cuts on the imaginary axis outside of -1j to 1j.
    """


@like(add, "arctan2(x1, x2)")
def atan2() -> None:
    """Compute the angle of the points (x2, x1), from -pi to pi; signs of zeros count."""


@like(abs, "arctanh(x)")
def atanh() -> None:
    """Compute the inverse hyperbolic tangent: infinite at -1 and 1, NaN outside of these.

    Complex ones have branch cuts on the real axis outside of -1 to 1.
    """


@like(add, "x1 & x2")
def bitwise_and() -> None:
    """Compute the bits that both arrays have, of integers or truth values."""


@like(abs, "~x")
def bitwise_invert() -> None:
    """Invert all bits of integers, or truth values."""


@like(add, "x1 << x2")
def bitwise_left_shift() -> None:
    """Shift the bits of integers to the left; shifts by the width of the dtype or more give 0."""


@like(add, "x1 | x2")
def bitwise_or() -> None:
    """Compute the bits that one of the arrays has, of integers or truth values."""


@like(add, "x1 >> x2")
def bitwise_right_shift() -> None:
    """Move the bits of integers to the right, keeping the sign."""


@like(add, "x1 ^ x2")
def bitwise_xor() -> None:
    """Compute the bits that just one of the arrays has, of integers or truth values."""


@like(abs, "ceil(x)")
def ceil() -> None:
    """Round up to integers, of the same dtype."""


@_clipping
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
    ...


@like(abs, "conj(x)")
def conj() -> None:
    """Compute the complex conjugate; real numbers stay."""


@like(add, "copysign(x1, x2)")
def copysign() -> None:
    """Give the elements of the first array the signs of the second; zeros have signs also."""


@like(abs, "cos(x)")
def cos() -> None:
    """Compute the cosine of angles in radians."""


@like(abs, "cosh(x)")
def cosh() -> None:
    """Compute the hyperbolic cosine."""


@like(add, "x1 / x2")
def divide() -> None:
    """Divide two arrays; integers are divided as floating ones."""


@like(add, "x1 == x2")
def equal() -> None:
    """Return where two arrays are equal; NaN equals nothing."""


@like(abs, "exp(x)")
def exp() -> None:
    """Compute the exponential function."""


@like(abs, "expm1(x)")
def expm1() -> None:
    """Compute the exponential function minus 1, exact for small elements.

    The real part has fewer digits where the result of a complex element is nearly imaginary.
    """


@like(abs, "floor(x)")
def floor() -> None:
    """Round down to integers, of the same dtype."""


@like(add, "x1 // x2")
def floor_divide() -> None:
    """Divide two arrays, and round down.

    An integer divided by zero gives 0, as in NumPy. Infinite numbers have the rounded quotient, as the
    standard prefers: 1 by minus infinity is -0, and infinity by 2 is infinity. NumPy returns -1 and NaN.
    """


@like(add, "x1 > x2")
def greater() -> None:
    """Return where the first of two real arrays is greater."""


@like(add, "x1 >= x2")
def greater_equal() -> None:
    """Return where the first of two real arrays is greater, or both are equal."""


@like(add, "hypot(x1, x2)")
def hypot() -> None:
    """Compute ``sqrt(x1**2 + x2**2)``, even if the squares are too large."""


@like(abs, "imag(x)")
def imag() -> None:
    """Compute the imaginary part; of real numbers it is 0."""


@like(abs, "isfinite(x)")
def isfinite() -> None:
    """Return where elements are neither infinite nor NaN; integers always are finite."""


@like(abs, "isinf(x)")
def isinf() -> None:
    """Return where elements, or a part of a complex one, are infinite."""


@like(abs, "isnan(x)")
def isnan() -> None:
    """Return where elements, or a part of a complex one, are NaN."""


@like(add, "x1 < x2")
def less() -> None:
    """Return where the first of two real arrays is less."""


@like(add, "x1 <= x2")
def less_equal() -> None:
    """Return where the first of two real arrays is less, or both are equal."""


@like(abs, "log(x)")
def log() -> None:
    """Compute the natural logarithm: minus infinity of 0, NaN below.

    Complex logarithms have a branch cut on the negative real axis, as do logarithms with other bases.
    """


@like(abs, "log1p(x)")
def log1p() -> None:
    """Compute the natural logarithm of 1 + x, exact for small elements.

    Complex ones have a branch cut on the real axis below -1.
    """


@like(abs, "log2(x)")
def log2() -> None:
    """Compute the logarithm with base 2."""


@like(abs, "log10(x)")
def log10() -> None:
    """Compute the logarithm with base 10."""


@like(add, "logaddexp(x1, x2)")
def logaddexp() -> None:
    """Compute log(exp(x1) + exp(x2)), where the exponentials may be too large themselves."""


@like(add, "logical_and(x1, x2)")
def logical_and() -> None:
    """Return where both arrays are true; numbers are where they are not zero."""


@like(abs, "logical_not(x)")
def logical_not() -> None:
    """Return where an array is not true."""


@like(add, "logical_or(x1, x2)")
def logical_or() -> None:
    """Return where one of the arrays is true."""


@like(add, "logical_xor(x1, x2)")
def logical_xor() -> None:
    """Return where just one of the arrays is true."""


@like(add, "maximum(x1, x2)")
def maximum() -> None:
    """Compute the larger of two real arrays' elements; NaN if one is."""


@like(add, "minimum(x1, x2)")
def minimum() -> None:
    """Compute the smaller of two real arrays' elements; NaN if one is."""


@like(add, "x1 * x2")
def multiply() -> None:
    """Multiply two arrays, element by element; integers wrap around if the product is too large."""


@like(abs, "-x")
def negative() -> None:
    """Negate each element; unsigned numbers wrap around."""


@like(add, "nextafter(x1, x2)")
def nextafter() -> None:
    """Compute the next number of the dtype from the first array's elements towards the second's."""


@like(add, "x1 != x2")
def not_equal() -> None:
    """Return where two arrays differ; NaN differs from everything."""


@like(abs, "+x")
def positive() -> None:
    """Copy an array of numbers."""


@like(add, "x1 ** x2")
def pow() -> None:
    """Raise the elements of the first array to powers of the second.

    Integers wrap around if the power is too large. A negative exponent in an array rounds the power towards
    zero, and a negative Python number raises `ValueError`.
    """


@like(abs, "real(x)")
def real() -> None:
    """Compute the real part."""


@like(abs, "reciprocal(x)")
def reciprocal() -> None:
    """Compute 1 / x of floating and complex numbers."""


@like(add, "x1 % x2")
def remainder() -> None:
    """Compute the rest of `floor_divide`, with the sign of the divisor."""


@like(abs, "round(x)")
def round() -> None:
    """Round to the nearest integer, of two the even one; of complex numbers both parts."""


@like(abs, "sign(x)")
def sign() -> None:
    """Compute -1, 0 or 1; of complex numbers x / abs(x), or 0."""


@like(abs, "signbit(x)")
def signbit() -> None:
    """Return where the sign bit of floating numbers is set; zeros and NaN have one also."""


@like(abs, "sin(x)")
def sin() -> None:
    """Compute the sine of angles in radians."""


@like(abs, "sinh(x)")
def sinh() -> None:
    """Compute the hyperbolic sine."""


@like(abs, "sqrt(x)")
def sqrt() -> None:
    """Compute the square root: NaN for negative elements.

    Complex ones have a branch cut on the negative real axis.
    """


@like(abs, "square(x)")
def square() -> None:
    """Multiply each element by itself."""


@like(add, "x1 - x2")
def subtract() -> None:
    """Subtract the second array from the first; integers wrap around if the difference is too large."""


@like(abs, "tan(x)")
def tan() -> None:
    """Compute the tangent of angles in radians."""


@like(abs, "tanh(x)")
def tanh() -> None:
    """Compute the hyperbolic tangent."""


@like(abs, "trunc(x)")
def trunc() -> None:
    """Round towards zero to integers, of the same dtype."""


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
