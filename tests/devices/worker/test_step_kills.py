"""A worker killed while it runs a step: one outcome for each caller, and plans that continue."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import trio
from chain_programs import STEPS, WRITING
from chosen import BACKEND, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st
from isolated import options, replace_worker, wait_in_flight
from step_programs import Case, arguments, cases, expected_of, outcome_of, put

import trio_accel as ta
from trio_accel import arrays

GRAPHS = "trio_accel.graphs:GraphsActor"
# Products of it take long enough to be killed in.
LARGE = 4000 if BACKEND == "cuda" and not IS_STAND_IN else 600


async def nothing_left(device: ta.Device, blocks: int) -> None:
    gc.collect()
    await device.synchronize()
    assert (await device.statistics()).memory.blocks == blocks
    assert device.pending == 0


def powers(x: Any, scale: float) -> Any:
    y: Any = x
    for _ in range(20):
        y = (y @ x) * scale
    return y


@pytest.mark.parametrize("retry", [0, 1])
async def test_a_step_in_flight(system: ta.System, retry: int) -> None:
    async with system.open_device(BACKEND, options=options(retry=retry)) as device:
        x = await device.put(np.eye(LARGE) * 2.0)
        step = ta.step(lambda x, scale: arrays.sum(powers(x, scale)).item())
        for _ in range(3):
            assert await step(x, 0.5) == 2.0 * LARGE
        found: list[Any] = []

        async def ask() -> None:
            found.append(await outcome_of(step(x, 0.5)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_in_flight(device, 1, GRAPHS)
            await replace_worker(device)
        if retry:
            assert found == [await outcome_of(step(x, 0.5))]
        else:
            kind, text = found.pop()
            assert kind is ta.ContextLostError
            assert "linalg.matmul, arrays.multiply, linalg.matmul" in text
        # Arrays that it only read are unchanged, and the plan runs on the next worker.
        for scale in (0.5, 1.0):
            assert await step(x, scale) == 2.0 * LARGE * (2.0 * scale) ** 20
        assert device.generation == 2
        await nothing_left(device, 1)


async def test_arrays_changed_by_a_step_are_damaged(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(retry=5)) as device:
        x, y = await device.put(np.eye(LARGE) * 2.0), await device.put(np.zeros((LARGE, LARGE)))
        step = ta.step(lambda x, y: arrays.add(y, powers(x, 0.5), out=y))
        for _ in range(3):
            await step(x, y)
        found: list[Any] = []

        async def ask() -> None:
            found.append(await outcome_of(step(x, y)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_in_flight(device, 1, GRAPHS)
            await replace_worker(device)
        assert found.pop()[0] is ta.ContextLostError
        with pytest.raises(ta.StaleRefError, match="spoiled by"):
            await step(x, y)
        await y.fill(1.0)
        for turn in range(3):
            await step(x, y)
            assert await y[0, 1].item() == 1.0
            assert await y[0, 0].item() == 1.0 + 2.0 * (turn + 1)
        await nothing_left(device, 2)


# Values without a use in the last call are not awaited.
@pytest.mark.filterwarnings("ignore:<Call .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("retry", [0, 1])
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_random_steps_and_kills(system: ta.System, retry: int) -> None:
    kinds = [kind for kind in STEPS if kind not in WRITING]
    async with system.open_device(BACKEND, options=options(retry=retry)) as device:

        async def check(case: Case, turns: int, waits: int) -> None:
            mine = await put(case.program, device, 0, "plain")
            step: Any = ta.step(case.function())
            expected = await expected_of(case, mine)
            for _ in range(turns):
                assert await outcome_of(step(*arguments(mine))) == expected
            found: list[Any] = []

            async def ask() -> None:
                try:
                    found.append(await outcome_of(step(*arguments(mine))))
                except ta.ContextLostError as error:
                    # The result stays on the device, and its read is an operation that can be lost too.
                    found.append((type(error), str(error)))

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(ask)
                for _ in range(waits):
                    await trio.lowlevel.checkpoint()
                await replace_worker(device)
            assert len(found) == 3
            for one in found:
                assert one == expected or (_is_lost(one) and not retry), one
            for _ in range(2):
                assert await outcome_of(step(*arguments(mine))) == expected

        @given(case=cases(kinds=kinds), turns=st.integers(0, 3), waits=st.integers(0, 30))
        @settings(max_examples=25, deadline=None, derandomize=True)
        def run(case: Case, turns: int, waits: int) -> None:
            trio.from_thread.run(check, case, turns, waits)

        await trio.to_thread.run_sync(run)
        await nothing_left(device, 0)


def _is_lost(found: Any) -> bool:
    several = found if isinstance(found, list) else [found]
    return any(one[0] is ta.ContextLostError for one in several)
