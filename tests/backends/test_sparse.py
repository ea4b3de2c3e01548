from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse

from trio_accel.backends.base import DType, LibraryError, NotSupportedError
from trio_accel.backends.base.contract.ops import FillSpec
from trio_accel.sparse import spmv

DTYPES = ["float32", "float64", "complex64", "complex128"]


def multiply(rig, matrix, x, out=None, times=1):
    """A product, made several times: a library may do better by a matrix that it knows."""
    rows, columns = matrix.shape
    arrays = [rig.put(part) for part in (matrix.indptr, matrix.indices, matrix.data)]
    x = rig.put_as_laid_out(x)
    if out is None:
        out = rig.empty((rows,), matrix.dtype)
    for _ in range(times):
        rig.enqueue("memory", FillSpec(math.nan, out))  # old contents must not show
        rig.apply("sparse", spmv.spec((rows, columns), *arrays, x, out))
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
@pytest.mark.parametrize("times", [1, 3])
def test_against_a_dense_product(rig, random_array, exact, assert_close, dtype, index, size, times):
    rows, columns, density = size
    matrix = random_matrix(rows, columns, density, dtype, index)
    x = random_array((columns,), dtype)
    terms = int(np.diff(matrix.indptr).max(initial=0))
    assert_close(multiply(rig, matrix, x, times=times), exact(matrix.toarray()) @ exact(x), terms)


@pytest.mark.parametrize("times", [1, 2])
def test_rows_without_elements_are_zero(rig, times):
    matrix = scipy.sparse.csr_array((np.ones(2), np.array([0, 2]), np.array([0, 0, 2, 2, 2])), shape=(4, 3))
    x = np.array([1.0, 5.0, 2.0])
    np.testing.assert_array_equal(multiply(rig, matrix, x, times=times), [0, 3, 0, 0])


@pytest.mark.parametrize("times", [1, 2])
def test_elements_stored_twice_and_out_of_order_count(rig, times):
    data, indices = np.array([1.0, 2.0, 4.0, 8.0]), np.array([2, 0, 2, 1], np.int32)
    matrix = scipy.sparse.csr_array((data, indices, np.array([0, 3, 4], np.int32)), shape=(2, 3))
    x = np.array([1.0, 10.0, 100.0])
    np.testing.assert_array_equal(multiply(rig, matrix, x, times=times), [502, 80])


@pytest.mark.parametrize("times", [1, 2])
def test_more_stored_than_is_used(rig, times):
    arrays = [rig.put(np.array(values, np.int64)) for values in ([0, 1, 3], [1, 0, 1, 99])]
    data, x = rig.put(np.array([2.0, 3.0, 5.0, np.nan])), rig.put(np.array([1.0, 10.0]))
    out = rig.empty((2,), "float64")
    for _ in range(times):
        rig.apply("sparse", spmv.spec((2, 2), *arrays, data, x, out))
    np.testing.assert_array_equal(rig.get(out), [20, 53])


@pytest.mark.parametrize("times", [1, 2])
def test_one_structure_with_other_values_and_vectors(rig, random_array, assert_close, times):
    matrix = random_matrix(30, 40, 0.2, "float64", "int32")
    structure = [rig.put(part) for part in (matrix.indptr, matrix.indices)]
    for seed in range(times + 1):
        data, x = random_array(matrix.data.shape, "float64", seed), random_array((40,), "float64", seed)
        out = rig.empty((30,), "float64")
        rig.apply("sparse", spmv.spec((30, 40), *structure, rig.put(data), rig.put(x), out))
        other = scipy.sparse.csr_array((data, matrix.indices, matrix.indptr), matrix.shape)
        assert_close(rig.get(out), other.toarray() @ x, 40)


@pytest.mark.parametrize("times", [1, 2])
def test_vectors_with_gaps(rig, random_array, assert_close, times):
    matrix = random_matrix(60, 45, 0.2, "float64", "int32")
    x = random_array((90,), "float64")[::-2]
    out = rig.put_as_laid_out(np.zeros(120)[::2])
    assert_close(multiply(rig, matrix, x, out, times), matrix.toarray() @ x, 45)


@pytest.mark.parametrize("indptr", [[0, 2, 3], [1, 2, 2], [0, 3, -1], [0, 1]])
def test_row_pointers_that_lie_are_refused_before_memory_is_read(rig, indptr):
    indptr = np.array(indptr, np.int32)
    indices, data = rig.put(np.array([0, 1], np.int32)), rig.put(np.ones(2))
    spec = spmv.spec((2, 2), rig.put(indptr), indices, data, rig.put(np.ones(2)), rig.empty((2,), "float64"))
    with pytest.raises(LibraryError, match="indptr"):
        rig.apply("sparse", spec)
    rig.finish(rig.stream)


@pytest.mark.parametrize(
    ("dtype", "index"), [("float16", "int32"), ("int32", "int32"), ("float64", "uint32")]
)
def test_the_error_names_the_unsupported_option(rig, backend, dtype, index):
    indptr, indices = rig.put(np.array([0, 1], index)), rig.put(np.array([0], index))
    data = rig.put(np.ones(1, dtype))
    rig.library("sparse")
    with pytest.raises(NotSupportedError, match=r"(?i)spmv") as caught:
        rig.enqueue("sparse", spmv.spec((1, 1), indptr, indices, data, data, rig.empty((1,), dtype)))
    assert caught.value.backend == backend.name
