"""Memory of the application that the device of a worker transfers from and to."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from ...backends.base import AccelDevice, AccelError, DType
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
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}

    async def add(self, device: AccelDevice, number: int, nbytes: int, descriptor: int) -> None:
        """Map a slab, and have the device know it.

        Raises:
            OSError: It cannot be mapped.
        """
        try:
            memory = self._memory[number] = map_shared(descriptor, nbytes)
        finally:
            os.close(descriptor)
        try:
            await trio.to_thread.run_sync(device.register_host, memory)
        except AccelError as error:
            # Its arrays are transferred all the same, like any other.
            _logger.warning("host memory of %d bytes is not known to the device: %s", nbytes, error)

    def array(
        self, number: int, offset: int, dtype: str, shape: tuple[int, ...], transfer: int | None
    ) -> npt.NDArray[Any] | StagedArray:
        """Make an array in a slab; `transfer` says which copy of the application's is to fill it first."""
        array: npt.NDArray[Any] = np.ndarray(shape, DType(dtype).dtype, self._memory[number].data, offset)
        return array if transfer is None else self._copies.stage(transfer, array)

    def remove(self, number: int) -> npt.NDArray[np.uint8]:
        """Forget a slab: no array of the application lies in it.

        Returns:
            Its memory, which the device is to forget when nothing uses it any more.
        """
        return self._memory.pop(number)
