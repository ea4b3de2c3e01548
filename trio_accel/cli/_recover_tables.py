"""How the result of ``demo recover`` looks on a terminal."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trio_accel.cli._grid import grid
from trio_accel.cli._results import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from trio_accel.cli._faults import FaultReport
    from trio_accel.cli._load import Fate
    from trio_accel.cli._recover import RecoverData
    from trio_accel.cli._witness import ArrayReport

__all__ = ["render_recovery"]

_DIGITS = 12


def render_recovery(data: RecoverData) -> RenderableType:
    """Trees, faults, arrays and fates."""
    faults = f"after {count_of(len(data.faults), 'fault')}, {data.clients} clients asking all the time"
    tables = (
        _faults(data.faults) if data.rounds == 1 else _rounds(data.faults),
        _fates(data.fates),
        _arrays(data.arrays),
    )
    parts: list[RenderableType] = [
        Text("before", style="dim"),
        _tree(data.tree_before),
        Text(faults, style="dim"),
        _tree(data.tree_after),
        *(Padding(table, (1, 0, 0, 0)) for table in tables),
        Text(),
    ]
    if any(array.lost_with is not None for array in data.arrays) and data.isolation == "inline":
        parts.append(Text("Inline, arrays are lost with their context. In a worker process they outlive it."))
        parts.append(Text())
    return Group(*parts)


def _tree(lines: str) -> RenderableType:
    """A tree whose lines end where the terminal does: one that went on below would break it."""
    return Padding(Text(lines, no_wrap=True, overflow="ellipsis"), (0, 0, 0, 2))


def _faults(faults: Sequence[FaultReport]) -> Table:
    """What was broken, and how long that was felt."""
    table = grid("fault", "generation", ">failed", ">next right product")
    for report in faults:
        recovery = "never" if report.recovery_ms is None else f"after {report.recovery_ms:.1f} ms"
        table.add_row(
            report.text,
            f"{report.generation_before} → {report.generation_after}",
            str(report.failed),
            recovery,
        )
    return table


def _rounds(faults: Sequence[FaultReport]) -> Table:
    """The same of several rounds: each fault in all of them, with medians and the longest times."""
    table = grid("fault", ">times", ">failed", ">right after", ">at most")
    for text in dict.fromkeys(report.text for report in faults):
        ours = [report for report in faults if report.text == text]
        times = [report.recovery_ms for report in ours if report.recovery_ms is not None]
        took = (statistics.median(times), max(times)) if len(times) == len(ours) else ()
        table.add_row(
            text,
            str(len(ours)),
            str(sum(report.failed for report in ours)),
            *([f"{milliseconds:.1f} ms" for milliseconds in took] or ("never", "never")),
        )
    return table


def _fates(fates: Sequence[Fate]) -> Table:
    """How many requests ended how, by the fault injected last at that time."""
    # With all faults of a GPU it is just as wide as a terminal.
    phases = list(dict.fromkeys(fate.after for fate in fates))
    table = grid("requests by last fault", *(f">{phase or 'none'}" for phase in phases), ">all")
    table.collapse_padding, table.columns[0].no_wrap = True, True
    outcomes = sorted({fate.outcome for fate in fates}, key=lambda outcome: (outcome != "completed", outcome))
    for outcome in outcomes:
        ours = Counter(fate.after for fate in fates if fate.outcome == outcome)
        table.add_row(escape(outcome), *(str(ours[phase]) for phase in phases), str(ours.total()))
    table.add_section()
    sums = Counter(fate.after for fate in fates)
    table.add_row("together", *(str(sums[phase]) for phase in phases), str(sums.total()), style="bold")
    return table


def _arrays(arrays: Sequence[ArrayReport]) -> Table:
    """What the arrays held before and after."""
    table = grid("array", ">MiB", "SHA-256 before", "SHA-256 after", "fate")
    for array in arrays:
        table.add_row(
            f"{array.dtype} {'×'.join(map(str, array.shape))}",
            f"{array.nbytes / 2**20:.0f}",
            array.sha256_before[:_DIGITS],
            array.sha256_after[:_DIGITS],
            _what_became(array),
        )
    return table


def _what_became(array: ArrayReport) -> str:
    if array.lost_with is not None:
        text = "lost, put again"
        return f"[yellow]{text}[/]" if array.is_identical else f"[bold red]{text}, different[/]"
    return "[green]identical[/]" if array.is_identical else "[bold red]changed[/]"
