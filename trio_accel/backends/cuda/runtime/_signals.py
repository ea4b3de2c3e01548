"""Signals between host and device about the progress of a stream; the driver never runs Python (D6).

Streams write to status words in pinned host memory how far they are, and wait for the host's words; a thread
rings when a stream gets somewhere.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import threading
from typing import Any

import attrs
from cuda.bindings import driver

from ...base import AccelEvent, Waker
from ...base.kit.pools import PagePool
from ._context import CudaContext

_BYTES = 64 << 10
# A cache line each: the host polls one while the device writes the next.
_APART = 64


@attrs.define(eq=False)
class StatusWord:
    """One word of 32 bits, that host and device see at once; a timeline semaphore if its numbers grow.

    Attributes:
        address: Its device address.
        native: The same, in the form for the bindings.
        sequence: The last number that a stream has to write to it, without a limit. A word that another
            stream takes over continues its count, because numbers of the previous stream may still be waited
            for.
        written: The last number that the host wrote.
    """

    address: int
    native: driver.CUdeviceptr
    sequence: int = 0
    written: int = 0
    _word: ctypes.c_uint32 = attrs.field(alias="word", factory=ctypes.c_uint32)

    def read(self) -> int:
        """Return the number in the word."""
        return self._word.value

    def write(self, value: int) -> None:
        """Let the device see a number, of which the word has the lower 32 bits."""
        self._word.value = value


@attrs.define(eq=False)
class StatusWords(PagePool[StatusWord]):
    """The status words of one device. A word is taken, and a page made or freed, with the context current."""

    _context: CudaContext

    def __attrs_post_init__(self) -> None:
        with self._context:
            self.add_page()

    def advance(self, word: StatusWord | None, sequence: int) -> None:
        """Write to a word, once for each number; nothing when the device is closed. From any thread."""
        with self._lock:
            # Two threads may release one hold together, and `close` may have freed the page.
            if word is not None and self._pages and word.written < sequence:
                word.written = sequence
                word.write(sequence)

    def make_page(self) -> tuple[int, list[StatusWord]]:
        """Make a page of zero words."""
        flags = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE
        host = int(self._context.check(driver.cuMemHostAlloc(_BYTES, flags)))
        device = int(self._context.check(driver.cuMemHostGetDevicePointer(host, 0)))
        ctypes.memset(host, 0, _BYTES)
        return host, [
            StatusWord(
                address,
                driver.CUdeviceptr(address),
                word=ctypes.c_uint32.from_address(host + address - device),
            )
            for address in range(device + _BYTES - _APART, device - 1, -_APART)
        ]

    def free_page(self, page: int) -> None:
        """Free a page, which no host thread uses any longer."""
        driver.cuMemFreeHost(page)


_SIZE_OF_A_SEMAPHORE = 64

_libc = ctypes.CDLL(None)
for _name in ("sem_init", "sem_wait", "sem_post", "sem_destroy"):
    getattr(_libc, _name).argtypes = (
        [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint] if _name == "sem_init" else [ctypes.c_void_p]
    )


def _address_of(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


_POST = driver.CUhostFn(_address_of(_libc.sem_post))
_STRLEN = driver.CUhostFn(_address_of(_libc.strlen))
# Semaphores of devices closed while a stream was stuck: the driver may still post to them.
_abandoned: list[Any] = []


class EventNotifier:
    """A thread that waits for a semaphore of the C library, which host functions post.

    A host function that ran Python would need the interpreter's lock in a thread of the driver (D6), and one
    on the work's own stream would stall that stream (D7). So it is enqueued on a side stream that waits for
    the event's number. After a fault the driver calls no host function (D9), so the engine's watch notices a
    lost context.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._semaphore = ctypes.create_string_buffer(_SIZE_OF_A_SEMAPHORE)
        self._address = ctypes.addressof(self._semaphore)
        _libc.sem_init(self._address, 0, 0)
        self._watched: list[tuple[AccelEvent, Waker]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        # An unreadable page, so that the C library's strlen dies of it.
        self._trap: mmap.mmap | None = None

    def watch(self, event: AccelEvent, waker: Waker) -> bool:
        """Ring once an event is done, after a `post`; return False if the notifier is closed."""
        with self._lock:
            if self._is_closed:
                return False
            self._watched.append((event, waker))
            if self._thread is None:
                # A daemon: it must not keep the interpreter from ending.
                self._thread = threading.Thread(target=self._run, name=f"{self._name} notifier", daemon=True)
                self._thread.start()
        return True

    def post(self, stream: int) -> tuple[Any, ...]:
        """Enqueue a look at the watched events; returns the driver's answer."""
        result: tuple[Any, ...] = driver.cuLaunchHostFunc(stream, _POST, self._address)
        return result

    def crash(self, stream: int) -> tuple[Any, ...]:
        """Enqueue what this process dies of; returns the driver's answer."""
        if self._trap is None:
            self._trap = mmap.mmap(-1, mmap.PAGESIZE)
            self._protect(0)
        # A process that dies on purpose needs no report of it.
        faulthandler.disable()
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._trap))
        result: tuple[Any, ...] = driver.cuLaunchHostFunc(stream, _STRLEN, address)
        return result

    def defuse(self) -> None:
        """Make the trap readable: in a context that counts as lost, work that still runs must not kill it."""
        if self._trap is not None:
            self._protect(mmap.PROT_READ | mmap.PROT_WRITE)

    def _protect(self, access: int) -> None:
        assert self._trap is not None
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._trap))
        _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), access)

    def close(self, *, is_idle: bool) -> None:
        """End the thread; nothing is notified any longer.

        Args:
            is_idle: Whether no stream can post any longer.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._watched.clear()
            thread = self._thread
        if thread is not None:
            _libc.sem_post(self._address)
            thread.join()
        if is_idle:
            _libc.sem_destroy(self._address)
        else:
            _abandoned.append(self._semaphore)

    def _run(self) -> None:
        while True:
            _libc.sem_wait(self._address)
            with self._lock:
                if self._is_closed:
                    return
                watched, self._watched = self._watched, []
                done: list[Waker] = []
                for event, waker in watched:
                    if event.is_done:
                        done.append(waker)
                    else:
                        self._watched.append((event, waker))
            for waker in done:
                waker.ring()
            # References would keep events and wakers alive while it waits.
            watched = done = event = waker = None  # type: ignore[assignment]
