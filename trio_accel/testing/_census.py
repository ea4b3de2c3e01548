"""What a program has at one moment, of all that it may leave behind."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Self, TypeVar

import attrs

from ..devices import AccelRef, Device
from ._kernel import Descriptor, Process, descendants, descriptors, lone_mappings

__all__ = ["Census", "Leak", "LeakKind"]

ItemT = TypeVar("ItemT")

LeakKind = Literal[
    "device", "array", "memory", "chunk", "descriptor", "shared memory", "thread", "process"
]

# Trio keeps the threads of `to_thread.run_sync` for a while, to use them again.
_CACHED_THREAD = "Trio thread "
_LAUNCHER = "_launcher_process.py"
_LAUNCHER_CLASS = "LauncherActor"
# Memory of isolated devices on the CPU backend; elsewhere its descriptors go by the driver's names.
_CHUNK = "/memfd:trio_accel"
_PAGE = "/memfd:trio_accel page"
# What the application holds of a worker, and of the launcher.
_OF_WORKER = (_PAGE, "socket", "anon_inode:[pidfd]")
_OF_LAUNCHER = ("socket", "anon_inode:[pidfd]")


@attrs.frozen
class Leak:
    """Something that was left behind.

    Attributes:
        kind: ``"device"``, one that is open; ``"array"``, a reference to one; ``"memory"``, blocks of a
            device; ``"chunk"``, memory of an isolated device; ``"descriptor"``; ``"shared memory"``,
            which is mapped; ``"thread"``; ``"process"``.
        what: Which one, with all that is known of it.
    """

    kind: LeakKind
    what: str

    def __str__(self) -> str:
        return f"{self.kind} {self.what}"


@attrs.frozen(kw_only=True)
class Census:
    """What there was at one moment.

    Attributes:
        open_devices: Devices of the process that are open, by `id`.
        arrays: References to arrays, by the id of their block.
        memory: Blocks and bytes in use, by the path of the device.
        threads: Names by number; without those that Trio keeps in reserve.
        processes: Children, and theirs.
        opened: Descriptors.
        mappings: Shared memory that is mapped and has no descriptor, by inode.
    """

    open_devices: Mapping[int, Device]
    arrays: Mapping[int, AccelRef] = attrs.field(repr=False)
    memory: Mapping[str, tuple[int, int]]
    threads: Mapping[int, str]
    processes: tuple[Process, ...]
    opened: tuple[Descriptor, ...]
    mappings: Mapping[int, str]

    @classmethod
    def take(cls, memory: Mapping[str, tuple[int, int]] | None = None) -> Self:
        """Look at everything; `memory` is what devices have said of theirs."""
        gc.collect()
        opened = descriptors()
        return cls(
            open_devices={id(device): device for device in live(Device) if not device.availability.is_ended},
            arrays={ref.block.id: ref for ref in live(AccelRef) if not ref.block.is_released},
            memory=memory or {},
            threads={
                thread.ident or 0: thread.name
                for thread in threading.enumerate()
                if not thread.name.startswith(_CACHED_THREAD)
            },
            processes=descendants(),
            opened=opened,
            mappings=lone_mappings(opened),
        )

    def settled(self) -> Self:
        """The same without objects: what is remembered must keep nothing alive."""
        return attrs.evolve(self, open_devices=dict.fromkeys(self.open_devices), arrays=dict.fromkeys(self.arrays))

    def leaks_since(self, before: Census, belongs: Callable[[Device], bool]) -> list[Leak]:
        """Name everything that there is more than before and that belongs to no open device.

        Args:
            before: What there was before.
            belongs: Whether the arrays of a device are looked at.
        """
        leaks = [
            Leak("array", f"{ref!r}, {ref.nbytes} bytes")
            for block, ref in self.arrays.items()
            if block not in before.arrays and belongs(ref.device)
        ]
        left = [device for key, device in self.open_devices.items() if key not in before.open_devices]
        if left:
            # Its memory, threads, descriptors and processes are explained by that.
            return [*(Leak("device", f"{device.path} is open") for device in left if belongs(device)), *leaks]
        return [
            *leaks,
            *self._memory_since(before),
            *self._threads_since(before),
            *self._processes_since(before),
            *self._opened_since(before),
            *(
                Leak("shared memory", f"{name} is mapped, inode {inode}")
                for inode, name in self.mappings.items()
                if inode not in before.mappings
            ),
        ]

    def _memory_since(self, before: Census) -> Iterable[Leak]:
        for path, (blocks, used) in self.memory.items():
            blocks_before, used_before = before.memory.get(path, (0, 0))
            if blocks > blocks_before:
                yield Leak(
                    "memory",
                    f"of {path}: {blocks - blocks_before} blocks more, {used - used_before} bytes more",
                )

    def _threads_since(self, before: Census) -> Iterable[Leak]:
        # Streams of inline devices come with the first use of a library and stay as long as it does.
        streams = tuple(
            f"{device.name} " for device in self.open_devices.values() if device.isolation == "inline"
        )
        for number, name in self.threads.items():
            if number not in before.threads and not name.startswith(streams):
                yield Leak("thread", f"{name!r}")

    def _processes_since(self, before: Census) -> Iterable[Leak]:
        known = {(process.pid, process.started) for process in before.processes}
        launchers = [process for process in self.processes if _LAUNCHER in process.command]
        pids = {process.pid for process in launchers}
        workers = [process for process in self.processes if process.parent in pids]
        others = [process for process in self.processes if process not in launchers + workers]
        # A worker that was replaced has another number.
        new_workers = [worker for worker in workers if (worker.pid, worker.started) not in known]
        excess = max(0, len(workers) - self._workers_wanted())
        new_launchers = [launcher for launcher in launchers if (launcher.pid, launcher.started) not in known]
        spare = max(0, len(launchers) - self._launchers_wanted())
        left = _last(new_workers, excess) + _last(new_launchers, spare)
        left += [process for process in others if (process.pid, process.started) not in known]
        return [Leak("process", str(process)) for process in left]

    def _opened_since(self, before: Census) -> Iterable[Leak]:
        counts = Counter(descriptor.kind for descriptor in before.opened)
        # What open devices and their launchers have may have been made since, and grown.
        isolated = [device for device in self.open_devices.values() if device.isolation == "process"]
        counts += Counter(dict.fromkeys([_CHUNK], len(isolated)))
        more_workers = max(0, self._workers_wanted() - before.count_workers())
        counts += Counter(dict.fromkeys(_OF_WORKER, more_workers))
        more_launchers = max(0, self._launchers_wanted() - before.count_launchers())
        counts += Counter(dict.fromkeys(_OF_LAUNCHER, more_launchers))
        for kind, number in Counter(descriptor.kind for descriptor in self.opened).items():
            of_kind = [descriptor for descriptor in self.opened if descriptor.kind == kind]
            known = {(descriptor.number, descriptor.target) for descriptor in before.opened}
            new = [item for item in of_kind if (item.number, item.target) not in known]
            for descriptor in _last(new, max(0, number - counts[kind])):
                yield Leak("chunk" if kind == _CHUNK else "descriptor", str(descriptor))

    def count_launchers(self) -> int:
        """Launchers of worker processes that live."""
        return sum(_LAUNCHER in process.command for process in self.processes)

    def count_workers(self) -> int:
        """Workers that live."""
        launchers = {process.pid for process in self.processes if _LAUNCHER in process.command}
        return sum(process.parent in launchers for process in self.processes)
