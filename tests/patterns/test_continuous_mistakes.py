"""Wrong steps, items and options of the continuous batcher."""

from __future__ import annotations

import math
from typing import Any

import outcome
import pytest
import trio
from continuous import Sequence, Writer, always, ask_all, broken, count, name_of, parts_of, read, spawn
from trio.testing import MockClock

import trio_accel as ta
from trio_accel.patterns import (
    Last,
    ModelOutputError,
    Submit,
    open_parts,
)


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
async def test_invalid_results(
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
async def test_a_result_without_a_list_of_parts_fails_its_own_sequence(
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
        ({"length": always(2.5)}, TypeError, "length of a prompt must be an integer, got 2.5"),
        (
            {"cost": always(math.nan), "max_cost": 5},
            ValueError,
            "cost of an item must be a number .*nan",
        ),
        ({"cost": always(-1), "max_cost": 5}, ValueError, "cost of an item must be a number from 0"),
        ({"cost": always(6), "max_cost": 5}, ValueError, "costs 6, and there are at most 5 at once"),
        ({"priority": always(9)}, ValueError, "priority must be at least -8 and at most 8, got 9"),
        ({"priority": always(0.5)}, TypeError, "priority must be an integer, got 0.5"),
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
        await batcher.ask(Submit(("a", 1)))
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
    assert "tenant 'b' is missing in the weights" in str(results["b"])


async def test_it_refuses_requests_beyond_its_capacity(system: ta.System, autojump_clock: MockClock) -> None:
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
        ({"room": object()}, TypeError, "room must be a Room or None"),
        ({"max_sequences": 0}, ValueError, "max_sequences must be at least 1"),
        ({"max_sequences": 64, "max_positions": 63}, ValueError, "max_positions must be at least 64, got 63"),
        ({"buffer": 0}, ValueError, "buffer must be at least 1"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1"),
        ({"patience": -1.0}, ValueError, "patience must be a finite number of at least 0"),
        ({"splits": -1}, ValueError, "splits must be at least 0"),
        ({"weights": {"a": 0}}, ValueError, "the weight of 'a'"),
        ({"leave": Writer.__call__}, TypeError, "leave must not be async"),
    ],
)
async def test_wrong_options(
    system: ta.System, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await spawn(system, Writer(), **options)


async def test_an_invalid_step_is_refused(system: ta.System, autojump_clock: MockClock) -> None:
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
