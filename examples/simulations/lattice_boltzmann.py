"""The flow around a cylinder by a lattice Boltzmann method: D2Q9, one relaxation time (BGK), pull scheme.

The tests compare it with the Taylor-Green vortex, with a speed that decays as exp(-2 nu k^2 t), and with the
sums of mass and momentum, which collisions conserve. Source: T. Krueger et al., The Lattice Boltzmann Method,
2017.

Run it with: python lattice_boltzmann.py --size 96 --steps 8000 --out street.png
"""

from __future__ import annotations

from functools import partial

import numpy as np
from drawing import coloured
from simulation import Simulation, State, Step, program

import trio_accel as ta

# Directions (down, right), their weights, and the numbers of the opposite directions.
DIRECTIONS = ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, -1), (-1, 1))
WEIGHTS = (4 / 9, *[1 / 9] * 4, *[1 / 36] * 4)
OPPOSITE = (0, 3, 4, 1, 2, 7, 8, 5, 6)
FLUID, SOLID, INLET = 0, 1, 2
SPEED, REYNOLDS = 0.1, 150


def update_of(height: int, width: int) -> ta.jit.Elementwise[State]:
    """Return the expression of a step, from node kinds, the relaxation rate, and the flows."""
    lines = [
        f"g{k} = f{k}[(i(0) - ({down})) % {height}, (i(1) - ({right})) % {width}]"
        for k, (down, right) in enumerate(DIRECTIONS)
    ]
    lines += ["rho = " + " + ".join(f"g{k}" for k in range(9))]
    for name, axis in (("v", 0), ("u", 1)):
        moving = [f"({each[axis]})*g{k}" for k, each in enumerate(DIRECTIONS) if each[axis]]
        lines += [f"{name} = ({' + '.join(moving)}) / rho"]
    lines += ["rest = 1 - 1.5*(u*u + v*v)"]
    for k, (down, right) in enumerate(DIRECTIONS):
        lines += [f"c{k} = ({right})*u + ({down})*v"]
        lines += [f"fluid{k} = g{k} + omega*({WEIGHTS[k]}*rho*(rest + 3*c{k} + 4.5*c{k}*c{k}) - g{k})"]
        # A wall reflects the incoming flow; the inlet always has the same inflow.
        new = WEIGHTS[k] * (1 - 1.5 * SPEED**2 + 3 * right * SPEED + 4.5 * (right * SPEED) ** 2)
        lines += [f"o{k} = where(kind == {FLUID}, fluid{k}, where(kind == {SOLID}, g{OPPOSITE[k]}, {new}))"]
    return ta.jit.elementwise(
        "; ".join(lines),
        inputs=("kind", "omega", *(f"f{k}" for k in range(9))),
        outputs=tuple(f"o{k}" for k in range(9)),
        name="boltzmann",
    )


def step_of(kind: ta.AccelRef, omega: float) -> Step:
    """Return the step of a grid with nodes of these kinds, uint8 of shape (h, w)."""
    update = update_of(*kind.shape)

    async def step(*flows: ta.AccelRef) -> State:
        return await update(kind, omega, *flows)

    return step


def equilibrium(rho: np.ndarray, v: np.ndarray, u: np.ndarray) -> list[np.ndarray]:
    """Return the flows of the equilibrium with this density and these velocities down and right."""
    along = [down * v + right * u for down, right in DIRECTIONS]
    rest = 1 - 1.5 * (u * u + v * v)
    return [w * rho * (rest + 3 * c + 4.5 * c * c) for w, c in zip(WEIGHTS, along, strict=True)]


def moments(*flows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the density, and the velocities down and right."""
    rho = np.sum(flows, axis=0)
    v, u = (sum(each[axis] * f for each, f in zip(DIRECTIONS, flows, strict=True)) / rho for axis in (0, 1))
    return rho, v, u


def cylinder(size: int) -> tuple[np.ndarray, float]:
    """Return node kinds of a channel with a cylinder, (size, 3 size), and the relaxation rate."""
    down, right = np.indices((size, 3 * size))
    diameter = size / 6
    kind = np.where(np.hypot(down - size / 2, right - size / 2) < diameter / 2, SOLID, FLUID)
    kind[:, 0] = INLET
    return kind.astype(np.uint8), 1 / (3 * SPEED * diameter / REYNOLDS + 0.5)


async def start(device: ta.Device, size: int, seed: int) -> tuple[State, Step]:
    """Start a stream around a cylinder, with a little noise to break the symmetry."""
    kind, omega = cylinder(size)
    noise = 1e-3 * np.random.default_rng(seed).standard_normal(kind.shape)
    flows = equilibrium(np.ones(kind.shape), noise, np.where(kind == SOLID, 0.0, SPEED))
    step = step_of(await device.put(kind), omega)
    return tuple([await device.put(flow) for flow in flows]), step


def picture(*flows: np.ndarray) -> np.ndarray:
    """Return a picture of the vorticity: blue turns counterclockwise, red clockwise."""
    _, v, u = moments(*flows)
    curl = np.gradient(v, axis=1) - np.gradient(u, axis=0)
    return coloured(0.5 + 0.5 * curl / (0.25 * SPEED), "RdBu_r")


SIMULATION = Simulation(start=start, picture=picture)
main = partial(program, __doc__, SIMULATION, size=48, steps=2000)

if __name__ == "__main__":
    raise SystemExit(main())
