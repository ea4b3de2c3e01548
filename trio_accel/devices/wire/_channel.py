"""Messages and descriptors between the application and a worker process."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import inf
from typing import TypeAlias

import trio
from trio.lowlevel import enable_ki_protection

from ..base._port import LONGEST_LOOK, LatencyEstimator
from ..base._waits import TaskNotifier
from ._frames import MAX_LENGTH, RETRY, Inbox, Outbox, Received, close_all
from ._protocol import PICKLED, Codec, SharedFrame

Take: TypeAlias = Callable[[list[Received]], bool]
"""Takes messages, and says whether it has."""

# Turns of the loop before the receiver sleeps, where answers come one after the other.
_TURNS = 2
# Seconds of one poll where an answer is due: as long as two turns of the loop take.
_POLL = 20e-6
# Polls between two looks for a cancellation.
_TURNS_TO_LOOK = 8
# A read of the socket in vain takes as long as so many looks at memory.
_LOOKS = 6


class EndOfChannel(Exception):  # noqa: N818 - an end, as Trio names it; only sometimes an error
    """The peer is gone, or this end was closed; everything that came before was received."""


class Channel:
    """One end of a connected pair of Unix stream sockets: whole messages, in order, with descriptors.

    `send` never blocks: what the socket does not take waits in an outbox, which `run` empties. One
    task receives. Reading does not wait for writing nor the other way round, so that two ends that
    both have much to say cannot block one another. How much may wait is up to the sender.

    Once both `share` memory, a lone frame to a peer that is awake is not sent, but shown there.

    Args:
        sock: The socket, which belongs to the channel from here on.
        sends: How messages are written.
        receives: How the peer's are read.
        limit: The most bytes that a frame of the peer may have.

    Attributes:
        send: Sends a message; see `Outbox.send`.
        run: Sends what waits, in a task; see `Outbox.run`.
        spin_wait: Tells when to stay awake for an answer, if `spin_with` was called.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        sends: Codec = PICKLED,
        receives: Codec = PICKLED,
        limit: int = MAX_LENGTH,
    ) -> None:
        sock.setblocking(False)
        self.spin_wait: SpinWait | None = None
        self._sock = sock
        self._outbox = outbox = Outbox(sock, sends)
        # The methods are those of the outbox, without a call in between.
        self.send = outbox.send
        self.run = outbox.run
        self._inbox = Inbox(receives.decode, limit)
        # Two tasks take turns where there is a `spin_wait`: the one that waits for messages, and the one that
        # listens for them meanwhile. The listener pauses from its first notice on until the other sleeps
        # again.
        self._sleeper = TaskNotifier()
        self._listener = TaskNotifier()
        # Whether an asker's task receives for a while (`spin`).
        self._is_spinning = False
        # Messages that it has received and leaves to the receiver.
        self._left: list[Received] = []
        self._is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "broken" if self._outbox.is_broken else "open"
        return f"<Channel {state}, {self._outbox.pending_bytes} bytes to send>"

    def spin_with(self, spin_wait: SpinWait) -> None:
        """Stay awake for answers that are due, from now on. Then a task must `listen`."""
        self.spin_wait = spin_wait
        self._outbox.asks = spin_wait.asks
        self._outbox.on_asked = self._asked

    def share(self, shown: SharedFrame, seen: SharedFrame) -> None:
        """Show lone frames to the peer while it is awake, and take those that it shows; after `spin_with`.

        Args:
            shown: Where the peer looks.
            seen: Where it shows its own.
        """
        if SharedFrame.is_possible():
            self._outbox.shown = shown
            self._inbox.seen = seen

    @property
    def pending_bytes(self) -> int:
        """Bytes that are encoded, and that the socket has not taken yet."""
        return self._outbox.pending_bytes

    def _asked(self) -> None:
        """Note that the peer has something to answer."""
        if self.spin_wait is not None and self.spin_wait.sent():
            # An answer is due.
            self._sleeper.notify()

    async def receive(self) -> list[Received]:
        """Wait for messages; cancelling it loses none.

        Returns:
            All that have arrived, at least one.

        Raises:
            EndOfChannel: There will be no more: the peer is gone or sent something that is no
                message (the cause says what), or this end is closed.
        """
        spin_wait = self.spin_wait
        # Tasks that have waited for what was received go first, and may ask again: to sleep takes as long.
        turns = 0 if spin_wait is None or not spin_wait.is_steady else _TURNS
        while self._left or not (self._is_closed or self._inbox.is_at_end):
            if self._left:
                received, self._left = self._left, []
                return received
            pause = inf if spin_wait is None or self._is_spinning else spin_wait.pause()
            if not pause:
                await trio.lowlevel.checkpoint()
            elif turns and not self._is_spinning:
                turns -= 1
                await trio.lowlevel.checkpoint()
                if turns:
                    # The peer cannot have answered yet, and to read in vain takes as long as half a turn.
                    continue
            else:
                try:
                    await self._sleep(pause)
                except trio.ClosedResourceError:
                    continue
            # From here on there is no checkpoint: a cancellation cannot lose messages that were read.
            if not self._is_spinning and not self._left:
                received = self._take(0.0 if pause else _POLL)
                if received:
                    return received
                if self._inbox.is_refused:
                    # The kernel had no memory for the read, but the socket stays readable: without a pause
                    # this would spin.
                    await trio.sleep(RETRY)
        self._outbox.close()
        raise EndOfChannel("this end is closed" if self._is_closed else "the peer is gone") from (
            None if self._is_closed else self._inbox.error
        )

    @property
    def may_spin(self) -> bool:
        """Whether an answer is due so soon that the task that waits for it may `spin`."""
        if self.spin_wait is None or self._is_spinning or self._left:
            # Messages that are left over came first.
            return False
        return not self.spin_wait.pause()

    async def spin(self, take: Take, goes_on: Callable[[], bool]) -> None:
        """Poll for an answer in the task that waits for it; see `spin_together`."""
        await spin_together(((self, take),), goes_on)

    def begin_spin(self) -> None:
        """Leave to the receiver only what a task does not take that polls, until `end_spin`."""
        self._is_spinning = True

    def poll(self, take: Take, seconds: float) -> bool | None:
        """Look once for what a task waits for that polls; returns whether it has come, or None at the end."""
        assert self.spin_wait is not None
        if self._inbox.is_at_end or self.spin_wait.pause():
            return None
        received = self._take(seconds)
        if received and not take(received):
            self._left = received
            return None
        return bool(received)

    def end_spin(self, take: Take) -> None:
        """Leave the rest to the receiver."""
        assert self.spin_wait is not None
        self._is_spinning = False
        received = [] if self._left else self._doze()
        if received and not take(received):
            self._left = received
        if self._left or self._inbox.is_at_end or self.spin_wait.pause() != inf:
            # Something is left, over or due: the receiver looks after it.
            self._sleeper.notify()
        # The listener has paused since its first notice: it waits for the socket again.
        self._listener.notify()

    def _take(self, seconds: float) -> list[Received]:
        """Read what has arrived; where an answer is near, look for so long."""
        spin_wait, inbox = self.spin_wait, self._inbox
        if inbox.seen is not None:
            # D44: from here on the peer may show frames in place of sending them, as this end looks once more
            # before it sleeps.
            inbox.seen.wake()
        received = inbox.poll() or inbox.read(self._sock)
        if spin_wait is not None:
            if not received and seconds and spin_wait.is_near:
                received = self._poll(seconds)
            if received:
                spin_wait.received(received)
        return received

    def _poll(self, seconds: float) -> list[Received]:
        """Look for a short while: a turn of the loop takes longer than the answer does from here on."""
        inbox = self._inbox
        end = time.perf_counter() + seconds
        received: list[Received] = []
        looks = 0
        while not (received or inbox.is_at_end) and time.perf_counter() < end:
            # Several answers that come together are sent by the socket, so it is read now and then, too.
            received = inbox.poll() if looks % _LOOKS else inbox.read(self._sock)
            looks += 1
        return received

    def _doze(self) -> list[Received]:
        """Poll no more for frames that are shown; returns one that was by then."""
        seen = self._inbox.seen
        if seen is None:
            return []
        seen.sleep()
        # D44: the flag is down before this look, so a frame that was shown in between is not missed.
        received = self._inbox.poll()
        if received and self.spin_wait is not None:
            self.spin_wait.received(received)
        return received

    @enable_ki_protection
    async def listen(self) -> None:
        """Tell the receiver when there is something to read, until the channel is closed; after `spin_with`.

        A task that waits for the socket itself has to be cancelled to be woken by anything else, which takes
        three times as long as to wake one that waits for another task.
        """
        with suppress(trio.ClosedResourceError):
            while not self._is_closed:
                await trio.lowlevel.wait_readable(self._sock)
                # A task that spins reads the socket itself, and the receiver sleeps on.
                if not self._is_spinning:
                    self._sleeper.notify()
                await self._listener.wait()

    async def _sleep(self, seconds: float) -> None:
        """Wait until there is something to read, for so long at most, or until something else is due.

        Raises:
            trio.ClosedResourceError: This end is closed.
        """
        if self.spin_wait is None:
            await trio.lowlevel.wait_readable(self._sock)
            return
        if not self._is_spinning:
            self._left = self._doze()
            if self._left:
                return
        self._listener.notify()
        if seconds == inf:
            await self._sleeper.wait()
            return
        with trio.move_on_after(seconds):
            await self._sleeper.wait()

    def expect_no_more(self) -> None:
        """End after the messages that a dead peer has sent, even if a child has its socket."""
        if not self._is_closed:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end at once; what was not sent is dropped, and tasks that wait are woken."""
        if self._is_closed:
            return
        self._is_closed = True
        self._outbox.close()
        self._inbox.close()
        for _, descriptors in self._left:
            # They came for messages that are dropped here: left open they would leak, and keep chunks (D3).
            close_all(descriptors)
        self._left = []
        # D78: a forked child may hold a copy of the socket, and then `close` alone would not end the peer's
        # wait.
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        # Trio has to hear of the end before the descriptor is closed: its number may soon be another's.
        with suppress(RuntimeError):  # outside of Trio no task waits
            trio.lowlevel.notify_closing(self._sock)
            self._sleeper.notify()
            self._listener.notify()
        self._sock.close()


async def spin_together(ends: Iterable[tuple[Channel, Take]], goes_on: Callable[[], bool]) -> None:
    """Poll for answers of several peers in the task that waits for them, while due and `goes_on` says so.

    Then it need not be woken by the receivers, which takes a turn of the loop for each. They sleep until the
    answer of their peer has come. Once the task is cancelled this returns, as it does after a while in any
    case: Trio tells the main task of Ctrl-C only where it is parked.

    Args:
        ends: Each with what takes messages that were received, if they are what the task waits for or belong
            to it, and says whether it has; what it has not is the receiver's.
        goes_on: Called between two looks.
    """
    spinning = dict(ends)
    for channel in spinning:
        channel.begin_spin()
    seconds, end = _POLL / len(spinning), time.perf_counter() + LONGEST_LOOK
    turns = 0
    try:
        while spinning:
            await trio.lowlevel.cancel_shielded_checkpoint()
            if not goes_on():
                break
            has_come = False
            for channel, take in tuple(spinning.items()):
                found = channel.poll(take, seconds)
                if found is None:
                    del spinning[channel]
                    channel.end_spin(take)
                has_come = has_come or bool(found)
            if has_come and not goes_on():
                break
            turns += 1
            # To ask Trio for a cancellation takes as long as the rest of a turn.
            is_cancelled = not turns % _TURNS_TO_LOOK and trio.current_effective_deadline() == -inf
            if is_cancelled or time.perf_counter() > end:
                break
    finally:
        for channel, take in spinning.items():
            channel.end_spin(take)


class SpinWait:
    """Tells when a message is due, so that the task that waits for it does not sleep then.

    A processor that has slept takes long to wake. So where the peer has taken about as long for its last
    two answers, its messages are looked for from a while before the next is due until a while after.

    Args:
        window: The most seconds to stay awake for one message: half of them before it is due.
        asks: First items of the messages that something answers, or follows.
        answers: First items of the messages that do. Others may come and go in between, and mean nothing.
    """

    def __init__(self, window: float, asks: frozenset[object], answers: frozenset[object]) -> None:
        self.asks: frozenset[object] = asks
        self.answers: frozenset[object] = answers
        self._half = window / 2
        self._forecast = LatencyEstimator(time.perf_counter())
        self._is_expected = False

    @property
    def is_steady(self) -> bool:
        """Whether the next answer can be told."""
        return self._forecast.is_steady

    @property
    def is_near(self) -> bool:
        """Whether the answer is likely to come in these moments."""
        return self._is_expected and self._forecast.is_near(time.perf_counter())

    def sent(self) -> bool:
        """Note that something was sent that is answered; returns whether `pause` has changed."""
        if self._is_expected:
            return False
        self._is_expected = True
        self._forecast.begin(time.perf_counter())
        return self._forecast.is_steady

    def received(self, messages: Sequence[tuple[tuple[object, ...], object]]) -> None:
        """Note that messages have come, and among them perhaps an answer."""
        if self._is_expected:
            answers = self.answers
            for message, _ in messages:
                if message[0] in answers:
                    self._end()
                    break

    def _end(self) -> None:
        self._is_expected = False
        self._forecast.end(time.perf_counter())

    def pause(self) -> float:
        """Return the seconds for which one may sleep; 0 while an answer is due, infinity if none is."""
        forecast = self._forecast
        if not self._is_expected or not forecast.is_steady:
            return inf
        left = forecast.due - time.perf_counter()
        if left > self._half:
            return left - self._half
        if left > -self._half:
            return 0.0
        # The answer did not come when it was due: stay awake no more until the times agree again.
        forecast.is_steady = False
        return inf
