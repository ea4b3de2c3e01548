"""Waits of tasks and launches: for a time, an arrival, a context, a call of `notify`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Hashable

import trio
from trio.lowlevel import enable_ki_protection

from ...actors import WOKEN

__all__ = ["Alarms", "Arrival", "Availability", "TaskNotifier"]


class Availability:
    """The generations of a device, from the first to its end.

    Attributes:
        generation: Number of the current one, or of the last while there is none; 0 before the first.
        is_ready: Whether there is one now.
        is_ended: Whether none will follow.
    """

    __slots__ = ("_changed", "generation", "is_ended", "is_ready")

    def __init__(self) -> None:
        self.generation: int = 0
        self.is_ready: bool = False
        self.is_ended: bool = False
        self._changed = trio.Event()

    def begin(self, generation: int) -> None:
        """Begin a generation: its context is ready."""
        self.generation = generation
        self.is_ready = True
        self._wake()

    def interrupt(self) -> None:
        """End the generation: the context is gone, and another may follow."""
        self.is_ready = False
        self._wake()

    def end(self) -> None:
        """No context follows."""
        self.is_ready = False
        self.is_ended = True
        self._wake()

    async def wait_changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    async def watch(self) -> AsyncGenerator[int, None]:
        """Iterate over the generations: the current one, then each new one, until the end."""
        seen = 0
        while not self.is_ended:
            if self.is_ready and self.generation != seen:
                seen = self.generation
                yield seen
            else:
                await self._changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()


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
        """It is over, and its waiters are told; on the Trio thread."""
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
            self.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        self.task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)

    def notify(self) -> None:
        """Let the task go on, if it waits. On the Trio thread."""
        task, self.task = self.task, None
        if task is not None:
            trio.lowlevel.reschedule(task, WOKEN)
