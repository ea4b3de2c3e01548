"""Memory of the application that the device of a worker transfers from and to."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import attrs
import numpy as np
import numpy.typing as npt
import trio

from ....backends.base import AccelDevice, DType
from ....backends.base.host import map_shared
from ...base._waits import Arrival

__all__ = ["WorkerSlabs"]

Change: TypeAlias = Callable[[], Awaitable[None]]

_logger = logging.getLogger("trio_accel.devices")
# Then all of a slab are forgotten: they are made again in a moment.
_MOST_ARRAYS = 256


@attrs.frozen(eq=False)
class _Slab:
    memory: npt.NDArray[np.uint8]
    registered: Arrival = attrs.field(factory=Arrival)
    # Those that operations used, by offset, type and shape: a program uses the same again and again.
    arrays: dict[tuple[int, str, tuple[int, ...]], npt.NDArray[Any]] = attrs.field(
        factory=dict[tuple[int, str, tuple[int, ...]], "npt.NDArray[Any]"]
    )


class WorkerSlabs:
    """The slabs of the application's pool, mapped and made known to the device.

    What an array in them needs before it is used is the slab's registration, since the driver copies
    other memory while its caller waits, and the application's copy to it.
    """

    def __init__(self) -> None:
        self._coming, come = trio.open_memory_channel[Change](inf)
        self._going, gone = trio.open_memory_channel[Change](inf)
        self._pending = come, gone
        self._slabs: dict[int, _Slab] = {}
        # By the application's number of the copy, as long as an operation still needs it.
        self._copies: WeakValueDictionary[int, Arrival] = WeakValueDictionary()

    async def run(self) -> None:
        """Tell the device of slabs that come, and beside that of those that go, until it is cancelled.

        The driver takes its time for that, so the task that reads messages does not wait for it.
        """
        async with trio.open_nursery() as nursery:
            for pending in self._pending:
                nursery.start_soon(_make, pending)

    def add(self, device: AccelDevice, number: int, nbytes: int, descriptor: int) -> None:
        """Map a slab, and have the device know it soon.

        Raises:
            OSError: It cannot be mapped.
        """
        try:
            slab = self._slabs[number] = _Slab(map_shared(descriptor, nbytes))
        finally:
            os.close(descriptor)
        self._coming.send_nowait(partial(self._register, device, slab))

    async def _register(self, device: AccelDevice, slab: _Slab) -> None:
        try:
            await trio.to_thread.run_sync(device.register_host, slab.memory)
        except Exception as error:  # noqa: BLE001  # the driver refuses, or the device is being closed
            # Its arrays are transferred all the same, like any other.
            _logger.debug("host memory of %d bytes is not known to the device: %s", slab.memory.nbytes, error)
        finally:
            slab.registered.end()

    def array(
        self,
        arrivals: list[Arrival],
        number: int,
        offset: int,
        dtype: str,
        shape: tuple[int, ...],
        transfer: int | None,
    ) -> npt.NDArray[Any]:
        """An array in a slab; the same for the same offset, type and shape.

        Args:
            arrivals: Takes what must be over before the array is used.
            number: The slab.
            offset: Where the array begins in it.
            dtype: Its type.
            shape: Its shape; it is contiguous.
            transfer: Which copy of the application's is to fill it first.
        """
        slab = self._slabs[number]
        if not slab.registered.is_over:
            arrivals.append(slab.registered)
        if transfer is not None:
            # The same one again, if the application has sent its request again.
            arrivals.append(self._copies.setdefault(transfer, Arrival()))
        key, arrays = (offset, dtype, shape), slab.arrays
        array = arrays.get(key)
        if array is None:
            if len(arrays) >= _MOST_ARRAYS:
                arrays.clear()
            array = arrays[key] = np.ndarray(shape, DType(dtype).dtype, slab.memory.data, offset)
        return array

    def filled(self, transfer: int) -> None:
        """The application has copied: what waits for it is launched."""
        arrival = self._copies.get(transfer)
        if arrival is not None:
            arrival.end()

    def remove(self, device: AccelDevice, number: int, wait_idle: Callable[[], Awaitable[None]]) -> None:
        """Forget a slab: no array of the application lies in it.

        Args:
            device: What is to forget it, too.
            number: Which one; the application may not have been able to tell of it.
            wait_idle: Waits until nothing uses it: an operation that failed may have left a transfer behind.
        """
        slab = self._slabs.pop(number, None)
        if slab is not None:
            go = partial(self._unregister, device, slab.memory, wait_idle)
            # What were forgotten first would then be registered, and unmapped all the same.
            slab.registered.tell(partial(self._going.send_nowait, go))

    async def _unregister(
        self, device: AccelDevice, memory: npt.NDArray[np.uint8], wait_idle: Callable[[], Awaitable[None]]
    ) -> None:
        await wait_idle()
        with suppress(Exception):
            # If the device is closed by now, it has forgotten it.
            await trio.to_thread.run_sync(device.unregister_host, memory)


async def _make(pending: trio.MemoryReceiveChannel[Change]) -> None:
    async for change in pending:
        await change()
        # Nothing is to hold on to memory while there is nothing to do.
        del change
