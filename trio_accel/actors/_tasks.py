"""Which running task is which actor's."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from ._cell import Cell

__all__ = ["actor_path_of", "cell_of", "cell_of_task", "lend", "running", "running_cells"]

# Of all systems: an actor of one may ask an actor of another. Each task takes its own entry away.
_cells: dict[trio.lowlevel.Task, Cell] = {}


@contextmanager
def running(cell: Cell) -> Generator[trio.lowlevel.Task, None, None]:
    """Run the current task for an actor."""
    task = trio.lowlevel.current_task()
    _cells[task] = cell
    try:
        yield task
    finally:
        del _cells[task]


def lend(task: trio.lowlevel.Task, cell: Cell | None) -> Cell | None:
    """Let a task run for an actor, or for none; returns for which it did before."""
    before = _cells.pop(task, None)
    if cell is not None:
        _cells[task] = cell
    return before


def cell_of(task: trio.lowlevel.Task) -> Cell | None:
    """The actor that a task is running for."""
    return _cells.get(task)


def cell_of_task() -> Cell | None:
    """The actor that the current task is running for; None for a task that a handler has started."""
    return _cells.get(trio.lowlevel.current_task())


def running_cells() -> list[Cell]:
    """All actors that have tasks."""
    return list(dict.fromkeys(_cells.values()))


def actor_path_of(task: trio.lowlevel.Task) -> str | None:
    """Path of the actor whose task this is; None if it is no actor's. For tests that look for leaks."""
    cell = _cells.get(task)
    return None if cell is None else cell.path
