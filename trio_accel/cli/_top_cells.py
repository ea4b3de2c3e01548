"""Cells and pages of ``trio-accel top``: numbers that a person reads, text that fits, lists."""

from __future__ import annotations

import time
from textwrap import wrap
from typing import TYPE_CHECKING

import attrs
from rich.cells import cell_len
from rich.text import Text

from trio_accel.cli._errors import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trio_accel.telemetry import ActorRow, DeviceRow, FailureRow, SystemSnapshot

__all__ = [
    "COLUMNS",
    "LEAST_NAME",
    "PAGES",
    "STATES",
    "WIDEST_NAME",
    "Column",
    "cut_off",
    "failure_lines",
    "fit",
    "format_bytes",
    "format_clock",
    "format_count",
    "format_seconds",
    "joined",
    "one_line",
]

LEAST_NAME, WIDEST_NAME = 14, 48
STATES = {"running": "green", "starting": "cyan", "restarting": "yellow", "stopping": "cyan"}


@attrs.frozen
class Column:
    """A column of the table of actors.

    Attributes:
        heading: Its first line.
        width: Its width in columns of the terminal.
        rank: Where there is no room for all, those of the lowest rank stay.
        cell: The text for an actor, and for the device if it is one.
        sort: The order that it shows.
    """

    heading: str
    width: int
    rank: int
    cell: Callable[[ActorRow, DeviceRow | None], str]
    sort: str = ""


def format_count(number: float) -> str:
    """A number of at most five characters; nothing for none at all."""
    if number <= 0:
        return ""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size * (10 if unit == "k" else 1):
            return f"{number / size:.3g}{unit}" if number < 999.5 * size else f"{number / size:.0f}{unit}"
    return f"{number:.0f}" if number >= 99.95 or number == int(number) else f"{number:.1f}"


def format_clock(seconds: float) -> str:
    """The time of day, of seconds since the epoch; nothing for what is beyond all calendars."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""


def format_seconds(seconds: float | None) -> str:
    """A time of at most seven characters."""
    if seconds is None:
        return ""
    for unit, size in (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        value = seconds / size
        if value < 999.5:
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def format_bytes(number: float) -> str:
    """Bytes with a binary unit, at most nine characters."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1023.5:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 99.95 else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def _memory(row: ActorRow, device: DeviceRow | None) -> str:
    """Of a device all its arrays, of another actor those that it has made."""
    if device is not None:
        return "" if device.memory is None else format_bytes(device.memory.used)
    return format_bytes(row.array_bytes) if row.array_bytes else ""


# In the order of the screen.
COLUMNS = (
    Column("state", 11, 0, lambda row, _: row.state),
    Column("msg/s", 6, 1, lambda row, _: format_count(row.rate), "rate"),
    Column("queue", 5, 3, lambda row, _: format_count(row.mailbox_depth + row.mailbox_waiting), "queue"),
    Column("flight", 6, 5, lambda row, _: format_count(row.deferred), "flight"),
    Column("p50", 8, 6, lambda row, _: format_seconds(row.p50), "p50"),
    Column("p99", 8, 2, lambda row, _: format_seconds(row.p99), "p99"),
    Column("failed", 6, 7, lambda row, _: format_count(row.failed), "failed"),
    Column("restarts", 8, 4, lambda row, _: format_count(row.restarts), "restarts"),
    Column("gen", 4, 9, lambda _, device: "" if device is None else str(device.generation)),
    Column("bytes", 9, 8, _memory),
    Column("handled", 7, 10, lambda row, _: format_count(row.handled)),
    Column("process", 7, 11, lambda row, _: "" if row.pid is None else str(row.pid)),
    Column("class", 19, 12, lambda row, _: row.actor_class),
)


def one_line(text: str, width: int, style: str = "") -> Text:
    line = Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")
    line.truncate(width, overflow="ellipsis")
    return line


def joined(parts: Sequence[tuple[str, str]], width: int) -> Text:
    """As many parts as find room, with the gap of two spaces; the first one always."""
    line = Text(no_wrap=True)
    for text, style in parts:
        shown = printable(text)
        if line and line.cell_len + 2 + cell_len(shown) > width:
            continue
        line.append("  " if line else "").append(shown, style=style)
    line.truncate(width, overflow="ellipsis")
    return line


def fit(text: str, width: int) -> str:
    """Exactly so wide."""
    fitted = cut_off(text, width)
    return fitted + " " * (width - cell_len(fitted))


def cut_off(text: str, width: int) -> str:
    """At most so wide, cut at the end."""
    line = Text(text)
    line.truncate(max(0, width), overflow="ellipsis")
    return line.plain


