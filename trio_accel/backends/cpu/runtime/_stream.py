"""Streams, events and holds of the CPU backend.

A stream is a queue and a thread that runs its work in order. A failed operation does not prevent later ones.
But a lost context (`CpuFault`) is shared by all streams of a device, and work that has not begun by then
never runs.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import itertools
import queue
import threading
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from ...base import AccelEvent, ContextPoisonedError, Waker

Work: TypeAlias = Callable[[], object]
"""One operation, ready to run; its result is dropped."""

COMPILED: set[bytes] = set()
"""The keys of the compilations that run in this process now."""

_WRITING = 0.0001  # seconds between the writes of a hold

_THREADS = weakref.WeakSet[threading.Thread]()


class CpuStream:
    """A queue of work, run in order by a thread of its own.

    The thread starts with the first work and ends after `close`. A failing operation does not stop the
    stream: the next event reports the first error since the previous event.

    Args:
        name: The name of the stream and its thread.
        fault: The state of the context, shared by its streams; None for a new context.

    Attributes:
        name: Name of the stream and its thread.
        is_closed: Whether the stream takes no more work.
    """

    def __init__(self, name: str, fault: CpuFault | None = None) -> None:
        self.name: str = name
        self._fault = fault or CpuFault("cpu")
        # SimpleQueue wakes an idle thread most reliably of the queues in the standard library (compared with
        # Queue, Condition, Semaphore, and a lock with a deque). While the thread is busy, `put` costs 20 ns.
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.is_closed: bool = False
        # Held to enqueue, because nothing may follow the end that `close` enqueues,
        # and because only one thread may be started.
        self._lock = threading.Lock()

    @property
    def failure(self) -> Exception | None:
        """Why the context is no longer usable; None while it is."""
        return self._fault.error()

    @property
    def is_preparing(self) -> bool:
        """Whether a compiler runs in this process now. Compilation has its own time limit."""
        return bool(COMPILED)

    @property
    def has_ended(self) -> bool:
        """Whether the stream is closed and everything enqueued is done."""
        return self.is_closed and (self._thread is None or not self._thread.is_alive())

    def enqueue(self, work: Work) -> None:
        """Run `work` in the stream's thread, after everything enqueued so far.

        Raises:
            RuntimeError: The stream is closed, or the system cannot start a thread.
            ContextPoisonedError: The context is lost.
        """
        failure = self._fault.error()
        if failure is not None and not self.is_closed:
            raise failure
        self._put(work)

    def record(self) -> CpuEvent:
        """Make an event after everything enqueued so far; see `AccelStream.record`.

        Raises:
            RuntimeError: The stream is closed.
        """
        event = CpuEvent()
        self._put(event)
        return event

    def wait(self, event: AccelEvent) -> None:
        """Hold back what is enqueued from now on until an event of any stream is done.

        Streams cannot deadlock, because only a recorded event can be waited for.

        Raises:
            TypeError: The event is not from the CPU backend.
            RuntimeError: The stream is closed.
        """
        if not isinstance(event, CpuEvent):
            raise TypeError(f"event: a stream of the CPU backend waits for its own kind, not {event!r}")
        if not event.is_done:
            self._put(partial(_wait_until_done, event))

    def hold(self, waker: Waker | None = None, memory: npt.NDArray[np.uint8] | None = None) -> CpuHold:
        """Hold back what is enqueued from now on; see `AccelStream.hold`.

        Args:
            waker: Rung when the stream reaches the hold.
            memory: An array to write to until the release, as a running kernel would: for tests.

        Raises:
            RuntimeError: The stream is closed.
            ContextPoisonedError: The context is lost.
        """
        hold = CpuHold(waker, memory)
        self.enqueue(hold.wait)
        return hold

    def crash(self) -> None:
        """Let the process die of SIGSEGV when the stream gets here; see `AccelStream.crash`."""
        self.enqueue(_crash)

    def notify(self, event: AccelEvent, waker: Waker) -> None:
        """Ring when the event is done: from the stream's thread, or at once if it is done already.

        Raises:
            TypeError: The event is not from the CPU backend.
        """
        if not isinstance(event, CpuEvent):
            raise TypeError(f"event: a stream of the CPU backend knows its own kind, not {event!r}")
        event.notify(waker)

    def synchronize(self) -> None:
        """Block until everything enqueued so far is done; errors are left to the next event."""
        latch = _Latch()
        try:
            self._put(latch)
        except RuntimeError:
            self.join()
        else:
            latch.wait()

    def close(self) -> None:
        """Refuse further work, without a wait. Enqueued work still runs, and then the thread ends."""
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self._items.put(None)

    def join(self) -> None:
        """Block until the closed stream's thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _put(self, item: _Item) -> None:
        with self._lock:
            if self.is_closed:
                raise RuntimeError(f"stream {self.name!r} is closed and takes no more work")
            if self._thread is None:
                # A daemon, because a stuck operation must not prevent the interpreter's exit. Start it before
                # the work is enqueued, so that nothing was enqueued if the system has no thread left.
                thread = threading.Thread(
                    target=_run, args=(self._items, self._fault), name=self.name, daemon=True
                )
                thread.start()
                self._thread = thread
                _THREADS.add(thread)
            self._items.put(item)

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "open"
        return f"<CpuStream {self.name!r} ({state})>"


