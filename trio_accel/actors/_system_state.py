"""What all actors of a system share."""

from __future__ import annotations

import trio

from ._events import Observers
from ._options import SystemOptions
from ._runs import check_run, thread_ident

__all__ = ["SystemState"]


class SystemState:
    """The part of a `System` that its actors refer to."""

    def __init__(self, name: str, options: SystemOptions) -> None:
        self.name: str = name
        self.options: SystemOptions = options
        self.observers: Observers = Observers()
        self.token: trio.lowlevel.TrioToken = trio.lowlevel.current_trio_token()
        self.thread: int = thread_ident()
        self.dead_letters: int = 0
        self.quarantined: int = 0

    def check_run(self, verb: str) -> None:
        """Refuse another thread or Trio run.

        Raises:
            RuntimeError: The calling thread is not that of the system's run.
        """
        check_run(self.thread, verb, f"system {self.name}")
