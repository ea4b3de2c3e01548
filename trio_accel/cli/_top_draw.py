"""The looks of ``trio-accel top``: lines that fit the width, and as many as the height."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import ceil
from textwrap import wrap
from typing import Literal

import attrs
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from trio_accel.cli._board import count_of
from trio_accel.cli._run import printable
from trio_accel.cli._top_view import Line, View
from trio_accel.telemetry import ActorRow, DeviceRow, FailureRow, MemoryRow, SystemSnapshot

_MOST_FAILURES = 3
# Rows of the tree that stay visible when devices and failures are many.
_LEAST_ROWS = 4
_BAR_WIDTH = 8
# Seconds from which on a restart is told of in a line of its own.
_LONG_RESTART = 1.0
_LEAST_ERROR = 24
_LEAST_NAME, _WIDEST_NAME = 14, 48
# Characters of one text that are looked at: more than any terminal has columns.
_LONGEST = 4096
_STATES = {"running": "green", "starting": "cyan", "restarting": "yellow", "stopping": "cyan"}
_HINT = "q quit  ? keys  / filter  s sort  enter fold  e failures  o messages  p pause"


@attrs.frozen(kw_only=True)
class Status:
    """The state of the connection.

    Attributes:
        name: Name of the program's socket.
        pid: Its process; None where the platform does not tell.
        interval: Seconds between snapshots; None for a single one.
        silent: Seconds since the last snapshot, if that is longer than snapshots take; else 0.
    """

    name: str
    pid: int | None
    interval: float | None = None
    silent: float = 0.0


def draw_screen(
    snapshot: SystemSnapshot | None, view: View, status: Status, *, width: int, height: int
) -> RenderableType:
    """Return the whole screen, exactly ``height`` lines."""
    foot = [_footer(view, width)]
    head = [_title(status, snapshot, view, width)]
    if snapshot is None:
        body = [Text(), _one_line("waiting for the program", width, "dim")]
    elif view.page is not None:
        head.append(_totals(snapshot, width))
        page = list(_PAGES[view.page](snapshot, width))
        room = max(1, height - len(head) - len(foot))
        first = view.scrolled(len(page), room)
        body = page[first : first + room]
    else:
        head.append(_totals(snapshot, width))
        # The tree keeps a few rows. Among the others, devices come first, then one failure, then the tree.
        head += list(_devices(snapshot.devices, width))[: max(0, height - len(head) - 2 - _LEAST_ROWS)]
        room = max(1, height - len(head) - 2)
        spare = room - len(view.lines(snapshot, room))
        most = min(_MOST_FAILURES, spare) or int(room > _LEAST_ROWS)
        newest = snapshot.failures[max(0, len(snapshot.failures) - most) :]
        foot = [*_failure_lines(newest, width), *foot]
        lines = view.lines(snapshot, room - len(foot) + 1)
        body = list(_table(lines, snapshot, view, width, count=view.count))
    room = max(0, height - len(foot))
    above = (head + body)[:room]
    drawn = [*above, *[Text()] * (room - len(above)), *foot][:height]
    for line in drawn:
        line.truncate(width, overflow="ellipsis")
    return Group(*drawn)


def draw_all(snapshot: SystemSnapshot, view: View, status: Status, *, width: int) -> Sequence[Text]:
    """Everything, without a limit to the number of lines."""
    lines = view.lines(snapshot, len(snapshot.actors))
    return [
        _title(status, snapshot, view, width),
        _totals(snapshot, width),
        *_devices(snapshot.devices, width),
        *_table(lines, snapshot, view, width, count=len(lines), has_cursor=False),
        *_failure_lines(snapshot.failures[-_MOST_FAILURES:], width),
    ]


def _title(status: Status, snapshot: SystemSnapshot | None, view: View, width: int) -> Text:
    parts = [
        (status.name, "bold"),
        (f"no answer for {status.silent:.0f} s: its loop is held" if status.silent else "", "bold red"),
        ("paused" if view.is_paused else "", "bold yellow"),
        ("" if status.pid is None else f"process {status.pid}", ""),
        ("" if snapshot is None else f"up {_uptime(snapshot.uptime)}", ""),
        ("" if snapshot is None else _format_clock(snapshot.time), ""),
        ("" if status.interval is None else f"every {status.interval:g} s", "dim"),
    ]
    return _joined(parts, width)


def _uptime(seconds: float) -> str:
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60:02} min" if hours else f"{minutes} min {int(seconds) % 60:02} s"


def _totals(snapshot: SystemSnapshot, width: int) -> Text:
    rows = snapshot.actors
    not_running = sum(row.state != "running" for row in rows)
    queued = sum(row.mailbox_depth + row.mailbox_waiting for row in rows)
    # The sum includes ended actors: those below a context that was lost are others now.
    failed = sum(operation.failed for operation in snapshot.operations)
    restarts = sum(row.restarts for row in rows)
    parts = [
        (count_of(len(rows), "actor"), ""),
        (f"{not_running} not running" if not_running else "", "yellow"),
        (f"{_format_count(snapshot.rate) or 0} msg/s", ""),
        (f"{queued} queued", "") if queued else ("", ""),
        (f"{sum(row.deferred for row in rows)} in flight", ""),
        (f"{failed} failed", "red") if failed else ("", ""),
        (count_of(restarts, "restart"), "yellow") if restarts else ("", ""),
        (count_of(snapshot.dead_letters, "dead letter"), "yellow") if snapshot.dead_letters else ("", ""),
        (f"{snapshot.quarantined} quarantined", "red") if snapshot.quarantined else ("", ""),
    ]
    return _joined(parts, width)


def _devices(devices: Sequence[DeviceRow], width: int) -> Iterator[Text]:
    for device in devices:
        memory, recovery, cost = device.memory, device.recovery_time, device.recovery_cost
        parts = [
            (device.path.rpartition("/")[2], "bold cyan"),
            (device.state, _STATES.get(device.state, "red")),
            (f"gen {device.generation}", ""),
            (count_of(device.losses, "loss") if device.losses else "", "yellow"),
            ("" if memory is None else _used(memory), ""),
            (f"{device.in_flight} in flight", ""),
            ("" if recovery is None else f"recovered in {_format_seconds(recovery)}", ""),
            ("" if cost is None else f"{_start(device)} {_format_seconds(cost)}", ""),
            (f"{device.pending} waiting" if device.pending else "", "yellow"),
            (_where(device), "dim"),
        ]
        yield _joined(parts, width)
        # The parts are worth a line where a person waits for them.
        if device.recovery_text is not None and (cost or 0.0) >= _LONG_RESTART:
            # The reason has a line of its own: it is what a person can change.
            for text in device.recovery_text.split("; ", 1):
                yield _one_line(f"  {text}", width, "yellow")


def _start(device: DeviceRow) -> str:
    """Name the start whose time is known: the first one takes longer than a recovery."""
    return "first start" if (device.recovery_text or "").startswith("first start") else "restart"


def _where(device: DeviceRow) -> str:
    if device.pid is not None:
        return f"process {device.pid}"
    return "no process now" if device.isolation == "process" else device.isolation


def _used(memory: MemoryRow) -> str:
    used, limit = memory.used, memory.limit
    filled = ceil(_BAR_WIDTH * min(1.0, used / limit)) if limit > 0 else 0
    bar = f"[{'━' * filled}{' ' * (_BAR_WIDTH - filled)}]"
    return f"{_format_bytes(used)} of {_format_bytes(limit)} {bar}"


def _table(
    lines: Sequence[Line],
    snapshot: SystemSnapshot,
    view: View,
    width: int,
    *,
    count: int,
    has_cursor: bool = True,
) -> Iterator[Text]:
    devices = {device.path: device for device in snapshot.devices}
    labels = [cell_len(line.before + line.label[:_LONGEST]) + (line.hidden > 0) * 6 for line in lines]
    wanted = max(labels, default=0)
    columns = _fitting(width, wanted)
    name = width - sum(column.width + 1 for column in columns)
    name = max(1, min(name, max(wanted, _LEAST_NAME)))
    title = f"actor {len(lines)}/{count}" if len(lines) < count else "actor"
    yield _header(columns, name, view, width, title)
    for line in lines:
        is_selected = has_cursor and line.row.path == view.selected
        yield _row(line, columns, name, devices.get(line.row.path), width, is_selected=is_selected)


def _fitting(width: int, wanted: int) -> Sequence[_Column]:
    """Return the columns that find room beside the names."""
    room = width - min(max(wanted, _LEAST_NAME), _WIDEST_NAME, max(_LEAST_NAME, width // 2))
    chosen: set[_Column] = set()
    for column in sorted(_COLUMNS, key=lambda column: column.rank):
        if column.width + 1 > room:
            break
        room -= column.width + 1
        chosen.add(column)
    return [column for column in _COLUMNS if column in chosen]


def _header(columns: Sequence[_Column], name: int, view: View, width: int, title: str) -> Text:
    line = Text(_fit(title, name), style="bold underline")
    for column in columns:
        style = "reverse" if column.sort == view.sort else ""
        line.append(" ").append(column.fit(column.heading), style=style)
    line.truncate(width, pad=True)
    return line


def _row(
    line: Line,
    columns: Sequence[_Column],
    name: int,
    device: DeviceRow | None,
    width: int,
    *,
    is_selected: bool,
) -> Text:
    hidden = f" +{line.hidden}" if line.hidden else ""
    text = Text(line.before + _shown(line.label), no_wrap=True, overflow="ellipsis")
    text.truncate(name - len(hidden))
    text.append(hidden).align("left", name)
    text.stylize("dim", 0, len(line.before))
    if not line.is_match:
        text.stylize("dim")
    for column in columns:
        style = _STATES.get(line.row.state, "red") if column.heading == "state" else column.style
        text.append(" ").append(column.fit(_shown(column.cell(line.row, device))), style)
    # The error is shown where there is room behind all columns.
    if line.row.last_error is not None and width - text.cell_len >= _LEAST_ERROR:
        text.append("  ").append(_shown(" ".join(line.row.last_error.split())), "red")
    text.truncate(width, overflow="ellipsis", pad=is_selected)
    return Text(text.plain, style="reverse") if is_selected else text


def _footer(view: View, width: int) -> Text:
    if view.is_typing:
        return _joined(
            [(f"filter: {view.filter}_", "bold"), ("enter keep", "dim"), ("escape end", "dim")], width
        )
    parts = [
        (f"filter: {view.filter}" if view.filter else "", "bold"),
        ("" if view.sort == "tree" else f"by {view.sort}", "bold"),
        (view.page or "", "bold"),
        ("" if view.page is None else "escape back", "dim"),
    ]
    return _joined([*parts, *((hint, "dim") for hint in _HINT.split("  "))], width)


@attrs.frozen
class _Column:
    """A column of the table of actors.

    Attributes:
        heading: Its first line.
        width: Its width in columns of the terminal.
        rank: Where there is no room for all, those of the lowest rank stay.
        cell: The text for an actor, and for the device if it is one.
        sort: The order that it shows.
        style: How it looks, but for the state.
        align: Where its words stand; numbers stand to the right.
    """

    heading: str
    width: int
    rank: int
    cell: Callable[[ActorRow, DeviceRow | None], str]
    sort: str = ""
    style: str = ""
    align: Literal["left", "right"] = "right"

    def fit(self, text: str) -> str:
        """Make a cell as wide as the column."""
        return _fit(text, self.width, self.align)


def _format_count(number: float) -> str:
    """Return a number of at most five characters; nothing for none at all."""
    if number <= 0:
        return ""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size * (10 if unit == "k" else 1):
            return f"{number / size:.3g}{unit}" if number < 999.5 * size else f"{number / size:.0f}{unit}"
    return f"{number:.0f}" if number >= 99.95 or number == int(number) else f"{number:.1f}"


def _format_clock(seconds: float) -> str:
    """Return the time of day, of seconds since the epoch; nothing for what is beyond all calendars."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""


