"""Snapshots of a system's actors, and the figures that actors and programs publish."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import attrs

from ._numbers import is_number

__all__ = ["ActorFigures", "ActorSnapshot", "Buckets", "Reading"]


@attrs.frozen(kw_only=True)
class Reading:
    """A figure of an actor or a program at one moment.

    Attributes:
        name: Words joined by underscores, with the unit last if there is one: ``"queue_wait_seconds"``.
        kind: ``"counter"``, which only rises until its owner restarts, ``"gauge"`` or ``"histogram"``.
        help: The meaning, in a sentence.
        value: The value; for a histogram, the sum of all values.
        labels: Names and values that distinguish figures of the same name; use only a few different ones.
        bounds: Upper ends of a histogram's ranges, in rising order.
        counts: The number of values in each range; one more than there are bounds.
        path: Path of the actor; ``""`` for a program's own figure.
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
    """Counts values by range, for a histogram.

    Args:
        bounds: Upper ends of the ranges, in rising order; a value equal to a bound counts as below it.
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
            ValueError: The value is an integer too large for a float.
        """
        try:
            self._total += value
        except OverflowError:
            raise ValueError("Buckets.add: value is too large for a float") from None
        self._counts[bisect_left(self._bounds, value)] += 1

    def reading(self, name: str, help: str, labels: tuple[tuple[str, str], ...] = ()) -> Reading:  # noqa: A002  # as in metrics
        """Return the counts as a figure."""
        return Reading(
            name=name,
            kind="histogram",
            help=help,
            value=self._total,
            labels=labels,
            bounds=self._bounds,
            counts=tuple(self._counts),
        )


# The maximum width of a printed note or error, in columns.
_NOTE_COLUMNS = 100


@attrs.frozen(kw_only=True)
class ActorFigures:
    """The figures of one actor that snapshots and recordings share."""

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
            was cancelled but did not end) or ``"terminated"``.
        incarnation: Number of the current incarnation, from 0, which equals the number of restarts.
        pid: Number of the process that does the actor's work; None for this process.
        mailbox_depth: The number of messages in the mailbox.
        mailbox_peak: The maximum of `mailbox_depth` so far.
        mailbox_waiting: The number of senders that wait for room.
        stashed: The number of stashed messages.
        dropped: The number of messages that the mailbox dropped or refused.
        running: The number of messages being served.
        handled: The number of messages with a handler that returned, including deferred replies.
        failed: The number of messages with a handler that raised.
        expired: The number of requests dropped because their deadline had passed.
        deferred: The number of open requests with a deferred reply.
        note: The actor's text about itself, or None. A device reports the cost of its next recovery here. The
            printed text is truncated.
        last_error: Error of the last failed incarnation, in full, or None. The printed text is truncated.
        readings: Figures that the actor publishes.
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
        """Yield this snapshot and all its descendants, parents before children."""
        # Use a list instead of recursion, because a tree may be deeper than Python's stack.
        pending: list[ActorSnapshot] = [self]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(reversed(node.children))

    def find(self, path: str) -> ActorSnapshot:
        """Find an actor by its full path.

        Raises:
            KeyError: The tree does not contain such an actor.
        """
        for node in self.walk():
            if node.path == path:
                return node
        raise KeyError(path)

    def __str__(self) -> str:
        return "\n".join(_draw(self))

    @property
    def summary(self) -> str:
        """The actor in one line, without its children; a long note or last error is truncated."""
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
    # Each node with the prefix of its own line, and the prefix of its children's lines.
    pending = [(root, "", "")]
    while pending:
        node, first, rest = pending.pop()
        yield first + node.summary
        for child in reversed(node.children):
            is_last = child is node.children[-1]
            pending.append(
                (child, rest + ("└─ " if is_last else "├─ "), rest + ("   " if is_last else "│  "))
            )


def _shortened(text: str) -> str:
    """Return a text as one line, short enough to keep the tree readable."""
    line = " ".join(text.split())
    return line if len(line) <= _NOTE_COLUMNS else line[: _NOTE_COLUMNS - 1].rstrip() + "…"
