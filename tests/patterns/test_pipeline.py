"""Pipelines: when each stage begins with each item, and the outcomes of items that fail or leave."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import hypothesis.strategies as st
import numpy as np
import outcome
import pytest
import trio
from hypothesis import given, settings
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.patterns import (
    GetStatistics,
    Pipeline,
    PipelineStage,
    PipelineStatistics,
    Replica,
    ReplicaPool,
    RetryBudget,
    RetryPolicy,
    Submit,
    open_results,
)

# Two contexts of one device are two devices here, on a machine with one.
pytestmark = pytest.mark.filterwarnings("ignore:open_device. cpu.0 is open already:RuntimeWarning")

Model = Callable[[Any], Awaitable[Any]]


@attrs.frozen
class Visit:
    """An item: its arrival, the duration of each stage, its failing stage, and its caller's departure."""

    comes: int
    takes: tuple[int, ...]
    fails_in: int | None
    leaves: float


@attrs.frozen
class Line:
    """A stage of the reference."""

    workers: int
    capacity: int


def largest(times: list[float], place: int) -> float:
    """The time from which on fewer than `place` things are left, given the time of each departure."""
    return sorted(times, reverse=True)[place - 1] if len(times) >= place else 0.0


def reference(lines: list[Line], visits: list[Visit]) -> tuple[list[list[float]], list[tuple[str, float]]]:
    """Begins of the items in the stages, and how and when each ends, by the recurrence of a tandem queue.

    With `w` workers and room for `c`: an item begins after its arrival, when all before it have begun or
    left, and fewer than `w` workers are taken. It leaves its worker when fewer than `c` of the items before
    it have still to begin in the next stage.
    """
    begins: list[list[float]] = []
    ends: list[tuple[str, float]] = []
    # For each stage and item so far: its beginning or departure, and the time it left its worker.
    passed: list[list[float]] = [[] for _ in lines]
    left: list[list[float]] = [[] for _ in lines]
    for visit in visits:
        now, mine, end = float(visit.comes), list[float](), ("", math.inf)
        for k, line in enumerate(lines):
            begin = max([now, *passed[k], largest(left[k], line.workers)])
            if begin > visit.leaves:
                end = ("cancelled", visit.leaves)
                break
            mine.append(begin)
            passed[k].append(begin)
            now = begin + visit.takes[k]
            is_over = now > visit.leaves
            if is_over or visit.fails_in == k:
                end = ("cancelled", visit.leaves) if is_over else ("failed", now)
                left[k].append(end[1])
                break
            if k + 1 < len(lines):
                now = max(now, largest(passed[k + 1], lines[k + 1].capacity))
            left[k].append(min(now, visit.leaves))
            if now > visit.leaves:
                end = ("cancelled", visit.leaves)
                break
        else:
            end = ("answered", now)
        for k in range(len(mine), len(lines)):
            passed[k].append(end[1])
        begins.append(mine)
        ends.append(end)
    return begins, ends


class World:
    """The visits of one run, and when they were seen where."""

    def __init__(self, lines: list[Line], visits: list[Visit]) -> None:
        self.lines, self.visits = lines, visits
        self.begins: list[list[float]] = [[] for _ in visits]
        self.ends: list[tuple[str, float]] = [("", 0.0) for _ in visits]
        self.statistics: PipelineStatistics

    async def model(self, k: int, number: int) -> int:
        visit = self.visits[number]
        self.begins[number].append(trio.current_time())
        await trio.sleep(visit.takes[k])
        if visit.fails_in == k:
            raise LookupError(number)
        return number

    async def visit(self, number: int, pipeline: ta.Ref[Any]) -> None:
        visit, end = self.visits[number], "cancelled"
        await trio.sleep_until(visit.comes)
        with trio.CancelScope(deadline=visit.leaves):
            try:
                assert await pipeline.ask(Submit(number)) == number
                end = "answered"
            except LookupError:
                end = "failed"
        self.ends[number] = end, trio.current_time()

    async def run(self) -> None:
        async with ta.open_system("test") as system:
            stages = [
                PipelineStage(
                    partial(self.model, k), name=f"{k}", workers=line.workers, capacity=line.capacity
                )
                for k, line in enumerate(self.lines)
            ]
            pipeline: ta.Ref[Any] = await system.spawn(Pipeline, *stages)  # type: ignore[arg-type]
            # A lost worker does not make the test hang.
            with trio.fail_after(10_000):
                async with trio.open_nursery() as nursery:
                    for number in range(len(self.visits)):
                        nursery.start_soon(self.visit, number, pipeline)
            self.statistics = await pipeline.ask(GetStatistics())


