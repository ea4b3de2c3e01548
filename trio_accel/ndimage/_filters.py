"""Linear filters: weighted sums of windows, by `scipy.ndimage`'s names.

Sums are made in float64 or complex128, and rounded once for each axis, as SciPy rounds them. Weights of a filter that
has a name are added in SciPy's order, so that its bits come out where the backend rounds as a processor does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from ..actors import arguments_of
from ..arrays import add
from ..backends.base import DType
from ..devices import AccelRef
from ..devices.base._refusals import whole
from ..devices.operations._calls import composed
from ..expressions import Elementwise, intermediates
from ._windows import (
    MOST,
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
    reach,
    spread,
    stored,
    taken,
    view,
    wide_of,
)

__all__ = [
    "convolve", "convolve1d", "correlate", "correlate1d", "gaussian_filter", "gaussian_filter1d",
    "gaussian_laplace", "laplace", "prewitt", "sobel",
]  # fmt: skip

Weights: TypeAlias = "AccelRef | npt.ArrayLike"

_EPSILON = np.finfo(float).eps
_LEAST_SIGMA = 1e-15


@attrs.frozen
class Term:
    """A product of a sum.

    Attributes:
        weight: Its weight: a number, or an array without axes.
        first: Where its element begins in a padded array.
        second: Where an element begins that is added to that before, or taken from it; None for none.
        sign: ``"+"`` or ``"-"``.
    """

    weight: Any
    first: tuple[int, ...]
    second: tuple[int, ...] | None = None
    sign: str = ""


async def weighed(
    x: AccelRef, terms: Sequence[Term], shape: tuple[int, ...], dtype: DType, wide: str
) -> AccelRef:
    """Sum up products of views of a padded array, a few at a time."""
    with intermediates() as made:
        total: list[AccelRef] = []
        for start in range(0, len(terms), MOST // 2):
            here, is_last = terms[start : start + MOST // 2], start + MOST // 2 >= len(terms)
            expression = _sum(
                tuple([one.sign for one in here]), wide, bool(total), dtype if is_last else DType(wide)
            )
            places = [place for one in here for place in (one.first, one.second) if place is not None]
            given = [*total, *[view(x, shape, place) for place in places], *[one.weight for one in here]]
            sums = await expression(*given)
            total = [sums if is_last else made(sums)]
        return total[0]


@functools.cache
def _sum(signs: tuple[str, ...], wide: str, is_more: bool, dtype: DType) -> Elementwise[AccelRef]:
    names = [f"x{n}" for n in range(len(signs) + sum(map(bool, signs)))]
    left, text = iter(names), "y = total" if is_more else ""
    for n, sign in enumerate(signs):
        element = f"{wide}({next(left)})"
        element = f"({element} {sign} {wide}({next(left)}))" if sign else element
        text += f"; y = y + {element} * w{n}" if text else f"y = {element} * w{n}"
    inputs = [*["total"] * is_more, *names, *[f"w{n}" for n in range(len(signs))]]
    text += f"; z = {stored('y', dtype)}"
    return Elementwise(text, inputs=inputs, dtypes=dtype, operation="ndimage.correlate")


async def line(
    x: AccelRef,
    weights: npt.NDArray[Any],
    axis: int,
    dtype: DType,
    mode: str,
    cval: complex = 0.0,
    origin: int = 0,
) -> AccelRef:
    """Correlate along an axis with weights that the host knows; what is alike on both sides is added first."""
    before, behind = reach("ndimage.correlate1d", len(weights), origin)
    middle, pairs = len(weights) // 2, range(len(weights) // 2)
    sign = next(
        (
            sign
            for sign, factor in (("+", 1), ("-", -1))
            if len(weights) % 2 and np.all(abs(weights - factor * weights[::-1])[:middle] <= _EPSILON)
        ),
        "",
    )

    def at(number: int) -> tuple[int, ...]:
        return tuple([number if one == axis else 0 for one in range(x.ndim)])

    if sign:
        terms = [Term(float(weights[middle]), at(middle))]
        terms += [Term(float(weights[n]), at(n), at(len(weights) - 1 - n), sign) for n in pairs]
    else:
        terms = [Term(w.item(), at(n)) for n, w in enumerate(weights)]
    widths = [(before, behind) if one == axis else (0, 0) for one in range(x.ndim)]
    with intermediates() as made:
        wider = await padded(x, widths, [mode] * x.ndim, cval)
        wider = wider if wider is x else made(wider)
        return await weighed(wider, terms, x.shape, dtype, wide_of(x.dtype, dtype))


@functools.cache
def _converted(text: str) -> Elementwise[AccelRef]:
    return Elementwise(text, operation="ndimage.correlate")


async def _correlate(
    name: str,
    input: AccelRef,
    weights: Weights,
    output: Output,
    mode: Mode,
    cval: complex,
    origin: Any,
    axes: object,
) -> AccelRef:
    """Correlate, or convolve: then weights are in reverse, and not conjugated."""
    is_convolved, name = "convolve" in name, f"ndimage.{name}"
    [x] = taken(name, input=input)
    along, filled = axes_of(name, x, axes), mode_of(name, mode)
    with intermediates() as made:
        if isinstance(weights, AccelRef):
            wide = wide_of(weights.dtype)
            text = "conj(w)" if wide == "complex128" and not is_convolved else "w"
            w: Any = made(await _converted(f"{wide}({text})")(*taken(name, weights=weights)))
        else:
            w = numbers(name, "weights", weights)
            wide = str(w.dtype)
            w = w if is_convolved else w.conj()
        if w.ndim != len(along) or not w.size:
            told = f"{len(along)} axes and elements, got shape {w.shape}"
            raise ValueError(f"{name}: weights must have {told}")
        origins = [whole(name, "origin", one) for one in each(name, "origin", origin, len(along))]
        if is_convolved:
            w = w[(slice(None, None, -1),) * w.ndim]
            origins = [-one - (size % 2 == 0) for one, size in zip(origins, w.shape, strict=True)]
        is_complex = "complex128" in (wide, wide_of(x.dtype))
        dtype = dtype_of(name, x, output, x.shape, is_complex=is_complex)
        pairs = [reach(name, size, one) for size, one in zip(w.shape, origins, strict=True)]
        terms = [
            Term(w[place] if isinstance(w, AccelRef) else w[place].item(), spread(x, along, place, 0))
            for place in np.ndindex(w.shape)
        ]
        wider = await padded(x, spread(x, along, pairs, (0, 0)), [filled] * x.ndim, cval)
        wider = wider if wider is x else made(wider)
        return await delivered(
            await weighed(wider, terms, x.shape, dtype, "complex128" if is_complex else "float64"), output
        )


@composed
async def correlate(
    input: AccelRef,
    weights: Weights,
    output: Output = None,
    mode: Mode = "reflect",
    cval: complex = 0.0,
    origin: int | Sequence[int] = 0,
    *,
    axes: int | Sequence[int] | None = None,
) -> AccelRef:
    """Correlate an image with weights, as `scipy.ndimage.correlate` does.

    Args:
        input: The image, of any number of axes.
        weights: An array of the host or of the device, with an axis for each of `axes`. Complex ones are conjugated.
        output: See `Output`.
        mode: See `Mode`.
        cval: The number beyond the edges, in ``"constant"``.
        origin: How far the window lies behind its place: for all axes, or for each.
        axes: Axes to filter along; None for all.

    Returns:
        The sums, in the dtype of `input`: of whole numbers rounded towards zero. They are complex where the weights
        are.

    Raises:
        TypeError: `input` is no array of a device, or a real `output` of complex sums.
        ValueError: Weights of another number of axes, an origin outside of the window, an axis or mode that there
            is not, or `output` of another shape.
        NotSupportedError: float8.
    """
    return await _correlate("correlate", input, weights, output, mode, cval, origin, axes)


@arguments_of(correlate, _correlate, "convolve")
def convolve() -> None:
    """Convolve an image with weights, as `scipy.ndimage.convolve` does: weights are in reverse, and not conjugated.

    Arguments, result and errors are those of `correlate`.
    """


async def _correlate1d(
    name: str,
    input: AccelRef,
    weights: Weights,
    axis: int,
    output: Output,
    mode: Mode,
    cval: complex,
    origin: int,
) -> AccelRef:
    return await _correlate(name, input, weights, output, mode, cval, origin, (axis,))


@composed
async def correlate1d(
    input: AccelRef,
    weights: Weights,
    axis: int = -1,
    output: Output = None,
    mode: Mode = "reflect",
    cval: complex = 0.0,
    origin: int = 0,
) -> AccelRef:
    """Correlate lines along an axis with weights, as `scipy.ndimage.correlate1d` does.

    Args:
        input: The image.
        weights: A vector of the host or of the device.
        axis: The axis.
        output: See `Output`.
        mode: See `Mode`.
        cval: The number beyond the edges, in ``"constant"``.
        origin: How far the window lies behind its place.

    Returns:
        See `correlate`.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `correlate`.
    """
    return await _correlate1d("correlate1d", input, weights, axis, output, mode, cval, origin)


@arguments_of(correlate1d, _correlate1d, "convolve1d")
def convolve1d() -> None:
    """Convolve lines along an axis with weights, as `scipy.ndimage.convolve1d` does; see `correlate1d`."""


def _gaussian(
    name: str, sigma: float, order: int, truncate: float, radius: int | None
) -> npt.NDArray[Any] | None:
    """Have SciPy make the weights: its filter of an impulse has them in reverse. None where nothing is smoothed."""
    import scipy.ndimage

    if sigma <= _LEAST_SIGMA:
        return None
    if radius is None:
        radius = int(truncate * float(sigma) + 0.5)
    if whole(name, "radius", radius) < 0 or whole(name, "order", order) < 0:
        raise ValueError(f"{name}: radius and order must be at least 0, got {radius} and {order}")
    impulse = np.zeros(2 * radius + 1)
    impulse[radius] = 1
    found: Any = scipy.ndimage.gaussian_filter1d(impulse, sigma, order=order, mode="constant", radius=radius)
    return found[::-1]


@composed
async def gaussian_filter1d(
    input: AccelRef,
    sigma: float,
    axis: int = -1,
    order: int = 0,
    output: Output = None,
    mode: Mode = "reflect",
    cval: complex = 0.0,
    truncate: float = 4.0,
    *,
    radius: int | None = None,
) -> AccelRef:
    """Smooth lines along an axis by a Gaussian, or compute its derivatives: `scipy.ndimage.gaussian_filter1d`.

    Args:
        input: The image.
        sigma: Standard deviation, in elements.
        axis: The axis.
        order: 0 smooths; 1 and more are derivatives.
        output: See `Output`.
        mode: See `Mode`.
        cval: The number beyond the edges, in ``"constant"``.
        truncate: How many standard deviations the window reaches.
        radius: How many elements it reaches; by default `truncate` says it.

    Returns:
        See `correlate`.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `correlate`; or a negative order or radius.
    """
    name = "ndimage.gaussian_filter1d"
    return await _separable(
        name, input, output, mode, cval, (axis,), [_gaussian(name, sigma, order, truncate, radius)]
    )


async def _separable(
    name: str,
    input: AccelRef,
    output: Output,
    mode: Any,
    cval: complex,
    axes: object,
    kernels: Sequence[npt.NDArray[Any] | None],
) -> AccelRef:
    """Correlate along one axis after the other; None for one that stays as it is."""
    [x] = taken(name, input=input)
    along = axes_of(name, x, axes)
    modes = [mode_of(name, one) for one in each(name, "mode", mode, len(along))]
    dtype = dtype_of(name, x, output, x.shape, is_complex=x.dtype.kind == "complex")
    with intermediates() as made:
        result = x
        for axis, weights, filled in zip(along, kernels, modes, strict=True):
            if weights is not None:
                result = result if result is x else made(result)
                result = await line(result, weights, axis, dtype, filled, cval)
        return await delivered(await converted(dtype)(x) if result is x else result, output)


@composed
async def gaussian_filter(
    input: AccelRef,
    sigma: float | Sequence[float],
    order: int | Sequence[int] = 0,
    output: Output = None,
    mode: Mode | Sequence[Mode] = "reflect",
    cval: complex = 0.0,
    truncate: float = 4.0,
    *,
    radius: int | Sequence[int] | None = None,
    axes: int | Sequence[int] | None = None,
) -> AccelRef:
    """Smooth an image by a Gaussian, or compute its derivatives, as `scipy.ndimage.gaussian_filter` does.

    Args:
        input: The image.
        sigma: Standard deviation, in elements: for all axes, or for each. Along one of 0 nothing happens.
        order: See `gaussian_filter1d`; for all axes, or for each.
        output: See `Output`.
        mode: See `Mode`; for all axes, or for each.
        cval: The number beyond the edges, in ``"constant"``.
        truncate: See `gaussian_filter1d`.
        radius: See `gaussian_filter1d`; for all axes, or for each.
        axes: Axes to filter along; None for all.

    Returns:
        See `correlate`; it is rounded to its dtype after each axis.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `gaussian_filter1d`.
    """
    name = "ndimage.gaussian_filter"
    count = len(axes_of(name, *taken(name, input=input), axes))
    rows = [
        each(name, key, value, count)
        for key, value in (("sigma", sigma), ("order", order), ("radius", radius))
    ]
    kernels = [_gaussian(name, one, nth, truncate, reached) for one, nth, reached in zip(*rows, strict=True)]
    return await _separable(name, input, output, mode, cval, axes, kernels)


async def _differences(
    name: str, input: AccelRef, axis: int, output: Output, mode: Any, cval: complex, across: Sequence[float]
) -> AccelRef:
    """Correlate with differences along an axis, and with other weights along all others."""
    [x] = taken(name, input=input)
    [place] = axes_of(name, x, axis)
    axes = [place, *[one for one in range(x.ndim) if one != place]]
    modes = each(name, "mode", mode, x.ndim)
    kernels = [np.array([-1.0, 0.0, 1.0]), *[np.array(across)] * (x.ndim - 1)]
    return await _separable(name, x, output, [modes[one] for one in axes], cval, axes, kernels)


@composed
async def sobel(
    input: AccelRef,
    axis: int = -1,
    output: Output = None,
    mode: Mode | Sequence[Mode] = "reflect",
    cval: complex = 0.0,
) -> AccelRef:
    """Compute differences along an axis, smoothed by 1, 2, 1 along the others, as `scipy.ndimage.sobel` does.

    Args:
        input: The image.
        axis: The axis.
        output: See `Output`.
        mode: See `Mode`; for all axes, or for each.
        cval: The number beyond the edges, in ``"constant"``.

    Returns:
        See `gaussian_filter`.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `correlate`.
    """
    return await _differences("ndimage.sobel", input, axis, output, mode, cval, (1.0, 2.0, 1.0))


@composed
async def prewitt(
    input: AccelRef,
    axis: int = -1,
    output: Output = None,
    mode: Mode | Sequence[Mode] = "reflect",
    cval: complex = 0.0,
) -> AccelRef:
    """Compute differences along an axis, added up over three lines, as `scipy.ndimage.prewitt` does; see `sobel`."""
    return await _differences("ndimage.prewitt", input, axis, output, mode, cval, (1.0, 1.0, 1.0))


async def _total(
    name: str,
    input: AccelRef,
    output: Output,
    mode: Any,
    cval: complex,
    axes: object,
    kernels: Callable[[int], Sequence[npt.NDArray[Any] | None]],
) -> AccelRef:
    """Add up what several kernels give, one for each axis."""
    [x] = taken(name, input=input)
    along = axes_of(name, x, axes)
    dtype = dtype_of(name, x, output, x.shape, is_complex=x.dtype.kind == "complex")
    total: AccelRef | None = None
    with intermediates() as made:
        for n, one in enumerate(each(name, "mode", mode, len(along))):
            part = await _separable(name, x, dtype, one, cval, along, kernels(n))
            total = part if total is None else await add(made(total), made(part))
        return await delivered(await converted(dtype)(x) if total is None else total, output)


@composed
async def laplace(
    input: AccelRef,
    output: Output = None,
    mode: Mode | Sequence[Mode] = "reflect",
    cval: complex = 0.0,
    *,
    axes: int | Sequence[int] | None = None,
) -> AccelRef:
    """Add up second differences along axes, as `scipy.ndimage.laplace` does.

    Args:
        input: The image.
        output: See `Output`.
        mode: See `Mode`; for all axes, or for each.
        cval: The number beyond the edges, in ``"constant"``.
        axes: Axes to filter along; None for all.

    Returns:
        See `correlate`; it is rounded to its dtype for each axis.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `correlate`.
    """
    name, second = "ndimage.laplace", np.array([1.0, -2.0, 1.0])
    count = len(axes_of(name, *taken(name, input=input), axes))

    def kernels(place: int) -> list[npt.NDArray[Any] | None]:
        return [second if n == place else None for n in range(count)]

    return await _total(name, input, output, mode, cval, axes, kernels)


@composed
async def gaussian_laplace(
    input: AccelRef,
    sigma: float | Sequence[float],
    output: Output = None,
    mode: Mode | Sequence[Mode] = "reflect",
    cval: complex = 0.0,
    *,
    axes: int | Sequence[int] | None = None,
    truncate: float = 4.0,
    radius: int | None = None,
) -> AccelRef:
    """Add up second derivatives of an image that a Gaussian smooths, as `scipy.ndimage.gaussian_laplace` does.

    Args:
        input: The image.
        sigma: See `gaussian_filter`.
        output: See `Output`.
        mode: See `Mode`; for all axes, or for that of each derivative.
        cval: The number beyond the edges, in ``"constant"``.
        axes: Axes to filter along; None for all.
        truncate: See `gaussian_filter1d`.
        radius: See `gaussian_filter1d`.

    Returns:
        See `laplace`.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `gaussian_filter`.
    """
    name = "ndimage.gaussian_laplace"
    sigmas = each(name, "sigma", sigma, len(axes_of(name, *taken(name, input=input), axes)))

    def kernels(place: int) -> list[npt.NDArray[Any] | None]:
        return [_gaussian(name, one, 2 * (n == place), truncate, radius) for n, one in enumerate(sigmas)]

    return await _total(name, input, output, mode, cval, axes, kernels)
