"""Things to be done at a time, by one task."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import trio
from trio.lowlevel import enable_ki_protection

__all__ = ["Alarms"]


class Alarms:
    """Callbacks with deadlines on Trio's clock. One that is dropped is let go of at once."""

    __slots__ = ("_alarms", "_changed")

    def __init__(self) -> None:
        self._alarms: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        self._changed = trio.Event()

    def __len__(self) -> int:
        return len(self._alarms)

    def set(self, key: Hashable, deadline: float, callback: Callable[[], None]) -> None:
        """Call back at the deadline; a key has one alarm."""
        is_next = all(deadline < other for other, _ in self._alarms.values())
        self._alarms[key] = (deadline, callback)
        if is_next:
            self._changed.set()

    def drop(self, key: Hashable) -> None:
        """Do not call back."""
        self._alarms.pop(key, None)

    def clear(self) -> None:
        """Call nobody back."""
        self._alarms.clear()

    @enable_ki_protection
    async def run(self) -> None:
        """Call back in time, until cancelled."""
        while True:
            self._changed = trio.Event()
            deadline = min((deadline for deadline, _ in self._alarms.values()), default=float("inf"))
            with trio.move_on_at(deadline):
                await self._changed.wait()
            now = trio.current_time()
            for key, (due, callback) in tuple(self._alarms.items()):
                if due <= now and key in self._alarms:
                    del self._alarms[key]
                    callback()
