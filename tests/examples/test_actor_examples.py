"""The example programs of the actor runtime, run as their reader would, in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(program: str, *arguments: str) -> list[str]:
    """Returns the lines that the program printed; it must end well and write no errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / program), *arguments],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_counter_begins_again_after_its_crash() -> None:
    assert run("counter.py", "--count", "4") == [
        "crashed: lost at 4",
        "counter (System) running",
        "└─ counter (Counter) running, 5 handled, 1 failed, 1 restart, last error: RuntimeError: lost at 4",
        "1 2 3 4 1",
    ]


@pytest.mark.parametrize("jobs", [1, 5, 60])
def test_the_pool_slows_its_producer_and_loses_nothing(jobs: int) -> None:
    *tree, last = run("worker_pool.py", "--jobs", str(jobs))
    assert tree[0] == "squares (System) running"
    assert [line.split()[1] for line in tree[1:]] == ["worker-1", "worker-2", "worker-3", "worker-4", "pool"]
    found = re.fullmatch(r"sum of squares (\d+), at most (\d+) of 13 jobs on their way at once", last)
    assert found is not None, last
    assert int(found[1]) == sum(number**2 for number in range(jobs))
    # 8 in the mailbox, 1 next in turn, 4 being done; with enough jobs the mailbox has been full.
    assert (8 if jobs == 60 else 1) <= int(found[2]) <= min(jobs, 13)


@pytest.mark.parametrize("requests", [2, 30])
def test_one_request_crashes_the_pages_and_all_others_are_served(requests: int) -> None:
    served = requests - 1
    crashed = f"{served} handled, 1 failed, 1 restart, last error: RuntimeError: no page -1"
    assert run("crash_and_recover.py", "--requests", str(requests)) == [
        "before",
        "library (System) running",
        "├─ archive (Pages) running",
        "├─ pages (Pages) running",
        "└─ index (Index) running",
        "after",
        "library (System) running",
        "├─ archive (Pages) running",
        f"├─ pages (Pages) running, {crashed}",
        "└─ index (Index) running, 1 restart",
        f"{{'failed: no page -1': 1, 'served': {served}}}",
    ]


@pytest.mark.parametrize("path", ["counter.py", "worker_pool.py", "crash_and_recover.py"])
def test_an_example_is_short_and_uses_public_names_only(path: str) -> None:
    source = (EXAMPLES / path).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 80
    assert not re.search(r"trio_accel\.\w*\._|\bta\._", source)
