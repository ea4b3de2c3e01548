"""Copies between host and device that never block their caller."""

from __future__ import annotations

import bisect
import ctypes
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver

from ..base import ContextPoisonedError, as_bits
from ._context import CudaContext
from ._stream import CudaHold, CudaStream

__all__ = ["SMALL", "Transfers"]

HostArray: TypeAlias = npt.NDArray[Any]

SMALL = 64 << 10
"""Arrays up to so many bytes go by way of a slot of pinned memory that is filled, or read, on the spot."""

_SLOTS = 64
# So much is copied by the host while the device transfers as much.
_PIECE = 8 << 20
_PIECES = 2


class Transfers:
    """What moves arrays of the host: pinned and registered ones go straight, others by way of pinned memory.

    The driver copies from and to pageable memory while its caller waits. So a large array is cut into
    pieces that a thread copies to pinned memory and sends from there, while the stream is held; the host's
    copy of one piece goes on beside the transfer of the one before.
    """

    def __init__(self, context: CudaContext, name: str) -> None:
        self._context = context
        self._name = name
        # Starts of registered ranges, sorted, and their ends.
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._slots: list[HostArray] = []
        self._areas: list[int] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        # Held while pages are pinned, which takes long: never wanted where nothing may block.
        self._pinning = threading.Lock()
        self._is_closed = False

    def prepare(self) -> None:
        """Take the first pinned memory; blocks."""
        self._add_slots()

    def register(self, array: HostArray) -> None:
        """Pin memory of the host, so that it is transferred without a copy; blocks.

        Args:
            array: Contiguous; its memory must stay as long as it is registered.

        Raises:
            AccelError: The driver refused.
        """
        start, end = array.ctypes.data, array.ctypes.data + array.nbytes
        with self._pinning, self._context:
            if self._is_closed:
                return
            result = driver.cuMemHostRegister(start, array.nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE)
            # By a device that was closed while a stream of it was stuck: contexts of a process are one.
            if result[0] != driver.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
                self._context.check(result)
            with self._lock:
                index = bisect.bisect(self._starts, start)
                self._starts.insert(index, start)
                self._ends.insert(index, end)

    def unregister(self, array: HostArray) -> None:
        """Give the pages back to the system; no transfer uses them. Blocks."""
        with self._pinning:
            self._forget(array.ctypes.data)

    def _forget(self, start: int) -> None:
        with self._lock:
            index = bisect.bisect_left(self._starts, start)
            if index == len(self._starts) or self._starts[index] != start:
                return
            del self._starts[index], self._ends[index]
        if not self._context.is_dead:
            with self._context:
                driver.cuMemHostUnregister(start)

    def is_registered(self, host: HostArray) -> bool:
        """Whether an array lies in memory that the device transfers by itself."""
        start = host.ctypes.data
        with self._lock:
            index = bisect.bisect_right(self._starts, start) - 1
            return index >= 0 and start + host.nbytes <= self._ends[index]

    def to_device(self, stream: CudaStream, host: HostArray, address: int) -> None:
        """Enqueue the copy of a host array, in C order, to device memory. It is read until the next event."""
        if host.flags.c_contiguous and self.is_registered(host):
            self._context.check(
                driver.cuMemcpyHtoDAsync(address, host.ctypes.data, host.nbytes, stream.handle)
            )
        elif host.nbytes <= SMALL:
            slot = self._take_slot()
            _copy(_shaped(slot, host), host)
            stream.after(partial(self._give_slot_back, slot))
            self._context.check(
                driver.cuMemcpyHtoDAsync(address, slot.ctypes.data, host.nbytes, stream.handle)
            )
        else:
            self._start(stream, _Job(host, address, is_upload=True))

    def to_host(self, stream: CudaStream, address: int, host: HostArray) -> None:
        """Enqueue the copy of device memory to a host array, in C order; it is there at the next event."""
        if host.flags.c_contiguous and self.is_registered(host):
            self._context.check(
                driver.cuMemcpyDtoHAsync(host.ctypes.data, address, host.nbytes, stream.handle)
            )
        elif host.nbytes <= SMALL:
            slot = self._take_slot()
            self._context.check(
                driver.cuMemcpyDtoHAsync(slot.ctypes.data, address, host.nbytes, stream.handle)
            )
            stream.after(partial(self._fetch, slot, host))
        else:
            self._start(stream, _Job(host, address, is_upload=False))

    def close(self) -> None:
        """End the thread, free the pinned memory and unregister the rest: no stream is held any more.

        The context is current.
        """
        thread = self._thread
        if thread is not None:
            self._jobs.put(None)
            thread.join()
        self._slots.clear()
        areas, self._areas = self._areas, []
        for area in areas:
            driver.cuMemFreeHost(area)
        with self._pinning:
            self._is_closed = True
            for start in tuple(self._starts):
                self._forget(start)

    def _start(self, stream: CudaStream, job: _Job) -> None:
        with self._lock:
            if self._thread is None:
                # A daemon: a transfer that is stuck must not keep the interpreter from ending.
                self._thread = threading.Thread(target=self._run, name=f"{self._name} transfers", daemon=True)
                self._thread.start()
        job.queue = self._jobs
        reached = stream.record()
        job.hold = stream.hold()
        stream.after(job.check)
        # Last: the thread may be done with it at once.
        try:
            stream.notify(reached, job)
        except BaseException:
            # Nobody else would ever let the stream go.
            job.end()
            raise

    def _take_slot(self) -> HostArray:
        while True:
            with self._lock:
                if self._slots:
                    return self._slots.pop()
            # Without the lock: a fault that shows here has what others hold given back.
            self._add_slots()

    def _add_slots(self) -> None:
        area, memory = self._pinned(_SLOTS * SMALL)
        self._areas.append(area)
        self._slots += [memory[start : start + SMALL] for start in range(0, _SLOTS * SMALL, SMALL)]

    def _give_slot_back(self, slot: HostArray) -> None:
        with self._lock:
            self._slots.append(slot)

    def _fetch(self, slot: HostArray, host: HostArray) -> None:
        try:
            _copy(host, _shaped(slot, host))
        finally:
            self._give_slot_back(slot)

    def _pinned(self, nbytes: int) -> tuple[int, HostArray]:
        with self._context:
            flags = driver.CU_MEMHOSTALLOC_PORTABLE
            area = int(self._context.check(driver.cuMemHostAlloc(nbytes, flags)))
        return area, np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(area))

    def _run(self) -> None:
        """Body of the thread: one transfer after the other."""
        machine: _Machine | None = None
        while (job := self._jobs.get()) is not None:
            try:
                with self._context:
                    if machine is None:
                        machine = _Machine(self._context, *self._pinned(_PIECES * _PIECE))
                    machine.run(job)
            except Exception as error:  # noqa: BLE001  # it is the operation's
                job.failure = error
            finally:
                # After a fault, too: whoever looks sees that the context is lost.
                job.end()
                del job
        if machine is not None:
            with self._context:
                machine.close()


