"""Steps of a continuous batcher called while the one before them runs."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from continuous import Sequence, Writer, ask, ask_all, count, parts_of, read, spawn
from trio.testing import MockClock

import trio_accel as ta


class Ahead(Writer):
    """A `Writer` with parts that follow only from the positions; it notes the number of concurrent steps."""

    def __init__(self, fails: Any = lambda batch: None) -> None:
        super().__init__(fails)
        self.running = self.most = 0

    async def __call__(self, batch: list[Sequence]) -> list[Any]:
        self.running += 1
        self.most = max(self.most, self.running)
        results = [self.parts_of(sequence) for sequence in batch]
        self.batches.append([sequence.item[0] for sequence in batch])
        self.seen.update(batch)
        error = self.fails(batch)
        try:
            await trio.sleep(self.seconds)
        finally:
            self.running -= 1
        if error is not None:
            raise error
        return results

    def parts_of(self, sequence: Sequence) -> Any:
        if not sequence.gives_part:
            return []
        name, many = sequence.item
        place = len(sequence.parts) + sequence.steps_ahead
        self.check(sequence)
        return [f"{name}-{place}"] if place + 1 < many else self.last(f"{name}-{place}", place + 1 == many)

    def check(self, sequence: Sequence) -> None:
        assert len(sequence.parts) == sequence.done + sequence.chunk - sequence.length

    def last(self, part: str, is_last: bool) -> Any:
        return ta.patterns.Last([part]) if is_last else []


async def test_the_next_step_runs_next_to_each(system: ta.System, autojump_clock: MockClock) -> None:
    writer = Ahead()
    batcher = await spawn(system, writer, steps_ahead=1)
    began = trio.current_time()
    results = await ask_all(batcher, [("a", 9), ("b", 4)])
    assert results == {name: parts_of(name, many) for name, many in (("a", 9), ("b", 4))}
    # The prompts of both, and then pairs of steps.
    assert trio.current_time() - began < 8
    assert writer.most == 2
    await trio.sleep(2)
    assert sorted(writer.left) == ["a", "b"]
    assert writer.running == 0


async def test_without_it_one_step_runs_at_a_time(system: ta.System, autojump_clock: MockClock) -> None:
    writer = Ahead()
    batcher = await spawn(system, writer)
    assert await ask_all(batcher, [("a", 5)]) == {"a": parts_of("a", 5)}
    assert writer.most == 1


async def test_a_prompt_waits_for_no_more_than_the_steps_that_run(
    system: ta.System, autojump_clock: MockClock
) -> None:
    writer = Ahead()
    batcher = await spawn(system, writer, steps_ahead=1)
    results: dict[str, object] = {}
    parts: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, batcher, ("long", 12), results)
        await trio.sleep(3.5)
        began = trio.current_time()
        async with ta.patterns.open_parts(batcher, ("short", 2)) as stream:
            parts.append(await anext(stream))
        assert trio.current_time() - began <= 2.5
    assert parts == ["short-0"]
    assert results == {"long": parts_of("long", 12)}


@pytest.mark.parametrize("number", range(2, 7))
async def test_a_lost_step_takes_the_next_one_with_it(
    system: ta.System, autojump_clock: MockClock, number: int
) -> None:
    def lost(batch: list[Sequence]) -> Exception | None:
        is_now = len(writer.batches) == number
        return ta.ContextLostError("killed", device="cpu:0") if is_now else None

    writer = Ahead(lost)
    batcher = await spawn(system, writer, steps_ahead=1)
    assert await ask_all(batcher, [("a", 6), ("b", 6)]) == {name: parts_of(name, 6) for name in "ab"}
    assert (await count(batcher)).repeated == 1


async def test_only_the_bad_sequence_fails(system: ta.System, autojump_clock: MockClock) -> None:
    def bad(batch: list[Sequence]) -> Exception | None:
        named = {one.item[0]: len(one.parts) + one.steps_ahead for one in batch}
        return ta.programs.Refused("bad") if named.get("b", 0) == 3 else None

    writer = Ahead(bad)
    batcher = await spawn(system, writer, steps_ahead=1)
    results = await ask_all(batcher, [("a", 7), ("b", 7), ("c", 7)])
    assert isinstance(results.pop("b"), ta.programs.Refused)
    assert results == {name: parts_of(name, 7) for name in "ac"}
    await trio.sleep(2)
    assert sorted(writer.left) == ["a", "b", "c"]


@pytest.mark.parametrize("buffer", [1, 2, 3])
async def test_a_slow_reader_holds_its_own_sequence(
    system: ta.System, autojump_clock: MockClock, buffer: int
) -> None:
    writer = Ahead()
    batcher = await spawn(system, writer, steps_ahead=1, buffer=buffer)
    parts: list[str] = []
    results: dict[str, object] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, batcher, ("quick", 8), results)
        async with ta.patterns.open_parts(batcher, ("slow", 8)) as stream:
            await trio.sleep(20)
            assert len(stream.unread) == buffer
            assert results == {"quick": parts_of("quick", 8)}
            parts += [part async for part in stream]
    assert tuple(parts) == parts_of("slow", 8)


async def test_a_leaving_sequence_waits_for_both_steps(system: ta.System, autojump_clock: MockClock) -> None:
    writer = Ahead()
    batcher = await spawn(system, writer, steps_ahead=1)
    results: dict[str, object] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, batcher, ("stays", 19), results)
        with trio.move_on_after(3.5):
            await read(batcher, ("leaves", 9), [])
        assert writer.left == []
        await trio.sleep(2.1)
        assert writer.left == ["leaves"]
    assert results == {"stays": parts_of("stays", 19)}


async def test_an_end_in_the_middle_gives_back_once(system: ta.System, autojump_clock: MockClock) -> None:
    writer = Ahead()
    batcher = await spawn(system, writer, steps_ahead=1)
    results: dict[str, object] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, batcher, ("a", 9), results)
        await trio.sleep(3.5)
        await batcher.stop()
    assert isinstance(results["a"], ta.ActorFailedError | ta.ActorStoppedError)
    assert writer.left == ["a"]
