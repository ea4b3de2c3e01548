"""The processors of a comparison, and the treatment of a pair disturbed by something else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import attrs
import pytest
import trio

from benchmarks import Goal, Plan, Result, _processors, describe_plan
from benchmarks._harness import Figure, alternate
from benchmarks._processors import Processors, process_tree
from benchmarks._statistics import Pairs
from benchmarks._table import cells

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(not Processors.are_told(), reason="this system does not tell of processors"),
]

_SLEEPER = """
import subprocess, sys
with subprocess.Popen([sys.executable, "-c", "input()"]) as process:
    print(process.pid, flush=True)
"""


class _Scripted:
    """Processors of which it is known beforehand when they are slow."""

    def __init__(self, *are_good: bool) -> None:
        self.are_good, self.calls = iter(are_good), list[str]()

    def chosen(self) -> _Scripted:
        return self

    def __enter__(self) -> None:
        self.calls.append("chosen")

    def __exit__(self, *_: object) -> None:
        self.calls.append("as before")

    def begin(self, name: str) -> None:
        self.calls.append(name)

    def were_good(self, name: str) -> bool:
        assert self.calls[-1] == f"{name} measured"
        self.calls.append("looked at")
        return next(self.are_good)


async def _alternate(
    processors: _Scripted,
    monkeypatch: pytest.MonkeyPatch,
    *,
    patience: float,
    took: float = 0.0,
    on_pair: Callable[[], None] = lambda: None,
) -> Pairs:
    class Factory:
        are_told = staticmethod(lambda: True)

        def __new__(cls) -> _Scripted:
            return processors

    monkeypatch.setattr("benchmarks._harness.Processors", Factory)

    async def measure(name: str) -> float:
        await trio.lowlevel.checkpoint()
        # A measurement with a long duration: the clock is the real one.
        # clock: the duration of this work decides nothing
        await trio.sleep(took)
        processors.calls.append(f"{name} measured")
        return float(processors.calls.count(f"{name} measured"))

    plan = Plan(pairs=3, warmups=1, patience=patience)
    return await alternate(lambda: measure("ours"), lambda: measure("peer"), plan, on_pair=on_pair)


async def test_a_pair_with_a_slow_processor_on_either_side_is_taken_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processors = _Scripted(True, True, False, True, False, True, True, True, True)
    pairs = await _alternate(processors, monkeypatch, patience=60.0)
    # The first measurement is the warm-up's. The third of ours was disturbed, and no peer follows it; and
    # the peer of the fourth.
    assert pairs == Pairs(ours=(2.0, 5.0, 6.0), peer=(2.0, 4.0, 5.0), retaken=2)
    assert processors.calls[2] == "chosen"
    assert processors.calls[3:6] == ["ours", "ours measured", "looked at"]
    assert processors.calls[6:9] == ["peer", "peer measured", "looked at"]
    assert processors.calls[-1] == "as before"


async def test_patience_ends_and_then_every_pair_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = await _alternate(_Scripted(*[False] * 100), monkeypatch, patience=0.05, took=0.01)
    assert 1 <= pairs.retaken <= 5
    first = 2.0 + pairs.retaken
    assert pairs.ours == (first, first + 1, first + 2)
    assert pairs.peer == (2.0, 3.0, 4.0)
    assert pairs.disturbed == 3


async def test_only_counted_pairs_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the row of the first single ones, whose measurements are noted on the way."""
    noted: list[int] = []
    processors = _Scripted(True, True, False, True, False, True, True, True, True)
    await _alternate(
        processors, monkeypatch, patience=60.0, on_pair=lambda: noted.append(len(processors.calls))
    )
    assert [processors.calls[index - 2] for index in noted] == ["peer measured"] * 3
    assert len(noted) == 3


async def test_without_patience_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    processors = _Scripted()
    pairs = await _alternate(processors, monkeypatch, patience=0.0)
    assert pairs == Pairs(ours=(2.0, 3.0, 4.0), peer=(2.0, 3.0, 4.0))
    assert set(processors.calls) == {"ours measured", "peer measured"}


