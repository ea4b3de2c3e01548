"""Operations in flight, their uses of blocks, and the order of work that follows from the uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

import attrs

from ...actors import DeferredReply, DirectReply
from ...backends.base import (
    AccelDevice,
    AccelEvent,
    AccelStream,
    InputFailedError,
    OutOfMemoryError,
    PlacedBlock,
    function_of,
)
from ..base._errors import leaves_unchanged
from ..operations._blocks import BlockTable
from ..operations._operation import Launch

Reply: TypeAlias = "DeferredReply[None] | DirectReply"
"""The reply to an operation's caller: through the library's mailbox, or directly."""


@attrs.frozen(eq=False)
class _NotYet:
    """The event of an operation while a thread enqueues it."""

    is_done: bool = False
    error: Exception | None = None


NOT_YET = _NotYet()


class Bound(Protocol):
    """A reference to the memory of a block."""

    def drop(self) -> None:
        """Drop the reference, because the memory is freed."""


class InFlight:
    """An operation in the backend, with the resources that it holds until it is done.

    Attributes:
        launch: The launch.
        event: Done when the operation is; `NOT_YET` until it is enqueued.
        number: The number of earlier launches.
        uses: The blocks that it uses.
        after: The operations in flight that make its inputs, if any. They are done when this operation is,
            though perhaps not detected yet.
        reply: The reply to its caller.
        crash: Restarts the library actor.
        has_grace: Whether its cancelled caller waits for it, so that an alarm is set.
        is_lost: Whether its context is lost, and its caller knows.
        is_given_up: Whether its cancelled caller has left it after the grace.
    """

    # This is a plain `__init__`, because attrs looks up each missing argument's default, and every operation
    # makes an instance.
    def __init__(self, launch: Launch, event: AccelEvent, number: int) -> None:
        self.launch: Launch = launch
        self.event: AccelEvent = event
        self.number: int = number
        self.uses: list[BlockUse] = []
        self.after: list[InFlight] | None = None
        self.reply: Reply | None = None
        self.crash: Callable[[Exception], None] | None = None
        self.has_grace: bool = False
        self.is_lost: bool = False
        self.is_given_up: bool = False
        self._failure: Exception | None = None

    def occupy(self, uses: BlockUses, stream: AccelStream, *, is_whole: bool) -> None:
        """Pin the blocks that it uses until `vacate`, and record its reads and writes.

        Args:
            uses: The uses of blocks.
            stream: The stream on which its event was recorded.
            is_whole: Whether it was enqueued completely, so that it makes what it writes.
        """
        launch, event, pinned = self.launch, self.event, self.uses
        written = stream, event
        for block in launch.reads:
            use = uses[block]
            use.pins += 1
            pinned.append(use)
            reads = use.reads
            if reads is None:
                use.reads = {stream: event}
            elif stream in reads:
                reads[stream] = event
            else:
                use.read(stream, event)
            if use.writer is not None:
                if self.after is None:
                    self.after = []
                self.after.append(use.writer)
        for block in launch.writes:
            use = uses[block]
            use.pins += 1
            pinned.append(use)
            use.last_write, use.reads = written, None
            if is_whole:
                use.writer = self

    def bind(self, stream: AccelStream, event: AccelEvent) -> None:
        """Replace `NOT_YET` by the event of an enqueued operation."""
        self.event = event
        writes = self.launch.writes
        for use in self.uses:
            if use.block not in writes:
                # Other operations of the stream may also read the block. Then their event has replaced this
                # `NOT_YET`, or was done and removed. Operations of a stream are bound in order, so this event
                # is the later one.
                use.read(stream, event)
            elif use.last_write == (stream, NOT_YET):
                use.last_write = stream, event

    def vacate(self, unpin: Callable[[BlockUse], None]) -> None:
        """End its uses of blocks.

        Args:
            unpin: Ends the use of a block, because it is missing or will be freed.
        """
        for use in self.uses:
            if use.writer is self:
                use.writer = None
            if use.is_allocated and not use.is_dropped:
                use.pins -= 1
            else:
                unpin(use)

    def touches(self, block: int, *, write: bool) -> bool:
        """Return whether it must end before the host reads a block, or writes it."""
        launch = self.launch
        return block in launch.writes or (write and block in launch.reads)

    def failure(self) -> Exception | None:
        """Return its own error or an input's error, once it is done."""
        if self._failure is None:
            self._failure = self.event.error
            if self.after is not None:
                self._failure = self._failure or self._failed_input(self.after)
                # The list becomes empty instead of None, because for None the completer would look only at
                # the event, and miss this failure.
                self.after = []
        return self._failure

    def _failed_input(self, producers: list[InFlight]) -> InputFailedError | None:
        for producer in producers:
            cause = producer.failure()
            if cause is not None and not leaves_unchanged(cause):
                failed = InputFailedError(
                    f"an input was being written by {function_of(producer.launch.name)}, which failed; "
                    "make the input again, then ask again"
                )
                failed.__cause__ = cause
                return failed
        return None


