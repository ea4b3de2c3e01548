"""Systems with sparse matrices: direct solutions by cuDSS; by cuSPARSE triangles and incomplete factors."""

from __future__ import annotations

import struct
from contextlib import ExitStack
from typing import Any, ClassVar

import attrs
import numpy as np
from nvmath.bindings import cudss, cusparse

from ...base import DType, LibraryError, NotSupportedError
from ...base.contract.device_array import DeviceArray
from ...base.kit.checks import NATIVE
from ...base.kit.kernels import kernel
from ..kit._library import Errors, KernelCall, LibraryDevice
from ._cublas import KINDS
from ._cudss import SIZES, Cudss, System, is_solved
from ._cusparse import VALUE_TYPES, csr, dense, factors, operation_of, vector
from ._sparse_makers import TYPES, Job, Maker
from ._sparse_structures import Structure, StructureLibrary, read_words

__all__ = ["SystemLibrary"]

_DTYPES = {"matrix_data": NATIVE}
_NARROW = 1 << 31
_NOT_FINITE, _NOT_HERMITIAN = -1, -2
_WORDS = 6
# As in residuals.cu.
_LEAST = struct.Struct("<7Qdqi4x")


@attrs.frozen(eq=False)
class _Looked:
    """A square matrix that was looked at.

    Attributes:
        addresses: Of its row pointers, columns and values.
        stored: How many values it has.
        words: What `inspect` has found; see structures.cu.
    """

    addresses: tuple[int, int, int]
    stored: int
    words: Any


