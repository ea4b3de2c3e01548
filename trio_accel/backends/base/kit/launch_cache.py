"""The choice of repeated launches that are cached, and of those that make way for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

import attrs

_VALUE = TypeVar("_VALUE")
_SOON = 3
_MOST_COUNTED = 1024
_PATIENCE = 8
_MOST_REFUSED = 16


@attrs.define(eq=False)
class GraphCall:
    """A call without its stream, addresses and factors. Known by its identity, which a key holds.

    Whether it can be cached may depend on the factors, and is taken not to depend on the rest. A refusal is
    remembered for a few factors; a call that was refused with so many is refused with all others.

    Attributes:
        owner: The library that has what such a call needs.
    """

    owner: object
    _refused: set[bytes] = attrs.field(factory=set[bytes], init=False, repr=False)

    def is_refused(self, key: Key) -> bool:
        """Tell whether it turned out that it cannot be cached, with the factors of a key of its own."""
        refused = self._refused
        return bool(refused) and (len(refused) >= _MOST_REFUSED or _factors_of(key) in refused)

    def refuse(self, key: Key) -> None:
        """It cannot be cached, with the factors of a key of its own."""
        if len(self._refused) < _MOST_REFUSED:
            self._refused.add(_factors_of(key))


Key: TypeAlias = tuple[GraphCall, Any, *tuple[int | bytes, ...]]
"""A call, its stream, and whatever else it was made for: addresses, and last its factors, if it has any."""


def _factors_of(key: Key) -> bytes:
    last = key[-1]
    return last if isinstance(last, bytes) else b""


@attrs.define(eq=False)
class CacheEntry(Generic[_VALUE]):
    """A value that is cached.

    Attributes:
        value: The value.
        last: When it was used last, as its stream counts.
        looked: Value of `last` when the clock's hand passed.
    """

    value: _VALUE
    last: int
    looked: int = -1


@attrs.define(eq=False)
class LaunchCache(Generic[_VALUE]):
    """A bounded cache; a value is stored from the third time on that its key is seen.

    One that has not been used since it was looked at before makes way, by a clock with one hand. It moves by
    one at every eighth call that would be stored if there were room. A program that uses a few more in turn
    than there is room for loses no entries, and pays for no entry that is thrown away before its use.

    Args:
        is_free: Whether an entry can be thrown away: by its key, and when it was used last.
        discard: Throws it away.

    Attributes:
        most: How many there may be.
        entries: The entries by their keys; the user of one writes its `last`.
    """

    _is_free: Callable[[Key, int], bool]
    _discard: Callable[[_VALUE], None]
    most: int = 0
    entries: dict[Key, CacheEntry[_VALUE]] = attrs.field(factory=dict[Key, CacheEntry[_VALUE]])
    _counts: dict[Key, int] = attrs.field(factory=dict[Key, int])
    _waits: int = 0

    def is_due(self, key: Key) -> bool:
        """Count a key that is not cached; returns whether it is to be stored now, if there is room."""
        counts = self._counts
        count = counts.get(key, 0) + 1
        if count >= _SOON:
            return True
        if count == 1 and len(counts) >= _MOST_COUNTED:
            counts.clear()
        counts[key] = count
        return False

    def has_room(self) -> bool:
        """Tell whether there is room for one that is due; another may make way for it."""
        return len(self.entries) < self.most or self._make_room()

    def store(self, key: Key, value: _VALUE, now: int) -> None:
        """Store a value that was due, and is used now."""
        self.entries[key] = CacheEntry(value, now)
        self.forget(key)

    def forget(self, key: Key) -> None:
        """Count a key anew."""
        self._counts.pop(key, None)

    def drop(self, owner: object) -> None:
        """Throw away the entries of an owner's calls. Entries that are still in use make way later."""
        for key, entry in tuple(self.entries.items()):
            if key[0].owner is owner and self._is_free(key, entry.last):
                self._throw_away(key)
        for key in tuple(self._counts):
            if key[0].owner is owner:
                self.forget(key)

    def clear(self) -> None:
        """Throw everything away."""
        self._counts.clear()
        for key in tuple(self.entries):
            self._throw_away(key)

    def remove(self, key: Key) -> None:
        """Throw one away."""
        if key in self.entries:
            self._throw_away(key)

    def _make_room(self) -> bool:
        self._waits += 1
        if self._waits % _PATIENCE or not self.entries:
            return False
        key = next(iter(self.entries))
        entry = self.entries[key]
        if entry.looked == entry.last and self._is_free(key, entry.last):
            self._throw_away(key)
            return True
        # The hand goes on: this one comes last now.
        entry.looked = entry.last
        self.entries[key] = self.entries.pop(key)
        return False

    def _throw_away(self, key: Key) -> None:
        self._discard(self.entries.pop(key).value)
