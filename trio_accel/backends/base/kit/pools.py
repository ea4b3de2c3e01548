"""Memory that is slow to allocate or free: cached pages, and a thread that frees."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import attrs

ItemT = TypeVar("ItemT")


@attrs.define(eq=False)
class PagePool(Generic[ItemT]):
    """Pieces of pages, which are taken and given back one by one; the pages stay until the device is closed.

    A backend implements how a page is made and freed. All other methods may be called from any thread.
    """

    _free: list[ItemT] = attrs.field(factory=list[ItemT], init=False)
    _pages: list[int] = attrs.field(factory=list[int], init=False)
    # A thread of the device may give back while an operation takes.
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def make_page(self) -> tuple[int, list[ItemT]]:
        """Get a page: its address, and its pieces."""
        raise NotImplementedError

    def free_page(self, page: int) -> None:
        """Give a page back."""
        raise NotImplementedError

    def add_page(self) -> None:
        """Add a page. The thread that opens the device calls it in advance also, because it takes a while."""
        page, items = self.make_page()
        with self._lock:
            self._pages.append(page)
            self._free += items

    def take(self) -> ItemT:
        """Take a free piece; raises what `make_page` does."""
        while True:
            with self._lock:
                if self._free:
                    return self._free.pop()
            # The lock must be free here: a fault that shows now makes others give back what they hold.
            self.add_page()

    def give_back(self, item: ItemT) -> None:
        """Take a piece back. All enqueued work is done with it, and none waits for more than it holds."""
        with self._lock:
            if self._pages:
                self._free.append(item)

    def close(self) -> None:
        """Free the pages, which no stream uses any longer."""
        with self._lock:
            self._free.clear()
            pages, self._pages = self._pages, []
        for page in pages:
            self.free_page(page)


class Reclaimer:
    """A thread that gives memory back, one job after the other.

    Unmapping may wait for all enqueued work, and a stream may be held until Trio's thread releases it. So
    Trio's thread must not wait.
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
                # A daemon, because a stuck device must not keep the interpreter from ending.
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
            # A reference would keep the chunk's mapping alive while the thread waits for the next job.
            del job
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._is_idle.set()
