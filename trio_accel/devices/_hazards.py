"""Order between streams: what work must wait for because of the memory it touches."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from ..backends.base import AccelEvent, AccelStream

__all__ = ["HazardTracker"]


@attrs.define(eq=False)
class _Access:
    """The unfinished work on one block: its last write and, since then, the last read of each stream."""

    write: tuple[AccelStream, AccelEvent] | None = None
    reads: dict[int, tuple[AccelStream, AccelEvent]] = attrs.field(
        factory=dict[int, tuple[AccelStream, AccelEvent]]
    )


class HazardTracker:
    """Read-after-write, write-after-read and write-after-write, by memory block.

    Work on one stream is ordered by the stream; only other streams' events are waited for, and
    only on the device: the host never waits.
    """

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: dict[int, _Access] = {}

    def order(self, stream: AccelStream, reads: Iterable[int], writes: Iterable[int]) -> None:
        """Make a stream wait for everything that work on these blocks must follow."""
        for block in reads:
            access = self._blocks.get(block)
            if access is not None:
                _wait(stream, access.write)
        for block in writes:
            access = self._blocks.get(block)
            if access is not None:
                _wait(stream, access.write)
                for read in access.reads.values():
                    _wait(stream, read)

    def record(
        self, stream: AccelStream, event: AccelEvent, reads: Iterable[int], writes: Iterable[int]
    ) -> None:
        """Remember work that was enqueued: `event` is done when it is."""
        for block in reads:
            reads_since = self._blocks.setdefault(block, _Access()).reads
            if id(stream) not in reads_since:
                # An array that is read for ever by one stream after the other keeps none that is done.
                for other in [other for other, (_, last) in reads_since.items() if last.is_done]:
                    del reads_since[other]
            reads_since[id(stream)] = (stream, event)
        for block in writes:
            # Earlier reads are ordered before this write, so whoever waits for it has waited for them.
            self._blocks[block] = _Access(write=(stream, event))

    def forget(self, block: int) -> None:
        """Drop the record of a block that is freed."""
        self._blocks.pop(block, None)


def _wait(stream: AccelStream, last: tuple[AccelStream, AccelEvent] | None) -> None:
    if last is not None:
        other, event = last
        if other is not stream and not event.is_done:
            stream.wait(event)
