"""The board of all demos: live on a terminal, plain lines elsewhere, nothing with ``--json``."""

from __future__ import annotations

import errno
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from trio_accel.cli._tables import render_result

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from rich.console import RenderableType

    from trio_accel.cli._results import StepResult

__all__ = ["PipeConsole", "Screen", "make_console", "open_screen", "print_line"]

_REFRESH_SECONDS = 0.08


class PipeConsole(Console):
    """A console that reports a closed pipe as ``BrokenPipeError`` instead of ending the process."""

    def on_broken_pipe(self) -> None:
        """Let the error out: the command line ends quietly."""
        raise BrokenPipeError(errno.EPIPE, "standard output was closed")


def make_console(*, is_quiet: bool = False) -> Console:
    """The console on stdout; a quiet one prints nothing."""
    return PipeConsole(file=sys.stdout, highlight=False, quiet=is_quiet)


def print_line(console: Console, markup: str) -> None:
    """Print a line: words are wrapped on a terminal, nothing is in a pipe."""
    console.print(markup, soft_wrap=not console.is_terminal)


@attrs.define(kw_only=True, eq=False)
class Screen:
    """The steps of a run: the results so far above, the running one and those to come below."""

    console: Console
    waiting: list[str]
    live: Live | None = None
    _running: str | None = attrs.field(default=None, init=False)
    _done: int = attrs.field(default=0, init=False)
    _total: int = attrs.field(default=1, init=False)
    _text: str = attrs.field(default="", init=False)
    _told: list[str] = attrs.field(factory=list[str], init=False)
    _look: Callable[[], str] | None = attrs.field(default=None, init=False)
    _spinner: Spinner = attrs.field(factory=lambda: Spinner("dots", style="cyan"), init=False)

    def show_header(self, text: str) -> None:
        """Say what runs, on which device."""
        print_line(self.console, f"[bold]{escape(text)}[/]")
        self.console.print()

    def begin(self, name: str) -> None:
        """Begin a step."""
        self.waiting = [other for other in self.waiting if other != name]
        self._running = name
        self.update(0, 1, "")

    def update(self, done: int, total: int, text: str) -> None:
        """See `Progress.update`."""
        self._done, self._total, self._text = done, total, text

    def tell(self, text: str) -> None:
        """See `Progress.tell`."""
        self._told.append(text)

    def watch(self, look: Callable[[], str]) -> None:
        """See `Progress.watch`."""
        self._look = look

    def finish(self, result: StepResult) -> None:
        """End a step, and print what it found."""
        self._running = self._look = None
        self._told.clear()
        # Otherwise the result makes room for what was drawn before.
        self.refresh()
        mark = "[green]✓[/]" if result.is_ok else "[bold red]✗[/]"
        seconds = f"[dim]({result.seconds:.1f} s)[/]"
        title = f"{mark} [bold]{escape(result.name)}[/]  {escape(result.summary)} {seconds}"
        print_line(self.console, title)
        self.console.print(render_result(result))

    def refresh(self) -> None:
        """Draw the live part anew, if there is one."""
        if self.live is not None:
            self.live.update(self._draw(), refresh=True)

    def _draw(self) -> RenderableType:
        """What the running step has told, its bar, what it watches, then the names of the steps to come."""
        lines: list[RenderableType] = [_cut(text) for text in self._told]
        if self._running is not None:
            line = Table.grid(padding=(0, 1))
            bar = ProgressBar(total=self._total, completed=self._done, width=24)
            line.add_row(
                self._spinner,
                Text(self._running, style="bold"),
                bar,
                Text(self._text, overflow="ellipsis", no_wrap=True),
            )
            lines.append(line)
        if self._look is not None:
            lines += [Text(), _cut(self._look()), Text()]
        lines += [Text(f"  {name}", style="dim") for name in self.waiting]
        return Group(*lines)


@asynccontextmanager
async def open_screen(console: Console, names: Sequence[str]) -> AsyncGenerator[Screen]:
    """A reporter that prints to ``console``, with a live part where that is a terminal."""
    screen = Screen(console=console, waiting=list(names))
    if console.quiet or not console.is_terminal or console.is_dumb_terminal:
        yield screen
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        screen.live = live
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_refresh, screen)
            yield screen
            nursery.cancel_scope.cancel()


async def _refresh(screen: Screen) -> None:
    while True:
        screen.refresh()
        await trio.sleep(_REFRESH_SECONDS)


def _cut(lines: str) -> Text:
    """Lines that end where the terminal does."""
    return Text(lines, no_wrap=True, overflow="ellipsis")
