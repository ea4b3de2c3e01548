"""Waits of tasks and launches: for a time, an arrival, a context, a turn in the order, a call of `notify`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable

import trio
from trio.lowlevel import enable_ki_protection

from ...actors import WAKE_VALUE


class Availability:
    """The generations of a device, from the first to its end.

    Attributes:
        generation: Number of the current one, or of the last while there is none; 0 before the first.
        is_ready: Whether there is one now.
        is_ended: Whether none will follow.
        is_shut: Whether requests are refused: none will follow, or not before the device is opened again.
    """

    __slots__ = ("_changed", "generation", "is_ended", "is_ready", "is_shut")

    def __init__(self) -> None:
        self.generation: int = 0
        self.is_ready: bool = False
        self.is_ended: bool = False
        self.is_shut: bool = False
        self._changed = trio.lowlevel.ParkingLot()

    def begin(self, generation: int) -> None:
        """Begin a generation: its context is ready."""
        self.generation = generation
        self.is_ready = True
        self.is_shut = False
        self._changed.unpark_all()

    def shut(self) -> None:
        """Have requests refused until the next generation begins."""
        self.is_shut = True
        self._changed.unpark_all()

    def interrupt(self) -> None:
        """End the generation: the context is gone, and another may follow."""
        self.is_ready = False
        self._changed.unpark_all()

    def end(self) -> None:
        """End the generations: no context follows."""
        self.is_ready = False
        self.is_ended = self.is_shut = True
        self._changed.unpark_all()

    async def wait_changed(self) -> None:
        """Wait for the next change."""
        await self._changed.park()

    async def watch(self) -> AsyncGenerator[int]:
        """Iterate over the generations: the current one, then each new one, until the end."""
        seen = 0
        while not self.is_ended:
            if self.is_ready and self.generation != seen:
                seen = self.generation
                yield seen
            else:
                await self._changed.park()


class Arrival:
    """Something that is on its way, such as a host array that a thread copies.

    Operations that need it are not launched before. A stream that were held for it instead would hold up
    every call to the driver that waits for the context, and with it perhaps the thread that has to release
    the stream (D50).

    Attributes:
        is_over: Whether it is there, or never will be.
        failure: Why it never will be.
    """

    __slots__ = ("__weakref__", "_waiting", "failure", "is_over")

    def __init__(self) -> None:
        self.is_over: bool = False
        self.failure: Exception | None = None
        self._waiting: list[Callable[[], None]] = []

    def tell(self, notify: Callable[[], None]) -> None:
        """Have somebody told when it is over; on the Trio thread."""
        if self.is_over:
            notify()
        else:
            self._waiting.append(notify)

    def end(self, failure: Exception | None = None) -> None:
        """Note that it is over, and tell its waiters; on the Trio thread."""
        self.is_over = True
        self.failure = failure
        waiting, self._waiting = self._waiting, []
        for notify in waiting:
            notify()


class Alarms:
    """Callbacks with deadlines on Trio's clock. One that is dropped is let go of at once."""

    __slots__ = ("_alarms", "_changed")

    def __init__(self) -> None:
        self._alarms: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        self._changed = trio.Event()

    def __len__(self) -> int:
        return len(self._alarms)

    def __contains__(self, key: Hashable) -> bool:
        """Tell whether a key has an alarm."""
        return key in self._alarms

    def set(self, key: Hashable, deadline: float, callback: Callable[[], None]) -> None:
        """Call back at the deadline; a key has one alarm."""
        is_next = all(deadline < other for other, _ in self._alarms.values())
        self._alarms[key] = (deadline, callback)
        if is_next:
            self._changed.set()

    def drop(self, key: Hashable) -> None:
        """Do not call back."""
        self._alarms.pop(key, None)

    def clear(self) -> None:
        """Drop all calls."""
        self._alarms.clear()

    @enable_ki_protection
    async def run(self) -> None:
        """Call back in time, until cancelled."""
        while True:
            self._changed = trio.Event()
            deadline = min((deadline for deadline, _ in self._alarms.values()), default=float("inf"))
            with trio.move_on_at(deadline):
                await self._changed.wait()
            now = trio.current_time()
            for key, (due, callback) in tuple(self._alarms.items()):
                # A callback may drop alarms that follow it.
                if due <= now and key in self._alarms:
                    del self._alarms[key]
                    callback()


class TaskNotifier:
    """Wakes the one task that waits here; a call of `notify` while none waits is lost.

    Costs half as much as an event, of which there would be one for each time.

    Attributes:
        task: The task that waits; not to be changed from outside.
    """

    __slots__ = ("task",)

    def __init__(self) -> None:
        self.task: trio.lowlevel.Task | None = None

    async def wait(self) -> None:
        """Wait for the next `notify`."""

        def abort(_: object) -> trio.lowlevel.Abort:
            # A later `notify` would reschedule a task that is not parked, which is an error of Trio's.
            self.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        self.task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)

    def notify(self) -> None:
        """Let the task go on, if it waits. On the Trio thread."""
        task, self.task = self.task, None
        if task is not None:
            trio.lowlevel.reschedule(task, WAKE_VALUE)


