"""How the result of each step looks on a terminal: one table, and one list of facts, for all of them."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trio_accel.cli._chart import ResidualChart
from trio_accel.cli._errors import printable
from trio_accel.cli._matmul import MatmulData
from trio_accel.cli._recover import RecoverData
from trio_accel.cli._results import count_of
from trio_accel.cli._solve import SolveData
from trio_accel.cli._spectrum import SpectrumData

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from trio_accel.cli._load import ArrayReport, Fate
    from trio_accel.cli._recover import FaultReport
    from trio_accel.cli._results import Check, StepResult

__all__ = ["facts", "render_result"]

# Of a hash, as it is shown.
_DIGITS = 12


def render_result(result: StepResult) -> RenderableType:
    """Figures, checks and notes of one step."""
    parts: list[RenderableType] = [_figures(result), _checks(result)]
    parts += [Text(f"note: {printable(note)}", style="yellow") for note in result.notes]
    return Padding(Group(*parts), (0, 0, 1, 2))


def facts(rows: Iterator[tuple[str, str]]) -> Table:
    """Names and values in two columns without lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(printable(value)))
    return table


def _figures(result: StepResult) -> RenderableType:
    data = result.data
    if isinstance(data, MatmulData):
        return _matmul(data)
    if isinstance(data, SpectrumData):
        return facts(_spectrum(data))
    if isinstance(data, SolveData):
        return Group(facts(_solve(data)), ResidualChart(history=data.history))
    if isinstance(data, RecoverData):
        return _recovery(data)
    return Text(result.summary)


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


def _matmul(data: MatmulData) -> RenderableType:
    table = _grid(data.dtype, ">products", ">GFLOP/s", ">bare NumPy", ">ratio", ">error")
    for row in data.rows:
        table.add_row(
            f"{row.size} × {row.size}",
            str(row.calls * row.rounds * data.clients),
            f"{row.gflops:.1f}",
            f"{row.numpy_gflops:.1f}",
            f"{row.gflops / row.numpy_gflops:.2f}",
            f"{row.error:.1e}",
        )
    return Padding(table, (1, 0))


def _spectrum(data: SpectrumData) -> Iterator[tuple[str, str]]:
    channels = {1: "mono", 2: "stereo"}.get(data.channels, f"{data.channels} channels")
    yield (
        "recording",
        f"{data.audio}: {data.duration:.2f} s, {data.rate / 1000:g} kHz, {channels}, {data.encoding}",
    )
    yield "frames", f"{data.frames} of {data.window} samples (Hann window), every {data.hop} samples"
    if data.peak_frequency is not None and data.peak_time is not None:
        loudest = (
            f"{data.peak_frequency:.0f} Hz at {data.peak_time:.2f} s, {data.peak_level:.1f} dB re full scale"
        )
        yield "loudest", loudest
    if data.picture is not None:
        yield "picture", data.picture


def _solve(data: SolveData) -> Iterator[tuple[str, str]]:
    yield "matrix", f"{data.matrix}: {data.rows} × {data.rows}, {count_of(data.nonzeros, 'nonzero')}"
    yield "", data.kind
    if data.title:
        yield "", data.title
    goal = (
        f"to {data.rtol:.0e}"
        if data.converged
        else f"of at most {data.max_iterations}, without reaching {data.rtol:.0e}"
    )
    iterations = count_of(data.iterations, "iteration")
    yield "solved by", f"conjugate gradients, no preconditioner, {iterations} {goal}"
    yield "condition", f"{data.condition:.1e} (from the Ritz values)"
    yield "residual", "norm(b - A x) / norm(b), b = 1 in every row:"


def _grid(*headings: str) -> Table:
    """Make a table with a line below its head; ``>`` in front of a heading puts its column to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    return table


def _recovery(data: RecoverData) -> RenderableType:
    """Trees, faults, arrays and fates."""
    faults = f"after {count_of(len(data.faults), 'fault')}, {data.clients} clients asking all the time"
    tables = (
        _recovered(data.faults) if data.rounds == 1 else _rounds(data.faults),
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


def _recovered(faults: Sequence[FaultReport]) -> Table:
    """What was broken, and how long that was felt."""
    table = _grid("fault", "generation", ">failed", ">next right product")
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
    table = _grid("fault", ">times", ">failed", ">right after", ">at most")
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
    table = _grid("requests by last fault", *(f">{phase or 'none'}" for phase in phases), ">all")
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
    table = _grid("array", ">MiB", "SHA-256 before", "SHA-256 after", "fate")
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
