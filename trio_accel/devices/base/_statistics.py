"""Counts and times of a device, and the cost of its next recovery."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Self, TypeAlias

import attrs

from ...backends.base import CacheCounts, KeptCounts, MemoryStatistics

__all__ = [
    "CacheStatistics",
    "DeviceStatistics",
    "KeptStatistics",
    "LaunchTimes",
    "LibraryStatistics",
    "ProcessStatistics",
    "ProgramCost",
    "QueueStatistics",
    "RecoveryCost",
]


# CPUCLOCK_SCHED of the kernel: all that the threads of a process have run. Python does not have
# clock_getcpuclockid(3).
_SCHEDULED = 2


def processor_time(pid: int) -> int:
    """Return the nanoseconds for which the threads of a process have run; 0 where the system does not say."""
    try:
        return time.clock_gettime_ns((~pid << 3) | _SCHEDULED)
    except OSError:
        return 0


@attrs.frozen(kw_only=True)
class ProcessStatistics:
    """Memory and processor time of a process of this machine.

    Attributes:
        pid: Its number.
        memory: Bytes of its resident memory, with the shared memory that it has touched.
        processor_seconds: Seconds for which its threads have run.
    """

    pid: int
    memory: int
    processor_seconds: float

    @classmethod
    def of(cls, pid: int) -> ProcessStatistics | None:
        """Look at a process; None if it has ended, or the system has no ``/proc``."""
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                pages = int(file.read().split()[1])
        except (OSError, IndexError):
            return None
        return cls(pid=pid, memory=pages * mmap.PAGESIZE, processor_seconds=processor_time(pid) / 1e9)


@attrs.frozen(kw_only=True)
class QueueStatistics:
    """Requests of one library.

    Attributes:
        waiting: Handed over and not launched.
        in_flight: Launched and not complete.
    """

    waiting: int
    in_flight: int


@attrs.frozen(kw_only=True)
class CacheStatistics:
    """Counts of the entries of a cache.

    Attributes:
        found: How often one was there.
        made: How many were made.
        evicted: How many of those made way for others.
    """

    found: int = 0
    made: int = 0
    evicted: int = 0

    @classmethod
    def of(cls, counts: CacheCounts) -> Self:
        """Make the statistics of a counter."""
        return cls(found=counts.found, made=counts.made, evicted=counts.evicted)


@attrs.frozen(kw_only=True)
class KeptStatistics:
    """Counts of a table of kept plans.

    Attributes:
        seen: Requests that were served without a plan, because their structure was new.
        found: Requests that found their plan.
        recorded: Plans that were made.
        bound: Bindings of plans to blocks.
        armed: Bindings whose kernels were prepared.
        refused: Requests whose structure can have no plan.
        evicted: Plans that made way for others.
    """

    seen: int = 0
    found: int = 0
    recorded: int = 0
    bound: int = 0
    armed: int = 0
    refused: int = 0
    evicted: int = 0

    @classmethod
    def of(cls, counts: KeptCounts) -> Self:
        """Make the statistics of a counter."""
        return cls(**attrs.asdict(counts))


@attrs.frozen(kw_only=True)
class LibraryStatistics:
    """Plans of one library in one generation, and its workspace.

    Attributes:
        plans: Plans of its operations: each launch by a plan has found one, or had one made. On the CPU
            backend they are compiled expressions (D186), and NumPy computes what has none.
        workspace: Bytes that it holds for itself beside the arrays. Where several libraries share a stream,
            its workspace counts for the last one that used it.
    """

    plans: CacheStatistics = CacheStatistics()
    workspace: int = 0


@attrs.frozen(kw_only=True)
class DeviceStatistics:
    """Counts of one generation of a device, but for its losses.

    Attributes:
        generation: Number of the generation.
        pid: Number of the worker process that serves it; None where it is in this process.
        launched: Operations enqueued.
        completed: Operations that completed, with or without an error.
        in_flight: Operations that the backend has now.
        queues: Queues with requests now, by the import path of the library (`Operation.library`).
        memory: Memory of the device's arrays.
        losses: Contexts that the device has lost since it was opened.
        libraries: By the import path of the library: those that have planned something in this generation,
            or hold memory for themselves.
        kept: Plans that are kept, by their side. ``"application"`` has chains of calls over all generations.
            ``"link"`` has the launch templates of the worker process; the second operation of its kind makes
            one. ``"executor"`` has their bindings, and those of chains and graphs, in the process that
            launches.
        actors: Bytes of arrays by the path of the actor whose task made them. ``""`` stands for all other
            tasks, also for those that a handler has started in a nursery.
        process: Memory and processor time of the process that serves it, the worker or the program; None
            where the system does not tell.
    """

    generation: int
    pid: int | None = None
    launched: int
    completed: int
    in_flight: int
    queues: Mapping[str, QueueStatistics]
    memory: MemoryStatistics
    losses: int
    libraries: Mapping[str, LibraryStatistics] = attrs.field(factory=dict[str, LibraryStatistics])
    kept: Mapping[str, KeptStatistics] = attrs.field(factory=dict[str, KeptStatistics])
    actors: Mapping[str, int] = attrs.field(factory=dict[str, int])
    process: ProcessStatistics | None = None


@attrs.frozen
class LaunchTimes:
    """The time when a worker has launched an operation, by `time.monotonic_ns`, which all processes share.

    Attributes:
        process: Number of the worker process.
        begun: When the backend was about to be called.
        completed: When the operation was seen to be complete.
    """

    process: int
    begun: int
    completed: int


Ahead: TypeAlias = Literal["fully", "refused", "pending", "inline"]


@attrs.frozen(kw_only=True)
class ProgramCost:
    """The share of one program in a recovery.

    Attributes:
        program: Its name.
        module: The module of its class or function.
        imports: Seconds that the last worker took to import the module; 0.0 if the next one begins with it.
        makes: Seconds that constructor and `warm_up` took the last time.
        preloading: Whether the next worker begins with the module: ``"fully"``; ``"refused"``, where it
            does not; ``"pending"``, where that is being tried. ``"inline"``: there is no worker, and the
            module stays imported.
        reason: Why a worker imports the module; None if none does.
    """

    program: str
    module: str
    imports: float
    makes: float
    preloading: Ahead
    reason: str | None = None


@attrs.frozen(kw_only=True)
class RecoveryCost:
    """Cost of the next recovery: measured times of the last start, without the wait before a restart (D141).

    As text it is one line, such as ``restart 1.71 s: worker 0.12 s, import of encoder 1.55 s, ...``.

    Attributes:
        context: Seconds from the order of the last worker to its context; without a worker, those of the last
            context. None before there was one.
        programs: Shares of programs.
        spares: Workers that stand ready: the next recovery finds all of that done.
        is_first: Whether the times are those of the first start, which loads more than a recovery does.
    """

    context: float | None = None
    programs: tuple[ProgramCost, ...] = ()
    spares: int = 0
    is_first: bool = False

    @property
    def seconds(self) -> float | None:
        """The sum, where no worker stands ready; None before there was a context."""
        if self.context is None:
            return None
        return self.context + sum(self._imports().values()) + sum(each.makes for each in self.programs)

    @property
    def reason(self) -> str | None:
        """The reason why modules are imported in each worker; None if none is."""
        found = {each.module: each.reason for each in self.programs if each.reason is not None}
        lines = [
            f"module {module} is imported in each worker, because {why}" for module, why in found.items()
        ]
        return "; ".join(lines) or None

    def __str__(self) -> str:
        if self.context is None:
            return "restart not measured yet"
        is_inline = any(each.preloading == "inline" for each in self.programs)
        parts = [f"{'context' if is_inline else 'worker and context'} {self.context:.2f} s"]
        parts += [f"import of {module} {seconds:.2f} s" for module, seconds in self._imports().items()]
        parts += [f"constructor of {each.program} {each.makes:.2f} s" for each in self.programs]
        ready = ", which a spare has done" if self.spares else ""
        why = f"; {self.reason}" if self.reason else ""
        what = "first start" if self.is_first else "restart"
        return f"{what} {self.seconds:.2f} s{ready}: {', '.join(parts)}{why}"

    def _imports(self) -> dict[str, float]:
        """Return the seconds by module: the first program of a worker pays for the others."""
        found: dict[str, float] = {}
        for each in self.programs:
            if each.preloading not in ("fully", "inline"):
                found[each.module] = max(found.get(each.module, 0.0), each.imports)
        return found


@attrs.define(eq=False)
class _Program:
    name: str
    module: str
    imports: float = 0.0
    makes: float = 0.0


class Recoveries:
    """The times of one device from which the cost of its next recovery follows.

    Attributes:
        context: Seconds of the last start of a worker, or of a context without one; None before the first.
        judge: Says of a module whether the next worker begins with it, and why not.
        spares: Says how many workers stand ready.
    """

    def __init__(self) -> None:
        self.context: float | None = None
        self._starts = 0
        self.judge: Callable[[str], tuple[Ahead, str | None]] = lambda _: ("inline", None)
        self.spares: Callable[[], int] = lambda: 0
        # The programs, by the backend's name of their library.
        self._programs: dict[str, _Program] = {}

    def started(self, seconds: float) -> None:
        """Note that a worker has started, or a context without one."""
        self._starts += 1
        self.context = seconds

    def expect(self, library: str, name: str, module: str) -> None:
        """Note that a program is to be opened.

        Args:
            library: The backend's name of its library.
            name: Its name.
            module: The module of its class.
        """
        self._programs[library] = _Program(name, module)

    def forget(self, library: str) -> None:
        """Forget a program that was closed, or could not be opened."""
        self._programs.pop(library, None)

    def made(self, library: str, seconds: float, imports: float) -> None:
        """Note that a context has made a program; one that is not known is left out.

        Args:
            library: The backend's name of its library.
            seconds: How long that took, in all.
            imports: Seconds of these for the import of its module.
        """
        program = self._programs.get(library)
        if program is not None:
            program.imports, program.makes = imports, max(0.0, seconds - imports)

    def cost(self, libraries: Iterable[str] | None = None) -> RecoveryCost:
        """Return the cost of the next recovery; of some libraries alone, if they are named."""
        chosen = self._programs if libraries is None else libraries
        found = [self._programs[library] for library in chosen if library in self._programs]
        return RecoveryCost(
            context=self.context,
            programs=tuple(map(self._of, found)),
            spares=self.spares(),
            is_first=self._starts == 1,
        )

    def _of(self, program: _Program) -> ProgramCost:
        ahead, reason = self.judge(program.module)
        # The import that another program of the module has paid, this one would pay without it.
        paid = max(each.imports for each in self._programs.values() if each.module == program.module)
        return ProgramCost(
            program=program.name,
            module=program.module,
            imports=0.0 if ahead in ("fully", "inline") else paid,
            makes=program.makes,
            preloading=ahead,
            reason=reason,
        )