_KEYS = (
    ("q", "leave"),
    ("/", "filter: type a part of a path, class or state; enter keeps it, escape ends it"),
    ("s  S", "sort by the next column, or the one before"),
    ("up  down", "select; also k and j, page up, page down, home, end"),
    ("enter", "fold what is below the selected actor, or unfold it; also left and right"),
    ("e", "the last failures, with their tracebacks"),
    ("o", "messages by actor and type"),
    ("l", "libraries of devices, with their plans"),
    ("p", "pause; also the space bar"),
    ("escape", "back to the whole tree"),
    ("?", "this page"),
)


def failure_lines(failures: Sequence[FailureRow], width: int) -> Iterator[Text]:
    for failure in failures:
        times = f" (x{failure.count})" if failure.count > 1 else ""
        yield joined([(format_clock(failure.time), "dim")], width) + one_line(
            f" {failure.path} {failure.kind}{times}: {failure.error}", max(1, width - 8), "red"
        )


def _failures_page(snapshot: SystemSnapshot, width: int) -> Iterator[Text]:
    if not snapshot.failures:
        yield one_line("nothing has failed since recording began", width, "dim")
    for failure in reversed(snapshot.failures):
        yield Text()
        yield from failure_lines([failure], width)
        for line in failure.traceback.rstrip().splitlines():
            yield one_line(f"  {line}", width)


def _operations_page(snapshot: SystemSnapshot, width: int) -> Iterator[Text]:
    headings = ("msg/s", "done", "failed", "cancelled", "dropped", "p50", "p99")
    line = _columns((6, 6, 6, 9, 7, 8, 8), width)
    yield one_line(line("message", headings).ljust(width), width, "reverse")
    for one in sorted(snapshot.operations, key=lambda one: -one.rate):
        counts = (one.rate, one.completed, one.failed, one.cancelled, one.dropped)
        cells = [*map(format_count, counts), format_seconds(one.p50), format_seconds(one.p99)]
        path = one.path.partition("/")[2] or one.path
        yield one_line(line(f"{one.message_type} {path}", cells), width, "red" if one.failed else "")


def _libraries_page(snapshot: SystemSnapshot, width: int) -> Iterator[Text]:
    headings = ("waiting", "flight", "plans", "found", "evicted", "workspace", "templates", "found")
    line = _columns((7, 6, 6, 6, 7, 9, 9, 6), width)
    yield one_line(line("library", headings).ljust(width), width, "reverse")
    for device in snapshot.devices:
        for one in device.libraries:
            plans, templates = one.plans, one.templates
            cells = [format_count(count) for count in (one.waiting, one.in_flight, plans.made)]
            cells += [_percent(plans.share), format_count(plans.evicted)]
            cells.append(format_bytes(one.workspace) if one.workspace else "")
            cells += [format_count(templates.made), _percent(templates.share)]
            name = f"{device.path.rpartition('/')[2]} {one.library.rpartition(':')[2]}"
            yield one_line(line(name, cells), width)
    if not any(device.libraries for device in snapshot.devices):
        yield one_line("no library of a device is in use", width, "dim")


def _percent(share: float | None) -> str:
    """In whole percent, rounded down: 100 % is all of them."""
    return "" if share is None else f"{int(100 * share)} %"


def _columns(widths: Sequence[int], width: int) -> Callable[[str, Sequence[str]], str]:
    """What makes a line of a name and cells, of which those at the end are left out that find no room."""
    kept = max(1, sum(1 for at in range(len(widths)) if sum(widths[: at + 1]) + at + 1 + LEAST_NAME <= width))
    name = max(1, min(width - sum(widths[:kept]) - kept, WIDEST_NAME))

    def line(first: str, cells: Sequence[str]) -> str:
        chosen = zip(cells[:kept], widths, strict=False)
        return fit(first, name) + "".join(f" {cell:>{wide}}" for cell, wide in chosen)

    return line


def _help_page(_: SystemSnapshot, width: int) -> Iterator[Text]:
    yield Text()
    room = max(8, width - 12)
    for key, meaning in _KEYS:
        first, *others = wrap(meaning, room)
        yield joined([(f"{key:>10}", "bold")], width) + one_line(f"  {first}", max(1, width - 10))
        yield from (one_line(f"{'':12}{other}", width) for other in others)


PAGES: Mapping[str, Callable[[SystemSnapshot, int], Iterator[Text]]] = {
    "failures": _failures_page,
    "operations": _operations_page,
    "libraries": _libraries_page,
    "help": _help_page,
}
