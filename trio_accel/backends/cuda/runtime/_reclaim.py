"""Giving memory back where the driver may make its caller wait for the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["Reclaimer"]


class Reclaimer:
    """Runs what gives memory back in a thread, one after the other.

    To unmap memory may wait for everything that is enqueued, and a stream may be held until Trio's
    thread lets it go: so that must not be the thread that waits.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left = 0
        self._lock = threading.Lock()
        self._is_idle = threading.Event()
        self._is_idle.set()

    def give_back(self, job: Callable[[], None]) -> None:
        """Run something soon; it must not raise."""
        with self._lock:
            if self._thread is None:
                # A daemon: a device that is stuck must not keep the interpreter from ending.
                self._thread = threading.Thread(target=self._run, name=f"{self._name} reclaim", daemon=True)
                self._thread.start()
            self._left += 1
            self._is_idle.clear()
        self._jobs.put(job)

    def wait(self, seconds: float) -> bool:
        """Block until all is given back; returns whether it was in time."""
        return self._is_idle.wait(seconds)

    def close(self) -> None:
        """Give back what is left, and end the thread; blocks."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._is_idle.set()
