"""Convolutions, correlations and other functions of signals that transforms make fast.

Names and arguments follow `scipy.signal`. The functions are here because each consists of transforms with an
expression between them; a package of its own would have no kernels.
"""

from __future__ import annotations

import cmath
import functools
import math
import sys
from collections.abc import Sequence
from typing import Literal, TypeAlias

import attrs
import numpy as np

from ..actors import arguments_of
from ..backends.base import DType, NotSupportedError, host_array
from ..backends.base.contract.ops import complex_of
from ..devices import AccelRef, Operand, bounded_integer, bounded_integers, composed, device_of, refuse_dtypes
from ..expressions import Elementwise, Out, intermediates, on_device
from ._functions import (
    Fft,
    Fftn,
    Rfftn,
    axis_of,
    check_floating,
    check_out,
    extent_of,
    fft,
    ifft,
    ifftn,
    irfftn,
)
from ._helpers import next_fast_len
from ._real import fit

__all__ = ["ConvolveMode", "convolve", "correlate", "czt", "fftconvolve", "hilbert", "oaconvolve", "zoom_fft"]

ConvolveMode: TypeAlias = Literal["full", "same", "valid"]
"""Which part of a convolution: all of it; the middle, of the shape of the first array; or what depends on no
elements outside of the arrays."""

_Axes: TypeAlias = "int | Sequence[int] | None"


async def _convolve(
    name: str, in1: Operand, in2: Operand, mode: ConvolveMode, axes: _Axes, out: Out
) -> AccelRef:
    """Check the arguments, and convolve along axes."""
    _check_pair(name, in1, in2)
    if mode not in ("full", "same", "valid"):
        raise ValueError(f"{name}: mode must be 'full', 'same' or 'valid', got {mode!r}")
    chosen = _chosen(name, in1, in2, axes)
    wide = [axis for axis in chosen if in1.shape[axis] > 1 < in2.shape[axis]]
    # SciPy's `fftconvolve` lets either array be the longer one along the others.
    compared = wide if name in ("fftconvolve", "oaconvolve") else chosen
    if mode == "valid" and any(in1.shape[axis] < in2.shape[axis] for axis in compared):
        in1, in2 = in2, in1
        if any(in1.shape[axis] < in2.shape[axis] for axis in compared):
            raise ValueError(
                f"{name}: for 'valid', one array must be the larger one along all axes, got shapes "
                f"{in2.shape} and {in1.shape}"
            )
    full = list(
        np.broadcast_shapes(*[[1 if n in wide else e for n, e in enumerate(a.shape)] for a in (in1, in2)])
    )
    for axis in wide:
        full[axis] = in1.shape[axis] + in2.shape[axis] - 1
    result_shape = list(in1.shape) if mode == "same" else list(full)
    if mode == "valid":
        result_shape = [
            in1.shape[n] - in2.shape[n] + 1 if n in wide else extent for n, extent in enumerate(full)
        ]
    check_out(name, out, result_shape, DType.of(in1.dtype))
    convolution = _FftConvolution(name, in1, in2, wide, full, result_shape)
    return await (convolution.by_blocks if name == "oaconvolve" else convolution.by_transforms)(out)


@composed
async def fftconvolve(
    in1: Operand, in2: Operand, mode: ConvolveMode = "full", axes: _Axes = None, *, out: Out = None
) -> AccelRef:
    """Convolve two arrays by transforms along axes, as `scipy.signal.fftconvolve`.

    Args:
        in1: Array of float32, float64, complex64 or complex128.
        in2: Array of the same dtype and number of axes. Along the other axes, shapes broadcast.
        mode: See `ConvolveMode`.
        axes: Axes to convolve along; None for all.
        out: Array to write to; by default a new one.

    Returns:
        The convolution. In ``"valid"``, either of the arrays may be the larger one.

    Raises:
        TypeError: No array is on a device, a dtype is not supported, or the dtypes differ.
        ValueError: The numbers of axes differ, the mode is unknown, an axis is out of range or named twice,
            shapes do not broadcast, there are no elements, in ``"valid"`` neither array is larger along all
            axes, or `out` does not fit.
    """
    return await _convolve("fftconvolve", in1, in2, mode, axes, out)


