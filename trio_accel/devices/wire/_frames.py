"""Frames: layout of messages and descriptors in a stream, and the outbox and inbox of a channel."""

from __future__ import annotations

import array
import errno
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeAlias

import trio
from trio.lowlevel import enable_ki_protection

from ...backends.base import Ints
from ..base._waits import TaskNotifier
from ._protocol import Codec, Message, NonsenseError, SharedFrame

Received: TypeAlias = tuple[Message, Ints]
"""A message and its descriptors, which belong to the receiver.

`LOST` replaces all of them if too many files are open in the receiving process.
"""

MAX_DESCRIPTORS = 16
"""The maximum number of descriptors of one message."""

LOST = -1
"""In place of a message's lost descriptors."""

HEADER = struct.Struct("<IBQ")
"""The header of each payload: its length, the number of descriptors, the number of the frame."""

MAX_LENGTH = 2**32 - 1
"""The maximum bytes of a payload."""

BUFFER = 256 * 1024
"""The maximum bytes of one read, and the approximate bytes that one write collects."""

TRANSIENT = frozenset({errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})
"""The kernel lacks memory, or too many descriptors are in transit to processes that do not read.

The socket counts as ready nevertheless, so the call is repeated after `RETRY` seconds.
"""

RETRY = 0.005

# Frames of at least this size are sent separately, which saves a copy.
_SEND_ALONE_FROM_BYTES = 64 * 1024
# The maximum number of successive system calls before the writer lets other tasks run.
_BURST = 8
# With this flag, sending to an ended peer fails without a SIGPIPE.
_NO_SIGNAL = int(getattr(socket, "MSG_NOSIGNAL", 0))
_ANCILLARY = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
# The flags are plain numbers, because Python code combines members of an enumeration. Other systems do not
# have workers, but import this module.
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_TRUNCATED = int(socket.MSG_CTRUNC)


