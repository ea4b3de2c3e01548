"""Messages and descriptors between the application and a worker process."""

from __future__ import annotations

import array
import errno
import mmap
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import TypeAlias, cast

import trio
from trio.lowlevel import enable_ki_protection

from ...base._nudge import Nudge
from ...completion._port import LONGEST_LOOK
from ._codec import PICKLED, Codec, Message, NonsenseError
from ._shared_frame import SharedFrame
from ._spin_wait import Vigil

__all__ = ["LOST", "MAX_DESCRIPTORS", "Channel", "EndOfChannel", "Message", "Received"]

Received: TypeAlias = tuple[Message, tuple[int, ...]]
"""A message and the descriptors that came with it, which belong to the receiver.

`LOST` stands for all of them if too many files are open in the process that receives.
"""

MAX_DESCRIPTORS = 16
"""Descriptors that one message can carry."""

LOST = -1
"""In place of the descriptors of a message that were lost."""

# Length of the pickle, number of descriptors, place among all frames.
_HEADER = struct.Struct("<IBQ")
_MAX_LENGTH = 2**32 - 1
# One read takes at most so much, and one write gathers about so much.
_BUFFER = 256 * 1024
# A frame from this size on is sent alone, which saves a copy.
_LARGE = 64 * 1024
# So many messages that were posted travel in one frame.
_POSTED = 64
# So many system calls in a row before the writer lets other tasks run.
_BURST = 8
# The kernel has no memory, or too many descriptors are on their way to processes that do not read:
# a socket counts as writable all the same, so the writer looks again after a while.
_TRANSIENT = frozenset({errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})
_RETRY = 0.005
# So many turns of the loop before the receiver sleeps, where answers come one after the other.
_TURNS = 2
# Where an answer is due, so many seconds in a row: as long as two turns of the loop take.
_GLANCE = 20e-6
# To read in vain takes as long as so many looks at memory.
_LOOKS = 6
_ANCILLARY = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
# As plain numbers: members of an enumeration are put together by Python code.
# Other systems have no workers, but import this.
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_TRUNCATED = int(socket.MSG_CTRUNC)
_NO_SIGNAL = int(getattr(socket, "MSG_NOSIGNAL", 0))


def _never() -> bool:
    return False


class EndOfChannel(Exception):  # noqa: N818 - an end, as Trio names it; only sometimes an error
    """The peer is gone, or this end was closed; everything that came before was received."""


