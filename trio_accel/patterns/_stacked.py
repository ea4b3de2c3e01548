"""Batch models from functions of a single array: items are stacked on the device."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..backends.base import DType, element
from ..devices import AccelRef, Device, Operand, Stack
from ._batcher import BatchResults

__all__ = ["by_length", "by_shape", "padded", "stacked"]

Host: TypeAlias = npt.NDArray[Any]


def stacked(
    function: Callable[[AccelRef], Awaitable[BatchResults[Any]]], device: Device, *, to_host: bool = False
) -> Callable[[list[Operand]], Awaitable[BatchResults[Any]]]:
    """Make a `Batcher` model from a function that takes all items in one array.

    The items are arrays with the same shape and dtype: NumPy arrays, arrays of the device, or both. They
    become one array on the device, along a new first axis. If all are NumPy arrays, they are sent in one
    transfer. Otherwise all are copied on the device in one operation. If shapes differ, use
    ``bucket=by_shape``.

    Each reply is a view of the function's result, ``result[i]``: the memory is released with the last reply.
    With `to_host`, the result is transferred as a whole, and the replies are rows of it.

    Args:
        function: Takes an array of shape (items, ...) on the device, and returns an array with as many rows.
        device: The device for the items.
        to_host: Whether the replies are NumPy arrays, if the function returns an array on a device.
    """

    async def model(items: list[Operand]) -> BatchResults[Any]:
        return await _received(await function(await _stack(device, items, None)), to_host=to_host)

    return model


def padded(
    function: Callable[[AccelRef, npt.NDArray[np.int64]], Awaitable[BatchResults[Any]]],
    device: Device,
    *,
    pad: complex = 0,
    to_host: bool = False,
) -> Callable[[list[Operand]], Awaitable[BatchResults[Any]]]:
    """Make a model as `stacked` does, for items with different lengths.

    Shorter items are extended with `pad`, in each axis. With ``bucket=by_length``, less than half of the
    first axis is padding.

    Args:
        function: Takes an array of shape (items, longest, ...) on the device, and the lengths of the items:
            int64 on the host. Returns an array with as many rows. Results for the padding are not removed.
        device: The device for the items.
        pad: The value that extends shorter items.
        to_host: Whether the replies are NumPy arrays, if the function returns an array on a device.
    """

    async def model(items: list[Operand]) -> BatchResults[Any]:
        lengths = np.array([_extents(item)[0] for item in items], np.int64)
        return await _received(await function(await _stack(device, items, pad), lengths), to_host=to_host)

    return model


def by_shape(item: Operand) -> Hashable:
    """Return the key of a `Batcher` for `stacked`: items with the same shape and dtype share it.

    Raises:
        TypeError: The item is not an array.
    """
    return (_shape(item), str(item.dtype))


def by_length(item: Operand) -> Hashable:
    """Return the key of a `Batcher` for `padded`: lengths with the same next power of two share it.

    The length is the extent of the first axis. The other axes and the dtype must be the same.

    Raises:
        TypeError: The item is not an array.
        ValueError: The item is a 0-d array.
    """
    length, *trailing = _extents(item)
    return (max(length - 1, 0).bit_length(), tuple(trailing), str(item.dtype))


def _shape(item: Operand) -> tuple[int, ...]:
    if not isinstance(item, (AccelRef, np.ndarray)):
        raise TypeError(f"an item must be an AccelRef or a NumPy array, got {type(item).__name__}")
    return item.shape


def _extents(item: Operand) -> tuple[int, ...]:
    shape = _shape(item)
    if not shape:
        raise ValueError("an item must have at least one axis")
    return shape


async def _stack(device: Device, items: list[Operand], pad: complex | None) -> AccelRef:
    if not all(type(item) is np.ndarray for item in items):
        return await device.ask(Stack(items, pad))
    shapes, dtypes = [item.shape for item in items], {item.dtype for item in items}
    is_even = len(set(shapes)) == 1
    if len(dtypes) > 1 or not (is_even or (pad is not None and len(set(map(len, shapes))) == 1)):
        # The operation raises an error with the reason.
        return await device.ask(Stack(items, pad))
    padded_shape = tuple(max(extents) for extents in zip(*shapes, strict=True))
    host = device.host_empty((len(items), *padded_shape), items[0].dtype)
    if not is_even:
        host[...] = element("padded", "pad", pad, DType.of(items[0].dtype))
    for index, item in enumerate(items):
        its_place: tuple[Any, ...] = (index, *map(slice, item.shape))
        host[its_place] = item
    return await device.put(host)


async def _received(result: BatchResults[Any], *, to_host: bool) -> BatchResults[Any]:
    if to_host and isinstance(result, AccelRef):
        host: Host = await result.to_host()
        return host
    return result
