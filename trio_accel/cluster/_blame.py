"""Finds the request that ends agent after agent, as devices find operations that lose contexts (D136, D205).

A request with an id is sent again when its agent is lost, because the store knows whether it was executed. If
a request ends its process, it would take agent after agent. So requests in flight when an agent crashed are
suspects. They run again one after the other, the newest first, because most crashes follow at once, and other
requests wait briefly meanwhile. With the next crash in its turn, a suspect is to blame. If others were in
flight at the same time anyway, it takes one more crash.

A killed agent shows nothing about its requests, but a request that takes all memory looks the same. After two
such losses a request waits until no agent is lost for some seconds. If an agent is lost, somebody kills
agents, and the losses do not count. Otherwise the request is a suspect, and a third loss blames it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable

import attrs
import trio

from ..actors import ParkingLot, leavable_context
from ._errors import LethalRequestError
from ._members import Member, Target

# Seconds until a suspect runs concurrently with others, because a turn may take long, or may wait for the
# suspect. Each loss doubles them, so that every suspect finally runs on its own.
_SUSPECT_SECONDS = 5.0
# The maximum seconds that other requests wait for suspects.
_HOLD = 0.5
# The number of killed agents before a request is to blame.
_KILLS = 3


@attrs.define(eq=False)
class RequestTrial:
    """A request in flight.

    Attributes:
        target: The entity.
        cls: The class of its message.
        lost: The members lost with it.
        sent: The time when it was sent to the last lost member.
        beside: The number of other requests lost with that member.
        was_alone: Whether it was the only suspect in flight then.
        is_alone: Whether it is the only suspect in flight now.
        pardons: The number of times that losses did not count, because others were also lost.
    """

    target: Target
    cls: type
    lost: list[Member] = attrs.field(factory=list[Member])
    sent: float = 0.0
    beside: int = 0
    was_alone: bool = False
    is_alone: bool = False
    pardons: int = 0

    def lose(self, member: Member, sent: float, beside: int) -> None:
        """Record a loss."""
        self.lost.append(member)
        self.sent, self.beside, self.was_alone = sent, beside, self.is_alone


class Blame:
    """This process's requests in flight to agents, and crashed agents.

    Args:
        is_quiet: Returns after some seconds whether no agent was lost meanwhile.
    """

    def __init__(self, is_quiet: Callable[[], Awaitable[bool]]) -> None:
        self._is_quiet = is_quiet
        self._waiting, self._running = list[RequestTrial](), list[RequestTrial]()
        self._changed = ParkingLot()
        self._crashed: deque[Member] = deque(maxlen=256)

    def note_crash(self, member: Member) -> None:
        """Record that an agent's process has ended on its own."""
        self._crashed.append(member)

    @property
    def has_suspects(self) -> bool:
        """Whether suspects run, or wait for their turns."""
        return bool(self._running or self._waiting)

    @leavable_context
    async def turn(self, trial: RequestTrial) -> AsyncGenerator[None]:
        """Wait until a request may be sent.

        Raises:
            LethalRequestError: It is to blame for the loss of its agents.
        """
        self._check(trial)
        crashes = [member for member in trial.lost if member in self._crashed]
        is_killed = len(trial.lost) + 1 >= _KILLS and trial.lost[-1] not in self._crashed
        if is_killed and not await self._wait_quiet(trial):
            trial.lost, is_killed = crashes, False
        if not (crashes or is_killed):
            trial.is_alone = False
            with trio.move_on_after(_HOLD):
                while self.has_suspects:
                    await self._changed.park()
            yield
            return
        self._waiting.append(trial)
        try:
            with trio.move_on_after(_SUSPECT_SECONDS * 2 ** min(len(trial.lost), 10)):
                # After this, all requests lost at the same time are here.
                await trio.lowlevel.checkpoint()
                while self._running or trial is not max(self._waiting, key=lambda candidate: candidate.sent):
                    await self._changed.park()
        finally:
            self._waiting.remove(trial)
            self._changed.unpark_all()
        trial.is_alone = not self._running
        for running in self._running:
            running.is_alone = False
        self._running.append(trial)
        try:
            yield
        finally:
            self._running.remove(trial)
            self._changed.unpark_all()

    async def _wait_quiet(self, trial: RequestTrial) -> bool:
        # Wait longer each time, so that several requests that end agents all wait here at last.
        for _ in range(trial.pardons + 1):
            if await self._is_quiet():
                return True
        trial.pardons += 1
        return False

    def _check(self, trial: RequestTrial) -> None:
        if len(trial.lost) < 2 or not trial.was_alone:
            return
        has_crashed = trial.lost[-1] in self._crashed
        if len(trial.lost) >= (2 + (trial.beside > 0) if has_crashed else _KILLS):
            names = ", ".join(member.name for member in trial.lost)
            request = f"{trial.cls.__qualname__} to {trial.target.text}"
            raise LethalRequestError(
                f"{request} was in flight when each of these nodes was lost, and is not asked again: {names}",
                node=trial.lost[-1].name,
                epoch=trial.lost[-1].epoch,
                request=request,
            )
