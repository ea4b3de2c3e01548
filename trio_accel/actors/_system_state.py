"""State shared by all actors of a system, and the system's Trio run."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, copy_context
from threading import get_ident as thread_ident
from typing import Any

import trio

from ._events import Observers
from ._options import SystemOptions

__all__ = ["SystemState", "thread_ident"]


class SystemState:
    """The part of a `System` that its actors refer to.

    Attributes:
        name: Name of the system: the first part of every path.
        options: Options of the system.
        observers: The subscribed observers; see `System.subscribe`.
        token: The system's Trio run.
        thread: The run's thread.
        opened_at: The opening time, on Trio's clock.
        dead_letters: The total number of dropped or refused messages.
        quarantined: The total number of actors that were cancelled but did not end.
        context: The context variables of the task that opened the system.
        call: Has the run call a function, for threads of the program; None except for `ta.blocking`.
    """

    def __init__(self, name: str, options: SystemOptions) -> None:
        self.name: str = name
        self.options: SystemOptions = options
        self.observers: Observers = Observers()
        self.token: trio.lowlevel.TrioToken = trio.lowlevel.current_trio_token()
        self.thread: int = thread_ident()
        self.opened_at: float = trio.current_time()
        self.dead_letters: int = 0
        self.quarantined: int = 0
        self.context: Context = copy_context()
        self.call: Callable[[Callable[[], Any]], Any] | None = None

    def check_run(self, verb: str) -> None:
        """Raise an error in another thread or Trio run.

        Raises:
            RuntimeError: The calling thread is not the thread of the system's run.
        """
        check_run(self.thread, verb, f"system {self.name}")


def check_run(thread: int, verb: str, label: str) -> None:
    """Raise an error in another thread or Trio run, before the call harms the runtime's state.

    A thread has at most one run at a time, so its number identifies the run, in a third of the time that the
    run's token takes.

    Args:
        thread: The run's thread.
        verb: The called function.
        label: The object of the call.

    Raises:
        RuntimeError: The call comes from another thread.
    """
    if thread_ident() != thread:
        raise RuntimeError(
            f"{verb}: {label} belongs to another thread or Trio run; call it there, "
            "for example by trio.from_thread.run from a thread that the run has started"
        )
