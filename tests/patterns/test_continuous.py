"""The continuous batcher: streams, failures, losses."""

from __future__ import annotations

import math

import pytest
import trio
from continuous import Sequence, Writer, always, ask, ask_all, cost_of, count, parts_of, read, spawn
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.patterns import (
    Submit,
    open_parts,
)


async def test_sequences_join_and_leave_between_two_steps(
    system: ta.System, autojump_clock: MockClock
) -> None:
    writer = Writer()
    batcher = await spawn(system, writer)
    results: dict[str, object] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, batcher, ("a", 4), results)
        await trio.sleep(0.5)
        nursery.start_soon(ask, batcher, ("b", 2), results)
        await trio.sleep(1)
        nursery.start_soon(ask, batcher, ("c", 2), results)
    assert writer.batches == [["a"], ["a", "b"], ["a", "b", "c"], ["a", "c"]]
    assert results == {"a": parts_of("a", 4), "b": parts_of("b", 2), "c": parts_of("c", 2)}
    assert writer.left == ["b", "a", "c"]
    seen = await count(batcher)
    assert (seen.steps, seen.parts, seen.answered, seen.repeated) == (4, 8, 3, 0)


async def test_a_stream_has_each_part_as_soon_as_it_is_ready(
    system: ta.System, autojump_clock: MockClock
) -> None:
    batcher = await spawn(system, Writer())
    times: list[float] = []
    start = trio.current_time()
    async with open_parts(batcher, ("a", 3)) as stream:
        with pytest.raises(RuntimeError, match="has not ended"):
            _ = stream.parts
        times += [trio.current_time() - start async for _ in stream]
    assert times == pytest.approx([1, 2, 3])
    assert stream.parts == parts_of("a", 3)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_slow_reader_holds_up_only_its_own_sequence(
    system: ta.System, autojump_clock: MockClock
) -> None:
    writer = Writer()
    batcher = await spawn(system, writer, buffer=3)
    slow: list[str] = []
    fast: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, batcher, ("slow", 6), slow, 10.0)
        nursery.start_soon(read, batcher, ("fast", 6), fast)
        await trio.sleep(9.9)
        # One was read, and three are in advance.
        assert len(slow) == 1
        assert sum("slow" in batch for batch in writer.batches) == 4
        assert tuple(fast) == parts_of("fast", 6)
    assert tuple(slow) == parts_of("slow", 6)


async def test_a_reader_that_never_reads(system: ta.System, autojump_clock: MockClock) -> None:
    writer = Writer()
    batcher = await spawn(system, writer, buffer=2)
    async with open_parts(batcher, ("idle", 100)) as stream:
        results = await ask_all(batcher, [("a", 5), ("b", 5)])
        assert results == {"a": parts_of("a", 5), "b": parts_of("b", 5)}
        assert sum("idle" in batch for batch in writer.batches) == 2
        assert len(stream.unread) == 2
        seen = await count(batcher)
        assert seen.in_flight == 1
        assert "idle" not in writer.left
    assert writer.left == ["a", "b", "idle"]


async def test_who_leaves_makes_room_while_no_step_runs(system: ta.System, autojump_clock: MockClock) -> None:
    """A request with a place that does not read; then a request that had its turn, and did not fit."""
    writer = Writer()
    batcher = await spawn(system, writer, buffer=1, cost=cost_of, max_cost=10)
    results: dict[str, object] = {}
    async with trio.open_nursery() as nursery:
        async with open_parts(batcher, ("idle", 5)):
            await trio.sleep(2)
            scope = trio.CancelScope()

            async def ask_big() -> None:
                with scope:
                    await batcher.ask(Submit(("big", 6)))

            nursery.start_soon(ask_big)
            await wait_all_tasks_blocked()
            nursery.start_soon(ask, batcher, ("small", 5), results)
            await wait_all_tasks_blocked()
            assert (await count(batcher)).waiting == 2
            scope.cancel()
            await trio.sleep(10)
            assert results == {"small": parts_of("small", 5)}
            nursery.start_soon(ask, batcher, ("late", 6), results)
            await trio.sleep(10)
            assert "late" not in results
        left_at = trio.current_time()
    assert trio.current_time() - left_at == pytest.approx(6)
    assert results["late"] == parts_of("late", 6)
    assert writer.left == ["small", "idle", "late"]


