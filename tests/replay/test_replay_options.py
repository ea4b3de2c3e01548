"""Options of recordings and replays that cause a refusal before anything runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND

import trio_accel as ta
from trio_accel import replay

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"until": 0}, "until must be at least 1, got 0"),
    ({"until": -2}, "until must be at least 1, got -2"),
    ({"until": 1.5}, "until must be an integer, got 1.5"),
    ({"until": "3"}, "until must be an integer, got '3'"),
    ({"programs": "no"}, "programs must be True or False, got 'no'"),
    ({"programs": None}, "programs must be True or False, got None"),
    ({"tolerance": 1e-3}, "tolerance must be a Tolerance or None, got 0.001"),
]
PAIR: list[tuple[dict[str, Any], str]] = [
    ({"isolated": 1}, "isolated must be True or False, got 1"),
    ({"steps": 0}, "steps must be True or False, got 0"),
    ({"max_differences": 0}, "max_differences must be at least 1, got 0"),
    ({"max_differences": "2"}, "max_differences must be an integer, got '2'"),
]


@pytest.mark.parametrize(("options", "text"), WRONG + PAIR, ids=str)
async def test_replays(system: ta.System, options: dict[str, Any], text: str) -> None:
    journal = replay.MemoryJournal()
    async with system.open_device(BACKEND) as device, system.open_device(BACKEND) as other:
        async with replay.record(device, journal) as recording:
            await recording.mark("x", x=await device.put(np.ones(2)))
        calls = [lambda: replay.lockstep(journal, device, other, **options)]
        if (options, text) in WRONG:
            calls.append(lambda: replay.replay(journal, device, **options))
        for call in calls:
            with pytest.raises((TypeError, ValueError), match=text):
                await call()
        assert (await replay.replay(journal, device, until=1)).is_same


async def test_recordings(device: ta.Device) -> None:
    contents: Any = "none"
    with pytest.raises(TypeError, match="record: contents must be True or False, got 'none'"):
        async with replay.record(device, replay.MemoryJournal(), contents=contents):
            pass


@pytest.mark.parametrize("value", [-1.0, math.nan, "1", True, 1j, None])
def test_tolerances(value: Any) -> None:
    for name in ("relative", "absolute"):
        with pytest.raises((TypeError, ValueError), match=f"Tolerance: {name} must be a number from 0"):
            replay.Tolerance(**{name: value})
    scalar: Any = np.float32(0.5)
    assert type(replay.Tolerance(relative=scalar).relative) is float
