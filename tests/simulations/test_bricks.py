"""Rays through bricks: plain Python through a dense grid."""

from __future__ import annotations

import itertools

import bricks
import numpy as np
import pytest
from simulation import to_host
from walking import put

import trio_accel as ta

pytestmark = [pytest.mark.examples, pytest.mark.stand_in]


def dense(grid: np.ndarray, voxels: np.ndarray) -> np.ndarray:
    """All voxels in a grid of bricks."""
    size, edge = len(grid) * bricks.EDGE, bricks.EDGE
    full = np.zeros((size, size, size), np.uint8)
    for place in zip(*np.nonzero(grid >= 0), strict=True):
        full[tuple(slice(edge * int(at), edge * int(at) + edge) for at in place)] = voxels[grid[place]]
    return full


def cross(full: np.ndarray, at: np.ndarray, way: np.ndarray) -> tuple[float, int]:
    """Go from wall to wall of a dense grid: how far, and to which colour."""
    size = len(full)
    walls = [np.arange(size + 1) / w - a / w for a, w in zip(at, way, strict=True)]
    times = np.unique(np.concatenate(walls))
    times = times[times > 0]
    for begin, end in itertools.pairwise(times.tolist()):
        x, y, z = np.floor(at + (begin + end) / 2 * way).astype(int).tolist()
        if min(x, y, z) >= 0 and max(x, y, z) < size and full[x, y, z]:
            return float(begin), int(full[x, y, z])
    return np.inf, 0


async def test_rays_match_a_dense_grid(device: ta.Device) -> None:
    n, height = 4, 20
    grid, voxels = bricks.island(n, 2)
    assert (grid < 0).any()
    full, size = dense(grid, voxels), n * bricks.EDGE
    angle, *there = await put(device, np.asarray(1.0), grid, voxels)
    step = await bricks.step_of(there[0], there[1], height)
    _, depth, *channels = await to_host(await step(angle))
    turned = 1.0 + bricks.TURN
    forwards, sideways = (
        np.array([-np.cos(turned), -np.sin(turned), -0.6]),
        np.array([-np.sin(turned), np.cos(turned), 0]),
    )
    at = size * np.array([0.5 + 1.2 * np.cos(turned), 0.5 + 1.2 * np.sin(turned), 0.85])
    hits = 0
    for row, column in np.ndindex(depth.shape):
        right = (column + 0.5 - depth.shape[1] / 2) / height
        up = 0.5 - (row + 0.5) / height
        far, colour = cross(full, at, forwards + right * sideways + np.array([0, 0, up]))
        found = depth[row, column]
        # A ray that touches an edge within a ten-thousandth may pass on either side.
        hits += bool(np.isclose(found, far, atol=1e-3))
        if far < np.inf and np.isclose(found, far, atol=1e-3):
            shades = np.array([channel[row, column] for channel in channels]) / bricks.PAINT[colour]
            assert np.ptp(shades) <= 6
    assert np.isfinite(depth).mean() > 0.4
    assert hits > 0.99 * depth.size


async def test_a_grid_without_bricks_is_sky(device: ta.Device) -> None:
    grid, voxels = np.full((2, 2, 2), -1, np.int32), np.zeros((1, *[bricks.EDGE] * 3), np.uint8)
    angle, *there = await put(device, np.asarray(0.0), grid, voxels)
    _, depth, _, _, blue = await to_host(await (await bricks.step_of(there[0], there[1], 8))(angle))
    assert np.isinf(depth).all()
    assert (blue == 229).all()