async def test_a_reader_that_leaves_is_in_no_further_step(
    system: ta.System, autojump_clock: MockClock
) -> None:
    writer = Writer()
    batcher = await spawn(system, writer)
    results: dict[str, object] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, batcher, ("a", 6), results)
        async with open_parts(batcher, ("gone", 100)) as stream:
            await anext(stream)
            await trio.sleep(0.5)
            left_at = trio.current_time()
        # It does not wait for the step, and its pages are given back when no step uses them.
        assert trio.current_time() == left_at
        assert writer.left == []
        await trio.sleep(0.6)
        assert writer.left == ["gone"]
    assert sum("gone" in batch for batch in writer.batches) == 2
    assert results == {"a": parts_of("a", 6)}
    seen = await count(batcher)
    assert (seen.cancelled, seen.answered) == (1, 1)


async def test_a_step_that_nobody_waits_for_is_cancelled(
    system: ta.System, autojump_clock: MockClock
) -> None:
    writer = Writer()
    writer.seconds = math.inf
    batcher = await spawn(system, writer)
    with trio.move_on_after(3) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(batcher.ask, Submit(("a", 1)))
            nursery.start_soon(batcher.ask, Submit(("b", 1)))
    assert scope.cancelled_caught
    await wait_all_tasks_blocked()
    assert len(writer.batches) == 1
    assert sorted(writer.left) == ["a", "b"]
    writer.seconds = 1
    assert await batcher.ask(Submit(("c", 1))) == ("c-0",)


async def test_a_deadline_takes_a_sequence_out(system: ta.System, autojump_clock: MockClock) -> None:
    writer = Writer()
    batcher = await spawn(system, writer)
    parts: list[str] = []
    with trio.move_on_after(2.5) as scope:
        await read(batcher, ("a", 100), parts)
    assert scope.cancelled_caught
    assert parts == ["a-0", "a-1"]
    await trio.sleep(5)
    assert (writer.left, len(writer.batches)) == (["a"], 3)


async def test_two_readers_of_one_stream(system: ta.System, autojump_clock: MockClock) -> None:
    batcher = await spawn(system, Writer())
    parts: list[str] = []
    async with open_parts(batcher, ("a", 2)) as stream, trio.open_nursery() as nursery:

        async def first() -> None:
            parts.extend([part async for part in stream])

        nursery.start_soon(first)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError, match="another task reads"):
            await anext(stream)
    assert tuple(parts) == parts_of("a", 2)


async def test_a_cancelled_reader_loses_no_part(system: ta.System, autojump_clock: MockClock) -> None:
    batcher = await spawn(system, Writer())
    parts: list[str] = []
    async with open_parts(batcher, ("a", 4)) as stream:
        while len(parts) < 4:
            with trio.move_on_after(0.3):
                parts.append(await anext(stream))
    assert tuple(parts) == parts_of("a", 4)


async def test_an_error_follows_the_parts_before_it(system: ta.System, autojump_clock: MockClock) -> None:
    """A step that raises at the third part of one sequence."""

    def third_of_bad(batch: list[Sequence]) -> Exception | None:
        bad = [one for one in batch if one.item[0] == "bad" and len(one.parts) == 2]
        return OSError("no third part") if bad else None

    writer = Writer(third_of_bad)
    batcher = await spawn(system, writer)
    bad: list[str] = []
    others: list[list[str]] = [[] for _ in range(6)]
    async with trio.open_nursery() as nursery:
        for number, parts in enumerate(others):
            nursery.start_soon(read, batcher, (f"good{number}", 5), parts)
        with pytest.raises(OSError, match="no third part"):
            # It reads slowly, so the error is there before the parts are read.
            await read(batcher, ("bad", 5), bad, 30.0)
    assert bad == ["bad-0", "bad-1"]
    assert [tuple(parts) for parts in others] == [parts_of(f"good{number}", 5) for number in range(6)]
    assert sorted(writer.left) == sorted(["bad", *(f"good{number}" for number in range(6))])
    seen = await count(batcher)
    assert (seen.failed, seen.answered) == (1, 6)


