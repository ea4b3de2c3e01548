"""Flows: analytic solutions, conserved sums, and NumPy and SciPy step for step."""

from __future__ import annotations

from typing import Any

import fluid
import lattice_boltzmann as boltzmann
import numpy as np
import pytest
from scipy import fft, ndimage
from simulation import to_host
from walking import put, walk

import trio_accel as ta

pytestmark = [pytest.mark.examples, pytest.mark.stand_in]


async def test_a_vortex_on_a_lattice_decays_by_the_formula_of_taylor_and_green(device: ta.Device) -> None:
    n, steps, omega, speed = 32, 200, 1.0, 0.02
    down, right = 2 * np.pi * np.indices((n, n)) / n
    u, v = speed * np.cos(right) * np.sin(down), -speed * np.sin(right) * np.cos(down)
    rho = 1 - 0.75 * speed**2 * (np.cos(2 * right) + np.cos(2 * down))
    [kind] = await put(device, np.full((n, n), boltzmann.FLUID, np.uint8))
    flows = await put(device, *boltzmann.equilibrium(rho, v, u))
    last = await walk(boltzmann.step_of(kind, omega), flows, steps)
    left = np.exp(-2 * (1 / omega - 0.5) / 3 * (2 * np.pi / n) ** 2 * steps)
    assert left < 0.3
    _, found_v, found_u = boltzmann.moments(*last)
    np.testing.assert_allclose(found_u, left * u, atol=0.01 * left * speed)
    np.testing.assert_allclose(found_v, left * v, atol=0.01 * left * speed)


def boltzmann_by_numpy(kind: np.ndarray, flows: np.ndarray, omega: float) -> np.ndarray:
    """With all directions in one array, and each moment by one contraction."""
    directions, weights = np.array(boltzmann.DIRECTIONS), np.array(boltzmann.WEIGHTS)
    came = np.stack([np.roll(f, tuple(by), (0, 1)) for f, by in zip(flows, directions, strict=True)])
    rho = came.sum(0)
    velocity = np.einsum("ka,kij->aij", directions, came) / rho
    along = np.einsum("ka,aij->kij", directions, velocity)
    rest = weights[:, None, None] * rho * (1 + 3 * along + 4.5 * along**2 - 1.5 * (velocity**2).sum(0))
    back = came[[list(map(tuple, directions)).index((-a, -b)) for a, b in directions]]
    inlet = np.stack(boltzmann.equilibrium(np.ones(()), np.zeros(()), np.asarray(boltzmann.SPEED)))
    new = np.where(kind == boltzmann.SOLID, back, came + omega * (rest - came))
    return np.where(kind == boltzmann.INLET, inlet[:, None, None], new)


async def test_a_lattice_with_walls_and_an_inlet_is_as_by_numpy(device: ta.Device) -> None:
    rng = np.random.default_rng(1)
    kind = rng.choice(3, (12, 20), p=[0.8, 0.15, 0.05]).astype(np.uint8)
    expected = rng.uniform(0.9, 1.1, (9, 12, 20)) * np.array(boltzmann.WEIGHTS)[:, None, None]
    flows = await put(device, *expected)
    [there] = await put(device, kind)
    found = await walk(boltzmann.step_of(there, 1.3), flows, 5)
    for _ in range(5):
        expected = boltzmann_by_numpy(kind, expected, 1.3)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


async def test_the_gradient_of_a_lattice_is_that_of_differences(device: ta.Device) -> None:
    rng, steps = np.random.default_rng(4), 3
    kind = rng.choice(3, (6, 8), p=[0.7, 0.2, 0.1]).astype(np.uint8)
    hosts = rng.uniform(0.9, 1.1, (9, 6, 8)) * np.array(boltzmann.WEIGHTS)[:, None, None]
    weights, direction = rng.standard_normal((2, 9, 6, 8))
    [there] = await put(device, kind)
    update: Any = boltzmann.update_of(6, 8)

    def loss(flows: Any) -> Any:
        for _ in range(steps):
            flows = list(update(there, 1.3, *flows))
        return ta.arrays.sum(ta.arrays.stack(flows) ** 2 * weights)

    slopes = await ta.grad(loss)(list(await put(device, *hosts)))
    found = np.sum(
        [(await slope.to_host() * one).sum() for slope, one in zip(slopes, direction, strict=True)]
    )
    sides = [await loss(await put(device, *(hosts + by * direction))).item() for by in (1e-6, -1e-6)]
    np.testing.assert_allclose(found, (sides[0] - sides[1]) / 2e-6, rtol=1e-7)


