"""Messages and descriptors between the application and a worker process."""

from __future__ import annotations

import array
import mmap
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import cast

import trio
from trio.lowlevel import enable_ki_protection

from ...base._waits import TaskNotifier
from ...completion._port import LONGEST_LOOK
from ._codec import PICKLED, Codec, Message, NonsenseError
from ._framing import (
    BUFFER,
    HEADER,
    LOST,
    MAX_DESCRIPTORS,
    MAX_LENGTH,
    RETRY,
    TRANSIENT,
    Received,
    close_all,
)
from ._outbox import Outbox
from ._shared_frame import SharedFrame
from ._spin_wait import SpinWait

__all__ = ["Channel", "EndOfChannel"]

# So many turns of the loop before the receiver sleeps, where answers come one after the other.
_TURNS = 2
# Where an answer is due, one polls for so many seconds in a row: as long as two turns of the loop take.
_POLL = 20e-6
# To read the socket in vain takes as long as so many looks at memory.
_LOOKS = 6
_ANCILLARY = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
# As plain numbers: members of an enumeration are put together by Python code.
# Other systems have no workers, but import this.
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_TRUNCATED = int(socket.MSG_CTRUNC)


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
        post: Sends a small message, together with others; see `Outbox.post`.
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
        # Without a call in between.
        self.send = outbox.send
        self.post = outbox.post
        self.run = outbox.run
        self._inbox = _Inbox(receives.decode, limit)
        # Where there is a `spin_wait`: the task that waits for messages, and the one that listens for them
        # meanwhile, which pauses from its first notice on until the other sleeps again.
        self._sleeper = TaskNotifier()
        self._listener = TaskNotifier()
        # Whether another task receives for a while.
        self._is_spinning = False
        # What it has received and leaves to the receiver.
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
        """The peer has something to answer."""
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
                    # Nobody can have answered yet, and to read in vain takes as long as half a turn.
                    continue
            else:
                try:
                    await self._sleep(pause)
                except trio.ClosedResourceError:
                    continue
            # From here on there is no checkpoint, so what is read is returned.
            if not self._is_spinning and not self._left:
                received = self._take(is_due=not pause)
                if received:
                    return received
                if self._inbox.is_refused:
                    # The socket counts as readable all the same.
                    await trio.sleep(RETRY)
        self._outbox.close()
        raise EndOfChannel("this end is closed" if self._is_closed else "the peer is gone") from (
            None if self._is_closed else self._inbox.error
        )

    @property
    def may_spin(self) -> bool:
        """Whether an answer is due so soon that the task that waits for it may `spin`."""
        if self.spin_wait is None or self._is_spinning or self._left:
            # What is left was there first.
            return False
        return not self.spin_wait.pause()

    async def spin(self, take: Callable[[list[Received]], bool], goes_on: Callable[[], bool]) -> None:
        """Poll for an answer in the task that waits for it, as long as it is due and `goes_on` says so.

        Then it need not be woken by the receiver, which takes a turn of the loop. The receiver sleeps
        meanwhile. Once the task is cancelled this returns, as it does at the end of the channel, and after a
        while in any case: Trio tells the main task of Ctrl-C only where it is parked.

        Args:
            take: Takes what was received if it is what the task waits for, or belongs to it, and says
                whether it has; what it has not is the receiver's.
            goes_on: Called between two polls.
        """
        assert self.spin_wait is not None
        self._is_spinning = True
        end = time.perf_counter() + LONGEST_LOOK
        try:
            while True:
                await trio.lowlevel.cancel_shielded_checkpoint()
                if self._inbox.is_at_end or not goes_on() or self.spin_wait.pause():
                    break
                received = self._take(is_due=True)
                if received and not take(received):
                    self._left = received
                    break
                if received and not goes_on():
                    break
                if trio.current_effective_deadline() == -inf or time.perf_counter() > end:
                    break
        finally:
            self._is_spinning = False
            received = [] if self._left else self._doze()
            if received and not take(received):
                self._left = received
            if self._left or self._inbox.is_at_end or self.spin_wait.pause() != inf:
                # Something is left, over or due: the receiver looks after it.
                self._sleeper.notify()
            self._listener.notify()

    def _take(self, *, is_due: bool) -> list[Received]:
        """Read what has arrived."""
        spin_wait, inbox = self.spin_wait, self._inbox
        if inbox.seen is not None:
            inbox.seen.wake()
        received = inbox.poll() or inbox.read(self._sock)
        if spin_wait is not None:
            if not received and is_due and spin_wait.is_near:
                received = self._poll()
            if received:
                spin_wait.received(received)
        return received

    def _poll(self) -> list[Received]:
        """Look for a short while: a turn of the loop takes longer than the answer does from here on."""
        inbox = self._inbox
        end = time.perf_counter() + _POLL
        received: list[Received] = []
        looks = 0
        while not (received or inbox.is_at_end) and time.perf_counter() < end:
            # Several answers that come together are sent.
            received = inbox.poll() if looks % _LOOKS else inbox.read(self._sock)
            looks += 1
        return received

    def _doze(self) -> list[Received]:
        """Poll no more for frames that are shown; returns one that was by then."""
        seen = self._inbox.seen
        if seen is None:
            return []
        seen.sleep()
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
        """The peer is dead: what it has sent is received, and no more, even if a child has its socket."""
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
            close_all(descriptors)
        self._left = []
        # A forked child may hold a copy of the socket: without this the peer would wait for it.
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with suppress(RuntimeError):  # outside of Trio nobody waits
            trio.lowlevel.notify_closing(self._sock)
            self._sleeper.notify()
            self._listener.notify()
        self._sock.close()


