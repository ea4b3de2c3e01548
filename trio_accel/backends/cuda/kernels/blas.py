"""Dense linear algebra: cuBLAS."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
from cuda.bindings import driver
from nvmath.bindings import cublas

from ...base import DType
from ...base.ops import AxpySpec, DotSpec, GemmSpec, MatmulSpec, Nrm2Spec, OperationSpec, ScalSpec
from .._arrays import DeviceArray
from .._library import CudaLibrary
from .._stream import CudaStream
from .._workspace import Workspace
from ._checks import INEXACT, check_dtype, check_same_dtype, factor_of
from ._integers import IntegerProducts
from ._layouts import Packing, Product, broadcast_operands, plan_gemm, plan_matmul, vectors

if TYPE_CHECKING:
    from .._device import CudaDevice

__all__ = ["BlasLibrary"]

# What NVIDIA advises for Hopper; with an own one cuBLAS allocates nothing, and repeats its results.
_WORKSPACE = 32 << 20
_MOST_PLANS = 1024
_HOST, _DEVICE = int(cublas.PointerMode.HOST), int(cublas.PointerMode.DEVICE)
_DEFAULT = int(cublas.GemmAlgo.DEFAULT)
# Sums in parts are in the type of the sum, and not in that of the result: rounded once.
_MATH = int(cublas.Math.DEFAULT_MATH) | int(cublas.Math.DISALLOW_REDUCED_PRECISION_REDUCTION)
_SINGLE, _DOUBLE = int(cublas.ComputeType.COMPUTE_32F), int(cublas.ComputeType.COMPUTE_64F)
_INTEGERS = tuple(dtype for dtype in DType if dtype.kind in ("int", "uint"))
_WITH_INTEGERS = (*INEXACT, *_INTEGERS)


@attrs.frozen
class _Kind:
    """What cuBLAS calls an element type.

    Attributes:
        code: Its `cudaDataType`.
        scalar: That of its factors, and of the execution of vectors' routines.
        compute: In what products are summed up.
        real: Its absolute values' type.
        norm: The execution of `nrm2`.
        is_double: Whether factors are doubles.
    """

    code: int
    scalar: int
    compute: int
    real: DType
    norm: int
    is_double: bool


_KINDS = {
    DType.float16: _Kind(2, 0, _SINGLE, DType.float16, 0, False),
    DType.bfloat16: _Kind(14, 0, _SINGLE, DType.bfloat16, 0, False),
    DType.float32: _Kind(0, 0, _SINGLE, DType.float32, 0, False),
    DType.float64: _Kind(1, 1, _DOUBLE, DType.float64, 1, True),
    DType.complex64: _Kind(4, 4, _SINGLE, DType.float32, 0, False),
    DType.complex128: _Kind(5, 5, _DOUBLE, DType.float64, 1, True),
}


class _Factors:
    """Two factors in host memory, which cuBLAS reads at the call."""

    def __init__(self) -> None:
        self._bytes = (ctypes.c_char * 32)()
        self._singles = (ctypes.c_float * 8).from_buffer(self._bytes)
        self._doubles = (ctypes.c_double * 4).from_buffer(self._bytes)
        self.alpha: int = ctypes.addressof(self._bytes)
        self.beta: int = self.alpha + 16

    def put(self, kind: _Kind, alpha: complex, beta: complex = 0.0) -> None:
        """Write both, of the type that goes with an element type."""
        if kind.is_double:
            self._doubles[:] = [alpha.real, alpha.imag, beta.real, beta.imag]
        else:
            self._singles[:] = [alpha.real, alpha.imag, 0.0, 0.0, beta.real, beta.imag, 0.0, 0.0]


class BlasLibrary(CudaLibrary):
    """cuBLAS, by its routines for mixed types; products of whole numbers by a kernel of the backend's own."""

    name = "blas"
    statuses = cublas.cuBLASError
    codes = cublas.Status
    refused = frozenset({"INVALID_VALUE"})
    exhausted = frozenset({"ALLOC_FAILED"})
    missing = frozenset({"NOT_SUPPORTED", "ARCH_MISMATCH"})

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device)
        self._workspace = Workspace(self._context)
        self._packed = [Workspace(self._context) for _ in range(3)]
        self._plans: dict[object, Product] = {}
        self._integers: IntegerProducts | None = None
        self._stream: CudaStream | None = None
        self._mode = _HOST
        self._factors = _Factors()
        self._plain: dict[bool, _Factors] = {False: _Factors(), True: _Factors()}
        for kind in _KINDS.values():
            self._plain[kind.is_double].put(kind, 1.0)
        self._table = {
            MatmulSpec: self._matmul,
            GemmSpec: self._gemm,
            AxpySpec: self._axpy,
            ScalSpec: self._scal,
            DotSpec: self._dot,
            Nrm2Spec: self._nrm2,
        }
        self._handle: int = cublas.create()
        try:
            cublas.set_math_mode(self._handle, _MATH)
            self._warm_up()
        except BaseException:
            self._destroy()
            raise

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        """Compile the kernel for whole numbers, once; see `KernelLibrary.prepare`."""
        if self._integers is None and type(spec) is MatmulSpec and spec.a.dtype in _INTEGERS:
            return self._load_integers
        return None

    def _load_integers(self) -> None:
        if self._integers is None:
            self._integers = IntegerProducts(self._device.kernels)

    def _destroy(self) -> None:
        cublas.destroy(self._handle)
        for workspace in (self._workspace, *self._packed):
            workspace.close()

    def _matmul(self, spec: MatmulSpec, stream: CudaStream) -> None:
        dtype = check_same_dtype("matmul", spec.a, spec.b, spec.out)
        kind = _KINDS.get(dtype)
        if kind is None:
            check_dtype("matmul", dtype, _WITH_INTEGERS)
        at = self._device.at
        a, b, out = at(spec.a), at(spec.b), at(spec.out)
        if not out.size:
            return
        if not a.size:
            self._device.arrays.fill(stream, out, 0)
        elif kind is None:
            self._load_integers()
            assert self._integers is not None
            self._integers.multiply(stream, a, b, out)
        else:
            key = kind.code, a.shape, a.strides, b.shape, b.strides
            plan = self._plans.get(key)
            if plan is None:
                shapes, strides = (a.shape, b.shape), (a.strides, b.strides)
                plan = self._keep(key, plan_matmul(shapes, strides, dtype.itemsize))
            self._multiply(stream, kind, plan, self._plain[kind.is_double], a, b, out)

    def _gemm(self, spec: GemmSpec, stream: CudaStream) -> None:
        dtype = check_same_dtype("gemm", spec.a, spec.b, spec.c)
        kind = _KINDS.get(dtype)
        if kind is None:
            check_dtype("gemm", dtype, INEXACT)
        assert kind is not None
        alpha, beta = (
            factor_of("blas", "alpha", spec.alpha, dtype),
            factor_of("blas", "beta", spec.beta, dtype),
        )
        at = self._device.at
        a, b, c = at(spec.a), at(spec.b), at(spec.c)
        if not c.size:
            return
        if not a.size:
            if beta:
                self._scale(stream, kind, c, beta)
            else:
                self._device.arrays.fill(stream, c, 0)
            return
        letters = spec.transpose_a, spec.transpose_b
        key = kind.code, letters, a.shape, a.strides, b.shape, b.strides, c.strides
        plan = self._plans.get(key)
        if plan is None:
            shapes, strides = _matrices(a, b, c), (a.strides, b.strides, c.strides)
            is_complex = dtype.kind == "complex"
            plan = plan_gemm(*letters, shapes, strides, dtype.itemsize, is_complex=is_complex)
            self._keep(key, plan)
        self._factors.put(kind, alpha, beta)
        if not plan.is_c_packed:
            self._multiply(stream, kind, plan, self._factors, a, b, c)
            return
        packed = DeviceArray.packed(self._packed[2].reserve(stream, c.nbytes), dtype, c.shape)
        if beta:
            self._device.arrays.convert(stream, c, packed)
        self._multiply(stream, kind, plan, self._factors, a, b, packed)
        self._device.arrays.convert(stream, packed, c)

    def _keep(self, key: object, plan: Product) -> Product:
        if len(self._plans) >= _MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[key] = plan
        return plan

    def _multiply(
        self,
        stream: CudaStream,
        kind: _Kind,
        plan: Product,
        factors: _Factors,
        a: DeviceArray,
        b: DeviceArray,
        c: DeviceArray,
    ) -> None:
        self._select(stream, _HOST)
        at_a, at_b = a.address, b.address
        if plan.packing_a is not None or plan.packing_b is not None:
            at_a, at_b = self._packed_operands(stream, plan, a, b)
        first, second = (at_b, at_a) if plan.is_swapped else (at_a, at_b)
        code, (trans_a, trans_b), (lda, ldb, ldc) = kind.code, plan.operations, plan.leading
        if plan.batches == 1 and len(plan.groups) == 1:
            cublas.gemm_ex_64(
                self._handle, trans_a, trans_b, plan.m, plan.n, plan.k,
                factors.alpha, first, code, lda, second, code, ldb,
                factors.beta, c.address, code, ldc, kind.compute, _DEFAULT,
            )  # fmt: skip
            return
        step_a, step_b, step_c = plan.steps
        for group in plan.groups:
            off_a, off_b = (group.b, group.a) if plan.is_swapped else (group.a, group.b)
            cublas.gemm_strided_batched_ex_64(
                self._handle, trans_a, trans_b, plan.m, plan.n, plan.k,
                factors.alpha, first + off_a, code, lda, step_a, second + off_b, code, ldb, step_b,
                factors.beta, c.address + group.c, code, ldc, step_c, plan.batches, kind.compute, _DEFAULT,
            )  # fmt: skip

    def _packed_operands(
        self, stream: CudaStream, plan: Product, a: DeviceArray, b: DeviceArray
    ) -> tuple[int, int]:
        """Lay out what cannot be read as it lies; returns where both are then."""
        if plan.shape_a is not None:
            a, b = _in_full(a, b)
        operands = (a, plan.packing_a), (b, plan.packing_b)
        # All memory first: there may not be so much.
        places = [
            None if packing is None else self._packed[number].reserve(stream, operand.nbytes)
            for number, (operand, packing) in enumerate(operands)
        ]
        for (operand, packing), place in zip(operands, places, strict=True):
            if place is not None:
                self._pack(stream, operand, place, packing)
        return places[0] or a.address, places[1] or b.address

    def _pack(
        self, stream: CudaStream, array: DeviceArray, place: int, packing: Packing | None = None
    ) -> DeviceArray:
        packed = DeviceArray.packed(place, array.dtype, array.shape)
        self._device.arrays.convert(stream, array, packed, conjugate=packing == "conjugate")
        return packed

    def _axpy(self, spec: AxpySpec, stream: CudaStream) -> None:
        dtype = check_same_dtype("axpy", spec.x, spec.y)
        check_dtype("axpy", dtype, INEXACT)
        kind = _KINDS[dtype]
        self._factors.put(kind, factor_of("blas", "alpha", spec.alpha, dtype))
        x, y = self._device.at(spec.x), self._device.at(spec.y)
        if not y.size:
            return
        add = partial(self._add, stream, kind)
        if add(x, y):
            return
        places = [self._packed[number].reserve(stream, y.nbytes) for number in range(2)]
        x = self._pack(stream, x, places[0])
        if not add(x, y):
            packed = self._pack(stream, y, places[1])
            add(x, packed)
            self._device.arrays.convert(stream, packed, y)

    def _add(self, stream: CudaStream, kind: _Kind, x: DeviceArray, y: DeviceArray) -> bool:
        """Enqueue axpy with the factor that was put; False where these are no vectors."""
        found = vectors(y.shape, y.dtype.itemsize, x.strides, y.strides)
        if found is None:
            return False
        (x_offset, x_step), (y_offset, y_step) = found
        self._select(stream, _HOST)
        cublas.axpy_ex_64(
            self._handle, y.size, self._factors.alpha, kind.scalar, x.address + x_offset, kind.code, x_step,
            y.address + y_offset, kind.code, y_step, kind.scalar,
        )  # fmt: skip
        return True

    def _scal(self, spec: ScalSpec, stream: CudaStream) -> None:
        dtype = spec.x.dtype
        check_dtype("scal", dtype, INEXACT)
        alpha = factor_of("blas", "alpha", spec.alpha, dtype)
        x = self._device.at(spec.x)
        if x.size:
            self._scale(stream, _KINDS[dtype], x, alpha)

    def _scale(self, stream: CudaStream, kind: _Kind, x: DeviceArray, alpha: complex) -> None:
        found = vectors(x.shape, x.dtype.itemsize, x.strides)
        if found is None and not alpha.imag:
            self._device.arrays.convert(stream, x, x, scale=alpha.real)
            return
        source = x
        if found is None:
            x = self._pack(stream, x, self._packed[0].reserve(stream, x.nbytes))
            found = [(0, 1)]
        ((offset, step),) = found
        self._factors.put(kind, alpha)
        self._select(stream, _HOST)
        cublas.scal_ex_64(
            self._handle, x.size, self._factors.alpha, kind.scalar, x.address + offset, kind.code, step,
            kind.scalar,
        )  # fmt: skip
        if x is not source:
            self._device.arrays.convert(stream, x, source)

    def _dot(self, spec: DotSpec, stream: CudaStream) -> None:
        dtype = check_same_dtype("dot", spec.x, spec.y, spec.out)
        check_dtype("dot", dtype, INEXACT)
        kind = _KINDS[dtype]
        x, y, out = self._device.at(spec.x), self._device.at(spec.y), self._device.at(spec.out)
        if not x.size:
            self._device.arrays.fill(stream, out, 0)
            return
        found = vectors(x.shape, dtype.itemsize, x.strides, y.strides)
        if found is None:
            places = [self._packed[number].reserve(stream, x.nbytes) for number in range(2)]
            x, y = self._pack(stream, x, places[0]), self._pack(stream, y, places[1])
            found = [(0, 1), (0, 1)]
        (x_offset, x_step), (y_offset, y_step) = found
        self._select(stream, _DEVICE)
        cublas.dot_ex_64(
            self._handle, x.size, x.address + x_offset, kind.code, x_step,
            y.address + y_offset, kind.code, y_step, out.address, kind.code, kind.scalar,
        )  # fmt: skip

    def _nrm2(self, spec: Nrm2Spec, stream: CudaStream) -> None:
        dtype = spec.x.dtype
        check_dtype("nrm2", dtype, INEXACT)
        kind = _KINDS[dtype]
        check_dtype(f"nrm2 of {dtype} to", spec.out.dtype, (kind.real,))
        x, out = self._device.at(spec.x), self._device.at(spec.out)
        if not x.size:
            self._device.arrays.fill(stream, out, 0)
            return
        found = vectors(x.shape, dtype.itemsize, x.strides)
        if found is None:
            x, found = self._pack(stream, x, self._packed[0].reserve(stream, x.nbytes)), [(0, 1)]
        ((offset, step),) = found
        self._select(stream, _DEVICE)
        cublas.nrm2ex_64(
            self._handle, x.size, x.address + offset, kind.code, step, out.address,
            _KINDS[kind.real].code, kind.norm,
        )  # fmt: skip

    def _select(self, stream: CudaStream, mode: int) -> None:
        """Let the handle work on a stream, with results and factors in the memory of host or device."""
        if stream is not self._stream:
            place = self._workspace.reserve(stream, _WORKSPACE)
            self._stream = None
            cublas.set_stream(self._handle, stream.handle)
            # Each stream has its own, and a change of the stream takes it away.
            cublas.set_workspace(self._handle, place, _WORKSPACE)
            self._stream = stream
        if mode != self._mode:
            cublas.set_pointer_mode(self._handle, mode)
            self._mode = mode

    def _warm_up(self) -> None:
        """Multiply something: cuBLAS loads kernels at first use, which would hold up whoever asks first."""
        check = self._context.check
        stream = int(check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        try:
            nbytes = 64 * 64 * 8
            place = int(check(driver.cuMemAllocAsync(_WORKSPACE + 2 * nbytes, stream)))
            check(driver.cuMemsetD8Async(place, 0, _WORKSPACE + 2 * nbytes, stream))
            cublas.set_stream(self._handle, stream)
            cublas.set_workspace(self._handle, place, _WORKSPACE)
            source, out = place + _WORKSPACE, place + _WORKSPACE + nbytes
            for dtype in (DType.float32, DType.float64, DType.bfloat16):
                kind, factors = _KINDS[dtype], self._plain[_KINDS[dtype].is_double]
                cublas.gemm_ex_64(
                    self._handle, 0, 0, 64, 64, 64, factors.alpha, source, kind.code, 64, source, kind.code,
                    64, factors.beta, out, kind.code, 64, kind.compute, _DEFAULT,
                )  # fmt: skip
            check(driver.cuMemFreeAsync(place, stream))
            check(driver.cuStreamSynchronize(stream))
        finally:
            driver.cuStreamDestroy(stream)


def _matrices(*arrays: DeviceArray) -> Any:
    return tuple(array.shape for array in arrays)


def _in_full(a: DeviceArray, b: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
    """Both operands of a product with all batches, as they lie: without a copy."""
    batch, left, right = broadcast_operands((a.shape, b.shape), (a.strides, b.strides))
    full_a, full_b = (
        DeviceArray(
            array.address, array.dtype, (*batch, *operand.shape), (*operand.batch_strides, *operand.strides)
        )
        for array, operand in ((a, left), (b, right))
    )
    return full_a, full_b
