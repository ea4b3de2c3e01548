"""Grains: plain Python bit for bit, and the momentum, which they keep."""

from __future__ import annotations

import math

import numpy as np
import particles
import pytest
from chosen import BACKEND
from simulation import State, to_host
from walking import put

import trio_accel as ta

pytestmark = [pytest.mark.examples, pytest.mark.stand_in]


def by_python(grains: np.ndarray, cells: int, fall: float) -> np.ndarray:
    """One step. All pairs are looked at, in the order of their cells."""
    grains = grains[:, np.lexsort((np.arange(len(grains.T)), grains[1] // 1, grains[0] // 1))]
    new = grains.copy()
    for one, (y, x, v, u, _) in enumerate(grains.T.tolist()):
        down, right = fall, 0.0
        for there, along, lower, beside, _ in grains.T.tolist():
            dy, dx = y - there, x - along
            squared = dy * dy + dx * dx
            if 0 < squared < 1:
                part = 1 / math.sqrt(squared)
                closing = ((lower - v) * dy + (beside - u) * dx) * part * part
                push = particles.STIFFNESS * (part - 1) + particles.DAMPING * closing
                down, right = down + dy * push, right + dx * push
        for axis, (place, speed) in enumerate(((y, v + down), (x, u + right))):
            held = min(max(place + speed, 0.0), cells - 1e-6)
            new[axis, one] = held
            new[2 + axis, one] = speed if held == place + speed else -particles.BOUNCE * speed
    return new


def grains(count: int, cells: int) -> np.ndarray:
    rng = np.random.default_rng(6)
    return np.stack(
        [*(cells * rng.random((2, count))), *rng.normal(scale=0.1, size=(2, count)), rng.random(count)]
    )


async def test_grains_are_as_by_python(device: ta.Device) -> None:
    cells, fall = 7, 0.01
    expected = grains(60, cells)
    step, state = particles.step_of(cells, fall), await put(device, *expected)
    for _ in range(4):
        state = await step(*state)
        expected = by_python(expected, cells, fall)
    found = np.stack(await to_host(state))
    if BACKEND == "cpu":
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


async def test_pushes_keep_the_momentum(device: ta.Device) -> None:
    begin = grains(50, 10)
    begin[:2] = 2 + begin[:2] * 0.6  # far from the walls
    begin[2:4] *= 0.1
    step = particles.step_of(10, 0.0)
    state: State = await put(device, *begin)
    for _ in range(10):
        state = await step(*state)
    found = np.stack(await to_host(state))
    assert np.abs(np.sort(found[2]) - np.sort(begin[2])).max() > 0.01
    assert found[:2].min() > 0
    assert found[:2].max() < 9.9
    np.testing.assert_allclose(found[2:4].sum(1), begin[2:4].sum(1), atol=1e-13)
    np.testing.assert_allclose(np.sort(found[4]), np.sort(begin[4]))


async def test_grains_in_one_place_and_in_corners(device: ta.Device) -> None:
    corners = np.array(
        [[0, 0, 4 - 1e-6, 4 - 1e-6, 2, 2], [0, 4 - 1e-6, 0, 4 - 1e-6, 2, 2], *np.zeros((3, 6))]
    )
    corners[2:4] = [[-1, -1, 1, 1, 0, 0], [-1, 1, -1, 1, 0, 0]]
    state = await particles.step_of(4, 0.0)(*await put(device, *corners))
    y, x, v, u, _ = await to_host(state)
    # Walls return a part of the speed; two grains in one place have no direction, and stay.
    np.testing.assert_array_equal(np.sort(v), [-0.3, -0.3, 0, 0, 0.3, 0.3])
    np.testing.assert_array_equal(np.sort(u), [-0.3, -0.3, 0, 0, 0.3, 0.3])
    np.testing.assert_array_equal(np.sort(y), np.sort(corners[0]))
    np.testing.assert_array_equal(np.sort(x), np.sort(corners[1]))
