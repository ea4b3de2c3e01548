"""Resources of processes at one moment, to see whether they grow."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from pathlib import Path

import attrs
import driver
import processes

import trio_accel as ta

_PAGE = os.sysconf("SC_PAGE_SIZE")


@attrs.frozen(kw_only=True)
class Holdings:
    """Resources of an open device's processes.

    Attributes:
        descriptors: That are open.
        threads: Live threads, except those that Trio keeps in reserve for ten seconds.
        mappings: Of memory.
        resident: Bytes in physical memory, by process: a worker that took another's place is another.
        processes: The application, the launcher and the workers.
        blocks: Of device memory.
        used: Bytes of them.
        reserved: Bytes that they lie in.
        device_free: Bytes of the device that nobody has.
    """

    descriptors: int
    threads: int
    mappings: int
    resident: dict[int, int]
    processes: int
    blocks: int
    used: int
    reserved: int
    device_free: int

    @classmethod
    async def now(cls, device: ta.Device) -> Holdings:
        """Look, when nothing is in flight."""
        gc.collect()
        await device.synchronize()
        memory = (await device.statistics()).memory
        pids = _pids(device)
        return cls(
            descriptors=sum(len(processes.descriptors(pid)) for pid in pids),
            threads=sum(_threads(pid) for pid in pids),
            mappings=sum(_lines(pid) for pid in pids),
            resident={pid: _resident(pid) for pid in pids},
            processes=len(pids),
            blocks=memory.blocks,
            used=memory.used,
            reserved=memory.reserved,
            device_free=driver.free_memory(),
        )


def _pids(device: ta.Device) -> list[int]:
    pids = [os.getpid()]
    if device.isolation == "process":
        launcher = processes.launcher()
        pids += [launcher, *processes.workers(launcher)]
    return pids


def _threads(pid: int) -> int:
    """The number of working threads: Trio's idle ones are known by their names."""
    names: list[str] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            names.append((task / "comm").read_text())
    return sum(not name.startswith("Trio thread") for name in names)


def _lines(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_bytes().count(b"\n")


def _resident(pid: int) -> int:
    with suppress(FileNotFoundError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0
