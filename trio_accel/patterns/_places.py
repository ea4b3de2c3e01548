"""Whose turn it is for a place of a `ContinuousBatcher`, where sequences grow, and who is set aside.

A sequence *runs*, is *set aside*, or *waits* and was never begun. All have a rank: the order of arrival, in
which a level of priority goes before some arrivals of the level below. These rules choose (D222):

* A step without room sets one aside: of the tenant that has the most for its weight, the last by rank.
* A place or room that is free goes to the tenant that has the least for its weight: first to its sequences
  that were set aside, then to those that wait.
* If none is free, a sequence takes the place of another: of a tenant that has as much or more after both
  have moved; or of its own tenant, if it was set aside for a while and is before the other by rank. So no two
  displace each other in turns.
* One that has its turn, but no room, waits beside the queue, as if it had been set aside. So small ones may
  overtake it.
* The first of all by rank takes the place of any other, and no other takes its place.

Later arrivals have higher ranks. So each sequence is the first at some time, unless it ends before: nobody
waits for ever.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Generic

import attrs

from ._fair_queue import FairQueue, Weights
from ._sequences import PartT, Room, SequenceEntry
from ._submit import ItemT

# Arrivals of the level below that one of a level of priority goes before.
LEVEL_ARRIVALS = 1000
# Steps until a sequence that was set aside takes the place of a later one of its tenant, and until it makes
# way for one when it is back.
_STEPS_UNTIL_REPLACED = 64
# The sequences that wait, and those set aside, that are looked at; the second may be overtaken.
_MOST_CANDIDATES, _MOST_ASIDE = 8, 256
# The part of the mean below which it hardly helps to set a sequence aside.
_LITTLE = 0.125


@attrs.define(eq=False)
class _TenantUses(Generic[ItemT, PartT]):
    """The uses of tenants at one time.

    Attributes:
        first: The first of all by rank.
        held: The part of the room that each sequence with a place has.
        uses: The places and the room that each tenant has, as parts of all.
    """

    weights: Weights
    first: SequenceEntry[ItemT, PartT] | None
    held: dict[SequenceEntry[ItemT, PartT], float]
    place: float
    uses: dict[Hashable, list[float]] = attrs.field(factory=dict[Any, Any], init=False)

    def __attrs_post_init__(self) -> None:
        for entry, held in self.held.items():
            self.count(entry, 1, held)

    def count(self, entry: SequenceEntry[ItemT, PartT], sign: int, room: float) -> None:
        """Give a sequence a place and room, or take both away."""
        use = self.uses.setdefault(entry.tenant, [0.0, 0.0])
        use[0] += sign * self.place
        use[1] += sign * room

    def share(self, entry: SequenceEntry[ItemT, PartT], without: float | None = None) -> float:
        """Return the share of a sequence's tenant, for its weight; or the share without its place and room.

        It is the dominant share of Ghodsi et al., "Dominant Resource Fairness", NSDI 2011.
        """
        places, room = self.uses.get(entry.tenant, (0.0, 0.0))
        if without is not None:
            places, room = places - self.place, room - without
        return max(places, room) / (self.weights.of(entry.tenant) or entry.weight)

    def sorted(self, entries: Iterable[SequenceEntry[ItemT, PartT]]) -> list[SequenceEntry[ItemT, PartT]]:
        """Sort by who is set aside first: who waits for a reader, and those that have little last."""
        little = sum(self.held.values()) / max(len(self.held), 1) * _LITTLE
        return sorted(
            entries,
            key=lambda entry: (
                not entry.is_held,
                -self.share(entry),
                self.held[entry] < little,
                -entry.rank,
            ),
        )


@attrs.define(eq=False)
class SequenceSlots(Generic[ItemT, PartT]):
    """Sequences that run and that were set aside.

    Attributes:
        running: Sequences with a place, in the order in which they came to it.
        aside: Sequences that were set aside, and some that had their turn, but no room.
        leaving: Sequences that run, and are to be set aside for `claimant`.
        claimant: The next one to get a place.
    """

    running: dict[SequenceEntry[ItemT, PartT], None]
    aside: dict[SequenceEntry[ItemT, PartT], None]
    queue: FairQueue[SequenceEntry[ItemT, PartT]]
    weights: Weights
    most: int
    room: Room[ItemT, PartT]
    leaving: list[SequenceEntry[ItemT, PartT]] = attrs.field(factory=list[Any], init=False)
    claimant: SequenceEntry[ItemT, PartT] | None = attrs.field(default=None, init=False)
    # A state in which nobody could come in, and the room that was free in it.
    _seen: object = attrs.field(default=None, init=False)
    _seen_free: float = attrs.field(default=0.0, init=False)

    def take(self, step: int) -> SequenceEntry[ItemT, PartT] | None:
        """Give the next sequence a place, or choose `leaving` for a `claimant`; None if there is no place."""
        while not (self.leaving or (self._state(step) == self._seen and self.room.free <= self._seen_free)):
            heads = [queued.value for queued in self.queue.heads()]
            aside = [entry for entry in self.aside if not entry.is_held]
            look = self._look([*heads, *aside])
            available = self.room.free - sum(map(self._promised, self.running))
            candidates = self._candidates(heads, aside, look)
            self.claimant = None
            for entry, wanted in candidates.items():
                has_room = not self.running or wanted <= available
                if has_room and len(self.running) < self.most:
                    self._leave_queue(entry, step)
                    del self.aside[entry]
                    self.running[entry] = None
                    entry.stays_until = step + _STEPS_UNTIL_REPLACED if entry.is_aside else 0
                    self._seen = None
                    return entry
            if not self._displace(candidates, look, available, step) and self._let_overtake(candidates, step):
                continue
            self._seen, self._seen_free = self._state(step), self.room.free
        return None

    def _candidates(
        self,
        heads: list[SequenceEntry[ItemT, PartT]],
        aside: list[SequenceEntry[ItemT, PartT]],
        look: _TenantUses[ItemT, PartT],
    ) -> dict[SequenceEntry[ItemT, PartT], float]:
        """Return some that want a place, in the order of their turns, with the room that they want."""

        def order(entry: SequenceEntry[ItemT, PartT]) -> tuple[bool, bool, float, bool, int]:
            waits = entry.queued is not None
            is_next = entry is self.claimant, entry is look.first
            return not is_next[0], not is_next[1], look.share(entry), waits, 0 if waits else entry.rank

        # Behind the first ones, the shortest may fit.
        found = sorted(aside, key=lambda entry: entry.sequence.length)[:_MOST_CANDIDATES]
        for kind in (heads, aside):
            found += sorted(kind, key=order)[:_MOST_CANDIDATES]
        return {entry: self._wanted(entry) for entry in sorted(dict.fromkeys(found), key=order)}

    def _displace(
        self,
        candidates: dict[SequenceEntry[ItemT, PartT], float],
        look: _TenantUses[ItemT, PartT],
        available: float,
        step: int,
    ) -> bool:
        """Choose `leaving` for the first that may take the place of others."""
        for entry, wanted in candidates.items():
            self.leaving = self._victims(entry, look, wanted, available, step)
            if self.leaving:
                self._leave_queue(entry, step)
                self.claimant = entry
                for victim in self.leaving:
                    victim.is_moving = True
                return True
        return False

    def by_turn(self) -> list[SequenceEntry[ItemT, PartT]]:
        """Return those that may be set aside if a step has no room, in this order."""
        look = self._look(())
        return look.sorted(self._movable(look))

    def _state(self, step: int) -> object:
        readable = sum(not entry.is_held for entry in self.aside)
        return len(self.running), readable, self.queue.queued, step // (_STEPS_UNTIL_REPLACED // 4)

    def _look(self, others: Iterable[SequenceEntry[ItemT, PartT]]) -> _TenantUses[ItemT, PartT]:
        going = [entry for entry in self.running if not (entry.is_held or entry.is_moving or entry.is_over)]
        first = min([*others, *going], key=lambda entry: entry.rank, default=None)
        held = {entry: self.room.held(entry.sequence) / self.room.total for entry in self.running}
        return _TenantUses(self.weights, first, held, 1 / self.most)

    def _movable(self, look: _TenantUses[ItemT, PartT]) -> list[SequenceEntry[ItemT, PartT]]:
        return [
            entry for entry in self.running if not (entry is look.first or entry.is_moving or entry.is_over)
        ]

    def _leave_queue(self, entry: SequenceEntry[ItemT, PartT], step: int) -> None:
        if entry.queued is not None:
            self.queue.begin(entry.queued)
            entry.queued, entry.since = None, step
            self.aside[entry] = None

    def _let_overtake(self, candidates: Iterable[SequenceEntry[ItemT, PartT]], step: int) -> bool:
        """Have one that waits stand beside the queue, if there is a place, but no room for it."""
        waiting = [entry for entry in candidates if entry.queued is not None]
        is_room = len(self.running) < self.most and len(self.aside) < _MOST_ASIDE
        if is_room and waiting:
            self._leave_queue(waiting[0], step)
        return is_room and bool(waiting)

    def _wanted(self, entry: SequenceEntry[ItemT, PartT]) -> float:
        """Return the room that there must be for a sequence: a small one may use what others leave free."""
        wanted, spare = self.room.wanted(entry.sequence), self.room.spare
        is_small = wanted <= spare and not entry.is_aside
        return wanted if is_small else min(wanted + spare, self.room.total)

    def _promised(self, entry: SequenceEntry[ItemT, PartT]) -> float:
        """Return the room that a sequence with a place has not taken yet."""
        is_growing = entry.is_aside or entry.sequence.is_prefilling
        return self.room.wanted(entry.sequence) if is_growing and not entry.is_over else 0.0

    def _victims(
        self,
        entry: SequenceEntry[ItemT, PartT],
        look: _TenantUses[ItemT, PartT],
        wanted: float,
        available: float,
        step: int,
    ) -> list[SequenceEntry[ItemT, PartT]]:
        """Return those that are to be set aside for a sequence; none if they would not be enough."""
        chosen: list[SequenceEntry[ItemT, PartT]] = []
        rest, part = self._movable(look), wanted / self.room.total
        has_waited = entry.queued is None and step - entry.since >= _STEPS_UNTIL_REPLACED

        def makes_way(one: SequenceEntry[ItemT, PartT]) -> bool:
            if one.is_stuck or one.is_held or entry is look.first:
                return not one.is_stuck
            if entry.tenant == one.tenant:
                return has_waited and entry.rank < one.rank and step >= one.stays_until
            # Sums of floats are equal up to rounding.
            is_fair = look.share(entry) <= look.share(one, look.held[one]) * (1 + 1e-9)
            return is_fair and (has_waited or not entry.is_aside)

        look.count(entry, 1, part)
        while len(self.running) - len(chosen) >= self.most or wanted > available:
            may = [one for one in rest if makes_way(one)]
            if not may:
                break
            victim = look.sorted(may)[0]
            rest.remove(victim)
            chosen.append(victim)
            available += look.held[victim] * self.room.total
            look.count(victim, -1, look.held[victim])
        else:
            return chosen
        for victim in chosen:
            look.count(victim, 1, look.held[victim])
        look.count(entry, -1, part)
        return []
