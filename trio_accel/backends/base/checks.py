"""What libraries check before anything is enqueued, in the same words on every backend."""

from __future__ import annotations

from collections.abc import Collection

from .dtypes import DType
from .errors import LibraryError, NotSupportedError
from .ops import ArraySpec, FftSpec

__all__ = [
    "INEXACT",
    "LOW_PRECISION",
    "NATIVE",
    "check_dtype",
    "check_same_dtype",
    "check_transform_axes",
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


def check_transform_axes(spec: FftSpec) -> None:
    """Refuse a transform along axes that the array does not have, or without a length for each.

    Raises:
        LibraryError: Axes or lengths that are none.
    """
    axes, lengths = spec.axes, spec.lengths
    if not axes or len(set(axes)) < len(axes) or not set(axes) <= set(range(spec.source.ndim)):
        message = f"axes: {axes} are no distinct axes of an array of shape {spec.source.shape}"
    elif len(lengths) != len(axes):
        message = f"lengths: {len(lengths)} are given for {len(axes)} axes"
    elif min(lengths) < 1:
        message = f"lengths: a transform has at least one point along each axis, not {lengths}"
    else:
        return
    raise LibraryError(message, library="fft", code="size")
