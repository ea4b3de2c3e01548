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


# The kernel's CPUCLOCK_SCHED: the total time for which the threads of a process have run. Python lacks
# clock_getcpuclockid(3).
_SCHEDULED = 2


def processor_time(pid: int) -> int:
    """Return the nanoseconds for which the threads of a process have run; 0 without data from the system."""
    try:
        return time.clock_gettime_ns((~pid << 3) | _SCHEDULED)
    except OSError:
        return 0


@attrs.frozen(kw_only=True)
class ProcessStatistics:
    """The memory and processor time of a process on this machine.

    Attributes:
        pid: The number of the process.
        memory: The bytes of its resident memory, including the shared memory that it has touched.
        processor_seconds: The seconds for which its threads have run.
    """

    pid: int
    memory: int
    processor_seconds: float

    @classmethod
    def of(cls, pid: int) -> ProcessStatistics | None:
        """Return the statistics of a process; None if it has ended, or the system lacks ``/proc``."""
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                pages = int(file.read().split()[1])
        except (OSError, IndexError):
            return None
        return cls(pid=pid, memory=pages * mmap.PAGESIZE, processor_seconds=processor_time(pid) / 1e9)


@attrs.frozen(kw_only=True)
class QueueStatistics:
    """The requests of one library.

    Attributes:
        waiting: The number of unlaunched requests.
        in_flight: The number of launched, incomplete requests.
    """

    waiting: int
    in_flight: int


@attrs.frozen(kw_only=True)
class CacheStatistics:
    """Counts for the entries of a cache.

    Attributes:
        hits: The number of lookups that found an entry.
        created: The number of new entries.
        evicted: The number of evicted entries.
    """

    hits: int = 0
    created: int = 0
    evicted: int = 0

    @classmethod
    def of(cls, counts: CacheCounts) -> Self:
        """Make the statistics of a counter."""
        return cls(hits=counts.hits, created=counts.created, evicted=counts.evicted)


@attrs.frozen(kw_only=True)
class KeptStatistics:
    """Counts for a table of kept plans.

    Attributes:
        unplanned: The requests without a plan, because their structure was new.
        hits: The requests that found their plan.
        recorded: The new plans.
        bound: The bindings of plans to blocks.
        armed: The bindings with prepared kernels.
        refused: The requests with a structure that cannot have a plan.
        evicted: The plans that were evicted.
    """

    unplanned: int = 0
    hits: int = 0
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
    """The plans of one library in one generation, and its workspace.

    Attributes:
        plans: The plans of its operations: each launch with a plan has found or made it. On the CPU backend
            they are compiled expressions (D186); NumPy computes without plans.
        workspace: The bytes that the library itself holds, in addition to the arrays. If several libraries
            share a stream, its workspace counts for the last library that used it.
    """

    plans: CacheStatistics = CacheStatistics()
    workspace: int = 0


