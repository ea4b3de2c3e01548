"""Operations with sparse matrices, by SciPy's compiled loops.

Arrays of SciPy's own classes would look through all indices, and make one more array, for each operation. The
loops add to what they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from scipy.sparse import _sparsetools

from ...base import DType, LibraryError
from ...base.checks import NATIVE, scalar_of
from ...base.kernels import kernel
from ...base.ops import CsrToDenseSpec, SddmmCsrSpec, SpmmCsrSpec, SpmvCsrSpec
from ..kit._checks import check_dtype, check_shapes
from ..runtime._memory import CpuMemory, HostArray
from ..runtime._stream import Work

__all__ = ["sddmm_csr", "spmm_csr", "spmv_csr", "to_dense_csr"]

_tools: Any = _sparsetools

_Csr = SpmvCsrSpec | SpmmCsrSpec | SddmmCsrSpec | CsrToDenseSpec

# Elements of the rows and columns that one piece of a sampled product gathers.
_PIECE = 1 << 18


@kernel(SpmvCsrSpec, backend="cpu")
def spmv_csr(spec: SpmvCsrSpec, memory: CpuMemory) -> Work:
    """Prepare a product of a matrix and a vector."""
    _check(spec, "spmv")

    def multiply(
        indptr: HostArray, indices: HostArray, data: HostArray, x: HostArray, out: HostArray
    ) -> None:
        _check_structure(spec, indptr, indices)
        out.fill(0)
        _tools.csr_matvec(spec.rows, spec.columns, indptr, indices, data, x, out)

    arrays = (spec.indptr, spec.indices, spec.data, spec.x)
    return partial(_run, multiply, tuple(map(memory.view, arrays)), memory.view(spec.out))


@kernel(SpmmCsrSpec, backend="cpu")
def spmm_csr(spec: SpmmCsrSpec, memory: CpuMemory) -> Work:
    """Prepare a product of a matrix and a dense one."""
    _check(spec, "spmm")
    alpha = scalar_of("sparse", "alpha", spec.alpha, spec.out.dtype)
    beta = scalar_of("sparse", "beta", spec.beta, spec.out.dtype)
    old = memory.view(spec.out)

    def multiply(
        indptr: HostArray, indices: HostArray, data: HostArray, b: HostArray, out: HostArray
    ) -> None:
        _check_structure(spec, indptr, indices)
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

    arrays = (spec.indptr, spec.indices, spec.data, spec.b)
    return partial(_run, multiply, tuple(map(memory.view, arrays)), old)


@kernel(SddmmCsrSpec, backend="cpu")
def sddmm_csr(spec: SddmmCsrSpec, memory: CpuMemory) -> Work:
    """Prepare elements of a product of dense matrices."""
    _check(spec, "sddmm")

    def multiply(indptr: Any, indices: Any, a: Any, b: Any, out: Any) -> None:
        _check_structure(spec, indptr, indices)
        rows = np.repeat(np.arange(spec.rows), np.diff(indptr))
        step = max(_PIECE // max(a.shape[1], 1), 1)
        for first in range(0, len(out), step):
            piece = slice(first, first + step)
            np.einsum("ij,ij->i", a[rows[piece]], b.T[indices[piece]], out=out[piece])

    arrays = (spec.indptr, spec.indices, spec.a, spec.b)
    return partial(_run, multiply, tuple(map(memory.view, arrays)), memory.view(spec.out))


@kernel(CsrToDenseSpec, backend="cpu")
def to_dense_csr(spec: CsrToDenseSpec, memory: CpuMemory) -> Work:
    """Prepare a dense matrix."""
    _check(spec, "to_dense")

    def convert(indptr: Any, indices: Any, data: Any, out: Any) -> None:
        _check_structure(spec, indptr, indices)
        out.fill(0)
        _tools.csr_todense(spec.rows, spec.columns, indptr, indices, data, out)

    arrays = (spec.indptr, spec.indices, spec.data)
    return partial(_run, convert, tuple(map(memory.view, arrays)), memory.view(spec.out))


def _run(work: Callable[..., None], arrays: tuple[HostArray, ...], out: HostArray) -> None:
    """Have an array filled, by way of one in C order where it lies otherwise."""
    result: HostArray = out if out.flags.c_contiguous else np.empty_like(out, order="C")
    work(*arrays, result)
    if result is not out:
        np.copyto(out, result)


def _check(spec: _Csr, operation: str) -> None:
    """Refuse what can be told to be wrong without the elements."""
    check_shapes("sparse", spec)
    check_dtype(operation, spec.out.dtype, NATIVE)
    check_dtype(f"{operation} with indices", spec.indices.dtype, (DType.int32, DType.int64))


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
