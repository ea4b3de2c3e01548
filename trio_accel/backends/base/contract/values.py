"""Numbers for arrays, conversions between their types, and arrays as the bits that they are.

Wrong values are refused before anything is launched.
"""

from __future__ import annotations

import cmath
import numbers
import reprlib
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from .dtypes import DType, HostArray
from .errors import LibraryError

__all__ = [
    "ALWAYS_HELD",
    "as_bits",
    "by_way_of_int64",
    "check_conversion",
    "check_plain",
    "check_same_kind",
    "element",
    "factor",
    "host_array",
    "is_same_kind",
    "scalar",
]


ALWAYS_HELD = 448
"""The largest number of the smallest floating type."""


_NUMBERS = frozenset({bool, int, float, complex})


_MAX_AXES = 64


def host_array(argument: str, value: Any, dtype: npt.DTypeLike | None = None) -> HostArray:
    """Make a NumPy array of a program's value; refuse a value with more than its elements.

    Raises:
        TypeError: See `check_plain`.
    """
    check_plain(argument, value)
    return np.asarray(value, dtype)


def by_way_of_int64(array: HostArray, dtype: npt.DTypeLike) -> HostArray:
    """Make int64 of numbers that become uint32, and are not integers; else return the array as it is.

    NumPy's loops for adjacent and for scattered elements disagree about numbers outside of uint32, because C
    leaves these undefined. The result of int64 is defined by all processors, and compiled code takes the same
    way.
    """
    return array.astype(np.int64) if dtype == np.uint32 and array.dtype.kind not in "biu" else array


def check_plain(argument: str, value: object, *, depth: int = 0) -> None:
    """Refuse an array that would lose its meaning: a masked one, or one of a class that adds to the elements.

    Lists and tuples are searched also, because NumPy makes one array of them.

    Raises:
        TypeError: The value is such an array, or contains one.
        ValueError: A list contains itself, or has more axes than NumPy allows.
    """
    if depth > _MAX_AXES:
        raise ValueError(f"{argument} must be nested at most {_MAX_AXES} deep; does a list hold itself?")
    kind = type(value)
    if kind is np.ndarray or kind in _NUMBERS:
        return
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{argument} is a masked array; fill it first: array.filled(value)")
    if isinstance(value, np.ndarray) and not isinstance(value, (np.matrix, np.memmap, np.recarray)):
        raise TypeError(
            f"{argument} is of type {kind.__name__}, and a device array is elements and nothing more; take "
            "these first: np.asarray(value)"
        )
    if isinstance(value, (list, tuple)):
        several = cast("list[object] | tuple[object, ...]", value)
        if not _NUMBERS.issuperset(map(type, several)):
            for item in several:
                check_plain(argument, item, depth=depth + 1)


def in_range(name: str, argument: str, value: complex, dtype: DType) -> None:
    """Require that a finite value stays finite as a floating or complex dtype.

    Raises:
        ValueError: It is too large.
    """
    if abs(value) <= ALWAYS_HELD:
        return
    with np.errstate(all="ignore"):
        try:
            is_held = bool(np.isfinite(number_array(value, dtype))) or not cmath.isfinite(value)
        except OverflowError:
            is_held = False
    if not is_held:
        raise ValueError(f"{name}: {argument} {reprlib.repr(value)} is outside the range of {dtype}")


def factor(name: str, argument: str, value: object, dtype: DType) -> complex:
    """Require a number that a floating or complex dtype can hold as a factor.

    Raises:
        TypeError: The value is not a number; or it is complex, and the arrays are real; or the arrays hold
            integers.
        ValueError: The value is too large.
    """
    if not dtype.is_inexact:
        raise TypeError(f"{name}: the arrays must have a floating or complex dtype, got {dtype}; use cast()")
    if isinstance(value, bool) or not isinstance(value, numbers.Complex):
        raise TypeError(f"{name}: {argument} must be a number, got {type(value).__name__}")
    if dtype.kind != "complex" and not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: {argument} {value!r} is complex, the arrays are {dtype}")
    try:
        number = float(value) if isinstance(value, numbers.Real) else complex(value)
    except OverflowError:
        raise ValueError(
            f"{name}: {argument} {reprlib.repr(value)} is outside the range of {dtype}"
        ) from None
    # Half precision is computed in single precision, and the factor with it.
    in_range(name, argument, number, DType.float32 if dtype.itemsize < 4 else dtype)
    return number


