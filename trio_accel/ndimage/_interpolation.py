"""Interpolation by splines of order 0 to 5, with `scipy.ndimage`'s names and rules, in float64 like SciPy.

Coefficients are convolutions with ``z ** abs(k)`` for each pole ``z`` of the inverse filter (M. Unser, A.
Aldroubi and M. Eden, 1993), which end where the numbers do: 61 for cubic splines. So each element is made by
itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.base import DType, HostArray, Ints, NotSupportedError
from ..devices import AccelRef, Operand, composed, device_of
from . import windows as w
from ._degrees import cosine_and_sine
from ._filters import line
from .windows import Floats, Mode, Output

__all__ = [
    "affine_transform",
    "map_coordinates",
    "rotate",
    "shift",
    "spline_filter",
    "spline_filter1d",
    "zoom",
]

_POLES: dict[int, tuple[float, ...]] = {
    2: (math.sqrt(8) - 3,),
    3: (math.sqrt(3) - 2,),
    4: (-0.361341225900220177092212841325675255, -0.013725429297339121360331226939128204),
    5: (-0.430575347099973791851434783493520110, -0.043096288203264653822712376822550182),
}
# A coordinate c outside of an axis with n elements; s is its period.
_BOUNDARY_FORMULAS = {
    "grid-constant": "c = clip(c, -r, n + r)",
    "nearest": "c = clip(c, -r, n + r)",
    "mirror": "s = maximum(2 * n - 2, 1); m = abs(c); m = m - s * floor(m / s);"
    # Halves are rounded like SciPy's.
    " c = where(m >= where(c < 0, n - 1, n), s - m, m)",
    "reflect": "s = 2 * n; m = abs(c + 0.5); m = m - s * floor(m / s); c = minimum(m, s - m) - 0.5",
    "wrap": "s = maximum(n - 1, 1); c = where(c < 0, c + s * (trunc(-c / s) + 1), c - s * trunc(c / s))",
    "grid-wrap": "c = c - n * floor(c / n)",
}
# How coefficients continue outside of their axes; SciPy lacks another way for modes without a rule.
_FILLED = {
    "constant": "mirror",
    "wrap": "mirror",
    "grid-constant": "constant",
    "grid-wrap": "wrap",
    "mirror": "mirror",
    "reflect": "reflect",
    "nearest": "nearest",
}
_FILTERED = {"grid-wrap": "wrap", "reflect": "reflect", "nearest": "reflect"}
# Elements that SciPy adds around an image if its mode lacks exact coefficients.
_PADDING_ELEMENTS = 12
# Elements for each result are bounded because its time grows with them. Axes, and indices without a loop, are
# because the source of an expression has a maximum length; statements for an axis are as long as 60 indices.
_MAX_TAPS, _MAX_AXES, _MAX_INDICES, _PER_AXIS = 1 << 16, 13, 555, 60


@functools.cache
def _kernel(order: int) -> HostArray:
    kernel = np.ones(1)
    for pole in _POLES[order]:
        count = math.ceil(math.log(1e-18) / math.log(-pole))
        kernel = np.convolve(kernel, (1 - pole) / (1 + pole) * pole ** abs(np.arange(-count, count + 1)))
    return kernel


async def _filtered(x: AccelRef, order: int, mode: str, axes: Sequence[int]) -> AccelRef:
    """Compute the coefficients of splines, in the wide dtype."""
    dtype, coefficients = DType(w.wide_of(x)), x
    for axis in axes if order > 1 else ():
        if x.shape[axis] > 1:
            coefficients = await line(
                coefficients, _kernel(order), axis, dtype, _FILTERED.get(mode, "mirror")
            )
    return coefficients


async def _sampled(
    x: Any,
    coordinates: Mapping[int, str],
    arguments: Mapping[str, Any],
    shape: Sequence[int],
    output: Output,
    order: int,
    mode: str,
    cval: complex,
    prefilter: bool,
) -> AccelRef:
    """Interpolate an image at coordinates `c`, with steps by its axes; other axes stay."""
    axes, (order, mode) = list(coordinates), _checked(order, mode)
    dtype = w.dtype_of(x, output, shape)
    is_even = mode in ("nearest", "grid-constant")
    padding = _PADDING_ELEMENTS * (is_even and prefilter and order > 1)
    if (taps := (order + 1) ** len(axes)) > _MAX_TAPS or len(axes) > _MAX_AXES:
        message = f"{taps} elements for each one by order {order} along {len(axes)} axes"
        raise NotSupportedError(f"{message}; {_MAX_TAPS} along {_MAX_AXES} axes are possible")
    if prefilter:
        edges = w.spread(x, axes, [(padding, padding)] * len(axes), (0, 0))
        x = await _filtered(await w.padded(x, edges, [_FILLED[mode]] * x.ndim, cval), order, mode, axes)
    margin = order // 2 + 2 + (order + 1) * is_even
    widths = w.spread(x, axes, [(margin, margin)] * len(axes), (0, 0))
    wider = await w.padded(x, widths, [_FILLED[mode]] * x.ndim, cval)
    key = tuple(coordinates.items()), x.ndim, order, mode, padding, margin, w.wide_of(x), dtype
    sizes = {f"n{axis}": x.shape[axis] for axis in axes}
    values = {**arguments, **sizes, "x": wider, "cval": cval}
    expression = _interpolated(*key)
    [result] = await expression(*[values[name] for name in expression.inputs], shape=shape)
    return await w.delivered(result, output)


def _checked(order: object, mode: object, min_order: int = 0) -> tuple[int, str]:
    """Check an order and a mode."""
    w.modes_of((mode,), 1)
    number = w.integer("order", order)
    w.require(min_order <= number <= 5, f"order must be from {min_order} to 5, got {number}")
    return number, "reflect" if mode == "grid-mirror" else str(mode)


@functools.cache
def _interpolated(
    coordinates: tuple[tuple[int, str], ...],
    ndim: int,
    order: int,
    mode: str,
    padding: int,
    margin: int,
    wide: str,
    dtype: DType,
) -> Any:
    lines, indices = list[str](), [[f"i({axis})"] for axis in range(ndim)]
    middle = "" if order % 2 else " + 0.5"
    for axis, text in coordinates:
        lines.append(f"n = n{axis}; r = {order + 1}; {text}; c = c + {padding}")
        if mode == "constant":
            lines.append(f"o{axis} = c < 0 or c > n - 1")
        else:
            lines.append(f"g = c; {_BOUNDARY_FORMULAS[mode]}; c = where(g >= 0 and g <= n - 1, g, c)")
        lines.append(f"f = floor(c{middle}); d = c{middle} - f; b = int64(f) + {margin - order // 2}")
        lines += _weights(f"w{axis}_", order)
        indices[axis] = [f"p{axis}_{k}" for k in range(order + 1)]
        lines += [f"{index} = b + {k}" for k, index in enumerate(indices[axis])]

    def total(*prefix: str) -> str:
        if len(prefix) == ndim:
            return f"{wide}(x[{', '.join(prefix)}])"
        parts = [total(*prefix, index) for index in indices[len(prefix)]]
        weighed = [f"w{len(prefix)}_{k} * {part}" for k, part in enumerate(parts)]
        return f"({' + '.join(weighed)})" if len(parts) > 1 else parts[0]

    count, body = _loop([axis for axis, _ in coordinates], order, indices)
    sums = f"t = {total()}\n"
    if body:
        sums = f"t = {wide}(0)\nfor k in range({count}): {'; '.join(body)}; t = t + v * {total()}\n"
    outside = " or ".join(f"o{axis}" for axis, _ in coordinates if mode == "constant")
    ends = [f"y = where({outside}, cval, t)" if outside else "y = t", *_rounded(dtype)]
    return w.several("interpolate", f"{'; '.join(lines)}; {sums}{'; '.join(ends)}", None, ("y",), dtype)


def _loop(axes: Sequence[int], order: int, indices: list[list[str]]) -> tuple[int, list[str]]:
    """Write a loop over the leading axes: its length, and statements for places and their weight v."""
    count, weights, body = 1, list[str](), list[str]()
    for n, axis in enumerate(reversed(axes), 1):
        if (order + 1) ** n * len(indices) > _MAX_INDICES - _PER_AXIS * len(axes):
            weight = f"w{axis}_{order}"
            for tap in reversed(range(order)):
                weight = f"where(m{axis} == {tap}, w{axis}_{tap}, {weight})"
            body += [f"m{axis} = k // {count} % {order + 1}", f"l{axis} = p{axis}_0 + m{axis}"]
            count, indices[axis], weights = count * (order + 1), [f"l{axis}"], [weight, *weights]
    return count, [*body, f"v = {' * '.join(weights)}"] if weights else []


def _weights(w: str, order: int) -> list[str]:
    """Weigh the elements around a place d after a knot: B-splines, by C. de Boor's recursion, 1972."""
    lines = [f"{w}0 = 1 - d; {w}1 = d"] * (order > 0)
    for degree in range(2, order + 1):
        # Each is divided once, at the end.
        divided = f" / {math.factorial(order)}" * (degree == order)
        lines.append(f"{w}{degree} = d * {w}{degree - 1}{divided}")
        for k in range(degree - 1, 0, -1):
            rising, falling = f"(d + {degree - k}) * {w}{k - 1}", f"({k + 1} - d) * {w}{k}"
            lines.append(f"{w}{k} = ({rising} + {falling}){divided}")
        lines.append(f"{w}0 = (1 - d) * {w}0{divided}")
    return lines


