"""``trio-accel top``: a running program's devices, actors and last failures, once or live in a terminal."""

from __future__ import annotations

import json
import os
import sys
import termios
import time
import tty
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import cast

import trio
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import Segment, SegmentLines
from rich.table import Table
from rich.text import Text

from trio_accel.cli._console import can_move, count_of, make_console
from trio_accel.cli._run import InputError, at_a_second_signal, printable, run_async, run_for_json
from trio_accel.telemetry import (
    ActorRow,
    DeviceRow,
    FailureRow,
    LibraryRow,
    Observation,
    ObservedProgram,
    ObserverSocketError,
    SystemSnapshot,
    list_programs,
    open_observation,
)

# Seconds for which a program may hold its loop before it is called silent; and given up, before its first
# snapshot.
_SILENT_SECONDS, _ANSWER_SECONDS = 2.0, 10.0
# Seconds from one snapshot to the next, until it is seen: those of a large tree come less often than was
# asked for.
_FIRST_PACE, _REDRAW_SECONDS = 3.0, 0.5
_SOON_SECONDS, _MORE_LOOKS = 0.1, 10
# Columns of a pipe: room for the whole table.
_PIPE_WIDTH = 180
_MOST_FAILURES = 3
# Characters of one text that are shown.
_LONGEST = 1000
_SHORTEST_NAME, _LEAST_NAME, _LONGEST_UPTIME = 5, 14, 10**12
# Seconds from which on the parts of a restart are told.
_LONG_RESTART = 1.0
_STATES = {"running": "green", "starting": "cyan", "restarting": "yellow", "stopping": "cyan"}
_KINDS = {
    "message": "failed",
    "restart": "was restarted",
    "end": "ended for good",
    "supervisor": "gave up, as what is below it failed too often",
}
_HOW_TO_OPEN = "a program opens one by: async with ta.telemetry.open_socket(system)"


def show_top(wanted: str | None, *, interval: float, is_once: bool, is_json: bool) -> int:
    """Show a program until the user leaves, or once.

    Returns:
        The exit code, 0.

    Raises:
        InputError: There is no such program, or more than one.
        ObserverSocketError: It does not answer, or has ended.
    """
    path = find_program(wanted, list_programs())
    if is_json:
        return _print_json(path)
    console = make_console()
    if is_once or not can_move(console):
        return run_async(partial(_print_once, console, path))
    return run_async(partial(_show_live, console, path, interval))


def find_program(wanted: str | None, programs: Sequence[ObservedProgram]) -> Path:
    """Find the socket of the program: by name, by process, by path, or the only one there is.

    Raises:
        InputError: There is none, or more than one.
    """
    if wanted is not None and "/" in wanted:
        return Path(wanted)
    found = [one for one in programs if wanted in {None, one.name, str(one.pid)}]
    if not found and wanted:
        found = [one for one in programs if one.name.startswith(wanted)]
    if len(found) == 1:
        return found[0].path
    if found:
        raise InputError(f"{len(found)} programs are meant, name one of them: {_listed(found)}")
    if not programs:
        raise InputError(f"no program of this user has an observer socket open; {_HOW_TO_OPEN}")
    raise InputError(f"there is no program {wanted!r}; there are: {_listed(programs)}")


def _listed(programs: Sequence[ObservedProgram]) -> str:
    return ", ".join(one.name if one.pid is None else f"{one.name} (process {one.pid})" for one in programs)


@asynccontextmanager
async def _observed(
    path: Path, interval: float, more_looks: int = 0
) -> AsyncGenerator[tuple[Observation, SystemSnapshot]]:
    """Connect, and wait for a snapshot; a device's own counts come a moment later, if it answers."""
    async with AsyncExitStack() as stack:
        try:
            with trio.fail_after(_ANSWER_SECONDS):
                observation = await stack.enter_async_context(open_observation(path, interval=interval))
                snapshot = await _next(observation)
                for _ in range(more_looks):
                    if all(device.age is not None for device in snapshot.devices):
                        break
                    snapshot = await _next(observation)
        except trio.TooSlowError:
            raise ObserverSocketError(
                f"the program at {path} does not answer: its loop is held for more than {_ANSWER_SECONDS:g} s"
            ) from None
        yield observation, snapshot


async def _next(observation: Observation) -> SystemSnapshot:
    try:
        return await anext(observation)
    except StopAsyncIteration:
        name = observation.program.name
        raise ObserverSocketError(f"{name} closed the connection: has it ended?") from None


