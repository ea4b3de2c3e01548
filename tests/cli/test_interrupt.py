"""Ctrl-C at different moments: the command ends in order, and nothing is left."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import trio_accel as ta
from trio_accel.cli._run import _leave_at_once
from trio_accel.testing import _leaks

Start = Callable[..., "subprocess.Popen[str]"]

# Each of the commands runs for minutes if nothing interrupts it.
LIMIT_SECONDS = 30.0

IS_ISOLATED = "process" in ta.list_devices()[0].isolations

LOSES_THE_INTERRUPT = """
while True:
    try:
        while True: pass
    except BaseException: pass
"""

# Each runs for minutes if nobody stops it.
LONG = ["recover --rounds 64", "--rounds 64"]
DEMO = pytest.mark.skipif(not IS_ISOLATED, reason="the device has no worker processes")


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture
def launch(start: Start, environment: dict[str, str], temporary: Path) -> Start:
    """Starts a command as the leader of a process group with a folder for temporary files of its own."""

    def run(*arguments: str, **options: object) -> subprocess.Popen[str]:
        env = {**environment, "TMPDIR": str(temporary)}
        return start(*arguments, **{"env": env, "start_new_session": True, **options})

    return run


def interrupt(process: subprocess.Popen[str], number: int = signal.SIGINT) -> tuple[str, str]:
    process.send_signal(number)
    return process.communicate(timeout=LIMIT_SECONDS)


def is_nothing_left(process: subprocess.Popen[str], temporary: Path) -> bool:
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return list(temporary.iterdir()) == []
    return False


@DEMO
@pytest.mark.parametrize("step", LONG)
@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_in_the_middle_of_a_step(launch: Start, temporary: Path, step: str, delay: float) -> None:
    process = launch("demo", *step.split())
    assert process.stdout is not None
    assert process.stdout.readline().startswith("trio-accel ")
    # The device is open by now; a moment later its first operations run.
    # clock: any moment will do
    time.sleep(delay)
    _, err = interrupt(process)
    assert (process.returncode, err) == (130, "trio-accel: interrupted\n")
    assert is_nothing_left(process, temporary)


@DEMO
def test_termination_is_as_orderly(launch: Start, temporary: Path) -> None:
    process = launch("demo", *LONG[0].split())
    assert process.stdout is not None
    process.stdout.readline()
    _, err = interrupt(process, signal.SIGTERM)
    assert (process.returncode, err) == (143, "trio-accel: interrupted\n")
    assert is_nothing_left(process, temporary)


@DEMO
def test_the_json_document_reports_the_interrupt(launch: Start) -> None:
    process = launch("demo", *LONG[1].split(), "--json")
    # Trio's import also starts a program, and a signal during the imports is only a line.
    while not any(b"_launcher_process" in command_of(pid) for pid, _ in below(process.pid)):
        time.sleep(0.01)
    out, err = interrupt(process)
    # The log may contain lost contexts.
    assert (process.returncode, err.splitlines()[-1]) == (130, "trio-accel: interrupted")
    document = json.loads(out)
    assert (document["ok"], document["exit_code"], document["error"]) == (False, 130, "interrupted")


@DEMO
@pytest.mark.slow
def test_the_terminal_is_restored(launch: Start, temporary: Path) -> None:
    controller, terminal = pty.openpty()
    process = launch("demo", *LONG[1].split(), stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    screen = b""
    while b"putting arrays" not in screen:
        screen += os.read(controller, 65536)
    rest: list[bytes] = []
    reader = threading.Thread(target=drain, args=(controller, rest))
    reader.start()
    interrupt(process)
    reader.join(10)
    screen += b"".join(rest)
    assert process.returncode == 130
    assert screen.count(b"\x1b[?25l") == screen.count(b"\x1b[?25h") == 1
    assert screen.endswith(b"trio-accel: interrupted\r\n")
    assert is_nothing_left(process, temporary)


def drain(controller: int, parts: list[bytes]) -> None:
    try:
        while part := os.read(controller, 65536):
            parts.append(part)
    except OSError:  # Linux: the other side is closed
        pass
    os.close(controller)


@pytest.mark.parametrize("module", ["attrs", "numpy", "trio", "cyclopts"])
@pytest.mark.parametrize("loop", ["while True: pass", LOSES_THE_INTERRUPT])
def test_a_signal_during_the_imports(launch: Start, tmp_path: Path, module: str, loop: str) -> None:
    # A module that never returns; a module that loses the exception, as some compiled ones do.
    (tmp_path / f"{module}.py").write_text(f"print(flush=True)\n{loop}\n", "ascii")
    process = launch("demo")
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    _, err = interrupt(process)
    assert (process.returncode, err) == (130, "trio-accel: interrupted\n")


@pytest.mark.slow
def test_a_signal_after_the_last_step_changes_nothing() -> None:
    # The first registered function is called last, when the command has left.
    program = (
        "import atexit, os, signal, sys\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['trio-accel', '--version']\n"
        "from _trio_accel import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().endswith(ta.__version__)


@DEMO
@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("phase", ["opening", "running", "closing"])
def test_no_worker_is_left(launch: Start, temporary: Path, phase: str, is_terminal: bool) -> None:
    arguments = LONG[0] if phase != "closing" else "recover"
    process = launch("demo", *arguments.split())
    assert process.stdout is not None
    started = set[tuple[int, int]]()
    if phase == "opening":
        while not (started := below(process.pid)):
            time.sleep(0.001)
    else:
        assert process.stdout.readline().startswith("trio-accel ")
        started = below(process.pid)
    if phase == "closing":
        assert "all 6 checks hold\n" in iter(process.stdout.readline, "")
    assert started
    # A terminal sends the signal to all processes in the foreground.
    (os.killpg if is_terminal else os.kill)(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    # A signal after the last step has cut nothing short.
    ends = [(130, "trio-accel: interrupted\n"), (0, "")]
    assert (process.returncode, err) in ends[: 2 if phase == "closing" else 1]
    deadline = time.monotonic() + LIMIT_SECONDS
    while left := started & {(pid, began) for pid, _, began in _leaks._everyone()}:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    assert list(temporary.iterdir()) == []


def below(pid: int) -> set[tuple[int, int]]:
    """Child processes and grandchildren of a process: their numbers and times of start."""
    parents, found = {pid}, set[tuple[int, int]]()
    everyone = list(_leaks._everyone())
    while new := {(child, began) for child, parent, began in everyone if parent in parents} - found:
        found |= new
        parents = {child for child, _ in new}
    return found


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it is over
        return b""


def test_a_second_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    _leave_at_once(signal.SIGTERM)
    assert codes == [143]
