"""Memory of the application that the device of a worker transfers from and to."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from ...backends.base import AccelDevice, DType
from ...backends.base.host import map_shared
from ._remote_copies import RemoteCopies, StagedArray

__all__ = ["WorkerSlabs"]

_logger = logging.getLogger("trio_accel.devices")


class WorkerSlabs:
    """The slabs of the application's pool, mapped and made known to the device.

    Args:
        copies: Knows which arrays in them are not filled yet.
    """

    def __init__(self, copies: RemoteCopies) -> None:
        self._copies = copies
        self._changes, self._pending = trio.open_memory_channel[Callable[[], Awaitable[None]]](inf)
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}

    async def run(self) -> None:
        """Tell the device of slabs, one after the other, until it is cancelled.

        The driver takes its time for that, and may wait for streams that a message lets go: so whoever
        reads messages does not wait for it. What is not registered yet is transferred like any other.
        """
        async for change in self._pending:
            await change()
            # Nothing is to hold on to memory while there is nothing to do.
            del change

    def add(self, device: AccelDevice, number: int, nbytes: int, descriptor: int) -> None:
        """Map a slab, and have the device know it soon.

        Raises:
            OSError: It cannot be mapped.
        """
        try:
            memory = self._memory[number] = map_shared(descriptor, nbytes)
        finally:
            os.close(descriptor)
        self._changes.send_nowait(partial(self._register, device, memory))

    async def _register(self, device: AccelDevice, memory: npt.NDArray[np.uint8]) -> None:
        try:
            await trio.to_thread.run_sync(device.register_host, memory)
        except Exception as error:  # noqa: BLE001  # the driver refuses, or the device is being closed
            # Its arrays are transferred all the same, like any other.
            _logger.debug("host memory of %d bytes is not known to the device: %s", memory.nbytes, error)

    def array(
        self, number: int, offset: int, dtype: str, shape: tuple[int, ...], transfer: int | None
    ) -> npt.NDArray[Any] | StagedArray:
        """Make an array in a slab; `transfer` says which copy of the application's is to fill it first."""
        array: npt.NDArray[Any] = np.ndarray(shape, DType(dtype).dtype, self._memory[number].data, offset)
        return array if transfer is None else self._copies.stage(transfer, array)

    def remove(self, device: AccelDevice, number: int, settle: Callable[[], Awaitable[None]]) -> None:
        """Forget a slab: no array of the application lies in it.

        Args:
            device: What is to forget it, too.
            number: Which one; the application may not have been able to tell of it.
            settle: Waits for what may use it: an operation that failed may have left a transfer behind.
        """
        memory = self._memory.pop(number, None)
        if memory is not None:
            self._changes.send_nowait(partial(self._unregister, device, memory, settle))

    async def _unregister(
        self, device: AccelDevice, memory: npt.NDArray[np.uint8], settle: Callable[[], Awaitable[None]]
    ) -> None:
        await settle()
        with suppress(Exception):
            # If the device is closed by now, it has forgotten it.
            await trio.to_thread.run_sync(device.unregister_host, memory)
