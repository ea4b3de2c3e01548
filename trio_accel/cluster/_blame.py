"""Finds the request that ends one agent after another, as devices find what loses their contexts (D136).

A request with an id is asked again when its agent is lost, because the store knows whether it was executed.
One that ends its process would take agent after agent. So requests that were in flight when an agent crashed
are suspects. They run again one after the other, the newest first, because most crashes follow at once, and
other requests wait meanwhile for a moment. With the next crash in its turn, a suspect is to blame. If others
were in flight beside it all the same, it takes one crash more.

The end of an agent that was killed says nothing about its requests, but a request that takes all memory looks
the same. So it takes three losses, and three more for each agent that was lost without the request in the
last minute. A request is a suspect before the last of these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import attrs
import trio

from ._errors import LethalRequestError
from ._members import Member, Target

__all__ = ["Blame", "Trial"]

# Seconds until a suspect runs beside others, because a turn may take long, or may wait for the suspect. Each
# loss doubles them, so that every suspect runs alone at last.
_PATIENCE = 5.0
# Seconds that other requests wait for suspects at most.
_HOLD = 0.5
# Losses of agents that were killed, and the seconds in which others count.
_KILLS, _MINUTE = 3, 60.0


@attrs.define(eq=False)
class Trial:
    """A request on its way.

    Attributes:
        target: The entity.
        cls: The class of its message.
        lost: The members that were lost with it.
        sent: When it was sent to the last of these.
        beside: How many other requests were lost with that.
        was_alone: Whether it was the only suspect in flight then.
        is_alone: Whether it is.
    """

    target: Target
    cls: type
    lost: list[Member] = attrs.field(factory=list[Member])
    sent: float = 0.0
    beside: int = 0
    was_alone: bool = False
    is_alone: bool = False

    def lose(self, member: Member, sent: float, beside: int) -> None:
        """Remember a loss."""
        self.lost.append(member)
        self.sent, self.beside, self.was_alone = sent, beside, self.is_alone


class Blame:
    """Requests of this process that are in flight to agents, and agents that have ended."""

    def __init__(self) -> None:
        self._waiting, self._running = list[Trial](), list[Trial]()
        self._changed = trio.Event()
        self._crashed: deque[Member] = deque(maxlen=256)
        self._killed: deque[tuple[float, Member]] = deque(maxlen=256)

    def note_end(self, member: Member, *, has_crashed: bool) -> None:
        """Remember that an agent is gone, and whether its process has ended by itself."""
        if has_crashed:
            self._crashed.append(member)
        elif member not in self._crashed:
            self._killed.append((trio.current_time(), member))

    @property
    def has_suspects(self) -> bool:
        """Whether suspects run, or wait for their turn."""
        return bool(self._running or self._waiting)

    @asynccontextmanager
    async def turn(self, trial: Trial) -> AsyncGenerator[None, None]:
        """Wait until a request may be sent.

        Raises:
            LethalRequestError: It is to blame for the loss of its agents.
        """
        self._check(trial)
        if not self._is_suspect(trial):
            trial.is_alone = False
            with trio.move_on_after(_HOLD):
                while self.has_suspects:
                    await self._changed.wait()
            yield
            return
        self._waiting.append(trial)
        try:
            with trio.move_on_after(_PATIENCE * 2 ** min(len(trial.lost), 10)):
                # All that were lost together are here behind this.
                await trio.lowlevel.checkpoint()
                while self._running or trial is not max(self._waiting, key=lambda one: one.sent):
                    await self._changed.wait()
        finally:
            self._waiting.remove(trial)
            self._wake()
        trial.is_alone = not self._running
        for other in self._running:
            other.is_alone = False
        self._running.append(trial)
        try:
            yield
        finally:
            self._running.remove(trial)
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    def _is_suspect(self, trial: Trial) -> bool:
        if any(member in self._crashed for member in trial.lost):
            return True
        return len(trial.lost) > 0 and len(trial.lost) + 1 >= self._max_kills(trial)

    def _max_kills(self, trial: Trial) -> int:
        """Return how many killed agents a request may have been in flight to."""
        since = trio.current_time() - _MINUTE
        others = {member for when, member in self._killed if when > since}.difference(trial.lost)
        return _KILLS * (1 + len(others))

    def _check(self, trial: Trial) -> None:
        if len(trial.lost) < 2 or not trial.was_alone:
            return
        has_crashed = trial.lost[-1] in self._crashed
        if len(trial.lost) >= (2 + (trial.beside > 0) if has_crashed else self._max_kills(trial)):
            names = ", ".join(member.name for member in trial.lost)
            request = f"{trial.cls.__qualname__} to {trial.target.text}"
            raise LethalRequestError(
                f"{request} was in flight when each of these nodes was lost, and is not asked again: {names}",
                node=trial.lost[-1].name,
                epoch=trial.lost[-1].epoch,
                request=request,
            )
