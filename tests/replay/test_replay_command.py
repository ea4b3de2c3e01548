"""The commands `replay` and `journal`."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND, SEARCHED
from command import Cli, make_cli

import trio_accel as ta
from trio_accel import replay
from trio_accel.cli import main

Make = Callable[[str], replay.RecordingJournal]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return make_cli(main, capsys)


async def recorded(journal: replay.RecordingJournal) -> None:
    async with (
        ta.open_system("test") as system,
        system.open_device(BACKEND) as device,
        replay.record(device, journal) as recording,
    ):
        x = await device.put(np.arange(16.0).reshape(4, 4) + 0.1)
        await (ta.nn.relu(x @ x) + 1.0).to_host()
        with pytest.raises(ta.LinAlgError):
            await ta.linalg.inv(await device.zeros((3, 3)))
        await recording.mark("end", x=x)


@pytest.mark.parametrize("make", [replay.FileJournal, replay.SqliteJournal])
def test_a_replay(cli: Cli, tmp_path: Path, make: Any) -> None:
    path = tmp_path / "journal"
    trio.run(recorded, make(path))
    done = cli("replay", path, "--device", BACKEND)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("no difference\n")
    assert "3 operations, 2 arrays compared, 0 differ" in done.out
    done = cli("replay", path, "--device", BACKEND, "--until", "1")
    assert "1 operations, 0 arrays compared" in done.out
    done = cli("replay", path, "--device", BACKEND, "--against", BACKEND, "--tolerance", "1e-9")
    assert (done.code, done.err) == (0, "")
    listed = cli("journal", path)
    assert listed.code == 0
    lines = listed.out.splitlines()
    assert lines[0] == f"trio_accel: {ta.__version__}"
    assert "1 devices.Put" in lines
    assert any(line.startswith("4 linalg.Inv: LinAlgError: ") for line in lines), lines
    assert lines[-1] == "mark 'end': x"


def test_a_difference(cli: Cli, tmp_path: Path) -> None:
    path, changed = tmp_path / "journal", tmp_path / "changed"
    trio.run(recorded, replay.FileJournal(path))
    copy = replay.FileJournal(changed)
    number = np.float64(15.1).tobytes()
    for entry in replay.FileJournal(path).entries():
        # The input array is another one.
        copy.append(entry.replace(number, np.float64(15.2).tobytes()) if b"Put" in entry else entry)
    done = cli("replay", changed, "--device", BACKEND)
    assert done.code == 1
    assert done.out.startswith(
        "first difference: operation 2, linalg.matmul, nn.relu, arrays.add, AccelRef.to_host"
    )
    done = cli("replay", changed, "--device", BACKEND, "--tolerance", "1")
    assert done.code == 0


def test_files_other_than_journals(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("some text")
    sqlite3.connect(tmp_path / "database").execute("create table other (x)").connection.close()
    for arguments, told in [
        (("replay", tmp_path / "missing"), "cannot read"),
        (("replay", tmp_path / "text"), "is not a journal"),
        (("journal", tmp_path / "text"), "is not a journal"),
        (("journal", tmp_path / "missing"), "cannot read"),
        (("replay", tmp_path / "database"), "header is missing"),
        (("replay", tmp_path / "text", "--device", "no_such"), "no_such|cannot open"),
    ]:
        done = cli(*arguments)
        assert (done.code, done.out) == (2, ""), arguments
        assert any(each in done.err for each in told.split("|")), done.err
        assert done.err.count("\n") == 1


async def recorded_twenty(journal: replay.RecordingJournal) -> None:
    """Record some operations."""
    async with (
        ta.open_system("test") as system,
        system.open_device(BACKEND) as device,
        replay.record(device, journal),
    ):
        x = await device.put(np.ones(4))
        for _ in range(20):
            await ta.linalg.scal(1.0, x)


@pytest.mark.parametrize("against", [(), ("--against", BACKEND)])
def test_ctrl_c(tmp_path: Path, against: tuple[str, ...]) -> None:
    path = tmp_path / "journal"
    trio.run(recorded_twenty, replay.FileJournal(path))
    # It stops in the middle of the first operation.
    program = (
        "import sys, trio\n"
        "from trio_accel import replay\n"
        "from trio_accel.replay import _replay\n"
        "give = _replay.Player.give\n"
        "async def told(*arguments):\n"
        "    await give(*arguments)\n"
        "    print('begun', flush=True)\n"
        "    await trio.sleep_forever()\n"
        "_replay.Player.give = told\n"
        "from trio_accel.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", program, "replay", str(path), "--device", BACKEND, *against]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SEARCHED},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "trio-accel: interrupted\n")
