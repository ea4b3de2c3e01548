"""What libraries check before anything is enqueued."""

from __future__ import annotations

from collections.abc import Collection

from ...base import DType, LibraryError, NotSupportedError
from ...base.ops import ArraySpec

__all__ = ["INEXACT", "LOW_PRECISION", "NATIVE", "check_dtype", "check_same_dtype", "factor_of"]

NATIVE = (DType.float32, DType.float64, DType.complex64, DType.complex128)
"""Types that are computed in themselves."""

LOW_PRECISION = (DType.float16, DType.bfloat16)
"""Types that are computed in float32 and rounded once."""

INEXACT = (*LOW_PRECISION, *NATIVE)


def check_dtype(operation: str, dtype: DType, allowed: Collection[DType]) -> None:
    """Refuse an element type that an operation does not have.

    Raises:
        NotSupportedError: It is not among the allowed ones.
    """
    if dtype not in allowed:
        names = ", ".join(str(other) for other in allowed)
        raise NotSupportedError(
            f"the CUDA backend has no {operation} for {dtype}; it has {names}", backend="cuda"
        )


def check_same_dtype(operation: str, *arrays: ArraySpec) -> DType:
    """Find the one element type of all operands.

    Raises:
        NotSupportedError: They differ.
    """
    first = arrays[0].dtype
    for array in arrays:
        if array.dtype is not first:
            names = ", ".join(str(other.dtype) for other in arrays)
            raise NotSupportedError(
                f"the CUDA backend has no {operation} for operands of different types: {names}",
                backend="cuda",
            )
    return first


def factor_of(library: str, name: str, value: complex, dtype: DType) -> complex:
    """Take a factor to what a type can hold.

    Raises:
        LibraryError: It has an imaginary part and the type has none, or more digits than a double.
    """
    if value.imag and dtype.kind != "complex":
        problem = f"has an imaginary part, {dtype} has none"
    else:
        try:
            return complex(value)
        except OverflowError:
            problem = f"is outside the range of {dtype}"
    raise LibraryError(f"{name}: {value!r} {problem}", library=library, code="invalid_value")
