"""How ``trio-accel top`` looks: lines that fit the width, and as many as the height."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import attrs
from rich.cells import cell_len
from rich.console import Group
from rich.text import Text

from trio_accel.cli._errors import printable
from trio_accel.cli._results import count_of
from trio_accel.cli._top_cells import (
    COLUMNS,
    LEAST_NAME,
    PAGES,
    STATES,
    WIDEST_NAME,
    Column,
    cut_off,
    failure_lines,
    fit,
    format_bytes,
    format_clock,
    format_count,
    format_seconds,
    joined,
    one_line,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from trio_accel.cli._top_view import Line, View
    from trio_accel.telemetry import ActorRow, DeviceRow, SystemSnapshot

__all__ = ["Status", "draw_all", "draw_screen"]

_MOST_FAILURES = 3
# Rows of the tree that stay visible when devices and failures are many.
_LEAST_ROWS = 4
_BAR_WIDTH = 8
# Seconds from which on a restart is told of in a line of its own.
_LONG_RESTART = 1.0
_LEAST_ERROR = 24
_HINT = "q quit  ? keys  / filter  s sort  enter fold  e failures  o messages  p pause"


@attrs.frozen(kw_only=True)
class Status:
    """How the connection is.

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
    """The whole screen, exactly ``height`` lines."""
    foot = [_footer(view, width)]
    head = [_title(status, snapshot, view, width)]
    if snapshot is None:
        body = [Text(), one_line("waiting for the program", width, "dim")]
    elif view.page is not None:
        head.append(_totals(snapshot, width))
        page = list(PAGES[view.page](snapshot, width))
        room = max(1, height - len(head) - len(foot))
        first = view.scrolled(len(page), room)
        body = page[first : first + room]
    else:
        head.append(_totals(snapshot, width))
        # The tree keeps a few rows. Of the others, devices come first, then one failure, then the tree.
        head += list(_devices(snapshot.devices, width))[: max(0, height - len(head) - 2 - _LEAST_ROWS)]
        room = max(1, height - len(head) - 2)
        spare = room - len(view.lines(snapshot, room))
        most = min(_MOST_FAILURES, spare) or int(room > _LEAST_ROWS)
        newest = snapshot.failures[max(0, len(snapshot.failures) - most) :]
        foot = [*failure_lines(newest, width), *foot]
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
        *failure_lines(snapshot.failures[-_MOST_FAILURES:], width),
    ]


def _title(status: Status, snapshot: SystemSnapshot | None, view: View, width: int) -> Text:
    parts = [(status.name, "bold")]
    if status.silent:
        parts.append((f"no answer for {status.silent:.0f} s: its loop is held", "bold red"))
    if view.is_paused:
        parts.append(("paused", "bold yellow"))
    if status.pid is not None:
        parts.append((f"process {status.pid}", ""))
    if snapshot is not None:
        parts.append((f"up {_uptime(snapshot.uptime)}", ""))
        parts.append((format_clock(snapshot.time), ""))
    if status.interval is not None:
        parts.append((f"every {status.interval:g} s", "dim"))
    return joined(parts, width)


def _uptime(seconds: float) -> str:
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60:02} min" if hours else f"{minutes} min {int(seconds) % 60:02} s"


def _totals(snapshot: SystemSnapshot, width: int) -> Text:
    rows = snapshot.actors
    not_running = sum(row.state != "running" for row in rows)
    queued = sum(row.mailbox_depth + row.mailbox_waiting for row in rows)
    # Of ended actors, too: those below a context that was lost are others now.
    failed = sum(operation.failed for operation in snapshot.operations)
    restarts = sum(row.restarts for row in rows)
    parts = [
        (count_of(len(rows), "actor"), ""),
        (f"{not_running} not running", "yellow") if not_running else ("", ""),
        (f"{format_count(snapshot.rate) or 0} msg/s", ""),
        (f"{queued} queued", "") if queued else ("", ""),
        (f"{sum(row.deferred for row in rows)} in flight", ""),
        (f"{failed} failed", "red") if failed else ("", ""),
        (count_of(restarts, "restart"), "yellow") if restarts else ("", ""),
        (count_of(snapshot.dead_letters, "dead letter"), "yellow") if snapshot.dead_letters else ("", ""),
        (f"{snapshot.quarantined} quarantined", "red") if snapshot.quarantined else ("", ""),
    ]
    return joined([part for part in parts if part[0]], width)


