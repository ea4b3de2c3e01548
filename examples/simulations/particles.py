"""Grains that fall, pile up and push one another apart: a step is a sort by cells and two expressions.

Only grains in the nine surrounding cells can touch. Three cells in a row are adjacent in a list sorted by
cells, so forces are sums over three ranges. The tests compare it with plain Python, bit for bit, and check
the momentum.
Source: P. Cundall, O. Strack, A Discrete Numerical Model for Granular Assemblies, 1979.

Run it with: python particles.py --size 20000 --steps 2000 --out grains.apng
"""

from __future__ import annotations

from functools import partial

import numpy as np
from drawing import coloured
from simulation import Simulation, State, Step, program

import trio_accel as ta

# The unit is the distance at which grains touch, and the edge of a cell.
STIFFNESS, DAMPING, BOUNCE = 0.1, 0.05, 0.3
NAMES = ("y", "x", "v", "u", "tag")  # places and speeds, down and to the right
SORT = ta.jit.elementwise(
    "; ".join(f"{name}_ = {name}[order]" for name in NAMES),
    inputs=("order", *NAMES),
    outputs=tuple(f"{name}_" for name in NAMES),
    name="sort",
)
PUSH = ta.jit.elementwise(
    f"""
at = vector(y, x)
speed = vector(v, u)
row = int(y)
column = int(x)
force = vector(fall, 0.0)
for r in range(maximum(row - 1, 0), minimum(row + 2, cells)):
    for j in range(starts[r*cells + maximum(column - 1, 0)], starts[r*cells + minimum(column + 2, cells)]):
        apart = at - vector(y[j], x[j])
        squared = dot(apart, apart)
        part = 1 / sqrt(squared)
        closing = dot(vector(v[j], u[j]) - speed, apart) * part * part
        if squared > 0 and squared < 1:
            force += apart * ({STIFFNESS}*(part - 1) + {DAMPING}*closing)
speed += force
new = at + speed
held = clip(new, 0.0, cells - 1e-6)
speed = where(new == held, speed, -{BOUNCE}*speed)
ny = held.x; nx = held.y; nv = speed.x; nu = speed.y
""",
    inputs=("y", "x", "v", "u", "starts", "cells", "fall"),
    outputs=("ny", "nx", "nv", "nu"),
    name="push",
)


def step_of(cells: int, fall: float) -> Step:
    """Return the step of grains in a square of `cells` cells along each edge."""

    async def step(*grains: ta.AccelRef) -> State:
        places = ta.arrays.stack(list(grains[:2]), axis=1)
        order, starts, *_ = await ta.spatial.cell_list(places, 1.0, low=0.0, shape=cells)
        by_cells = await SORT(order, *grains)
        return *await PUSH(*by_cells[:4], starts, cells, fall), by_cells[4]

    return step


async def start(device: ta.Device, size: int, seed: int) -> tuple[State, Step]:
    """Place `size` grains in the left half of a square, which is half full."""
    cells = int(np.sqrt(2 * size)) + 2
    y, x = cells * np.random.default_rng(seed).random((2, size)) * [[1], [0.5]]
    state = y, x, np.zeros(size), np.zeros(size), y / cells
    return tuple([await device.put(array) for array in state]), step_of(cells, 0.02 / cells)


def picture(y: np.ndarray, x: np.ndarray, _: np.ndarray, __: np.ndarray, tag: np.ndarray) -> np.ndarray:
    """Return a picture of the grains, coloured by their initial layers."""
    cells = int(np.sqrt(2 * len(x))) + 2
    scale = max(1, 400 // cells)
    image = np.zeros((scale * (cells + 1), scale * (cells + 1), 3), np.uint8)
    for down, right in np.ndindex(scale, scale):
        image[(scale * y).astype(int) + down, (scale * x).astype(int) + right] = coloured(tag, "turbo")
    return image


SIMULATION = Simulation(start=start, picture=picture)
main = partial(program, __doc__, SIMULATION, size=1000, steps=50)

if __name__ == "__main__":
    raise SystemExit(main())
