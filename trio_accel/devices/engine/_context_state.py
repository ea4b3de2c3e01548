"""The context of an engine: which it is, whether it is lost, how errors name it, and what watches over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ...backends.base import CompletionTimeoutError, ContextLostError, DeviceLostError
from ..arrays._blocks import BlockTable
from ..base._errors import FailureClass, classify, locate, loss_of
from ..operations._hooks import EngineHook
from ..operations._operation import Launch
from ._in_flight import InFlight
from ._leases import Leases
from ._stream_queues import StreamQueue

__all__ = ["ContextState", "EngineObserver", "Watchdog"]


class EngineObserver(Protocol):
    """Sees what an engine does: the owner of the context, a device or a worker process.

    Attributes:
        hooks: See every operation at every step.
        launching: Called with each operation that is about to be launched, whatever becomes of it. Not a
            hook: it is there with every launch of a worker, and hooks take a slower way. None where no other
            process has to know.
    """

    hooks: list[EngineHook]
    launching: Callable[[Launch], None] | None

    def looked(self, number: int, /) -> None:
        """Note that the engine has looked after what is in flight so often; 0 when nothing is any more."""

    def made(self, library: str, seconds: float, imports: float, /) -> None:
        """Note that a program was made: the library's name, the seconds in all, and those of its import."""

    def is_alone(self) -> bool:
        """Whether nothing else is asked for than the operation that is being launched."""
        ...


class ContextState:
    """The base of the engine, as its parts know it.

    Args:
        device_name: Name of the device.
        generation: Number of the context.

    Attributes:
        generation: Number of the context.
        is_lost: Whether the context is gone: nothing is launched any more, and replies are of no account.
        closed_alone: Paths of library actors that are closed while the context goes on.
        is_closing: Whether the device closes, so that what is in flight is lost to that.
    """

    def __init__(self, device_name: str, generation: int) -> None:
        self.generation: int = generation
        self.is_lost: bool = False
        self.closed_alone: set[str] = set()
        self.is_closing: bool = False
        self._device_name = device_name

    def expect_end(self, path: str) -> None:
        """Note that an actor stops: unless it alone does, or the context is lost, the device closes."""
        if path not in self.closed_alone:
            self.is_closing = not self.is_lost

    def lose_context(self, cause: Exception) -> None:
        """The context is gone: end everything in flight, and have the context replaced."""
        raise NotImplementedError

    def locate(self, error: Exception, launch: Launch) -> None:
        """Say where an error happened; if the context is lost with it, have the context replaced."""
        locate(error, device=self._device_name, operation=launch.name, generation=self.generation)
        if classify(error) is FailureClass.CONTEXT_LOST:
            self.lose_context(error)

    def lost(self, launch: Launch, cause: BaseException | None) -> ContextLostError | DeviceLostError:
        """Make the error of an operation that was in flight when the context ended."""
        return self._lost(launch.name, "was in flight", launch.advice, cause)

    def lost_to_library(
        self, launch: Launch, cause: BaseException | None
    ) -> ContextLostError | DeviceLostError:
        """Make the error of an operation whose library was being opened when the context turned out lost."""
        return self._lost(launch.name, "waited for its library to be opened", "ask again", cause)

    def lost_lease(self, cause: BaseException | None) -> ContextLostError | DeviceLostError:
        """Make the error of a lease that was waited for when the context ended."""
        return self._lost("lease", "was waited for", "lease the array again", cause)

    def _lost(
        self, name: str, state: str, advice: str, cause: BaseException | None
    ) -> ContextLostError | DeviceLostError:
        where: dict[str, Any] = {
            "device": self._device_name,
            "operation": name,
            "generation": self.generation,
        }
        if self.is_closing:
            return DeviceLostError(f"the device was closed while this operation {state}", **where)
        error = loss_of(cause)(
            f"the device's context was lost while this operation {state}; {advice}", **where
        )
        error.__cause__ = cause
        return error


_INTERVAL = 0.02


@attrs.define(eq=False)
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

    _context: ContextState
    _device: str
    _queues: Sequence[StreamQueue]
    _leases: Leases
    _blocks: BlockTable
    _reap: Callable[[], None]
    _stuck_after: float | None
    _observer: EngineObserver
    idle: trio.Event | None = attrs.field(default=None, init=False)

    @enable_ki_protection
    async def run(self) -> None:
        """Look after what is in flight, until it is cancelled."""
        number, blocks = 0, self._blocks
        try:
            while True:
                if not self._leases.tails and not any(queue.operations for queue in self._queues):
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
