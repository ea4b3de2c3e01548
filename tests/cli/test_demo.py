from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from terminal import drain

import trio_accel as ta
from trio_accel.cli import _recover

if TYPE_CHECKING:
    from command import Cli

Start = Callable[..., "subprocess.Popen[str]"]
IS_ISOLATED = "process" in ta.list_devices()[0].isolations

pytestmark = pytest.mark.skipif(not IS_ISOLATED, reason="the device has no worker processes")


@pytest.mark.slow
def test_it_is_one_json_document(cli: Cli) -> None:
    done = cli("demo", "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    names = "command version device backend description summary requests failed retried checks faults arrays "
    names += "ok exit_code error"
    assert list(document) == names.split()
    assert (document["command"], document["version"]) == ("demo", ta.__version__)
    assert (document["ok"], document["exit_code"], document["error"]) == (True, 0, None)
    info = next(info for info in ta.list_devices() if info.name == document["device"])
    assert (document["backend"], document["description"]) == (info.backend, info.description)
    # Each fault is felt by a request, which `retry` has tried again.
    assert document["failed"] == {}
    assert document["requests"] > sum(document["retried"].values()) >= len(document["faults"])
    assert all(fault["retried"] > 0 for fault in document["faults"])
    for check in document["checks"]:
        assert list(check) == ["name", "value", "limit", "ok"]
        assert check["ok"] is (check["value"] <= check["limit"]) is True


def test_a_failing_check_fails_the_demo(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ta.testing, "inject_fault", lambda *_, **__: None)
    monkeypatch.setattr(_recover, "_FAULTS", _recover._FAULTS[:2])
    done = cli("demo")
    assert done.code == 1
    assert [line.split()[1] for line in done.out.splitlines() if line.startswith("✗")] == ["recover"]
    assert done.out.endswith("1 of 6 checks failed\n")


def test_an_error_of_the_device_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object, **__: object) -> None:
        raise ta.DeviceLostError("the device gave up", device="cpu:0")

    monkeypatch.setattr(ta.linalg, "matmul", lost)
    done = cli("demo")
    assert done.code == 1
    assert done.err == "trio-accel: DeviceLostError: the device gave up (device cpu:0)\n"
    done = cli("demo", "--json")
    assert done.code == 1
    document = json.loads(done.out)
    assert (document["ok"], document["exit_code"], document.get("summary")) == (False, 1, None)
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
    assert re.search(r"crash of the BLAS actor +1 +\d+ +\d+\.\d ms", screen)
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