@arguments_of(fftconvolve, _convolve, "oaconvolve")
def oaconvolve() -> None:
    """Convolve a long array with a short one in blocks, as `scipy.signal.oaconvolve`: overlap and add.

    The array is cut along the axis where one array is longest relative to the other; along other axes it is
    transformed as a whole. With a short filter it takes less time than `fftconvolve`. If no axis is long
    enough to be cut, it is `fftconvolve`.

    See `fftconvolve` for arguments, result and errors.
    """


async def _of_signals(
    name: str, in1: Operand, in2: Operand, mode: ConvolveMode, method: str, out: Out
) -> AccelRef:
    """Convolve along all axes, or correlate: then the second array is in reverse, and conjugated."""
    if method == "direct":
        raise NotSupportedError(f"{name}: method 'direct' is not supported; use 'fft' or 'auto'")
    if method not in ("auto", "fft"):
        raise ValueError(f"{name}: method must be 'auto' or 'fft', got {method!r}")
    if name == "convolve":
        return await _convolve(name, in1, in2, mode, None, out)
    _check_pair(name, in1, in2)
    reverse = in2[(slice(None, None, -1),) * len(in2.shape)]
    if DType.of(in2.dtype).kind != "complex":
        return await _convolve(name, in1, reverse, mode, None, out)
    with intermediates() as track:
        taken = await device_of(name, in1, in2).ask(_CONJUGATE.compute(reverse))
        return await _convolve(name, in1, track(taken), mode, None, out)


@composed
async def convolve(
    in1: Operand,
    in2: Operand,
    mode: ConvolveMode = "full",
    method: Literal["auto", "fft"] = "auto",
    *,
    out: Out = None,
) -> AccelRef:
    """Convolve two arrays, as `scipy.signal.convolve`: by `fftconvolve` along all axes.

    Errors are relative to the largest element of the result, as in all transforms.

    Args:
        in1: See `fftconvolve`.
        in2: See `fftconvolve`.
        mode: See `ConvolveMode`.
        method: ``"auto"`` and ``"fft"`` are the same.
        out: See `fftconvolve`.

    Raises:
        NotSupportedError: The method ``"direct"``.
        TypeError, ValueError: As `fftconvolve`.
    """
    return await _of_signals("convolve", in1, in2, mode, method, out)


@arguments_of(convolve, _of_signals, "correlate")
def correlate() -> None:
    """Correlate two arrays, as `scipy.signal.correlate`: `in2` in reverse, and conjugated, is convolved.

    See `convolve` for arguments and errors.
    """


@composed
async def hilbert(
    x: Operand,
    N: int | None = None,  # noqa: N803  # SciPy's name
    axis: int = -1,
    *,
    out: Out = None,
) -> AccelRef:
    """Make the analytic signal of a real one, as `scipy.signal.hilbert`: its imaginary part is the transform.

    Args:
        x: Array of float32 or float64.
        N: Length of the transform; the axis is cut or padded with zeros to it. By default its length.
        axis: Axis of time; the others are a batch.
        out: Array to write to; by default a new one.

    Returns:
        The shape of `x` with `N` elements along `axis`, in the complex dtype of the same precision.

    Raises:
        TypeError: The array is not on a device, or its dtype is not supported.
        ValueError: A length is below 1, an axis is out of range, or `out` does not fit.
    """
    name = "hilbert"
    axis_index, n = _points(name, x, "N", N, axis, out, is_real=True)
    with intermediates() as track:
        spectrum = track(await device_of(name, x, out).ask(Fft(x, n, axis_index)))
        await _one_sided(axis_index - spectrum.ndim)(spectrum, n, out=spectrum)
        return await ifft(spectrum, axis=axis_index, out=out)


