"""Spectra of a signal's segments, and resampled signals: windows, transforms, and their evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ..actors import run_in_thread
from ..arrays import imag, mean, moveaxis, pad, real, sliding_window_view
from ..arrays._checks import check_number
from ..backends.base import DType, HostArray
from ..backends.base.kit.modules import import_alone
from ..devices import AccelRef, bounded_integer, composed
from ..expressions import Elementwise, axis_of, check_ref
from ..fft import fft, irfft, rfft

__all__ = ["SpectrumScaling", "Window", "resample", "stft", "welch"]

Window: TypeAlias = str | tuple[Any, ...] | HostArray
"""A window by the names of `scipy.signal.get_window`, or its values on the host."""

SpectrumScaling: TypeAlias = Literal["density", "spectrum"]
"""Power in a unit of frequency, or power."""

# One-sided spectra include the power of negative frequencies: of all up to `half`, except 0.
_POWER = Elementwise[AccelRef](
    "p = abs(x) ** 2 * factor; out = where(i(-1) > 0 and i(-1) < half, 2 * p, p)",
    inputs=("x", "factor", "half"),
    operation="signal.power",
)


@functools.cache
def _scipy_windows() -> Callable[..., HostArray]:
    """Return SciPy's function of windows by name. The first call takes a second, because it imports SciPy."""
    return cast("Callable[..., HostArray]", import_alone("scipy.signal").get_window)


async def _load_windows(window: object) -> None:
    """Let a thread import SciPy's windows at the first use of a name, so that the loop is not held."""
    if isinstance(window, (str, tuple)) and not _scipy_windows.cache_info().currsize:
        await run_in_thread(_scipy_windows)


def _segments(
    name: str,
    x: Any,
    fs: float,
    window: Window,
    axis: int,
    lengths: tuple[int | None, int | None, int | None],
    scaling: str,
    *,
    is_padded: bool,
    is_detrended: bool,
) -> tuple[Any, float, int, int, Callable[[], tuple[HostArray, HostArray]]]:
    """Make the call that transforms the segments of a signal.

    Args:
        name: The function.
        x: The signals, an array or a call.
        fs: Elements in a unit of time.
        window: The window.
        axis: The axis of time.
        lengths: Elements of a segment, of its overlap with the next one, and of a transform.
        scaling: One of `SpectrumScaling`.
        is_padded: Whether there are zeros at the ends.
        is_detrended: Whether the mean of each segment is subtracted.

    Returns:
        The transforms, with the axis of segments and then the axis of frequencies last; the factor of powers;
        the frequency up to which they count twice; the axis; and a function that makes frequencies and times.
        These are host arrays as long as the transforms, which may exceed memory.
    """
    axis_index = axis_of(name, x, axis)
    count: int = x.shape[axis_index]
    nperseg, noverlap, nfft = lengths
    rate = float(check_number(name, "fs", fs, is_real=True))
    window_length = min(256, count) if nperseg is None else bounded_integer(name, "nperseg", nperseg)
    if not 0 < rate < np.inf or not 0 < window_length <= count:
        raise ValueError(
            f"{name}: fs must be above 0, and nperseg from 1 to the {count} elements of the signal, got "
            f"{rate} and {window_length}"
        )
    if isinstance(window, (str, tuple)):
        window = _scipy_windows()(window, window_length)
    window = np.asarray(window)
    size, is_real = window.size, x.dtype.kind != "complex"
    overlap = size // 2 if noverlap is None else bounded_integer(name, "noverlap", noverlap)
    length = size if nfft is None else bounded_integer(name, "nfft", nfft)
    if scaling not in ("density", "spectrum"):
        raise ValueError(f"{name}: scaling must be 'density' or 'spectrum', got {scaling!r}")
    if window.shape != (nperseg or size,) or not 0 <= overlap < size <= min(length, count):
        raise ValueError(
            f"{name}: window must have nperseg={nperseg} elements, and no more than the signal, noverlap "
            f"fewer, and nfft as many or more, got {window.shape}, {overlap} and {length}"
        )
    dtype = DType.of(np.result_type(x.dtype.dtype, np.float32))
    rows: Any = moveaxis(x.cast(dtype), axis_index, -1)
    step, ends = size - overlap, size // 2
    if is_padded:
        padding = -(count + 2 * ends - size) % step % size
        rows, count = (
            pad(rows, (*((0, 0),) * (x.ndim - 1), (ends, ends + padding))),
            count + 2 * ends + padding,
        )
    parts: Any = sliding_window_view(rows, size, axis=-1)[..., ::step, :]
    kind = dtype.dtype.type(0).real.dtype
    taper = window.astype(kind)
    shown = (parts - mean(parts, axis=-1, keepdims=True) if is_detrended else parts) * taper
    spectra: Any = (rfft if is_real else fft)(shown, length)
    with np.errstate(all="ignore"):
        power = rate * (window**2).sum() if scaling == "density" else window.sum() ** 2
        factor = float(1 / power)

    def axes() -> tuple[HostArray, HostArray]:
        times: Any = np.arange((count - size) // step + 1) * step + (0 if is_padded else size / 2)
        return (np.fft.rfftfreq if is_real else np.fft.fftfreq)(length, 1 / rate), times / rate

    return spectra, factor, (length + 1) // 2 if is_real else 0, axis_index, axes


@composed
async def welch(
    x: AccelRef,
    fs: float = 1.0,
    window: Window = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    detrend: Literal["constant", False] = "constant",
    *,
    scaling: SpectrumScaling = "density",
    axis: int = -1,
) -> tuple[npt.NDArray[Any], AccelRef]:
    """Estimate the power spectrum as the mean over segments, as `scipy.signal.welch`.

    Source: P. Welch, "The use of the fast Fourier transform for the estimation of power spectra", 1967.

    Args:
        x: The signals, real or complex.
        fs: Elements in a unit of time.
        window: The window of a segment, on the host.
        nperseg: Elements of a segment; by default 256, or fewer if the signal is shorter, or the length of
            the window.
        noverlap: Elements that a segment shares with the next one; by default half of it.
        nfft: Elements of a transform; by default as many as in a segment.
        detrend: ``"constant"`` to subtract the mean of each segment; False for nothing.
        scaling: See `SpectrumScaling`.
        axis: The axis of time.

    Returns:
        The frequencies, on the host, and the spectra, with frequencies along the axis: one-sided for real
        signals.

    Raises:
        TypeError: `x` is not an array of a device.
        ValueError: The axis is out of range, scaling or detrending, a segment is longer than the signal, or
            `noverlap` or `nfft` does not fit it.
    """
    check_ref("welch", "x", x)
    await _load_windows(window)
    spectra, axes = welch_of(x, fs, window, nperseg, noverlap, nfft, detrend, scaling=scaling, axis=axis)
    power = await spectra
    return axes()[0], power


def welch_of(
    x: Any,
    fs: float,
    window: Window,
    nperseg: int | None,
    noverlap: int | None,
    nfft: int | None,
    detrend: Literal["constant", False],
    *,
    scaling: SpectrumScaling,
    axis: int,
) -> tuple[Any, Callable[[], tuple[HostArray, HostArray]]]:
    """Return the call that makes the spectra of `welch`, and a function for frequencies and times."""
    if detrend not in ("constant", False):
        raise ValueError(f"welch: detrend must be 'constant' or False, got {detrend!r}")
    spectra, factor, half, axis_index, axes = _segments(
        "welch",
        x,
        fs,
        window,
        axis,
        (nperseg, noverlap, nfft),
        scaling,
        is_padded=False,
        is_detrended=bool(detrend),
    )
    power: Any = mean(_POWER(spectra, factor, half), axis=-2)
    return moveaxis(power, -1, axis_index), axes


@composed
async def stft(
    x: AccelRef,
    fs: float = 1.0,
    window: Window = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    *,
    axis: int = -1,
    scaling: SpectrumScaling = "spectrum",
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], AccelRef]:
    """Compute the short-time Fourier transform, as `scipy.signal.stft` with zeros at the ends.

    Args:
        x: The signals, real or complex.
        fs: Elements in a unit of time.
        window: The window of a segment, on the host.
        nperseg: Elements of a segment; by default 256, or fewer if the signal is shorter, or the length of
            the window.
        noverlap: Elements that a segment shares with the next one; by default half of it.
        nfft: Elements of a transform; by default as many as in a segment.
        axis: The axis of time.
        scaling: See `SpectrumScaling`, which applies to the squares of the transforms. SciPy's name for a
            density is "psd".

    Returns:
        The frequencies and the times of segments, on the host; and the transforms, with frequencies along the
        axis and segments along the last one. One-sided for real signals.

    Raises:
        TypeError: `x` is not an array of a device.
        ValueError: The axis is out of range or scaling, or `noverlap` or `nfft` does not fit a segment.
    """
    check_ref("stft", "x", x)
    await _load_windows(window)
    spectra, axes = stft_of(x, fs, window, nperseg, noverlap, nfft, axis=axis, scaling=scaling)
    transforms = await spectra
    return *axes(), transforms


