"""Status words in pinned host memory: streams write what they have done, and wait for the host's."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import attrs
from cuda.bindings import driver

from ._context import CudaContext

__all__ = ["StatusWord", "StatusWords"]

_BYTES = 64 << 10
# A cache line each: the host polls one while the device writes the next.
_APART = 64


@attrs.define(eq=False)
class StatusWord:
    """One word of 32 bits, that host and device see at once; a timeline semaphore if its numbers grow.

    Attributes:
        address: Where the device finds it.
        native: The same, as the bindings want it.
        sequence: The last number that a stream was told to write to it, without a limit. A word that goes to
            another stream counts on, as the numbers of the previous stream may still be waited for.
        written: The last number that the host wrote.
    """

    address: int
    native: driver.CUdeviceptr
    sequence: int = 0
    written: int = 0
    _view: Any = None
    _index: int = 0

    def read(self) -> int:
        """What stands there."""
        value: int = self._view[self._index]
        return value

    def write(self, value: int) -> None:
        """Let the device see a number."""
        self._view[self._index] = value & 0xFFFFFFFF


class StatusWords:
    """The status words of one device; pages are given back when it is closed."""

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._free: list[StatusWord] = []
        self._pages: list[int] = []
        self._lock = threading.Lock()
        # In the thread that opens the device: pinned memory takes the driver a while.
        with context:
            self._add_page()

    def take(self) -> StatusWord:
        """A word that nobody uses. The context is current."""
        while True:
            with self._lock:
                if self._free:
                    return self._free.pop()
            # Without the lock: a fault that shows here has what others hold given back.
            self._add_page()

    def give_back(self, word: StatusWord) -> None:
        """Let others have it: nothing that was enqueued waits for more than it holds."""
        with self._lock:
            if self._pages:
                self._free.append(word)

    def advance(self, word: StatusWord | None, sequence: int) -> None:
        """Write to a word, once for each number; nothing when the device is closed. From any thread."""
        with self._lock:
            # Threads may come here together with one hold; and its page may be gone.
            if word is not None and self._pages and word.written < sequence:
                word.written = sequence
                word.write(sequence)

    def close(self) -> None:
        """Free the pages: no stream uses one any more, and no host thread. The context is current."""
        with self._lock:
            self._free.clear()
            pages, self._pages = self._pages, []
        for page in pages:
            driver.cuMemFreeHost(page)

    def _add_page(self) -> None:
        flags = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE
        host = int(self._context.check(driver.cuMemHostAlloc(_BYTES, flags)))
        device = int(self._context.check(driver.cuMemHostGetDevicePointer(host, 0)))
        ctypes.memset(host, 0, _BYTES)
        self._pages.append(host)
        view = memoryview((ctypes.c_uint32 * (_BYTES // 4)).from_address(host)).cast("B").cast("I")
        for offset in range(_BYTES - _APART, -1, -_APART):
            self._free.append(
                StatusWord(device + offset, driver.CUdeviceptr(device + offset), 0, 0, view, offset // 4)
            )
