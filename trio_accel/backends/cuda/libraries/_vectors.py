"""BLAS 1: operations on vectors, and on arrays as if they were vectors."""

from __future__ import annotations

import struct
from typing import TypeAlias

from nvmath.bindings import cublas

from ...base import DType
from ...base.checks import INEXACT
from ...base.ops import AxpySpec, DotSpec, Nrm2Spec, ScalSpec
from ..kit._checks import check_dtype, check_same_dtype, factor_of
from ..kit._device import LibraryDevice
from ..kit._layouts import vectors
from ..runtime._device_array import DeviceArray
from ..runtime._stream import CudaStream
from ._cublas import DEVICE, HOST, KINDS, Cublas, Kind

__all__ = ["VectorRoutines"]

_MOST_LAYOUTS = 1024
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
_Found: TypeAlias = list[tuple[int, int]]


class VectorRoutines:
    """Enqueues what cuBLAS has for vectors; what is none is packed into one.

    Compiles a kernel of the backend's own when it is made, which blocks.
    """

    def __init__(self, device: LibraryDevice, blas: Cublas) -> None:
        self._device = device
        self._blas = blas
        self._layouts: dict[object, _Found | None] = {}
        self._norm_again = device.kernels.function("norms", "norm_again", _NORM.size)

    def axpy(self, spec: AxpySpec, stream: CudaStream) -> None:
        """Enqueue ``y = alpha * x + y``."""
        dtype = check_same_dtype("axpy", spec.x, spec.y)
        kind = _kind_of("axpy", dtype)
        alpha = factor_of("blas", "alpha", spec.alpha, dtype)
        x, y = self._device.at(spec.x), self._device.at(spec.y)
        if not y.size or self._add(stream, kind, alpha, x, y):
            return
        room = self._blas.room(stream, 1, y)
        packed = self._blas.packed(stream, 0, x)
        if not self._add(stream, kind, alpha, packed, y):
            self._device.arrays.convert(stream, y, room)
            self._add(stream, kind, alpha, packed, room)
            self._device.arrays.convert(stream, room, y)

    def scal(self, spec: ScalSpec, stream: CudaStream) -> None:
        """Enqueue ``x = alpha * x``."""
        kind = _kind_of("scal", spec.x.dtype)
        alpha = factor_of("blas", "alpha", spec.alpha, spec.x.dtype)
        x = self._device.at(spec.x)
        if x.size:
            self.scale(stream, kind, alpha, x)

    def scale(self, stream: CudaStream, kind: Kind, alpha: complex, x: DeviceArray) -> None:
        """Enqueue ``x = alpha * x`` for an array that is not empty."""
        found = self._find(x)
        if found is None and not alpha.imag:
            self._device.arrays.convert(stream, x, x, scale=alpha.real)
            return
        target = x if found is not None else self._blas.packed(stream, 0, x)
        ((offset, step),) = found or [(0, 1)]
        blas = self._blas
        blas.select(stream, HOST)
        blas.factors.put(kind, alpha)
        cublas.scal_ex_64(
            blas.handle, target.size, blas.factors.alpha, kind.factor, target.address + offset, kind.code,
            step, kind.factor,
        )  # fmt: skip
        if target is not x:
            self._device.arrays.convert(stream, target, x)

    def dot(self, spec: DotSpec, stream: CudaStream) -> None:
        """Enqueue ``out = sum(x * y)``."""
        dtype = check_same_dtype("dot", spec.x, spec.y, spec.out)
        kind = _kind_of("dot", dtype)
        x, y, out = self._device.at(spec.x), self._device.at(spec.y), self._device.at(spec.out)
        if not x.size:
            self._device.arrays.fill(stream, out, 0)
            return
        found = self._find(x, y)
        if found is None:
            room = self._blas.room(stream, 1, y)
            x = self._blas.packed(stream, 0, x)
            self._device.arrays.convert(stream, y, room)
            y, found = room, [(0, 1), (0, 1)]
        (x_offset, x_step), (y_offset, y_step) = found
        self._blas.select(stream, DEVICE)
        cublas.dot_ex_64(
            self._blas.handle, x.size, x.address + x_offset, kind.code, x_step,
            y.address + y_offset, kind.code, y_step, out.address, kind.code, kind.factor,
        )  # fmt: skip

    def nrm2(self, spec: Nrm2Spec, stream: CudaStream) -> None:
        """Enqueue ``out = sqrt(sum(abs(x)**2))``."""
        dtype = spec.x.dtype
        kind = _kind_of("nrm2", dtype)
        check_dtype(f"nrm2 of {dtype} to", spec.out.dtype, (kind.real,))
        real = KINDS[kind.real]
        x, out = self._device.at(spec.x), self._device.at(spec.out)
        if not x.size:
            self._device.arrays.fill(stream, out, 0)
            return
        found = self._find(x)
        if found is None:
            x, found = self._blas.packed(stream, 0, x), [(0, 1)]
        ((offset, step),) = found
        self._blas.select(stream, DEVICE)
        cublas.nrm2ex_64(
            self._blas.handle, x.size, x.address + offset, kind.code, step, out.address, real.code,
            real.factor,
        )  # fmt: skip
        number = _NORM_TYPES.get(dtype)
        if number is not None:
            # To cuBLAS denormal numbers are zeros.
            with self._norm_again as arguments:
                _NORM.pack_into(arguments, 0, x.address + offset, out.address, x.size, step, number)
                self._norm_again.launch(stream.handle, _NORM_THREADS, threads=_NORM_THREADS)

    def _add(self, stream: CudaStream, kind: Kind, alpha: complex, x: DeviceArray, y: DeviceArray) -> bool:
        """Enqueue axpy; False where these are no vectors."""
        found = self._find(x, y)
        if found is None:
            return False
        (x_offset, x_step), (y_offset, y_step) = found
        blas = self._blas
        blas.select(stream, HOST)
        blas.factors.put(kind, alpha)
        cublas.axpy_ex_64(
            blas.handle, y.size, blas.factors.alpha, kind.factor, x.address + x_offset, kind.code, x_step,
            y.address + y_offset, kind.code, y_step, kind.factor,
        )  # fmt: skip
        return True

    def _find(self, *arrays: DeviceArray) -> _Found | None:
        """See arrays as vectors; what was found for a layout is kept."""
        first = arrays[0]
        key = (id(first.dtype), first.shape, *[array.strides for array in arrays])
        try:
            return self._layouts[key]
        except KeyError:
            pass
        if len(self._layouts) >= _MOST_LAYOUTS:
            self._layouts.clear()
        strides = (array.strides for array in arrays)
        found = self._layouts[key] = vectors(first.shape, first.dtype.itemsize, *strides)
        return found


def _kind_of(operation: str, dtype: DType) -> Kind:
    kind = KINDS.get(dtype)
    if kind is None:
        check_dtype(operation, dtype, INEXACT)
    assert kind is not None
    return kind
