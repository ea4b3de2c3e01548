"""Whether a device has a context, and which."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import trio

__all__ = ["Availability"]


class Availability:
    """The generations of a device, from the first to its end.

    Attributes:
        generation: Number of the current one, or of the last while there is none; 0 before the first.
        is_ready: Whether there is one now.
        is_ended: Whether none will follow.
    """

    __slots__ = ("_changed", "generation", "is_ended", "is_ready")

    def __init__(self) -> None:
        self.generation: int = 0
        self.is_ready: bool = False
        self.is_ended: bool = False
        self._changed = trio.Event()

    def begin(self, generation: int) -> None:
        """A context is ready."""
        self.generation = generation
        self.is_ready = True
        self._wake()

    def interrupt(self) -> None:
        """The context is gone; another may follow."""
        self.is_ready = False
        self._wake()

    def end(self) -> None:
        """No context follows."""
        self.is_ready = False
        self.is_ended = True
        self._wake()

    async def wait_changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    async def watch(self) -> AsyncGenerator[int, None]:
        """Iterate over the generations: the current one, then each new one, until the end."""
        seen = 0
        while not self.is_ended:
            if self.is_ready and self.generation != seen:
                seen = self.generation
                yield seen
            else:
                await self._changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()
