"""Checks of arguments, under the names that errors use."""

from __future__ import annotations

from numbers import Complex, Real
from typing import Any

import numpy as np

from ..backends.base import ArraySpec, DType, DTypeLike, host_array
from ..devices import (
    AccelRef,
    Operand,
    Planner,
    bounded_integer,
    bounded_integers,
    clamped,
    device_of,
    integer,
    is_several,
    shown,
)
from ..devices.base._views import reshaped
from ..expressions import axis_of, check_ref, on_device

__all__ = [
    "axis_of",
    "bounded_integer",
    "bounded_integers",
    "check_number",
    "check_real",
    "check_ref",
    "clamped",
    "flag",
    "flat",
    "integer",
    "is_several",
    "placed",
    "summed_dtype",
]


async def placed(name: str, **arrays: Operand) -> list[AccelRef]:
    """Bring arrays to the device that one of them is on, for functions of several steps.

    Raises:
        TypeError: One is not an array, or none is on a device.
    """
    device = device_of(name, *arrays.values())
    for argument, array in arrays.items():
        if isinstance(array, np.ndarray):
            DType.of(host_array(f"{name}: {argument}", array).dtype)
        else:
            check_ref(name, argument, array)
    return [
        await device.put(array) if isinstance(array, np.ndarray) else on_device(array)
        for array in arrays.values()
    ]


def check_number(name: str, argument: str, value: object, *, is_real: bool = False) -> Any:
    """Take a number, of Python or NumPy, as Python's: NumPy's integers would wrap around.

    Raises:
        TypeError: It is none, or a complex one where that does not do.
    """
    # Not all of NumPy's numbers are registered with `numbers`.
    untyped_value: Any = value
    number = untyped_value.item() if isinstance(value, np.generic) else untyped_value
    if not isinstance(number, Real if is_real else Complex):
        raise TypeError(f"{name}: {argument} must be a {'real ' * is_real}number, got {shown(untyped_value)}")
    return number


def flag(name: str, argument: str, value: object) -> bool:
    """Take a truth value.

    Raises:
        TypeError: It is none.
    """
    if value is True or value is False:
        return value
    raise TypeError(f"{name}: {argument} must be True or False, got {shown(value)}")


def check_real(name: str, **arrays: ArraySpec) -> None:
    """Refuse arrays without an order, or without a common one.

    Raises:
        TypeError: An array is complex, or the types lack a common one.
    """
    for argument, array in arrays.items():
        if array.dtype.kind == "complex":
            raise TypeError(
                f"{name}: {argument} must be real, because complex numbers cannot be compared; "
                f"got {array.dtype}"
            )
    try:
        DType.of(np.result_type(*[array.dtype.dtype for array in arrays.values()]))
    except TypeError:
        listing = " and ".join(f"{argument} of {array.dtype}" for argument, array in arrays.items())
        raise TypeError(
            f"{name}: {listing} do not promote to a common dtype; convert one by cast()"
        ) from None


def flat(planner: Planner, x: ArraySpec) -> ArraySpec:
    """Return an array as a vector of its elements in C order; copy it if there is no such view."""
    try:
        return reshaped(x, (x.size,))
    except ValueError:
        return reshaped(planner.convert(x, x.dtype), (x.size,))


def summed_dtype(name: str, dtype: DType, chosen: DTypeLike | None) -> DType:
    """Return the dtype of a sum or a product, by the array API standard.

    Raises:
        TypeError: Devices lack this dtype.
    """
    if chosen is not None:
        return DType.of(chosen)
    if dtype.is_inexact:
        return dtype
    return DType.uint64 if dtype.kind == "uint" else DType.int64
