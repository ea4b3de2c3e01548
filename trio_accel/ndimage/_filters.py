"""Linear filters: weighted sums of windows, by `scipy.ndimage`'s names.

Sums are computed in float64 or complex128, and rounded once for each axis, as in SciPy. Weights of a named
filter are added in SciPy's order, to get its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..actors import arguments_of
from ..arrays import add
from ..backends.base import DType, HostArray
from ..devices import AccelRef, Operand, composed
from . import windows as w
from .windows import Floats, Mode, Modes, Numbers, Output

__all__ = [
    "convolve",
    "convolve1d",
    "correlate",
    "correlate1d",
    "gaussian_filter",
    "gaussian_filter1d",
    "gaussian_laplace",
    "laplace",
    "prewitt",
    "sobel",
]

Weights: TypeAlias = "AccelRef | npt.ArrayLike"
_Term: TypeAlias = "tuple[Any, str, list[AccelRef]]"
_Kernels: TypeAlias = "Sequence[HostArray | None]"


async def _weighed(terms: Sequence[_Term], dtype: DType, wide: str) -> AccelRef:
    """Sum up views of a padded array, a few at a time.

    Each has a weight, and a sign; with a sign, another view is first added to it, or taken from it.
    """
    total, step = list[AccelRef](), w.MAX_WINDOW_ELEMENTS // 2
    for start in range(0, len(terms), step):
        chunk, result_dtype = (
            terms[start : start + step],
            dtype if start + step >= len(terms) else DType(wide),
        )
        inputs, parts = ["total"] * len(total), ["total"] * len(total)
        for n, (_, sign, views) in enumerate(chunk):
            inputs += [f"{letter}{n}" for letter in "ab"[: len(views)]]
            parts.append(f"({wide}(a{n})" + f" {sign} {wide}(b{n})" * bool(sign) + f") * w{n}")
        text = f"y = {' + '.join(parts)}; y = {w.stored('y', result_dtype)}"
        expression = w.compute(
            "correlate", text, (*inputs, *[f"w{n}" for n in range(len(chunk))]), result_dtype
        )
        operands = [
            *total,
            *[view for *_, views in chunk for view in views],
            *[weight for weight, *_ in chunk],
        ]
        total = [await expression(*operands)]
    return total[0]


async def line(
    x: AccelRef, weights: HostArray, axis: int, dtype: DType, mode: str, cval: complex = 0.0
) -> AccelRef:
    """Correlate along an axis with weights of the host; elements with equal weights are added first."""
    pairs = len(weights) // 2
    views = await w.windows(x, (axis,), np.ones(len(weights)), (0,), (mode,), cval)
    terms: list[_Term] = [(weight.item(), "", [view]) for weight, view in zip(weights, views, strict=True)]
    for sign, factor in (("+", 1), ("-", -1)):
        if len(weights) % 2 and np.allclose(weights[:pairs], factor * weights[: -pairs - 1 : -1], 0, 2**-52):
            sides = zip(weights.tolist(), views[:pairs], views[::-1], strict=False)
            terms = [
                terms[pairs],
                *[(weight, sign, [view, mirrored_view]) for weight, view, mirrored_view in sides],
            ]
            break
    return await _weighed(terms, dtype, w.wide_of(x))


async def _correlate(
    is_convolved: bool,
    input: Any,
    weights: Any,
    output: Output,
    mode: Any,
    cval: complex,
    origin: Any,
    axes: object,
) -> AccelRef:
    """Correlate, or convolve: then weights are in reverse, and not conjugated."""
    x, is_on_device = input, isinstance(weights, AccelRef)
    along, filled = w.axes_of(x, axes), w.modes_of((mode,), 1)
    window: Any = await weights.cast("float64") if is_on_device else w.numbers("weights", weights)
    message = f"weights must have {len(along)} axes and elements, got shape {window.shape}"
    w.require(window.ndim == len(along) and window.size, message)
    along, origins = w.in_order(along, w.origins_of(origin, window.shape))
    # The window has the axes in this order.
    origins = w.origins_of(origins, window.shape, is_turned=is_convolved)
    is_complex = not is_on_device and window.dtype.kind == "c"
    if is_convolved:
        window = window[(slice(None, None, -1),) * window.ndim]
    elif is_complex:
        window = window.conj()
    dtype = w.dtype_of(x, output, x.shape, is_complex)
    every = np.broadcast_to(True, window.shape)
    views = await w.windows(x, along, every, origins, filled * len(along), cval)
    weights = [window[n] for n in np.ndindex(window.shape)] if is_on_device else window.ravel().tolist()
    terms: list[_Term] = [(weight, "", [view]) for weight, view in zip(weights, views, strict=True)]
    return await w.delivered(await _weighed(terms, dtype, w.wide_of(x, is_complex)), output)


@composed
async def correlate(
    input: Operand,
    weights: Weights,
    output: Output = None,
    mode: Mode = "reflect",
    cval: complex = 0.0,
    origin: Numbers = 0,
    *,
    axes: Numbers | None = None,
) -> AccelRef:
    """Correlate an image with weights, as `scipy.ndimage.correlate` does.

    Args:
        input: The image, with any number of axes.
        weights: An array with an axis for each of `axes`: on the host, or a real one on the device. Complex
            weights are conjugated.
        output: See `Output`.
        mode: See `Mode`.
        cval: The number outside of the edges, in ``"constant"``.
        origin: How far the window is shifted towards the begin: for all axes, or for each.
        axes: Axes to filter along; None for all.

    Returns:
        The sums, in the dtype of `input`: of integers rounded towards zero. They are complex where the
        weights are.

    Raises:
        TypeError: `input` is not an array of a device, or a real `output` gets complex sums.
        ValueError: The weights have another number of axes, an origin is outside of the window, an axis or
            mode is unknown, or `output` has another shape.
        NotSupportedError: float8.
    """
    return await _correlate(False, input, weights, output, mode, cval, origin, axes)


@arguments_of(correlate, _correlate, True)
def convolve() -> None:
    """Convolve an image with weights, as `scipy.ndimage.convolve` does.

    Weights are in reverse, and not conjugated. See `correlate` for arguments, result and errors.
    """


async def _convolve1d(axis: int, **arguments: Any) -> AccelRef:
    return await _correlate(True, **arguments, axes=w.integer("axis", axis))


@composed
async def correlate1d(
    input: Operand,
    weights: Weights,
    axis: int = -1,
    output: Output = None,
    mode: Mode = "reflect",
    cval: complex = 0.0,
    origin: int = 0,
) -> AccelRef:
    """Correlate lines along an axis with a vector of weights, as `scipy.ndimage.correlate1d` does.

    See `correlate` for arguments, result and errors, with one `axis`.
    """
    return await _correlate(False, input, weights, output, mode, cval, origin, w.integer("axis", axis))


@arguments_of(correlate1d, _convolve1d)
def convolve1d() -> None:
    """Convolve lines along an axis with a vector of weights, as `scipy.ndimage.convolve1d` does.

    See `correlate` for arguments, result and errors, with one `axis`.
    """


def gaussian_weights(sigma: float, order: int, truncate: float, radius: int | None) -> Any:
    """Return the weights of `scipy.ndimage.gaussian_filter1d`, or None if they are empty.

    The derivative of ``q(x) * exp(-x**2 / (2 * sigma**2))`` is ``(q'(x) - x / sigma**2 * q(x))`` times that
    exponential, so a derivative of any order is a polynomial times the Gaussian.
    """
    w.require(w.real("sigma", sigma) >= 0, f"sigma must be at least 0, got {sigma}")
    reached = w.real("truncate times sigma", truncate * sigma)
    count = int(min(reached, 1e9) + 0.5) if radius is None else w.integer("radius", radius)
    order = w.integer("order", order)
    is_right = 0 <= count <= 1 << 16 and 0 <= order <= 64
    w.require(is_right, f"radius and order must be from 0 to 65536 and 64, got {count} and {order}")
    if sigma <= 1e-15:
        return None
    x, powers = np.arange(-count, count + 1), np.arange(order + 1)
    gaussian = np.exp(-0.5 / (sigma * sigma) * x**2)
    gaussian /= gaussian.sum()
    if not order:
        return gaussian
    derive = np.diag(powers[1:], 1) + np.diag(np.ones(order) / -(sigma * sigma), -1)
    polynomial: Any = np.eye(1, order + 1)[0]
    for _ in range(order):
        polynomial = derive.dot(polynomial)
    return ((x[:, None] ** powers).dot(polynomial) * gaussian)[::-1]


async def _separable(
    x: Any, output: Output, mode: Any, cval: complex, axes: object, sums: Sequence[_Kernels]
) -> AccelRef:
    """Correlate along one axis after the other, and add up what several kernels for these give."""
    along, total = w.axes_of(x, axes), list[AccelRef]()
    modes, dtype = w.modes_of(mode, len(along)), w.dtype_of(x, output, x.shape)
    # SciPy stores truth values as bytes that wrap around, and the next axis reads these: -1 + 1 is False.
    stored_dtype = DType.uint8 if dtype is DType.bool else dtype
    for n, kernels in enumerate(sums):
        result = x
        for axis, weights, filled in zip(along, kernels, modes, strict=True):
            if weights is not None:
                result = await line(
                    result, weights, axis, stored_dtype, filled if len(sums) == 1 else modes[n], cval
                )
        if result is x or result.dtype is not dtype:
            result = await w.converted(result, dtype)
        total = [await add(total[0], result) if total else result]
    return await w.delivered(total[0] if total else await w.converted(x, dtype), output)


@composed
async def gaussian_filter1d(
    input: Operand,
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
    """Smooth lines along an axis, or compute derivatives, as `scipy.ndimage.gaussian_filter1d` does.

    Args:
        input: The image.
        sigma: Standard deviation, in elements.
        axis: The axis.
        order: 0 smooths; 1 and more are derivatives.
        output: See `Output`.
        mode: See `Mode`.
        cval: The number outside of the edges, in ``"constant"``.
        truncate: The number of standard deviations that the window reaches.
        radius: The number of elements that it reaches; by default it follows from `truncate`.

    Returns:
        See `correlate`.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `correlate`; or a negative order or radius.
    """
    arguments = input, w.real("sigma", sigma), order, output, mode, cval, truncate
    return await gaussian_filter(*arguments, radius=radius, axes=w.integer("axis", axis))


@composed
async def gaussian_filter(
    input: Operand,
    sigma: Floats,
    order: Numbers = 0,
    output: Output = None,
    mode: Modes = "reflect",
    cval: complex = 0.0,
    truncate: float = 4.0,
    *,
    radius: Numbers | None = None,
    axes: Numbers | None = None,
) -> AccelRef:
    """Smooth an image by a Gaussian, or compute its derivatives, as `scipy.ndimage.gaussian_filter` does.

    Args:
        input: The image.
        sigma: See `gaussian_filter1d`: for all axes, or for each. Along an axis with 0 nothing happens.
        order: See `gaussian_filter1d`: for all axes, or for each.
        output: See `Output`.
        mode: See `Mode`: for all axes, or for each.
        cval: The number outside of the edges, in ``"constant"``.
        truncate: See `gaussian_filter1d`.
        radius: See `gaussian_filter1d`: for all axes, or for each.
        axes: Axes to filter along; None for all.

    Returns:
        See `correlate`; it is rounded to its dtype after each axis.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `gaussian_filter1d`.
    """
    options, count = {"sigma": sigma, "order": order, "radius": radius}, len(w.axes_of(input, axes))
    rows = zip(*[w.per_axis(key, value, count) for key, value in options.items()], strict=True)
    kernels = [gaussian_weights(deviation, nth, truncate, reached) for deviation, nth, reached in rows]
    return await _separable(input, output, mode, cval, axes, [kernels])


async def _differences(
    middle: float, input: Any, axis: int, output: Output, mode: Any, cval: complex
) -> AccelRef:
    [derivative_axis], smoothing_kernels = (
        w.axes_of(input, w.integer("axis", axis)),
        [np.array([1.0, middle, 1.0])] * (input.ndim - 1),
    )
    axes = [derivative_axis, *[dim for dim in range(input.ndim) if dim != derivative_axis]]
    modes = w.per_axis("mode", mode, input.ndim)
    kernels = [np.array([-1.0, 0.0, 1.0]), *smoothing_kernels]
    return await _separable(input, output, [modes[dim] for dim in axes], cval, axes, [kernels])


@composed
async def sobel(
    input: Operand, axis: int = -1, output: Output = None, mode: Modes = "reflect", cval: complex = 0.0
) -> AccelRef:
    """Compute differences along an axis, smoothed by 1, 2, 1 along the others, as `scipy.ndimage.sobel` does.

    Args:
        input: The image.
        axis: The axis.
        output: See `Output`.
        mode: See `Mode`: for all axes, or for each.
        cval: The number outside of the edges, in ``"constant"``.

    Returns:
        See `gaussian_filter`.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `correlate`.
    """
    return await _differences(2.0, input, axis, output, mode, cval)


@arguments_of(sobel, _differences, 1.0)
def prewitt() -> None:
    """Compute differences along an axis, added up over three lines: `scipy.ndimage.prewitt`; see `sobel`."""


@composed
async def laplace(
    input: Operand,
    output: Output = None,
    mode: Modes = "reflect",
    cval: complex = 0.0,
    *,
    axes: Numbers | None = None,
) -> AccelRef:
    """Add up second differences along axes, as `scipy.ndimage.laplace` does.

    Args:
        input: The image.
        output: See `Output`.
        mode: See `Mode`: for all axes, or for each.
        cval: The number outside of the edges, in ``"constant"``.
        axes: Axes to filter along; None for all.

    Returns:
        See `correlate`; it is rounded to its dtype for each axis.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `correlate`.
    """
    second, indices = np.array([1.0, -2.0, 1.0]), range(len(w.axes_of(input, axes)))
    sums = [[second if n == index else None for n in indices] for index in indices]
    return await _separable(input, output, mode, cval, axes, sums)


@composed
async def gaussian_laplace(
    input: Operand,
    sigma: Floats,
    output: Output = None,
    mode: Modes = "reflect",
    cval: complex = 0.0,
    *,
    axes: Numbers | None = None,
    truncate: float = 4.0,
    radius: int | None = None,
) -> AccelRef:
    """Add up second derivatives of a smoothed image, as `scipy.ndimage.gaussian_laplace` does.

    Args:
        input: The image.
        sigma: See `gaussian_filter`.
        output: See `Output`.
        mode: See `Mode`: for all axes, or for each derivative.
        cval: The number outside of the edges, in ``"constant"``.
        axes: Axes to filter along; None for all.
        truncate: See `gaussian_filter1d`.
        radius: See `gaussian_filter1d`.

    Returns:
        See `laplace`.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `gaussian_filter`.
    """
    sigmas = w.per_axis("sigma", sigma, len(w.axes_of(input, axes)))
    sums = [
        [
            gaussian_weights(deviation, 2 * (n == index), truncate, radius)
            for n, deviation in enumerate(sigmas)
        ]
        for index in range(len(sigmas))
    ]
    return await _separable(input, output, mode, cval, axes, sums)
