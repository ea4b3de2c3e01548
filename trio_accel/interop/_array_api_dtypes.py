"""The dtypes of the Python array API standard: their kinds, limits and promotion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, cast

import attrs
import numpy as np

from ..backends.base import DType, DTypeLike


class HasDType(Protocol):
    """An array."""

    @property
    def dtype(self) -> DType:
        """Element type."""
        ...


Typed: TypeAlias = "HasDType | DTypeLike"

KINDS = {
    "bool": ("bool",),
    "signed integer": ("int",),
    "unsigned integer": ("uint",),
    "integral": ("int", "uint"),
    "real floating": ("float",),
    "complex floating": ("complex",),
    "numeric": ("int", "uint", "float", "complex"),
}
"""Kinds of dtypes as the standard names them, and as `DType.kind` does."""
STANDARD = tuple(dtype for dtype in DType if dtype.kind != "float" or dtype in (DType.float32, DType.float64))
"""The dtypes that the standard has."""
DEFAULTS = {
    "real floating": DType.float64,
    "complex floating": DType.complex128,
    "integral": DType.int64,
    "indexing": DType.int64,
}
"""The dtypes of what is made without one."""
_SCALARS: dict[type, tuple[str, ...]] = {
    bool: ("bool",),
    int: ("int", "uint", "float", "complex"),
    float: ("float", "complex"),
    complex: ("float", "complex"),
}
"""Kinds of the dtypes that a Python number goes with."""


@attrs.frozen(kw_only=True)
class FloatInfo:
    """Limits of a floating dtype; for a complex dtype, the limits of its parts.

    Attributes:
        bits: Bits of one number.
        eps: Distance from 1 to the next larger number.
        max: The largest number.
        min: The smallest number, a negative one.
        smallest_normal: The smallest positive number with full precision.
        dtype: The dtype.
    """

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


@attrs.frozen(kw_only=True)
class IntegerInfo:
    """Limits of an integer dtype.

    Attributes:
        bits: Bits of one number.
        max: The largest number.
        min: The smallest number.
        dtype: The dtype.
    """

    bits: int
    max: int
    min: int
    dtype: DType


def dtype_of(array_or_dtype: Typed) -> DType:
    """Return the dtype of an array, or the dtype."""
    # NumPy's dtypes and classes also have an attribute of that name.
    if isinstance(array_or_dtype, (DType, str, type, np.dtype)):
        return DType.of(array_or_dtype)
    return DType.of(array_or_dtype.dtype)


def finfo(type: Typed, /) -> FloatInfo:  # noqa: A002  # the standard's name
    """Return the limits of a floating or complex dtype.

    Raises:
        TypeError: It is another one.
    """
    import ml_dtypes

    dtype = dtype_of(type)
    if not dtype.is_inexact:
        raise TypeError(f"finfo: type must be floating or complex, got {dtype}")
    part = {DType.complex64: DType.float32, DType.complex128: DType.float64}.get(dtype, dtype)
    # It also knows dtypes that NumPy lacks.
    find: Any = ml_dtypes.finfo
    limits: Any = find(part.dtype)
    return FloatInfo(
        bits=limits.bits,
        dtype=part,
        **{name: float(getattr(limits, name)) for name in ("eps", "max", "min", "smallest_normal")},
    )


def iinfo(type: Typed, /) -> IntegerInfo:  # noqa: A002  # the standard's name
    """Return the limits of an integer dtype.

    Raises:
        TypeError: It is another one.
    """
    dtype = dtype_of(type)
    if dtype.kind not in KINDS["integral"]:
        raise TypeError(f"iinfo: type must be an integer dtype, got {dtype}")
    limits = np.iinfo(dtype.dtype)
    return IntegerInfo(bits=limits.bits, max=int(limits.max), min=int(limits.min), dtype=dtype)


def isdtype(dtype: DTypeLike, kind: DTypeLike | Sequence[DTypeLike]) -> bool:
    """Return whether a dtype is of a kind, of one of several, or another dtype.

    Raises:
        ValueError: The kind is unknown.
    """
    if isinstance(kind, (tuple, list)):
        return any(isdtype(dtype, alternative) for alternative in kind)
    if isinstance(kind, str):
        if kind not in KINDS:
            raise ValueError(f"isdtype: kind must be one of {', '.join(KINDS)}, or a dtype; got {kind!r}")
        return DType.of(dtype).kind in KINDS[kind]
    return DType.of(dtype) is DType.of(cast("DTypeLike", kind))


def result_type(*arrays_and_dtypes: Typed | complex) -> DType:
    """Return the result dtype for arrays, dtypes and Python numbers together.

    Raises:
        TypeError: The standard does not promote them, or there is neither an array nor a dtype.
    """
    numbers = [type(argument) for argument in arrays_and_dtypes if type(argument) in _SCALARS]
    dtypes = [
        dtype_of(cast("Typed", argument)) for argument in arrays_and_dtypes if type(argument) not in _SCALARS
    ]
    kinds = {dtype.kind for dtype in dtypes}
    fits = (
        len(kinds) == 1
        or kinds == {"float", "complex"}
        or (kinds == {"int", "uint"} and DType.uint64 not in dtypes)
    )
    if not fits or any(not kinds & set(_SCALARS[number]) for number in numbers):
        listing = ", ".join([*map(str, dtypes), *(f"a Python {number.__name__}" for number in numbers)])
        raise TypeError(
            f"result_type: the array API standard does not promote {listing or 'nothing'} to one dtype"
        )
    # A complex number makes a real floating dtype complex.
    return DType.of(np.result_type(*(dtype.dtype for dtype in dtypes), *[1j] * (complex in numbers)))


def can_cast(from_: Typed, to: DTypeLike, /) -> bool:
    """Return whether a dtype becomes another by promotion."""
    try:
        return result_type(dtype_of(from_), to) is DType.of(to)
    except TypeError:
        return False
