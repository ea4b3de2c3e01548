"""Sparse matrices made from others: keys sorted by CUB, and kernels of the backend's own.

cuSPARSE's conversions only take indices of int32, and keep sums that cancel out. A key is the place of a
value, row by row. Once keys are sorted, equal ones are neighbours, which serves all functions (D166).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeAlias

import attrs
import numpy as np
from nvmath.bindings import cusparse

from ...base import NATIVE, DType, Ints, NotSupportedError, misplaced
from ...base.contract.ops import ArraySpec, StatusArray
from ...base.gpu.driver import KernelFunction
from ...base.gpu.primitives import CountScan
from ..kit._library import KernelCall, LibraryDevice
from ._cublas import KINDS
from ._radix_sort import RadixSort

AS_IT_IS = cusparse.Operation.NON_TRANSPOSE
"""The matrix, not transposed."""

VALUE_TYPES = {dtype: KINDS[dtype].code for dtype in NATIVE}
"""``cudaDataType`` of values."""

_OPERATIONS = {
    "N": AS_IT_IS,
    "T": cusparse.Operation.TRANSPOSE,
    "C": cusparse.Operation.CONJUGATE_TRANSPOSE,
}
_INDEX_TYPES = {DType.int32: cusparse.IndexType.INDEX_32I, DType.int64: cusparse.IndexType.INDEX_64I}
_FACTORS = {dtype: (np.ones(1, dtype.dtype), np.zeros(1, dtype.dtype)) for dtype in NATIVE}


def operation_of(letter: str, dtype: DType) -> cusparse.Operation:
    """Return the operation that turns a matrix: cuSPARSE only conjugates complex matrices."""
    return _OPERATIONS["T" if letter == "C" and dtype.kind != "complex" else letter]


def factors(dtype: DType) -> tuple[int, int]:
    """Return the addresses of one and zero."""
    unit, zero = _FACTORS[dtype]
    return unit.ctypes.data, zero.ctypes.data


# Nothing of a descriptor is needed once an operation is enqueued: it is destroyed when the stack is undone.
def csr(
    undo: ExitStack,
    shape: tuple[int, int],
    stored: int,
    addresses: tuple[int, int, int],
    index: DType,
    dtype: DType,
) -> int:
    """Describe a sparse matrix of `stored` values: its row pointers, columns and values."""
    kind = _INDEX_TYPES[index]
    descriptor: int = cusparse.create_csr(
        *shape, stored, *addresses, kind, kind, cusparse.IndexBase.ZERO, VALUE_TYPES[dtype]
    )
    undo.callback(cusparse.destroy_sp_mat, descriptor)
    return descriptor


def dense(undo: ExitStack, shape: tuple[int, int], address: int, dtype: DType) -> int:
    """Describe a dense matrix by rows."""
    descriptor: int = cusparse.create_dn_mat(
        *shape, shape[1], address, VALUE_TYPES[dtype], cusparse.Order.ROW
    )
    undo.callback(cusparse.destroy_dn_mat, descriptor)
    return descriptor


def vector(undo: ExitStack, size: int, address: int, dtype: DType) -> int:
    """Describe a dense vector."""
    descriptor: int = cusparse.create_dn_vec(size, address, VALUE_TYPES[dtype])
    undo.callback(cusparse.destroy_dn_vec, descriptor)
    return descriptor


# The order matches the fields in structures.cu.
_FIELDS = (
    "indptr", "indices", "data", "other_data", "out_indptr", "out_indices",
    "out_data", "keys", "kept", "order", "flags", "places", "list", "words", "count", "rows", "columns",
    "height", "width", "first", "limit", "step", "type", "is_wide", "kind",
)  # fmt: skip
_ARGUMENTS = struct.Struct("<14Q8q3i4x")
_KINDS = {
    "sum_duplicates": 0,
    "coo_to_csr": 1,
    "csr_to_csc": 2,
    "bsr_to_csr": 3,
    "csr_to_bsr": 4,
    "eliminate_zeros": 5,
    "tril": 6,
    "triu": 7,
}
_NAMES = (
    "make_keys", "mark_heads", "sum_groups", "fill_blocks", "move_columns",
    "point_keys", "put_total", "tell_outside", "mark_values", "move_values", "count_rows", "take_values",
    "inspect", "measure", "compare", "mirror",
)  # fmt: skip
TYPES = {dtype: code for code, dtype in enumerate(NATIVE)}
"""Numbers of the types of values, as sources have them."""

# Values are numbered by 32 bits.
_MAX_VALUES = (1 << 31) - 1
ANY = 1 << 62
"""No limit."""

_Right: TypeAlias = Callable[[tuple[int, int], ArraySpec, ArraySpec], tuple[int, int]]


@attrs.frozen(eq=False)
class Job:
    """A matrix to be made, as in `MadeSpec`; results are addresses.

    Attributes:
        function: The function's name.
        numbers: Rows and columns of the source, followed by other numbers of the function.
        arrays: The source arrays.
        out: Addresses of row pointers, columns and values; zeros if values are only counted.
        limit: The number of values that fit; `ANY` if values are only counted.
        count: Address of an int64 that gets the number of values.
    """

    function: str
    numbers: Ints
    arrays: tuple[ArraySpec, ...]
    out: tuple[int, int, int]
    limit: int
    count: int

    @property
    def is_counted(self) -> bool:
        """Whether values are only counted."""
        return self.limit == ANY


class MakerKernels:
    """The kernels, compiled when the first matrix is made; blocks. The context is current.

    Attributes:
        handle: A handle of cuSPARSE; operations that do not block use another one.
    """

    def __init__(self, device: LibraryDevice) -> None:
        self.handle: int = cusparse.create()
        load, self._architecture = device.kernels.function, device.architecture
        self.functions: dict[str, KernelFunction] = {
            name: load("structures", name, _ARGUMENTS.size) for name in _NAMES
        }
        self.scan: CountScan = CountScan(device.kernels)
        self._sort: RadixSort | None = None

    @property
    def sort(self) -> RadixSort:
        """The sort of keys with a number for each; compiled at its first use.

        Raises:
            NotSupportedError: The package cuda-cccl is missing.
        """
        if self._sort is None:
            architecture = self._architecture
            self._sort = RadixSort(DType.uint64, DType.uint32, descending=False, architecture=architecture)
        return self._sort


class Maker:
    """Makes one matrix, or counts what it will have.

    Args:
        kernels: The kernels that it launches.
        job: The matrix that it makes.
        call: The operation.
        right: Returns the addresses of row pointers and columns, once they are found right; see
            `SparseLibrary._right`.
    """

    def __init__(self, kernels: MakerKernels, job: Job, call: KernelCall, right: _Right) -> None:
        self._kernels, self._job, self._call, self._right = kernels, job, call, right
        self._index, self._dtype = job.arrays[0].dtype, job.arrays[2].dtype
        self._values: dict[str, int] = {
            **dict.fromkeys(_FIELDS, 0),
            "type": TYPES[self._dtype],
            "is_wide": self._index is DType.int64,
            "kind": _KINDS.get(job.function, 0),
            "limit": job.limit,
        }
        self._itemsize = self._dtype.itemsize
        self._out, self._count = job.out, job.count
        self._to = {"out_indices": job.out[1], "out_data": job.out[2]}
        self.rows: int = job.numbers[0]

    def run(self) -> None:
        """Enqueue it."""
        if max(array.size for array in self._job.arrays) > _MAX_VALUES:
            raise self._too_many("values")
        getattr(self, f"_{_WAYS.get(self._job.function, self._job.function)}")()

    def _too_many(self, quantity: str) -> NotSupportedError:
        return NotSupportedError(
            f"{self._job.function}: the CUDA backend supports no matrices of more than {_MAX_VALUES} "
            f"{quantity}",
            backend="cuda",
        )

    def set(self, **values: int) -> None:
        """Set arguments of all kernels that follow."""
        self._values.update(values)

    def launch(self, name: str, items: int, /, **values: int) -> None:
        """Enqueue a kernel for `items` items, with arguments for this launch only."""
        if items:
            arguments = {**self._values, **values}
            self._kernels.functions[name].run(
                self._call.handle, items, _ARGUMENTS, *[arguments[field] for field in _FIELDS]
            )

    def _take(self, shape: Ints, arrays: Any) -> tuple[int, int, int]:
        """Return the addresses of a matrix by rows, after its structure was checked."""
        return *self._right((shape[0], shape[1]), *arrays[:2]), self._call.packed(arrays[2])

    def _read(self, shape: Ints) -> None:
        """Set the addresses of the first matrix, likewise."""
        self.set_matrix(self._take(shape, self._job.arrays))

    def set_matrix(self, addresses: tuple[int, int, int]) -> None:
        """Set the addresses of row pointers, columns and values."""
        self.set(**dict(zip(("indptr", "indices", "data"), addresses, strict=True)))

    def _make_room(self, columns: int, lines: int, count: int) -> None:
        """Set the extents, and take room for keys up to ``columns * lines``, and for their numbers."""
        if columns * lines >= 1 << 63:
            raise NotSupportedError(
                f"{self._job.function}: CUDA cannot make keys for {lines} times {columns} elements",
                backend="cuda",
            )
        self.set(rows=self.rows, columns=self._job.numbers[1])
        self.set(keys=self._call.workspace(2 * count * 8), order=self._call.workspace(2 * count * 4))

    def _sort(self, count: int, bound: int) -> None:
        """Bring keys below `bound` into order, and note where they are."""
        keys, order, half = self._values["keys"], self._values["order"], 0
        if count:
            pairs = (keys, keys + 8 * count), (order, order + 4 * count)
            half = self._kernels.sort(self._call, *pairs, count, max((bound - 1).bit_length(), 1))
        self.set(keys=keys + 8 * count * half, order=order + 4 * count * half)
        # The other half is free now.
        self.set(kept=keys + 8 * count * (1 - half))

    def _scan(self, count: int) -> None:
        """Add the flags up."""
        self.set(places=self._kernels.scan(self._call, self._values["flags"], count))

    def _group(self, count: int) -> None:
        self.set(flags=self._call.workspace(count * 4))
        self.launch("mark_heads", count, count=count)
        self._scan(count)

    def _point(self, count: int, lines: int, step: int, **values: int) -> None:
        """Write row pointers, and how many values there are."""
        arguments = {
            "count": count,
            "rows": lines,
            "step": step,
            "words": self._count,
            "out_indptr": self._out[0],
        }
        self.launch("point_keys", lines + 1, **arguments, **values)

    # ---- by keys

    def _by_rows(self) -> None:
        """Make a matrix, adding up the values of equal places."""
        job, call = self._job, self._call
        (rows, columns), data = job.numbers, job.arrays[2]
        count = data.size
        self._make_room(columns, rows, count)
        if job.function == "coo_to_csr":
            self.set(words=self._words("row", "col"))
            row, col = job.arrays[:2]
            self.set_matrix((call.packed(row), call.packed(col), call.packed(data)))
        elif job.function == "bsr_to_csr":
            height, width = data.shape[1:]
            self._read((rows // height, columns // width))
            self.set(height=height, width=width)
        else:
            self._read(job.numbers)
        self.launch("make_keys", count, count=count)
        if job.function == "coo_to_csr":
            self.launch("tell_outside", 2)
        self._sort(count, rows * columns)
        self._group(count)
        self.launch("sum_groups", count, count=count, first=count, step=columns, **self._to)
        self._point(count, rows, columns)

    def _add(self) -> None:
        job = self._job
        rows, columns = job.numbers
        first, second = (self._take(job.numbers, job.arrays[k : k + 3]) for k in (0, 3))
        sizes = [job.arrays[k].size for k in (2, 5)]
        count = sum(sizes)
        if count > _MAX_VALUES:
            raise self._too_many("values")
        self._make_room(columns, rows, count)
        for (indptr, indices, _), size, start in zip((first, second), sizes, (0, sizes[0]), strict=True):
            self.launch("make_keys", size, count=size, first=start, indptr=indptr, indices=indices)
        self.set(data=first[2], other_data=second[2])
        self._sort(count, rows * columns)
        self._group(count)
        sizes_of = (rows + 1) * self._index.itemsize, count * self._index.itemsize, count * self._itemsize
        pointers, indices, sums = map(self._call.workspace, sizes_of)
        if count:
            # The sums are followed by zeros.
            self._call.stream.set_bytes(sums, 0, count * self._itemsize)
        arguments = {"count": count, "step": columns, "limit": ANY}
        self.launch("sum_groups", count, first=sizes[0], out_indices=indices, out_data=sums, **arguments)
        self.launch("point_keys", rows + 1, out_indptr=pointers, **arguments)
        self._select_sums((pointers, indices, sums), rows, count)

    def _spgemm(self) -> None:
        """Multiply by cuSPARSE, which keeps what cancels out; that is left out here."""
        job, call, dtype = self._job, self._call, self._dtype
        rows, inner, columns = job.numbers
        first = self._take((rows, inner), job.arrays[:3])
        second = self._take((inner, columns), job.arrays[3:])
        sizes = [job.arrays[k].size for k in (2, 5)]
        if not all(sizes):
            # cuSPARSE takes no matrix without values.
            self._write_none(rows)
            return
        handle, kind, (unit, zero) = self._kernels.handle, VALUE_TYPES[dtype], factors(dtype)
        cusparse.set_stream(handle, call.handle)
        pointers = call.workspace((rows + 1) * self._index.itemsize)
        with ExitStack() as undo:
            a = csr(undo, (rows, inner), sizes[0], first, self._index, dtype)
            b = csr(undo, (inner, columns), sizes[1], second, self._index, dtype)
            product = csr(undo, (rows, columns), 0, (pointers, 0, 0), self._index, dtype)
            state = cusparse.sp_gemm_create_descr()
            undo.callback(cusparse.sp_gemm_destroy_descr, state)
            terms = (
                *(handle, AS_IT_IS, AS_IT_IS, unit, a, b, zero, product, kind),
                *(cusparse.SpGEMMAlg.DEFAULT, state),
            )
            room = call.workspace(max(cusparse.sp_gemm_work_estimation(*terms, 0), 1))
            cusparse.sp_gemm_work_estimation(*terms, room)
            nbytes = np.zeros(1, np.uint64)
            cusparse.sp_gemm_compute(*terms, nbytes.ctypes.data, 0)
            cusparse.sp_gemm_compute(*terms, nbytes.ctypes.data, call.workspace(max(int(nbytes[0]), 1)))
            stored = int(cusparse.sp_mat_get_size(product)[2])
            if stored > _MAX_VALUES:
                raise self._too_many("values")
            if not stored:
                self._write_none(rows)
                return
            if job.is_counted:
                counted = call.uploaded(np.array([stored], np.int64))
                call.stream.copy(self._count, counted, 8)
                return
            indices, data = (call.workspace(stored * element.itemsize) for element in (self._index, dtype))
            cusparse.csr_set_pointers(product, pointers, indices, data)
            cusparse.sp_gemm_copy(*terms)
        self._select_sums((pointers, indices, data), rows, stored)

    def _select_sums(self, addresses: tuple[int, int, int], rows: int, count: int) -> None:
        """Write the values of a sum or a product, but for zeros."""
        self.set_matrix(addresses)
        self.set(kind=_KINDS["eliminate_zeros"])
        self._select(rows, count)

    def _write_none(self, rows: int) -> None:
        """Write that nothing is stored."""
        self._call.stream.set_bytes(self._count, 0, 8)
        if not self._job.is_counted:
            self._call.stream.set_bytes(self._out[0], 0, (rows + 1) * self._index.itemsize)

    def _csr_to_csc(self) -> None:
        job = self._job
        columns, count = job.numbers[1], job.arrays[2].size
        self._read(job.numbers)
        self._make_room(columns, 1, count)
        self.launch("make_keys", count, count=count)
        self._sort(count, columns)
        self.launch("move_columns", count, count=count, **self._to)
        self._point(count, columns, 1, kept=self._values["keys"])

    def _csr_to_bsr(self) -> None:
        job, call = self._job, self._call
        rows, columns, height, width = job.numbers
        count = job.arrays[2].size
        self._read(job.numbers)
        lines, step = rows // height, columns // width
        self._make_room(columns, rows, count)
        self.set(height=height, width=width)
        self.launch("make_keys", count, count=count)
        self._sort(count, lines * step)
        self._group(count)
        if job.is_counted:
            self.launch("put_total", 1, count=count, words=self._count)
            return
        if job.limit:
            call.stream.set_bytes(self._out[2], 0, job.limit * height * width * self._itemsize)
        self.launch("fill_blocks", count, count=count, step=step, **self._to)
        self._point(count, lines, step)

    # ---- parts

    def _part(self) -> None:
        rows, _, *numbers = self._job.numbers
        self._read(self._job.numbers)
        # The number of a diagonal, within 64 bits.
        self.set(first=max(-ANY, min(numbers[0], ANY)) if numbers else 0)
        self._select(rows, self._job.arrays[2].size)

    def _select(self, rows: int, count: int) -> None:
        """Write the selected values of a matrix."""
        self.set(rows=rows, flags=self._call.workspace(count * 4), count=count)
        self.launch("mark_values", count)
        self._scan(count)
        self.launch(
            "move_values", max(count, rows + 1), words=self._count, **self._to, out_indptr=self._out[0]
        )

    def _take_rows(self) -> None:
        job, call = self._job, self._call
        self._read(job.numbers)
        indices = job.arrays[3]
        count = indices.size
        chosen = call.workspace_array(DType.int64, (count,))
        call.convert(call.array(indices), chosen)
        self.set(rows=job.numbers[0], count=count)
        self.set(flags=call.workspace(count * 4), list=chosen.address, words=self._words("indices"))
        self.launch("count_rows", count)
        self.launch("tell_outside", 2)
        self._scan(count)
        if job.is_counted:
            self.launch("put_total", 1, words=self._count)
            return
        arguments = {"words": self._count, "out_indptr": self._out[0], **self._to}
        self.launch("take_values", max(job.limit, count + 1), **arguments)

    # ---- what was found wrong

    def _words(self, *names: str) -> int:
        """Return the address of words for indices that lead outside, in arrays of these names."""

        def judge(words: StatusArray) -> None:
            values = words[2:].view(np.int64)
            for name, number, value, limit in zip(names, words, values, self._job.numbers, strict=False):
                if number:
                    raise misplaced(name, int(number) - 1, int(value), limit)

        return self._call.words(6, judge)


_WAYS = {
    "coo_to_csr": "by_rows",
    "bsr_to_csr": "by_rows",
    "sum_duplicates": "by_rows",
    "eliminate_zeros": "part",
    "tril": "part",
    "triu": "part",
}
