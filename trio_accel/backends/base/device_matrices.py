"""Stacks of matrices on the device, seen otherwise: nothing is copied."""

from __future__ import annotations

import math

from .device_array import DeviceArray
from .ops import ArraySpec

__all__ = ["broadcast", "diagonals", "first_rows", "stacked", "transposed"]


def stacked(array: ArraySpec | DeviceArray) -> int:
    """How many matrices there are in a stack."""
    return math.prod(array.shape[:-2])


def transposed(array: DeviceArray) -> DeviceArray:
    """The matrices transposed."""
    shape, strides = array.shape, array.strides
    shape, strides = (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2])
    return DeviceArray(array.address, array.dtype, shape, strides)


def first_rows(array: DeviceArray, rows: int) -> DeviceArray:
    """The first rows of each matrix."""
    return DeviceArray(array.address, array.dtype, (*array.shape[:-2], rows, array.shape[-1]), array.strides)


def diagonals(array: DeviceArray) -> DeviceArray:
    """The diagonal of each matrix."""
    shape = *array.shape[:-2], min(array.shape[-2:])
    strides = *array.strides[:-2], array.strides[-1] + array.strides[-2]
    return DeviceArray(array.address, array.dtype, shape, strides)


def broadcast(array: DeviceArray, shape: tuple[int, ...]) -> DeviceArray:
    """An array broadcast to a shape that it broadcasts to."""
    missing = len(shape) - len(array.shape)
    axes = zip(array.shape, array.strides, shape[missing:], strict=True)
    steps = tuple(step if extent == wanted else 0 for extent, step, wanted in axes)
    return DeviceArray(array.address, array.dtype, shape, (0,) * missing + steps)
