"""What all actors of a system share."""

from __future__ import annotations

import trio

from ._events import Observers
from ._options import SystemOptions
from ._runs import check_run, thread_ident

__all__ = ["SystemState"]


class SystemState:
    """The part of a `System` that its actors refer to.

    Attributes:
        name: Name of the system: the first part of every path.
        options: Options it was opened with.
        observers: Those who listen; see `System.subscribe`.
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
