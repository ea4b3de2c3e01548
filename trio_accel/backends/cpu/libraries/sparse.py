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

from ...base import DType, LibraryError
from ...base.checks import NATIVE, scalar_of
from ...base.kernels import Call, kernel
from ...base.ops import CsrToDenseSpec, SddmmCsrSpec, SpmmCsrSpec, SpmvCsrSpec
from ..runtime._memory import HostArray

__all__ = ["sddmm_csr", "spmm_csr", "spmv_csr", "to_dense_csr"]

_tools: Any = _sparsetools
_DTYPES = {"out": NATIVE, "indices": (DType.int32, DType.int64)}

_Csr = SpmvCsrSpec | SpmmCsrSpec | SddmmCsrSpec | CsrToDenseSpec

# Elements of the rows and columns that one piece of a sampled product gathers.
_PIECE = 1 << 18


@kernel(SpmvCsrSpec, backend="cpu", dtypes=_DTYPES)
def spmv_csr(spec: SpmvCsrSpec, call: Call) -> None:
    """Multiply a matrix and a vector."""
    indptr, indices = _structure(spec, call)
    with _contiguous(call.array(spec.out)) as out:
        out.fill(0)
        data, x = call.array(spec.data), call.array(spec.x)
        _tools.csr_matvec(spec.rows, spec.columns, indptr, indices, data, x, out)


@kernel(SpmmCsrSpec, backend="cpu", dtypes=_DTYPES)
def spmm_csr(spec: SpmmCsrSpec, call: Call) -> None:
    """Multiply a matrix and a dense one."""
    alpha = scalar_of("sparse", "alpha", spec.alpha, spec.out.dtype)
    beta = scalar_of("sparse", "beta", spec.beta, spec.out.dtype)
    indptr, indices = _structure(spec, call)
    old, data, b = call.array(spec.out), call.array(spec.data), call.array(spec.b)
    with _contiguous(old) as out:
        if beta == 0:
            out.fill(0)
        else:
            np.multiply(old, out.dtype.type(beta), out=out)
        b = np.ascontiguousarray(b if alpha == 1 else b * b.dtype.type(alpha))
        if spec.transpose == "N":
            tool, shape = _tools.csr_matvecs, (spec.rows, spec.columns)
        else:
            # The same arrays are the transpose by columns.
            tool, shape = _tools.csc_matvecs, (spec.columns, spec.rows)
            data = np.conj(data) if spec.transpose == "C" else data
        tool(*shape, b.shape[1], indptr, indices, data, b.reshape(-1), out.reshape(-1))


@kernel(SddmmCsrSpec, backend="cpu", dtypes=_DTYPES)
def sddmm_csr(spec: SddmmCsrSpec, call: Call) -> None:
    """Compute elements of a product of dense matrices."""
    indptr, indices = _structure(spec, call)
    a, b = call.array(spec.a), call.array(spec.b)
    rows = np.repeat(np.arange(spec.rows), np.diff(indptr))
    step = max(_PIECE // max(a.shape[1], 1), 1)
    with _contiguous(call.array(spec.out)) as out:
        for first in range(0, len(out), step):
            piece = slice(first, first + step)
            np.einsum("ij,ij->i", a[rows[piece]], b.T[indices[piece]], out=out[piece])


@kernel(CsrToDenseSpec, backend="cpu", dtypes=_DTYPES)
def to_dense_csr(spec: CsrToDenseSpec, call: Call) -> None:
    """Make a dense matrix."""
    indptr, indices = _structure(spec, call)
    with _contiguous(call.array(spec.out)) as out:
        out.fill(0)
        _tools.csr_todense(spec.rows, spec.columns, indptr, indices, call.array(spec.data), out)


@contextmanager
def _contiguous(out: HostArray) -> Generator[HostArray]:
    """Have an array filled, by way of one in C order where it lies otherwise."""
    result: HostArray = out if out.flags.c_contiguous else np.empty_like(out, order="C")
    yield result
    if result is not out:
        np.copyto(out, result)


def _structure(spec: _Csr, call: Call) -> tuple[HostArray, HostArray]:
    """The row pointers and columns, once they are found to lead nowhere outside of the arrays."""
    indptr, indices = call.array(spec.indptr), call.array(spec.indices)
    _check_structure(spec, indptr, indices)
    return indptr, indices


def _check_structure(spec: _Csr, indptr: HostArray, indices: HostArray) -> None:
    """Refuse a structure that leads outside of the arrays."""
    stored = len(indices)
    if indptr[0] != 0 or not 0 <= indptr[-1] <= stored:
        raise _refusal(f"indptr: {spec.rows} rows need {spec.rows + 1} elements from 0 to at most {stored}")
    if isinstance(spec, (SpmmCsrSpec, SddmmCsrSpec)) and indptr[-1] != stored:
        raise _refusal(f"indptr: it must end at the {stored} stored elements")
    if np.any(indptr[1:] < indptr[:-1]):
        raise _refusal("indptr: its elements must not decrease")
    used = indices[: int(indptr[-1])]
    if used.size and not 0 <= used.min() <= used.max() < spec.columns:
        raise _refusal(f"indices: a matrix of {spec.columns} columns has them from 0 on")


def _refusal(message: str) -> LibraryError:
    return LibraryError(message, library="sparse", code="invalid_value")
