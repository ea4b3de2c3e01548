"""Arrays that a device of this process lends to others, and those that it reads of others."""

from __future__ import annotations

from typing import Protocol

import attrs
import trio

from ...backends.base import AccelDevice, NotSupportedError, PlacedBlock
from ..engine._context import Session
from ..engine._leases import Held
from ..operations._loans import Loan, next_abroad
from ..operations._ref import AccelRef


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
    _session: Session | None = attrs.field(default=None, init=False)
    _chunk: int | None = attrs.field(default=None, init=False)

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
