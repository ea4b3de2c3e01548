"""Cubic splines: derivatives at the knots by a tridiagonal system, and polynomials between them."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, cast, get_args

import attrs
import numpy as np
import numpy.typing as npt

from ..arrays import asarray, concat, flip, linear_recurrence, moveaxis, reshape, searchsorted, stack
from ..backends.base import DType, HostArray
from ..devices import AccelRef, Operand, bounded_integer, composed
from ..expressions import Elementwise, axis_of, check_ref

__all__ = ["BoundaryType", "CubicSpline", "cubic_spline", "evaluate_spline"]

BoundaryType: TypeAlias = Literal["not-a-knot", "clamped", "natural"]
"""What holds at both ends: the first two pieces are one polynomial; the slope is 0; the curvature is 0."""

_Floats: TypeAlias = npt.NDArray[np.float64]


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
    """Find the cubic spline through points, as `scipy.interpolate.CubicSpline`.

    Source: C. de Boor, "A practical guide to splines", 1978.

    Args:
        x: The knots, ascending, on the host.
        y: Values at the knots: real or complex, one for each knot along the axis.
        axis: The axis.
        bc_type: The condition at both ends.

    Returns:
        The spline. The axis of its coefficients is the second one, and the others follow.

    Raises:
        TypeError: `y` is not an array of a device.
        ValueError: There are fewer than two knots, or they do not ascend; the axis is out of range, or it has
            another length; or no such `bc_type`.
    """
    check_ref("cubic_spline", "y", y)
    knots, axis_index = np.asarray(x, np.float64), axis_of("cubic_spline", y, axis)
    step = np.diff(knots) if knots.ndim == 1 else np.zeros(0)
    if (
        not len(step)
        or len(knots) != y.shape[axis_index]
        or not (np.isfinite(knots).all() and (step > 0).all())
    ):
        raise ValueError(
            f"cubic_spline: x must be two or more ascending knots, one for each of {y.shape[axis_index]} "
            f"elements of y, got shape {knots.shape}"
        )
    if bc_type not in (names := get_args(BoundaryType)):
        raise ValueError(f"cubic_spline: bc_type must be one of {', '.join(names)}, got {bc_type!r}")
    dtype = DType.of(np.result_type(y.dtype.dtype, np.float32))
    moved = moveaxis(await y.cast(dtype), axis_index, 0)
    values = await reshape(moved, (len(knots), -1))
    h: Any = step.astype(dtype.dtype.type(0).real.dtype)[:, None]
    slope = await ((values[1:] - values[:-1]) / h)
    ends = [_end(steps, bc_type) for steps in (step, step[::-1])]
    # The system of the derivatives: at inner knots the curvature is continuous.
    diagonals = (
        np.concatenate([[0.0], step[1:], [ends[1][1]]]),
        np.concatenate([[ends[0][0]], 2 * (step[:-1] + step[1:]), [ends[1][0]]]),
        np.concatenate([[ends[0][1]], step[:-1], [0.0]]),
    )
    rhs: list[Any] = []
    for (_, _, first_weight, second_weight), edge in zip(ends, (slope, flip(slope, axis=0)), strict=True):
        rhs.append(
            await (
                first_weight * edge[:1] + second_weight * edge[1:2]
                if second_weight
                else first_weight * edge[:1]
            )
        )
    rhs[1:1] = [await (3 * (h[1:] * slope[:-1] + h[:-1] * slope[1:]))] if len(step) > 1 else []
    forward, backward = (-factor.astype(h.dtype)[:, None] for factor in _factors(*diagonals))
    pivots = diagonals[1].astype(h.dtype)[:, None]
    half = await linear_recurrence(forward, await concat(rhs), axis=0)
    turned = flip(await (half / pivots), axis=0)
    s = flip(await linear_recurrence(backward[::-1], turned, axis=0), axis=0)
    bend = await ((s[:-1] + s[1:] - 2 * slope) / h)
    coefficients = await stack([await (bend / h), await ((slope - s[:-1]) / h - bend), s[:-1], values[:-1]])
    return CubicSpline(knots, coefficients.reshape((4, len(step), *moved.shape[1:])))


def _factors(below: _Floats, main: _Floats, above: _Floats) -> tuple[_Floats, _Floats]:
    """Eliminate forth and back, on the host: the factors of each equation for the previous and next one.

    The diagonal becomes the pivots. They are positive for ascending knots, so no rows are exchanged.
    """
    forward = np.zeros(len(main))
    for k in range(1, len(main)):
        forward[k] = below[k] / main[k - 1]
        main[k] -= forward[k] * above[k - 1]
    return forward, above / main


def _end(step: HostArray, bc_type: BoundaryType) -> tuple[float, float, float, float]:
    """Make the equation of an end: of the derivative there and of the next; and of the first two slopes."""
    if bc_type == "clamped":
        return 1.0, 0.0, 0.0, 0.0
    if bc_type == "natural" or len(step) == 1:
        return 2.0, 1.0, 3.0, 0.0
    if len(step) == 2:  # a parabola
        return 1.0, 1.0, 2.0, 0.0
    h0, h1, both = float(step[0]), float(step[1]), float(step[0] + step[1])
    return h1, both, (h0 + 2 * both) * h1 / both, h0**2 / both


# Pieces and their derivatives, as polynomials of the distance to the knot.
_PIECES = [
    Elementwise[AccelRef](
        "k = minimum(maximum(j - 1, 0), last); d = q - t[k];"
        + "".join(f"c{power} = c[{power}, k, i(1)];" for power in range(4) if f"c{power}" in text)
        + f"y = {text}",
        inputs=("c", "q", "j", "t", "last"),
        operation="signal.evaluate_spline",
    )
    for text in (
        "((c0 * d + c1) * d + c2) * d + c3",
        "(3 * c0 * d + 2 * c1) * d + c2",
        "6 * c0 * d + 2 * c1",
        "6 * c0 + 0 * d",
    )
]


@composed
async def evaluate_spline(spline: CubicSpline, x: Operand, nu: int = 0) -> AccelRef:
    """Evaluate a spline, or a derivative of it; outside of the knots, its outer pieces go on.

    Args:
        spline: The spline.
        x: The points, real: an array on the device or the host, with any shape.
        nu: The order of the derivative, 0 to 3.

    Returns:
        Values of shape ``x.shape + c.shape[2:]``.

    Raises:
        TypeError: `x` is not an array of real numbers.
        ValueError: The derivative does not exist.
    """
    order = bounded_integer("evaluate_spline", "nu", nu)
    if not 0 <= order < len(_PIECES):
        raise ValueError(f"evaluate_spline: nu must be from 0 to 3, got {nu}")
    device, c = spline.c.device, spline.c
    positions = await asarray(device, cast("AccelRef", x))
    points = await reshape(
        positions if positions.dtype.kind == "float" else await positions.cast("float64"), (-1,)
    )
    knots = await device.put(spline.x.astype(points.dtype.dtype))
    intervals = await searchsorted(knots, points, side="right")
    table, count = c.reshape((*c.shape[:2], -1)), points.size
    columns = [array.reshape((count, 1)) for array in (points, intervals)]
    last_interval, shape = len(spline.x) - 2, (count, table.shape[2])
    values = await _PIECES[order](table, *columns, knots, last_interval, shape=shape)
    return values.reshape((*positions.shape, *c.shape[2:]))
