"""Arguments of transforms, and how they are refused."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Final, NoReturn, SupportsIndex, cast

import numpy as np

from ..backends.base import DType
from ..backends.base.checks import NATIVE
from ..backends.base.ops import ArraySpec
from ..devices import AccelRef, Operand
from ..devices.base._refusals import what_to_do

__all__ = [
    "ARRAYS",
    "all_whole",
    "axes_of",
    "axis_of",
    "check_floating",
    "check_norm",
    "check_out",
    "extent_of",
    "refuse_dtype",
    "whole",
]

ARRAYS: Final = "trio_accel.arrays:ArraysActor"
"""Import path of the actor of what is made of expressions: backends give the library of transforms no such
kernels. It is a text, because capabilities do not import one another."""

_NUMBERS = "a sequence of whole numbers, or None"


def check_norm(name: str, norm: object) -> None:
    """Refuse an unknown norm."""
    if norm not in (None, "backward", "ortho", "forward"):
        raise ValueError(f"{name}: norm must be 'backward', 'ortho' or 'forward', got {norm!r}")


def check_out(name: str, out: AccelRef | None, shape: Sequence[int], dtype: DType) -> None:
    """Refuse an array to write to that is not like the result, ahead of the first of several launches."""
    if out is not None and (out.shape, out.dtype) != (tuple(shape), dtype):
        raise ValueError(
            f"{name}: out must have shape {tuple(shape)} and dtype {dtype}, got shape {out.shape} and dtype "
            f"{out.dtype}"
        )


def refuse_dtype(name: str, argument: str, given: Operand, *, is_real: bool) -> NoReturn:
    """Say which dtypes a function has, and how to convert an array to the nearest one."""
    allowed = "float32 or float64" if is_real else "float32, float64, complex64 or complex128"
    dtype = DType.of(given.dtype)
    nearest = "float64" if dtype.kind in ("bool", "int", "uint") else "float32"
    call = f"await {argument}.cast" if isinstance(given, AccelRef) else f"{argument}.astype"
    raise TypeError(
        f"{name}: {argument} must be {allowed}, got {dtype}; convert it first: {call}('{nearest}')"
    )


def check_floating(name: str, argument: str, a: Operand, *, is_real: bool = False) -> None:
    """Refuse what is no array, and dtypes that there are no transforms of.

    Raises:
        TypeError: In these cases.
    """
    if not isinstance(cast("object", a), (AccelRef, np.ndarray)):
        told = f"{type(a).__name__}{what_to_do(a)}"
        raise TypeError(f"{name}: {argument} must be an AccelRef or a NumPy array, got {told}")
    if DType.of(a.dtype) not in NATIVE[: 2 if is_real else 4]:
        refuse_dtype(name, argument, a, is_real=is_real)


def axes_of(
    name: str, source: ArraySpec | Operand, axes: tuple[int, ...] | None, given: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Find the axes of lengths that the caller gave, counted from the first; by default all."""
    if axes is None:
        if given is not None and len(given) > source.ndim:
            raise ValueError(f"{name}: s must have a length for each axis, got {given} for {source.shape}")
        axes = tuple(range(-source.ndim if given is None else -len(given), 0))
    elif given is not None and len(given) != len(axes):
        raise ValueError(f"{name}: s must have a length for each of axes, got s {given} and axes {axes}")
    if not axes:
        raise ValueError(f"{name}: axes must name at least one axis, got none for a of shape {source.shape}")
    checked = tuple(axis_of(name, "axes:", axis, source) for axis in axes)
    if len(set(checked)) < len(checked):
        raise ValueError(f"{name}: axes must be distinct, got {axes} for a of shape {source.shape}")
    return checked


def axis_of(name: str, argument: str, axis: int, source: ArraySpec | Operand) -> int:
    """Take an axis counted from either end to one counted from the first."""
    ndim = len(source.shape)
    if not -ndim <= axis < ndim:
        raise ValueError(f"{name}: {argument} {axis} is not there in an array of shape {source.shape}")
    return axis % ndim


def extent_of(name: str, axis: int, source: ArraySpec | Operand, argument: str = "a") -> int:
    """Length of an axis along which the caller gave none."""
    extent = source.shape[axis]
    if extent == 0:
        raise ValueError(f"{name}: axis {axis} of {argument} has no elements (shape {source.shape})")
    return extent


def whole(name: str, argument: str, value: object, allowed: str) -> int:
    """Take what is a whole number, of Python's or NumPy's, and nothing else."""
    if type(value) is int:
        # To ask whether it has a method takes longer than the rest of a plan.
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name}: {argument} must be {allowed}, got {value!r}")
    return operator.index(value)


def all_whole(name: str, argument: str, values: Iterable[object] | None) -> tuple[int, ...] | None:
    """Take a sequence of whole numbers, or None."""
    if values is None:
        return None
    if not isinstance(values, Iterable):
        raise TypeError(f"{name}: {argument} must be {_NUMBERS}, got {values!r}")
    return tuple(whole(name, argument, value, _NUMBERS) for value in values)
