"""The copies that the application makes for its worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import trio
from trio.lowlevel import enable_ki_protection

from ...backends.base.ops import CopyToHostSpec
from ._chunks import ChunkTable
from ._copies import Copying
from ._frames import read_array
from ._request import OperationRequest

__all__ = ["CopyService"]

# They are bound by memory: two at a time saturate it.
_AT_ONCE = 2


class CopyService:
    """Copies between host arrays of requests and the memory of the device, in threads.

    Args:
        chunks: Where that memory is mapped.
    """

    def __init__(self, chunks: ChunkTable) -> None:
        self._chunks = chunks
        self._running: dict[Copying, OperationRequest] = {}
        self._changed = trio.Event()
        self._limiter = trio.CapacityLimiter(_AT_ONCE)

    def start(
        self, nursery: trio.Nursery, request: OperationRequest, where: Any, copied: Callable[[], None]
    ) -> None:
        """Copy one host array of a request.

        Args:
            nursery: Where the task goes that waits for it.
            request: What it is for; it remembers why a copy failed.
            where: Index of the host array, chunk, offset and array, as the worker sent them.
            copied: Called when the copy is over.
        """
        index, chunk, offset, plain = where
        try:
            copying = self._copying(request, index, self._chunks.view(chunk, offset, read_array(plain)))
        except Exception as error:  # noqa: BLE001  # no address space, or no descriptor for the mapping
            request.failure = error
            copied()
            return
        request.copies += 1
        self._running[copying] = request
        nursery.start_soon(self._copy, request, copying, copied)

    def cancel(self, request: OperationRequest) -> None:
        """End the copies of one request soon."""
        for copying, owner in self._running.items():
            if owner is request:
                copying.cancel()

    def cancel_all(self) -> None:
        """End all copies soon: what they were for is lost."""
        for copying in self._running:
            copying.cancel()

    async def wait_idle(self) -> None:
        """Wait until none runs."""
        while self._running:
            await self._changed.wait()

    def _copying(self, request: OperationRequest, index: int, view: npt.NDArray[Any]) -> Copying:
        host = request.hosts.copied[index]
        is_read = isinstance(request.launch.spec, CopyToHostSpec)
        return Copying(host, view) if is_read else Copying(view, host)

    @enable_ki_protection
    async def _copy(self, request: OperationRequest, copying: Copying, copied: Callable[[], None]) -> None:
        try:
            await trio.to_thread.run_sync(copying.run, limiter=self._limiter)
        except Exception as error:  # noqa: BLE001  # the system has no thread
            request.failure = error
        finally:
            del self._running[copying]
            changed, self._changed = self._changed, trio.Event()
            changed.set()
            copied()
            request.copy_over()
