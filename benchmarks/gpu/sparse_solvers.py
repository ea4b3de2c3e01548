"""Sparse matrices beside CuPy's in one process: ``python -m benchmarks.gpu.sparse_solvers [SCALE]``.

The five-point Laplacian of a square of 10^6 points, in float64. First 500 steps of conjugate gradients,
without and with division by the diagonal: the solver looks at its residual every 10 steps, CuPy's at each.
Then 10 cycles of 20 steps of minimal residuals. Then one call each of what makes matrices of others, of a
triangular solution and of incomplete factors. Last direct solutions with 10^4, 10^5 and 10^6 points, beside
cuDSS by its bindings, CuPy's QR and SciPy's SuperLU, these two for few points. Each line tells the median of
calls that take turns. ``--device`` names another device than CUDA's, and ``--only`` some of the parts.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import trio

import trio_accel as ta
from trio_accel import sparse

__all__ = ["main"]

_POINTS, _STEPS, _ROUNDS = 1000, 500, 5
_RESTART, _CYCLES = 20, 10
# Unknowns: more take others minutes.
_MOST_QR, _MOST_SUPERLU = 20_000, 200_000

Ours = Callable[[], Awaitable[object]]
Theirs = Callable[[], object]


def laplacian(points: int) -> Any:
    """Make the five-point Laplacian of a square of so many points a side."""
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(points, points))
    eye = scipy.sparse.eye_array(points)
    return scipy.sparse.csr_array(scipy.sparse.kron(line, eye) + scipy.sparse.kron(eye, line))


async def compare(
    name: str, device: ta.Device, ours: Ours, theirs: Mapping[str, Theirs | None], rounds: int = _ROUNDS
) -> None:
    """Print the time of a call of each side."""
    others = {title: call for title, call in theirs.items() if call is not None}
    found = {title: list[float]() for title in ("", *others)}
    for number in range(rounds + 1):
        start = time.perf_counter()
        await ours()
        await device.synchronize()
        took = [time.perf_counter() - start]
        for call in others.values():
            start = time.perf_counter()
            call()
            took.append(time.perf_counter() - start)
        # The first call compiles.
        if number:
            for times, one in zip(found.values(), took, strict=True):
                times.append(one)
    mine, *rest = (statistics.median(times) * 1e3 for times in found.values())
    told = f"  {name:<34} {mine:9.2f} ms"
    for title, other in zip(others, rest, strict=True):
        told += f"   {title} {other:9.2f} ms   {other / mine:6.2f} ×"
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
        await compare(f"{_STEPS} steps of {name}", device, ours, {"CuPy": theirs})


async def minimal_residuals(device: ta.Device, matrix: Any, peer: Any) -> None:
    """Compare cycles of minimal residuals."""
    b = np.random.default_rng(0).normal(size=int(matrix.shape[0]))
    a, there = await sparse.csr(device, matrix), await device.put(b)

    async def ours() -> None:
        with suppress(sparse.ConvergenceError):
            await sparse.gmres(a, there, rtol=0.0, restart=_RESTART, maxiter=_CYCLES)

    theirs = None if peer is None else peer.gmres(matrix, b)
    await compare(f"{_CYCLES} cycles of gmres", device, ours, {"CuPy": theirs})


async def direct(device: ta.Device, matrix: Any, peer: Any) -> None:
    """Compare direct solutions."""
    most = round(int(matrix.shape[0]) ** 0.5)
    for points in sorted({most // 10, round(most / 10**0.5), most}):
        small = laplacian(points)
        b = np.random.default_rng(0).normal(size=int(points**2))
        a, there = await sparse.csr(device, small), await device.put(b)
        theirs: dict[str, Theirs | None] = {}
        if peer is not None:
            theirs = {"cuDSS": peer.cudss(small, b), "CuPy": peer.direct(small, b, _MOST_QR)}
        if points**2 <= _MOST_SUPERLU:
            theirs["SciPy"] = partial(_superlu, small.tocsc(), b)

        async def ours(a: sparse.CsrMatrix = a, there: ta.AccelRef = there) -> None:
            await sparse.spsolve(a, there)

        rounds = 3 if points**2 <= _MOST_SUPERLU else 1
        await compare(f"spsolve, {points**2} unknowns", device, ours, theirs, rounds)


def _superlu(matrix: Any, b: Any) -> None:
    spsolve: Any = scipy.sparse.linalg.spsolve
    spsolve(matrix, b)


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
        await compare(name, device, ours, {"CuPy": theirs.get(theirs_name)})


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

    def gmres(self, matrix: Any, b: Any) -> Theirs:
        gmres, a, there = self._linalg.gmres, self._sparse.csr_matrix(matrix), self._cupy.asarray(b)
        tolerance = "rtol" if "rtol" in inspect.signature(gmres).parameters else "tol"
        told = {"restart": _RESTART, "maxiter": _RESTART * _CYCLES, tolerance: 0.0, "atol": 0.0}
        return self._waited(lambda: gmres(a, there, **told))

    def direct(self, matrix: Any, b: Any, most: int) -> Theirs | None:
        if matrix.shape[0] > most:
            return None
        a, there = self._sparse.csr_matrix(matrix), self._cupy.asarray(b)
        return self._waited(lambda: self._linalg.spsolve(a, there))

    def cudss(self, matrix: Any, b: Any) -> Theirs:
        """Analyse, factor and solve by the bindings, with threads of the host."""
        cudss, cupy, rows = import_module("nvmath.bindings.cudss"), self._cupy, matrix.shape[0]
        index, kind, general = cudss.DataType.R_32I, cudss.DataType.R_64F, cudss.MatrixType.GENERAL
        indptr, indices = (cupy.asarray(one.astype(np.int32)) for one in (matrix.indptr, matrix.indices))
        data, side, x = cupy.asarray(matrix.data), cupy.asarray(b), cupy.zeros(rows)
        handle = cudss.create()
        path = Path(import_module("cuda.pathfinder").load_nvidia_dynamic_lib("cudss").abs_path)
        if (threads := path.with_name("libcudss_mtlayer_gomp.so.0")).exists():
            cudss.set_threading_layer(handle, str(threads))

        def solve() -> None:
            cudss.set_stream(handle, cupy.cuda.get_current_stream().ptr)
            config, state = cudss.config_create(), cudss.data_create(handle)
            a = cudss.matrix_create_csr(
                rows,
                rows,
                matrix.nnz,
                indptr.data.ptr,
                0,
                indices.data.ptr,
                data.data.ptr,
                index,
                index,
                kind,
                general,
                cudss.MatrixViewType.FULL,
                cudss.IndexBase.ZERO,
            )
            sides = [
                cudss.matrix_create_dn(rows, 1, rows, array.data.ptr, kind, cudss.Layout.COL_MAJOR)
                for array in (x, side)
            ]
            for phase in (cudss.Phase.ANALYSIS, cudss.Phase.FACTORIZATION, cudss.Phase.SOLVE):
                cudss.execute(handle, phase, config, state, a, *sides)
            cupy.cuda.get_current_stream().synchronize()
            for one in (a, *sides):
                cudss.matrix_destroy(one)
            cudss.data_destroy(handle, state)
            cudss.config_destroy(config)

        return solve

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


_PARTS = {"cg": solvers, "gmres": minimal_residuals, "structures": structures, "direct": direct}


async def _run(scale: float, name: str, only: Sequence[str]) -> None:
    matrix = laplacian(max(8, int(_POINTS * scale**0.5)))
    async with ta.open_system("sparse-solvers") as system, system.open_device(name) as device:
        peer = _CuPy() if device.info.name.startswith("cuda") and find_spec("cupy") is not None else None
        sys.stdout.write(f"{device.info.description}: {matrix.shape[0]} unknowns, {matrix.nnz} values\n")
        for part in only:
            await _PARTS[part](device, matrix, peer)


def main() -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.sparse_solvers")
    parser.add_argument("scale", nargs="?", type=float, default=1.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default=",".join(_PARTS), help="parts, with commas in between")
    given = parser.parse_args()
    trio.run(_run, given.scale, given.device, given.only.split(","))
    return 0


if __name__ == "__main__":
    sys.exit(main())
