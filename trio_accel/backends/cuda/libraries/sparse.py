"""Operations with sparse matrices by cuSPARSE."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import attrs
import numpy as np
from nvmath.bindings import cusparse

from ...base import DType, LibraryError
from ...base.contract.device_array import DeviceArray
from ...base.contract.ops import OperationSpec
from ...base.kit.checks import NATIVE, scalar_of
from ...base.kit.kernels import kernel
from ..kit._library import KernelCall, LibraryDevice
from ..runtime._stream import CudaStream
from ._cusparse import AS_IT_IS, VALUE_TYPES, csr, dense, factors, operation_of, vector
from ._sparse_makers import TYPES
from ._sparse_structures import Structure
from ._sparse_systems import SystemLibrary

__all__ = ["SparseLibrary"]

_ALGORITHM = cusparse.SpMVAlg.DEFAULT

_DTYPES = {"out": NATIVE}

# As in sparse.cu.
_ARGUMENTS = struct.Struct("<6Q3qiii4x")
_SCALE = struct.Struct("<Qqddi4x")
_LANES = 32


@attrs.frozen(eq=False)
class _Product:
    """cuSPARSE's descriptors of one product. They are in host memory, and running work does not need them.

    Attributes:
        matrix: Of the matrix.
        x: Of the argument.
        out: Of the result.
        nbytes: Bytes of workspace of the product.
        terms: Type of the values, and addresses of one and zero.
        destroy: Gives the descriptors back.
    """

    matrix: int
    x: int
    out: int
    nbytes: int
    terms: tuple[int, int, int]
    destroy: Callable[[], None]


class SparseLibrary(SystemLibrary):
    """Products by cuSPARSE, which follows row pointers and columns without a check, wherever they lead.

    To check indices on the device costs nearly as much as a product, and the outcome cannot be awaited before
    the product is enqueued. So the first product with a structure is computed by a kernel that checks all
    that it reads, and when it has found nothing the next ones are cuSPARSE's (D26). A structure is recognised
    by the blocks of its arrays, until one of these is written to. The first product with a dense matrix is
    cuSPARSE's too, by a copy of the structure that a kernel has made: a harmless one if it has found
    something.
    """

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._unchecked = device.kernels.function("sparse", "multiply_unchecked", _ARGUMENTS.size)
        self._scale = device.kernels.function("sparse", "scale", _SCALE.size)
        self._stream: CudaStream | None = None
        self._handle: int = cusparse.create()

    def captures(self, spec: OperationSpec) -> bool:
        """See `EnqueuingLibrary.captures`: a product whose structure was found right before, among others."""
        return spec.operation in ("sparse.spmv", "sparse.least_residual")

    @kernel("sparse.spmv", backend="cuda", dtypes=_DTYPES)
    def _multiply(self, spec: Any, call: KernelCall) -> None:
        # A type is compared by identity: cheaper than its hash, which is NumPy's.
        structure = _structure(spec)
        key = (id(spec.out.dtype), *structure.key)
        seen = self._seen.get(key)
        indptr, indices, data, x = map(
            call.packed, (spec.matrix_indptr, spec.matrix_indices, spec.matrix_data, spec.x)
        )
        out = call.result(spec.out)
        if seen is None or not seen.is_right:
            if call.stream.is_capturing:
                raise LibraryError(
                    "the structure was not looked at yet", library=self.name, code="not_checked"
                )
            words = call.words(2, self._expect(structure, key))
            self._launch_unchecked(spec, call, (indptr, indices, data, x, out), words, is_dense=False)
            return
        seen.used = self._uses = self._uses + 1
        if call.stream.is_capturing:
            self._note_watched()
        product: _Product | None = seen.product
        if product is None:
            product = seen.product = self._describe(spec, (indptr, indices, data, x, out))
        else:
            cusparse.csr_set_pointers(product.matrix, indptr, indices, data)
            cusparse.dn_vec_set_values(product.x, x)
            cusparse.dn_vec_set_values(product.out, out)
        self._go_to(call.stream)
        kind, one, zero = product.terms
        cusparse.sp_mv(
            *(self._handle, AS_IT_IS, one, product.matrix, product.x, zero, product.out),
            *(kind, _ALGORITHM, call.workspace(product.nbytes)),
        )

    def _describe(self, spec: Any, addresses: tuple[int, int, int, int, int]) -> _Product:
        """Make the descriptors of a product, and find its workspace."""
        indptr, indices, data, x_at, out_at = addresses
        dtype = spec.matrix_data.dtype
        kind, (one, zero) = VALUE_TYPES[dtype], factors(dtype)
        with ExitStack() as undo:
            matrix = _csr(undo, spec, (indptr, indices, data), dtype)
            x, out = vector(undo, spec.x.size, x_at, dtype), vector(undo, spec.out.size, out_at, dtype)
            nbytes = cusparse.sp_mv_buffer_size(
                self._handle, AS_IT_IS, one, matrix, x, zero, out, kind, _ALGORITHM
            )
            return _Product(matrix, x, out, nbytes, (kind, one, zero), undo.pop_all().close)

    def _go_to(self, stream: CudaStream) -> None:
        if stream is not self._stream:
            cusparse.set_stream(self._handle, stream.handle)
            self._stream = stream

    @kernel("sparse.spmm", backend="cuda", dtypes=_DTYPES)
    def _multiply_dense(self, spec: Any, call: KernelCall) -> None:
        structure, dtype = self._harmless(_structure(spec), call), spec.matrix_data.dtype
        given = [scalar_of("sparse", name, getattr(spec, name), dtype) for name in ("alpha", "beta")]
        out, size = call.result(spec.out, is_updated=True), spec.out.size
        if not (_stored(spec) and size and spec.b.shape[0]):
            # There is no product, and cuSPARSE does not take it.
            beta = complex(given[1])
            values = out, size, beta.real, beta.imag, TYPES[dtype]
            self._scale.run(call.handle, max(size, 1), _SCALE, *values)
            return
        kind, terms_at = VALUE_TYPES[dtype], np.array(given, dtype.dtype)
        alpha, beta_at = terms_at.ctypes.data, terms_at.ctypes.data + dtype.itemsize
        with ExitStack() as undo:
            matrix = _csr(undo, spec, (*structure, call.packed(spec.matrix_data)), dtype)
            b = dense(undo, spec.b.shape, call.packed(spec.b), dtype)
            product = dense(undo, spec.out.shape, out, dtype)
            self._go_to(call.stream)
            terms = (
                *(self._handle, operation_of(spec.transpose, dtype), AS_IT_IS, alpha, matrix, b),
                *(beta_at, product, kind, cusparse.SpMMAlg.DEFAULT),
            )
            cusparse.sp_mm(*terms, call.workspace(cusparse.sp_mm_buffer_size(*terms)))

    @kernel("sparse.sddmm", backend="cuda", dtypes=_DTYPES)
    def _sample(self, spec: Any, call: KernelCall) -> None:
        structure = self._harmless(_structure(spec), call)
        (rows, inner), columns = spec.a.shape, spec.b.shape[1]
        if not (_stored(spec) and inner and rows and columns):
            call.fill(spec.out, 0)
            return
        a, b, out = call.packed(spec.a), call.packed(spec.b), call.result(spec.out)
        dtype = spec.out.dtype
        kind, (one, zero) = VALUE_TYPES[dtype], factors(dtype)
        with ExitStack() as undo:
            left, right = dense(undo, spec.a.shape, a, dtype), dense(undo, spec.b.shape, b, dtype)
            sampled = _csr(undo, spec, (*structure, out), dtype)
            self._go_to(call.stream)
            terms = (
                *(self._handle, AS_IT_IS, AS_IT_IS, one, left, right),
                *(zero, sampled, kind, cusparse.SDDMMAlg.DEFAULT),
            )
            nbytes = np.zeros(1, np.uint64)
            cusparse.sddmm_buffer_size(*terms, nbytes.ctypes.data)
            cusparse.sddmm(*terms, call.workspace(int(nbytes[0])))

    @kernel("sparse.to_dense", backend="cuda", dtypes=_DTYPES)
    def _to_dense(self, spec: Any, call: KernelCall) -> None:
        out = call.result(spec.out)
        call.fill(DeviceArray.packed(out, spec.out.dtype, spec.out.shape), 0)
        indptr, indices, data = map(call.packed, (spec.matrix_indptr, spec.matrix_indices, spec.matrix_data))
        words = call.words(2, _structure(spec).refuse_faulty)
        self._launch_unchecked(spec, call, (indptr, indices, data, 0, out), words, is_dense=True)

    @kernel("sparse.check_structure", backend="cuda", dtypes={"matrix_data": NATIVE})
    def _check(self, spec: Any, call: KernelCall) -> None:
        # What the guard copies is not used here.
        self._harmless(_structure(spec), call)

    def _launch_unchecked(
        self, spec: Any, call: KernelCall, addresses: tuple[int, ...], words: int, *, is_dense: bool
    ) -> None:
        """Enqueue the kernel that checks all that it reads, by a warp for each row."""
        types = TYPES[spec.matrix_data.dtype], spec.matrix_indptr.dtype is DType.int64, is_dense
        values = *addresses, words, *spec.matrix, _stored(spec), *types
        self._unchecked.run(call.handle, max(spec.matrix[0], 1) * _LANES, _ARGUMENTS, *values)

    def _destroy(self) -> None:
        super()._destroy()
        cusparse.destroy(self._handle)


def _csr(undo: ExitStack, spec: Any, addresses: tuple[int, int, int], dtype: DType) -> int:
    """Describe the matrix of an operation."""
    return csr(undo, spec.matrix, _stored(spec), addresses, spec.matrix_indptr.dtype, dtype)


def _stored(spec: Any) -> int:
    return int(spec.matrix_indices.size)


def _structure(spec: Any) -> Structure:
    return Structure(spec.matrix, spec.matrix_indptr, spec.matrix_indices)
