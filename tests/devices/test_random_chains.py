"""Random chains of calls have the bits of their steps, awaited one by one, whichever way they run."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import trio
from chain_programs import STEPS, Program, contents, outcome, programs, step_by_step
from chosen import IS_STAND_IN
from hypothesis import given, settings
from isolations import inline, isolated

import trio_accel as ta

# Values without a use in the last step are not awaited.
pytestmark = pytest.mark.filterwarnings("ignore:<Call .* was never awaited:RuntimeWarning")
# Each is recorded at first, and a template then. After some runs its neighbours are fused. Then arrays are
# others.
TURNS = 9
# The stand-in lacks solvers, and a chain reports that in other words.
KINDS = [kind for kind in STEPS if not (IS_STAND_IN and kind == "solve")]


async def check(device: ta.Device, program: Program) -> int:
    """Compare all turns; returns how many ran by a template."""
    chains: Any = device.chains  # type: ignore[attr-defined]
    before = chains.kept.counts.hits
    mine, plain = await program.put(device, 0), await program.put(device, 0)
    for turn in range(TURNS):
        if turn == TURNS - 2:
            mine = await program.put(device, turn)
            plain = await program.put(device, turn)
        elif turn:
            await program.renew(mine, turn)
            await program.renew(plain, turn)
        expected = await outcome(step_by_step(program.call(plain)))
        assert await outcome(program.call(mine)) == expected
        assert await contents(mine) == await contents(plain)
    found: int = chains.kept.counts.hits - before
    return found


async def search(device: ta.Device, most: int) -> None:
    found = [0]

    # Each failure of a property is found again at the same place.
    @given(program=programs(kinds=KINDS))
    @settings(max_examples=most, deadline=None, derandomize=True)
    def run(program: Program) -> None:
        found[0] += trio.from_thread.run(check, device, program)

    await trio.to_thread.run_sync(run)
    assert device.generation == 1
    # Most of them are templates.
    assert found[0] > most
    gc.collect()
    await device.synchronize()
    assert (await device.statistics()).memory.blocks == 0


@inline
async def test_a_chain_has_the_bits_of_its_steps(device: ta.Device) -> None:
    await search(device, 12)


@isolated
async def test_a_chain_has_the_bits_of_its_steps_in_a_worker(device: ta.Device) -> None:
    await search(device, 6)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_many_chains_have_the_bits_of_their_steps(device: ta.Device) -> None:
    await search(device, 200)
