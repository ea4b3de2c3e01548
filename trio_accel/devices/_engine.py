"""The engine of one context: the one path of every operation from launch to release."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import Protocol

import attrs
import trio

from ..actors import DeferredReply
from ..backends.base import (
    AccelDevice,
    AccelEvent,
    AccelStream,
    ContextPoisonedError,
    KernelLibrary,
)
from ._errors import FailureClass, classify, locate
from ._hazards import HazardTracker
from ._operation import Launch
from ._options import DeviceOptions

__all__ = ["Engine", "EngineHook", "Lane", "Phase"]


class Phase(enum.Enum):
    """Steps of an operation, in their order."""

    VALIDATE = "validate"
    ENQUEUE = "enqueue"
    COMPLETE = "complete"
    REPLY = "reply"
    RELEASE = "release"


class EngineHook(Protocol):
    """Sees every operation of a device at every step; tracing and fault injection hook in here."""

    def __call__(self, phase: Phase, launch: Launch, /) -> None:
        """Called on the Trio thread. What it raises in phase ENQUEUE counts as the backend's failure."""


@attrs.define(eq=False)
class _InFlight:
    """An operation that the backend has, and what is held until it is done."""

    launch: Launch
    event: AccelEvent
    blocks: frozenset[int]
    reply: DeferredReply[None] | None = None
    crash: Callable[[Exception], None] | None = None
    is_given_up: bool = False
    """Its asker was cancelled and has waited for its whole grace; nobody waits for it any more."""


@attrs.define(eq=False)
class Lane:
    """A stream with its operations in flight, in order."""

    stream: AccelStream
    limit: int
    operations: deque[_InFlight] = attrs.field(factory=deque[_InFlight])
    changed: trio.Event = attrs.field(factory=trio.Event)
    on_idle: Callable[[], None] | None = None
    """Set when the stream takes no more work: called when the last operation is done."""

    async def admit(self) -> None:
        """Wait until there is room in the window."""
        while len(self.operations) >= self.limit:
            await self.changed.wait()

    async def drain(self) -> None:
        """Wait until nothing is in flight but what was given up."""
        while any(not operation.is_given_up for operation in self.operations):
            await self.changed.wait()

    def notify(self) -> None:
        """Wake those that wait for a change."""
        changed, self.changed = self.changed, trio.Event()
        changed.set()


