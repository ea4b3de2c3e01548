"""Output of the commands: the console, lines, two columns of facts, and objects as JSON."""

from __future__ import annotations

import errno
import math
import sys
from collections.abc import Iterable
from typing import Any

import attrs
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trio_accel.cli._run import printable


class PipeConsole(Console):
    """A console that reports a closed pipe as ``BrokenPipeError`` instead of ending the process."""

    def on_broken_pipe(self) -> None:
        """Let the error out: the command line ends quietly."""
        raise BrokenPipeError(errno.EPIPE, "standard output was closed")


def make_console(*, is_quiet: bool = False) -> Console:
    """Return the console on stdout; a quiet one prints nothing."""
    return PipeConsole(file=sys.stdout, highlight=False, quiet=is_quiet)


def can_redraw(console: Console) -> bool:
    """Return whether it is a terminal with redraw; environment variables may pretend that it is one."""
    return console.is_terminal and not console.is_dumb_terminal and sys.stdout.isatty()


def cut(lines: str) -> Text:
    """Return lines truncated at the terminal's width, because wrapped lines would break a tree."""
    return Text(lines, no_wrap=True, overflow="ellipsis")


def print_line(console: Console, part: RenderableType) -> None:
    """Print markup, or a table: words are wrapped on a terminal, nothing is in a pipe."""
    console.print(part, soft_wrap=not console.is_terminal)


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Return the names and values in two columns without lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(printable(value)))
    return table


def count_of(number: int, noun: str) -> str:
    """``"1 fault"``, but ``"2 faults"``: a number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def as_json(instance: attrs.AttrsInstance) -> dict[str, Any]:
    """Return an attrs object as JSON types: infinities and NaN become null."""
    return attrs.asdict(instance, value_serializer=lambda _, __, value: _finite(value))


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
