"""The shared state of an engine's context: its number, its loss, its name in errors; and the watchdog."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ...backends.base import CompletionTimeoutError, ContextLostError, DeviceLostError
from ..base._errors import IN_FLIGHT, FailureClass, classify, locate, lost
from ..operations._blocks import BlockTable
from ..operations._hooks import EngineHook
from ..operations._operation import Launch
from ._in_flight import InFlight
from ._leases import Leases
from ._stream_queues import StreamQueue


class EngineObserver(Protocol):
    """The observer of an engine: the context's owner, a device or a worker process.

    Attributes:
        hooks: Receive every operation at every step.
        launching: Called with each operation before its launch, even if the launch fails. Not a hook (D142),
            because a worker needs it for every launch, and hooks take a slower path. None if no other process
            has to know.
    """

    hooks: list[EngineHook]
    launching: Callable[[Launch], None] | None

    def looked(self, number: int, /) -> None:
        """Record the number of the engine's checks of operations in flight; 0 if there are none."""

    def program_opened(self, library: str, seconds: float, imports: float, /) -> None:
        """Record that a program was made: its library's name, the total seconds, and the import's share."""

    def progressed(self) -> None:
        """Record that the first operation of a library actor's incarnation has succeeded."""

    def is_alone(self) -> bool:
        """Return whether the launching operation is the only request."""
        ...


class ContextState:
    """The base of the engine, as its parts use it.

    Args:
        device_name: The name of the device.
        generation: The number of the context.

    Attributes:
        generation: The number of the context.
        is_lost: Whether the context is lost: nothing is launched, and replies no longer matter.
        closed_alone: The paths of library actors that are closed while the context continues.
        is_closing: Whether the device is closing, and so ends operations in flight.
    """

    def __init__(self, device_name: str, generation: int) -> None:
        self.generation: int = generation
        self.is_lost: bool = False
        self.closed_alone: set[str] = set()
        self.is_closing: bool = False
        self._device_name = device_name

    def expect_end(self, path: str) -> None:
        """Record that an actor stops: the device is closing, unless only it closes or the context is lost."""
        if path not in self.closed_alone:
            self.is_closing = not self.is_lost

    def lose_context(self, cause: Exception) -> None:
        """Lose the context: end everything in flight, and start its replacement."""
        raise NotImplementedError

    def give_up(self, cause: Exception | None, reason: str) -> None:
        """End everything in flight, because the context's actor has failed or will fail."""
        raise NotImplementedError

    def locate(self, error: Exception, launch: Launch) -> None:
        """Add the place of an error. If the error means a lost context, start its replacement."""
        locate(error, device=self._device_name, operation=launch.name, generation=self.generation)
        if classify(error) is FailureClass.CONTEXT_LOST:
            self.lose_context(error)

    def lost(self, launch: Launch, cause: BaseException | None) -> ContextLostError | DeviceLostError:
        """Make the error of an operation in flight at the end of the context."""
        return self.lost_while(launch.name, IN_FLIGHT, launch.advice(is_kept=False), cause)

    def lost_while(
        self, name: str, state: str, advice: str, cause: BaseException | None
    ) -> ContextLostError | DeviceLostError:
        """Make the error of an operation in the given state at the end of the context; see `lost`."""
        error = lost(cause, state, advice, is_closing=self.is_closing)
        locate(error, device=self._device_name, operation=name, generation=self.generation)
        return error


_INTERVAL = 0.02
# The maximum time that counts between two checks, as a part of `stuck_after`. On a suspended machine, or in a
# stopped program, hours may have passed without progress of any operation.
_MOST_OF_LIMIT = 0.1


@attrs.define(eq=False)
class Watchdog:
    """The second path of every wait (D9): detects a lost context, and operations that do not end.

    Args:
        context: The context.
        device: The name of the device.
        queues: Its streams, with the operations in flight.
        leases: Its leases.
        blocks: Drained at each check.
        reap: Replies to all completed operations.
        stuck_after: Seconds after which an operation counts as hung; None for never.
        observer: Notified of each check.

    Attributes:
        idle: Wakes the watchdog; exists while nothing is in flight.
    """

    _context: ContextState
    _device: str
    _queues: Sequence[StreamQueue]
    _leases: Leases
    _blocks: BlockTable
    _reap: Callable[[], None]
    _stuck_after: float | None
    _observer: EngineObserver
    idle: trio.Event | None = None

    @enable_ki_protection
    async def run(self) -> None:
        """Watch operations in flight, until cancelled."""
        number, blocks, watched = 0, self._blocks, 0.0
        max_elapsed = max(_INTERVAL, _MOST_OF_LIMIT * (self._stuck_after or 0.0))
        try:
            while True:
                if not self._leases.tails and not any(queue.operations for queue in self._queues):
                    self._observer.looked(0)
                    # Clear the flag before draining: blocks dropped after that wake the loop, and blocks
                    # dropped before are drained here.
                    blocks.is_watched = False
                    blocks.drain_some()
                    self.idle = trio.Event()
                    await self.idle.wait()
                blocks.is_watched = True
                number += 1
                self._observer.looked(number)
                since = trio.current_time()
                await trio.sleep(_INTERVAL)
                watched += min(trio.current_time() - since, max_elapsed)
                blocks.drain_some()
                if not self._context.is_lost:
                    self._check(watched)
        finally:
            # From here on, dropped blocks notify the loop again. The end of the context drains the rest.
            blocks.is_watched = False
            if not (self._context.is_lost or self._context.is_closing):
                # The context's actor has failed otherwise, and stops its libraries. They wait for operations
                # in flight, and nothing will detect the ends of these.
                self._context.give_up(None, "the context's actor has failed")

    def begin(self) -> None:
        """Start watching, because an operation is about to be enqueued while nothing is in flight."""
        self._observer.looked(1)
        self.wake()

    def wake(self) -> None:
        """Check from now on."""
        idle, self.idle = self.idle, None
        if idle is not None:
            idle.set()

    def _check(self, now: float) -> None:
        for queue in self._queues:
            # D9: after a fault the driver calls no host function, so only a query detects the loss.
            if queue.operations and (failure := queue.stream.failure) is not None:
                self._context.lose_context(failure)
                return
        if (failure := self._leases.failure) is not None:
            self._context.lose_context(failure)
            return
        # D9: the notifying thread may wait for the interpreter's lock for seconds, because a busy loop
        # releases it only for moments, and each time the thread's wait starts again.
        self._reap()
        limit = self._stuck_after
        if limit is None:
            return
        if any(
            queue.operations
            and (queue.operations[0].launch.spec.waits_for_others or queue.stream.is_preparing)
            for queue in self._queues
        ):
            # D162: an operation waits for another device, or for a compiler, which has its own limit. Other
            # operations here may wait for it in turn.
            for queue in self._queues:
                queue.forget_seen()
            return
        # A stream runs in order, so only its first operation can be stuck. Streams may wait for one another,
        # so of several stuck operations the first launched one is to blame.
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
        launch.mark_damaged(stuck)
        if operation.reply is not None:
            operation.reply.fail(stuck)
        self._context.lose_context(stuck)