def _format_seconds(seconds: float | None) -> str:
    """Return a time of at most seven characters."""
    if seconds is None:
        return ""
    for unit, size in (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        value = seconds / size
        if value < 999.5:
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def _format_bytes(number: float) -> str:
    """Return the bytes with a binary unit, at most nine characters."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1023.5:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 99.95 else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def _memory(row: ActorRow, device: DeviceRow | None) -> str:
    """Show all arrays of a device, or those that another actor has made."""
    if device is not None:
        return "" if device.memory is None else _format_bytes(device.memory.used)
    return _format_bytes(row.array_bytes) if row.array_bytes else ""


# The order is that of the screen.
_COLUMNS = (
    _Column("state", 11, 0, lambda row, _: row.state, align="left"),
    _Column("msg/s", 6, 1, lambda row, _: _format_count(row.rate), "rate"),
    _Column("queue", 5, 3, lambda row, _: _format_count(row.mailbox_depth + row.mailbox_waiting), "queue"),
    _Column("flight", 6, 5, lambda row, _: _format_count(row.deferred), "flight"),
    _Column("p50", 8, 6, lambda row, _: _format_seconds(row.p50), "p50"),
    _Column("p99", 8, 2, lambda row, _: _format_seconds(row.p99), "p99"),
    _Column("failed", 6, 7, lambda row, _: _format_count(row.failed), "failed", "red"),
    _Column("restarts", 8, 4, lambda row, _: _format_count(row.restarts), "restarts", "yellow"),
    _Column("gen", 4, 9, lambda _, device: "" if device is None else str(device.generation)),
    _Column("bytes", 9, 8, _memory),
    _Column("handled", 7, 10, lambda row, _: _format_count(row.handled)),
    _Column("process", 7, 11, lambda row, _: "" if row.pid is None else str(row.pid), style="dim"),
    _Column("class", 19, 12, lambda row, _: row.actor_class, style="dim", align="left"),
)


def _shown(text: str) -> str:
    """Return the part of a text that a terminal may show; the text may be megabytes long."""
    return printable(text[:_LONGEST])


def _one_line(text: str, width: int, style: str = "") -> Text:
    line = Text(_shown(text), style=style, no_wrap=True, overflow="ellipsis")
    line.truncate(width, overflow="ellipsis")
    return line


def _joined(parts: Sequence[tuple[str, str]], width: int) -> Text:
    """Join as many parts as find room, with the gap of two spaces; the first one always."""
    line = Text(no_wrap=True)
    for text, style in parts:
        shown = _shown(text)
        if not shown:
            continue
        if line and line.cell_len + 2 + cell_len(shown) > width:
            continue
        line.append("  " if line else "").append(shown, style=style)
    line.truncate(width, overflow="ellipsis")
    return line


def _fit(text: str, width: int, align: Literal["left", "right"] = "left") -> str:
    """Exactly so wide: cut at the end, or filled up."""
    line = Text(text[:_LONGEST], overflow="ellipsis")
    line.align(align, max(0, width))
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
    ("c", "counters and other figures of the program and of patterns"),
    ("p", "pause; also the space bar"),
    ("escape", "back to the whole tree"),
    ("?", "this page"),
)


def _failure_lines(failures: Sequence[FailureRow], width: int) -> Iterator[Text]:
    for failure in failures:
        times = f" (x{failure.count})" if failure.count > 1 else ""
        if times and failure.first is not None:
            times = f" (x{failure.count} since {_format_clock(failure.first)})"
        yield _joined([(_format_clock(failure.time), "dim")], width) + _one_line(
            f" {failure.path} {failure.kind}{times}: {failure.error}", max(1, width - 8), "red"
        )


def _failures_page(snapshot: SystemSnapshot, width: int) -> Iterator[Text]:
    if not snapshot.failures:
        yield _one_line("nothing has failed since recording began", width, "dim")
    for failure in reversed(snapshot.failures):
        yield Text()
        yield from _failure_lines([failure], width)
        for line in failure.traceback.rstrip().splitlines():
            yield _one_line(f"  {line}", width)


def _operations_page(snapshot: SystemSnapshot, width: int) -> Iterator[Text]:
    headings = ("msg/s", "done", "failed", "cancelled", "dropped", "p50", "p99")
    line = _columns((6, 6, 6, 9, 7, 8, 8), width)
    yield _one_line(line("message", headings).ljust(width), width, "reverse")
    for one in sorted(snapshot.operations, key=lambda one: -one.rate):
        counts = (one.rate, one.completed, one.failed, one.cancelled, one.dropped)
        cells = [*map(_format_count, counts), _format_seconds(one.p50), _format_seconds(one.p99)]
        path = one.path.partition("/")[2] or one.path
        yield _one_line(line(f"{one.message_type} {path}", cells), width, "red" if one.failed else "")


def _libraries_page(snapshot: SystemSnapshot, width: int) -> Iterator[Text]:
    headings = ("waiting", "flight", "plans", "found", "evicted", "workspace", "templates", "found")
    line = _columns((7, 6, 6, 6, 7, 9, 9, 6), width)
    yield _one_line(line("library", headings).ljust(width), width, "reverse")
    for device in snapshot.devices:
        for one in device.libraries:
            plans, templates = one.plans, one.templates
            cells = [_format_count(count) for count in (one.waiting, one.in_flight, plans.made)]
            cells += [_percent(plans.share), _format_count(plans.evicted)]
            cells.append(_format_bytes(one.workspace) if one.workspace else "")
            cells += [_format_count(templates.made), _percent(templates.share)]
            name = f"{device.path.rpartition('/')[2]} {one.library.rpartition(':')[2]}"
            yield _one_line(line(name, cells), width)
    if not any(device.libraries for device in snapshot.devices):
        yield _one_line("no library of a device is in use", width, "dim")


def _readings_page(snapshot: SystemSnapshot, width: int) -> Iterator[Text]:
    line = _columns((10, 10, 24), width)
    yield _one_line(line("figure", ("value", "mean", "actor")).ljust(width), width, "reverse")
    for one in snapshot.readings:
        labels = ", ".join(f"{name}={value}" for name, value in one.labels if value)
        values, mean = sum(one.counts), ""
        if values:
            mean = f"{one.value / values:.3g}"
        shown = _format_count(values if one.kind == "histogram" else one.value)
        path = one.path.partition("/")[2] or one.path
        yield _one_line(line(f"{one.name} {labels}", [shown or "0", mean, path]), width)
    if not snapshot.readings:
        yield _one_line("no figures: recorder.counter() makes one", width, "dim")


def _percent(share: float | None) -> str:
    """Write a share in whole percent, rounded down: 100 % is all of them."""
    return "" if share is None else f"{int(100 * share)} %"


def _columns(widths: Sequence[int], width: int) -> Callable[[str, Sequence[str]], str]:
    """Make the function that draws a line of a name and cells; cells at the end are left out without room."""
    room = width - _LEAST_NAME
    kept = max(1, sum(used <= room for used in accumulate(wide + 1 for wide in widths)))
    name = max(1, min(width - sum(widths[:kept]) - kept, _WIDEST_NAME))

    def line(first: str, cells: Sequence[str]) -> str:
        chosen = zip(cells[:kept], widths, strict=False)
        return _fit(first, name) + "".join(f" {cell:>{wide}}" for cell, wide in chosen)

    return line


def _help_page(_: SystemSnapshot, width: int) -> Iterator[Text]:
    yield Text()
    room = max(8, width - 12)
    for key, meaning in _KEYS:
        first, *others = wrap(meaning, room)
        yield _joined([(f"{key:>10}", "bold")], width) + _one_line(f"  {first}", max(1, width - 10))
        yield from (_one_line(f"{'':12}{other}", width) for other in others)


_PAGES: Mapping[str, Callable[[SystemSnapshot, int], Iterator[Text]]] = {
    "failures": _failures_page,
    "operations": _operations_page,
    "libraries": _libraries_page,
    "readings": _readings_page,
    "help": _help_page,
}
