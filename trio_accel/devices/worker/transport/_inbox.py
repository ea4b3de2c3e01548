"""What an end of a channel has read."""

from __future__ import annotations

import array
import mmap
import socket
from collections import deque
from collections.abc import Callable
from typing import cast

from ._codec import Message, NonsenseError
from ._framing import BUFFER, HEADER, LOST, MAX_DESCRIPTORS, TRANSIENT, Received, close_all
from ._shared_frame import SharedFrame

__all__ = ["Inbox"]

_ANCILLARY = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
# As plain numbers: members of an enumeration are put together by Python code.
# Other systems have no workers, but import this.
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_TRUNCATED = int(socket.MSG_CTRUNC)


class Inbox:
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
