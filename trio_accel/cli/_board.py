"""The board of all demos: what a step found, as lines on a terminal, live while it runs, or as JSON."""

from __future__ import annotations

import errno
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Protocol, cast

import attrs
import numpy as np
import trio
from numpy.typing import NDArray
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

import trio_accel as ta
from trio_accel.cli._run import printable

_REFRESH_SECONDS = 0.08


@attrs.frozen(kw_only=True)
class Check:
    """A number that must not exceed a limit; NaN exceeds every limit.

    Attributes:
        name: The measured quantity.
        value: The measured number.
        limit: The largest number that is right.
    """

    name: str
    value: float
    limit: float

    @property
    def is_ok(self) -> bool:
        """Whether the number is within its limit."""
        return bool(self.value <= self.limit)


class StepData(attrs.AttrsInstance, Protocol):
    """The figures of one step: a frozen attrs class, whose fields are what ``--json`` prints."""

    def figures(self) -> RenderableType:
        """Draw them for a terminal."""
        ...


@attrs.frozen(kw_only=True)
class StepResult:
    """The outcome of one step.

    Attributes:
        name: The step's name on the command line; the runner sets it and the seconds.
        summary: One line for a person.
        seconds: How long the step took.
        checks: Comparisons with NumPy or SciPy; the step holds if each is within its limit.
        notes: Anything that a reader should know, one line each.
        data: The step's own figures.
    """

    name: str = ""
    summary: str
    seconds: float = 0.0
    checks: Sequence[Check]
    notes: Sequence[str] = ()
    data: StepData

    @property
    def is_ok(self) -> bool:
        """Whether there is a check and every check is within its limit."""
        return bool(self.checks) and all(check.is_ok for check in self.checks)


@attrs.define(kw_only=True, eq=False)
class Screen:
    """What a step does, live while it runs, and its result."""

    console: Console
    live: Live | None = None
    _running: str | None = attrs.field(default=None, init=False)
    _bar: ProgressBar = attrs.field(factory=lambda: ProgressBar(width=24), init=False)
    _text: str = attrs.field(default="", init=False)
    _told: list[str] = attrs.field(factory=list[str], init=False)
    _look: Callable[[], str] | None = attrs.field(default=None, init=False)
    _spinner: Spinner = attrs.field(factory=lambda: Spinner("dots", style="cyan"), init=False)

    def begin(self, name: str, header: str) -> None:
        """Say what runs, on which device, and begin."""
        print_line(self.console, f"[bold]{escape(header)}[/]")
        self.console.print()
        self._running = name
        self.update(0, 1, "")

    def update(self, done: int, total: int, text: str) -> None:
        """Show that ``done`` of ``total`` parts are finished; ``text`` says what is going on."""
        self._bar.update(done, total)
        self._text = text

    def tell(self, text: str) -> None:
        """Tell what has happened; a person reads it until the step ends."""
        self._told.append(text)

    def watch(self, look: Callable[[], str]) -> None:
        """Show the lines that ``look`` returns, anew all the time until the step ends."""
        self._look = look

    def finish(self, result: StepResult) -> None:
        """End a step, and print its result."""
        self._running = self._look = None
        self._told.clear()
        # The board is drawn once more, as the result makes room for what was drawn before.
        self.refresh()
        mark = "[green]✓[/]" if result.is_ok else "[bold red]✗[/]"
        seconds = f"[dim]({result.seconds:.1f} s)[/]"
        title = f"{mark} [bold]{escape(result.name)}[/]  {escape(result.summary)} {seconds}"
        print_line(self.console, title)
        parts: list[RenderableType] = [result.data.figures(), _checks(result)]
        parts += [Text(f"note: {printable(note)}", style="yellow") for note in result.notes]
        self.console.print(Padding(Group(*parts), (0, 0, 1, 2)))

    def refresh(self) -> None:
        """Draw the live part anew, if there is one."""
        if self.live is not None:
            self.live.update(self._draw(), refresh=True)

    def _draw(self) -> RenderableType:
        """Draw the running step with its bar and watched values."""
        lines: list[RenderableType] = [_cut(text) for text in self._told]
        if self._running is not None:
            line = Table.grid(padding=(0, 1))
            line.add_row(
                self._spinner,
                Text(self._running, style="bold"),
                self._bar,
                Text(self._text, overflow="ellipsis", no_wrap=True),
            )
            lines.append(line)
        if self._look is not None:
            lines += [Text(), _cut(self._look()), Text()]
        return Group(*lines)


