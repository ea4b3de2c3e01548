"""The heart of a worker: a thread that shows that the process runs, and ends it if its driver is stuck."""

from __future__ import annotations

import os
import threading
import time

from ..launcher._launcher_process import FAULTED
from ..wire._protocol import SharedPage

# Seconds between heartbeats.
_INTERVAL = 0.1
# The nanoseconds that the loop's thread may compute in a query of the driver (D189). A query takes
# microseconds. One that waits for another thread's call takes longer, but computes nothing.
_LONGEST_QUERY = 250_000_000


class Heart:
    """The heartbeat of the process whose loop runs in the thread that makes this."""

    def __init__(self, page: SharedPage) -> None:
        self._page = page
        self._clock: int = time.pthread_getcpuclockid(threading.get_ident())
        # The processor time of the loop's thread when it asked the driver; None while it does not ask.
        self._asked: int | None = None

    def start(self) -> None:
        """Start to beat, until the process ends."""
        # A thread beats, because an operation that keeps the loop busy is not a hang. It is a daemon, because
        # the process must end in any case.
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def asks_driver(self, is_asking: bool, /) -> None:
        """Record that the loop asks the driver for faults, or has its answer."""
        self._asked = time.clock_gettime_ns(self._clock) if is_asking else None

    def _run(self) -> None:
        while True:
            time.sleep(_INTERVAL)
            asked = self._asked
            if asked is not None and time.clock_gettime_ns(self._clock) - asked > _LONGEST_QUERY:
                # The next worker need not wait for the driver.
                os._exit(FAULTED)
            self._page.beat()
