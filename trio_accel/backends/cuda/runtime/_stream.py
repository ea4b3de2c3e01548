"""Streams of the CUDA backend, with the numbers that they write when they get somewhere."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

import attrs
from cuda.bindings import driver

from ...base import AccelEvent, ContextPoisonedError, Waker
from ._context import CudaContext, is_sticky
from ._signals import EventNotifier, StatusWord, StatusWords

_MASK = 0xFFFFFFFF
_AT_LEAST = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
# The least memory taken for a trial.
_SCRATCH = 256
# A blocking stream would wait for the legacy default stream, which other libraries of the process use.
_NON_BLOCKING = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class CudaStream:
    """A stream, and its timeline semaphore: a word in host memory to which it writes a number for each event.

    The host reads the word to see how far the stream is, without a call into the driver or from it. Other
    streams wait for the same word on the device.

    Attributes:
        name: Name of the stream.
        done: The number of the last event that `refresh` saw to be done.
        native: The driver's handle, as the bindings want it: of an integer they make one each time.
        handle: The same as an integer.
        is_closed: Whether it takes no more work.
        is_destroyed: Whether it has ended and was given back.
        timeline: The word that it writes to.
        is_capturing: Whether enqueued work is captured, and does not run.
    """

    is_capturing: bool = False

    def __init__(
        self,
        name: str,
        context: CudaContext,
        status_words: StatusWords,
        notifier: EventNotifier,
        priority: int = 0,
    ) -> None:
        self.name: str = name
        self._context = context
        self._status_words = status_words
        self._notifier = notifier
        self.is_closed: bool = False
        with self._context:
            stream = self._context.check(driver.cuStreamCreateWithPriority(_NON_BLOCKING, priority))
            self.native: driver.CUstream = stream
            self.handle: int = int(stream)
            self.timeline: StatusWord = status_words.take()
        # Last result of `refresh`.
        self.done: int = self.timeline.sequence
        # D7: a host function on the work's own stream would stall it, so callbacks have a second stream.
        self._side: int | None = None
        # Host callbacks for the next event, and events with such callbacks.
        self._next: list[Callable[[], None]] = []
        self._finishing: deque[CudaEvent] = deque()
        self.is_destroyed: bool = False
        # Number of abandoned threads that enqueue on it.
        self._users = 0
        self._lock = threading.RLock()

    @property
    def orders_memory(self) -> CudaStream:
        """The stream that orders memory for work here; another stream if this one captures."""
        return self

    @property
    def launched(self) -> int:
        """The number of its last event."""
        return self.timeline.sequence

    def take_memory(self, nbytes: int) -> int:
        """Take memory from the driver's stream-ordered pool; the context is current.

        Raises:
            CudaMemoryError: There is too little memory.
        """
        return int(self._context.check(driver.cuMemAllocAsync(nbytes, self.orders_memory.handle)))

    def free_memory(self, address: int) -> None:
        """Free memory after the enqueued work; the context is current, or dead."""
        if not self._context.is_dead:
            # The work of an ended stream no longer uses it, and its handle is invalid.
            order = self.orders_memory
            driver.cuMemFreeAsync(address, 0 if order.is_destroyed else order.handle)

    def copy_in(self, target: int, host: int, nbytes: int) -> None:
        """Copy to an address of the device, from one of the host; the context is current."""
        self._context.check(driver.cuMemcpyHtoDAsync(target, host, nbytes, self.native))

    def copy_out(self, host: int, source: int, nbytes: int) -> None:
        """Copy to an address of the host, from one of the device; the context is current."""
        self._context.check(driver.cuMemcpyDtoHAsync(host, source, nbytes, self.native))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the device; the context is current."""
        self._context.check(driver.cuMemcpyDtoDAsync(target, source, nbytes, self.native))

    def set_bytes(self, target: int, byte: int, count: int) -> None:
        """Set `count` bytes to one value; the context is current."""
        self._context.check(driver.cuMemsetD8Async(target, byte, count, self.native))

    def set_words(self, target: int, word: int, count: int) -> None:
        """Set `count` words of 32 bits to one value; the context is current."""
        self._context.check(driver.cuMemsetD32Async(target, word, count, self.native))

    @property
    def failure(self) -> Exception | None:
        """The reason why the context is unusable; asks the driver, which is how a fault is learned of."""
        if not self._context.is_lost and not self.is_destroyed:
            self._query(self.handle)
        return self._context.failure()

    @property
    def is_preparing(self) -> bool:
        """Kernels are compiled before they are enqueued."""
        return False

    @property
    def has_ended(self) -> bool:
        """Whether the stream is closed and everything enqueued is done, or never will be."""
        if not self.is_closed or self._users:
            return False
        if self.is_destroyed:
            return True
        # A post is enqueued on the side: the semaphore must outlive it.
        handles = (self.handle,) if self._side is None else (self.handle, self._side)
        return all(self._query(handle) != driver.CUresult.CUDA_ERROR_NOT_READY for handle in handles)

    def check(self) -> None:
        """Refuse more work where none can be enqueued.

        Raises:
            RuntimeError: The stream is closed.
            ContextPoisonedError: The context is lost.
        """
        if self.is_closed:
            raise RuntimeError(f"stream {self.name!r} is closed and takes no more work")
        if self._context.is_lost:
            failure = self._context.failure()
            assert failure is not None
            raise failure

    @contextmanager
    def in_use(self) -> Generator[None]:
        """Enqueue on it in a thread that the device does not wait for when it is closed: it has not ended.

        Raises:
            RuntimeError, ContextPoisonedError: As for `check`.
        """
        with self._lock:
            self.check()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1

    def record(self) -> CudaEvent:
        """Make an event after everything enqueued so far; see `AccelStream.record`."""
        if self.is_closed:
            raise RuntimeError(f"stream {self.name!r} is closed and takes no more work")
        timeline, result = self.timeline, None
        with self._lock:
            if not self._context.is_lost:
                sequence = timeline.sequence + 1
                # D37: an event is the stream's next number. It counts only once the driver has accepted the
                # write, because a number never written would never be done.
                result = driver.cuStreamWriteValue32(self.native, timeline.native, sequence & _MASK, 0)
                if not result[0]:
                    timeline.sequence = sequence
                    event = CudaEvent(self, sequence)
                    if self._next:
                        event.finishers, self._next = tuple(self._next), []
                        self._finishing.append(event)
                    return event
        # The lock is not held here: a loss calls `forget` of every stream, which takes their locks.
        if result is not None:
            with suppress(ContextPoisonedError):
                self._context.check(result)
        # An event never written reports the loss of the context.
        return CudaEvent(self, timeline.sequence + 1)

    def after(self, finisher: Callable[[], None]) -> None:
        """Do something short on the host before the next event is done; an error of it is the event's."""
        self._next.append(finisher)

    def wait(self, event: AccelEvent) -> None:
        """Hold back later work until an event of any stream on this device is done."""
        if not isinstance(event, CudaEvent):
            raise TypeError(f"event: a stream of the CUDA backend waits for its own kind, not {event!r}")
        if event.is_done or event.stream is self or self._context.is_lost:
            return
        self._wait_for(event.stream.timeline, event.sequence)

    def hold(self, waker: Waker | None = None) -> CudaHold:
        """Hold back what is enqueued from now on; see `AccelStream.hold`."""
        self.check()
        with self._context:
            word = self._status_words.take()
        word.sequence += 1
        hold = CudaHold(self._status_words, word)
        if waker is not None:
            self.notify(self.record(), waker)
        self._wait_for(word, word.sequence)
        # When this runs, the stream has passed the word, so another stream may have it.
        self.after(lambda: self._status_words.give_back(word))
        return hold

    def crash(self) -> None:
        """Let the process die of SIGSEGV when the stream gets here; see `AccelStream.crash`."""
        self.check()
        self._context.check(self._notifier.crash(self.handle))

    def notify(self, event: AccelEvent, waker: Waker) -> None:
        """Ring when the event is done, from a thread of the device; at once if it is already."""
        if not isinstance(event, CudaEvent):
            raise TypeError(f"event: a stream of the CUDA backend knows its own kind, not {event!r}")
        if event.is_done:
            waker.ring()
        else:
            stream = event.stream
            if self._notifier.watch(event, waker):
                stream.notify_after(event.sequence)

    def notify_after(self, sequence: int) -> None:
        """Have the driver post, on a side stream, when the stream has written a number."""
        # A lost context is noticed by polling.
        with suppress(ContextPoisonedError):
            side, check = self.side(), self._context.check
            check(driver.cuStreamWaitValue32(side, self.timeline.address, sequence & _MASK, _AT_LEAST))
            check(self._notifier.post(side))

    def side(self) -> int:
        """Return the handle of a side stream, made on first use, for work that must not stall this one."""
        if self._side is None:
            with self._context:
                self._side = int(self._context.check(driver.cuStreamCreate(_NON_BLOCKING)))
        return self._side

    def refresh(self) -> int:
        """Query the stream's progress; return the number of its last event that is done."""
        with self._lock:
            done = self.done
            # The word of a released stream is in use by another stream.
            if not self._context.is_lost and not self.is_destroyed:
                # The word has 32 bits, the count is unlimited: the difference modulo 2³² is the progress.
                done += (self.timeline.read() - done) & _MASK
            while self._finishing and self._finishing[0].sequence <= done:
                self._finishing.popleft().finish()
            # Stored last: `CudaEvent.is_done` reads it without the lock, and takes events up to here for
            # finished.
            self.done = done
            return done

    @property
    def is_lost(self) -> bool:
        """Whether the context is."""
        return self._context.is_lost

    def loss(self) -> ContextPoisonedError | None:
        """Make the error that the context was lost to."""
        return self._context.failure()

    def forget(self) -> None:
        """Drop unfinished events: the context is lost, and they never finish."""
        with self._lock:
            self.refresh()
            self._finishing.clear()
            self._next.clear()

    def synchronize(self) -> None:
        """Block until everything enqueued is done."""
        if not self.is_destroyed:
            code = driver.cuStreamSynchronize(self.handle)[0]
            if is_sticky(code):
                self._context.lose_to(int(code))
        self.refresh()

    def close(self) -> None:
        """Take no more work. Enqueued work still runs; does not wait for it."""
        with self._lock:
            self.is_closed = True

    def destroy(self) -> None:
        """Give the stream back: it has ended."""
        if self.is_destroyed:
            return
        self.refresh()
        self.is_destroyed = True
        if not self._context.is_dead:
            for handle in (self.handle, self._side):
                if handle is not None:
                    driver.cuStreamDestroy(handle)
            self._status_words.give_back(self.timeline)

    def _wait_for(self, word: StatusWord, sequence: int) -> None:
        self._context.check(
            driver.cuStreamWaitValue32(self.handle, word.address, sequence & _MASK, _AT_LEAST)
        )

    def _query(self, handle: int) -> int:
        code = driver.cuStreamQuery(handle)[0]
        if is_sticky(code):
            self._context.lose_to(int(code))
        return int(code)

    def __repr__(self) -> str:
        return f"<CudaStream {self.name!r} ({'closed' if self.is_closed else 'open'})>"


