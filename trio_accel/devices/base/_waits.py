"""The objects by which tasks and launches wait.

* `Availability`: for a context of a device.
* `Arrival`: for something in transit.
* `Alarms`: for a time.
* `TaskNotifier`: for a call of `notify`.
* `SubmissionOrder` and `SubmissionTurn`: for earlier operations on the same memory.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable

import trio
from trio.lowlevel import enable_ki_protection

from ...actors import WAKE_VALUE, ParkingLot, TaskEvent, run_all


class Availability:
    """The generations of a device. Each begins with a new context, and ends when the context is lost.

    Attributes:
        generation: The number of the current generation, or of the last one; 0 before the first.
        is_ready: Whether a generation has begun and not ended.
        is_ended: Whether no generation will follow.
        is_shut: Whether requests are refused, because no generation will follow, or only when the device is
            opened again.
    """

    __slots__ = ("_changed", "generation", "is_ended", "is_ready", "is_shut")

    def __init__(self) -> None:
        self.generation: int = 0
        self.is_ready: bool = False
        self.is_ended: bool = False
        self.is_shut: bool = False
        self._changed = ParkingLot()

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
        """Wait for the next call of `begin`, `shut`, `interrupt` or `end`."""
        await self._changed.park()

    async def watch(self) -> AsyncGenerator[int]:
        """Yield the current generation, then new ones until the end.

        A generation that ends before the next iteration is skipped.
        """
        generation = 0
        while not self.is_ended:
            if self.is_ready and self.generation != generation:
                generation = self.generation
                yield generation
            else:
                await self._changed.park()


class Arrival:
    """Something in transit, such as a host array that a thread copies.

    Operations that need it are launched only after its arrival. A stream must not be held for it instead,
    because that would block every driver call that waits for the context, and perhaps the thread that has to
    release the stream (D50).

    Attributes:
        is_over: Whether it has arrived, or never will.
        failure: The reason why it never will; None if it has arrived or is still in transit.
    """

    __slots__ = ("__weakref__", "_waiting", "failure", "is_over")

    def __init__(self) -> None:
        self.is_over: bool = False
        self.failure: Exception | None = None
        self._waiting: list[Callable[[], None]] = []

    def tell(self, notify: Callable[[], None]) -> None:
        """Call `notify` when it is over, or now if it is over already; on the Trio thread."""
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
    """Callbacks with deadlines on Trio's clock, one for each key.

    After a drop, no reference to the callback remains.
    """

    __slots__ = ("_alarms", "_changed")

    def __init__(self) -> None:
        self._alarms: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        self._changed = TaskEvent()

    def __len__(self) -> int:
        return len(self._alarms)

    def __contains__(self, key: Hashable) -> bool:
        """Return whether a key has an alarm."""
        return key in self._alarms

    def set(self, key: Hashable, deadline: float, callback: Callable[[], None]) -> None:
        """Call back once, when Trio's clock has reached the deadline; replace the key's earlier alarm."""
        is_next = all(deadline < scheduled for scheduled, _ in self._alarms.values())
        self._alarms[key] = (deadline, callback)
        if is_next:
            self._changed.set()

    def drop(self, key: Hashable) -> None:
        """Drop the alarm of a key, if there is one."""
        self._alarms.pop(key, None)

    def clear(self) -> None:
        """Drop all callbacks."""
        self._alarms.clear()

    @enable_ki_protection
    async def run(self) -> None:
        """Call the callbacks at their deadlines, until cancelled. An error of a callback is raised."""
        while True:
            self._changed = TaskEvent()
            deadline = min((deadline for deadline, _ in self._alarms.values()), default=float("inf"))
            with trio.move_on_at(deadline):
                await self._changed.wait()
            now = trio.current_time()
            for key, (due, callback) in tuple(self._alarms.items()):
                # An earlier callback of this loop may have dropped this alarm.
                if due <= now and key in self._alarms:
                    del self._alarms[key]
                    callback()


class TaskNotifier:
    """Wakes the only task that waits here. A call of `notify` without a waiting task has no effect.

    It costs half as much as a `trio.Event`, of which each wait would need a new one.

    Attributes:
        task: The waiting task, or None; read-only for others.
    """

    __slots__ = ("task",)

    def __init__(self) -> None:
        self.task: trio.lowlevel.Task | None = None

    async def wait(self) -> None:
        """Wait for the next `notify`; can be cancelled."""

        def abort(_: object) -> trio.lowlevel.Abort:
            # Otherwise a later `notify` would reschedule a task that no longer waits, which Trio forbids.
            self.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        task = self.task = trio.lowlevel.current_task()
        try:
            await trio.lowlevel.wait_task_rescheduled(abort)
        finally:
            # The task may have left its wait half-way.
            if self.task is task:
                self.task = None

    def notify(self) -> None:
        """Wake the waiting task, if any. On the Trio thread."""
        task, self.task = self.task, None
        if task is not None:
            trio.lowlevel.reschedule(task, WAKE_VALUE)


class SubmissionTurn:
    """The position of one operation in a `SubmissionOrder`, whose `enter` makes it.

    Attributes:
        reads: The blocks that the operation reads.
        writes: The blocks that it changes.
        waits_for: The number of turns that must end before.
        followers: The turns that wait for this turn; None if there are none.
        ready: The event of the task that waits for this turn, set when the turn is ready; None without one.
        is_leaving: Whether the operation was launched or withdrawn. If the turn still waits for others, it
            keeps its position for its followers.
        is_over: Whether the turn has ended.
    """

    def __init__(self, reads: frozenset[int], writes: frozenset[int]) -> None:
        self.reads: frozenset[int] = reads
        self.writes: frozenset[int] = writes
        self.waits_for: int = 0
        self.followers: list[SubmissionTurn] | None = None
        self.ready: TaskEvent | None = None
        self.is_leaving: bool = False
        self.is_over: bool = False
        self._is_released = False

    @property
    def is_ready(self) -> bool:
        """Whether the turn waits for no earlier operation, or has been released."""
        return self.waits_for == 0 or self._is_released

    async def wait(self) -> None:
        """Wait until this turn is ready."""
        while not self.is_ready:
            self.ready = TaskEvent()
            await self.ready.wait()

    def release(self) -> None:
        """Make the turn ready, because the order no longer matters."""
        self._is_released = True
        if self.ready is not None:
            self.ready.set()

    def follow(self, earlier: SubmissionTurn) -> None:
        """Wait for another turn, unless it is over."""
        if earlier.is_over or earlier is self:
            return
        if earlier.followers is None:
            earlier.followers = []
        earlier.followers.append(self)
        self.waits_for += 1

    def end(self) -> list[SubmissionTurn]:
        """End the turn; return the leaving followers that can now end also."""
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
    an earlier operation in another mailbox. If both use the same memory and one of them writes, the later
    operation waits for the launch of the earlier one. After the launches, streams and events keep the order.

    Operations cannot deadlock, because each waits only for previously submitted operations, and each library
    takes its operations in submission order.
    """

    __slots__ = ("_readers", "_writers")

    def __init__(self) -> None:
        # The last turn that writes each block, and the later turns that read it.
        self._writers: dict[int, SubmissionTurn] = {}
        self._readers: dict[int, dict[SubmissionTurn, None]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether the order has no operations."""
        return not self._writers and not self._readers

    def is_free(self, reads: frozenset[int], writes: frozenset[int]) -> bool:
        """Return whether a new operation on these blocks would not have to wait."""
        return self._writers.keys().isdisjoint(reads | writes) and writes.isdisjoint(self._readers)

    def enter(self, reads: frozenset[int], writes: frozenset[int]) -> SubmissionTurn:
        """Add the next operation; return its turn."""
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
        """Leave the order after the launch or a withdrawal, so that the operations that wait for it continue.

        An operation withdrawn during its wait keeps its position until its turn, because later operations
        follow the earlier ones only through this position.

        Args:
            turn: The operation's turn.
            outputs: The blocks that the operation makes. No earlier operation uses them. So after a
                withdrawal, another operation that makes them need not follow this turn.
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
    """Run tasks concurrently. The first error cancels the other tasks, and is raised without a group."""
    await run_all(tasks)
