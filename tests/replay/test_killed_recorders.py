"""A program killed while it records has lost none of its replies."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from chosen import BACKEND, INLINE, SEARCHED

import trio_accel as ta
from trio_accel import replay

KILLS = pytest.mark.parametrize("kills", [1, pytest.param(10, marks=[pytest.mark.slow])])


@KILLS
@pytest.mark.parametrize("askers", [1, 8])
@pytest.mark.timeout(120)
async def test_no_reply_is_missing(system: ta.System, tmp_path: Path, askers: int, kills: int) -> None:
    for kill in range(kills):
        path = tmp_path / f"journal{kill}"
        replies = killed(path, askers, 0.3 + 0.02 * kill)
        assert len(replies) > askers
        journal = replay.FileJournal(path)
        # The results in the journal, with repetitions.
        kept = [
            float(np.frombuffer(array[2], np.float64)[1]).hex()
            for entry in map(pickle.loads, journal.entries())
            if entry[0] == "result"
            for array in entry[2]
        ]
        for value in {value for _, _, value in replies}:
            given = sum(each == value for _, _, each in replies)
            assert kept.count(value) >= given, value
        async with system.open_device(BACKEND, options=INLINE) as device:
            report = await replay.replay(journal, device, until=200)
        assert report.is_same, report


def killed(path: Path, askers: int, seconds: float) -> list[tuple[str, str, str]]:
    """Run a recorder for a while, and kill it; returns the replies that it was given."""
    program = [sys.executable, str(Path(__file__).with_name("killed_recorder.py")), str(path), str(askers)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, env={"PYTHONPATH": SEARCHED}) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        # clock: any moment will do
        time.sleep(seconds)
        process.kill()
        rest = process.stdout.read()
    lines = (first + rest).decode().splitlines()
    found = [tuple(line.split()) for line in lines]
    return [(each[0], each[1], each[2]) for each in found]
