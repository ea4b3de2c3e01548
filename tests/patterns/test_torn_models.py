"""Models that fail while they are cancelled: their nurseries report both, in one group."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import numpy as np
import outcome
import pytest
import trio
from every_pattern import PATTERNS, Model, Spawned, torn
from trio.testing import MockClock

import trio_accel as ta
from trio_accel.patterns import (
    Deployment,
    ExpertsFailedError,
    HotSwap,
    MoeRouter,
    Submit,
    Swap,
    SwapFailedError,
    open_parts,
)


async def in_tasks(item: object) -> int:
    """A model whose task fails over the cancellation, next to a merely cancelled one."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(torn)
        nursery.start_soon(trio.sleep_forever)
    raise AssertionError


def depth(error: BaseException) -> int:
    """How many groups lie in one another."""
    if not isinstance(error, BaseExceptionGroup):
        return 0
    group = cast("BaseExceptionGroup[BaseException]", error)
    return 1 + max(depth(each) for each in group.exceptions)


@pytest.mark.parametrize("spawn", PATTERNS)
async def test_a_cancelled_asker_gets_no_group_in_a_group(
    spawn: Callable[[ta.System, Model], Awaitable[Spawned]], system: ta.System, autojump_clock: MockClock
) -> None:
    ref, item_of = await spawn(system, in_tasks)
    results: list[outcome.Outcome[object]] = []
    with trio.move_on_after(1) as scope:
        results.append(await outcome.acapture(ref.ask, Submit(item_of(1))))
    assert scope.cancel_called
    (result,) = results
    assert isinstance(result, outcome.Error)
    if not isinstance(result.error, trio.Cancelled):
        assert pytest.RaisesGroup(OSError).matches(result.error)
    assert system.tree().find(ref.path).restarts == 0


@pytest.mark.parametrize("on_failure", ["raise", "renormalise"])
async def test_a_cancelled_asker_of_experts_gets_its_cancellation(
    system: ta.System, autojump_clock: MockClock, on_failure: str
) -> None:
    router = await system.spawn(MoeRouter, _even, [in_tasks, in_tasks, hangs], top_k=3, on_failure=on_failure)
    with trio.move_on_after(1) as scope:
        await router.ask(Submit(np.ones((2, 2))))
    assert scope.cancelled_caught


async def _even(tokens: object) -> object:
    await trio.lowlevel.checkpoint()
    return np.zeros((2, 3))


async def hangs(item: object) -> object:
    await trio.sleep_forever()
    raise AssertionError


async def gone(item: object) -> object:
    await trio.sleep(1)
    raise LookupError("gone")


async def test_experts_torn_by_the_failure_of_another_hide_nothing(
    system: ta.System, autojump_clock: MockClock
) -> None:
    experts = [in_tasks, gone, hangs]
    router = await system.spawn(MoeRouter, _even, experts, top_k=3, on_failure="raise")
    with pytest.raises(LookupError, match="gone"):
        await router.ask(Submit(np.ones((2, 2))))


async def test_experts_that_tear_themselves_have_failed(system: ta.System, autojump_clock: MockClock) -> None:
    async def limited(item: object) -> object:
        with trio.move_on_after(1):
            await in_tasks(item)
        raise AssertionError

    router = await system.spawn(MoeRouter, _even, [limited] * 3, top_k=3)
    with pytest.raises(ExpertsFailedError, match="0: ExceptionGroup") as caught:
        await router.ask(Submit(np.ones((2, 2))))
    assert {depth(error) for error in caught.value.errors.values()} == {1}


async def test_a_cancelled_swap_that_cannot_be_tidied_up_has_failed(
    system: ta.System, autojump_clock: MockClock
) -> None:
    @asynccontextmanager
    async def good() -> AsyncGenerator[Callable[[object], Awaitable[object]], None]:
        yield gone

    @asynccontextmanager
    async def bad() -> AsyncGenerator[Callable[[object], Awaitable[object]], None]:
        await in_tasks(None)
        yield gone

    models = await system.spawn(HotSwap[object, object], Deployment[object, object](good), name="models")
    with trio.move_on_after(1), pytest.raises(SwapFailedError, match="2 was not taken") as caught:
        await models.ask(Swap(bad, "2"))
    assert pytest.RaisesGroup(OSError).matches(caught.value.__cause__)
    with pytest.raises(LookupError, match="gone"):
        await models.ask(Submit(None))
    assert system.tree().find("test/models").restarts == 0


async def torn_batcher(item: object) -> tuple[int, ...]:
    await in_tasks(item)
    raise AssertionError


async def test_a_reader_of_tokens_sees_its_own_group_unchanged(autojump_clock: MockClock) -> None:
    with pytest.RaisesGroup(OSError), trio.move_on_after(1):
        async with open_parts(torn_batcher, 0):
            await in_tasks(None)


async def test_a_batcher_torn_when_its_reader_leaves_is_not_heard(autojump_clock: MockClock) -> None:
    async with open_parts(torn_batcher, 0):
        await trio.sleep(1)
    with trio.move_on_after(1) as scope:
        async with open_parts(torn_batcher, 0) as stream:
            await stream.__anext__()
    assert scope.cancelled_caught