LINES = st.lists(
    st.builds(Line, workers=st.integers(1, 3), capacity=st.integers(1, 3)), min_size=1, max_size=4
)


@st.composite
def visits_of(draw: st.DrawFn, count: int, most: int = 12) -> list[Visit]:
    moment, visits = 0, list[Visit]()
    for number in range(draw(st.integers(1, most))):
        # Two simultaneous arrivals are unordered.
        moment += draw(st.integers(1, 3))
        visits.append(
            Visit(
                comes=moment,
                takes=tuple(draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))),
                fails_in=draw(st.none() | st.none() | st.integers(0, count - 1)),
                # At no moment at which anything else happens: each has a fraction of its own.
                leaves=moment + draw(st.sampled_from([math.inf, math.inf, *range(20)])) + (number + 1) / 64,
            )
        )
    return visits


WORLDS = LINES.flatmap(lambda lines: visits_of(len(lines)).map(lambda visits: World(lines, visits)))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(world=WORLDS)
def test_times_match_a_tandem_queue(world: World) -> None:
    trio.run(world.run, clock=MockClock(autojump_threshold=0))
    begins, ends = reference(world.lines, world.visits)
    assert world.begins == begins
    assert world.ends == ends
    statistics, kinds = world.statistics, Counter(kind for kind, _ in ends)
    assert (statistics.answered, statistics.failed) == (kinds["answered"], kinds["failed"])
    # Nothing is left of failed or departed items.
    assert [(stage.waiting, stage.held, stage.in_flight) for stage in statistics.stages] == [(0, 0, 0)] * len(
        world.lines
    )
    assert [stage.begun for stage in statistics.stages] == [
        sum(len(mine) > k for mine in begins) for k in range(len(world.lines))
    ]


async def sleep_for(seconds: float, item: Any) -> Any:
    # clock: a mock clock of the caller, or work of any duration
    await trio.sleep(seconds)
    return item


async def test_a_thousand_items_take_as_long_as_in_the_slowest_stage(
    system: ta.System, autojump_clock: MockClock
) -> None:
    first, slow, last = 2.0, 3.0, 1.0
    pipeline = await system.spawn(
        Pipeline, partial(sleep_for, first), partial(sleep_for, slow), partial(sleep_for, last)
    )
    begun = trio.current_time()
    async with open_results(pipeline, range(1000)) as results:
        assert [result async for result in results] == list(range(1000))
    assert trio.current_time() - begun == pytest.approx(first + 1000 * slow + last)


async def test_a_full_stage_holds_the_one_before(system: ta.System, autojump_clock: MockClock) -> None:
    between = most = 0
    counts: list[tuple[tuple[int, int], ...]] = []

    async def quick(item: int) -> int:
        nonlocal between, most
        await trio.sleep(1)
        between += 1
        most = max(most, between)
        return item

    async def slow(item: int) -> int:
        nonlocal between
        between -= 1
        await trio.sleep(10)
        return item

    pipeline = await system.spawn(Pipeline, PipelineStage(quick, workers=2), PipelineStage(slow, capacity=3))

    async def look() -> None:
        while True:
            await trio.sleep(5)
            statistics: PipelineStatistics = await pipeline.ask(GetStatistics())
            counts.append(tuple((stage.waiting, stage.held) for stage in statistics.stages))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        async with open_results(pipeline, range(50)) as results:
            assert [result async for result in results] == list(range(50))
        nursery.cancel_scope.cancel()
    # 3 in the queue, and 2 with the workers before it.
    assert most == 5
    assert max(waiting for _, (waiting, _) in counts) == 3
    assert max(held for (_, held), _ in counts) == 2
    # Items with a place are in front of the first stage; the others wait with their callers.
    assert {waiting for (waiting, _), _ in counts} <= {0, 1}