async def _print_once(console: Console, path: Path) -> int:
    async with _observed(path, _SOON_SECONDS, _MORE_LOOKS) as (observation, snapshot):
        if not console.is_terminal:
            console.width = _PIPE_WIDTH
        actors = _actors(snapshot.actors, console.width)
        console.print(Group(*_head(observation.program, snapshot), actors, *_foot(snapshot)))
    return 0


def _print_json(path: Path) -> int:
    document: dict[str, object] = {"command": "top", "path": str(path), "exit_code": 0, "error": None}

    async def look() -> int:
        async with _observed(path, _SOON_SECONDS, _MORE_LOOKS) as (observation, snapshot):
            document.update(name=observation.program.name, snapshot=json.loads(snapshot.to_json()))
        return 0

    def render(code: int, error: str | None) -> str:
        return json.dumps({**document, "exit_code": code, "error": error}, allow_nan=False, indent=2)

    return run_for_json(look, render)


async def _show_live(console: Console, path: Path, interval: float) -> int:
    # Errors of the first connection are printed before the screen is taken.
    async with _observed(path, interval) as (observation, first), trio.open_nursery() as nursery:
        descriptor = sys.stdout.fileno()
        with _taken(console, descriptor) as live:
            nursery.start_soon(_leave_at_q, descriptor, nursery.cancel_scope)
            newest, came, pace, silent = first, trio.current_time(), max(interval, _FIRST_PACE), 0.0
            while True:
                live.update(draw_screen(console, observation.program, newest, silent), refresh=True)
                with trio.move_on_after(_REDRAW_SECONDS):
                    newest = await _next(observation)
                    pace = max(interval, trio.current_time() - came)
                    came = trio.current_time()
                since = trio.current_time() - came
                silent = since if since > pace + max(pace, _SILENT_SECONDS) else 0.0
    return 0


@contextmanager
def _taken(console: Console, descriptor: int) -> Generator[Live]:
    """Take the screen and the keys; whatever ends the command gives them back."""
    live = Live(console=console, auto_refresh=False, screen=True)
    before = cast("list[int | list[bytes | int]]", termios.tcgetattr(descriptor))

    def give_back() -> None:
        # It does not wait for the output: a terminal that is stopped takes none.
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
        live.stop()

    try:
        # Ctrl-C and Ctrl-\ stay signals. Ctrl-Z would leave the shell this screen, so it does nothing.
        tty.setcbreak(descriptor, termios.TCSANOW)
        now = termios.tcgetattr(descriptor)
        now[6][termios.VSUSP] = bytes([os.fpathconf(descriptor, "PC_VDISABLE")])
        termios.tcsetattr(descriptor, termios.TCSANOW, now)
        live.start()
        with at_a_second_signal(give_back):
            yield live
    finally:
        give_back()


async def _leave_at_q(descriptor: int, scope: trio.CancelScope) -> None:
    """Wait for the key, until the terminal is gone."""
    data = b" "
    while data and b"q" not in data:
        await trio.lowlevel.wait_readable(descriptor)
        try:
            data = os.read(descriptor, 1024)
        except OSError:
            return
    if data:
        scope.cancel(reason="the user leaves")


