"""Cloth that hangs by two corners and falls onto a ball, with Verlet's method or with XPBD.

Each particle has 12 springs: along the threads, diagonally, and to the second neighbours along the threads.
XPBD runs one iteration in each small step, in which all springs correct their particles at once. The tests
compare both methods with free fall, and with NumPy step by step. Verlet's method must also conserve energy.
Sources: L. Verlet, 1967; M. Macklin et al., XPBD, 2016, and Small Steps in Physics Simulation, 2019.

Run it with: python cloth.py --solver xpbd --out cloth.apng
"""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import trio
from drawing import lit
from simulation import Simulation, State, Step, command, simulate

import trio_accel as ta

NEIGHBOURS = [(a, b) for a, b in product(range(-2, 3), repeat=2) if 0 < a * a + b * b <= 4]
SMALL_STEPS = 16
BALL, RADIUS = (0.0, 0.5, -0.6), 0.25
# In units of a small step: stiffness of a spring, share of a correction to apply, compliance, share of the
# speed to keep, fall.
STIFFNESS, SHARE, COMPLIANCE, KEPT, FALL = 0.1, 0.125, 1e-3, 0.9995, 0.01


def make(*lines: str) -> ta.jit.Elementwise[tuple[ta.AccelRef, ...]]:
    """Return an expression that computes new positions from the current and the previous positions."""
    text = "; ".join(["at = vector(x, y, z)", *lines, "nx = new.x; ny = new.y; nz = new.z"])
    names = ("free", *"xyz", "px", "py", "pz") if "px" in text else ("free", *"xyz")
    return ta.jit.elementwise(text, inputs=names, outputs=("nx", "ny", "nz"), name="cloth")


def pulls(n: int, strength: str) -> str:
    """Return source that sums the pulls of a particle's springs, in an n x n cloth."""
    lines = ["pull = vector(0.0, 0.0, 0.0)"]
    for k, (a, b) in enumerate(NEIGHBOURS):
        there = f"[clip(i(0) + ({a}), 0, {n - 1}), clip(i(1) + ({b}), 0, {n - 1})]"
        is_inside = f"0 <= i(0) + ({a}) < {n} and 0 <= i(1) + ({b}) < {n}"
        lines += [f"d{k} = vector(x{there}, y{there}, z{there}) - at"]
        share = f"{strength.format(there=there)} * (1 - {np.hypot(a, b) / (n - 1)} / length(d{k}))"
        lines += [f"pull = pull + d{k} * where({is_inside}, {share}, 0)"]
    return "; ".join(lines)


def step_of(free: ta.AccelRef, solver: str, *, kept: float = KEPT, radius: float = RADIUS) -> Step:
    """Return the step of particles; `free` is 1 for free and 0 for held ones, float64 of shape (n, n)."""
    n = free.shape[0]
    fly = f"speed = (at - vector(px, py, pz))*{kept} - vector(0, 0, {FALL / n / n})"
    # The ball pushes particles out.
    out = f"ball = vector{BALL}; out = new - ball; new = ball + out*maximum(1, {radius} / length(out))"
    verlet = make(fly, pulls(n, "1"), f"new = at + free*(speed + {STIFFNESS}*pull)", out)
    foresee = make(fly, "new = at + free*speed")
    weight = f"{SHARE} * free / (free + free{{there}} + {COMPLIANCE})"
    correct = make(pulls(n, weight), "new = at + pull", out)

    async def step(*state: ta.AccelRef) -> State:
        now, before = state[:3], state[3:]
        for _ in range(SMALL_STEPS):
            if solver == "verlet":
                new = await verlet(free, *now, *before)
            else:
                new = await correct(free, *await foresee(free, *now, *before))
            now, before = new, now
        return *now, *before

    return step


async def start(device: ta.Device, size: int, seed: int, *, solver: str = "verlet") -> tuple[State, Step]:
    """Make a flat sheet of 1 x 1 with a little noise, which hangs by two of its corners."""
    y, x = np.indices((size, size)) / (size - 1)
    noise = np.random.default_rng(seed).normal(scale=1e-4, size=(size, size))
    free = np.ones(x.shape)
    free[[0, -1], 0] = 0
    place = [await device.put(x), await device.put(y), await device.put(noise)]
    return (*place, *place), step_of(await device.put(free), solver)


def picture(x: np.ndarray, y: np.ndarray, z: np.ndarray, *_: np.ndarray) -> np.ndarray:
    """Return a picture of the cloth and the ball."""
    turn, tilt = np.mgrid[0 : 2 * np.pi : 25j, 0 : np.pi : 13j]
    ball = np.stack([np.cos(turn) * np.sin(tilt), np.sin(turn) * np.sin(tilt), np.cos(tilt)])
    every = max(1, len(x) // 64)
    cloth = np.stack([x, y, z])[:, ::every, ::every]
    return lit([cloth, 0.95 * RADIUS * ball + np.reshape(BALL, (3, 1, 1))], [(200, 75, 50), (100, 130, 180)])


SIMULATION = Simulation(start=start, picture=picture)


def main() -> int:
    """Return the exit code."""
    parser = command(__doc__, size=32, steps=200)
    parser.add_argument("--solver", choices=["verlet", "xpbd"], default="verlet")
    arguments = parser.parse_args()
    made = Simulation(start=partial(start, solver=arguments.solver), picture=picture)
    return trio.run(simulate, arguments, made)


if __name__ == "__main__":
    raise SystemExit(main())
