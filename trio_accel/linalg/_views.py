"""Views of matrices, and helpers of functions with several steps."""

from __future__ import annotations

import numpy as np

from ..backends.base import DType
from ..backends.base.contract.ops import real_of
from ..devices import AccelRef, Operand, integer
from ..expressions import check_operands, diagonal_of, on_device, viewed

__all__ = ["diagonal", "matrix_transpose"]


def matrix_transpose(x: AccelRef) -> AccelRef:
    """Exchange the last two axes: a view, which costs no launch and is not awaited.

    Args:
        x: Array of shape (..., m, n).

    Returns:
        A view of shape (..., n, m), which shares the memory.

    Raises:
        numpy.linalg.LinAlgError: `x` has less than two axes.
    """
    check_matrices("matrix_transpose", x)
    return on_device(viewed(x, lambda array: array.mT))


def diagonal(x: AccelRef, /, *, offset: int = 0) -> AccelRef:
    """Diagonals of matrices, as `numpy.linalg.diagonal`: a view, which costs no launch and is not awaited.

    Args:
        x: Array of shape (..., m, n).
        offset: Which diagonal: 0 for the main one, above it positive, below it negative.

    Returns:
        A view of shape (..., k), which shares the memory; k is 0 for a diagonal that there is not.

    Raises:
        numpy.linalg.LinAlgError: `x` has less than two axes.
    """
    check_matrices("diagonal", x)
    number = integer("diagonal", "offset", offset)
    return on_device(viewed(x, lambda array: diagonal_of(array, number)))


def check_matrices(name: str, x: Operand, *, square: bool = False) -> DType:
    """Refuse what is not a stack of matrices, or not of square ones, as NumPy does; returns the dtype."""
    dtype = check_operands(name, x=x)
    if len(x.shape) < 2 or (square and x.shape[-1] != x.shape[-2]):
        expected = "(..., n, n)" if square else "(..., m, n)"
        raise np.linalg.LinAlgError(f"{name}: x must have shape {expected}, got shape {x.shape}")
    return dtype


def real_dtype(name: str, dtype: DType) -> DType:
    """Return the dtype of absolute values.

    Raises:
        TypeError: It is neither a floating nor a complex one.
    """
    if not dtype.is_inexact:
        raise TypeError(f"{name}: x must be of a floating or complex dtype, got {dtype}; await x.cast(...)")
    return real_of(dtype)
