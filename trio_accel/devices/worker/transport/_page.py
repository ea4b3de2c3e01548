"""Memory that a worker and the application share: what it has begun, that it lives, and messages."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Self

from ._shared_frame import SIZE, SharedFrame

__all__ = ["FIRST_WORD", "WORDS", "SharedPage"]

# One page in all.
_FRAMES = 2048
_MIDDLE = _FRAMES + SIZE
_BYTES = _MIDDLE + SIZE

FIRST_WORD = 2
"""Number of the first word of a library."""

WORDS = _FRAMES // 8
"""How many words there are."""


class SharedPage:
    """Words of 64 bits, and a frame of each end.

    The words are the heartbeat, the looks of the engine, and one for each library. A word is written by the
    worker alone, as a whole, so that what the application reads after the worker's death was written.

    Attributes:
        descriptor: To be given to the worker.
        frames: Those that the application shows, and those that the worker does.
    """

    __slots__ = ("_map", "_words", "descriptor", "frames")

    def __init__(self, descriptor: int) -> None:
        self.descriptor: int = descriptor
        self._map = mmap.mmap(descriptor, _BYTES)
        memory = memoryview(self._map)
        self._words = memory[:_FRAMES].cast("Q")
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
            # To read what the worker has cut off would be the end of the application.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            return cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def heartbeat(self) -> int:
        """How often the worker's heart has beaten."""
        return self._words[0]

    def beat(self) -> None:
        """Show that the worker lives."""
        self._words[0] += 1

    @property
    def looks(self) -> int:
        """How often the worker's engine has looked after what is in flight; 0 while nothing is."""
        return self._words[1]

    def look(self, number: int) -> None:
        """Show that it has looked so often, or with 0 that there is nothing to look after."""
        self._words[1] = number

    def started(self, word: int) -> int:
        """Number of the last operation that a library has begun to launch."""
        return self._words[word]

    def start(self, word: int, number: int) -> None:
        """A library begins to launch an operation."""
        self._words[word] = number

    def close(self) -> None:
        """Give the page back."""
        self._words.release()
        for frame in self.frames:
            frame.close()
        self._map.close()
        os.close(self.descriptor)
