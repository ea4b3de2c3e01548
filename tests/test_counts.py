"""The project's own counts have not grown: docs/design/counts.md says why they are counted."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from chosen import ROOT
from counts import EXECUTED, code_lines, count_lines, executed_files, package_lines, private_names

import trio_accel as ta

# The most there may be. A change that needs fewer lowers the bound.
FILES = {"inline": 18, "process": 18}
LINES_PER_FUNCTION = 42
LINES = 68_700
PRIVATE_NAMES = 150


@pytest.mark.parametrize("isolation", FILES)
def test_few_files_run_for_an_operation(isolation: ta.Isolation) -> None:
    if isolation == "process" and sys.platform != "linux":
        pytest.skip("the CPU backend has worker processes on Linux only")
    traces = trio.run(executed_files, isolation)
    assert set(traces) == set(EXECUTED)
    assert 5 < max(len(trace.calls) for trace in traces.values()) <= FILES[isolation]


def test_few_lines_stand_behind_a_function() -> None:
    lines = count_lines()
    assert {"matmul", "cholesky"} <= lines.functions["linalg"]
    assert {"capabilities", "specifications", "cpu", "cuda"} <= set(lines.by_kind)
    assert 10 < lines.per_function < math.nextafter(LINES_PER_FUNCTION, 0)


def test_the_package_has_not_grown() -> None:
    assert 10_000 < package_lines() <= LINES


def test_tests_import_few_private_names() -> None:
    names = private_names()
    assert "Cell" in names
    assert "open_system" not in names
    assert len(names) <= PRIVATE_NAMES


def test_lines_without_code_do_not_count(tmp_path: Path) -> None:
    python, cuda = tmp_path / "a.py", tmp_path / "a.cu"
    python.write_text('"""Doc.\n\nMore."""\n\n# why\nx = 1  # why\ny = """two\nlines"""\n')
    cuda.write_text("/* why\n why */\n// why\nint x;  // why\n\n")
    assert (code_lines(python), code_lines(cuda)) == (3, 1)


@pytest.mark.slow
def test_a_command_prints_the_counts() -> None:
    program = str(ROOT / "tests" / "counts.py")
    done = subprocess.run(
        [sys.executable, program], check=True, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    for what in ("inline matmul: ", "process rfft: ", " lines per public function: ", " private names that "):
        assert what in done.stdout
