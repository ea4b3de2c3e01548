"""Leases: an array is the program's for a while, in the device's own memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from ...backends.base import AccelDevice, AccelEvent, AccelStream, ContextLostError, Lease
from ...backends.base.contract.ops import ArraySpec
from ..base._waits import Turn
from ..operations._blocks import Block
from ._in_flight import BlockUse, MemoryInUse
from ._launch_gate import LaunchOrder
from ._stream_queues import StreamQueue

__all__ = ["Held", "Leases"]


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
    tails: list[_Tail] = attrs.field(factory=list[_Tail], init=False)
    _changed: trio.Event = attrs.field(factory=trio.Event, init=False)
    _lost: Callable[[], Exception] | None = attrs.field(default=None, init=False)

    @property
    def failure(self) -> Exception | None:
        """Why the context cannot be used any more, as what was enqueued last shows."""
        return next((failure for tail in self.tails if (failure := tail.stream.failure) is not None), None)

    @asynccontextmanager
    async def lease(
        self, block: Block, spec: ArraySpec, *, write: bool, stream: object
    ) -> AsyncGenerator[Any, None]:
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
        # By this call, and not when a task first runs: the order is that of the calls.
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
        return not used and not self._memory.use(block).pins

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
            self._notify()

    async def drain(self) -> None:
        """Wait until nothing is left that a program has enqueued during a lease."""
        while self.tails and self._lost is None:
            await self._changed.wait()

    def lose(self, error: Callable[[], Exception]) -> None:
        """End with the context: tasks that wait for a lease get the error."""
        self._lost = error
        # Their blocks stay taken until the device is closed, which waits for their work.
        self.tails.clear()
        self._notify()

    async def take(self, held: Held) -> BlockUse:
        """Wait until a block that is held is not in use; see `Held.wait`."""
        block, write = held.block, held.write
        # The turn comes when earlier operations are launched; the program's use waits until they are done.
        await held.turn.wait()
        for queue in tuple(self._queues):
            while any(operation.touches(block, write=write) for operation in queue.operations):
                # Nothing more is seen of its operations. Whether the context is lost is asked afterwards.
                if queue.is_lost:
                    break
                await queue.wait_changed()
        while any(tail.use.block == block and (write or tail.write) for tail in self.tails):
            await self._changed.wait()
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
                block.spoil("lease", error)
            raise
        if last is None:
            return
        use = self._memory.pin(block.id)
        if self._lost is not None:
            return
        stream, event = last
        if write:
            use.write(stream, event)
        else:
            use.read(stream, event)
        self.tails.append(_Tail(use, write, stream, event))
        self._watch(stream, event)

    def _notify(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()


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
    turn: Turn
    block: int
    write: bool
    use: BlockUse | None = attrs.field(default=None, init=False)

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
            self.end()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.end()
