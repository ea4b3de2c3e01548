"""Tasks: the actor that each runs for, and the outcome that wakes it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from typing import Any, Final, final

import outcome
import trio

from ._messages import Party

__all__ = ["WOKEN", "actor_path_of"]

cells: dict[trio.lowlevel.Task, Party] = {}
"""The actors that tasks are running for, of all systems: an actor of one may ask an actor of another.

Each task takes its own entry away.
"""


@final
class _Woken(outcome.Outcome[None]):
    """None, for any number of tasks. Trio makes a `Value` each time: three tenths of a wake-up."""

    __slots__ = ()

    def unwrap(self) -> None:
        """Tell nothing."""

    def send(self, gen: Generator[Any, None, Any]) -> Any:
        """Go on with a generator."""
        return gen.send(None)

    async def asend(self, agen: AsyncGenerator[Any, None]) -> Any:
        """Go on with an async generator."""
        return await agen.asend(None)


WOKEN: Final[outcome.Outcome[None]] = _Woken()
"""The outcome None for `trio.lowlevel.reschedule`, shared by all tasks that are told nothing."""


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
    """Find the actor that the current task is running for; None for a task that a handler has started."""
    return cells.get(trio.lowlevel.current_task())


def running_cells() -> list[Party]:
    """List all actors that have tasks."""
    return list(dict.fromkeys(cells.values()))


def actor_path_of(task: trio.lowlevel.Task) -> str | None:
    """Find the path of the actor whose task this is; None if it is no actor's."""
    cell = cells.get(task)
    return None if cell is None else cell.path
