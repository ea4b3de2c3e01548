"""The vendor's libraries by the bindings that the backend uses, and nothing around them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver
from nvmath.bindings import cublas, cublasLt, cufft, cusparse

from ._banded import banded
from ._mixed import MIXED, REPEATED

__all__ = ["Bare", "make"]

_F32, _C64, _BF16, _F8 = 0, 4, 14, 28
_INDICES_32 = cusparse.IndexType.INDEX_32I
_SUM = int(cublas.ComputeType.COMPUTE_32F)
_ALGORITHM = int(cublas.GemmAlgo.DEFAULT)
_FORWARD = -1
_TRANSPOSE = 1
_WORKSPACE = 32 << 20
_POSIX = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def check(result: tuple[Any, ...]) -> Any:
    """Take a call's result apart."""
    if result[0]:
        raise RuntimeError(f"the driver answers {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]


class Bare:
    """A context with one stream, memory of the same kind as the backend's, and the libraries' handles."""

    def __init__(self) -> None:
        check(driver.cuInit(0))
        self._device = check(driver.cuDeviceGet(0))
        check(driver.cuCtxPushCurrent(check(driver.cuDevicePrimaryCtxRetain(self._device))))
        self._stream = int(check(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))))
        self._blas = cublas.create()
        cublas.set_stream(self._blas, self._stream)
        self._lt = cublasLt.create()
        self._sparse = cusparse.create()
        cusparse.set_stream(self._sparse, self._stream)
        self._one, self._zero = np.ones(1, np.float32), np.zeros(1, np.float32)
        # What the library reads at each call.
        self._ways: list[npt.NDArray[Any]] = []
        self._works: dict[tuple[str, int], Callable[[], None]] = {}
        self._mixed: dict[str, Callable[[], Callable[[], None]]] = {}

    def blocking(self, work: str, size: int, calls: int) -> float:
        """Seconds for one call that is waited for."""
        call = self._work(work, size)
        start = time.perf_counter()
        for _ in range(calls):
            call()
            driver.cuStreamSynchronize(self._stream)
        return (time.perf_counter() - start) / calls

    def singles(self, work: str, size: int, calls: int) -> list[float]:
        """Seconds of each of several calls in a row, each of which is waited for."""
        call = self._work(work, size)
        times: list[float] = []
        for _ in range(calls):
            start = time.perf_counter()
            call()
            driver.cuStreamSynchronize(self._stream)
            times.append(time.perf_counter() - start)
        return times

    def rate(self, work: str, size: int, calls: int) -> float:
        """Calls per second, all enqueued at once."""
        call = self._work(work, size)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        check(driver.cuStreamSynchronize(self._stream))
        return calls / (time.perf_counter() - start)

    def mixed(self, work: str, calls: int) -> float:
        """Seconds for one call of mixed shapes that is waited for; memory and plans are there."""
        following = self._mixed.get(work) or self._make_mixed(work)
        start = time.perf_counter()
        for _ in range(calls):
            following()()
            driver.cuStreamSynchronize(self._stream)
        return (time.perf_counter() - start) / calls

    def _make_mixed(self, work: str) -> Callable[[], Callable[[], None]]:
        """What gives one call after the other."""
        if work == "repeat":
            calls = [self._make_gemm_f32(REPEATED)]
        else:
            make = {"matmul": self._product, "rfft": self._rfft}[work]
            calls = [make(*shape) for shape in MIXED]
        for call in calls:
            call()
        check(driver.cuStreamSynchronize(self._stream))
        following = self._mixed[work] = itertools.cycle(calls).__next__
        return following

    def _product(self, rows: int, columns: int) -> Callable[[], None]:
        """The product of a matrix with itself, transposed."""
        a, c = self._memory(4 * rows * columns), self._memory(4 * rows * rows)
        self._fill(a, 4 * rows * columns)
        one, zero = self._one.ctypes.data, self._zero.ctypes.data

        def call() -> None:
            # cuBLAS sees the transpose of a matrix whose rows lie one after the other.
            cublas.gemm_ex_64(
                self._blas,
                _TRANSPOSE,
                0,
                rows,
                rows,
                columns,
                one,
                a,
                _F32,
                columns,
                a,
                _F32,
                columns,
                zero,
                c,
                _F32,
                rows,
                _SUM,
                _ALGORITHM,
            )

        return call

    def _rfft(self, rows: int, columns: int) -> Callable[[], None]:
        """The transform of each row."""
        half = columns // 2 + 1
        source, out = self._memory(4 * rows * columns), self._memory(8 * rows * half)
        self._fill(source, 4 * rows * columns)
        plan = self._plan(columns, columns, half, cufft.Type.R2C, rows)
        return lambda: cufft.exec_r2c(plan, source, out)

    def _plan(self, size: int, source: int, out: int, kind: cufft.Type, batch: int) -> int:
        """A plan with its work area, for rows that lie one after the other."""
        plan: int = cufft.create()
        cufft.set_auto_allocation(plan, 0)
        area = cufft.make_plan_many64(plan, 1, [size], [source], 1, source, [out], 1, out, kind, batch)
        # The plan's tables come on the default stream, which this one does not wait for.
        check(driver.cuStreamSynchronize(0))
        cufft.set_work_area(plan, self._memory(area))
        cufft.set_stream(plan, self._stream)
        return plan

    def _work(self, name: str, size: int) -> Callable[[], None]:
        """What enqueues it; the memory and plans are there afterwards."""
        key = name, int(size)
        if key not in self._works:
            call = getattr(self, f"_make_{name}")(int(size))
            call()
            check(driver.cuStreamSynchronize(self._stream))
            self._works[key] = call
        return self._works[key]

    def _make_gemm_f32(self, size: int) -> Callable[[], None]:
        return self._gemm(size, _F32, 4)

    def _make_gemm_bf16(self, size: int) -> Callable[[], None]:
        return self._gemm(size, _BF16, 2)

    def _gemm(self, size: int, code: int, itemsize: int) -> Callable[[], None]:
        a, b, c = (self._memory(size * size * itemsize) for _ in range(3))
        self._fill(a, size * size * itemsize)
        self._fill(b, size * size * itemsize)
        one, zero = self._one.ctypes.data, self._zero.ctypes.data

        def call() -> None:
            cublas.gemm_ex_64(
                self._blas,
                0,
                0,
                size,
                size,
                size,
                one,
                a,
                code,
                size,
                b,
                code,
                size,
                zero,
                c,
                code,
                size,
                _SUM,
                _ALGORITHM,
            )

        return call

    def _make_fused_bf16(self, size: int) -> Callable[[], None]:
        return self._fused(size, _BF16, 2, cublasLt.Epilogue.RELU_BIAS, is_transposed=False)

    def _make_fused_f8(self, size: int) -> Callable[[], None]:
        return self._fused(size, _F8, 1, cublasLt.Epilogue.DEFAULT, is_transposed=True)

    def _fused(
        self, size: int, code: int, itemsize: int, epilogue: cublasLt.Epilogue, *, is_transposed: bool
    ) -> Callable[[], None]:
        """A product to bfloat16 by cuBLASLt, in the way that it advises."""
        a, b, c = (self._memory(size * size * nbytes) for nbytes in (itemsize, itemsize, 2))
        self._fill(a, size * size * itemsize)
        self._fill(b, size * size * itemsize)
        description = cublasLt.matmul_desc_create(_SUM, _F32)
        kinds = cublasLt.MatmulDescAttribute
        values = {kinds.TRANSA: int(is_transposed), kinds.EPILOGUE: int(epilogue)}
        if epilogue is not cublasLt.Epilogue.DEFAULT:
            values[kinds.BIAS_POINTER] = b
        for attribute, value in values.items():
            word = np.array([value], cublasLt.get_matmul_desc_attribute_dtype(attribute))
            cublasLt.matmul_desc_set_attribute(description, attribute, word.ctypes.data, word.nbytes)
        of_a = cublasLt.matrix_layout_create(code, size, size, size)
        of_c = cublasLt.matrix_layout_create(_BF16, size, size, size)
        most = np.array([_WORKSPACE], np.uint64)
        preference = cublasLt.matmul_preference_create()
        room = cublasLt.MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES
        cublasLt.matmul_preference_set_attribute(preference, room, most.ctypes.data, 8)
        found = np.zeros(1, cublasLt.matmul_heuristic_result_dtype)
        count, workspace = np.zeros(1, np.int32), self._memory(_WORKSPACE)
        cublasLt.matmul_algo_get_heuristic(
            self._lt, description, of_a, of_a, of_c, of_c, preference, 1, found.ctypes.data, count.ctypes.data
        )
        self._ways.append(found)
        one, zero, way = self._one.ctypes.data, self._zero.ctypes.data, found.ctypes.data
        return lambda: cublasLt.matmul(
            self._lt,
            description,
            one,
            a,
            of_a,
            b,
            of_a,
            zero,
            c,
            of_c,
            c,
            of_c,
            way,
            workspace,
            _WORKSPACE,
            self._stream,
        )

    def _make_fft(self, size: int) -> Callable[[], None]:
        source, out = self._memory(8 * size), self._memory(8 * size)
        self._fill(source, 8 * size)
        plan = self._plan(size, size, size, cufft.Type.C2C, 1)
        return lambda: cufft.exec_c2c(plan, source, out, _FORWARD)

    def _make_spmv(self, rows: int) -> Callable[[], None]:
        arrays = banded(rows)
        indptr, indices, data = (self._upload(array) for array in arrays)
        x, out = self._upload(np.ones(rows, np.float32)), self._memory(4 * rows)
        one, zero = self._one.ctypes.data, self._zero.ctypes.data
        matrix = cusparse.create_csr(
            rows,
            rows,
            len(arrays[1]),
            indptr,
            indices,
            data,
            _INDICES_32,
            _INDICES_32,
            cusparse.IndexBase.ZERO,
            _F32,
        )
        vectors = cusparse.create_dn_vec(rows, x, _F32), cusparse.create_dn_vec(rows, out, _F32)
        way = cusparse.Operation.NON_TRANSPOSE, cusparse.SpMVAlg.DEFAULT
        size = cusparse.sp_mv_buffer_size(
            self._sparse, way[0], one, matrix, vectors[0], zero, vectors[1], _F32, way[1]
        )
        buffer = self._memory(size) if size else 0
        return lambda: cusparse.sp_mv(
            self._sparse, way[0], one, matrix, vectors[0], zero, vectors[1], _F32, way[1], buffer
        )

    def _make_put(self, nbytes: int) -> Callable[[], None]:
        host, device = self._pinned(nbytes), self._memory(nbytes)
        return lambda: check(driver.cuMemcpyHtoDAsync(device, host, nbytes, self._stream))

    def _make_to_host(self, nbytes: int) -> Callable[[], None]:
        host, device = self._pinned(nbytes), self._memory(nbytes)
        return lambda: check(driver.cuMemcpyDtoHAsync(host, device, nbytes, self._stream))

    def _pinned(self, nbytes: int) -> int:
        return int(check(driver.cuMemHostAlloc(nbytes, 0)))

    def _memory(self, nbytes: int) -> int:
        """Memory that could be exported, as that of arrays is."""
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(self._device)
        properties.requestedHandleTypes = _POSIX
        granularity = check(
            driver.cuMemGetAllocationGranularity(
                properties, driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            )
        )
        whole = -(-max(1, nbytes) // granularity) * granularity
        handle = check(driver.cuMemCreate(whole, properties, 0))
        address = int(check(driver.cuMemAddressReserve(whole, 0, 0, 0)))
        check(driver.cuMemMap(address, whole, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location = properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(driver.cuMemSetAccess(address, whole, [access], 1))
        return address

    def _upload(self, host: npt.NDArray[Any]) -> int:
        address = self._memory(host.nbytes)
        check(driver.cuMemcpyHtoDAsync(address, host.ctypes.data, host.nbytes, self._stream))
        check(driver.cuStreamSynchronize(self._stream))
        return address

    def _fill(self, address: int, nbytes: int) -> None:
        # A power of two in each of the element types: a chip computes with zeros at another pace.
        check(driver.cuMemsetD32Async(address, 0x3F803F80, nbytes // 4, self._stream))


make = Bare
