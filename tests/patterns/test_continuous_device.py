"""Streams of a continuous batcher with a killed worker: they continue at their next part."""

from __future__ import annotations

from typing import Any

import numpy as np
import trio

import trio_accel as ta
from trio_accel.patterns import (
    ContinuousBatcher,
    ContinuousStatistics,
    GetStatistics,
    Last,
    RunningSequence,
    StepResult,
    open_parts,
)

WIDTH, TOKENS, KILLS = 16, 40, 2


def row_of(sequence: RunningSequence[int, int]) -> int:
    """The last token: the next one depends only on it."""
    return sequence.parts[-1] if sequence.parts else sequence.item


def text_of(table: Any, token: int) -> list[int]:
    text: list[int] = []
    while len(text) < TOKENS:
        token = int(table[token].argmax())
        text.append(token)
    return text


async def test_streams_go_on_when_their_worker_is_killed(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process", retry=0, intensity=ta.Intensity(KILLS + 1, 60.0))
    device = await system.open_device("cpu", options=options)
    table = np.random.default_rng(1).standard_normal((WIDTH, WIDTH))
    weights = await device.put(table)
    calls = 0
    left: list[int] = []

    async def step(batch: list[RunningSequence[int, int]]) -> list[StepResult[int]]:
        nonlocal calls
        calls += 1
        if calls in (10, 20):
            ta.testing.inject_fault(device, ta.linalg.Matmul, kill=True)
        chosen = np.eye(WIDTH)[[row_of(sequence) for sequence in batch]]
        tokens = (await (chosen @ weights).to_host()).argmax(axis=1).tolist()
        return [
            Last([token]) if len(sequence.parts) + 1 == TOKENS else [token]
            for sequence, token in zip(batch, tokens, strict=True)
        ]

    def leave(sequence: RunningSequence[int, int]) -> None:
        left.append(sequence.item)

    batcher = await system.spawn(ContinuousBatcher[int, int], step, leave=leave)
    texts: dict[int, list[int]] = {}

    async def read(token: int) -> None:
        async with open_parts(batcher, token) as stream:
            texts[token] = [part async for part in stream]

    async with trio.open_nursery() as nursery:
        for token in range(WIDTH):
            nursery.start_soon(read, token)
    assert texts == {token: text_of(table, token) for token in range(WIDTH)}
    assert sorted(left) == list(range(WIDTH))
    seen: ContinuousStatistics = await batcher.ask(GetStatistics())
    assert (seen.repeated, seen.failed) == (KILLS, 0)
    assert device.generation == KILLS + 1
