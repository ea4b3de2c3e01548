"""Cosines and sines of degrees, with the bits of `scipy.special`, whose import takes long.

Source: S. Moshier, Cephes Mathematical Library, `sindg.c`. An angle is reduced to at most 45 degrees, so
multiples of 90 degrees are exact. Other bits would move pixels at the edges of a rotated image.
"""

from __future__ import annotations

import math

_RADIANS = 1.74532925199432957692e-2
# Beyond, a float has no degrees left.
_MAX_DEGREES = 1e14
_SINE = (
    1.58962301572218447952e-10,
    -2.50507477628503540135e-8,
    2.75573136213856773549e-6,
    -1.98412698295895384658e-4,
    8.33333333332211858862e-3,
    -1.66666666666666307295e-1,
)
_COSINE = (
    1.13678171382044553091e-11,
    -2.08758833757683644217e-9,
    2.75573155429816611547e-7,
    -2.48015872936186303776e-5,
    1.38888888888806666760e-3,
    -4.16666666666666348141e-2,
    4.99999999999999999798e-1,
)


def cosine_and_sine(degrees: float) -> tuple[float, float]:
    """Return the cosine and the sine of a finite number of degrees."""
    angle = abs(degrees)
    if angle > _MAX_DEGREES:
        return 0.0, 0.0
    octant = math.floor(angle / 45.0)
    octant += octant % 2
    x = (angle - octant * 45.0) * _RADIANS
    cosine, sine = 1.0 - x * x * _polynomial(x * x, _COSINE), x + x * (x * x * _polynomial(x * x, _SINE))
    cosine, sine = ((cosine, sine), (-sine, cosine), (-cosine, -sine), (sine, -cosine))[octant // 2 % 4]
    return cosine, math.copysign(1.0, degrees) * sine


def _polynomial(x: float, coefficients: tuple[float, ...]) -> float:
    value = 0.0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value
