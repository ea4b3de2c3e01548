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
"""Takes messages, and returns whether it has taken them."""

# The turns of the loop before the receiver sleeps, while answers arrive one after the other.
_TURNS = 2
# The seconds of one poll for a due answer: as long as two turns of the loop take.
_POLL = 20e-6
# The number of polls between two checks for a cancellation.
_TURNS_TO_LOOK = 8
# A socket read without a result takes as long as this number of memory checks.
_LOOKS = 6


class EndOfChannel(Exception):  # noqa: N818 - an end, as Trio names it; only sometimes an error
    """The peer has ended, or this end was closed. All earlier data was received."""


class Channel:
    """One end of a connected Unix stream socket pair: complete messages, in order, with descriptors.

    `send` never blocks: data that the socket does not accept waits in an outbox, which `run` sends. One task
    receives. Reading and writing do not wait for each other, so that two ends with much data cannot block one
    another. The sender limits the waiting data.

    Once both ends `share` memory, a single frame to an awake peer is shown there instead of being sent.

    Args:
        sock: The socket, which now belongs to the channel.
        sends: The encoding of messages.
        receives: The encoding of the peer's messages.
        limit: The maximum bytes of a frame from the peer.

    Attributes:
        send: Sends a message; see `Outbox.send`.
        run: Sends waiting data, in a task; see `Outbox.run`.
        spin_wait: Determines when to stay awake for an answer, if `spin_with` was called.
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
        # The outbox's methods, bound directly to save a call.
        self.send = outbox.send
        self.run = outbox.run
        self._inbox = Inbox(receives.decode, limit)
        # With `spin_wait`, two tasks cooperate: one waits for messages, and the other listens for them
        # meanwhile. The listener pauses from its first notification until the receiver sleeps again.
        self._sleeper = TaskNotifier()
        self._listener = TaskNotifier()
        # Whether a caller's task receives for a while (`spin`).
        self._is_spinning = False
        self._spinner: tuple[trio.lowlevel.Task, float] | None = None
        # The messages that it has received and leaves to the receiver.
        self._left: list[Received] = []
        self._is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "broken" if self._outbox.is_broken else "open"
        return f"<Channel {state}, {self._outbox.pending_bytes} bytes to send>"

    def spin_with(self, spin_wait: SpinWait) -> None:
        """Stay awake for due answers from now on. Then a task must `listen`."""
        self.spin_wait = spin_wait
        self._outbox.asks = spin_wait.asks
        self._outbox.on_asked = self._asked

    def share(self, shown: SharedFrame, incoming: SharedFrame) -> None:
        """Show single frames to the awake peer, and take the peer's shown frames; after `spin_with`.

        Args:
            shown: The memory where the peer looks.
            incoming: The memory where the peer shows its frames.
        """
        if SharedFrame.is_possible():
            self._outbox.shown = shown
            self._inbox.seen = incoming

    @property
    def pending_bytes(self) -> int:
        """The number of encoded bytes that the socket has not accepted yet."""
        return self._outbox.pending_bytes

    def _asked(self) -> None:
        """Record that the peer has to answer."""
        if self._is_spinning and self._spinner is not None:
            # A task that drives its await by hand may have left its spin half-way, and would never end it.
            task, end = self._spinner
            if task is trio.lowlevel.current_task() or time.perf_counter() > end:
                self._is_spinning = False
                self._sleeper.notify()
                self._listener.notify()
        if self.spin_wait is not None and self.spin_wait.sent():
            # An answer is due.
            self._sleeper.notify()

    async def receive(self) -> list[Received]:
        """Wait for messages; cancelling it loses none.

        Returns:
            All arrived messages, at least one.

        Raises:
            EndOfChannel: There will be no more messages: the peer has ended or sent an invalid message (see
                the cause), or this end is closed.
        """
        spin_wait = self.spin_wait
        # Tasks that waited for the received messages run first, and may ask again. Sleeping would take as
        # long.
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
                    # The peer cannot have answered yet, and a useless read takes as long as half a turn.
                    continue
            else:
                try:
                    await self._sleep(pause)
                except trio.ClosedResourceError:
                    continue
            # Checkpoints are over here, so a cancellation cannot lose already read messages.
            if not self._is_spinning and not self._left:
                received = self._take(0.0 if pause else _POLL)
                if received:
                    return received
                if self._inbox.is_refused:
                    # The kernel lacked memory for the read, but the socket stays readable. Without a pause
                    # this loop would spin.
                    await trio.sleep(RETRY)
        self._outbox.close()
        raise EndOfChannel("this end is closed" if self._is_closed else "the peer is gone") from (
            None if self._is_closed else self._inbox.error
        )

    @property
    def may_spin(self) -> bool:
        """Whether an answer is due so soon that the waiting task may `spin`."""
        if self.spin_wait is None or self._is_spinning or self._left:
            # Remaining messages take precedence.
            return False
        return not self.spin_wait.pause()

    async def spin(self, take: Take, goes_on: Callable[[], bool]) -> None:
        """Poll for an answer in the waiting task; see `spin_together`."""
        await spin_together(((self, take),), goes_on)

    def begin_spin(self) -> None:
        """Leave only messages to the receiver that a polling task does not take, until `end_spin`."""
        self._is_spinning = True
        # The task asks nothing else while it spins, and no spin takes longer.
        self._spinner = trio.lowlevel.current_task(), time.perf_counter() + 2 * LONGEST_LOOK

    def poll(self, take: Take, seconds: float) -> bool | None:
        """Check once for a polling task; return whether its message has arrived, or None at the end."""
        assert self.spin_wait is not None
        if self._inbox.is_at_end or self.spin_wait.pause():
            return None
        received = self._take(seconds)
        if received and not take(received):
            self._left = received
            return None
        return bool(received)

    def end_spin(self, take: Take) -> None:
        """Leave the remaining messages to the receiver."""
        assert self.spin_wait is not None
        self._is_spinning, self._spinner = False, None
        received = [] if self._left else self._doze()
        if received and not take(received):
            self._left = received
        if self._left or self._inbox.is_at_end or self.spin_wait.pause() != inf:
            # Messages are left, the channel has ended, or an answer is due: the receiver takes over.
            self._sleeper.notify()
        # The listener has paused since its first notification, and waits for the socket again.
        self._listener.notify()

    def _take(self, seconds: float) -> list[Received]:
        """Read the arrived messages. If an answer is due, poll for this time."""
        spin_wait, inbox = self.spin_wait, self._inbox
        if inbox.seen is not None:
            # D44: from here on the peer may show frames instead of sending them, because this end checks once
            # more before it sleeps.
            inbox.seen.wake()
        received = inbox.poll() or inbox.read(self._sock)
        if spin_wait is not None:
            if not received and seconds and spin_wait.is_near:
                received = self._poll(seconds)
            if received:
                spin_wait.received(received)
        return received

    def _poll(self, seconds: float) -> list[Received]:
        """Poll for a short time, because a turn of the loop would take longer than the answer."""
        inbox = self._inbox
        end = time.perf_counter() + seconds
        received: list[Received] = []
        looks = 0
        while not (received or inbox.is_at_end) and time.perf_counter() < end:
            # Several answers at once are sent through the socket, so it is also read from time to time.
            received = inbox.poll() if looks % _LOOKS else inbox.read(self._sock)
            looks += 1
        return received

    def _doze(self) -> list[Received]:
        """Stop polling for shown frames; return any frame shown by then."""
        frame = self._inbox.seen
        if frame is None:
            return []
        frame.sleep()
        # D44: the flag is cleared before this check, so a frame shown in between is not missed.
        received = self._inbox.poll()
        if received and self.spin_wait is not None:
            self.spin_wait.received(received)
        return received

    @enable_ki_protection
    async def listen(self) -> None:
        """Notify the receiver of readable data, until the channel is closed; after `spin_with`.

        A task that waits for the socket itself must be cancelled for any other wake-up, which takes three
        times as long as waking a task that waits for another task.
        """
        with suppress(trio.ClosedResourceError):
            while not self._is_closed:
                await trio.lowlevel.wait_readable(self._sock)
                # A spinning task reads the socket itself, and the receiver continues to sleep.
                if not self._is_spinning:
                    self._sleeper.notify()
                await self._listener.wait()

    async def _sleep(self, seconds: float) -> None:
        """Wait until data is readable, at most for these seconds, or until another event is due.

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
        """Close this end at once. Unsent data is dropped, and waiting tasks are woken."""
        if self._is_closed:
            return
        self._is_closed = True
        self._outbox.close()
        self._inbox.close()
        for _, descriptors in self._left:
            # Their messages are dropped here. Open descriptors would leak, and keep chunks (D3).
            close_all(descriptors)
        self._left = []
        # D78: a forked child may hold a copy of the socket. Then `close` would not end the peer's wait.
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        # Trio must be notified before the descriptor is closed, because another file may soon get its number.
        with suppress(RuntimeError):  # outside of Trio no task waits
            trio.lowlevel.notify_closing(self._sock)
            self._sleeper.notify()
            self._listener.notify()
        self._sock.close()


