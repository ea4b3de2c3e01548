"""The common definitions of application and worker: tags of values, the first message, the memory page.

Messages are sent through a socket, or to an awake receiver in a frame of memory that both processes share,
`SharedFrame`.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import pickle
import platform
import threading
from collections.abc import Callable
from typing import Self, TypeAlias

import attrs

from ...backends.base import DType, Strs
from ...backends.base.kit.fast_paths import FastPaths
from ..base._options import DeviceOptions

Message: TypeAlias = tuple[object, ...]
"""Real numbers, strings, bytes, None and tuples of these, which pickle encodes without calling Python."""


class NonsenseError(ValueError):
    """The peer sent invalid data, or a meaningless message."""


@attrs.frozen
class Codec:
    """The conversions between messages and bytes.

    Attributes:
        encode: Encodes a message.
        decode: Decodes a message. If it cannot, it raises `NonsenseError`, or any other exception.
    """

    encode: Callable[[Message], bytes]
    decode: Callable[[bytes | memoryview], Message]


PICKLED = Codec(functools.partial(pickle.dumps, protocol=5), pickle.loads)
"""For messages of a trusted peer, because decoding one may run code that the sender has chosen."""


TUPLE, ARRAY, COMPLEX, ENUM, HOST = range(5)
"""Tags: the first item of every encoded tuple."""

NAME, ALLOCATIONS, OUTPUTS = 0, 3, 5
"""The indexes of the operation's name, the blocks to make and the written blocks in an encoded launch."""

DTYPES = {member.value: member for member in DType}
"""The dtypes by name."""


Address: TypeAlias = tuple[int, int, int, int]
"""The place of a block as plain values: its id, its size, the chunk, and the offset in it."""


@attrs.frozen(kw_only=True)
class WorkerConfig:
    """The first message to a worker.

    Attributes:
        device: The name of the device, such as ``"cpu:0"``.
        backend: The import path of its backend's class.
        path: The path of the device's actor, below which the tree shows the worker's actors.
        options: The options of the device.
        in_use: The import paths of libraries in use without blocks from their start, which it opens in
            advance.
        is_observed: Whether messages are observed.
        is_timed: Whether launches are timed.
        window: The maximum seconds to stay awake for a due request; 0 to sleep.
        fast_paths: The enabled fast paths.
    """

    device: str
    backend: str
    path: str
    options: DeviceOptions
    in_use: Strs
    is_observed: bool
    is_timed: bool
    window: float
    fast_paths: FastPaths


SIZE = 1024
"""The memory of a shared frame, in bytes."""

# The words of the sender, and the receiver's words in another cache line; the payload follows.
_NUMBER, _LENGTH = 0, 1
_IS_AWAKE, _TAKEN = 8, 9
_HEADER_BYTES = 128
# Processors that make stores visible, and execute loads, in program order.
_ORDERED = frozenset({"x86_64", "amd64"})

# One page in total.
_FRAMES = 2048
_MIDDLE = _FRAMES + SIZE
_BYTES = _MIDDLE + SIZE
FIRST_WORD = 2
"""The index of a library's first word."""

WORDS = _FRAMES // 8
"""The number of words."""