async def test_a_step_that_always_fails_is_called_a_few_times(
    system: ta.System, autojump_clock: MockClock
) -> None:
    writer = Writer(lambda batch: OSError("broken"))
    batcher = await spawn(system, writer)
    results = await ask_all(batcher, [("first", 1), *((f"{number}", 1) for number in range(8))])
    errors = list(results.values())
    assert [type(error) for error in errors] == [OSError] * 9
    assert len({id(error) for error in errors}) == 9
    # The first on its own; then the batch and its halves.
    assert [len(batch) for batch in writer.batches] == [1, 8, 4, 4]


@pytest.mark.parametrize(
    "loss",
    [
        ta.ContextLostError("lost", device="cpu:0"),
        ta.ContextPoisonedError("lost", device="cpu:0"),
        ta.QueueFullError("full", device="cpu:0"),
        ta.ActorFailedError("crashed", path="demo/model"),
        ta.ActorRestartingError("restarts", path="demo/model"),
        ta.MailboxFullError("full", path="demo/model"),
        ExceptionGroup("several", [ta.ContextLostError("lost", device="cpu:0")]),
    ],
    ids=lambda loss: type(loss).__name__,
)
async def test_streams_go_on_after_a_loss(
    system: ta.System, autojump_clock: MockClock, loss: Exception
) -> None:
    losing = [3, 4, 5, 8]
    seen_at: list[list[tuple[str, int, int]]] = []

    def lost(batch: list[Sequence]) -> Exception | None:
        seen_at.append([(one.item[0], one.done, one.chunk) for one in batch])
        return loss if len(seen_at) in losing else None

    writer = Writer(lost)
    batcher = await spawn(system, writer, length=always(7), max_positions=64)
    one: list[str] = []
    two: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, batcher, ("one", 6), one)
        nursery.start_soon(read, batcher, ("two", 6), two)
    assert (tuple(one), tuple(two)) == (parts_of("one", 6), parts_of("two", 6))
    for number in losing:
        # The same sequences, at the same places.
        assert seen_at[number] == seen_at[number - 1]
    seen = await count(batcher)
    assert (seen.repeated, seen.failed, seen.answered) == (4, 0, 2)
    assert sorted(writer.left) == ["one", "two"]


async def test_a_step_lost_again_and_again_fails_its_sequences(
    system: ta.System, autojump_clock: MockClock
) -> None:
    writer = Writer(lambda batch: ta.ContextLostError("lost", device="cpu:0"))
    writer.seconds = 0
    batcher = await spawn(system, writer, patience=0.05)
    start = trio.current_time()
    results = await ask_all(batcher, [("a", 2)])
    assert isinstance(results["a"], ta.ContextLostError)
    assert trio.current_time() - start == pytest.approx(0.01 + 0.02 + 0.04)
    assert writer.batches == [["a"]] * 4
    writer.fails = lambda batch: None
    assert await batcher.ask(Submit(("b", 2))) == parts_of("b", 2)
    assert (await count(await spawn(system, writer, name="other"))).requests == 0


async def test_who_leaves_while_a_step_is_repeated_is_in_no_call_of_it(
    system: ta.System, autojump_clock: MockClock
) -> None:
    writer = Writer(lambda batch: ta.QueueFullError("full", device="cpu:0"))
    batcher = await spawn(system, writer, patience=100)
    results: dict[str, object] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, batcher, ("a", 2), results)
        with trio.move_on_after(8):
            await batcher.ask(Submit(("gone", 2)))
        await trio.sleep(3)
        assert writer.left == ["gone"]
        assert writer.batches[-1] == ["a"]
        writer.fails = lambda batch: None
    assert results == {"a": parts_of("a", 2)}


async def test_a_sequence_to_blame_for_a_loss_fails_alone(
    system: ta.System, autojump_clock: MockClock
) -> None:
    blamed = ta.ContextPoisonedError("lost", device="cpu:0", is_to_blame=True)
    writer = Writer(lambda batch: blamed if "bad" in [one.item[0] for one in batch] else None)
    batcher = await spawn(system, writer)
    results = await ask_all(batcher, [("a", 3), ("b", 3), ("bad", 3), ("c", 3)])
    assert isinstance(results.pop("bad"), ta.ContextPoisonedError)
    assert results == {name: parts_of(name, 3) for name in "abc"}
    # It is not repeated as it is, but divided.
    assert (await count(batcher)).repeated == 0
