"""Which of the things that are done again and again are kept, and which of those makes way for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

import attrs

__all__ = ["Call", "Kept", "Key", "Repeats"]

_THING = TypeVar("_THING")
_SOON = 3
_MOST_COUNTED = 1024
_PATIENCE = 8
_MOST_REFUSED = 16


@attrs.define(eq=False)
class Call:
    """What is done: all but its stream, addresses and factors. Known by its identity, which a key holds.

    Whether it can be kept may depend on the factors, and is taken not to depend on the rest. What cannot is
    remembered for a few factors; a call that was refused with so many is refused with all others.

    Attributes:
        owner: Whoever keeps what such a call needs.
    """

    owner: object
    _refused: set[bytes] = attrs.field(factory=set[bytes], init=False, repr=False)

    def is_refused(self, key: Key) -> bool:
        """Whether it turned out that it cannot be kept, with the factors of a key of its own."""
        refused = self._refused
        return bool(refused) and (len(refused) >= _MOST_REFUSED or _factors_of(key) in refused)

    def refuse(self, key: Key) -> None:
        """It cannot be kept, with the factors of a key of its own."""
        if len(self._refused) < _MOST_REFUSED:
            self._refused.add(_factors_of(key))


Key: TypeAlias = tuple[Call, Any, *tuple[int | bytes, ...]]
"""A call, its stream, and whatever else it was made for: addresses, and last its factors, if it has any."""


def _factors_of(key: Key) -> bytes:
    last = key[-1]
    return last if isinstance(last, bytes) else b""


@attrs.define(eq=False)
class Kept(Generic[_THING]):
    """Something that is kept.

    Attributes:
        thing: What.
        last: When it was used last, as its stream counts.
        looked: What `last` was when it was looked at.
    """

    thing: _THING
    last: int
    looked: int = -1


class Repeats(Generic[_THING]):
    """So many things at most, each from the third time on that its key is seen.

    One that has not been used since it was looked at before makes way, by a clock with one hand. It moves by
    one at every eighth call that would be kept if there were room: who uses a few more in turn than there is
    room for loses none of those that are kept, and pays for none that is thrown away before it is used.

    Args:
        is_free: Whether something that is kept can be thrown away: by its key, and when it was used last.
        discard: Throws it away.

    Attributes:
        most: How many there may be.
        kept: By their keys; whoever uses one writes its `last`.
    """

    __slots__ = ("_counts", "_discard", "_is_free", "_waits", "kept", "most")

    def __init__(self, is_free: Callable[[Key, int], bool], discard: Callable[[_THING], None]) -> None:
        self._is_free = is_free
        self._discard = discard
        self._counts: dict[Key, int] = {}
        self._waits = 0
        self.most: int = 0
        self.kept: dict[Key, Kept[_THING]] = {}

    def is_due(self, key: Key) -> bool:
        """Count a key that is not kept; returns whether it is to be kept now, if there is room."""
        counts = self._counts
        count = counts.get(key, 0) + 1
        if count >= _SOON:
            return True
        if count == 1 and len(counts) >= _MOST_COUNTED:
            counts.clear()
        counts[key] = count
        return False

    def has_room(self) -> bool:
        """Whether there is room for one that is due; another may make way for it."""
        return len(self.kept) < self.most or self._make_room()

    def keep(self, key: Key, thing: _THING, now: int) -> None:
        """Keep something that was due, and is used now."""
        self.kept[key] = Kept(thing, now)
        self.forget(key)

    def forget(self, key: Key) -> None:
        """Count a key anew."""
        self._counts.pop(key, None)

    def drop(self, owner: object) -> None:
        """Throw away what calls of an owner made. What is in use yet makes way later: nobody asks for it."""
        for key, kept in tuple(self.kept.items()):
            if key[0].owner is owner and self._is_free(key, kept.last):
                self._throw_away(key)
        for key in tuple(self._counts):
            if key[0].owner is owner:
                self.forget(key)

    def clear(self) -> None:
        """Throw everything away."""
        self._counts.clear()
        for key in tuple(self.kept):
            self._throw_away(key)

    def remove(self, key: Key) -> None:
        """Throw one away."""
        if key in self.kept:
            self._throw_away(key)

    def _make_room(self) -> bool:
        self._waits += 1
        if self._waits % _PATIENCE or not self.kept:
            return False
        key = next(iter(self.kept))
        kept = self.kept[key]
        if kept.looked == kept.last and self._is_free(key, kept.last):
            self._throw_away(key)
            return True
        # The hand goes on: this one comes last now.
        kept.looked = kept.last
        self.kept[key] = self.kept.pop(key)
        return False

    def _throw_away(self, key: Key) -> None:
        self._discard(self.kept.pop(key).thing)
