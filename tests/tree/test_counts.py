"""The project's own counts have not grown; docs/design/counts.md gives the reasons for counting."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from chosen import ROOT
from counts import (
    PACKAGE,
    code_tokens,
    count_tokens,
    executed_files,
    library_of,
    package_tokens,
    private_names,
)

import trio_accel as ta

# The most there may be: a change that needs fewer lowers the bound. Files that run for one operation inline;
# through a worker, in the application and in the worker's loop.
FILES = {
    "matmul": (16, 16, 17),
    "cholesky": (17, 17, 18),
    "rfft": (17, 18, 17),
    "expression": (19, 19, 17),
    "loss": (17, 18, 17),
    "chain": (18, 19, 18),
    # Computed in place, and by a worker.
    "step": (12, 15, 18),
    "random draw": (20, 21, 18),
    "sparse product": (20, 21, 17),
    "program call": (19, 20, 18),
    # The program call, and the batcher of sequences before it.
    "decode step": (34, 35, 18),
    # The watch over the context looks at times: one more file inline.
    "collective": (33, 30, 29),
    "train step": (57, 54, 30),
}
# Python calls of a step of training in the application, and requests of each of its two ranks.
CALLS_OF_A_STEP = {"inline": 1640, "process": 1990}
REQUESTS_OF_A_STEP = 3
# Longer names break lines, and a broken line has one more comma.
TOKENS_PER_FUNCTION = 613
TOKENS_OF_THE_MEDIAN = 712
TOKENS = 894_000
PRIVATE_NAMES = 174


@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_few_files_run_for_an_operation(isolation: ta.Isolation) -> None:
    if isolation == "process" and sys.platform != "linux":
        pytest.skip("the CPU backend has worker processes on Linux only")
    fewest: dict[str, tuple[int, int]] = {}
    calls: list[int] = []
    for _ in range(12):
        # Files used next to an operation, now and then, are not its files: the fewest of some runs count.
        found = trio.run(executed_files, isolation)
        for name, one in found.items():
            assert (one.worker is None) == (isolation == "inline")
            counts = len(one.application.calls), len(one.worker.calls) if one.worker else 6
            fewest[name] = (
                min(counts[0], fewest.get(name, counts)[0]),
                min(counts[1], fewest.get(name, counts)[1]),
            )
        bounds = {name: (most[isolation == "process"], most[2]) for name, most in FILES.items()}
        step = found["train step"]
        assert step.requests == REQUESTS_OF_A_STEP
        calls.append(step.application.calls.total())
        if min(calls) <= CALLS_OF_A_STEP[isolation] and all(
            fewest[name][0] <= most and fewest[name][1] <= other for name, (most, other) in bounds.items()
        ):
            break
    assert 500 < min(calls) <= CALLS_OF_A_STEP[isolation]
    assert set(fewest) == set(FILES)
    for name, (application, worker) in fewest.items():
        assert 3 < application <= bounds[name][0], name
        assert 5 < worker <= bounds[name][1], name


def test_a_function_needs_few_tokens() -> None:
    tokens = count_tokens()
    assert {"matmul", "cholesky"} <= tokens.functions["linalg"]
    assert {"Generator.normal", "Sobol.random"} <= tokens.functions["random"]
    assert "Rank.all_reduce" in tokens.functions["collectives"]
    assert not {"bind", "check_array", "Matmul", "BlasActor"} & set().union(*tokens.functions.values())
    assert 100 < tokens.per_function <= TOKENS_PER_FUNCTION
    assert 100 < tokens.median <= TOKENS_OF_THE_MEDIAN


def test_every_room_that_computes_counts() -> None:
    rooms = {path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "backends").rglob("*.py")}
    libraries = {name for name in rooms if re.search(r"/(libraries|ops)/\w*[a-z]\w*\.py$", name)}
    counted = {name for name in libraries if library_of(name)}
    left = {Path(name).stem for name in libraries - counted}
    # Names, and functions that run the user's own code, move data, or serve all libraries.
    assert left == {
        *("__init__", "graphs", "jit", "memory", "program", "numeric", "tensor_maps"),
        *("_array", "_asker", "_signature", "_spec"),
    }


def test_the_package_has_not_grown() -> None:
    assert 100_000 < package_tokens() <= TOKENS


def test_tests_import_few_private_names() -> None:
    names = private_names()
    assert "Cell" in names
    assert "open_system" not in names
    assert len(names) <= PRIVATE_NAMES


def test_comments_docstrings_and_line_breaks_do_not_count(tmp_path: Path) -> None:
    python, cuda = tmp_path / "a.py", tmp_path / "a.cu"
    python.write_text('"""Doc.\n\nMore."""\n\n# why\nx = 1  # why\ny = """two\nlines"""\nz = (\n    x\n)\n')
    cuda.write_text("/* why\n why */\n// why\nint x;  // why\n\n")
    assert (code_tokens(python), code_tokens(cuda)) == (11, 3)


@pytest.mark.slow
def test_a_command_prints_the_counts() -> None:
    program = str(ROOT / "tests" / "counts.py")
    done = subprocess.run(
        [sys.executable, program], check=True, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    for what in (
        "inline matmul, application: ",
        "process rfft, worker: ",
        " of the median library",
        " private names ",
    ):
        assert what in done.stdout
