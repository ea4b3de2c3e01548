"""Contents in the order of the keys, by functions of arrays: for devices without kernels of one's own."""

from __future__ import annotations

from typing import Any

from ..arrays import argsort, compress, concat, isin, reshape, searchsorted, take
from ..backends.base import DType
from ..devices import AccelRef, Device, Operand
from ..expressions import Elementwise
from ._contents import NAME, FrozenArrays

_matching_position = Elementwise[AccelRef](
    "at = maximum(minimum(place, n - 1), 0); y = where((place < n) & (k[at] == key), at, -1)",
    inputs=("place", "k", "key", "n"),
    operation=NAME,
)
_is_last = Elementwise[AccelRef](
    "(i(0) == n - 1) | (k[minimum(i(0) + 1, n - 1)] != key)", inputs=("k", "key", "n"), operation=NAME
)


class Sorted:
    """Keys in ascending order. Without keys there is one slot all the same, which counts for none."""

    async def empty(self, device: Device, slots: int, dtype: DType) -> FrozenArrays:
        """Make contents without keys."""
        return FrozenArrays(slots=await device.zeros(1, "int64"), values=await device.zeros(1, dtype))

    async def find(self, now: FrozenArrays, keys: Operand) -> AccelRef:
        """Find the slots of keys, by bisection."""
        keys = await _placed(now, keys)
        positions = await searchsorted(now.slots, keys)
        return await _matching_position(positions, now.slots, keys, now.count)

    async def inserted(self, old: FrozenArrays, keys: Operand, values: Any) -> FrozenArrays:
        """Sort all keys; of equal keys the last one given is last."""
        keys, values = await _placed(old, keys), await _on_device(old, values)
        together = await concat([old.slots[: old.count], await reshape(keys, -1)])
        order = await argsort(together)
        in_order = await take(together, order)
        chosen = await compress(await _is_last(in_order, in_order, in_order.size), order)
        all_values = await concat([old.values[: old.count], await reshape(values, -1)])
        count = chosen.size
        return FrozenArrays(
            slots=await take(together, chosen), values=await take(all_values, chosen), count=count, used=count
        )

    async def erased(self, old: FrozenArrays, keys: Operand) -> FrozenArrays:
        """Keep the other keys."""
        keys = await _placed(old, keys)
        have, values = await self.taken(old)
        stays = await isin(have, await reshape(keys, -1), invert=True)
        remaining = await compress(stays, have)
        if not remaining.size:
            return await self.empty(old.slots.device, 1, old.values.dtype)
        return FrozenArrays(
            slots=remaining, values=await compress(stays, values), count=remaining.size, used=remaining.size
        )

    async def taken(self, now: FrozenArrays) -> tuple[AccelRef, AccelRef]:
        """Take the keys as they are."""
        return now.slots[: now.count], now.values[: now.count]


async def _on_device(now: FrozenArrays, array: Any) -> AccelRef:
    return array if isinstance(array, AccelRef) else await now.slots.device.put(array)


async def _placed(now: FrozenArrays, keys: Operand) -> AccelRef:
    """Bring keys to the device.

    Raises:
        TypeError: They are of another dtype, or no array.
        ValueError: They are on another device.
    """
    if DType.of(keys.dtype) is not DType.int64:
        raise TypeError(f"keys must have dtype int64, got {keys.dtype}; use cast()")
    return await _on_device(now, keys)
