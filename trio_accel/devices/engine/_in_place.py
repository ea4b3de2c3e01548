"""Short work that the caller computes in its own task, if the backend computes on the host.

Waiting for a thread takes longer than most steps: a park, a wake and two turns of the loop. A recorded chain
is computed in place if it was quick in each of its last runs, and if nobody could tell the difference: its
stream is empty, nothing in flight uses its blocks, nothing waits to be launched, and nobody observes
messages.

These orders matter:

* The caller's checkpoint precedes the work. So a cancelled caller never begins, and other tasks get their
  turn.
* All conditions are checked after that checkpoint. The work contains no other checkpoint, so they hold while
  it runs.
* A deadline cannot interrupt the work. So its processor time is limited, and all runs in one turn of the loop
  share a limit: `LoopTurn`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from threading import get_ident
from time import perf_counter, thread_time_ns
from typing import Any

import attrs
import numpy as np
import trio

from ...actors import Ref, unobserved_actor
from ...actors._outcomes import Outcomes
from ...backends.base import HostArray
from ...backends.base.contract.ops import ChainSpec
from ...backends.base.kit.library import ComputesInPlace
from ._engine import Engine
from ._in_flight import BlockUse
from ._library import LibraryActor

LIMIT_NS = 400_000
"""The maximum nanoseconds of processor time of a run in place, and of each earlier run in a thread."""
# The maximum seconds of all runs in a turn of the loop, and the assumed maximum length of a turn.
_TURN, _LONGEST = 0.0005, 0.002
_FRESH = 32


class LoopTurn:
    """The runs in place in one turn of the loop.

    Trio does not report where a turn ends. A task runs once in a turn, so when a task runs again, the next
    turn has begun.
    """

    __slots__ = ("_began", "_tasks", "spent")

    def __init__(self) -> None:
        self._tasks: set[trio.lowlevel.Task] = set()
        self._began = 0.0
        self.spent: float = 0.0

    def has_room(self, seconds: float) -> bool:
        """Return whether the calling task may compute for this time in this turn of the loop."""
        task, tasks = trio.lowlevel.current_task(), self._tasks
        now = perf_counter()
        if task in tasks or now - self._began > _LONGEST:
            tasks.clear()
            self._began, self.spent = now, 0.0
        tasks.add(task)
        return not self.spent or self.spent + seconds < _TURN


@attrs.define(eq=False)
class BoundWork:
    """A chain bound to blocks, with its callables, views and addresses.

    It does not hold a launch's status words, because the stream holds them for its operations.

    Attributes:
        works: The callables that compute it.
        host_buffer: The bytes for the host data of each run; None if there are none.
        result: The array that is returned to the host; None if there is none.
        uses: The uses of the blocks, and whether it writes them.
        is_dropped: Whether a block was freed.
        remaining_runs: The remaining runs until it is bound again, because code may have been compiled by
            then.
    """

    works: Sequence[Callable[[], object]]
    host_buffer: HostArray | None
    result: HostArray | None
    uses: Sequence[tuple[BlockUse, bool]]
    is_dropped: bool = False
    remaining_runs: int = _FRESH

    def drop(self) -> None:
        """Drop all references to the memory."""
        self.works, self.host_buffer, self.result = (), None, None
        self.is_dropped = True


class InPlace:
    """Computes chains of one context in place.

    Args:
        engine: The engine of the context.
        library: The graphs actor.
        actor: Its incarnation.

    Attributes:
        actor: The argument.
        computed: The number of runs.
    """

    def __init__(self, engine: Engine, library: Ref[LibraryActor], actor: LibraryActor) -> None:
        self.actor: LibraryActor = actor
        self.computed: int = 0
        self._engine = engine
        self._library = library
        kernels, self._queue = actor.kernels_and_queue()
        self._kernels = kernels if isinstance(kernels, ComputesInPlace) else None
        self._turn = LoopTurn()
        self._thread = get_ident()
        self._is_stopped = False
        self._outcomes: Outcomes
        # NumPy does not warn of overflows here, as in the thread of a stream.
        self._quiet: Context = copy_context()
        self._quiet.run(np.seterr, all="ignore")

    def is_quick(self, recipe: bytes, runs: int) -> bool:
        """Return whether at least `runs` runs in the stream's thread were quick."""
        return self._kernels is not None and self._kernels.quick_runs(recipe, LIMIT_NS) >= runs

    def admits(self, seconds: float) -> bool:
        """Return whether the calling task may compute now: nothing waits, and nothing is in flight.

        A held lease counts as waiting.

        Args:
            seconds: The duration of the last run.
        """
        engine, queue = self._engine, self._queue
        # The launch refuses calls from another thread, with an error.
        if get_ident() != self._thread or self._is_stopped:
            return False
        if engine.is_lost or not engine.gate.order.is_clear or queue.operations or queue.load.outstanding:
            return False
        # The first success of an incarnation has to be reported.
        if queue.on_progress is not None:
            return False
        unobserved = unobserved_actor(self._library)
        if unobserved is None or unobserved[0] is not self.actor:
            return False
        self._outcomes = unobserved[1]
        return self._turn.has_room(seconds)

    def stop(self) -> None:
        """Compute nothing more, because the context was poisoned. The next launch finds out."""
        self._is_stopped = True

    def allocate(self, allocations: Sequence[tuple[int, int]]) -> None:
        """Make blocks, and free blocks that the program has released.

        Raises:
            OutOfMemoryError: There is not enough memory.
        """
        self._engine.exchange(allocations)

    def bind(self, spec: ChainSpec) -> BoundWork | None:
        """Bind a chain to its blocks; return None if it cannot be computed in place."""
        assert self._kernels is not None  # it was quick
        works = self._kernels.bind_chain(spec, self._queue.stream)
        if works is None:
            return None
        device: Any = self._engine.device
        changed = {array.block for array in (*spec.updated, *spec.written)}
        blocks = dict.fromkeys([array.block for array in spec.arrays])
        uses = [(self._engine.uses[block], block in changed) for block in blocks]
        bound = BoundWork(
            works,
            device.host_view(spec.written[-1]) if spec.host_data else None,
            device.host_view(spec.result_at(), write=False) if spec.result else None,
            uses,
        )
        for use, _ in uses:
            use.bound = [
                work for work in use.bound or () if not isinstance(work, BoundWork) or not work.is_dropped
            ]
            use.bound.append(bound)
        return bound

    def compute(self, bound: BoundWork, payload: bytes) -> int:
        """Compute a bound chain.

        Returns:
            The nanoseconds of processor time; -1 if it must be launched, because blocks are in use.

        Raises:
            Exception: The work failed.
        """
        for use, is_written in bound.uses:
            if use.pins and (is_written or (use.last_write is not None and not use.last_write[1].is_done)):
                return -1
        if bound.host_buffer is not None:
            bound.host_buffer[: len(payload)] = np.frombuffer(payload, np.uint8)
        bound.remaining_runs -= 1
        began, turn, used = perf_counter(), self._turn, thread_time_ns()
        self._quiet.run(_run, bound.works)
        turn.spent += perf_counter() - began
        self.computed += 1
        self._engine.enqueuer.launched += 1
        self._engine.completer.completed += 1
        self._outcomes.handled += 1
        return thread_time_ns() - used


def _run(works: Sequence[Callable[[], object]]) -> None:
    for work in works:
        work()