def _rounded(dtype: DType) -> list[str]:
    """Round a result to the nearest integer that the dtype has."""
    if dtype.kind not in ("int", "uint"):
        return ["y = y >= 0.5"] * (dtype is DType.bool)
    minimum, maximum = np.iinfo(dtype.dtype).min, np.iinfo(dtype.dtype).max
    # The float next to the largest number of 64 bits is above it.
    highest = float(maximum) if int(float(maximum)) == maximum else float(np.nextafter(float(maximum), 0))
    below = "y - 0.5" if minimum else "0.0"
    return [f"y = clip(where(y > 0, y + 0.5, {below}), {float(minimum)}, {highest})"]


async def _splines(x: Any, order: int, axes: object, output: Output, mode: Mode, min_order: int) -> AccelRef:
    along, (order, filled) = w.axes_of(x, axes), _checked(order, mode, min_order)
    is_complex = x.dtype.kind == "complex" and not isinstance(output, AccelRef)
    dtype = w.dtype_of(x, "complex128" if is_complex else output, x.shape)
    return await w.delivered(await w.converted(await _filtered(x, order, filled, along), dtype), output)


@composed
async def spline_filter1d(
    input: Operand, order: int = 3, axis: int = -1, output: Output = "float64", mode: Mode = "mirror"
) -> AccelRef:
    """Compute coefficients of splines along an axis, as `scipy.ndimage.spline_filter1d` does.

    Args:
        input: The image.
        order: Order of the splines, from 0 to 5; nothing happens for 0 and 1.
        axis: The axis.
        output: See `Output`; of a complex image complex128.
        mode: See `Mode`.

    Returns:
        The coefficients.

    Raises:
        TypeError: `input` is not an array of a device.
        ValueError: An order, axis or mode that there is not, or `output` of another shape.
        NotSupportedError: float8.
    """
    return await _splines(input, order, w.integer("axis", axis), output, mode, 0)


