"""The table of cached plans: prepared work that is found again by its key.

The application keeps recordings of chains, and launch templates for each worker. The process that launches
keeps recipes and their bindings to blocks, and graphs that the driver has captured. All have the same states,
bound and eviction:

* A key without a plan is *seen*: its hash is in a ring. It takes no entry, so it evicts no plan.
* A plan is *recorded* when it is made. A binding to blocks makes it *bound*, and prepared kernels make it
  *armed*. A plan without a recording is *refused*, so that nobody tries to record it again.
* A full table evicts by a clock: the hand skips a plan that was used since its last turn, and a plan in
  flight. If plans are expensive, the hand is patient: it moves by one plan at every eighth key that needs a
  place. So a program that uses a few more keys in turn than there are places keeps its plans.

Threads of streams share a table, so its changes take a lock. A look-up needs none, because it is one step of
the interpreter: `KeptPlans.plans.get`. Whoever finds a plan sets its `is_used`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import attrs

from ..contract.errors import NoEdgeError
from ..contract.protocols import KeptCounts

MAX_PLANS = 1024
_MAX_SEEN = 2048

PlanState: TypeAlias = Literal["seen", "recorded", "bound", "armed", "refused", "over"]
PlanStep: TypeAlias = Literal[
    "record", "refuse", "join", "bind", "arm", "unbind", "disarm", "evict", "forget", "close"
]

T = TypeVar("T")
Key: TypeAlias = tuple[Any, ...]

_RETAINED_STATES: tuple[PlanState, ...] = ("recorded", "bound", "armed", "refused")
# The counter that a step adds to.
_COUNTERS: Mapping[PlanStep, str] = {
    "record": "recorded",
    "refuse": "refused",
    "join": "recorded",
    "bind": "bound",
    "arm": "armed",
    "evict": "evicted",
}


@attrs.define(eq=False, on_setattr=None)
class KeptPlan(Generic[T]):
    """One plan of a table.

    Attributes:
        edges: All steps of each state, and the next state.
        key: Its key.
        number: Its number in the table, which is never used again.
        value: The recording.
        binding: The binding of a bound or armed plan.
        state: Its state.
        is_used: Whether it was used since the clock's hand passed.
        in_flight: The number of its users that forbid its eviction.
        last: The time of its last use, as its stream counts; only tables with `is_free` need it.
    """

    edges: ClassVar[Mapping[tuple[PlanState, PlanStep], PlanState]] = {
        ("seen", "record"): "recorded",
        # A graph cannot hold it, or its steps need results in between.
        ("seen", "refuse"): "refused",
        # Neighbours became one launch, or cannot.
        ("recorded", "join"): "recorded",
        ("recorded", "refuse"): "refused",
        ("recorded", "bind"): "bound",
        ("bound", "arm"): "armed",
        # A block was dropped or moved.
        ("bound", "unbind"): "recorded",
        ("armed", "unbind"): "recorded",
        # The driver refuses it, or it takes too long.
        ("armed", "disarm"): "bound",
        # The driver has captured a launch, which has no recording.
        ("seen", "arm"): "armed",
        **{(state, "evict"): "over" for state in _RETAINED_STATES},
        # The other end of a link has forgotten it, or the recording that it depends on has ended.
        **{(state, "forget"): "over" for state in _RETAINED_STATES},
        **{(state, "close"): "over" for state in _RETAINED_STATES},
    }
    key: Key
    number: int
    _counts: KeptCounts
    value: T | None = None
    binding: Any = None
    state: PlanState = attrs.field(default="seen", init=False)
    is_used: bool = attrs.field(default=False, init=False)
    in_flight: int = attrs.field(default=0, init=False)
    last: int = attrs.field(default=0, init=False)

    def move(self, step: PlanStep) -> None:
        """Go to the next state, and count the step.

        Raises:
            NoEdgeError: There is none.
        """
        state = self.edges.get((self.state, step))
        if state is None:
            raise NoEdgeError(f"plan {self.number} is {self.state}: {step!r} does not lead on from there")
        self.state = state
        if state == "over" or step in ("refuse", "unbind"):
            self.binding = None
        counter = _COUNTERS.get(step)
        if counter is not None:
            setattr(self._counts, counter, getattr(self._counts, counter) + 1)


class KeptPlans(Generic[T]):
    """Plans by their keys, with a bound on their number.

    Args:
        bound: The most plans.
        counts: Counts them; several tables may share it.
        on_end: Called with each plan that has left the table, or found no place in it.
        is_free: Returns whether the device allows the eviction of a plan; by default, any plan may be evicted
            that is not in flight.
        patience: The number of keys that need a place until the clock's hand moves by one plan; 0 if it moves
            until it finds a plan to evict.

    Attributes:
        plans: The plans by their keys. Only the table changes it.
        counts: The counts.
        bound: The most plans.
    """

    def __init__(
        self,
        bound: int | None = None,
        counts: KeptCounts | None = None,
        on_end: Callable[[KeptPlan[T]], object] | None = None,
        *,
        is_free: Callable[[KeptPlan[T]], bool] | None = None,
        patience: int = 0,
    ) -> None:
        self.bound: int = MAX_PLANS if bound is None else bound
        self.counts: KeptCounts = KeptCounts() if counts is None else counts
        self.plans: OrderedDict[Key, KeptPlan[T]] = OrderedDict()
        self._on_end = on_end
        # Plans that the collector of garbage wants to end.
        self._dropped: deque[KeptPlan[T]] = deque()
        # Finished plans, before `on_end` was called with them.
        self._over: deque[KeptPlan[T]] = deque()
        self._is_free = is_free
        self._patience = patience
        self._waits = 0
        self._last = 0
        self._ring: deque[int] = deque()
        self._times: dict[int, int] = {}
        self._lock = threading.Lock()

    def see(self, key: Key) -> int:
        """Note a key without a plan; returns how often it was seen among the last 2048.

        A key is counted again from the start after it had a plan.
        """
        with self._lock:
            ring, times, key_hash = self._ring, self._times, hash(key)
            if len(ring) >= _MAX_SEEN:
                oldest = ring.popleft()
                remaining = times.pop(oldest, 1) - 1
                if remaining:
                    times[oldest] = remaining
            ring.append(key_hash)
            count = times.get(key_hash, 0)
            times[key_hash] = count + 1
            return count

    def end_dropped(self, plan: KeptPlan[T]) -> None:
        """Take a plan out, called by the collector of garbage.

        The collector may run while this thread holds the lock. Then the recording goes at once, and the plan
        before the next one is made.
        """
        plan.value = plan.binding = None
        if not self._lock.acquire(blocking=False):
            self._dropped.append(plan)
            return
        try:
            if plan.state != "over":
                self._end(plan, "forget")
        finally:
            self._lock.release()

    def new(self, key: Key) -> KeptPlan[T]:
        """Return a plan without a recording, which is not in the table yet."""
        while self._dropped:
            self.end(self._dropped.popleft())
        with self._lock:
            self._last += 1
            return KeptPlan(key, self._last, self.counts)

    def has_room(self) -> bool:
        """Return whether a new key may have a place; another plan may be evicted for it."""
        with self._lock:
            has_room = len(self.plans) < self.bound or self._evict()
        self._tell()
        return has_room

    def keep(self, plan: KeptPlan[T], value: T | None, step: PlanStep = "record") -> KeptPlan[T]:
        """Add a plan with its recording, or refuse it without one; an existing plan of this key stays.

        Args:
            plan: A new plan.
            value: The recording, or the launcher of a captured launch.
            step: The step of a plan with a value: ``"record"`` or ``"arm"``.

        Returns:
            The plan of this key. It is over at once if no other plan can be evicted.
        """
        with self._lock:
            existing = self.plans.get(plan.key)
            if existing is not None:
                return existing
            plan.value = value
            plan.move("refuse" if value is None else step)
            has_room = True
            while has_room and len(self.plans) >= self.bound:
                has_room = self._evict()
            if has_room:
                # The hand passes it once it was used again.
                plan.is_used = False
                self.plans[plan.key] = plan
                # After its plan has ended, a key is counted again from the start.
                self._times.pop(hash(plan.key), None)
            else:
                self._end(plan, "evict")
        self._tell()
        return plan

    def record(self, key: Key, value: T, step: PlanStep = "record") -> KeptPlan[T]:
        """Add a plan of a key."""
        return self.keep(self.new(key), value, step)

    def end(self, plan: KeptPlan[T], step: PlanStep = "forget") -> None:
        """Take a plan out, if another thread has not."""
        with self._lock:
            if plan.state != "over":
                self._end(plan, step)
        self._tell()

    def drop(self, ends: Callable[[KeptPlan[T]], bool]) -> None:
        """Remove plans; a plan in use stays until it is evicted."""
        with self._lock:
            for plan in tuple(self.plans.values()):
                if ends(plan) and self._may_end(plan):
                    self._end(plan, "forget")
        self._tell()

    def close(self) -> None:
        """Take all out, and forget what was seen."""
        with self._lock:
            for plan in tuple(self.plans.values()):
                self._end(plan, "close")
            self._ring.clear()
            self._times.clear()
        self._tell()

    def _may_end(self, plan: KeptPlan[T]) -> bool:
        return not plan.in_flight and (self._is_free is None or self._is_free(plan))

    def _evict(self) -> bool:
        """Have the clock's hand find a plan that makes way; returns whether there is one."""
        plans = self.plans
        # After one turn, no plan is in use.
        moves = 2 * len(plans)
        if self._patience:
            self._waits += 1
            moves = int(bool(plans) and self._waits % self._patience == 0)
        for _ in range(moves):
            plan = next(iter(plans.values()))
            if not plan.is_used and self._may_end(plan):
                self._end(plan, "evict")
                return True
            plan.is_used = False
            plans.move_to_end(plan.key)
        return False

    def _end(self, plan: KeptPlan[T], step: PlanStep) -> None:
        plan.move(step)
        if self.plans.get(plan.key) is plan:
            del self.plans[plan.key]
        if self._on_end is not None:
            self._over.append(plan)

    def _tell(self) -> None:
        """Call `on_end` with the plans that are over, without the lock, so that nobody waits for it."""
        while self._on_end is not None and self._over:
            try:
                plan = self._over.popleft()
            except IndexError:
                return  # another thread has taken it
            self._on_end(plan)
