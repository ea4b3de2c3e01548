"""Cells of the tables of ``trio-accel top``: numbers that a person reads, and text that fits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs
from rich.cells import cell_len
from rich.text import Text

from trio_accel.cli._errors import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trio_accel.telemetry import ActorRow, DeviceRow

__all__ = [
    "COLUMNS",
    "LEAST_NAME",
    "STATES",
    "WIDEST_NAME",
    "Column",
    "cut_off",
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
    """The time of day, of seconds since the epoch; nothing for what lies beyond all calendars."""
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
