"""The one place where foreign threads talk to Trio."""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

__all__ = ["LoopWaker"]

_logger = logging.getLogger("trio_accel.devices")


class LoopWaker:
    """Runs a callback on the Trio thread soon after any thread has rung.

    Rings that come before the callback has run are one: the callback looks at everything
    there is to see. Must be made on the Trio thread.
    """

    __slots__ = ("_callback", "_token", "rings", "wakeups")

    def __init__(self, callback: Callable[[], None]) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._callback: Callable[[], None] | None = callback
        self.rings = 0
        self.wakeups = 0

    def ring(self) -> None:
        """Ask for the callback. Any thread, finalisers included; never blocks, never raises."""
        self.rings += 1
        try:
            self._token.run_sync_soon(self._run, idempotent=True)
        except trio.RunFinishedError:
            # The program is over: nobody is left to be woken.
            return

    def close(self) -> None:
        """Ignore all later rings."""
        self._callback = None

    def _run(self) -> None:
        self.wakeups += 1
        if self._callback is None:
            return
        try:
            self._callback()
        except Exception:
            # An exception that leaves this function would end the whole run.
            _logger.exception("a completion callback failed")
