"""Sparse matrices and dense ones: products, sampled products and conversions."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
import scipy.sparse
from chosen import IS_STAND_IN

from trio_accel.backends.base import LibraryError, NotSupportedError
from trio_accel.backends.base.contract.ops import FillSpec
from trio_accel.sparse import sddmm, spmm, to_dense

DTYPES = ["float32", "float64", "complex64", "complex128"]
SIZES = [(1, 1, 1), (30, 40, 5), (40, 30, 1), (200, 7, 33), (0, 4, 3), (4, 0, 3), (4, 5, 0), (6, 5, 2)]
# cuSPARSE's products of matrices are checked on hardware; the kernels of the backend's own here too.
needs_cusparse = pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no products of matrices")


def random_matrix(rows, columns, dtype, index="int32", density=0.2):
    rng = np.random.default_rng(5)
    matrix = scipy.sparse.csr_array(
        rng.standard_normal((rows, columns)) * (rng.random((rows, columns)) < density)
    )
    matrix = matrix.astype(dtype)
    if np.dtype(dtype).kind == "c":
        matrix.data *= np.exp(1j * np.arange(matrix.nnz)).astype(dtype)
    matrix.indices, matrix.indptr = matrix.indices.astype(index), matrix.indptr.astype(index)
    return matrix


def put(rig, matrix):
    return matrix.shape, *(rig.put(part) for part in (matrix.indptr, matrix.indices))


def turned(matrix, transpose):
    return {"N": matrix, "T": matrix.T, "C": matrix.conj().T}[transpose]


@needs_cusparse
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("transpose", ["N", "T", "C"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_with_a_dense_matrix(rig, random_array, exact, assert_close, dtype, index, transpose, size):
    rows, columns, n = size
    matrix = random_matrix(rows, columns, dtype, index)
    op = turned(exact(matrix.toarray()), transpose)
    b, c = random_array((op.shape[1], n), dtype), random_array((op.shape[0], n), dtype)
    structure, data, dense = put(rig, matrix), rig.put(matrix.data), rig.put(b)
    alpha, beta = (0.5 - 2j, 1.5j) if np.dtype(dtype).kind == "c" else (-0.5, 2.0)
    # The second time the library knows the matrix.
    for _ in range(2):
        for factors in ((1.0, 0.0), (alpha, beta)):
            out = rig.put(c if factors[1] else np.full_like(c, math.nan))
            rig.apply("sparse", spmm.spec(*structure, data, dense, *factors, transpose, out))
            expected = factors[0] * op @ exact(b) + (factors[1] * exact(c) if factors[1] else 0)
            assert_close(rig.get(out), expected, max(op.shape[1], 1))


@needs_cusparse
@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_products_of_arrays_with_gaps(rig, random_array, assert_close, beta):
    matrix, b, c = (
        random_matrix(9, 7, "float64"),
        random_array((4, 7), "float64").T,
        random_array((18, 8), "float64"),
    )
    whole = rig.put(c)
    out = attrs.evolve(whole, shape=(9, 4), strides=(2 * 64, 16))
    for _ in range(2):
        rig.enqueue("memory", FillSpec(1.0, out))
        rig.apply(
            "sparse",
            spmm.spec(*put(rig, matrix), rig.put(matrix.data), rig.put_as_laid_out(b), 1.0, beta, "N", out),
        )
        assert_close(rig.get(out), matrix.toarray() @ b + beta, 7)
    np.testing.assert_array_equal(rig.get(whole)[1::2], c[1::2])


@needs_cusparse
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sampled_products(rig, random_array, exact, assert_close, dtype, index, size):
    rows, columns, inner = size
    matrix = random_matrix(rows, columns, dtype, index)
    a, b = random_array((rows, inner), dtype), random_array((columns, inner), dtype).T
    left, right, structure = rig.put(a), rig.put_as_laid_out(b), put(rig, matrix)
    full = exact(a) @ exact(b)
    place = np.repeat(np.arange(rows), np.diff(matrix.indptr)), matrix.indices
    for _ in range(2):
        out = rig.put(np.full(matrix.nnz, math.nan, dtype))
        rig.apply("sparse", sddmm.spec(*structure, left, right, out))
        assert_close(rig.get(out), full[place], max(inner, 1))


@needs_cusparse
@pytest.mark.parametrize("inner", [0, 3])
def test_sampled_products_into_an_array_with_gaps(rig, random_array, assert_close, inner):
    a, b = random_array((2, inner), "float64"), random_array((inner, 2), "float64")
    structure = ((2, 2), *(rig.put(np.array(values, np.int32)) for values in ([0, 1, 2], [1, 0])))
    whole = rig.put(np.full(4, 9.0))
    out = attrs.evolve(whole, shape=(2,), strides=(16,))
    rig.apply("sparse", sddmm.spec(*structure, rig.put(a), rig.put(b), out))
    assert_close(rig.get(out), (a @ b)[[0, 1], [1, 0]], 3)
    np.testing.assert_array_equal(rig.get(whole)[1::2], 9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_dense_ones(rig, dtype, index, size):
    matrix = random_matrix(*size[:2], dtype, index)
    out = rig.put(np.full(matrix.shape, math.nan, dtype))
    rig.apply("sparse", to_dense.spec(*put(rig, matrix), rig.put(matrix.data), out))
    np.testing.assert_array_equal(rig.get(out), matrix.toarray())


def test_a_dense_matrix_of_duplicate_and_unused_elements(rig):
    indptr, indices = rig.put(np.array([0, 3, 4], np.int32)), rig.put(np.array([2, 0, 2, 1, 77], np.int32))
    data = rig.put(np.array([1.0, 2.0, 4.0, 8.0, math.nan]))
    whole = rig.put(np.full((2, 6), 9.0))
    out = attrs.evolve(whole, shape=(2, 3), strides=(48, 16))
    rig.apply("sparse", to_dense.spec((2, 3), indptr, indices, data, out))
    np.testing.assert_array_equal(rig.get(out), [[2, 0, 5], [0, 8, 0]])
    np.testing.assert_array_equal(rig.get(whole)[:, 1::2], 9)


def spec_of(rig, name, arrays):
    """An operation with a matrix of 2 rows and 2 columns."""
    structure = ((2, 2), *(rig.put(np.array(values, np.int32)) for values in arrays))
    dense, data = rig.put(np.ones((2, 2))), rig.put(np.ones(2))
    if name == "spmm":
        return spmm.spec(*structure, data, dense, 1.0, 0.0, "N", rig.empty((2, 2), "float64"))
    if name == "sddmm":
        return sddmm.spec(*structure, dense, dense, rig.empty((2,), "float64"))
    return to_dense.spec(*structure, data, rig.empty((2, 2), "float64"))


@pytest.mark.parametrize(
    "name", [pytest.param("spmm", marks=needs_cusparse), pytest.param("sddmm", marks=needs_cusparse), "dense"]
)
@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([1, 2, 2], [0, 1], "indptr: "),
        ([0, 3, 2], [0, 1], "indptr: "),
        ([0, 2, 1], [0, 1], "indptr: "),
        ([0, -5, 2], [0, 1], "indptr: "),
        ([0, 1, 1 << 30], [0, 1], "indptr: "),
        ([0, 1, 2], [0, 2], "indices: a matrix of 2 columns"),
        ([0, 1, 2], [-1, 0], "indices: a matrix of 2 columns"),
        ([0, 1, 2], [1 << 30, 0], "indices: a matrix of 2 columns"),
    ],
)
def test_a_structure_that_leads_outside(rig, name, indptr, indices, message):
    for _ in range(2):
        with pytest.raises(LibraryError, match=message) as caught:
            rig.apply("sparse", spec_of(rig, name, (indptr, indices)))
        assert caught.value.library == "sparse"
    right = spec_of(rig, name, ([0, 1, 2], [0, 1]))
    rig.apply("sparse", right)
    np.testing.assert_array_equal(
        rig.get(right.out), {"spmm": np.ones((2, 2)), "sddmm": [2, 2]}.get(name, np.eye(2))
    )


@needs_cusparse
@pytest.mark.parametrize("name", ["spmm", "sddmm"])
def test_row_pointers_that_end_early_are_refused(rig, name):
    with pytest.raises(LibraryError, match="indptr: it must end at the 2 stored elements"):
        rig.apply("sparse", spec_of(rig, name, ([0, 1, 1], [0, 1])))


@pytest.mark.parametrize("name", ["spmm", "sddmm", "dense"])
def test_the_error_names_the_unsupported_option(rig, backend, name):
    spec = spec_of(rig, name, ([0, 1, 2], [0, 1]))
    fields = {
        "spmm": ("matrix_data", "b", "out"),
        "sddmm": ("a", "b", "out"),
        "dense": ("matrix_data", "out"),
    }[name]
    rig.library("sparse")
    halves = {field: rig.empty(getattr(spec, field).shape, "float16") for field in fields}
    for wrong in (halves, {"out": halves["out"]}):
        with pytest.raises(NotSupportedError, match="float16") as caught:
            rig.enqueue("sparse", attrs.evolve(spec, **wrong))
        assert caught.value.backend == backend.name
    with pytest.raises(LibraryError, match=r"(b|out) must have shape \(.*3.*\), got"):
        rig.enqueue("sparse", attrs.evolve(spec, matrix=(2, 3)))


def test_a_complex_factor_of_real_matrices_is_refused(rig):
    spec = spec_of(rig, "spmm", ([0, 1, 2], [0, 1]))
    for name in ("alpha", "beta"):
        with pytest.raises(
            LibraryError, match=f"{name}: .* has an imaginary part, which float64 cannot hold"
        ):
            rig.apply("sparse", attrs.evolve(spec, **{name: 1 + 2j}))
