"""Steps that are computed in place leave the loop to the other tasks of the program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND

import trio_accel as ta
from benchmarks._statistics import percentile
from benchmarks.loop_lag import lags
from trio_accel.backends.base import Isolation

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(BACKEND != "cpu", reason="other backends do not compute on the host"),
]
ASKERS, TICKS, TRIES = 16, 400, 5
# Milliseconds by which a task may wake too late.
MOST = 1.0


@pytest.fixture
def isolation() -> Isolation:
    """Only inline a step is computed in the loop of the program."""
    return "inline"


@ta.step
def request(x: Any, w: Any) -> Any:
    """Take some 0.05 to 0.2 ms, as the request of a small model does."""
    return ta.arrays.softmax(ta.nn.relu(x @ w) @ w, axis=1).to_host()


async def test_the_loop_is_on_time_beside_sixteen_askers(device: ta.Device) -> None:
    generator = np.random.default_rng(0)
    w = await device.put(generator.standard_normal((256, 256), dtype=np.float32))
    x = generator.standard_normal((8, 256), dtype=np.float32)
    expected = await request(x, w)
    place: Any = None
    for _ in range(500):
        await request(x, w)
        place = device.dispatch.place("trio_accel.graphs:GraphsActor")  # type: ignore[attr-defined]
        if place.computed > 5:
            break
    before, asked = place.computed, 0

    async def ask() -> None:
        nonlocal asked
        while True:
            found = await request(x, w)
            asked += 1
            if asked % 100 == 0:
                np.testing.assert_array_equal(found, expected)

    late: list[float] = []
    # The best of some, because the machine has other work to do at times.
    for _ in range(TRIES):
        async with trio.open_nursery() as nursery:
            for _ in range(ASKERS):
                nursery.start_soon(ask)
            late.append(percentile(await lags(TICKS), 99))
            nursery.cancel_scope.cancel(reason="measured")
        if late[-1] <= MOST:
            break
    share = (place.computed - before) / asked
    print(f"p99 of the lag in ms: {late}; {asked} requests, of which {share:.0%} in place")
    assert place.computed - before > 100
    assert min(late) <= MOST, late