class CpuEvent:
    """A point in a stream: done when everything enqueued before it is.

    Attributes:
        error: The first error between the stream's previous event and this one; None without an error.
        is_done: Whether the stream has passed this point.
    """

    __slots__ = ("_lock", "_wakers", "error", "is_done")

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.is_done: bool = False
        self._wakers: list[Waker] = []
        # Orders `notify` against `finish`, so that exactly one of them rings a waker. Neither rings while it
        # holds the lock.
        self._lock = threading.Lock()

    def notify(self, waker: Waker) -> None:
        """Ring when the event is done: from the stream's thread, or at once if it is done already."""
        with self._lock:
            if not self.is_done:
                self._wakers.append(waker)
                return
        waker.ring()

    def finish(self, error: Exception | None, *, is_lost: bool = False) -> None:
        """Mark the event as done and ring its wakers; called once, from the stream's thread.

        Args:
            error: The error that the event reports.
            is_lost: Whether the context is lost. Then, as on a GPU, only threads that block are woken, and
                no other waker rings (D9).
        """
        with self._lock:
            self.error = error
            self.is_done = True
            wakers, self._wakers = self._wakers, []
        for waker in wakers:
            # For a latch, another stream's thread blocks, which would never end.
            if not is_lost or isinstance(waker, _Latch):
                waker.ring()

    def __repr__(self) -> str:
        return f"<CpuEvent ({'done' if self.is_done else 'pending'}, error {self.error!r})>"


@attrs.define(eq=False)
class CpuHold:
    """Work that holds a stream: its thread waits for the release."""

    _waker: Waker | None
    _memory: npt.NDArray[np.uint8] | None
    _released: threading.Event = attrs.field(factory=threading.Event, init=False)

    def release(self) -> None:
        """Let the stream continue. From any thread; a second call does nothing."""
        self._released.set()

    def wait(self) -> None:
        """Block, or write to the memory, until the release; called in the stream's thread."""
        if self._waker is not None:
            self._waker.ring()
        for byte in itertools.cycle(range(256)):
            if self._memory is not None:
                self._memory[...] = byte
            # Between writes, other threads get the interpreter's lock.
            if self._released.wait(None if self._memory is None else _WRITING):
                return


_Item: TypeAlias = "Work | CpuEvent | _Latch | None"


class _Latch:
    """A waker for which one thread blocks."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        self._lock.release()

    def wait(self) -> None:
        self._lock.acquire()


def _end_with_work() -> None:
    """Let the process end while a stream's thread still works.

    OpenBLAS ends its threads in a function of C's `atexit`, which never returns if one of them multiplies. So
    `_exit` is called before it, with the same status.
    """
    library = ctypes.CDLL(None)
    if any(thread.is_alive() for thread in _THREADS) and hasattr(library, "on_exit"):
        library.on_exit(library._exit, None)  # noqa: SLF001  # the name is C's


# Registered before any device is opened, so it is called after those that close devices.
atexit.register(_end_with_work)


def _wait_until_done(event: CpuEvent) -> None:
    latch = _Latch()
    event.notify(latch)
    latch.wait()


def _crash() -> None:
    # This crash is intended, so it needs no report.
    faulthandler.disable()
    ctypes.string_at(0)


@attrs.define(eq=False)
class CpuFault:
    """The state of a context, shared by its streams: usable, or lost for a reason.

    Attributes:
        reason: The reason why the context is lost; None while it is usable.
    """

    _device: str
    reason: str | None = None

    def error(self) -> ContextPoisonedError | None:
        """Make a new error with the reason why the context is lost; return None while it is usable."""
        if self.reason is None:
            return None
        return ContextPoisonedError(f"the context is lost: {self.reason}", device=self._device)


class _StreamThread(threading.local):
    """The fault of the stream that this thread belongs to."""

    fault: CpuFault | None = None


_running = _StreamThread()


def check_usable() -> None:
    """Raise if the context is lost. Work that may never end on its own calls this, in its stream's thread.

    Raises:
        ContextPoisonedError: The context is lost.
    """
    failure = None if _running.fault is None else _running.fault.error()
    if failure is not None:
        raise failure


def _run(items: queue.SimpleQueue[_Item], fault: CpuFault) -> None:
    """Run the items of a stream until None; the body of its thread."""
    _running.fault = fault
    error: Exception | None = None
    # As on any device, overflow and the like show in the results and are not warned of.
    with np.errstate(all="ignore"):
        while (item := items.get()) is not None:
            lost = fault.error()
            if isinstance(item, CpuEvent):
                item.finish(lost or error, is_lost=lost is not None)
                error = None
            elif isinstance(item, _Latch):
                # Wake a blocked thread even if the context is lost.
                item.ring()
            elif lost is not None:
                # Work not yet begun at the fault never runs.
                error = lost
            else:
                failure = _call(item)
                error = error or failure
                failure = None
            # An idle thread must not keep an array, a specification or an event alive.
            item = None


def _call(work: Work) -> Exception | None:
    """Run work; return its error, without references to the locals of its frames."""
    try:
        work()
    # No error may end the thread, because others wait for its events. Trio has no cancellation here.
    except BaseException as error:  # noqa: ASYNC103, BLE001
        # The error's frames would keep the operation's arrays alive, so their locals are cleared. This frame
        # cannot be cleared, because it is running. So it is removed from the traceback, and drops the work.
        del work
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        _drop_locals(error)
        if isinstance(error, Exception):
            return error  # noqa: ASYNC104
        # Whatever an extension raises, the stream continues and the event reports the error.
        failure = RuntimeError(f"an operation raised {type(error).__name__}")
        failure.__cause__ = error
        return failure  # noqa: ASYNC104
    return None


def _drop_locals(error: BaseException) -> None:
    """Clear the locals of all frames of an error, its causes and contexts. Their lines stay."""
    visited: set[int] = set()
    errors = [error]
    while errors:
        error = errors.pop()
        if id(error) not in visited:
            visited.add(id(error))
            traceback.clear_frames(error.__traceback__)
            errors += [linked for linked in (error.__cause__, error.__context__) if linked is not None]
