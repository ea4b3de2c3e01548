"""A run killed with its program continues: no finished step or call is repeated."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from chosen import SEARCHED

pytestmark = [pytest.mark.no_device, pytest.mark.skipif(sys.platform != "linux", reason="it forks")]

PROGRAM = Path(__file__).with_name("workflow_program.py")
RUNS, KILLS = 5, 5
RESULT = "result q01234 of Q 0, Q 1, Q 2, Q 3"
NAMES = ["pages", *(f"score[{n}]" for n in range(4)), *(f"loop.{n}" for n in range(5)), "answer"]


def lines(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


def kept(folder: Path) -> set[str]:
    """Names of the finished steps and calls in the store, as SQLite itself sees them."""
    if not (folder / "store").exists():
        return set()
    with closing(sqlite3.connect(folder / "store")) as database:
        try:
            rows = database.execute("select id from accel_messages").fetchall()
        except sqlite3.OperationalError:
            return set()
    return {name.replace("loop.turn ", "loop.") for (name,) in rows}


@contextmanager
def forking() -> Generator[subprocess.Popen[str], None, None]:
    command, more = [sys.executable, str(PROGRAM)], {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": SEARCHED}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env={**os.environ, **more}) as program:
        try:
            yield program
        finally:
            program.stdin.close()  # type: ignore[union-attr]
            program.wait()


def run_with_kills(program: subprocess.Popen[str], folder: Path, kills: int, seed: int) -> int:
    """Kill the workflow repeatedly while it makes progress, let it end, and return the number of kills."""
    assert program.stdin is not None
    assert program.stdout is not None
    source, killed = random.Random(seed), 0
    while True:
        finished, before = kept(folder), lines(folder)
        print(folder, file=program.stdin, flush=True)
        pid = int(program.stdout.readline())
        if killed < kills:
            # A number of lines is reached at a random place, and the process is killed a random time after.
            target = len(before) + source.randint(1, 4)
            while len(lines(folder)) < target and lines(folder)[-1:] != [RESULT]:
                time.sleep(0.001)
            time.sleep(source.uniform(0.0, 0.03))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended = int(program.stdout.readline())
        begun = {line.split()[1] for line in lines(folder)[len(before) :] if line.startswith("begin")}
        assert not begun & finished
        assert ended in {0, -signal.SIGKILL}
        killed += ended != 0
        if ended == 0:
            return killed


def test_a_run_killed_with_its_program_repeats_no_finished_step(tmp_path: Path) -> None:
    killed = 0
    with forking() as program:
        for number in range(RUNS):
            folder = tmp_path / str(number)
            folder.mkdir()
            killed += run_with_kills(program, folder, KILLS, number)
            found = lines(folder)
            assert found[-1] == RESULT
            begun = Counter(line.split()[1] for line in found if line.startswith("begin"))
            ended = Counter(line.split()[1] for line in found if line.startswith("end"))
            assert sorted(ended) == sorted(NAMES)
            # A step has one key in all processes, which no other step has.
            keys = {tuple(line.split()[1:]) for line in found if line.startswith("begin")}
            assert sorted(name for name, _ in keys) == sorted(NAMES)
            steps = [name for name in NAMES if "loop" not in name] + ["loop"]
            assert {key for _, key in keys} == {f"workflow/killed/one/{name}" for name in steps}
            with closing(sqlite3.connect(folder / "store")) as database:
                for table in ("accel_owners", "accel_saves", "accel_messages"):
                    assert database.execute(f"select count(*) from {table}").fetchone() == (1,)
            print(f"run {number}: {sum(begun.values()) - len(NAMES)} unfinished calls were begun again")
    print(f"{killed} kills in {RUNS} runs")
    assert killed >= 20
