"""Arrays of other devices that a part of an operation which spans devices reads or writes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import attrs

from ._array import ArraySpec

__all__ = ["PeerArray", "Peers"]


@attrs.frozen(eq=False)
class PeerArray:
    """An array that one part of an operation lends to the kernels of the others.

    Attributes:
        array: Where it lies, in the memory of its device.
        part: Number of the part that has it.
        owner: Its open device, as the backend knows it.
    """

    array: ArraySpec
    part: int
    owner: object


class Peers:
    """What a kernel of one part knows of the others: arrays that they lend, and whether one has failed.

    While the kernel runs, the stream of every part has come to its kernel, and none goes on behind it.

    Attributes:
        arrays: The arrays that the part was given.
        failure: What another part has failed with, if one has.
    """

    __slots__ = ("_callbacks", "arrays", "failure")

    def __init__(self, arrays: tuple[PeerArray, ...]) -> None:
        self.arrays: tuple[PeerArray, ...] = arrays
        self.failure: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Have something called on the Trio thread when another part fails; at once if one has.

        A kernel that waits for its peers stops waiting by this. The callback must be quick and not raise.
        """
        self._callbacks.append(callback)
        # A kernel may say so in a thread while the other part fails: looked at behind, none is overlooked.
        if self.failure is not None:
            self._call_back()

    def fail(self, failure: BaseException) -> None:
        """Another part has failed; called by the engine."""
        if self.failure is None:
            self.failure = failure
            self._call_back()

    def end(self) -> None:
        """The operation is over; called by the engine."""
        self._callbacks.clear()

    def _call_back(self) -> None:
        while self._callbacks:
            # The other thread may take the last one: each is called once.
            with suppress(IndexError):
                self._callbacks.pop()()