@attrs.frozen(kw_only=True)
class DeviceStatistics:
    """Counts for one generation of a device; only its losses count all generations.

    Attributes:
        generation: The number of the generation.
        pid: The pid of the worker that serves it; None if it is in this process.
        launched: The number of enqueued operations.
        completed: The number of completed operations, with or without an error.
        in_flight: The number of operations that the backend has now.
        queues: The queues that have requests now, by the import path of the library (`Operation.library`).
        memory: The memory of the device's arrays.
        losses: The number of the device's lost contexts since it was opened.
        libraries: The libraries that have made plans in this generation, or hold memory, by import path.
        plan_caches: The caches of plans, by their place. ``"application"`` has chains of calls over all
            generations. ``"link"`` has the launch templates of the worker process; the second operation of
            its kind makes one. ``"executor"`` has their bindings, and the bindings of chains and graphs, in
            the launching process.
        actors: The bytes of arrays by the path of the actor whose task made them. ``""`` is for all other
            tasks, including a handler's tasks in a nursery.
        process: The memory and processor time of the process that serves it, the worker or the program; None
            without data from the system.
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
    plan_caches: Mapping[str, KeptStatistics] = attrs.field(factory=dict[str, KeptStatistics])
    actors: Mapping[str, int] = attrs.field(factory=dict[str, int])
    process: ProcessStatistics | None = None


@attrs.frozen
class LaunchTimes:
    """The times of an operation in a worker, by `time.monotonic_ns`, which all processes share.

    Attributes:
        process: The pid of the worker.
        begun: The time just before the backend was called.
        completed: The time when the operation was found complete.
    """

    process: int
    begun: int
    completed: int


PreloadState: TypeAlias = Literal["fully", "refused", "pending", "inline"]


@attrs.frozen(kw_only=True)
class ProgramCost:
    """The share of one program in a recovery.

    Attributes:
        program: Its name.
        module: The module of its class or function.
        imports: The seconds that the last worker took to import the module; 0.0 if the next one begins with
            it.
        makes: The last duration of constructor and `warm_up`, in seconds.
        preloading: Whether the next worker begins with the module: ``"fully"``: it does; ``"refused"``: it
            does not; ``"pending"``: that is being tried. ``"inline"``: there is no worker, and the module
            stays imported.
        reason: The reason why each worker imports the module; None if none does.
    """

    program: str
    module: str
    imports: float
    makes: float
    preloading: PreloadState
    reason: str | None = None


@attrs.frozen(kw_only=True)
class RecoveryCost:
    """The cost of the next recovery: measured times of the last start, without the delay of a restart (D141).

    Its text is one line, such as ``restart 1.71 s: worker 0.12 s, import of encoder 1.55 s, ...``.

    Attributes:
        context: The seconds from starting the last worker until its context was ready; without a worker, of
            the last context. None before the first context.
        programs: The shares of programs.
        spares: The number of spare workers, which have already done all of this for the next recovery.
        is_first: Whether the times are from the first start, which loads more than a recovery does.
    """

    context: float | None = None
    programs: tuple[ProgramCost, ...] = ()
    spares: int = 0
    is_first: bool = False

    @property
    def seconds(self) -> float | None:
        """The sum without a spare worker; None before the first context."""
        if self.context is None:
            return None
        return self.context + sum(self._imports().values()) + sum(program.makes for program in self.programs)

    @property
    def reason(self) -> str | None:
        """The reason why each worker imports modules; None if none does."""
        reasons = {program.module: program.reason for program in self.programs if program.reason is not None}
        lines = [
            f"module {module} is imported in each worker, because {reason}"
            for module, reason in reasons.items()
        ]
        return "; ".join(lines) or None

    def __str__(self) -> str:
        if self.context is None:
            return "restart not measured yet"
        is_inline = any(program.preloading == "inline" for program in self.programs)
        parts = [f"{'context' if is_inline else 'worker and context'} {self.context:.2f} s"]
        parts += [f"import of {module} {seconds:.2f} s" for module, seconds in self._imports().items()]
        parts += [f"constructor of {program.program} {program.makes:.2f} s" for program in self.programs]
        ready = ", which a spare has done" if self.spares else ""
        reason = f"; {self.reason}" if self.reason else ""
        label = "first start" if self.is_first else "restart"
        return f"{label} {self.seconds:.2f} s{ready}: {', '.join(parts)}{reason}"

    def _imports(self) -> dict[str, float]:
        """Return the seconds by module, because the first program of a worker pays for the others."""
        imports: dict[str, float] = {}
        for program in self.programs:
            if program.preloading not in ("fully", "inline"):
                imports[program.module] = max(imports.get(program.module, 0.0), program.imports)
        return imports


@attrs.define(eq=False)
class _Program:
    name: str
    module: str
    imports: float = 0.0
    makes: float = 0.0


class Recoveries:
    """The times of one device that determine the cost of its next recovery.

    Attributes:
        context: The seconds of the last start of a worker, or of an inline context; None before the first.
        judge: Returns whether the next worker begins with a module, and why not.
        spares: Returns the number of spare workers.
    """

    def __init__(self) -> None:
        self.context: float | None = None
        self._starts = 0
        self.judge: Callable[[str], tuple[PreloadState, str | None]] = lambda _: ("inline", None)
        self.spares: Callable[[], int] = lambda: 0
        # The programs, by the backend's names of their libraries.
        self._programs: dict[str, _Program] = {}

    def started(self, seconds: float) -> None:
        """Record that a worker, or an inline context, has started."""
        self._starts += 1
        self.context = seconds

    def expect(self, library: str, name: str, module: str) -> None:
        """Record that a program is to be opened.

        Args:
            library: The backend's name of its library.
            name: Its name.
            module: The module of its class.
        """
        self._programs[library] = _Program(name, module)

    def forget(self, library: str) -> None:
        """Forget a closed program, or one after a failed opening."""
        self._programs.pop(library, None)

    def record_program(self, library: str, seconds: float, imports: float) -> None:
        """Record that a context has made a program; unknown programs are ignored.

        Args:
            library: The backend's name of its library.
            seconds: The total duration.
            imports: The part of it for the import of its module.
        """
        program = self._programs.get(library)
        if program is not None:
            program.imports, program.makes = imports, max(0.0, seconds - imports)

    def cost(self, libraries: Iterable[str] | None = None) -> RecoveryCost:
        """Return the cost of the next recovery, or only the part for some libraries."""
        chosen = self._programs if libraries is None else libraries
        programs = [self._programs[library] for library in chosen if library in self._programs]
        return RecoveryCost(
            context=self.context,
            programs=tuple(map(self._of, programs)),
            spares=self.spares(),
            is_first=self._starts == 1,
        )

    def _of(self, program: _Program) -> ProgramCost:
        preloading, reason = self.judge(program.module)
        # Another program of the module has paid for the import, which this program would pay without it.
        paid = max(sibling.imports for sibling in self._programs.values() if sibling.module == program.module)
        return ProgramCost(
            program=program.name,
            module=program.module,
            imports=0.0 if preloading in ("fully", "inline") else paid,
            makes=program.makes,
            preloading=preloading,
            reason=reason,
        )
