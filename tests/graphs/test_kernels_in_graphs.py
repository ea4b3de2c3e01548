"""Kernels and expressions of the user's own as operations of a graph."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND

import trio_accel as ta
from trio_accel import graphs, linalg

# Test folders are no packages: a worker imports what several modules share by its own name.
sys.path.insert(0, str(Path(__file__).parent))

from graph_kernels import halves


def matrix(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((6, 6))


@pytest.mark.skipif(
    BACKEND != "cpu", reason="the stand-in compiles no sources of others; the script for the GPU does"
)
async def test_a_kernel_in_a_graph(device: ta.Device) -> None:
    x = await device.put(matrix(1))

    async def step(x: ta.AccelRef) -> ta.AccelRef:
        (half,) = await halves(n=36, x=x)
        return await linalg.matmul(half, x)

    graph = await graphs.capture(device, step, x)
    for _ in range(3):
        np.testing.assert_array_equal(
            await (await graph.replay()).to_host(), (0.5 * matrix(1) + 1.0) @ matrix(1)
        )
    other = await device.put(matrix(2))
    np.testing.assert_array_equal(await (await graph(other)).to_host(), (0.5 * matrix(2) + 1.0) @ matrix(2))


@pytest.mark.skipif(
    BACKEND != "cpu", reason="the stand-in compiles no sources of others; the script for the GPU does"
)
async def test_expressions_in_a_graph(device: ta.Device) -> None:
    blend = ta.jit.elementwise("out = a * x + y")
    total = ta.jit.reduction("x * x", "a + b")
    x, y = await device.put(matrix(1)), await device.put(matrix(2))

    async def step(x: ta.AccelRef, y: ta.AccelRef) -> tuple[ta.AccelRef, ta.AccelRef]:
        mixed = await blend(2.0, x, y)
        return mixed, await total(mixed)

    expected = [await ref.to_host() for ref in await step(x, y)]
    graph = await graphs.capture(device, step, x, y)
    for _ in range(3):
        for ref, host in zip(await graph.replay(), expected, strict=True):
            np.testing.assert_array_equal(await ref.to_host(), host)
