"""A worker killed while it runs a chain of calls: one outcome for each caller, and nothing left."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio
from chain_programs import STEPS, WRITING, Program, outcome, programs, step_by_step
from chosen import BACKEND, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st
from isolated import options, replace_worker, wait_at_worker, wait_in_flight

import trio_accel as ta
from trio_accel import arrays

GRAPHS = "trio_accel.graphs:GraphsActor"
# Products of it take long enough to be killed in.
LARGE = 4000 if BACKEND == "cuda" and not IS_STAND_IN else 600
TURNS = 3


async def nothing_left(device: ta.Device, blocks: int) -> None:
    gc.collect()
    await device.synchronize()
    assert (await device.statistics()).memory.blocks == blocks
    assert device.pending == 0


@pytest.mark.parametrize("retry", [0, 1])
async def test_a_chain_in_flight(system: ta.System, retry: int) -> None:
    async with system.open_device(BACKEND, options=options(retry=retry)) as device:
        host = np.eye(LARGE)
        x = await device.put(host * 2.0)

        def chain() -> Any:
            y: Any = x
            for _ in range(20):
                y = (y @ x) * 0.5
            return arrays.sum(y).item()

        for _ in range(TURNS):
            assert await chain() == 2.0 * LARGE
        found = await _outcome_of_a_kill(device, chain)
        if retry:
            assert found == 2.0 * LARGE
        else:
            assert type(found) is ta.ContextLostError
            assert found.operation is not None
            assert found.operation.startswith("linalg.matmul, arrays.multiply, linalg.matmul")
            assert len(str(found)) < 500
        del found
        # Arrays that it only read are unchanged, and the chain runs on the next worker.
        assert await chain() == 2.0 * LARGE
        assert device.generation == 2
        await nothing_left(device, 1)


async def test_arrays_changed_by_a_chain_are_damaged(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=options(retry=5)) as device:
        x, y = await device.put(np.eye(LARGE) * 2.0), await device.put(np.zeros((LARGE, LARGE)))

        def chain() -> Any:
            z: Any = x
            for _ in range(20):
                z = (z @ x) * 0.5
            return arrays.add(y, z, out=y)

        for _ in range(TURNS):
            await chain()
        assert type(await _outcome_of_a_kill(device, chain)) is ta.ContextLostError
        with pytest.raises(ta.StaleRefError, match="spoiled by"):
            await (y + 1.0).item()
        for turn in range(TURNS):
            await y.fill(1.0)
            await chain()
            assert await y[0, 1].item() == 1.0, turn
            assert await y[0, 0].item() == 3.0, turn
        await nothing_left(device, 2)


@pytest.mark.skipif(BACKEND == "cuda", reason="NumPy does not write to the memory of the device")
async def test_chains_before_their_beginning(system: ta.System) -> None:
    """They were sent to the lost worker by templates that the next one does not know."""
    async with system.open_device(BACKEND, options=options(retry=0)) as device:
        x = await device.put(np.ones(3))
        for _ in range(TURNS):
            await ((x + 1.0) * 2.0).to_host()
        found: list[Any] = []

        async def ask(number: int) -> None:
            found.append(await ((x + np.full(3, float(number))) * 2.0).to_host())

        for number in range(TURNS):
            await ask(number)
        found.clear()
        async with trio.open_nursery() as nursery, x.lease(write=True) as array:
            for number in range(5):
                nursery.start_soon(ask, number)
            await wait_at_worker(device, 1)
            await replace_worker(device)
            array[...] = 2.0
        assert sorted(one[0] for one in found) == [4.0, 6.0, 8.0, 10.0, 12.0]
        del array
        await nothing_left(device, 1)


async def _outcome_of_a_kill(device: ta.Device, chain: Callable[[], ta.Call[Any]]) -> object:
    """Ask a chain, and kill the worker while it runs."""
    found: list[object] = []

    async def ask() -> None:
        try:
            found.append(await chain())
        except ta.AccelError as error:
            found.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_in_flight(device, 1, GRAPHS)
        await replace_worker(device)
    one = found.pop()
    assert not found
    return one


# Values without a use in the last step are not awaited.
@pytest.mark.filterwarnings("ignore:<Call .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("retry", [0, 1])
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_random_chains_and_kills(system: ta.System, retry: int) -> None:
    kinds = [kind for kind in STEPS if kind not in WRITING]
    async with system.open_device(BACKEND, options=options(retry=retry)) as device:

        async def check(program: Program, turns: int, waits: int) -> None:
            mine = await program.put(device, 0)
            expected = await outcome(step_by_step(program.call(mine)))
            for _ in range(turns):
                assert await outcome(program.call(mine)) == expected
            found: list[Any] = []

            async def ask() -> None:
                try:
                    found.append(await outcome(program.call(mine)))
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
                assert one == expected or (one[0] is ta.ContextLostError and not retry), one
            for _ in range(2):
                assert await outcome(program.call(mine)) == expected

        @given(program=programs(kinds=kinds), turns=st.integers(0, 3), waits=st.integers(0, 30))
        @settings(max_examples=25, deadline=None, derandomize=True)
        def run(program: Program, turns: int, waits: int) -> None:
            trio.from_thread.run(check, program, turns, waits)

        await trio.to_thread.run_sync(run)
        await nothing_left(device, 0)
