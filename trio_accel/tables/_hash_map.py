"""A hash map on a device: an object that holds the arrays of its present contents."""

from __future__ import annotations

from typing import NamedTuple

from trio.lowlevel import enable_ki_protection

from ..actors import TaskLock
from ..arrays import argsort, compress, take
from ..backends.base import AccelError, DType, DTypeLike, element
from ..devices import AccelRef, Device, Operand, bounded_integer, check_device, composed
from ..devices.operations._named import named_methods
from ..expressions import Elementwise
from ._contents import NAME, FrozenArrays
from ._probing import Probing
from ._sorted import Sorted

__all__ = ["HashMap", "LookupResult", "TableFullError"]


class TableFullError(AccelError):
    """A hash map cannot grow enough for the keys of a call; none of them was inserted."""


class LookupResult(NamedTuple):
    """The contents of a hash map for keys; see `HashMap.lookup`."""

    values: AccelRef
    """The value of each key, and the default where it is missing."""
    found: AccelRef
    """Whether each key is there."""


_looked_up = Elementwise[tuple[AccelRef, AccelRef]](
    "found = place >= 0; values = where(found, v[place], default)",
    inputs=("place", "v", "default"),
    outputs=("values", "found"),
    operation=NAME,
)


class HashMap:
    """A map from integers to numbers, in arrays of a device: open addressing with linear probing.

    A device without kernels of one's own (`DeviceInfo.runs_kernels`) keeps the keys in order instead.

    Each int64 is a key. Floating keys are refused, because NaN is equal to nothing. Arguments are NumPy
    arrays or arrays on the device, and keys may have any shape. Other dtypes than int64 or the map's are
    refused; use ``cast``.

    A change makes new arrays, in a few launches, and then the map adopts them. So a change happens completely
    or not at all: it does not happen if it is cancelled, fails, or is lost with its context. With
    `DeviceOptions.retry` it runs again. Concurrent changes run one after the other, and lookups meanwhile see
    the previous contents. A change copies the table, so insert many keys at once. The arrays survive like
    other arrays: with ``isolation="inline"`` they are lost with the context. A graph keeps the contents that
    the map had at its capture.

    See `Device.ask` for cancellation and the errors that any operation can end with.

    >>> import numpy as np, trio, trio_accel as ta
    >>> async def main() -> None:
    ...     async with ta.open_system("map") as system, system.open_device("cpu") as device:
    ...         prices = ta.tables.HashMap(device, 100, "float64")
    ...         await prices.insert(np.array([7, -1, 7]), np.array([1.0, 2.0, 3.0]))
    ...         values, found = await prices.lookup(np.array([-1, 0, 7]), default=np.nan)
    ...         print(len(prices), await values.to_host(), await found.to_host())
    >>> trio.run(main)
    2 [ 2. nan  3.] [ True False  True]

    Args:
        device: The device.
        capacity: The most keys that it holds. It has 4/3 to 8/3 times as many slots, a power of two, of 16
            bytes and a value each, and as many again during a change.
        dtype: Dtype of the values.

    Raises:
        TypeError: `device` is not a device, or `capacity` no integer, or devices lack this dtype.
        ValueError: `capacity` is below 1.

    Attributes:
        device: The device.
        capacity: The most keys that it holds; `rehash` changes it.
        dtype: Dtype of the values.
    """

    def __init__(self, device: Device, capacity: int, dtype: DTypeLike = "int64") -> None:
        check_device("HashMap", device)
        self.device: Device = device
        _slots(capacity)
        self.capacity: int = capacity
        self.dtype: DType = DType.of(dtype)
        # Elsewhere lookups by kernels are five times as fast as bisection.
        self._form: Probing | Sorted = Probing() if device.info.runs_kernels else Sorted()
        self._contents: FrozenArrays | None = None
        # Ctrl-C must not come between a lock and its release: who takes it is protected.
        self._turn = TaskLock()

    def __repr__(self) -> str:
        return f"<HashMap {len(self)} of {self.capacity} keys, values {self.dtype}, on {self.device.name}>"

    def __len__(self) -> int:
        return self._contents.count if self._contents else 0

    @property
    def load_factor(self) -> float:
        """Its keys as a share of its slots."""
        return len(self) / _slots(self.capacity)

    @composed
    @enable_ki_protection
    async def insert(self, keys: Operand, values: Operand) -> int:
        """Insert keys, or give existing keys other values.

        Of equal keys the last one counts. Slots of erased keys are taken back where room is short.

        Args:
            keys: The keys, int64.
            values: As many values, of the map's dtype.

        Returns:
            How many of the keys are new.

        Raises:
            TypeError: An array of another dtype.
            ValueError: `keys` and `values` have different shapes.
            TableFullError: There would be more keys than the capacity. None was inserted.
        """
        if DType.of(values.dtype) is not self.dtype:
            raise TypeError(f"values must be {self.dtype}, got {values.dtype}; use cast()")
        if keys.shape != values.shape:
            raise ValueError(f"keys have shape {keys.shape}, and values {values.shape}")
        async with self._turn:
            old = await self._now()
            if not keys.size:
                return 0
            if old.used + keys.size > self.capacity:
                old = await self._with_room(old, keys)
            self._contents = contents = await self._form.inserted(old, keys, values)
            return contents.count - old.count

    @composed
    async def lookup(self, keys: Operand, default: complex = 0) -> LookupResult:
        """Look keys up.

        Args:
            keys: The keys, int64.
            default: The value of missing keys.

        Returns:
            Values and whether each key was found, in the shape of `keys`.

        Raises:
            TypeError, ValueError: Keys of another dtype, or a default that the map's dtype cannot hold.
        """
        default_value, now = element(NAME, "default", default, self.dtype), await self._now()
        slots = await self._form.find(now, keys)
        # A truth value next to integers would become an integer.
        default_value = bool(default_value) if self.dtype is DType.bool else default_value
        return LookupResult(*await _looked_up(slots, now.values, default_value))

    @composed
    @enable_ki_protection
    async def erase(self, keys: Operand) -> int:
        """Erase keys; missing keys are ignored.

        Args:
            keys: The keys, int64.

        Returns:
            How many keys were erased.

        Raises:
            TypeError: Keys of another dtype.
        """
        async with self._turn:
            old = await self._now()
            self._contents = contents = await self._form.erased(old, keys)
            return old.count - contents.count

    @composed
    async def items(self) -> tuple[AccelRef, AccelRef]:
        """Take out all keys, in ascending order, and their values.

        Raises:
            NotSupportedError: See `arrays.sort`.
        """
        keys, values = await self._form.taken(await self._now())
        order = await argsort(keys)
        return await take(keys, order), await take(values, order)

    @composed
    @enable_ki_protection
    async def rehash(self, capacity: int | None = None) -> None:
        """Make the table again, without the slots of erased keys.

        Args:
            capacity: The most keys that it is to hold; by default as many as now.

        Raises:
            TypeError, ValueError: `capacity` is not an integer from 1 on.
            TableFullError: There are more keys. The map stays as it was.
        """
        new_capacity = self.capacity if capacity is None else capacity
        _slots(new_capacity)
        async with self._turn:
            old = await self._now()
            if old.count > new_capacity:
                raise self._full(f"{old.count} keys", new_capacity)
            self._contents, self.capacity = await self._rehashed(old, new_capacity), new_capacity

    async def _now(self) -> FrozenArrays:
        if self._contents is None:
            contents = await self._empty(self.capacity)
            # Another task may have been faster.
            self._contents = self._contents or contents
        return self._contents

    async def _empty(self, capacity: int, dtype: DTypeLike | None = None) -> FrozenArrays:
        return await self._form.empty(self.device, _slots(capacity), DType.of(dtype or self.dtype))

    async def _rehashed(self, old: FrozenArrays, capacity: int) -> FrozenArrays:
        contents = await self._empty(capacity)
        return await self._form.inserted(contents, *await self._form.taken(old)) if old.count else contents

    async def _with_room(self, old: FrozenArrays, keys: Operand) -> FrozenArrays:
        """Count the new keys, and reclaim slots if the free ones do not suffice."""
        missing = await compress(await self._form.find(old, keys) < 0, keys)
        new = missing.size
        if old.count + new > self.capacity:
            # Some may be equal: slots of their own count them.
            new = (await self._form.inserted(await self._empty(new, "int64"), missing, missing)).count
        if old.count + new > self.capacity:
            raise self._full(f"{new} new keys beside {old.count}", self.capacity)
        return await self._rehashed(old, self.capacity) if old.used + new > self.capacity else old

    def _full(self, subject: str, capacity: int) -> TableFullError:
        reason = f"{subject} are more than the capacity {capacity}; rehash() with a larger one makes room"
        return TableFullError(f"{NAME}: {reason}", device=self.device.name)


def _slots(capacity: int) -> int:
    count = bounded_integer("HashMap", "capacity", capacity)
    if count < 1:
        raise ValueError(f"HashMap: capacity must be at least 1, got {capacity}")
    return 1 << (count * 4 // 3).bit_length()


named_methods(NAME, HashMap)
