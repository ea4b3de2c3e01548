"""Streams of the CPU backend: each is a queue of work and the thread that runs it in order."""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import queue
import threading
import traceback
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
"""The keys of what is compiled now, in this process."""

_WRITING = 0.0001


class CpuStream:
    """A queue of work, run in order by a thread of its own.

    The thread starts with the first work and ends after `close`. A failing operation does not stop the
    stream: the next event reports the error, and the one after that reports none.

    Attributes:
        name: Name of the stream and its thread.
        is_closed: Whether the stream takes no more work.
    """

    def __init__(self, name: str, fault: CpuFault | None = None) -> None:
        self.name: str = name
        self._fault = fault or CpuFault("cpu")
        # A SimpleQueue wakes an idle thread most reliably of all ways in the standard library (measured:
        # Queue, Condition, Semaphore, a lock with a deque). It costs next to nothing (20 ns) while the thread
        # is busy.
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.is_closed: bool = False
        # Nothing may follow the end that `close` enqueues, and only one thread is started.
        self._lock = threading.Lock()

    @property
    def failure(self) -> Exception | None:
        """Why the context is no longer usable; None while it is."""
        return self._fault.error()

    @property
    def is_preparing(self) -> bool:
        """Whether a compiler runs now, which has a limit of its own."""
        return bool(COMPILED)

    @property
    def has_ended(self) -> bool:
        """Whether the stream is closed and everything enqueued is done."""
        return self.is_closed and (self._thread is None or not self._thread.is_alive())

    def enqueue(self, work: Work) -> None:
        """Run something after everything enqueued so far.

        Raises:
            RuntimeError: The stream is closed.
            ContextPoisonedError: The context is lost.
        """
        failure = self._fault.error()
        if failure is not None and not self.is_closed:
            raise failure
        self._put(work)

    def record(self) -> CpuEvent:
        """Make an event after everything enqueued so far; see `AccelStream.record`."""
        event = CpuEvent()
        self._put(event)
        return event

    def wait(self, event: AccelEvent) -> None:
        """Hold back what is enqueued from now on until an event of any stream is done.

        Events are recorded before they are waited for, so streams never wait in a circle.
        """
        if not isinstance(event, CpuEvent):
            raise TypeError(f"event: a stream of the CPU backend waits for its own kind, not {event!r}")
        if not event.is_done:
            self._put(partial(_wait_until_done, event))

    def hold(self, waker: Waker | None = None, memory: npt.NDArray[np.uint8] | None = None) -> CpuHold:
        """Hold back what is enqueued from now on; see `AccelStream.hold`.

        Args:
            waker: Rung when the stream gets there.
            memory: Written to for as long.
        """
        hold = CpuHold(waker, memory)
        self.enqueue(hold.wait)
        return hold

    def crash(self) -> None:
        """Let the process die of SIGSEGV when the stream gets here; see `AccelStream.crash`."""
        self.enqueue(_crash)

    def notify(self, event: AccelEvent, waker: Waker) -> None:
        """Ring from the stream's thread when the event is done; at once if it is already."""
        if not isinstance(event, CpuEvent):
            raise TypeError(f"event: a stream of the CPU backend knows its own kind, not {event!r}")
        event.notify(waker)

    def synchronize(self) -> None:
        """Block until everything enqueued is done; errors stay for the next event."""
        latch = _Latch()
        try:
            self._put(latch)
        except RuntimeError:
            self.join()
        else:
            latch.wait()

    def close(self) -> None:
        """Take no more work. Enqueued work still runs, then the thread ends; does not wait."""
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
                # A daemon, because a stuck operation must not keep the interpreter from ending. It is started
                # before there is work, so that nothing was enqueued if the system has no thread left.
                thread = threading.Thread(
                    target=_run, args=(self._items, self._fault), name=self.name, daemon=True
                )
                thread.start()
                self._thread = thread
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
        # Orders `notify` against `finish`: a waker is rung by exactly one of them. Nothing is
        # called while it is held.
        self._lock = threading.Lock()

    def notify(self, waker: Waker) -> None:
        """Ring once the event is done: at once if it is already."""
        with self._lock:
            if not self.is_done:
                self._wakers.append(waker)
                return
        waker.ring()

    def finish(self, error: Exception | None, *, is_lost: bool = False) -> None:
        """Mark the event as done and ring; called once, from the stream's thread.

        When the context is lost, only other streams see it, and no callback is called, as on a GPU (D9).
        """
        with self._lock:
            self.error = error
            self.is_done = True
            wakers, self._wakers = self._wakers, []
        for waker in wakers:
            # A latch is another stream's thread, or a `synchronize`: it would block for ever.
            if not is_lost or isinstance(waker, _Latch):
                waker.ring()

    def __repr__(self) -> str:
        return f"<CpuEvent ({'done' if self.is_done else 'pending'}, error {self.error!r})>"


