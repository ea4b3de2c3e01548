"""Arrays of the CPU backend in the program's hands."""

from __future__ import annotations

from ...base import NotSupportedError
from ._memory import HostArray

__all__ = ["HostLease"]


class HostLease:
    """A host array that the program has; what it does with it is done when it gives it back.

    Args:
        array: An array object of its own over the memory.
        write: Whether it is to be changed.
        stream: Refused, as there are none that a program could have.

    Attributes:
        array: The array.
    """

    __slots__ = ("array",)

    def __init__(self, array: HostArray, *, write: bool, stream: object = None) -> None:
        if stream is not None:
            raise NotSupportedError("lease: stream: the CPU backend computes on no streams of others")
        array.flags.writeable = write
        self.array: HostArray = array

    def take_back(self) -> None:
        """Let nobody write to it any more."""
        self.array.flags.writeable = False