@attrs.define(eq=False, repr=False)
class CudaEvent:
    """A point in a stream: done when the stream has written its number, or never will."""

    stream: CudaStream
    sequence: int
    finishers: tuple[Callable[[], None], ...] = ()
    _error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether the stream has passed this point, or the context is lost."""
        stream = self.stream
        return stream.done >= self.sequence or stream.refresh() >= self.sequence or stream.is_lost

    @property
    def error(self) -> Exception | None:
        """The error between the stream's previous event and this one; None on success."""
        if self._error is None and self.stream.done < self.sequence:
            return self.stream.loss()
        return self._error

    def finish(self) -> None:
        """Run the host's work at this point; its first error is the event's error."""
        for finisher in self.finishers:
            try:
                finisher()
            except Exception as error:  # noqa: BLE001  # the event's error
                # Its frames lead back to the frames of the task that looks here, which would live as long as
                # the event. So would an error that this task is handling.
                error.__context__ = None
                self._error = self._error or error.with_traceback(None)
        self.finishers = ()

    def __repr__(self) -> str:
        return (
            f"<CudaEvent {self.sequence} of {self.stream.name!r} ({'done' if self.is_done else 'pending'})>"
        )


class CudaHold:
    """A hold of a stream: it waits for a word that the host writes (D37)."""

    __slots__ = ("_sequence", "_status_words", "_word")

    def __init__(self, status_words: StatusWords, word: StatusWord) -> None:
        self._status_words = status_words
        self._word: StatusWord | None = word
        self._sequence = word.sequence

    def release(self) -> None:
        """Let the stream go on. From any thread; more than once does nothing."""
        # Once the stream has passed it, the word belongs to another; the number shows whether it is still
        # this hold's.
        self._status_words.advance(self._word, self._sequence)
        self._word = None


