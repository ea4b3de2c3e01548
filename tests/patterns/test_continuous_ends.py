"""The end of a continuous batcher, patterns in front of it, swaps, cancellation, figures."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import trio
from cancel_at import cancelled_at_each_step
from continuous import (
    Batcher,
    Fails,
    Sequence,
    Writer,
    always,
    ask,
    cost_of,
    count,
    crash,
    parts_of,
    read,
    spawn,
)
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.patterns import (
    Deployment,
    HotSwap,
    Last,
    ModelRetiredError,
    PartStream,
    ReplicaPool,
    Streamed,
    Submit,
    Swap,
    SwapFailedError,
)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_drain_serves_all(system: ta.System, autojump_clock: MockClock, is_lost: bool) -> None:
    """Also while each other step is lost."""

    def lost(batch: list[Sequence]) -> Exception | None:
        is_now = is_lost and len(writer.batches) % 2
        return ta.ContextLostError("killed", device="cpu:0") if is_now else None

    writer = Writer(lost)
    writer.seconds = 0.2
    batcher = await spawn(system, writer, max_sequences=1)
    results: dict[str, object] = {}
    parts: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, batcher, ("stream", 2), parts)
        nursery.start_soon(ask, batcher, ("a", 2), results)
        await trio.sleep(0.1)
        await batcher.stop(drain=True)
    assert len(writer.batches) == (8 if is_lost else 4)
    assert (results, tuple(parts)) == ({"a": parts_of("a", 2)}, parts_of("stream", 2))
    assert sorted(writer.left) == ["a", "stream"]


@pytest.mark.parametrize("how", ["stop", "crash"])
async def test_an_end_in_the_middle(system: ta.System, autojump_clock: MockClock, how: str) -> None:
    """Those in the batch may have been executed, the others were not; pages are given back once."""
    writer = Writer()
    batcher = await spawn(system, writer, max_sequences=2)
    results: dict[str, object] = {}
    parts: list[str] = []

    async def read_to_the_end() -> None:
        with pytest.raises(ta.ActorFailedError):
            await read(batcher, ("stream", 9), parts)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_to_the_end)
        await wait_all_tasks_blocked()
        for name in "abc":
            nursery.start_soon(ask, batcher, (name, 9), results)
            await wait_all_tasks_blocked()
        await trio.sleep(2.5)
        if how == "stop":
            await batcher.stop()
        else:
            crash(batcher)
    assert parts == ["stream-0", "stream-1"]
    waiting = ta.ActorStoppedError if how == "stop" else ta.ActorRestartingError
    assert {name: type(error) for name, error in results.items()} == {
        "a": ta.ActorFailedError,
        "b": waiting,
        "c": waiting,
    }
    assert sorted(writer.left) == ["a", "stream"]


async def test_patterns_in_front_pass_streams_along(system: ta.System, autojump_clock: MockClock) -> None:
    batchers = [await spawn(system, Writer(), name=f"batcher{number}") for number in range(2)]
    pool = await system.spawn(ReplicaPool[Any, Any], batchers)
    texts: list[list[str]] = [[] for _ in range(4)]
    async with trio.open_nursery() as nursery:
        for number, parts in enumerate(texts):
            nursery.start_soon(read, pool, (f"{number}", 3), parts)
    assert [tuple(parts) for parts in texts] == [parts_of(f"{number}", 3) for number in range(4)]
    assert [(await count(batcher)).answered for batcher in batchers] == [2, 2]


async def test_a_stream_is_of_one_sequence(system: ta.System, autojump_clock: MockClock) -> None:
    batcher = await spawn(system, Writer(), max_sequences=1, capacity=1)
    stream: PartStream[str] = PartStream(lambda count: None)
    results: dict[str, object] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, batcher, ("a", 1), results)
        await wait_all_tasks_blocked()
        nursery.start_soon(ask, batcher, ("b", 1), results)
        await wait_all_tasks_blocked()
        # A refusal leaves the stream as it was.
        with pytest.raises(ta.MailboxFullError):
            await batcher.ask(Submit(Streamed(("c", 1), stream)))
    assert await batcher.ask(Submit(Streamed(("c", 1), stream))) == ("c-0",)
    with pytest.raises(RuntimeError, match="streamed from one place, once"):
        await batcher.ask(Submit(Streamed(("c", 1), stream)))


async def test_a_stream_before_its_beginning_may_be_asked_for_again(
    system: ta.System, autojump_clock: MockClock
) -> None:
    """As a pattern in front does when the batcher restarts."""
    batcher = await spawn(system, Writer(), max_sequences=1)
    stream: PartStream[str] = PartStream(lambda count: None)
    results: dict[str, object] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, batcher, ("a", 9), results)
        await wait_all_tasks_blocked()

        async def streamed() -> None:
            with pytest.raises(ta.ActorRestartingError):
                await batcher.ask(Submit(Streamed(("b", 2), stream)))
            await batcher.ask(Submit(Streamed(("b", 2), stream)))

        nursery.start_soon(streamed)
        await wait_all_tasks_blocked()
        crash(batcher)
    assert tuple(stream.unread) == parts_of("b", 2)


def opening_of(system: ta.System, writer: Writer, name: str) -> Any:
    @asynccontextmanager
    async def opening() -> AsyncGenerator[Batcher, None]:
        batcher = await spawn(system, writer, name=name)
        try:
            yield batcher
        finally:
            with trio.CancelScope(shield=True):
                await batcher.stop(drain=True)

    return opening


async def test_a_swap_by_sequence(system: ta.System, autojump_clock: MockClock) -> None:
    """Old sequences end where they are, streams included; new ones go to the new model."""
    old, new = Writer(), Writer()
    new.parts_of = lambda sequence: Last(["new"])  # type: ignore[method-assign]
    swap = await system.spawn(HotSwap[Any, Any], Deployment[Any, Any](opening_of(system, old, "old")))
    parts: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, swap, ("old", 9), parts)
        await trio.sleep(2.5)

        async def replace() -> None:
            done = await swap.ask(Swap(opening_of(system, new, "new"), "2"))
            # It ends when the last old sequence has: after 9 steps.
            assert done.drain_time == pytest.approx(6.5)

        nursery.start_soon(replace)
        await wait_all_tasks_blocked()
        assert await swap.ask(Submit(("late", 3))) == ("new",)
        with pytest.raises(SwapFailedError, match="is not closed yet"):
            await swap.ask(Swap(opening_of(system, Writer(), "third"), "3"))
    assert tuple(parts) == parts_of("old", 9)
    assert old.left == ["old"]
    names = {node.name for node in system.tree().find("test").children}
    assert "new" in names
    assert "old" not in names


async def test_a_kill_during_a_swap(system: ta.System, autojump_clock: MockClock) -> None:
    """The device loses its context while both models are there: no stream ends, none has a part twice."""
    lost: dict[str, int] = {"old": 0, "new": 0}

    def losing(name: str) -> Fails:
        def fails(batch: list[Sequence]) -> Exception | None:
            lost[name] += 1
            return ta.ContextLostError("killed", device="cpu:0") if lost[name] % 2 else None

        return fails

    old, new = Writer(losing("old")), Writer(losing("new"))
    swap = await system.spawn(HotSwap[Any, Any], Deployment[Any, Any](opening_of(system, old, "old")))
    first: list[str] = []
    second: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, swap, ("a", 5), first)
        await trio.sleep(3.5)
        nursery.start_soon(swap.ask, Swap(opening_of(system, new, "new"), "2"))
        await wait_all_tasks_blocked()
        nursery.start_soon(read, swap, ("b", 5), second)
    assert (tuple(first), tuple(second)) == (parts_of("a", 5), parts_of("b", 5))
    assert (old.left, new.left) == (["a"], ["b"])
    assert min(lost.values()) >= 10


async def test_an_old_model_that_takes_too_long(system: ta.System, autojump_clock: MockClock) -> None:
    """Its streams end with an error after their parts, and give back their resources."""
    old = Writer()
    deployment = Deployment[Any, Any](opening_of(system, old, "old"))
    swap = await system.spawn(HotSwap[Any, Any], deployment, drain_for=3.0)
    parts: list[str] = []
    async with trio.open_nursery() as nursery:

        async def read_long() -> None:
            with pytest.raises(ModelRetiredError):
                await read(swap, ("long", 100), parts)

        nursery.start_soon(read_long)
        await trio.sleep(2.5)
        await swap.ask(Swap(opening_of(system, Writer(), "new"), "2"))
    assert tuple(parts) == parts_of("long", 5)
    assert old.left == ["long"]


async def test_cancelled_at_each_step(system: ta.System) -> None:
    writer = Writer()
    writer.seconds = 0
    batcher = await spawn(system, writer, length=always(3), max_sequences=2, max_positions=2)
    tasks = trio.lowlevel.current_statistics().tasks_living
    others: list[list[str]] = []
    attempts = cancelled = 0
    async with trio.open_nursery() as nursery:

        async def attempt() -> None:
            others.append([])
            nursery.start_soon(read, batcher, ("other", 3), others[-1])
            seen: list[str] = []
            try:
                await read(batcher, ("a", 4), seen)
            finally:
                assert tuple(seen) == parts_of("a", 4)[: len(seen)]

        async with aclosing(cancelled_at_each_step(attempt)) as each:
            async for is_cancelled in each:
                attempts += 1
                cancelled += is_cancelled
                assert tuple(others[-1]) == parts_of("other", 3)
                statistics = await count(batcher)
                assert (statistics.in_flight, statistics.waiting, statistics.failed) == (0, 0, 0)
                assert statistics.answered + statistics.cancelled == statistics.requests
                node = system.tree().find(batcher.path)
                assert (node.deferred, node.restarts) == (0, 0)
                assert trio.lowlevel.current_statistics().tasks_living == tasks
    assert cancelled > 20
    assert writer.seen == set()
    assert writer.left.count("other") == attempts
    assert writer.left.count("a") > 20


async def test_its_figures(system: ta.System, autojump_clock: MockClock) -> None:
    writer = Writer()
    batcher = await spawn(system, writer, cost=cost_of, max_cost=6, length=always(3), max_positions=64)
    results: dict[str, object] = {}
    async with trio.open_nursery() as nursery:
        for name, many in (("a", 2), ("b", 4), ("c", 4)):
            nursery.start_soon(ask, batcher, (name, many), results)
            await wait_all_tasks_blocked()
        await trio.sleep(0.5)
        found = {
            (one.name, *(value for _, value in one.labels)): one
            for one in system.tree().find("test/batcher").readings
        }
        values = {key: one.value for key, one in found.items()}
        assert values["sequences", "running"] == 2
        assert values["sequences", "waiting"] == 1
        assert values["sequence_cost",] == 6
    found = {
        (one.name, *(value for _, value in one.labels)): one
        for one in system.tree().find("test/batcher").readings
    }
    assert found["parts",].value == 10
    assert found["requests", "answered"].value == 3
    assert found["sequence_cost",].value == 0
    # a on its own; then two at a time until a and b have left.
    sizes, firsts, waits = (
        found["batch_size",],
        found["time_to_first_part_seconds",],
        found["queue_wait_seconds",],
    )
    assert sizes.value == sum(map(len, writer.batches))
    assert sum(sizes.counts) == len(writer.batches)
    assert sum(firsts.counts) == sum(waits.counts) == 3
    assert {one.kind for one in found.values()} == {"counter", "gauge", "histogram"}
