"""The contents of a hash map in arrays."""

from __future__ import annotations

import attrs

from ..devices import AccelRef

NAME = "tables.HashMap"


@attrs.frozen(kw_only=True)
class FrozenArrays:
    """Arrays that are never written to again (D191).

    Attributes:
        slots: Keys and stamps, a row for each slot; or only keys, in ascending order.
        values: A value for each slot.
        stamp: The next stamp.
        count: The number of keys.
        used: At least the number of slots with a key, which may be erased.
    """

    slots: AccelRef
    values: AccelRef
    stamp: int = 1
    count: int = 0
    used: int = 0
