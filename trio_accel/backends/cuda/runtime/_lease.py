"""Arrays of the CUDA backend in the hands of other libraries of the process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ...base import ContextPoisonedError, DeviceInfo
from ...base.device_array import DeviceArray
from ._context import CudaContext
from ._export import CudaArray
from ._foreign import follow, handle_of
from ._stream import CudaEvent, CudaStream

__all__ = ["CudaLease", "Lending"]


class Lending:
    """What of a device the program has, and the streams on which later work waits for what it does with it.

    Each lease has a stream of its own for as long as its event is not done: on a shared one, a program whose
    stream waits for another of its own could wait for itself.

    Args:
        info: What the device is.
        context: Its context.
        open_stream: Makes a stream of the device.

    Attributes:
        info: As given.
        context: As given.
    """

    __slots__ = ("_leases", "_open_stream", "_returned", "context", "info")

    def __init__(self, info: DeviceInfo, context: CudaContext, open_stream: Callable[[], CudaStream]) -> None:
        self.info: DeviceInfo = info
        self.context: CudaContext = context
        self._open_stream = open_stream
        self._leases: set[CudaLease] = set()
        self._returned: list[CudaEvent] = []

    @property
    def is_idle(self) -> bool:
        """Whether the program has nothing; what it has enqueued is on streams of the device."""
        return not self._leases

    def lend(self, array: DeviceArray, *, write: bool, stream: object) -> CudaLease:
        """Make a lease; see `AccelDevice.lend`."""
        lease = CudaLease(self, array, write=write, stream=stream)
        self._leases.add(lease)
        return lease

    def stream(self) -> CudaStream:
        """A stream with nothing on it."""
        for event in self._returned:
            if event.is_done and not event.stream.is_closed:
                self._returned.remove(event)
                return event.stream
        return self._open_stream()

    def returned(self, lease: CudaLease, event: CudaEvent | None) -> None:
        """A lease is over."""
        self._leases.discard(lease)
        if event is not None:
            self._returned.append(event)


class CudaLease:
    """An array that the program has.

    Attributes:
        array: What the program uses.
    """

    def __init__(self, lending: Lending, array: DeviceArray, *, write: bool, stream: object) -> None:
        self._lending = lending
        self._context = lending.context
        self._handle = handle_of(stream)
        # An object keeps its stream only as long as itself.
        self._theirs = stream
        self.array: CudaArray = CudaArray(array, lending.info, self._context, is_read_only=not write)
        self._ours = lending.stream()
        try:
            # What is wrong with their stream is said before anything is enqueued on it.
            follow(self._ours, self._handle, self._context)
        except BaseException:
            self._ours.close()
            raise

    def take_back(self) -> tuple[CudaStream, CudaEvent] | None:
        """Follow what the program has enqueued; see `Lease.take_back`."""
        self.array.end()
        event: CudaEvent | None = None
        try:
            # In a context that only counts as lost their work goes on, and `close` waits for it.
            with suppress(ContextPoisonedError):
                follow(self._ours, self._handle, self._context)
            if not self._ours.is_closed:
                event = self._ours.record()
        finally:
            self._lending.returned(self, event)
        return None if event is None else (self._ours, event)
