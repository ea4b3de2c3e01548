"""Slots of a hash table: kernels that find, insert and erase keys, for GPUs and by NumPy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from ..arrays import compress, count_nonzero, reshape
from ..backends.base import DType
from ..devices import AccelRef, Device, Operand
from ..expressions import Elementwise
from ..jit import Kernel, cdiv, reads, scalar, updates, writes
from ._contents import NAME, FrozenArrays

_Words: TypeAlias = npt.NDArray[np.int64]

EMPTY = -(1 << 63)
"""The key of free slots, and their stamp. As a key of the program's it has the last slot for itself."""

_kernel = partial(
    Kernel,
    code=Path(__file__).with_name("probing.cu").read_text(encoding="utf-8"),
    grid=lambda n: cdiv(n, 256),
    block=256,
    skip_empty=True,
)
_SIZES, _KEYS = {"n": scalar("int64"), "mask": scalar("int64")}, reads("int64", layout="packed")
FIND = _kernel(
    "hash_find",
    cpu=f"{__name__}:hash_find",
    parameters={
        **_SIZES,
        "slots": reads("int64"),
        "keys": _KEYS,
        "places": writes("int64", shape=lambda keys: keys.shape),
    },
)
"""Find the slots of keys, -1 for keys that are not there."""
# A copy of the slots is changed, so a lost launch changes nothing, and can run again.
STAMP = _kernel(
    "hash_stamp",
    cpu=f"{__name__}:hash_stamp",
    parameters={
        **_SIZES,
        "slots": updates("int64", copy=True),
        "keys": _KEYS,
        "first": scalar("int64"),
    },
)
"""Insert keys, which get the stamps from `first` on; with 0 erase them."""


_stamped = Elementwise[AccelRef](
    "where(s[i(0), 1] >= first, new[maximum(s[i(0), 1], first) - first], old)",
    inputs=("s", "new", "old", "first"),
    operation=NAME,
)


class Probing:
    """Open addressing: keys and stamps in 2**n slots, plus a slot for the key `EMPTY`."""

    async def empty(self, device: Device, slots: int, dtype: DType) -> FrozenArrays:
        """Make contents without keys."""
        table = await device.full((slots + 1, 2), EMPTY, "int64")
        return FrozenArrays(slots=table, values=await device.zeros(slots + 1, dtype))

    async def find(self, now: FrozenArrays, keys: Operand) -> AccelRef:
        """Find the slots of keys."""
        [slot_indices] = await FIND(keys.size, _mask(now), now.slots, keys)
        return slot_indices

    async def inserted(self, old: FrozenArrays, keys: Operand, values: Any) -> FrozenArrays:
        """Stamp the slots of keys, and take the values by their stamps."""
        slots, count = await self._stamped(old, keys, old.stamp)
        flat = await reshape(values, -1) if isinstance(values, AccelRef) else values.reshape(-1)
        new_values = await _stamped(slots, flat, old.values, old.stamp)
        used = old.used + count - old.count
        return FrozenArrays(
            slots=slots, values=new_values, stamp=old.stamp + keys.size, count=count, used=used
        )

    async def erased(self, old: FrozenArrays, keys: Operand) -> FrozenArrays:
        """Take the stamps of keys, which keep their slots."""
        slots, count = await self._stamped(old, keys, 0)
        return attrs.evolve(old, slots=slots, count=count)

    async def taken(self, now: FrozenArrays) -> tuple[AccelRef, AccelRef]:
        """Take the keys with a stamp."""
        is_there = await (now.slots[:, 1] > 0)
        return await compress(is_there, now.slots[:, 0]), await compress(is_there, now.values)

    async def _stamped(self, old: FrozenArrays, keys: Operand, first: int) -> tuple[AccelRef, int]:
        [slots] = await STAMP(keys.size, _mask(old), old.slots, keys, first)
        return slots, int(await count_nonzero(slots[:, 1] > 0).item())


def _mask(now: FrozenArrays) -> int:
    """Return the last place that a key can be hashed to."""
    return now.slots.shape[0] - 2


def hash_find(n: int, mask: int, slots: _Words, keys: _Words, indices: _Words) -> None:
    """Compute `FIND`."""
    slot_indices = _places_of(keys, slots, mask, claims=False)
    indices.reshape(-1)[:] = np.where((slot_indices >= 0) & (slots[slot_indices, 1] > 0), slot_indices, -1)


def hash_stamp(n: int, mask: int, slots: _Words, keys: _Words, first: int) -> None:
    """Compute `STAMP`."""
    slot_indices = _places_of(keys, slots, mask, claims=first > 0)
    if first > 0:
        # The last one of several stamps for one slot stays.
        slots[slot_indices, 1] = first + np.arange(n)
    else:
        slots[slot_indices[slot_indices >= 0], 1] = 0


def _places_of(keys: _Words, slots: _Words, mask: int, *, claims: bool) -> _Words:
    """Look at one slot for each remaining key, again and again."""
    keys, table, word = keys.reshape(-1), slots[:, 0], keys.reshape(-1).astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 1):
        word = (word ^ word >> np.uint64(33)) * np.uint64(factor)
    slot_indices = np.where(keys == EMPTY, mask + 1, word.astype(np.int64) & mask)
    remaining = np.arange(keys.size)
    while remaining.size:
        key, slot = keys[remaining], slot_indices[remaining]
        if claims:
            free = table[slot] == EMPTY
            # One of several that want a slot gets it.
            table[slot[free]] = key[free]
        there = table[slot]
        is_other = there != key
        slot_indices[remaining[is_other & (there == EMPTY)]] = -1
        remaining = remaining[is_other & (there != EMPTY)]
        slot_indices[remaining] = slot_indices[remaining] + 1 & mask
    return slot_indices
