"""Which running task is which actor's."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from ._envelope import Party

__all__ = ["actor_path_of", "cell_of_task", "cells", "lend", "running", "running_cells"]

cells: dict[trio.lowlevel.Task, Party] = {}
"""The actors that tasks are running for, of all systems: an actor of one may ask an actor of another.

Each task takes its own entry away.
"""


@contextmanager
def running(cell: Party) -> Generator[trio.lowlevel.Task, None, None]:
    """Run the current task for an actor."""
    task = trio.lowlevel.current_task()
    cells[task] = cell
    try:
        yield task
    finally:
        del cells[task]


def lend(task: trio.lowlevel.Task, cell: Party | None) -> Party | None:
    """Let a task run for an actor, or for none; returns for which it did before."""
    before = cells.pop(task, None)
    if cell is not None:
        cells[task] = cell
    return before


def cell_of_task() -> Party | None:
    """The actor that the current task is running for; None for a task that a handler has started."""
    return cells.get(trio.lowlevel.current_task())


def running_cells() -> list[Party]:
    """All actors that have tasks."""
    return list(dict.fromkeys(cells.values()))


def actor_path_of(task: trio.lowlevel.Task) -> str | None:
    """Path of the actor whose task this is; None if it is no actor's. For tests that look for leaks."""
    cell = cells.get(task)
    return None if cell is None else cell.path
