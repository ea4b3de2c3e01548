"""What cuSPARSE is told of types and of matrices. Descriptors are in host memory; running work needs none."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
from nvmath.bindings import cusparse

from ...base import DType
from ...base.kit.checks import NATIVE

__all__ = ["AS_IT_IS", "VALUE_TYPES", "csr", "dense", "factors", "operation_of", "vector"]

AS_IT_IS = cusparse.Operation.NON_TRANSPOSE
"""The matrix, not transposed."""

VALUE_TYPES = {DType.float32: 0, DType.float64: 1, DType.complex64: 4, DType.complex128: 5}
"""``cudaDataType`` of values."""

_OPERATIONS = {
    "N": AS_IT_IS,
    "T": cusparse.Operation.TRANSPOSE,
    "C": cusparse.Operation.CONJUGATE_TRANSPOSE,
}
_INDEX_TYPES = {DType.int32: cusparse.IndexType.INDEX_32I, DType.int64: cusparse.IndexType.INDEX_64I}
_FACTORS = {dtype: (np.ones(1, dtype.dtype), np.zeros(1, dtype.dtype)) for dtype in NATIVE}


def operation_of(letter: str, dtype: DType) -> cusparse.Operation:
    """Tell how a matrix is turned: cuSPARSE conjugates complex ones alone."""
    return _OPERATIONS["T" if letter == "C" and dtype.kind != "complex" else letter]


def factors(dtype: DType) -> tuple[int, int]:
    """Return the addresses of one and zero."""
    one, zero = _FACTORS[dtype]
    return one.ctypes.data, zero.ctypes.data


# Nothing of a descriptor is needed once an operation is enqueued: it is destroyed when the stack is undone.
def csr(
    undo: ExitStack,
    shape: tuple[int, int],
    stored: int,
    addresses: tuple[int, int, int],
    index: DType,
    dtype: DType,
) -> int:
    """Describe a sparse matrix of so many values: its row pointers, columns and values."""
    kind = _INDEX_TYPES[index]
    made: int = cusparse.create_csr(
        *shape, stored, *addresses, kind, kind, cusparse.IndexBase.ZERO, VALUE_TYPES[dtype]
    )
    undo.callback(cusparse.destroy_sp_mat, made)
    return made


def dense(undo: ExitStack, shape: tuple[int, int], address: int, dtype: DType) -> int:
    """Describe a dense matrix by rows."""
    made: int = cusparse.create_dn_mat(*shape, shape[1], address, VALUE_TYPES[dtype], cusparse.Order.ROW)
    undo.callback(cusparse.destroy_dn_mat, made)
    return made


def vector(undo: ExitStack, size: int, address: int, dtype: DType) -> int:
    """Describe a dense vector."""
    made: int = cusparse.create_dn_vec(size, address, VALUE_TYPES[dtype])
    undo.callback(cusparse.destroy_dn_vec, made)
    return made
