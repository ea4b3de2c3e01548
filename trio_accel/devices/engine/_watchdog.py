"""Looking after a context while anything is in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio
from trio.lowlevel import enable_ki_protection

from ...backends.base import CompletionTimeoutError
from ..arrays._blocks import BlockTable
from ._context_state import ContextState, EngineObserver
from ._in_flight import InFlight
from ._leases import Leases
from ._stream_queues import StreamQueue

__all__ = ["Watchdog"]

_INTERVAL = 0.02


class Watchdog:
    """Sees what no completion tells: a context that is lost, and operations that do not end.

    Args:
        context: The context.
        device: Name of the device.
        queues: Its streams, with the operations in flight.
        leases: Its leases.
        blocks: Drained at each look.
        reap: Replies to everything that is done.
        stuck_after: Seconds after which an operation counts as hung; None for never.
        observer: Is told of each look.

    Attributes:
        idle: Wakes it; there while nothing is in flight.
    """

    def __init__(
        self,
        context: ContextState,
        device: str,
        queues: Sequence[StreamQueue],
        leases: Leases,
        blocks: BlockTable,
        *,
        reap: Callable[[], None],
        stuck_after: float | None,
        observer: EngineObserver,
    ) -> None:
        self._context = context
        self._device = device
        self._queues = queues
        self._leases = leases
        self._blocks = blocks
        self._reap = reap
        self._stuck_after = stuck_after
        self._observer = observer
        self.idle: trio.Event | None = None

    @enable_ki_protection
    async def run(self) -> None:
        """Look after what is in flight, until it is cancelled."""
        number, blocks = 0, self._blocks
        try:
            while True:
                if self._leases.is_idle and not any(queue.operations for queue in self._queues):
                    self._observer.looked(0)
                    # In this order: a block that is dropped from now on notifies the loop.
                    blocks.is_watched = False
                    blocks.drain()
                    self.idle = trio.Event()
                    await self.idle.wait()
                blocks.is_watched = True
                number += 1
                self._observer.looked(number)
                await trio.sleep(_INTERVAL)
                blocks.drain()
                if not self._context.is_lost:
                    self._look(trio.current_time())
        finally:
            # The code that ends the context gives back what is left.
            blocks.is_watched = False

    def begin(self) -> None:
        """An operation is about to be enqueued while nothing is in flight."""
        self._observer.looked(1)
        self.wake()

    def wake(self) -> None:
        """Look from now on."""
        idle, self.idle = self.idle, None
        if idle is not None:
            idle.set()

    def _look(self, now: float) -> None:
        for queue in self._queues:
            if queue.operations and (failure := queue.stream.failure) is not None:
                self._context.lose_context(failure)
                return
        if (failure := self._leases.failure) is not None:
            self._context.lose_context(failure)
            return
        # A thread that is to notify may wait for the interpreter's lock for seconds: a busy loop, which
        # releases the lock again and again for a moment, does not give it away.
        self._reap()
        limit = self._stuck_after
        if limit is None:
            return
        if any(queue.operations and queue.operations[0].waits_for_others for queue in self._queues):
            # For another device, which has its own limit; and others of this one may wait for it in turn.
            for queue in self._queues:
                queue.forget_seen()
            return
        # A stream runs in order, so only its first operation can be the one that is stuck; and of those of
        # several streams, which may wait for one another, the one that was launched first.
        firsts = [queue.operations[0] for queue in self._queues if queue.is_stuck(now, limit)]
        if firsts:
            self._stuck(min(firsts, key=lambda operation: operation.number), limit)

    def _stuck(self, operation: InFlight, limit: float) -> None:
        launch = operation.launch
        stuck = CompletionTimeoutError(
            f"it did not complete within stuck_after = {limit:g} s",
            device=self._device,
            operation=launch.name,
            generation=self._context.generation,
        )
        for output in launch.outputs:
            output.spoil(launch.name, stuck)
        if operation.reply is not None:
            operation.reply.fail(stuck)
        self._context.lose_context(stuck)
