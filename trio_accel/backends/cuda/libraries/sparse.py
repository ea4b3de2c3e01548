"""Products with sparse matrices by cuSPARSE."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import ClassVar, TypeAlias

import attrs
import numpy as np
from nvmath.bindings import cusparse

from ...base import DType, LibraryError
from ...base.checks import NATIVE
from ...base.kernels import kernel
from ...base.ops import SpmvCsrSpec, StatusArray
from ..kit._call import Call
from ..kit._checks import check_dtype, check_same_dtype
from ..kit._device import LibraryDevice
from ..kit._library import CudaLibrary, Errors
from ..runtime._stream import CudaStream

__all__ = ["SparseLibrary"]

_AS_IT_IS = cusparse.Operation.NON_TRANSPOSE
_ALGORITHM = cusparse.SpMVAlg.DEFAULT

_INDICES = (DType.int32, DType.int64)
_INDEX_TYPES = {DType.int32: cusparse.IndexType.INDEX_32I, DType.int64: cusparse.IndexType.INDEX_64I}
# cudaDataType.
_VALUE_TYPES = {DType.float32: 0, DType.float64: 1, DType.complex64: 4, DType.complex128: 5}
_FACTORS = {dtype: (np.ones(1, dtype.dtype), np.zeros(1, dtype.dtype)) for dtype in NATIVE}

# As in sparse.cu.
_ARGUMENTS = struct.Struct("<6Q3qii")
_TYPES = {dtype: code for code, dtype in enumerate(NATIVE)}
_FAULTS = {
    1: "indptr: {rows} rows need {more} elements from 0 to at most {stored}",
    2: "indptr: its elements must not decrease",
    3: "indices: a matrix of {columns} columns has them from 0 on",
}
_LANES = 32
_MOST_MATRICES = 256

_Structure: TypeAlias = tuple[object, ...]


@attrs.frozen(eq=False)
class _Product:
    """cuSPARSE's descriptors of one product. They lie in host memory, and what runs has no need of them.

    Attributes:
        matrix: Of the matrix.
        x: Of the argument.
        out: Of the result.
        nbytes: What the product needs for itself.
        terms: What the library is told of the values: their type, and where one and zero lie.
        destroy: Gives the descriptors back.
    """

    matrix: int
    x: int
    out: int
    nbytes: int
    terms: tuple[int, int, int]
    destroy: Callable[[], None]


@attrs.define(eq=False)
class _Matrix:
    """A matrix whose structure is right.

    Attributes:
        blocks: Where its structure lies.
        used: How many products there were before the last one by it.
        product: Its descriptors; None before the first product by cuSPARSE.
    """

    blocks: tuple[int, int]
    used: int
    product: _Product | None = None


class SparseLibrary(CudaLibrary):
    """Products by cuSPARSE, which believes what a matrix says of itself, and reads wherever that leads.

    To check indices on the device costs nearly as much as a product, and nobody can wait for the outcome
    before the product is enqueued. So the first product with a structure is computed by a kernel that
    checks all that it reads, and when it has found nothing the next ones are cuSPARSE's. What tells a
    structure are the blocks of its arrays, as long as these are what they were. A program that changes the
    arrays in place keeps them right, as `CsrMatrix` says.
    """

    name: ClassVar[str] = "sparse"
    errors: ClassVar[Errors] = {cusparse.cuSPARSEError: cusparse.Status}
    refused: ClassVar[frozenset[str]] = frozenset({"INVALID_VALUE", "MATRIX_TYPE_NOT_SUPPORTED"})
    exhausted: ClassVar[frozenset[str]] = frozenset({"ALLOC_FAILED", "INSUFFICIENT_RESOURCES"})
    missing: ClassVar[frozenset[str]] = frozenset({"NOT_SUPPORTED", "ARCH_MISMATCH"})

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._unchecked = device.kernels.function("sparse", "multiply_unchecked", _ARGUMENTS.size)
        self._matrices: dict[_Structure, _Matrix] = {}
        self._products = 0
        self._stream: CudaStream | None = None
        self._handle: int = cusparse.create()

    @kernel(SpmvCsrSpec, backend="cuda")
    def _multiply(self, spec: SpmvCsrSpec, call: Call) -> None:
        structure = _structure(spec)
        matrix = self._matrices.get(structure)
        if matrix is None:
            _check(spec)
        indptr, indices, data, x = map(call.packed, (spec.indptr, spec.indices, spec.data, spec.x))
        out = call.result(spec.out)
        if matrix is None:
            self._multiply_unchecked(spec, structure, call, (indptr, indices, data, x, out))
            return
        matrix.used = self._products = self._products + 1
        product = matrix.product
        if product is None:
            product = matrix.product = self._describe(spec, (indptr, indices, data, x, out))
        else:
            cusparse.csr_set_pointers(product.matrix, indptr, indices, data)
            cusparse.dn_vec_set_values(product.x, x)
            cusparse.dn_vec_set_values(product.out, out)
        stream = call.stream
        if stream is not self._stream:
            cusparse.set_stream(self._handle, stream.handle)
            self._stream = stream
        kind, one, zero = product.terms
        cusparse.sp_mv(
            *(self._handle, _AS_IT_IS, one, product.matrix, product.x, zero, product.out),
            *(kind, _ALGORITHM, call.workspace(product.nbytes)),
        )

    def _describe(self, spec: SpmvCsrSpec, addresses: tuple[int, int, int, int, int]) -> _Product:
        """Make the descriptors of a product, and find what it needs."""
        dtype, index = spec.data.dtype, _INDEX_TYPES[spec.indptr.dtype]
        kind, (one, zero) = _VALUE_TYPES[dtype], (factor.ctypes.data for factor in _FACTORS[dtype])
        with ExitStack() as undo:
            matrix = cusparse.create_csr(
                *(spec.rows, spec.columns, _stored(spec), *addresses[:3], index, index),
                *(cusparse.IndexBase.ZERO, kind),
            )
            undo.callback(cusparse.destroy_sp_mat, matrix)
            x = cusparse.create_dn_vec(spec.columns, addresses[3], kind)
            undo.callback(cusparse.destroy_dn_vec, x)
            out = cusparse.create_dn_vec(spec.rows, addresses[4], kind)
            undo.callback(cusparse.destroy_dn_vec, out)
            nbytes = cusparse.sp_mv_buffer_size(
                self._handle, _AS_IT_IS, one, matrix, x, zero, out, kind, _ALGORITHM
            )
            return _Product(matrix, x, out, nbytes, (kind, one, zero), undo.pop_all().close)

    def _multiply_unchecked(
        self, spec: SpmvCsrSpec, structure: _Structure, call: Call, addresses: tuple[int, ...]
    ) -> None:
        # Here, and not where one is added: a thread of the device must not destroy what is in use.
        while len(self._matrices) > _MOST_MATRICES:
            self._forget(min(tuple(self._matrices.items()), key=lambda item: item[1].used)[0])
        words = call.words(2, partial(self._judge, spec, structure))
        with self._unchecked as arguments:
            sizes = spec.rows, spec.columns, _stored(spec)
            types = _TYPES[spec.data.dtype], spec.indptr.dtype is DType.int64
            _ARGUMENTS.pack_into(arguments, 0, *addresses, words, *sizes, *types)
            self._unchecked.launch(call.handle, max(spec.rows, 1) * _LANES)

    def _judge(self, spec: SpmvCsrSpec, structure: _Structure, words: StatusArray) -> None:
        """The product with a matrix that was not checked is done. May run in a thread of the device."""
        fault, has_more = words.tolist()
        if fault:
            raise _refusal(_fault_text(fault, spec))
        # cuSPARSE can neither be told that more is stored than is used, nor that there is nothing.
        if not has_more and spec.rows and _stored(spec):
            blocks = spec.indptr.block, spec.indices.block
            self._matrices.setdefault(structure, _Matrix(blocks, self._products))
            for block in blocks:
                self._device.invalidate_with(block, self._invalidate_block)

    def _invalidate_block(self, block: int) -> None:
        """Other arrays may lie there from now on, that were not checked."""
        # A thread of the device may add one meanwhile, of other blocks.
        for structure, matrix in tuple(self._matrices.items()):
            if block in matrix.blocks:
                self._forget(structure)

    def _forget(self, structure: _Structure) -> None:
        product = self._matrices.pop(structure).product
        if product is not None:
            product.destroy()

    def _destroy(self) -> None:
        while self._matrices:
            self._forget(next(iter(self._matrices)))
        cusparse.destroy(self._handle)


def _stored(spec: SpmvCsrSpec) -> int:
    return min(spec.indices.shape[0], spec.data.shape[0])


def _structure(spec: SpmvCsrSpec) -> _Structure:
    """What tells a matrix from others and is checked with it: all but where values and vectors lie."""
    indptr, indices, data, x, out = spec.indptr, spec.indices, spec.data, spec.x, spec.out
    return (
        *(spec.rows, spec.columns, data.shape, x.shape, out.shape),
        # Types are compared by identity: cheaper than their hash, which is NumPy's.
        *(id(data.dtype), id(x.dtype), id(out.dtype)),
        *(indptr.block, indptr.offset, indptr.shape, indptr.strides, id(indptr.dtype)),
        *(indices.block, indices.offset, indices.shape, indices.strides, id(indices.dtype)),
    )


def _check(spec: SpmvCsrSpec) -> None:
    """Refuse what can be told to be wrong without the elements.

    Raises:
        NotSupportedError: A type that cuSPARSE has not.
        LibraryError: Arrays of other shapes than the matrix.
    """
    check_dtype("spmv", check_same_dtype("spmv", spec.data, spec.x, spec.out), NATIVE)
    check_dtype("spmv with indices", check_same_dtype("spmv", spec.indptr, spec.indices), _INDICES)
    for name, array in (("indices", spec.indices), ("data", spec.data)):
        if array.ndim != 1:
            raise _refusal(f"{name}: must have one axis, got shape {array.shape}")
    if spec.indptr.shape != (spec.rows + 1,):
        raise _refusal(_fault_text(1, spec))
    for name, array, length in (("x", spec.x, spec.columns), ("out", spec.out, spec.rows)):
        if array.shape != (length,):
            raise _refusal(
                f"{name}: a matrix of {spec.rows} rows and {spec.columns} columns needs a vector of "
                f"{length} elements, not of shape {array.shape}"
            )


def _fault_text(fault: int, spec: SpmvCsrSpec) -> str:
    """What is wrong with a structure, in words."""
    return _FAULTS[fault].format(
        rows=spec.rows, more=spec.rows + 1, columns=spec.columns, stored=_stored(spec)
    )


def _refusal(message: str) -> LibraryError:
    return LibraryError(message, library="sparse", code="invalid_value")
