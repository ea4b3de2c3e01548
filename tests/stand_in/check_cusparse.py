"""Checks the stand-in cuSPARSE by nvmath's bindings, against SciPy in double precision."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
from checking import call, code_of, main, make_stream, open_device, read
from cuda.bindings import driver
from nvmath.bindings import cusparse

Array = npt.NDArray[Any]
Status = cusparse.Status

ILLEGAL_ADDRESS = 700
AS_IT_IS, TRANSPOSED = cusparse.Operation.NON_TRANSPOSE, cusparse.Operation.TRANSPOSE
DEFAULT = cusparse.SpMVAlg.DEFAULT
TYPES: dict[Any, tuple[int, float]] = {
    np.float32: (0, 2e-6),
    np.float64: (1, 1e-14),
    np.complex64: (4, 2e-6),
    np.complex128: (5, 1e-14),
}
INDICES = {np.int32: cusparse.IndexType.INDEX_32I, np.int64: cusparse.IndexType.INDEX_64I}


class Rig:
    """A handle on a stream, and arrays in the device's memory."""

    def __init__(self) -> None:
        open_device()
        self.stream = make_stream()
        self.handle = cusparse.create()
        cusparse.set_stream(self.handle, int(self.stream))
        self.rng = np.random.default_rng(7)

    def numbers(self, count: int, dtype: Any) -> Array:
        values = self.rng.uniform(-1, 1, count) + 1j * self.rng.uniform(-1, 1, count)
        return (values if np.dtype(dtype).kind == "c" else values.real).astype(dtype)

    def matrix(self, rows: int, columns: int, dtype: Any) -> Any:
        matrix = scipy.sparse.random_array((rows, columns), density=0.3, rng=self.rng, format="csr")
        matrix = matrix.astype(dtype)
        matrix.data = self.numbers(matrix.nnz, dtype)
        return matrix

    def put(self, array: Array) -> int:
        address = int(call(driver.cuMemAlloc, max(array.nbytes, 16)))
        call(driver.cuMemcpyHtoD, address, array.ctypes.data, array.nbytes)
        return address

    def csr(self, matrix: Any, index: Any = np.int32) -> int:
        arrays = matrix.indptr.astype(index), matrix.indices.astype(index), matrix.data
        return self.descriptor(matrix.shape, arrays)

    def descriptor(self, shape: tuple[int, int], arrays: tuple[Array, Array, Array]) -> int:
        kind, index = TYPES[arrays[2].dtype.type][0], INDICES[arrays[0].dtype.type]
        addresses = map(self.put, arrays)
        descriptor: int = cusparse.create_csr(*shape, len(arrays[2]), *addresses, index, index, 0, kind)
        return descriptor

    def vector(self, values: Array) -> tuple[int, int]:
        address = self.put(values)
        return cusparse.create_dn_vec(len(values), address, TYPES[values.dtype.type][0]), address

    def multiply(
        self, matrix: int, x: int, y: int, dtype: Any, alpha: complex = 1, beta: complex = 0
    ) -> None:
        if np.dtype(dtype).kind != "c":
            alpha, beta = complex(alpha).real, complex(beta).real
        factors = np.array([alpha], dtype), np.array([beta], dtype)
        first, second = (factor.ctypes.data for factor in factors)
        kind = TYPES[dtype][0]
        arguments = self.handle, AS_IT_IS, first, matrix, x, second, y, kind, DEFAULT
        size = cusparse.sp_mv_buffer_size(*arguments)
        buffer = int(call(driver.cuMemAlloc, size)) if size else 0
        cusparse.sp_mv(*arguments, buffer)
        # They were read at the call.
        for factor in factors:
            factor[:] = 99

    def get(self, address: int, count: int, dtype: Any) -> Array:
        call(driver.cuStreamSynchronize, self.stream)
        return read(address, count, dtype)


def status_of(function: Any, *arguments: object) -> Status:
    try:
        function(*arguments)
    except cusparse.cuSPARSEError as error:
        return Status(error.status)
    return Status.SUCCESS


def check_products() -> None:
    rig = Rig()
    sizes = [(1, 1), (3, 40), (40, 3), (50, 60)]
    for (rows, columns), dtype, index in itertools.product(sizes, TYPES, INDICES):
        matrix, x, y = rig.matrix(rows, columns, dtype), rig.numbers(columns, dtype), rig.numbers(rows, dtype)
        for alpha, beta in [(1, 0), (2.5, 0), (1, 1), (-1.5, 0.5)]:
            (of, _), (to, address) = rig.vector(x), rig.vector(y)
            rig.multiply(rig.csr(matrix, index), of, to, dtype, alpha, beta)
            wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
            expected = alpha * (matrix.toarray().astype(wide) @ x.astype(wide)) + beta * y.astype(wide)
            error = np.abs(rig.get(address, rows, dtype) - expected).max()
            assert error <= TYPES[dtype][1] * 10, (dtype, index, alpha, beta, error)


def check_an_unread_result() -> None:
    rig = Rig()
    matrix, x = rig.matrix(5, 6, np.float64), rig.numbers(6, np.float64)
    (of, _), (to, address) = rig.vector(x), rig.vector(np.full(5, np.nan))
    rig.multiply(rig.csr(matrix), of, to, np.float64)
    np.testing.assert_allclose(rig.get(address, 5, np.float64), matrix @ x, rtol=1e-13)


