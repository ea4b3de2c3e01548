"""Heat on a plate: conjugate gradients solve a sparse system for each time step, in a worker process.

Halfway, the program kills the worker. The device starts another worker and runs the interrupted operation
again, so the numbers stay the same.

Run it with: python heat.py --points 24
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import trio
from scipy import sparse

import trio_accel as ta


def laplacian(points: int) -> sparse.csr_array:
    """Return the five-point Laplacian of a square with cold edges."""
    line = sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(points, points))
    eye = sparse.eye_array(points)
    return sparse.csr_array(sparse.kron(line, eye) + sparse.kron(eye, line))


async def cool(device: ta.Device, matrix: sparse.csr_array, heat: np.ndarray, steps: int) -> np.ndarray:
    """Take implicit steps, each of which solves (1 + dt * Laplacian) @ new = old."""
    a = await ta.sparse.csr(device, matrix)
    jacobi = await ta.sparse.precondition(a, "jacobi")
    x = await device.put(heat)
    for step in range(steps):
        if step == steps // 2:
            # Kill the worker during its next steps of conjugate gradients.
            ta.testing.inject_fault(device, ta.sparse.CgSteps, kill=True)
        found = await ta.sparse.cg(a, x, rtol=1e-10, M=jacobi)
        print(f"step {step}: {found.iterations} iterations, generation {device.generation}")
        x = found.x
    return await x.to_host()


async def run(points: int, steps: int) -> float:
    """Return the largest error, which is known because each wave decays by a fixed factor in each step."""
    start = expected = np.zeros(points**2)
    for number in range(1, points + 1):
        angle = number * np.pi / (points + 1)
        wave = np.sin(angle * np.arange(1, points + 1))
        start = start + np.outer(wave, wave).ravel()
        expected = expected + np.outer(wave, wave).ravel() / (5 - 4 * np.cos(angle)) ** steps
    matrix = sparse.csr_array(sparse.eye_array(points**2) + laplacian(points))
    options = ta.DeviceOptions(isolation="process", retry=1)
    async with ta.open_system("plate") as system, system.open_device("cpu", options=options) as device:
        found = await cool(device, matrix, start, steps)
    return float(np.abs(found - expected).max())


def main() -> int:
    """Return the exit code: 0 if the heat is right."""
    parser = argparse.ArgumentParser(description="Heat on a plate, by conjugate gradients in a worker.")
    parser.add_argument("--points", type=int, default=24, help="inner points of the grid in each direction")
    parser.add_argument("--steps", type=int, default=4, help="time steps")
    arguments = parser.parse_args()
    error = trio.run(partial(run, arguments.points, arguments.steps))
    print(f"largest error {error:.1e}: {'right' if error < 1e-8 else 'WRONG'}")
    return 0 if error < 1e-8 else 1


if __name__ == "__main__":
    raise SystemExit(main())