class SharedFrame:
    """Memory in which one process shows a frame to a polling process, instead of sending it.

    Then neither makes a system call (D44). Memory alone could fail in two ways.

    A receiver could read half of a frame. So frames are written and read as with a sequence lock: the frame's
    number is 0 while it is being written, and must be the same before and after it was read.

    A receiver could fall asleep just after a frame was shown. So it first announces that it sleeps, and then
    checks once more. A sender first shows the frame, and then checks whether the receiver sleeps. Each has a
    barrier in between, as in Dekker's algorithm. The second of them notices the other. If both do, the frame
    arrives twice, with the same number.

    Args:
        memory: `SIZE` bytes, initially zero.
    """

    __slots__ = ("_data", "_most", "_words")

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:_HEADER_BYTES].cast("Q")
        self._data = memory[_HEADER_BYTES:]
        self._most = len(self._data)

    # The sender.

    def show(self, number: int, payload: bytes) -> bool:
        """Show a frame.

        Args:
            number: Its position among all sent frames, from 1.
            payload: Its payload.

        Returns:
            Whether the receiver will see it. If false, the receiver may see it nevertheless.
        """
        length = len(payload)
        if length > self._most:
            return False
        words = self._words
        words[_NUMBER] = 0
        # Sequence lock: the number is 0 while the frame is incomplete.
        words[_LENGTH] = length
        self._data[:length] = payload
        words[_NUMBER] = number
        # The frame must be visible before this end checks whether the other one sleeps (D44).
        _barrier()
        return bool(words[_IS_AWAKE])

    def is_taken(self, number: int) -> bool:
        """Return whether a shown frame was taken."""
        return self._words[_TAKEN] >= number

    # The receiver.

    def wake(self) -> None:
        """Announce that this end polls until `sleep`."""
        self._words[_IS_AWAKE] = 1

    def sleep(self) -> None:
        """Announce that this end sees only sent frames. Check once more for a shown frame after this."""
        self._words[_IS_AWAKE] = 0
        # The flag must be visible before the last check of this end for a frame (D44).
        _barrier()

    def take(self, number: int) -> bytes | None:
        """Return the payload of the frame with this number, if it is shown now."""
        words = self._words
        if words[_NUMBER] != number:
            return None
        # Copied before the number is read again, because the sender may have begun the next frame.
        payload = bytes(self._data[: words[_LENGTH]])
        if words[_NUMBER] != number:
            return None
        words[_TAKEN] = number
        return payload

    def close(self) -> None:
        """Release the memory."""
        self._words.release()
        self._data.release()

    @staticmethod
    def is_possible() -> bool:
        """Return whether this machine has the required order of loads and stores."""
        return platform.machine().lower() in _ORDERED


_LOCK = threading.Lock()


def _barrier() -> None:
    """Make all stores visible before any later load, by an instruction with the lock prefix."""
    with _LOCK:
        pass


class SharedPage:
    """64-bit words, and a frame of each end.

    The words are the heartbeat, the count of the engine's checks, and one for each library. Only the worker
    writes a word, and atomically, so the application reads valid values even after the worker's death.

    Attributes:
        words: The words. A library's word is the number of the last operation that it began to launch.
        descriptor: The descriptor for the worker.
        frames: The frames shown by the application, and by the worker.
    """

    __slots__ = ("_map", "descriptor", "frames", "words")

    def __init__(self, descriptor: int) -> None:
        self.descriptor: int = descriptor
        self._map = mmap.mmap(descriptor, _BYTES)
        memory = memoryview(self._map)
        self.words: memoryview = memory[:_FRAMES].cast("Q")
        self.frames: tuple[SharedFrame, SharedFrame] = (
            SharedFrame(memory[_FRAMES:_MIDDLE]),
            SharedFrame(memory[_MIDDLE:]),
        )

    @classmethod
    def create(cls) -> Self:
        """Make a page of zeros."""
        descriptor = os.memfd_create("trio_accel page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, _BYTES)
            # Otherwise the worker could truncate the file, and a read here would end the application by
            # SIGBUS.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            return cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def heartbeat(self) -> int:
        """The count of the worker's heartbeats."""
        return self.words[0]

    def beat(self) -> None:
        """Show that the worker is alive."""
        self.words[0] += 1

    @property
    def looks(self) -> int:
        """The count of the engine's checks of operations in flight; 0 while there are none."""
        return self.words[1]

    def show_looks(self, number: int) -> None:
        """Show the count of checks, or with 0 that there is nothing to check."""
        self.words[1] = number

    def close(self) -> None:
        """Release the page."""
        self.words.release()
        for frame in self.frames:
            frame.close()
        # Python refuses to close a map while views of it exist.
        self._map.close()
        os.close(self.descriptor)
