"""Arrays that devices hold for other devices to read, and both sides for a device of this process."""

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
    """Return an id for a chunk on devices that map it read-only. It is below the ids of their own chunks."""
    return -next(_abroad)


@attrs.define(eq=False)
class Loan(abc.ABC):
    """An array that its device holds for other devices.

    Attributes:
        ref: The array.
        users: The number of its users: the lender and all readers.
    """

    ref: AccelRef
    users: int = attrs.field(default=1, init=False)

    @abc.abstractmethod
    async def wait(self, verb: str) -> None:
        """Wait until the array is held.

        Raises:
            StaleRefError, ContextLostError, DeviceLostError: The array no longer exists.
        """

    @abc.abstractmethod
    def map_to(self, device: AccelDevice, block: int) -> int | None:
        """Make its memory readable on a device of this process, as the block with this id.

        Returns:
            The id of the chunk that was mapped; None if the memory is the device's own.

        Raises:
            AccelError, OSError, ValueError: The array no longer exists, or cannot be mapped.
        """

    @abc.abstractmethod
    def give_back(self) -> None:
        """Stop holding the array."""

    def end(self) -> None:
        """End one use. After the last one, the array's device may write to it again."""
        self.users -= 1
        if not self.users:
            self.give_back()


@attrs.define(eq=False)
class InlineLoan(Loan):
    """An array of a device of this process, held for other devices."""

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
    """A device that reads arrays of other devices.

    Attributes:
        session: Its present context, if any.
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
    """A borrowed array on a device of this process. The next context maps it again.

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
        """Make the array known to a context; raises as `wait`, and as `Loan.wait` if the array is gone."""
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
        """Stop reading it. Operations that already read it are awaited in the background."""
        block, session = self.array.block, self._session
        block.is_released = True
        self._reader.borrowed.discard(self)
        if session is None or session is not self._reader.session or session.engine.leases.is_idle(block.id):
            self._give_back()
        else:
            held = session.engine.leases.hold(block.id, write=True)
            self._reader.nursery.start_soon(self._give_back_later, held)

    async def _give_back_later(self, held: Held) -> None:
        # The memory is returned after all operations that read it, because then its owner may change it.
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
        # A lost context has unmapped the memory.
        if session is not None and session is self._reader.session:
            session.engine.release_all((block.id,))
            if self._chunk is not None:
                session.engine.device.unmap_chunk(self._chunk)
        # The owner gets the memory back last, because nothing here reads it any longer.
        self._loan.end()
