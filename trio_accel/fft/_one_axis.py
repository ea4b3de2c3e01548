"""Transforms along one axis, batched over the others."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ..backends.base.ops import FftNorm
from ..devices import AccelRef, Operand, Operation, Planned, Planner
from ._actor import FftActor
from ._asks import asks, one_axis
from ._plan import HasTransform, check_axis, check_lengths, default_length, plan_transform, whole_number

__all__ = [
    "Fft", "Hfft", "Ifft", "Ihfft", "Irfft", "Rfft",
    "fft", "hfft", "ifft", "ihfft", "irfft", "rfft",
]  # fmt: skip


@attrs.define(eq=False, on_setattr=None)
class _OneAxis(HasTransform, Operation[FftActor, AccelRef]):
    """What the transforms along one axis share."""

    a: Operand
    n: int | None = None
    axis: int = -1
    norm: FftNorm | None = None
    out: AccelRef | None = None
    library: ClassVar[str] = "trio_accel.fft:FftActor"

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


class Fft(_OneAxis, transform=("c2c", "forward")):
    """Complex transform; see `fft`."""


class Ifft(_OneAxis, transform=("c2c", "inverse")):
    """Inverse complex transform; see `ifft`."""


class Rfft(_OneAxis, transform=("r2c", "forward")):
    """Transform of a real signal; see `rfft`."""


class Irfft(_OneAxis, transform=("c2r", "inverse")):
    """Inverse transform to a real signal; see `irfft`."""


class Hfft(_OneAxis, transform=("c2r", "forward")):
    """Transform to a real spectrum; see `hfft`."""


class Ihfft(_OneAxis, transform=("r2c", "inverse")):
    """Inverse transform of a real spectrum; see `ihfft`."""


@asks(one_axis, Fft)
def fft() -> None:
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


@asks(one_axis, Ifft)
def ifft() -> None:
    """Inverse discrete Fourier transform along one axis, as `numpy.fft.ifft`.

    Arguments, result and errors are those of `fft`.
    """


@asks(one_axis, Rfft)
def rfft() -> None:
    """Fourier transform of a real array along one axis, as `numpy.fft.rfft` (cuFFT ``R2C``, ``D2Z``).

    Arguments and errors are those of `fft`; `a` is float32 or float64.

    Returns:
        The non-negative frequencies: ``n // 2 + 1`` elements along `axis`.
    """


@asks(one_axis, Irfft)
def irfft() -> None:
    """Inverse of `rfft`, as `numpy.fft.irfft` (cuFFT ``C2R``, ``Z2D``).

    Arguments and errors are those of `fft`; `a` holds the non-negative frequencies, and `n` is the
    length of the real result: by default ``2 * (m - 1)`` for m frequencies.

    Returns:
        A real array with `n` elements along `axis`.
    """


@asks(one_axis, Hfft)
def hfft() -> None:
    """Fourier transform of a signal with Hermitian symmetry, as `numpy.fft.hfft`: its spectrum is real.

    Arguments and errors are those of `fft`; `a` holds the half of the signal from time 0 on, and `n`
    is the length of the real result: by default ``2 * (m - 1)`` for m elements.

    Returns:
        A real array with `n` elements along `axis`.
    """


@asks(one_axis, Ihfft)
def ihfft() -> None:
    """Inverse of `hfft`, as `numpy.fft.ihfft`.

    Arguments and errors are those of `fft`; `a` is float32 or float64.

    Returns:
        The half of the signal from time 0 on: ``n // 2 + 1`` complex elements along `axis`.
    """
