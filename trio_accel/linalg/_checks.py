"""Checks that several operations share."""

from __future__ import annotations

from ..backends.base import DType
from ..backends.base.ops import ArraySpec

__all__ = ["real_of", "same_dtype", "same_length", "vector"]


def same_dtype(name: str, **arrays: ArraySpec) -> DType:
    """Require one dtype of all arrays: devices do not convert silently."""
    first, *others = arrays.values()
    for other in others:
        if other.dtype is not first.dtype:
            given = ", ".join(f"{argument} {array.dtype}" for argument, array in arrays.items())
            raise TypeError(f"{name}: operands must have one dtype, got {given}; use cast()")
    return first.dtype


def vector(name: str, argument: str, array: ArraySpec) -> None:
    """Require a single axis."""
    if array.ndim != 1:
        raise ValueError(f"{name}: {argument} must have one axis, got shape {array.shape}")


def same_length(name: str, x: ArraySpec, y: ArraySpec) -> None:
    """Require one shape of both arrays."""
    if x.shape != y.shape:
        raise ValueError(f"{name}: x and y must have one shape, got {x.shape} and {y.shape}")


def real_of(dtype: DType) -> DType:
    """The dtype of absolute values."""
    return {DType.complex64: DType.float32, DType.complex128: DType.float64}.get(dtype, dtype)