class _Inbox:
    """What was read and not yet returned: frames of the socket, and those that the peer shows in memory.

    Args:
        decode: Reads a payload.
        limit: The most bytes that one may have.

    Attributes:
        is_at_end: There is nothing more to read.
        error: Why, where the peer did not simply close its end.
        is_refused: The kernel had no memory to read with, for now.
        seen: Where the peer shows frames.
    """

    __slots__ = (
        "_buffer",
        "_descriptors",
        "_end",
        "_last",
        "_limit",
        "_read_payload",
        "_start",
        "_view",
        "error",
        "is_at_end",
        "is_refused",
        "seen",
    )

    def __init__(self, decode: Callable[[bytes | memoryview], Message | list[Message]], limit: int) -> None:
        self._read_payload = decode
        self._limit = limit
        self._buffer = memoryview(bytearray(BUFFER))
        # The buffer, or a larger one that holds just the frame that is coming.
        self._view = self._buffer
        self._start = 0
        self._end = 0
        self._descriptors: deque[int] = deque()
        # Number of the last frame that was returned.
        self._last = 0
        self.is_at_end: bool = False
        self.is_refused: bool = False
        self.error: Exception | None = None
        self.seen: SharedFrame | None = None

    def poll(self) -> list[Received]:
        """The next message, if it is shown in memory."""
        seen = self.seen
        if seen is None:
            return []
        number = self._last + 1
        payload = seen.take(number)
        if payload is None:
            return []
        self._last = number
        try:
            return _alone(self._read_payload(payload))
        except Exception as error:  # noqa: BLE001 - as in `read`
            self.is_at_end = True
            self.error = error.with_traceback(None)
            return []

    def read(self, sock: socket.socket) -> list[Received]:
        """Read once; return the messages that are complete by then."""
        received: list[Received] = []
        self.is_refused = False
        try:
            size, ancillary, flags, _ = sock.recvmsg_into(
                [self._view[self._end :] if self._end else self._view], _ANCILLARY, _CLOSE_ON_EXEC
            )
            if ancillary or flags & _TRUNCATED:
                self._take(ancillary, flags)
            self._end += size
            self.is_at_end = not size
            self._decode(received)
        except (BlockingIOError, InterruptedError):
            pass
        except Exception as error:  # noqa: BLE001 - a peer that sends nonsense is as good as gone
            self.is_refused = isinstance(error, OSError) and error.errno in TRANSIENT
            if not self.is_refused:
                self.is_at_end = True
                self.error = error.with_traceback(None)
        if self.is_at_end:
            # What it has shown at last was there before.
            received += self.poll()
        return received

    def close(self) -> None:
        """Drop everything; descriptors whose message was not returned are closed."""
        self.is_at_end = True
        self.seen = None
        close_all(self._descriptors)
        self._descriptors.clear()

    def _take(self, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                self._descriptors.extend(descriptors)
        if len(self._descriptors) > MAX_DESCRIPTORS:
            raise NonsenseError(f"{len(self._descriptors)} descriptors came that no message names")
        if flags & _TRUNCATED:
            # Of the message that is being read: the kernel hands over those of one at a time.
            self._descriptors.append(LOST)

    def _decode(self, received: list[Received]) -> None:
        """Append the messages that are complete, and make room for the next one."""
        view, start, end, ahead = self._view, self._start, self._end, HEADER.size
        needed = ahead
        while end - start >= ahead:
            length, count, number = HEADER.unpack_from(view, start)
            if length > self._limit:
                raise NonsenseError(f"a message of {length} bytes is too large; allowed: {self._limit}")
            begin = start + ahead
            if begin + length > end:
                needed += length
                break
            if number > self._last + 1:
                raise NonsenseError(f"frame {number} came behind frame {self._last}: others are missing")
            if number > self._last:
                self._last = number
                message = self._read_payload(view[begin : begin + length])
                if type(message) is not list:
                    received.append((cast("Message", message), self._claim(count) if count else ()))
                elif count:
                    raise NonsenseError("several messages came with descriptors")
                else:
                    # Several that were posted.
                    received.extend([(one, ()) for one in message])
            start = self._start = begin + length
        if start == end:
            self._view = self._buffer
            self._start = self._end = 0
        elif start + needed > len(view):
            self._make_room(needed)

    def _claim(self, count: int) -> tuple[int, ...]:
        """Take the descriptors of the next message that has some; `LOST` if one of them was."""
        claimed: list[int] = []
        while len(claimed) < count:
            descriptor = self._descriptors.popleft() if self._descriptors else None
            if descriptor is None or descriptor == LOST:
                close_all(claimed)
                if descriptor is None:
                    raise NonsenseError(f"a message came with {len(claimed)} descriptors instead of {count}")
                return (LOST,)
            claimed.append(descriptor)
        return tuple(claimed)

    def _make_room(self, needed: int) -> None:
        """Move the beginning of a frame to where the whole of it fits; happens once for each frame."""
        rest = self._view[self._start : self._end]
        # Memory that the system gives as it is filled: the frame may be announced, and never come.
        self._view = self._buffer if needed <= BUFFER else memoryview(mmap.mmap(-1, needed))
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)


def _alone(message: Message | list[Message]) -> list[Received]:
    if type(message) is list:
        raise NonsenseError("a frame that is shown holds one message")
    return [(cast("Message", message), ())]
