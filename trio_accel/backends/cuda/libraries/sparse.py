"""Products with sparse matrices by cuSPARSE."""

from __future__ import annotations

import enum
import struct
from functools import partial
from typing import ClassVar, TypeAlias

import attrs
import numpy as np
from nvmath.bindings import cusparse

from ...base import DType, LibraryError
from ...base.checks import NATIVE
from ...base.ops import ArraySpec, SpmvCsrSpec
from ..kit._checks import check_dtype, check_same_dtype
from ..kit._device import LibraryDevice
from ..kit._library import CudaLibrary
from ..kit._plan_cache import PlanCache
from ..kit._workspace import Workspace
from ..runtime._device_array import DeviceArray
from ..runtime._status_words import StatusWord, StatusWords
from ..runtime._stream import CudaStream

__all__ = ["SparseLibrary"]

_AS_IT_IS = cusparse.Operation.NON_TRANSPOSE
_ALGORITHM = cusparse.SpMVAlg.DEFAULT

_INDICES = (DType.int32, DType.int64)
_INDEX_TYPES = {DType.int32: cusparse.IndexType.INDEX_32I, DType.int64: cusparse.IndexType.INDEX_64I}
# cudaDataType.
_VALUE_TYPES = {DType.float32: 0, DType.float64: 1, DType.complex64: 4, DType.complex128: 5}
_FACTORS = {dtype: (np.ones(1, dtype.dtype), np.zeros(1, dtype.dtype)) for dtype in NATIVE}
# By identity, as a dtype's hash takes longer than the rest: its code, and where its one and its zero are.
_TERMS = {
    id(dtype): (_VALUE_TYPES[dtype], one.ctypes.data, zero.ctypes.data)
    for dtype, (one, zero) in _FACTORS.items()
}

# As in sparse.cu.
_ARGUMENTS = struct.Struct("<7Q3qii")
_TYPES = {dtype: code for code, dtype in enumerate(NATIVE)}
_FAULTS = {
    1: "indptr: {rows} rows need {more} elements from 0 to at most {stored}",
    2: "indptr: its elements must not decrease",
    3: "indices: a matrix of {columns} columns has them from 0 on",
}
_LANES = 32

_MOST_MATRICES = 256

_Structure: TypeAlias = tuple[object, ...]


@attrs.define(eq=False)
class _Matrix:
    """A matrix whose structure is right.

    Attributes:
        blocks: Where its structure lies.
        handle: cuSPARSE's descriptor; None before the first product by it.
        pointers: What the descriptor points to.
        size: Bytes of the buffer that a product needs.
        used: How many products there were before the last one by it.
    """

    blocks: tuple[int, int]
    handle: int | None = None
    pointers: tuple[int, int, int] | None = None
    size: int = 0
    used: int = 0


@attrs.define(eq=False)
class _Vector:
    """cuSPARSE's descriptor of a vector, or 0 once it is gone, and where that lies."""

    handle: int
    address: int

    def at(self, address: int) -> int:
        """The descriptor of one that lies there."""
        if address != self.address and self.handle:
            cusparse.dn_vec_set_values(self.handle, address)
            self.address = address
        return self.handle


@attrs.frozen(eq=False)
class _Product:
    """A product with a matrix that is right, of arrays without gaps, and where these lie."""

    matrix: _Matrix
    pointers: tuple[int, int, int]
    x: _Vector
    x_address: int
    out: _Vector
    out_address: int
    terms: tuple[int, int, int]


