"""Tasks and interrupts for tests of a blocking device."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio

__all__ = ["WAIT", "Task", "interrupt", "late_interrupt", "never_run", "refused"]

WAIT = 20.0  # seconds, for what happens in an instant


def late_interrupt() -> None:
    """Send a Ctrl-C that does not wake up the main thread, like an interrupt just before a wait."""
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


def interrupt() -> None:
    """Send a Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


class Task:
    """A Trio task that waits, and the thread that it interrupts."""

    def __init__(self, interrupt: Callable[[], None] = lambda: None) -> None:
        self.interrupt = interrupt
        self.has_begun = threading.Event()
        self.is_cancelled = threading.Event()
        self.may_end = threading.Event()
        self.has_ended = threading.Event()

    async def run(self) -> None:
        try:
            self.has_begun.set()
            self.interrupt()
            await trio.sleep_forever()
        finally:
            self.is_cancelled.set()
            # A thread that did not wait for the end of the task would be too early here.
            with trio.CancelScope(shield=True):
                for _ in range(5):
                    await trio.lowlevel.checkpoint()
            self.has_ended.set()


async def never_run() -> None:
    raise AssertionError


def refused(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(RuntimeError) as error:
        function(*args)
    assert type(error.value) is RuntimeError
    return str(error.value)