async def test_only_the_bad_item_fails_and_with_its_own_error(system: ta.System) -> None:
    error = KeyError("bad item")

    async def picky(item: int) -> int:
        await trio.lowlevel.checkpoint()
        if item % 3 == 1:
            raise error
        return item

    async def double(item: int) -> int:
        await trio.lowlevel.checkpoint()
        return 2 * item

    pipeline = await system.spawn(Pipeline, picky, double, name="pipeline")
    async with open_results(pipeline, range(30), outcomes=True) as results:
        found = [result async for result in results]
    for item, result in enumerate(found):
        if item % 3 == 1:
            assert isinstance(result, outcome.Error)
            assert result.error is error
        else:
            assert result == outcome.Value(2 * item)
    statistics: PipelineStatistics = await pipeline.ask(GetStatistics())
    assert [(stage.name, stage.begun, stage.failed) for stage in statistics.stages] == [
        ("picky", 30, 10),
        ("double", 20, 0),
    ]
    assert system.tree().find("test/pipeline").restarts == 0


async def test_a_cancelled_asker_takes_its_item_out(system: ta.System, autojump_clock: MockClock) -> None:
    ended: list[str] = []

    async def hangs(item: int) -> int:
        try:
            await trio.sleep(math.inf if item == 0 else 1)
        finally:
            ended.append(f"{item}")
        return item

    pipeline = await system.spawn(Pipeline, hangs, partial(sleep_for, 1))
    results: list[int] = []

    async def ask(item: int) -> None:
        results.append(await pipeline.ask(Submit(item)))

    async with trio.open_nursery() as nursery, trio.open_nursery() as first:
        first.start_soon(ask, 0)
        await wait_all_tasks_blocked()
        nursery.start_soon(ask, 1)
        await trio.sleep(5)
        assert not ended
        first.cancel_scope.cancel()
    assert ended == ["0", "1"]
    assert results == [1]


async def test_an_ended_stage_fails_items_as_other_patterns_do(system: ta.System) -> None:
    inner = await system.spawn(Pipeline, partial(sleep_for, 0), name="inner")
    pipeline = await system.spawn(Pipeline, partial(sleep_for, 0), inner, name="outer")
    assert await pipeline.ask(Submit(1)) == 1
    await inner.stop()
    for _ in range(2):
        with pytest.raises(ta.ActorStoppedError) as caught:
            await pipeline.ask(Submit(1))
        assert caught.value.path == "test/inner"
    assert system.tree().find("test/outer").restarts == 0


async def test_items_before_their_first_stage_are_reported_as_unexecuted(system: ta.System) -> None:
    seen: list[int] = []

    async def hangs(item: int) -> int:
        seen.append(item)
        await trio.sleep_forever()

    pipeline = await system.spawn(Pipeline, hangs)
    outcomes: dict[int, BaseException] = {}

    async def ask(item: int) -> None:
        result = await outcome.acapture(pipeline.ask, Submit(item))
        assert isinstance(result, outcome.Error)
        outcomes[item] = result.error

    async with trio.open_nursery() as nursery:
        for item in range(4):
            nursery.start_soon(ask, item)
        await wait_all_tasks_blocked()
        await pipeline.stop()
    (begun,) = seen
    assert {item: type(error) for item, error in outcomes.items()} == {
        item: ta.ActorFailedError if item == begun else ta.ActorStoppedError for item in range(4)
    }


async def test_a_drain_takes_all_items_through(system: ta.System, autojump_clock: MockClock) -> None:
    pipeline = await system.spawn(Pipeline, partial(sleep_for, 0.1), partial(sleep_for, 0.2))
    results: list[int] = []

    async def ask(item: int) -> None:
        results.append(await pipeline.ask(Submit(item)))

    async with trio.open_nursery() as nursery:
        for item in range(6):
            nursery.start_soon(ask, item)
        await wait_all_tasks_blocked()
        await pipeline.stop(drain=True)
    assert sorted(results) == list(range(6))


