"""The check for leaks, which compares all resources before and after a piece of code.

A `Census` lists the resources at one moment, and `Census.leaks_since` compares two. `leak_check` is the
context manager for tests; the pytest fixtures use `Census` and `raise_leaks`.

Processes and chunks are seen on Linux only. Descriptors and shared memory of other libraries are not checked.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, Self, TypeVar, cast

import attrs
import trio

from ..actors import opens
from ..backends.base import DeviceLostError
from ..devices import AccelRef, Device, OpenDevice, System, opened
from ..devices.dispatch import WorkerDispatch

__all__ = ["Leak", "LeakError", "LeakKind", "leak_check"]

ItemT = TypeVar("ItemT")

LeakKind = Literal["device", "array", "memory", "chunk", "thread", "process"]

_SETTLE = 2.0  # seconds for resources that end on their own, such as a killed worker
_POLL_INTERVAL = 0.005  # seconds
# The prefix of Trio's names for worker threads, which Trio caches for `to_thread.run_sync`.
_CACHED_THREAD = "Trio thread "
_LAUNCHER = "_launcher_process.py"
_WORKER = "worker"
_TEMPLATE = b"accel template\n"  # the name of the process from which workers are forked
_LAUNCHER_CLASS = "LauncherSupervisor"
# The mapping's name of host arrays, and of the memory of isolated devices on the CPU backend.
_CHUNK = "/memfd:trio_accel (deleted)"
_PROC = Path("/proc")


@attrs.frozen
class Leak:
    """A leaked resource.

    Attributes:
        kind: ``"device"``, an open device; ``"array"``, a reference to an array; ``"memory"``, blocks of a
            device; ``"chunk"``, mapped shared memory of an isolated device; ``"thread"``; ``"process"``.
        description: The resource, with everything known about it.
    """

    kind: LeakKind
    description: str

    def __str__(self) -> str:
        return f"{self.kind} {self.description}"


@attrs.frozen
class Thing:
    """A thread, a process or a chunk.

    Attributes:
        key: A unique key.
        group: The group of interchangeable resources to which it belongs, such as all workers.
        leak: The description to report if it has leaked.
    """

    key: object
    group: object
    leak: Leak


@attrs.frozen(kw_only=True)
class Census:
    """The resources at one moment, none of which it keeps alive.

    Attributes:
        devices: The open devices.
        arrays: Descriptions of the references to arrays, by the ids of their blocks.
        memory: The number of blocks and bytes in use, by the path of the device.
        things: Threads, processes and chunks.
        workers: The number of worker processes that belong to open devices.
        launchers: The number of worker launchers that belong to open systems.
    """

    devices: weakref.WeakSet[OpenDevice]
    arrays: Mapping[int, str]
    memory: Mapping[str, tuple[int, int]]
    things: Sequence[Thing]
    workers: int
    launchers: int

    @classmethod
    def take(
        cls, belongs: Callable[[OpenDevice], bool], memory: Mapping[str, tuple[int, int]] | None = None
    ) -> Self:
        """List all resources, after two garbage collections.

        Args:
            belongs: Returns whether to count a device and its arrays.
            memory: The number of blocks and bytes that each device has reported, by its path.
        """
        # Arrays in reference cycles, such as the frames of an error, are not leaks.
        gc.collect()
        gc.collect()
        devices = open_devices(everything)
        for device in devices:
            # Drop the memory cached for the next chain's intermediate results, which belongs to no array.
            device.state.blocks.spare = None
        top = [child for system in _living(System) for child in system.tree().children]
        return cls(
            devices=weakref.WeakSet(device for device in devices if belongs(device)),
            arrays={
                ref.block.id: f"{ref!r}, {ref.nbytes} bytes"
                for ref in _living(AccelRef)
                if not ref.block.is_released and belongs(opened(ref.device))
            },
            memory=memory or {},
            things=(*_threads(devices), *_processes(), *_chunks(devices)),
            workers=sum(1 + device.options.spares for device in devices if device.isolation == "process"),
            launchers=sum(actor.actor_class == _LAUNCHER_CLASS for actor in top),
        )

    def leaks_since(self, baseline: Census) -> list[Leak]:
        """Return the resources added since the baseline that do not belong to an open device."""
        arrays = [
            Leak("array", description)
            for block, description in self.arrays.items()
            if block not in baseline.arrays
        ]
        device_leaks = [
            Leak("device", f"{device.path} is open") for device in self.devices - baseline.devices
        ]
        if device_leaks:
            # An open device explains memory, threads and processes.
            return device_leaks + arrays
        return [*arrays, *self._memory_since(baseline), *self._things_since(baseline)]

    def _memory_since(self, baseline: Census) -> Iterator[Leak]:
        for path, (blocks, used) in self.memory.items():
            blocks_before, used_before = baseline.memory.get(path, (0, 0))
            surplus = blocks - blocks_before
            if surplus > 0:
                count = "1 block" if surplus == 1 else f"{surplus} blocks"
                yield Leak("memory", f"of {path}: {count} more, {used - used_before} bytes more")

    def _things_since(self, baseline: Census) -> Iterator[Leak]:
        allowed = Counter(thing.group for thing in baseline.things)
        # Open devices and systems may have started or replaced processes since the baseline. So their present
        # number is allowed.
        allowed[_WORKER], allowed[_LAUNCHER] = self.workers, self.launchers
        old = {thing.key for thing in baseline.things}
        for group, number in Counter(thing.group for thing in self.things).items():
            new = [thing.leak for thing in self.things if thing.group == group and thing.key not in old]
            if (surplus := number - allowed[group]) > 0:
                yield from new[-surplus:]


def everything(device: OpenDevice) -> bool:
    """Accept every device, as an argument `belongs`."""
    return True


def open_devices(belongs: Callable[[OpenDevice], bool]) -> list[OpenDevice]:
    """Return the open devices of this process."""
    return [
        device for device in _living(OpenDevice) if not device.state.availability.is_ended and belongs(device)
    ]


def _living(cls: type[ItemT]) -> list[ItemT]:
    # Do not use `isinstance`, which would wake proxies among the objects.
    return [item for item in gc.get_objects() if type(item) is cls]


def _threads(devices: Iterable[OpenDevice]) -> Iterator[Thing]:
    # Skip the threads of an open device's streams. They start at the first use of a library, and exist as
    # long as the library.
    streams = [f"{device.name} " for device in devices if device.isolation == "inline"]
    for thread in threading.enumerate():
        if not thread.name.startswith((_CACHED_THREAD, *streams)):
            key = ("thread", thread.ident)
            yield Thing(key, key, Leak("thread", repr(thread.name)))


def _processes() -> Iterator[Thing]:
    """Yield all descendants of this process, including unreaped dead processes, but not templates."""
    children: dict[int, list[tuple[int, int]]] = {}
    for number, parent, started in _everyone():
        children.setdefault(parent, []).append((number, started))
    waiting: list[tuple[int, object]] = [(os.getpid(), None)]
    while waiting:
        parent, group_of_parent = waiting.pop()
        # The key includes the start time, because a process ID may be reused.
        for key in children.get(parent, ()):
            pid, group = str(key[0]), cast("object", key)
            command = _content(_PROC / pid / "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
            if parent == os.getpid() and _LAUNCHER in command:
                group = _LAUNCHER
            elif group_of_parent == _LAUNCHER:
                # A launcher starts a template process, from which workers are forked.
                group = _TEMPLATE if _content(_PROC / pid / "comm") == _TEMPLATE else _WORKER
            waiting.append((key[0], group))
            if group != _TEMPLATE:
                yield Thing(key, group, Leak("process", f"{pid} ({command or 'dead, not reaped'})"))


def _chunks(devices: Iterable[OpenDevice]) -> Iterator[Thing]:
    """Yield mapped chunks, except chunks of open devices."""
    inodes = {os.fstat(descriptor).st_ino for device in devices for descriptor in device.descriptors}
    for line in _content(_PROC / "self" / "maps").decode(errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if fields[5:] == [_CHUNK] and (inode := int(fields[4])) not in inodes:
            # A chunk may appear in several lines.
            inodes.add(inode)
            key = ("inode", inode)
            yield Thing(key, _CHUNK, Leak("chunk", f"/memfd:trio_accel (inode {inode})"))


def _everyone() -> Iterator[tuple[int, int, int]]:
    """Yield the ID, the parent's ID and the start time of every process of the machine."""
    for folder in _PROC.glob("[0-9]*"):
        # The program's name, in parentheses, may contain anything.
        fields = _content(folder / "stat").decode(errors="replace").rpartition(")")[2].split()
        if fields:
            yield int(folder.name), int(fields[1]), int(fields[19])


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        # The process has ended meanwhile, or belongs to another user.
        return b""