def draw_screen(
    console: Console, program: ObservedProgram, snapshot: SystemSnapshot, silent: float = 0.0
) -> RenderableType:
    """Return the whole screen; the actors have at least the room that devices and failures leave them.

    Args:
        console: Where it is to be drawn.
        program: The program.
        snapshot: Its newest snapshot.
        silent: Seconds since that, if they are longer than snapshots take; else 0.
    """
    width, height = console.size
    head = _fitting(console, _head(program, snapshot, silent), max(1, height // 2))
    foot = _fitting(console, _foot(snapshot), height // 4)
    room = height - len(head) - len(foot) - 1
    actors = console.render_lines(_actors(snapshot.actors, width, room - 1), pad=False)
    lines = [*head, *actors[: max(0, room)], *foot]
    lines += [[]] * (height - 1 - len(lines))
    hint = "q leaves; trio-accel top --json has tracebacks" if foot else "q leaves"
    lines += console.render_lines(Text(hint, "dim", no_wrap=True, overflow="ellipsis"), pad=False)
    return SegmentLines(lines[:height], new_lines=True)


def _fitting(console: Console, parts: Sequence[RenderableType], room: int) -> list[list[Segment]]:
    """Draw as many parts as find room: whole ones, but for the first."""
    lines: list[list[Segment]] = []
    for part in parts:
        drawn = console.render_lines(part, pad=False)
        if lines and len(lines) + len(drawn) > room:
            break
        lines += drawn
    return lines[:room]


def _head(program: ObservedProgram, snapshot: SystemSnapshot, silent: float = 0.0) -> list[RenderableType]:
    rows = snapshot.actors
    not_running = sum(row.state != "running" for row in rows)
    queued = sum(row.mailbox_depth + row.mailbox_waiting for row in rows)
    # Actors that have ended count, too: those below a context that was lost are others now.
    failed = sum(operation.failed for operation in snapshot.operations)
    restarts = sum(row.restarts for row in rows)
    title = _told(
        (program.name, "bold"),
        (f"no answer for {silent:.0f} s: its loop is held" if silent else "", "bold red"),
        ("" if program.pid is None else f"process {program.pid}", ""),
        (f"up {timedelta(seconds=min(int(snapshot.uptime), _LONGEST_UPTIME))}", ""),
        (_clock(snapshot.time), ""),
    )
    totals = _told(
        (count_of(len(rows), "actor"), ""),
        (f"{not_running} not running" if not_running else "", "yellow"),
        (f"{_count(snapshot.rate) or 0} messages/s", ""),
        (f"{queued} queued" if queued else "", ""),
        (f"{sum(row.deferred for row in rows)} in flight", ""),
        (f"{failed} failed" if failed else "", "red"),
        (count_of(restarts, "restart") if restarts else "", "yellow"),
        (count_of(snapshot.dead_letters, "dead letter") if snapshot.dead_letters else "", "yellow"),
        (f"{snapshot.quarantined} cancelled without end" if snapshot.quarantined else "", "red"),
    )
    devices = [(_name(device), _device(device)) for device in snapshot.devices]
    libraries = [(_name(device), _library(one)) for device in snapshot.devices for one in device.libraries]
    return [title, totals, *_rows([*devices, *libraries])]


def _foot(snapshot: SystemSnapshot) -> list[RenderableType]:
    newest = snapshot.failures[: -_MOST_FAILURES - 1 : -1]
    return _rows([(_clock(one.time), _failure(one)) for one in newest])


def _rows(pairs: Sequence[tuple[str, Text]]) -> list[RenderableType]:
    """Draw a name and what is told of it in two columns; lines that go on stay in theirs."""
    widest = max((cell_len(name) for name, _ in pairs), default=0)
    drawn: list[RenderableType] = []
    for name, text in pairs:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True, min_width=widest)
        table.add_column(overflow="fold")
        table.add_row(Text(name), text)
        drawn.append(table)
    return drawn


def _told(*parts: tuple[str, str]) -> Text:
    """Join texts with their styles as in a sentence; empty ones are left out."""
    return Text(", ").join(Text(_shown(text), style) for text, style in parts if text)


def _name(device: DeviceRow) -> str:
    return _shown(device.path.rpartition("/")[2])


def _device(device: DeviceRow) -> Text:
    memory, recovery, cost = device.memory, device.recovery_time, device.recovery_text or ""
    # What makes a restart long is told where it is: a person can change that.
    if (device.recovery_cost or 0.0) < _LONG_RESTART:
        cost = cost.partition(":")[0]
    where = "no process now" if device.isolation == "process" else device.isolation
    return _told(
        (device.state, _STATES.get(device.state, "red")),
        (f"generation {device.generation}", ""),
        (f"{count_of(device.losses, 'context')} lost" if device.losses else "", "yellow"),
        ("" if memory is None else f"{_scaled(memory.used, _BYTES)} of {_scaled(memory.limit, _BYTES)}", ""),
        (f"{device.in_flight} in flight", ""),
        (f"{device.pending} waiting" if device.pending else "", "yellow"),
        ("" if recovery is None else f"recovered in {_seconds(recovery)}", ""),
        (where if device.pid is None else f"process {device.pid}", ""),
        (cost, ""),
    )


def _library(one: LibraryRow) -> Text:
    share = one.plans.share
    return _told(
        (one.library.rpartition(":")[2], "bold"),
        (f"{one.waiting} waiting", ""),
        (f"{one.in_flight} in flight", ""),
        (count_of(one.plans.made, "plan") if one.plans.made else "", ""),
        # Rounded down: 100 % is all of them.
        ("" if share is None else f"{int(100 * share)} % found again", ""),
        (f"{_scaled(one.workspace, _BYTES)} of workspace" if one.workspace else "", ""),
    )


def _failure(one: FailureRow) -> Text:
    over = f" over {one.message_type}" if one.message_type else ""
    since = "" if one.first is None else f" since {_clock(one.first)}"
    times = f", {one.count} times{since}" if one.count > 1 else ""
    what = f"{_shown(one.path)} {_KINDS.get(one.kind, one.kind)}{over}{times}"
    return Text(f"{_shown(what)}: ").append(_shown(one.error), "red")


def _actors(rows: Sequence[ActorRow], width: int, room: int | None = None) -> RenderableType:
    """Draw the tree of actors with as many columns as find room, and rows."""
    count = len(rows) if room is None or len(rows) <= room else max(0, room - 1)
    lines = [
        (Text(before, "dim").append(_shown(row.name), "not dim"), row)
        for before, row in islice(_tree(rows), count)
    ]
    widest = max([_SHORTEST_NAME, *(label.cell_len for label, _ in lines)])
    left = width - min(widest, max(_LEAST_NAME, width // 2))
    ends = accumulate(size + 1 for _, size, _ in _COLUMNS)
    columns = [column for column, end in zip(_COLUMNS, ends, strict=True) if end <= left]
    table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False, header_style="bold")
    names = max(1, width - sum(size + 1 for _, size, _ in columns))
    table.add_column("actor", no_wrap=True, overflow="ellipsis", max_width=names)
    for heading, size, _ in columns:
        side = "left" if heading in _WORDS else "right"
        table.add_column(heading, justify=side, no_wrap=True, overflow="ellipsis", width=size)
    for label, row in lines:
        state = _STATES.get(row.state, "red")
        cells = [Text(_shown(cell(row)), state if heading == "state" else "") for heading, _, cell in columns]
        table.add_row(label, *cells)
    if count == len(rows):
        return table
    return Group(table, Text(f"and {len(rows) - count} more, which trio-accel top --once prints", "dim"))


def _tree(rows: Sequence[ActorRow]) -> Iterator[tuple[str, ActorRow]]:
    """Yield the actors with the lines before their names; those whose parents are missing, too."""
    children: dict[str | None, list[ActorRow]] = {}
    there = {row.path for row in rows}
    for row in rows:
        children.setdefault(row.parent if row.parent in there else None, []).append(row)
    # A tree may be deeper than Python's stack.
    left = [("", "", row) for row in reversed(children.get(None, ()))]
    while left:
        before, rest, row = left.pop()
        yield before, row
        below = children.get(row.path, ())
        for child in reversed(below):
            bend, line = ("└─ ", "   ") if child is below[-1] else ("├─ ", "│  ")
            left.append((rest + bend, rest + line, child))


def _shown(text: str) -> str:
    """Return the part of a text that a terminal may show; the text may be megabytes long."""
    return printable(" ".join(text[:_LONGEST].split()))


def _clock(seconds: float) -> str:
    """Return the time of day, of seconds since the epoch; nothing for what is beyond all calendars."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""


def _scaled(number: float, units: Sequence[tuple[str, float]]) -> str:
    """Return a number in three digits, in the smallest unit that has room for it."""
    unit, size = next((one for one in units if number < 999.5 * one[1]), units[-1])
    value = round(number / size, 2)
    return f"{value:.3g}{unit}" if value < 999.5 else f"{value:.0f}{unit}"


def _count(number: float) -> str:
    """Return a number; nothing for none at all."""
    return _scaled(number, _COUNTS) if number > 0 else ""


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else _scaled(seconds, _TIMES)


_COUNTS = (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9))
_TIMES = ((" µs", 1e-6), (" ms", 1e-3), (" s", 1.0), (" h", 3600.0))
_BYTES = ((" B", 1.0), (" KiB", 2.0**10), (" MiB", 2.0**20), (" GiB", 2.0**30), (" TiB", 2.0**40))
# The order is that of the screen: where there is no room for all, the first ones stay.
_COLUMNS: Sequence[tuple[str, int, Callable[[ActorRow], str]]] = (
    ("state", 11, lambda row: row.state),
    ("msg/s", 6, lambda row: _count(row.rate)),
    ("queue", 5, lambda row: _count(row.mailbox_depth + row.mailbox_waiting)),
    ("p99", 8, lambda row: _seconds(row.p99)),
    ("failed", 6, lambda row: _count(row.failed)),
    ("restarts", 8, lambda row: _count(row.restarts)),
    ("flight", 6, lambda row: _count(row.deferred)),
    ("p50", 8, lambda row: _seconds(row.p50)),
    ("handled", 7, lambda row: _count(row.handled)),
    ("arrays", 9, lambda row: _scaled(row.array_bytes, _BYTES) if row.array_bytes else ""),
    ("process", 7, lambda row: "" if row.pid is None else str(row.pid)),
    ("class", 19, lambda row: row.actor_class),
)
_WORDS = {"state", "class"}
