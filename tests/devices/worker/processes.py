"""The kernel's facts about processes and descriptors."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

PROC = Path("/proc")
LAUNCHER = "_launcher_process.py"
_DYING = 60.0


def everyone() -> Iterator[tuple[int, int, int]]:
    """Yield pid, parent and session of every process."""
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            stat = _read(entry / "stat").decode()
            if stat:
                _, parent, _, session, *_ = stat.rpartition(")")[2].split()
                yield int(entry.name), int(parent), int(session)


def children(parent: int | None = None) -> set[int]:
    """The children of a process, by default of this one, including unreaped children."""
    wanted = os.getpid() if parent is None else parent
    return {pid for pid, other, _ in everyone() if other == wanted}


def in_session(session: int) -> set[int]:
    """The processes of a session that live."""
    return {pid for pid, _, other in everyone() if other == session and command(pid)}


def marked(mark: str) -> set[int]:
    """The processes that live and were started with a mark in their environment."""
    return {pid for pid, _, _ in everyone() if mark.encode() in _read(PROC / str(pid) / "environ")}


def command(pid: int) -> str:
    """Command line of a process; empty when it is dead."""
    return _read(PROC / str(pid) / "cmdline").replace(b"\0", b" ").decode(errors="replace")


def launcher(parent: int | None = None) -> int:
    """The one launcher of a process, by default this one."""
    (pid,) = [pid for pid in children(parent) if LAUNCHER in command(pid)]
    return pid


def workers(launcher: int) -> set[int]:
    """Live processes of the launcher's session except itself and the process that workers are forked from."""
    others = in_session(launcher) - {launcher}
    return {pid for pid in others if _read(PROC / str(pid) / "comm") != b"accel template\n"}


def descriptors(pid: int | None = None) -> dict[int, str]:
    """The open descriptors of a process, by default of this one."""
    found = {}
    for entry in (PROC / (str(pid) if pid else "self") / "fd").iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except FileNotFoundError:
            # The one of the listing itself.
            continue
    return found


@contextmanager
def none_left(monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
    """Fail if a process started in the body is left, however far removed."""
    mark = uuid.uuid4().hex
    # Handed down to every process started from here, and to their children.
    monkeypatch.setenv("TRIO_ACCEL_TEST_MARK", mark)
    zombies = children()
    yield
    deadline = time.monotonic() + _DYING
    while (left := marked(mark)) and time.monotonic() < deadline:
        # A killed process that is nobody's child here takes a moment.
        time.sleep(0.005)
    assert not left, f"processes are alive: {[command(pid) for pid in left]}"
    left = children() - zombies
    assert not left, f"processes were not reaped: {left}"


async def wait_dead(*pidfds: int) -> None:
    """Wait for the deaths of processes that need not be children."""
    for pidfd in pidfds:
        await trio.lowlevel.wait_readable(pidfd)


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for an action of other processes that report it to nobody."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110  # there is nothing to wait for
            await trio.sleep(0.001)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        # It has ended meanwhile, or is somebody else's.
        return b""
