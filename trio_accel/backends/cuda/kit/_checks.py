"""What libraries check before anything is enqueued."""

from __future__ import annotations

from ...base import DType, LibraryError, checks

__all__ = ["factor_of"]


def factor_of(library: str, name: str, value: complex, dtype: DType) -> complex:
    """Take a factor to what a type can hold, as cuBLAS gets it.

    Raises:
        LibraryError: It has an imaginary part and the type has none, or more digits than a double.
    """
    try:
        return complex(checks.scalar_of(library, name, value, dtype))
    except OverflowError as error:
        raise LibraryError(
            f"{name}: {value!r} is outside the range of {dtype}", library=library, code="invalid_value"
        ) from error
