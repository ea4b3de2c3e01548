"""Writes of collectives are content from outside: a recording of each rank is replayed with the same bits."""

from __future__ import annotations

import pickle
from contextlib import AsyncExitStack

import numpy as np
import pytest
from chosen import BACKEND, INLINE
from worlds import contents, opened_world, put

import trio_accel as ta
from trio_accel import replay

pytestmark = pytest.mark.filterwarnings("ignore:open_device:RuntimeWarning")

SIZE = 3
HOSTS = [np.random.default_rng(seed).normal(size=(6, 4)) for seed in range(SIZE)]


@pytest.mark.parametrize("way", ["mapped", "library"], indirect=True)
async def test_collectives_are_from_outside(system: ta.System, way: str) -> None:
    journals = [replay.MemoryJournal() for _ in range(SIZE)]
    async with opened_world(system, SIZE, transport=way) as world, AsyncExitStack() as stack:
        before = await put(world, HOSTS)
        for device, journal in zip(world.devices, journals, strict=True):
            await stack.enter_async_context(replay.record(device, journal))
        arrays = await put(world, HOSTS)
        # Results in new arrays, in place and in views, and operations before and after.
        sums = await world.all_reduce([await (one * 2.0) for one in before])
        await world.all_reduce(arrays, out=arrays)
        halves = await world.all_gather([one[:3] for one in sums])
        sent = await world.broadcast(arrays[1], root=1)
        swapped = await world.all_to_all(sent)
        several = (sums, arrays, halves, sent, swapped)
        read = [[(await (one + 1.0).to_host()).tobytes() for one in each] for each in several]
        np.testing.assert_allclose((await contents(sums))[0], 2 * sum(HOSTS))
    for rank, journal in enumerate(journals):
        results = [entry[2][-1][2] for entry in map(pickle.loads, journal.entries()) if entry[0] == "result"]
        assert [each[rank] for each in read] == results[: len(read)]
        async with system.open_device(BACKEND, options=INLINE) as device:
            report = await replay.replay(journal, device)
        assert report.is_same, report
        assert not report.skipped, report
        assert report.compared >= len(read)
        assert ("collectives.exchange" in report.outside) == (world.transport == "nccl"), report
