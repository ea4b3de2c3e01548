from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from terminal import drain

import trio_accel as ta

if TYPE_CHECKING:
    from command import Cli

Start = Callable[..., "subprocess.Popen[str]"]
ISOLATIONS = ta.list_devices()[0].isolations
STEPS = ["matmul", "spectrum", "solve", "recover"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product per round: what is measured is not what these tests are about."""
    monkeypatch.setattr("trio_accel.cli._matmul._ROUND_SECONDS", 0.0)


@pytest.mark.slow
def test_the_tour_is_one_json_document(cli: Cli) -> None:
    done = cli("demo", "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    assert list(document) == [
        "command",
        "version",
        "ok",
        "exit_code",
        "error",
        "device",
        "backend",
        "description",
        "isolation",
        "steps",
    ]
    assert (document["command"], document["version"]) == ("demo", ta.__version__)
    assert (document["ok"], document["exit_code"], document["error"]) == (True, 0, None)
    info = next(info for info in ta.list_devices() if info.name == document["device"])
    assert (document["backend"], document["description"]) == (info.backend, info.description)
    assert document["isolation"] == info.isolations[0]
    assert [step["name"] for step in document["steps"]] == STEPS
    for step in document["steps"]:
        assert list(step) == ["name", "ok", "summary", "seconds", "checks", "notes", "data"]
        assert (step["ok"], step["notes"]) == (True, [])
        assert step["seconds"] > 0
        assert step["checks"]
        for check in step["checks"]:
            assert list(check) == ["name", "value", "limit", "ok"]
            assert check["ok"] is (check["value"] <= check["limit"]) is True
    assert [row["size"] for row in document["steps"][0]["data"]["rows"]] == [256, 512, 1024]
    recovered = document["steps"][3]["data"]
    assert recovered["isolation"] == ("process" if "process" in info.isolations else "inline")
    lost = [array["lost_with"] is not None for array in recovered["arrays"]]
    assert lost == [recovered["isolation"] == "inline"] * 4


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_step_runs_in_either_isolation(cli: Cli, isolation: str) -> None:
    where = {"inline": "inline", "process": "in a worker process"}[isolation]
    done = cli("demo", "matmul", "--sizes", 16, "--isolation", isolation)
    assert (done.code, done.err) == (0, "")
    name = ta.list_devices()[0].name
    assert done.out.startswith(f"trio-accel {ta.__version__} on {name} ({where}), ")
    document = json.loads(cli("demo", "matmul", "--sizes", 16, "--isolation", isolation, "--json").out)
    assert (document["isolation"], document["ok"]) == (isolation, True)


def headers_of(text: str) -> list[str]:
    """Where each device of a run computes."""
    return re.findall(r"^(?:trio-accel \S+|now) on \S+ \((.+?)\)", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.skipif("process" not in ISOLATIONS, reason="the device has no worker processes")
def test_only_recover_has_a_worker_process_of_its_own(cli: Cli) -> None:
    done = cli("demo")
    assert (done.code, done.err) == (0, "")
    assert headers_of(done.out) == ["inline", "in a worker process"]
    between = done.out.partition("✓ solve")[2].partition("✓ recover")[0]
    assert "now on " in between


@pytest.mark.slow
def test_a_chosen_isolation_holds_for_every_step_of_the_tour(cli: Cli) -> None:
    done = cli("demo", "--isolation", "inline")
    assert (done.code, done.err) == (0, "")
    assert headers_of(done.out) == ["inline", "inline"]


@pytest.mark.slow
def test_the_tour_goes_on_without_matplotlib(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )
    done = cli("demo")
    assert (done.code, done.err) == (0, "")
    assert (
        "note: picture not written: a spectrogram needs Matplotlib: pip install '.[plot]' in a checkout"
        in " ".join(done.out.split())
    )
    assert [line.split()[1] for line in done.out.splitlines() if line.startswith("✓")] == STEPS
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_tour_goes_on_where_no_picture_can_be_written(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "spectrogram.png").mkdir()
    done = cli("demo", "--json")
    assert done.code == 0
    assert json.loads(done.out)["steps"][1]["notes"] == [
        "picture not written: cannot write spectrogram.png: it is a directory"
    ]


@pytest.mark.slow
def test_a_failing_step_fails_the_tour_and_says_which(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ta.testing, "inject_fault", lambda *_, **__: None)
    done = cli("demo", "--isolation", "inline")
    assert done.code == 1
    marks = [tuple(line.split()[:2]) for line in done.out.splitlines() if line[:1] in ("✓", "✗")]
    assert marks == [("✓", "matmul"), ("✓", "spectrum"), ("✓", "solve"), ("✗", "recover")]
    assert done.out.endswith("1 of 13 checks failed\n")


@pytest.mark.parametrize(
    ("sizes", "tolerance", "verdict"),
    [
        ("8", 1.0, "the check holds"),
        ("8,9", 1.0, "all 2 checks hold"),
        ("8", 0.0, "the check failed"),
        ("8,9", 0.0, "2 of 2 checks failed"),
    ],
)
def test_the_verdict_is_a_sentence(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, sizes: str, tolerance: float, verdict: str
) -> None:
    monkeypatch.setattr("trio_accel.cli._matmul._TOLERANCE", {"float32": tolerance})
    done = cli("demo", "matmul", "--sizes", sizes)
    assert done.code == ("failed" in verdict)
    assert done.out.endswith(f"\n{verdict}\n")


def test_an_error_of_the_device_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object, **__: object) -> None:
        raise ta.DeviceLostError("the device gave up", device="cpu:0")

    monkeypatch.setattr(ta.sparse, "spmv", lost)
    done = cli("demo", "solve")
    assert done.code == 1
    assert done.err == "trio-accel: DeviceLostError: the device gave up (device cpu:0)\n"
    done = cli("demo", "solve", "--json")
    assert done.code == 1
    document = json.loads(done.out)
    assert (document["ok"], document["exit_code"], document["steps"]) == (False, 1, [])
    assert document["error"] == "the device gave up (device cpu:0)"


@pytest.mark.slow
def test_on_a_terminal_the_progress_is_live(start: Start) -> None:
    controller, terminal = pty.openpty()
    process = start("demo", "recover", stdout=terminal, stderr=terminal)
    os.close(terminal)
    screen = drain(controller)
    assert process.wait(40) == 0
    hidden, shown = screen.index("\x1b[?25l"), screen.rindex("\x1b[?25h")
    assert hidden < shown
    assert "putting arrays" in screen[hidden:shown]
    # One worker process per count of restarts. The screen may skip one between two refreshes.
    context = r"context \(WorkerContextActor\) running, process (\d+)(?:, (\d) restart)?"
    seen = {(int(restarts or 0), pid) for pid, restarts in re.findall(context, screen[hidden:])}
    counts, pids = zip(*sorted(seen), strict=True)
    assert (counts[0], counts[-1]) == (0, 3)
    assert len(set(counts)) == len(set(pids)) == len(seen)
    assert re.search(r"crash of the BLAS actor: \d+ failed, right again after \d+ ms", screen)
    assert "all 6 checks hold" in screen


@pytest.mark.slow
def test_without_a_terminal_nothing_moves(start: Start) -> None:
    process = start("demo", "recover")
    out, err = process.communicate(timeout=40)
    assert (process.returncode, err) == (0, "")
    assert "\x1b" not in out
    assert "\r" not in out
    assert "putting arrays" not in out


@pytest.mark.slow
def test_a_dumb_terminal_gets_no_control_sequences(start: Start, environment: dict[str, str]) -> None:
    controller, terminal = pty.openpty()
    process = start("demo", "recover", stdout=terminal, stderr=terminal, env={**environment, "TERM": "dumb"})
    os.close(terminal)
    screen = drain(controller)
    assert process.wait(40) == 0
    assert "\x1b[?25l" not in screen
    assert "putting arrays" not in screen
    assert "all 6 checks hold" in screen
