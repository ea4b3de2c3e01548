"""Communicators of a worker: found by their numbers, waited for with an end, and given up from outside."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from operator import methodcaller
from typing import Any, ClassVar, Protocol, TypeVar

from ..contract.errors import LibraryError
from ..contract.ops import Waiting

MISSING = "NO_COMMUNICATOR"
"""Code of a `LibraryError`: the worker has no communicator of that number, perhaps as it is new."""
ABORTED = "ABORTED"
"""Code of a `LibraryError`: the communicator was given up from outside."""
NOT_IN_TIME = "NOT_IN_TIME"
"""Code of a `LibraryError`: others have not come in time."""

T = TypeVar("T")

# Looks without a pause, before the thread sleeps between two.
_EAGER = 200
_PAUSE = 50e-6
# The most looks in an event loop, where nothing can be given up meanwhile.
_MAX_LOOP_POLLS = 1200
# Seconds for a call into the vendor's library to return, before the communicator is given up all the same.
_LEAVING = 1.0


class Handle(Protocol):
    """A communicator of a vendor's library that never blocks."""

    def poll(self) -> bool:
        """Return whether the pending step is complete or enqueued.

        Raises:
            LibraryError: It has failed.
        """
        ...

    def abort(self) -> None:
        """Abort it with all its operations in flight. Blocks for a while. Called once, from any thread."""
        ...


class RankCommunicator:
    """One rank of a communicator. One thread works with it, and another one may give it up at any time.

    Args:
        library: Name of the library, for errors.
    """

    def __init__(self, library: str) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._handle: Any = None
        self._is_aborted = False
        # The last kernel's words to the watchdog.
        self._waiting: Waiting | None = None

    def begin(self, make: Callable[[], Handle]) -> None:
        """Make the handle, unless it was given up before.

        Raises:
            LibraryError: It was.
        """
        with self._lock:
            self.check()
            self._handle = make()

    @contextmanager
    def calling(self, waiting: Waiting) -> Generator[None]:
        """Report to the watchdog that the calls inside wait for others, until the communicator is aborted."""
        self._waiting = waiting
        waiting.is_over, waiting.is_calling = self._is_aborted, True
        try:
            yield
        finally:
            waiting.is_calling = False

    def check(self) -> None:
        """Refuse to go on where it was given up.

        Raises:
            LibraryError: It was.
        """
        if self._is_aborted:
            raise LibraryError(
                "the communicator was given up, as a rank has failed or a collective was cancelled",
                library=self._library,
                code=ABORTED,
            )

    def call(self, function: Callable[[Any], T]) -> T:
        """Call something with the handle; it must not block.

        Raises:
            LibraryError: The communicator was given up; or as the function does.
        """
        with self._lock:
            self.check()
            return function(self._handle)

    def settle(self, *, is_short: bool = False) -> None:
        """Wait until what was begun is there, or the communicator is given up: the application has the clock.

        Args:
            is_short: Nothing waits for others: a few looks will do.

        Raises:
            LibraryError: It has failed, was given up, or others were waited for all the same.
        """
        for attempt in itertools.count(1):
            if self.call(methodcaller("poll")):
                return
            if is_short and attempt > _MAX_LOOP_POLLS:
                raise LibraryError("other ranks have not come", library=self._library, code=NOT_IN_TIME)
            if attempt > _EAGER:
                time.sleep(_PAUSE)

    def abort(self) -> None:
        """Abort it: its waits end. Blocks for a while. Any thread may call it; a second call does nothing.

        A thread that works with it no longer uses it afterwards. A thread stuck in a call of the library gets
        a second to return.
        """
        has_lock = self._lock.acquire(timeout=_LEAVING)
        try:
            handle, self._handle = self._handle, None
            self._is_aborted = True
        finally:
            if has_lock:
                self._lock.release()
        if self._waiting is not None:
            # A kernel that does not end now is stuck.
            self._waiting.is_over = True
        if handle is not None:
            handle.abort()


class Communicators:
    """The communicators of a process, by the application's numbers; its one device has one rank of each.

    Args:
        library: Name of the library, for errors.

    Attributes:
        max_closed: The number of aborted communicators that are remembered.
    """

    max_closed: ClassVar[int] = 1024

    def __init__(self, library: str) -> None:
        self._library = library
        self._open: dict[int, RankCommunicator] = {}
        # The numbers of aborted communicators; some were aborted before they were opened.
        self._closed: dict[int, None] = {}
        self._lock = threading.Lock()

    def new(self, number: int) -> RankCommunicator:
        """Enter a communicator, which can be given up from now on.

        Raises:
            LibraryError: It was given up before.
        """
        communicator = RankCommunicator(self._library)
        with self._lock:
            if number in self._closed:
                communicator.abort()
            else:
                self._open[number] = communicator
        communicator.check()
        return communicator

    def find(self, number: int) -> RankCommunicator:
        """Return a communicator.

        Raises:
            LibraryError: There is none, or it was given up.
        """
        communicator = self._open.get(number)
        if communicator is None:
            code = ABORTED if number in self._closed else MISSING
            raise LibraryError(f"communicator {number} does not exist here", library=self._library, code=code)
        communicator.check()
        return communicator

    def close(self, number: int) -> threading.Thread:
        """Abort a communicator, also before it is open; return the thread that does so.

        Nobody has to wait for it: the library needs half a second to give memory back, and meanwhile the next
        communicator can be opened. It may also wait for the device, and so for a communicator that is aborted
        next.
        """
        with self._lock:
            communicator = self._open.pop(number, None)
            self._closed[number] = None
            if len(self._closed) > self.max_closed:
                del self._closed[next(iter(self._closed))]
        closing = threading.Thread(target=communicator.abort if communicator else None, daemon=True)
        closing.start()
        return closing