class SparseLibrary(CudaLibrary):
    """Products by cuSPARSE, which believes what a matrix says of itself, and reads wherever that leads.

    To check indices on the device costs nearly as much as a product, and nobody can wait for the outcome
    before the product is enqueued. So the first product with a structure is computed by a kernel that
    checks all that it reads, and when it has found nothing the next ones are cuSPARSE's. What tells a
    structure are the blocks of its arrays, as long as these are what they were. A program that changes the
    arrays in place keeps them right, as `CsrMatrix` says.
    """

    name: ClassVar[str] = "sparse"
    statuses: ClassVar[type[Exception] | None] = cusparse.cuSPARSEError
    codes: ClassVar[type[enum.IntEnum] | None] = cusparse.Status
    refused: ClassVar[frozenset[str]] = frozenset({"INVALID_VALUE", "MATRIX_TYPE_NOT_SUPPORTED"})
    exhausted: ClassVar[frozenset[str]] = frozenset({"ALLOC_FAILED", "INSUFFICIENT_RESOURCES"})
    missing: ClassVar[frozenset[str]] = frozenset({"NOT_SUPPORTED", "ARCH_MISMATCH"})

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._table = {SpmvCsrSpec: self._enqueue_product}
        self._unchecked = device.kernels.function("sparse", "multiply_unchecked", _ARGUMENTS.size)
        self._matrices: dict[_Structure, _Matrix] = {}
        self._products = 0
        # By length and type, for the argument and the result.
        self._vectors: dict[tuple[str, int, int], _Vector] = {}
        self._plan_cache: PlanCache[_Product] = PlanCache(device.addresses)
        self._status_words = StatusWords(self._context)
        self._stream: CudaStream | None = None
        names = ("indptr", "indices", "data", "x", "out", "buffer")
        self._areas = {name: Workspace(self._context) for name in names}
        self._handle: int = cusparse.create()

    def _enqueue_product(self, spec: SpmvCsrSpec, stream: CudaStream) -> None:
        product = self._plan_cache.find(spec, stream)
        if product is None or not self._multiply(product, stream):
            self._find_and_multiply(spec, stream)

    def _find_and_multiply(self, spec: SpmvCsrSpec, stream: CudaStream) -> None:
        structure = _structure(spec)
        matrix = self._matrices.get(structure)
        if matrix is None:
            _check(spec)
        elif spec.x.dtype is not spec.data.dtype or spec.out.dtype is not spec.data.dtype:
            check_same_dtype("spmv", spec.data, spec.x, spec.out)
        _check_vectors(spec)
        if matrix is not None and not spec.rows:
            return
        device = self._device
        if matrix is not None and not _stored(spec):
            device.arrays.fill(stream, device.at(spec.out), 0)
            return
        packed: DeviceArray | None = None
        if _has_no_gaps(spec.out):
            result = device.address(spec.out)
        else:
            out = device.at(spec.out)
            packed = DeviceArray.packed(self._areas["out"].reserve(stream, out.nbytes), out.dtype, out.shape)
            result = packed.address
        indptr = self._packed(stream, "indptr", spec.indptr)
        indices = self._packed(stream, "indices", spec.indices)
        data, x = self._packed(stream, "data", spec.data), self._packed(stream, "x", spec.x)
        if matrix is None:
            self._multiply_unchecked(spec, structure, stream, (indptr, indices, data, x, result))
        else:
            product = self._product(spec, matrix, (indptr, indices, data), x, result)
            is_whole = self._multiply(product, stream)
            assert is_whole
            if all(map(_has_no_gaps, (spec.indptr, spec.indices, spec.data, spec.x, spec.out))):
                self._plan_cache.store(spec, stream, product)
        if packed is not None:
            device.arrays.convert(stream, packed, device.at(spec.out))

    def _packed(self, stream: CudaStream, name: str, spec: ArraySpec) -> int:
        """The address of an array's elements without gaps: its own, or that of a copy."""
        if _has_no_gaps(spec):
            return self._device.address(spec)
        array = self._device.at(spec)
        packed = DeviceArray.packed(self._areas[name].reserve(stream, array.nbytes), array.dtype, array.shape)
        self._device.arrays.convert(stream, array, packed)
        return packed.address

    def _product(
        self, spec: SpmvCsrSpec, matrix: _Matrix, pointers: tuple[int, int, int], x: int, out: int
    ) -> _Product:
        dtype = spec.data.dtype
        of_x, of_out = (
            self._vector("x", spec.columns, dtype, x),
            self._vector("out", spec.rows, dtype, out),
        )
        if matrix.handle is None:
            self._describe(spec, matrix, pointers, (of_x.at(x), of_out.at(out)))
        return _Product(matrix, pointers, of_x, x, of_out, out, _TERMS[id(dtype)])

    def _multiply(self, product: _Product, stream: CudaStream) -> bool:
        """Enqueue a product; returns False if a descriptor of it is gone."""
        matrix, pointers = product.matrix, product.pointers
        x, out = product.x.at(product.x_address), product.out.at(product.out_address)
        handle = matrix.handle
        if handle is None or not x or not out:
            return False
        matrix.used = self._products = self._products + 1
        if matrix.pointers != pointers:
            cusparse.csr_set_pointers(handle, *pointers)
            matrix.pointers = pointers
        buffer = self._areas["buffer"].reserve(stream, matrix.size) if matrix.size else 0
        if stream is not self._stream:
            cusparse.set_stream(self._handle, stream.handle)
            self._stream = stream
        kind, one, zero = product.terms
        cusparse.sp_mv(self._handle, _AS_IT_IS, one, handle, x, zero, out, kind, _ALGORITHM, buffer)
        return True

    def _describe(
        self, spec: SpmvCsrSpec, matrix: _Matrix, pointers: tuple[int, int, int], vectors: tuple[int, int]
    ) -> None:
        """Make the descriptor of a matrix, and find what a product with it needs."""
        kind, one, zero = _TERMS[id(spec.data.dtype)]
        index = _INDEX_TYPES[spec.indptr.dtype]
        handle = cusparse.create_csr(
            *(spec.rows, spec.columns, _stored(spec), *pointers, index, index),
            *(cusparse.IndexBase.ZERO, kind),
        )
        try:
            matrix.size = cusparse.sp_mv_buffer_size(
                *(self._handle, _AS_IT_IS, one, handle, vectors[0], zero, vectors[1], kind, _ALGORITHM)
            )
        except BaseException:
            cusparse.destroy_sp_mat(handle)
            raise
        matrix.handle, matrix.pointers = handle, pointers

    def _vector(self, role: str, length: int, dtype: DType, address: int) -> _Vector:
        """The descriptor of a vector, made for this address if it is new."""
        key = role, length, id(dtype)
        vector = self._vectors.pop(key, None)
        if vector is None:
            if len(self._vectors) >= _MOST_MATRICES:
                oldest = self._vectors.pop(next(iter(self._vectors)))
                handle, oldest.handle = oldest.handle, 0
                cusparse.destroy_dn_vec(handle)
            handle = cusparse.create_dn_vec(length, address, _VALUE_TYPES[dtype])
            vector = _Vector(handle, address)
        # As the last one: the other vector of this product must not make it go.
        self._vectors[key] = vector
        return vector

    def _forget_some(self) -> None:
        """Keep no more descriptors than that: the rest is checked again."""
        while len(self._matrices) > _MOST_MATRICES:
            # A thread of the device may add one meanwhile.
            matrices = tuple(self._matrices.items())
            self._forget(min(matrices, key=lambda item: item[1].used)[0])

    def _invalidate_block(self, block: int) -> None:
        """Other arrays may lie there from now on, that were not checked."""
        # A thread of the device may add one meanwhile, of other blocks.
        for structure, matrix in tuple(self._matrices.items()):
            if block in matrix.blocks:
                self._forget(structure)

    def _forget(self, structure: _Structure) -> None:
        matrix = self._matrices.pop(structure)
        self._plan_cache.clear()
        if matrix.handle is not None:
            # It lies in host memory, and what runs has no need of it.
            handle, matrix.handle = matrix.handle, None
            cusparse.destroy_sp_mat(handle)

    def _multiply_unchecked(
        self, spec: SpmvCsrSpec, structure: _Structure, stream: CudaStream, addresses: tuple[int, ...]
    ) -> None:
        self._forget_some()
        fault, is_short = self._status_words.take(), self._status_words.take()
        fault.write(0)
        is_short.write(0)
        with self._unchecked as arguments:
            _ARGUMENTS.pack_into(
                arguments,
                0,
                *(*addresses, fault.address, is_short.address),
                *(spec.rows, spec.columns, _stored(spec)),
                *(_TYPES[spec.data.dtype], spec.indptr.dtype is DType.int64),
            )
            self._unchecked.launch(stream.handle, max(spec.rows, 1) * _LANES)
        stream.after(partial(self._read_status, spec, structure, fault, is_short))

    def _read_status(
        self, spec: SpmvCsrSpec, structure: _Structure, fault: StatusWord, is_short: StatusWord
    ) -> None:
        """The product with a matrix that was not checked is done. May run in a thread of the device."""
        found, has_more = fault.read(), is_short.read()
        self._status_words.give_back(fault)
        self._status_words.give_back(is_short)
        if found:
            raise LibraryError(
                _FAULTS[found].format(
                    rows=spec.rows, more=spec.rows + 1, columns=spec.columns, stored=_stored(spec)
                ),
                library="sparse",
                code="invalid_value",
            )
        # To have more stored than is used is right, but nothing that cuSPARSE could be told.
        if not has_more:
            blocks = spec.indptr.block, spec.indices.block
            self._matrices.setdefault(structure, _Matrix(blocks, used=self._products))
            for block in blocks:
                self._device.invalidate_with(block, self._invalidate_block)

    def _destroy(self) -> None:
        while self._matrices:
            self._forget(next(iter(self._matrices)))
        for vector in self._vectors.values():
            cusparse.destroy_dn_vec(vector.handle)
        cusparse.destroy(self._handle)
        self._status_words.close()
        for area in self._areas.values():
            area.close()