class BlockUse:
    """The use of one block.

    Attributes:
        block: Its id.
        is_allocated: Whether it exists.
        is_dropped: Whether it is to be freed as soon as nothing uses it.
        pins: The number of operations in flight, and leases, that use it.
        writer: The operation in flight that writes it last.
        last_write: The last enqueued write, unless it is known to be done.
        reads: The reads since then, if any: the last of each stream.
        bound: References to its memory, which are dropped with it; None if there are none.
    """

    def __init__(self, block: int) -> None:
        self.block: int = block
        self.is_allocated: bool = False
        self.is_dropped: bool = False
        self.pins: int = 0
        self.writer: InFlight | None = None
        self.last_write: tuple[AccelStream, AccelEvent] | None = None
        self.reads: dict[AccelStream, AccelEvent] | None = None
        self.bound: list[Bound] | None = None

    def order(self, stream: AccelStream, wait: Callable[[AccelEvent], object], *, is_write: bool) -> None:
        """Make later work on a stream wait for all work that a read, or a write, must follow."""
        if self.last_write is not None:
            writer, written = self.last_write
            # A stream orders its own work, so waiting for its own event would only cost a driver call.
            if writer is not stream:
                if written.is_done:
                    # It is forgotten, so that later work need not check it.
                    self.last_write = None
                else:
                    wait(written)
        if is_write and self.reads:
            for reader, event in self.reads.items():
                if reader is not stream and not event.is_done:
                    wait(event)

    def read(self, stream: AccelStream, event: AccelEvent) -> None:
        """Record an enqueued read, which is done when the event is."""
        reads = self.reads
        if reads is None:
            self.reads = {stream: event}
            return
        if stream not in reads:
            # Remove completed reads, so that an array read by one stream after the other does not collect
            # events.
            for reader in [reader for reader, last_read in reads.items() if last_read.is_done]:
                del reads[reader]
        reads[stream] = event

    def write(self, stream: AccelStream, event: AccelEvent) -> None:
        """Record an enqueued write."""
        # Earlier reads precede this write, so waiting for it includes them.
        self.last_write = stream, event
        self.reads = None


class BlockUses(dict[int, BlockUse]):
    """The uses of blocks by id; a missing use is made when it is looked up."""

    __slots__ = ()

    def __missing__(self, block: int) -> BlockUse:
        use = self[block] = BlockUse(block)
        return use