@composed
async def czt(
    x: Operand,
    m: int | None = None,
    w: complex | None = None,
    a: complex = 1 + 0j,
    *,
    axis: int = -1,
    out: Out = None,
) -> AccelRef:
    """Compute the chirp z-transform, as `scipy.signal.czt`: the z-transform along a spiral (Bluestein).

    Args:
        x: Array of float32, float64, complex64 or complex128.
        m: How many points; by default as many as the axis has elements.
        w: Ratio from one point to the next; by default ``exp(-2j * pi / m)``, with which all points are on
            the unit circle.
        a: The first point.
        axis: Axis to transform; the others are a batch.
        out: Array to write to; by default a new one.

    Returns:
        The shape of `x` with `m` elements along `axis`, in the complex dtype of the same precision.

    Raises:
        TypeError: The array is not on a device, or its dtype is not supported.
        ValueError: There are no points or elements, an axis is out of range, `w` or `a` is 0, or `out` does
            not fit.
    """
    axis_index, count = _points("czt", x, "m", m, axis, out)
    if a == 0 or w == 0:
        raise ValueError(f"czt: a and w must not be 0, got a {a!r} and w {w!r}")
    # SciPy reduces integers before the angle is made.
    rate, period = (-1j * math.pi / count, 2 * count) if w is None else (cmath.log(w) / 2, sys.maxsize)
    return await _chirped("czt", x, axis_index, count, _Chirp(-cmath.log(a), rate, period), out)


@composed
async def zoom_fft(
    x: Operand,
    fn: float | Sequence[float],
    m: int | None = None,
    *,
    fs: float = 2,
    endpoint: bool = False,
    axis: int = -1,
    out: Out = None,
) -> AccelRef:
    """Compute the spectrum in a range of frequencies, as `scipy.signal.zoom_fft`; by `czt`.

    Args:
        x: See `czt`.
        fn: The first and the last frequency; or the last one, where the first is 0.
        m: See `czt`.
        fs: Samples for each unit of time.
        endpoint: Whether the last frequency is one of the points.
        axis: See `czt`.
        out: See `czt`.

    Returns:
        See `czt`.

    Raises:
        TypeError, ValueError: As `czt`; or `fn` is neither a number nor two.
    """
    axis_index, count = _points("zoom_fft", x, "m", m, axis, out)
    ends = np.atleast_1d(np.empty(0) if np.iscomplexobj(fn) else host_array("zoom_fft: fn", fn, float))
    if ends.shape not in ((1,), (2,)):
        raise ValueError(f"zoom_fft: fn must be a frequency or two, got {fn!r}")
    low, high = (0.0, *ends)[-2:]
    if endpoint and count == 1:
        raise ValueError("zoom_fft: m must be at least 2 with endpoint")
    if fs == 0:
        raise ValueError("zoom_fft: fs must not be 0, as it is samples for each unit of time")
    step = (high - low) / fs / (count - endpoint)
    chirp = _Chirp(-2j * math.pi * low / fs, -1j * math.pi * step, sys.maxsize)
    return await _chirped("zoom_fft", x, axis_index, count, chirp, out)


def _points(
    name: str, x: Operand, argument: str, points: int | None, axis: int, out: Out, *, is_real: bool = False
) -> tuple[int, int]:
    """Check the arguments of a transform along an axis; return the axis, and the number of points."""
    device_of(name, x, out)
    check_floating(name, "x", x, is_real=is_real)
    axis_index = axis_of(name, "axis", bounded_integer(name, "axis", axis), x)
    if points is None:
        count = extent_of(name, axis_index, x, "x")
    else:
        count = bounded_integer(name, argument, points, "an integer or None")
    if count < 1:
        raise ValueError(f"{name}: {argument} must be at least 1, got {points}")
    check_out(
        name, out, (*x.shape[:axis_index], count, *x.shape[axis_index + 1 :]), complex_of(DType.of(x.dtype))
    )
    return axis_index, count


@attrs.frozen
class _Chirp:
    """Numbers ``exp(slope * k + rate * k**2)``; all are made on the device, in double.

    Attributes:
        slope: Logarithm of the ratio between neighbours, for a part with a constant ratio.
        rate: Its change from one point to the next.
        period: The modulus that reduces the squares.
    """

    slope: complex
    rate: complex
    period: int

    @property
    def arguments(self) -> tuple[float, float, float, float, int]:
        """Return the arguments of the expressions in `_CHIRPS`."""
        return self.slope.real, self.slope.imag, self.rate.real, self.rate.imag, self.period


_CHIRPS = ("sr", "si", "rr", "ri", "period")
_CHIRP = "q = k * k % period; e = exp(sr * k + rr * q); t = si * k + ri * q; c = e * cos(t) + 1j * e * sin(t)"


