"""Sparse matrices beside CuPy's in one process: ``python -m benchmarks.gpu.sparse_solvers [SCALE]``.

The five-point Laplacian of a square of 10^6 points, in float64. First 500 steps of conjugate gradients,
without and with division by the diagonal: the solver looks at its residual every 10 steps, CuPy's at each.
Then one call each of what makes matrices of others, of a triangular solution and of incomplete factors. Each
line tells the median of calls that take turns. ``--device`` names another device than CUDA's.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import scipy.sparse
import trio

import trio_accel as ta
from trio_accel import sparse

__all__ = ["main"]

_POINTS, _STEPS, _ROUNDS = 1000, 500, 5

Ours = Callable[[], Awaitable[object]]
Theirs = Callable[[], object]


def laplacian(points: int) -> Any:
    """Make the five-point Laplacian of a square of so many points a side."""
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(points, points))
    eye = scipy.sparse.eye_array(points)
    return scipy.sparse.csr_array(scipy.sparse.kron(line, eye) + scipy.sparse.kron(eye, line))


async def compare(name: str, device: ta.Device, ours: Ours, theirs: Theirs | None) -> None:
    """Print the time of a call of each side."""
    found: tuple[list[float], list[float]] = [], []
    for number in range(_ROUNDS + 1):
        start = time.perf_counter()
        await ours()
        await device.synchronize()
        took = [time.perf_counter() - start]
        if theirs is not None:
            start = time.perf_counter()
            theirs()
            took.append(time.perf_counter() - start)
        # The first call compiles.
        if number:
            for times, one in zip(found, took, strict=False):
                times.append(one)
    mine = statistics.median(found[0]) * 1e3
    told = f"  {name:<34} {mine:9.2f} ms"
    if found[1]:
        other = statistics.median(found[1]) * 1e3
        told += f"   CuPy {other:9.2f} ms   {other / mine:6.2f} ×"
    sys.stdout.write(f"{told}\n")
    sys.stdout.flush()


async def _steps(a: sparse.CsrMatrix, b: ta.AccelRef, m: Any) -> None:
    with suppress(sparse.ConvergenceError):
        await sparse.cg(a, b, rtol=0.0, maxiter=_STEPS, M=m)


async def solvers(device: ta.Device, matrix: Any, peer: Any) -> None:
    """Compare steps of conjugate gradients."""
    unknowns = int(matrix.shape[0])
    b = np.random.default_rng(0).normal(size=unknowns)
    a, there = await sparse.csr(device, matrix), await device.put(b)
    for name, m in (("cg", None), ("cg, jacobi", await sparse.precondition(a))):

        async def ours(m: Any = m) -> None:
            await _steps(a, there, m)

        theirs = None if peer is None else peer.cg(matrix, b, has_jacobi=m is not None)
        await compare(f"{_STEPS} steps of {name}", device, ours, theirs)


async def structures(device: ta.Device, matrix: Any, peer: Any) -> None:
    """Compare conversions, sums, products, and solutions."""
    a = await sparse.csr(device, matrix)
    entries = await sparse.coo(device, matrix)
    b = await device.put(np.ones(matrix.shape[0]))
    ways: dict[str, tuple[Ours, str]] = {
        "tocsr of coordinates": (lambda: sparse.tocsr(entries), "tocsr"),
        "tocsc": (lambda: sparse.tocsc(a), "tocsc"),
        "add": (lambda: sparse.add(a, a), "add"),
        "spgemm": (lambda: sparse.spgemm(a, a), "spgemm"),
        "tril": (lambda: sparse.tril(a), "tril"),
        "spsolve_triangular": (lambda: sparse.spsolve_triangular(a, b), "spsolve_triangular"),
        "ilu0": (lambda: sparse.ilu0(a), ""),
    }
    theirs: dict[str, Theirs] = {} if peer is None else peer.structures(matrix)
    for name, (ours, theirs_name) in ways.items():
        await compare(name, device, ours, theirs.get(theirs_name))


class _CuPy:
    """The same by CuPy; each call waits for its end."""

    def __init__(self) -> None:
        self._cupy = import_module("cupy")
        self._sparse = import_module("cupyx.scipy.sparse")
        self._linalg = import_module("cupyx.scipy.sparse.linalg")

    def _waited(self, call: Theirs) -> Theirs:
        def waited() -> None:
            call()
            self._cupy.cuda.get_current_stream().synchronize()

        return waited

    def cg(self, matrix: Any, b: Any, *, has_jacobi: bool) -> Theirs:
        cg, a, there = self._linalg.cg, self._sparse.csr_matrix(matrix), self._cupy.asarray(b)
        m = self._sparse.diags(1 / self._cupy.asarray(matrix.diagonal())) if has_jacobi else None
        tolerance = "rtol" if "rtol" in inspect.signature(cg).parameters else "tol"
        return self._waited(lambda: cg(a, there, maxiter=_STEPS, M=m, **{tolerance: 0.0}))

    def structures(self, matrix: Any) -> dict[str, Theirs]:
        a, linalg, sparse_ = self._sparse.csr_matrix(matrix), self._linalg, self._sparse
        entries, b = a.tocoo(), self._cupy.ones(matrix.shape[0])
        lower = sparse_.tril(a, format="csr")
        ways: dict[str, Theirs] = {
            "tocsr": lambda: sparse_.coo_matrix((entries.data, (entries.row, entries.col)), a.shape).tocsr(),
            "tocsc": a.tocsc,
            "add": lambda: a + a,
            "spgemm": lambda: a @ a,
            "tril": lambda: sparse_.tril(a, format="csr"),
            "spsolve_triangular": lambda: linalg.spsolve_triangular(lower, b),
        }
        return {name: self._waited(call) for name, call in ways.items()}


async def _run(scale: float, name: str) -> None:
    matrix = laplacian(max(8, int(_POINTS * scale**0.5)))
    async with ta.open_system("sparse-solvers") as system, system.open_device(name) as device:
        peer = _CuPy() if device.info.name.startswith("cuda") and find_spec("cupy") is not None else None
        sys.stdout.write(f"{device.info.description}: {matrix.shape[0]} unknowns, {matrix.nnz} values\n")
        for part in (solvers, structures):
            await part(device, matrix, peer)


def main() -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.sparse_solvers")
    parser.add_argument("scale", nargs="?", type=float, default=1.0)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    trio.run(_run, given.scale, given.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
