"""What all transforms check, how they become one specification, and the actor that serves them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, SupportsIndex

import attrs

from ..backends.base import DType, ops
from ..backends.base.ops import ArraySpec, FftDirection, FftKind
from ..devices import AccelRef, LibraryActor, Planned, Planner

__all__ = ["FftActor", "Transform"]

_NUMBERS = "a sequence of whole numbers, or None"


class FftActor(LibraryActor):
    """Serves Fourier transforms, on a stream of its own.

    CPU backend: SciPy's pocketfft. CUDA: cuFFT.
    """

    library = "fft"


@attrs.frozen
class Transform:
    """A transform, as both libraries call it; see `FftSpec`."""

    kind: FftKind
    direction: FftDirection

    def plan_one_axis(self, message: Any, planner: Planner) -> Planned[AccelRef]:
        """Check a message with `n` and `axis`, and name the result."""
        name, source = planner.name, planner.read("a", message.a)
        axis = _axis(name, "axis", _whole(name, "axis", message.axis, "a whole number"), source)
        given = None if message.n is None else [_whole(name, "n", message.n, "a whole number or None")]
        return self._plan(message, planner, "n", source, (axis,), given)

    def plan_several_axes(self, message: Any, planner: Planner) -> Planned[AccelRef]:
        """Check a message with `s` and `axes`, and name the result."""
        name, source = planner.name, planner.read("a", message.a)
        given = _all_whole(name, "s", message.s)
        axes = _axes(name, source, _all_whole(name, "axes", message.axes), given)
        lengths = given and [
            _extent(name, axis, source) if n == -1 else n for axis, n in zip(axes, given, strict=True)
        ]
        return self._plan(message, planner, "s", source, axes, lengths)

    def _plan(
        self,
        message: Any,
        planner: Planner,
        argument: str,
        source: ArraySpec,
        axes: tuple[int, ...],
        given: Sequence[int] | None,
    ) -> Planned[AccelRef]:
        """Check what is left to check, and name the result; axes are checked."""
        name, kind, norm, out = planner.name, self.kind, message.norm, message.out
        lengths = tuple(given or self._default_lengths(name, argument, source, axes))
        if min(lengths) < 1:
            raise ValueError(f"{name}: {argument} must be at least 1, got {getattr(message, argument)}")
        if norm not in (None, "backward", "ortho", "forward"):
            raise ValueError(f"{name}: norm must be 'backward', 'ortho' or 'forward', got {norm!r}")
        shape = ops.transformed_shape(source.shape, axes, lengths, is_halved=kind == "r2c")
        # Libraries have the other kinds for complex input alone.
        taken = source.dtype if kind == "r2c" else ops.complex_of(source.dtype)
        dtype = ops.FFT_DTYPES[kind].get(taken)
        if dtype is None:
            self._refuse(name, source.dtype)
        result = planner.output(shape, dtype, out)
        if out is not None:
            planner.distinct("out", result.spec, a=source)
        if taken is not source.dtype:
            source = planner.convert(source, taken)
        spec = ops.FftSpec(kind, self.direction, lengths, axes, norm or "backward", source, result.spec)
        return Planned(spec, result, is_checked=True)

    def _default_lengths(
        self, name: str, argument: str, source: ArraySpec, axes: tuple[int, ...]
    ) -> list[int]:
        """Lengths where the caller gave none; the last axis may hold half of the frequencies."""
        lengths = [_extent(name, axis, source) for axis in axes]
        if self.kind == "c2r":
            lengths[-1] = 2 * (lengths[-1] - 1)
            if not lengths[-1]:
                raise ValueError(
                    f"{name}: {argument}: 1 frequency says nothing of the length of the result; "
                    f"give {argument}"
                )
        return lengths

    def _refuse(self, name: str, dtype: DType) -> NoReturn:
        if self.kind == "r2c" and dtype.kind == "complex":
            instead = "fft" if self.direction == "forward" else "ifft"
            raise TypeError(f"{name}: a must be real, got {dtype}; use {instead}")
        allowed = "float32 or float64" if self.kind == "r2c" else "float32, float64, complex64 or complex128"
        raise TypeError(f"{name}: a must be {allowed}, got {dtype}; use cast()")


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


def _extent(name: str, axis: int, source: ArraySpec) -> int:
    """Length of an axis along which the caller gave none."""
    extent = source.shape[axis]
    if extent == 0:
        raise ValueError(f"{name}: axis {axis} of a has no elements (shape {source.shape})")
    return extent


def _whole(name: str, argument: str, value: object, allowed: str) -> int:
    """Take what is a whole number, of Python's or NumPy's, and nothing else."""
    if type(value) is int:
        # To ask whether it has a method takes longer than the rest of a plan.
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name}: {argument} must be {allowed}, got {value!r}")
    return operator.index(value)


def _all_whole(name: str, argument: str, values: Iterable[object] | None) -> tuple[int, ...] | None:
    if values is None:
        return None
    if not isinstance(values, Iterable):
        raise TypeError(f"{name}: {argument} must be {_NUMBERS}, got {values!r}")
    return tuple(_whole(name, argument, value, _NUMBERS) for value in values)
