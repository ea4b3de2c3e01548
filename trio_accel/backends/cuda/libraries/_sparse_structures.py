"""Sparse matrices that are made of others: keys that are sorted by CUB, and kernels of the backend's own.

cuSPARSE's conversions and products take indices of int32 alone, and keep what cancels out. A key is the place
of a value, row by row. Once keys are in order, equal ones are neighbours: one way for all functions (D166).
"""

from __future__ import annotations

import ctypes
import struct
import threading
from functools import partial
from typing import Any, ClassVar

import attrs
import numpy as np
import numpy.typing as npt
from cuda.bindings import driver
from nvmath.bindings import cusparse

from ...base import DType, LibraryError, NotSupportedError
from ...base.checks import NATIVE, check_structure
from ...base.gpu.driver import Function
from ...base.gpu.primitives import CountScan
from ...base.kernels import kernel
from ...base.ops import ArraySpec, StatusArray, array_key
from ..kit._library import CudaLibrary, Errors, KernelCall, LibraryDevice
from ._radix_sort import RadixSort

__all__ = ["TYPES", "Structure", "StructureLibrary", "read_words"]

# As in sparse.cu.
_GUARD = struct.Struct("<5Q3qii")
# As in structures.cu.
_FIELDS = (
    "indptr", "indices", "data", "other_indptr", "other_indices", "other_data", "out_indptr", "out_indices",
    "out_data", "keys", "kept", "order", "flags", "places", "list", "words", "count", "rows", "columns",
    "height", "width", "first", "limit", "step", "type", "is_wide", "kind",
)  # fmt: skip
_ARGUMENTS = struct.Struct("<16Q8q3i4x")
_KINDS = {
    "sum_duplicates": 0, "coo_to_csr": 1, "csr_to_csc": 2, "bsr_to_csr": 3, "csr_to_bsr": 4,
    "eliminate_zeros": 5, "tril": 6, "triu": 7,
}  # fmt: skip
_NAMES = (
    "make_keys", "mark_heads", "sum_groups", "mark_sums", "move_sums", "fill_blocks", "move_columns",
    "point_keys", "put_total", "tell_outside", "mark_values", "move_values", "count_rows", "take_values",
    "make_products",
)  # fmt: skip
TYPES = {dtype: code for code, dtype in enumerate(NATIVE)}
"""Numbers of the types of values, as sources have them."""

_MOST_STRUCTURES = 256
# Values are numbered by 32 bits.
_MOST = (1 << 31) - 1
_ANY = 1 << 62


