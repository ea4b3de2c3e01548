"""Where an actor's task and those who start it wait for each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from ._envelope import AwaitedStart

__all__ = ["StartGate"]


class StartGate:
    """Before each incarnation of an actor: whether it may start, and whether it has.

    Attributes:
        awaited_start: Set while another actor's task waits for the start of this one.
        swept: While the actor has a part in a restart of several children; set once its incarnation
            has ended.
    """

    __slots__ = ("_begun", "_has_begun", "_is_shut", "_pause", "_turn", "awaited_start", "swept")

    def __init__(self) -> None:
        self.awaited_start: AwaitedStart | None = None
        self.swept: trio.Event | None = None
        self._begun: trio.Event | None = None
        self._has_begun = False
        self._turn: trio.Event | None = None
        self._pause: trio.CancelScope | None = None
        self._is_shut = False

    def expect_begin(self) -> None:
        """Prepare for `wait_begun`, before the incarnation can start."""
        self._begun = trio.Event()
        self._has_begun = False

    async def wait_begun(self) -> bool:
        """Wait until the incarnation takes messages; returns False if it failed before."""
        if self._begun is not None:
            await self._begun.wait()
        return self._has_begun  # noqa: ASYNC910  # its caller checkpoints

    def begin(self) -> None:
        """The incarnation takes messages."""
        self._has_begun = True
        self._release()

    def _release(self) -> None:
        begun, self._begun = self._begun, None
        self.awaited_start = None
        if begun is not None:
            begun.set()

    async def pause(self, wait: Callable[[], Awaitable[object]]) -> bool:
        """Wait between two incarnations; returns False if the gate was shut."""
        with trio.CancelScope() as self._pause:  # noqa: ASYNC912  # there may be nothing to wait for
            if not self._is_shut:
                await wait()
        self._pause = None
        return not self._is_shut  # noqa: ASYNC910  # its caller checkpoints

    async def wait_turn(self) -> bool:
        """Wait until the restart of several children comes to this one; False if the gate is shut first."""
        self._turn = trio.Event()
        self._release()
        assert self.swept is not None
        self.swept.set()
        is_going_on = await self.pause(self._turn.wait)
        self._turn = self.swept = None
        return is_going_on

    async def take_turn(self) -> bool:
        """Start the next incarnation of a child in `wait_turn`; False if it failed to start."""
        if self._turn is None:
            return False  # noqa: ASYNC910  # its caller checkpoints
        self.expect_begin()
        self._turn.set()
        return await self.wait_begun()

    def shut(self, reason: str) -> None:
        """Let no further incarnation start: the actor is to end."""
        self._is_shut = True
        if self._pause is not None:
            self._pause.cancel(reason=reason)

    def end(self) -> None:
        """The actor has ended: its start is waited for no more."""
        self._release()
        if self.swept is not None:
            self.swept.set()
