"""Attention out of products of matrices and kernels for their rows: of every type, and with every option.

The scores of some rows of all heads are in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property, partial
from struct import Struct
from typing import TypeAlias

import attrs
from nvmath.bindings import cublas

from ...base import DType, OutOfRangeError
from ...base.contract.device_array import DeviceArray, broadcast
from ...base.contract.ops import ArraySpec, AttentionGradSpec, AttentionSpec, OperationSpec, StatusArray
from ...base.gpu.driver import with_axes
from ..kit._library import KernelCall, LibraryDevice
from ..runtime._stream import CudaStream
from ._cublas import DEFAULT, HOST, KINDS, Cublas
from ._dnn_base import LANES, DnnKernels, wide, wide_of, wide_result
from ._pooling import first_wrong

__all__ = ["Attention", "AttentionKernels", "Lengths", "Sizes"]

# Scores that are made at a time.
_PIECE = 1 << 24
_TABLE = 3
_ADDED = 2

# As in dnn.cu.
_LENGTHS = Struct("<3Q2q2i")
_BLOCKS = Struct("<4Q4q2i")
_GATHER = Struct("<4Q11q")
_MEANS = Struct("<3Q3q")
_TRUTH = Struct("<2Q2q")
_SCORES = "7Q11qd4i"
_MEND = Struct("<4Q12q")
_FUSED = Struct("<12Q41qd")
_LAYOUTS = {
    "check_lengths": _LENGTHS,
    "check_blocks": _BLOCKS,
    "gather": _GATHER,
    "attention_fused": _FUSED,
    "mask_to_bias": _TRUTH,
    "attention_means": _MEANS,
    "attention_mend": _MEND,
    "attention_weights": with_axes(_SCORES, 2, 0),
    "attention_slopes": with_axes(_SCORES, 2, 0),
}


@attrs.frozen
class Lengths:
    """Addresses of lengths and blocks that are checked, int32 each; 0 where there are none.

    Attributes:
        query: Lengths of the queries.
        key: Lengths of the keys.
        table: Blocks of the keys.
    """

    query: int = 0
    key: int = 0
    table: int = 0


@attrs.frozen
class Sizes:
    """Extents of an attention.

    Attributes:
        stack: The leading axes.
        heads: Heads of the queries.
        served: Heads of the keys.
        rows: Queries.
        columns: Keys.
        e: Elements of a query.
        f: Elements of a value.
        block: Keys of a block; 0 where there are no blocks.
    """

    stack: tuple[int, ...]
    heads: int
    served: int
    rows: int
    columns: int
    e: int
    f: int
    block: int

    @classmethod
    def of(cls, spec: AttentionSpec | AttentionGradSpec) -> Sizes:
        """Read them off a specification."""
        query, key = _headed(spec.query), _headed(spec.key)
        table = spec.block_table if isinstance(spec, AttentionSpec) else None
        columns, block = (key[-2], 0) if table is None else (key[-2] * table.shape[-1], key[-2])
        return cls(query[:-3], query[-3], key[-3], query[-2], columns, query[-1], spec.value.shape[-1], block)

    @property
    def sequences(self) -> int:
        """How many sequences there are."""
        return math.prod(self.stack)

    @property
    def batches(self) -> int:
        """How many products there are of a kind: one for each head of the keys."""
        return self.sequences * self.served

    @property
    def lines(self) -> int:
        """Rows of each of these: the queries of all heads that a head of the keys serves."""
        return self.heads // self.served * self.rows if self.served else 0


def _headed(array: ArraySpec) -> tuple[int, ...]:
    """Return the shape with an axis for the heads."""
    return array.shape if array.ndim > 2 else (1, *array.shape)


class AttentionKernels(DnnKernels):
    """Checks of lengths, and the attention out of products.

    Attributes:
        blas: cuBLAS, once products are loaded.
    """

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self.blas: Cublas | None = None

    def captures(self, spec: OperationSpec) -> bool:
        """See `EnqueuingLibrary.captures`: lengths that are checked are looked at on the host."""
        if isinstance(spec, (AttentionSpec, AttentionGradSpec)):
            return spec.query_lengths is None and spec.key_lengths is None
        return super().captures(spec)

    def attach(self, stream: CudaStream) -> None:
        """Take the workspace of cuBLAS; see `EnqueuingLibrary.attach`."""
        if self.blas is not None:
            self.blas.select(stream, HOST)

    def _destroy(self) -> None:
        if self.blas is not None:
            self.blas.destroy()
        super()._destroy()

    def _load_checks(self) -> None:
        """Load the kernels; blocks."""
        for name, layout in _LAYOUTS.items():
            self._load(name, layout)

    def _load_products(self, dtype: DType) -> None:
        """Load the kernels, and products of a type; blocks."""
        self._load_checks()
        if self.blas is None:
            self.blas = Cublas(self._device, self.name)
        self.blas.warm(KINDS[wide_of(dtype)])

    def check_lengths(
        self, spec: AttentionSpec | AttentionGradSpec, sizes: Sizes, call: KernelCall
    ) -> Lengths:
        """Have lengths and blocks checked, and copies made that lead nowhere outside."""
        table = spec.block_table if isinstance(spec, AttentionSpec) else None
        given = (spec.query_lengths, sizes.rows), (spec.key_lengths, sizes.columns)
        if all(lengths is None or not lengths.size for lengths, _ in given):
            return Lengths()
        blocks = 0 if table is None else spec.key.shape[0]
        words = call.words(3, partial(_judge, (sizes.rows, sizes.columns, blocks)))
        found = [0, 0]
        for number, (lengths, most) in enumerate(given):
            if lengths is not None:
                found[number] = call.workspace(4 * lengths.size)
                is_wide = lengths.dtype is DType.int64
                values = call.packed(lengths), found[number], words, lengths.size, most, is_wide, number + 1
                self.launch("check_lengths", call, lengths.size, *values)
        if table is None or not table.size:
            return Lengths(found[0], found[1])
        safe, is_wide = call.workspace(4 * table.size), table.dtype is DType.int64
        self.launch(
            *("check_blocks", call, table.size, call.packed(table), found[1], safe, words, table.size),
            *(table.shape[1], sizes.block, blocks, is_wide, _TABLE),
        )
        return Lengths(found[0], found[1], safe)

    def _compute_attention(self, spec: AttentionSpec, call: KernelCall) -> None:
        """Enqueue an attention out of products."""
        of = Attention(self, spec, call)
        sizes = of.sizes
        if not sizes.batches * sizes.lines:
            return
        query, key, value = of.rows(spec.query), of.keys(spec.key), of.keys(spec.value)
        logs = call.workspace(sizes.batches * sizes.lines * of.wide.itemsize)
        with wide_result(call, spec.out) as out:
            for piece in of.pieces():
                scores = of.scores(query, key, piece)
                of.launch("attention_weights", scores, 0, 0, logs, piece)
                to, weights = piece.of_all(out, sizes.f), piece.own(scores, sizes.columns)
                of.weigh("NN", (sizes.f, piece.count, sizes.columns), of.served(value, sizes.f), weights, to)
        if spec.lse is not None:
            shape = spec.query.shape[:-1]
            call.convert(DeviceArray.packed(logs, of.wide, shape), call.array(spec.lse))

    def _compute_attention_grad(self, spec: AttentionGradSpec, call: KernelCall) -> None:
        """Enqueue the gradients of an attention out of products."""
        of = Attention(self, spec, call)
        sizes = of.sizes
        if not sizes.batches * sizes.lines:
            for array in (spec.grad_query, spec.grad_key, spec.grad_value):
                call.fill(array, 0)
            return
        query, key, value = of.rows(spec.query), of.keys(spec.key), of.keys(spec.value)
        grad, out, logs = of.rows(spec.grad), of.rows(spec.out), call.packed(spec.lse)
        lines, columns, e, f = sizes.batches * sizes.lines, sizes.columns, sizes.e, sizes.f
        means = call.workspace(lines * of.wide.itemsize)
        self.launch(
            *("attention_means", call, lines * LANES, grad, out, means, lines, sizes.f),
            of.wide is DType.float64,
        )
        with (
            wide_result(call, spec.grad_query) as to_query,
            wide_result(call, spec.grad_key) as to_key,
            wide_result(call, spec.grad_value) as to_value,
        ):
            room = 0
            for array, place in ((spec.grad_key, to_key), (spec.grad_value, to_value)):
                call.fill(DeviceArray.packed(place, of.wide, array.shape), 0)
            for piece in of.pieces():
                scores = of.scores(query, key, piece)
                room = room or of.room()
                weights, slopes = (piece.own(one, columns) for one in (scores, room))
                of.multiply(
                    "TN", (columns, piece.count, f), of.served(value, f), piece.of_all(grad, f), slopes
                )
                of.launch("attention_slopes", scores, room, means, logs, piece)
                for left, right, place, width in ((weights, grad, to_value, f), (slopes, query, to_key, e)):
                    extents, added = (width, columns, piece.count), of.served(place, width)
                    of.weigh("NT", extents, piece.of_all(right, width), left, added)
                made = piece.of_all(to_query, e)
                of.weigh("NN", (e, piece.count, columns), of.served(key, e), slopes, made)


_Matrices: TypeAlias = tuple[int, int, int]
"""Address of the first one, its leading dimension, and elements from one to the next."""


@attrs.frozen
class _Piece:
    """Some rows of each head of keys.

    Attributes:
        first: The first one.
        count: How many there are.
        lines: How many there are in all.
        itemsize: Bytes of an element.
    """

    first: int
    count: int
    lines: int
    itemsize: int

    def of_all(self, address: int, width: int) -> _Matrices:
        """Take these rows out of an array that has all."""
        return address + self.first * width * self.itemsize, max(1, width), self.lines * width

    def own(self, address: int, width: int) -> _Matrices:
        """Take an array that has these rows alone."""
        return address, max(1, width), self.count * width


class Attention:
    """One attention: its arrays without gaps, and products of them.

    Attributes:
        sizes: Its extents.
        wide: The type that it is computed in.
        lengths: Addresses of its lengths.
    """

    def __init__(
        self, kernels: AttentionKernels, spec: AttentionSpec | AttentionGradSpec, call: KernelCall
    ) -> None:
        self.sizes = Sizes.of(spec)
        self.wide = wide_of(spec.query.dtype)
        self._kernels, self._spec, self._call = kernels, spec, call
        self.lengths = kernels.check_lengths(spec, self.sizes, call)
        self._kind = KINDS[self.wide]
        self._most = max(1, _PIECE // max(1, self.sizes.batches * self.sizes.columns))
        self._scores = self._sums = 0

    @cached_property
    def _mask(self) -> DeviceArray | None:
        """The mask with all axes, of truth values or of the wide type; None for none."""
        sizes, call, mask = self.sizes, self._call, self._spec.mask
        if mask is None:
            return None
        given = call.array(mask)
        if mask.dtype.is_half:
            room = call.workspace_array(self.wide, mask.shape)
            call.convert(given, room)
            given = room
        return broadcast(given, (*sizes.stack, sizes.heads, sizes.rows, sizes.columns))

    def rows(self, array: ArraySpec) -> int:
        """Return the address of queries, or of what is like them."""
        return self._gathered(array, self.lengths.query, 0, self.sizes.rows)

    def keys(self, array: ArraySpec) -> int:
        """Return the address of keys or values."""
        return self._gathered(array, self.lengths.key, self.lengths.table, self.sizes.columns)

    def _gathered(self, array: ArraySpec, lengths: int, table: int, rows: int) -> int:
        """Return the address of rows without gaps in the wide type, with zeros behind their lengths."""
        call = self._call
        if not lengths:
            return wide(call, array)
        made = self.gathered(array, lengths, table, rows)
        if not array.dtype.is_half:
            return made.address
        room = call.workspace_array(self.wide, made.shape)
        call.convert(made, room)
        return room.address

    def gathered(self, array: ArraySpec, lengths: int, table: int, rows: int) -> DeviceArray:
        """Copy rows without gaps, out of blocks if need be, with zeros behind their lengths."""
        call, n = self._call, self.sizes.sequences
        source, heads, width = call.array(array), _headed(array)[-3], array.shape[-1]
        if len(source.shape) != 4:
            source = DeviceArray.packed(call.packed(array), array.dtype, (n, heads, rows, width))
        made = call.workspace_array(array.dtype, (n, heads, rows, width))
        block = source.shape[2]
        self._kernels.launch(
            *("gather", call, made.size, source.address, made.address, lengths, table, made.size),
            *(heads, rows, width, block, rows // max(1, block), *source.strides, array.dtype.itemsize),
        )
        return made

    def pieces(self) -> Iterator[_Piece]:
        """Cut the rows of each head of keys into pieces."""
        lines = self.sizes.lines
        for first in range(0, lines, self._most):
            yield _Piece(first, min(self._most, lines - first), lines, self.wide.itemsize)

    def served(self, address: int, width: int) -> _Matrices:
        """Take keys, or what is like them, as matrices."""
        return address, max(1, width), self.sizes.columns * width

    def room(self) -> int:
        """Return the address of workspace for the scores of a piece."""
        count = self.sizes.batches * min(self._most, self.sizes.lines) * self.sizes.columns
        return self._call.workspace(max(1, count) * self.wide.itemsize)

    def scores(self, query: int, key: int, piece: _Piece) -> int:
        """Multiply queries by keys; returns the address of the scores."""
        self._scores = self._scores or self.room()
        columns, e = self.sizes.columns, self.sizes.e
        to, extents = piece.own(self._scores, columns), (columns, piece.count, e)
        self.multiply("TN", extents, self.served(key, e), piece.of_all(query, e), to, self._spec.scale)
        return self._scores

    def weigh(
        self,
        letters: str,
        extents: tuple[int, int, int],
        values: _Matrices,
        weights: _Matrices,
        to: _Matrices,
    ) -> None:
        """Multiply as `multiply` does, where a weight of zero takes nothing: not of infinity or NaN, either.

        Products of transposed weights, one for each key, are added to what is there.
        """
        (width, rows, terms), is_added = extents, letters == "NT"
        made, batches = to, self.sizes.batches
        if not (batches and rows and width):
            return
        if is_added:
            widest = max(self.sizes.e, self.sizes.f)
            self._sums = self._sums or self._call.workspace(
                max(1, batches * rows * widest) * self.wide.itemsize
            )
            made = self._sums, to[1], rows * width
        self.multiply(letters, extents, values, weights, made)
        steps = (1, weights[1]) if is_added else (weights[1], 1)
        self._kernels.launch(
            *("attention_mend", self._call, batches * rows * width, weights[0], values[0], made[0], to[0]),
            *(batches * rows * width, rows, width, terms, *steps, weights[2], values[2], made[2], to[2]),
            *(is_added, self.wide is DType.float64),
        )

    def multiply(
        self,
        letters: str,
        extents: tuple[int, int, int],
        a: _Matrices,
        b: _Matrices,
        c: _Matrices,
        alpha: float = 1,
    ) -> None:
        """Enqueue products, one for each head of keys, by cuBLAS, to which matrices are by columns.

        Args:
            letters: For a and b, whether it is transposed.
            extents: To cuBLAS: rows, columns and terms.
            a: The left matrices.
            b: The right matrices.
            c: The results.
            alpha: Factor of the products.
        """
        blas, kind = self._kernels.blas, self._kind
        if not (extents[0] and extents[1]):
            return
        assert blas is not None
        blas.select(self._call.stream, HOST)
        blas.factors.put(kind, alpha, 0)
        op_a, op_b = ["NT".index(one) for one in letters]
        (first, lda, step_a), (second, ldb, step_b), (out, ldc, step_c) = a, b, c
        cublas.gemm_strided_batched_ex_64(
            blas.handle, op_a, op_b, *extents, blas.factors.alpha, first, kind.code, lda, step_a, second,
            kind.code, ldb, step_b, blas.factors.beta, out, kind.code, ldc, step_c, self.sizes.batches,
            kind.compute, DEFAULT,
        )  # fmt: skip

    def launch(self, name: str, scores: int, slopes: int, means: int, logs: int, piece: _Piece) -> None:
        """Launch a kernel over the rows of a piece."""
        sizes, spec, mask, lengths = self.sizes, self._spec, self._mask, self.lengths
        strides = (0,) * (len(sizes.stack) + 3) if mask is None else mask.strides
        kind = 0 if mask is None else 1 if mask.dtype is DType.bool else _ADDED
        rows, shape = sizes.batches * piece.count, (*sizes.stack, sizes.heads)
        self._kernels.launch(
            name, self._call, rows * LANES, scores, slopes, means, logs, 0 if mask is None else mask.address,
            lengths.query, lengths.key, rows, piece.count, piece.first, sizes.rows, sizes.columns,
            sizes.heads // sizes.served, sizes.served, spec.left, spec.right, *strides[-2:], spec.scale,
            self.wide is DType.float64, spec.alignment == "lower_right", kind, len(shape), *shape,
            *strides[:-2], layout=with_axes(_SCORES, 2, len(shape)),
        )  # fmt: skip


def _judge(mosts: tuple[int, int, int], words: StatusArray) -> None:
    """Refuse the first length or block that a kernel has found wrong."""
    if not words[0]:
        return
    number, most = first_wrong(words), mosts[int(words[0]) - 1]
    if words[0] == _TABLE:
        argument, text = "block_table", f"there is no block {number} of {most}"
    else:
        argument = ("query_lengths", "key_lengths")[int(words[0]) - 1]
        text = f"{number} is no length of an axis of {most}"
    raise OutOfRangeError(f"{argument}: {text}", library="dnn", index=number, axis=0, length=most)
