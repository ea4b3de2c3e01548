"""Types of patterns' replies; read by mypy and pyright, never run."""

# A `type: ignore` that nothing needs is an error here: it marks what the checkers must refuse.
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, assert_type

import trio_accel as ta
from trio_accel.patterns import (
    Batcher,
    Cascade,
    CascadeAnswer,
    ContinuousBatcher,
    Generate,
    HotSwap,
    Last,
    Model,
    PartStream,
    ReplicaPool,
    Router,
    RunningSequence,
    Score,
    SpeculativeStep,
    Streamed,
    Submit,
    SubmitActor,
    as_callable,
    open_parts,
)

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


async def lengths(texts: Sequence[str]) -> list[int]:
    return [len(text) for text in texts]


async def length(text: str) -> int:
    return len(text)


async def spawned(system: ta.System) -> None:
    batcher = await system.spawn(Batcher, lengths, max_size=4)
    assert_type(await batcher.ask(Submit("x")), int)
    await batcher.ask(Submit(3))  # type: ignore[arg-type]
    pool: ta.Ref[ReplicaPool[str, int]] = await system.spawn(ReplicaPool, [length, length])
    assert_type(await pool.ask(Submit("x"), abandon_on_cancel=True), int)
    await pool.ask(Submit(b"x"))  # type: ignore[arg-type]


async def given(
    batcher: ta.Ref[Batcher[str, int]],
    cascade: ta.Ref[Cascade[str, float]],
    swap: ta.Ref[HotSwap[str, list[int]]],
    router: ta.Ref[Router[object, int]],
    any_actor: ta.Ref[SubmitActor[Any, Any]],
) -> None:
    call = Submit("x")
    assert_type(call, Submit[str])
    assert_type(await batcher.ask(call), int)
    assert_type(await cascade.ask(call), CascadeAnswer[float])
    assert_type(await swap.ask(call), list[int])
    # An actor of more takes less.
    assert_type(await router.ask(call), int)
    assert_type(await any_actor.ask(call), Any)
    await cascade.ask(Submit(1.0))  # type: ignore[arg-type]


async def relay(actor: ta.Ref[SubmitActor[ItemT, ResultT]], item: ItemT) -> ResultT:
    return await actor.ask(Submit(item))


async def relayed(batcher: ta.Ref[Batcher[str, int]], model: Model[str, int]) -> None:
    assert_type(await relay(batcher, "x"), int)
    assert_type(await as_callable(model)("x"), int)
    await relay(batcher, 3)  # type: ignore[misc]


async def letters(batch: list[RunningSequence[str, int]]) -> list[Last[int]]:
    return [Last([len(sequence.item)]) for sequence in batch]


async def rows(scores: list[Score]) -> list[list[list[float]]]:
    return [[[1.0]] * score.count for score in scores]


async def in_steps(system: ta.System) -> None:
    batcher = await system.spawn(ContinuousBatcher[str, int], letters, length=len)
    assert_type(await batcher.ask(Submit("x")), tuple[int, ...])
    await batcher.ask(Submit(3))  # type: ignore[arg-type]
    async with open_parts(batcher, "x") as stream:
        assert_type(stream, PartStream[int])
        assert_type(await anext(stream), int)
        assert_type(stream.parts, tuple[int, ...])
    text = await system.spawn(ContinuousBatcher[Generate, int], SpeculativeStep(rows))
    assert_type(await text.ask(Submit(Generate((1,)))), tuple[int, ...])


async def in_steps_behind(swap: ta.Ref[HotSwap[str | Streamed[str, int], tuple[int, ...]]]) -> None:
    async with open_parts(swap, "x") as stream:
        assert_type([part async for part in stream], list[int])


class Plain(ta.Actor):
    pass


async def no_submit_actor(plain: ta.Ref[Plain]) -> None:
    await plain.ask(Submit("x"))  # type: ignore[arg-type]