class LeakError(AssertionError):
    """Resources have leaked.

    Attributes:
        leaks: Their descriptions.
    """

    def __init__(self, leaks: Iterable[Leak]) -> None:
        self.leaks: tuple[Leak, ...] = tuple(leaks)
        super().__init__("left behind:\n" + "\n".join(f"  {leak}" for leak in self.leaks))

    def __reduce__(self) -> tuple[type[LeakError], tuple[tuple[Leak, ...]]]:
        return type(self), (self.leaks,)


@opens("nothing is checked yet: async with leak_check(...)")
async def leak_check(*scope: Device | System) -> AsyncGenerator[None]:
    """Fail if the body of the ``async with`` leaks resources.

    It counts open devices, references to arrays, blocks and chunks of device memory, threads, and descendant
    processes. It does not count resources of devices that stay open: the threads of their streams, their
    workers with the launcher, and one empty chunk for each device. Chunks and processes are seen only on
    Linux.

    At the end the devices are synchronized, garbage is collected, and resources that end on their own get up
    to two seconds. If the body raises or is cancelled, nothing is checked.

    A local variable exists until its function ends. So if a variable of the function around the body refers
    to an array, the array counts as a leak. Call a function in the body.

    Args:
        *scope: The devices, or systems with all their devices, whose arrays and memory are checked;
            by default all devices of this Trio run. Other resources
            are always counted for the whole process.

    Raises:
        LeakError: Resources have leaked; the error names each.
        TypeError: `scope` has an item that is neither a device nor a system.
    """
    for item in scope:
        if not isinstance(item, (Device, System)):
            raise TypeError(f"leak_check: scope must be devices and systems, got {item!r}")
    belongs = partial(_belongs, scope)
    baseline = await _take(belongs)
    yield
    deadline = time.monotonic() + _SETTLE
    while leaks := (await _take(belongs)).leaks_since(baseline):
        if time.monotonic() > deadline:
            raise LeakError(leaks)
        await _pause()