class Channel:
    """One end of a connected pair of Unix stream sockets: whole messages, in order, with descriptors.

    `send` never blocks: what the socket does not take waits in an outbox, which `run` empties. One
    task receives. Reading does not wait for writing nor the other way round, so that two ends that
    both have much to say cannot block one another. How much may wait is up to the sender.

    A frame holds one message, or several that were posted: to encode these together takes less time and
    fewer bytes, as what they have in common is written once. One that carries descriptors is sent by a system
    call of its own: the kernel hands them over with its first byte, so they come in the order of the frames
    that name their number.

    Once both `share` memory, a lone frame to a peer that is awake is not sent, but shown there.

    Args:
        sock: The socket, which belongs to the channel from here on.
        sends: How messages are written.
        receives: How the peer's are read.
        limit: The most bytes that a frame of the peer may have.

    Attributes:
        vigil: Is told of what is sent and received, if anybody wants to know; then a task
            must `listen`.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        sends: Codec = PICKLED,
        receives: Codec = PICKLED,
        limit: int = _MAX_LENGTH,
    ) -> None:
        sock.setblocking(False)
        self.vigil: Vigil | None = None
        self._codec = sends
        self._encode = sends.encode
        self._sock = sock
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()
        # Messages behind those of the outbox, that are not encoded yet.
        self._posted: list[Message] = []
        # What is being sent: the rest of one or several frames, and descriptors that go with its start.
        self._rest: bytes | memoryview | None = None
        self._attached: tuple[int, ...] = ()
        self._pending_bytes = 0
        self._inbox = _Inbox(receives.decode, limit)
        # How many frames there were; where they are shown; what the last holds, while it is shown alone.
        self._frames = 0
        self._shown: SharedFrame | None = None
        self._held: bytes | None = None
        self._is_refused = False
        # Whether there is something to be sent that is answered.
        self._asks = False
        self._work = Nudge()
        # Where there is a vigil: whoever waits for messages, and who listens for them meanwhile, which pauses
        # from its first ring on until the other sleeps again.
        self._sleeper = Nudge()
        self._ringer = Nudge()
        # Whether another task receives for a while.
        self._is_attended = False
        # What it has received and leaves to the receiver.
        self._left: list[Received] = []
        self._is_broken = False
        self._is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "broken" if self._is_broken else "open"
        return f"<Channel {state}, {self._pending_bytes} bytes to send>"

    def share(self, shown: SharedFrame, seen: SharedFrame) -> None:
        """Show lone frames to the peer while it is awake, and take those that it shows. Takes a vigil.

        Args:
            shown: Where the peer looks.
            seen: Where it shows its own.
        """
        if SharedFrame.is_possible():
            self._shown = shown
            self._inbox.seen = seen

    @property
    def pending_bytes(self) -> int:
        """Bytes that are encoded, and that the socket has not taken yet."""
        return self._pending_bytes

    def send(self, message: Message, descriptors: Sequence[int] = (), *, now: bool = False) -> None:
        """Put a message into the outbox; once the channel is broken or closed, do nothing.

        The message is encoded and its descriptors are duplicated here and now.

        Args:
            message: Plain values.
            descriptors: At most `MAX_DESCRIPTORS` that the peer shall have too.
            now: Try to send it right here if nothing waits: a lone message saves the way through
                the writer, many in a row are cheaper together.

        Raises:
            ValueError: Too many descriptors, or 4 GiB and more.
            OSError: A descriptor cannot be duplicated.
        """
        if self._is_broken:
            return
        self._note(message)
        payload = self._encode(message)
        if len(payload) > _MAX_LENGTH or len(descriptors) > MAX_DESCRIPTORS:
            raise ValueError(
                f"a message of {len(payload)} bytes with {len(descriptors)} descriptors is too large; "
                f"allowed: {_MAX_LENGTH} bytes, {MAX_DESCRIPTORS} descriptors"
            )
        if now and not descriptors and self._is_lone and self._show(payload):
            return
        copies = _duplicates(descriptors) if descriptors else ()
        self._encode_posted()
        is_first = self._rest is None and not self._outbox
        self._put(payload, copies)
        if not (now and is_first and self._flush(1)):
            self._work.wake()

    def post(self, message: Message, *, now: bool = False, payload: bytes | None = None) -> None:
        """Put a small message into the outbox, that is encoded when it is sent; see `send`.

        Args:
            message: Real numbers, strings, bytes, None and tuples of these.
            now: Try to send it right here, with what was posted before it, unless the socket is full.
            payload: What the channel's codec makes of it, if that was called by now.
        """
        if self._is_broken:
            return
        self._note(message)
        if now and self._is_lone:
            payload = payload or self._encode(message)
            if not self._show(payload):
                self._put(payload)
                if not self._flush(1):
                    self._work.wake()
            return
        self._posted.append(message)
        if not (now and self._rest is None and self._flush(1)) and len(self._posted) <= 1:
            self._work.wake()

    @enable_ki_protection
    async def run(self) -> None:
        """Send what the outbox holds, until the channel is closed or the peer is gone.

        Cancelling it loses nothing: it may be run again.
        """
        while not self._is_broken:
            if self._flush(_BURST):
                if not self._is_broken:
                    await self._work.wait()
            elif self._is_refused:
                await trio.sleep(_RETRY)
            else:
                with suppress(trio.ClosedResourceError):
                    await trio.lowlevel.wait_writable(self._sock)

    async def receive(self) -> list[Received]:
        """Wait for messages; cancelling it loses none.

        Returns:
            All that have arrived, at least one.

        Raises:
            EndOfChannel: There will be no more: the peer is gone or sent something that is no
                message (the cause says what), or this end is closed.
        """
        vigil = self.vigil
        # Whoever has waited for what was received goes first, and may ask again: to sleep takes as long.
        turns = 0 if vigil is None or not vigil.is_steady else _TURNS
        while self._left or not (self._is_closed or self._inbox.is_at_end):
            if self._left:
                received, self._left = self._left, []
                return received
            pause = inf if vigil is None or self._is_attended else vigil.pause()
            if not pause:
                await trio.lowlevel.checkpoint()
            elif turns and not self._is_attended:
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
            if not self._is_attended and not self._left:
                received = self._take(is_due=not pause)
                if received:
                    return received
                if self._inbox.is_refused:
                    # The socket counts as readable all the same.
                    await trio.sleep(_RETRY)
        self._break()
        raise EndOfChannel("this end is closed" if self._is_closed else "the peer is gone") from (
            None if self._is_closed else self._inbox.error
        )

    @property
    def is_awaited(self) -> bool:
        """Whether an answer is due so soon that whoever waits for it may `attend`."""
        if self.vigil is None or self._is_attended or self._left:
            # What is left was there first.
            return False
        return not self.vigil.pause()

    async def attend(
        self,
        take: Callable[[list[Received]], bool],
        goes_on: Callable[[], bool],
        is_shown: Callable[[], bool] = _never,
    ) -> None:
        """Look for an answer in the task that waits for it, as long as it is due and `goes_on` says so.

        Then it need not be woken by the receiver, which takes a turn of the loop. The receiver sleeps
        meanwhile. Once the task is cancelled this returns, as it does at the end of the channel, and after a
        while in any case: Trio tells the main task of Ctrl-C only where it is parked.

        Args:
            take: Takes what was received if it is what the task waits for, or belongs to it, and says
                whether it has; what it has not is the receiver's.
            goes_on: Called between two looks.
            is_shown: Whether it is to be called at once.
        """
        assert self.vigil is not None
        self._is_attended = True
        end = time.perf_counter() + LONGEST_LOOK
        try:
            while True:
                await trio.lowlevel.cancel_shielded_checkpoint()
                if self._inbox.is_at_end or not goes_on() or self.vigil.pause():
                    break
                received = self._take(is_due=True, is_shown=is_shown)
                if received and not take(received):
                    self._left = received
                    break
                if (received or is_shown()) and not goes_on():
                    break
                if trio.current_effective_deadline() == -inf or time.perf_counter() > end:
                    break
        finally:
            self._is_attended = False
            received = [] if self._left else self._doze()
            if received and not take(received):
                self._left = received
            if self._left or self._inbox.is_at_end or self.vigil.pause() != inf:
                # Something is left, over or due: the receiver looks after it.
                self._sleeper.wake()
            self._ringer.wake()

    def _take(self, *, is_due: bool, is_shown: Callable[[], bool] = _never) -> list[Received]:
        """Read what has arrived."""
        vigil, inbox = self.vigil, self._inbox
        if inbox.seen is not None:
            inbox.seen.wake()
        received = inbox.look() or inbox.read(self._sock)
        if vigil is not None:
            if not received and is_due and vigil.is_near:
                received = self._glance(is_shown)
            if received:
                vigil.received(received)
        return received

    def _glance(self, is_shown: Callable[[], bool]) -> list[Received]:
        """Look for a short while: a turn of the loop takes longer than the answer does from here on."""
        inbox = self._inbox
        end = time.perf_counter() + _GLANCE
        received: list[Received] = []
        looks = 0
        while not (received or inbox.is_at_end or is_shown()) and time.perf_counter() < end:
            # Several answers that come together are sent.
            received = inbox.look() if looks % _LOOKS else inbox.read(self._sock)
            looks += 1
        return received

    def _doze(self) -> list[Received]:
        """Look no more for frames that are shown; returns one that was by then."""
        seen = self._inbox.seen
        if seen is None:
            return []
        seen.sleep()
        received = self._inbox.look()
        if received and self.vigil is not None:
            self.vigil.received(received)
        return received

    @enable_ki_protection
    async def listen(self) -> None:
        """Tell the receiver when there is something to read, until the channel is closed.

        Of a channel with a vigil. A task that waits for the socket itself has to be cancelled to be woken by
        anything else, which takes three times as long as to wake one that waits for another task.
        """
        with suppress(trio.ClosedResourceError):
            while not self._is_closed:
                await trio.lowlevel.wait_readable(self._sock)
                if not self._is_attended:
                    self._sleeper.wake()
                await self._ringer.wait()

    async def _sleep(self, seconds: float) -> None:
        """Wait until there is something to read, for so long at most, or until something else is due.

        Raises:
            trio.ClosedResourceError: This end is closed.
        """
        if self.vigil is None:
            await trio.lowlevel.wait_readable(self._sock)
            return
        if not self._is_attended:
            self._left = self._doze()
            if self._left:
                return
        self._ringer.wake()
        if seconds == inf:
            await self._sleeper.wait()
            return
        with trio.move_on_after(seconds):
            await self._sleeper.wait()

    def expect_no_more(self) -> None:
        """The peer is dead: what it has sent is received, then this is the end, whoever holds its socket."""
        if not self._is_closed:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end at once; what was not sent is dropped, and whoever waits is woken."""
        if self._is_closed:
            return
        self._is_closed = True
        self._break()
        self._inbox.close()
        for _, descriptors in self._left:
            _close_all(descriptors)
        self._left = []
        # A forked child may hold a copy of the socket: without this the peer would wait for it.
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with suppress(RuntimeError):  # outside of Trio nobody waits
            trio.lowlevel.notify_closing(self._sock)
            self._sleeper.wake()
            self._ringer.wake()
        self._sock.close()

    @property
    def _is_lone(self) -> bool:
        """Whether nothing waits to be sent."""
        return self._rest is None and not self._posted and not self._outbox

    def _note(self, message: Message) -> None:
        """Note whether the next frame is answered."""
        vigil = self.vigil
        if vigil is not None and message[0] in vigil.asks:
            self._asks = True

    def _told(self) -> None:
        """The peer has something to answer."""
        self._asks = False
        if self.vigil is not None and self.vigil.sent():
            # An answer is due.
            self._sleeper.wake()

    def _show(self, payload: bytes) -> bool:
        """Show a frame instead of sending it; returns whether the peer will see it."""
        shown = self._shown
        if shown is None:
            return False
        if self._held is not None:
            if not shown.is_taken(self._frames):
                return False
            self._held = None
        if not shown.show(self._frames + 1, payload):
            return False
        self._frames += 1
        self._held = payload
        if self._asks:
            self._told()
        return True

    def _flush(self, calls: int) -> bool:
        """Send what goes without blocking, in so many system calls; say whether nothing is left."""
        for _ in range(calls):
            rest = self._rest or self._gather()
            if rest is None:
                return True
            try:
                sent = _transmit(self._sock, rest, self._attached)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                self._is_refused = error.errno in _TRANSIENT
                if self._is_refused:
                    return False
                # Whoever receives finds out what there was to read before.
                self._break()
                return True
            self._is_refused = False
            if self._asks:
                self._told()
            if self._attached:
                _close_all(self._attached)
                self._attached = ()
            self._pending_bytes -= sent
            self._rest = memoryview(rest)[sent:] if sent < len(rest) else None
        return self._rest is None and not self._outbox and not self._posted

    def _encode_posted(self) -> None:
        """Put what was posted into frames."""
        posted = self._posted
        if posted:
            self._posted = []
            for start in range(0, len(posted), _POSTED):
                self._put(self._codec.encode_all(posted[start : start + _POSTED]))

    def _put(self, payload: bytes, descriptors: tuple[int, ...] = ()) -> None:
        held = self._held
        if held is not None:
            self._held = None
            assert self._shown is not None
            if not self._shown.is_taken(self._frames):
                # It may be by now; the peer knows the number.
                self._queue(self._frames, held, ())
        self._frames += 1
        self._queue(self._frames, payload, descriptors)

    def _queue(self, number: int, payload: bytes, descriptors: tuple[int, ...]) -> None:
        frame = _HEADER.pack(len(payload), len(descriptors), number) + payload
        self._outbox.append((frame, descriptors))
        self._pending_bytes += len(frame)

    def _gather(self) -> bytes | None:
        """Take from the outbox what one system call can send."""
        if not self._outbox:
            self._encode_posted()
            if not self._outbox:
                return None
        frame, self._attached = self._outbox.popleft()
        if self._outbox and not self._attached and len(frame) < _LARGE:
            frames = [frame]
            size = len(frame)
            while self._outbox and size < _BUFFER:
                following, descriptors = self._outbox[0]
                if descriptors or len(following) >= _LARGE:
                    break
                frames.append(following)
                size += len(following)
                self._outbox.popleft()
            frame = b"".join(frames)
        self._rest = frame
        return frame

    def _break(self) -> None:
        """Give up sending."""
        self._is_broken = True
        self._held = self._shown = None
        _close_all(self._attached)
        for _, descriptors in self._outbox:
            _close_all(descriptors)
        self._outbox.clear()
        self._posted.clear()
        self._attached = ()
        self._rest = None
        self._pending_bytes = 0
        self._work.wake()


