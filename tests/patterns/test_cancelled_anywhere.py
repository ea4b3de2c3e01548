"""A text and a router of experts with a caller cancelled at any step: one outcome, nothing is left."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import trio
from cancel_at import cancelled_at_each_step
from language_models import Batcher, batcher_of, step_of

import trio_accel as ta
from trio_accel import linalg
from trio_accel.patterns import (
    Generate,
    GetStatistics,
    MoeRouter,
    Score,
    Submit,
    open_parts,
)

VOCABULARY, WIDTH, TOKENS = 5, 3, 7
Put = Callable[[Any], Awaitable[Any]]


async def on_the_host(array: Any) -> Any:
    await trio.lowlevel.checkpoint()
    return array


def distributions(kind: int, put: Put) -> Callable[[Score], Awaitable[Any]]:
    """A model with distributions that depend on all tokens before."""

    async def model(score: Score) -> Any:
        ends = range(len(score.tokens) - score.count + 1, len(score.tokens) + 1)
        generators = [np.random.default_rng((kind, *score.tokens[:end])) for end in ends]
        return await put(np.array([each.dirichlet(np.ones(VOCABULARY)) for each in generators]))

    return model


async def texts_of(system: ta.System, put: Put) -> Batcher:
    return await batcher_of(system, step_of(distributions(1, put), distributions(2, put), lookahead=2))


async def router_of(system: ta.System, put: Put) -> ta.Ref[MoeRouter]:
    matrices = np.random.default_rng(0).standard_normal((3, WIDTH, WIDTH))

    async def gate(tokens: Any) -> Any:
        return await put(np.cumsum(tokens, axis=1))

    def expert_of(matrix: Any) -> Any:
        async def expert(tokens: Any) -> Any:
            return await put(tokens @ matrix)

        return expert

    # Each expert is called more than once, and all of them at once.
    return await system.spawn(
        MoeRouter, gate, [expert_of(matrix) for matrix in matrices], capacity_factor=0.5, overflow="wait"
    )


def tokens_of(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((TOKENS, WIDTH))


async def check_nothing_is_left(system: ta.System, ref: ta.Ref[Any], begun: int, tasks: int) -> Any:
    """Every call has ended once, and no task is left of any; returns the statistics."""
    statistics = await ref.ask(GetStatistics())
    assert statistics.begun == statistics.answered + statistics.cancelled <= begun
    assert (statistics.failed, statistics.in_flight) == (0, 0)
    node = system.tree().find(ref.path)
    assert (node.deferred, node.restarts) == (0, 0)
    assert trio.lowlevel.current_statistics().tasks_living == tasks
    return statistics


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_text(system: ta.System, is_streamed: bool) -> None:
    batcher = await texts_of(system, on_the_host)
    request, other = Generate((0,), max_tokens=9, seed=1), Generate((1,), max_tokens=6, seed=2)
    text, other_text = [await batcher.ask(Submit(each)) for each in (request, other)]
    tasks = trio.lowlevel.current_statistics().tasks_living
    outcomes: list[tuple[int, ...]] = []
    others: list[tuple[int, ...]] = []
    seen: list[int] = []

    async def ask_other() -> None:
        others.append(await batcher.ask(Submit(other)))

    async def ask() -> None:
        seen.clear()
        if not is_streamed:
            outcomes.append(await batcher.ask(Submit(request)))
            return
        async with open_parts(batcher, request) as stream:
            async for token in stream:
                seen.append(token)  # noqa: PERF401  # those before a cancellation count
        # The end of the block is also a checkpoint.
        outcomes.append(stream.parts)

    attempts = cancelled = 0
    async with trio.open_nursery() as nursery:

        async def attempt() -> None:
            nursery.start_soon(ask_other)
            await ask()

        async with aclosing(cancelled_at_each_step(attempt)) as each:
            async for is_cancelled in each:
                attempts += 1
                cancelled += is_cancelled
                assert (len(outcomes), len(others)) == (attempts - cancelled, attempts)
                assert tuple(seen) == text[: len(seen)]
                statistics = await check_nothing_is_left(system, batcher, 2 + 2 * attempts, tasks)
    assert cancelled > 20
    assert outcomes
    assert set(outcomes) == {text}
    assert set(others) == {other_text}
    assert statistics.answered >= 2 + len(outcomes) + len(others)


async def test_tokens_of_experts(system: ta.System) -> None:
    router = await router_of(system, on_the_host)
    items = tokens_of(1), tokens_of(2)
    expected = [(await router.ask(Submit(item))).output for item in items]
    tasks = trio.lowlevel.current_statistics().tasks_living
    outputs: tuple[list[Any], list[Any]] = ([], [])

    async def ask(which: int) -> None:
        outputs[which].append((await router.ask(Submit(items[which]))).output)

    attempts = cancelled = 0
    async with trio.open_nursery() as nursery:

        async def attempt() -> None:
            nursery.start_soon(ask, 1)
            await ask(0)

        async with aclosing(cancelled_at_each_step(attempt)) as each:
            async for is_cancelled in each:
                attempts += 1
                cancelled += is_cancelled
                assert [len(found) for found in outputs] == [attempts - cancelled, attempts]
                statistics = await check_nothing_is_left(system, router, 2 + 2 * attempts, tasks)
                # Cancelled requests are not counted.
                assert statistics.routing.tokens == TOKENS * statistics.answered
    assert cancelled > 10
    for found, right in zip(outputs, expected, strict=True):
        assert found
        for output in found:
            np.testing.assert_array_equal(output, right)


@pytest.mark.parametrize("pattern", ["texts", "router"])
async def test_arrays_of_a_device_are_given_back(system: ta.System, device: ta.Device, pattern: str) -> None:
    """Models return arrays of a device, and the router is given one. How many steps that takes may vary."""

    async def put(array: Any) -> ta.AccelRef:
        return await linalg.scal(1.0, await device.put(array))

    ref: ta.Ref[Any]
    if pattern == "texts":
        ref, item = await texts_of(system, put), Generate((0,), max_tokens=3, seed=1)
    else:
        ref, item = await router_of(system, put), await device.put(tokens_of(1))
    await ref.ask(Submit(item))
    blocks = 1 if pattern == "router" else 0
    tasks = trio.lowlevel.current_statistics().tasks_living
    attempts = 0

    async def attempt() -> None:
        await ref.ask(Submit(item))

    async with aclosing(cancelled_at_each_step(attempt)) as each:
        async for _ in each:
            attempts += 1
            await device.synchronize()
            statistics = await device.statistics()
            assert statistics.in_flight == 0
            assert statistics.memory.blocks == blocks
            await check_nothing_is_left(system, ref, 1 + attempts, tasks)
    assert attempts > 10