def stft_of(
    x: Any,
    fs: float,
    window: Window,
    nperseg: int | None,
    noverlap: int | None,
    nfft: int | None,
    *,
    axis: int,
    scaling: SpectrumScaling,
) -> tuple[Any, Callable[[], tuple[HostArray, HostArray]]]:
    """Return the call that makes the transforms of `stft`, and a function for frequencies and times."""
    spectra, factor, _, axis_index, axes = _segments(
        "stft", x, fs, window, axis, (nperseg, noverlap, nfft), scaling, is_padded=True, is_detrended=False
    )
    return moveaxis(spectra * factor**0.5, (-1, -2), (axis_index, -1)), axes


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
        TypeError: `x` is not an array of a device, or `num` is not an integer.
        ValueError: The axis is out of range, it has no elements, or `num` is less than 1.
    """
    check_ref("resample", "x", x)
    axis_index, size = axis_of("resample", x, axis), bounded_integer("resample", "num", num)
    count = x.shape[axis_index]
    if size < 1 or not count:
        raise ValueError(f"resample: num must be at least 1, and the axis not empty, got {num} for {count}")
    if x.dtype.kind == "complex":
        # It is linear, with real coefficients.
        parts = [await _resampled(await part(x), size, axis_index) for part in (real, imag)]
        return await (parts[0] + 1j * parts[1])
    return await _resampled(x if x.dtype.kind == "float" else await x.cast("float64"), size, axis_index)


async def _resampled(x: AccelRef, size: int, axis_index: int) -> AccelRef:
    spectrum, count = await rfft(x, axis=axis_index), x.shape[axis_index]
    scale = np.full(
        (spectrum.shape[axis_index], *(1,) * (x.ndim - 1 - axis_index)), size / count, x.dtype.dtype
    )
    # The highest frequency of the smaller length is its own opposite there, and one of two in the other.
    if min(size, count) % 2 == 0 and size != count:
        scale[min(size, count) // 2] *= 2 if size < count else 0.5
    return await irfft(spectrum * scale, size, axis=axis_index)