async def test_collisions_keep_mass_and_momentum(device: ta.Device) -> None:
    flows = np.random.default_rng(2).uniform(0.02, 0.05, (9, 16, 16))
    [kind] = await put(device, np.zeros((16, 16), np.uint8))
    last = np.stack(await walk(boltzmann.step_of(kind, 0.7), await put(device, *flows), 50))
    assert np.abs(last - flows).max() > 0.001
    for weights in (np.ones(9), *np.transpose(boltzmann.DIRECTIONS)):
        before, after = (np.einsum("k,kij->", weights, each) for each in (flows, last))
        assert after == pytest.approx(before, rel=1e-12, abs=1e-11)


async def test_walls_keep_mass(device: ta.Device) -> None:
    rng = np.random.default_rng(3)
    [kind] = await put(device, rng.choice([boltzmann.FLUID, boltzmann.SOLID], (16, 16)).astype(np.uint8))
    flows = await put(device, *rng.uniform(0.02, 0.05, (9, 16, 16)))
    before = sum(f.sum() for f in await to_host(flows))
    after = sum(f.sum() for f in await walk(boltzmann.step_of(kind, 0.7), flows, 50))
    assert after == pytest.approx(before, rel=1e-12)


async def test_a_vortex_in_a_box_decays_by_the_formula_of_taylor_and_green(device: ta.Device) -> None:
    n, viscosity = 32, 0.02
    y, x = np.indices((n, n)) + 1.0
    stream = 0.3 * np.sin(np.pi * x / (n + 1)) * np.sin(np.pi * y / (n + 1))
    nothing, *state = await put(device, np.zeros((n, n)), 2 * np.pi**2 * stream, stream, np.zeros((n, n)))
    curl, found, smoke = await walk(await fluid.step_of(nothing, viscosity), tuple(state), n)
    left = np.exp(-2 * np.pi**2 * viscosity)
    assert left < 0.7
    np.testing.assert_allclose(found, left * stream, atol=0.002 * left * stream.max())
    np.testing.assert_allclose(curl, left * 2 * np.pi**2 * stream, atol=0.01 * left * 2 * np.pi**2 * 0.3)
    assert not smoke.any()


def keys(distance: np.ndarray) -> np.ndarray:
    """Keys' kernel of cubic interpolation, as a function of the distance: another form of Catmull-Rom."""
    x = np.abs(distance)
    near, far = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def cubic(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    n = len(values)
    y, x = np.clip(places, 0, n - 1)
    padded = np.pad(values, 2, "edge")
    at = np.arange(-2, n + 2)
    rows, columns = keys(y[..., None] - at), keys(x[..., None] - at)
    found: np.ndarray = np.einsum("ijk,kl,ijl->ij", rows, padded, columns)
    return found


async def test_a_box_of_smoke_is_as_by_scipy(device: ta.Device) -> None:
    n, rng = 16, np.random.default_rng(4)
    source = rng.random((n, n)) * (rng.random((n, n)) < 0.05)
    curl, smoke = rng.normal(size=(n, n)), rng.random((n, n))
    squares = (np.pi * np.arange(1, n + 1)) ** 2
    squares = squares[:, None] + squares
    stream = fft.idstn(fft.dstn(curl, type=1) / squares, type=1)
    there, *state = await put(device, source, curl, stream, smoke)
    found = await walk(await fluid.step_of(there), tuple(state), 3)
    for _ in range(3):
        framed = np.pad(stream, 1)
        u = (n + 1) ** 2 / n * (framed[2:, 1:-1] - framed[:-2, 1:-1]) / 2
        v = (n + 1) ** 2 / n * (framed[1:-1, :-2] - framed[1:-1, 2:]) / 2
        places = np.indices((n, n)).astype(float)
        middle = places - np.stack([v, u]) / 2
        back = places - [ndimage.map_coordinates(each, middle, order=1, mode="nearest") for each in (v, u)]
        framed = np.pad(smoke, 1, "edge")
        lift = fluid.BUOYANCY / n * (framed[1:-1, 2:] - framed[1:-1, :-2]) / 2 * (n + 1)
        waves = fft.dstn(cubic(curl, back) - lift, type=1) * np.exp(-fluid.VISCOSITY / n * squares)
        smoke = np.maximum(np.clip(cubic(smoke, back), 0, 1), source)
        curl, stream = fft.idstn(waves, type=1), fft.idstn(waves / squares, type=1)
    for each, wanted in zip(found, (curl, stream, smoke), strict=True):
        np.testing.assert_allclose(each, wanted, rtol=1e-10, atol=1e-12)
