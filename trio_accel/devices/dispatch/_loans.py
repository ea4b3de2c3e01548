"""Arrays that their devices hold for others, which read them; and how a device of this process does both."""

from __future__ import annotations

import abc
import itertools
from typing import Protocol

import attrs
import trio

from ...backends.base import AccelDevice, NotSupportedError, PlacedBlock
from ..engine._context import Session
from ..engine._leases import Held
from ..operations._ref import AccelRef

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


@attrs.define(eq=False)
class InlineLoan(Loan):
    """An array of a device of this process that is held for others."""

    _session: Session
    _held: Held

    async def wait(self, verb: str) -> None:
        """See `Loan.wait`."""
        await self._held.wait()
        self._check(verb)

    def _check(self, verb: str) -> None:
        self._session.engine.leases.check(verb, self.ref.block, self.ref.spec)

    def map_to(self, device: AccelDevice, block: int) -> int | None:
        """See `Loan.map_to`."""
        self._check("borrow")
        owner = self._session.engine.device
        _, nbytes, chunk, offset = owner.placement(self.ref.block.id)
        mapped = None
        if device is not owner:
            mapped = next_abroad()
            device.map_peer(mapped, owner, chunk)
            chunk = mapped
        device.expect((PlacedBlock(block, nbytes, chunk, offset),))
        return mapped

    def give_back(self) -> None:
        """See `Loan.give_back`."""
        self._held.end()


class Reader(Protocol):
    """The device that reads arrays of others.

    Attributes:
        session: Its context, if it has one now.
        borrowed: The arrays that it reads.
        nursery: Runs tasks until the device ends.
    """

    session: Session | None
    borrowed: set[InlineBorrowed]
    nursery: trio.Nursery

    async def ready(self) -> Session:
        """Wait for a context."""
        ...


@attrs.define(eq=False)
class InlineBorrowed:
    """An array that was lent, as one of a device of this process; the next context has it, too.

    Attributes:
        array: The array.
    """

    array: AccelRef
    _loan: Loan
    _reader: Reader
    _session: Session | None = None
    _chunk: int | None = None

    async def wait(self, verb: str) -> None:
        """Wait until operations may read it.

        Raises:
            NotSupportedError: The driver cannot map the memory.
            DeviceLostError: The device is closed, or was given up.
        """
        self.begin(await self._reader.ready())

    def begin(self, session: Session) -> None:
        """Have a context know it; raises as `wait` does, and as `Loan.wait` if the array is not there."""
        if self._session is session:
            return
        block = self.array.block
        try:
            self._chunk = self._loan.map_to(session.engine.device, block.id)
        except (OSError, ValueError) as error:
            raise NotSupportedError(
                f"borrow: the device cannot map the memory: {error}", operation="borrow"
            ) from error
        session.engine.adopt((block.id,))
        block.generation, self._session = session.generation, session

    def end(self) -> None:
        """End to read it: operations that do by now are awaited, and not by the caller."""
        block, session = self.array.block, self._session
        block.is_released = True
        self._reader.borrowed.discard(self)
        if session is None or session is not self._reader.session or session.engine.leases.is_idle(block.id):
            self._give_back()
        else:
            held = session.engine.leases.hold(block.id, write=True)
            self._reader.nursery.start_soon(self._give_back_later, held)

    async def _give_back_later(self, held: Held) -> None:
        # The memory goes back behind all operations that read it: then its owner may change it.
        try:
            async with held:
                pass
        except trio.Cancelled:
            # The device ends, and its operations with it.
            self._session = None
            raise
        finally:
            self._give_back()

    def _give_back(self) -> None:
        block, session = self.array.block, self._session
        # The memory of a context that is gone is unmapped with it.
        if session is not None and session is self._reader.session:
            session.engine.release_all((block.id,))
            if self._chunk is not None:
                session.engine.device.unmap_chunk(self._chunk)
        # The owner gets the memory back last: nothing here reads it any more.
        self._loan.end()
