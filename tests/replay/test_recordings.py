"""Recordings of random work, replayed inline and in a worker, have the same bits."""

from __future__ import annotations

import pytest
from random_work import recorded, replayed

import trio_accel as ta
from trio_accel import replay
from trio_accel.backends.base import Isolation

# What the last step does not use is not awaited.
pytestmark = pytest.mark.filterwarnings("ignore:<Call .* was never awaited:RuntimeWarning")


async def check(system: ta.System, journal: replay.Journal, read: int) -> None:
    for isolation in ("inline", "process"):
        report = await replayed(system, journal, isolation)
        assert not report.differences, report
        assert not report.failures, report
        assert report.compared >= read
        assert report.environment == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("isolation", ["inline", "process"])
@pytest.mark.parametrize("tasks", [1, 4])
async def test_random_work(system: ta.System, isolation: Isolation, tasks: int) -> None:
    journal, read, _ = await recorded(system, isolation, tasks, 300)
    assert len(read) > 100
    await check(system, journal, len(read))
