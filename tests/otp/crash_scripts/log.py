"""The event log of a run, in the words of both sides and in common words."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Literal, TypeAlias

import attrs

__all__ = ["COLUMN", "Event", "RawEvent", "lines", "normalise", "side_by_side"]

COLUMN = 24
"""Width of the left column of `side_by_side`."""

RawEvent: TypeAlias = tuple[str, int, str]
"""Name of the child, number of its incarnation, and what happened in the words of one side."""

Kind: TypeAlias = Literal[
    "started", "failed to start", "crashed", "finished", "was shut down", "gave up", "ended"
]


@attrs.frozen
class Event:
    """Something that happened to an incarnation of a worker or a supervisor.

    Attributes:
        name: Name of the child.
        number: Number of its incarnation, failed starts included, counted from 0 over the whole script.
        kind: The kind of event. A supervisor starts before its children and ends after them. If its children
            fail to start, it has no end.
    """

    name: str
    number: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.name} #{self.number} {self.kind}"


_KINDS: dict[str, Kind] = {
    # OTP: the callbacks of the child, the reports of the supervisor, and the end of its process.
    "init": "started",
    "init boom": "failed to start",
    "terminate boom": "crashed",
    "terminate normal": "finished",
    "terminate shutdown": "was shut down",
    "report reached_max_restart_intensity": "gave up",
    "exit shutdown": "ended",
    # Ours: the events in the child's `lifespan`, and the reports to the observer.
    "lifespan entered": "started",
    "lifespan refused with Boom": "failed to start",
    "lifespan left with Boom": "crashed",
    "lifespan left after finish": "finished",
    "lifespan left": "was shut down",
    "SupervisorFailed": "gave up",
    "supervisor ended": "ended",
}


def normalise(events: Sequence[RawEvent]) -> list[Event]:
    """Put a log into common words. Neither log is changed in any other way before the comparison.

    Order, names, numbers and the count of events stay as they are. Back-off needs no
    normalisation: scripts run with none.

    Raises:
        KeyError: Something happened that the scripts do not provide for.
    """
    return [Event(name, number, _KINDS[what]) for name, number, what in events]


def lines(events: Sequence[RawEvent]) -> list[str]:
    """A log in common words, as text."""
    return [str(event) for event in normalise(events)]


def side_by_side(left: Sequence[str], right: Sequence[str]) -> str:
    """Two logs in two columns: common events in one row, other events in a row of their own."""
    rows: list[str] = []
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for tag, start, end, other_start, other_end in matcher.get_opcodes():
        if tag == "equal":
            rows += [f"{line:<{COLUMN}}{line}" for line in left[start:end]]
        else:
            rows += left[start:end]
            rows += [f"{'':<{COLUMN}}{line}" for line in right[other_start:other_end]]
    return "\n".join(rows)
