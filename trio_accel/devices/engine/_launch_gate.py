"""Operations that wait to be launched: which of them must come first, and when each may."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import trio

from ..base._errors import WithdrawnError
from ..base._waits import SubmissionOrder, Turn
from ..operations._operation import Launch
from ._stream_queues import StreamQueue

__all__ = ["LaunchGate", "LaunchOrder"]


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
        # Before the thread: a plan may need memory that the program has let go.
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
        """Return the turn of an operation; None where it has none."""
        return self._turns.get(launch)

    def enter_lease(self, block: int, *, write: bool) -> Turn:
        """Give a lease of a block its place."""
        self.make_turns()
        self.is_clear = False
        blocks = frozenset([block])
        return self._order.enter(frozenset() if write else blocks, blocks if write else frozenset())

    def leave_lease(self, turn: Turn) -> None:
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
