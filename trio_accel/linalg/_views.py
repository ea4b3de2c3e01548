"""Views of matrices, and what functions of several steps share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..backends.base import DType
from ..devices import AccelRef, Operand, device_of
from ..devices.base._refusals import refuse_dtypes, what_to_do
from ..devices.base._views import seen
from ..expressions import intermediates as intermediates  # noqa: PLC0414  # neighbours have it from here

__all__ = ["diagonal", "matrix_transpose"]

ARRAYS: Final = "trio_accel.arrays:ArraysActor"
"""Import path of the actor of what is made of expressions: backends give the libraries of BLAS and solvers
no such kernels. It is a text, because capabilities do not import one another."""


def matrix_transpose(x: AccelRef) -> AccelRef:
    """Exchange the last two axes: a view, which costs no launch and is not awaited.

    Args:
        x: Array of shape (..., m, n).

    Returns:
        A view of shape (..., n, m), which shares the memory.

    Raises:
        numpy.linalg.LinAlgError: `x` has less than two axes.
    """
    check_operands("matrix_transpose", x=x)
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
    check_operands("diagonal", x=x)
    check_matrices("diagonal", x)
    return on_device(viewed(x, lambda array: array.diagonal(offset, -2, -1)))


def on_device(array: Operand) -> AccelRef:
    """Tell a type checker that an array is on a device."""
    assert isinstance(array, AccelRef)
    return array


def viewed(array: Operand, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Operand:
    """View an array as NumPy views one of its layout."""
    if isinstance(array, AccelRef):
        return AccelRef(array.block, seen(array.spec, change))
    return change(array)


def permuted(array: Operand, axes: Sequence[int]) -> Operand:
    """View an array with its axes in another order."""
    return viewed(array, lambda lying: lying.transpose(axes))


def check_operands(name: str, **given: Any) -> DType:
    """Refuse what is no array, arrays of which none is on a device, and those of several dtypes.

    Returns:
        The dtype.

    Raises:
        TypeError: In these cases.
    """
    device_of(name, *given.values())
    for argument, array in given.items():
        if not isinstance(array, (AccelRef, np.ndarray)):
            told = f"{type(array).__name__}{what_to_do(array)}"
            raise TypeError(f"{name}: {argument} must be an array, got {told}")
    dtypes = {argument: DType.of(array.dtype) for argument, array in given.items()}
    if len(set(dtypes.values())) > 1:
        hosts = [argument for argument, array in given.items() if not isinstance(array, AccelRef)]
        refuse_dtypes(name, dtypes, hosts)
    return next(iter(dtypes.values()))


def check_matrices(name: str, x: Operand, *, square: bool = False) -> None:
    """Refuse what is no stack of matrices, or not of square ones, as NumPy does."""
    if len(x.shape) < 2 or (square and x.shape[-1] != x.shape[-2]):
        wanted = "(..., n, n)" if square else "(..., m, n)"
        raise np.linalg.LinAlgError(f"{name}: x must have shape {wanted}, got shape {x.shape}")


def real_of(name: str, dtype: DType) -> DType:
    """Return the dtype of absolute values.

    Raises:
        TypeError: It is neither a floating nor a complex one.
    """
    if not dtype.is_inexact:
        raise TypeError(f"{name}: x must be of a floating or complex dtype, got {dtype}; await x.cast(...)")
    return {DType.complex64: DType.float32, DType.complex128: DType.float64}.get(dtype, dtype)