@composed
async def spline_filter(
    input: Operand, order: int = 3, output: Output = "float64", mode: Mode = "mirror"
) -> AccelRef:
    """Compute coefficients of splines along all axes, as `scipy.ndimage.spline_filter` does.

    The order is from 2 to 5. All else is as of `spline_filter1d`.
    """
    return await _splines(input, order, None, output, mode, 2)


@composed
async def map_coordinates(
    input: Operand,
    coordinates: Operand,
    output: Output = None,
    order: int = 3,
    mode: Mode = "constant",
    cval: complex = 0.0,
    prefilter: bool = True,
) -> AccelRef:
    """Interpolate an image at coordinates by splines, as `scipy.ndimage.map_coordinates` does.

    Args:
        input: The image.
        coordinates: Real numbers of shape ``(axes of the image, ...)``.
        output: See `Output`.
        order: Order of the splines, from 0 to 5.
        mode: See `Mode`. In ``"constant"``, the value is `cval` at any distance outside of an edge.
        cval: The number outside of the edges.
        prefilter: Whether to compute coefficients; False if `input` has the coefficients of `spline_filter`.

    Returns:
        An array with the shape of one coordinate, in the dtype of `input`. Integers are the nearest ones, and
        truth values are True from 0.5 on.

    Raises:
        TypeError: `input` is not an array of a device, or coordinates are complex.
        ValueError: Coordinates for another number of axes, an order or mode that there is not, or `output` of
            another shape.
        NotSupportedError: float8, more than 13 axes, or more than 65536 elements for each result.
    """
    ndim, is_on_device = len(w.axes_of(input, None)), isinstance(coordinates, AccelRef)
    points: Any = coordinates if is_on_device else w.numbers("coordinates", coordinates)
    message = f"coordinates must have shape ({ndim}, ...), got {points.shape}"
    w.require(points.ndim > 1 and points.shape[0] == ndim, message)
    points = points if is_on_device else await device_of("ndimage.function", input).put(points)
    texts = {axis: f"c = float64(at{axis})" for axis in range(ndim)}
    arguments = {f"at{axis}": points[axis] for axis in texts}
    return await _sampled(input, texts, arguments, points.shape[1:], output, order, mode, cval, prefilter)


