"""The check that nothing is left behind: a count of all resources, before and after.

Children, descriptors and shared memory are seen on Linux only.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal, Self, TypeVar

import attrs
import trio

from ..backends.base import DeviceLostError
from ..devices import AccelRef, Device, System
from ..devices.dispatch import WorkerDispatch
from ..devices.front._device import OpenDevice, opened

__all__ = ["Leak", "LeakError", "LeakKind", "leak_check"]

ItemT = TypeVar("ItemT")

LeakKind = Literal["device", "array", "memory", "chunk", "descriptor", "shared memory", "thread", "process"]

# Seconds for resources that end by themselves, such as a worker that was killed.
_SETTLE = 2.0
_LOOK = 0.005
# Trio keeps the threads of `to_thread.run_sync` for a while, to use them again.
_CACHED_THREAD = "Trio thread "
_LAUNCHER = "_launcher_process.py"
_TEMPLATE = "accel template"
_LAUNCHER_CLASS = "LauncherSupervisor"
# Memory of isolated devices on the CPU backend, and host arrays.
_CHUNK = "/memfd:trio_accel"
_PAGE = "/memfd:trio_accel page"
# Compiled expressions stay loaded.
_CODE = "/memfd:accel code"
# Descriptors of a worker in the application, besides a page; and of a launcher, which Trio watches, too.
_OF_WORKER = ("socket", "anon_inode:[pidfd]")
_OF_LAUNCHER = (*_OF_WORKER, "anon_inode:[pidfd]")


@attrs.frozen
class Leak:
    """Something that was left behind.

    Attributes:
        kind: ``"device"``, one that is open; ``"array"``, a reference to one; ``"memory"``, blocks of a
            device; ``"chunk"``, shared memory that was made for an isolated device; ``"shared memory"``
            of another kind; ``"descriptor"``; ``"thread"``; ``"process"``.
        what: Which one, with all that is known of it.
    """

    kind: LeakKind
    what: str

    def __str__(self) -> str:
        return f"{self.kind} {self.what}"


@attrs.frozen(kw_only=True)
class Census:
    """Resources at one moment. It keeps none alive.

    Attributes:
        devices: The devices that were open.
        arrays: References to arrays, in words, by the id of their block.
        memory: Blocks and bytes in use, by the path of the device.
        streams: Prefixes of the names of threads that belong to open devices.
        threads: Names by number; without those that Trio keeps in reserve.
        processes: Children, and theirs.
        workers: How many worker processes belong to open devices.
        launchers: How many launchers of them belong to open systems.
        opened: Descriptors, but for shared memory and those of open devices.
        shared: Names of shared memory that is mapped or open, by inode; without that of open devices.
    """

    devices: weakref.WeakSet[OpenDevice]
    arrays: Mapping[int, str]
    memory: Mapping[str, tuple[int, int]]
    streams: tuple[str, ...]
    threads: Mapping[int, str]
    processes: tuple[Process, ...]
    workers: int
    launchers: int
    opened: tuple[Descriptor, ...]
    shared: Mapping[int, str]

    @classmethod
    def take(
        cls, belongs: Callable[[OpenDevice], bool], memory: Mapping[str, tuple[int, int]] | None = None
    ) -> Self:
        """Look at everything.

        Args:
            belongs: Whether a device and its arrays are looked at.
            memory: The devices' own counts.
        """
        # Arrays in reference cycles, such as those of an error's frames, wait to be collected.
        gc.collect()
        gc.collect()
        devices = open_devices(everything)
        for device in devices:
            # Memory for results in between is kept for the next chain, and is nobody's array.
            device.state.blocks.spare = None
        top = [child for system in _living(System) for child in system.tree().children]
        isolated = [device for device in devices if device.isolation == "process"]
        held = [descriptor for device in devices for descriptor in device.descriptors]
        of_devices = {os.fstat(descriptor).st_ino for descriptor in held}
        return cls(
            devices=weakref.WeakSet(device for device in devices if belongs(device)),
            arrays={
                ref.block.id: f"{ref!r}, {ref.nbytes} bytes"
                for ref in _living(AccelRef)
                if not ref.block.is_released and belongs(opened(ref.device))
            },
            memory=memory or {},
            streams=tuple(f"{device.name} " for device in devices if device.isolation == "inline"),
            threads={thread.ident or 0: thread.name for thread in threading.enumerate()},
            processes=descendants(),
            workers=sum(1 + device.options.spares for device in isolated),
            launchers=sum(one.actor_class == _LAUNCHER_CLASS for one in top),
            opened=tuple(item for item in descriptors() if item.number not in held),
            shared={inode: name for inode, name in shared_memory().items() if inode not in of_devices},
        )

    def leaks_since(self, before: Census) -> list[Leak]:
        """Name everything that there is more than before and that belongs to no open device."""
        arrays = [Leak("array", what) for block, what in self.arrays.items() if block not in before.arrays]
        left = [Leak("device", f"{device.path} is open") for device in self.devices - before.devices]
        if left:
            # That explains its memory, threads, descriptors and processes.
            return left + arrays
        return [
            *arrays,
            *self._memory_since(before),
            *self._threads_since(before),
            *self._processes_since(before),
            *self._opened_since(before),
            *self._shared_since(before),
        ]

    def _memory_since(self, before: Census) -> Iterator[Leak]:
        for path, (blocks, used) in self.memory.items():
            blocks_before, used_before = before.memory.get(path, (0, 0))
            more = blocks - blocks_before
            if more > 0:
                count = "1 block" if more == 1 else f"{more} blocks"
                yield Leak("memory", f"of {path}: {count} more, {used - used_before} bytes more")

    def _threads_since(self, before: Census) -> Iterator[Leak]:
        # Streams of a device come with the first use of a library and stay as long as that.
        for number, name in self.threads.items():
            if number not in before.threads and not name.startswith((_CACHED_THREAD, *self.streams)):
                yield Leak("thread", repr(name))

    def _processes_since(self, before: Census) -> Iterator[Leak]:
        old = {process.key for process in before.processes}
        new = [process for process in self.processes if process.key not in old]
        launchers, workers = self._launching()
        # One that was replaced has another number: so these are counted.
        left = _last([item for item in new if item in launchers], len(launchers) - self.launchers)
        left += _last([item for item in new if item in workers], len(workers) - self.workers)
        # A launcher has a template for itself, which workers are forked from.
        of_launchers = {launcher.pid for launcher in launchers}
        left += [
            item
            for item in new
            if item not in launchers
            and item not in workers
            and not (item.name == _TEMPLATE and item.parent in of_launchers)
        ]
        yield from (Leak("process", str(process)) for process in left)

    def _opened_since(self, before: Census) -> Iterator[Leak]:
        may_be = Counter(descriptor.kind for descriptor in before.opened)
        # Open devices and systems may have got them since.
        launchers, workers = before._launching()
        may_be.update(_OF_WORKER * max(0, self.workers - len(workers)))
        may_be.update(_OF_LAUNCHER * max(0, self.launchers - len(launchers)))
        old = set(before.opened)
        for kind, number in Counter(descriptor.kind for descriptor in self.opened).items():
            new = [item for item in self.opened if item.kind == kind and item not in old]
            yield from (Leak("descriptor", str(item)) for item in _last(new, number - may_be[kind]))

    def _shared_since(self, before: Census) -> Iterator[Leak]:
        may_be = Counter(before.shared.values())
        may_be[_PAGE] += max(0, self.workers - len(before._launching()[1]))
        for name, number in Counter(self.shared.values()).items():
            new = [
                inode for inode, other in self.shared.items() if other == name and inode not in before.shared
            ]
            for inode in _last(new, number - may_be[name]):
                yield Leak("chunk" if name == _CHUNK else "shared memory", f"{name} (inode {inode})")

    def _launching(self) -> tuple[list[Process], list[Process]]:
        """Launchers, and workers."""
        named = [process for process in self.processes if _LAUNCHER in process.command]
        # A worker that was forked has its launcher's command line.
        forked_from = {process.pid for process in named}
        launchers = [process for process in named if process.parent not in forked_from]
        pids = {process.pid for process in launchers}
        children = [process for process in self.processes if process.parent in pids]
        return launchers, [process for process in children if process.name != _TEMPLATE]


def everything(device: OpenDevice) -> bool:
    """Look at every device."""
    return True


def open_devices(belongs: Callable[[OpenDevice], bool]) -> list[OpenDevice]:
    """List the devices of this process that are open."""
    return [
        device for device in _living(OpenDevice) if not device.state.availability.is_ended and belongs(device)
    ]


def _living(cls: type[ItemT]) -> list[ItemT]:
    # `type`, not `isinstance`: proxies among the objects must not be woken.
    return [item for item in gc.get_objects() if type(item) is cls]


def _last(items: Sequence[ItemT], count: int) -> list[ItemT]:
    """Return the last of them, so many if there are."""
    return list(items[-count:]) if count > 0 else []


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
        """Return resources that no other process has."""
        return self.pid, self.started


@attrs.frozen
class Descriptor:
    """An open descriptor.

    Attributes:
        number: Its number.
        target: Its file, such as ``"/tmp/x"`` or ``"socket:[123]"``.
    """

    number: int
    target: str

    def __str__(self) -> str:
        return f"{self.number} ({self.target})"

    @property
    def kind(self) -> str:
        """Its file, without numbers that differ each time."""
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
            command = _content(_PROC / str(pid) / "cmdline").replace(b"\0", b" ").decode(errors="replace")
            name = _content(_PROC / str(pid) / "comm").decode(errors="replace")
            found.append(Process(pid, started, parent, command.strip(), name.strip()))
            parents.append(pid)
    return tuple(found)


def descriptors() -> tuple[Descriptor, ...]:
    """List the open descriptors of this process, but for shared memory."""
    return tuple(Descriptor(number, target) for number, target in _opened() if not target.startswith(_SHARED))


def shared_memory() -> dict[int, str]:
    """Shared memory that this process has mapped or open: its name by inode."""
    found: dict[int, str] = {}
    for number, target in _opened():
        if target.startswith(_SHARED):
            with suppress(OSError):
                found[os.fstat(number).st_ino] = target.removesuffix(_GONE)
    for line in _content(_PROC / "self" / "maps").decode(errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(_SHARED) and not fields[5].startswith(_CODE):
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
            fields = _content(_PROC / name / "stat").decode(errors="replace").rpartition(")")[2].split()
            if fields:
                yield int(name), int(fields[1]), int(fields[19])


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        # It has ended meanwhile, or is somebody else's.
        return b""


class LeakError(AssertionError):
    """Resources were left behind.

    Attributes:
        leaks: Their descriptions.
    """

    def __init__(self, leaks: Iterable[Leak]) -> None:
        self.leaks: tuple[Leak, ...] = tuple(leaks)
        super().__init__("left behind:\n" + "\n".join(f"  {leak}" for leak in self.leaks))

    def __reduce__(self) -> tuple[type[LeakError], tuple[tuple[Leak, ...]]]:
        return type(self), (self.leaks,)


@asynccontextmanager
async def leak_check(*scope: Device | System) -> AsyncGenerator[None, None]:
    """Fail if the body of the ``async with`` leaves more behind than there was before.

    Counted are devices that are open, references to arrays, blocks and chunks of device memory,
    descriptors, mapped shared memory, threads, and processes, those of its children included. Not
    counted are resources of devices that stay open: the threads of their streams, their workers, the
    launcher of those, one empty chunk each. Descriptors, shared memory and processes are seen on Linux.

    At the end the devices are synchronized, garbage is collected, and resources that end by themselves get up
    to two seconds. If the body raises, nothing is checked.

    Variables live longer than the block that they were assigned in: an array that a local variable
    of the function around it refers to is left behind. Call a function in the body.

    Args:
        *scope: Devices and systems whose devices, arrays and memory are looked at; by default all of
            this Trio run. The rest always is of the whole process.

    Raises:
        LeakError: Something was left behind; it names each thing.
        TypeError: `scope` has something else than devices and systems.
    """
    for item in scope:
        if not isinstance(item, (Device, System)):
            raise TypeError(f"leak_check: scope must be devices and systems, got {item!r}")
    belongs = _belongs(scope)
    before = await _take(belongs)
    yield
    deadline = time.monotonic() + _SETTLE
    while leaks := (await _take(belongs)).leaks_since(before):
        if time.monotonic() > deadline:
            raise LeakError(leaks)
        await _pause()


def raise_leaks(before: Census, take: Callable[[], Census]) -> None:
    """Do what `leak_check` does at its end, outside of Trio; blocks.

    Raises:
        LeakError: Something was left behind.
    """
    deadline = time.monotonic() + _SETTLE
    while leaks := take().leaks_since(before):
        if time.monotonic() > deadline:
            raise LeakError(leaks)
        time.sleep(_LOOK)


def _belongs(scope: tuple[Device | System, ...]) -> Callable[[OpenDevice], bool]:
    def belongs(device: OpenDevice) -> bool:
        if not scope:
            return device.state.is_own_run()
        return any(device is item or device.state.system is item for item in scope)

    return belongs


async def _take(belongs: Callable[[OpenDevice], bool]) -> Census:
    """Look at everything, when devices have nothing in flight and no memory to give back."""
    memory: dict[str, tuple[int, int]] = {}
    for device in open_devices(belongs):
        try:
            await device.synchronize()
            await _wait_for_spares(device)
            used = (await device.statistics()).memory
        except DeviceLostError:
            # It was closed or given up just now.
            continue
        memory[device.path] = (used.blocks, used.used)
    await trio.lowlevel.checkpoint()
    return Census.take(belongs, memory)


async def _wait_for_spares(device: OpenDevice) -> None:
    """Let the workers come up that are to stand ready: half of one cannot be told from a leak."""
    dispatch = device.dispatch
    deadline = time.monotonic() + _SETTLE
    while (
        isinstance(dispatch, WorkerDispatch)
        and dispatch.spares < device.options.spares
        and time.monotonic() < deadline
    ):
        await _pause()


async def _pause() -> None:
    # `trio.sleep` would not do: a test's clock may stand still.
    await trio.to_thread.run_sync(time.sleep, _LOOK)
