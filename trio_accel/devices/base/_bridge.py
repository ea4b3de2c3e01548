"""The one place where foreign threads talk to Trio, and where such are started."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import trio

__all__ = ["Chores", "LoopNotifier"]

_logger = logging.getLogger("trio_accel.devices")


class LoopNotifier:
    """Runs a callback on the Trio thread soon after any thread has called `notify`.

    Calls that come before the callback has run are one: the callback looks at everything
    there is to see. Must be made on the Trio thread.
    """

    __slots__ = ("_callback", "_token", "notifications", "wakeups")

    def __init__(self, callback: Callable[[], None]) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._callback: Callable[[], None] | None = callback
        self.notifications = 0
        self.wakeups = 0

    def notify(self) -> None:
        """Ask for the callback. Any thread, finalisers included; never blocks, never raises."""
        self.notifications += 1
        try:
            self._token.run_sync_soon(self._run, idempotent=True)
        except trio.RunFinishedError:
            # The program is over: nobody is left to be woken.
            return

    # The name by which a stream calls it: it is a `Waker` of the backends.
    ring = notify

    def close(self) -> None:
        """Ignore all later calls of `notify`."""
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


class Chores:
    """What is to be done soon, may block, and has nobody to wait for it: each in a thread of its own."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, name: str, chore: Callable[[], None]) -> None:
        """Begin with one; what it raises is logged with its name."""
        thread = threading.Thread(target=_do, args=(name, chore), name=name, daemon=True)
        self._threads = [other for other in self._threads if other.is_alive()]
        self._threads.append(thread)
        thread.start()

    def finish(self, seconds: float) -> None:
        """Wait for all, so many seconds at most. Any thread."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _do(name: str, chore: Callable[[], None]) -> None:
    try:
        chore()
    except Exception:
        _logger.exception("%s failed", name)
