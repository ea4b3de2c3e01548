"""The order of turns: waiting launches, and leases, which give an array to the program for a while."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import attrs
import trio

from ...actors import ParkingLot, leavable_context
from ...backends.base import (
    AccelDevice,
    AccelEvent,
    AccelStream,
    ArraySpec,
    ContextLostError,
    Lease,
)
from ..base._errors import WithdrawnError
from ..base._waits import SubmissionOrder, SubmissionTurn
from ..operations._blocks import Block
from ..operations._operation import Launch
from ._in_flight import BlockUse, MemoryInUse
from ._stream_queues import StreamQueue


class LaunchGate:
    """Operations that wait for their launch, and can be withdrawn until then.

    Args:
        drain_some: Frees blocks that the program has released, and returns whether some remain.

    Attributes:
        order: The order of waiting operations.
    """

    def __init__(self, drain_some: Callable[[], bool]) -> None:
        self.order: LaunchOrder = LaunchOrder()
        self._drain_some = drain_some
        # The operations with which their library actors have begun, and the withdrawn ones among them.
        self._waiting: dict[Launch, StreamQueue] = {}
        self._withdrawn: set[Launch] = set()
        # D111: operations in flight that keep their turns until a thread has enqueued them.
        self._kept: set[Launch] = set()

    def leave(self, launch: Launch) -> None:
        """Record that an operation is launched, or never will be."""
        if self._withdrawn:
            self._withdrawn.discard(launch)
        self.order.leave(launch)

    def over(self, launch: Launch) -> None:
        """Record that nobody waits for an operation. Unless it is in flight, it frees its memory."""
        if launch.is_forgotten or launch in self._kept:
            return
        self.leave(launch)
        if not launch.is_in_flight:
            launch.forget()

    def keep(self, launch: Launch) -> None:
        """Keep the turn of an operation that a thread enqueues, until `launched` is called.

        It keeps the turn even if its caller leaves, because later work cannot wait for it on the device
        before its event is recorded (D111).
        """
        self._kept.add(launch)
        # All operations get turns, because even operations of the same library must wait: its actor may have
        # restarted by then.
        self.order.make_turns()

    def launched(self, launch: Launch) -> None:
        """Leave the order with an operation that a thread has enqueued."""
        self._kept.discard(launch)
        self.leave(launch)

    def may_launch(self, launch: Launch, queue: StreamQueue) -> bool:
        """Return whether its arrivals, the window and all earlier launches permit its launch."""
        if self.order.has_turns:
            turn = self.order.turn(launch)
            if turn is not None and turn.waits_for and not turn.is_ready:
                return False
        if launch.arrivals and not launch.has_arrived:
            return False
        return _has_room(launch, queue) and launch not in self._withdrawn

    async def prepare(
        self, launch: Launch, queue: StreamQueue, prepare: Callable[[], None]
    ) -> Exception | None:
        """Let a library prepare in a thread, because that would block the loop (D24).

        A cancelled caller waits for it, because the library can do nothing else meanwhile. The preparation
        serves the next similar operation.

        Returns:
            Its error; `Enqueuer.enqueue` raises it for the caller.

        Raises:
            WithdrawnError: The operation was withdrawn meanwhile.
        """
        self._waiting[launch] = queue
        failure: Exception | None = None
        try:
            # Drain before starting the thread, because a plan may need memory that the program has released.
            has_rest = self._drain_some()
            while has_rest:
                await trio.lowlevel.checkpoint()
                has_rest = self._drain_some()
            try:
                await trio.to_thread.run_sync(prepare)
            except Exception as error:  # noqa: BLE001  # it belongs to the operation
                failure = error
            await trio.lowlevel.checkpoint_if_cancelled()
            if launch in self._withdrawn:
                raise WithdrawnError
        finally:
            del self._waiting[launch]
            self._withdrawn.discard(launch)
        return failure

    async def wait(self, launch: Launch, queue: StreamQueue) -> None:
        """Wait until an operation may be launched.

        Raises:
            WithdrawnError: It was withdrawn.
        """
        self._waiting[launch] = queue
        try:
            for arrival in launch.arrivals:
                # The end of an arrival wakes the loop below, as a free slot does.
                arrival.tell(queue.notify)
            is_ready = False
            while not is_ready:
                while not (_has_room(launch, queue) and launch.has_arrived):
                    if launch in self._withdrawn or queue.is_lost:
                        # It will not be launched, and waits only for its turn.
                        break
                    await queue.wait_changed()
                turn = self.order.turn(launch)
                is_ready = turn is None or launch in self._withdrawn or turn.is_ready
                if turn is not None and not is_ready:
                    # During this wait a thread may begin to enqueue on the stream, so check for room again.
                    await turn.wait()
            if launch in self._withdrawn:
                raise WithdrawnError
        finally:
            del self._waiting[launch]
            self._withdrawn.discard(launch)

    def withdraw(self, launch: Launch) -> None:
        """Withdraw an unlaunched operation from its library actor."""
        queue, turn = self._waiting.get(launch), self.order.turn(launch)
        if queue is None and launch not in self.order:
            return
        self._withdrawn.add(launch)
        if turn is not None:
            turn.release()
        if queue is not None:
            queue.notify()


def _has_room(launch: Launch, queue: StreamQueue) -> bool:
    """Return whether there is room in the window and on the stream."""
    # The loop puts an injected fault on the stream, while no thread may be using it.
    return not queue.is_full and (launch.fault is None or not queue.calls)


class LaunchOrder:
    """The order of operations and leases. They have turns only if something depends on them (D19).

    A library launches its operations in their submission order. So while all waiting operations belong to one
    library, none has a turn. As soon as an operation of another library or a lease is added, all get their
    turns in that order.

    Attributes:
        has_turns: Whether they have turns.
        is_clear: Whether nothing waits, so that an operation launched at once need not be entered.
    """

    __slots__ = ("_library", "_order", "_turns", "has_turns", "is_clear")

    def __init__(self) -> None:
        self._order = SubmissionOrder()
        self._turns: dict[Launch, SubmissionTurn | None] = {}
        self.has_turns: bool = False
        self.is_clear: bool = True
        # The library of all waiting operations, while they do not need turns.
        self._library = ""

    def __contains__(self, launch: Launch) -> bool:
        return launch in self._turns

    def __iter__(self) -> Iterator[Launch]:
        return iter(self._turns)

    def admits(self, launch: Launch) -> bool:
        """Return whether an operation need not be entered: none waits, and it uses no leased array."""
        return not self._turns and self._order.is_free(launch.reads, launch.writes)

    def enter(self, launch: Launch) -> None:
        """Enter a submitted operation: later operations that touch its memory are launched after it."""
        turns = self._turns
        self.is_clear = False
        if not turns and self._order.is_empty:
            self._library, self.has_turns = launch.library, False
        if not self.has_turns:
            if launch.library == self._library:
                turns[launch] = None
                return
            self.make_turns()
        turns[launch] = self._order.enter(launch.reads, launch.writes)

    def leave(self, launch: Launch) -> None:
        """Record that an operation is launched, or never will be."""
        turns = self._turns
        turn = turns.pop(launch, None)
        if turn is not None:
            self._order.leave(turn, [block for block, _ in launch.allocations])
        if not turns:
            self.is_clear = self._order.is_empty

    def turn(self, launch: Launch) -> SubmissionTurn | None:
        """Return the turn of an operation, or None."""
        return self._turns.get(launch)

    def enter_lease(self, block: int, *, write: bool) -> SubmissionTurn:
        """Give a lease of a block its turn."""
        self.make_turns()
        self.is_clear = False
        blocks = frozenset([block])
        return self._order.enter(frozenset() if write else blocks, blocks if write else frozenset())

    def leave_lease(self, turn: SubmissionTurn) -> None:
        """End a lease."""
        self._order.leave(turn)
        self.is_clear = not self._turns and self._order.is_empty

    def release_all(self) -> None:
        """Let all continue, because the order no longer matters."""
        for turn in self._turns.values():
            if turn is not None:
                turn.release()

    def make_turns(self) -> None:
        """Give turns to all operations, even if they belong to one library."""
        if self.has_turns:
            return
        self.has_turns = True
        for launch in self._turns:
            self._turns[launch] = self._order.enter(launch.reads, launch.writes)


@attrs.define(eq=False)
class _Tail:
    """Work that a program enqueued on its own streams during a lease, and that may still run."""

    use: BlockUse
    write: bool
    stream: AccelStream
    event: AccelEvent


@attrs.define(eq=False)
class Leases:
    """The leases of one context's arrays to the program, each in its turn; later work follows it (D36).

    A lease takes its turn as an operation does, as a reader or a writer. It begins when all earlier work on
    the array is done, which is awaited here. Later operations wait for the program's work on the device, and
    the host does not wait.

    Args:
        device: The device of the arrays.
        queues: Its streams, with the operations in flight.
        order: The order of launches.
        memory: The blocks in use; the program's work counts as a use.
        watch: Arranges a call of `reap` soon after an event on a stream is done.
        lose: Starts the replacement of a lost context.

    Attributes:
        tails: The work of programs from ended leases that may still run.
    """

    _device: AccelDevice
    _queues: Sequence[StreamQueue]
    _order: LaunchOrder
    _memory: MemoryInUse
    _watch: Callable[[AccelStream, AccelEvent], None]
    _lose: Callable[[Exception], None]
    tails: list[_Tail] = attrs.field(factory=list[_Tail])
    _changed: ParkingLot = attrs.field(factory=ParkingLot)
    _lost: Callable[[], Exception] | None = None

    @property
    def failure(self) -> Exception | None:
        """The reason why the context is unusable, according to the work enqueued last."""
        return next((failure for tail in self.tails if (failure := tail.stream.failure) is not None), None)

    @leavable_context
    async def lease(
        self, block: Block, spec: ArraySpec, *, write: bool, stream: object
    ) -> AsyncGenerator[Any]:
        """Lease an array to the program; see `AccelRef.lease`.

        Args:
            block: The memory of the array.
            spec: The array.
            write: Whether the program may change it.
            stream: The stream on which the program will enqueue its work; see `AccelDevice.lend`.

        Raises:
            ContextLostError, DeviceLostError: The context ended before its turn.
            StaleRefError: The array was released by then, or has become invalid.
        """
        async with self.hold(spec.block, write=write):
            self.check("lease", block, spec)
            try:
                lease = self._device.lend(spec, write=write, stream=stream)
            except ContextLostError as error:
                self._lose(error)
                raise
            try:
                yield lease.array
            finally:
                self._end(lease, block, write=write)

    def hold(self, block: int, *, write: bool) -> Held:
        """Hold a block for use elsewhere; this call takes its turn."""
        # This call takes the turn, and not a task's first step, so that the calls determine the order.
        return Held(self, self._order.enter_lease(block, write=write), block, write)

    def check(self, verb: str, block: Block, spec: ArraySpec) -> None:
        """Refuse an array lost, released or damaged during the wait for its turn.

        Raises:
            ContextLostError, DeviceLostError, StaleRefError: It was.
        """
        if self._lost is not None:
            raise self._lost()
        block.check(verb, spec)

    def is_idle(self, block: int) -> bool:
        """Return whether no operation and no lease uses a block, and no waiting operation will."""
        used = any(block in launch.reads or block in launch.writes for launch in self._order)
        return not used and not self._memory.uses[block].pins

    def reap(self) -> None:
        """Release blocks that the program's work no longer uses."""
        done = [tail for tail in self.tails if tail.event.is_done]
        if done:
            self.tails = [tail for tail in self.tails if tail not in done]
            errors = [error for tail in done if (error := tail.event.error) is not None]
            if errors:
                # These events are done because the context is lost, but the program's work may still run.
                self._lose(errors[0])
                return
            for tail in done:
                self._memory.unpin(tail.use)
            self._changed.unpark_all()

    async def drain(self) -> None:
        """Wait until no work that a program enqueued during a lease is left."""
        while self.tails and self._lost is None:
            await self._changed.park()

    def lose(self, error: Callable[[], Exception]) -> None:
        """End with the context: tasks that wait for a lease get the error."""
        self._lost = error
        # Their blocks stay taken until the device is closed, because that waits for their work.
        self.tails.clear()
        self._changed.unpark_all()

    async def take(self, held: Held) -> BlockUse:
        """Wait until a held block is not in use; see `Held.wait`."""
        block, write = held.block, held.write
        # The turn begins when earlier operations are launched, but the program has to wait until they are
        # done.
        await held.turn.wait()
        for queue in tuple(self._queues):
            while queue.operations and any(
                operation.touches(block, write=write) for operation in queue.operations
            ):
                # Its operations can no longer be observed. The caller checks afterwards for a lost context.
                if queue.is_lost:
                    break
                await queue.wait_changed()
        while self.tails and any(tail.use.block == block and (write or tail.write) for tail in self.tails):
            await self._changed.park()
        if write:
            self._memory.renew((block,))
        return self._memory.pin(block)

    def leave(self, held: Held) -> None:
        """Stop holding a block, or waiting for it; later operations on it continue."""
        if held.use is not None:
            self._memory.unpin(held.use)
        self._order.leave_lease(held.turn)

    def _end(self, lease: Lease, block: Block, *, write: bool) -> None:
        """Take an array back before later operations get their turn."""
        try:
            last_event = lease.take_back()
        except Exception as error:
            # The end of the program's work cannot be observed, so the memory is never used again.
            self._memory.pin(block.id)
            if write:
                block.mark_damaged("lease", error)
            raise
        if last_event is None:
            return
        use = self._memory.pin(block.id)
        # The block stays pinned after a loss, because the program's work may run until the device is closed.
        if self._lost is not None:
            return
        stream, event = last_event
        if write:
            use.write(stream, event)
        else:
            use.read(stream, event)
        self.tails.append(_Tail(use, write, stream, event))
        self._watch(stream, event)


@attrs.define(eq=False)
class Held:
    """A block held, or waiting for its turn. As an async context manager, it is held inside.

    Attributes:
        turn: Its turn among operations and leases.
        block: The id of the block.
        write: Whether its holder may change it.
        use: Its use of the block, while it is held.
    """

    _leases: Leases
    turn: SubmissionTurn
    block: int
    write: bool
    use: BlockUse | None = None

    async def wait(self) -> None:
        """Wait until earlier operations on the block are done, or the context is lost; see `Leases.check`."""
        self.use = await self._leases.take(self)

    def end(self) -> None:
        """Release the block; call this only once."""
        self._leases.leave(self)

    async def __aenter__(self) -> None:
        try:
            await self.wait()
        except BaseException:
            # Keeping the turn would block all later operations on the block.
            self.end()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.end()
