"""Transforms along several axes, batched over the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs

from ..backends.base.ops import ArraySpec, FftNorm
from ..devices import AccelRef, Operand, Operation, Planned, Planner
from ._actor import FftActor
from ._asks import asks, several_axes, two_axes
from ._plan import HasTransform, check_axis, check_lengths, default_length, plan_transform, whole_numbers

__all__ = [
    "Fftn", "Hfftn", "Ifftn", "Ihfftn", "Irfftn", "Rfftn",
    "fft2", "fftn", "hfft2", "hfftn", "ifft2", "ifftn",
    "ihfft2", "ihfftn", "irfft2", "irfftn", "rfft2", "rfftn",
]  # fmt: skip


@attrs.define(eq=False, on_setattr=None)
class _SeveralAxes(HasTransform, Operation[FftActor, AccelRef]):
    """What the transforms along several axes share."""

    a: Operand
    s: Sequence[int] | None = None
    axes: Sequence[int] | None = None
    norm: FftNorm | None = None
    out: AccelRef | None = None
    library: ClassVar[str] = "trio_accel.fft:FftActor"

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the arguments and name the result."""
        name = planner.name
        source = planner.read("a", self.a)
        given = whole_numbers(name, "s", self.s)
        axes = _axes(name, source, whole_numbers(name, "axes", self.axes), given)
        lengths = self._lengths(name, source, axes, given)
        return plan_transform(planner, self.transform, source, axes, lengths, self.norm, self.out)

    def _lengths(
        self, name: str, source: ArraySpec, axes: tuple[int, ...], given: tuple[int, ...] | None
    ) -> tuple[int, ...]:
        if given is None:
            halved = axes[-1] if self.transform[0] == "c2r" else None
            return tuple(default_length(name, "s", source, axis, is_halved=axis == halved) for axis in axes)
        lengths = [
            default_length(name, "s", source, axis, is_halved=False) if length == -1 else length
            for axis, length in zip(axes, given, strict=True)
        ]
        check_lengths(name, "s", given, lengths)
        return tuple(lengths)


class Fftn(_SeveralAxes, transform=("c2c", "forward")):
    """Complex transform; see `fftn` and `fft2`."""


class Ifftn(_SeveralAxes, transform=("c2c", "inverse")):
    """Inverse complex transform; see `ifftn` and `ifft2`."""


class Rfftn(_SeveralAxes, transform=("r2c", "forward")):
    """Transform of a real array; see `rfftn` and `rfft2`."""


class Irfftn(_SeveralAxes, transform=("c2r", "inverse")):
    """Inverse transform to a real array; see `irfftn` and `irfft2`."""


class Hfftn(_SeveralAxes, transform=("c2r", "forward")):
    """Transform to a real spectrum; see `hfftn` and `hfft2`."""


class Ihfftn(_SeveralAxes, transform=("r2c", "inverse")):
    """Inverse transform of a real spectrum; see `ihfftn` and `ihfft2`."""


@asks(several_axes, Fftn)
def fftn() -> None:
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


@asks(two_axes, Fftn)
def fft2() -> None:
    """`fftn` along the last two axes, as `numpy.fft.fft2`."""


@asks(several_axes, Ifftn)
def ifftn() -> None:
    """Inverse discrete Fourier transform along several axes, as `numpy.fft.ifftn`.

    Arguments, result and errors are those of `fftn`.
    """


@asks(two_axes, Ifftn)
def ifft2() -> None:
    """`ifftn` along the last two axes, as `numpy.fft.ifft2`."""


@asks(several_axes, Rfftn)
def rfftn() -> None:
    """Fourier transform of a real array along several axes, as `numpy.fft.rfftn` (cuFFT ``R2C``, ``D2Z``).

    Arguments and errors are those of `fftn`; `a` is float32 or float64.

    Returns:
        The frequencies that are not negative along the last of `axes`, n of them being ``n // 2 + 1``
        elements; all frequencies along the others.
    """


@asks(two_axes, Rfftn)
def rfft2() -> None:
    """`rfftn` along the last two axes, as `numpy.fft.rfft2`."""


@asks(several_axes, Irfftn)
def irfftn() -> None:
    """Inverse of `rfftn`, as `numpy.fft.irfftn` (cuFFT ``C2R``, ``Z2D``).

    Arguments and errors are those of `fftn`; `s` is the shape of the real result along `axes`: by
    default that of `a`, and ``2 * (m - 1)`` along the last of them, where `a` has m frequencies.

    Returns:
        A real array.
    """


@asks(two_axes, Irfftn)
def irfft2() -> None:
    """`irfftn` along the last two axes, as `numpy.fft.irfft2`."""


@asks(several_axes, Hfftn)
def hfftn() -> None:
    """Fourier transform of an array with Hermitian symmetry, as `scipy.fft.hfftn`: its spectrum is real.

    Arguments and errors are those of `irfftn`.

    Returns:
        A real array.
    """


@asks(two_axes, Hfftn)
def hfft2() -> None:
    """`hfftn` along the last two axes, as `scipy.fft.hfft2`."""


@asks(several_axes, Ihfftn)
def ihfftn() -> None:
    """Inverse of `hfftn`, as `scipy.fft.ihfftn`.

    Arguments, result and errors are those of `rfftn`.
    """


@asks(two_axes, Ihfftn)
def ihfft2() -> None:
    """`ihfftn` along the last two axes, as `scipy.fft.ihfft2`."""


def _axes(
    name: str, source: ArraySpec, axes: tuple[int, ...] | None, given: tuple[int, ...] | None
) -> tuple[int, ...]:
    if axes is None:
        if given is not None and len(given) > source.ndim:
            raise ValueError(f"{name}: s must have a length for each axis, got {given} for {source.shape}")
        axes = tuple(range(-source.ndim if given is None else -len(given), 0))
    elif given is not None and len(given) != len(axes):
        raise ValueError(f"{name}: s must have a length for each of axes, got s {given} and axes {axes}")
    if not axes:
        raise ValueError(f"{name}: axes must name at least one axis, got none for a of shape {source.shape}")
    checked = tuple(check_axis(name, "axes:", axis, source) for axis in axes)
    if len(set(checked)) < len(checked):
        raise ValueError(f"{name}: axes must be distinct, got {axes} for a of shape {source.shape}")
    return checked
