"""The sign of life of a worker."""

from __future__ import annotations

import threading

from ..transport._page import SharedPage

__all__ = ["Heartbeat"]

_INTERVAL = 0.1


class Heartbeat:
    """A thread that beats: an operation that keeps the worker's loop busy is no silence."""

    def __init__(self, page: SharedPage) -> None:
        self._page = page
        self._is_over = threading.Event()
        # A daemon: whatever else fails, the process must end.
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Beat no more."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_INTERVAL):
            self._page.beat()
