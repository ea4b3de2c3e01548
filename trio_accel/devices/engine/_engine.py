"""The engine of one context: the one path of every operation from launch to release."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextvars import Context
from functools import partial
from typing import Any

import trio
from trio.lowlevel import enable_ki_protection

from ...actors import ActorStoppedError, DeferredReply, DirectReply
from ...backends.base import (
    AccelDevice,
    AccelEvent,
    AccelStream,
    CompletionTimeoutError,
    ContextPoisonedError,
    DeviceLostError,
    Hold,
    KernelLibrary,
    PlacedBlock,
)
from .._options import DeviceOptions
from ..arrays._blocks import BlockTable
from ..base._alarms import Alarms
from ..base._bridge import Chores
from ..base._cancel_grace import grace_in
from ..base._errors import FailureClass, WithdrawnError, classify, locate
from ..base._statistics import QueueStatistics
from ..completion._completion import CompletionPort, best_completion
from ..operations._hooks import EngineHook, Phase, enter, notify
from ..operations._operation import Launch
from ._host_use import leave_hosts
from ._in_flight import InFlight, Reply
from ._lane import Lane, StreamLoad
from ._launch_order import LaunchOrder
from ._leases import Leases
from ._memory_in_use import MemoryInUse

__all__ = ["Engine"]

_WATCH_INTERVAL = 0.02
# A host array is being copied: seconds between two looks at it.
_COPYING = 0.001
# Seconds to wait for a moment of rest, before what needs one is done all the same.
_MOST_PATIENCE = 10.0
# Its streams do nothing useful any more: the next context does not wait for them.
_GRACE_OF_A_LOST_CONTEXT = 0.1
_logger = logging.getLogger("trio_accel.devices")


def _never(_: int) -> bool:
    return False


def _nobody() -> None:
    """Nobody wants to know."""


class Engine:
    """Launches operations, sees their completion, replies, and gives memory back.

    Lives on the Trio thread; never blocks. Operations in flight belong to the engine, so they
    outlive a restart of the library actor that launched them.

    Attributes:
        order: What waits to be launched.
        is_lost: Whether the context is gone: nothing is launched any more, and replies are of no account.
        placed: Tells where a block of a chunk that is kept lies; None if it is freed, or is to be.
        fresh: Blocks that lie where they did not lie before; whoever takes note of where removes them.
        enter: Notes that an operation is handed over: later ones that touch its memory are launched after it.
        release_all: Frees blocks, each as soon as nothing in flight uses it.
    """

    def __init__(
        self,
        device: AccelDevice,
        memory: KernelLibrary,
        *,
        options: DeviceOptions,
        generation: int,
        hooks: list[EngineHook],
        lose: Callable[[Exception], None],
        blocks: BlockTable,
        on_launch: Callable[[Launch], None] | None = None,
        on_look: Callable[[int], None] | None = None,
        is_alone: Callable[[], bool] = bool,
        may_defer: Callable[[int], bool] = _never,
        on_progress: Callable[[], None] = _nobody,
    ) -> None:
        self.device = device
        self.generation: int = generation
        self._memory = memory
        self._options = options
        self._hooks = hooks
        self._lose = lose
        self._blocks = blocks
        self._on_launch = on_launch
        self._on_look = on_look
        self._is_alone = is_alone
        self._on_progress = on_progress
        self.is_lost: bool = False
        self.is_closing: bool = False
        self._grace_at_end = options.close_grace
        self.order: LaunchOrder = LaunchOrder()
        self.enter: Callable[[Launch], None] = self.order.enter
        self._streams = options.streams.open(device)
        self._lanes: list[Lane] = []
        # Those whose library actor has begun with them, and those of them that are taken back.
        self._waiting: dict[Launch, Lane] = {}
        self._withdrawn: set[Launch] = set()
        self._memory_in_use = MemoryInUse(device)
        self.release_all: Callable[[Iterable[int]], None] = self._memory_in_use.release_all
        self.placed: Callable[[int], PlacedBlock | None] = self._memory_in_use.placed
        self.fresh: set[int] = self._memory_in_use.fresh
        self.completion: CompletionPort = (options.completion or best_completion(device.info)).open(self.reap)
        # An operation's grace is dropped when it is done: the alarm holds on to its arrays.
        self.alarms: Alarms = Alarms()
        self.leases: Leases = Leases(
            device,
            self._lanes,
            self.order,
            self._memory_in_use,
            self._watch_lease,
            self.lose_context,
        )
        self._may_defer: Callable[[int], bool] = may_defer if self.completion.flushes else _never
        self._holds: list[Hold] = []
        self._chores = Chores()
        # Made by the watch while there is nothing to watch.
        self._idle: trio.Event | None = None
        self.launched: int = 0
        self.completed: int = 0

    @property
    def in_flight(self) -> int:
        """Operations that the backend has."""
        return sum(len(lane.operations) for lane in self._lanes)

    def begin(self, generation: int, adopted: Iterable[int]) -> None:
        """Serve as a generation of the device; for an engine that stood ready.

        Args:
            generation: Its number.
            adopted: Blocks that are there from the context before.
        """
        self.generation = generation
        self._memory_in_use.adopt(adopted)

    def open_lane(self, library: str, owner: str, on_progress: Callable[[], None] | None = None) -> Lane:
        """Take a stream for one incarnation of the library actor with the path `owner`.

        Args:
            library: Its library.
            owner: Its path.
            on_progress: Called once, when the first operation has completed without an error.
        """
        stream = self._streams.acquire(library)
        load = next((other.load for other in self._lanes if other.stream is stream), StreamLoad())
        lane = Lane(stream, load, self._options.in_flight, owner, on_progress)
        self._lanes.append(lane)
        return lane

    def retire_lane(self, lane: Lane, on_idle: Callable[[], None]) -> None:
        """Take no more work on a stream; what is in flight still completes and replies."""
        self._streams.release(lane.stream)
        lane.on_idle = on_idle
        self._sweep(lane)

    def _sweep(self, lane: Lane) -> None:
        """Forget a stream that takes no more work and has none."""
        if lane.on_idle is not None and not lane.operations:
            self._lanes.remove(lane)
            # A vendor's library waits for whatever the device does.
            self._chores.start(f"to close the library behind stream {lane.stream.name}", lane.on_idle)

    def launch(
        self,
        launch: Launch,
        library: KernelLibrary,
        lane: Lane,
        defer: Callable[..., DeferredReply[None]],
        crash: Callable[[Exception], None],
        failure: Exception | None = None,
    ) -> DeferredReply[None]:
        """Enqueue an operation. The reply it makes with `defer` is given at completion.

        Args:
            launch: The validated operation.
            library: Library that has it.
            lane: Stream to put it on.
            defer: Makes the reply, given `on_cancel`: what to call when the asker is cancelled.
            crash: Restarts the library actor; called if the operation makes the library suspect.
            failure: What its preparation failed with: it is refused with that, as by the library.

        Raises:
            Exception: What the backend raised; nothing is in flight, and what was allocated is freed.
        """
        try:
            operation = self.enqueue(launch, library, lane, failure)
        finally:
            self.leave(launch)
        operation.crash = crash
        reply: DeferredReply[None] = defer(on_cancel=lambda: self.start_grace(lane, operation, reply.context))
        operation.reply = reply
        self.see_to(operation, lane, reply)
        return reply

    def enqueue(
        self, launch: Launch, library: KernelLibrary, lane: Lane, failure: Exception | None = None
    ) -> InFlight:
        """Give an operation to the backend: all of `launch` but its reply, which `see_to` gives.

        It was not handed over before, or is left by whoever calls this.

        Raises:
            Exception: As for `launch`.
        """
        if self.is_lost:
            raise ActorStoppedError(f"{launch.name} was not started: the context is lost", path=lane.owner)
        has_staged = False
        memory, stream = self._memory_in_use, lane.stream
        try:
            if self._on_launch is not None:
                self._on_launch(launch)
            is_plain = launch.fault is None and not launch.arrivals and failure is None
            if is_plain and self._idle is None and not self._hooks:
                launch.check_inputs()
            else:
                self._begin(launch, lane, failure)
            # What the program has let go by now is there for this operation.
            memory.exchange(self._blocks, launch.allocations)
            memory.order(stream, launch.reads, launch.writes)
            for copy in launch.staged:
                has_staged = True
                self._memory.enqueue(copy, stream)
            library.enqueue(launch.spec, stream)
            if launch.fault is not None:
                launch.fault.fault.behind(self.device, stream, sorted(launch.writes), self._holds)
        except Exception as error:
            self._abandon(launch, lane, error, has_staged=has_staged)
            self._locate(error, launch)
            raise
        operation = self._fly(lane, launch)
        if launch.fault is not None:
            launch.fault.fault.after()
        for output in launch.outputs:
            if output.is_released:
                # Before it was there: it goes when the operation is complete.
                self._memory_in_use.release(output.id)
        self.launched += 1
        return operation

    def see_to(self, operation: InFlight, lane: Lane, reply: Reply) -> None:
        """Have its asker learn of the end of a very short operation, and the loop of that of others."""
        completion = self.completion
        if not self._is_alone():
            completion.watch(lane.stream, operation.event)
        elif completion.is_quick:
            if not reply.look_last(partial(self._look, lane, operation)):
                self._look(lane, operation)
        elif not (
            isinstance(reply, DirectReply)
            and completion.is_awaited(lane.stream)
            and reply.attend(
                partial(self._attend, lane, operation, reply), partial(completion.herald, operation.event)
            )
        ):
            completion.watch(lane.stream, operation.event)

    async def _attend(self, lane: Lane, operation: InFlight, reply: DirectReply) -> None:
        """Wait for an operation in its asker's task; what is better watched is watched afterwards."""
        is_done = await self.completion.attend(
            lane.stream, operation.event, lambda: self._is_alone() and not reply.is_done
        )
        if not is_done:
            if not reply.is_done:
                self.completion.watch(lane.stream, operation.event)
        elif not operation.is_lost:
            self._reap(lane)

    def _look(self, lane: Lane, operation: InFlight) -> None:
        """Reply if the operation is done, or will be in a moment; else it is watched from now on."""
        if not self.completion.stare(operation.event):
            self.completion.watch(lane.stream, operation.event)
        elif not operation.is_lost:
            self._reap(lane)

    def _fly(self, lane: Lane, launch: Launch, *, is_whole: bool = True) -> InFlight:
        """Hold what was enqueued until it is done: the whole operation, or copies for it alone."""
        stream = lane.stream
        event = stream.record_deferred() if self._may_defer(len(lane.operations)) else stream.record()
        operation = InFlight(launch, event, self.launched)
        self._memory_in_use.occupy(operation, stream, is_whole=is_whole)
        lane.operations.append(operation)
        lane.load.outstanding += 1
        launch.is_in_flight = True
        return operation

    def leave(self, launch: Launch) -> None:
        """Note that an operation is launched, or never will be."""
        if self._withdrawn:
            self._withdrawn.discard(launch)
        self.order.leave(launch)

    def may_launch(self, launch: Launch, lane: Lane) -> bool:
        """Whether what it needs is there, and room in the window, and all that goes before is launched."""
        if self.order.has_turns:
            turn = self.order.turn(launch)
            if turn is not None and turn.waits_for and not turn.is_ready:
                return False
        if launch.arrivals and not launch.has_arrived:
            return False
        return not lane.is_full and launch not in self._withdrawn

    async def prepare(self, launch: Launch, lane: Lane, prepare: Callable[[], None]) -> Exception | None:
        """Have a library do what would block the loop, in a thread.

        A cancelled asker waits for it, since the library can do nothing else meanwhile; what was prepared
        serves the next operation of the kind.

        Returns:
            What it failed with; `launch` tells it to whoever has to know.

        Raises:
            WithdrawnError: The operation was taken back meanwhile.
        """
        self._waiting[launch] = lane
        failure: Exception | None = None
        # A plan may need the memory that the program has let go.
        self._blocks.drain()
        try:
            try:
                await trio.to_thread.run_sync(prepare)
            except Exception as error:  # noqa: BLE001  # it is the operation's
                failure = error
            await trio.lowlevel.checkpoint_if_cancelled()
            if launch in self._withdrawn:
                raise WithdrawnError
        finally:
            del self._waiting[launch]
            self._withdrawn.discard(launch)
        return failure

    async def wait_to_launch(self, launch: Launch, lane: Lane) -> None:
        """Wait until an operation may be launched.

        Raises:
            WithdrawnError: It was taken back.
        """
        self._waiting[launch] = lane
        try:
            for arrival in launch.arrivals:
                arrival.tell(lane.notify)
            while (lane.is_full or not launch.has_arrived) and self._counts_on(launch, lane):
                await lane.wait_changed()
            turn = self.order.turn(launch)
            if turn is not None and launch not in self._withdrawn:
                await turn.wait()
            if launch in self._withdrawn:
                raise WithdrawnError
        finally:
            del self._waiting[launch]
            self._withdrawn.discard(launch)

    def _counts_on(self, launch: Launch, lane: Lane) -> bool:
        """Whether an operation that waits is still to be launched."""
        return launch not in self._withdrawn and not lane.is_lost

    def withdraw(self, launch: Launch) -> None:
        """Take an operation back that its library actor has, and that is not launched."""
        lane, turn = self._waiting.get(launch), self.order.turn(launch)
        if lane is None and launch not in self.order:
            return
        self._withdrawn.add(launch)
        if turn is not None:
            turn.release()
        if lane is not None:
            lane.notify()

    def _abandon(self, launch: Launch, lane: Lane, error: Exception, *, has_staged: bool) -> None:
        """Clean up after a launch that failed; its error is the reply that follows.

        Args:
            launch: The operation.
            lane: Where it was to go.
            error: What it failed with.
            has_staged: Whether copies for it are enqueued already.
        """
        self._notify(Phase.COMPLETE, launch)
        self._notify(Phase.REPLY, launch)
        if has_staged:
            # The copies run all the same: what they use is held until they have.
            self.completion.watch(lane.stream, self._fly(lane, launch, is_whole=False).event)
        else:
            self._notify(Phase.RELEASE, launch)
        made = {block for block, _ in launch.allocations}
        for output in launch.outputs:
            if output.id in made:
                output.spoil(launch.name, error)
        for block in made:
            self._memory_in_use.release(block)

    def _locate(self, error: Exception, launch: Launch) -> None:
        """Say where an error happened, and see to a context that is lost."""
        locate(error, device=self.device.info.name, operation=launch.name, generation=self.generation)
        if classify(error) is FailureClass.CONTEXT_LOST:
            self.lose_context(error)

    def over(self, launch: Launch) -> None:
        """Note that nobody waits for an operation any more: unless it is in flight, it holds nothing now."""
        if launch.is_forgotten:
            return
        self.leave(launch)
        if not launch.is_in_flight:
            launch.forget()

    def queues(self) -> dict[str, QueueStatistics]:
        """Count what waits and what is in flight, by the import path of the library."""
        waiting = Counter(launch.library for launch in self.order)
        in_flight = Counter(operation.launch.library for lane in self._lanes for operation in lane.operations)
        return {
            library: QueueStatistics(waiting=waiting[library], in_flight=in_flight[library])
            for library in waiting.keys() | in_flight.keys()
        }

    def _watch_lease(self, stream: AccelStream, event: AccelEvent) -> None:
        """Look after what a program enqueued during a lease."""
        self.completion.watch(stream, event)
        self._wake_watch()

    def _wake_watch(self) -> None:
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.set()

    def reap(self) -> None:
        """Reply to everything that is done. Called on the Trio thread after a wake-up."""
        self.leases.reap()
        for lane in tuple(self._lanes):
            if lane.operations and lane.operations[0].event.is_done:
                self._reap(lane)

    def _reap(self, lane: Lane) -> None:
        operations, load = lane.operations, lane.load
        was_full = load.is_full
        done: AccelEvent | None = None
        while operations:
            event = operations[0].event
            # Several may share one.
            if event is not done and not event.is_done:
                break
            done = event
            load.outstanding -= 1
            load.finished += 1
            self._finish(operations.popleft(), lane)
        for other in tuple(self._lanes) if was_full else (lane,):
            if other.load is load:
                other.notify()
        if lane.on_idle is not None:
            self._sweep(lane)

    def _finish(self, operation: InFlight, lane: Lane) -> None:
        launch, reply = operation.launch, operation.reply
        error = operation.event.error if operation.after is None else operation.failure()
        launch.is_in_flight = False
        if operation.has_grace:
            self.alarms.drop(operation)
        if reply is not None and not operation.is_lost:
            self.completed += 1
            if self._hooks:
                self._notify(Phase.COMPLETE, launch)
            if error is None:
                reply.set(None)
                if lane.on_progress is not None:
                    self._report_progress(lane, lane.on_progress)
            else:
                self._report(operation, reply, error)
            if self._hooks:
                self._notify(Phase.REPLY, launch)
        self._memory_in_use.vacate(operation)
        launch.forget()
        if self._hooks and not operation.is_lost:
            self._notify(Phase.RELEASE, launch)

    def _report_progress(self, lane: Lane, on_progress: Callable[[], None]) -> None:
        """The first operation of a lane has completed without an error."""
        lane.on_progress = None
        on_progress()
        self._on_progress()

    def _report(self, operation: InFlight, reply: Reply, error: Exception) -> None:
        launch = operation.launch
        for block in launch.outputs:
            block.spoil(launch.name, error)
        self._locate(error, launch)
        if classify(error) is FailureClass.SUSPECT:
            reply.fail_as_crash(error)
            if operation.crash is not None:
                operation.crash(error)
        else:
            reply.fail(error)

    def _begin(self, launch: Launch, lane: Lane, failure: Exception | None) -> None:
        """Tell of a launch that begins something or is watched, and look whether it may be."""
        if self._idle is not None:
            # Before it is enqueued: a driver that never returns is to be seen, too.
            self._tell_look(1)
            self._wake_watch()
        if self._hooks:
            enter(self._hooks, launch)
        launch.check_inputs()
        if failure is not None:
            raise failure
        for arrival in launch.arrivals:
            if arrival.failure is not None:
                raise arrival.failure
        hit = launch.fault
        if hit is not None:
            hit.strike()
            hit.fault.before(self.device, lane.stream, self.alarms, self._holds)

    def _notify(self, phase: Phase, launch: Launch) -> None:
        if self._hooks:
            notify(self._hooks, phase, launch)

    @enable_ki_protection
    async def watch(self) -> None:
        """See what no completion tells: a context that is lost, and operations that do not end."""
        number, blocks = 0, self._blocks
        try:
            while True:
                if not self.in_flight and self.leases.is_idle:
                    self._tell_look(0)
                    # In this order: what is dropped from now on rings.
                    blocks.is_watched = False
                    blocks.drain()
                    self._idle = trio.Event()
                    await self._idle.wait()
                blocks.is_watched = True
                number += 1
                self._tell_look(number)
                await trio.sleep(_WATCH_INTERVAL)
                blocks.drain()
                if not self.is_lost:
                    self._look_after(trio.current_time())
        finally:
            # Whoever takes the context away gives back what is left.
            blocks.is_watched = False

    def _tell_look(self, number: int) -> None:
        if self._on_look is not None:
            self._on_look(number)

    def _look_after(self, now: float) -> None:
        for lane in self._lanes:
            if lane.operations and (failure := lane.stream.failure) is not None:
                self.lose_context(failure)
                return
        if (failure := self.leases.failure) is not None:
            self.lose_context(failure)
            return
        # A thread that is to ring may wait for the interpreter's lock for seconds: whoever releases it again
        # and again for a moment, as a loop does that is busy, does not give it away.
        self.reap()
        limit = self._options.stuck_after
        if limit is None:
            return
        # A stream runs in order, so only its first operation can be the one that is stuck; and of those of
        # several streams, which may wait for one another, the one that was launched first.
        firsts = [lane.operations[0] for lane in self._lanes if lane.is_stuck(now, limit)]
        if firsts:
            self._stuck(min(firsts, key=lambda operation: operation.number), limit)

    def _stuck(self, operation: InFlight, limit: float) -> None:
        launch = operation.launch
        stuck = CompletionTimeoutError(
            f"it did not complete within stuck_after = {limit:g} s",
            device=self.device.info.name,
            operation=launch.name,
            generation=self.generation,
        )
        for output in launch.outputs:
            output.spoil(launch.name, stuck)
        if operation.reply is not None:
            operation.reply.fail(stuck)
        self.lose_context(stuck)

    def lose_context(self, cause: Exception) -> None:
        """The context is gone: end everything in flight, and have it replaced."""
        if not self.is_lost:
            self._grace_at_end = min(self._options.close_grace, _GRACE_OF_A_LOST_CONTEXT)
            self.fail_all(cause)
            self._lose(cause)

    def _leave(self, operation: InFlight, lane: Lane) -> None:
        """Let a cancelled asker go; the operation stays in flight, and its buffers with it."""
        is_free = leave_hosts(operation.launch)
        if not is_free:
            if is_free is not None:
                self._let_wait(operation, lane, _COPYING)
            return
        operation.is_given_up = True
        if operation.reply is not None:
            operation.reply.cancelled()
        lane.notify()

    def start_grace(self, lane: Lane, operation: InFlight, context: Context) -> None:
        """The asker of an operation in flight is cancelled: it waits no longer than the grace.

        Args:
            lane: Where the operation is.
            operation: The operation.
            context: Context variables of the asker.
        """
        operation.has_grace = True
        self._let_wait(operation, lane, grace_in(context, self._options.cancel_grace))

    def _let_wait(self, operation: InFlight, lane: Lane, seconds: float) -> None:
        deadline = trio.current_time() + seconds
        self.alarms.set(operation, deadline, lambda: self._leave(operation, lane))

    def expect_end(self) -> None:
        """Note that its actors are being stopped: unless the context is lost, the device closes."""
        self.is_closing = not self.is_lost

    async def synchronize(self, owner: str | None = None) -> None:
        """Wait until nothing is in flight, of all or of one library actor.

        For one that ends, what its askers have left does not count.
        """
        for lane in tuple(self._lanes):
            if owner in (None, lane.owner):
                await lane.drain(with_left=owner is None)
        if owner is None:
            await self.leases.drain()

    async def settle(self) -> None:
        """Wait until what is in flight now is over, whatever is launched meanwhile."""
        for lane in tuple(self._lanes):
            last = lane.operations[-1] if lane.operations else None
            while last is not None and last in lane.operations and not last.is_lost:
                await lane.wait_changed()

    async def rest(self) -> None:
        """Wait for a moment at which nothing runs, for a while; then for the end of what is in flight.

        Much of a driver waits for all that runs, and holds up every launch meanwhile.
        """
        with trio.move_on_after(_MOST_PATIENCE):
            while not self.is_lost and (self.in_flight or not self.leases.is_idle):  # noqa: ASYNC110  # rarely
                await trio.sleep(_WATCH_INTERVAL)
        await self.settle()

    def fail_all(self, cause: BaseException | None) -> None:
        """End everything in flight: the context is gone."""
        self.is_lost = True
        self.alarms.clear()
        for lane in self._lanes:
            for operation in lane.operations:
                operation.is_given_up = True
                if not operation.is_lost:
                    operation.is_lost = True
                    self._fail_lost(operation, cause)
            lane.is_lost = True
            lane.notify()
        # Whoever waits to launch hears that it is too late.
        self.order.release_all()
        self.leases.lose(lambda: self._lost("lease", "was waited for", "lease the array again", cause))

    def _fail_lost(self, operation: InFlight, cause: BaseException | None) -> None:
        launch, reply = operation.launch, operation.reply
        for block in launch.outputs:
            block.spoil(launch.name, cause)
        if reply is not None:
            self._notify(Phase.COMPLETE, launch)
            reply.fail(self.lost(launch, cause))
            self._notify(Phase.REPLY, launch)
        self._notify(Phase.RELEASE, launch)

    def lost(self, launch: Launch, cause: BaseException | None) -> ContextPoisonedError | DeviceLostError:
        """Make the error of an operation that was in flight when the context ended."""
        return self._lost(launch.name, "was in flight", launch.advice, cause)

    def lost_to_library(
        self, launch: Launch, cause: BaseException | None
    ) -> ContextPoisonedError | DeviceLostError:
        """Make the error of an operation whose library was being opened when the context turned out lost."""
        return self._lost(launch.name, "waited for its library to be opened", "ask again", cause)

    def _lost(
        self, name: str, state: str, advice: str, cause: BaseException | None
    ) -> ContextPoisonedError | DeviceLostError:
        where: dict[str, Any] = {
            "device": self.device.info.name,
            "operation": name,
            "generation": self.generation,
        }
        if self.is_closing:
            return DeviceLostError(f"the device was closed while this operation {state}", **where)
        error = ContextPoisonedError(
            f"the device's context was lost while this operation {state}; {advice}", **where
        )
        error.__cause__ = cause
        return error

    async def close(self) -> bool:
        """Give the device back; waits for streams within the grace.

        Returns:
            Whether all streams ended; memory that one still uses stays reserved.
        """
        self.completion.close()
        for hold in self._holds:
            hold.release()
        return await trio.to_thread.run_sync(self._end, not self.in_flight)

    def _end(self, is_idle: bool) -> bool:
        started = time.monotonic()
        self._chores.finish(self._grace_at_end)
        if is_idle:
            self._memory.close()
        return self.device.close(max(0.0, self._grace_at_end - (time.monotonic() - started)))
