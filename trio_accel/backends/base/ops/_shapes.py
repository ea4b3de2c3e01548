"""Shapes of results, and what is said of specifications whose shapes do not fit."""

from __future__ import annotations

from functools import lru_cache
from typing import NoReturn

import numpy as np

from ._array import ArraySpec
from ._spec import OperationSpec

__all__ = ["check_one_dtype", "common_shape", "product_shape", "refuse_shapes", "transformed_shape"]


def refuse_shapes(name: str, spec: OperationSpec, rule: str, **arrays: ArraySpec) -> NoReturn:
    """Refuse a specification of an operation over the shapes of its arrays.

    Raises:
        ValueError: Always.
    """
    given = ", ".join([f"{field} of shape {array.shape}" for field, array in arrays.items()])
    raise ValueError(f"{name}: {type(spec).__name__}: {rule}, got {given}")


def check_one_dtype(name: str, spec: OperationSpec, **arrays: ArraySpec) -> None:
    """Require one dtype of all arrays.

    Raises:
        TypeError: They differ.
    """
    if len({array.dtype for array in arrays.values()}) > 1:
        given = ", ".join([f"{field} of {array.dtype}" for field, array in arrays.items()])
        raise TypeError(f"{name}: {type(spec).__name__}: the arrays must have one dtype, got {given}")


@lru_cache
def common_shape(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that all broadcast to; None where there is none."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        return None


@lru_cache
def transformed_shape(
    shape: tuple[int, ...], axes: tuple[int, ...], lengths: tuple[int, ...], *, is_halved: bool
) -> tuple[int, ...]:
    """Shape of a Fourier transform along axes that are there; `is_halved` is for the kind r2c."""
    extents = list(shape)
    for axis, length in zip(axes, lengths, strict=True):
        extents[axis] = length
    if is_halved:
        extents[axes[-1]] = lengths[-1] // 2 + 1
    return tuple(extents)


@lru_cache
def product_shape(name: str, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a product by the rules of `numpy.matmul`.

    Raises:
        ValueError: The shapes of the operands do not fit.
    """
    if not a or not b:
        scalar = "a" if not a else "b"
        raise ValueError(f"{name}: {scalar} must have at least one axis, got an array without axes; use scal")
    rows, columns = a[:-1][-1:], b[1:] if len(b) == 1 else b[-1:]
    inner = b[0] if len(b) == 1 else b[-2]
    if a[-1] != inner:
        raise ValueError(
            f"{name}: the last axis of a and the {'only' if len(b) == 1 else 'last but one'} axis of b must "
            f"have one length, got a of shape {a} and b of shape {b}"
        )
    stack = common_shape(a[:-2], b[:-2])
    if stack is None:
        raise ValueError(
            f"{name}: the leading axes of a and b must broadcast, got a of shape {a} and b of shape {b}"
        )
    return stack + rows + columns
