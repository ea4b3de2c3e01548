"""Snapshots of the actors of a system, and figures that actors and programs show of themselves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import attrs

from ._numbers import is_number

__all__ = ["ActorFigures", "ActorSnapshot", "Buckets", "Reading"]


@attrs.frozen(kw_only=True)
class Reading:
    """A figure of an actor, or of a program, at one moment.

    Attributes:
        name: Words with an underscore between, and the unit last if there is one: ``"queue_wait_seconds"``.
        kind: ``"counter"``, which only rises until its owner begins anew, ``"gauge"`` or ``"histogram"``.
        help: Its meaning, in a sentence.
        value: Its value; the sum of all values of a histogram.
        labels: Names and values of what tells it from others of its name; there must be few of them.
        bounds: Upper ends of the ranges of a histogram, in rising order.
        counts: How many values are in each range; one more than there are bounds.
        path: Path of its actor; ``""`` if it is the program's.
    """

    name: str
    kind: str
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    path: str = ""


class Buckets:
    """Counts values by ranges, for a histogram.

    Args:
        bounds: Upper ends of the ranges, in rising order; a value that equals one counts as below it.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        if not all(map(is_number, bounds)):
            raise ValueError(f"Buckets: bounds must be numbers, got {bounds!r}")
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count a value.

        Raises:
            ValueError: A whole number that no float can hold.
        """
        try:
            self._total += value
        except OverflowError:
            raise ValueError("Buckets.add: value is too large for a float") from None
        self._counts[bisect_left(self._bounds, value)] += 1

    def reading(self, name: str, help: str, labels: tuple[tuple[str, str], ...] = ()) -> Reading:  # noqa: A002  # as in metrics
        """Return what was counted."""
        return Reading(
            name=name,
            kind="histogram",
            help=help,
            value=self._total,
            labels=labels,
            bounds=self._bounds,
            counts=tuple(self._counts),
        )


# Columns of a printed note or error.
_NOTE_COLUMNS = 100


@attrs.frozen(kw_only=True)
class ActorFigures:
    """Hold the figures of one actor that a snapshot and a recording share."""

    path: str
    actor_class: str
    state: str
    pid: int | None = None
    mailbox_depth: int = 0
    mailbox_peak: int = 0
    mailbox_waiting: int = 0
    stashed: int = 0
    dropped: int = 0
    running: int = 0
    handled: int = 0
    failed: int = 0
    expired: int = 0
    deferred: int = 0
    last_error: str | None = None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]


@attrs.frozen(kw_only=True)
class ActorSnapshot(ActorFigures):
    """One actor at one moment, with its children; ``str()`` draws the tree, ``repr()`` counts the children.

    Attributes:
        path: Path in the tree.
        actor_class: Name of the class.
        state: ``"starting"``, ``"running"``, ``"restarting"``, ``"stopping"``, ``"quarantined"`` (it
            was cancelled and does not end) or ``"terminated"``.
        incarnation: Number of the incarnation that runs, from 0: how often it was restarted.
        pid: Number of the process in which it does its work; None where that is this one.
        mailbox_depth: Messages in the mailbox.
        mailbox_peak: The most that were in it at once.
        mailbox_waiting: Senders that wait for room.
        stashed: Messages that the actor has set aside.
        dropped: Messages that the mailbox dropped or refused.
        running: Messages being served.
        handled: Messages whose handler returned, deferred ones included.
        failed: Messages whose handler raised.
        expired: Requests dropped because their deadline had passed.
        deferred: Requests whose reply is given later, and has not been given.
        note: A text of the actor about itself, or None; a device tells the cost of its next recovery. The
            printed one is cut off.
        last_error: Error of the last incarnation that failed, in full, or None. The printed one is cut off.
        readings: Figures that the actor shows of itself.
        children: Snapshots of the children in start order.
    """

    incarnation: int = 0
    note: str | None = None
    readings: tuple[Reading, ...] = attrs.field(default=(), repr=False)
    children: tuple[ActorSnapshot, ...] = attrs.field(default=(), repr=lambda them: f"<{len(them)}>")

    @property
    def restarts(self) -> int:
        """The number of the actor's restarts."""
        return self.incarnation

    def walk(self) -> Iterator[ActorSnapshot]:
        """Yield this snapshot and all below it, parents before children."""
        # A tree may be deeper than Python's stack.
        left: list[ActorSnapshot] = [self]
        while left:
            node = left.pop()
            yield node
            left.extend(reversed(node.children))

    def find(self, path: str) -> ActorSnapshot:
        """Find an actor by its whole path.

        Raises:
            KeyError: There is no such actor.
        """
        for node in self.walk():
            if node.path == path:
                return node
        raise KeyError(path)

    def __str__(self) -> str:
        return "\n".join(_draw(self))

    @property
    def summary(self) -> str:
        """The actor in one line, without its children; a long note or last error is cut off."""
        parts = [f"{self.name} ({self.actor_class}) {self.state}"]
        if self.pid is not None:
            parts.append(f"process {self.pid}")
        if self.handled:
            parts.append(f"{self.handled} handled")
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self.mailbox_depth or self.mailbox_waiting:
            parts.append(f"{self.mailbox_depth + self.mailbox_waiting} queued")
        if self.deferred:
            parts.append(f"{self.deferred} in flight")
        if self.restarts:
            parts.append(f"{self.restarts} restart{'s' if self.restarts > 1 else ''}")
        if self.note is not None:
            parts.append(_shortened(self.note))
        if self.last_error is not None:
            parts.append(f"last error: {_shortened(self.last_error)}")
        return ", ".join(parts)


def _draw(root: ActorSnapshot) -> Iterator[str]:
    # Each with what stands before it, and before its children.
    left = [(root, "", "")]
    while left:
        node, first, rest = left.pop()
        yield first + node.summary
        for child in reversed(node.children):
            is_last = child is node.children[-1]
            left.append((child, rest + ("└─ " if is_last else "├─ "), rest + ("   " if is_last else "│  ")))


def _shortened(text: str) -> str:
    """Return a text in one line of a width that leaves the tree readable."""
    line = " ".join(text.split())
    return line if len(line) <= _NOTE_COLUMNS else line[: _NOTE_COLUMNS - 1].rstrip() + "…"
