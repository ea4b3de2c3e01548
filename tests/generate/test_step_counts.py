"""Python calls of a step with many sequences, with a reader for each: few of them for each sequence."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND
from generation import Prompt, open_generation
from model import GREEDY, Batch, Chosen, Model
from running import TINY
from text import load_random

import trio_accel as ta
from trio_accel.patterns import open_parts

pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(BACKEND != "cpu", reason="it counts the calls of the application alone"),
    pytest.mark.skipif(hasattr(sys, "gettrace") and sys.gettrace() is not None, reason="traced"),
]
pytest.importorskip("tokenizers", reason="pip install '.[generate]'")
pytest.importorskip("jinja2", reason="pip install '.[generate]'")

LOADED = load_random(TINY, 3)
STEPS = 24


async def calls_of_a_step(system: ta.System, device: ta.Device, count: int) -> float:
    """Count the Python calls of this thread for each step, once all sequences have their first tokens."""
    steps = calls = 0

    async def forward(batch: Batch) -> Chosen:
        nonlocal steps
        steps += len(batch.rows) == 5
        if steps == STEPS // 2:
            sys.setprofile(profile)
        elif steps == STEPS:
            sys.setprofile(None)
        await trio.lowlevel.checkpoint()
        return Chosen(np.full(len(batch.tables), 7, np.int32))

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    async def read() -> None:
        async with open_parts(made.batcher, Prompt(tokens=[5], most=2 * STEPS, sampling=GREEDY)) as stream:
            async for _ in stream:
                pass

    caches: list[Any] = [await device.zeros(TINY.cache_shape(20 * count, 4))]
    model = Model(TINY, caches, forward, None, 64)
    async with open_generation(system, model, LOADED) as made, trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(read)
    return calls / (STEPS - STEPS // 2)


async def test_a_sequence_more_takes_few_calls(system: ta.System, device: ta.Device) -> None:
    one = await calls_of_a_step(system, device, 1)
    async with ta.open_system("many") as other:
        many = await calls_of_a_step(other, device, 64)
    assert 50 < one < 300
    # Of 32 calls, Trio takes 14 to wake a reader. A sequence also gets pages now and then.
    assert (many - one) / 63 < 34
