"""The order of turns: launches that wait, and leases, by which an array is the program's for a while."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

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
    """Operations that wait until they may be launched, and can be taken back meanwhile.

    Args:
        drain: Gives back blocks that the program has let go.

    Attributes:
        order: The order of operations that wait.
    """

    def __init__(self, drain: Callable[[], None]) -> None:
        self.order: LaunchOrder = LaunchOrder()
        self._drain = drain
        # Operations that their library actors have begun with, and those of them that are taken back.
        self._waiting: dict[Launch, StreamQueue] = {}
        self._withdrawn: set[Launch] = set()
        # D111: operations in flight that keep their places until a thread has enqueued them.
        self._kept: set[Launch] = set()

    def leave(self, launch: Launch) -> None:
        """Note that an operation is launched, or never will be."""
        if self._withdrawn:
            self._withdrawn.discard(launch)
        self.order.leave(launch)

    def over(self, launch: Launch) -> None:
        """Note that an operation has no waiter any more: unless it is in flight, it gives its memory back."""
        if launch.is_forgotten or launch in self._kept:
            return
        self.leave(launch)
        if not launch.is_in_flight:
            launch.forget()

    def keep(self, launch: Launch) -> None:
        """Keep the place of an operation that a thread enqueues, until it is `launched`.

        Also if its asker leaves: later work cannot wait for it on the device before its event is recorded
        (D111).
        """
        self._kept.add(launch)
        # Turns for all: also operations of the same library must wait, as its actor may have restarted by
        # then.
        self.order.make_turns()

    def launched(self, launch: Launch) -> None:
        """Leave the order with an operation that a thread has enqueued."""
        self._kept.discard(launch)
        self.leave(launch)

    def may_launch(self, launch: Launch, queue: StreamQueue) -> bool:
        """Tell whether its arrivals, room in the window and all launches before it are there."""
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
        """Have a library prepare in a thread, as that would block the loop (D24).

        A cancelled asker waits for it, since the library can do nothing else meanwhile; the preparation
        serves the next operation of the kind.

        Returns:
            Its error; `Enqueuer.enqueue` tells the asker.

        Raises:
            WithdrawnError: The operation was taken back meanwhile.
        """
        self._waiting[launch] = queue
        failure: Exception | None = None
        # The drain comes before the thread: a plan may need memory that the program has let go.
        self._drain()
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

    async def wait(self, launch: Launch, queue: StreamQueue) -> None:
        """Wait until an operation may be launched.

        Raises:
            WithdrawnError: It was taken back.
        """
        self._waiting[launch] = queue
        try:
            for arrival in launch.arrivals:
                # The end of an arrival wakes the loop below, as room does.
                arrival.tell(queue.notify)
            is_ready = False
            while not is_ready:
                while not (_has_room(launch, queue) and launch.has_arrived):
                    if launch in self._withdrawn or queue.is_lost:
                        # It is not to be launched any more, and waits for its turn alone.
                        break
                    await queue.wait_changed()
                turn = self.order.turn(launch)
                is_ready = turn is None or launch in self._withdrawn or turn.is_ready
                if turn is not None and not is_ready:
                    # During this wait a thread may begin to enqueue on the stream, so room is looked for
                    # again.
                    await turn.wait()
            if launch in self._withdrawn:
                raise WithdrawnError
        finally:
            del self._waiting[launch]
            self._withdrawn.discard(launch)

    def withdraw(self, launch: Launch) -> None:
        """Take an operation back that its library actor has, and that is not launched."""
        queue, turn = self._waiting.get(launch), self.order.turn(launch)
        if queue is None and launch not in self.order:
            return
        self._withdrawn.add(launch)
        if turn is not None:
            turn.release()
        if queue is not None:
            queue.notify()


def _has_room(launch: Launch, queue: StreamQueue) -> bool:
    """Tell whether there is room in the window and on the stream."""
    # The loop puts an injected fault on the stream, where no thread may be at work then.
    return not queue.is_full and (launch.fault is None or not queue.calls)


class LaunchOrder:
    """The order of operations and leases; they have turns only where anything depends on them (D19).

    A library launches its operations in the order in which they were handed over. So while all that wait
    are of one library, none has a turn. As soon as an operation of another library comes, or a lease, all
    get theirs, in that order.

    Attributes:
        has_turns: Whether they have.
        is_clear: Whether nothing waits, so that an operation that is launched at once need not be entered.
    """

    __slots__ = ("_library", "_order", "_turns", "has_turns", "is_clear")

    def __init__(self) -> None:
        self._order = SubmissionOrder()
        self._turns: dict[Launch, SubmissionTurn | None] = {}
        self.has_turns: bool = False
        self.is_clear: bool = True
        # The library of all that wait, while they have no turns.
        self._library = ""

    def __contains__(self, launch: Launch) -> bool:
        return launch in self._turns

    def __iter__(self) -> Iterator[Launch]:
        return iter(self._turns)

    def admits(self, launch: Launch) -> bool:
        """Tell whether an operation need not be entered: no other waits, and it uses no leased array."""
        return not self._turns and self._order.is_free(launch.reads, launch.writes)

    def enter(self, launch: Launch) -> None:
        """Note that an operation is handed over: later ones that touch its memory are launched after it."""
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
        """Note that an operation is launched, or never will be."""
        turns = self._turns
        turn = turns.pop(launch, None)
        if turn is not None:
            self._order.leave(turn, [block for block, _ in launch.allocations])
        if not turns:
            self.is_clear = self._order.is_empty

    def turn(self, launch: Launch) -> SubmissionTurn | None:
        """Return the turn of an operation; None where it has none."""
        return self._turns.get(launch)

    def enter_lease(self, block: int, *, write: bool) -> SubmissionTurn:
        """Give a lease of a block its place."""
        self.make_turns()
        self.is_clear = False
        blocks = frozenset([block])
        return self._order.enter(frozenset() if write else blocks, blocks if write else frozenset())

    def leave_lease(self, turn: SubmissionTurn) -> None:
        """End a lease."""
        self._order.leave(turn)
        self.is_clear = not self._turns and self._order.is_empty

    def release_all(self) -> None:
        """Let all go on: the order does not matter any more."""
        for turn in self._turns.values():
            if turn is not None:
                turn.release()

    def make_turns(self) -> None:
        """Give turns to all, also while they are of one library."""
        if self.has_turns:
            return
        self.has_turns = True
        for launch in self._turns:
            self._turns[launch] = self._order.enter(launch.reads, launch.writes)


@attrs.define(eq=False)
class _Tail:
    """Work that a program enqueued during a lease, on streams of its own, and that may still run."""

    use: BlockUse
    write: bool
    stream: AccelStream
    event: AccelEvent


@attrs.define(eq=False)
class Leases:
    """Leases of one context's arrays to the program, each in its turn; later work follows it (D36).

    A lease takes its turn as an operation does, as a reader or a writer. It begins when all earlier work on
    the array is done, which is waited for here. Later operations wait on the device for the program's work,
    and the host does not wait.

    Args:
        device: The device of the arrays.
        queues: Its streams, with the operations in flight.
        order: The order of launches.
        memory: Blocks that are in use; it takes the program's work as a use.
        watch: Has `reap` called soon after an event on a stream is done.
        lose: Has the context replaced, which is lost.

    Attributes:
        tails: Work of programs from leases that are over, which may still run.
    """

    _device: AccelDevice
    _queues: Sequence[StreamQueue]
    _order: LaunchOrder
    _memory: MemoryInUse
    _watch: Callable[[AccelStream, AccelEvent], None]
    _lose: Callable[[Exception], None]
    tails: list[_Tail] = attrs.field(factory=list[_Tail])
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    _lost: Callable[[], Exception] | None = None

    @property
    def failure(self) -> Exception | None:
        """The reason why the context cannot be used any more, as what was enqueued last shows."""
        return next((failure for tail in self.tails if (failure := tail.stream.failure) is not None), None)

    @asynccontextmanager
    async def lease(
        self, block: Block, spec: ArraySpec, *, write: bool, stream: object
    ) -> AsyncGenerator[Any]:
        """Give an array to the program; see `AccelRef.lease`.

        Args:
            block: The memory of the array.
            spec: The array.
            write: Whether the program may change it.
            stream: Where the program will enqueue its work; see `AccelDevice.lend`.

        Raises:
            ContextLostError, DeviceLostError: The context ended before its turn came.
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
        """Hold a block that is given out elsewhere; its turn is that of this call."""
        # The turn is that of this call, and not of a task's first step: the order is that of the calls.
        return Held(self, self._order.enter_lease(block, write=write), block, write)

    def check(self, verb: str, block: Block, spec: ArraySpec) -> None:
        """Refuse an array that was lost, released or damaged while its turn was waited for.

        Raises:
            ContextLostError, DeviceLostError, StaleRefError: It was.
        """
        if self._lost is not None:
            raise self._lost()
        block.check(verb, spec)

    def is_idle(self, block: int) -> bool:
        """Tell whether no operation and no lease uses a block, and no operation waits that will."""
        used = any(block in launch.reads or block in launch.writes for launch in self._order)
        return not used and not self._memory.uses[block].pins

    def reap(self) -> None:
        """Let go of the blocks that the program's work is done with."""
        done = [tail for tail in self.tails if tail.event.is_done]
        if done:
            self.tails = [tail for tail in self.tails if tail not in done]
            errors = [error for tail in done if (error := tail.event.error) is not None]
            if errors:
                # These events are done because the context is lost, but the program's work may run on.
                self._lose(errors[0])
                return
            for tail in done:
                self._memory.unpin(tail.use)
            self._changed.unpark_all()

    async def drain(self) -> None:
        """Wait until nothing is left that a program has enqueued during a lease."""
        while self.tails and self._lost is None:
            await self._changed.park()

    def lose(self, error: Callable[[], Exception]) -> None:
        """End with the context: tasks that wait for a lease get the error."""
        self._lost = error
        # Their blocks stay taken until the device is closed, which waits for their work.
        self.tails.clear()
        self._changed.unpark_all()

    async def take(self, held: Held) -> BlockUse:
        """Wait until a block that is held is not in use; see `Held.wait`."""
        block, write = held.block, held.write
        # The turn comes when earlier operations are launched; the program's use waits until they are done.
        await held.turn.wait()
        for queue in tuple(self._queues):
            while queue.operations and any(one.touches(block, write=write) for one in queue.operations):
                # Nothing more is seen of its operations. Whether the context is lost is asked afterwards.
                if queue.is_lost:
                    break
                await queue.wait_changed()
        while self.tails and any(one.use.block == block and (write or one.write) for one in self.tails):
            await self._changed.park()
        if write:
            self._memory.renew((block,))
        return self._memory.pin(block)

    def leave(self, held: Held) -> None:
        """End to hold a block, or to wait for that; later operations on it go on."""
        if held.use is not None:
            self._memory.unpin(held.use)
        self._order.leave_lease(held.turn)

    def _end(self, lease: Lease, block: Block, *, write: bool) -> None:
        """Take an array back, before the turn of later operations comes."""
        try:
            last = lease.take_back()
        except Exception as error:
            # The end of the program's work cannot be seen: the memory is never used for anything else.
            self._memory.pin(block.id)
            if write:
                block.mark_damaged("lease", error)
            raise
        if last is None:
            return
        use = self._memory.pin(block.id)
        # The block stays pinned after a loss: the program's work may run until the device is closed.
        if self._lost is not None:
            return
        stream, event = last
        if write:
            use.write(stream, event)
        else:
            use.read(stream, event)
        self.tails.append(_Tail(use, write, stream, event))
        self._watch(stream, event)


@attrs.define(eq=False)
class Held:
    """A block that is held, or waits for its turn; as an async context manager, it is held inside.

    Attributes:
        turn: Its turn among operations and leases.
        block: Id of the block.
        write: Whether it may be changed meanwhile.
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
        """Let go of it; once only."""
        self._leases.leave(self)

    async def __aenter__(self) -> None:
        try:
            await self.wait()
        except BaseException:
            # A turn that is not given up would hold up all later operations on the block.
            self.end()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.end()
