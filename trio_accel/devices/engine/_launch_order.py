"""The operations of one engine that wait to be launched, and which of them must come first."""

from __future__ import annotations

from collections.abc import Iterator

from ..base._order import SubmissionOrder, Turn
from ..operations._operation import Launch

__all__ = ["LaunchOrder"]


class LaunchOrder:
    """Gives operations and leases their turns, where anything depends on them.

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
        self._turns: dict[Launch, Turn | None] = {}
        self.has_turns: bool = False
        self.is_clear: bool = True
        # While they have not: the library of all that wait.
        self._library = ""

    def __contains__(self, launch: Launch) -> bool:
        return launch in self._turns

    def __iter__(self) -> Iterator[Launch]:
        return iter(self._turns)

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

    def turn(self, launch: Launch) -> Turn | None:
        """Whom an operation waits for; None where it waits for nobody."""
        return self._turns.get(launch)

    def enter_lease(self, block: int, *, write: bool) -> Turn:
        """Give a lease of a block its place."""
        self.make_turns()
        self.is_clear = False
        blocks = frozenset([block])
        return self._order.enter(frozenset() if write else blocks, blocks if write else frozenset())

    def leave_lease(self, turn: Turn) -> None:
        """The lease is over."""
        self._order.leave(turn)
        self.is_clear = not self._turns and self._order.is_empty

    def release_all(self) -> None:
        """Let all go on: the order is of no account any more."""
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
