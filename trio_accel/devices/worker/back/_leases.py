"""Arrays that the program holds while a worker serves."""

from __future__ import annotations

from typing import Any

import trio

from ..transport._channel import Channel
from ..transport._protocol import plain_address
from ._requests import WorkerRequests

__all__ = ["WorkerLeases"]


class WorkerLeases:
    """Holds blocks in their order among operations, until the application gives them back.

    Args:
        channel: Where the application is told.
        requests: Has the context.
    """

    def __init__(self, channel: Channel, requests: WorkerRequests) -> None:
        self._channel = channel
        self._requests = requests
        self._over: dict[int, trio.Event] = {}

    def begin(self, nursery: trio.Nursery, number: int, block: int, *, write: bool) -> None:
        """Hold a block, and say where it lies once it is its turn."""
        session = self._requests.session
        if session is not None:
            over = self._over[number] = trio.Event()
            # The order is that of the messages, so its turn is taken before the next one is read.
            lease = session.engine.leases.hold(block, write=write)
            nursery.start_soon(self._hold, number, block, lease, over)

    async def _hold(self, number: int, block: int, lease: Any, over: trio.Event) -> None:
        session = self._requests.session
        async with lease:
            address = None if session is None else session.engine.placed(block)
            if address is not None and not over.is_set():
                self._channel.send(("granted", number, plain_address(address)), now=True)
                await over.wait()
        del self._over[number]
        self._channel.send(("done", number, (), (), None), now=True)

    def end(self, number: int) -> None:
        """The application has given a block back."""
        if number in self._over:
            self._over[number].set()

    def end_all(self) -> None:
        """The context is to end."""
        for over in self._over.values():
            over.set()
