"""Specifications of communicators: operations that ranks run together, each on a device of its own."""

from __future__ import annotations

from typing import ClassVar, Protocol, TypeAlias

import attrs

from ._array import ArraySpec, StatusArray, exact, packed, reads, scalar, status, writes
from ._spec import OperationSpec, specification

__all__ = [
    "CloseCommunicatorSpec",
    "CollectiveSpec",
    "CommunicatorIdSpec",
    "OpenCommunicatorSpec",
    "Waiting",
]


class _StreamPoint(Protocol):
    """A point in a stream: an event of a backend."""

    @property
    def is_done(self) -> bool:
        """Whether the stream has passed it."""
        ...


_Pieces: TypeAlias = "tuple[tuple[int, int, int], ...]"


@attrs.define(eq=False)
class Waiting:
    """A kernel's message to the watchdog: whether it waits for other ranks, and not for its device.

    Attributes:
        is_calling: Whether the vendor's library is in a call that returns only when other ranks have arrived.
        came: Done when the stream has reached the kernel; None before that is enqueued.
        ran: Done when the kernel has ended; None before that is enqueued.
        is_over: Whether nobody is waited for any longer, because the communicator has failed for good.
    """

    is_calling: bool = False
    came: _StreamPoint | None = None
    ran: _StreamPoint | None = None
    is_over: bool = False

    @property
    def is_on(self) -> bool:
        """Whether it waits for others now."""
        if self.is_over:
            return False
        if self.is_calling:
            return True
        return self.came is not None and self.came.is_done and (self.ran is None or not self.ran.is_done)


@specification
class _WaitingSpec(OperationSpec):
    """An operation that may wait for other ranks, or for the library's own threads."""

    is_from_outside: ClassVar[bool] = True

    waiting: Waiting = attrs.field(factory=Waiting, init=False, eq=False, repr=False)

    @property
    def waits_for_others(self) -> bool:
        """See `OperationSpec.waits_for_others`."""
        return self.waiting.is_on


@specification
class CommunicatorIdSpec(OperationSpec):
    """Make a name for a new communicator, which all its ranks open.

    Attributes:
        words: The name.
    """

    is_from_outside: ClassVar[bool] = True

    words: StatusArray = status()


@specification
class OpenCommunicatorSpec(_WaitingSpec):
    """Open a rank of a communicator; done when all ranks have.

    Attributes:
        number: The application's number of the communicator.
        rank: Number of this rank.
        size: How many there are.
        name: The name that `CommunicatorIdSpec` has made.
    """

    runs_once: ClassVar[bool] = True

    number: int = scalar()
    rank: int = exact()
    size: int = exact()
    name: bytes = packed()


@specification
class CloseCommunicatorSpec(OperationSpec):
    """Abort a rank of a communicator, with all its operations in flight; also before it is open.

    Attributes:
        number: The application's number of the communicator.
    """

    is_from_outside: ClassVar[bool] = True

    number: int = scalar()


@specification
class CollectiveSpec(_WaitingSpec):
    """Take part in a collective, as all other ranks do.

    Attributes:
        number: The application's number of the communicator.
        kind: ``"all_reduce"``, ``"reduce"``, ``"reduce_scatter"``, ``"all_gather"``, ``"broadcast"``, or
            ``"exchange"``: pieces of arrays are sent and received.
        reduction: How elements are combined; empty if they are not.
        root: The only rank that gives or gets an array.
        is_known: Whether ranks have met in the same way by this communicator before, so that all are
            connected.
        source: The array that this rank gives, if any.
        out: The array that it gets, if any.
        sends: For ``"exchange"``: receiving rank, first element of `source`, number of elements.
        receives: Likewise: sending rank, first element of `out`, number of elements.
    """

    runs_once: ClassVar[bool] = True

    number: int = scalar()
    kind: str = exact()
    reduction: str = exact()
    root: int = exact()
    is_known: bool = exact()
    source: ArraySpec | None = reads(optional=True)
    out: ArraySpec | None = writes(optional=True)
    sends: _Pieces = exact()
    receives: _Pieces = exact()
