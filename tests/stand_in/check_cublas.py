"""Checks the stand-in cuBLAS by nvmath's bindings, against NumPy in double precision."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from checking import call, launch_host, main, make_stream, open_device, pinned, read
from cuda.bindings import driver
from nvmath.bindings import cublas

Array = npt.NDArray[Any]

HOST, DEVICE = int(cublas.PointerMode.HOST), int(cublas.PointerMode.DEVICE)
SINGLE, DOUBLE = int(cublas.ComputeType.COMPUTE_32F), int(cublas.ComputeType.COMPUTE_64F)
LETTERS: dict[int, Callable[[Array], Array]] = {0: lambda x: x, 1: lambda x: x.T, 2: lambda x: x.conj().T}

# For an element type: its code, the code of factors, the compute type, the type of sums, the error of one
# rounding.
TYPES: dict[Any, tuple[int, int, int, Any, float]] = {
    np.float16: (2, 0, SINGLE, np.float32, 1e-3),
    ml_dtypes.bfloat16: (14, 0, SINGLE, np.float32, 8e-3),
    np.float32: (0, 0, SINGLE, np.float32, 1e-6),
    np.float64: (1, 1, DOUBLE, np.float64, 1e-14),
    np.complex64: (4, 4, SINGLE, np.complex64, 1e-6),
    np.complex128: (5, 5, DOUBLE, np.complex128, 1e-14),
}


class Rig:
    """A handle on a stream, and arrays in the device's memory."""

    def __init__(self) -> None:
        open_device()
        self.stream = make_stream()
        self.handle = cublas.create()
        cublas.set_stream(self.handle, int(self.stream))
        self.rng = np.random.default_rng(3)

    def numbers(self, count: int, dtype: Any) -> Array:
        values = self.rng.uniform(-1, 1, count) + 1j * self.rng.uniform(-1, 1, count)
        return (values if np.dtype(dtype).kind == "c" else values.real).astype(dtype)

    def put(self, array: Array) -> int:
        address = int(call(driver.cuMemAlloc, max(array.nbytes, 1)))
        call(driver.cuMemcpyHtoD, address, array.ctypes.data, array.nbytes)
        return address

    def get(self, address: int, like: Array) -> Array:
        call(driver.cuStreamSynchronize, self.stream)
        return read(address, like.size, like.dtype).reshape(like.shape)


