"""Cancelling a caller before each step of any task, one after the other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

import trio
from trio.testing import wait_all_tasks_blocked

__all__ = ["CancelAt", "cancelled_at_each_step"]


class CancelAt(trio.abc.Instrument):
    """Cancels a scope before a step of any task, by its number."""

    def __init__(self, scope: trio.CancelScope, step: int) -> None:
        self.scope, self.left = scope, step

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            self.scope.cancel()


async def cancelled_at_each_step(attempt: Callable[[], Awaitable[None]]) -> AsyncGenerator[bool, None]:
    """Attempt it again and again, cancelled at the next step each time, until it ends before its step comes.

    Yields whether it was cancelled, when all tasks are idle.
    """
    step = 0
    while True:
        step += 1
        scope = trio.CancelScope()
        instrument = CancelAt(scope, step)
        trio.lowlevel.add_instrument(instrument)
        try:
            with scope:
                await attempt()
        finally:
            trio.lowlevel.remove_instrument(instrument)
        await wait_all_tasks_blocked()
        yield scope.cancelled_caught
        if instrument.left > 0:
            return
