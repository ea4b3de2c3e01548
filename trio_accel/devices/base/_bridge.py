"""The one place where foreign threads talk to Trio, and where such are started."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

import outcome
import trio

__all__ = ["Chores", "LoopNotifier", "call_in_thread"]

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


def call_in_thread(
    name: str, function: Callable[[], object], done: Callable[[Exception | None], None]
) -> None:
    """Call something that blocks in a thread; nobody has to wait for it. Called on the Trio thread.

    Args:
        name: For people.
        function: What is called.
        done: Called on the Trio thread afterwards, unless the run is over, with what was raised.
    """
    token = trio.lowlevel.current_trio_token()

    def deliver(result: outcome.Outcome[object]) -> None:
        error = _failure_of(result.error) if isinstance(result, outcome.Error) else None
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(_report, name, done, error)

    trio.lowlevel.start_thread_soon(function, deliver, name)


def _failure_of(error: BaseException) -> Exception:
    """What a thread has raised, as an exception that keeps its lines, and nothing alive."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            left += [one.__cause__, one.__context__]
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"a thread raised {type(error).__name__}")
    failure.__cause__ = error
    return failure


def _report(name: str, done: Callable[[Exception | None], None], error: Exception | None) -> None:
    try:
        done(error)
    except Exception:
        # An exception that leaves this function would end the whole run.
        _logger.exception("%s failed", name)