def duplicates(descriptors: Sequence[int]) -> Ints:
    """Duplicate descriptors.

    Raises:
        OSError: A descriptor cannot be duplicated; then none is.
    """
    copies: list[int] = []
    try:
        copies.extend(os.dup(descriptor) for descriptor in descriptors)
    except BaseException:
        close_all(copies)
        raise
    return tuple(copies)


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors that arrived with a message, or were to be sent with one."""
    for descriptor in descriptors:
        if descriptor != LOST:
            os.close(descriptor)


def _ignore() -> None:
    """Do nothing."""


class Outbox:
    """Sends frames through the socket, or shows them in shared memory. Frames wait here until then.

    A frame contains one message. A frame with descriptors is sent by a separate system call: the kernel
    delivers them with its first byte, so they arrive in the order of the frames that contain their number.

    Args:
        sock: The socket.
        codec: The encoding of messages.

    Attributes:
        is_broken: Whether nothing can be sent any longer.
        pending_bytes: The number of encoded bytes that the socket has not accepted yet.
        shown: The memory where single frames are shown to an awake peer instead of being sent.
        asks: The first items of messages that are answered.
        on_asked: Called when such a message was sent, or shown.
    """

    def __init__(self, sock: socket.socket, codec: Codec) -> None:
        self.is_broken: bool = False
        self.pending_bytes: int = 0
        self.shown: SharedFrame | None = None
        self.asks: frozenset[object] = frozenset()
        self.on_asked: Callable[[], None] = _ignore
        self._sock = sock
        self._encode = codec.encode
        # The frames, with their descriptors.
        self._queue: deque[tuple[bytes, Ints]] = deque()
        # The bytes in transmission: the rest of one or several frames, and the descriptors for its start.
        self._rest: bytes | memoryview | None = None
        self._attached: Ints = ()
        # The number of frames; and the content of the last one, while it is only shown.
        self._frames = 0
        self._held: bytes | None = None
        self._is_refused = False
        # Whether a message with an expected answer waits to be sent.
        self._is_asking = False
        self._work = TaskNotifier()

    def send(self, message: Message, descriptors: Sequence[int] = (), *, now: bool = False) -> None:
        """Put a message into the outbox; do nothing if it is broken.

        The message is encoded and its descriptors are duplicated immediately.

        Args:
            message: Plain values.
            descriptors: At most `MAX_DESCRIPTORS` descriptors for the peer.
            now: Try to send it immediately if nothing waits. A single message saves the detour through the
                writer, while many in a row are cheaper together.

        Raises:
            ValueError: There are too many descriptors, or 4 GiB and more.
            OSError: A descriptor cannot be duplicated.
        """
        if self.is_broken:
            return
        if message[0] in self.asks:
            self._is_asking = True
        payload = self._encode(message)
        if len(payload) > MAX_LENGTH or len(descriptors) > MAX_DESCRIPTORS:
            raise ValueError(
                f"a message of {len(payload)} bytes with {len(descriptors)} descriptors is too large; "
                f"allowed: {MAX_LENGTH} bytes, {MAX_DESCRIPTORS} descriptors"
            )
        # A frame is shown only if nothing waits, because it must not overtake others. Descriptors need the
        # socket.
        now = now and self._rest is None and not self._queue
        if now and not descriptors and self._show(payload):
            return
        # Duplicates, because the caller may close its own before the socket takes them.
        self._put(payload, duplicates(descriptors) if descriptors else ())
        if not (now and self._flush(1)):
            self._work.notify()

    @enable_ki_protection
    async def run(self) -> None:
        """Send the contents of the outbox, until the channel is closed or the peer has ended.

        Cancelling it loses nothing, and it may run again.
        """
        while not self.is_broken:
            if self._flush(_BURST):
                if not self.is_broken:
                    await self._work.wait()
            elif self._is_refused:
                # The kernel lacked memory for the send, but the socket stays writable, so waiting for that
                # would spin.
                await trio.sleep(RETRY)
            else:
                with suppress(trio.ClosedResourceError):
                    await trio.lowlevel.wait_writable(self._sock)

    def close(self) -> None:
        """Stop sending. Waiting messages are dropped."""
        self.is_broken = True
        self._held = self.shown = None
        self.on_asked = _ignore
        close_all(self._attached)
        for _, descriptors in self._queue:
            close_all(descriptors)
        self._queue.clear()
        self._attached = ()
        self._rest = None
        self.pending_bytes = 0
        self._work.notify()

    def _show(self, payload: bytes) -> bool:
        """Show a frame instead of sending it; return whether the peer will see it."""
        shown = self.shown
        if shown is None:
            return False
        if self._held is not None:
            # One frame is shown at a time, because the next would overwrite it.
            if not shown.is_taken(self._frames):
                return False
            self._held = None
        if not shown.show(self._frames + 1, payload):
            return False
        self._frames += 1
        self._held = payload
        if self._is_asking:
            self._is_asking = False
            self.on_asked()
        return True

    def _flush(self, calls: int) -> bool:
        """Send without blocking, in at most this number of system calls; return whether nothing is left."""
        for _ in range(calls):
            rest = self._rest or self._gather()
            if rest is None:
                return True
            try:
                sent = _transmit(self._sock, rest, self._attached)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                self._is_refused = error.errno in TRANSIENT
                if self._is_refused:
                    return False
                # The peer has ended. The receiver still reads everything before that, and reports the end.
                self.close()
                return True
            self._is_refused = False
            if self._is_asking:
                self._is_asking = False
                self.on_asked()
            # The kernel has delivered them with the first byte, so the rest of the frame is sent without
            # them.
            if self._attached:
                close_all(self._attached)
                self._attached = ()
            self.pending_bytes -= sent
            self._rest = memoryview(rest)[sent:] if sent < len(rest) else None
        return self._rest is None and not self._queue

    def _put(self, payload: bytes, descriptors: Ints = ()) -> None:
        held = self._held
        if held is not None:
            self._held = None
            assert self.shown is not None
            if not self.shown.is_taken(self._frames):
                # D44: the peer may take the shown frame at this moment as well. It drops a frame with a
                # number that it has already seen.
                self._append(self._frames, held, ())
        self._frames += 1
        self._append(self._frames, payload, descriptors)

    def _append(self, number: int, payload: bytes, descriptors: Ints) -> None:
        frame = HEADER.pack(len(payload), len(descriptors), number) + payload
        self._queue.append((frame, descriptors))
        self.pending_bytes += len(frame)

    def _gather(self) -> bytes | None:
        """Take the data for one system call from the outbox."""
        if not self._queue:
            return None
        frame, self._attached = self._queue.popleft()
        if self._queue and not self._attached and len(frame) < _SEND_ALONE_FROM_BYTES:
            frames = [frame]
            size = len(frame)
            while self._queue and size < BUFFER:
                following, descriptors = self._queue[0]
                # Descriptors are sent with the first byte of a call, which must begin a frame. Joining a
                # large frame would copy it.
                if descriptors or len(following) >= _SEND_ALONE_FROM_BYTES:
                    break
                frames.append(following)
                size += len(following)
                self._queue.popleft()
            frame = b"".join(frames)
        self._rest = frame
        return frame


def _transmit(sock: socket.socket, data: bytes | memoryview, descriptors: Ints) -> int:
    if not descriptors:
        return sock.send(data, _NO_SIGNAL)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    return sock.sendmsg([data], [rights], _NO_SIGNAL)


class Inbox:
    """Reads frames from the socket and from the memory where the peer shows them.

    Args:
        decode: Reads a payload.
        limit: The maximum bytes of a payload.

    Attributes:
        is_at_end: Whether there is nothing more to read.
        error: The reason, unless the peer simply closed its end.
        is_refused: Whether the kernel has too little memory for reading at present.
        seen: The memory where the peer shows frames.
    """

    def __init__(self, decode: Callable[[bytes | memoryview], Message], limit: int) -> None:
        self._read_payload = decode
        self._limit = limit
        # Mapped, because the heap would retain the memory of a freed buffer, and all of it would be resident.
        self._buffer = memoryview(mmap.mmap(-1, BUFFER, flags=mmap.MAP_PRIVATE))
        # The buffer, or a larger one for a frame that does not fit.
        self._view = self._buffer
        self._start = 0
        self._end = 0
        self._descriptors: deque[int] = deque()
        # The number of the last returned frame.
        self._last = 0
        self.is_at_end: bool = False
        self.is_refused: bool = False
        self.error: Exception | None = None
        self.seen: SharedFrame | None = None

    def poll(self) -> list[Received]:
        """Return the next message, if it is shown in memory."""
        frame = self.seen
        if frame is None:
            return []
        # D44: a later frame follows frames still in the socket, and an earlier frame was read there.
        number = self._last + 1
        payload = frame.take(number)
        if payload is None:
            return []
        self._last = number
        try:
            return [(self._read_payload(payload), ())]
        except Exception as error:  # noqa: BLE001 - as in `read`
            self.is_at_end = True
            self.error = error.with_traceback(None)
            return []

    def read(self, sock: socket.socket) -> list[Received]:
        """Read once; return the completed messages."""
        received: list[Received] = []
        self.is_refused = False
        try:
            # The same call marks the descriptors as not inheritable. Otherwise a program that another thread
            # starts meanwhile would keep the chunks (D3).
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
        except Exception as error:  # noqa: BLE001 - a peer that sends nonsense is treated as gone
            self.is_refused = isinstance(error, OSError) and error.errno in TRANSIENT
            if not self.is_refused:
                self.is_at_end = True
                self.error = error.with_traceback(None)
        if self.is_at_end:
            # The last shown frame precedes the end.
            received += self.poll()
        return received

    def close(self) -> None:
        """Drop everything, and close the descriptors of unreturned messages."""
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
            # D74: the lost descriptors belong to the present message, because the kernel delivers one
            # message's descriptors at a time.
            self._descriptors.append(LOST)

    def _decode(self, received: list[Received]) -> None:
        """Append the complete messages, and make room for the next one."""
        view, start, end, header_size = self._view, self._start, self._end, HEADER.size
        needed = header_size
        while end - start >= header_size:
            length, count, number = HEADER.unpack_from(view, start)
            if length > self._limit:
                raise NonsenseError(f"a message of {length} bytes is too large; allowed: {self._limit}")
            begin = start + header_size
            if begin + length > end:
                needed += length
                break
            if number > self._last + 1:
                raise NonsenseError(f"frame {number} came behind frame {self._last}: others are missing")
            # D44: a frame both shown in memory and sent repeats a number.
            if number > self._last:
                self._last = number
                message = self._read_payload(view[begin : begin + length])
                received.append((message, self._claim(count) if count else ()))
            start = self._start = begin + length
        if start == end:
            self._view = self._buffer
            self._start = self._end = 0
        elif start + needed > len(view):
            self._make_room(needed)

    def _claim(self, count: int) -> Ints:
        """Take the descriptors of the next message with any; `LOST` if one of them was lost."""
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
        """Move the beginning of a frame to a buffer where it fits; happens once for each frame."""
        rest = self._view[self._start : self._end]
        # D80: mapped memory, which the system allocates as it is filled, because an announced frame may never
        # arrive.
        self._view = self._buffer if needed <= BUFFER else memoryview(mmap.mmap(-1, needed))
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)
