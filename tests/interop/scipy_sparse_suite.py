"""Runs tests of SciPy in a worker thread of a Trio run, with solvers of `ta.sparse` in place of its own.

    python scipy_sparse_suite.py REPORT TEST...

writes a JSON document to REPORT: for each test its outcome, its error, and how many solutions it asked of the
device. An adapter is as thin as can be: it puts matrices and vectors on the device, and takes what SciPy's
function has and ours has not as a reason to skip.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
import trio
from scipy_fft_suite import Recorder

import trio_accel as ta
from trio_accel import sparse

PACKAGE = "scipy.sparse.linalg"
ITERATIVE = {"cg": sparse.cg, "bicgstab": sparse.bicgstab, "gmres": sparse.gmres, "minres": sparse.minres}

# Tests of functions that stay SciPy's; the last one iterates with a nonlinear function.
OTHERS = (
    r"\b(bicg|cgs|gcrotmk|lgmres|qmr|tfqmr)\b|nonsymmetric|eigs_|"
    r"TestQMR|TestSplu|TestFactorized|TestGstrs|reentering"
)


def has_none_of(**given: Any) -> None:
    """Skip a test of a missing function."""
    for name, value in given.items():
        if value is not None and value is not False:
            pytest.skip(f"there is no {name}")


class Solvers:
    """SciPy's functions, by a device.

    Attributes:
        calls: How many solutions were asked for.
    """

    def __init__(self, device: ta.Device) -> None:
        self.calls = 0
        self._device = device
        # Some tests start threads of their own.
        self._token = trio.lowlevel.current_trio_token()

    def _solve(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        self.calls += 1
        return trio.from_thread.run(ask, trio_token=self._token)

    async def _operand(self, a: Any, dtype: Any) -> Any:
        """Put a matrix on the device, or make a function of a host operator."""
        if scipy.sparse.issparse(a) or isinstance(a, np.ndarray):
            return await sparse.csr(self._device, scipy.sparse.csr_array(a).astype(dtype))

        async def product(x: ta.AccelRef) -> ta.AccelRef:
            made = a.matvec(await x.to_host()) if hasattr(a, "matvec") else a @ await x.to_host()
            return await self._device.put(np.asarray(made, dtype))

        return product

    def iterative(self, name: str) -> Callable[..., Any]:
        def solve(
            A: Any,
            b: Any,
            x0: Any = None,
            *,
            rtol: float = 1e-5,
            atol: float = 0.0,
            maxiter: Any = None,
            M: Any = None,
            callback: Any = None,
            restart: Any = None,
            callback_type: Any = None,
            shift: float = 0.0,
            check: bool = False,
            show: bool = False,
        ) -> Any:
            is_called_in_cycles = name == "gmres" and callback is not None and callback_type != "x"
            if is_called_in_cycles and callback_type is None:
                warnings.warn("called without specifying `callback_type`", DeprecationWarning, stacklevel=2)
            has_none_of(
                shift=shift or None, check=check, show=show, callback_within_a_cycle=is_called_in_cycles
            )
            if M is None and hasattr(A, "psolve"):
                M = scipy.sparse.linalg.LinearOperator(A.shape, A.psolve)
            shape, b = np.shape(b), np.asarray(b)
            if isinstance(x0, str):
                x0 = b if M is None else M @ b
            dtype = np.result_type(A.dtype, b.dtype, np.float32)
            dtype = dtype if dtype.char in "fdFD" else np.dtype(float)
            more: dict[str, Any] = {"restart": restart} if restart else {}
            more |= {} if name == "gmres" or callback is None else {"check_every": 1}

            async def note(x: ta.AccelRef) -> None:
                callback((await x.to_host()).copy())

            async def ask() -> Any:
                a, m = await self._operand(A, dtype), None
                if M is not None:
                    inverse = await self._operand(M, dtype)

                    async def product(x: ta.AccelRef) -> ta.AccelRef:
                        return await sparse.spmv(inverse, x)

                    m = inverse if callable(inverse) else product
                begin = None if x0 is None else np.asarray(x0, dtype).reshape(-1)
                side = await self._device.put(b.reshape(-1).astype(dtype))
                try:
                    found = await ITERATIVE[name](
                        a,
                        side,
                        begin,
                        rtol=rtol,
                        atol=atol,
                        maxiter=maxiter,
                        M=m,
                        callback=None if callback is None else note,
                        **more,
                    )
                except sparse.ConvergenceError as error:
                    left: Any = error.x
                    return await left.to_host(), maxiter or error.iterations
                return await found.x.to_host(), 0

            x, info = self._solve(ask)
            return x.reshape(shape), info

        solve.__name__ = name
        return solve

    def spsolve(self, A: Any, b: Any, permc_spec: Any = None, use_umfpack: bool = True) -> Any:
        has_none_of(a_sparse_right_side=scipy.sparse.issparse(b))
        b = np.asarray(b)
        dtype = np.result_type(A.dtype, b.dtype, np.float32)

        async def ask() -> Any:
            a = await self._operand(A, dtype)
            column = b.ndim == 2 and b.shape[1] == 1
            try:
                found = await sparse.spsolve(a, (b.ravel() if column else b).astype(dtype))
            except ta.LinAlgError as error:
                # SciPy warns, and returns no numbers.
                warnings.warn(str(error), scipy.sparse.linalg.MatrixRankWarning, stacklevel=2)
                return np.full(b.size if column else b.shape, np.nan)
            return await found.to_host()

        return self._solve(ask)

    def spsolve_triangular(
        self,
        A: Any,
        b: Any,
        lower: bool = True,
        overwrite_A: bool = False,
        overwrite_b: bool = False,
        unit_diagonal: bool = False,
    ) -> Any:
        dtype = np.result_type(A.dtype, b.dtype, np.float32)

        async def ask() -> Any:
            a = await self._operand(A, dtype)
            told = {"unit_diagonal": unit_diagonal}
            return await (await sparse.spsolve_triangular(a, b.astype(dtype), lower, **told)).to_host()

        return self._solve(ask)

    def eigsh(
        self,
        A: Any,
        k: int = 6,
        M: Any = None,
        sigma: Any = None,
        which: Any = "LM",
        v0: Any = None,
        ncv: Any = None,
        maxiter: Any = None,
        tol: float = 0,
        return_eigenvectors: bool = True,
        rng: Any = None,
        **others: Any,
    ) -> Any:
        has_none_of(
            M=M,
            which=None if which in ("LM", "LA", "SA") else which,
            **{name: value for name, value in others.items() if (name, value) != ("mode", "normal")},
        )
        if not (scipy.sparse.issparse(A) or isinstance(A, np.ndarray)):
            has_none_of(sigma=sigma)
        has_none_of(dense_matrix=isinstance(k, int) and k >= A.shape[0])
        dtype = np.result_type(A.dtype, np.float32)

        async def ask() -> Any:
            begin = None
            if v0 is not None or not (scipy.sparse.issparse(A) or isinstance(A, np.ndarray)):
                generator = np.random.default_rng(1)
                given = generator.normal(size=A.shape[0]) if v0 is None else v0
                begin = await self._device.put(np.asarray(given, dtype))
            found = await sparse.eigsh(
                await self._operand(A, dtype), k, which, begin, ncv, maxiter, tol, sigma=sigma
            )
            return await found.eigenvalues.to_host(), await found.eigenvectors.to_host()

        w, v = self._solve(ask)
        return (w, v) if return_eigenvectors else w


def replace(solvers: Solvers) -> None:
    """Have SciPy's tests take these: they import them from where they are defined."""
    made = {name: solvers.iterative(name) for name in ITERATIVE}
    for package, functions in (
        ("_isolve", made),
        ("_dsolve", {"spsolve": solvers.spsolve, "spsolve_triangular": solvers.spsolve_triangular}),
        ("_eigen.arpack", {"eigsh": solvers.eigsh}),
    ):
        module = importlib.import_module(f"{PACKAGE}.{package}")
        for name, function in functions.items():
            assert inspect.isfunction(getattr(module, name))
            setattr(module, name, function)


class Selection:
    """Leaves out tests of other functions by their names."""

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        others = [item for item in items if re.search(OTHERS, item.nodeid)]
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=others)


def run_tests(solvers: Solvers, arguments: list[str]) -> dict[str, dict[str, object]]:
    replace(solvers)
    recorder = Recorder(solvers)
    pytest.main(arguments, plugins=[Selection(), recorder])
    return recorder.tests


async def main(report: str, *tests: str) -> None:
    options = [
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:trio",
        f"--rootdir={Path(report).parent}",
    ]
    backend = os.environ.get("TRIO_ACCEL_BACKEND", "cpu")
    async with ta.open_system("suite") as system:
        device_options = ta.DeviceOptions(isolation="inline")
        async with system.open_device(backend, options=device_options) as device:
            found = await trio.to_thread.run_sync(run_tests, Solvers(device), [*options, "--pyargs", *tests])
    await trio.Path(report).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
