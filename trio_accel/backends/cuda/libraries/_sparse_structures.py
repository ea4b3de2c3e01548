"""Structures of sparse matrices: those that were looked at, and matrices that are made of others."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import attrs
import numpy as np
import numpy.typing as npt
from cuda.bindings import driver
from nvmath.bindings import cusparse

from ...base import DType
from ...base.contract.ops import ArraySpec, StatusArray, array_key
from ...base.kit.checks import check_structure
from ...base.kit.kernels import kernel
from ..kit._library import CudaLibrary, Errors, KernelCall, LibraryDevice
from ._sparse_makers import ANY, Job, Maker, MakerKernels

__all__ = ["Structure", "StructureLibrary", "read_words"]

# As in sparse.cu.
_GUARD = struct.Struct("<5Q3qii")
_MOST_STRUCTURES = 256


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
    """A structure that is looked at, and believed once it was found right.

    Attributes:
        blocks: Blocks of its arrays.
        used: How many operations there were before the last one with it.
        is_right: Whether it was found right.
        product: What a product with it needs; None before the first product by cuSPARSE.
    """

    blocks: tuple[int, int]
    used: int
    is_right: bool = False
    product: Any = None


class StructureLibrary(CudaLibrary):
    """Looks at structures, and makes matrices of others."""

    name = "sparse"
    # Its work depends on whether a structure was checked, so most of it cannot be captured.
    is_captured: ClassVar[bool] = False
    errors: ClassVar[Errors] = {cusparse.cuSPARSEError: cusparse.Status}
    refused: ClassVar[frozenset[str]] = frozenset({"INVALID_VALUE", "MATRIX_TYPE_NOT_SUPPORTED"})

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._guard = device.kernels.function("sparse", "guard", _GUARD.size)
        self._seen: dict[tuple[object, ...], Seen] = {}
        self._uses = 0
        self._made_by: MakerKernels | None = None
        # Operations that block are called in threads, one for each stream.
        self._lock = threading.Lock()
        self._solving = threading.Lock()

    # ---- structures that are looked at

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
            self._look(structure, call, (indptr, indices, *safe, words), phase)
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
            self._look(structure, call, (indptr, indices, 0, 0, words), 0)
            judge(read_words(call, words, np.int32))
        return indptr, indices

    def _is_right(self, key: tuple[object, ...]) -> bool:
        seen = self._seen.get(key)
        if seen is None or not seen.is_right:
            return False
        seen.used = self._uses = self._uses + 1
        return True

    def _look(self, structure: Structure, call: KernelCall, addresses: tuple[int, ...], phase: int) -> None:
        count = max(structure.indptr.size, structure.stored)
        values = *addresses, *structure.shape, structure.stored, structure.is_wide
        self._guard.run(call.handle, count, _GUARD, *values, phase)

    def _expect(self, structure: Structure, key: tuple[object, ...]) -> Callable[[StatusArray], None]:
        """Begin a look at a structure; returns what is to be called with its outcome."""
        self._forget_oldest()
        # A write that is launched before the outcome is there takes this out, and the outcome proves nothing.
        seen = self._seen.setdefault(key, Seen(structure.blocks, self._uses))
        for block in structure.blocks:
            self._device.invalidate_with(block, self._invalidate_block)
        return partial(self._judge, structure, seen)

    def _judge(self, structure: Structure, seen: Seen, words: StatusArray) -> None:
        """Note the end of an operation that checked its matrix. May run in a thread of the device."""
        structure.refuse_faulty(words)
        # cuSPARSE can neither be told that more is stored than is used, nor that there is nothing.
        if not words[1:].any() and structure.shape[0] and structure.stored:
            seen.is_right = True

    def _invalidate_block(self, block: int) -> None:
        """Nothing is known of the structures in this block from now on."""
        # A thread of the device may add one meanwhile, of other blocks.
        for key, seen in tuple(self._seen.items()):
            if block in seen.blocks:
                self._forget(key)

    def _forget_oldest(self) -> None:
        # Not where one is added: a thread of the device must not destroy what is in use.
        while len(self._seen) > _MOST_STRUCTURES:
            self._forget(min(tuple(self._seen.items()), key=lambda item: item[1].used)[0])

    def _forget(self, key: tuple[object, ...]) -> None:
        seen = self._seen.pop(key)
        if seen.is_right:
            # A captured graph may go on with this structure, which nobody watches any more.
            self._begin_epoch()
        product = seen.product
        if product is not None:
            product.destroy()

    # ---- matrices that are made

    def _loaded(self) -> MakerKernels:
        """Compile what makes matrices; blocks. The context is current."""
        if self._made_by is None:
            self._made_by = MakerKernels(self._device)
        return self._made_by

    @kernel("sparse.make", backend="cuda", is_blocking=True)
    def _make(self, spec: Any, call: KernelCall) -> None:
        written = spec.indptr, spec.indices, spec.data
        indptr, indices, data = (0 if one is None else call.result(one) for one in written)
        limit, count = ANY if spec.indices is None else spec.indices.size, call.status(spec.count)
        job = Job(spec.function, spec.numbers, spec.arrays, (indptr, indices, data), limit, count)
        with self._lock:
            self._maker(job, call).run()

    def _maker(self, job: Job, call: KernelCall) -> Maker:
        """Return what makes a matrix, or looks at one; blocks. The lock is held."""

        def right(shape: tuple[int, int], indptr: ArraySpec, indices: ArraySpec) -> tuple[int, int]:
            return self._right(Structure(shape, indptr, indices), call)

        return Maker(self._loaded(), job, call, right)

    def _destroy(self) -> None:
        while self._seen:
            self._forget(next(iter(self._seen)))
        if self._made_by is not None:
            self._made_by.scan.close()
            cusparse.destroy(self._made_by.handle)


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
