"""A run that is killed with its program goes on: no finished step or call is repeated."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

pytestmark = [pytest.mark.no_device, pytest.mark.slow, pytest.mark.timeout(300)]

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


def run_with_kills(folder: Path, kills: int, seed: int) -> int:
    """Kill the program so often while it makes progress, let it end, and return how often it was killed."""
    source, killed = random.Random(seed), 0
    while True:
        finished, before = kept(folder), lines(folder)
        process = subprocess.Popen([sys.executable, str(PROGRAM), str(folder)])
        try:
            # A number of lines is reached at a random place, and the program is killed a random time after.
            target = len(before) + source.randint(1, 4)
            while process.poll() is None and (killed == kills or len(lines(folder)) < target):
                time.sleep(0.001)
            if process.poll() is None:
                time.sleep(source.uniform(0.0, 0.03))
        finally:
            process.send_signal(signal.SIGKILL)
        killed += (ended := process.wait()) == -signal.SIGKILL
        begun = {line.split()[1] for line in lines(folder)[len(before) :] if line.startswith("begin")}
        assert not begun & finished
        if ended == 0:
            return killed
        assert ended == -signal.SIGKILL


def test_a_run_that_is_killed_with_its_program_repeats_no_finished_step(tmp_path: Path) -> None:
    killed = 0
    for number in range(RUNS):
        folder = tmp_path / str(number)
        folder.mkdir()
        killed += run_with_kills(folder, KILLS, number)
        found = lines(folder)
        assert found[-1] == RESULT
        begun = Counter(line.split()[1] for line in found if line.startswith("begin"))
        ended = Counter(line.split()[1] for line in found if line.startswith("end"))
        assert sorted(ended) == sorted(NAMES)
        # A step has one key in all processes, and no other step has it.
        keys = {tuple(line.split()[1:]) for line in found if line.startswith("begin")}
        assert sorted(name for name, _ in keys) == sorted(NAMES)
        steps = [name for name in NAMES if "loop" not in name] + ["loop"]
        assert {key for _, key in keys} == {f"workflow/killed/one/{name}" for name in steps}
        with closing(sqlite3.connect(folder / "store")) as database:
            for table in ("accel_owners", "accel_saves", "accel_messages"):
                assert database.execute(f"select count(*) from {table}").fetchone() == (1,)
        repeated = sum(begun.values()) - len(NAMES)
        print(f"run {number}: {repeated} unfinished calls were begun again")
    print(f"{killed} kills in {RUNS} runs")
    assert killed >= 20
