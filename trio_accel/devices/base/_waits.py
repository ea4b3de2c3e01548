"""Waits of tasks and launches: for a time, an arrival, a context, a turn, or a call of `notify`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable

import trio
from trio.lowlevel import enable_ki_protection

from ...actors import WAKE_VALUE


class Availability:
    """The generations of a device, from the first to its end.

    Attributes:
        generation: The number of the current generation, or of the last one; 0 before the first.
        is_ready: Whether there is a generation now.
        is_ended: Whether none will follow.
        is_shut: Whether requests are refused: none will follow, or only when the device is opened again.
    """

    __slots__ = ("_changed", "generation", "is_ended", "is_ready", "is_shut")

    def __init__(self) -> None:
        self.generation: int = 0
        self.is_ready: bool = False
        self.is_ended: bool = False
        self.is_shut: bool = False
        self._changed = trio.lowlevel.ParkingLot()

    def begin(self, generation: int) -> None:
        """Begin a generation, because its context is ready."""
        self.generation = generation
        self.is_ready = True
        self.is_shut = False
        self._changed.unpark_all()

    def shut(self) -> None:
        """Refuse requests until the next generation begins."""
        self.is_shut = True
        self._changed.unpark_all()

    def interrupt(self) -> None:
        """End the generation, because its context is lost. Another may follow."""
        self.is_ready = False
        self._changed.unpark_all()

    def end(self) -> None:
        """End the generations, because no context follows."""
        self.is_ready = False
        self.is_ended = self.is_shut = True
        self._changed.unpark_all()

    async def wait_changed(self) -> None:
        """Wait for the next change."""
        await self._changed.park()

    async def watch(self) -> AsyncGenerator[int]:
        """Iterate over the generations: the current one, then each new one, until the end."""
        generation = 0
        while not self.is_ended:
            if self.is_ready and self.generation != generation:
                generation = self.generation
                yield generation
            else:
                await self._changed.park()


class Arrival:
    """Something in transit, such as a host array that a thread copies.

    Operations that need it are not launched before. Holding a stream for it would block every driver call
    that waits for the context, and perhaps the thread that has to release the stream (D50).

    Attributes:
        is_over: Whether it has arrived, or never will.
        failure: The reason why it never will.
    """

    __slots__ = ("__weakref__", "_waiting", "failure", "is_over")

    def __init__(self) -> None:
        self.is_over: bool = False
        self.failure: Exception | None = None
        self._waiting: list[Callable[[], None]] = []

    def tell(self, notify: Callable[[], None]) -> None:
        """Call `notify` when it is over; on the Trio thread."""
        if self.is_over:
            notify()
        else:
            self._waiting.append(notify)

    def end(self, failure: Exception | None = None) -> None:
        """Mark it as over, and notify its waiters; on the Trio thread."""
        self.is_over = True
        self.failure = failure
        waiting, self._waiting = self._waiting, []
        for notify in waiting:
            notify()


class Alarms:
    """Callbacks with deadlines on Trio's clock. A dropped callback is released at once."""

    __slots__ = ("_alarms", "_changed")

    def __init__(self) -> None:
        self._alarms: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        self._changed = trio.Event()

    def __len__(self) -> int:
        return len(self._alarms)

    def __contains__(self, key: Hashable) -> bool:
        """Return whether a key has an alarm."""
        return key in self._alarms

    def set(self, key: Hashable, deadline: float, callback: Callable[[], None]) -> None:
        """Call back at the deadline; only one alarm per key."""
        is_next = all(deadline < scheduled for scheduled, _ in self._alarms.values())
        self._alarms[key] = (deadline, callback)
        if is_next:
            self._changed.set()

    def drop(self, key: Hashable) -> None:
        """Drop the callback of a key."""
        self._alarms.pop(key, None)

    def clear(self) -> None:
        """Drop all callbacks."""
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
                # A callback may drop later alarms.
                if due <= now and key in self._alarms:
                    del self._alarms[key]
                    callback()