class _Threads:
    """Threads, their computations, and their processors; the speeds of the processors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = {(1, thread): 0 for thread in (11, 12, 13)}
        self.speeds = dict.fromkeys(os.sched_getaffinity(0), 1.0)
        self.looked_at: list[int] = []
        self.of = {name: min(self.speeds) for name in self.used}
        monkeypatch.setattr(Processors, "_threads", lambda _: iter(self.used.items()))
        monkeypatch.setattr(_processors, "_last_processor", lambda *name: self.of[name])
        monkeypatch.setattr(Processors, "_speed", self._speed)

    def _speed(self, processor: int) -> float:
        self.looked_at.append(processor)
        return self.speeds[processor]

    def compute(self, *names: tuple[int, int]) -> None:
        """For longer than any measurement takes."""
        for name in names:
            self.used[name] += 10**18

    def slow_down(self) -> None:
        self.speeds = dict.fromkeys(self.speeds, 0.5)


def test_only_processors_of_busy_threads_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, processors = _Threads(monkeypatch), Processors(best=1.0)
    processors.begin("idle")
    threads.slow_down()
    assert processors.were_good("idle")
    assert not threads.looked_at
    processors.begin("busy")
    threads.compute((1, 12))
    assert not processors.were_good("busy")
    assert threads.looked_at == [threads.of[1, 12]]
    # Not so slow.
    slower = Processors(best=0.6)
    slower.begin("busy")
    threads.compute((1, 11), (1, 12))
    assert slower.were_good("busy")
    # Both are on one.
    assert len(threads.looked_at) == 2


def test_a_measurement_begins_elsewhere_if_its_last_processors_are_slow_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, processors, chosen = _Threads(monkeypatch), Processors(best=1.0), list[str]()
    monkeypatch.setattr(Processors, "choose", lambda _: chosen.append("anew"))
    processors.begin("a")
    threads.compute((1, 13))
    assert processors.were_good("a")
    processors.begin("a")
    assert chosen == []
    threads.slow_down()
    processors.begin("b")
    assert chosen == []
    processors.begin("a")
    assert chosen == ["anew"]


def test_a_thread_that_computes_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine it gets less than a quarter.
    monkeypatch.setattr(_processors, "_BUSY", 0.01)
    processors = Processors(best=1.0)
    processors.begin("this")
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    processors.were_good("this")
    assert (os.getpid(), threading.get_native_id()) in processors._busy["this"]


@pytest.fixture
def sleepers() -> Iterator[list[int]]:
    """A child process of this one, and its grandchild."""
    command = [sys.executable, "-c", _SLEEPER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            found = [process.pid, int(process.stdout.readline())]
            assert set(found) < set(process_tree())
            yield found
        finally:
            # The second has its input from the first.
            process.communicate(b"\n")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is nothing to choose from")
def test_all_processes_avoid_slow_processors_and_are_free_afterwards(
    monkeypatch: pytest.MonkeyPatch, sleepers: list[int]
) -> None:
    everywhere = os.sched_getaffinity(0)
    fast = set(sorted(everywhere)[1:])
    monkeypatch.setattr(
        _processors, "_time_of_additions", lambda: 0.1 if os.sched_getaffinity(0) <= fast else 0.2
    )
    monkeypatch.setattr(_processors, "_FEWEST", 1)
    processors = Processors()
    with processors.chosen():
        for pid in (os.getpid(), *sleepers):
            assert os.sched_getaffinity(pid) == fast
    for pid in (os.getpid(), *sleepers):
        assert os.sched_getaffinity(pid) == everywhere
    monkeypatch.setattr(_processors, "_FEWEST", len(everywhere))
    with processors.chosen():
        # Too few are left to choose from.
        assert os.sched_getaffinity(0) == everywhere


def test_the_requested_processor_is_measured_and_the_thread_returns() -> None:
    before = os.sched_getaffinity(0)
    processors = Processors()
    # Slower machines than this have not been seen.
    assert all(processors._speed(processor) > 1e5 for processor in before)
    assert os.sched_getaffinity(0) == before


def test_a_row_has_the_number_of_uncounted_pairs() -> None:
    pairs = Pairs(ours=(2.0, 4.0), peer=(1.0, 2.0), retaken=3)
    row = Result.compare("some.row", pairs, unit="µs", goal=Goal(figure=Figure.RATIO, most=3.0))
    assert cells(row)[3] == "2.00 [2.00, 2.00] × +3"
    assert cells(attrs.evolve(row, disturbed=2))[3] == "2.00 [2.00, 2.00] × +3, 2 disturbed"
    assert "12 s of a comparison" in describe_plan(Plan(patience=12.0))
    assert "once more" not in describe_plan(Plan())
