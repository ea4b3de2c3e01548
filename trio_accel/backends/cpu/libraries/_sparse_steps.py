"""Steps of conjugate gradients in the thread of a stream, without the host's part in each of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from scipy import sparse
from scipy.sparse import _sparsetools, linalg

from ...base import DType, HostArray, HostCall
from ...base.contract.ops import real_of
from ..compiled import _triangles as triangles
from ..runtime.blas_threads import matrix_product
from .blas import norm_of

_tools: Any = _sparsetools
_linalg: Any = linalg
_sparse: Any = sparse

Checked: TypeAlias = Callable[[HostArray, HostArray, tuple[int, int]], object]


def factor_triangle(triangle: Any) -> Any:
    """Factor a triangle in its own order, which fills nothing in.

    Raises:
        RuntimeError: SuperLU takes a very small pivot for zero.
    """
    options = {"Equil": False, "SymmetricMode": True}
    return _linalg.splu(triangle.tocsc(), permc_spec="NATURAL", diag_pivot_thresh=0.0, options=options)


def make_steps(spec: Any, call: HostCall, check: Checked) -> None:
    """Make steps and looks at the residual; stop at a look that ends the iteration.

    Args:
        spec: The operation, a `CgSpec`.
        call: The launch.
        check: Refuses row pointers and columns that lead outside.
    """
    indptr, indices, data, b, *begin = map(call.array, spec.read[:8])
    check(indptr, indices, spec.matrix)
    state, best = ([call.array(array) for array in spec.written[k : k + 4]] for k in (0, 4))
    # The last two are not there before the first step.
    for target, source in zip(state[: 2 if spec.is_first else 4], begin, strict=False):
        np.copyto(target, source)
    x, r, p, rz = state
    precondition = _preconditioner(spec, call, check, r)
    tolerance, previous, least_residual, threshold = np.frombuffer(spec.bounds)
    real = real_of(DType.of(x.dtype))
    product: HostArray = np.empty_like(x)
    room: HostArray = np.empty_like(x)

    def multiply(vector: HostArray) -> HostArray:
        product.fill(0)
        _tools.csr_matvec(*spec.matrix, indptr, indices, data, vector, product)
        return product

    if spec.is_first:
        np.copyto(p, precondition())
        rz[...] = _dot(r, p)
    residuals = spec.residuals.view(np.float64)
    residuals[:2] = 0, -1
    for check_number in range(spec.looks):
        for _ in range(spec.steps):
            q = multiply(p)
            step = _quotient(rz[()], _dot(p, q), threshold)
            np.add(x, np.multiply(p, step, out=room), out=x)
            np.subtract(r, np.multiply(q, step, out=room), out=r)
            z = precondition()
            new = _dot(r, z)
            turn = _quotient(new, rz[()], threshold)
            np.add(z, np.multiply(p, turn, out=room), out=p)
            rz[...] = new
        # The residual of a non-finite solution is not finite either, even if the matrix stores nothing for
        # it.
        np.subtract(b, multiply(x), out=room)
        residual = norm_of(np.add(room, np.multiply(x, 0, out=product), out=room), real)
        residuals[0], residuals[check_number + 2] = check_number + 1, residual
        if residual < least_residual or not math.isfinite(least_residual):
            least_residual, residuals[1] = residual, check_number
            for target, source in zip(best, state, strict=False):
                np.copyto(target, source)
        if residual <= tolerance or residual == previous or not math.isfinite(residual):
            return
        previous = residual


def _dot(x: HostArray, y: HostArray) -> Any:
    return matrix_product(np.conj(x) if x.dtype.kind == "c" else x, y)


def _quotient(x: Any, y: Any, threshold: float) -> Any:
    """Divide; return 0 if the divisor has lost its digits, because then nothing is left to do."""
    return x / y if abs(y) > threshold else x.dtype.type(0) * y


def _preconditioner(spec: Any, call: HostCall, check: Checked, r: HostArray) -> Callable[[], HostArray]:
    """Return a function that preconditions a vector with its value at the time of the call."""
    arrays = [call.array(array) for array in spec.read[8:]]
    if not arrays:
        return lambda: r
    z: HostArray = np.empty_like(r)
    if spec.kind == "jacobi":
        (diagonal,) = arrays
        return lambda: np.divide(r, diagonal, out=z)
    half: HostArray = np.empty_like(r)
    is_unit = spec.kind == "ilu0"
    for triangle in (arrays[:3], arrays[3:]):
        check(triangle[0], triangle[1], spec.matrix)
    first = _solution(arrays[:3], r, half, is_lower=True, is_unit=is_unit)
    second = _solution(arrays[3:], half, z, is_lower=False, is_unit=False)

    def apply() -> HostArray:
        first()
        second()
        return z

    return apply


def _solution(
    arrays: list[HostArray], b: HostArray, x: HostArray, *, is_lower: bool, is_unit: bool
) -> Callable[[], object]:
    """Return a function that solves with a triangle."""
    arranged = triangles.arrange(arrays, is_lower=is_lower, is_unit=is_unit)
    if arranged is not None:
        return arranged.bind(b, x)
    indptr, indices, data = arrays
    count = len(b)
    triangle = _sparse.csr_array((data, indices, indptr), shape=(count, count))
    if is_unit:
        triangle = (_sparse.tril(triangle, -1) + _sparse.eye_array(count)).tocsr().astype(data.dtype)
    try:
        solve = factor_triangle(triangle).solve
    except RuntimeError:
        solve = partial(_linalg.spsolve_triangular, triangle, lower=is_lower)
    return lambda: np.copyto(x, solve(b))
