"""The continuous batcher: streams, failures, losses, what a step may do wrong, its end, swaps."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import outcome
import pytest
import trio
from cancel_at import cancelled_at_each_step
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.actors._ref import cell_behind
from trio_accel.patterns import (
    Call,
    ContinuousBatcher,
    ContinuousStatistics,
    Deployment,
    GetStatistics,
    HotSwap,
    Last,
    ModelOutputError,
    ModelRetiredError,
    PartStream,
    ReplicaPool,
    RunningSequence,
    Streamed,
    Swap,
    SwapFailedError,
    open_parts,
)

# An item is a pair: a name, and how many parts its sequence has.
Item = tuple[str, int]
Sequence = RunningSequence[Item, str]
Fails = Callable[[list[Sequence]], Exception | None]
Batcher = ta.Ref[ContinuousBatcher[Item, str]]


class Writer:
    """A step of a second that gives each sequence the parts ``name-0``, ``name-1`` and so on."""

    def __init__(self, fails: Fails = lambda batch: None) -> None:
        self.batches: list[list[str]] = []
        self.left: list[str] = []
        self.seen: set[Sequence] = set()
        self.fails: Fails = fails
        self.seconds = 1.0

    async def __call__(self, batch: list[Sequence]) -> list[Any]:
        self.batches.append([sequence.item[0] for sequence in batch])
        self.seen.update(batch)
        await trio.sleep(self.seconds)
        error = self.fails(batch)
        if error is not None:
            raise error
        return [self.parts_of(sequence) for sequence in batch]

    def parts_of(self, sequence: Sequence) -> Any:
        if not sequence.gives_part:
            return []
        name, many = sequence.item
        part = f"{name}-{len(sequence.parts)}"
        return Last([part]) if len(sequence.parts) + 1 == many else [part]

    def leave(self, sequence: Sequence) -> None:
        self.left.append(sequence.item[0])
        # Each once, and only what a step may have seen.
        self.seen.remove(sequence)


def always(value: Any) -> Callable[[Item], Any]:
    def of(item: Item) -> Any:
        return value

    return of


def name_of(item: Item) -> str:
    return item[0]


def cost_of(item: Item) -> float:
    return float(item[1])


def broken(item: Item) -> Any:
    raise IndexError("out of range")


async def spawn(system: ta.System, step: object, **options: Any) -> Batcher:
    if isinstance(step, Writer):
        options = {"leave": step.leave, **options}
    options = {"name": "batcher", **options}
    batcher = await system.spawn(ContinuousBatcher[Item, str], step, **options)  # type: ignore[arg-type]
    # From here on it waits, so that requests which come in one turn of the loop begin in one step.
    await wait_all_tasks_blocked()
    return batcher


async def ask(batcher: Batcher, item: Item, results: dict[str, object]) -> None:
    try:
        results[item[0]] = await batcher.ask(Call(item))
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the outcome
        results[item[0]] = error


async def ask_all(batcher: Batcher, items: list[Item]) -> dict[str, object]:
    """Ask for several at once: the results, or the errors."""
    results: dict[str, object] = {}
    async with trio.open_nursery() as nursery:
        for item in items:
            nursery.start_soon(ask, batcher, item, results)
            # In this order: Trio shuffles tasks.
            await wait_all_tasks_blocked()
    return results


def crash(batcher: Batcher) -> None:
    incarnation = cell_behind(batcher).incarnation
    assert incarnation is not None
    incarnation.crash(OSError("a bug"))


async def read(batcher: Any, item: Item, parts: list[str], pause: float = 0.0) -> None:
    async with open_parts(batcher, item) as stream:
        async for part in stream:
            parts.append(part)
            await trio.sleep(pause)
    assert stream.parts == tuple(parts)


def parts_of(name: str, many: int) -> tuple[str, ...]:
    return tuple(f"{name}-{number}" for number in range(many))


async def count(batcher: Any) -> ContinuousStatistics:
    seen: ContinuousStatistics = await batcher.ask(GetStatistics())
    ended = seen.answered + seen.failed + seen.cancelled + seen.refused
    assert seen.requests == seen.waiting + seen.in_flight + ended
    return seen


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


async def test_a_stream_has_each_part_as_soon_as_it_is_there(
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
        # One was read, and three are ahead.
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
    """One that had a place and does not read; then one that had its turn, and did not fit."""
    writer = Writer()
    batcher = await spawn(system, writer, buffer=1, cost=cost_of, max_cost=10)
    results: dict[str, object] = {}
    async with trio.open_nursery() as nursery:
        async with open_parts(batcher, ("idle", 5)):
            await trio.sleep(2)
            scope = trio.CancelScope()

            async def ask_big() -> None:
                with scope:
                    await batcher.ask(Call(("big", 6)))

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
        # It does not wait for the step, and its pages are given back when no step has it.
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
            nursery.start_soon(batcher.ask, Call(("a", 1)))
            nursery.start_soon(batcher.ask, Call(("b", 1)))
    assert scope.cancelled_caught
    await wait_all_tasks_blocked()
    assert len(writer.batches) == 1
    assert sorted(writer.left) == ["a", "b"]
    writer.seconds = 1
    assert await batcher.ask(Call(("c", 1))) == ("c-0",)


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


async def test_an_error_comes_behind_the_parts_before_it(
    system: ta.System, autojump_clock: MockClock
) -> None:
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
    # The first alone; then the batch and its halves.
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


async def test_a_step_that_is_lost_again_and_again_fails_its_sequences(
    system: ta.System, autojump_clock: MockClock
) -> None:
    writer = Writer(lambda batch: ta.ContextLostError("lost", device="cpu:0"))
    writer.seconds = 0
    batcher = await spawn(system, writer, retry=3)
    start = trio.current_time()
    results = await ask_all(batcher, [("a", 2)])
    assert isinstance(results["a"], ta.ContextLostError)
    assert trio.current_time() - start == pytest.approx(0.01 + 0.02 + 0.04)
    assert writer.batches == [["a"]] * 4
    writer.fails = lambda batch: None
    assert await batcher.ask(Call(("b", 2))) == parts_of("b", 2)
    assert (await count(await spawn(system, writer, name="other"))).requests == 0


async def test_who_leaves_while_a_step_is_repeated_is_in_no_call_of_it(
    system: ta.System, autojump_clock: MockClock
) -> None:
    writer = Writer(lambda batch: ta.QueueFullError("full", device="cpu:0"))
    batcher = await spawn(system, writer, retry=100)
    results: dict[str, object] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, batcher, ("a", 2), results)
        with trio.move_on_after(8):
            await batcher.ask(Call(("gone", 2)))
        await trio.sleep(3)
        assert writer.left == ["gone"]
        assert writer.batches[-1] == ["a"]
        writer.fails = lambda batch: None
    assert results == {"a": parts_of("a", 2)}


async def test_a_sequence_that_is_to_blame_for_a_loss_fails_alone(
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


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ([["x"]], "1 result"),
        ([["x"], ["x"], ["x"]], "3 result"),
        (None, "NoneType"),
        ("ab", "str"),
        ({"a": 1}, "dict"),
    ],
    ids=repr,
)
async def test_results_that_are_none(
    system: ta.System, autojump_clock: MockClock, returned: object, text: str
) -> None:
    async def step(batch: list[Sequence]) -> object:
        await trio.sleep(1)
        return returned if len(batch) == 2 else [["first"]]

    batcher = await spawn(system, step)
    results = await ask_all(batcher, [("a", 1), ("b", 1)])
    assert [type(error) for error in results.values()] == [ModelOutputError] * 2
    assert all(f"the model returned {text}" in str(error) for error in results.values())
    assert (await count(batcher)).failed == 2


@pytest.mark.parametrize("bad", ["text", None, 3, Last("text"), b"x", {"a": 1}, {1}, outcome.Value([1])])
async def test_a_result_that_is_no_list_of_parts_fails_its_own_sequence(
    system: ta.System, autojump_clock: MockClock, bad: object
) -> None:
    writer = Writer()

    async def step(batch: list[Sequence]) -> list[Any]:
        results = await writer(batch)
        return [
            bad if sequence.item[0] == "bad" and len(sequence.parts) == 2 else result
            for sequence, result in zip(batch, results, strict=True)
        ]

    batcher = await spawn(system, step, leave=writer.leave)
    results = await ask_all(batcher, [("a", 4), ("bad", 4)])
    assert results["a"] == parts_of("a", 4)
    assert isinstance(results["bad"], ModelOutputError)
    assert "for a sequence; let it return a list of parts" in str(results["bad"])
    assert sorted(writer.left) == ["a", "bad"]


async def test_an_error_in_its_place_is_of_one_sequence(system: ta.System, autojump_clock: MockClock) -> None:
    async def step(batch: list[Sequence]) -> list[Any]:
        await trio.sleep(1)
        return [
            outcome.Error(OSError("bad")) if sequence.item[0] == "bad" else Last(("x", "y"))
            for sequence in batch
        ]

    batcher = await spawn(system, step)
    results = await ask_all(batcher, [("a", 1), ("bad", 1)])
    assert results["a"] == ("x", "y")
    assert isinstance(results["bad"], OSError)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"length": always(0)}, ValueError, "length of a prompt must be at least 1 and .*, got 0"),
        ({"length": always(-3)}, ValueError, "length of a prompt must be at least 1 and .*, got -3"),
        ({"length": always(2.5)}, TypeError, "length of a prompt must be a whole number, got 2.5"),
        (
            {"cost": always(math.nan), "max_cost": 5},
            ValueError,
            "cost of an item must be a number .*nan",
        ),
        ({"cost": always(-1), "max_cost": 5}, ValueError, "cost of an item must be a number from 0"),
        ({"cost": always(6), "max_cost": 5}, ValueError, "costs 6, and all in the batch at most 5"),
        ({"priority": always(9)}, ValueError, "priority must be at least -8 and at most 8, got 9"),
        ({"priority": always(0.5)}, TypeError, "priority must be a whole number, got 0.5"),
        ({"tenant": always([])}, TypeError, "unhashable"),
        ({"length": broken}, IndexError, "out of range"),
    ],
)
async def test_an_item_that_can_never_be_served_is_refused(
    system: ta.System, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    writer = Writer()
    batcher = await spawn(system, writer, **options)
    with pytest.raises(error, match=text):
        await batcher.ask(Call(("a", 1)))
    with pytest.raises(error, match=text):
        await read(batcher, ("a", 1), [])
    seen = await count(batcher)
    assert (seen.refused, seen.steps, seen.cost) == (2, 0, 0)
    assert (writer.batches, writer.left) == ([], [])


async def test_tenants_without_a_weight_are_refused(system: ta.System, autojump_clock: MockClock) -> None:
    weights = ta.patterns.Weights({"a": 1.0}, default=None)
    batcher = await spawn(system, Writer(), tenant=name_of, weights=weights)
    results = await ask_all(batcher, [("a", 1), ("b", 1)])
    assert results["a"] == ("a-0",)
    assert isinstance(results["b"], ta.patterns.UnknownTenantError)
    assert "tenant 'b' has no weight" in str(results["b"])


async def test_beyond_its_capacity_it_refuses(system: ta.System, autojump_clock: MockClock) -> None:
    writer = Writer()
    batcher = await spawn(system, writer, capacity=2, max_sequences=1)
    results = await ask_all(batcher, [("a", 2), ("b", 1), ("c", 1), ("d", 1)])
    assert isinstance(results.pop("d"), ta.MailboxFullError)
    assert results == {"a": parts_of("a", 2), "b": ("b-0",), "c": ("c-0",)}
    assert writer.batches == [["a"], ["a"], ["b"], ["c"]]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_cost": 3}, ValueError, "cost and max_cost go together"),
        ({"cost": len}, ValueError, "cost and max_cost go together"),
        ({"cost": len, "max_cost": math.nan}, ValueError, "max_cost must be a finite number above 0"),
        ({"max_sequences": 0}, ValueError, "max_sequences must be at least 1"),
        ({"max_sequences": 64, "max_positions": 63}, ValueError, "max_positions must be at least 64, got 63"),
        ({"buffer": 0}, ValueError, "buffer must be at least 1"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1"),
        ({"retry": -1}, ValueError, "retry must be at least 0"),
        ({"splits": -1}, ValueError, "splits must be at least 0"),
        ({"weights": {"a": 0}}, ValueError, "the weight of 'a'"),
        ({"leave": Writer.__call__}, TypeError, "leave must not be async"),
    ],
)
async def test_options_that_are_wrong(
    system: ta.System, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await spawn(system, Writer(), **options)


async def test_what_is_no_step_is_refused(system: ta.System, autojump_clock: MockClock) -> None:
    with pytest.raises(TypeError, match="a model is an async callable"):
        await spawn(system, 3)

    def not_async(batch: list[Sequence]) -> list[list[str]]:
        return [[] for _ in batch]

    batcher = await spawn(system, not_async)
    results = await ask_all(batcher, [("a", 1)])
    assert "must be async" in str(results["a"])
    with pytest.raises(TypeError, match="a model is"):
        async with open_parts(3, ("a", 1)):  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            pass


async def test_a_leave_that_fails_is_logged_and_disturbs_nobody(
    system: ta.System, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(sequence: Sequence) -> None:
        raise OSError("no pages")

    batcher = await spawn(system, Writer(), leave=leave)
    results = await ask_all(batcher, [("a", 2), ("b", 3)])
    assert results == {"a": parts_of("a", 2), "b": parts_of("b", 3)}
    assert caplog.text.count("`leave` failed") == 2
    assert system.tree().find("test/batcher").restarts == 0


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_drain_goes_through_all(system: ta.System, autojump_clock: MockClock, is_lost: bool) -> None:
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
    stream: PartStream[str] = PartStream()
    results: dict[str, object] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, batcher, ("a", 1), results)
        await wait_all_tasks_blocked()
        nursery.start_soon(ask, batcher, ("b", 1), results)
        await wait_all_tasks_blocked()
        # A refusal leaves the stream as it was.
        with pytest.raises(ta.MailboxFullError):
            await batcher.ask(Call(Streamed(("c", 1), stream)))
    assert await batcher.ask(Call(Streamed(("c", 1), stream))) == ("c-0",)
    with pytest.raises(RuntimeError, match="streamed from one place, once"):
        await batcher.ask(Call(Streamed(("c", 1), stream)))


async def test_a_stream_that_was_not_begun_may_be_asked_for_again(
    system: ta.System, autojump_clock: MockClock
) -> None:
    """As a pattern in front does when the batcher restarts."""
    batcher = await spawn(system, Writer(), max_sequences=1)
    stream: PartStream[str] = PartStream()
    results: dict[str, object] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, batcher, ("a", 9), results)
        await wait_all_tasks_blocked()

        async def streamed() -> None:
            with pytest.raises(ta.ActorRestartingError):
                await batcher.ask(Call(Streamed(("b", 2), stream)))
            await batcher.ask(Call(Streamed(("b", 2), stream)))

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
        assert await swap.ask(Call(("late", 3))) == ("new",)
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
    """Its streams end with an error behind their parts, and give back what they hold."""
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
    # a alone; then two at a time until a and b have left.
    sizes, firsts, waits = (
        found["batch_size",],
        found["time_to_first_part_seconds",],
        found["queue_wait_seconds",],
    )
    assert sizes.value == sum(map(len, writer.batches))
    assert sum(sizes.counts) == len(writer.batches)
    assert sum(firsts.counts) == sum(waits.counts) == 3
    assert {one.kind for one in found.values()} == {"counter", "gauge", "histogram"}
