"""The order in which operations were handed over, kept until they are launched.

Library actors take their messages independently of each other, so an operation could be launched
before one that was handed over earlier and waits in another mailbox. Where both touch the same
memory and one of them writes, the later one waits for the launch of the earlier one; from there
on streams and events keep the order.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio

__all__ = ["SubmissionOrder", "Turn"]


class Turn:
    """One operation's place in the order. Made by `SubmissionOrder.enter`.

    Attributes:
        reads: Blocks that it reads.
        writes: Blocks that it changes.
        waits_for: How many others must be launched before.
        followers: Those that wait for this one, if there are any.
        ready: Set when it waits for none any more; made when somebody waits for that.
        is_leaving: Whether it is gone but for its place, which those behind it keep.
        is_over: Whether it has given its place up.
    """

    def __init__(self, reads: frozenset[int], writes: frozenset[int]) -> None:
        self.reads: frozenset[int] = reads
        self.writes: frozenset[int] = writes
        self.waits_for: int = 0
        self.followers: list[Turn] | None = None
        self.ready: trio.Event | None = None
        self.is_leaving: bool = False
        self.is_over: bool = False
        self._is_released = False

    @property
    def is_ready(self) -> bool:
        """Whether everything that must be launched before has been, or never will be."""
        return self.waits_for == 0 or self._is_released

    async def wait(self) -> None:
        """Wait until it is."""
        while not self.is_ready:
            self.ready = trio.Event()
            await self.ready.wait()

    def release(self) -> None:
        """Wait for nothing more: the order is of no account."""
        self._is_released = True
        if self.ready is not None:
            self.ready.set()

    def follow(self, other: Turn) -> None:
        """Come after another, unless that is over."""
        if other.is_over or other is self:
            return
        if other.followers is None:
            other.followers = []
        other.followers.append(self)
        self.waits_for += 1

    def end(self) -> list[Turn]:
        """Give the place up; returns those that may give up theirs now."""
        self.is_over = True
        followers, self.followers = self.followers, None
        if followers is None:
            return []
        for turn in followers:
            turn.waits_for -= 1
            if turn.is_ready and turn.ready is not None:
                turn.ready.set()
        return [turn for turn in followers if turn.is_leaving and not turn.waits_for]


class SubmissionOrder:
    """The operations that were handed over and not launched yet.

    There is no deadlock: an operation waits only for ones that were handed over before it, and
    each library takes its own in the order in which they were handed over.
    """

    __slots__ = ("_readers", "_writers")

    def __init__(self) -> None:
        # By block: the last turn that writes it, and the turns that read it since.
        self._writers: dict[int, Turn] = {}
        self._readers: dict[int, dict[Turn, None]] = {}

    def __len__(self) -> int:
        return len(self._writers) + len(self._readers)

    @property
    def is_empty(self) -> bool:
        """Whether no operation has a place in it."""
        return not self._writers and not self._readers

    def enter(self, reads: frozenset[int], writes: frozenset[int]) -> Turn:
        """Give the next operation its place."""
        turn = Turn(reads, writes)
        writers, readers = self._writers, self._readers
        for block in reads:
            if block in writes:
                continue
            if block in writers:
                turn.follow(writers[block])
            if block in readers:
                readers[block][turn] = None
            else:
                readers[block] = {turn: None}
        for block in writes:
            if block in writers:
                turn.follow(writers[block])
            if block in readers:
                # Later operations follow this write, and by it the readers: they need not be kept.
                for reader in readers.pop(block):
                    turn.follow(reader)
            writers[block] = turn
        return turn

    def leave(self, turn: Turn, made: Iterable[int] = ()) -> None:
        """Leave the order, launched or never to be: operations that wait for this one go on.

        An operation that was taken back while it waited keeps its place until its turn: later ones know of
        those before it by that place alone.

        Args:
            turn: Its place.
            made: Blocks that it was to make. No earlier operation uses these, so another one that makes them,
                once this one is taken back, does not come behind it.
        """
        turn.is_leaving = True
        if turn.waits_for or turn.is_over:
            for block in made:
                if self._writers.get(block) is turn:
                    del self._writers[block]
            return
        self._forget(turn)
        if turn.followers is None:
            turn.is_over = True
            return
        leaving = turn.end()
        while leaving:
            left = leaving.pop()
            self._forget(left)
            leaving += left.end()

    def _forget(self, turn: Turn) -> None:
        writers, readers = self._writers, self._readers
        for block in turn.writes:
            if block in writers and writers[block] is turn:
                del writers[block]
        for block in turn.reads:
            if block in readers and turn in readers[block]:
                del readers[block][turn]
                if not readers[block]:
                    del readers[block]
