"""Cubic splines: derivatives at the knots by a tridiagonal system, and polynomials between them."""

from __future__ import annotations

import functools
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from ..arrays import asarray, concat, flip, moveaxis, reshape, searchsorted, stack
from ..backends.base import DType
from ..devices import AccelRef, Operand
from ..devices.base._refusals import whole
from ..devices.operations._calls import composed
from ..expressions import Elementwise, axis_of, check_ref
from ..linalg import solve_tridiagonal

__all__ = ["BoundaryType", "CubicSpline", "cubic_spline", "evaluate_spline"]

BoundaryType: TypeAlias = Literal["not-a-knot", "clamped", "natural"]
"""What holds at both ends: the first two pieces are one polynomial; the slope is 0; the curvature is 0."""


@attrs.frozen(eq=False)
class CubicSpline:
    """A piecewise cubic polynomial through points; made by `cubic_spline`, evaluated by `evaluate_spline`.

    Attributes:
        x: The knots, of shape (n,), on the host.
        c: Coefficients of the pieces, of shape (4, n - 1, ...), the highest power first: SciPy's ``c``.
    """

    x: npt.NDArray[Any]
    c: AccelRef


@composed
async def cubic_spline(
    x: npt.ArrayLike, y: AccelRef, axis: int = 0, bc_type: BoundaryType = "not-a-knot"
) -> CubicSpline:
    """Find the cubic spline with two continuous derivatives through points, as `scipy.interpolate.CubicSpline`.

    Source: C. de Boor, "A practical guide to splines", 1978.

    Args:
        x: The knots, ascending, on the host.
        y: Values at the knots: real or complex, with as many along the axis.
        axis: The axis.
        bc_type: What holds at both ends.

    Returns:
        The spline. The axis of its coefficients is the second one, and the others follow.

    Raises:
        TypeError: `y` is no array of a device.
        ValueError: There are fewer than two knots, or they do not ascend; there is no such axis, or it has
            another length; or no such `bc_type`.
    """
    check_ref("cubic_spline", "y", y)
    knots, place = np.asarray(x, np.float64), axis_of("cubic_spline", y, axis)
    count = len(knots) if knots.ndim == 1 else 0
    if count < 2 or not np.isfinite(knots).all() or (np.diff(knots) <= 0).any() or y.shape[place] != count:
        raise ValueError(
            f"cubic_spline: x must be at least two ascending knots, one for each of {y.shape[place]} elements of "
            f"y, got shape {knots.shape}"
        )
    if bc_type not in ("not-a-knot", "clamped", "natural"):
        raise ValueError(
            f"cubic_spline: bc_type must be 'not-a-knot', 'clamped' or 'natural', got {bc_type!r}"
        )
    dtype = y.dtype if y.dtype.is_inexact else DType.float64
    moved = moveaxis(y if dtype is y.dtype else await y.cast(dtype), place, 0)
    values = await reshape(moved, (count, -1))
    step, kind = np.diff(knots), np.dtype(dtype)
    h: Any = step.astype(kind.type(0).real.dtype)[:, None]
    slope = await ((values[1:] - values[:-1]) / h)
    ends = [_end(each, bc_type) for each in (step, step[::-1])]
    # The system of the derivatives: at inner knots the curvature is continuous.
    (first, above, *_), (last, below, *_) = ends
    diagonals = (
        np.concatenate([[0.0], step[1:], [below]]),
        np.concatenate([[first], 2 * (step[:-1] + step[1:]), [last]]),
        np.concatenate([[above], step[:-1], [0.0]]),
    )
    given: list[Any] = []
    for (_, _, one, two), edge in zip(ends, (slope, flip(slope, axis=0)), strict=True):
        given.append(one * edge[:1] + two * edge[1:2] if two else one * edge[:1])
    if count > 2:
        given.insert(1, 3 * (h[1:] * slope[:-1] + h[:-1] * slope[1:]))
    s = await solve_tridiagonal(*[each.astype(kind) for each in diagonals], concat(given))
    bend = await ((s[:-1] + s[1:] - 2 * slope) / h)
    made = await stack([bend / h, (slope - s[:-1]) / h - bend, s[:-1], values[:-1]])
    return CubicSpline(knots, made.reshape((4, count - 1, *moved.shape[1:])))


def _end(step: npt.NDArray[Any], bc_type: BoundaryType) -> tuple[float, float, float, float]:
    """Make the equation of an end: of the derivative there and of the next; and of the first two slopes."""
    if bc_type == "clamped":
        return 1.0, 0.0, 0.0, 0.0
    if bc_type == "natural" or len(step) == 1:
        return 2.0, 1.0, 3.0, 0.0
    if len(step) == 2:  # a parabola
        return 1.0, 1.0, 2.0, 0.0
    one, two, both = float(step[0]), float(step[1]), float(step[0] + step[1])
    return two, both, (one + 2 * both) * two / both, one**2 / both


# Pieces and their derivatives, of the powers of the distance to the knot.
_PIECES = (
    "((c0 * d + c1) * d + c2) * d + c3", "(3 * c0 * d + 2 * c1) * d + c2", "6 * c0 * d + 2 * c1", "6 * c0 + 0 * d",
)  # fmt: skip


@functools.cache
def _piece(nu: int) -> Elementwise[AccelRef]:
    loads = "".join(f"c{power} = c[{power}, k, i(1)];" for power in range(4) if f"c{power}" in _PIECES[nu])
    text = f"k = minimum(maximum(j - 1, 0), last); d = q - t[k]; {loads} y = {_PIECES[nu]}"
    return Elementwise(text, inputs=("c", "q", "j", "t", "last"), operation="signal.evaluate_spline")


@composed
async def evaluate_spline(spline: CubicSpline, x: Operand, nu: int = 0) -> AccelRef:
    """Evaluate a spline, or a derivative of it; outside of the knots, its outer pieces go on.

    Args:
        spline: The spline.
        x: Where, real: an array of the device or of the host, of any shape.
        nu: Which derivative, 0 to 3.

    Returns:
        Values of shape ``x.shape + c.shape[2:]``.

    Raises:
        TypeError: `x` is no array of real numbers.
        ValueError: There is no such derivative.
    """
    order = whole("evaluate_spline", "nu", nu)
    if not 0 <= order < len(_PIECES):
        raise ValueError(f"evaluate_spline: nu must be from 0 to 3, got {nu}")
    device, c = spline.c.device, spline.c
    given = await asarray(device, x)
    points = await reshape(given if given.dtype.kind == "float" else await given.cast("float64"), (-1,))
    knots = await device.put(spline.x.astype(points.dtype.dtype))
    place = await searchsorted(knots, points, side="right")
    table, count = c.reshape((*c.shape[:2], -1)), points.size
    columns = [each.reshape((count, 1)) for each in (points, place)]
    last, shape = len(spline.x) - 2, (count, table.shape[2])
    made = await _piece(order)(table, *columns, knots, last, shape=shape)
    return made.reshape((*given.shape, *c.shape[2:]))
