"""Opening the backend's libraries in threads, on first use or ahead of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ...actors import ActorStoppedError
from ...backends.base import AccelDevice, KernelLibrary
from ...backends.base.kit.programs import ImportsCode

__all__ = ["KernelLibraries"]


@attrs.define(eq=False)
class _Opening:
    """A library that is being opened, or is open, and that no actor has taken yet."""

    name: str
    library: KernelLibrary | None = None
    error: Exception | None = None
    is_over: trio.Event = attrs.field(factory=trio.Event)


class KernelLibraries:
    """The libraries of one context, which are opened in threads: the loop and other libraries go on (D99).

    An opening belongs to the context. It goes on when the actor that began it is cancelled, and the next
    actor takes the library.

    Args:
        device: The device of the context.
        made: Called with the name of a program's library, when it is open, the seconds that this took, and
            those of the import.
    """

    def __init__(self, device: AccelDevice, made: Callable[[str, float, float], None]) -> None:
        self._device = device
        self._made = made
        self._nursery: trio.Nursery
        self._openings: dict[str, list[_Opening]] = {}

    def start(self, nursery: trio.Nursery) -> None:
        """Begin: libraries are opened by tasks of the nursery."""
        self._nursery = nursery

    async def take(self, name: str) -> KernelLibrary:
        """Return a library for its caller alone: one that was opened ahead, or a new one.

        Raises:
            NotSupportedError: There is no such library.
            Exception: Another error of its opening.
        """
        while True:
            openings = self._openings.get(name)
            opening = openings[0] if openings else self._begin(name)
            await opening.is_over.wait()
            if opening.error is not None:
                raise opening.error
            if opening in self._openings.get(name, ()):
                # Else another actor has taken it during the wait.
                self._remove(opening)
                assert opening.library is not None
                return opening.library

    async def prepare(self, name: str) -> None:
        """Open a library ahead, for the next that takes it; raises as `take` does."""
        opening = self._begin(name)
        await opening.is_over.wait()
        if opening.error is not None:
            raise opening.error

    async def drop(self, name: str) -> None:
        """Close a library that was opened ahead and not taken."""
        await self._end(self._openings.pop(name, []))

    def discard(self, name: str) -> None:
        """Withdraw a library that was opened ahead, and have it closed soon."""
        self._nursery.start_soon(self._end, self._openings.pop(name, []))

    @enable_ki_protection
    async def _end(self, openings: list[_Opening]) -> None:
        for opening in openings:
            await opening.is_over.wait()
            if opening.library is not None:
                await trio.to_thread.run_sync(opening.library.close)

    def _remove(self, opening: _Opening) -> None:
        openings = self._openings[opening.name]
        openings.remove(opening)
        if not openings:
            del self._openings[opening.name]

    def _begin(self, name: str) -> _Opening:
        opening = _Opening(name)
        self._openings.setdefault(name, []).append(opening)
        self._nursery.start_soon(self._open, opening)
        return opening

    @enable_ki_protection
    async def _open(self, opening: _Opening) -> None:
        name = opening.name
        try:
            began = time.perf_counter()
            library = await trio.to_thread.run_sync(self._device.open_library, name)
            opening.library = library
            if isinstance(library, ImportsCode):
                self._made(name, time.perf_counter() - began, library.import_seconds)
        except Exception as error:  # noqa: BLE001  # told to the actor that waits for it
            opening.error = error
        finally:
            if opening.library is None and opening in self._openings.get(name, ()):
                self._remove(opening)
                opening.error = opening.error or ActorStoppedError(
                    f"the context ended before its library {name!r} was open", path=self._device.info.name
                )
            # Also when cancelled: the waiting actors belong to other tasks, and would wait for ever.
            opening.is_over.set()

    def close(self) -> None:
        """Close libraries that were opened ahead and not taken. Blocks; none is being opened now."""
        for openings in self._openings.values():
            for opening in openings:
                if opening.library is not None:
                    opening.library.close()
            openings.clear()