async def spin_together(ends: Iterable[tuple[Channel, Take]], goes_on: Callable[[], bool]) -> None:
    """Poll for answers of several peers in the waiting task, while they are due and `goes_on` returns true.

    Then the receivers need not wake the task, which takes a turn of the loop for each. They sleep until their
    peer's answer has arrived. This returns once the task is cancelled, and after a while in any case, because
    Trio delivers Ctrl-C to the main task only while it is parked.

    Args:
        ends: Each channel with a function that takes messages if they belong to the task, and returns whether
            it has taken them; others are left to the receiver.
        goes_on: Called between two polls.
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
                received = channel.poll(take, seconds)
                if received is None:
                    del spinning[channel]
                    channel.end_spin(take)
                has_come = has_come or bool(received)
            if has_come and not goes_on():
                break
            turns += 1
            # Checking for a cancellation takes as long as the rest of a turn.
            is_cancelled = not turns % _TURNS_TO_LOOK and trio.current_effective_deadline() == -inf
            if is_cancelled or time.perf_counter() > end:
                break
    finally:
        for channel, take in spinning.items():
            channel.end_spin(take)


class SpinWait:
    """Determines when a message is due, so that the waiting task stays awake then.

    A sleeping processor takes long to wake up. So if the peer's last two answers took about the same time,
    its messages are polled for from some time before the next one is due until some time after.

    Args:
        window: The maximum seconds to stay awake for one message: half of them before it is due.
        asks: The first items of messages that are answered or followed by others.
        answers: The first items of these answers. Other messages in between are ignored.
    """

    def __init__(self, window: float, asks: frozenset[object], answers: frozenset[object]) -> None:
        self.asks: frozenset[object] = asks
        self.answers: frozenset[object] = answers
        self._half = window / 2
        self._forecast = LatencyEstimator(time.perf_counter())
        self._is_expected = False

    @property
    def is_steady(self) -> bool:
        """Whether the time of the next answer can be estimated."""
        return self._forecast.is_steady

    @property
    def is_near(self) -> bool:
        """Whether the answer is likely to arrive at about this time."""
        return self._is_expected and self._forecast.is_near(time.perf_counter())

    def sent(self) -> bool:
        """Record that a message with an expected answer was sent; return whether `pause` has changed."""
        if self._is_expected:
            return False
        self._is_expected = True
        self._forecast.begin(time.perf_counter())
        return self._forecast.is_steady

    def received(self, messages: Sequence[tuple[tuple[object, ...], object]]) -> None:
        """Record that messages have arrived, and perhaps an answer among them."""
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
        """Return the seconds for which the task may sleep; 0 while an answer is due, infinity without one."""
        forecast = self._forecast
        if not self._is_expected or not forecast.is_steady:
            return inf
        remaining = forecast.due - time.perf_counter()
        if remaining > self._half:
            return remaining - self._half
        if remaining > -self._half:
            return 0.0
        # The answer was late. Do not stay awake again until two times agree.
        forecast.is_steady = False
        return inf
