"""Python numbers as elements of a device's types, and arrays as the bits that they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .dtypes import DType
from .errors import LibraryError

__all__ = ["as_bits", "scalar"]

_INTEGERS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def scalar(value: complex, dtype: DType) -> npt.NDArray[Any]:
    """The array without axes that holds a number.

    Raises:
        LibraryError: The type cannot hold it.
    """
    if dtype.kind != "complex":
        if value.imag:
            raise _bad_value(value, dtype)
        value = value.real  # of an int an int: exact at any size
    try:
        return np.array(value, dtype.dtype)
    except (ValueError, OverflowError) as error:
        raise _bad_value(value, dtype) from error


def as_bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same memory as integers.

    Copied so, every bit pattern survives (also NaNs that signal), and the types that NumPy does not know
    itself are as fast as its own.
    """
    integer = _INTEGERS.get(array.itemsize)
    return array if integer is None else array.view(integer)


def _bad_value(value: complex, dtype: DType) -> LibraryError:
    return LibraryError(f"value: {value!r} is no value of {dtype}", library="memory", code="invalid_value")
