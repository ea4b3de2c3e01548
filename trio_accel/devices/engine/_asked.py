"""A task that waits for an operation which it has launched by itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NoReturn

import outcome
import trio

from ...actors import WOKEN, DirectReply
from ..operations._operation import Launch
from ._in_flight import InFlight
from ._library import LibraryActor

__all__ = ["Asked"]


class Asked(DirectReply):
    """The reply of an operation whose asker waits for it.

    The code that reschedules the parked task forgets it in the same step, as with an envelope.
    """

    __slots__ = ("_error", "_last_look", "_library", "_operation", "_raise_cancel", "_spin", "_task")

    def __init__(self, launch: Launch) -> None:
        # Without the call of the base's, which takes longer than it does anything.
        self.message = launch
        self.outcomes = None
        self.is_done = False
        self._library: LibraryActor | None = None
        self._operation: InFlight | None = None
        self._task: trio.lowlevel.Task | None = None
        self._error: BaseException | None = None
        self._raise_cancel: Callable[[], NoReturn] | None = None
        self._last_look: Callable[[], None] | None = None
        self._spin: Callable[[], Awaitable[None]] | None = None

    def wait(self, library: LibraryActor, operation: InFlight | bool) -> Awaitable[object]:
        """Wait for the outcome, at once; if cancelled, until the device is done or the grace has passed.

        Args:
            library: Who has launched it.
            operation: What was launched; True if it has failed by now.
        """
        if self.is_done or self._last_look is not None or self._spin is not None:
            return self._look_and_wait(library, operation)
        # Most wait for nothing but being woken, for which a coroutine of its own would take as long again.
        assert not isinstance(operation, bool)  # that has failed, and is done
        self._library, self._operation = library, operation
        self._task = trio.lowlevel.current_task()
        return trio.lowlevel.wait_task_rescheduled(self._abort)  # noqa: ASYNC105  # by the caller

    async def _look_and_wait(self, library: LibraryActor, operation: InFlight | bool) -> None:
        if self.is_done or self._last_look is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            look, self._last_look = self._last_look, None
            if look is not None:
                # Also if it is said to have failed by now: it may be in flight all the same.
                look()
        elif self._spin is not None:
            spin, self._spin = self._spin, None
            await spin()
        if self.is_done:
            error, self._error = self._error, None
            if error is not None:
                try:
                    raise error
                finally:
                    # It holds this frame.
                    del error
            return
        await self.wait(library, operation)

    def _abort(self, raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        self._raise_cancel = raise_cancel
        assert self._library is not None
        assert self._operation is not None
        assert self._task is not None  # it is parked
        self._library.start_grace(self._operation, self._task.context)
        return trio.lowlevel.Abort.FAILED

    def deliver(self, error: BaseException | None) -> None:
        """Wake the task, or keep the outcome for it."""
        task, self._task = self._task, None
        # It refers to this.
        self._operation = None
        if task is None:
            self._error = error
        elif error is None:
            trio.lowlevel.reschedule(task, WOKEN)
        else:
            trio.lowlevel.reschedule(task, outcome.Error(error))

    def cancelled(self) -> bool:
        """Give the task its cancellation; returns whether that is news."""
        if self.is_done:
            return False
        self.is_done = True
        self._operation = None
        assert self.outcomes is not None  # it is cancelled only while it is parked
        self.outcomes.settle(self)
        assert self._raise_cancel is not None
        assert self._task is not None
        task, self._task = self._task, None
        trio.lowlevel.reschedule(task, outcome.capture(self._raise_cancel))
        return True

    def attend(
        self, attend: Callable[[], Awaitable[None]], herald: Callable[[Callable[[], None]], None]
    ) -> bool:
        """Wait by that, before the task is parked if need be."""
        self._spin = attend
        return True

    def look_last(self, look: Callable[[], None]) -> bool:
        """Look once for the end, behind a turn of the loop."""
        self._last_look = look
        return True
