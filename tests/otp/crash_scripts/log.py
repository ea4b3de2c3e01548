"""The event log of a run, in the words of both sides and in common words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import attrs

__all__ = ["Event", "RawEvent", "normalise"]

RawEvent: TypeAlias = tuple[str, int, str]
"""Name of the child, number of its incarnation, and what happened in the words of one side."""

Kind: TypeAlias = Literal["started", "failed to start", "crashed", "finished", "was shut down", "gave up"]


@attrs.frozen
class Event:
    """Something that happened to an incarnation of a worker or a supervisor.

    Attributes:
        name: Name of the child.
        number: Number of its incarnation, failed starts included, counted from 0 over the whole script.
        kind: What happened. Supervisors start before their children, and end after them; one
            whose children fail to start has no end.
    """

    name: str
    number: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.name} #{self.number} {self.kind}"


_KINDS: dict[str, Kind] = {
    # OTP: what the child's callbacks saw, and how its supervisor's process ended.
    "init": "started",
    "init boom": "failed to start",
    "terminate boom": "crashed",
    "terminate normal": "finished",
    "terminate shutdown": "was shut down",
    "exit shutdown": "was shut down",
    "exit reached_max_restart_intensity": "gave up",
    # Ours: what the child's `lifespan` saw, and what its supervisor was told about its end.
    "lifespan entered": "started",
    "lifespan refused with Boom": "failed to start",
    "lifespan left with Boom": "crashed",
    "lifespan left after finish": "finished",
    "lifespan left": "was shut down",
    "ended": "was shut down",
    "ended with ActorFailedError": "gave up",
}


def normalise(events: Sequence[RawEvent]) -> list[Event]:
    """Put a log into common words. This is all that is done to either log before they are compared.

    Order, names, numbers and the count of events stay as they are. Back-off needs no
    normalisation: scripts run with none.

    Raises:
        KeyError: Something happened that the scripts do not provide for.
    """
    return [Event(name, number, _KINDS[what]) for name, number, what in events]
