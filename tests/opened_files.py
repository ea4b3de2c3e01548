"""This process's open files according to the kernel, except those of devices."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import attrs
import trio

import trio_accel as ta
from trio_accel.testing import _leaks, leak_check

_SHARED = ("/memfd:", "/dev/shm/")  # shared memory shows here, without a file
_GONE = " (deleted)"
_INODE = re.compile(r":\[\d+\]")
# Compiled expressions stay loaded.
_CODE = "/memfd:accel code"
# The application has these of a worker, and of a launcher, which Trio also watches.
_OF_WORKER = ("socket", "anon_inode:[pidfd]", "/memfd:trio_accel page")
_OF_LAUNCHER = ("socket", "anon_inode:[pidfd]", "anon_inode:[pidfd]")


@attrs.frozen
class Opened:
    """The open files, by kind and number; and the processes of devices at that time."""

    things: frozenset[tuple[str, str]]
    census: _leaks.Census

    def running(self, group: str) -> int:
        """Count the workers, or the launchers, that run: a spare one may be coming up."""
        return sum(thing.group == group for thing in self.census.things)

    @classmethod
    def now(cls) -> Opened:
        census = _leaks.Census.take(_leaks.everything)
        if not Path("/proc/self").exists():
            return cls(frozenset(), census)
        devices = _leaks.open_devices(_leaks.everything)
        held = [descriptor for device in devices for descriptor in device.descriptors]
        inodes = {os.fstat(descriptor).st_ino for descriptor in held}
        shared: dict[int, str] = {}
        things: set[tuple[str, str]] = set()
        for number in os.listdir("/proc/self/fd"):
            # The descriptor of the listing itself has gone.
            with suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{number}")
                if target.startswith(_SHARED):
                    shared[os.fstat(int(number)).st_ino] = target.removesuffix(_GONE)
                elif int(number) not in held:
                    things.add((_INODE.sub("", target).removesuffix(_GONE), f"{number} ({target})"))
        for line in Path("/proc/self/maps").read_bytes().decode(errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(_SHARED) and not fields[5].startswith(_CODE):
                shared[int(fields[4])] = fields[5].removesuffix(_GONE)
        things |= {(shared[inode], f"inode {inode}") for inode in shared.keys() - inodes}
        return cls(frozenset(things), census)

    def more_than(self, before: Opened) -> list[str]:
        """Name new files that do not replace old ones."""
        may_be = Counter(kind for kind, _ in before.things)
        # Open devices and systems may have started processes since.
        may_be.update(_OF_WORKER * max(0, self.census.workers - before.running(_leaks._WORKER)))
        may_be.update(_OF_LAUNCHER * max(0, self.census.launchers - before.running(_leaks._LAUNCHER)))
        left: list[str] = []
        for kind, number in Counter(kind for kind, _ in self.things).items():
            new = sorted(f"{what} {name}" for what, name in self.things - before.things if what == kind)
            if (more := number - may_be[kind]) > 0:
                left += new[-more:]
        return left


@asynccontextmanager
async def leaves_nothing(*scope: ta.Device | ta.System) -> AsyncGenerator[None, None]:
    """Do the work of `leak_check`, and also look at descriptors and shared memory."""
    before = Opened.now()
    async with leak_check(*scope):
        yield
    deadline = time.monotonic() + _leaks._SETTLE
    while left := Opened.now().more_than(before):
        assert time.monotonic() < deadline, f"left open: {left}"
        await trio.to_thread.run_sync(time.sleep, 0.005)
