"""What all transforms check, and how they become one specification."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import ClassVar, SupportsIndex, TypeAlias

from ..backends.base import DType
from ..backends.base.ops import ArraySpec, FftDirection, FftKind, FftNorm, FftSpec, transformed_shape
from ..devices import AccelRef, Planned, Planner

__all__ = [
    "HasTransform",
    "check_axis",
    "check_lengths",
    "default_length",
    "plan_transform",
    "whole_number",
    "whole_numbers",
]

_COMPLEX = {
    DType.float32: DType.complex64,
    DType.float64: DType.complex128,
    DType.complex64: DType.complex64,
    DType.complex128: DType.complex128,
}
_REAL = {DType.complex64: DType.float32, DType.complex128: DType.float64}

Transform: TypeAlias = tuple[FftKind, FftDirection]


class HasTransform:
    """What a class of messages is given: ``class Fft(..., transform=("c2c", "forward"))``."""

    __slots__ = ()

    transform: ClassVar[Transform]

    def __init_subclass__(cls, transform: Transform | None = None) -> None:
        super().__init_subclass__()
        if transform is not None:
            cls.transform = transform


def plan_transform(
    planner: Planner,
    transform: Transform,
    source: ArraySpec,
    axes: tuple[int, ...],
    lengths: tuple[int, ...],
    norm: FftNorm | None,
    out: AccelRef | None,
) -> Planned[AccelRef]:
    """Check what is left to check, and name the result.

    Args:
        planner: Planner of the operation.
        transform: Kind and direction.
        source: What is transformed.
        axes: Axes, checked.
        lengths: Length along each of them, checked; of the real side where one side is real.
        norm: Scaling, not checked.
        out: Where the caller wants the result, not checked.
    """
    name = planner.name
    kind, direction = transform
    scaling = _norm(name, norm)
    shape = transformed_shape(source.shape, axes, lengths, is_halved=kind == "r2c")
    result = planner.output(shape, _result_dtype(name, transform, source.dtype), out)
    if out is not None:
        planner.distinct("out", result.spec, a=source)
    if kind != "r2c" and source.dtype.kind == "float":
        # Libraries have these transforms for complex input alone.
        source = planner.convert(source, _COMPLEX[source.dtype])
    return Planned(FftSpec(kind, direction, lengths, axes, scaling, source, result.spec), result)


def default_length(name: str, argument: str, source: ArraySpec, axis: int, *, is_halved: bool) -> int:
    """Length of a transform along an axis where the caller gave none.

    Args:
        name: Name of the operation.
        argument: Name of the argument that would give it.
        source: What is transformed.
        axis: The axis.
        is_halved: Whether the axis holds the non-negative frequencies of a real result.
    """
    extent = source.shape[axis]
    if extent == 0:
        raise ValueError(f"{name}: axis {axis} of a has no elements (shape {source.shape})")
    if not is_halved:
        return extent
    if extent == 1:
        raise ValueError(
            f"{name}: {argument}: 1 frequency says nothing of the length of the result; give {argument}"
        )
    return 2 * (extent - 1)


def check_axis(name: str, argument: str, axis: int, source: ArraySpec) -> int:
    """Take an axis counted from either end to one counted from the first."""
    ndim = len(source.shape)
    if not -ndim <= axis < ndim:
        raise ValueError(f"{name}: {argument} {axis} is not there in an array of shape {source.shape}")
    return axis % ndim


def check_lengths(name: str, argument: str, given: object, lengths: Iterable[int]) -> None:
    """Refuse transforms of no points."""
    if any(length < 1 for length in lengths):
        raise ValueError(f"{name}: {argument} must be at least 1, got {given}")


def whole_number(name: str, argument: str, value: object, allowed: str) -> int:
    """Take what is a whole number, of Python's or NumPy's, and nothing else."""
    if type(value) is int:
        # To ask whether it has a method takes longer than the rest of a plan.
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name}: {argument} must be {allowed}, got {value!r}")
    return operator.index(value)


def whole_numbers(name: str, argument: str, values: Iterable[object] | None) -> tuple[int, ...] | None:
    """Take a sequence of whole numbers, or None."""
    if values is None:
        return None
    allowed = "a sequence of whole numbers, or None"
    if not isinstance(values, Iterable):
        raise TypeError(f"{name}: {argument} must be {allowed}, got {values!r}")
    return tuple(whole_number(name, argument, value, allowed) for value in values)


def _norm(name: str, norm: FftNorm | None) -> FftNorm:
    if norm is None:
        return "backward"
    if norm not in ("backward", "ortho", "forward"):
        raise ValueError(f"{name}: norm must be 'backward', 'ortho' or 'forward', got {norm!r}")
    return norm


def _result_dtype(name: str, transform: Transform, dtype: DType) -> DType:
    kind, direction = transform
    if kind == "r2c" and dtype.kind == "complex":
        instead = "fft" if direction == "forward" else "ifft"
        raise TypeError(f"{name}: a must be real, got {dtype}; use {instead}")
    complex_dtype = _COMPLEX.get(dtype)
    if complex_dtype is None:
        allowed = "float32 or float64" if kind == "r2c" else "float32, float64, complex64 or complex128"
        raise TypeError(f"{name}: a must be {allowed}, got {dtype}; use cast()")
    return _REAL[complex_dtype] if kind == "c2r" else complex_dtype