@attrs.frozen(eq=False)
class Structure:
    """Where the values of a matrix of compressed rows are.

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
        """How many values are stored."""
        return int(self.indices.size)

    @property
    def is_wide(self) -> bool:
        """Whether indices are of 64 bits."""
        return self.indptr.dtype is DType.int64

    @property
    def key(self) -> tuple[object, ...]:
        """What distinguishes it from others: the places of its arrays."""
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
class Seen:
    """A structure that was found right.

    Attributes:
        blocks: Blocks of its arrays.
        used: How many operations there were before the last one with it.
        product: What a product with it needs; None before the first product by cuSPARSE.
    """

    blocks: tuple[int, int]
    used: int
    product: Any = None


class _Kernels:
    """What is compiled when the first matrix is made; blocks. The context is current."""

    def __init__(self, device: LibraryDevice) -> None:
        load, self._architecture = device.kernels.function, device.architecture
        self.functions: dict[str, Function] = {
            name: load("structures", name, _ARGUMENTS.size) for name in _NAMES
        }
        self.scan: CountScan = CountScan(device.kernels)
        self._sort: RadixSort | None = None

    @property
    def sort(self) -> RadixSort:
        """What sorts keys with numbers beside them; compiled when that is used first.

        Raises:
            NotSupportedError: The package cuda-cccl is not there.
        """
        if self._sort is None:
            architecture = self._architecture
            self._sort = RadixSort(DType.uint64, DType.uint32, descending=False, architecture=architecture)
        return self._sort


class StructureLibrary(CudaLibrary):
    """Looks at structures, and makes matrices of others."""

    name = "sparse"
    # Its work depends on whether a structure was checked, so it cannot be captured.
    is_captured: ClassVar[bool] = False
    errors: ClassVar[Errors] = {cusparse.cuSPARSEError: cusparse.Status}
    refused: ClassVar[frozenset[str]] = frozenset({"INVALID_VALUE", "MATRIX_TYPE_NOT_SUPPORTED"})

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._guard = device.kernels.function("sparse", "guard", _GUARD.size)
        self._seen: dict[tuple[object, ...], Seen] = {}
        self._uses = 0
        self._made_by: _Kernels | None = None
        # Operations that block are called in threads, one for each stream.
        self._lock = threading.Lock()

    # ---- structures that are looked at

    def _harmless(self, structure: Structure, call: KernelCall, *, forgets: bool = True) -> tuple[int, int]:
        """Return addresses of row pointers and columns that lead nowhere outside.

        Those of the matrix, if it was found right. Otherwise copies that a kernel makes: of the structure, or
        of a harmless one, and then the operation fails (D104).

        Args:
            structure: The structure.
            call: The operation.
            forgets: Whether older ones may make way: not in a thread, which others do not wait for.
        """
        indptr, indices = call.packed(structure.indptr), call.packed(structure.indices)
        key = ("harmless", *structure.key)
        seen = self._seen.get(key)
        if seen is not None:
            seen.used = self._uses = self._uses + 1
            return indptr, indices
        if forgets:
            self._forget_oldest()
        words = call.words(1, partial(self._judge, structure, key))
        size = structure.indptr.dtype.itemsize
        safe = call.workspace(structure.indptr.size * size), call.workspace(structure.stored * size)
        count = max(structure.indptr.size, structure.stored)
        values = indptr, indices, *safe, words, *structure.shape, structure.stored, structure.is_wide
        for phase in range(2):
            self._guard.run(call.handle, count, _GUARD, *values, phase)
        return safe

    def _judge(self, structure: Structure, key: tuple[object, ...], words: StatusArray) -> None:
        """Note the end of an operation that checked its matrix. May run in a thread of the device."""
        structure.refuse_faulty(words)
        # cuSPARSE can neither be told that more is stored than is used, nor that there is nothing.
        if not words[1:].any() and structure.shape[0] and structure.stored:
            self._seen.setdefault(key, Seen(structure.blocks, self._uses))
            for block in structure.blocks:
                self._device.invalidate_with(block, self._invalidate_block)

    def _invalidate_block(self, block: int) -> None:
        """Other arrays, which were not checked, may be in these blocks from now on."""
        # A thread of the device may add one meanwhile, of other blocks.
        for key, seen in tuple(self._seen.items()):
            if block in seen.blocks:
                self._forget(key)

    def _forget_oldest(self) -> None:
        # Not where one is added: a thread of the device must not destroy what is in use.
        while len(self._seen) > _MOST_STRUCTURES:
            self._forget(min(tuple(self._seen.items()), key=lambda item: item[1].used)[0])

    def _forget(self, key: tuple[object, ...]) -> None:
        product = self._seen.pop(key).product
        if product is not None:
            product.destroy()

    # ---- matrices that are made

    def _loaded(self) -> _Kernels:
        """Compile what makes matrices; blocks. The context is current."""
        if self._made_by is None:
            self._made_by = _Kernels(self._device)
        return self._made_by

    @kernel("sparse.make", backend="cuda", is_blocking=True)
    def _make(self, spec: Any, call: KernelCall) -> None:
        with self._lock:
            _Maker(self._loaded(), spec, call, self._harmless).run()

    def _destroy(self) -> None:
        while self._seen:
            self._forget(next(iter(self._seen)))
        if self._made_by is not None:
            self._made_by.scan.close()


class _Maker:
    """Makes one matrix, or counts what it will have.

    Args:
        kernels: What it launches.
        spec: The operation.
        call: The same, as it is launched.
        harmless: See `StructureLibrary._harmless`.
    """

    def __init__(self, kernels: _Kernels, spec: Any, call: KernelCall, harmless: Any) -> None:
        self._kernels, self._spec, self._call, self._harmless = kernels, spec, call, harmless
        index, values = spec.arrays[0], spec.arrays[2]
        self._values: dict[str, int] = {
            **dict.fromkeys(_FIELDS, 0),
            "type": TYPES[values.dtype],
            "is_wide": index.dtype is DType.int64,
            "kind": _KINDS.get(spec.function, 0),
            "limit": _ANY if spec.indices is None else spec.indices.size,
        }
        self._itemsize = values.dtype.itemsize
        # Where results go.
        self._out = [0 if one is None else call.result(one) for one in (spec.indptr, spec.indices, spec.data)]

    def run(self) -> None:
        """Enqueue it."""
        spec, call = self._spec, self._call
        self._count = call.status(spec.count)
        if max(array.size for array in spec.arrays) > _MOST:
            raise self._too_many("values")
        getattr(self, f"_{_WAYS.get(spec.function, spec.function)}")()

    def _too_many(self, what: str) -> NotSupportedError:
        return NotSupportedError(
            f"{self._spec.function}: the CUDA backend has no matrices of more than {_MOST} {what}",
            backend="cuda",
        )

    def _set(self, **values: int) -> None:
        self._values.update(values)

    def _launch(self, name: str, items: int, /, **values: int) -> None:
        """Enqueue a kernel for so many items; these arguments are for it alone."""
        if items:
            told = {**self._values, **values}
            self._kernels.functions[name].run(
                self._call.handle, items, _ARGUMENTS, *[told[field] for field in _FIELDS]
            )

    def _take(self, shape: tuple[int, int], arrays: Any) -> tuple[int, int, int]:
        """Return the addresses of a matrix of rows, which lead nowhere outside."""
        structure = Structure(shape, arrays[0], arrays[1])
        return *self._harmless(structure, self._call, forgets=False), self._call.packed(arrays[2])

    def _keys(self, columns: int, lines: int, count: int) -> tuple[int, int]:
        """Take room for keys, that of numbers up to ``columns * lines``, and their numbers."""
        if columns * lines >= 1 << 63:
            raise NotSupportedError(
                f"{self._spec.function}: the CUDA backend has no keys for {lines} times {columns} elements",
                backend="cuda",
            )
        return self._call.workspace(2 * count * 8), self._call.workspace(2 * count * 4)

    def _sort(self, room: tuple[int, int], count: int, most: int) -> None:
        """Bring keys below `most` into order, and note where they are."""
        (keys, order), found = room, 0
        if count:
            pairs = (keys, keys + 8 * count), (order, order + 4 * count)
            found = self._kernels.sort(self._call, *pairs, count, max((most - 1).bit_length(), 1))
        self._set(keys=keys + 8 * count * found, order=order + 4 * count * found)
        # The other half is free now.
        self._set(kept=keys + 8 * count * (1 - found))

    def _scan(self, count: int) -> int:
        """Add the flags up."""
        places = self._kernels.scan(self._call, self._values["flags"], count)
        self._set(places=places)
        return places

    def _group(self, count: int) -> None:
        self._set(flags=self._call.workspace(count * 4))
        self._launch("mark_heads", count, count=count)
        self._scan(count)

    def _point(self, count: int, lines: int, step: int, **values: int) -> None:
        """Write row pointers, and how many values there are."""
        told = {"count": count, "rows": lines, "step": step, "words": self._count, "out_indptr": self._out[0]}
        self._launch("point_keys", lines + 1, **told, **values)

    # ---- by keys

    def _by_rows(self) -> None:
        """Make a matrix whose values of one place are added up."""
        spec, call = self._spec, self._call
        rows, columns = spec.numbers
        indptr, indices, data = spec.arrays[:3]
        count = data.size
        room = self._keys(columns, rows, count)
        self._set(rows=rows, columns=columns, keys=room[0], order=room[1])
        if spec.function == "coo_to_csr":
            places, words = (
                [call.packed(one) for one in (indptr, indices)],
                self._words("row", "col"),
            )
            self._set(words=words)
            addresses = *places, call.packed(data)
        elif spec.function == "bsr_to_csr":
            height, width = data.shape[1:]
            addresses = self._take((rows // height, columns // width), spec.arrays)
            self._set(height=height, width=width)
        else:
            addresses = self._take((rows, columns), spec.arrays)
        self._set(**dict(zip(("indptr", "indices", "data"), addresses, strict=True)))
        self._launch("make_keys", count, count=count)
        if spec.function == "coo_to_csr":
            self._launch("tell_outside", 2)
        self._sum(room, count, rows, columns)

    def _sum(self, room: tuple[int, int], count: int, rows: int, columns: int) -> None:
        """Add values of one key up, and write the matrix."""
        self._sort(room, count, rows * columns)
        self._group(count)
        told = {"count": count, "first": count, "step": columns}
        self._launch("sum_groups", count, **told, out_indices=self._out[1], out_data=self._out[2])
        self._point(count, rows, columns)

    def _add(self) -> None:
        spec = self._spec
        rows, columns = spec.numbers
        first, second = (self._take(spec.numbers, spec.arrays[k : k + 3]) for k in (0, 3))
        sizes = [spec.arrays[k].size for k in (2, 5)]
        count = sum(sizes)
        if count > _MOST:
            raise self._too_many("values")
        room = self._keys(columns, rows, count)
        self._set(rows=rows, columns=columns, keys=room[0], order=room[1])
        for (indptr, indices, _), size, start in zip((first, second), sizes, (0, sizes[0]), strict=True):
            self._launch("make_keys", size, count=size, first=start, indptr=indptr, indices=indices)
        self._set(data=first[2], other_data=second[2])
        self._sort(room, count, rows * columns)
        self._sum_without_zeros(count, sizes[0], rows, columns)

    def _sum_without_zeros(self, count: int, first: int, rows: int, columns: int) -> None:
        """Add values of keys in order up, and write what is not zero."""
        self._group(count)
        sums, keys, kept = (
            self._call.workspace(count * self._itemsize),
            self._values["keys"],
            self._values["kept"],
        )
        self._launch("sum_groups", count, count=count, first=first, step=columns, out_data=sums, limit=_ANY)
        self._launch("mark_sums", count, count=count, data=sums)
        self._scan(count)
        # The keys of groups are in the other half; those of what is left go where all were.
        told = {"count": count, "data": sums, "keys": kept, "kept": keys, "step": columns}
        self._launch("move_sums", count, **told, out_indices=self._out[1], out_data=self._out[2])
        self._point(count, rows, columns, kept=keys)

    def _spgemm(self) -> None:
        spec, call = self._spec, self._call
        rows, inner, columns = spec.numbers
        first, second = (
            self._take((rows, inner), spec.arrays[:3]),
            self._take((inner, columns), spec.arrays[3:]),
        )
        stored = spec.arrays[2].size
        self._set(**dict(zip(("indptr", "indices", "data"), first, strict=True)), rows=rows, columns=columns)
        self._set(**dict(zip(("other_indptr", "other_indices", "other_data"), second, strict=True)))
        self._set(flags=call.workspace(stored * 4))
        self._launch("count_rows", stored, count=stored)
        places = self._scan(stored)
        count = int(read_words(call, places + 8 * stored, np.uint64)[0])
        if count > _MOST:
            raise self._too_many("products of pairs")
        room, is_counted = self._keys(columns, rows, count), spec.indices is None
        products = 0 if is_counted else call.workspace(count * self._itemsize)
        told = {"count": count, "limit": stored, "keys": room[0], "order": room[1], "out_data": products}
        self._launch("make_products", count, **told)
        self._sort(room, count, rows * columns)
        if is_counted:
            self._group(count)
            self._launch("put_total", 1, count=count, words=self._count)
            return
        self._set(data=products)
        self._sum_without_zeros(count, count, rows, columns)

    def _csr_to_csc(self) -> None:
        spec = self._spec
        rows, columns = spec.numbers
        count = spec.arrays[2].size
        indptr, indices, data = self._take(spec.numbers, spec.arrays)
        room = self._keys(columns, 1, count)
        self._set(rows=rows, columns=columns, keys=room[0], order=room[1])
        self._set(indptr=indptr, indices=indices, data=data)
        self._launch("make_keys", count, count=count)
        self._sort(room, count, columns)
        self._launch("move_columns", count, count=count, out_indices=self._out[1], out_data=self._out[2])
        self._point(count, columns, 1, kept=self._values["keys"])

    def _csr_to_bsr(self) -> None:
        spec, call = self._spec, self._call
        rows, columns, height, width = spec.numbers
        count = spec.arrays[2].size
        indptr, indices, data = self._take((rows, columns), spec.arrays)
        room, (lines, step) = self._keys(columns, rows, count), (rows // height, columns // width)
        self._set(rows=rows, columns=columns, height=height, width=width, keys=room[0], order=room[1])
        self._set(indptr=indptr, indices=indices, data=data)
        self._launch("make_keys", count, count=count)
        self._sort(room, count, lines * step)
        self._group(count)
        if spec.indices is None:
            self._launch("put_total", 1, count=count, words=self._count)
            return
        if spec.data.size:
            call.stream.set_bytes(self._out[2], 0, spec.data.size * self._itemsize)
        told = {"count": count, "step": step, "out_indices": self._out[1], "out_data": self._out[2]}
        self._launch("fill_blocks", count, **told)
        self._point(count, lines, step)

    # ---- parts

    def _part(self) -> None:
        spec = self._spec
        rows, columns, *numbers = spec.numbers
        count = spec.arrays[2].size
        indptr, indices, data = self._take((rows, columns), spec.arrays)
        self._set(indptr=indptr, indices=indices, data=data, rows=rows, columns=columns)
        self._set(flags=self._call.workspace(count * 4), count=count)
        self._launch("mark_values", count, first=_clipped(numbers[0]) if numbers else 0)
        self._scan(count)
        told = dict(zip(("out_indptr", "out_indices", "out_data"), self._out, strict=True))
        self._launch("move_values", max(count, rows + 1), words=self._count, **told)

    def _take_rows(self) -> None:
        spec, call = self._spec, self._call
        indptr, indices, data = self._take(spec.numbers, spec.arrays)
        wanted = spec.arrays[3]
        count = wanted.size
        chosen = call.workspace_array(DType.int64, (count,))
        call.convert(call.array(wanted), chosen)
        self._set(indptr=indptr, indices=indices, data=data, rows=spec.numbers[0], count=count)
        self._set(flags=call.workspace(count * 4), list=chosen.address, words=self._words("indices"))
        self._launch("count_rows", count)
        self._launch("tell_outside", 2)
        self._scan(count)
        if spec.indices is None:
            self._launch("put_total", 1, words=self._count)
            return
        told = dict(zip(("out_indptr", "out_indices", "out_data"), self._out, strict=True))
        self._launch("take_values", max(spec.indices.size, count + 1), words=self._count, **told)

    # ---- what was found wrong

    def _words(self, *names: str) -> int:
        """Return the address of words for indices that lead outside, in arrays of these names."""

        def judge(words: StatusArray) -> None:
            values = words[2:].view(np.int64)
            for name, number, value, limit in zip(names, words, values, self._spec.numbers, strict=False):
                if number:
                    raise LibraryError(
                        f"{name}[{number - 1}] is {value}; it must be from 0 to {limit - 1}",
                        library="sparse",
                        code="invalid_value",
                    )

        return self._call.words(6, judge)


_WAYS = {
    "coo_to_csr": "by_rows", "bsr_to_csr": "by_rows", "sum_duplicates": "by_rows",
    "eliminate_zeros": "part", "tril": "part", "triu": "part",
}  # fmt: skip


def _clipped(number: int) -> int:
    """Take the number of a diagonal to 64 bits."""
    return max(-_ANY, min(number, _ANY))


def read_words(call: KernelCall, address: int, dtype: Any, count: int = 1) -> npt.NDArray[Any]:
    """Wait for what is enqueued, and read some numbers; blocks.

    Raises:
        ContextPoisonedError: The context is lost.
        RuntimeError: The stream is closed.
    """
    stream, made, pinned = call.stream, np.empty(count, dtype), call.device.pinned
    stream.check()
    host = pinned.take(made.nbytes)
    stream.copy_out(host, address, made.nbytes)
    call.device.context.check(driver.cuStreamSynchronize(stream.handle))
    ctypes.memmove(made.ctypes.data, host, made.nbytes)
    pinned.give_back(made.nbytes, host)
    return made
