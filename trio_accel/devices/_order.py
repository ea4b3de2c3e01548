"""The order in which operations were handed over, kept until they are launched.

Library actors take their messages independently of each other, so an operation could be launched
before one that was handed over earlier and waits in another mailbox. Where both touch the same
memory and one of them writes, the later one waits for the launch of the earlier one; from there
on streams and events keep the order.
"""

from __future__ import annotations

import trio

__all__ = ["SubmissionOrder", "Turn"]


class Turn:
    """One operation's place in the order. Made by `SubmissionOrder.enter`.

    Attributes:
        reads: Blocks that it reads.
        writes: Blocks that it changes.
        waits_for: How many others must be launched before.
        followers: Those that wait for this one.
        ready: Set when it waits for none any more; made when somebody waits for that.
    """

    __slots__ = ("_is_over", "followers", "reads", "ready", "waits_for", "writes")

    def __init__(self, reads: frozenset[int], writes: frozenset[int]) -> None:
        self.reads: frozenset[int] = reads
        self.writes: frozenset[int] = writes
        self.waits_for: int = 0
        self.followers: list[Turn] = []
        self.ready: trio.Event | None = None
        self._is_over = False

    @property
    def is_ready(self) -> bool:
        """Whether everything that must be launched before has been, or never will be."""
        return self.waits_for <= 0

    async def wait(self) -> None:
        """Wait until it is."""
        while not self.is_ready:
            self.ready = trio.Event()
            await self.ready.wait()

    def release(self) -> None:
        """Wait for nothing more: the order is of no account."""
        self.waits_for = 0
        if self.ready is not None:
            self.ready.set()

    def follow(self, other: Turn) -> None:
        """Come after another, unless that is over."""
        if not other._is_over and other is not self:
            other.followers.append(self)
            self.waits_for += 1

    def end(self) -> bool:
        """It was launched, or never will be; returns False if that was known."""
        if self._is_over:
            return False
        self._is_over = True
        for turn in self.followers:
            turn.waits_for -= 1
            if turn.is_ready and turn.ready is not None:
                turn.ready.set()
        self.followers.clear()
        return True


class SubmissionOrder:
    """The operations that were handed over and not launched yet.

    There is no deadlock: an operation waits only for ones that were handed over before it, and
    each library takes its own in the order in which they were handed over.
    """

    __slots__ = ("_readers", "_writers")

    def __init__(self) -> None:
        # By block: the last that writes it, and those that read it since.
        self._writers: dict[int, Turn] = {}
        self._readers: dict[int, list[Turn]] = {}

    def __len__(self) -> int:
        return len(self._writers) + len(self._readers)

    def enter(self, reads: frozenset[int], writes: frozenset[int]) -> Turn:
        """Give the next operation its place."""
        turn = Turn(reads, writes)
        for block in reads | writes:
            writer = self._writers.get(block)
            if writer is not None:
                turn.follow(writer)
        for block in writes:
            for reader in self._readers.pop(block, ()):
                turn.follow(reader)
            self._writers[block] = turn
        for block in reads - writes:
            self._readers.setdefault(block, []).append(turn)
        return turn

    def leave(self, turn: Turn) -> None:
        """An operation was launched, or never will be: those that wait for it go on."""
        if not turn.end():
            return
        for block in turn.writes:
            if self._writers.get(block) is turn:
                del self._writers[block]
        for block in turn.reads - turn.writes:
            readers = self._readers.get(block)
            if readers is not None and turn in readers:
                readers.remove(turn)
                if not readers:
                    del self._readers[block]