def _devices(devices: Sequence[DeviceRow], width: int) -> Iterator[Text]:
    for device in devices:
        parts = [
            (device.path.rpartition("/")[2], "bold cyan"),
            (device.state, STATES.get(device.state, "red")),
        ]
        parts.append((f"gen {device.generation}", ""))
        if device.losses:
            parts.append((count_of(device.losses, "loss"), "yellow"))
        if device.memory is not None:
            used, limit = device.memory.used, device.memory.limit
            parts.append((f"{format_bytes(used)} of {format_bytes(limit)} {_bar(used, limit)}", ""))
        parts.append((f"{device.in_flight} in flight", ""))
        if device.recovery_time is not None:
            parts.append((f"recovered in {format_seconds(device.recovery_time)}", ""))
        if device.recovery_cost is not None:
            parts.append((f"restart {format_seconds(device.recovery_cost)}", ""))
        if device.pending:
            parts.append((f"{device.pending} waiting", "yellow"))
        parts.append((device.isolation if device.pid is None else f"process {device.pid}", "dim"))
        yield joined(parts, width)
        # The parts are worth a line where a person waits for them.
        if device.recovery_text is not None and (device.recovery_cost or 0.0) >= _LONG_RESTART:
            # The reason has a line of its own: it is what a person can change.
            for text in device.recovery_text.split("; ", 1):
                yield one_line(f"  {text}", width, "yellow")


def _bar(used: int, limit: int) -> str:
    filled = ceil(_BAR_WIDTH * min(1.0, used / limit)) if limit > 0 else 0
    return f"[{'━' * filled}{' ' * (_BAR_WIDTH - filled)}]"


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
    wanted = max((cell_len(line.before + line.label) + (line.hidden > 0) * 6 for line in lines), default=0)
    columns = _fitting(width, wanted)
    name = width - sum(column.width + 1 for column in columns)
    name = max(1, min(name, max(wanted, LEAST_NAME)))
    yield _header(
        columns, name, view, width, f"actor {len(lines)}/{count}" if len(lines) < count else "actor"
    )
    for line in lines:
        is_selected = has_cursor and line.row.path == view.selected
        yield _row(line, columns, name, devices.get(line.row.path), width, is_selected=is_selected)


def _fitting(width: int, wanted: int) -> Sequence[Column]:
    """The columns that find room beside the names."""
    room = width - min(max(wanted, LEAST_NAME), WIDEST_NAME, max(LEAST_NAME, width // 2))
    chosen: set[Column] = set()
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        if column.width + 1 > room:
            break
        room -= column.width + 1
        chosen.add(column)
    return [column for column in COLUMNS if column in chosen]


def _header(columns: Sequence[Column], name: int, view: View, width: int, title: str) -> Text:
    line = Text(fit(title, name), style="bold underline")
    for column in columns:
        is_sorted = view.sort.value is not None and column.sort == view.sort.name
        line.append(" ").append(_aligned(column, column.heading), style="reverse" if is_sorted else "")
    line.truncate(width, pad=True)
    return line


def _row(
    line: Line,
    columns: Sequence[Column],
    name: int,
    device: DeviceRow | None,
    width: int,
    *,
    is_selected: bool,
) -> Text:
    hidden = f" +{line.hidden}" if line.hidden else ""
    label = line.before + printable(line.label)
    text = Text(fit(cut_off(label, name - len(hidden)) + hidden, name), no_wrap=True)
    text.stylize("dim", 0, len(line.before))
    if not line.is_match:
        text.stylize("dim")
    for column in columns:
        cell = printable(column.cell(line.row, device))
        text.append(" ").append(_aligned(column, cell), _style(column, line.row))
    # Where there is room behind all columns.
    if line.row.last_error is not None and width - text.cell_len >= _LEAST_ERROR:
        text.append("  ").append(printable(" ".join(line.row.last_error.split())), "red")
    text.truncate(width, overflow="ellipsis", pad=is_selected)
    return Text(text.plain, style="reverse") if is_selected else text


def _style(column: Column, row: ActorRow) -> str:
    match column.heading:
        case "state":
            return STATES.get(row.state, "red")
        case "failed":
            return "red"
        case "restarts":
            return "yellow"
        case "class" | "process":
            return "dim"
        case _:
            return ""


def _aligned(column: Column, text: str) -> str:
    """A cell as wide as its column: words to the left, numbers to the right."""
    fitted = cut_off(text, column.width)
    gap = " " * (column.width - cell_len(fitted))
    return fitted + gap if column.heading in {"state", "class"} else gap + fitted


def _footer(view: View, width: int) -> Text:
    if view.is_typing:
        return joined(
            [(f"filter: {view.filter}_", "bold"), ("enter keep", "dim"), ("escape end", "dim")], width
        )
    parts = [(f"filter: {view.filter}", "bold")] if view.filter else []
    if view.sort.value is not None:
        parts.append((f"by {view.sort.name}", "bold"))
    if view.page is not None:
        parts.append((view.page, "bold"))
        parts.append(("escape back", "dim"))
    return joined([*parts, *((hint, "dim") for hint in _HINT.split("  "))], width)
