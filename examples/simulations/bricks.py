"""Rays through sparse voxels: a grid of bricks, in which only non-empty bricks have voxels.

Each ray is a bounded loop in an expression, which ends early at a hit. It crosses an empty brick in one step,
and other bricks voxel by voxel. The tests compare it with rays that cross a dense grid, in plain Python
(J. Amanatides, A. Woo, A Fast Voxel Traversal Algorithm for Ray Tracing, 1987).

Run it with: python bricks.py --size 32 --steps 100 --out island.apng
"""

from __future__ import annotations

from functools import partial

import numpy as np
from simulation import Simulation, State, Step, program

import trio_accel as ta

EDGE, TURN = 8, 0.03  # voxels along a brick's edge; rotation of the camera per step
# Nothing, water, sand, meadow, snow.
PAINT = np.array([(0, 0, 0), (0.2, 0.45, 0.7), (0.9, 0.8, 0.55), (0.35, 0.6, 0.3), (0.95, 0.95, 1)])
MARCH = """
across = (i(1) + 0.5 - {width} / 2) / {height}; up = 0.5 - (i(0) + 0.5) / {height}
at = vector(0.5 + 1.2*cos(turned), 0.5 + 1.2*sin(turned), 0.85) * {voxels}
way = vector(-cos(turned) - across*sin(turned), across*cos(turned) - sin(turned), up - 0.6)
way = where(abs(way) < 1e-9, 1e-9, way)
near = minimum(-at / way, ({voxels} - at) / way)
far = maximum(max(near), 0) + 1e-4
face = where(near.x == max(near), 0, where(near.y == max(near), 1, 2))
colour = 0
for k in range({limit}):
    place = floor(at + far*way)
    if min(place) < 0 or max(place) >= {voxels}:
        break
    x = int(place.x); y = int(place.y); z = int(place.z)
    brick = grid[x // {edge}, y // {edge}, z // {edge}]
    size = {edge}.0
    if brick >= 0:
        size = 1.0
        colour = int(voxels[brick, x % {edge}, y % {edge}, z % {edge}])
        if colour > 0:
            break
    low = floor(place / size) * size
    out = (low + where(way > 0, size, 0.0) - at) / way
    face = where(out.x == min(out), 0, where(out.y == min(out), 1, 2))
    far = min(out) + 1e-4
lit = where(face == 0, 0.75, where(face == 1, 0.6, 1.0)) * exp(-0.4*far / {voxels})
seen = colour > 0
depth = where(seen, far, inf)
red = uint8(255 * where(seen, lit*paint[colour, 0], 0.55 + 0.3*up))
green = uint8(255 * where(seen, lit*paint[colour, 1], 0.7 + 0.2*up))
blue = uint8(255 * where(seen, lit*paint[colour, 2], 0.9))
"""


async def step_of(grid: ta.AccelRef, voxels: ta.AccelRef, height: int) -> Step:
    """Return the step of a camera that moves around: images of shape (height, height * 3 / 2).

    The grid has the number of each brick, or -1 for an empty brick: int32 of shape (n, n, n). Voxels are
    numbers of colours, or 0 if they are empty: uint8 of shape (bricks, 8, 8, 8).
    """
    n, width = grid.shape[0], height * 3 // 2
    text = MARCH.format(height=height, width=width, edge=EDGE, voxels=n * EDGE, limit=4 * n * EDGE)
    outputs = ("depth", "red", "green", "blue")
    march = ta.jit.elementwise(
        text, inputs=("turned", "grid", "voxels", "paint"), outputs=outputs, name="march"
    )
    paint = await grid.device.put(PAINT)

    async def step(angle: ta.AccelRef, *_: ta.AccelRef) -> State:
        angle = await (angle + TURN)
        return angle, *await march(angle, grid, voxels, paint, shape=(height, width))

    return step


def island(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an island of water, sand, meadows and snow, as a grid and the voxels of non-empty bricks."""
    rng, size = np.random.default_rng(seed), n * EDGE
    x, y = np.indices((size, size)) / size - 0.5
    height = 0.5 - 2.2 * (x * x + y * y)
    for waves in (1, 2, 4, 8):
        turn, *phases = 2 * np.pi * rng.random(3)
        along, across = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
        height += 0.2 / waves * np.sin(9 * waves * along + phases[0]) * np.sin(9 * waves * across + phases[1])
    ground, z = height[..., None] * size, np.arange(size)
    soil = np.where(z < 0.16 * size, 2, np.where(z < 0.45 * size, 3, 4))
    colours = np.where(z < ground, soil, z < 0.12 * size)
    bricks = colours.astype(np.uint8).reshape(n, EDGE, n, EDGE, n, EDGE).transpose(0, 2, 4, 1, 3, 5)
    is_full = bricks.any((3, 4, 5))
    return np.where(is_full, np.cumsum(is_full).reshape(is_full.shape) - 1, -1).astype(np.int32), bricks[
        is_full
    ]


async def start(device: ta.Device, size: int, seed: int) -> tuple[State, Step]:
    """Make an island in a grid of `size` bricks along each edge, and its first image."""
    grid, voxels = island(size, seed)
    step = await step_of(await device.put(grid), await device.put(voxels), 8 * size)
    angle = await device.put(np.asarray(0.3))
    return (angle, *(await step(angle))[1:]), step


def picture(_: np.ndarray, __: np.ndarray, *channels: np.ndarray) -> np.ndarray:
    """Return the image of the camera."""
    return np.stack(channels, axis=-1)


SIMULATION = Simulation(start=start, picture=picture)
main = partial(program, __doc__, SIMULATION, size=16, steps=20)

if __name__ == "__main__":
    raise SystemExit(main())
