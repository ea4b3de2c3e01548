"""The contents of a hash map in arrays, and the ways to keep them."""

from __future__ import annotations

from typing import Any, Protocol

import attrs

from ..backends.base import DType
from ..devices import AccelRef, Device, Operand

NAME = "tables.HashMap"


@attrs.frozen(kw_only=True)
class Contents:
    """Arrays that are never written to again (D191).

    Attributes:
        slots: Keys and stamps, a row for each slot; or keys alone, in ascending order.
        values: A value for each slot.
        stamp: The next stamp.
        count: How many keys there are.
        used: At least as many slots as have a key, which may be erased.
    """

    slots: AccelRef
    values: AccelRef
    stamp: int = 1
    count: int = 0
    used: int = 0


class Form(Protocol):
    """A way to keep keys and values in arrays."""

    async def empty(self, device: Device, slots: int, dtype: DType) -> Contents:
        """Make contents without keys."""
        ...

    async def find(self, now: Contents, keys: Operand) -> AccelRef:
        """Find the slots of keys, -1 for keys that are not there."""
        ...

    async def inserted(self, old: Contents, keys: Operand, values: Any) -> Contents:
        """Insert keys, of which the last of equal ones counts."""
        ...

    async def erased(self, old: Contents, keys: Operand) -> Contents:
        """Erase keys."""
        ...

    async def taken(self, now: Contents) -> tuple[AccelRef, AccelRef]:
        """Take all keys and their values, in any order."""
        ...
