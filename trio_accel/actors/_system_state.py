"""State that all actors of a system share, and its Trio run."""

from __future__ import annotations

from threading import get_ident as thread_ident

import trio

from ._events import Observers
from ._options import SystemOptions

__all__ = ["SystemState", "thread_ident"]


class SystemState:
    """The part of a `System` that its actors refer to.

    Attributes:
        name: Name of the system: the first part of every path.
        options: Options it was opened with.
        observers: The observers that listen; see `System.subscribe`.
        token: The Trio run that it lives in.
        thread: The thread of that run.
        opened_at: When it was opened, on Trio's clock.
        dead_letters: Messages that were dropped or refused, in all.
        quarantined: Actors that were cancelled and did not end, in all.
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

    def check_run(self, verb: str) -> None:
        """Refuse another thread or Trio run.

        Raises:
            RuntimeError: The calling thread is not that of the system's run.
        """
        check_run(self.thread, verb, f"system {self.name}")


def check_run(thread: int, verb: str, what: str) -> None:
    """Refuse another thread or Trio run, before it harms the runtime's state.

    A thread has one run at a time, so its number tells as much as the run's token, in a third of the time.

    Args:
        thread: The run's thread.
        verb: The called function.
        what: The object of the call.

    Raises:
        RuntimeError: The calling thread is another.
    """
    if thread_ident() != thread:
        raise RuntimeError(
            f"{verb}: {what} belongs to another thread or Trio run; call it there, "
            "for example by trio.from_thread.run from a thread that the run has started"
        )
