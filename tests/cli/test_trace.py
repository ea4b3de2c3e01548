"""The command `trace` runs a program and leaves a whole timeline, however the program ends."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import sys
import trio
import trio_accel as ta

async def main():
    async with ta.open_system("traced") as system, system.open_device("cpu") as device:
        await device.zeros((3,))
        print(sys.argv[1:], __name__)
        {end}

trio.run(main)
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("", 0, ""),
        ("sys.exit(7)", 1, "SystemExit"),
        ("raise LookupError('gone')", 1, "LookupError: gone"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
    ],
)
def test_a_program_with_its_arguments(
    cli: Callable[..., Any], tmp_path: Path, end: str, code: int, said: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(end=end), encoding="utf-8")
    done = cli("trace", "-o", str(tmp_path / "t.json"), str(program), "--output", "x", "-m")
    assert done.out == "['--output', 'x', '-m'] __main__\n"
    assert "https://ui.perfetto.dev" in done.err
    assert str(tmp_path / "t.json") in done.err
    assert said in done.err
    assert done.code == code
    events = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert "devices.Empty" in {event["name"] for event in events}


def test_an_unusable_program_or_output_is_refused(cli: Callable[..., Any], tmp_path: Path) -> None:
    done = cli("trace", str(tmp_path / "none.py"))
    assert (done.code, done.out) == (2, "")
    assert "does not exist" in done.err
    program = tmp_path / "program.py"
    program.write_text("", encoding="utf-8")
    done = cli("trace", "--output", str(tmp_path / "no" / "t.json"), str(program))
    assert done.code == 2
    assert "cannot write" in done.err


def test_the_exit_code_is_the_programs(cli: Callable[..., Any], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit(7)", encoding="utf-8")
    assert cli("trace", "-o", str(tmp_path / "t.json"), str(program)).code == 7


@pytest.mark.slow
def test_ctrl_c_is_the_programs(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    end = """
        try:
            print("ready", flush=True)
            while True:
                await (await device.zeros((3,))).copy()
        finally:
            print("cleaned up", flush=True)
"""
    program.write_text(PROGRAM.format(end=end.strip()), encoding="utf-8")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start("trace", "-o", str(tmp_path / "t.json"), str(program), **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[] __main__\n"
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "cleaned up\n")
    said = error.splitlines()
    assert said[0].endswith(f" events in {tmp_path / 't.json'}")
    assert said[-1] == "trio-accel: interrupted"
    events = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert len(events) == int(said[0].split()[1])
