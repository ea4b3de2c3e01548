"""Messages: which transform of what, what all transforms check, and how they become one specification."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import ClassVar, SupportsIndex, TypeAlias

import attrs

from ..backends.base import DType, ops
from ..backends.base.checks import NATIVE
from ..backends.base.ops import ArraySpec, FftNorm
from ..devices import AccelRef, LibraryActor, Operand, Operation, Planned, Planner

__all__ = [
    "Fft", "FftActor", "Fftn", "Hfft", "Hfftn", "Ifft", "Ifftn",
    "Ihfft", "Ihfftn", "Irfft", "Irfftn", "Rfft", "Rfftn",
]  # fmt: skip

_Transform: TypeAlias = tuple[ops.FftKind, ops.FftDirection]


class FftActor(LibraryActor):
    """Serves Fourier transforms, on a stream of its own.

    CPU backend: SciPy's pocketfft. CUDA: cuFFT.
    """

    library = "fft"


class _Message:
    """What all messages share: ``class Fft(..., transform=("c2c", "forward"))``."""

    __slots__ = ()

    library: ClassVar[str] = "trio_accel.fft:FftActor"
    transform: ClassVar[_Transform]

    def __init_subclass__(cls, transform: _Transform | None = None) -> None:
        super().__init_subclass__()
        if transform is not None:
            cls.transform = transform


@attrs.define(eq=False, on_setattr=None)
class _OneAxis(_Message, Operation[FftActor, AccelRef]):
    """What the transforms along one axis share."""

    a: Operand
    n: int | None = None
    axis: int = -1
    norm: FftNorm | None = None
    out: AccelRef | None = None

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the arguments and name the result."""
        name, source = planner.name, planner.read("a", self.a)
        axis = _axis(name, "axis", _whole_number(name, "axis", self.axis, "a whole number"), source)
        if self.n is None:
            n = _default_length(name, "n", source, axis, is_halved=self.transform[0] == "c2r")
        else:
            n = _whole_number(name, "n", self.n, "a whole number or None")
            _check_lengths(name, "n", n, n)
        return _planned(planner, self.transform, source, (axis,), (n,), self.norm, self.out)


@attrs.define(eq=False, on_setattr=None)
class _SeveralAxes(_Message, Operation[FftActor, AccelRef]):
    """What the transforms along several axes share."""

    a: Operand
    s: Sequence[int] | None = None
    axes: Sequence[int] | None = None
    norm: FftNorm | None = None
    out: AccelRef | None = None

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the arguments and name the result."""
        name, source, kind = planner.name, planner.read("a", self.a), self.transform[0]
        given = _whole_numbers(name, "s", self.s)
        axes = _axes(name, source, _whole_numbers(name, "axes", self.axes), given)
        halved = axes[-1] if kind == "c2r" and given is None else None
        lengths = tuple([
            _default_length(name, "s", source, axis, is_halved=axis == halved) if length == -1 else length
            for axis, length in zip(axes, given or (-1,) * len(axes), strict=True)
        ])  # fmt: skip
        _check_lengths(name, "s", given, *lengths)
        return _planned(planner, self.transform, source, axes, lengths, self.norm, self.out)


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


def _planned(
    planner: Planner,
    transform: _Transform,
    source: ArraySpec,
    axes: tuple[int, ...],
    lengths: tuple[int, ...],
    norm: FftNorm | None,
    out: AccelRef | None,
) -> Planned[AccelRef]:
    """Check what is left to check, and name the result; axes and lengths are checked."""
    name, (kind, direction) = planner.name, transform
    if norm not in (None, "backward", "ortho", "forward"):
        raise ValueError(f"{name}: norm must be 'backward', 'ortho' or 'forward', got {norm!r}")
    shape = ops.transformed_shape(source.shape, axes, lengths, is_halved=kind == "r2c")
    result = planner.output(shape, _result_dtype(name, transform, source.dtype), out)
    if out is not None:
        planner.distinct("out", result.spec, a=source)
    if kind != "r2c" and source.dtype.kind == "float":
        # Libraries have these transforms for complex input alone.
        source = planner.convert(source, ops.complex_of(source.dtype))
    spec = ops.FftSpec(kind, direction, lengths, axes, norm or "backward", source, result.spec)
    return Planned(spec, result)


def _result_dtype(name: str, transform: _Transform, dtype: DType) -> DType:
    kind, direction = transform
    if kind == "r2c" and dtype.kind == "complex":
        instead = "fft" if direction == "forward" else "ifft"
        raise TypeError(f"{name}: a must be real, got {dtype}; use {instead}")
    if dtype not in NATIVE:
        allowed = "float32 or float64" if kind == "r2c" else "float32, float64, complex64 or complex128"
        raise TypeError(f"{name}: a must be {allowed}, got {dtype}; use cast()")
    return ops.real_of(dtype) if kind == "c2r" else ops.complex_of(dtype)


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
    checked = tuple(_axis(name, "axes:", axis, source) for axis in axes)
    if len(set(checked)) < len(checked):
        raise ValueError(f"{name}: axes must be distinct, got {axes} for a of shape {source.shape}")
    return checked


def _axis(name: str, argument: str, axis: int, source: ArraySpec) -> int:
    """Take an axis counted from either end to one counted from the first."""
    ndim = len(source.shape)
    if not -ndim <= axis < ndim:
        raise ValueError(f"{name}: {argument} {axis} is not there in an array of shape {source.shape}")
    return axis % ndim


def _default_length(name: str, argument: str, source: ArraySpec, axis: int, *, is_halved: bool) -> int:
    """Length along an axis where the caller gave none; a halved axis holds half of the frequencies."""
    extent = source.shape[axis]
    if extent == 0:
        raise ValueError(f"{name}: axis {axis} of a has no elements (shape {source.shape})")
    if is_halved and extent == 1:
        raise ValueError(
            f"{name}: {argument}: 1 frequency says nothing of the length of the result; give {argument}"
        )
    return 2 * (extent - 1) if is_halved else extent


def _check_lengths(name: str, argument: str, given: object, *lengths: int) -> None:
    if min(lengths) < 1:
        raise ValueError(f"{name}: {argument} must be at least 1, got {given}")


def _whole_number(name: str, argument: str, value: object, allowed: str) -> int:
    """Take what is a whole number, of Python's or NumPy's, and nothing else."""
    if type(value) is int:
        # To ask whether it has a method takes longer than the rest of a plan.
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name}: {argument} must be {allowed}, got {value!r}")
    return operator.index(value)


def _whole_numbers(name: str, argument: str, values: Iterable[object] | None) -> tuple[int, ...] | None:
    if values is None:
        return None
    allowed = "a sequence of whole numbers, or None"
    if not isinstance(values, Iterable):
        raise TypeError(f"{name}: {argument} must be {allowed}, got {values!r}")
    return tuple(_whole_number(name, argument, value, allowed) for value in values)
