"""Separate processes that ask the driver: the use of their answers, and of missing answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from chosen import ROOT
from surroundings import Machine

from trio_accel.backends.cuda import _probe

pytestmark = pytest.mark.no_device


class TestChild:
    @pytest.fixture(autouse=True)
    def program(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(_probe, "_PROGRAM", tmp_path / "program.py")
        return tmp_path / "program.py"

    def test_the_answer_is_the_last_line(self, program: Path) -> None:
        text = "import json, sys; print('hello'); print(json.dumps([json.load(sys.stdin), 2]))"
        program.write_text(text)
        assert _probe.ask("probe", {"a": 1}) == [["probe", [], {"a": 1}], 2]

    @pytest.mark.parametrize(
        ("text", "how"),
        [
            ("", r"gave no answer"),
            ("print('hello')", r"gave no answer"),
            ("raise SystemExit(3)", r"ended with code 3$"),
            ("import os; os.kill(os.getpid(), 9)", r"crashed \(SIGKILL\)"),
            ("1 / 0", r"ended with code 1 \(ZeroDivisionError: division by zero\)"),
        ],
    )
    def test_there_is_no_answer(self, program: Path, text: str, how: str) -> None:
        program.write_text(text)
        with pytest.raises(_probe.ChildError, match=how):
            _probe.ask("probe", {})

    def test_the_interpreter_cannot_be_started(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
        with pytest.raises(_probe.ChildError, match="could not be started"):
            _probe.ask("probe", {})


@pytest.mark.parametrize(
    ("version", "extra"), [("12080", "12"), ("13000", "13"), ("13030", "13"), ("14010", "13"), ("11080", "")]
)
def test_nox_installs_for_the_driver(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, version: str, extra: str
) -> None:
    machine.add_driver()
    monkeypatch.setenv("STAND_IN_VERSION", version)
    pytest.importorskip("nox")
    program = "import noxfile; print(noxfile._driver())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    reason = "" if extra else "the CUDA driver sees no device, or is older than CUDA 12"
    assert done.stdout.strip() == repr((int(extra or 0), reason))