class SystemLibrary(StructureLibrary):
    """Solves with triangles, and factors within a structure.

    cuSPARSE takes a diagonal that is not there for ones, so each matrix is looked at first, which waits for
    the device. Its routines wait too, while they look for what can be done at a time.
    """

    errors: ClassVar[Errors] = {**StructureLibrary.errors, cudss.cuDSSError: cudss.Status}

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._direct: Cudss | None = None
        self._least = device.kernels.function("residuals", "least_residual", _LEAST.size)

    @kernel("sparse.spsolve", backend="cuda", dtypes=_DTYPES, is_blocking=True)
    def _solve(self, spec: Any, call: KernelCall) -> None:
        status, dtype, rows = call.status(spec.info), spec.out.dtype, spec.matrix[0]
        out = call.result(spec.out, "F")
        with self._lock:
            looked = self._looked_at(spec, call)
            if looked.words[0]:
                looked = self._added_up(spec, looked, call)
            if looked.words[2] or (rows and not looked.stored):
                _tell(call, status, _NOT_FINITE if looked.words[2] else 1)
                return
            if not rows:
                return
            if self._direct is None:
                self._direct = Cudss(self._device)
        # What makes matrices goes on meanwhile: this takes seconds.
        with self._solving:
            b, sides = call.packed(spec.b, "F"), spec.out.size // rows
            if not sides:
                # The matrix may be singular all the same.
                b, out = (call.workspace(rows * dtype.itemsize) for _ in range(2))
                call.stream.set_bytes(b, 0, rows * dtype.itemsize)
            system = System(
                rows, looked.stored, looked.addresses, spec.matrix_indptr.dtype, dtype, max(sides, 1), b, out
            )
            # Pivots of blocks are found in less time. They may not do, where those of columns would.
            if not any(self._is_solved(system, call, is_global=is_global) for is_global in (False, True)):
                _tell(call, status, 1)

    def _is_solved(self, system: System, call: KernelCall, *, is_global: bool) -> bool:
        """Solve, and tell whether the solution is right; blocks."""
        assert self._direct is not None
        if not self._direct.solve(system, call.stream, is_global=is_global):
            return False
        sizes = self._direct.find_sizes(system, call)
        return is_solved(read_words(call, sizes, np.float64, SIZES * system.sides), system.dtype)

    @kernel("sparse.least_residual", backend="cuda", dtypes={"h": NATIVE})
    def _find_least(self, spec: Any, call: KernelCall) -> None:
        steps = spec.sizes.size
        arrays = [call.packed(array) for array in (spec.h, spec.sizes, spec.size, spec.made)]
        room = call.workspace((steps * (steps + 2) + 1) * 16 + steps * 8)
        places = *arrays, call.result(spec.y), call.result(spec.count), room
        self._least.run(call.handle, 1, _LEAST, *places, spec.wanted, steps, TYPES[spec.h.dtype])

    def _destroy(self) -> None:
        super()._destroy()
        if self._direct is not None:
            self._direct.destroy()

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
            turned, kind, (one, _) = operation_of(spec.trans, dtype), VALUE_TYPES[dtype], factors(dtype)
            if len(spec.b.shape) == 1:
                state = cusparse.sp_sv_create_descr()
                undo.callback(cusparse.sp_sv_destroy_descr, state)
                vectors = vector(undo, spec.b.size, b, dtype), vector(undo, spec.b.size, out, dtype)
                terms = handle, turned, one, matrix, *vectors, kind, cusparse.SpSVAlg.DEFAULT, state
                room = call.workspace(max(cusparse.sp_sv_buffer_size(*terms), 1))
                cusparse.sp_sv_analysis(*terms, room)
                cusparse.sp_sv_solve(*terms)
                return
            state = cusparse.sp_sm_create_descr()
            undo.callback(cusparse.sp_sm_destroy_descr, state)
            sides = dense(undo, spec.b.shape, b, dtype), dense(undo, spec.out.shape, out, dtype)
            as_it_is = operation_of("N", dtype)
            many = handle, turned, as_it_is, one, matrix, *sides, kind, cusparse.SpSMAlg.DEFAULT, state
            room = call.workspace(max(cusparse.sp_sm_buffer_size(*many), 1))
            cusparse.sp_sm_analysis(*many, room)
            cusparse.sp_sm_solve(*many)

    @kernel("sparse.ilu0", backend="cuda", dtypes=_DTYPES, is_blocking=True)
    @kernel("sparse.ic0", backend="cuda", dtypes=_DTYPES, is_blocking=True)
    def _incomplete(self, spec: Any, call: KernelCall) -> None:
        status, dtype, out = call.status(spec.info), spec.out.dtype, call.result(spec.out)
        is_cholesky = spec.operation == "sparse.ic0"
        with self._lock:
            looked = self._looked_at(spec, call, is_cholesky=is_cholesky)
            row, pivot, is_endless, _, differs, _ = (int(word) for word in looked.words)
            if row:
                raise LibraryError(
                    f"the columns of row {row - 1} do not ascend; bring them into order: "
                    "sparse.sum_duplicates",
                    library="sparse",
                    code="invalid_value",
                )
            if is_endless or (is_cholesky and differs):
                _tell(call, status, _NOT_FINITE if is_endless else _NOT_HERMITIAN)
                return
            indptr, indices, data = looked.addresses
            if looked.stored:
                call.stream.copy(out, data, looked.stored * dtype.itemsize)
                self._factor(spec, call, (indptr, indices, out), "ic" if is_cholesky else "ilu")
            # The vendor says only that there is a pivot of zero. Behind it all is infinite, or not a number;
            # with one that is not stored, it does nothing.
            maker = self._maker_of(spec, call)
            kind, original = (2, data) if is_cholesky else (1, 0)
            words = self._inspect(maker, call, (indptr, indices, out), kind, original=original)
            bad = [number for number in (pivot, int(words[1])) if number]
            if bad:
                _tell(call, status, min(bad))
            elif is_cholesky:
                maker.launch("mirror", looked.stored, count=looked.stored, out_data=out)

    def _factor(self, spec: Any, call: KernelCall, addresses: tuple[int, int, int], name: str) -> None:
        """Factor in place, by a routine that knows indices of 32 bits alone."""
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
            about = cusparse.create_mat_descr()
            undo.callback(cusparse.destroy_mat_descr, about)
            routine = f"{letter}csr{name}02"
            terms = handle, rows, stored, about, addresses[2], indptr, indices, state
            room = call.workspace(max(getattr(cusparse, f"{routine}_buffer_size")(*terms), 1))
            last = cusparse.SolvePolicy.USE_LEVEL, room
            getattr(cusparse, f"{routine}_analysis")(*terms, *last)
            getattr(cusparse, routine)(*terms, *last)

    def _narrow(self, call: KernelCall, address: int, array: Any) -> int:
        if array.dtype is DType.int32:
            return address
        made = call.workspace_array(DType.int32, array.shape)
        call.convert(DeviceArray.packed(address, array.dtype, array.shape), made)
        return made.address

    def _maker_of(self, spec: Any, call: KernelCall) -> Maker:
        """Return what looks at the matrix of an operation."""
        arrays = spec.matrix_indptr, spec.matrix_indices, spec.matrix_data
        return self._maker(Job("sum_duplicates", spec.matrix, arrays, (0, 0, 0), 0, 0), call)

    def _looked_at(self, spec: Any, call: KernelCall, *, is_cholesky: bool = False) -> _Looked:
        """Look at a matrix, and wait for what is found.

        Raises:
            LibraryError: Its structure is wrong.
        """
        structure = Structure(spec.matrix, spec.matrix_indptr, spec.matrix_indices)
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
        """Look at values, and whether so many of them are those of a Hermitian matrix; blocks.

        Factors of kind 2 are compared with the values that they were made of, which are at `original`.
        """
        words = call.workspace(4 * _WORDS)
        call.stream.set_bytes(words, 0, 4 * _WORDS)
        maker.set(**dict(zip(("indptr", "indices", "data"), addresses, strict=True)), rows=maker.rows)
        maker.launch("inspect", maker.rows, words=words, kind=kind, out_data=original)
        for name in ("measure", "compare"):
            maker.launch(name, compared, count=compared, words=words)
        return read_words(call, words, np.int32, _WORDS)

    def _added_up(self, spec: Any, looked: _Looked, call: KernelCall) -> _Looked:
        """Add values of one place up, in workspace: a diagonal that is stored twice is two to the vendor."""
        arrays, stored = (spec.matrix_indptr, spec.matrix_indices, spec.matrix_data), looked.stored
        indptr, indices, data = (call.workspace(array.size * array.dtype.itemsize) for array in arrays)
        count = call.workspace(8)
        job = Job("sum_duplicates", spec.matrix, arrays, (indptr, indices, data), stored, count)
        self._maker(job, call).run()
        left = int(read_words(call, count, np.int64)[0])
        addresses = indptr, indices, data
        return _Looked(addresses, left, self._inspect(self._maker_of(spec, call), call, addresses, 0))


def _tell(call: KernelCall, status: int, number: int) -> None:
    """Set the status word of an operation."""
    call.fill(DeviceArray.packed(status, DType.int32, (1,)), number)