class MemoryInUse:
    """The memory in use. Released blocks are freed as soon as no operation and no lease uses them.

    It also knows unfinished uses of blocks, for the hazards: read-after-write, write-after-read and
    write-after-write. Each stream orders its own work. Only the events of other streams are awaited, and only
    on the device: the host never waits.

    Args:
        device: The device.

    Attributes:
        fresh: The blocks with new addresses that the application does not know yet.
        uses: The uses of blocks that exist, or are in use.
    """

    __slots__ = ("_device", "fresh", "uses")

    def __init__(self, device: AccelDevice) -> None:
        self._device = device
        self.fresh: set[int] = set()
        self.uses: BlockUses = BlockUses()

    def adopt(self, blocks: Iterable[int]) -> None:
        """Take over existing blocks, from the previous context or from another device."""
        for block in blocks:
            self.uses[block].is_allocated = True

    def exchange(self, table: BlockTable, allocations: Sequence[tuple[int, int]]) -> None:
        """Free the blocks that the program has released, each once nothing uses it, and make others.

        Args:
            table: The released blocks.
            allocations: The ids and sizes of the others.

        Raises:
            OutOfMemoryError: See `allocate`.
        """
        if table.dropped:
            self.release_all(table.take_some())
        if allocations:
            self.allocate(allocations, table.make_room, table.drain)

    def allocate(
        self,
        blocks: Iterable[tuple[int, int]],
        make_room: Callable[[], None],
        drain: Callable[[], None] | None = None,
    ) -> None:
        """Make blocks; an existing block is made again in place.

        So a program that makes one result after the other uses the same block for all.

        Args:
            blocks: Their ids and sizes.
            make_room: Frees memory that nobody needs, after a collection of garbage.
            drain: Frees the dropped blocks without it, if some may be left.

        Raises:
            OutOfMemoryError: There is not enough memory, even after garbage was collected.
        """
        uses = self.uses
        for block, nbytes in blocks:
            use = uses.get(block)
            if use is not None and use.is_allocated:
                # D22: a new array has taken the id of a dropped block before it was freed.
                use.is_dropped = False
                # Later work must follow work that still runs, so its events stay.
                if not use.pins:
                    use.last_write = use.reads = None
                if block in self._device.validated_blocks:
                    self._device.renew(block)
                continue
            try:
                self._device.allocate(block, nbytes)
            except OutOfMemoryError as error:
                if error.requested > error.total:
                    # Garbage cannot free enough for it, and collecting it blocks the loop.
                    raise
                if drain is None or not self._fits(block, nbytes, drain):
                    make_room()
                    self._device.allocate(block, nbytes)
            self.fresh.add(block)
            uses[block].is_allocated = True

    def _fits(self, block: int, nbytes: int, drain: Callable[[], None]) -> bool:
        """Allocate a block after the dropped blocks are freed; return whether there is memory then."""
        drain()
        try:
            self._device.allocate(block, nbytes)
        except OutOfMemoryError:
            return False
        return True

    def order(
        self,
        stream: AccelStream,
        reads: Iterable[int],
        writes: Iterable[int],
        wait: Callable[[AccelEvent], object] | None = None,
    ) -> None:
        """Make a stream wait for all work that must precede work on these blocks.

        Args:
            stream: The stream.
            reads: The blocks to read.
            writes: The blocks to change.
            wait: Called for each event; None for `AccelStream.wait`, unless it is to be done later.
        """
        if self._device.validated_blocks:
            self.renew(writes)
        wait = wait or stream.wait
        use_of = self.uses.get
        for block in reads:
            use = use_of(block)
            if use is not None and use.last_write is not None and use.last_write[0] is not stream:
                use.order(stream, wait, is_write=False)
        for block in writes:
            use = use_of(block)
            if use is not None and (use.last_write is not None or use.reads is not None):
                use.order(stream, wait, is_write=True)

    def renew(self, blocks: Iterable[int]) -> None:
        """Make the device forget what it knows of blocks' contents, because they are to be written."""
        for block in blocks:
            if block in self._device.validated_blocks:
                self._device.renew(block)

    def release(self, block: int) -> None:
        """Free a block as soon as nothing uses it."""
        self.release_all((block,))

    def release_all(self, blocks: Iterable[int]) -> None:
        """Free blocks, each as soon as nothing uses it."""
        uses = self.uses
        for block in blocks:
            use = uses.get(block)
            if use is None or not use.is_allocated:
                # Its operation was withdrawn before the launch.
                continue
            if use.pins:
                use.is_dropped = True
            else:
                del uses[block]
                self.fresh.discard(block)
                if use.bound is not None:
                    for bound in use.bound:
                        bound.drop()
                self._device.free(block)

    def placed(self, block: int) -> PlacedBlock | None:
        """Return the place of a block in a retained chunk; None if it is freed, or will be."""
        use = self.uses.get(block)
        if use is None or not use.is_allocated or use.is_dropped:
            return None
        return self._device.placement(block)

    def pin(self, block: int) -> BlockUse:
        """Begin a use of a block."""
        use = self.uses[block]
        use.pins += 1
        return use

    def unpin_all(self, uses: Iterable[BlockUse]) -> None:
        """End uses of blocks."""
        for use in uses:
            self.unpin(use)

    def unpin(self, use: BlockUse) -> None:
        """End a use of a block."""
        use.pins -= 1
        if use.pins:
            return
        if use.is_dropped:
            self.release(use.block)
        elif not use.is_allocated:
            del self.uses[use.block]
