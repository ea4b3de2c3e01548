"""Which processors a comparison is measured on, and what becomes of a pair that something else disturbed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import trio

from trio_accel.benchmarks import Goal, Plan, Result, _processors, describe_plan
from trio_accel.benchmarks._harness import Figure, alternate
from trio_accel.benchmarks._processors import Processors, process_tree
from trio_accel.benchmarks._statistics import Pairs
from trio_accel.benchmarks._table import cells

pytestmark = pytest.mark.skipif(not Processors.are_told(), reason="this system does not tell of processors")

_SLEEPER = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


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
    processors: _Scripted, monkeypatch: pytest.MonkeyPatch, *, patience: float, took: float = 0.0
) -> Pairs:
    class Factory:
        are_told = staticmethod(lambda: True)

        def __new__(cls) -> _Scripted:
            return processors

    monkeypatch.setattr("trio_accel.benchmarks._harness.Processors", Factory)

    async def measure(name: str) -> float:
        await trio.lowlevel.checkpoint()
        # A measurement that takes so long: the clock is the real one.
        await trio.sleep(took)
        processors.calls.append(f"{name} measured")
        return float(processors.calls.count(f"{name} measured"))

    plan = Plan(pairs=3, warmups=1, patience=patience)
    return await alternate(lambda: measure("ours"), lambda: measure("peer"), plan)


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


async def test_without_patience_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    processors = _Scripted()
    pairs = await _alternate(processors, monkeypatch, patience=0.0)
    assert pairs == Pairs(ours=(2.0, 3.0, 4.0), peer=(2.0, 3.0, 4.0))
    assert set(processors.calls) == {"ours measured", "peer measured"}


def test_only_processors_of_busy_threads_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []

    def slow(self: Processors, processor: int) -> float:
        looked_at.append(processor)
        return 1.0

    monkeypatch.setattr(Processors, "_speed", slow)
    processors = Processors(best=10.0)
    processors.begin("idle")
    time.sleep(0.05)
    assert processors.were_good("idle")
    assert looked_at == []
    processors.begin("busy")
    used = time.thread_time()
    while time.thread_time() < used + 0.05:
        pass
    assert not processors.were_good("busy")
    assert set(looked_at) <= os.sched_getaffinity(0)
    assert len(looked_at) == 1
    assert Processors(best=1.1).were_good("busy")


def test_a_measurement_begins_elsewhere_where_its_last_processors_are_slow_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(Processors, "choose", lambda _: chosen.append("anew"))
    monkeypatch.setattr(Processors, "_speed", lambda *_: 1.0)
    processors = Processors(best=1.0)
    processors.begin("a")
    used = time.thread_time()
    while time.thread_time() < used + 0.05:
        pass
    assert processors.were_good("a")
    processors.begin("a")
    assert chosen == []
    monkeypatch.setattr(Processors, "_speed", lambda *_: 0.5)
    processors.begin("b")
    assert chosen == []
    processors.begin("a")
    assert chosen == ["anew"]


@pytest.fixture
def sleepers() -> Iterator[list[int]]:
    """A process that this one has started, and one that that has started."""
    with subprocess.Popen([sys.executable, "-c", _SLEEPER], stdin=subprocess.PIPE) as process:
        try:
            ends = time.monotonic() + 10.0
            while len(found := [pid for pid in process_tree() if pid != os.getpid()]) < 2:
                assert time.monotonic() < ends
                time.sleep(0.01)
            yield found
        finally:
            # The second has its input from the first.
            process.communicate(b"\n")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is nothing to choose from")
def test_all_processes_compute_on_what_is_not_slow_and_may_go_everywhere_afterwards(
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


def test_a_speed_is_that_of_the_processor_asked_for_and_the_thread_goes_back() -> None:
    before = os.sched_getaffinity(0)
    processors = Processors()
    # Slower machines than this have not been seen.
    assert all(processors._speed(processor) > 1e5 for processor in before)
    assert os.sched_getaffinity(0) == before


def test_a_row_tells_how_many_pairs_do_not_count() -> None:
    pairs = Pairs(ours=(2.0, 4.0), peer=(1.0, 2.0), retaken=3)
    row = Result.compare("some.row", pairs, unit="µs", goal=Goal(figure=Figure.RATIO, most=3.0))
    assert cells(row)[3] == "2.00 [2.00, 2.00] × +3"
    assert "at most 12 s" in describe_plan(Plan(patience=12.0))
    assert "once more" not in describe_plan(Plan())
