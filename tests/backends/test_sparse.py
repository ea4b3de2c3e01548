from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse

from trio_accel.backends.base import DType, LibraryError, NotSupportedError
from trio_accel.backends.base.ops import SpmvCsrSpec

DTYPES = ["float32", "float64", "complex64", "complex128"]


def multiply(rig, matrix, x, out=None):
    rows, columns = matrix.shape
    if out is None:
        out = rig.put(np.full(rows, np.nan, matrix.dtype))  # what was there must not show
    arrays = [rig.put(part) for part in (matrix.indptr, matrix.indices, matrix.data)]
    rig.enqueue("sparse", SpmvCsrSpec(rows, columns, *arrays, rig.put_as_laid_out(x), out))
    return rig.get(out)


def random_matrix(rows, columns, density, dtype, index):
    rng = np.random.default_rng(3)
    dense = rng.standard_normal((rows, columns)) * (rng.random((rows, columns)) < density)
    matrix = scipy.sparse.csr_array(dense.astype(dtype))
    if DType(dtype).kind == "complex":
        matrix.data *= np.exp(1j * np.arange(matrix.nnz)).astype(dtype)
    matrix.indices, matrix.indptr = matrix.indices.astype(index), matrix.indptr.astype(index)
    return matrix


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize(
    "size",
    [(1, 1, 1.0), (50, 40, 0.1), (40, 50, 0.01), (30, 30, 0.0), (2000, 3000, 0.02), (0, 5, 0.5), (5, 0, 0.5)],
)
def test_against_a_dense_product(rig, random_array, exact, assert_close, dtype, index, size):
    rows, columns, density = size
    matrix = random_matrix(rows, columns, density, dtype, index)
    x = random_array((columns,), dtype)
    terms = int(np.diff(matrix.indptr).max(initial=0))
    assert_close(multiply(rig, matrix, x), exact(matrix.toarray()) @ exact(x), terms)


def test_rows_without_elements_are_zero(rig):
    matrix = scipy.sparse.csr_array((np.ones(2), np.array([0, 2]), np.array([0, 0, 2, 2, 2])), shape=(4, 3))
    np.testing.assert_array_equal(multiply(rig, matrix, np.array([1.0, 5.0, 2.0])), [0, 3, 0, 0])


def test_elements_stored_twice_and_out_of_order_count(rig):
    data, indices = np.array([1.0, 2.0, 4.0, 8.0]), np.array([2, 0, 2, 1], np.int32)
    matrix = scipy.sparse.csr_array((data, indices, np.array([0, 3, 4], np.int32)), shape=(2, 3))
    np.testing.assert_array_equal(multiply(rig, matrix, np.array([1.0, 10.0, 100.0])), [502, 80])


def test_vectors_with_gaps(rig, random_array, assert_close):
    matrix = random_matrix(60, 45, 0.2, "float64", "int32")
    x = random_array((90,), "float64")[::-2]
    out = rig.put_as_laid_out(np.zeros(120)[::2])
    assert_close(multiply(rig, matrix, x, out), matrix.toarray() @ x, 45)


@pytest.mark.parametrize("indptr", [[0, 2, 3], [1, 2, 2], [0, 3, -1], [0, 1]])
def test_row_pointers_that_lie_are_refused_before_memory_is_read(rig, indptr):
    indptr = np.array(indptr, np.int32)
    indices, data = rig.put(np.array([0, 1], np.int32)), rig.put(np.ones(2))
    spec = SpmvCsrSpec(2, 2, rig.put(indptr), indices, data, rig.put(np.ones(2)), rig.empty((2,), "float64"))
    with pytest.raises(LibraryError, match="indptr"):
        rig.apply("sparse", spec)
    rig.finish(rig.stream)


@pytest.mark.parametrize(
    ("dtype", "index"), [("float16", "int32"), ("int32", "int32"), ("float64", "uint32")]
)
def test_what_is_not_supported_is_said(rig, backend, dtype, index):
    indptr, indices = rig.put(np.array([0, 1], index)), rig.put(np.array([0], index))
    data = rig.put(np.ones(1, dtype))
    with pytest.raises(NotSupportedError, match="spmv") as caught:
        rig.enqueue("sparse", SpmvCsrSpec(1, 1, indptr, indices, data, data, rig.empty((1,), dtype)))
    assert caught.value.backend == backend.name
