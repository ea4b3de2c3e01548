"""Arrays that their devices hold for others, which read them."""

from __future__ import annotations

import abc
import itertools

import attrs

from ...backends.base import AccelDevice
from ._ref import AccelRef

_abroad = itertools.count(1)


def next_abroad() -> int:
    """Return an id for a chunk on devices that have it mapped for reading; it is below those of their own."""
    return -next(_abroad)


@attrs.define(eq=False)
class Loan(abc.ABC):
    """An array that its device holds for others.

    Attributes:
        ref: The array.
        users: The ones who need it: the one who lends it, and readers.
    """

    ref: AccelRef
    users: int = attrs.field(default=1, init=False)

    @abc.abstractmethod
    async def wait(self, verb: str) -> None:
        """Wait until it is held.

        Raises:
            StaleRefError, ContextLostError, DeviceLostError: It is not there any more.
        """

    @abc.abstractmethod
    def map_to(self, device: AccelDevice, block: int) -> int | None:
        """Have a device of this process know its memory, to be read, under the id of a block there.

        Returns:
            Id of the chunk that is mapped for that; None where it is the device's own.

        Raises:
            AccelError, OSError, ValueError: It is not there any more, or cannot be mapped.
        """

    @abc.abstractmethod
    def give_back(self) -> None:
        """Hold it no longer."""

    def end(self) -> None:
        """End to lend it or to read it; when the last one ends, its device may write to it again."""
        self.users -= 1
        if not self.users:
            self.give_back()