class SubmissionTurn:
    """One operation's place in the order. Made by `SubmissionOrder.enter`.

    Attributes:
        reads: Blocks that it reads.
        writes: Blocks that it changes.
        waits_for: How many others must be launched before.
        followers: The ones that wait for this one, if there are any.
        ready: Set when it waits for none any more; made when somebody waits for that.
        is_leaving: Whether it is gone but for its place, which those behind it keep.
        is_over: Whether it has given its place up.
    """

    def __init__(self, reads: frozenset[int], writes: frozenset[int]) -> None:
        self.reads: frozenset[int] = reads
        self.writes: frozenset[int] = writes
        self.waits_for: int = 0
        self.followers: list[SubmissionTurn] | None = None
        self.ready: trio.Event | None = None
        self.is_leaving: bool = False
        self.is_over: bool = False
        self._is_released = False

    @property
    def is_ready(self) -> bool:
        """Whether everything that must be launched before has been, or never will be."""
        return self.waits_for == 0 or self._is_released

    async def wait(self) -> None:
        """Wait until it is."""
        while not self.is_ready:
            self.ready = trio.Event()
            await self.ready.wait()

    def release(self) -> None:
        """Wait for nothing more: the order is of no account."""
        self._is_released = True
        if self.ready is not None:
            self.ready.set()

    def follow(self, other: SubmissionTurn) -> None:
        """Come after another, unless that is over."""
        if other.is_over or other is self:
            return
        if other.followers is None:
            other.followers = []
        other.followers.append(self)
        self.waits_for += 1

    def end(self) -> list[SubmissionTurn]:
        """Give the place up; returns those that may give up theirs now."""
        self.is_over = True
        followers, self.followers = self.followers, None
        if followers is None:
            return []
        for turn in followers:
            turn.waits_for -= 1
            if turn.is_ready and turn.ready is not None:
                turn.ready.set()
        return [turn for turn in followers if turn.is_leaving and not turn.waits_for]


class SubmissionOrder:
    """The operations that were handed over and not launched yet, in that order.

    Library actors take their messages independently of each other, so an operation could be launched
    before one that was handed over earlier and waits in another mailbox. Where both touch the same
    memory and one of them writes, the later one waits for the launch of the earlier one; from there
    on streams and events keep the order.

    There is no deadlock: an operation waits only for ones that were handed over before it, and
    each library takes its own in the order in which they were handed over.
    """

    __slots__ = ("_readers", "_writers")

    def __init__(self) -> None:
        # The last turn that writes each block, and the turns that read it since.
        self._writers: dict[int, SubmissionTurn] = {}
        self._readers: dict[int, dict[SubmissionTurn, None]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no operation has a place in it."""
        return not self._writers and not self._readers

    def is_free(self, reads: frozenset[int], writes: frozenset[int]) -> bool:
        """Tell whether an operation that used these blocks now would follow none."""
        return self._writers.keys().isdisjoint(reads | writes) and writes.isdisjoint(self._readers)

    def enter(self, reads: frozenset[int], writes: frozenset[int]) -> SubmissionTurn:
        """Give the next operation its place."""
        turn = SubmissionTurn(reads, writes)
        writers, readers = self._writers, self._readers
        for block in reads:
            # The write below follows all that a read of the block would follow.
            if block in writes:
                continue
            if block in writers:
                turn.follow(writers[block])
            if block in readers:
                readers[block][turn] = None
            else:
                readers[block] = {turn: None}
        for block in writes:
            if block in writers:
                turn.follow(writers[block])
            if block in readers:
                # Later operations follow this write, and by it the readers: they need not be kept.
                for reader in readers.pop(block):
                    turn.follow(reader)
            writers[block] = turn
        return turn

    def leave(self, turn: SubmissionTurn, made: Iterable[int] = ()) -> None:
        """Leave the order, launched or never to be: operations that wait for this one go on.

        An operation that was taken back while it waited keeps its place until its turn: later ones know of
        those before it by that place alone.

        Args:
            turn: Its place.
            made: Blocks that it was to make. No earlier operation uses these, so another one that makes them,
                once this one is taken back, does not come behind it.
        """
        turn.is_leaving = True
        if turn.waits_for or turn.is_over:
            for block in made:
                if self._writers.get(block) is turn:
                    del self._writers[block]
            return
        self._forget(turn)
        if turn.followers is None:
            turn.is_over = True
            return
        leaving = turn.end()
        while leaving:
            left = leaving.pop()
            self._forget(left)
            leaving += left.end()

    def _forget(self, turn: SubmissionTurn) -> None:
        writers, readers = self._writers, self._readers
        for block in turn.writes:
            if block in writers and writers[block] is turn:
                del writers[block]
        for block in turn.reads:
            if block in readers and turn in readers[block]:
                del readers[block][turn]
                if not readers[block]:
                    del readers[block]


async def run_together(tasks: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Run tasks at the same time; the first error ends the others, and is raised as it is, not in a group."""
    errors: list[Exception] = []
    async with trio.open_nursery() as nursery:

        async def run(task: Callable[[], Awaitable[object]]) -> None:
            try:
                await task()
            except Exception as error:  # noqa: BLE001  # raised below
                errors.append(error)
                nursery.cancel_scope.cancel(reason="one that runs at the same time has failed")

        for task in tasks:
            nursery.start_soon(run, task)
    if errors:
        first = errors[0]
        errors.clear()
        try:
            raise first
        finally:
            # The error has this frame, which would have the error.
            del first
