"""Conjugate gradients for the Poisson equation on a square; matrix and vectors stay on the device.

Run it with: python conjugate_gradient.py --points 64
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import trio
from scipy import sparse

import trio_accel as ta


def poisson(points: int) -> sparse.csr_array:
    """Return the five-point Laplacian on a grid of ``points`` × ``points`` inner points."""
    line = sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(points, points))
    eye = sparse.eye_array(points)
    return sparse.csr_array(sparse.kron(line, eye) + sparse.kron(eye, line))


async def solve(device: ta.Device, a: sparse.csr_array, b: np.ndarray, rtol: float) -> tuple[np.ndarray, int]:
    """Return the solution of ``a x = b`` and the number of iterations (Hestenes and Stiefel, 1952)."""
    matrix = await ta.sparse.csr(device, a)
    x, r = await device.put(np.zeros_like(b)), await device.put(b)
    p = await r.copy()
    start = norm = float(await ta.linalg.nrm2(r).item())
    iterations = 0
    while norm > rtol * start:
        q = await ta.sparse.spmv(matrix, p)
        alpha = norm**2 / float(await ta.linalg.dot(p, q).item())
        await ta.linalg.axpy(alpha, p, x)
        await ta.linalg.axpy(-alpha, q, r)
        previous, norm = norm, float(await ta.linalg.nrm2(r).item())
        await ta.linalg.scal((norm / previous) ** 2, p)
        await ta.linalg.axpy(1.0, r, p)
        q.release()
        iterations += 1
    return await x.to_host(), iterations


async def run(points: int, rtol: float, backend: str | None) -> float:
    """Return the relative residual, computed with SciPy."""
    a = poisson(points)
    b = np.ones(points**2)
    async with ta.open_system("poisson") as system, system.open_device(backend) as device:
        x, iterations = await solve(device, a, b, rtol)
    print(f"{points**2} unknowns, {iterations} iterations on {device.info.name}")
    print(f"largest value {x.max() / (points + 1) ** 2:.5f} (0.07367 on ever finer grids)")
    return float(np.linalg.norm(b - a @ x) / np.linalg.norm(b))


def main() -> int:
    """Return the exit code: 0 if the residual is within the tolerance."""
    parser = argparse.ArgumentParser(description="The Poisson equation by conjugate gradients.")
    parser.add_argument("--points", type=int, default=64, help="inner points of the grid in each direction")
    parser.add_argument("--rtol", type=float, default=1e-10, help="relative residual at which to stop")
    parser.add_argument("--backend", help="device to use, such as cpu or cuda:1")
    arguments = parser.parse_args()
    residual = trio.run(partial(run, arguments.points, arguments.rtol, arguments.backend))
    is_right = residual <= 1.1 * arguments.rtol
    print(f"relative residual {residual:.1e}: {'right' if is_right else 'WRONG'}")
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
