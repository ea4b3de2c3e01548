"""Processes of their own that ask the driver: what comes of their answers, and of having none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chosen import ROOT
from surroundings import Machine

from trio_accel.backends.cuda import _probe

pytestmark = pytest.mark.no_device


class TestChild:
    def program(self, tmp_path: Path, text: str) -> Any:
        (tmp_path / "program.py").write_text(text)
        return _probe.ask(tmp_path / "program.py", [], {"a": 1}, 20.0)

    def test_the_answer_is_the_last_line(self, tmp_path: Path) -> None:
        text = "import json, sys; print('hello'); print(json.dumps([json.load(sys.stdin), 2]))"
        assert self.program(tmp_path, text) == [{"a": 1}, 2]

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
    def test_there_is_none(self, tmp_path: Path, text: str, how: str) -> None:
        with pytest.raises(_probe.ChildError, match=how):
            self.program(tmp_path, text)

    def test_the_interpreter_cannot_be_started(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
        with pytest.raises(_probe.ChildError, match="could not be started"):
            self.program(tmp_path, "")


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
