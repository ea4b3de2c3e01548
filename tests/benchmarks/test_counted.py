"""Calls of many tasks are counted while all of them make some."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from benchmarks import _counted
from benchmarks._counted import Counted


async def test_how_they_begin_and_end_does_not_count(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(_counted.time, "perf_counter", lambda: trio.current_time() + 1.0)
    counted, made = Counted(3, 5), 0

    async def ask(delay: float) -> None:
        nonlocal made
        # They begin late, and one after the other.
        await trio.sleep(delay)
        while not counted.is_over:
            await trio.sleep(0.5)
            made += 1
            counted.count()

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(ask, 0.1 * number)
    # Three in half a second, from the 12th to the 27th; the two others were being served then.
    assert counted.rate == pytest.approx(15 / 2.5)
    assert made == 3 * (4 + 5) + 2
