"""The table of element types that every backend speaks of."""

from __future__ import annotations

import builtins
import enum
import functools
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

__all__ = ["DType", "DTypeLike", "HostArray", "Ints", "Strs"]

_LOW_PRECISION = ("bfloat16", "float8_e4m3fn", "float8_e5m2")

Kind: TypeAlias = Literal["float", "complex", "int", "uint", "bool"]


class DType(enum.Enum):
    """Element type of a device array.

    `numpy.dtype` accepts a member wherever it accepts a dtype, and a member equals the
    NumPy dtype (or anything NumPy takes for one) of the same type:

    >>> DType.float32 == "float32"
    True
    >>> np.zeros(2, dtype=DType.complex64).dtype
    dtype('complex64')

    bfloat16 and the float8 formats are `ml_dtypes` types on the host.
    """

    float64 = "float64"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float8_e4m3fn = "float8_e4m3fn"
    float8_e5m2 = "float8_e5m2"
    complex64 = "complex64"
    complex128 = "complex128"
    int8 = "int8"
    int16 = "int16"
    int32 = "int32"
    int64 = "int64"
    uint8 = "uint8"
    uint16 = "uint16"
    uint32 = "uint32"
    uint64 = "uint64"
    bool = "bool"

    @classmethod
    def of(cls, like: DTypeLike) -> DType:
        """Find the member for anything that NumPy takes for a dtype.

        Raises:
            TypeError: Devices lack this element type; the message lists the types that they have.
        """
        if isinstance(like, DType):
            return like
        # The dtypes of host arrays come again and again, so they are remembered; the names were known.
        member = _member_cache.get(like) if isinstance(like, (str, np.dtype)) else None
        if member is not None:
            return member
        member = _by_numpy(like) if isinstance(like, (str, type, np.dtype)) else None
        if member is None:
            native = like.newbyteorder("=") if isinstance(like, np.dtype) else None
            if native is not None and _by_numpy(native) is not None:
                raise TypeError(
                    f"dtype: {like!r} has the other byte order; make it native: array.astype({native.name!r})"
                )
            names = ", ".join(cls.__members__)
            is_known = isinstance(like, (str, type, np.dtype))
            label = str(like) if is_known else f"an object of {type(cast('object', like)).__name__}"
            label = repr(like) if isinstance(like, str) else label
            raise TypeError(f"dtype: {label} is not an element type of a device; allowed: {names}")
        return member

    # Every operation asks for these several times, so they are found once.
    @functools.cached_property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype (native byte order)."""
        return _numpy_dtype(self.value)

    @functools.cached_property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return self.dtype.itemsize

    @functools.cached_property
    def kind(self) -> Kind:
        """``"float"``, ``"complex"``, ``"int"``, ``"uint"`` or ``"bool"``."""
        name = self.value
        if name.startswith("bfloat"):
            return "float"
        return cast("Kind", name.rstrip("0123456789") if "float8" not in name else "float")

    @functools.cached_property
    def is_inexact(self) -> builtins.bool:
        """Whether the type is a floating or complex one."""
        return self.kind in ("float", "complex")

    @functools.cached_property
    def is_half(self) -> builtins.bool:
        """Whether the type is a floating one of two bytes, which hosts compute in float32."""
        return self.value in ("float16", "bfloat16")

    # Users compare `ref.dtype` with `np.float32`.
    def __eq__(self, other: object) -> builtins.bool:
        if isinstance(other, DType):
            return self is other
        if isinstance(other, (str, type, np.dtype)):
            return _by_numpy(cast("npt.DTypeLike", other)) is self
        return NotImplemented

    def __hash__(self) -> int:
        # A member equals its NumPy dtype, so it hashes like it.
        return hash(self.dtype)

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return f"DType.{self.value}"


DTypeLike: TypeAlias = DType | str | type | np.dtype[Any]

HostArray: TypeAlias = npt.NDArray[Any]
"""An array of NumPy, of any dtype and shape."""

Ints: TypeAlias = tuple[int, ...]
"""Any number of integers, such as a shape, strides or axes."""

Strs: TypeAlias = tuple[str, ...]
"""Any number of strings, such as names or arguments."""


_member_cache: dict[Any, DType] = dict(DType.__members__)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name in _LOW_PRECISION:
        import ml_dtypes

        low_precision: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return low_precision
    return np.dtype(name)


def _by_numpy(like: npt.DTypeLike) -> DType | None:
    if isinstance(like, str) and like in _LOW_PRECISION:
        return DType(like)
    try:
        dtype = np.dtype(like)
    except (TypeError, ValueError, SyntaxError):
        # The last two are of strings with commas or brackets, which name the fields of a record.
        return None
    if not dtype.isnative:
        return None
    member = DType.__members__.get(dtype.name)
    # Metadata may have any object of the program, which the table would keep alive.
    if member is not None and dtype.metadata is None:
        _member_cache[dtype] = member
    return member
