"""On which processors a measurement ran, and whether something else took half of one meanwhile (Linux)."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs

__all__ = ["Processors", "process_tree"]

_PROC = Path("/proc")
_ADDITIONS, _TIMES = 30_000, 3
_SLOW = 0.8
"""Share of the best one's speed below which a processor is slow: beside a neighbour it has about half."""

_BUSY = 0.25
"""Share of a measurement's time from which on a thread's processor matters."""

_FEWEST = 4
"""With fewer processors to choose from, a program would wait in another way than it does in use."""


@attrs.define(eq=False)
class Processors:
    """The processors that this process and those that it started compute on.

    The processors of a virtual machine are threads of its host, which runs those of others beside them on
    one core: for seconds, some have half of their speed, and no counter in the machine tells of it. A loop
    of Python does. Its time is that of its thread, so that who waits for the same processor *in* the machine,
    a thread of what is measured for example, is not taken for a neighbour.
    """

    _allowed: frozenset[int] = attrs.field(factory=lambda: _affinity(0))
    _chosen: set[frozenset[int]] = attrs.field(factory=set[frozenset[int]])
    _best: float = 0.0
    _busy: dict[str, Sequence[tuple[int, int]]] = attrs.field(factory=dict[str, Sequence[tuple[int, int]]])
    _used: dict[tuple[int, int], int] = attrs.field(factory=dict[tuple[int, int], int])
    _began: int = 0

    @classmethod
    def are_told(cls) -> bool:
        """Whether the system tells what is needed."""
        if sys.platform != "linux":
            return False
        children = _PROC / "self" / "task" / str(os.getpid()) / "children"
        return children.exists() and bool(_times(os.getpid()))

    @contextmanager
    def chosen(self) -> Generator[None, None, None]:
        """A block after which all threads may use all processors again."""
        try:
            self.choose()
            yield
        finally:
            self._move(self._allowed)

    def choose(self) -> None:
        """Have all threads of these processes compute where the processors are not slow just now."""
        speeds = {processor: self._speed(processor) for processor in sorted(self._allowed)}
        # Not the best of all times: some are faster than ever again for a moment.
        self._best = max(speeds.values())
        good = frozenset(processor for processor, speed in speeds.items() if speed >= _SLOW * self._best)
        self._chosen |= {self._allowed, good}
        self._move(good if len(good) >= _FEWEST else self._allowed)

    def begin(self, name: str) -> None:
        """Begin a measurement: where the threads that it had last time are slow just now, `choose` anew.

        Args:
            name: What is measured.
        """
        if not self._are_good(self._busy.get(name, ())):
            self.choose()
        self._used, self._began = dict(self._threads()), time.perf_counter_ns()

    def were_good(self, name: str) -> bool:
        """End it, and say whether no thread that was busy since has computed on a slow processor at last.

        One is busy that has computed for a quarter of the time; those that have ended by now are not seen.
        """
        least = (time.perf_counter_ns() - self._began) * _BUSY
        busy = [thread for thread, used in self._threads() if used - self._used.get(thread, 0) >= least]
        self._busy[name] = busy
        return self._are_good(busy)

    def _are_good(self, threads: Iterable[tuple[int, int]]) -> bool:
        processors = {_last_processor(*thread) for thread in threads} & self._allowed
        return all(self._speed(processor) >= _SLOW * self._best for processor in processors)

    def _speed(self, processor: int) -> float:
        """Additions in a second of this thread's time on a processor."""
        before, home = _affinity(0), _processor_in(_PROC / "thread-self/stat")
        os.sched_setaffinity(0, {processor})
        try:
            return _ADDITIONS / statistics.median(_time_of_additions() for _ in range(_TIMES))
        finally:
            # Otherwise it would stay there, perhaps beside a thread of what is measured.
            os.sched_setaffinity(0, {home})
            os.sched_setaffinity(0, before)

    def _move(self, processors: frozenset[int]) -> None:
        for _, thread in self._names():
            # It may have ended; and one that has been told otherwise is left alone. One that began just now
            # may have what was chosen before.
            with suppress(ProcessLookupError, PermissionError):
                if _affinity(thread) in self._chosen:
                    os.sched_setaffinity(thread, processors)

    def _names(self) -> Iterator[tuple[int, int]]:
        for process in process_tree():
            for thread in _listed(_PROC / str(process) / "task"):
                yield process, int(thread.name)

    def _threads(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Every thread, and the nanoseconds that it has computed for."""
        for process, thread in self._names():
            if times := _times(process, thread):
                yield (process, thread), times[0]


def process_tree() -> list[int]:
    """This process and those that it has started, and those that these have."""
    found, new = list[int](), [os.getpid()]
    while new:
        found.append(process := new.pop())
        for thread in _listed(_PROC / str(process) / "task"):
            # A thread may have ended since it was listed.
            with suppress(FileNotFoundError, ProcessLookupError):
                new += map(int, (thread / "children").read_text(encoding="ascii").split())
    return found


def _listed(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError, ProcessLookupError):
        return list(folder.iterdir())
    return []


def _times(process: int, thread: int | None = None) -> tuple[int, ...]:
    """Nanoseconds that a thread has computed and waited for a processor; nothing if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        path = _PROC / str(process) / "task" / str(thread or process) / "schedstat"
        return tuple(map(int, path.read_text(encoding="ascii").split()))
    return ()


def _last_processor(process: int, thread: int) -> int:
    """Where a thread computes, or did last; -1 if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return _processor_in(_PROC / str(process) / "task" / str(thread) / "stat")
    return -1


def _processor_in(stat: Path) -> int:
    """The processor in a thread's statistics (proc(5): field 39)."""
    # The name of the program stands in brackets, and may have spaces and brackets itself.
    return int(stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[36])


def _affinity(thread: int) -> frozenset[int]:
    return frozenset(os.sched_getaffinity(thread))


def _time_of_additions() -> float:
    total, start = 0, time.thread_time()
    for number in range(_ADDITIONS):
        total += number
    return time.thread_time() - start
