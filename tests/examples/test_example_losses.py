"""A killed worker of an example is one line on stderr, because examples configure no logging."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_examples import EXAMPLES, ISOLATED, LOSS, ROOT, RUNS

pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes are on Linux only"),
]

# Runs an example, kills its first worker as soon as that serves, and writes down how many contexts were lost.
PROGRAM = """
import os, runpy, signal, sys
from contextlib import contextmanager
from pathlib import Path
import trio_accel as ta
from trio_accel.actors import around_each_system

killed, losses = [], []

def watch(event):
    if not event.path.endswith("/context"):
        return
    if isinstance(event, ta.ActorRestarted):
        losses.append(event)
    elif isinstance(event, ta.ActorStarted) and event.pid is not None and not killed:
        killed.append(event.pid)
        os.kill(event.pid, signal.SIGKILL)

@contextmanager
def watching(system):
    with system.subscribe(watch, messages=False):
        yield

del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
try:
    with around_each_system(watching):
        runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    Path("losses").write_text(f"{len(killed)} {len(losses)}")
"""
PROGRAMS = {name: arguments for name, arguments, _ in RUNS if name in ISOLATED}
PROGRAMS |= {
    "all_reduce.py": "",
    "digits_cnn.py": "--rounds 1",
    "train_digits.py": "--steps 4 --quiet",
    "fit_simulation.py": "--size 16 --steps 2 --iterations 2 --kills 1",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_killed_worker_is_one_line(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(EXAMPLES / name), *PROGRAMS[name].split()]
    environment = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=100,
        check=False,
    )
    killed, losses = map(int, (tmp_path / "losses").read_text().split())
    assert killed == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("trio_accel")]
    assert [line for line in lines if not LOSS.fullmatch(line)] == []
    assert len(lines) == losses >= 1, done.stderr
    # Without a `retry` the first request fails, and the program with it.
    assert done.returncode == 0 or re.search(r"ContextLostError: .*worker", done.stderr), done.stderr