def element(name: str, argument: str, value: object, dtype: DType) -> complex:
    """Require a number that an array of a dtype can hold as it is; return it as a Python number.

    Raises:
        TypeError: The value is not a number; or it is complex, and the array is not.
        ValueError: The value is too large, or not an integer although the array holds integers.
    """
    number = np.asarray(value).item() if issubclass(type(value), np.generic) else value
    if not isinstance(number, (bool, int, float, complex)):
        raise TypeError(f"{name}: {argument} must be a number, got {value!r}")
    if isinstance(number, complex) and dtype.kind != "complex":
        raise TypeError(f"{name}: {argument} {value!r} is complex, the array is {dtype}")
    if dtype.is_inexact:
        in_range(name, argument, number, dtype)
        return number
    if isinstance(number, complex):
        raise TypeError(f"{name}: {argument} {value!r} is complex, the array is {dtype}")
    if dtype.kind in ("int", "uint"):
        if isinstance(number, float) and not number.is_integer():
            raise ValueError(f"{name}: {argument} {value!r} is not an integer, the array is {dtype}")
        limits = np.iinfo(dtype.dtype)
        if not limits.min <= number <= limits.max:
            raise ValueError(
                f"{name}: {argument} {value!r} is outside {limits.min} to {limits.max}, the array is {dtype}"
            )
        return int(number)
    return number


def check_conversion(name: str, argument: str, source: DType, dtype: DType) -> None:
    """Refuse a conversion that would drop imaginary parts.

    Raises:
        TypeError: Complex to real.
    """
    if source.kind == "complex" and dtype.kind not in ("complex", "bool"):
        raise TypeError(
            f"{name}: {argument}: {source} to {dtype} would drop the imaginary parts; a complex dtype keeps "
            "them; to have the real parts alone, take them on the host: "
            "await device.put((await ref.to_host()).real)"
        )


_KINDS = ("bool", "uint", "int", "float", "complex")


def is_same_kind(source: DType, dtype: DType) -> bool:
    """Return whether a conversion keeps the kind or widens it, like NumPy's ``"same_kind"``."""
    return _KINDS.index(source.kind) <= _KINDS.index(dtype.kind)


def check_same_kind(name: str, argument: str, source: DType, dtype: DType) -> None:
    """Refuse a conversion to a narrower kind, which would drop signs, fractions or imaginary parts.

    Raises:
        TypeError: Such a one.
    """
    if not is_same_kind(source, dtype):
        raise TypeError(
            f"{name}: {argument} is of {source}, which does not become {dtype} of the array: a conversion "
            f"may not narrow the kind; convert it first: await {argument}.cast(...)"
        )


_MOST_WHOLE = 1 << 63


def number_array(value: complex, dtype: DType) -> HostArray:
    """Return the 0-d array of a number that the type can hold."""
    # bfloat16 holds no integer that int64 lacks, and for the other floating types this is the same.
    if isinstance(value, int) and not -_MOST_WHOLE <= value < _MOST_WHOLE and dtype.is_inexact:
        value = float(value)
    return np.array(value, dtype.dtype)


_INTEGERS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def scalar(value: complex, dtype: DType) -> npt.NDArray[Any]:
    """Return the 0-d array that holds a number.

    Raises:
        LibraryError: The type cannot hold it.
    """
    if dtype.kind != "complex":
        if value.imag:
            raise _bad_value(value, dtype)
        value = value.real  # of an int an int: exact at any size
    try:
        return number_array(value, dtype)
    except (ValueError, OverflowError) as error:
        raise _bad_value(value, dtype) from error


def as_bits(array: HostArray) -> HostArray:
    """Return the same memory as integers.

    Copied so, every bit pattern survives (also NaNs that signal), and the types that NumPy does not know
    itself are as fast as its own.
    """
    integer = _INTEGERS.get(array.itemsize)
    return array if integer is None else array.view(integer)


def _bad_value(value: complex, dtype: DType) -> LibraryError:
    return LibraryError(f"value: {value!r} is not a value of {dtype}", library="memory", code="invalid_value")