async def test_a_stage_with_a_deadline(system: ta.System, autojump_clock: MockClock) -> None:
    async def slow(item: int) -> int:
        await trio.sleep(5 if item == 1 else 1)
        return item

    pipeline = await system.spawn(Pipeline, PipelineStage(slow, name="slow", deadline=2.0))
    begun = trio.current_time()
    async with open_results(pipeline, range(3), outcomes=True) as results:
        found = [result async for result in results]
    assert trio.current_time() - begun == pytest.approx(4.0)
    assert found[0::2] == [outcome.Value(0), outcome.Value(2)]
    with pytest.raises(trio.TooSlowError, match="stage 'slow' did not finish within 2 s"):
        found[1].unwrap()


async def test_a_repeated_stage(system: ta.System, autojump_clock: MockClock) -> None:
    tries: Counter[int] = Counter()

    async def flaky(item: int) -> int:
        await trio.lowlevel.checkpoint()
        tries[item] += 1
        if item % 2 and tries[item] < 3:
            raise ta.MailboxFullError("full", path="test/other")
        return item

    policy = RetryPolicy(budget=RetryBudget(share=1.0, minimum=100.0), attempts=3)
    pipeline = await system.spawn(Pipeline, PipelineStage(flaky, retry=policy), partial(sleep_for, 1))
    async with open_results(pipeline, range(6)) as results:
        assert [result async for result in results] == list(range(6))
    assert tries == {item: 3 if item % 2 else 1 for item in range(6)}


# Devices.


async def test_spans_and_metrics_of_stages(system: ta.System, device: ta.Device) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def put(item: float) -> ta.AccelRef:
        return await device.put(np.array([item]))

    async def check(array: ta.AccelRef) -> float:
        value = float(await array.item())
        if value < 0:
            raise ValueError("negative")
        return value

    pipeline = await system.spawn(Pipeline, put, check, name="pipe")
    with ta.telemetry.record(system) as recorder, ta.telemetry.trace(system, provider):
        assert await pipeline.ask(Submit(1.0)) == 1.0
        with pytest.raises(ValueError, match="negative"):
            await pipeline.ask(Submit(-1.0))
        snapshot = recorder.snapshot()
    spans = exporter.get_finished_spans()
    below = {span.context.span_id: span.name for span in spans if span.context is not None}
    children = Counter((below[span.parent.span_id] if span.parent else "", span.name) for span in spans)
    for name, count in {("", "Submit"): 2, ("Submit", "put"): 2, ("Submit", "check"): 2}.items():
        assert children[name] == count
    # A stage's requests to the device belong to it, and not to the stage before.
    assert children["put", "devices.Put"] == 2
    assert not any(parent == "put" and name == "check" for parent, name in children)
    stages = [span for span in spans if span.name == "check"]
    assert [span.attributes["trio_accel.actor"] for span in stages if span.attributes] == [
        "test/pipe/check"
    ] * 2
    assert [span.status.is_ok or span.status.is_unset for span in stages] == [True, False]
    assert all(span.events[0].name == "started" for span in stages)
    rows = {(row.path, row.message_type): row for row in snapshot.operations}
    assert rows["test/pipe/put", "put"].run.count == 2
    assert (rows["test/pipe/check", "check"].run.count, rows["test/pipe/check", "check"].failed) == (2, 1)


