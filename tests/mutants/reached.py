"""A plugin of pytest that notes which mutated functions each test enters.

``pytest -p reached`` watches the functions of ``MUTANTS`` by `sys.monitoring`, so it needs Python 3.12. Every
process that a test starts watches them as well, because it imports `sitecustomize` beside this file at its
start. Such a process writes what it enters into a folder, from which the running test takes it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any

# The file of the mutants; the folder of the results; and the folder for processes that a test starts.
MUTANTS, FOUND, ENTERED = "TRIO_ACCEL_MUTANTS", "TRIO_ACCEL_REACHED", "TRIO_ACCEL_ENTERED"
_PACKAGE = "trio_accel"


class Watch:
    """Watches the functions that mutants are in."""

    def __init__(self, mutants: Path) -> None:
        self.entered: set[tuple[str, int]] = set()
        self.functions = {(each["file"], each["line"]) for each in json.loads(mutants.read_text("utf-8"))}
        self._file: Path | None = None
        # Kept here, because the interpreter clears the names of modules at its end.
        self._monitoring: Any = sys.monitoring  # type: ignore[attr-defined]  # of 3.12

    def start(self, file: Path | None) -> None:
        """Begin to watch; with a file, write each function into it that is entered."""
        self._file = file
        monitoring = self._monitoring
        tool, event = monitoring.PROFILER_ID, monitoring.events.PY_START
        monitoring.use_tool_id(tool, "reached")
        monitoring.register_callback(tool, event, self._started)
        monitoring.set_events(tool, event)
        # A fork has entered nothing yet.
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._file = Path(os.environ[ENTERED]) / f"{os.getpid()}.entered"
        self._monitoring.restart_events()

    def _started(self, code: CodeType, _: int) -> object:
        monitoring = self._monitoring
        at = code.co_filename.rfind(f"{_PACKAGE}/")
        function = (code.co_filename[at:], code.co_firstlineno)
        if at < 0 or function not in self.functions:
            return monitoring.DISABLE
        if self._file is None:
            self.entered.add(function)
            return None
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{function[0]}:{function[1]}\n")
        return monitoring.DISABLE


class Reached:
    """Writes a line for each test: what it entered, how long it took, and how it ended."""

    def __init__(self) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self._folder = Path(os.environ[FOUND]) / worker
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lines = self._folder.with_suffix(".jsonl").open("a", encoding="utf-8")
        self._watch = Watch(Path(os.environ[MUTANTS]))
        os.environ[ENTERED] = str(self._folder)
        self._watch.start(None)

    @staticmethod
    def _of(folder: Path) -> set[tuple[str, int]]:
        found: set[tuple[str, int]] = set()
        for file in folder.glob("*.entered"):
            for line in file.read_text(encoding="utf-8").splitlines():
                name, _, number = line.rpartition(":")
                found.add((name, int(number)))
            file.unlink()
        return found

    @staticmethod
    def _is_main(config: Any) -> bool:
        return not hasattr(config, "workerinput") and config.getoption("numprocesses", None)

    def pytest_runtest_protocol(self) -> None:
        self._watch.entered.clear()
        self._seconds, self._outcome = 0.0, "passed"

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds += report.duration
        if not report.passed:
            self._outcome = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        entered = sorted(self._watch.entered | self._of(self._folder))
        line = {"test": nodeid, "seconds": self._seconds, "outcome": self._outcome, "entered": entered}
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()


def pytest_configure(config: Any) -> None:
    if not Reached._is_main(config):
        config.pluginmanager.register(Reached())
