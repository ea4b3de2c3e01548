"""Products with sparse matrices."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from scipy.sparse import _sparsetools

from ...base import DType, LibraryError
from ...base.checks import NATIVE
from ...base.kernels import kernel
from ...base.ops import SpmvCsrSpec
from ..kit._checks import check_dtype, check_same_dtype
from ..runtime._memory import CpuMemory, HostArray
from ..runtime._stream import Work

__all__ = ["spmv_csr"]

_INDICES = (DType.int32, DType.int64)


@kernel(SpmvCsrSpec, backend="cpu")
def spmv_csr(spec: SpmvCsrSpec, memory: CpuMemory) -> Work:
    """Prepare a product of a matrix and a vector."""
    check_dtype("spmv", check_same_dtype("spmv", spec.data, spec.x, spec.out), NATIVE)
    check_dtype("spmv with indices", check_same_dtype("spmv", spec.indptr, spec.indices), _INDICES)
    arrays = (spec.indptr, spec.indices, spec.data, spec.x, spec.out)
    return partial(_spmv, spec.rows, spec.columns, *map(memory.view, arrays))


def _spmv(
    rows: int,
    columns: int,
    indptr: HostArray,
    indices: HostArray,
    data: HostArray,
    x: HostArray,
    out: HostArray,
) -> None:
    stored = min(len(indices), len(data))
    if len(indptr) != rows + 1 or indptr[0] != 0 or not 0 <= indptr[-1] <= stored:
        raise LibraryError(
            f"indptr: {rows} rows need {rows + 1} elements from 0 to at most {stored}",
            library="sparse",
            code="invalid_value",
        )
    # The compiled loop behind SciPy's `A @ x`. A `csr_array` would look through all indices, and
    # make one more vector, for each product. It adds to what it is given.
    result: HostArray = out if out.flags.c_contiguous else np.empty_like(out, order="C")
    result.fill(0)
    product: Any = _sparsetools.csr_matvec
    product(rows, columns, indptr, indices, data, x, result)
    if result is not out:
        np.copyto(out, result)
