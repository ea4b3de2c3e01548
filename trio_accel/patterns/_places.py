"""The places of a `ContinuousBatcher` with growing sequences: who gets one, and who is set aside.

A sequence *runs*, is *set aside*, or *waits* and was never begun. All have a rank: the order of arrival, in
which a priority level precedes some arrivals of the level below. These rules choose (D222):

* A step without room sets a sequence aside: from the tenant with the most for its weight, the last by rank.
* Free places or room go to the tenant with the least for its weight: first to its set-aside sequences, then
  to its waiting ones.
* If none is free, a sequence takes the place of another: of a tenant that has as much or more after both have
  moved; or of its own tenant, if it was set aside for a while and precedes the other by rank. So no two
  displace each other in turns.
* If it is the turn of a sequence but there is no room, the sequence waits outside the queue, as if it had
  been set aside. So small ones may overtake it.
* The first of all by rank takes the place of any other, and no other takes its place.

Later arrivals have higher ranks. So each sequence is the first at some time, unless it ends before: nobody
waits forever.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Generic

import attrs

from ._fair_queue import FairQueue, Weights
from ._sequences import PartT, Room, SequenceEntry
from ._submit import ItemT

# The number of arrivals in the level below that a higher priority level precedes.
LEVEL_ARRIVALS = 1000
# The number of steps until a set-aside sequence replaces a later one of its tenant, and until a sequence that
# came back makes way for one.
_STEPS_UNTIL_REPLACED = 64
# The numbers of waiting and set-aside sequences to consider; the latter may be overtaken.
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
    slot_share: float
    uses: dict[Hashable, list[float]] = attrs.field(factory=dict[Any, Any], init=False)

    def __attrs_post_init__(self) -> None:
        for entry, held in self.held.items():
            self.count(entry, 1, held)

    def count(self, entry: SequenceEntry[ItemT, PartT], sign: int, room: float) -> None:
        """Give a sequence a place and room, or take both away."""
        use = self.uses.setdefault(entry.tenant, [0.0, 0.0])
        use[0] += sign * self.slot_share
        use[1] += sign * room

    def share(self, entry: SequenceEntry[ItemT, PartT], without: float | None = None) -> float:
        """Return the share of a sequence's tenant, for its weight; or the share without its place and room.

        It is the dominant share of Ghodsi et al., "Dominant Resource Fairness", NSDI 2011.
        """
        slots, room = self.uses.get(entry.tenant, (0.0, 0.0))
        if without is not None:
            slots, room = slots - self.slot_share, room - without
        return max(slots, room) / (self.weights.of(entry.tenant) or entry.weight)

    def sorted(self, entries: Iterable[SequenceEntry[ItemT, PartT]]) -> list[SequenceEntry[ItemT, PartT]]:
        """Sort for setting aside: sequences that wait for readers first, sequences with little room last."""
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
    """The running and set-aside sequences.

    Attributes:
        running: Sequences with a place, in the order in which they got it.
        aside: Sequences set aside, and some whose turn has come without enough room.
        leaving: Running sequences to set aside for `claimant`.
        claimant: The next sequence to get a place.
    """

    running: dict[SequenceEntry[ItemT, PartT], None]
    aside: dict[SequenceEntry[ItemT, PartT], None]
    queue: FairQueue[SequenceEntry[ItemT, PartT]]
    weights: Weights
    max_running: int
    room: Room[ItemT, PartT]
    leaving: list[SequenceEntry[ItemT, PartT]] = attrs.field(factory=list[Any], init=False)
    claimant: SequenceEntry[ItemT, PartT] | None = attrs.field(default=None, init=False)
    # A state in which nobody could join, and the free room in it.
    _stalled_state: object = attrs.field(default=None, init=False)
    _stalled_free: float = attrs.field(default=0.0, init=False)

    def take(self, step: int) -> SequenceEntry[ItemT, PartT] | None:
        """Give the next sequence a place, or choose `leaving` for a `claimant` and return None."""
        while not (
            self.leaving
            or (self._state(step) == self._stalled_state and self.room.free <= self._stalled_free)
        ):
            heads = [queued.value for queued in self.queue.heads()]
            aside = [entry for entry in self.aside if not entry.is_held]
            uses = self._tenant_uses([*heads, *aside])
            available = self.room.free - sum(map(self._promised, self.running))
            candidates = self._candidates(heads, aside, uses)
            self.claimant = None
            for entry, demand in candidates.items():
                has_room = not self.running or demand <= available
                if has_room and len(self.running) < self.max_running:
                    self._leave_queue(entry, step)
                    del self.aside[entry]
                    self.running[entry] = None
                    entry.stays_until = step + _STEPS_UNTIL_REPLACED if entry.is_aside else 0
                    self._stalled_state = None
                    return entry
            if not self._displace(candidates, uses, available, step) and self._let_overtake(candidates, step):
                continue
            self._stalled_state, self._stalled_free = self._state(step), self.room.free
        return None

    def _candidates(
        self,
        heads: list[SequenceEntry[ItemT, PartT]],
        aside: list[SequenceEntry[ItemT, PartT]],
        uses: _TenantUses[ItemT, PartT],
    ) -> dict[SequenceEntry[ItemT, PartT], float]:
        """Return some sequences that want a place, in the order of their turns, with the wanted room."""

        def order(entry: SequenceEntry[ItemT, PartT]) -> tuple[bool, bool, float, bool, int]:
            waits = entry.queued is not None
            is_next = entry is self.claimant, entry is uses.first
            return not is_next[0], not is_next[1], uses.share(entry), waits, 0 if waits else entry.rank

        # After the first ones, the shortest may fit.
        shortlist = sorted(aside, key=lambda entry: entry.sequence.length)[:_MOST_CANDIDATES]
        for kind in (heads, aside):
            shortlist += sorted(kind, key=order)[:_MOST_CANDIDATES]
        return {entry: self._demand_of(entry) for entry in sorted(dict.fromkeys(shortlist), key=order)}

    def _displace(
        self,
        candidates: dict[SequenceEntry[ItemT, PartT], float],
        uses: _TenantUses[ItemT, PartT],
        available: float,
        step: int,
    ) -> bool:
        """Choose `leaving` for the first candidate that may take the place of others."""
        for entry, demand in candidates.items():
            self.leaving = self._victims(entry, uses, demand, available, step)
            if self.leaving:
                self._leave_queue(entry, step)
                self.claimant = entry
                for victim in self.leaving:
                    victim.is_moving = True
                return True
        return False

    def by_turn(self) -> list[SequenceEntry[ItemT, PartT]]:
        """Return the sequences that may be set aside if a step lacks room, in this order."""
        uses = self._tenant_uses(())
        return uses.sorted(self._movable(uses))

    def _state(self, step: int) -> object:
        readable = sum(not entry.is_held for entry in self.aside)
        return len(self.running), readable, self.queue.queued, step // (_STEPS_UNTIL_REPLACED // 4)

    def _tenant_uses(self, waiting: Iterable[SequenceEntry[ItemT, PartT]]) -> _TenantUses[ItemT, PartT]:
        going = [entry for entry in self.running if not (entry.is_held or entry.is_moving or entry.is_over)]
        first = min([*waiting, *going], key=lambda entry: entry.rank, default=None)
        held = {entry: self.room.held(entry.sequence) / self.room.total for entry in self.running}
        return _TenantUses(self.weights, first, held, 1 / self.max_running)

    def _movable(self, uses: _TenantUses[ItemT, PartT]) -> list[SequenceEntry[ItemT, PartT]]:
        return [
            entry for entry in self.running if not (entry is uses.first or entry.is_moving or entry.is_over)
        ]

    def _leave_queue(self, entry: SequenceEntry[ItemT, PartT], step: int) -> None:
        if entry.queued is not None:
            self.queue.begin(entry.queued)
            entry.queued, entry.since = None, step
            self.aside[entry] = None

    def _let_overtake(self, candidates: Iterable[SequenceEntry[ItemT, PartT]], step: int) -> bool:
        """If a place is free, but a waiting sequence lacks room, let it wait outside the queue."""
        waiting = [entry for entry in candidates if entry.queued is not None]
        is_room = len(self.running) < self.max_running and len(self.aside) < _MOST_ASIDE
        if is_room and waiting:
            self._leave_queue(waiting[0], step)
        return is_room and bool(waiting)

    def _demand_of(self, entry: SequenceEntry[ItemT, PartT]) -> float:
        """Return the room required for a sequence: a small one may use what others leave free."""
        demand, spare = self.room.demand(entry.sequence), self.room.spare
        is_small = demand <= spare and not entry.is_aside
        return demand if is_small else min(demand + spare, self.room.total)

    def _promised(self, entry: SequenceEntry[ItemT, PartT]) -> float:
        """Return the room that a sequence with a place has not taken yet."""
        is_growing = entry.is_aside or entry.sequence.is_prefilling
        return self.room.demand(entry.sequence) if is_growing and not entry.is_over else 0.0

    def _victims(
        self,
        entry: SequenceEntry[ItemT, PartT],
        uses: _TenantUses[ItemT, PartT],
        demand: float,
        available: float,
        step: int,
    ) -> list[SequenceEntry[ItemT, PartT]]:
        """Return the sequences to set aside for a sequence; empty if they would not be enough."""
        chosen: list[SequenceEntry[ItemT, PartT]] = []
        rest, part = self._movable(uses), demand / self.room.total
        has_waited = entry.queued is None and step - entry.since >= _STEPS_UNTIL_REPLACED

        def makes_way(holder: SequenceEntry[ItemT, PartT]) -> bool:
            if holder.is_stuck or holder.is_held or entry is uses.first:
                return not holder.is_stuck
            if entry.tenant == holder.tenant:
                return has_waited and entry.rank < holder.rank and step >= holder.stays_until
            # Sums of floats are equal up to rounding.
            is_fair = uses.share(entry) <= uses.share(holder, uses.held[holder]) * (1 + 1e-9)
            return is_fair and (has_waited or not entry.is_aside)

        uses.count(entry, 1, part)
        while len(self.running) - len(chosen) >= self.max_running or demand > available:
            may = [holder for holder in rest if makes_way(holder)]
            if not may:
                break
            victim = uses.sorted(may)[0]
            rest.remove(victim)
            chosen.append(victim)
            available += uses.held[victim] * self.room.total
            uses.count(victim, -1, uses.held[victim])
        else:
            return chosen
        for victim in chosen:
            uses.count(victim, 1, uses.held[victim])
        uses.count(entry, -1, part)
        return []
