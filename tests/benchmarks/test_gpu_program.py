"""The program for the hardware: its sections, their time limits, and its report."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import pytest

from benchmarks import BENCHMARKS, gpu
from benchmarks.gpu import _program, real_modules
from benchmarks.gpu._sections import ROOT, SECTIONS, Section, Settings, choose


@attrs.frozen(kw_only=True)
class Fake(Section):
    """A section with a short program."""

    program: str = ""

    def arguments(self, settings: Settings) -> list[str]:
        return [sys.executable, "-c", self.program]


def use(monkeypatch: pytest.MonkeyPatch, *sections: Section) -> None:
    monkeypatch.setattr(_program, "SECTIONS", sections)
    monkeypatch.setattr(
        _program, "choose", lambda names: [s for s in sections if not names or s.name in names]
    )


def test_every_section_finds_its_files() -> None:
    names = {benchmark.name for benchmark in BENCHMARKS}
    for section in SECTIONS:
        assert all((ROOT / "tests" / path).exists() for path in section.tests)
        assert set(section.measures) <= names
        assert bool(section.tests) + bool(section.measures) + bool(section.command) == 1
    measured = {name for section in SECTIONS for name in section.measures}
    assert measured == {name for name in names if name.startswith("cuda.")}


def test_sections_are_chosen_in_their_order() -> None:
    assert [section.name for section in choose(["soak", "info"])] == ["info", "soak"]
    assert choose([]) == SECTIONS
    with pytest.raises(ValueError, match="no section nonsense; there are info, conformance"):
        choose(["nonsense"])


def test_a_wrong_section_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--out", str(tmp_path), "--only", "nonsense"])
    assert "no section nonsense" in capsys.readouterr().err


def test_logs_are_kept_and_the_table_remembers_earlier_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Fake(name="info", text="", program="print('all is well')")
    bad = Fake(name="leaks", text="", program="import sys; print('3 things left'); sys.exit(1)")
    use(monkeypatch, good, bad)
    assert gpu.main(["--out", str(tmp_path), "--only", "info"]) == 0
    assert (tmp_path / "info.log").read_text() == "all is well\n"
    capsys.readouterr()
    assert gpu.main(["--out", str(tmp_path), "--only", "leaks"]) == 1
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line]
    assert lines[1:3] == [["info", "ok"], ["leaks", "FAILED"]]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["leaks"]["text"] == "3 things left"


def test_a_slow_section_is_stopped_with_all_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_program, "_RESERVE", 0.0)
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    use(monkeypatch, Fake(name="rounds", text="", program=program), Fake(name="soak", text=""))
    assert gpu.main(["--out", str(tmp_path), "--minutes", str(1 / 60)]) == 1
    summary: dict[str, Any] = json.loads((tmp_path / "summary.json").read_text())
    assert [summary[name]["verdict"] for name in ("rounds", "soak")] == ["CUT OFF", "no time"]
    (pid, *_) = (tmp_path / "rounds.log").read_text().split()
    deadline = time.monotonic() + 5
    while (alive := _lives(int(pid))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive


def _lives(pid: int) -> bool:
    try:
        return b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def test_the_gist_of_a_log_is_its_end(tmp_path: Path) -> None:
    log, settings = tmp_path / "x.log", Settings(out=tmp_path)
    tests = Section(name="x", text="", tests=("gpu",))
    log.write_text("...\n===== 1 failed, 12 passed in 3.20s =====\n")
    assert _program._summary(tests, settings, log) == "1 failed, 12 passed in 3.20s"
    log.write_text("12 passed, 3 deselected in 130.20s (0:02:10)\n")
    assert _program._summary(tests, settings, log).startswith("12 passed, 3 deselected in 130.20s")
    log.write_text("Segmentation fault")
    assert _program._summary(tests, settings, log) == "pytest did not come to its end"
    command = Section(name="x", text="", command=("demo", "--json"))
    log.write_text(json.dumps({"command": "demo", "summary": "4 faults, none lost"}))
    assert _program._summary(command, settings, log) == "4 faults, none lost"
    log.write_text("Segmentation fault")
    assert _program._summary(command, settings, log) == "Segmentation fault"
    measured = Section(name="x", text="", measures=("cuda.lag",))
    assert _program._summary(measured, settings, log) == "nothing was measured"
    rows = [
        {"name": name, "verdict": verdict} for name, verdict in (("a", "met"), ("b", "MISSED"), ("c", "-"))
    ]
    (tmp_path / "x.json").write_text(json.dumps({"results": rows}))
    assert _program._summary(measured, settings, log) == "1 met, 1 MISSED: b"


def test_other_peoples_models_list_their_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_modules, "find_spec", lambda name: None if name == "timm" else object())
    with pytest.raises(SystemExit, match=r"^real_modules: recover needs timm, which cannot be imported"):
        real_modules.main(["recover"])
    monkeypatch.setattr(real_modules, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="rates needs torch and transformers, which cannot"):
        real_modules.main(["rates", "2"])