@contextmanager
def scratch(context: CudaContext, *rooms: int) -> Generator[tuple[int, list[int]]]:
    """Yield a stream, and addresses of zeroed memory with these sizes; at the end, wait for the stream."""
    check, rooms = context.check, tuple(max(room, _SCRATCH) for room in rooms)
    stream = int(check(driver.cuStreamCreate(_NON_BLOCKING)))
    try:
        addresses = [int(check(driver.cuMemAllocAsync(room, stream))) for room in rooms]
        for address, room in zip(addresses, rooms, strict=True):
            check(driver.cuMemsetD8Async(address, 0, room, stream))
        yield stream, addresses
        for address in addresses:
            check(driver.cuMemFreeAsync(address, stream))
        check(driver.cuStreamSynchronize(stream))
        context.settle()
    finally:
        driver.cuStreamDestroy(stream)


def capture_once(context: CudaContext, enqueue: Callable[[int], None]) -> None:
    """Have the driver load the kernels that a call enqueues: they are captured, and do not run. Blocks.

    Args:
        context: The context, which is current.
        enqueue: Called with the handle of a stream for this call only; its errors are raised.
    """
    stream = int(context.check(driver.cuStreamCreate(_NON_BLOCKING)))
    try:
        if driver.cuStreamBeginCapture(stream, _RELAXED)[0]:
            return
        try:
            enqueue(stream)
        finally:
            code, captured = driver.cuStreamEndCapture(stream)
            if not code and int(captured):
                driver.cuGraphDestroy(captured)
    finally:
        driver.cuStreamDestroy(stream)