async def test_settings_of_observers_for_a_stage_end_with_it(system: ta.System) -> None:
    """The span of one stage is not the parent of the next, also where no span is above."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    may_go = trio.Event()

    async def wait(item: int) -> int:
        await may_go.wait()
        return item

    pipeline = await system.spawn(Pipeline, wait, PipelineStage(wait, name="then"), partial(sleep_for, 0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pipeline.ask, Submit(1))
        await wait_all_tasks_blocked()
        # The item began before anybody traced, so its span is missing.
        with ta.telemetry.trace(system, provider):
            may_go.set()
            await wait_all_tasks_blocked()
    spans = exporter.get_finished_spans()
    assert [(span.name, span.parent) for span in spans] == [("then", None), ("sleep_for", None)]


async def test_the_timeline_shows_stages_at_the_same_time(
    system: ta.System, tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "trace.json"
    pipeline = await system.spawn(
        Pipeline,
        PipelineStage(partial(sleep_for, 1), name="a", workers=2),
        PipelineStage(partial(sleep_for, 1), name="b"),
        name="pipe",
    )
    with ta.telemetry.timeline(system, path):
        async with open_results(pipeline, range(5), limit=5) as results:
            assert [result async for result in results] == list(range(5))
        await pipeline.stop()
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rows = Counter(names[event["tid"]] for event in events if event["ph"] == "X")
    assert rows["test/pipe/b"] == 5
    assert rows["test/pipe/a"] + rows["test/pipe/a (2)"] == 5
    slices = {
        name: [
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event["ph"] == "X" and names[event["tid"]] == name
        ]
        for name in ("test/pipe/a", "test/pipe/b")
    }
    assert any(
        begin < other_end and other_begin < end
        for begin, end in slices["test/pipe/a"]
        for other_begin, other_end in slices["test/pipe/b"]
    )
    waited = [
        event["args"]["queued_us"]
        for event in events
        if event["ph"] == "X" and names[event["tid"]] == "test/pipe/b"
    ]
    # The first two are done at once, so the second waits for the first, and so on.
    assert [round(microseconds / 1e6) for microseconds in waited] == [0, 1, 1, 2, 2]


# Objects that cannot be pipelines.


async def nothing(item: int) -> int:
    await trio.lowlevel.checkpoint()
    return item


untyped: Any = Pipeline
untyped_stage: Any = PipelineStage


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (untyped, ValueError, "Pipeline: there must be at least one stage"),
        (lambda: untyped(nothing, 3), TypeError, "Pipeline: stage 1 must be an async callable.*, got 3"),
        (lambda: untyped([nothing]), TypeError, "Pipeline: stage 0 must be an async callable"),
        (lambda: PipelineStage(nothing, capacity=0), ValueError, "capacity must be at least 1, got 0"),
        (lambda: PipelineStage(nothing, workers=0), ValueError, "workers must be at least 1, got 0"),
        (lambda: untyped_stage(nothing, workers=1.5), TypeError, "workers must be an integer, got 1.5"),
        (lambda: PipelineStage(nothing, name=""), ValueError, "name must be a non-empty string"),
        (lambda: PipelineStage(nothing, name="a/b"), ValueError, "without '/', got 'a/b'"),
        (lambda: untyped_stage(nothing, name=3), TypeError, "name must be a string or None, got 3"),
        (
            lambda: PipelineStage(nothing, deadline=0.0),
            ValueError,
            "deadline must be a finite number above 0",
        ),
        (lambda: untyped_stage(nothing, device="cpu"), TypeError, "device must be a Device, got 'cpu'"),
        (lambda: untyped_stage(nothing, retry=3), TypeError, "retry must be a RetryPolicy, got 3"),
        (lambda: untyped_stage("model"), TypeError, "a model is an async callable or the address"),
        (lambda: untyped_stage(nothing, worker=3), TypeError, "did you mean 'workers'"),
        (
            lambda: untyped(PipelineStage(nothing, name="a"), PipelineStage(nothing, name="a")),
            ValueError,
            r"a name of its own, got \['a', 'a'\]",
        ),
        (lambda: RetryPolicy(budget=RetryBudget(), attempts=0), ValueError, "attempts must be at least 1"),
    ],
)
def test_bad_arguments(make: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


async def test_a_synchronous_model_is_reported(system: ta.System) -> None:
    pipeline = await system.spawn(untyped, abs)
    with pytest.raises(TypeError, match="the model abs returned int, and must be async"):
        await pipeline.ask(Submit(-1))


async def test_names_of_stages(system: ta.System) -> None:
    pool = await system.spawn(ReplicaPool[int, int], [Replica(nothing)], name="pool")

    class Nothing:
        async def __call__(self, item: int) -> int:
            return await nothing(item)

    async def anonymous(item: int) -> int:
        return await nothing(item)

    anonymous.__name__ = "<lambda>"
    named = PipelineStage(nothing, name="pool")
    pipeline = await system.spawn(untyped, nothing, partial(nothing), pool, named, anonymous, Nothing())
    assert await pipeline.ask(Submit(1)) == 1
    statistics: PipelineStatistics = await pipeline.ask(GetStatistics())
    assert [stage.name for stage in statistics.stages] == [
        *("nothing", "nothing-1", "pool-2", "pool", "function", "Nothing")
    ]
