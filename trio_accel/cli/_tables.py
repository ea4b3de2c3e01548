"""How the result of each step looks on a terminal."""

from __future__ import annotations

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
from trio_accel.cli._recover_tables import render_recovery
from trio_accel.cli._results import count_of
from trio_accel.cli._solve import SolveData
from trio_accel.cli._spectrum import SpectrumData

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from trio_accel.cli._results import Check, StepResult

__all__ = ["facts", "render_result"]


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
        return render_recovery(data)
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
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(data.dtype)
    for heading in ("products", "GFLOP/s", "bare NumPy", "ratio", "error"):
        table.add_column(heading, justify="right")
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
