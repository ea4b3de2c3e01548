"""Calls of the worker beside operations: counts, the end of operations in flight, and leases."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
from numpy.lib.stride_tricks import as_strided

from ....backends.base import CacheCounts, MemoryStatistics, NotSupportedError
from ...arrays._ref import AccelRef
from ...base._library_paths import by_title
from ...base._statistics import CacheStatistics, DeviceStatistics, LibraryStatistics
from ...engine._device_state import DeviceState
from ..transport._answers import MEMORY, USAGE
from ..transport._protocol import NonsenseError
from ._chunks import ChunkTable
from ._request import LeaseRequest
from ._requests import RequestSender

__all__ = ["Leases", "Questions"]


@attrs.define(eq=False)
class _Question:
    what: str
    done: trio.Event = attrs.field(factory=trio.Event)
    value: Any = None
    is_lost: bool = False


class Questions:
    """The questions to workers that are not answered.

    Args:
        device: The device.
        sender: Has the worker that serves.
    """

    def __init__(self, device: DeviceState, sender: RequestSender) -> None:
        self._device = device
        self._sender = sender
        self._last = 0
        self._calls: dict[int, _Question] = {}

    def __len__(self) -> int:
        return len(self._calls)

    async def ask(self, what: str, *arguments: str) -> Any:
        """Call the worker that serves, and the next one if it is lost meanwhile.

        Args:
            what: ``"count"``, ``"synchronize"``, or ``"close"`` with the import path of a library.
            arguments: Arguments of the call.

        Raises:
            DeviceLostError: There is no worker any more.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        availability, sender = self._device.availability, self._sender
        while True:
            while sender.link is None:
                if availability.is_ended:
                    raise await self._device.lost()
                await availability.wait_changed()
            # Arrays that the program has let go by now are counted as released.
            sender.send_released()
            self._last += 1
            number = self._last
            call = self._calls[number] = _Question(what)
            sender.link.send(("call", number, what, *arguments), now=True)
            try:
                await call.done.wait()
            finally:
                del self._calls[number]
            if not call.is_lost:
                return call.value

    def answer(self, pid: int, number: int, value: Any) -> None:
        """Take an answer of a worker; its asker may have gone.

        Args:
            pid: Number of its process.
            number: Number of the call.
            value: The answer.

        Raises:
            NonsenseError: There was no such call, or it asks for something else.
        """
        call = self._calls.get(number)
        if number > self._last or (call is not None and (value is None) is (call.what == "count")):
            raise NonsenseError(f"result: it answers no call that was made, {number}")
        # Counted now, and not when its asker runs: more may have happened by then.
        counted = None if value is None else self._count(pid, value)
        if call is not None:
            call.value = counted
            call.done.set()

    def _count(self, pid: int, value: Any) -> DeviceStatistics:
        """Add what the worker counts to what waits here: whatever it had done by then is known here."""
        launched, completed, in_flight, memory, usage = value
        return DeviceStatistics(
            generation=self._device.generation,
            pid=pid,
            launched=launched,
            completed=completed,
            in_flight=sum(in_flight.values()),
            queues=by_title(self._sender.requests.queues(in_flight)),
            memory=MemoryStatistics(**dict(zip(MEMORY, memory, strict=True))),
            losses=self._device.losses.count,
            libraries=by_title(self._libraries(usage)),
            actors=self._device.blocks.bytes_by_actor(),
        )

    def _libraries(self, usage: dict[str, tuple[int, ...]]) -> dict[str, LibraryStatistics]:
        """Add the launch templates, which are found here, to the plans of the worker's libraries."""
        link = self._sender.link
        templates: Mapping[str, CacheCounts] = {} if link is None else link.templates.counts
        libraries: dict[str, LibraryStatistics] = {}
        for path in usage.keys() | templates.keys():
            *plans, workspace = usage.get(path) or [0] * len(USAGE)
            libraries[path] = LibraryStatistics(
                plans=CacheStatistics.of(CacheCounts(*plans)),
                templates=CacheStatistics.of(templates.get(path) or CacheCounts()),
                workspace=workspace,
            )
        return libraries

    def lose(self) -> None:
        """Fail all calls: the worker is gone."""
        for call in self._calls.values():
            call.is_lost = True
            call.done.set()


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
            if not write:
                # A flag could be set back, over memory of which other arrays are made.
                array = as_strided(array, writeable=False)
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
