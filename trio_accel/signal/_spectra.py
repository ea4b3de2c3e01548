"""Spectra of segments of a signal, and signals of another rate: windows, and transforms of what they show."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.signal

from ..arrays import imag, mean, moveaxis, pad, real, sliding_window_view
from ..backends.base import DType
from ..devices import AccelRef
from ..devices.base._refusals import whole
from ..devices.operations._calls import composed
from ..expressions import Elementwise, axis_of, check_ref
from ..fft import fft, irfft, rfft

__all__ = ["Window", "resample", "stft", "welch"]

Window: TypeAlias = "str | tuple[Any, ...] | npt.NDArray[Any]"
"""A window by `scipy.signal.get_window`, or its values on the host."""

_Host: TypeAlias = npt.NDArray[Any]
_POWER = Elementwise[AccelRef]("abs(x) ** 2 * weights", inputs=("x", "weights"), operation="signal.welch")


async def _segments(
    name: str, x: AccelRef, window: Window, nperseg: int | None, noverlap: int | None, nfft: int | None,
    axis: int, *, padded: bool, detrended: bool,
) -> tuple[AccelRef, _Host, int, int]:  # fmt: skip
    """Transform the segments of a signal; return the spectra, the window, the step and the length of transforms.

    The spectra have the axis of segments, then that of frequencies, behind the others.
    """
    check_ref(name, "x", x)
    place = axis_of(name, x, axis)
    count = x.shape[place]
    given = None if isinstance(window, (str, tuple)) else np.asarray(window)
    if given is not None and (given.ndim != 1 or nperseg not in (None, len(given))):
        raise ValueError(f"{name}: window must be a vector of nperseg={nperseg} elements, got {given.shape}")
    size = (
        len(given)
        if given is not None
        else min(256, count)
        if nperseg is None
        else whole(name, "nperseg", nperseg)
    )
    overlap = size // 2 if noverlap is None else whole(name, "noverlap", noverlap)
    length = size if nfft is None else whole(name, "nfft", nfft)
    if not size > 0 or not 0 <= overlap < size or length < size:
        raise ValueError(
            f"{name}: noverlap must be from 0 to below nperseg, and nfft at least nperseg, got {overlap}, {size} "
            f"and {length}"
        )
    values = scipy.signal.get_window(window, size) if given is None else given
    dtype = DType.of(np.result_type(np.dtype(x.dtype), np.float32))
    rows = moveaxis(x, place, -1) if dtype is x.dtype else moveaxis(await x.cast(dtype), place, -1)
    step, none = size - overlap, ((0, 0),) * (x.ndim - 1)
    if padded:
        ends = size // 2
        more = -(count + 2 * ends - size) % step % size
        rows = await pad(rows, (*none, (ends, ends + more)))
    if rows.shape[-1] < size:
        raise ValueError(f"{name}: nperseg={size} must be at most the length of the signal, {rows.shape[-1]}")
    parts = sliding_window_view(rows, size, axis=-1)[..., ::step, :]
    tapered = values.astype(np.dtype(dtype).type(0).real.dtype)
    shown = await ((parts - mean(parts, axis=-1, keepdims=True)) * tapered if detrended else parts * tapered)
    return await (fft if dtype.kind == "complex" else rfft)(shown, length), values, step, length


def _frequencies(x: AccelRef, length: int, fs: float) -> _Host:
    return (np.fft.fftfreq if x.dtype.kind == "complex" else np.fft.rfftfreq)(length, 1 / fs)


@composed
async def welch(
    x: AccelRef,
    fs: float = 1.0,
    window: Window = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    detrend: Literal["constant", False] = "constant",
    scaling: Literal["density", "spectrum"] = "density",
    axis: int = -1,
) -> tuple[_Host, AccelRef]:
    """Estimate the power spectrum by the mean of those of segments, as `scipy.signal.welch`.

    Source: P. Welch, "The use of the fast Fourier transform for the estimation of power spectra", 1967.

    Args:
        x: The signals, real or complex.
        fs: Elements in a unit of time.
        window: The window of a segment, on the host.
        nperseg: Elements of a segment; by default 256, or all where there are fewer, or those of the window.
        noverlap: Elements that a segment shares with the next one; by default half of it.
        nfft: Elements of a transform; by default those of a segment.
        detrend: Whether the mean of each segment is subtracted.
        scaling: ``"density"`` for power in a unit of frequency, ``"spectrum"`` for power.
        axis: The axis of time.

    Returns:
        The frequencies, on the host, and the spectra, with frequencies along the axis: one-sided for real
        signals.

    Raises:
        TypeError: `x` is no array of a device.
        ValueError: There is no such axis or scaling, a segment is longer than the signal, or `noverlap` or
            `nfft` does not fit it.
    """
    if scaling not in ("density", "spectrum") or detrend not in ("constant", False):
        raise ValueError(
            f"welch: scaling must be 'density' or 'spectrum', and detrend 'constant' or False, got {scaling!r} "
            f"and {detrend!r}"
        )
    spectra, values, _, length = await _segments(
        "welch", x, window, nperseg, noverlap, nfft, axis, padded=False, detrended=bool(detrend)
    )
    weights = np.full(
        spectra.shape[-1], 1 / (fs * (values**2).sum() if scaling == "density" else values.sum() ** 2)
    )
    if x.dtype.kind != "complex":
        weights[1 : (length + 1) // 2] *= 2
    kind = np.dtype(spectra.dtype).type(0).real.dtype
    powers = await mean(_POWER(spectra, weights.astype(kind)), axis=-2)
    return _frequencies(x, length, fs), moveaxis(powers, -1, axis % x.ndim)


@composed
async def stft(
    x: AccelRef,
    fs: float = 1.0,
    window: Window = "hann",
    nperseg: int = 256,
    noverlap: int | None = None,
    nfft: int | None = None,
    axis: int = -1,
    scaling: Literal["spectrum", "psd"] = "spectrum",
) -> tuple[_Host, _Host, AccelRef]:
    """Compute the short-time Fourier transform, as `scipy.signal.stft` with zeros at the ends.

    Args:
        x: The signals, real or complex.
        fs: Elements in a unit of time.
        window: The window of a segment, on the host.
        nperseg: Elements of a segment.
        noverlap: Elements that a segment shares with the next one; by default half of it.
        nfft: Elements of a transform; by default those of a segment.
        axis: The axis of time.
        scaling: ``"spectrum"`` for magnitudes, ``"psd"`` for roots of a density.

    Returns:
        The frequencies and the times of segments, on the host; and the transforms, with frequencies along the
        axis and segments along the last one. One-sided for real signals.

    Raises:
        TypeError: `x` is no array of a device.
        ValueError: There is no such axis or scaling, or `noverlap` or `nfft` does not fit a segment.
    """
    if scaling not in ("spectrum", "psd"):
        raise ValueError(f"stft: scaling must be 'spectrum' or 'psd', got {scaling!r}")
    spectra, values, step, length = await _segments(
        "stft", x, window, nperseg if isinstance(window, (str, tuple)) else None, noverlap, nfft, axis,
        padded=True, detrended=False,
    )  # fmt: skip
    scale = 1 / values.sum() if scaling == "spectrum" else 1 / np.sqrt(fs * (values**2).sum())
    made = moveaxis(await (spectra * float(scale)), (-1, -2), (axis % x.ndim, -1))
    return _frequencies(x, length, fs), np.arange(spectra.shape[-2]) * step / fs, made


@composed
async def resample(x: AccelRef, num: int, axis: int = 0) -> AccelRef:
    """Resample a periodic signal by its Fourier transform, as `scipy.signal.resample` without a window.

    Args:
        x: The signals, real or complex.
        num: How many elements the axis gets.
        axis: The axis.

    Returns:
        The signals with `num` elements along the axis.

    Raises:
        TypeError: `x` is no array of a device, or `num` no whole number.
        ValueError: There is no such axis, it has no elements, or `num` is less than 1.
    """
    check_ref("resample", "x", x)
    place, size = axis_of("resample", x, axis), whole("resample", "num", num)
    count = x.shape[place]
    if size < 1 or not count:
        raise ValueError(
            f"resample: num must be at least 1, and the axis have elements, got {num} and {count}"
        )
    if x.dtype.kind == "complex":
        return await (resample(real(x), size, axis) + 1j * resample(imag(x), size, axis))
    spectrum = await rfft(x if x.dtype.kind == "float" else await x.cast("float64"), axis=place)
    both = min(size, count)
    # The highest frequency of the smaller length is its own opposite there, and one of two in the other.
    scale = np.full(spectrum.shape[place], size / count)
    if both % 2 == 0 and size != count:
        scale[both // 2] *= 2 if size < count else 0.5
    kind = np.dtype(spectrum.dtype).type(0).real.dtype
    shape = (-1, *(1,) * (x.ndim - 1 - place))
    return await irfft(spectrum * scale.astype(kind).reshape(shape), size, axis=place)
