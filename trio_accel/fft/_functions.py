"""Functions that ask for transforms along several axes."""

from __future__ import annotations

from collections.abc import Sequence

from ..backends.base.ops import FftNorm
from ..devices import AccelRef, Operand, device_of
from ._several_axes import Fftn, Hfftn, Ifftn, Ihfftn, Irfftn, Rfftn

__all__ = [
    "fft2", "fftn", "hfft2", "hfftn", "ifft2", "ifftn",
    "ihfft2", "ihfftn", "irfft2", "irfftn", "rfft2", "rfftn",
]  # fmt: skip


async def fftn(
    a: Operand,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Discrete Fourier transform along several axes, as `numpy.fft.fftn` (cuFFT ``C2C``, ``Z2Z``).

    Args:
        a: Array of float32, float64, complex64 or complex128; real input is taken as complex.
        s: Length of the transform along each of `axes`, which are cut or padded with zeros to it; -1
            is the length that `a` has there. By default the shape of `a`. Without `axes` it is for the
            last axes.
        axes: Axes to transform, distinct; the others are a batch. By default all, or the last ``len(s)``.
        norm: ``"backward"`` (default), ``"ortho"`` or ``"forward"``, as in NumPy; it scales by the
            product of the lengths.
        out: Array of the result's shape and dtype to write to; by default a new one.

    Returns:
        The spectrum: the shape of `a` with `s` along `axes`, in the complex dtype of the same precision.

    Raises:
        ValueError: A length below 1, an axis that is not there or is named twice, no axis, not one
            length for each axis, an unknown norm, a wrong `out`.
        TypeError: Not on a device, or a dtype without a transform.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    return await device_of("fftn", a, out).ask(Fftn(a, s, axes, norm, out))


async def fft2(
    a: Operand,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = (-2, -1),
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """`fftn` along the last two axes, as `numpy.fft.fft2`."""
    return await device_of("fft2", a, out).ask(Fftn(a, s, axes, norm, out))


async def ifftn(
    a: Operand,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Inverse discrete Fourier transform along several axes, as `numpy.fft.ifftn`.

    Arguments, result and errors are those of `fftn`.
    """
    return await device_of("ifftn", a, out).ask(Ifftn(a, s, axes, norm, out))


async def ifft2(
    a: Operand,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = (-2, -1),
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """`ifftn` along the last two axes, as `numpy.fft.ifft2`."""
    return await device_of("ifft2", a, out).ask(Ifftn(a, s, axes, norm, out))


async def rfftn(
    a: Operand,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Fourier transform of a real array along several axes, as `numpy.fft.rfftn` (cuFFT ``R2C``, ``D2Z``).

    Arguments and errors are those of `fftn`; `a` is float32 or float64.

    Returns:
        The frequencies that are not negative along the last of `axes`, n of them being ``n // 2 + 1``
        elements; all frequencies along the others.
    """
    return await device_of("rfftn", a, out).ask(Rfftn(a, s, axes, norm, out))


async def rfft2(
    a: Operand,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = (-2, -1),
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """`rfftn` along the last two axes, as `numpy.fft.rfft2`."""
    return await device_of("rfft2", a, out).ask(Rfftn(a, s, axes, norm, out))


async def irfftn(
    a: Operand,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Inverse of `rfftn`, as `numpy.fft.irfftn` (cuFFT ``C2R``, ``Z2D``).

    Arguments and errors are those of `fftn`; `s` is the shape of the real result along `axes`: by
    default that of `a`, and ``2 * (m - 1)`` along the last of them, where `a` has m frequencies.

    Returns:
        A real array.
    """
    return await device_of("irfftn", a, out).ask(Irfftn(a, s, axes, norm, out))


async def irfft2(
    a: Operand,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = (-2, -1),
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """`irfftn` along the last two axes, as `numpy.fft.irfft2`."""
    return await device_of("irfft2", a, out).ask(Irfftn(a, s, axes, norm, out))


async def hfftn(
    a: Operand,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Fourier transform of an array with Hermitian symmetry, as `scipy.fft.hfftn`: its spectrum is real.

    Arguments and errors are those of `irfftn`.

    Returns:
        A real array.
    """
    return await device_of("hfftn", a, out).ask(Hfftn(a, s, axes, norm, out))


async def hfft2(
    a: Operand,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = (-2, -1),
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """`hfftn` along the last two axes, as `scipy.fft.hfft2`."""
    return await device_of("hfft2", a, out).ask(Hfftn(a, s, axes, norm, out))


async def ihfftn(
    a: Operand,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Inverse of `hfftn`, as `scipy.fft.ihfftn`.

    Arguments, result and errors are those of `rfftn`.
    """
    return await device_of("ihfftn", a, out).ask(Ihfftn(a, s, axes, norm, out))


async def ihfft2(
    a: Operand,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = (-2, -1),
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """`ihfftn` along the last two axes, as `scipy.fft.ihfft2`."""
    return await device_of("ihfft2", a, out).ask(Ihfftn(a, s, axes, norm, out))
