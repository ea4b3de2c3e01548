"""Checks that several operations share."""

from __future__ import annotations

import numbers
import reprlib

from ..backends.base import DType
from ..backends.base.ops import ArraySpec
from ..devices import in_range

__all__ = ["factor", "real_of", "same_dtype", "same_length", "vector"]


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


def factor(name: str, argument: str, value: object, dtype: DType) -> complex:
    """Require a number that a floating or complex dtype can hold as a factor."""
    if not dtype.is_inexact:
        raise TypeError(f"{name}: the arrays must have a floating or complex dtype, got {dtype}; use cast()")
    if isinstance(value, bool) or not isinstance(value, numbers.Complex):
        raise TypeError(f"{name}: {argument} must be a number, got {type(value).__name__}")
    if dtype.kind != "complex" and not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: {argument} {value!r} is complex, the arrays are {dtype}")
    try:
        number = float(value) if isinstance(value, numbers.Real) else complex(value)
    except OverflowError:
        raise ValueError(
            f"{name}: {argument} {reprlib.repr(value)} is outside the range of {dtype}"
        ) from None
    # Half precision is computed in single precision, and the factor with it.
    in_range(name, argument, number, DType.float32 if dtype.itemsize < 4 else dtype)
    return number


def real_of(dtype: DType) -> DType:
    """The dtype of absolute values."""
    return {DType.complex64: DType.float32, DType.complex128: DType.float64}.get(dtype, dtype)
