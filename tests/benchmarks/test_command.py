"""``python -m benchmarks``: the selected benchmarks, the output, and the exit code."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from chosen import SEARCHED
from command import Cli, Refused, Start
from rich.console import Console
from terminal import drain

import trio_accel as ta
from benchmarks import BENCHMARKS, Benchmark, Figure, Goal, Plan, Result, Summary, _command, select
from benchmarks._board import print_results
from trio_accel.backends.cpu import CpuBackend

pytestmark = pytest.mark.machine


async def slow(plan: Plan) -> tuple[Result, ...]:
    """Miss a goal."""
    await trio.lowlevel.checkpoint()
    goal = Goal(figure=Figure.OURS, most=1.0)
    return (Result(name="test.slow", unit="s", ours=Summary.of([2.0, 3.0]), goal=goal),)


async def quick(plan: Plan) -> tuple[Result, ...]:
    """Meet a goal, lack a goal, and leave one out."""
    await trio.lowlevel.checkpoint()
    goal = Goal(figure=Figure.OURS, most=1.0)
    return (
        Result(name="test.quick", unit="s", ours=Summary.of([0.5]), goal=goal),
        Result(name="test.free", unit="s", ours=Summary.of([float(plan.pairs)])),
        Result(name="test.left-out", goal=goal, reason="there is no peer"),
    )


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = (Benchmark("test.quick", quick), Benchmark("test.slow", slow))
    monkeypatch.setattr(_command, "select", partial(select, benchmarks=chosen))


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.startswith("test.")]


def test_list_describes_the_measurements_and_measures_nothing(cli: Cli) -> None:
    done = cli("--list")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines] == [benchmark.name for benchmark in BENCHMARKS]
    assert all(line.endswith(".") for line in lines)
    document = json.loads(cli("actors", "--list", "--json").out)
    assert [row["name"] for row in document["benchmarks"]] == [
        benchmark.name for benchmark in BENCHMARKS if benchmark.group == "actors"
    ]


def test_an_unknown_name_lists_the_existing_names(refused: Refused) -> None:
    line = refused("actors", "actors.nonsense")
    assert line.startswith("no benchmark or group actors.nonsense; there are actors, actors.ask, ")
    for benchmark in BENCHMARKS:
        assert benchmark.name in line


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--pairs 0", "Must be >= 1"),
        ("--pairs many", "--pairs"),
        ("--backend bogus", "cannot open a device: 'bogus'"),
        ("--isolation bogus", 'Choose from: "inline", "process"'),
        ("--isolation inline", "none of actors.ask measures a device with isolation inline"),
        ("--nonsense", "Unknown option"),
    ],
)
def test_wrong_options_end_with_one_line(refused: Refused, option: str, reason: str) -> None:
    assert reason in refused("actors.ask", *option.split())


@pytest.mark.usefixtures("fakes")
def test_the_exit_code_is_1_if_a_goal_is_missed(cli: Cli) -> None:
    done = cli()
    assert (done.code, done.err) == (1, "")
    assert rows_of(done.out) == [
        ["test.quick", "0.500", "s", "-", "-", "at", "most", "1.00", "s", "met"],
        ["test.free", "25.0", "s", "-", "-", "-", "-"],
        ["test.left-out", "-", "-", "-", "at", "most", "1.00", "not", "run:", "there", "is", "no", "peer"],
        ["test.slow", "2.50", "[2.25,", "2.75]", "s", "-", "-", "at", "most", "1.00", "s", "MISSED"],
    ]
    assert "\n1 of 2 goals missed, 1 row not run (" in done.out


@pytest.mark.usefixtures("fakes")
def test_the_exit_code_is_0_if_every_goal_is_met(cli: Cli) -> None:
    done = cli("test.quick", "--pairs", 7)
    assert (done.code, done.err) == (0, "")
    assert rows_of(done.out)[1][:2] == ["test.free", "7.00"]
    assert "\nevery goal met (1), 1 row not run (" in done.out
    assert done.out.startswith(f"trio-accel {ta.__version__} on ")
    assert f"numpy {np.__version__}" in done.out
    assert "Medians of 7 measurements" in done.out


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(("name", "code"), [("test.quick", 0), ("test.slow", 1)])
def test_json_is_one_document_with_the_verdicts(cli: Cli, name: str, code: int) -> None:
    done = cli(name, "--json", "--pairs", 4)
    assert (done.code, done.err) == (code, "")
    document = json.loads(done.out)
    assert (document["ok"], document["exit_code"], document["error"]) == (code == 0, code, None)
    assert document["plan"] == {"pairs": 4, "warmups": 2, "scale": 1.0}
    assert document["device"] in {info.name for info in ta.list_devices()}
    verdicts = {"test.quick": ["met", "-", "not run"], "test.slow": ["MISSED"]}
    assert [row["verdict"] for row in document["results"]] == verdicts[name]
    assert document["results"][0]["goal"] == {"figure": "ours", "most": 1.0, "least": None}


@pytest.mark.usefixtures("fakes")
def test_a_quick_look_judges_no_goal(cli: Cli) -> None:
    done = cli("--quick")
    assert (done.code, done.err) == (0, "")
    assert [row[-1] for row in rows_of(done.out)] == ["-", "-", "peer", "-"]
    assert "\neverything runs (3 rows), 1 row not run (" in done.out
    document = json.loads(cli("--quick", "--json").out)
    assert document["plan"] == {"pairs": 1, "warmups": 0, "scale": 0.002}
    assert document["ok"]
    assert [row["verdict"] for row in document["results"]] == ["-", "-", "not run", "-"]
    assert [row["goal"] for row in document["results"]] == [None] * 4


@pytest.mark.slow
def test_benchmarks_of_a_quick_look_share_their_devices(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    opened: list[object] = []
    open_device = ta.System.open_device

    def counted(self: ta.System, *arguments: Any, **options: Any) -> Any:
        opened.append(options.get("options"))
        return open_device(self, *arguments, **options)

    monkeypatch.setattr(ta.System, "open_device", counted)
    done = cli("devices.copies", "devices.copies-process", "devices.rfft", "devices.rfft-process", "--quick")
    assert (done.code, done.err, list(recwarn)) == (0, "", [])
    assert "\neverything runs (6 rows) (" in done.out
    # The first one is opened to see whether there is such a device.
    assert [getattr(options, "isolation", None) for options in opened[1:]] == ["inline", "process"]


def test_an_error_is_in_the_document(cli: Cli) -> None:
    done = cli("--backend", "bogus", "--json")
    assert done.code == 2
    document: dict[str, Any] = json.loads(done.out)
    assert (document["ok"], document["exit_code"], document["results"]) == (False, 2, [])
    assert document["error"].startswith("cannot open a device: 'bogus'")


@pytest.mark.slow
def test_a_benchmark_runs_from_the_command_line(start: Start) -> None:
    process = start("actors.ask", "--quick", "--json")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    document = json.loads(out)
    (row,) = document["results"]
    assert row["name"] == "actors.ask"
    assert document["plan"]["pairs"] == row["ours"]["count"] == row["ratio"]["count"] == 1
    for key in ("ours", "peer", "ratio"):
        assert 0 < row[key]["lower"] <= row[key]["median"] <= row[key]["upper"] < math.inf
    machine = document["machine"]
    assert machine["cores"] >= 1
    assert machine["versions"]["trio"] == trio.__version__
    assert machine["versions"]["numpy"] == np.__version__


@pytest.mark.slow
def test_on_a_terminal_the_progress_is_live(start: Start) -> None:
    controller, terminal = pty.openpty()
    process = start("actors.ask", "actors.restart", "--quick", stdout=terminal, stderr=terminal)
    os.close(terminal)
    screen = drain(controller)
    assert process.wait(20) == 0
    hidden, shown = screen.index("\x1b[?25l"), screen.rindex("\x1b[?25h")
    assert "benchmark 1 of 2" in screen[hidden:shown]
    assert "actors.restart" in screen[shown:]


@pytest.mark.parametrize(("width", "has_quartiles"), [(60, False), (80, False), (200, True)])
def test_the_table_fits_the_terminal(width: int, has_quartiles: bool) -> None:
    goal = Goal(figure=Figure.DIFFERENCE, most=120.0)
    summary = Summary.of([12345.0, 23456.0, 34567.0])
    result = Result(
        name="group.of-a-long-name", unit="µs", ours=summary, peer=summary, difference=summary, goal=goal
    )
    file = io.StringIO()
    print_results(Console(file=file, width=width, force_terminal=True, color_system=None), [result])
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert ("[" in file.getvalue()) is has_quartiles
    text = file.getvalue().split()
    assert "MISSED" in text
    assert "more" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["actors.resident", "devices.loop-lag"])
def test_ctrl_c_in_the_middle_of_a_benchmark(start: Start, tmp_path: Path, name: str) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": SEARCHED, "TMPDIR": str(temporary)}
    process = start(name, env=environment, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("trio-accel ")
    # clock: any moment will do
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    # The benchmark waits for the operation that runs: about a second.
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "benchmarks: interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert list(temporary.iterdir()) == []


def test_an_unavailable_isolation(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    infos = CpuBackend().list_devices()
    only_inline = tuple(attrs.evolve(info, isolations=("inline",)) for info in infos)
    monkeypatch.setattr(CpuBackend, "list_devices", lambda self: only_inline)
    line = refused("--isolation", "process", "--backend", "cpu")
    assert line.startswith("cannot open a device: isolation='process' is not there for this device")
    assert refused("--isolation", "thread").endswith('Choose from: "inline", "process".')
