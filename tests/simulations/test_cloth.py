"""Cloth: free fall, energy, and NumPy step for step."""

from __future__ import annotations

import cloth
import numpy as np
import pytest
from walking import put, walk

import trio_accel as ta

pytestmark = [pytest.mark.examples, pytest.mark.stand_in]

SOLVERS = pytest.mark.parametrize("solver", ["verlet", "xpbd"])


def sheet(n: int, noise: float) -> np.ndarray:
    """Places of shape (3, n, n)."""
    flat = np.stack([*np.indices((n, n))[::-1] / (n - 1), np.zeros((n, n))])
    return flat + np.random.default_rng(5).normal(scale=noise, size=flat.shape)


def springs(places: np.ndarray, strength: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """Forces, each spring once and on both of its ends, and the squares of the excess lengths."""
    n = places.shape[1]
    forces, squares = np.zeros_like(places), np.zeros(())
    for a, b in ((0, 1), (1, 0), (1, 1), (1, -1), (0, 2), (2, 0)):
        one = np.s_[:, : n - a, max(0, -b) : n - max(0, b)]
        other = np.s_[:, a:, max(0, b) : n - max(0, -b)]
        between = places[other] - places[one]
        length = np.sqrt((between**2).sum(0))
        excess = length - np.hypot(a, b) / (n - 1)
        shared = np.broadcast_to(strength, (1, n, n))
        scale = (shared[one] + shared[other] + cloth.COMPLIANCE) if np.ndim(strength) else 1 / strength
        pull = between / length * excess / scale
        forces[one] += pull
        forces[other] -= pull
        squares = squares + (excess**2).sum()
    return forces, squares


@SOLVERS
async def test_a_sheet_that_nothing_holds_falls_as_a_stone(device: ta.Device, solver: str) -> None:
    n = 8
    places = sheet(n, 0.0)
    [free] = await put(device, np.ones((n, n)))
    state = await put(device, *places, *places)
    last = await walk(cloth.step_of(free, solver, kept=1.0, radius=0.0), state, 3)
    count = 3 * cloth.SMALL_STEPS
    places[2] -= cloth.FALL / n**2 * count * (count + 1) / 2
    np.testing.assert_allclose(last[:3], places, atol=1e-12)


@SOLVERS
async def test_springs_keep_the_momentum(device: ta.Device, solver: str) -> None:
    n = 8
    places = sheet(n, 0.02)
    [free] = await put(device, np.ones((n, n)))
    last = np.stack(
        await walk(cloth.step_of(free, solver, kept=1.0, radius=0.0), await put(device, *places, *places), 3)
    )
    count = 3 * cloth.SMALL_STEPS
    fall = np.array([0, 0, cloth.FALL / n**2 * count])
    middle = places.mean((1, 2)) - fall * (count + 1) / 2
    np.testing.assert_allclose(last[:3].mean((1, 2)), middle, atol=1e-13)
    np.testing.assert_allclose((last[:3] - last[3:]).mean((1, 2)), -fall, atol=1e-13)
    assert np.abs(last[:3] - places).max() > 0.01


async def test_verlet_keeps_the_energy(device: ta.Device) -> None:
    n = 12
    places = sheet(n, 0.02)
    [free] = await put(device, np.ones((n, n)))
    step, state = cloth.step_of(free, "verlet", kept=1.0, radius=0.0), await put(device, *places, *places)

    def energy(last: np.ndarray) -> float:
        moving = ((last[:3] - last[3:]) ** 2).sum() / 2
        held = sum(
            cloth.STIFFNESS * springs(each, 1.0)[1] / 2 + cloth.FALL / n**2 * each[2].sum()
            for each in (last[:3], last[3:])
        )
        return float(moving + held / 2)

    begin = cloth.STIFFNESS * float(springs(places, 1.0)[1]) / 2
    energies = [energy(np.stack(await walk(step, state, steps))) for steps in (1, 5, 20)]
    # It is kept in the mean: a later step lacks the excess of a small step.
    np.testing.assert_allclose(energies, energies[0], atol=0.05 * begin)


@SOLVERS
async def test_it_is_as_by_numpy(device: ta.Device, solver: str) -> None:
    n = 8
    free = np.ones((n, n))
    free[[0, -1], 0] = 0
    now = before = sheet(n, 0.01) - np.array([0, 0, 0.5])[:, None, None]
    [there] = await put(device, free)
    found = await walk(cloth.step_of(there, solver), await put(device, *now, *before), 1)
    ball = np.reshape(cloth.BALL, (3, 1, 1))
    for _ in range(cloth.SMALL_STEPS):
        speed = (now - before) * cloth.KEPT
        speed[2] -= cloth.FALL / n**2
        if solver == "verlet":
            new = now + free * (speed + cloth.STIFFNESS * springs(now, 1.0)[0])
        else:
            new = now + free * speed
            new = new + cloth.SHARE * free * springs(new, free)[0]
        out = new - ball
        distance = np.sqrt((out**2).sum(0))
        new = np.where(distance < cloth.RADIUS, ball + cloth.RADIUS * out / distance, new)
        now, before = new, now
    np.testing.assert_allclose(found, [*now, *before], rtol=1e-9, atol=1e-12)
