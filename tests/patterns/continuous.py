"""Steps for tests of the continuous batcher, and its callers and readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.actors._ref import cell_behind
from trio_accel.patterns import (
    ContinuousBatcher,
    ContinuousStatistics,
    GetStatistics,
    Last,
    RunningSequence,
    Submit,
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
        results[item[0]] = await batcher.ask(Submit(item))
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
