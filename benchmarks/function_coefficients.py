"""Find the polynomials of `trio_accel/backends/cpu/compiled/functions.h`; for a Python that has mpmath.

Each interpolates a function at Chebyshev's nodes, which is near the best in the greatest error. It is printed
with the error that it leaves in the result, as a power of two; a coefficient has the bits that count there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeAlias

_mpmath: Any = importlib.import_module("mpmath")
mp, mpf = _mpmath.mp, _mpmath.mpf
mp.prec = 300

Function: TypeAlias = Callable[[Any], Any]
Case: TypeAlias = tuple[str, Function, Any, Any, int, Function]
_LEAST = mpf(10) ** -12
# Lost by each coefficient beside the result: far less than a bit of it.
_LOST, _LOST_SHORT = mpf(2) ** -66, mpf(2) ** -46


def fitted(
    function: Function, low: Any, high: Any, degree: int, weight: Function, lost: Any
) -> tuple[list[Any], float]:
    """Return the coefficients, lowest first, and the greatest error times `weight`, as a power of two."""
    count = degree + 1
    turns = [mp.cos(mp.pi * (2 * k + 1) / (2 * count)) for k in range(count)]
    nodes = [(low + high) / 2 + (high - low) / 2 * turn for turn in turns]
    matrix = mp.matrix([[node**k for k in range(count)] for node in nodes])
    exact = mp.lu_solve(matrix, mp.matrix([function(node) for node in nodes]))
    most = max(abs(low), abs(high))
    kept = [_rounded(each, lost / (most**k * weight(most))) for k, each in enumerate(exact)]
    places = [low + (high - low) * (k + mpf(1) / 3) / 500 for k in range(500)]
    errors = [abs(mp.polyval(kept[::-1], at) - function(at)) * weight(at) for at in places]
    return kept, float(mp.log(max(errors), 2))


def _rounded(number: Any, step: Any) -> Any:
    step = mpf(2) ** max(mp.floor(mp.log(step, 2)), mp.floor(mp.log(abs(number), 2)) - 52)
    return mp.nint(number / step) * step


def main() -> None:
    """Print all."""
    ln2, root = mp.log(2), mp.sqrt
    far = ln2 / 2 * mpf("1.0001")
    quarter, half = (mp.pi / 4 * mpf("1.002")) ** 2, (mp.pi / 2 * mpf("1.002")) ** 2
    wide = ((root(2) - 1) / (root(2) + 1) * mpf("1.0001")) ** 2

    def odd(function: Function) -> tuple[Function, Function]:
        """Of function(x) = x + x * z * p(z), z = x * x: p, and what an error of it counts."""

        def rest(z: Any) -> Any:
            return (function(root(z)) / root(z) - 1) / z

        return rest, lambda z: z * root(z) / function(root(z))

    def exp(r: Any) -> Any:
        return (mp.expm1(r) - r) / r**2

    def cos(z: Any) -> Any:
        return (mp.cos(root(z)) - 1 + z / 2) / z**2

    def of_atanh(z: Any) -> Any:
        return 2 * mp.atanh(root(z)) / root(z)

    def erfc(t: Any) -> Any:
        x = mpf("3.5") * (1 + t) / (1 - t)
        return (1 + 2 * x) * mp.exp(x * x) * mp.erfc(x)

    # The places of 0 and of 27.3, where `erfc` is 0 in float64.
    last, middle = mpf("23.8") / mpf("30.8"), erfc(mpf(0))
    print(f"middle of erfc: {_short(middle)}, {_short(middle - mpf(float(middle)))}")
    per_pi = 2 / root(mp.pi)
    print(f"2 / sqrt(pi): {_short(per_pi)}, {_short(per_pi - mpf(float(per_pi)))}")
    sin, of_sin = odd(mp.sin)
    atan, of_atan = odd(mp.atan)
    cases: list[Case] = [
        ("exp(r) = 1 + r + r * r * p(r)", exp, -far - _LEAST, far, 10, lambda r: r * r / mp.exp(r)),
        ("the same, float32", exp, -far - _LEAST, far, 5, lambda r: r * r / mp.exp(r)),
        (
            "2 * atanh(s) = 2 * s + s * z * p(z)",
            lambda z: (of_atanh(z) - 2) / z, _LEAST, wide, 7, lambda z: z / 2,
        ),
        ("2 * atanh(s) = s * p(z), float32", of_atanh, _LEAST, wide, 4, lambda z: mpf(1) / 2),
        (
            "2 * atanh(s) / ln(2) = s / ln(2) * (2 + 2 / 3 * z) + s * z * z * p(z)",
            lambda z: (of_atanh(z) - 2 - 2 * z / 3) / z**2 / ln2, _LEAST, wide, 7, lambda z: z * z * ln2 / 2,
        ),
        ("sin(r) = r + r * z * p(z)", sin, _LEAST, quarter, 6, of_sin),
        ("the same as far as pi / 2, float32", sin, _LEAST, half, 4, of_sin),
        ("cos(r) = 1 - z / 2 + z * z * p(z)", cos, _LEAST, quarter, 5, lambda z: z * z / mp.cos(root(z))),
        (
            "(1 + 2 * x) * exp(x * x) * erfc(x) = middle + t * p(t), t = (x - 3.5) / (x + 3.5)",
            lambda t: (erfc(t) - middle) / t, mpf(-1), last, 23, abs,
        ),
        (
            "erf(x) = x * 2 / sqrt(pi) + x * z * p(z)",
            lambda z: (mp.erf(root(z)) / root(z) - per_pi) / z, _LEAST, mpf(1) / 4, 8,
            lambda z: z * root(z) / mp.erf(root(z)),
        ),
        ("atan(t) = t + t * z * p(z)", atan, _LEAST, mp.tan(mp.pi / 8) ** 2, 10, of_atan),
    ]  # fmt: skip
    for name, function, low, high, degree, weight in cases:
        lost = _LOST_SHORT if "float32" in name else _LOST
        kept, error = fitted(function, low, high, degree, weight, lost)
        print(f"{name}: 2**{error:.1f}")
        print(f"    {', '.join(_short(each) for each in kept)}")


def _short(number: Any) -> str:
    mantissa, exponent = float(number).hex().split("p")
    return f"{mantissa.rstrip('0').removesuffix('.')}p{exponent}"


if __name__ == "__main__":
    main()
