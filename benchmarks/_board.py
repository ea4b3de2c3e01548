"""The results of benchmarks as they come, and as a table at the end."""

from __future__ import annotations

from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

import attrs
from rich import box
from rich.console import Group
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ._harness import Verdict
from ._table import HEADER, cells, table

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from rich.console import Console, RenderableType

    from ._harness import Result

__all__ = ["Board", "open_board", "print_results"]

_REDRAW_SECONDS = 0.1
# Lines of the terminal that are no rows of the table: its head, the running benchmark, the cursor.
_OTHER_LINES = 5
_UNBOUNDED = 10_000
_STYLES = {Verdict.MET: "green", Verdict.MISSED: "bold red", Verdict.NONE: "dim", Verdict.NOT_RUN: "yellow"}


@attrs.define(kw_only=True, eq=False)
class Board:
    """What has been measured so far, and how far the running benchmark is.

    It is drawn between two measurements and never during one: drawing takes the interpreter for
    milliseconds, which would be measured too.

    Attributes:
        console: The terminal.
        total: Number of benchmarks.
        live: Where it is drawn; None where nothing moves.
        results: The rows so far.
    """

    console: Console
    total: int
    live: Live | None
    results: Sequence[Result] = ()
    _number: int = attrs.field(default=0, init=False)
    _name: str = attrs.field(default="", init=False)
    _drawn: float = attrs.field(default=0.0, init=False)

    def begin(self, name: str) -> None:
        """A benchmark begins."""
        self._number += 1
        self._name = name
        self._drawn = 0.0
        self.update(0, 0)

    def update(self, done: int, total: int) -> None:
        """So many of its measurements are done; a total of 0 is one that is not known."""
        if self.live is None or perf_counter() - self._drawn < _REDRAW_SECONDS:
            return
        self.live.update(self._draw(done, total), refresh=True)
        self._drawn = perf_counter()

    def _draw(self, done: int, total: int) -> RenderableType:
        line = Table.grid(padding=(0, 1))
        measured = f"{done} of {total} measurements, " if total else ""
        line.add_row(
            ProgressBar(total=total or 1, completed=done, width=24),
            Text(self._name, style="bold"),
            Text(f"{measured}benchmark {self._number} of {self.total}", style="dim"),
        )
        room = max(1, self.console.height - _OTHER_LINES)
        newest = self.results[-room:]
        return Group(_fitting(self.console, newest), line) if newest else line


@contextmanager
def open_board(console: Console, total: int) -> Generator[Board]:
    """A board that is drawn where the console is a terminal that can."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield Board(console=console, total=total, live=None)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield Board(console=console, total=total, live=live)


def print_results(console: Console, results: Sequence[Result]) -> None:
    """Print the table; with all its columns in a pipe, as it fits on a terminal."""
    if console.is_terminal:
        console.print(_fitting(console, results))
    else:
        console.print(table(results), markup=False, soft_wrap=True)


def _fitting(console: Console, results: Sequence[Result]) -> Table:
    """With quartiles where they find room, else without."""
    whole = _table(results, has_quartiles=True)
    unbounded = console.options.update(max_width=_UNBOUNDED)
    is_narrow = Measurement.get(console, unbounded, whole).maximum > console.width
    return _table(results, has_quartiles=False) if is_narrow else whole


def _table(results: Sequence[Result], *, has_quartiles: bool) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in HEADER:
        drawn.add_column(heading, no_wrap=heading == "name", overflow="fold")
    for result in results:
        *others, verdict = cells(result, has_quartiles=has_quartiles)
        drawn.add_row(*map(Text, others), Text(verdict, style=_STYLES[result.verdict]))
    return drawn
