"""Arrays that the program holds without a copy, while workers come and go."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import trio

from ....backends.base import NotSupportedError
from ...arrays._ref import AccelRef
from ...engine._device_state import DeviceState
from ._chunks import ChunkTable
from ._request import LeaseRequest
from ._requests import RequestSender

__all__ = ["Leases"]


class Leases:
    """Holds arrays of a device whose memory this process has mapped.

    Args:
        device: The device.
        sender: Has the requests, and the worker that serves.
        chunks: The memory.
    """

    def __init__(self, device: DeviceState, sender: RequestSender, chunks: ChunkTable) -> None:
        self._device = device
        self._sender = sender
        self._requests = sender.requests
        self._chunks = chunks

    @asynccontextmanager
    async def hold(self, ref: AccelRef, *, write: bool, stream: object) -> AsyncGenerator[Any, None]:
        """See `AccelRef.lease`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._device.availability.is_ended:
            raise await self._device.lost()
        self._check(ref, stream)
        request = LeaseRequest(self._requests.next_number(), ref.spec, write=write)
        try:
            self._requests.add(request)
            await request.granted.wait()
            if request.failure is not None:
                raise request.failure
            # While its turn was waited for, it may have become invalid, or was released.
            ref.block.check("lease")
            assert request.address is not None
            _, _, chunk, offset = request.address
            array = self._chunks.view(chunk, offset, ref.spec)
            array.flags.writeable = write
            self._device.leases += 1
            try:
                yield array
            finally:
                self._device.leases -= 1
                array.flags.writeable = False
        finally:
            request.is_given_back = True
            if not self._requests.withdraw(request) and self._sender.link is not None:
                self._sender.link.send(("unlease", request.number), now=True)

    def _check(self, ref: AccelRef, stream: object) -> None:
        ref.block.check("lease")
        if stream is not None:
            raise NotSupportedError(
                "lease: stream: in a worker process no stream of this one reaches the array"
            )
        if not self._device.backend.shares_memory_with_host:
            raise NotSupportedError(
                "lease: this process cannot address the memory of the device, whose context is in a worker; "
                "copy with to_host(), or open the device with isolation='inline'",
                device=self._device.name,
                operation="lease",
                backend=self._device.backend.name,
            )