def check_descriptors_are_read_at_the_call() -> None:
    rig = Rig()
    matrix, x = rig.matrix(5, 6, np.float64), rig.numbers(6, np.float64)
    described, (of, _), (to, first) = rig.csr(matrix), rig.vector(x), rig.vector(np.zeros(5))
    second = rig.put(np.zeros(5))
    rig.multiply(described, of, to, np.float64)
    cusparse.dn_vec_set_values(to, second)
    other = matrix.copy()
    other.data = rig.numbers(matrix.nnz, np.float64)
    cusparse.csr_set_pointers(
        described, *(rig.put(part) for part in (other.indptr, other.indices, other.data))
    )
    rig.multiply(described, of, to, np.float64)
    cusparse.destroy_sp_mat(described)
    cusparse.destroy_dn_vec(to)
    np.testing.assert_allclose(rig.get(first, 5, np.float64), matrix @ x, rtol=1e-13)
    np.testing.assert_allclose(rig.get(second, 5, np.float64), other @ x, rtol=1e-13)


def check_arguments() -> None:
    rig = Rig()
    matrix = rig.csr(rig.matrix(5, 6, np.float64))
    (x, _), (y, _) = rig.vector(np.zeros(6)), rig.vector(np.zeros(5))
    one = np.ones(1)
    at = one.ctypes.data
    good = [rig.handle, AS_IT_IS, at, matrix, x, at, y, 1, DEFAULT]
    assert status_of(cusparse.sp_mv_buffer_size, *good) == Status.SUCCESS
    for place, value, status in [
        (0, 0, Status.NOT_INITIALIZED),
        (1, TRANSPOSED, Status.NOT_SUPPORTED),
        (2, 0, Status.INVALID_VALUE),
        (3, 0, Status.INVALID_VALUE),
        (4, y, Status.INVALID_VALUE),
        (6, x, Status.INVALID_VALUE),
        (7, 0, Status.NOT_SUPPORTED),
        (8, 1, Status.NOT_SUPPORTED),
    ]:
        wrong = [value if number == place else argument for number, argument in enumerate(good)]
        assert status_of(cusparse.sp_mv_buffer_size, *wrong) == status, place
        assert status_of(cusparse.sp_mv, *wrong, 0) == status, place
    assert status_of(cusparse.sp_mv, *good, 0) == Status.INVALID_VALUE  # without its buffer
    assert status_of(cusparse.destroy_sp_mat, x + 8) == Status.INVALID_VALUE


def check_invalid_matrices() -> None:
    rig = Rig()
    arrays = [rig.put(np.zeros(8, np.int32)) for _ in range(3)]
    i32, i64 = INDICES.values()
    for arguments, status in [
        ((-1, 2, 1, *arrays, i32, i32, 0, 1), Status.INVALID_VALUE),
        ((2, 2, 5, *arrays, i32, i32, 0, 1), Status.INVALID_VALUE),
        ((2, 2, 1, 0, *arrays[1:], i32, i32, 0, 1), Status.INVALID_VALUE),
        ((2, 2, 1, arrays[0], 0, arrays[2], i32, i32, 0, 1), Status.INVALID_VALUE),
        ((2, 2, 1, *arrays, i32, i32, 0, 99), Status.INVALID_VALUE),
        ((2, 2, 1, *arrays, i32, i64, 0, 1), Status.NOT_SUPPORTED),
        ((2, 2, 1, *arrays, 9, 9, 0, 1), Status.INVALID_VALUE),
    ]:
        assert status_of(cusparse.create_csr, *arguments) == status, arguments
    assert status_of(cusparse.create_dn_vec, 3, 0, 1) == Status.INVALID_VALUE


def _check_fault(indptr: list[int], indices: list[int]) -> None:
    rig = Rig()
    arrays = np.array(indptr, np.int32), np.array(indices, np.int32), np.ones(len(indices))
    (x, _), (y, _) = rig.vector(np.zeros(2)), rig.vector(np.zeros(2))
    rig.multiply(rig.descriptor((2, 2), arrays), x, y, np.float64)
    assert code_of(driver.cuStreamSynchronize, rig.stream) == ILLEGAL_ADDRESS


def check_row_pointers_that_end_elsewhere() -> None:
    _check_fault([0, 1, 3], [0, 1])


def check_row_pointers_that_decrease() -> None:
    _check_fault([0, 3, 2], [0, 1])


def check_columns_out_of_range() -> None:
    _check_fault([0, 1, 2], [0, 2])


def check_destroyed_objects_are_released() -> None:
    rig = Rig()
    count = ctypes.CDLL("libcusparse.so.12").stand_in_cusparse_objects
    count.restype = ctypes.c_ulong
    matrix, (x, _) = rig.csr(rig.matrix(5, 6, np.float64)), rig.vector(np.zeros(6))
    assert count() == 3
    cusparse.destroy_sp_mat(matrix)
    cusparse.destroy_dn_vec(x)
    cusparse.destroy(rig.handle)
    assert count() == 0


def check_without_a_context() -> None:
    call(driver.cuInit, 0)
    assert status_of(cusparse.create) == Status.NOT_INITIALIZED


if __name__ == "__main__":
    main(globals().items())