class Engine:
    """Launches operations, sees their completion, replies, and gives memory back.

    Lives on the Trio thread; never blocks. Operations in flight belong to the engine, so they
    outlive a restart of the library actor that launched them.
    """

    def __init__(
        self,
        device: AccelDevice,
        memory: KernelLibrary,
        *,
        options: DeviceOptions,
        generation: int,
        hooks: list[EngineHook],
    ) -> None:
        self.device = device
        self.generation = generation
        self._memory = memory
        self._options = options
        self._hooks = hooks
        self._hazards = HazardTracker()
        self._lanes: list[Lane] = []
        self._allocated: set[int] = set()
        self._pins: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._completion = options.completion.open(self.reap)
        self._grace: deque[tuple[float, Lane, _InFlight]] = deque()
        self._grace_started = trio.Event()
        self.launched = 0
        self.completed = 0

    @property
    def in_flight(self) -> int:
        """Operations that the backend has."""
        return sum(len(lane.operations) for lane in self._lanes)

    # -- streams ----------------------------------------------------------------------------

    def open_lane(self, name: str) -> Lane:
        """Make a stream for one library actor."""
        lane = Lane(self.device.open_stream(name), self._options.in_flight)
        self._lanes.append(lane)
        return lane

    def retire_lane(self, lane: Lane, on_idle: Callable[[], None]) -> None:
        """Take no more work on a stream; what is in flight still completes and replies."""
        lane.stream.close()
        lane.on_idle = on_idle
        self._sweep(lane)

    def _sweep(self, lane: Lane) -> None:
        """Forget a stream that takes no more work and has none."""
        if lane.on_idle is not None and not lane.operations:
            self._lanes.remove(lane)
            lane.on_idle()

    # -- launch -----------------------------------------------------------------------------

    def launch(
        self,
        launch: Launch,
        library: KernelLibrary,
        lane: Lane,
        defer: Callable[[Callable[[], None]], DeferredReply[None]],
        crash: Callable[[Exception], None],
    ) -> DeferredReply[None]:
        """Enqueue an operation. The reply it makes with `defer` is given at completion.

        Args:
            launch: The validated operation.
            library: Library that has it.
            lane: Stream to put it on.
            defer: Makes the reply, given what to call when the asker is cancelled.
            crash: Restarts the library actor; called if the operation makes the library suspect.

        Raises:
            Exception: What the backend raised; nothing is in flight, and what was allocated is freed.
        """
        reads = frozenset(array.block for array in launch.spec.inputs())
        writes = frozenset(array.block for array in launch.spec.outputs())
        has_staged = False
        try:
            for block, nbytes in launch.allocations:
                self.device.allocate(block, nbytes)
                self._allocated.add(block)
            self._hazards.order(lane.stream, reads, writes)
            self._notify(Phase.ENQUEUE, launch)
            for copy in launch.staged:
                has_staged = True
                self._memory.enqueue(copy, lane.stream)
            library.enqueue(launch.spec, lane.stream)
        except Exception as error:
            if has_staged:
                # The copies run all the same: what they use is held until they have.
                self._fly(lane, launch, reads, writes)
            for block, _ in launch.allocations:
                self.release(block)
            locate(error, device=self.device.info.name, operation=launch.name, generation=self.generation)
            raise
        operation = self._fly(lane, launch, reads, writes)
        operation.crash = crash
        operation.reply = defer(lambda: self._start_grace(lane, operation))
        self.launched += 1
        return operation.reply

    def _fly(self, lane: Lane, launch: Launch, reads: frozenset[int], writes: frozenset[int]) -> _InFlight:
        """Hold what was enqueued until it is done."""
        event = lane.stream.record()
        self._hazards.record(lane.stream, event, reads, writes)
        operation = _InFlight(launch, event, reads | writes)
        for block in operation.blocks:
            self._pins[block] = self._pins.get(block, 0) + 1
        lane.operations.append(operation)
        self._completion.watch(lane.stream, event)
        return operation

    # -- completion ---------------------------------------------------------------------------

    def reap(self) -> None:
        """Reply to everything that is done. Called on the Trio thread after a wake-up."""
        for lane in tuple(self._lanes):
            done = False
            while lane.operations and lane.operations[0].event.is_done:
                self._finish(lane.operations.popleft())
                done = True
            if done:
                lane.notify()
                self._sweep(lane)

    def _finish(self, operation: _InFlight) -> None:
        launch, reply, error = operation.launch, operation.reply, operation.event.error
        if reply is not None:
            self.completed += 1
            self._notify(Phase.COMPLETE, launch)
            if error is None:
                reply.set(None)
            else:
                self._report(operation, reply, error)
            self._notify(Phase.REPLY, launch)
        self._unpin(operation.blocks)
        self._notify(Phase.RELEASE, launch)

    def _report(self, operation: _InFlight, reply: DeferredReply[None], error: Exception) -> None:
        launch = operation.launch
        for block in launch.outputs:
            block.damaged_by = launch.name
        locate(error, device=self.device.info.name, operation=launch.name, generation=self.generation)
        if classify(error) is FailureClass.SUSPECT:
            reply.fail_as_crash(error)
            if operation.crash is not None:
                operation.crash(error)
        else:
            reply.fail(error)

    def _notify(self, phase: Phase, launch: Launch) -> None:
        for hook in tuple(self._hooks):
            hook(phase, launch)

    # -- memory -------------------------------------------------------------------------------

    def release(self, block: int) -> None:
        """Free a block, as soon as nothing in flight uses it."""
        if block not in self._allocated:
            # Its operation was withdrawn before it was launched.
            return
        if self._pins.get(block):
            self._dropped.add(block)
            return
        self._allocated.discard(block)
        self._dropped.discard(block)
        self._hazards.forget(block)
        self.device.free(block)

    def _unpin(self, blocks: frozenset[int]) -> None:
        for block in blocks:
            left = self._pins[block] - 1
            if left:
                self._pins[block] = left
                continue
            del self._pins[block]
            if block in self._dropped:
                self.release(block)

    # -- cancellation and the end ---------------------------------------------------------------

    async def run(self) -> None:
        """Give up waiting for cancelled operations whose grace is over; runs beside the engine."""
        while True:
            await self._grace_started.wait()
            self._grace_started = trio.Event()
            while self._grace:
                deadline, lane, operation = self._grace[0]
                reply = operation.reply
                if reply is not None and not reply.is_done:
                    await trio.sleep_until(deadline)
                self._grace.popleft()
                if reply is not None and not reply.is_done:
                    # The operation stays in flight, and its buffers with it.
                    operation.is_given_up = True
                    reply.cancelled()
                    lane.notify()

    def _start_grace(self, lane: Lane, operation: _InFlight) -> None:
        self._grace.append((trio.current_time() + self._options.cancel_grace, lane, operation))
        self._grace_started.set()

    async def synchronize(self) -> None:
        """Wait until nothing is in flight."""
        for lane in tuple(self._lanes):
            await lane.drain()

    def fail_all(self, cause: BaseException | None) -> None:
        """End everything in flight: the context is lost."""
        for lane in self._lanes:
            for operation in lane.operations:
                lost = ContextPoisonedError(
                    "the device's context was lost while this operation was in flight",
                    device=self.device.info.name,
                    operation=operation.launch.name,
                    generation=self.generation,
                )
                lost.__cause__ = cause
                if operation.reply is not None:
                    operation.reply.fail(lost)
                for block in operation.launch.outputs:
                    block.damaged_by = operation.launch.name

    async def close(self) -> bool:
        """Give the device back; waits for streams within the grace.

        Returns:
            Whether all streams ended; memory that one still uses stays reserved.
        """
        self._completion.close()
        return await trio.to_thread.run_sync(self.device.close, self._options.cancel_grace)