@composed
async def affine_transform(
    input: Operand,
    matrix: npt.ArrayLike,
    offset: Floats = 0.0,
    output_shape: Sequence[int] | None = None,
    output: Output = None,
    order: int = 3,
    mode: Mode = "constant",
    cval: complex = 0.0,
    prefilter: bool = True,
) -> AccelRef:
    """Interpolate an image at ``matrix @ place + offset``, as `scipy.ndimage.affine_transform` does.

    Args:
        input: The image.
        matrix: A matrix with a row for each axis of the image; a vector for a diagonal matrix; or a matrix of
            homogeneous coordinates, with the offset in its last column. It is on the host.
        offset: For all axes, or for each.
        output_shape: Shape of the result; by default the shape of an `output` array, or of `input`.
        output: See `Output`.
        order: See `map_coordinates`.
        mode: See `map_coordinates`.
        cval: See `map_coordinates`.
        prefilter: See `map_coordinates`.

    Returns:
        See `map_coordinates`.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `map_coordinates`; or a matrix of another shape.
    """
    ndim, rest = len(w.axes_of(input, None)), (output, order, mode, cval, prefilter)
    shape_source = output if isinstance(output, AccelRef) else input
    shape = [
        w.integer("output_shape", extent)
        for extent in (shape_source.shape if output_shape is None else output_shape)
    ]
    w.require(min(shape, default=0) >= 0, f"output_shape must be at least 0, got {output_shape}")
    rows = w.numbers("matrix", matrix)
    starts = np.array([w.real("offset", start) for start in w.per_axis("offset", offset, ndim)])
    if rows.shape in ((ndim, ndim + 1), (ndim + 1, ndim + 1)):
        is_right = rows[ndim:].tolist() in ([], [[0] * ndim + [1]])
        w.require(is_right, f"matrix must end with a row of 0 and a 1, got {rows[ndim:].tolist()}")
        starts, rows = rows[:ndim, ndim], rows[:ndim, :ndim]
    requirement = f"({ndim}, {len(shape)}), for an image of {ndim} axes and a result of {len(shape)}"
    is_right = ndim > 0 and rows.shape in ((ndim,) * (len(shape) == ndim), (ndim, len(shape)))
    w.require(is_right, f"matrix must have shape {requirement}, got {rows.shape}")
    if rows.ndim == 1 and rows.all():
        return await _scaled(input, starts / rows, rows, 0.0, shape, *rest)
    rows = rows if rows.ndim > 1 else np.diag(rows)
    return await _turned(input, rows, starts, range(ndim), shape, *rest, is_given=True)


