"""Random steps have the bits of their calls, awaited one by one, whichever way they run."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import trio
from chain_programs import STEPS
from chosen import IS_STAND_IN
from hypothesis import given, settings
from isolations import inline, isolated
from step_programs import Case, Checker, cases

import trio_accel as ta

# Values without a use in the last call are not awaited.
pytestmark = pytest.mark.filterwarnings("ignore:<Call .* was never awaited:RuntimeWarning")
# The stand-in lacks solvers, and a chain reports that in other words.
KINDS = [kind for kind in STEPS if not (IS_STAND_IN and kind == "solve")]


async def search(device: ta.Device, most: int) -> None:
    chains: Any = device.chains  # type: ignore[attr-defined]

    async def check(case: Case) -> None:
        await Checker(device, case).run()

    # Each failure of a property is found again at the same place.
    @given(case=cases(kinds=KINDS))
    @settings(max_examples=most, deadline=None, derandomize=True)
    def run(case: Case) -> None:
        trio.from_thread.run(check, case)

    await trio.to_thread.run_sync(run)
    assert device.generation == 1
    # Most of them are templates, and inline on the host most of these are computed in place.
    assert chains.kept.counts.hits > most
    place = device.dispatch.in_place("trio_accel.graphs:GraphsActor")  # type: ignore[attr-defined]
    if device.info.backend == "cpu" and device.isolation == "inline":
        assert place.computed > most
    gc.collect()
    await device.synchronize()
    assert (await device.statistics()).memory.blocks == 0


@inline
async def test_a_step_has_the_bits_of_its_calls(device: ta.Device) -> None:
    await search(device, 12)


@isolated
async def test_a_step_has_the_bits_of_its_calls_in_a_worker(device: ta.Device) -> None:
    await search(device, 6)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_many_steps_have_the_bits_of_their_calls(device: ta.Device) -> None:
    await search(device, 200)
