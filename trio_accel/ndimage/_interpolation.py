"""Interpolation by splines of order 0 to 5, by `scipy.ndimage`'s names and rules, in float64 as SciPy has it.

Coefficients are convolutions with ``z ** abs(k)`` for each pole ``z`` of the inverse filter (M. Unser, A. Aldroubi and
M. Eden, 1993), which end where the numbers do: 61 for cubic splines. So each element is made by itself.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..backends.base import DType, NotSupportedError
from ..devices import AccelRef, Operand
from ..devices.base._refusals import whole
from ..devices.operations._calls import composed
from ..expressions import Elementwise, intermediates
from ._filters import line
from ._windows import (
    Mode,
    Output,
    axes_of,
    converted,
    delivered,
    dtype_of,
    each,
    mode_of,
    numbers,
    padded,
    spread,
    taken,
    wide_of,
)

__all__ = [
    "affine_transform", "map_coordinates", "rotate", "shift", "spline_filter", "spline_filter1d", "zoom",
]  # fmt: skip

_POLES: dict[int, tuple[float, ...]] = {
    2: (math.sqrt(8) - 3,),
    3: (math.sqrt(3) - 2,),
    4: (-0.361341225900220177092212841325675255, -0.013725429297339121360331226939128204),
    5: (-0.430575347099973791851434783493520110, -0.043096288203264653822712376822550182),
}
# SciPy's, of the place d beside an element; the last weight makes the sum one.
_WEIGHTS: dict[int, tuple[str, ...]] = {
    0: (),
    1: ("1 - d",),
    2: ("0.5 * t * t", "0.75 - d * d"),
    3: ("z * z * z / 6", "(d * d * (d - 2) * 3 + 4) / 6", "(z * z * (z - 2) * 3 + 4) / 6"),
    4: (
        "t * t * t * t / 24",
        "u * (u * (u * (5 - u) / 6 - 1.25) + 5 / 24) + 55 / 96",
        "d * d * (d * d * 0.25 - 0.625) + 115 / 192",
        "z * (z * (z * (5 - z) / 6 - 1.25) + 5 / 24) + 55 / 96",
    ),
    5: (
        "z * z * z * z * z / 120",
        "u * (u * (u * (u * (u / 24 - 0.375) + 1.25) - 1.75) + 0.625) + 0.425",
        "d * d * (d * d * (0.25 - d / 12) - 0.5) + 0.55",
        "z * z * (z * z * (0.25 - z / 12) - 0.5) + 0.55",
        "v * (v * (v * (v * (v / 24 - 0.375) + 1.25) - 1.75) + 0.625) + 0.425",
    ),
}
_PARTS = {"t": "0.5 - d", "z": "1 - d", "u": "1 + d", "v": "2 - d"}
# A coordinate c beyond an axis of n elements; s is its period.
_BEYOND = {
    "grid-constant": "c = clip(c, -r, n + r)",
    "nearest": "c = clip(c, -r, n + r)",
    "mirror": "s = maximum(2 * n - 2, 1); m = abs(c); m = m - s * floor(m / s); c = minimum(m, s - m)",
    "reflect": "s = 2 * n; m = abs(c + 0.5); m = m - s * floor(m / s); c = minimum(m, s - m) - 0.5",
    "wrap": "s = maximum(n - 1, 1); c = where(c < 0, c + s * (trunc(-c / s) + 1), c - s * trunc(c / s))",
    "grid-wrap": "c = c - n * floor(c / n)",
}
# How coefficients go on beyond their axes: SciPy has no other way for modes without a rule of their own.
_FILLED = {
    "constant": "mirror", "wrap": "mirror", "grid-constant": "constant", "grid-wrap": "wrap",
    "mirror": "mirror", "reflect": "reflect", "nearest": "nearest",
}  # fmt: skip
_FILTERED = {"grid-wrap": "wrap", "wrap": "wrap", "reflect": "reflect"}
# Elements that SciPy puts around an image whose mode has no exact coefficients.
_AHEAD = 12
# Elements of which one is made; the text of an expression has a most length.
_MOST = 220


def _checked(name: str, order: object, mode: object, least: int = 0) -> tuple[int, str]:
    """Take an order and a mode."""
    mode_of(name, mode)
    taken_order = whole(name, "order", order)
    if not least <= taken_order <= 5:
        raise ValueError(f"{name}: order must be from {least} to 5, got {order}")
    return taken_order, "reflect" if mode == "grid-mirror" else str(mode)


@functools.cache
def _kernel(order: int) -> npt.NDArray[Any]:
    found = np.ones(1)
    for pole in _POLES[order]:
        count = math.ceil(math.log(1e-18) / math.log(-pole))
        found = np.convolve(found, (1 - pole) / (1 + pole) * pole ** abs(np.arange(-count, count + 1)))
    return found


async def _filtered(x: AccelRef, order: int, mode: str, axes: Sequence[int]) -> AccelRef:
    """Compute the coefficients of splines: a new array, in the wide dtype."""
    dtype = DType(wide_of(x.dtype))
    with intermediates() as made:
        result = x
        for axis in axes if order > 1 else ():
            if x.shape[axis] > 1:
                result = result if result is x else made(result)
                result = await line(result, _kernel(order), axis, dtype, _FILTERED.get(mode, "mirror"))
        return await converted(dtype)(x) if result is x else result


@functools.cache
def _interpolated(
    coordinates: tuple[str, ...], order: int, mode: str, ahead: int, margin: int, wide: str, dtype: DType
) -> Elementwise[tuple[AccelRef, ...]]:
    mapped = [axis for axis, text in enumerate(coordinates) if text]
    if (order + 1) ** len(mapped) > _MOST:
        told = f"order {order} along {len(mapped)} axes takes {(order + 1) ** len(mapped)} elements"
        raise NotSupportedError(f"ndimage: {told} for each one; {_MOST} are possible")
    lines: list[str] = []
    for axis in mapped:
        n = f"n{axis}"
        lines.append(f"c = {coordinates[axis]} + {ahead}")
        if mode == "constant":
            lines.append(f"o{axis} = c < 0 or c > {n} - 1")
        else:
            beyond = re.sub(r"\bn\b", n, re.sub(r"\br\b", str(order + 1), _BEYOND[mode]))
            lines.append(f"g = c; {beyond}; c = where(g >= 0 and g <= {n} - 1, g, c)")
        lines.append(f"f = floor(c{'' if order % 2 else ' + 0.5'}); d = c - f")
        weights = _WEIGHTS[order]
        lines += [
            f"{name} = {text}" for name, text in _PARTS.items() if re.search(rf"\b{name}\b", str(weights))
        ]
        lines += [f"w{axis}_{n} = {text}" for n, text in enumerate(weights)]
        if order:
            lines.append(f"w{axis}_{order} = 1.0 - {' - '.join(f'w{axis}_{n}' for n in range(order))}")
        lines.append(f"b = int64(f) + {margin - order // 2}")
        lines += [f"p{axis}_{n} = b + {n}" for n in range(order + 1)]

    def total(places: tuple[str, ...]) -> str:
        axis = len(places)
        if axis == len(coordinates):
            return f"{wide}(x[{', '.join(places)}])"
        if axis not in mapped:
            return total((*places, f"i({axis})"))
        parts = [total((*places, f"p{axis}_{n}")) for n in range(order + 1)]
        return (
            f"({' + '.join(f'w{axis}_{n} * {part}' for n, part in enumerate(parts))})" if order else parts[0]
        )

    value = total(())
    if mode == "constant" and mapped:
        value = f"where({' or '.join(f'o{axis}' for axis in mapped)}, cval, {value})"
    lines += [f"r = {value}", *_rounded(dtype)]
    return Elementwise("; ".join(lines), outputs=("y",), dtypes=dtype, operation="ndimage.interpolate")


def _rounded(dtype: DType) -> list[str]:
    """Round a result to the nearest whole number that the dtype has."""
    if dtype.kind not in ("int", "uint"):
        return ["y = int64(r)" if dtype is DType.bool else "y = r"]
    least, most = np.iinfo(dtype.dtype).min, np.iinfo(dtype.dtype).max
    # The float next to the largest number of 64 bits is above it.
    highest = float(most) if int(float(most)) == most else float(np.nextafter(float(most), 0))
    below = "r - 0.5" if least else "0.0"
    return [f"y = clip(where(r > 0, r + 0.5, {below}), {float(least)}, {highest})"]


@attrs.frozen
class _Image:
    """An image that is interpolated: the arguments that all functions have.

    Attributes:
        name: Name of the function.
        x: The image.
        output: See `Output`.
        order: Order of the splines.
        mode: See `Mode`.
        cval: The number beyond the edges.
        prefilter: Whether coefficients are to be computed.
    """

    name: str
    x: AccelRef
    output: Output
    order: int
    mode: str
    cval: complex
    prefilter: bool

    @classmethod
    def of(
        cls, name: str, x: AccelRef, output: Output, order: int, mode: Mode, cval: complex, prefilter: bool
    ) -> _Image:
        """Check the arguments."""
        taken(name, input=x)
        if not x.ndim:
            raise ValueError(f"{name}: input must have an axis")
        return cls(name, x, output, *_checked(name, order, mode), cval, prefilter)

    async def at(self, coordinates: Sequence[str], given: dict[str, Any], shape: tuple[int, ...]) -> AccelRef:
        """Interpolate at coordinates, whose texts are empty for axes that stay."""
        is_complex = self.x.dtype.kind == "complex"
        dtype = dtype_of(self.name, self.x, self.output, shape, is_complex=is_complex)
        axes = [axis for axis, text in enumerate(coordinates) if text]
        with intermediates() as made:
            x, ahead = await self._coefficients(axes, made)
            return await delivered(
                await self._sample(x, ahead, tuple(coordinates), given, shape, dtype), self.output
            )

    async def along(
        self, offsets: Sequence[float], factors: Sequence[float], shape: tuple[int, ...], less: float = 0.0
    ) -> AccelRef:
        """Interpolate along one axis after the other, at ``(i + offset) * factor - less``."""
        is_complex = self.x.dtype.kind == "complex"
        dtype = dtype_of(self.name, self.x, self.output, shape, is_complex=is_complex)
        with intermediates() as made:
            x, ahead = await self._coefficients(range(self.x.ndim), made)
            for axis, numbers_of in enumerate(zip(offsets, factors, strict=True)):
                is_last = axis == self.x.ndim - 1
                texts = spread(x, (axis,), (f"(i({axis}) + a) * k - l",), "")
                here = (*shape[: axis + 1], *x.shape[axis + 1 :])
                given = dict(zip("akl", (*numbers_of, less), strict=True))
                result = await self._sample(
                    x, ahead, texts, given, here, dtype if is_last else DType(wide_of(x.dtype))
                )
                x = result if is_last else made(result)
            return await delivered(x, self.output)

    async def _coefficients(
        self, axes: Sequence[int], made: Callable[[AccelRef], AccelRef]
    ) -> tuple[AccelRef, int]:
        if not self.prefilter or self.order < 2:
            return self.x, 0
        x, ahead = self.x, _AHEAD * (self.mode in ("nearest", "grid-constant"))
        if ahead:
            widths = spread(x, axes, [(ahead, ahead)] * len(axes), (0, 0))
            x = made(await padded(x, widths, [_FILLED[self.mode]] * x.ndim, self.cval))
        return made(await _filtered(x, self.order, self.mode, axes)), ahead

    async def _sample(
        self,
        x: AccelRef,
        ahead: int,
        coordinates: tuple[str, ...],
        given: dict[str, Any],
        shape: tuple[int, ...],
        dtype: DType,
    ) -> AccelRef:
        margin = self.order // 2 + 2 + (self.order + 1) * (self.mode in ("nearest", "grid-constant"))
        widths = [(margin, margin) if text else (0, 0) for text in coordinates]
        with intermediates() as made:
            wider = await padded(x, widths, [_FILLED[self.mode]] * x.ndim, self.cval)
            named: dict[str, Any] = {f"n{axis}": extent for axis, extent in enumerate(x.shape)}
            named |= {"x": wider if wider is x else made(wider), "cval": self.cval, **given}
            key = coordinates, self.order, self.mode, ahead, margin, wide_of(x.dtype), dtype
            expression = _interpolated(*key)
            [found] = await expression(*[named[name] for name in expression.inputs], shape=shape)
            return found


@composed
async def spline_filter1d(
    input: AccelRef, order: int = 3, axis: int = -1, output: Output = "float64", mode: Mode = "mirror"
) -> AccelRef:
    """Compute coefficients of splines along an axis, as `scipy.ndimage.spline_filter1d` does.

    Args:
        input: The image.
        order: Order of the splines, from 0 to 5; nothing happens for 0 and 1.
        axis: The axis.
        output: See `Output`; float64 is complex128 for a complex image.
        mode: See `Mode`.

    Returns:
        The coefficients.

    Raises:
        TypeError: `input` is no array of a device.
        ValueError: An order, axis or mode that there is not, or `output` of another shape.
        NotSupportedError: float8.
    """
    return await _splines("ndimage.spline_filter1d", input, order, (axis,), output, mode, 0)


async def _splines(
    name: str, input: AccelRef, order: int, axes: object, output: Output, mode: Mode, least: int
) -> AccelRef:
    [x], (degree, filled) = taken(name, input=input), _checked(name, order, mode, least)
    is_complex = x.dtype.kind == "complex"
    given: Output = "complex128" if is_complex and not isinstance(output, AccelRef) else output
    dtype = dtype_of(name, x, given, x.shape, is_complex=is_complex)
    with intermediates() as made:
        coefficients = made(await _filtered(x, degree, filled, axes_of(name, x, axes)))
        return await delivered(await converted(dtype)(coefficients), output)


@composed
async def spline_filter(
    input: AccelRef, order: int = 3, output: Output = "float64", mode: Mode = "mirror"
) -> AccelRef:
    """Compute coefficients of splines along all axes, as `scipy.ndimage.spline_filter` does.

    Args:
        input: The image.
        order: Order of the splines, from 2 to 5.
        output: See `spline_filter1d`.
        mode: See `Mode`.

    Returns:
        The coefficients.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `spline_filter1d`.
    """
    return await _splines("ndimage.spline_filter", input, order, None, output, mode, 2)


@composed
async def map_coordinates(
    input: AccelRef,
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
        mode: See `Mode`. In ``"constant"``, what is beyond an edge by any fraction is `cval`.
        cval: The number beyond the edges.
        prefilter: Whether coefficients are to be computed; False where `input` has those of `spline_filter`.

    Returns:
        An array of the shape of one coordinate, in the dtype of `input`: whole numbers are the nearest ones.

    Raises:
        TypeError: `input` is no array of a device, or coordinates are complex.
        ValueError: Coordinates for another number of axes, an order or mode that there is not, or `output` of
            another shape.
        NotSupportedError: float8, or more than 220 elements for each result: cubic splines along four axes.
    """
    name = "ndimage.map_coordinates"
    image = _Image.of(name, input, output, order, mode, cval, prefilter)
    where: Any = coordinates
    if not isinstance(coordinates, AccelRef):
        where = numbers(name, "coordinates", coordinates)
    if where.dtype.kind not in ("bool", "int", "uint", "float", *"biuf"):
        raise TypeError(f"{name}: coordinates must be real, got {where.dtype}")
    if where.ndim < 2 or where.shape[0] != input.ndim:
        raise ValueError(f"{name}: coordinates must have shape ({input.ndim}, ...), got {where.shape}")
    with intermediates() as made:
        placed = where if isinstance(where, AccelRef) else made(await input.device.put(where))
        given = {f"at{axis}": placed[axis] for axis in range(input.ndim)}
        return await image.at([f"float64({key})" for key in given], given, tuple(where.shape[1:]))


