"""Notifying a task that waits for work."""

from __future__ import annotations

import trio

from ...actors import WOKEN

__all__ = ["TaskNotifier"]


class TaskNotifier:
    """Wakes the one task that waits here; a call of `notify` while none waits is lost.

    Costs half as much as an event, of which there would be one for each time.

    Attributes:
        task: Who waits here; not to be changed from outside.
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
