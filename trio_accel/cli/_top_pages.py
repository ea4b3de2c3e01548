"""What ``trio-accel top`` shows in place of the tree: failures, messages by type, libraries, the keys."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

from rich.text import Text

from trio_accel.cli._top_cells import (
    LEAST_NAME,
    WIDEST_NAME,
    fit,
    format_bytes,
    format_clock,
    format_count,
    format_seconds,
    joined,
    one_line,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trio_accel.telemetry import FailureRow, SystemSnapshot

__all__ = ["PAGES", "failure_lines"]

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
