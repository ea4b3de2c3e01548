"""The one place where foreign threads talk to Trio, and where such are started."""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import trio

_logger = logging.getLogger("trio_accel.devices")


class LoopNotifier:
    """Runs a callback on the Trio thread soon after any thread has called `notify`.

    Calls of `notify` before the callback has run count as one, so the callback must look at all events. Must
    be made on the Trio thread.
    """

    __slots__ = ("_callback", "_token", "notifications", "wakeups")

    def __init__(self, callback: Callable[[], object]) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._callback: Callable[[], object] | None = callback
        self.notifications = 0
        self.wakeups = 0

    def notify(self) -> None:
        """Ask for the callback. Any thread, finalisers included; never blocks, never raises."""
        self.notifications += 1
        try:
            self._token.run_sync_soon(self._run, idempotent=True)
        except trio.RunFinishedError:
            # The Trio run is over, so a loop to wake does not exist.
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


class BackgroundCalls:
    """Threads for calls that may block and that no task waits for, one thread for each."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, name: str, function: Callable[[], None]) -> None:
        """Begin a call; an exception that it raises is logged with its name."""
        thread = threading.Thread(target=_call, args=(name, function), name=name, daemon=True)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(thread)
        thread.start()

    def finish(self, seconds: float) -> None:
        """Wait for all calls until the time limit. Any thread."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _call(name: str, function: Callable[[], None]) -> None:
    try:
        function()
    except Exception:
        _logger.exception("%s failed", name)


_Job: TypeAlias = "tuple[Callable[[], object], Callable[[Exception | None], None]]"


class CallThread:
    """A thread for calls that block, one after the other, with callbacks. Made on the Trio thread.

    Thread-local state of a library, such as the handles of PyTorch, is there for the next call (D111).

    Args:
        name: Name of the thread, for debuggers.

    Raises:
        RuntimeError: The system has run out of threads.
    """

    __slots__ = ("_calls", "_name", "_token")

    def __init__(self, name: str) -> None:
        self._name = name
        self._token = trio.lowlevel.current_trio_token()
        self._calls: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # A daemon: a call that never returns must not keep the interpreter from ending.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[[], object], done: Callable[[Exception | None], None]) -> None:
        """Queue a call.

        Args:
            function: The function.
            done: Called on the Trio thread afterwards with the error or None, unless the run is over.
        """
        self._calls.put((function, done))

    def end(self) -> None:
        """Let the thread end when it has made its calls."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            function, done = call
            error: Exception | None = None
            try:
                function()
            except BaseException as raised:  # noqa: ASYNC103, BLE001  # Trio has no cancellation here
                # This frame is cut off the traceback: it lives as long as the thread.
                error = failure_of(
                    raised.with_traceback(raised.__traceback__ and raised.__traceback__.tb_next)
                )
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(_report, self._name, done, error)
            # References would keep arrays alive while it waits.
            del call, function, done, error


def failure_of(error: BaseException) -> Exception:
    """Return the error of a call as an exception that keeps its lines, and nothing alive."""
    pending: list[BaseException | None] = [error]
    visited: set[int] = set()
    while pending:
        exception = pending.pop()
        if exception is not None and id(exception) not in visited:
            visited.add(id(exception))
            traceback.clear_frames(exception.__traceback__)
            pending += [exception.__cause__, exception.__context__]
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
