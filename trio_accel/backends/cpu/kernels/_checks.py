"""What kernels check before anything is enqueued."""

from __future__ import annotations

from collections.abc import Collection

from ...base import DType, LibraryError, NotSupportedError
from ...base.ops import ArraySpec

__all__ = ["INEXACT", "LOW_PRECISION", "NATIVE", "check_dtype", "check_same_dtype", "scalar_of"]

NATIVE = (DType.float32, DType.float64, DType.complex64, DType.complex128)
"""Types that BLAS has."""

LOW_PRECISION = (DType.float16, DType.bfloat16)
"""Types that are computed in float32 and rounded once."""

INEXACT = (*LOW_PRECISION, *NATIVE)


def check_dtype(operation: str, dtype: DType, allowed: Collection[DType]) -> None:
    """Refuse an element type that a kernel does not have.

    Raises:
        NotSupportedError: It is not among the allowed ones.
    """
    if dtype not in allowed:
        names = ", ".join(str(other) for other in allowed)
        raise NotSupportedError(
            f"the CPU backend has no {operation} for {dtype}; it has {names}", backend="cpu"
        )


def check_same_dtype(operation: str, *arrays: ArraySpec) -> DType:
    """Find the one element type of all operands.

    Raises:
        NotSupportedError: They differ.
    """
    first, *others = (array.dtype for array in arrays)
    if any(other is not first for other in others):
        names = ", ".join(str(array.dtype) for array in arrays)
        raise NotSupportedError(
            f"the CPU backend has no {operation} for operands of different types: {names}", backend="cpu"
        )
    return first


def scalar_of(library: str, name: str, value: complex, dtype: DType) -> complex:
    """Take a factor to the kind of number that a type can hold: an int stays an int.

    Raises:
        LibraryError: It has an imaginary part and the type has none.
    """
    if dtype.kind == "complex":
        return value
    if value.imag:
        raise LibraryError(
            f"{name}: {value!r} has an imaginary part, {dtype} has none",
            library=library,
            code="invalid_value",
        )
    return value.real
