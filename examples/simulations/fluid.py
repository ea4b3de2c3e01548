"""Smoke that rises in a box, by stable fluids: any time step is stable, however fast the flow.

A stream function gives the velocity of an incompressible fluid. Sine transforms compute it from the
vorticity, which moves with the flow (J. Stam, Stable Fluids, 1999, in the form with vorticity). Viscosity is
exact. The tests compare it with the Taylor-Green vortex, which decays as exp(-2 nu pi^2 t), and with SciPy
step by step.

Run it with: python fluid.py --size 256 --steps 600 --out smoke.apng
"""

from __future__ import annotations

from functools import partial

import numpy as np
from drawing import coloured
from simulation import Simulation, State, Step, program

import trio_accel as ta

VISCOSITY, BUOYANCY = 2e-5, 4.0
# The weights of the surrounding points in an interpolation: linear, and by Catmull and Rom.
LINEAR = {0: "1 - {t}", 1: "{t}"}
CUBIC = {
    -1: "{t}*(-0.5 + {t}*(1 - 0.5*{t}))",
    0: "1 + {t}*{t}*(1.5*{t} - 2.5)",
    1: "{t}*(0.5 + {t}*(2 - 1.5*{t}))",
    2: "{t}*{t}*(0.5*{t} - 0.5)",
}


def sample(names: str, row: str, column: str, weights: dict[int, str], n: int) -> str:
    """Return source that samples n x n arrays at a position, into their names with the suffix _."""
    lines = [f"y = clip({row}, 0, {n - 1}); x = clip({column}, 0, {n - 1})"]
    for axis, place in enumerate("yx"):
        lines += [f"at{axis} = int64(floor({place})); t{axis} = {place} - at{axis}"]
        lines += [f"w{axis}_{k + 1} = {text.format(t=f't{axis}')}" for k, text in weights.items()]
        lines += [f"k{axis}_{k + 1} = clip(at{axis} + ({k}), 0, {n - 1})" for k in weights]
    for name in names:
        rows = [
            f"w0_{a}*(" + " + ".join(f"w1_{b}*{name}[k0_{a}, k1_{b}]" for b in (k + 1 for k in weights)) + ")"
            for a in (k + 1 for k in weights)
        ]
        lines += [f"{name}_ = {' + '.join(rows)}"]
    return "; ".join(lines)


async def step_of(source: ta.AccelRef, viscosity: float = VISCOSITY) -> Step:
    """Return the step of a 1 x 1 box with n x n inner points, and smoke from `source`."""
    n, device = source.shape[0], source.device
    time = 1 / n
    last, scale, rise = n - 1, time * (n + 1) ** 2 / 2, BUOYANCY * time * (n + 1) / 2
    # Velocities are in points per step, to the right (u) and down (v). The stream function of walls is 0.
    velocity = ta.jit.elementwise(
        f"below = where(i(0) < {last}, p[minimum(i(0) + 1, {last}), i(1)], 0); "
        "above = where(i(0) > 0, p[maximum(i(0) - 1, 0), i(1)], 0); "
        f"right = where(i(1) < {last}, p[i(0), minimum(i(1) + 1, {last})], 0); "
        "left = where(i(1) > 0, p[i(0), maximum(i(1) - 1, 0)], 0); "
        f"u = {scale} * (below - above); v = {scale} * (left - right)",
        inputs=("p",),
        outputs=("u", "v"),
        name="velocity",
    )
    flow = ta.jit.elementwise(
        f"{sample('uv', 'i(0) - 0.5*v', 'i(1) - 0.5*u', LINEAR, n)}; down = v_; along = u_; "
        f"{sample('ws', 'i(0) - down', 'i(1) - along', CUBIC, n)}; "
        f"slope = s[i(0), minimum(i(1) + 1, {last})] - s[i(0), maximum(i(1) - 1, 0)]; "
        f"curl = w_ - {rise}*slope; smoke = maximum(clip(s_, 0, 1), source)",
        inputs=("source", *"wsuv"),
        outputs=("curl", "smoke"),
        name="flow",
    )
    waves = (np.pi * np.arange(1, n + 1)) ** 2
    squares = waves[:, None] + waves
    kept = np.exp(-viscosity * time * squares)
    decay, stream = await device.put(kept), await device.put(kept / squares)

    async def step(w: ta.AccelRef, p: ta.AccelRef, s: ta.AccelRef) -> State:
        u, v = await velocity(p, shape=p.shape)
        curl, smoke = await flow(source, w, s, u, v)
        spectrum = await ta.fft.dstn(curl, type=1)
        w, p = await ta.fft.idstn(spectrum * decay, type=1), await ta.fft.idstn(spectrum * stream, type=1)
        return w, p, smoke

    return step


def source_of(size: int, seed: int) -> np.ndarray:
    """Return a slightly uneven source of smoke at the bottom."""
    down, right = np.indices((size, size)) / size
    uneven = 1 + 0.1 * np.random.default_rng(seed).standard_normal((size, size))
    near = np.exp(-((down - 0.92) ** 2 + (right - 0.5) ** 2) / 0.03**2)
    source: np.ndarray = np.clip(near * uneven, 0, 1)
    return source


async def start(device: ta.Device, size: int, seed: int) -> tuple[State, Step]:
    """Start with still air, and a source of smoke."""
    still = [await device.put(np.zeros((size, size))) for _ in range(3)]
    return tuple(still), await step_of(await device.put(source_of(size, seed)))


def picture(_: np.ndarray, __: np.ndarray, smoke: np.ndarray) -> np.ndarray:
    """Return a picture of the smoke, which is bright if dense."""
    return coloured(smoke, "magma")


SIMULATION = Simulation(start=start, picture=picture)
main = partial(program, __doc__, SIMULATION, size=64, steps=200)

if __name__ == "__main__":
    raise SystemExit(main())
