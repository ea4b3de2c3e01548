"""``python -m benchmarks``: runs benchmarks and judges them; live on a terminal, or as one JSON document."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import attrs
import trio
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.markup import escape

import trio_accel as ta
from trio_accel.cli._app import Backend, Flag, Json, run_app
from trio_accel.cli._console import as_json as to_json
from trio_accel.cli._console import count_of, make_console, print_line
from trio_accel.cli._run import InputError, open_device, run_async, run_for_json

from ._board import Board, open_board, print_results
from ._harness import Benchmark, Isolation, Plan, Result, Verdict
from ._machine import Machine
from ._selection import select
from ._stand import open_devices
from ._table import describe_plan

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from rich.console import Console

__all__ = ["run"]

app = App(
    name="benchmarks",
    usage="Usage: python -m benchmarks [NAME...] [OPTIONS]",
    help_epilogue="Exit codes: 0 every goal is met, 1 one is missed, 2 a name or an option cannot be used, "
    "130 ended by Ctrl-C.",
    version_flags=(),
    result_action="return_value",
)

_LISTED = ("name", "isolation", "description")


@attrs.define(kw_only=True, eq=False)
class _Document:
    """What ``--json`` prints, filled while the benchmarks run."""

    plan: Plan
    isolation: Isolation | None
    device: ta.DeviceInfo | None = None
    machine: Machine | None = None
    results: list[Result] = attrs.field(factory=list[Result])

    def add(self, results: Sequence[Result]) -> None:
        """Note rows; those of a quick look without their goals, which its numbers say nothing of."""
        quick = self.plan.is_quick
        self.results += [attrs.evolve(result, goal=None) if quick else result for result in results]

    @property
    def code(self) -> int:
        """0 if no goal is missed, else 1."""
        return int(any(result.verdict is Verdict.MISSED for result in self.results))

    def render(self, code: int, error: str | None) -> str:
        document = {
            "command": "bench",
            "version": ta.__version__,
            "ok": code == 0,
            "exit_code": code,
            "error": error,
            "device": None if self.device is None else self.device.name,
            "isolation": self.isolation,
            "machine": None if self.machine is None else to_json(self.machine),
            "plan": {name: getattr(self.plan, name) for name in ("pairs", "warmups", "scale")},
            "results": [_row(result) for result in self.results],
        }
        return json.dumps(document, allow_nan=False, indent=2)


def run(arguments: Sequence[str]) -> int:
    """Measure what the arguments name, and return the exit code.

    Raises:
        InputError: The arguments are wrong, or what they name cannot be used.
    """
    return run_app(app, arguments)


@app.default
def bench(
    *names: str,
    list_: Annotated[bool, Parameter(name="--list", negative=(), show_default=False)] = False,
    backend: Backend = None,
    isolation: Annotated[Isolation | None, Parameter(name="--isolation", show_default=False)] = None,
    pairs: Annotated[int | None, Parameter(validator=Number(gte=1, lte=1000), show_default=False)] = None,
    quick: Flag = False,
    json: Json = False,
) -> int:
    """Measure this library beside others in the same run, and compare with the goals.

    Prints one table of medians and ratios, and the machine. On a machine with other users only the
    ratios mean something.

    Args:
        names: Benchmarks, or groups of them such as actors. Default: all.
        list_: List the benchmarks with a description each, and run none.
        backend: Device to use, such as cpu or cuda:1. Default: $TRIO_ACCEL_BACKEND, else the best there is.
        isolation: Run only the benchmarks of a device with its context there. Default: all.
        pairs: Measurements of ours and of the peer each. Default: 25.
        quick: Only check that all of them run, in seconds; no goal is judged.
        json: Print one JSON document and nothing else.
    """
    chosen = _choose(names, isolation)
    if list_:
        return _list_benchmarks(chosen, as_json=json)
    plan = _make_plan(backend=backend, pairs=pairs, quick=quick)
    return _run_benchmarks(chosen, plan, isolation=isolation, as_json=json)


def _choose(names: Sequence[str], isolation: Isolation | None) -> Sequence[Benchmark]:
    """The benchmarks that names and groups mean, all of them where there is no name.

    Args:
        names: What the user gave.
        isolation: Only those of a device whose context lives there.

    Raises:
        InputError: A name is none; the message lists what there is. Or none is left.
    """
    try:
        return select(names, isolation=isolation)
    except ValueError as error:
        raise InputError(str(error)) from error


def _make_plan(*, backend: str | None, pairs: int | None, quick: bool) -> Plan:
    """How much to measure, and on which device: the full work unless told otherwise."""
    plan = attrs.evolve(Plan.quick() if quick else Plan(), backend=backend)
    return plan if pairs is None else attrs.evolve(plan, pairs=pairs)


def _list_benchmarks(chosen: Sequence[Benchmark], *, as_json: bool) -> int:
    """Say what is measured, and measure nothing."""
    if as_json:
        rows = [{name: getattr(benchmark, name) for name in _LISTED} for benchmark in chosen]
        print(json.dumps({"command": "bench", "version": ta.__version__, "benchmarks": rows}, indent=2))
        return 0
    width = max(len(benchmark.name) for benchmark in chosen)
    for benchmark in chosen:
        print(f"{benchmark.name.ljust(width)}  {benchmark.description}")
    return 0


def _run_benchmarks(
    chosen: Sequence[Benchmark], plan: Plan, *, isolation: Isolation | None, as_json: bool
) -> int:
    """Measure, and judge by the goals.

    Args:
        chosen: What to measure.
        plan: How much, and which device.
        isolation: What the user asked for: a device that does not have it is refused.
        as_json: Print one JSON document and nothing else.

    Returns:
        0 if every goal is met, 1 if one is missed.

    Raises:
        InputError: The device cannot be used.
        InterruptError: A signal ended the run.
        AccelError, ActorError: A benchmark failed.
    """
    document = _Document(plan=plan, isolation=isolation)
    if as_json:
        return run_for_json(partial(_measure_silently, chosen, document), document.render)
    return run_async(partial(_show, chosen, document))


async def _measure_silently(chosen: Sequence[Benchmark], document: _Document) -> int:
    await _look(document)
    async with _sharing(document.plan) as plan:
        for benchmark in chosen:
            document.add(await benchmark.measure(plan))
    return document.code


async def _show(chosen: Sequence[Benchmark], document: _Document) -> int:
    info = await _look(document)
    console = make_console()
    print_line(console, f"[bold]trio-accel {ta.__version__} on {escape(info.name)}[/]")
    print_line(console, escape(f"{document.machine}\n{describe_plan(document.plan)}\n"))
    start = trio.current_time()
    try:
        with open_board(console, len(chosen)) as board:
            await _measure_live(chosen, document, board)
    finally:
        # After Ctrl-C too: what was measured took minutes.
        if document.results:
            print_results(console, document.results)
    _print_verdict(console, document, trio.current_time() - start)
    return document.code


async def _measure_live(chosen: Sequence[Benchmark], document: _Document, board: Board) -> None:
    async with _sharing(attrs.evolve(document.plan, watch=board.update)) as plan:
        for benchmark in chosen:
            board.begin(benchmark.name)
            document.add(await benchmark.measure(plan))
            board.results = document.results


@asynccontextmanager
async def _sharing(plan: Plan) -> AsyncGenerator[Plan, None]:
    """A plan with devices that all benchmarks of a quick look share."""
    if not plan.is_quick:
        yield plan
        return
    async with open_devices() as devices:
        yield attrs.evolve(plan, devices=devices)


async def _look(document: _Document) -> ta.DeviceInfo:
    """What is measured, and on what; the device is opened once, so that a wrong one is refused first."""
    async with ta.open_system("bench") as system:
        options = ta.DeviceOptions(isolation=document.isolation)
        device = await open_device(system, document.plan.backend, options)
        document.device = info = device.info
        await device.close()
    document.machine = Machine.here()
    return info


def _print_verdict(console: Console, document: _Document, seconds: float) -> None:
    verdicts = [result.verdict for result in document.results]
    missed, judged = verdicts.count(Verdict.MISSED), verdicts.count(Verdict.MET)
    console.print()
    left_out = f", {count_of(skipped, 'row')} not run" if (skipped := verdicts.count(Verdict.NOT_RUN)) else ""
    if document.plan.is_quick:
        ran = count_of(len(verdicts) - skipped, "row")
        text = f"[bold green]everything runs ({ran})[/]"
    elif missed:
        text = f"[bold red]{missed} of {count_of(missed + judged, 'goal')} missed[/]"
    else:
        text = f"[bold green]every goal met ({judged})[/]"
    console.print(f"{text}{left_out} [dim]({seconds:.0f} s)[/]")


def _row(result: Result) -> dict[str, object]:
    return {**to_json(result), "verdict": result.verdict}
