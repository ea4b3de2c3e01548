"""Short work that its asker computes in its own task, where the backend computes on the host.

To wait for a thread takes longer than most steps take: a park, a wake and two turns of the loop. A recorded
chain that was quick in each of its last runs is computed in place, where nothing could tell the difference:
its stream is empty, nothing in flight uses its blocks, nothing waits to be launched, and nobody observes
messages.

These orders matter:

* The checkpoint of the asker comes before. So one that is cancelled never begins, and others have their turn.
* All conditions are looked at behind that checkpoint. Until the end of the work there is no other one, so
  they hold as long as it runs.
* A deadline cannot cut it short. So it has a bound of processor time, and the runs of one turn of the loop
  have one together: `LoopTurn`.
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
"""Nanoseconds of processor time: the most for a run in place, and for each of the runs in a thread before."""
# Seconds of all runs of a turn of the loop, and the most that a turn is taken to last.
_TURN, _LONGEST = 0.0005, 0.002
_FRESH = 32


class LoopTurn:
    """The runs in place of one turn of the loop.

    Trio does not tell where a turn ends. A task runs once in a turn, so where one comes again, the next turn
    has begun.
    """

    __slots__ = ("_began", "_tasks", "spent")

    def __init__(self) -> None:
        self._tasks: set[trio.lowlevel.Task] = set()
        self._began = 0.0
        self.spent: float = 0.0

    def has_room(self, seconds: float) -> bool:
        """Tell whether the task that calls this may compute for so long, in this turn of the loop."""
        task, tasks = trio.lowlevel.current_task(), self._tasks
        now = perf_counter()
        if task in tasks or now - self._began > _LONGEST:
            tasks.clear()
            self._began, self.spent = now, 0.0
        tasks.add(task)
        return not self.spent or self.spent + seconds < _TURN


@attrs.define(eq=False)
class BoundWork:
    """A chain that is bound to blocks: what computes it, with its views and addresses.

    It holds no status words of a launch: those of its operations are the stream's.

    Attributes:
        works: Computes it.
        given: Bytes for what is handed over with each run; None for none.
        result: The array that goes to the host; None for none.
        uses: Uses of the blocks, and whether it writes them.
        is_dropped: Whether a block was freed.
        left: Runs until it is bound anew, as code may have been compiled by then.
    """

    works: Sequence[Callable[[], object]]
    given: HostArray | None
    result: HostArray | None
    uses: Sequence[tuple[BlockUse, bool]]
    is_dropped: bool = False
    left: int = _FRESH

    def drop(self) -> None:
        """Let the memory go."""
        self.works, self.given, self.result = (), None, None
        self.is_dropped = True


class InPlace:
    """Computes chains of one context in place.

    Args:
        engine: The engine of the context.
        library: The actor of graphs.
        actor: Its incarnation.

    Attributes:
        actor: The argument.
        computed: How many runs there were.
    """

    def __init__(self, engine: Engine, library: Ref[LibraryActor], actor: LibraryActor) -> None:
        self.actor: LibraryActor = actor
        self.computed: int = 0
        self._engine = engine
        self._library = library
        kernels, self._queue = actor.place()
        self._kernels = kernels if isinstance(kernels, ComputesInPlace) else None
        self._turn = LoopTurn()
        self._thread = get_ident()
        self._is_stopped = False
        self._outcomes: Outcomes
        # NumPy warns of no overflow here, as in the thread of a stream.
        self._quiet: Context = copy_context()
        self._quiet.run(np.seterr, all="ignore")

    def is_quick(self, recipe: bytes, runs: int) -> bool:
        """Tell whether so many runs in the stream's thread were quick."""
        return self._kernels is not None and self._kernels.quick_runs(recipe, LIMIT_NS) >= runs

    def admits(self, seconds: float) -> bool:
        """Tell whether the task that calls this may compute now: nothing waits, and nothing is in flight.

        A lease waits, too, as long as it is held.

        Args:
            seconds: How long it took last.
        """
        engine, queue = self._engine, self._queue
        # The launch refuses another thread, and tells it.
        if get_ident() != self._thread or self._is_stopped:
            return False
        if engine.is_lost or not engine.gate.order.is_clear or queue.operations or queue.load.outstanding:
            return False
        # The first success of an incarnation has to be told.
        if queue.on_progress is not None:
            return False
        found = unobserved_actor(self._library)
        if found is None or found[0] is not self.actor:
            return False
        self._outcomes = found[1]
        return self._turn.has_room(seconds)

    def stop(self) -> None:
        """Compute nothing more, because the context was poisoned: the next launch finds out."""
        self._is_stopped = True

    def allocate(self, allocations: Sequence[tuple[int, int]]) -> None:
        """Make blocks, and free what the program has let go.

        Raises:
            OutOfMemoryError: There is no memory.
        """
        self._engine.exchange(allocations)

    def bind(self, spec: ChainSpec) -> BoundWork | None:
        """Bind a chain to its blocks; None where it cannot be computed in place."""
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
            device.host_view(spec.written[-1]) if spec.given else None,
            device.host_view(spec.result_at(), write=False) if spec.result else None,
            uses,
        )
        for use, _ in uses:
            use.bound = [
                one for one in use.bound or () if not isinstance(one, BoundWork) or not one.is_dropped
            ]
            use.bound.append(bound)
        return bound

    def compute(self, bound: BoundWork, given: bytes) -> int:
        """Compute a bound chain.

        Returns:
            Nanoseconds of processor time that it took; -1 if it must be launched, because blocks are in use.

        Raises:
            Exception: An error of the work.
        """
        for use, is_written in bound.uses:
            if use.pins and (is_written or (use.last_write is not None and not use.last_write[1].is_done)):
                return -1
        if bound.given is not None:
            bound.given[: len(given)] = np.frombuffer(given, np.uint8)
        bound.left -= 1
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
