"""BLAS 1: operations on vectors, and on arrays as if they were vectors."""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

from nvmath.bindings import cublas

from ...base import DType
from ...base.checks import INEXACT, NATIVE, check_dtype
from ...base.device_array import DeviceArray
from ...base.kernels import kernel
from ...base.ops import ArraySpec
from ...base.product_layouts import vectors
from ..kit._device import LibraryDevice
from ..kit._library import Call, CudaLibrary, factor_of
from ._cublas import DEVICE, HOST, KINDS, Cublas, Kind

__all__ = ["VectorLibrary"]

# As in norms.cu, with what fills the structure up.
_NORM = struct.Struct("<QQqqi4x")
# In float32, which float16 is computed in, its denormal numbers are none.
_NORM_TYPES = {
    DType.bfloat16: 0,
    DType.float32: 1,
    DType.float64: 2,
    DType.complex64: 3,
    DType.complex128: 4,
}
_NORM_THREADS = 1024
_INDEX = struct.Struct("<QQq")
# Of each array as a vector: bytes to its first element, and elements from one to the next.
_Vectors: TypeAlias = list[tuple[int, int]]
_PACKED: _Vectors = [(0, 1), (0, 1)]


class VectorLibrary(CudaLibrary):
    """Enqueues what cuBLAS has for vectors; arrays that are no vectors are packed into one.

    Compiles a kernel of the backend's own when it is made, which blocks.
    """

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._index_from_zero = device.kernels.function("norms", "index_from_zero", _INDEX.size)
        self._norm_again = device.kernels.function("norms", "norm_again", _NORM.size)
        self._blas = Cublas(device, self.name)

    def _plan_two(self, spec: Any, device: LibraryDevice) -> tuple[_Vectors | None]:
        """See both operands as vectors."""
        return (_vectors(spec.x, spec.y),)

    def _plan_index(self, spec: Any, device: LibraryDevice) -> tuple[_Vectors | None]:
        """See the operand as a vector in its own order, from which the index counts."""
        return (_vectors(spec.x) if spec.x.strides[0] > 0 else None,)

    def _plan_one(self, spec: Any, device: LibraryDevice) -> tuple[_Vectors | None]:
        """See the operand as a vector."""
        return (_vectors(spec.x),)

    def _plan_norm(self, spec: Any, device: LibraryDevice) -> tuple[_Vectors | None]:
        """The same; refuse a result that is not of the type of absolute values."""
        real = KINDS[spec.x.dtype].real
        check_dtype("cuda", f"norm of {spec.x.dtype} to", spec.out.dtype, (real,))
        return (_vectors(spec.x),)

    @kernel("linalg.axpy", backend="cuda", dtypes=INEXACT, plan=_plan_two, is_quick=True)
    def _axpy(self, spec: Any, call: Call) -> None:
        dtype = spec.y.dtype
        kind = KINDS[dtype]
        alpha = factor_of("blas", "alpha", spec.alpha, dtype)
        x, y = call.array(spec.x), call.array(spec.y)
        (found,) = call.plan
        if not y.size:
            return
        if found is not None:
            self._add(call, kind, alpha, x, y, found)
            return
        room, packed = call.room(y), call.copy_of(x)
        (found,) = (_vectors(packed, y),)
        if found is not None:
            self._add(call, kind, alpha, packed, y, found)
            return
        call.convert(y, room)
        self._add(call, kind, alpha, packed, room, _PACKED)
        call.convert(room, y)

    @kernel("linalg.scal", backend="cuda", dtypes=INEXACT, plan=_plan_one, is_quick=True)
    def _scal(self, spec: Any, call: Call) -> None:
        kind = KINDS[spec.x.dtype]
        alpha = factor_of("blas", "alpha", spec.alpha, spec.x.dtype)
        x = call.array(spec.x)
        if x.size:
            self._scale(call, kind, alpha, x, call.plan[0])

    def _scale(self, call: Call, kind: Kind, alpha: complex, x: DeviceArray, found: _Vectors | None) -> None:
        """Enqueue ``x = alpha * x`` for an array that is not empty."""
        if found is None and not alpha.imag:
            call.convert(x, x, scale=alpha.real)
            return
        target = x if found is not None else call.copy_of(x)
        offset, step = (found or _PACKED)[0]
        blas = self._blas
        blas.select(call.stream, HOST)
        blas.factors.put(kind, alpha)
        cublas.scal_ex_64(
            blas.handle, target.size, blas.factors.alpha, kind.factor, target.address + offset, kind.code,
            step, kind.factor,
        )  # fmt: skip
        if target is not x:
            call.convert(target, x)

    @kernel("linalg.dot", backend="cuda", dtypes=INEXACT, plan=_plan_two, is_quick=True)
    def _dot(self, spec: Any, call: Call) -> None:
        kind = KINDS[spec.out.dtype]
        x, y, out = call.array(spec.x), call.array(spec.y), call.array(spec.out)
        (found,) = call.plan
        if not x.size:
            call.fill(out, 0)
            return
        if found is None:
            x, y, found = call.copy_of(x), call.copy_of(y), _PACKED
        (x_offset, x_step), (y_offset, y_step) = found
        self._blas.select(call.stream, DEVICE)
        cublas.dot_ex_64(
            self._blas.handle, x.size, x.address + x_offset, kind.code, x_step,
            y.address + y_offset, kind.code, y_step, out.address, kind.code, kind.factor,
        )  # fmt: skip

    @kernel("linalg.nrm2", backend="cuda", dtypes=INEXACT, plan=_plan_norm, is_quick=True)
    def _nrm2(self, spec: Any, call: Call) -> None:
        dtype = spec.x.dtype
        kind = KINDS[dtype]
        real = KINDS[kind.real]
        x, out = call.array(spec.x), call.array(spec.out)
        (found,) = call.plan
        if not x.size:
            call.fill(out, 0)
            return
        if found is None:
            x, found = call.copy_of(x), _PACKED
        offset, step = found[0]
        self._blas.select(call.stream, DEVICE)
        cublas.nrm2ex_64(
            self._blas.handle, x.size, x.address + offset, kind.code, step, out.address, real.code,
            real.factor,
        )  # fmt: skip
        number = _NORM_TYPES.get(dtype)
        if number is not None:
            # To cuBLAS denormal numbers are zeros.
            with self._norm_again as arguments:
                _NORM.pack_into(arguments, 0, x.address + offset, out.address, x.size, step, number)
                self._norm_again.launch(call.handle, _NORM_THREADS, threads=_NORM_THREADS)

    @kernel("linalg.asum", backend="cuda", dtypes=NATIVE, plan=_plan_norm, is_quick=True)
    def _asum(self, spec: Any, call: Call) -> None:
        kind = KINDS[spec.x.dtype]
        out = call.at(spec.out)
        if spec.x.size:
            self._reduce(call, kind, "asum", spec.x, out)
        else:
            call.fill(spec.out, 0)

    @kernel("linalg.iamax", backend="cuda", dtypes=NATIVE, plan=_plan_index, is_quick=True)
    def _iamax(self, spec: Any, call: Call) -> None:
        found = call.workspace(8)
        self._reduce(call, KINDS[spec.x.dtype], "i{}amax", spec.x, found)
        with self._index_from_zero as arguments:
            _INDEX.pack_into(arguments, 0, found, call.at(spec.out), spec.x.size)
            self._index_from_zero.launch(call.handle, 1)

    def _reduce(self, call: Call, kind: Kind, name: str, x: ArraySpec, out: int) -> None:
        """Enqueue what makes a number in device memory of a vector."""
        array, (found,) = call.array(x), call.plan
        if found is None:
            array, found = call.copy_of(array), _PACKED
        offset, step = found[0]
        self._blas.select(call.stream, DEVICE)
        self._blas.invoke(kind, name, array.size, array.address + offset, step, out)

    @kernel("linalg.swap", backend="cuda", dtypes=tuple(DType))
    def _swap(self, spec: Any, call: Call) -> None:
        x, y = call.array(spec.x), call.array(spec.y)
        kept = call.copy_of(x)
        call.convert(y, x)
        call.convert(kept, y)

    @kernel("linalg.rot", backend="cuda", dtypes=NATIVE, plan=_plan_two, is_quick=True)
    def _rot(self, spec: Any, call: Call) -> None:
        dtype = spec.x.dtype
        kind, sine = KINDS[dtype], factor_of("blas", "s", spec.s, dtype)
        arrays, (found,) = (call.array(spec.x), call.array(spec.y)), call.plan
        if not spec.x.size:
            return
        x, y = arrays if found is not None else [call.copy_of(array) for array in arrays]
        (x_offset, x_step), (y_offset, y_step) = found or _PACKED
        places = x.address + x_offset, x_step, y.address + y_offset, y_step
        self._blas.select(call.stream, HOST)
        self._blas.invoke(kind, "rot", x.size, *places, complex(spec.c), sine)
        for source, array in zip((x, y), arrays, strict=True):
            if source is not array:
                call.convert(source, array)

    def try_vectors(self, kind: Kind, operation: str, place: int) -> None:
        """Call what an operation on vectors needs, on the stream of a trial, for zeros there."""
        blas, out, count = self._blas, place, 1000
        if operation == "linalg.rot":
            blas.invoke(kind, "rot", count, place, 1, place + 16 * count, 1, 1 + 0j, 0j)
            return
        blas.set_mode(DEVICE)
        name = "asum" if operation == "linalg.asum" else "i{}amax"
        blas.invoke(kind, name, count, place + 256, 1, out)

    def _add(
        self, call: Call, kind: Kind, alpha: complex, x: DeviceArray, y: DeviceArray, found: _Vectors
    ) -> None:
        """Enqueue axpy of vectors."""
        (x_offset, x_step), (y_offset, y_step) = found
        blas = self._blas
        blas.select(call.stream, HOST)
        blas.factors.put(kind, alpha)
        cublas.axpy_ex_64(
            blas.handle, y.size, blas.factors.alpha, kind.factor, x.address + x_offset, kind.code, x_step,
            y.address + y_offset, kind.code, y_step, kind.factor,
        )  # fmt: skip

    def _destroy(self) -> None:
        self._blas.destroy()


def _vectors(first: ArraySpec | DeviceArray, *others: ArraySpec | DeviceArray) -> _Vectors | None:
    """See arrays of one shape as vectors; None if they are none."""
    strides = (array.strides for array in (first, *others))
    return vectors(first.shape, first.dtype.itemsize, *strides)
