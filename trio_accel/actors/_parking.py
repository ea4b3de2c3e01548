"""Where tasks wait: a parking lot and an event that survive a wait which its task leaves half-way.

A program may drive an await by hand: `waiting = call.__await__()`, `waiting.send(None)`, and then close it,
throw into it, drop it, or keep it and await something else. Trio does not notice, because it sees only the
task's own traps. Trio's lots and events keep such a task, and the next wake-up raises `AssertionError` in the
task that wakes, which may be the reader of a device. Two rules prevent this:

* A wait ends its registration however its frame ends, with or without an outcome.
* Each wait marks the task (`Task.custom_sleep_data`, which Trio clears at each wake-up), and a task is woken
  only while it has the mark of this wait. A later wait replaces the mark of a wait that the task has kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any, Final, Generic, TypeVar, cast

import trio
from trio.lowlevel import enable_ki_protection

from ._messages import WAKE_VALUE, raise_closed

__all__ = ["Leavable", "ParkingLot", "TaskEvent", "TaskLock"]

T_co = TypeVar("T_co", covariant=True)


class ParkingLot:
    """Parked tasks, as in `trio.lowlevel.ParkingLot`; a closed wait leaves the lot."""

    __slots__ = ("_parked",)

    def __init__(self) -> None:
        # The task of each wait. A task may have left several waits half-way.
        self._parked: dict[object, trio.lowlevel.Task] = {}

    def __len__(self) -> int:
        """Return the number of parked tasks."""
        return len(self._parked)

    @enable_ki_protection
    async def park(self) -> None:
        """Park the current task until it is woken; can be cancelled."""
        wait = object()
        parked = self._parked

        def abort(_: object) -> trio.lowlevel.Abort:
            return trio.lowlevel.Abort.SUCCEEDED

        task = parked[wait] = trio.lowlevel.current_task()
        task.custom_sleep_data = wait
        del task
        try:
            await trio.lowlevel.wait_task_rescheduled(abort)
        finally:
            parked.pop(wait, None)

    @enable_ki_protection
    def unpark(self) -> bool:
        """Wake the task that has waited longest; return whether there was one."""
        while self._parked:
            if self._wake(next(iter(self._parked))):
                return True
        return False

    @enable_ki_protection
    def unpark_all(self) -> None:
        """Wake all tasks."""
        for wait in tuple(self._parked):
            self._wake(wait)

    def _wake(self, wait: object) -> bool:
        task = self._parked.pop(wait)
        # A task that runs is not parked, whatever its mark.
        if task.custom_sleep_data is not wait or task is trio.lowlevel.current_task():
            return False
        trio.lowlevel.reschedule(task, WAKE_VALUE)
        return True


class TaskEvent:
    """An event that tasks wait for, as in `trio.Event`; a closed wait is forgotten."""

    __slots__ = ("_is_set", "_lot")

    def __init__(self) -> None:
        self._is_set = False
        self._lot: Final = ParkingLot()

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake the tasks that wait."""
        self._is_set = True
        self._lot.unpark_all()

    async def wait(self) -> None:
        """Wait until it is set; a checkpoint in any case."""
        if self._is_set:
            await trio.lowlevel.checkpoint()
        else:
            await self._lot.park()


class TaskLock:
    """A fair lock for tasks, as `trio.Lock`; a closed wait does not get it."""

    __slots__ = ("_is_locked", "_lot")

    def __init__(self) -> None:
        self._is_locked = False
        self._lot: Final = ParkingLot()

    def locked(self) -> bool:
        """Return whether a task has it."""
        return self._is_locked

    @enable_ki_protection
    def acquire_nowait(self) -> None:
        """Take it.

        Raises:
            trio.WouldBlock: Another task has it.
        """
        if self._is_locked:
            raise trio.WouldBlock
        self._is_locked = True

    @enable_ki_protection
    async def acquire(self) -> None:
        """Take it, or wait until the previous task passes it on; a checkpoint in any case."""
        if self._is_locked:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            await trio.lowlevel.checkpoint()
        if self._is_locked:
            # The task that wakes this one keeps it locked.
            await self._lot.park()
        else:
            self._is_locked = True

    @enable_ki_protection
    def release(self) -> None:
        """Pass it to the task that has waited longest, or leave it open."""
        self._is_locked = self._lot.unpark()

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:  # noqa: ASYNC910  # as `trio.Lock`
        self.release()


class Leavable(Generic[T_co]):
    """An await of Trio's that a task may leave half-way. Its abort function runs then, as if cancelled."""

    __slots__ = ("_awaitable",)

    def __init__(self, awaitable: Awaitable[T_co]) -> None:
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, Any, T_co]:
        waiting = self._awaitable.__await__()
        answer = None
        while True:
            try:
                trap = waiting.send(answer)
            except StopIteration as end:
                return cast("T_co", end.value)
            is_left = True
            try:
                answer = yield trap
                is_left = False
            finally:
                if is_left and trio.lowlevel.in_trio_run():
                    abort = getattr(trap, "abort_func", None)
                    if abort is not None:
                        abort(raise_closed)