class _Job:
    """One large copy. Rung when its stream gets there."""

    def __init__(self, host: HostArray, address: int, *, is_upload: bool) -> None:
        self.host: HostArray | None = host
        self.address = address
        self.is_upload = is_upload
        self.queue: queue.SimpleQueue[_Job | None]
        self.hold: CudaHold | None = None
        self.failure: Exception | None = None

    def ring(self) -> None:
        self.queue.put(self)

    def check(self) -> None:
        """Raise what went wrong."""
        if self.failure is not None:
            raise self.failure

    def end(self) -> None:
        """Let the stream go on."""
        self.host = None
        hold, self.hold = self.hold, None
        if hold is not None:
            hold.release()


class _Machine:
    """A stream of its own and pieces of pinned memory, of which one is filled while another is sent."""

    def __init__(self, context: CudaContext, area: int, memory: HostArray) -> None:
        self._check = context.check
        self._area = area
        self._stream = int(self._check(driver.cuStreamCreate(1)))
        self._pieces = [memory[start : start + _PIECE] for start in range(0, memory.size, _PIECE)]
        self._events = [int(self._check(driver.cuEventCreate(2))) for _ in self._pieces]

    def run(self, job: _Job) -> None:
        """Copy; returns when it is done."""
        host = job.host
        assert host is not None
        if job.is_upload:
            self._upload(np.ascontiguousarray(host), job.address)
        elif host.flags.c_contiguous:
            self._download(job.address, host)
        else:
            packed = np.empty(host.shape, host.dtype)
            self._download(job.address, packed)
            _copy(host, packed)

    def _upload(self, host: HostArray, address: int) -> None:
        for number, part in enumerate(_parts(host)):
            turn = number % len(self._pieces)
            self._check(driver.cuEventSynchronize(self._events[turn]))
            piece = self._pieces[turn][: part.size]
            np.copyto(piece, part)
            self._check(
                driver.cuMemcpyHtoDAsync(
                    address + number * _PIECE, piece.ctypes.data, part.size, self._stream
                )
            )
            self._check(driver.cuEventRecord(self._events[turn], self._stream))
        self._check(driver.cuStreamSynchronize(self._stream))

    def _download(self, address: int, host: HostArray) -> None:
        waiting: list[tuple[int, HostArray]] = []
        for number, part in enumerate(_parts(host)):
            turn = number % len(self._pieces)
            if len(waiting) == len(self._pieces):
                self._fetch(*waiting.pop(0))
            piece = self._pieces[turn]
            self._check(
                driver.cuMemcpyDtoHAsync(
                    piece.ctypes.data, address + number * _PIECE, part.size, self._stream
                )
            )
            self._check(driver.cuEventRecord(self._events[turn], self._stream))
            waiting.append((turn, part))
        for turn, part in waiting:
            self._fetch(turn, part)

    def _fetch(self, turn: int, part: HostArray) -> None:
        self._check(driver.cuEventSynchronize(self._events[turn]))
        np.copyto(part, self._pieces[turn][: part.size])

    def close(self) -> None:
        with suppress(ContextPoisonedError):
            for event in self._events:
                self._check(driver.cuEventDestroy(event))
            self._check(driver.cuStreamDestroy(self._stream))
            self._check(driver.cuMemFreeHost(self._area))


def _parts(host: HostArray) -> Iterator[HostArray]:
    flat = host.reshape(-1).view(np.uint8)
    for start in range(0, flat.size, _PIECE):
        yield flat[start : start + _PIECE]


def _shaped(slot: HostArray, like: HostArray) -> HostArray:
    return slot[: like.nbytes].view(like.dtype).reshape(like.shape)


def _copy(target: HostArray, source: HostArray) -> None:
    np.copyto(as_bits(target), as_bits(source))
