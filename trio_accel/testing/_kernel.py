"""What the kernel says of this process: children, descriptors, shared memory. Nothing off Linux."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import attrs

__all__ = ["Descriptor", "Process", "descendants", "descriptors", "shared_memory"]

_PROC = Path("/proc")
_SHARED = ("/memfd:", "/dev/shm/")  # noqa: S108  # where shared memory shows, no file that is made
_GONE = " (deleted)"
_INODE = re.compile(r":\[\d+\]")


@attrs.frozen
class Process:
    """A process that this one has started, or one of those.

    Attributes:
        pid: Its number.
        started: When it was started, in ticks since the machine was: a number may be given again.
        parent: Number of its parent.
        command: Its command line; empty if it is dead and was not reaped.
        name: Its name, which a forked process may have changed.
    """

    pid: int
    started: int
    parent: int
    command: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.pid} ({self.command or 'dead, not reaped'})"

    @property
    def key(self) -> tuple[int, int]:
        """What no other process has."""
        return self.pid, self.started


@attrs.frozen
class Descriptor:
    """An open descriptor.

    Attributes:
        number: Its number.
        target: What it is open on, such as ``"/tmp/x"`` or ``"socket:[123]"``.
    """

    number: int
    target: str

    def __str__(self) -> str:
        return f"{self.number} ({self.target})"

    @property
    def kind(self) -> str:
        """What it is open on, without numbers that differ each time."""
        return _INODE.sub("", self.target).removesuffix(_GONE)


def descendants() -> tuple[Process, ...]:
    """Children of this process, and theirs; also those that are dead and not reaped."""
    children: dict[int, list[tuple[int, int]]] = {}
    for pid, parent, started in _everyone():
        children.setdefault(parent, []).append((pid, started))
    found: list[Process] = []
    parents = [os.getpid()]
    while parents:
        parent = parents.pop()
        for pid, started in children.get(parent, ()):
            command = _read(_PROC / str(pid) / "cmdline").replace(b"\0", b" ").decode(errors="replace")
            name = _read(_PROC / str(pid) / "comm").decode(errors="replace")
            found.append(Process(pid, started, parent, command.strip(), name.strip()))
            parents.append(pid)
    return tuple(found)


def descriptors() -> tuple[Descriptor, ...]:
    """What this process has open, but for shared memory."""
    return tuple(Descriptor(number, target) for number, target in _opened() if not target.startswith(_SHARED))


def shared_memory() -> dict[int, str]:
    """Shared memory that this process has mapped or open: its name by inode."""
    found: dict[int, str] = {}
    for number, target in _opened():
        if target.startswith(_SHARED):
            with suppress(OSError):
                found[os.fstat(number).st_ino] = target.removesuffix(_GONE)
    for line in _read(_PROC / "self" / "maps").decode(errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(_SHARED):
            found[int(fields[4])] = fields[5].removesuffix(_GONE)
    return found


def _opened() -> Iterator[tuple[int, str]]:
    for number in _names(_PROC / "self" / "fd"):
        # The one of the listing itself has gone.
        with suppress(OSError):
            yield int(number), os.readlink(_PROC / "self" / "fd" / number)


def _everyone() -> Iterator[tuple[int, int, int]]:
    """Yield pid, parent and time of start of every process."""
    for name in _names(_PROC):
        if name.isdecimal():
            # The name of the program, in brackets, may hold anything.
            fields = _read(_PROC / name / "stat").decode(errors="replace").rpartition(")")[2].split()
            if fields:
                yield int(name), int(fields[1]), int(fields[19])


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        # It has ended meanwhile, or is somebody else's.
        return b""
