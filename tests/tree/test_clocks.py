"""Clocks that jump: the time of day is shown, and nothing waits, ends or is bounded by it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import trio_accel

PACKAGE = Path(trio_accel.__file__).parent
SHOWN = {
    "telemetry/_tally.py",
    "telemetry/_recorder.py",
    "telemetry/_traces.py",
    # The age of files that killed writers have left.
    "backends/base/kit/code_cache.py",
    # When a checkpoint was saved, for its readers.
    "train/_checkpoints.py",
}
OF_THE_DAY = {"time.time", "time.time_ns", "time.localtime", "datetime.now", "datetime.utcnow", "date.today"}


@pytest.mark.slow
def test_only_modules_that_show_the_time_of_day_ask_for_it() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node).removeprefix("datetime.") in OF_THE_DAY:
                found.add(path.relative_to(PACKAGE).as_posix())
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                assert not {"time", "time_ns"} & {name.name for name in node.names}, path
    assert found <= SHOWN, "a clock that is set back or ahead would be felt there"