def wide(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def matrix(buffer: Array, rows: int, columns: int, leading: int) -> Array:
    """A matrix in column-major memory, as a view."""
    size = buffer.itemsize
    return np.ndarray((rows, columns), buffer.dtype, buffer, 0, (size, leading * size))


def status_of(function: Callable[..., object], *arguments: object) -> int:
    try:
        function(*arguments)
    except cublas.cuBLASError as error:
        return int(error.status)
    return 0


def check_products_of_all_types_and_letters() -> None:
    rig = Rig()
    m, n, k, lda, ldb, ldc = 5, 4, 3, 9, 8, 7
    for (dtype, found), op_a, op_b in itertools.product(TYPES.items(), LETTERS, LETTERS):
        code, _, compute, number, tolerance = found
        a, b, c = (rig.numbers(count, dtype) for count in (9 * 9, 9 * 9, ldc * n))
        alpha, beta = np.array(1.5, number), np.array(-0.5, number)
        if np.dtype(dtype).kind == "c":
            alpha, beta = np.array(1.5 - 1j, number), np.array(0.25j, number)
        at = rig.put(c)
        cublas.gemm_ex_64(
            rig.handle,
            op_a,
            op_b,
            m,
            n,
            k,
            alpha.ctypes.data,
            rig.put(a),
            code,
            lda,
            rig.put(b),
            code,
            ldb,
            beta.ctypes.data,
            at,
            code,
            ldc,
            compute,
            -1,
        )
        left = LETTERS[op_a](matrix(wide(a), *((m, k) if op_a == 0 else (k, m)), lda))
        right = LETTERS[op_b](matrix(wide(b), *((k, n) if op_b == 0 else (n, k)), ldb))
        expected = wide(c)
        out = matrix(expected, m, n, ldc)
        out[...] = (
            complex(alpha) * left @ right + complex(beta) * out
            if np.iscomplexobj(out)
            else (float(alpha) * left @ right + float(beta) * out)
        )
        # The elements between the columns are also unchanged.
        assert np.abs(wide(rig.get(at, c)) - expected).max() <= 4 * tolerance, (dtype, op_a, op_b)


def check_batches_and_beta_of_zero() -> None:
    rig = Rig()
    one, zero = np.array(1.0), np.array(0.0)
    a, b = rig.numbers(3 * 6, np.float64), rig.numbers(4, np.float64)
    c = np.full(3 * 10, np.nan)
    at = rig.put(c)
    cublas.gemm_strided_batched_ex_64(
        rig.handle,
        0,
        0,
        3,
        2,
        2,
        one.ctypes.data,
        rig.put(a),
        1,
        3,
        6,
        rig.put(b),
        1,
        2,
        0,
        zero.ctypes.data,
        at,
        1,
        3,
        10,
        3,
        DOUBLE,
        -1,
    )
    got = rig.get(at, c).reshape(3, 10)
    for batch in range(3):
        expected = matrix(a[6 * batch :], 3, 2, 3) @ matrix(b, 2, 2, 2)
        np.testing.assert_allclose(got[batch, :6].reshape(2, 3).T, expected, rtol=1e-14)
    assert np.isnan(got[:, 6:]).all()


def check_products_of_nothing() -> None:
    rig = Rig()
    one, two = np.array(1.0), np.array(2.0)
    c = np.arange(4.0)
    at = rig.put(c)
    gemm = cublas.gemm_ex_64
    gemm(rig.handle, 0, 0, 2, 2, 0, one.ctypes.data, 0, 1, 2, 0, 1, 1, two.ctypes.data, at, 1, 2, DOUBLE, -1)
    np.testing.assert_array_equal(rig.get(at, c), 2 * c)
    gemm(rig.handle, 0, 0, 0, 2, 1, one.ctypes.data, 0, 1, 1, 0, 1, 1, two.ctypes.data, 0, 1, 1, DOUBLE, -1)


def check_wrong_arguments() -> None:
    rig = Rig()
    one = np.array(1.0)
    at = rig.put(np.zeros(64))

    right = {"op": 0, "m": 4, "lda": 4, "ldb": 4, "ldc": 4, "type": 1, "compute": DOUBLE, "a": at}

    def gemm(**wrong: int) -> int:
        given = {"handle": rig.handle, **right, **wrong}
        return status_of(
            cublas.gemm_ex_64,
            given["handle"],
            given["op"],
            0,
            given["m"],
            4,
            4,
            one.ctypes.data,
            given["a"],
            given["type"],
            given["lda"],
            at,
            given["type"],
            given["ldb"],
            one.ctypes.data,
            at,
            given["type"],
            given["ldc"],
            given["compute"],
            -1,
        )

    assert gemm() == 0
    assert [gemm(op=3), gemm(m=-1), gemm(lda=3), gemm(ldb=3), gemm(ldc=3), gemm(a=at + 1)] == [7] * 6
    assert [gemm(compute=SINGLE), gemm(type=3), gemm(type=0), gemm(type=2)] == [15] * 4
    assert gemm(handle=0) == 1
    call(driver.cuStreamSynchronize, rig.stream)
    cublas.destroy(rig.handle)
    assert gemm() == 1


def check_destroy_waits_for_running_work() -> None:
    rig, go, has_run = Rig(), threading.Event(), threading.Event()
    keep = launch_host(make_stream(), lambda: (go.wait(30), has_run.set()))
    threading.Timer(0.1, go.set).start()
    cublas.destroy(rig.handle)
    assert keep is not None
    assert has_run.is_set()


def check_create_without_a_context() -> None:
    call(driver.cuInit, 0)
    assert status_of(cublas.create) == 1


def check_vectors() -> None:
    rig = Rig()
    for dtype, (code, scalar, _, number, tolerance) in TYPES.items():
        x, y = rig.numbers(7 * 3, dtype), rig.numbers(7 * 2, dtype)
        alpha = np.array(0.75 - 0.5j if np.dtype(dtype).kind == "c" else 0.75, number)
        at_x, at_y, factor = rig.put(x), rig.put(y), wide(alpha)
        cublas.set_pointer_mode(rig.handle, HOST)
        cublas.axpy_ex_64(rig.handle, 7, alpha.ctypes.data, scalar, at_x, code, 3, at_y, code, 2, scalar)
        expected = wide(y)
        expected[::2] += factor * wide(x)[::3]
        summed = rig.get(at_y, y)
        assert np.abs(wide(summed) - expected).max() <= 2 * tolerance, dtype
        cublas.scal_ex_64(rig.handle, 7, alpha.ctypes.data, scalar, at_x, code, 3, scalar)
        scaled = wide(x)
        scaled[::3] *= factor
        assert np.abs(wide(rig.get(at_x, x)) - scaled).max() <= 2 * tolerance, dtype
        x = rig.get(at_x, x)
        cublas.set_pointer_mode(rig.handle, DEVICE)
        result = rig.put(np.zeros(1, dtype))
        cublas.dot_ex_64(rig.handle, 7, at_x, code, 3, at_y, code, 2, result, code, scalar)
        dot = np.sum(wide(x)[::3] * wide(summed)[::2])
        assert abs(wide(rig.get(result, np.zeros(1, dtype)))[0] - dot) <= 20 * tolerance, dtype
        real = {np.complex64: np.float32, np.complex128: np.float64}.get(dtype, dtype)
        cublas.nrm2ex_64(rig.handle, 7, at_x, code, 3, result, TYPES[real][0], 1 if real is np.float64 else 0)
        norm = np.linalg.norm(wide(x)[::3])
        assert abs(wide(rig.get(result, np.zeros(1, real)))[0] - norm) <= 4 * tolerance, dtype


def check_reversed_and_empty_vectors() -> None:
    rig = Rig()
    two, x, y = np.array(2.0), np.arange(5.0), np.ones(5)
    at_x, at_y = rig.put(x), rig.put(y)
    cublas.axpy_ex_64(rig.handle, 5, two.ctypes.data, 1, at_x, 1, -1, at_y, 1, 1, 1)
    np.testing.assert_array_equal(rig.get(at_y, y), 1 + 2 * x[::-1])
    cublas.scal_ex_64(rig.handle, 5, two.ctypes.data, 1, at_x, 1, -1, 1)
    np.testing.assert_array_equal(rig.get(at_x, x), x)
    cublas.set_pointer_mode(rig.handle, DEVICE)
    for reduce in (
        lambda: cublas.dot_ex_64(rig.handle, 0, at_x, 1, 1, at_y, 1, 1, at_y, 1, 1),
        lambda: cublas.nrm2ex_64(rig.handle, 0, at_x, 1, 1, at_y, 1, 1),
    ):
        call(driver.cuMemsetD8Async, at_y, 255, 8, rig.stream)
        reduce()
        assert rig.get(at_y, y)[0] == 0


def check_factors_are_read_when_they_should_be() -> None:
    """Those on the host at the call, those on the device when the stream gets there."""
    rig = Rig()
    gate = ctypes.c_int(0)
    on_host, on_device = np.array(2.0), rig.put(np.array(2.0))
    first, second = rig.put(np.ones(1)), rig.put(np.ones(1))
    word = pinned(1)
    # The first of its kind waits for everything.
    cublas.scal_ex_64(rig.handle, 1, on_host.ctypes.data, 1, rig.put(np.ones(1)), 1, 1, 1)
    call(driver.cuStreamWaitValue32, rig.stream, word.ctypes.data, 1, 0)
    kept = launch_host(rig.stream, lambda: setattr(gate, "value", 1))
    cublas.scal_ex_64(rig.handle, 1, on_host.ctypes.data, 1, first, 1, 1, 1)
    cublas.set_pointer_mode(rig.handle, DEVICE)
    cublas.scal_ex_64(rig.handle, 1, on_device, 1, second, 1, 1, 1)
    on_host[...] = 3.0
    other = make_stream()
    call(driver.cuMemcpyDtoDAsync, on_device, rig.put(np.array(3.0)), 8, other)
    call(driver.cuStreamSynchronize, other)
    assert gate.value == 0
    word[0] = 1
    assert rig.get(first, np.ones(1))[0] == 2
    assert rig.get(second, np.ones(1))[0] == 3
    assert gate.value == 1
    del kept


def check_workspaces() -> None:
    """A change of the stream takes the user's workspace away; a product may write to all of it."""
    rig = Rig()
    library = ctypes.CDLL("libcublas.so.13")
    library.stand_in_cublas_without_workspace.restype = ctypes.c_ulong
    one, at = np.array(1.0), rig.put(np.ones(4))
    size = 1 << 16
    workspace = int(call(driver.cuMemAlloc, size))
    call(driver.cuMemsetD8Async, workspace, 1, size, rig.stream)

    def multiply() -> int:
        cublas.gemm_ex_64(
            rig.handle,
            0,
            0,
            1,
            1,
            1,
            one.ctypes.data,
            at,
            1,
            1,
            at,
            1,
            1,
            one.ctypes.data,
            at,
            1,
            1,
            DOUBLE,
            -1,
        )
        return int(library.stand_in_cublas_without_workspace())

    assert status_of(cublas.set_workspace, rig.handle, workspace + 8, size - 8) == 7
    assert multiply() == 1
    cublas.set_workspace(rig.handle, workspace, size)
    assert multiply() == 1
    assert not (rig.get(workspace, np.zeros(16, np.uint8)) == 1).any()
    cublas.set_stream(rig.handle, int(rig.stream))
    assert multiply() == 2
    call(driver.cuStreamSynchronize, rig.stream)


def check_norms_of_extremes() -> None:
    rig = Rig()
    cublas.set_pointer_mode(rig.handle, DEVICE)
    result = rig.put(np.zeros(1))
    for values, expected in (
        ([3e200, 4e200], 5e200),
        ([3e-200, 4e-200], 5e-200),
        ([1.0, np.inf], np.inf),
        ([np.nan, np.inf], np.nan),
        ([0.0, 0.0], 0.0),
        # It should be 5e-323.
        ([3e-323, 4e-323], 0.0),
    ):
        cublas.nrm2ex_64(rig.handle, 2, rig.put(np.array(values)), 1, 1, result, 1, 1)
        np.testing.assert_allclose(rig.get(result, np.zeros(1))[0], expected, rtol=1e-14)


def check_half_types_round_to_even() -> None:
    rig = Rig()
    numbers = rig.rng.uniform(-2, 2, 70) * 2.0 ** rig.rng.integers(-30, 20, 70)
    singles = np.append(numbers, [65519.0, 65520.0]).astype(np.float32)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        code = TYPES[dtype][0]
        ones = np.ones(1, dtype)
        for number in singles.tolist():
            factor, at = np.array(number, np.float32), rig.put(ones)
            cublas.scal_ex_64(rig.handle, 1, factor.ctypes.data, 0, at, code, 1, 0)
            with np.errstate(over="ignore"):
                expected = factor.astype(dtype)
            assert rig.get(at, ones).tobytes() == expected.tobytes(), (dtype, number)


if __name__ == "__main__":
    main(globals().items())