@asynccontextmanager
async def open_screen(console: Console) -> AsyncGenerator[Screen]:
    """A reporter that prints to ``console``, with a live part where that is a terminal."""
    screen = Screen(console=console)
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


@attrs.frozen(kw_only=True)
class Bench:
    """The means of a step.

    Attributes:
        system: The actor system.
        device: The device that every step of this run uses.
        progress: Where to report.
    """

    system: ta.System
    device: ta.Device
    progress: Screen


class Step(ABC):
    """One step of the demo, an attrs class of its options.

    Attributes:
        name: Its name on the command line.
    """

    name: ClassVar[str]

    @abstractmethod
    async def run(self, bench: Bench) -> StepResult:
        """Do it.

        Raises:
            InputError: The work showed that an input cannot be used.
        """


def relative_error(result: NDArray[Any], reference: NDArray[Any]) -> float:
    """Compare a result with a reference, relative to its Frobenius norm."""
    return float(np.linalg.norm(result - reference) / np.linalg.norm(reference))


def worst_of(errors: Sequence[float]) -> float:
    """Find the largest error; NaN if one is NaN, or if there is none."""
    # `max` would pass over a NaN that does not come first.
    return math.nan if any(map(math.isnan, errors)) else max(errors, default=math.nan)


def count_of(number: int, noun: str) -> str:
    """``"1 crash"``, but ``"2 crashes"``: a number with its noun."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('sh', 'ss')) else 's'}"


def as_json(value: object) -> object:
    """``value`` in terms of JSON: attrs classes become objects, numbers that are not finite become null."""
    if value is None or isinstance(value, str | int | float):
        return None if isinstance(value, float) and not math.isfinite(value) else value
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value)
        return {str(key): as_json(item) for key, item in items.items()}
    if isinstance(value, Sequence):
        return [as_json(item) for item in cast("Sequence[object]", value)]
    cls = type(value)
    if not attrs.has(cls):
        raise TypeError(f"{cls.__name__} has no form in JSON")
    found = {field.name: as_json(getattr(value, field.name)) for field in attrs.fields(cls)}
    if isinstance(value, StepResult):
        return {"name": value.name, "ok": value.is_ok, **found}
    return {**found, "ok": value.is_ok} if isinstance(value, Check) else found


class PipeConsole(Console):
    """A console that reports a closed pipe as ``BrokenPipeError`` instead of ending the process."""

    def on_broken_pipe(self) -> None:
        """Let the error out: the command line ends quietly."""
        raise BrokenPipeError(errno.EPIPE, "standard output was closed")


def make_console(*, is_quiet: bool = False) -> Console:
    """Return the console on stdout; a quiet one prints nothing."""
    return PipeConsole(file=sys.stdout, highlight=False, quiet=is_quiet)


def print_line(console: Console, markup: str) -> None:
    """Print a line: words are wrapped on a terminal, nothing is in a pipe."""
    console.print(markup, soft_wrap=not console.is_terminal)


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Return the names and values in two columns without lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(printable(value)))
    return table


def grid(*headings: str) -> Table:
    """Make a table with a line below its head; ``>`` in front of a heading puts its column to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    return table


def _checks(result: StepResult) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    for check in result.checks:
        mark = "[green]✓[/]" if check.is_ok else "[bold red]✗[/]"
        table.add_row(mark, escape(check.name), f"  {_comparison(check)}")
    return table


def _comparison(check: Check) -> str:
    if isinstance(check.value, int) and isinstance(check.limit, int):
        return f"{check.value}, allowed {check.limit}"
    return f"{check.value:.1e}, allowed {check.limit:.1e}"
