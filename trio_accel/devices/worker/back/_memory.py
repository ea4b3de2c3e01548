"""Memory that a worker's device and the application both have: chunks, and slabs of host memory."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ....backends.base import AccelDevice
from ...base._errors import lost_descriptors
from ..transport._channel import Channel
from ..transport._framing import LOST
from ._slabs import WorkerSlabs

__all__ = ["WorkerMemory"]


class WorkerMemory:
    """Tells the application of chunks that the device makes, and the device of what the application has.

    The device calls `keep` and `drop` while it allocates, on the Trio thread or in that of `adopt`.

    Args:
        channel: Where the application is told.
        give_up: Called where the device would serve without a part of the memory.

    Attributes:
        device: The device, once it is open.
        slabs: The slabs that it has been told of.
    """

    def __init__(self, channel: Channel, give_up: Callable[[BaseException], None]) -> None:
        self.device: AccelDevice
        self.slabs: WorkerSlabs = WorkerSlabs()
        self._channel = channel
        self._give_up = give_up
        # Size and descriptor of chunks that the application has not acknowledged.
        self._told: dict[int, tuple[int, int]] = {}

    def keep(self, chunk: int, nbytes: int, descriptor: int) -> None:
        """Give memory that was made to the application, too.

        Raises:
            MemoryError: There are too many open files.
        """
        try:
            # The application may have no room for it now, and ask again.
            self._told[chunk] = nbytes, os.dup(descriptor)
            self._tell(chunk)
        except OSError as error:
            self.forget(chunk)
            raise MemoryError(f"a chunk of {nbytes} bytes: {error}") from error

    def drop(self, chunk: int) -> None:
        """Memory is gone."""
        self.forget(chunk)
        self._channel.send(("unchunk", chunk))

    def _tell(self, chunk: int) -> None:
        told = self._told.get(chunk)
        if told is not None:
            nbytes, descriptor = told
            self._channel.send(("chunk", chunk, nbytes), (descriptor,))

    def tell_again(self, chunk: int) -> None:
        """The application had no room for a chunk; it asks again if this fails."""
        with suppress(OSError):
            self._tell(chunk)

    def forget(self, chunk: int) -> None:
        """The application has the descriptor of a chunk, or needs none any more."""
        told = self._told.pop(chunk, None)
        if told is not None:
            os.close(told[1])

    def add_chunk(self, number: int, nbytes: int, descriptor: int) -> None:
        """Have the device map a chunk that there is."""
        if descriptor == LOST:
            self._give_up(lost_descriptors())
            return
        self.device.map_chunk(number, nbytes, descriptor)

    def remove_chunk(self, number: int) -> None:
        """A chunk is gone."""
        # It may have been given back by this worker itself.
        with suppress(KeyError, ValueError):
            self.device.unmap_chunk(number)

    def add_slab(self, number: int, nbytes: int, descriptor: int) -> None:
        """Have the device know host memory of the application."""
        if descriptor == LOST:
            self._give_up(lost_descriptors())
            return
        self.slabs.add(self.device, number, nbytes, descriptor)

    def remove_slab(self, number: int, wait_idle: Callable[[], Awaitable[None]]) -> None:
        """No array of the application lies in a slab any more; see `WorkerSlabs.remove`."""
        self.slabs.remove(self.device, number, wait_idle)