# Errors of a computed coordinate, in ulps of the sum of its terms: matrix, offset, products and sums.
_ULPS = 8


def _snapped(text: str, axis: int) -> str:
    """Compute a coordinate, and move it back to the edge that it misses by rounding."""
    return f"q = {text}; s = clip(q, 0, n{axis} - 1); c = where(abs(q - s) <= e{axis}, s, q)"


def _rounding(*terms: float) -> float:
    return float(_ULPS * np.finfo(float).eps * np.abs(terms).sum())


async def _scaled(
    x: Any, offsets: Any, factors: Any, less: float, shape: Sequence[int], *rest: Any
) -> AccelRef:
    """Interpolate at ``(place + offset) * factor - less`` along each axis."""
    texts, arguments = dict[int, str](), dict[str, Any]()
    for axis, (offset, factor, count) in enumerate(zip(offsets, factors, shape, strict=True)):
        texts[axis] = _snapped(f"(i({axis}) + a{axis}) * k{axis} - half", axis)
        arguments |= {f"a{axis}": float(offset), f"k{axis}": float(factor)}
        arguments[f"e{axis}"] = _rounding(count * factor, offset * factor, less)
    return await _sampled(x, texts, {**arguments, "half": less}, shape, *rest)


async def _turned(
    x: Any, rows: Any, starts: Any, axes: Sequence[int], shape: Sequence[int], *rest: Any, is_given: bool
) -> AccelRef:
    """Interpolate along some axes by a matrix with columns for the axes of the result.

    Given numbers are used as they are, so an edge that they miss is missed, as in SciPy.
    """
    texts, arguments = dict[int, str](), dict[str, Any]()
    result_axes = axes if len(axes) < x.ndim else range(len(shape))
    for axis, row, start in zip(axes, rows.tolist(), starts.tolist(), strict=True):
        text = f"a{axis}" + "".join(
            f" + i({result_axis}) * k{axis}_{result_axis}" for result_axis in result_axes
        )
        texts[axis] = _snapped(text, axis)
        arguments |= {
            f"a{axis}": start,
            **{f"k{axis}_{result_axis}": k for result_axis, k in zip(result_axes, row, strict=True)},
        }
        terms = [k * shape[result_axis] for result_axis, k in zip(result_axes, row, strict=True)]
        arguments[f"e{axis}"] = 0.0 if is_given else _rounding(start, *terms)
    return await _sampled(x, texts, arguments, shape, *rest)


@composed
async def shift(
    input: Operand,
    shift: Floats,
    output: Output = None,
    order: int = 3,
    mode: Mode = "constant",
    cval: complex = 0.0,
    prefilter: bool = True,
) -> AccelRef:
    """Move an image, as `scipy.ndimage.shift` does.

    Args:
        input: The image.
        shift: How far, in elements: along all axes, or along each.
        output: See `Output`.
        order: See `map_coordinates`.
        mode: See `map_coordinates`.
        cval: See `map_coordinates`.
        prefilter: See `map_coordinates`.

    Returns:
        See `map_coordinates`; it has the shape of `input`.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `map_coordinates`.
    """
    offsets = [
        -w.real("shift", distance) for distance in w.per_axis("shift", shift, len(w.axes_of(input, None)))
    ]
    ones, rest = [1.0] * len(offsets), (output, order, mode, cval, prefilter)
    return await _scaled(input, offsets, ones, 0.0, input.shape, *rest)