@attrs.define(eq=False)
class CpuHold:
    """A hold of a stream: its thread waits for the release."""

    _waker: Waker | None
    _memory: npt.NDArray[np.uint8] | None
    _released: threading.Event = attrs.field(factory=threading.Event, init=False)

    def release(self) -> None:
        """Let the stream go on. From any thread; more than once does nothing."""
        self._released.set()

    def wait(self) -> None:
        """Block, or write to the memory, until the release; called in the stream's thread."""
        if self._waker is not None:
            self._waker.ring()
        for byte in itertools.cycle(range(256)):
            if self._memory is not None:
                self._memory[...] = byte
            # Others get the interpreter's lock in between.
            if self._released.wait(None if self._memory is None else _WRITING):
                return


_Item: TypeAlias = "Work | CpuEvent | _Latch | None"


class _Latch:
    """A waker that one thread waits for."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        self._lock.release()

    def wait(self) -> None:
        self._lock.acquire()


def _wait_until_done(event: CpuEvent) -> None:
    latch = _Latch()
    event.notify(latch)
    latch.wait()


def _crash() -> None:
    # A process that dies on purpose needs no report of it.
    faulthandler.disable()
    ctypes.string_at(0)


@attrs.define(eq=False)
class CpuFault:
    """The state of a context that all its streams share: usable, or lost for a reason."""

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
    """Asked by work that may never end by itself, in the thread of its stream.

    Raises:
        ContextPoisonedError: The context is lost.
    """
    failure = None if _running.fault is None else _running.fault.error()
    if failure is not None:
        raise failure


def _run(items: queue.SimpleQueue[_Item], fault: CpuFault) -> None:
    """Body of a stream's thread."""
    _running.fault = fault
    error: Exception | None = None
    # Overflow and the like are results here, as on any device, and no warnings.
    with np.errstate(all="ignore"):
        while (item := items.get()) is not None:
            lost = fault.error()
            if isinstance(item, CpuEvent):
                item.finish(lost or error, is_lost=lost is not None)
                error = None
            elif isinstance(item, _Latch):
                # A thread that blocks is woken, whatever has become of the context.
                item.ring()
            elif lost is not None:
                # Work enqueued after the fault never runs.
                error = lost
            else:
                failure = _call(item)
                error = error or failure
                failure = None
            # While the thread is idle it must hold no array, no specification and no event.
            item = None


def _call(work: Work) -> Exception | None:
    try:
        work()
    # Nothing may end the thread, because others wait for its events. Trio has no cancellation here.
    except BaseException as error:  # noqa: ASYNC103, BLE001
        # Frames keep their locals, and so the operation's arrays, as long as the error lives. So the frames
        # keep their lines and lose their locals. This frame still runs, and would stay alive with the frames
        # that it called. Therefore it is cut off, and drops the work itself.
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
    visited: set[int] = set()
    errors = [error]
    while errors:
        error = errors.pop()
        if id(error) not in visited:
            visited.add(id(error))
            traceback.clear_frames(error.__traceback__)
            errors += [linked for linked in (error.__cause__, error.__context__) if linked is not None]