async def _chirped(name: str, x: Operand, axis: int, m: int, chirp: _Chirp, out: Out) -> AccelRef:
    """Transform by a convolution with a chirp: L. Bluestein, 1970."""
    n = extent_of(name, axis, x, "x")
    length, trailing_axis = next_fast_len(n + m - 1), axis - len(x.shape)
    dtype = complex_of(DType.of(x.dtype))
    factors, device = _factors(trailing_axis, dtype.value), device_of(name, x, out)
    kernel_chirp, output_chirp = (_Chirp(0, rate, chirp.period) for rate in (-chirp.rate, chirp.rate))
    with intermediates() as track:
        kernel = track(
            await device.ask(_KERNEL.compute(*kernel_chirp.arguments, n - 1, n + m - 1, shape=length))
        )
        transformed = track(await fft(kernel))
        ready = track(await device.ask(factors.compute(x, *chirp.arguments)))
        spectrum = track(await fft(ready, length, axis))
        along = track(await transformed.cast(dtype)).reshape((length, *(1,) * (-1 - trailing_axis)))
        await _PRODUCT(spectrum, along, out=spectrum)
        points = track(await ifft(spectrum, axis=axis))
        section = points[(*(slice(None),) * axis, slice(n - 1, n + m - 1))]
        return await factors(section, *output_chirp.arguments, out=out)


@functools.cache
def _factors(trailing_axis: int, dtype: str) -> Elementwise[AccelRef]:
    """Multiply by a chirp along an axis, counted from the last."""
    text = f"k = i({trailing_axis}); {_CHIRP}; y = x * c"
    return Elementwise(text, inputs=("x", *_CHIRPS), dtypes=dtype, operation="fft.czt")


_KERNEL = Elementwise[AccelRef](
    f"j = i(0); k = abs(j - last); {_CHIRP}; y = c if j < count else 0",
    inputs=(*_CHIRPS, "last", "count"),
    dtypes="complex128",
    operation="fft.czt",
)


@functools.cache
def _one_sided(trailing_axis: int) -> Elementwise[AccelRef]:
    """Count positive frequencies twice, negative ones never, and 0 and the middle once."""
    text = f"j = 2 * i({trailing_axis}); y = x * (0 if j > n else 2 if j % n != 0 else 1)"
    return Elementwise(text, operation="fft.hilbert")


_PRODUCT = Elementwise[AccelRef]("a * b", operation="fft.convolve")
_CONJUGATE = Elementwise[AccelRef]("conj(x)", operation="fft.correlate")


def _check_pair(name: str, in1: Operand, in2: Operand) -> None:
    """Refuse arrays that cannot be convolved, whatever along."""
    device_of(name, in1, in2)
    check_floating(name, "in1", in1)
    check_floating(name, "in2", in2)
    dtypes = {"in1": DType.of(in1.dtype), "in2": DType.of(in2.dtype)}
    if dtypes["in1"] is not dtypes["in2"]:
        hosts = [key for key, array in (("in1", in1), ("in2", in2)) if not isinstance(array, AccelRef)]
        refuse_dtypes(name, dtypes, hosts)
    if len(in1.shape) != len(in2.shape) or 0 in (*in1.shape, *in2.shape):
        raise ValueError(
            f"{name}: in1 and in2 must have elements, and as many axes, got shapes {in1.shape} and "
            f"{in2.shape}"
        )