@composed
async def zoom(
    input: Operand,
    zoom: Floats,
    output: Output = None,
    order: int = 3,
    mode: Mode = "constant",
    cval: complex = 0.0,
    prefilter: bool = True,
    *,
    grid_mode: bool = False,
) -> AccelRef:
    """Make an image larger or smaller, as `scipy.ndimage.zoom` does.

    Args:
        input: The image.
        zoom: The factor of the length: for all axes, or for each.
        output: See `Output`.
        order: See `map_coordinates`.
        mode: See `map_coordinates`.
        cval: See `map_coordinates`.
        prefilter: See `map_coordinates`.
        grid_mode: Whether an axis ends half an element after its last one, and not in the middle of it. The
            modes ``"grid-constant"`` and ``"grid-wrap"`` belong to it.

    Returns:
        See `map_coordinates`; its shape is rounded.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `map_coordinates`; or a negative or infinite `zoom`.
    """
    rest = (output, order, mode, cval, prefilter)
    factors = [w.real("zoom", factor) for factor in w.per_axis("zoom", zoom, len(w.axes_of(input, None)))]
    w.require(all(factor >= 0 for factor in factors), f"zoom must be at least 0, got {zoom}")
    shape = [round(w.real("zoom", n * factor)) for n, factor in zip(input.shape, factors, strict=True)]
    if prefilter and all(factor == 1 for factor in factors):
        return await w.delivered(await w.converted(input, w.dtype_of(input, output, shape)), output)
    less, half = int(not grid_mode), 0.5 * grid_mode
    pairs = [(n - less, m - less) for n, m in zip(input.shape, shape, strict=True)]
    ratios = [n / m if m else 1.0 for n, m in pairs]
    return await _scaled(input, [half] * input.ndim, ratios, half, shape, *rest)


@composed
async def rotate(
    input: Operand,
    angle: float,
    axes: Sequence[int] = (1, 0),
    reshape: bool = True,
    output: Output = None,
    order: int = 3,
    mode: Mode = "constant",
    cval: complex = 0.0,
    prefilter: bool = True,
) -> AccelRef:
    """Rotate an image in the plane of two axes, as `scipy.ndimage.rotate` does.

    Args:
        input: The image.
        angle: The angle, in degrees.
        axes: The two axes.
        reshape: Whether the result has room for all of the image.
        output: See `Output`.
        order: See `map_coordinates`.
        mode: See `map_coordinates`.
        cval: See `map_coordinates`.
        prefilter: See `map_coordinates`.

    Returns:
        See `map_coordinates`.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `map_coordinates`; or not two axes.
    """
    rest = (output, order, mode, cval, prefilter)
    plane = sorted(w.axes_of(input, axes))
    w.require(len(plane) == 2, f"axes must be two, got {axes!r}")
    matrix, starts, shape = rotation(input.shape, w.real("angle", angle), plane, reshape=reshape)
    return await _turned(input, matrix, starts, plane, shape, *rest, is_given=False)


def rotation(
    shape: Ints, degrees: float, plane: Sequence[int], *, reshape: bool
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], list[int]]:
    """Return the matrix and the offset in the plane of a rotation, and the shape of the result."""
    cosine, sine = cosine_and_sine(degrees)
    matrix = np.array([[cosine, sine], [-sine, cosine]])
    rows, columns = (shape[axis] for axis in plane)
    corners = matrix @ [[0, 0, rows, rows], [0, columns, 0, columns]]
    plane_extents = (np.ptp(corners, axis=1) + 0.5).astype(int) if reshape else np.array([rows, columns])
    starts = np.array([rows - 1, columns - 1]) / 2 - matrix @ ((plane_extents - 1) / 2)
    extents = list(shape)
    extents[plane[0]], extents[plane[1]] = plane_extents.tolist()
    return matrix, starts, extents
