"""What the worker that serves is told: requests, and with them the blocks that the program has let go."""

from __future__ import annotations

from collections.abc import Iterable

import trio
from trio.lowlevel import enable_ki_protection

from ....backends.base import DeviceLostError
from ...base._errors import locate
from ...base._task_notifier import TaskNotifier
from ...engine._device_state import DeviceState
from ._chunks import ChunkTable
from ._copy_service import CopyService
from ._host_arrays import HostCopy
from ._link import WorkerLink
from ._outcomes import OutcomePolicy
from ._request import OperationRequest, RemoteRequest
from ._requests import RequestTable

__all__ = ["RequestSender"]

# Of what the program has let go: so many bytes, or blocks, do not wait for the next operation.
_LARGE = 64 << 20
_MANY = 64
# Seconds between two looks for what was dropped, while there are requests.
_DRAINED = 0.1


class RequestSender:
    """Sends to the worker that serves.

    Args:
        device: The device.
        chunks: Its memory.
        copies: What copies host arrays of requests.
        outcomes: What becomes of a request that cannot be sent.

    Attributes:
        link: The worker that serves, if one does now.
        requests: The requests that are not done.
    """

    def __init__(
        self,
        device: DeviceState,
        chunks: ChunkTable,
        copies: CopyService,
        outcomes: OutcomePolicy,
    ) -> None:
        self.link: WorkerLink | None = None
        self.requests: RequestTable = RequestTable(device.options.in_flight, self._send)
        self._device = device
        self._chunks = chunks
        self._copies = copies
        self._outcomes = outcomes
        # What the worker is to be told that the program has let go; of some it is not known how large it is.
        self._released: list[int] = []
        self._released_bytes = 0.0
        self._some_released = TaskNotifier()
        # The task that gives back what is dropped while the worker has requests; it waits while it has none.
        self._first_sent = TaskNotifier()

    def open(self, nursery: trio.Nursery) -> None:
        """Begin; blocks are given back by tasks of the nursery."""
        nursery.start_soon(self._send_released_soon)
        nursery.start_soon(self._drain_meanwhile)

    def begin(self, link: WorkerLink, told: Iterable[int]) -> None:
        """A worker serves, which was told of these blocks."""
        self.link = link
        link.is_serving = True
        # What the program has let go since the worker was told of it.
        self._released, self._released_bytes = [], 0.0
        self._release([block for block in told if block not in self._chunks.blocks])
        self._device.blocks.release = self._release

    def end(self) -> None:
        """The worker that served does so no more."""
        if self.link is not None:
            self.link.is_serving = False
            self.link = None

    def serving(self) -> WorkerLink:
        """The worker that serves.

        Raises:
            DeviceLostError: None does now.
        """
        if self.link is None:
            raise DeviceLostError("the device has no context now", device=self._device.name)
        return self.link

    def _send(self, request: RemoteRequest) -> None:
        """Hand a request over; the table has seen to it that it may go."""
        link, library = self.link or self.serving(), request.library
        blocks = self._device.blocks
        if blocks.dropped:
            # It goes along.
            self._note_released(blocks.take_some())
        if self._first_sent.task is not None:
            self._first_sent.notify()
        word = link.words.get(library)
        if word is None:
            # Of a lease there is none.
            word = link.word(library) if library else 0
        try:
            message = request.message(word, tuple(self._released), link.templates)
        except Exception as error:  # noqa: BLE001  # it is the asker's
            self.requests.done(request.number)
            if isinstance(request, OperationRequest):
                name, generation = self._device.name, self._device.generation
                locate(error, device=name, operation=request.launch.name, generation=generation)
            self._outcomes.refuse(request, error)
            return
        if self._released:
            self._released, self._released_bytes = [], 0.0
        is_alone = self.requests.sent == 1
        if isinstance(request, OperationRequest) and request.hosts.is_used:
            # It may be large.
            link.send(message, now=is_alone)
            self._copies.stage(request, self._filled)
            return
        link.post(message, now=is_alone)

    def _filled(self, copy: HostCopy) -> None:
        """A host array is in shared memory: streams may wait for it, which is the worker's to know."""
        if self.link is not None:
            self.link.send(("filled", copy.transfer), now=True)

    def _note_released(self, blocks: list[int]) -> None:
        self._released_bytes += self._chunks.forget(blocks)
        if self.link is not None:
            self._released.extend(blocks)

    def _release(self, blocks: Iterable[int]) -> None:
        self._note_released(list(blocks))
        if self.link is None:
            return
        if self._released_bytes >= _LARGE or len(self._released) >= _MANY:
            # Small ones, and few, can wait for a request to go with.
            self._some_released.notify()

    def send_released(self) -> None:
        """Tell the worker now what the program has let go."""
        if self._released and self.link is not None:
            self.link.send(("release", tuple(self._released)))
            self._released, self._released_bytes = [], 0.0

    @enable_ki_protection
    async def _send_released_soon(self) -> None:
        while True:
            await self._some_released.wait()
            self.send_released()

    @enable_ki_protection
    async def _drain_meanwhile(self) -> None:
        """Give back what is dropped while requests come and go, without being notified of each."""
        blocks = self._device.blocks
        try:
            while True:
                if not self.requests.sent:
                    # In this order: what is dropped from now on notifies.
                    blocks.is_watched = False
                    blocks.drain()
                    await self._first_sent.wait()
                blocks.is_watched = True
                await trio.sleep(_DRAINED)
                blocks.drain()
        finally:
            blocks.is_watched = False
