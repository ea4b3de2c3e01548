"""Libraries that a worker opens ahead, and the places that their blocks were said to have."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import starmap

import attrs
import trio

from ....actors import ActorError, Ref
from ....backends.base import AccelDevice, PlacedBlock
from ...engine._context import ContextActor, Session
from ...engine._library_opener import CloseLibrary, PrepareLibrary
from ..transport._protocol import Address
from ._memory import WorkerMemory

__all__ = ["PreparedLibraries"]


@attrs.define(eq=False)
class _Prepared:
    """A library that is opened ahead.

    Attributes:
        blocks: Where its blocks lay when it was to be opened.
        is_over: Set when it is open, or cannot be opened.
        is_closed: Whether the application has closed it.
    """

    blocks: tuple[PlacedBlock, ...]
    is_closed: bool = False
    is_over: trio.Event = attrs.field(factory=trio.Event)


class PreparedLibraries:
    """Opens libraries ahead, before and after the worker takes over.

    Before that, another worker serves. A library that has blocks from its start, as a program has, may read
    them at the places that were told. If they have moved at the takeover, or are gone, the library is dropped
    (D115).

    Args:
        memory: Maps the chunks.
    """

    def __init__(self, memory: WorkerMemory) -> None:
        self._memory = memory
        self._device: AccelDevice
        self._context: Ref[ContextActor]
        self._nursery: trio.Nursery
        self._prepared: dict[str, _Prepared] = {}
        # Chunks that are gone, and stay mapped while a library that is opened ahead has blocks in them.
        self._leaving: set[int] = set()
        self._has_begun = False

    def open(self, device: AccelDevice, context: Ref[ContextActor], nursery: trio.Nursery) -> None:
        """Begin, with the context of the worker."""
        self._device = device
        self._context = context
        self._nursery = nursery

    def prepare(self, path: str, blocks: Iterable[Address]) -> None:
        """Open a library ahead.

        Args:
            path: Import path of its actor.
            blocks: Places of the blocks that it has from its start.
        """
        places = tuple(starmap(PlacedBlock, blocks))
        if not self._has_begun:
            try:
                self._device.expect(places)
            except ValueError:
                # A place outside of the mapped chunks: the library is opened when it is used.
                return
            self._prepared[path] = _Prepared(places)
        self._nursery.start_soon(self._prepare, path, self._prepared.get(path))

    async def _prepare(self, path: str, prepared: _Prepared | None) -> None:
        # The context may be about to end: then nothing is opened ahead.
        with suppress(ActorError):
            await self._context.ask(PrepareLibrary(path))
        if prepared is not None:
            prepared.is_over.set()

    def forget(self, path: str) -> None:
        """Close a library that was opened ahead: the application has closed it."""
        prepared = self._prepared.get(path)
        if prepared is not None:
            prepared.is_closed = True
        self._nursery.start_soon(self._close, path)

    async def _close(self, path: str) -> None:
        prepared = self._prepared.get(path)
        if prepared is not None:
            await prepared.is_over.wait()
        with suppress(ActorError):
            await self._context.ask(CloseLibrary(path))
        if self._prepared.get(path) is prepared:
            self._prepared.pop(path, None)

    def begin(self, session: Session, blocks: Iterable[PlacedBlock]) -> None:
        """Take over: drop libraries that were opened with blocks that have moved.

        Args:
            session: The context.
            blocks: All blocks, with their places.
        """
        self._has_begun = True
        places = {place.block: place for place in blocks}
        prepared = dict(self._prepared)
        self._prepared.clear()
        for path, each in prepared.items():
            if any(places.get(place.block) != place for place in each.blocks):
                # D115: its objects refer to addresses that may be another block's now.
                session.discard(path)
                if not each.is_closed:
                    self.prepare(path, ())

    def remove_chunk(self, number: int) -> None:
        """Unmap a chunk that is gone; libraries that were opened ahead with blocks in it go first."""
        paths = [
            path
            for path, prepared in self._prepared.items()
            if any(place.chunk == number for place in prepared.blocks)
        ]
        if paths:
            self._leaving.add(number)
            self._nursery.start_soon(self._remove_chunk, number, paths)
        else:
            self._memory.remove_chunk(number)

    async def _remove_chunk(self, number: int, paths: list[str]) -> None:
        for path in paths:
            await self._close(path)
        if number in self._leaving:
            self._leaving.remove(number)
            self._memory.remove_chunk(number)

    def remove_leaving(self) -> None:
        """Unmap chunks that are gone, before the worker takes over all that are mapped."""
        for number in self._leaving:
            self._memory.remove_chunk(number)
        self._leaving.clear()
