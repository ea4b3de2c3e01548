"""The table of kept plans: work that was prepared once, and is found again by its key.

The application keeps recordings of chains, and launch templates for each worker. The process that launches
keeps recipes and their bindings to blocks. All have the same states, bound and eviction:

* A key without a plan is *seen*: its hash is in a ring. It takes no entry, so it evicts no plan.
* A plan is *recorded* when it is made. A binding to blocks makes it *bound*, and prepared kernels make it
  *armed*. A plan without a recording is *refused*, so that nobody tries to record it again.
* A full table evicts by a clock: the hand passes a plan that was used since its last turn, and one in flight.

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
_MAX_SEEN = 1024

PlanState: TypeAlias = Literal["seen", "recorded", "bound", "armed", "refused", "over"]
PlanStep: TypeAlias = Literal[
    "record", "refuse", "join", "bind", "arm", "unbind", "disarm", "evict", "forget", "close"
]

T = TypeVar("T")
Key: TypeAlias = tuple[Any, ...]

_KEPT: tuple[PlanState, ...] = ("recorded", "bound", "armed", "refused")
# The counter that a step adds to.
_COUNTED: Mapping[PlanStep, str] = {
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
        number: Its number in the table, which is never given again.
        value: The recording.
        binding: The binding of a plan that is bound or armed.
        state: Where it is.
        is_used: Whether it was used since the clock's hand passed.
        in_flight: The number of its users that forbid its eviction.
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
        **{(state, "evict"): "over" for state in _KEPT},
        # The other end of a link has forgotten it, or the recording that it depends on has ended.
        **{(state, "forget"): "over" for state in _KEPT},
        **{(state, "close"): "over" for state in _KEPT},
    }
    key: Key
    number: int
    _counts: KeptCounts
    value: T | None = None
    binding: Any = None
    state: PlanState = attrs.field(default="seen", init=False)
    is_used: bool = attrs.field(default=False, init=False)
    in_flight: int = attrs.field(default=0, init=False)

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
        counter = _COUNTED.get(step)
        if counter is not None:
            setattr(self._counts, counter, getattr(self._counts, counter) + 1)


class KeptPlans(Generic[T]):
    """Plans by their keys, with a bound on their number.

    Args:
        bound: The most plans.
        counts: Counts them, for several tables if need be.
        on_end: Called with each plan that has left the table.

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
    ) -> None:
        self.bound: int = MAX_PLANS if bound is None else bound
        self.counts: KeptCounts = KeptCounts() if counts is None else counts
        self.plans: OrderedDict[Key, KeptPlan[T]] = OrderedDict()
        self._on_end = on_end
        self._last = 0
        self._ring: deque[int] = deque()
        self._times: dict[int, int] = {}
        self._lock = threading.Lock()

    def see(self, key: Key) -> int:
        """Note a key without a plan; returns how often it was seen among the last 1024."""
        with self._lock:
            ring, times, seen = self._ring, self._times, hash(key)
            if len(ring) >= _MAX_SEEN:
                oldest = ring.popleft()
                times[oldest] -= 1
                if not times[oldest]:
                    del times[oldest]
            ring.append(seen)
            before = times.get(seen, 0)
            times[seen] = before + 1
            return before

    def new(self, key: Key) -> KeptPlan[T]:
        """Return a plan without a recording, which is not in the table yet."""
        with self._lock:
            self._last += 1
            return KeptPlan(key, self._last, self.counts)

    def keep(self, plan: KeptPlan[T], value: T | None) -> KeptPlan[T]:
        """Add a plan with its recording, or refuse it without one; a plan of this key that is there stays.

        Returns:
            The plan of this key. It is over at once if all others are in flight.
        """
        with self._lock:
            known = self.plans.get(plan.key)
            if known is not None:
                return known
            plan.value = value
            plan.move("refuse" if value is None else "record")
            while len(self.plans) >= self.bound:
                if not self._evict():
                    plan.move("evict")
                    return plan
            # The hand passes it once it was used again.
            plan.is_used = False
            self.plans[plan.key] = plan
            return plan

    def record(self, key: Key, value: T) -> KeptPlan[T]:
        """Add a plan of a key."""
        return self.keep(self.new(key), value)

    def end(self, plan: KeptPlan[T], step: PlanStep = "forget") -> None:
        """Take a plan out."""
        with self._lock:
            self._end(plan, step)

    def close(self) -> None:
        """Take all out, and forget what was seen."""
        with self._lock:
            for plan in tuple(self.plans.values()):
                self._end(plan, "close")
            self._ring.clear()
            self._times.clear()

    def _evict(self) -> bool:
        """Have the clock's hand find a plan that makes way; returns whether there is one."""
        plans = self.plans
        # After one turn, no plan is in use.
        for _ in range(2 * len(plans)):
            plan = next(iter(plans.values()))
            if not (plan.is_used or plan.in_flight):
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
            self._on_end(plan)
