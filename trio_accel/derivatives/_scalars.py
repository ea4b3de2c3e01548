"""Derivatives of the expression language's functions, as sources in that language.

A text reads `g`, the gradient of the result, the arguments `a` and `b`, and `y`, the result.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["BOUNDS", "NOT_HOLOMORPHIC", "OF_ONE", "OF_TWO", "STEPS"]

# The digamma function by its asymptotic series, after recurrences up to 10 and the reflection of negative
# numbers.
_DIGAMMA = (
    "r = where(a < 0.5, 1 - a, a); s = 0 * r; z = r\n"
    "for k in range(10):\n"
    "    s = s + where(z < 10, 1 / z, 0)\n"
    "    z = where(z < 10, z + 1, z)\n"
    "w = 1 / (z * z)\n"
    "d = log(z) - 0.5 / z - s - w * (1 / 12 - w * (1 / 120 - w * (1 / 252 - w * (1 / 240 - w * (1 / 132 -"
    " w * (691 / 32760 - w / 12))))))\n"
    "d = d - where(a < 0.5, pi / tan(pi * where(a < 0.5, a - floor(a), 0.5)), 0)\n"
)

# The smaller of two exponentials, as a part of the larger one.
_RATIO = "r = exp(where(a >= b, b - a, a - b))\n"

OF_ONE: Mapping[str, str] = {
    "absolute": "g * sign(a)", "fabs": "g * sign(a)", "negative": "-g", "positive": "g",
    "conjugate": "conj(g)", "real": "g", "imag": "g * 1j", "square": "2 * g * a",
    "reciprocal": "-g * y * y", "sqrt": "0.5 * g / y",
    "cbrt": "g / (3 * y * y)", "exp": "g * y", "exp2": "g * y * 0.6931471805599453", "expm1": "g * exp(a)",
    "log": "g / a", "log1p": "g / (1 + a)", "log2": "g / (a * 0.6931471805599453)",
    "log10": "g / (a * 2.302585092994046)", "sin": "g * cos(a)", "cos": "-g * sin(a)",
    "tan": "g * (1 + y * y)", "arcsin": "g / sqrt(1 - a * a)", "arccos": "-g / sqrt(1 - a * a)",
    "arctan": "g / (1 + a * a)", "sinh": "g * cosh(a)", "cosh": "g * sinh(a)", "tanh": "g * (1 - y * y)",
    "arcsinh": "g / sqrt(a * a + 1)", "arccosh": "g / (sqrt(a - 1) * sqrt(a + 1))",
    "arctanh": "g / (1 - a * a)",
    "deg2rad": "g * 0.017453292519943295", "radians": "g * 0.017453292519943295",
    "rad2deg": "g * 57.29577951308232", "degrees": "g * 57.29577951308232",
    "erf": "g * 1.1283791670955126 * exp(-a * a)", "erfc": "-g * 1.1283791670955126 * exp(-a * a)",
    "erfcx": "g * (2 * a * y - 1.1283791670955126)", "erfinv": "g * 0.8862269254527579 * exp(y * y)",
    "erfcinv": "-g * 0.8862269254527579 * exp(y * y)", "bessel_i0": "g * bessel_i1(a)",
    "bessel_i1": "g * (bessel_i0(a) - where(a == 0, 0.5, y / where(a == 0, 1, a)))",
    "lgamma": f"{_DIGAMMA}x = g * d", "tgamma": f"{_DIGAMMA}x = g * y * d",
    # The sign of a complex number is its direction; the sign of a real number is a step function.
    "sign": "where(a == 0, 0, (g - y * real(conj(y) * g)) / where(a == 0, 1, abs(a)))",
}  # fmt: skip
"""The derivatives of functions of one argument."""

OF_TWO: Mapping[str, tuple[str | None, str | None]] = {
    "add": ("g", "g"),
    "subtract": ("g", "-g"),
    "multiply": ("g * b", "g * a"),
    "divide": ("g / b", "-g * (y / b)"),
    # An exponent of 0 would multiply 0 by an infinite power of 0, and the logarithm of 0 is infinite.
    "power": (
        "where(b == 0, 0, g * b * a ** (b - 1))",
        "where((a == 0) and (real(b) >= 0), 0, g * y * log(a))",
    ),
    "maximum": (
        "where(a > b, g, where(a == b, 0.5 * g, 0))",
        "where(b > a, g, where(a == b, 0.5 * g, 0))",
    ),
    "minimum": (
        "where(a < b, g, where(a == b, 0.5 * g, 0))",
        "where(b < a, g, where(a == b, 0.5 * g, 0))",
    ),
    "fmax": ("where((a >= b) or (b != b), g, 0)", "where((a >= b) or (b != b), 0, g)"),
    "fmin": ("where((a <= b) or (b != b), g, 0)", "where((a <= b) or (b != b), 0, g)"),
    "remainder": ("g", "-g * floor_divide(a, b)"),
    "fmod": ("g", "-g * rint((a - y) / b)"),
    "hypot": ("where(y == 0, 0, g * (a / y))", "where(y == 0, 0, g * (b / y))"),
    "arctan2": (
        "where(hypot(a, b) == 0, 0, g * (b / hypot(a, b)) / hypot(a, b))",
        "where(hypot(a, b) == 0, 0, -g * (a / hypot(a, b)) / hypot(a, b))",
    ),
    # A constant only for infinities, because other equal arrays have a second derivative.
    "logaddexp": (
        f"{_RATIO}x = where((a == b) and isinf(a), 0.5 * g, g * where(a >= b, 1, r) / (1 + r))",
        f"{_RATIO}x = where((a == b) and isinf(a), 0.5 * g, g * where(a >= b, r, 1) / (1 + r))",
    ),
    "copysign": ("where(signbit(a) == signbit(b), g, -g)", None),
    "nextafter": ("g", None),
}
"""The derivatives of functions of two arguments by each of them; two equal arrays share that of an
extremum."""

BOUNDS: Mapping[str, tuple[str, str]] = {
    "maximum": ("greater", "less_equal"),
    "minimum": ("less", "greater_equal"),
}
"""The comparisons of an array with its bound, a number, where the derivative is 1, and where it is 0."""

STEPS = frozenset((
    "floor", "ceil", "trunc", "rint", "sign", "signbit", "floor_divide", "equal", "not_equal", "less",
    "less_equal", "greater", "greater_equal", "logical_and", "logical_or", "logical_xor", "logical_not",
    "isnan", "isinf", "isfinite", "bitwise_and", "bitwise_or", "bitwise_xor", "invert", "left_shift",
    "right_shift", "gcd", "lcm", "constant", "index", "stop_gradient",
))  # fmt: skip
"""The functions whose derivative is 0, because a small change of an argument does not change the result."""

NOT_HOLOMORPHIC = frozenset(
    {"absolute", "real", "imag", "conjugate", "add", "subtract", "negative", "positive", "sign"}
)
"""The functions whose texts are the gradients of complex numbers as they are."""
