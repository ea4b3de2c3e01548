"""The common ground of application and worker: tags of values, the first message, the page of memory.

Messages go through a socket, or to a receiver that is awake by a frame in memory that both processes see,
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
"""Real numbers, strings, bytes, None and tuples of these: what the pickler writes without calling Python."""


class NonsenseError(ValueError):
    """The peer sent something that is no message, or a message that cannot be meant."""


@attrs.frozen
class Codec:
    """The two ways between messages and bytes.

    Attributes:
        encode: Writes a message.
        decode: Reads it. Where it cannot, it raises `NonsenseError`, or any other exception.
    """

    encode: Callable[[Message], bytes]
    decode: Callable[[bytes | memoryview], Message]


PICKLED = Codec(functools.partial(pickle.dumps, protocol=5), pickle.loads)
"""For messages of a trusted peer: to read one may run code that the sender has chosen."""


TUPLE, ARRAY, COMPLEX, ENUM, HOST = range(5)
"""Tags: the first item of every tuple that stands for a value."""

NAME, ALLOCATIONS, OUTPUTS = 0, 3, 5
"""Where the operation's name, the blocks to be made and those that it writes stand in an encoded launch."""

DTYPES = {member.value: member for member in DType}
"""The dtypes by their names."""


Address: TypeAlias = tuple[int, int, int, int]
"""Place of a block as plain values: its id, bytes, the chunk, and the offset in it."""


@attrs.frozen(kw_only=True)
class WorkerConfig:
    """First message to a worker.

    Attributes:
        device: Name of the device, such as ``"cpu:0"``.
        backend: Import path of its backend's class.
        path: Path of the device's actor; the actors of the worker have the paths that the tree shows.
        options: Options of the device.
        in_use: Import paths of the libraries that are in use, and have no blocks from their start: it opens
            them ahead.
        is_observed: Whether somebody observes messages.
        is_timed: Whether times of launches are wanted.
        window: The most seconds to stay awake for a request that is due; 0 to sleep.
        fast_paths: The fast paths that are taken.
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
"""Bytes of memory of a shared frame."""

# Words of the sender, and in another cache line those of the receiver; the payload follows.
_NUMBER, _LENGTH = 0, 1
_IS_AWAKE, _TAKEN = 8, 9
_HEADER_BYTES = 128
# Processors that show stores, and make loads, in the order of the program.
_ORDERED = frozenset({"x86_64", "amd64"})

# One page in all.
_FRAMES = 2048
_MIDDLE = _FRAMES + SIZE
_BYTES = _MIDDLE + SIZE
FIRST_WORD = 2
"""Number of the first word of a library."""

WORDS = _FRAMES // 8
"""How many words there are."""


class SharedFrame:
    """Memory where one process shows a frame to another that looks for it, instead of sending it.

    Neither then calls the system (D44). Two things can go wrong with memory alone.

    A receiver could read half of a frame. So a frame is written and read as with a sequence lock: its number
    is 0 while it is being written, and is the same before and after it was read.

    A receiver could fall asleep over a frame that was just shown. So it first says that it sleeps, and then
    looks once more. A sender first shows, and then looks whether the receiver sleeps. Each has a barrier in
    between, as in Dekker's algorithm. The one that comes second notices. If both do, the frame comes twice,
    and has the same number.

    Args:
        memory: `SIZE` bytes, all zero in the beginning.
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
            number: Its place among all that were sent, from 1.
            payload: Its payload.

        Returns:
            Whether the receiver will see it. If not, it may all the same.
        """
        length = len(payload)
        if length > self._most:
            return False
        words = self._words
        words[_NUMBER] = 0
        # Sequence lock: the number is 0 while the frame is half written.
        words[_LENGTH] = length
        self._data[:length] = payload
        words[_NUMBER] = number
        # The frame has to be out before this end looks whether the other one sleeps (D44).
        _barrier()
        return bool(words[_IS_AWAKE])

    def is_taken(self, number: int) -> bool:
        """Tell whether a frame was taken that was shown."""
        return self._words[_TAKEN] >= number

    # The receiver.

    def wake(self) -> None:
        """Announce that this end looks every now and then, until `sleep`."""
        self._words[_IS_AWAKE] = 1

    def sleep(self) -> None:
        """Announce that this end sees only what is sent; what was shown by now is to be taken after that."""
        self._words[_IS_AWAKE] = 0
        # The flag has to be down before this end looks for a frame the last time (D44).
        _barrier()

    def take(self, number: int) -> bytes | None:
        """Return the payload of the frame of this number, if it is shown now."""
        words = self._words
        if words[_NUMBER] != number:
            return None
        # Copied before the number is read again: the sender may have begun to write the next frame.
        payload = bytes(self._data[: words[_LENGTH]])
        if words[_NUMBER] != number:
            return None
        words[_TAKEN] = number
        return payload

    def close(self) -> None:
        """Let go of the memory."""
        self._words.release()
        self._data.release()

    @staticmethod
    def is_possible() -> bool:
        """Tell whether this machine has the order of loads and stores that it takes."""
        return platform.machine().lower() in _ORDERED


_LOCK = threading.Lock()


def _barrier() -> None:
    """Have all stores seen before anything is loaded: an instruction with the lock prefix does so."""
    with _LOCK:
        pass


class SharedPage:
    """Words of 64 bits, and a frame of each end.

    The words are the heartbeat, the looks of the engine, and one for each library. A word is written by the
    worker alone, as a whole, so that what the application reads after the worker's death was written.

    Attributes:
        words: The words; that of a library has the number of the last operation that it began to launch.
        descriptor: To be given to the worker.
        frames: The frames that the application shows, and the worker's.
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
            # The worker could cut the file, and then a read here would end the application by SIGBUS.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            return cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def heartbeat(self) -> int:
        """The number of beats of the worker's heart."""
        return self.words[0]

    def beat(self) -> None:
        """Show that the worker lives."""
        self.words[0] += 1

    @property
    def looks(self) -> int:
        """The number of the engine's looks after what is in flight; 0 while nothing is."""
        return self.words[1]

    def look(self, number: int) -> None:
        """Show that it has looked so often, or with 0 that there is nothing to look after."""
        self.words[1] = number

    def close(self) -> None:
        """Give the page back."""
        self.words.release()
        for frame in self.frames:
            frame.close()
        # Python refuses to close a map while there are views of it.
        self._map.close()
        os.close(self.descriptor)
