"""Transforms along one axis, batched over the others."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ..backends.base.ops import FftNorm
from ..devices import AccelRef, Operand, Operation, Planned, Planner, device_of
from ._actor import FftActor
from ._plan import Transform, check_axis, check_lengths, default_length, plan_transform, whole_number

__all__ = [
    "Fft", "Hfft", "Ifft", "Ihfft", "Irfft", "Rfft",
    "fft", "hfft", "ifft", "ihfft", "irfft", "rfft",
]  # fmt: skip


@attrs.define(eq=False, on_setattr=None)
class _OneAxis(Operation[FftActor, AccelRef]):
    """What the transforms along one axis share."""

    a: Operand
    n: int | None = None
    axis: int = -1
    norm: FftNorm | None = None
    out: AccelRef | None = None
    library: ClassVar[str] = "trio_accel.fft:FftActor"
    transform: ClassVar[Transform]

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the arguments and name the result."""
        name = planner.name
        source = planner.read("a", self.a)
        axis = check_axis(name, "axis", whole_number(name, "axis", self.axis, "a whole number"), source)
        if self.n is None:
            n = default_length(name, "n", source, axis, is_halved=self.transform[0] == "c2r")
        else:
            n = whole_number(name, "n", self.n, "a whole number or None")
            check_lengths(name, "n", self.n, [n])
        return plan_transform(planner, self.transform, source, (axis,), (n,), self.norm, self.out)


@attrs.define(eq=False, on_setattr=None)
class Fft(_OneAxis):
    """Complex transform; see `fft`."""

    transform: ClassVar[Transform] = ("c2c", "forward")


@attrs.define(eq=False, on_setattr=None)
class Ifft(_OneAxis):
    """Inverse complex transform; see `ifft`."""

    transform: ClassVar[Transform] = ("c2c", "inverse")


@attrs.define(eq=False, on_setattr=None)
class Rfft(_OneAxis):
    """Transform of a real signal; see `rfft`."""

    transform: ClassVar[Transform] = ("r2c", "forward")


@attrs.define(eq=False, on_setattr=None)
class Irfft(_OneAxis):
    """Inverse transform to a real signal; see `irfft`."""

    transform: ClassVar[Transform] = ("c2r", "inverse")


@attrs.define(eq=False, on_setattr=None)
class Hfft(_OneAxis):
    """Transform to a real spectrum; see `hfft`."""

    transform: ClassVar[Transform] = ("c2r", "forward")


@attrs.define(eq=False, on_setattr=None)
class Ihfft(_OneAxis):
    """Inverse transform of a real spectrum; see `ihfft`."""

    transform: ClassVar[Transform] = ("r2c", "inverse")


async def fft(
    a: Operand,
    n: int | None = None,
    axis: int = -1,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Discrete Fourier transform along one axis, as `numpy.fft.fft` (cuFFT ``C2C``, ``Z2Z``).

    Args:
        a: Array of float32, float64, complex64 or complex128; real input is taken as complex.
        n: Length of the transform; the axis is cut or padded with zeros to it. By default its length.
        axis: Axis to transform; the others are a batch.
        norm: ``"backward"`` (default), ``"ortho"`` or ``"forward"``, as in NumPy.
        out: Array of the result's shape and dtype to write to; by default a new one.

    Returns:
        The spectrum: the shape of `a` with `n` elements along `axis`, in the complex dtype of
        the same precision.

    Raises:
        ValueError: A length below 1, an axis that is not there, an unknown norm, a wrong `out`.
        TypeError: Not on a device, or a dtype without a transform.

    See `Device.ask` for cancellation and the errors that any operation can end with.
    """
    return await device_of("fft", a, out).ask(Fft(a, n, axis, norm, out))


async def ifft(
    a: Operand,
    n: int | None = None,
    axis: int = -1,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Inverse discrete Fourier transform along one axis, as `numpy.fft.ifft`.

    Arguments, result and errors are those of `fft`.
    """
    return await device_of("ifft", a, out).ask(Ifft(a, n, axis, norm, out))


async def rfft(
    a: Operand,
    n: int | None = None,
    axis: int = -1,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Fourier transform of a real array along one axis, as `numpy.fft.rfft` (cuFFT ``R2C``, ``D2Z``).

    Arguments and errors are those of `fft`; `a` is float32 or float64.

    Returns:
        The non-negative frequencies: ``n // 2 + 1`` elements along `axis`.
    """
    return await device_of("rfft", a, out).ask(Rfft(a, n, axis, norm, out))


async def irfft(
    a: Operand,
    n: int | None = None,
    axis: int = -1,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Inverse of `rfft`, as `numpy.fft.irfft` (cuFFT ``C2R``, ``Z2D``).

    Arguments and errors are those of `fft`; `a` holds the non-negative frequencies, and `n` is the
    length of the real result: by default ``2 * (m - 1)`` for m frequencies.

    Returns:
        A real array with `n` elements along `axis`.
    """
    return await device_of("irfft", a, out).ask(Irfft(a, n, axis, norm, out))


async def hfft(
    a: Operand,
    n: int | None = None,
    axis: int = -1,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Fourier transform of a signal with Hermitian symmetry, as `numpy.fft.hfft`: its spectrum is real.

    Arguments and errors are those of `fft`; `a` holds the half of the signal from time 0 on, and `n`
    is the length of the real result: by default ``2 * (m - 1)`` for m elements.

    Returns:
        A real array with `n` elements along `axis`.
    """
    return await device_of("hfft", a, out).ask(Hfft(a, n, axis, norm, out))


async def ihfft(
    a: Operand,
    n: int | None = None,
    axis: int = -1,
    norm: FftNorm | None = None,
    *,
    out: AccelRef | None = None,
) -> AccelRef:
    """Inverse of `hfft`, as `numpy.fft.ihfft`.

    Arguments and errors are those of `fft`; `a` is float32 or float64.

    Returns:
        The half of the signal from time 0 on: ``n // 2 + 1`` complex elements along `axis`.
    """
    return await device_of("ihfft", a, out).ask(Ihfft(a, n, axis, norm, out))
