"""Taking snapshots of actors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ._failures import describe
from ._tree import ActorSnapshot

if TYPE_CHECKING:
    from ._cell import Cell

__all__ = ["snapshot_all"]


def snapshot_all(actors: Mapping[str, Cell]) -> tuple[ActorSnapshot, ...]:
    """Take snapshots of the children of a supervisor, and of all below them."""
    # Parents before children on the way down, so children before parents on the way back.
    below: list[tuple[Cell, tuple[Cell, ...]]] = []
    left = list(actors.values())
    while left:
        cell = left.pop()
        own = tuple(cell.children.values())
        below.append((cell, own))
        left += own
    done: dict[Cell, ActorSnapshot] = {}
    for cell, own in reversed(below):
        done[cell] = _snapshot(cell, tuple(done.pop(child) for child in own))
    return tuple(done[cell] for cell in actors.values())


def _snapshot(cell: Cell, children: tuple[ActorSnapshot, ...]) -> ActorSnapshot:
    error, incarnation = cell.last_error, cell.incarnation
    shown = incarnation.shown() if incarnation is not None and incarnation.shown is not None else ()
    return ActorSnapshot(
        path=cell.path,
        actor_class=cell.actor_class.__name__,
        state=str(cell.state),
        incarnation=max(cell.number, 0),
        pid=None if incarnation is None else cell.pid,
        mailbox_depth=cell.mailbox.depth,
        mailbox_peak=cell.mailbox.peak,
        mailbox_waiting=cell.mailbox.waiting,
        stashed=cell.mailbox.stashed,
        dropped=cell.mailbox.dropped,
        running=len(incarnation.serving) if incarnation is not None else 0,
        handled=cell.outcomes.handled,
        failed=cell.outcomes.failed,
        expired=cell.outcomes.expired,
        deferred=len(cell.outcomes.deferred),
        last_error=None if error is None else describe(error),
        children=children + shown,
    )