@attrs.frozen
class _FftConvolution:
    """Two arrays to convolve, and the part of the result to keep.

    Attributes:
        name: The function.
        in1: The first array; in ``"valid"`` the larger one.
        in2: The other one.
        wide: Axes along which both have several elements; along the other axes they are multiplied.
        full: Shape of the whole convolution.
        result_shape: Shape of the part to keep.
    """

    name: str
    in1: Operand
    in2: Operand
    wide: list[int]
    full: list[int]
    result_shape: list[int]

    @property
    def starts(self) -> list[int]:
        """The first place of the part to keep."""
        return [
            (full_extent - extent) // 2
            for full_extent, extent in zip(self.full, self.result_shape, strict=True)
        ]

    async def by_transforms(self, out: Out) -> AccelRef:
        """Transform both arrays, multiply, and transform back."""
        part = tuple(
            [
                slice(start, start + extent)
                for start, extent in zip(self.starts, self.result_shape, strict=True)
            ]
        )
        is_complex = DType.of(self.in1.dtype).kind == "complex"
        lengths = [next_fast_len(self.full[axis], real=not is_complex) for axis in self.wide]
        with intermediates() as track:
            arrays = self.in1, self.in2
            if self.wide:
                result = track(await _product_of(self.name, arrays, lengths, self.wide, is_complex))
            else:
                result = track(await device_of(self.name, *arrays).ask(_PRODUCT.compute(*arrays)))
            return await _COPY(result[part], out=out)

    async def by_blocks(self, out: Out) -> AccelRef:
        """Cut the longer array along the axis where that saves most, and add where results overlap."""
        if not self.wide:
            return await self.by_transforms(out)
        ratios = [self.in1.shape[axis] / self.in2.shape[axis] for axis in self.wide]
        index = int(np.argmax([max(ratio, 1 / ratio) for ratio in ratios]))
        axis = self.wide[index]
        signal, taps = (self.in1, self.in2) if ratios[index] > 1 else (self.in2, self.in1)
        is_complex, width = DType.of(signal.dtype).kind == "complex", taps.shape[axis]
        length = next_fast_len(_BLOCK * width, real=not is_complex)
        if length >= self.full[axis]:
            return await self.by_transforms(out)
        step = length - width + 1
        count = -(-signal.shape[axis] // step)
        inner = [dim + (dim >= axis) for dim in self.wide]
        lengths = [next_fast_len(self.full[dim], real=not is_complex) for dim in self.wide]
        lengths[index] = length
        with intermediates() as track:
            if isinstance(signal, np.ndarray):
                signal = track(await device_of(self.name, taps).put(signal))
            source = on_device(signal)
            cut = await fit(self.name, source, axis, count * step, track)
            cut = cut if cut.spec.is_contiguous else track(await cut.copy())
            blocks = cut.reshape((*cut.shape[:axis], count, step, *cut.shape[axis + 1 :]))
            kernel = taps[(*(slice(None),) * axis, None)]
            result = track(await _product_of(self.name, (blocks, kernel), lengths, inner, is_complex))
            numbers = {f"s{number}": start for number, start in enumerate(self.starts)}
            numbers |= {"step": step, "count": count, "length": length}
            return await _added(len(self.full), axis)(b=result, shape=self.result_shape, out=out, **numbers)


# The length of a block, in lengths of the shorter array: the steps per element change little from 4 to 16.
_BLOCK = 8


async def _product_of(
    name: str, arrays: tuple[Operand, Operand], lengths: Sequence[int], axes: Sequence[int], is_complex: bool
) -> AccelRef:
    """Multiply the spectra of two arrays, and transform back."""
    device, ask = device_of(name, *arrays), Fftn if is_complex else Rfftn
    with intermediates() as track:
        spectra = [track(await device.ask(ask(array, lengths, axes))) for array in arrays]
        product = track(await _PRODUCT(*spectra))
        return await (ifftn if is_complex else irfftn)(product, lengths, axes)


@functools.cache
def _added(ndim: int, axis: int) -> Elementwise[AccelRef]:
    """Add the end of each block along an axis to the begin of the next one."""
    indices = [f"i({dim}) + s{dim}" for dim in range(ndim)]
    prefix = "".join(f"{index}, " for index in indices[:axis])
    suffix = "".join(f", {index}" for index in indices[axis + 1 :])
    text = (
        f"j = {indices[axis]}; q = j // step; r = j - q * step;"
        f"y = (b[{prefix}q, r{suffix}] if q < count else 0)"
        f" + (b[{prefix}q - 1, r + step{suffix}] if q > 0 and r + step < length else 0)"
    )
    return Elementwise(text, operation="fft.oaconvolve")


def _chosen(name: str, in1: Operand, in2: Operand, axes: _Axes) -> list[int]:
    """Return the axes to convolve along, and hold the shapes along the others against each other."""
    ndim = len(in1.shape)
    requested_axes = range(ndim) if axes is None else bounded_integers(name, "axes", axes)
    chosen = [axis_of(name, "axes:", axis, in1) for axis in requested_axes]
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"{name}: axes must be distinct, got {axes!r}")
    for axis, pair in enumerate(zip(in1.shape, in2.shape, strict=True)):
        if axis not in chosen and 1 not in pair and pair[0] != pair[1]:
            raise ValueError(
                f"{name}: in1 of shape {in1.shape} and in2 of shape {in2.shape} do not broadcast along axis "
                f"{axis}"
            )
    return chosen


_COPY = Elementwise[AccelRef]("x", operation="fft.convolve")
