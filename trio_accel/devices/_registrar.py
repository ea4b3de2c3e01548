"""Making the pool of host memory known to the devices that are opened in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import trio
from trio.lowlevel import enable_ki_protection

from ..backends.base import AccelDevice
from ._host_pool import HostPool, Slab

__all__ = ["HostRegistrar"]

_logger = logging.getLogger("trio_accel.devices")
_Change: TypeAlias = tuple[Callable[[npt.NDArray[np.uint8]], None], npt.NDArray[np.uint8]]


class HostRegistrar:
    """Has each new device learn of all slabs, and the device of now of those that come and go.

    That takes milliseconds for each slab, so a thread does it, one after the other. Until then, the
    arrays in it are to the device as any other; and if the device refuses, they stay so.

    Args:
        pool: The slabs.
    """

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._device: AccelDevice | None = None
        self._changes, self._pending = trio.open_memory_channel[_Change](inf)
        pool.on_make = self._add
        pool.on_drop = self._remove

    def attach(self, device: AccelDevice) -> None:
        """A device is open; until it is closed it knows what is registered."""
        self._device = device
        for slab in self._pool.slabs.values():
            self._add(slab)

    def detach(self) -> None:
        """The device is about to be closed, which makes it forget everything."""
        self._device = None

    async def run(self) -> None:
        """Tell the devices, until it is cancelled."""
        async for change, memory in self._pending:
            await self._tell(change, memory)
            # Nothing is to hold on to memory while there is nothing to do.
            del change, memory

    @enable_ki_protection
    async def _tell(
        self, change: Callable[[npt.NDArray[np.uint8]], None], memory: npt.NDArray[np.uint8]
    ) -> None:
        try:
            await trio.to_thread.run_sync(change, memory)
        except Exception as error:  # noqa: BLE001  # the device is closed by now, or cannot; it goes on without
            _logger.debug("host memory of %d bytes is not known to the device: %r", memory.nbytes, error)

    def _add(self, slab: Slab) -> None:
        if self._device is not None:
            self._changes.send_nowait((self._device.register_host, slab.memory))

    def _remove(self, slab: Slab) -> None:
        # Whatever used it is over: it held on to its array.
        if self._device is not None:
            self._changes.send_nowait((self._device.unregister_host, slab.memory))
