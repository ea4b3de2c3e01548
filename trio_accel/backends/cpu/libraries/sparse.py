"""Operations with sparse matrices, by SciPy's compiled loops.

Arrays of SciPy's own classes would look through all indices, and make one more array, for each operation. The
loops add to what they are given.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
from scipy.sparse import _sparsetools

from ...base.kit.checks import NATIVE, scalar_of
from ...base.kit.kernels import HostCall, kernel
from ..runtime._memory import HostArray
from ._sparse_structures import checked, make
from ._sparse_systems import check_structure_only, incomplete, least_residual, solve, solve_triangular

__all__ = [
    "check_structure_only", "incomplete", "least_residual", "make", "sddmm", "solve", "solve_triangular",
    "spmm", "spmv", "to_dense",
]  # fmt: skip

_tools: Any = _sparsetools
_DTYPES = {"out": NATIVE}

# Elements of the rows and columns that one piece of a sampled product gathers.
_PIECE = 1 << 18


@kernel("sparse.spmv", backend="cpu", dtypes=_DTYPES)
def spmv(spec: Any, call: HostCall) -> None:
    """Multiply a matrix and a vector."""
    indptr, indices = _structure(spec, call, may_end_before=True)
    with _contiguous(call.array(spec.out)) as out:
        out.fill(0)
        data, x = call.array(spec.matrix_data), call.array(spec.x)
        _tools.csr_matvec(*spec.matrix, indptr, indices, data, x, out)


@kernel("sparse.spmm", backend="cpu", dtypes=_DTYPES)
def spmm(spec: Any, call: HostCall) -> None:
    """Multiply a matrix and a dense one."""
    alpha = scalar_of("sparse", "alpha", spec.alpha, spec.out.dtype)
    beta = scalar_of("sparse", "beta", spec.beta, spec.out.dtype)
    indptr, indices = _structure(spec, call)
    old, data, b = call.array(spec.out), call.array(spec.matrix_data), call.array(spec.b)
    with _contiguous(old) as out:
        if beta == 0:
            out.fill(0)
        else:
            np.multiply(old, out.dtype.type(beta), out=out)
        b = np.ascontiguousarray(b if alpha == 1 else b * b.dtype.type(alpha))
        if spec.transpose == "N":
            tool = _tools.csr_matvecs
        else:
            # The same arrays are the transpose by columns.
            tool = _tools.csc_matvecs
            data = np.conj(data) if spec.transpose == "C" else data
        tool(len(out), len(b), b.shape[1], indptr, indices, data, b.reshape(-1), out.reshape(-1))


@kernel("sparse.sddmm", backend="cpu", dtypes=_DTYPES)
def sddmm(spec: Any, call: HostCall) -> None:
    """Compute elements of a product of dense matrices."""
    indptr, indices = _structure(spec, call)
    a, b = call.array(spec.a), call.array(spec.b)
    rows = np.repeat(np.arange(len(a)), np.diff(indptr))
    step = max(_PIECE // max(a.shape[1], 1), 1)
    with _contiguous(call.array(spec.out)) as out:
        for first in range(0, len(out), step):
            piece = slice(first, first + step)
            np.einsum("ij,ij->i", a[rows[piece]], b.T[indices[piece]], out=out[piece])


@kernel("sparse.to_dense", backend="cpu", dtypes=_DTYPES)
def to_dense(spec: Any, call: HostCall) -> None:
    """Make a dense matrix."""
    indptr, indices = _structure(spec, call, may_end_before=True)
    with _contiguous(call.array(spec.out)) as out:
        out.fill(0)
        _tools.csr_todense(*spec.matrix, indptr, indices, call.array(spec.matrix_data), out)


@contextmanager
def _contiguous(out: HostArray) -> Generator[HostArray]:
    """Have an array filled, by way of one in C order where its own layout differs."""
    result: HostArray = out if out.flags.c_contiguous else np.empty_like(out, order="C")
    yield result
    if result is not out:
        np.copyto(out, result)


def _structure(spec: Any, call: HostCall, *, may_end_before: bool = False) -> tuple[HostArray, HostArray]:
    """Take the row pointers and columns, once they are found to lead nowhere outside of the arrays."""
    indptr, indices = call.array(spec.matrix_indptr), call.array(spec.matrix_indices)
    return checked(indptr, indices, spec.matrix, may_end_before=may_end_before)