@composed
async def affine_transform(
    input: AccelRef,
    matrix: npt.ArrayLike,
    offset: float | Sequence[float] = 0.0,
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
        matrix: A matrix with a row for each axis of the image; a vector for a diagonal one; or one of homogeneous
            coordinates, which has the offset in its last column. It is on the host.
        offset: For all axes, or for each.
        output_shape: Shape of the result; by default that of `input`, or of an `output` that is an array.
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
    name = "ndimage.affine_transform"
    image = _Image.of(name, input, output, order, mode, cval, prefilter)
    given_shape = input.shape if output_shape is None else output_shape
    if output_shape is None and isinstance(output, AccelRef):
        given_shape = output.shape
    shape, ndim = tuple([whole(name, "output_shape", one) for one in given_shape]), input.ndim
    rows = numbers(name, "matrix", matrix)
    starts = np.array(each(name, "offset", offset, ndim), float)
    if rows.ndim == 2 and rows.shape[1] == ndim + 1 and rows.shape[0] in (ndim, ndim + 1):
        if rows.shape[0] > ndim and rows[ndim].tolist() != [0] * ndim + [1]:
            raise ValueError(
                f"{name}: the last row of homogeneous coordinates must be 0 and 1, got {rows[ndim]}"
            )
        starts, rows = rows[:ndim, ndim], rows[:ndim, :ndim]
    if rows.shape not in ((ndim,), (ndim, len(shape))) or (rows.ndim == 1 and len(shape) != ndim):
        told = f"({ndim},) or ({ndim}, {len(shape)}) for a result of {len(shape)} axes"
        raise ValueError(f"{name}: matrix must have shape {told}, got {rows.shape}")
    if rows.ndim == 1 and rows.all():
        return await image.along((starts / rows).tolist(), rows.tolist(), shape)
    matrix_rows = np.diag(rows) if rows.ndim == 1 else rows
    return await _affine(image, matrix_rows, starts, range(ndim), range(len(shape)), shape)


async def _affine(
    image: _Image,
    rows: npt.NDArray[Any],
    starts: npt.NDArray[Any],
    axes: Sequence[int],
    places: Sequence[int],
    shape: tuple[int, ...],
) -> AccelRef:
    """Interpolate along some axes by a matrix, whose columns are for places of the result."""
    given: dict[str, Any] = {}
    texts: list[str] = []
    for row, start, axis in zip(rows.tolist(), starts.tolist(), axes, strict=True):
        given |= {f"a{axis}": start, **{f"k{axis}_{place}": k for place, k in zip(places, row, strict=True)}}
        texts.append(" + ".join([f"a{axis}", *[f"i({place}) * k{axis}_{place}" for place in places]]))
    return await image.at(spread(image.x, axes, texts, ""), given, shape)


@composed
async def shift(
    input: AccelRef,
    shift: float | Sequence[float],
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
        See `map_coordinates`; its shape is that of `input`.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `map_coordinates`.
    """
    image = _Image.of("ndimage.shift", input, output, order, mode, cval, prefilter)
    offsets = [-float(one) for one in each("ndimage.shift", "shift", shift, input.ndim)]
    return await image.along(offsets, [1.0] * input.ndim, input.shape)


@composed
async def zoom(
    input: AccelRef,
    zoom: float | Sequence[float],
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
        zoom: How many times as long: all axes, or each.
        output: See `Output`.
        order: See `map_coordinates`.
        mode: See `map_coordinates`.
        cval: See `map_coordinates`.
        prefilter: See `map_coordinates`.
        grid_mode: Whether an axis ends half an element beyond its last one, and not in the middle of it. The modes
            ``"grid-constant"`` and ``"grid-wrap"`` go with it.

    Returns:
        See `map_coordinates`; its shape is rounded.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `map_coordinates`.
    """
    name = "ndimage.zoom"
    image = _Image.of(name, input, output, order, mode, cval, prefilter)
    factors = [float(one) for one in each(name, "zoom", zoom, input.ndim)]
    if not all(0 <= one < math.inf for one in factors):
        raise ValueError(f"{name}: zoom must be at least 0 and finite, got {zoom}")
    shape = tuple([round(extent * one) for extent, one in zip(input.shape, factors, strict=True)])
    if prefilter and all(one == 1 for one in factors):
        return await delivered(await converted(dtype_of(name, input, output, shape))(input), output)
    # Places are of the middles of elements, or of their edges.
    less = 0 if grid_mode else 1
    ratios = [
        (before - less) / (after - less) if after != less else 1.0
        for before, after in zip(input.shape, shape, strict=True)
    ]
    half = 0.5 * grid_mode
    return await image.along([half] * input.ndim, ratios, shape, half)


@composed
async def rotate(
    input: AccelRef,
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
    name = "ndimage.rotate"
    image = _Image.of(name, input, output, order, mode, cval, prefilter)
    plane = sorted(axes_of(name, input, axes))
    if len(plane) != 2:
        raise ValueError(f"{name}: axes must be two, got {axes!r}")
    from scipy import special

    # They are exact at multiples of 90 degrees.
    cosine, sine = special.cosdg(angle), special.sindg(angle)
    matrix = np.array([[cosine, sine], [-sine, cosine]])
    extents = np.array([input.shape[axis] for axis in plane])
    corners = matrix @ [[0, 0, extents[0], extents[0]], [0, extents[1], 0, extents[1]]]
    made = (np.ptp(corners, axis=1) + 0.5).astype(int) if reshape else extents
    starts = (extents - 1) / 2 - matrix @ ((made - 1) / 2)
    shape = list(input.shape)
    shape[plane[0]], shape[plane[1]] = made.tolist()
    return await _affine(image, matrix, starts, plane, plane, tuple(shape))