class TaskNotifier:
    """Wakes the one task that waits here; a call of `notify` without a waiting task is lost.

    It costs half as much as an event, because an event would be made for each wait.

    Attributes:
        task: The waiting task; do not change it from outside.
    """

    __slots__ = ("task",)

    def __init__(self) -> None:
        self.task: trio.lowlevel.Task | None = None

    async def wait(self) -> None:
        """Wait for the next `notify`."""

        def abort(_: object) -> trio.lowlevel.Abort:
            # Otherwise a later `notify` would reschedule an unparked task, which Trio forbids.
            self.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        self.task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)

    def notify(self) -> None:
        """Wake the waiting task, if any. On the Trio thread."""
        task, self.task = self.task, None
        if task is not None:
            trio.lowlevel.reschedule(task, WAKE_VALUE)


class SubmissionTurn:
    """One operation's place in the order. Made by `SubmissionOrder.enter`.

    Attributes:
        reads: The blocks that it reads.
        writes: The blocks that it changes.
        waits_for: The number of operations that must be launched before.
        followers: The turns that wait for this turn, if any.
        ready: Set when it no longer waits for others; made when a task waits for that.
        is_leaving: Whether only its place remains, which its followers need.
        is_over: Whether it has given up its place.
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
        """Whether every operation that must be launched before has been launched, or never will be."""
        return self.waits_for == 0 or self._is_released

    async def wait(self) -> None:
        """Wait until this turn is ready."""
        while not self.is_ready:
            self.ready = trio.Event()
            await self.ready.wait()

    def release(self) -> None:
        """Stop waiting, because the order no longer matters."""
        self._is_released = True
        if self.ready is not None:
            self.ready.set()

    def follow(self, earlier: SubmissionTurn) -> None:
        """Follow another turn, unless it is over."""
        if earlier.is_over or earlier is self:
            return
        if earlier.followers is None:
            earlier.followers = []
        earlier.followers.append(self)
        self.waits_for += 1

    def end(self) -> list[SubmissionTurn]:
        """Give up the place; return the followers that can now give up theirs."""
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
    """The submitted, unlaunched operations, in submission order.

    Library actors take their messages independently of each other, so an operation could be launched before
    an earlier operation in another mailbox. If both touch the same memory and one of them writes, the later
    one waits for the launch of the earlier one. From there on, streams and events keep the order.

    There can be no deadlock, because an operation waits only for previously submitted operations, and each
    library takes its own in submission order.
    """

    __slots__ = ("_readers", "_writers")

    def __init__(self) -> None:
        # The last turn that writes each block, and the later turns that read it.
        self._writers: dict[int, SubmissionTurn] = {}
        self._readers: dict[int, dict[SubmissionTurn, None]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no operation has a place."""
        return not self._writers and not self._readers

    def is_free(self, reads: frozenset[int], writes: frozenset[int]) -> bool:
        """Return whether an operation that used these blocks now would not follow any other."""
        return self._writers.keys().isdisjoint(reads | writes) and writes.isdisjoint(self._readers)

    def enter(self, reads: frozenset[int], writes: frozenset[int]) -> SubmissionTurn:
        """Give the next operation its place."""
        turn = SubmissionTurn(reads, writes)
        writers, readers = self._writers, self._readers
        for block in reads:
            # The write below follows every operation that a read of the block would follow.
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
                # Later operations follow this write, and through it the readers, so these can be forgotten.
                for reader in readers.pop(block):
                    turn.follow(reader)
            writers[block] = turn
        return turn

    def leave(self, turn: SubmissionTurn, outputs: Iterable[int] = ()) -> None:
        """Leave the order after the launch, or without one: operations that wait for this turn continue.

        An operation withdrawn during its wait keeps its place until its turn, because later operations follow
        the earlier ones only through that place.

        Args:
            turn: Its turn.
            outputs: The blocks that it was to make. No earlier operation uses them. So after a withdrawal,
                another operation that makes them need not follow this turn.
        """
        turn.is_leaving = True
        if turn.waits_for or turn.is_over:
            for block in outputs:
                if self._writers.get(block) is turn:
                    del self._writers[block]
            return
        self._forget(turn)
        if turn.followers is None:
            turn.is_over = True
            return
        leaving = turn.end()
        while leaving:
            follower = leaving.pop()
            self._forget(follower)
            leaving += follower.end()

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
    """Run tasks concurrently. The first error cancels the others, and is raised without a group."""
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
            # The error refers to this frame, so this frame must not refer to the error.
            del first