def raise_leaks(baseline: Census, take: Callable[[], Census]) -> None:
    """Do the final check of `leak_check` outside of Trio; blocks for up to two seconds.

    Args:
        baseline: The resources before.
        take: Lists the present resources.

    Raises:
        LeakError: Resources have leaked.
    """
    deadline = time.monotonic() + _SETTLE
    while leaks := take().leaks_since(baseline):
        if time.monotonic() > deadline:
            raise LeakError(leaks)
        time.sleep(_POLL_INTERVAL)


def _belongs(scope: tuple[Device | System, ...], device: OpenDevice) -> bool:
    if not scope:
        return device.state.is_own_run()
    return any(device is item or device.state.system is item for item in scope)


async def _take(belongs: Callable[[OpenDevice], bool]) -> Census:
    """List all resources, once the devices have nothing in flight and no memory to release."""
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
    """Wait up to two seconds for the spare workers, because a worker during its start looks like a leak."""
    dispatch = device.dispatch
    deadline = time.monotonic() + _SETTLE
    while (
        isinstance(dispatch, WorkerDispatch)
        and dispatch.spares < device.options.spares
        and time.monotonic() < deadline
    ):
        await _pause()


async def _pause() -> None:
    # Do not use `trio.sleep`, because a test's clock may not advance.
    await trio.to_thread.run_sync(time.sleep, _POLL_INTERVAL)