def _stored(spec: SpmvCsrSpec) -> int:
    return min(spec.indices.shape[0], spec.data.shape[0])


def _has_no_gaps(vector: ArraySpec) -> bool:
    return vector.strides[0] == vector.dtype.itemsize or vector.shape[0] <= 1


def _structure(spec: SpmvCsrSpec) -> _Structure:
    """What tells a matrix from others, and is checked with it, apart from its values."""
    indptr, indices, data = spec.indptr, spec.indices, spec.data
    return (
        *(spec.rows, spec.columns),
        # Types are compared by identity: cheaper than their hash, which is NumPy's.
        *(indptr.block, indptr.offset, indptr.shape, indptr.strides, id(indptr.dtype)),
        *(indices.block, indices.offset, indices.shape, indices.strides, id(indices.dtype)),
        *(data.shape, id(data.dtype)),
    )


def _check(spec: SpmvCsrSpec) -> None:
    """Refuse what can be told to be wrong without the elements.

    Raises:
        NotSupportedError: A type that cuSPARSE has not.
        LibraryError: Row pointers of another number.
    """
    check_dtype("spmv", check_same_dtype("spmv", spec.data, spec.x, spec.out), NATIVE)
    check_dtype("spmv with indices", check_same_dtype("spmv", spec.indptr, spec.indices), _INDICES)
    for name, array in (("indices", spec.indices), ("data", spec.data)):
        if array.ndim != 1:
            message = f"{name}: must have one axis, got shape {array.shape}"
            raise LibraryError(message, library="sparse", code="invalid_value")
    if spec.indptr.shape != (spec.rows + 1,):
        message = _FAULTS[1].format(rows=spec.rows, more=spec.rows + 1, stored=_stored(spec))
        raise LibraryError(message, library="sparse", code="invalid_value")


def _check_vectors(spec: SpmvCsrSpec) -> None:
    for name, array, length in (("x", spec.x, spec.columns), ("out", spec.out, spec.rows)):
        if array.shape != (length,):
            raise LibraryError(
                f"{name}: a matrix of {spec.rows} rows and {spec.columns} columns needs a vector of "
                f"{length} elements, not of shape {array.shape}",
                library="sparse",
                code="invalid_value",
            )