class _Inbox:
    """What was read and not yet returned.

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
        self._buffer = memoryview(bytearray(_BUFFER))
        # The buffer, or a larger one that holds just the frame that is coming.
        self._view = self._buffer
        self._start = 0
        self._end = 0
        self._descriptors: deque[int] = deque()
        # Number of the last frame that was returned.
        self._last = 0
        self.is_at_end = False
        self.is_refused = False
        self.error: Exception | None = None
        self.seen: SharedFrame | None = None

    def look(self) -> list[Received]:
        """The next message, if it is shown; more will be looked for."""
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
            self.is_refused = isinstance(error, OSError) and error.errno in _TRANSIENT
            if not self.is_refused:
                self.is_at_end = True
                self.error = error.with_traceback(None)
        if self.is_at_end:
            # What it has shown at last was there before.
            received += self.look()
        return received

    def close(self) -> None:
        """Drop everything; descriptors whose message was not returned are closed."""
        self.is_at_end = True
        self.seen = None
        _close_all(self._descriptors)
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
        view, start, end, ahead = self._view, self._start, self._end, _HEADER.size
        needed = ahead
        while end - start >= ahead:
            length, count, number = _HEADER.unpack_from(view, start)
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
                _close_all(claimed)
                if descriptor is None:
                    raise NonsenseError(f"a message came with {len(claimed)} descriptors instead of {count}")
                return (LOST,)
            claimed.append(descriptor)
        return tuple(claimed)

    def _make_room(self, needed: int) -> None:
        """Move the beginning of a frame to where the whole of it fits; happens once for each frame."""
        rest = self._view[self._start : self._end]
        # Memory that the system gives as it is filled: the frame may be announced, and never come.
        self._view = self._buffer if needed <= _BUFFER else memoryview(mmap.mmap(-1, needed))
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)


def _alone(message: Message | list[Message]) -> list[Received]:
    if type(message) is list:
        raise NonsenseError("a frame that is shown holds one message")
    return [(cast("Message", message), ())]


def _transmit(sock: socket.socket, data: bytes | memoryview, descriptors: tuple[int, ...]) -> int:
    if not descriptors:
        return sock.send(data, _NO_SIGNAL)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    return sock.sendmsg([data], [rights], _NO_SIGNAL)


def _duplicates(descriptors: Sequence[int]) -> tuple[int, ...]:
    copies: list[int] = []
    try:
        copies.extend(os.dup(descriptor) for descriptor in descriptors)
    except BaseException:
        _close_all(copies)
        raise
    return tuple(copies)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        if descriptor != LOST:
            os.close(descriptor)
