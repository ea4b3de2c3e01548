"""The context of an engine: its number, its loss, its name in errors, and the watchdog."""

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
    """Observer of an engine: the owner of the context, a device or a worker process.

    Attributes:
        hooks: See every operation at every step.
        launching: Called with each operation before its launch, also if that fails. Not a hook (D142): a
            worker has it with every launch, and hooks take a slower way. None where no other
            process has to know.
    """

    hooks: list[EngineHook]
    launching: Callable[[Launch], None] | None

    def looked(self, number: int, /) -> None:
        """Note the number of the engine's looks at operations in flight; 0 when there are none."""

    def made(self, library: str, seconds: float, imports: float, /) -> None:
        """Note that a program was made: the library's name, the seconds in all, and those of its import."""

    def progressed(self) -> None:
        """Note that the first operation of a library actor's incarnation has completed without an error."""

    def is_alone(self) -> bool:
        """Tell whether nothing else is asked for than the operation that is being launched."""
        ...


class ContextState:
    """The base of the engine, as its parts know it.

    Args:
        device_name: Name of the device.
        generation: Number of the context.

    Attributes:
        generation: Number of the context.
        is_lost: Whether the context is gone: nothing is launched any more, and replies do not matter any
            more.
        closed_alone: Paths of library actors that are closed while the context goes on.
        is_closing: Whether the device closes, so that operations in flight are lost to that.
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
        """Lose the context: end everything in flight, and have it replaced."""
        raise NotImplementedError

    def give_up(self, cause: Exception | None, why: str) -> None:
        """End everything in flight: the context's actor has failed, or is to fail."""
        raise NotImplementedError

    def locate(self, error: Exception, launch: Launch) -> None:
        """Say where an error happened; if the context is lost with it, have the context replaced."""
        locate(error, device=self._device_name, operation=launch.name, generation=self.generation)
        if classify(error) is FailureClass.CONTEXT_LOST:
            self.lose_context(error)

    def lost(self, launch: Launch, cause: BaseException | None) -> ContextLostError | DeviceLostError:
        """Make the error of an operation that was in flight when the context ended."""
        return self.lost_while(launch.name, IN_FLIGHT, launch.advice(is_kept=False), cause)

    def lost_while(
        self, name: str, state: str, advice: str, cause: BaseException | None
    ) -> ContextLostError | DeviceLostError:
        """Make the error of an operation that was in this state when the context ended; see `lost`."""
        error = lost(cause, state, advice, is_closing=self.is_closing)
        locate(error, device=self._device_name, operation=name, generation=self.generation)
        return error


_INTERVAL = 0.02
# The most that the time between two looks counts for, as a part of `stuck_after`. A machine that was
# suspended, or a program that was stopped, finds that hours have passed, and no operation went on meanwhile.
_MOST_OF_LIMIT = 0.1


@attrs.define(eq=False)
class Watchdog:
    """The second path of every wait (D9): it sees a lost context, and operations that do not end.

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
    idle: trio.Event | None = None

    @enable_ki_protection
    async def run(self) -> None:
        """Watch operations in flight, until it is cancelled."""
        number, blocks, watched = 0, self._blocks, 0.0
        most = max(_INTERVAL, _MOST_OF_LIMIT * (self._stuck_after or 0.0))
        try:
            while True:
                if not self._leases.tails and not any(queue.operations for queue in self._queues):
                    self._observer.looked(0)
                    # The flag falls before the drain: blocks that are dropped after it wake the loop, and
                    # those before it are drained here.
                    blocks.is_watched = False
                    blocks.drain()
                    self.idle = trio.Event()
                    await self.idle.wait()
                blocks.is_watched = True
                number += 1
                self._observer.looked(number)
                since = trio.current_time()
                await trio.sleep(_INTERVAL)
                watched += min(trio.current_time() - since, most)
                blocks.drain()
                if not self._context.is_lost:
                    self._look(watched)
        finally:
            # Dropped blocks notify the loop again from here on; the end of the context drains the rest.
            blocks.is_watched = False
            if not (self._context.is_lost or self._context.is_closing):
                # The context's actor has failed otherwise, and stops its libraries. These wait for what is in
                # flight, and nothing sees its end from here on.
                self._context.give_up(None, "the context's actor has failed")

    def begin(self) -> None:
        """Begin to watch: an operation is about to be enqueued while nothing is in flight."""
        self._observer.looked(1)
        self.wake()

    def wake(self) -> None:
        """Look from now on."""
        idle, self.idle = self.idle, None
        if idle is not None:
            idle.set()

    def _look(self, now: float) -> None:
        for queue in self._queues:
            # D9: after a fault the driver calls no host function, so a loss is only found by asking.
            if queue.operations and (failure := queue.stream.failure) is not None:
                self._context.lose_context(failure)
                return
        if (failure := self._leases.failure) is not None:
            self._context.lose_context(failure)
            return
        # D9: the thread that notifies may wait for the interpreter's lock for seconds, as a busy loop
        # releases it only for moments, and each time the thread's wait begins anew.
        self._reap()
        limit = self._stuck_after
        if limit is None:
            return
        if any(
            queue.operations
            and (queue.operations[0].launch.spec.waits_for_others or queue.stream.is_preparing)
            for queue in self._queues
        ):
            # D162: it waits for another device, or a compiler, which has a limit of its own; and others here
            # may wait for it in turn.
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
        launch.mark_damaged(stuck)
        if operation.reply is not None:
            operation.reply.fail(stuck)
        self._context.lose_context(stuck)
