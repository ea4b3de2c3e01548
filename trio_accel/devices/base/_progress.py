"""Progress of long work: one event, which a function of the program receives.

Loading and saving weights, trainings, calls and streams of programs report to the listener of their task, and
so does work of the program's own by `track_progress`. Tasks inherit the listener, because it is a context
variable. Work without reports emits no event, so short calls show no bar.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeAlias

import attrs

__all__ = [
    "ProgressEvent",
    "ProgressListener",
    "ProgressReport",
    "show_progress",
    "track_progress",
    "watch_progress",
]


@attrs.frozen(kw_only=True)
class ProgressEvent:
    """Progress of long work.

    Attributes:
        work: A number that all events of this work have, and no others in this process.
        name: The work, such as ``"load weights"``.
        done: The finished part, in units.
        total: The whole, in units; None if it is unknown.
        unit: The unit, such as ``"B"``, ``"steps"`` or ``"items"``; empty if it is unknown.
        note: Further figures for people, such as ``"loss 0.12"``.
        is_over: Whether this is the last event of the work, which may have failed.
    """

    work: int
    name: str
    done: float
    total: float | None
    unit: str
    note: str = ""
    is_over: bool = False


ProgressListener: TypeAlias = Callable[[ProgressEvent], object]
"""Receives events, in the thread of the work."""
_LISTENER: ContextVar[ProgressListener | None] = ContextVar("trio_accel.watch_progress", default=None)
_MAX_FINISHED = 8
_numbers = itertools.count(1)


class ProgressReport(Protocol):
    """Reports the progress of one task; see `track_progress`."""

    def __call__(self, done: float, total: float | None = None, note: str = "") -> None:
        """Report the finished part, the whole if it is known by now, and a note."""


chosen_listener: Callable[[], ProgressListener | None] = _LISTENER.get
"""Returns the listener of this task; None if it has none."""


@contextmanager
def watch_progress(listener: ProgressListener) -> Generator[None, None, None]:
    """Receive the progress of long work that begins in the body, and in tasks started there.

    An inner listener replaces an outer one. An error of the listener ends the work.

    Args:
        listener: Called with each event, in the thread of the work, which it must not block.

    Raises:
        TypeError: `listener` is async, or not callable.
    """
    if not callable(listener) or inspect.iscoroutinefunction(listener):
        raise TypeError(f"watch_progress: listener must be a function that is not async, got {listener!r}")
    outer = _LISTENER.get()
    _LISTENER.set(listener)
    try:
        yield
    finally:
        # Not by a token: another task may end an iteration that one has begun.
        _LISTENER.set(outer)


@contextmanager
def track_progress(
    name: str, *, total: float | None = None, unit: str = ""
) -> Generator[ProgressReport, None, None]:
    """Report the progress of your own work in the body.

    Args:
        name: The work, for people.
        total: The whole, in units; None if it is unknown.
        unit: The unit.

    Yields:
        A function for the reports. The end of the body makes the last event.
    """
    listener = _LISTENER.get()
    if listener is None:
        yield _ignore
        return
    event = ProgressEvent(work=next(_numbers), name=name, done=0, total=total, unit=unit)
    latest: ProgressEvent | None = None

    def report(done: float, total: float | None = None, note: str = "") -> None:
        nonlocal latest
        latest = attrs.evolve(event, done=done, total=event.total if total is None else total, note=note)
        listener(latest)

    try:
        yield report
    finally:
        if latest is not None:
            listener(attrs.evolve(latest, is_over=True))


def _ignore(done: float, total: float | None = None, note: str = "") -> None:
    """Take a report that nobody receives."""


@contextmanager
def show_progress() -> Generator[None, None, None]:
    """Show bars on the terminal, or in the notebook, for long work that begins in the body.

    The last eight bars of finished work stay. In a notebook, Rich needs the package ipywidgets.
    """
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}")
    tasks: dict[int, TaskID] = {}
    finished: list[TaskID] = []

    def show(event: ProgressEvent) -> None:
        if event.work not in tasks:
            tasks[event.work] = bars.add_task(escape(event.name), total=None, amount="")
        task, amount = tasks[event.work], escape(_amount(event))
        bars.update(task, completed=event.done, total=event.total, amount=amount)
        if event.is_over:
            bars.stop_task(task)
            finished.append(tasks.pop(event.work))
            if len(finished) > _MAX_FINISHED:
                bars.remove_task(finished.pop(0))

    with Progress(*columns, TimeRemainingColumn()) as bars, watch_progress(show):
        yield


def _amount(event: ProgressEvent) -> str:
    from rich.filesize import decimal

    is_bytes = event.unit == "B"
    parts = [event.done] if event.total is None else [event.done, event.total]
    numbers = "/".join(decimal(int(part)) if is_bytes else f"{part:,g}" for part in parts)
    return "  ".join(filter(None, (numbers, "" if is_bytes else event.unit, event.note)))
