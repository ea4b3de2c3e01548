"""Operations with sparse matrices: products, triangles, incomplete factors by cuSPARSE, systems by cuDSS."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

import attrs
import numpy as np
from nvmath.bindings import cudss, cusparse

from ...base import (
    NATIVE,
    DeviceArray,
    DType,
    HostArray,
    Ints,
    LibraryError,
    NotSupportedError,
    check_structure,
    kernel,
    scalar_of,
    unordered,
)
from ...base.contract.ops import ArraySpec, OperationSpec, StatusArray, array_key
from ..kit._library import CudaLibrary, Errors, KernelCall, LibraryDevice, read_now
from ..runtime._stream import CudaStream
from ._cublas import KINDS
from ._cudss import DirectSolver, LinearSystem
from ._sparse_makers import (
    ANY,
    AS_IT_IS,
    TYPES,
    VALUE_TYPES,
    Job,
    Maker,
    MakerKernels,
    csr,
    dense,
    factors,
    operation_of,
    vector,
)

# The layout matches the structure in sparse.cu.
_GUARD = struct.Struct("<5Q3qii")
_ARGUMENTS = struct.Struct("<6Q3qiii4x")
_SCALE = struct.Struct("<Qqddi4x")
_LANES = 32
# The layout matches the structure in residuals.cu.
_RESIDUAL_STRUCT = struct.Struct("<7Qdqi4x")
_MOST_STRUCTURES = 256
_ALGORITHM = cusparse.SpMVAlg.DEFAULT
_OUT, _DTYPES = {"out": NATIVE}, {"matrix_data": NATIVE}
_NARROW = 1 << 31
_NOT_FINITE, _NOT_HERMITIAN = -1, -2
_WORDS = 6


@attrs.frozen(eq=False)
class Structure:
    """The places of a compressed matrix's values.

    Attributes:
        shape: Rows and columns.
        indptr: Row pointers.
        indices: Columns.
    """

    shape: tuple[int, int]
    indptr: ArraySpec
    indices: ArraySpec

    @property
    def stored(self) -> int:
        """The number of stored values."""
        return int(self.indices.size)

    @property
    def is_wide(self) -> bool:
        """Whether indices are of 64 bits."""
        return self.indptr.dtype is DType.int64

    @property
    def key(self) -> tuple[object, ...]:
        """The key that distinguishes it from others: the places of its arrays."""
        indptr, indices = self.indptr, self.indices
        return self.shape, indptr.block, *array_key(indptr), indices.block, *array_key(indices)

    @property
    def blocks(self) -> tuple[int, int]:
        """The blocks of its arrays."""
        return self.indptr.block, self.indices.block

    def refuse_faulty(self, words: StatusArray) -> None:
        """Refuse it over what a kernel has found."""
        check_structure(int(words[0]), self.shape, self.stored)


@attrs.define(eq=False)
class ValidatedStructure:
    """A structure that is being checked, or was checked and found right.

    Attributes:
        blocks: Blocks of its arrays.
        used: The number of operations before the last one with it.
        is_right: Whether it was found right.
        product: The descriptors of a product with it; None before the first product by cuSPARSE.
    """

    blocks: tuple[int, int]
    used: int
    is_right: bool = False
    product: Any = None


@attrs.frozen(eq=False)
class _Product:
    """cuSPARSE's descriptors of one product. They are in host memory, and running work does not need them.

    Attributes:
        matrix: Descriptor of the matrix.
        x: Descriptor of the argument.
        out: Descriptor of the result.
        nbytes: Bytes of the product's workspace.
        terms: Type of the values, and addresses of one and zero.
        destroy: Releases the descriptors.
    """

    matrix: int
    x: int
    out: int
    nbytes: int
    terms: tuple[int, int, int]
    destroy: Callable[[], None]


@attrs.frozen(eq=False)
class _Looked:
    """A square matrix after its inspection.

    Attributes:
        addresses: Addresses of its row pointers, columns and values.
        stored: The number of its values.
        words: The results of `inspect`; see structures.cu.
    """

    addresses: tuple[int, int, int]
    stored: int
    words: Any


class SparseLibrary(CudaLibrary):
    """Products by cuSPARSE, which follows row pointers and columns without a check, wherever they lead.

    Checking indices on the device costs nearly as much as a product, and the outcome cannot be awaited before
    the product is enqueued. So a kernel that checks everything it reads computes the first product with a
    structure, and if it finds no fault, cuSPARSE computes the next ones (D26). A structure is recognised by
    the blocks of its arrays, until one of these is written to. cuSPARSE also computes the first product with
    a dense matrix, with a copy of the structure that a kernel has made, which is harmless if the kernel has
    found a fault.

    Other functions make matrices from matrices, solve systems, and factor matrices within their structure.
    cuSPARSE takes a missing diagonal for ones, so each matrix of a system is inspected first, which waits for
    the device. Its routines also wait while they search for work that can be done at a time.
    """

    name = "sparse"
    # Its work depends on whether a structure was checked, so most of it cannot be captured.
    is_captured: ClassVar[bool] = False
    errors: ClassVar[Errors] = {cusparse.cuSPARSEError: cusparse.Status, cudss.cuDSSError: cudss.Status}
    refused: ClassVar[frozenset[str]] = frozenset({"INVALID_VALUE", "MATRIX_TYPE_NOT_SUPPORTED"})

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        load = device.kernels.function
        self._guard = load("sparse", "guard", _GUARD.size)
        self._unchecked = load("sparse", "multiply_unchecked", _ARGUMENTS.size)
        self._scale = load("sparse", "scale", _SCALE.size)
        self._least = load("residuals", "least_residual", _RESIDUAL_STRUCT.size)
        self._seen: dict[tuple[object, ...], ValidatedStructure] = {}
        self._uses = 0
        self._made_by: MakerKernels | None = None
        self._direct = DirectSolver(device, threading.Lock())
        # Operations that block are called in threads, one for each stream.
        self._lock = threading.Lock()
        self._stream: CudaStream | None = None
        self._handle: int = cusparse.create()

    def _destroy(self) -> None:
        while self._seen:
            self._forget(next(iter(self._seen)))
        if self._made_by is not None:
            self._made_by.scan.close()
            cusparse.destroy(self._made_by.handle)
        self._direct.destroy()
        cusparse.destroy(self._handle)

    # ---- products

    def captures(self, spec: OperationSpec) -> bool:
        """See `EnqueuingLibrary.captures`: among others, a product with a structure that was found right."""
        return spec.operation in ("sparse.spmv", "sparse.least_residual")

    @kernel("sparse.spmv", backend="cuda", dtypes=_OUT)
    def _multiply(self, spec: Any, call: KernelCall) -> None:
        # A type is compared by identity: cheaper than its hash, which is NumPy's.
        structure = _structure(spec)
        key = (id(spec.out.dtype), *structure.key)
        entry = self._seen.get(key)
        indptr, indices, data, x = map(
            call.packed, (spec.matrix_indptr, spec.matrix_indices, spec.matrix_data, spec.x)
        )
        out = call.result(spec.out)
        if entry is None or not entry.is_right:
            if call.stream.is_capturing:
                raise LibraryError(
                    "the structure was not looked at yet", library=self.name, code="not_checked"
                )
            words = call.words(2, self._expect(structure, key))
            self._launch_unchecked(spec, call, (indptr, indices, data, x, out), words, is_dense=False)
            return
        entry.used = self._uses = self._uses + 1
        if call.stream.is_capturing:
            self.watched += 1
        product: _Product | None = entry.product
        if product is None:
            product = entry.product = self._describe(spec, (indptr, indices, data, x, out))
        else:
            cusparse.csr_set_pointers(product.matrix, indptr, indices, data)
            cusparse.dn_vec_set_values(product.x, x)
            cusparse.dn_vec_set_values(product.out, out)
        self._go_to(call.stream)
        kind, unit, zero = product.terms
        cusparse.sp_mv(
            *(self._handle, AS_IT_IS, unit, product.matrix, product.x, zero, product.out),
            *(kind, _ALGORITHM, call.workspace(product.nbytes)),
        )

    def _describe(self, spec: Any, addresses: tuple[int, int, int, int, int]) -> _Product:
        """Make the descriptors of a product, and find its workspace."""
        indptr, indices, data, x_at, out_at = addresses
        dtype = spec.matrix_data.dtype
        kind, (unit, zero) = VALUE_TYPES[dtype], factors(dtype)
        with ExitStack() as undo:
            matrix = _csr(undo, spec, (indptr, indices, data), dtype)
            x, out = vector(undo, spec.x.size, x_at, dtype), vector(undo, spec.out.size, out_at, dtype)
            nbytes = cusparse.sp_mv_buffer_size(
                self._handle, AS_IT_IS, unit, matrix, x, zero, out, kind, _ALGORITHM
            )
            return _Product(matrix, x, out, nbytes, (kind, unit, zero), undo.pop_all().close)

    def _go_to(self, stream: CudaStream) -> None:
        if stream is not self._stream:
            cusparse.set_stream(self._handle, stream.handle)
            self._stream = stream

    @kernel("sparse.spmm", backend="cuda", dtypes=_OUT)
    def _multiply_dense(self, spec: Any, call: KernelCall) -> None:
        structure, dtype = self._harmless(_structure(spec), call), spec.matrix_data.dtype
        scalars = [scalar_of("sparse", name, getattr(spec, name), dtype) for name in ("alpha", "beta")]
        out, size = call.result(spec.out, is_updated=True), spec.out.size
        if not (_stored(spec) and size and spec.b.shape[0]):
            # The product is empty, which cuSPARSE does not accept.
            beta = complex(scalars[1])
            values = out, size, beta.real, beta.imag, TYPES[dtype]
            self._scale.run(call.handle, max(size, 1), _SCALE, *values)
            return
        kind, terms_at = VALUE_TYPES[dtype], np.array(scalars, dtype.dtype)
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

    @kernel("sparse.sddmm", backend="cuda", dtypes=_OUT)
    def _sample(self, spec: Any, call: KernelCall) -> None:
        structure = self._harmless(_structure(spec), call)
        (rows, inner), columns = spec.a.shape, spec.b.shape[1]
        if not (_stored(spec) and inner and rows and columns):
            call.fill(spec.out, 0)
            return
        a, b, out = call.packed(spec.a), call.packed(spec.b), call.result(spec.out)
        dtype = spec.out.dtype
        kind, (unit, zero) = VALUE_TYPES[dtype], factors(dtype)
        with ExitStack() as undo:
            lhs, rhs = dense(undo, spec.a.shape, a, dtype), dense(undo, spec.b.shape, b, dtype)
            sampled = _csr(undo, spec, (*structure, out), dtype)
            self._go_to(call.stream)
            terms = (
                *(self._handle, AS_IT_IS, AS_IT_IS, unit, lhs, rhs),
                *(zero, sampled, kind, cusparse.SDDMMAlg.DEFAULT),
            )
            nbytes = np.zeros(1, np.uint64)
            cusparse.sddmm_buffer_size(*terms, nbytes.ctypes.data)
            cusparse.sddmm(*terms, call.workspace(int(nbytes[0])))

    @kernel("sparse.to_dense", backend="cuda", dtypes=_OUT)
    def _to_dense(self, spec: Any, call: KernelCall) -> None:
        out = call.result(spec.out)
        call.fill(DeviceArray.packed(out, spec.out.dtype, spec.out.shape), 0)
        indptr, indices, data = map(call.packed, (spec.matrix_indptr, spec.matrix_indices, spec.matrix_data))
        words = call.words(2, _structure(spec).refuse_faulty)
        self._launch_unchecked(spec, call, (indptr, indices, data, 0, out), words, is_dense=True)

    @kernel("sparse.check_structure", backend="cuda", dtypes=_DTYPES)
    def _check(self, spec: Any, call: KernelCall) -> None:
        # The copies that the guard makes are not used here.
        self._harmless(_structure(spec), call)

    def _launch_unchecked(
        self, spec: Any, call: KernelCall, addresses: Ints, words: int, *, is_dense: bool
    ) -> None:
        """Enqueue the kernel that checks all that it reads, by a warp for each row."""
        types = TYPES[spec.matrix_data.dtype], spec.matrix_indptr.dtype is DType.int64, is_dense
        values = *addresses, words, *spec.matrix, _stored(spec), *types
        self._unchecked.run(call.handle, max(spec.matrix[0], 1) * _LANES, _ARGUMENTS, *values)

    # ---- checks of structures

    def _harmless(self, structure: Structure, call: KernelCall) -> tuple[int, int]:
        """Return addresses of row pointers and columns that lead nowhere outside.

        Those of the matrix, if it was found right. Otherwise copies that a kernel makes: of the structure, or
        of a harmless one, and then the operation fails (D104).
        """
        indptr, indices = call.packed(structure.indptr), call.packed(structure.indices)
        key = ("harmless", *structure.key)
        if self._is_right(key):
            return indptr, indices
        words = call.words(1, self._expect(structure, key))
        size = structure.indptr.dtype.itemsize
        safe = call.workspace(structure.indptr.size * size), call.workspace(structure.stored * size)
        for phase in range(2):
            self._launch_guard(structure, call, (indptr, indices, *safe, words), phase)
        return safe

    def _right(self, structure: Structure, call: KernelCall) -> tuple[int, int]:
        """Return addresses of row pointers and columns; waits for the outcome of a look, which blocks.

        Raises:
            LibraryError: They lead outside.
        """
        indptr, indices = call.packed(structure.indptr), call.packed(structure.indices)
        key = ("harmless", *structure.key)
        if not self._is_right(key):
            words = call.workspace(4)
            call.stream.set_bytes(words, 0, 4)
            judge = self._expect(structure, key)
            self._launch_guard(structure, call, (indptr, indices, 0, 0, words), 0)
            judge(_read(call, words, np.int32))
        return indptr, indices

    def _is_right(self, key: tuple[object, ...]) -> bool:
        entry = self._seen.get(key)
        if entry is None or not entry.is_right:
            return False
        entry.used = self._uses = self._uses + 1
        return True

    def _launch_guard(self, structure: Structure, call: KernelCall, addresses: Ints, phase: int) -> None:
        count = max(structure.indptr.size, structure.stored)
        values = *addresses, *structure.shape, structure.stored, structure.is_wide
        self._guard.run(call.handle, count, _GUARD, *values, phase)

    def _expect(self, structure: Structure, key: tuple[object, ...]) -> Callable[[StatusArray], None]:
        """Begin a look at a structure; returns what is to be called with its outcome."""
        self._forget_oldest()
        # A write launched before the outcome removes this entry, so that the outcome proves nothing.
        entry = self._seen.setdefault(key, ValidatedStructure(structure.blocks, self._uses))
        for block in structure.blocks:
            self._device.invalidate_with(block, self._invalidate_block)
        return partial(self._judge, structure, entry)

    def _judge(self, structure: Structure, entry: ValidatedStructure, words: StatusArray) -> None:
        """Note the end of an operation that checked its matrix. May run in a thread of the device."""
        structure.refuse_faulty(words)
        # cuSPARSE can take neither more stored values than are used, nor an empty matrix.
        if not words[1:].any() and structure.shape[0] and structure.stored:
            entry.is_right = True

    def _invalidate_block(self, block: int) -> None:
        """Nothing is known of the structures in this block from now on."""
        # A thread of the device may add one meanwhile, of other blocks.
        for key, entry in tuple(self._seen.items()):
            if block in entry.blocks:
                self._forget(key)

    def _forget_oldest(self) -> None:
        # The structures go here, and not where one is added: a thread of the device must not destroy one in
        # use.
        while len(self._seen) > _MOST_STRUCTURES:
            self._forget(min(tuple(self._seen.items()), key=lambda item: item[1].used)[0])

    def _forget(self, key: tuple[object, ...]) -> None:
        entry = self._seen.pop(key)
        if entry.is_right:
            # A captured graph may continue to use this structure, which nobody watches any longer.
            self.epoch += 1
        product = entry.product
        if product is not None:
            product.destroy()

    # ---- matrices made from others

    def _loaded(self) -> MakerKernels:
        """Compile the kernels that make matrices; blocks. The context is current."""
        if self._made_by is None:
            self._made_by = MakerKernels(self._device)
        return self._made_by

    @kernel("sparse.make", backend="cuda", is_blocking=True)
    def _make(self, spec: Any, call: KernelCall) -> None:
        written = spec.indptr, spec.indices, spec.data
        indptr, indices, data = (0 if array is None else call.result(array) for array in written)
        limit, count = ANY if spec.indices is None else spec.indices.size, call.status(spec.count)
        job = Job(spec.function, spec.numbers, spec.arrays, (indptr, indices, data), limit, count)
        with self._lock:
            self._maker(job, call).run()

    def _maker(self, job: Job, call: KernelCall) -> Maker:
        """Return what makes a matrix, or looks at one; blocks. The lock is held."""

        def right(shape: tuple[int, int], indptr: ArraySpec, indices: ArraySpec) -> tuple[int, int]:
            return self._right(Structure(shape, indptr, indices), call)

        return Maker(self._loaded(), job, call, right)

    # ---- systems

    @kernel("sparse.spsolve", backend="cuda", dtypes=_DTYPES, is_blocking=True)
    @kernel("sparse.factor", backend="cuda", dtypes=_DTYPES, is_blocking=True)
    @kernel("sparse.solve_factored", backend="cuda", dtypes=_DTYPES, is_blocking=True)
    def _solve(self, spec: Any, call: KernelCall) -> None:
        status, dtype, rows = call.status(spec.info), spec.matrix_data.dtype, spec.matrix[0]
        number, target = getattr(spec, "number", None), getattr(spec, "out", None)
        if getattr(spec, "trans", "N") != "N":
            raise NotSupportedError("sparse.Factors.solve: cuDSS solves with trans='N' alone", backend="cuda")
        out = 0 if target is None else call.result(target, "F")
        arrays = spec.matrix_indptr, spec.matrix_indices, spec.matrix_data
        if self._direct.has(number):
            indptr, indices, data = map(call.packed, arrays)
            looked = _Looked((indptr, indices, data), _stored(spec), None)
        else:
            with self._lock:
                looked = self._looked_at(spec, call)
                if looked.words[0] or not all(array.is_contiguous for array in arrays):
                    # Cached factors refer to their matrix, but this matrix is in workspace.
                    number = None
                if looked.words[0]:
                    looked = self._added_up(spec, looked, call)
            if looked.words[2] or (rows and not looked.stored):
                _tell(call, status, _NOT_FINITE if looked.words[2] else 1)
                return
        if not rows:
            return
        sides = 0 if target is None else target.size // rows
        if sides:
            b = call.packed(spec.b, "F")
        else:
            # The matrix may be singular all the same.
            b, out = (call.workspace(rows * dtype.itemsize) for _ in range(2))
            call.fill(DeviceArray.packed(b, dtype, (rows,)), 1)
        index = spec.matrix_indptr.dtype
        system = LinearSystem(rows, looked.stored, looked.addresses, index, dtype, max(sides, 1), b, out)
        # Makers of matrices go on meanwhile.
        if not self._direct.solve(system, call, number, spec.matrix_data.block):
            _tell(call, status, 1)

    @kernel("sparse.least_residual", backend="cuda", dtypes={"h": NATIVE})
    def _find_least(self, spec: Any, call: KernelCall) -> None:
        steps = spec.sizes.size
        arrays = [call.packed(array) for array in (spec.h, spec.sizes, spec.size, spec.step_count)]
        room = call.workspace((steps * (steps + 2) + 1) * 16 + steps * 8)
        addresses = *arrays, call.result(spec.y), call.result(spec.count), room
        self._least.run(
            call.handle, 1, _RESIDUAL_STRUCT, *addresses, spec.tolerance, steps, TYPES[spec.h.dtype]
        )

    @kernel("sparse.spsolve_triangular", backend="cuda", dtypes=_DTYPES, is_blocking=True)
    def _solve_triangular(self, spec: Any, call: KernelCall) -> None:
        status, dtype, out = call.status(spec.info), spec.out.dtype, call.result(spec.out)
        with self._lock, ExitStack() as undo:
            looked = self._looked_at(spec, call)
            if looked.words[5]:
                looked = self._added_up(spec, looked, call)
            if looked.words[1] and not spec.unit_diagonal:
                _tell(call, status, int(looked.words[1]))
                return
            if not spec.out.size:
                return
            if not looked.stored:
                call.convert(call.array(spec.b), DeviceArray.packed(out, dtype, spec.out.shape))
                return
            handle, b = self._loaded().handle, call.packed(spec.b)
            cusparse.set_stream(handle, call.handle)
            matrix = csr(undo, spec.matrix, looked.stored, looked.addresses, spec.matrix_indptr.dtype, dtype)
            fill = cusparse.FillMode.LOWER if spec.lower else cusparse.FillMode.UPPER
            unit = cusparse.DiagType.UNIT if spec.unit_diagonal else cusparse.DiagType.NON_UNIT
            for attribute, value in (
                (cusparse.SpMatAttribute.FILL_MODE, fill),
                (cusparse.SpMatAttribute.DIAG_TYPE, unit),
            ):
                word = np.array([value], np.int32)
                cusparse.sp_mat_set_attribute(matrix, attribute, word.ctypes.data, word.nbytes)
            # A single right-hand side is a vector; of a matrix, cuSPARSE also takes whether it is turned.
            is_vector = spec.b.ndim == 1
            turns = (operation_of(spec.trans, dtype), *(AS_IT_IS,) * (not is_vector))
            if is_vector:
                name, algorithm = "sp_sv", int(cusparse.SpSVAlg.DEFAULT)
                sides = vector(undo, spec.b.size, b, dtype), vector(undo, spec.b.size, out, dtype)
            else:
                name, algorithm = "sp_sm", int(cusparse.SpSMAlg.DEFAULT)
                sides = dense(undo, spec.b.shape, b, dtype), dense(undo, spec.out.shape, out, dtype)
            state = getattr(cusparse, f"{name}_create_descr")()
            undo.callback(getattr(cusparse, f"{name}_destroy_descr"), state)
            terms = handle, *turns, factors(dtype)[0], matrix, *sides, VALUE_TYPES[dtype], algorithm, state
            room = call.workspace(max(getattr(cusparse, f"{name}_buffer_size")(*terms), 1))
            getattr(cusparse, f"{name}_analysis")(*terms, room)
            getattr(cusparse, f"{name}_solve")(*terms)

    @kernel("sparse.ilu0", backend="cuda", dtypes=_DTYPES, is_blocking=True)
    @kernel("sparse.ic0", backend="cuda", dtypes=_DTYPES, is_blocking=True)
    def _incomplete(self, spec: Any, call: KernelCall) -> None:
        status, dtype, out = call.status(spec.info), spec.out.dtype, call.result(spec.out)
        is_cholesky = spec.operation == "sparse.ic0"
        with self._lock:
            looked = self._looked_at(spec, call, is_cholesky=is_cholesky)
            row, pivot, is_endless, _, differs, _ = (int(word) for word in looked.words)
            if row:
                raise unordered(row - 1)
            if is_endless or (is_cholesky and differs):
                _tell(call, status, _NOT_FINITE if is_endless else _NOT_HERMITIAN)
                return
            indptr, indices, data = looked.addresses
            if looked.stored:
                call.stream.copy(out, data, looked.stored * dtype.itemsize)
                self._factor(spec, call, (indptr, indices, out), "ic" if is_cholesky else "ilu")
            # The vendor only reports that a pivot is zero. All values after it are infinite, or NaN. If the
            # pivot is not stored, the routine does nothing.
            maker = self._maker_of(spec, call)
            kind, original = (2, data) if is_cholesky else (1, 0)
            words = self._inspect(maker, call, (indptr, indices, out), kind, original=original)
            bad = [number for number in (pivot, int(words[1])) if number]
            if bad:
                _tell(call, status, min(bad))
            elif is_cholesky:
                maker.launch("mirror", looked.stored, count=looked.stored, out_data=out)

    def _factor(self, spec: Any, call: KernelCall, addresses: tuple[int, int, int], name: str) -> None:
        """Factor in place, by a routine that only takes indices of 32 bits."""
        rows, stored, dtype = spec.matrix[0], spec.matrix_indices.size, spec.out.dtype
        if max(rows, stored) >= _NARROW:
            raise NotSupportedError(
                f"{spec.operation}: the CUDA backend factors no matrix of {stored} values", backend="cuda"
            )
        indptr, indices = (
            self._narrow(call, address, array)
            for address, array in zip(addresses, (spec.matrix_indptr, spec.matrix_indices), strict=False)
        )
        handle, letter = self._loaded().handle, KINDS[dtype].letter
        cusparse.set_stream(handle, call.handle)
        with ExitStack() as undo:
            state = getattr(cusparse, f"create_csr{name}02_info")()
            undo.callback(getattr(cusparse, f"destroy_csr{name}02_info"), state)
            descriptor = cusparse.create_mat_descr()
            undo.callback(cusparse.destroy_mat_descr, descriptor)
            routine = f"{letter}csr{name}02"
            terms = handle, rows, stored, descriptor, addresses[2], indptr, indices, state
            room = call.workspace(max(getattr(cusparse, f"{routine}_buffer_size")(*terms), 1))
            options = cusparse.SolvePolicy.USE_LEVEL, room
            getattr(cusparse, f"{routine}_analysis")(*terms, *options)
            getattr(cusparse, routine)(*terms, *options)

    def _narrow(self, call: KernelCall, address: int, array: Any) -> int:
        if array.dtype is DType.int32:
            return address
        result = call.workspace_array(DType.int32, array.shape)
        call.convert(DeviceArray.packed(address, array.dtype, array.shape), result)
        return result.address

    def _maker_of(self, spec: Any, call: KernelCall) -> Maker:
        """Return what looks at the matrix of an operation."""
        arrays = spec.matrix_indptr, spec.matrix_indices, spec.matrix_data
        return self._maker(Job("sum_duplicates", spec.matrix, arrays, (0, 0, 0), 0, 0), call)

    def _looked_at(self, spec: Any, call: KernelCall, *, is_cholesky: bool = False) -> _Looked:
        """Inspect a matrix, and wait for the result.

        Raises:
            LibraryError: Its structure is wrong.
        """
        structure = _structure(spec)
        addresses = *self._right(structure, call), call.packed(spec.matrix_data)
        words = self._inspect(
            self._maker_of(spec, call), call, addresses, 0, structure.stored if is_cholesky else 0
        )
        return _Looked(addresses, structure.stored, words)

    def _inspect(
        self,
        maker: Maker,
        call: KernelCall,
        addresses: tuple[int, int, int],
        kind: int,
        compared: int = 0,
        original: int = 0,
    ) -> Any:
        """Inspect values, and whether `compared` of them belong to a Hermitian matrix; blocks.

        Factors of kind 2 are compared with their original values, which are at `original`.
        """
        words = call.workspace(4 * _WORDS)
        call.stream.set_bytes(words, 0, 4 * _WORDS)
        maker.set_matrix(addresses)
        maker.set(rows=maker.rows)
        maker.launch("inspect", maker.rows, words=words, kind=kind, out_data=original)
        for name in ("measure", "compare"):
            maker.launch(name, compared, count=compared, words=words)
        return _read(call, words, np.int32, _WORDS)

    def _added_up(self, spec: Any, looked: _Looked, call: KernelCall) -> _Looked:
        """Add up the values of equal places, in workspace, because the vendor counts them separately."""
        arrays, stored = (spec.matrix_indptr, spec.matrix_indices, spec.matrix_data), looked.stored
        indptr, indices, data = (call.workspace(array.size * array.dtype.itemsize) for array in arrays)
        count = call.workspace(8)
        job = Job("sum_duplicates", spec.matrix, arrays, (indptr, indices, data), stored, count)
        self._maker(job, call).run()
        remaining = int(_read(call, count, np.int64)[0])
        addresses = indptr, indices, data
        return _Looked(addresses, remaining, self._inspect(self._maker_of(spec, call), call, addresses, 0))


def _read(call: KernelCall, address: int, dtype: Any, count: int = 1) -> HostArray:
    """Wait for enqueued work, and read some numbers; blocks, and raises as `read_now` does."""
    return np.frombuffer(read_now(call.device, call.stream, address, count * np.dtype(dtype).itemsize), dtype)


def _tell(call: KernelCall, status: int, number: int) -> None:
    """Set the status word of an operation."""
    call.fill(DeviceArray.packed(status, DType.int32, (1,)), number)


def _csr(undo: ExitStack, spec: Any, addresses: tuple[int, int, int], dtype: DType) -> int:
    """Describe the matrix of an operation."""
    return csr(undo, spec.matrix, _stored(spec), addresses, spec.matrix_indptr.dtype, dtype)


def _stored(spec: Any) -> int:
    return int(spec.matrix_indices.size)


def _structure(spec: Any) -> Structure:
    return Structure(spec.matrix, spec.matrix_indptr, spec.matrix_indices)
