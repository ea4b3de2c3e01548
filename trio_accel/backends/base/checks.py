"""What libraries check before anything is enqueued, in the same words on every backend."""

from __future__ import annotations

from collections.abc import Collection

from .dtypes import DType
from .errors import LibraryError, NotSupportedError
from .ops import ArraySpec, OperationSpec

__all__ = [
    "INEXACT",
    "LOW_PRECISION",
    "NATIVE",
    "check_dtype",
    "check_same_dtype",
    "check_shapes",
    "scalar_of",
]

NATIVE = (DType.float32, DType.float64, DType.complex64, DType.complex128)
"""Types that BLAS has, computed in themselves."""

LOW_PRECISION = (DType.float16, DType.bfloat16)
"""Types that are computed in float32 and rounded once."""

INEXACT = (*LOW_PRECISION, *NATIVE)


def check_dtype(backend: str, operation: str, dtype: DType, allowed: Collection[DType]) -> None:
    """Refuse an element type that an operation does not have.

    Raises:
        NotSupportedError: It is not among the allowed ones.
    """
    if dtype not in allowed:
        names = ", ".join(str(other) for other in allowed)
        raise NotSupportedError(
            f"the {backend.upper()} backend has no {operation} for {dtype}; it has {names}", backend=backend
        )


def check_same_dtype(backend: str, operation: str, *arrays: ArraySpec) -> DType:
    """Find the one element type of all operands.

    Raises:
        NotSupportedError: They differ.
    """
    first = arrays[0].dtype
    for array in arrays:
        if array.dtype is not first:
            names = ", ".join(str(other.dtype) for other in arrays)
            raise NotSupportedError(
                f"the {backend.upper()} backend has no {operation} for operands of different types: {names}",
                backend=backend,
            )
    return first


def check_shapes(backend: str, library: str, spec: OperationSpec) -> None:
    """Refuse on a backend what `OperationSpec.check_shapes` refuses.

    Raises:
        NotSupportedError: Dtypes that do not fit.
        LibraryError: Shapes that do not fit.
    """
    try:
        spec.check_shapes(library)
    except TypeError as error:
        raise NotSupportedError(f"the {backend.upper()} backend: {error}", backend=backend) from error
    except ValueError as error:
        raise LibraryError(str(error), library=library, code="invalid_value") from error


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
