"""Attention by one kernel of cuDNN, or by matrix products and kernels for their rows if cuDNN lacks a kernel.

The products take every type and every option. Scores are in memory for some rows of all heads at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any, TypeAlias

import attrs
from nvmath.bindings import cublas

from ...base import DType, Ints, kernel, no_length
from ...base.contract.device_array import DeviceArray, broadcast
from ...base.contract.ops import ArraySpec, AttentionGradSpec, AttentionSpec, OperationSpec, StatusArray
from ...base.gpu.driver import with_axes
from ..kit._library import KernelCall, LibraryDevice
from ..runtime._stream import CudaStream
from ._cublas import DEFAULT, HOST, KINDS, Cublas
from ._cudnn import (
    FLOATS,
    LANES,
    SCORES,
    CudnnGraph,
    DnnKernels,
    TensorDescription,
    aligned,
    aligned_result,
    first_wrong,
    is_aligned,
    wide,
    wide_of,
    wide_result,
)

# Scores made at a time.
_CHUNK_SCORES = 1 << 24
_TABLE = 3
_ADDED = 2


@attrs.frozen
class Lengths:
    """Addresses of checked lengths and blocks, int32 each; 0 without them.

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
        block: Keys of a block; 0 without blocks.
    """

    stack: Ints
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
        """The number of sequences."""
        return math.prod(self.stack)

    @property
    def batches(self) -> int:
        """The number of products of one kind: one for each key head."""
        return self.sequences * self.served

    @property
    def lines(self) -> int:
        """Rows of each product: the queries of all heads that a head of the keys serves."""
        return self.heads // self.served * self.rows if self.served else 0


def _headed(array: ArraySpec) -> Ints:
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
        """See `EnqueuingLibrary.captures`: the host looks at checked lengths."""
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

    def _load_products(self, dtype: DType) -> None:
        """Load products of a type; blocks."""
        if self.blas is None:
            self.blas = Cublas(self._device, self.name)
        self.blas.warm(KINDS[wide_of(dtype)])

    def check_lengths(
        self, spec: AttentionSpec | AttentionGradSpec, sizes: Sizes, call: KernelCall
    ) -> Lengths:
        """Have lengths and blocks checked, and copies made that lead nowhere outside."""
        table = spec.block_table if isinstance(spec, AttentionSpec) else None
        length_arrays = (spec.query_lengths, sizes.rows), (spec.key_lengths, sizes.columns)
        if all(lengths is None or not lengths.size for lengths, _ in length_arrays):
            return Lengths()
        blocks = 0 if table is None else spec.key.shape[0]
        words = call.words(3, partial(_judge, (sizes.rows, sizes.columns, blocks)))
        addresses = [0, 0]
        for number, (lengths, limit) in enumerate(length_arrays):
            if lengths is not None:
                addresses[number] = call.workspace(4 * lengths.size)
                is_wide = lengths.dtype is DType.int64
                values = (
                    call.packed(lengths),
                    addresses[number],
                    words,
                    lengths.size,
                    limit,
                    is_wide,
                    number + 1,
                )
                self.launch("check_lengths", call, lengths.size, *values)
        if table is None or not table.size:
            return Lengths(addresses[0], addresses[1])
        safe, is_wide = call.workspace(4 * table.size), table.dtype is DType.int64
        self.launch(
            *("check_blocks", call, table.size, call.packed(table), addresses[1], safe, words, table.size),
            *(table.shape[1], sizes.block, blocks, is_wide, _TABLE),
        )
        return Lengths(addresses[0], addresses[1], safe)

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
                to, weights = piece.of_all(out, sizes.f), piece.local_rows(scores, sizes.columns)
                of.weigh("NN", (sizes.f, piece.count, sizes.columns), of.served(value, sizes.f), weights, to)
        if spec.lse is not None:
            shape = spec.query.shape[:-1]
            call.convert(DeviceArray.packed(logs, of.wide, shape), call.array(spec.lse))

    def _compute_attention_grad(self, spec: AttentionGradSpec, call: KernelCall) -> None:
        """Enqueue the gradients of an attention, as matrix products."""
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
            for array, address in ((spec.grad_key, to_key), (spec.grad_value, to_value)):
                call.fill(DeviceArray.packed(address, of.wide, array.shape), 0)
            for piece in of.pieces():
                scores = of.scores(query, key, piece)
                room = room or of.room()
                weights, slopes = (piece.local_rows(address, columns) for address in (scores, room))
                of.multiply(
                    "TN", (columns, piece.count, f), of.served(value, f), piece.of_all(grad, f), slopes
                )
                of.launch("attention_slopes", scores, room, means, logs, piece)
                for lhs, rhs, address, width in ((weights, grad, to_value, f), (slopes, query, to_key, e)):
                    extents, added = (width, columns, piece.count), of.served(address, width)
                    of.weigh("NT", extents, piece.of_all(rhs, width), lhs, added)
                output = piece.of_all(to_query, e)
                of.weigh("NN", (e, piece.count, columns), of.served(key, e), slopes, output)


_Matrices: TypeAlias = tuple[int, int, int]
"""Address of the first one, its leading dimension, and elements from one to the next."""


@attrs.frozen
class _Piece:
    """Some rows of each key head.

    Attributes:
        first: The first row.
        count: The number of these rows.
        lines: The number of all rows.
        itemsize: Bytes of an element.
    """

    first: int
    count: int
    lines: int
    itemsize: int

    def of_all(self, address: int, width: int) -> _Matrices:
        """Select these rows in an array with all rows."""
        return address + self.first * width * self.itemsize, max(1, width), self.lines * width

    def local_rows(self, address: int, width: int) -> _Matrices:
        """Select all rows of an array with these rows only."""
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
        self._most = max(1, _CHUNK_SCORES // max(1, self.sizes.batches * self.sizes.columns))
        self._scores = self._sums = 0

    @cached_property
    def _mask(self) -> DeviceArray | None:
        """The mask with all axes, of truth values or of the wide type; None without a mask."""
        sizes, call, mask = self.sizes, self._call, self._spec.mask
        if mask is None:
            return None
        view = call.array(mask)
        if mask.dtype.is_half:
            room = call.workspace_array(self.wide, mask.shape)
            call.convert(view, room)
            view = room
        return broadcast(view, (*sizes.stack, sizes.heads, sizes.rows, sizes.columns))

    def rows(self, array: ArraySpec) -> int:
        """Return the address of queries, or of an array of their shape."""
        return self._gathered(array, self.lengths.query, 0, self.sizes.rows)

    def keys(self, array: ArraySpec) -> int:
        """Return the address of keys or values."""
        return self._gathered(array, self.lengths.key, self.lengths.table, self.sizes.columns)

    def _gathered(self, array: ArraySpec, lengths: int, table: int, rows: int) -> int:
        """Return the address of rows without gaps in the wide type, with zeros after their lengths."""
        call = self._call
        if not lengths:
            return wide(call, array)
        packed = self.gathered(array, lengths, table, rows)
        if not array.dtype.is_half:
            return packed.address
        room = call.workspace_array(self.wide, packed.shape)
        call.convert(packed, room)
        return room.address

    def gathered(self, array: ArraySpec, lengths: int, table: int, rows: int) -> DeviceArray:
        """Copy rows without gaps, out of blocks if need be, with zeros after their lengths."""
        call, n = self._call, self.sizes.sequences
        source, heads, width = call.array(array), _headed(array)[-3], array.shape[-1]
        if len(source.shape) != 4:
            source = DeviceArray.packed(call.packed(array), array.dtype, (n, heads, rows, width))
        result = call.workspace_array(array.dtype, (n, heads, rows, width))
        block = source.shape[2]
        self._kernels.launch(
            *("gather", call, result.size, source.address, result.address, lengths, table, result.size),
            *(heads, rows, width, block, rows // max(1, block), *source.strides, array.dtype.itemsize),
        )
        return result

    def pieces(self) -> Iterator[_Piece]:
        """Cut the rows of each key head into pieces."""
        lines = self.sizes.lines
        for first in range(0, lines, self._most):
            yield _Piece(first, min(self._most, lines - first), lines, self.wide.itemsize)

    def served(self, address: int, width: int) -> _Matrices:
        """Return keys, or an array of their shape, as matrices."""
        return address, max(1, width), self.sizes.columns * width

    def room(self) -> int:
        """Return the address of workspace for the scores of a piece."""
        count = self.sizes.batches * min(self._most, self.sizes.lines) * self.sizes.columns
        return self._call.workspace(max(1, count) * self.wide.itemsize)

    def scores(self, query: int, key: int, piece: _Piece) -> int:
        """Multiply queries by keys; returns the address of the scores."""
        self._scores = self._scores or self.room()
        columns, e = self.sizes.columns, self.sizes.e
        to, extents = piece.local_rows(self._scores, columns), (columns, piece.count, e)
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
        """Multiply as `multiply` does, except that a weight of zero takes nothing, not even infinity or NaN.

        Products of transposed weights, one for each key, are added to the present values.
        """
        (width, rows, terms), is_added = extents, letters == "NT"
        product, batches = to, self.sizes.batches
        if not (batches and rows and width):
            return
        if is_added:
            widest = max(self.sizes.e, self.sizes.f)
            self._sums = self._sums or self._call.workspace(
                max(1, batches * rows * widest) * self.wide.itemsize
            )
            product = self._sums, to[1], rows * width
        self.multiply(letters, extents, values, weights, product)
        steps = (1, weights[1]) if is_added else (weights[1], 1)
        self._kernels.launch(
            *("attention_mend", self._call, batches * rows * width, weights[0], values[0], product[0], to[0]),
            *(batches * rows * width, rows, width, terms, *steps, weights[2], values[2], product[2], to[2]),
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
        op_a, op_b = ["NT".index(letter) for letter in letters]
        (first, lda, step_a), (second, ldb, step_b), (out, ldc, step_c) = a, b, c
        cublas.gemm_strided_batched_ex_64(
            blas.handle,
            op_a,
            op_b,
            *extents,
            blas.factors.alpha,
            first,
            kind.code,
            lda,
            step_a,
            second,
            kind.code,
            ldb,
            step_b,
            blas.factors.beta,
            out,
            kind.code,
            ldc,
            step_c,
            self.sizes.batches,
            kind.compute,
            DEFAULT,
        )

    def launch(self, name: str, scores: int, slopes: int, means: int, logs: int, piece: _Piece) -> None:
        """Launch a kernel over the rows of a piece."""
        sizes, spec, mask, lengths = self.sizes, self._spec, self._mask, self.lengths
        strides = (0,) * (len(sizes.stack) + 3) if mask is None else mask.strides
        kind = 0 if mask is None else 1 if mask.dtype is DType.bool else _ADDED
        rows, shape = sizes.batches * piece.count, (*sizes.stack, sizes.heads)
        self._kernels.launch(
            name,
            self._call,
            rows * LANES,
            scores,
            slopes,
            means,
            logs,
            0 if mask is None else mask.address,
            lengths.query,
            lengths.key,
            rows,
            piece.count,
            piece.first,
            sizes.rows,
            sizes.columns,
            sizes.heads // sizes.served,
            sizes.served,
            spec.window_left,
            spec.window_right,
            *strides[-2:],
            spec.scale,
            self.wide is DType.float64,
            spec.alignment == "lower_right",
            kind,
            len(shape),
            *shape,
            *strides[:-2],
            layout=with_axes(SCORES, 2, len(shape)),
        )


def _judge(mosts: tuple[int, int, int], words: StatusArray) -> None:
    """Refuse the first length or block that a kernel has found wrong."""
    if words[0]:
        index = int(words[0]) - 1
        argument = ("query_lengths", "key_lengths", "block_table")[index]
        raise no_length(argument, first_wrong(words), mosts[index])


# The gradient gets lengths if they are not multiples of this, because it has been seen to make NaNs otherwise
# (https://github.com/NVIDIA/cudnn-frontend/issues/160).
_TILE = 128
# Elements of halves read at once.
_EIGHT = 8
# The code of minus infinity.
_INFINITE = {DType.float16: 0xFC00, DType.bfloat16: 0xFF80}

# The order matches the arrays in dnn.cu.
_ARRAYS = "query", "key", "value", "grad", "out", "mask", "grad_query", "grad_key", "grad_value"

_Spec: TypeAlias = AttentionSpec | AttentionGradSpec


@attrs.frozen(eq=False)
class _AttentionPlan:
    """The way in which an attention is computed.

    Attributes:
        graph: cuDNN's graph; None for matrix products.
        has_lengths: Whether the graph gets lengths.
        mask: Shape of the array that the graph adds to the scores; None for none.
        numbers: Strides and extents, for the kernel that checks the results of the graph.
    """

    graph: CudnnGraph | None = None
    has_lengths: bool = False
    mask: Ints | None = None
    numbers: tuple[float, ...] = ()


class AttentionLibrary(AttentionKernels):
    """Attention, and its gradients."""

    def _key_of(self, spec: OperationSpec) -> tuple[object, ...]:
        key = super()._key_of(spec)
        # A graph has the factor in it.
        return (*key, spec.scale) if isinstance(spec, (AttentionSpec, AttentionGradSpec)) else key

    def _plan_attention(self, spec: _Spec, device: LibraryDevice) -> _AttentionPlan:
        plan = self._fused(spec)
        if plan is None:
            self._load_products(spec.query.dtype)
        self._load_kernels()
        return plan or _AttentionPlan()

    def _fused(self, spec: _Spec) -> _AttentionPlan | None:
        """Build cuDNN's graph; None if it lacks a kernel, or a correct one."""
        sizes, is_grad = Sizes.of(spec), isinstance(spec, AttentionGradSpec)
        # cuDNN accepts float32, and reads invalid memory. It accepts factors of 0 or less, and gives wrong
        # results.
        is_left = (
            not spec.query.dtype.is_half
            or spec.scale <= 0
            or not all((sizes.batches, sizes.lines, sizes.columns, sizes.e, sizes.f))
        )
        has_lengths = spec.query_lengths is not None or spec.key_lengths is not None
        # Its gradients of rows that see no key, and of masked ones, have been seen to be NaN.
        if is_left or (is_grad and (has_lengths or spec.mask is not None)):
            return None
        if spec.mask is not None and len(sizes.stack) > 1:
            return None
        cudnn = self._find_cudnn()
        if cudnn is None:
            return None
        if is_grad:
            has_lengths = bool(sizes.rows % _TILE or sizes.columns % _TILE)
        plan = _AttentionPlan(None, has_lengths, _mask_shape(spec, sizes))
        layouts = self._layouts(spec, sizes, plan)
        outputs = ["grad_query", "grad_key", "grad_value"] if is_grad else ["out"]
        if isinstance(spec, AttentionSpec) and spec.lse is not None:
            outputs.append("lse")

        def describe(graph: Any, tensors: dict[str, Any]) -> list[Any]:
            return _describe(cudnn.front, spec, graph, tensors)

        graph = cudnn.build(layouts, outputs, describe, is_exact=False)
        if graph is None:
            return None
        return attrs.evolve(plan, graph=graph, numbers=_numbers(spec, sizes, layouts))

    def _layouts(self, spec: _Spec, sizes: Sizes, plan: _AttentionPlan) -> dict[str, TensorDescription]:
        """Return the layouts of a graph's arrays, written arrays last."""
        n, heads, rows = sizes.sequences, sizes.heads, sizes.rows
        keys = n, sizes.served, sizes.columns
        layouts: dict[str, TensorDescription] = {"query": _layout(spec.query, (n, heads, rows, sizes.e))}
        for name, array, width in (("key", spec.key, sizes.e), ("value", spec.value, sizes.f)):
            # Keys with lengths are copied.
            is_copied = spec.key_lengths is not None
            layouts[name] = (
                TensorDescription.packed(array.dtype, (*keys, width))
                if is_copied
                else _layout(array, (*keys, width))
            )
        if plan.has_lengths:
            for name in ("query_lengths", "key_lengths"):
                layouts[name] = TensorDescription.packed(DType.int32, (n, 1, 1, 1))
        if plan.mask is not None:
            steps = TensorDescription.packed(spec.query.dtype, _padded(plan.mask)).strides
            layouts["mask"] = TensorDescription(spec.query.dtype, plan.mask, steps)
        logs = TensorDescription.packed(DType.float32, (n, heads, rows, 1))
        if isinstance(spec, AttentionSpec):
            layouts["out"] = _layout(spec.out, (n, heads, rows, sizes.f))
            return layouts if spec.lse is None else layouts | {"lse": logs}
        layouts["grad"] = _layout(spec.grad, (n, heads, rows, sizes.f))
        layouts["out"] = _layout(spec.out, (n, heads, rows, sizes.f))
        layouts["lse"] = logs
        for name in ("query", "key", "value"):
            layouts[f"grad_{name}"] = TensorDescription.packed(spec.query.dtype, layouts[name].shape)
        return layouts

    @kernel(AttentionSpec, backend="cuda", dtypes={"query": FLOATS}, plan=_plan_attention)
    def _attention(self, spec: AttentionSpec, call: KernelCall) -> None:
        plan: _AttentionPlan = call.plan
        if plan.graph is None:
            self._compute_attention(spec, call)
            return
        addresses = {"query": _in_place(call, spec.query)}
        # To look at an attention without lengths would take as long as to launch it.
        of = Attention(self, spec, call) if plan.has_lengths else None
        lengths = Lengths() if of is None else of.lengths
        for name, array in (("key", spec.key), ("value", spec.value)):
            addresses[name] = (
                _in_place(call, array)
                if of is None or not lengths.key
                else of.gathered(array, lengths.key, lengths.table, of.sizes.columns).address
            )
        if of is not None:
            addresses |= self._told_lengths(call, of.sizes, lengths.query, lengths.key)
        if plan.mask is not None and spec.mask is not None:
            addresses["mask"] = self._bias(call, spec.mask, spec.query.dtype, plan.mask)
        addresses["lse"] = 0 if spec.lse is None else call.result(spec.lse)
        with aligned_result(call, spec.out, is_direct=_is_direct(spec.out)) as out:
            self._run_plan(plan, plan.graph, call, addresses | {"out": out}, lengths)

    @kernel(AttentionGradSpec, backend="cuda", dtypes={"query": FLOATS}, plan=_plan_attention)
    def _attention_grad(self, spec: AttentionGradSpec, call: KernelCall) -> None:
        plan: _AttentionPlan = call.plan
        if plan.graph is None:
            self._compute_attention_grad(spec, call)
            return
        addresses = {
            name: _in_place(call, getattr(spec, name)) for name in ("query", "key", "value", "grad", "out")
        }
        addresses["lse"] = aligned(call, spec.lse)
        if plan.has_lengths:
            addresses |= self._told_lengths(call, Sizes.of(spec), 0, 0)
        # They are new, and so without gaps.
        for name in ("grad_query", "grad_key", "grad_value"):
            addresses[name] = call.address_of(getattr(spec, name))
        self._run_plan(plan, plan.graph, call, addresses, Lengths())

    def _run_plan(
        self,
        plan: _AttentionPlan,
        graph: CudnnGraph,
        call: KernelCall,
        addresses: dict[str, int],
        lengths: Lengths,
    ) -> None:
        """Enqueue a graph, and the kernel that repeats rows in which it has multiplied hidden values."""
        self._run_graph(graph, call, addresses)
        arrays = (addresses.get(name, 0) for name in (*_ARRAYS, "lse"))
        numbers, count = plan.numbers, int(plan.numbers[3 * len(_ARRAYS)])
        self.launch("attention_fused", call, count, *arrays, lengths.query, lengths.key, *numbers)

    def _told_lengths(self, call: KernelCall, sizes: Sizes, query: int, key: int) -> dict[str, int]:
        """Return addresses of lengths, and of the extents where none are given."""
        addresses: dict[str, int] = {}
        for name, address, extent in (
            ("query_lengths", query, sizes.rows),
            ("key_lengths", key, sizes.columns),
        ):
            room = address or call.workspace(4 * sizes.sequences)
            if not address:
                call.fill(DeviceArray.packed(room, DType.int32, (sizes.sequences,)), extent)
            addresses[name] = room
        return addresses

    def _bias(self, call: KernelCall, mask: ArraySpec, dtype: DType, shape: Ints) -> int:
        """Return the address of the numbers to add to scores."""
        source = call.array(mask)
        above = (*(1,) * (4 - mask.ndim), *mask.shape) if mask.ndim < 4 else mask.shape
        full_mask = broadcast(
            DeviceArray(source.address, mask.dtype, above, (*(0,) * (4 - mask.ndim), *source.strides)), shape
        )
        # Rows begin where several elements can be read at once.
        room = call.workspace_array(mask.dtype, _padded(shape))
        call.convert(full_mask, DeviceArray(room.address, mask.dtype, shape, room.strides))
        if mask.dtype is not DType.bool:
            return room.address
        bias = call.workspace_array(dtype, room.shape)
        values = room.address, bias.address, room.size, _INFINITE[dtype]
        self.launch("mask_to_bias", call, room.size, *values)
        return bias.address


def _padded(shape: Ints) -> Ints:
    return (*shape[:-1], -(-shape[-1] // _EIGHT) * _EIGHT)


def _mask_shape(spec: _Spec, sizes: Sizes) -> Ints | None:
    """Return the shape of the numbers to add to scores: sequences and heads may share them."""
    if spec.mask is None:
        return None
    shape = (*(1,) * (len(sizes.stack) + 3 - spec.mask.ndim), *spec.mask.shape)
    above = 1 if all(extent == 1 for extent in shape[:-3]) else sizes.sequences
    return (above, shape[-3], sizes.rows, sizes.columns)


def _numbers(spec: _Spec, sizes: Sizes, layouts: dict[str, TensorDescription]) -> tuple[float, ...]:
    """Return strides and extents in the order of `FusedArguments` in dnn.cu."""
    steps: list[int] = []
    for layout in map(layouts.get, _ARRAYS):
        shape, strides = ((1, 1, 1), (0, 0, 0)) if layout is None else (layout.shape, layout.strides)
        # An axis of one element is shared by all, as in a mask.
        steps += [0 if extent == 1 else step for extent, step in zip(shape[:3], strides[:3], strict=True)]
    queries, keys = sizes.batches * sizes.lines, sizes.batches * sizes.columns
    is_grad = isinstance(spec, AttentionGradSpec)
    return (
        *(*steps, queries + 2 * keys if is_grad else queries, queries, keys, sizes.heads),
        *(
            sizes.heads // sizes.served,
            sizes.rows,
            sizes.columns,
            sizes.e,
            sizes.f,
            spec.window_left,
            spec.window_right,
        ),
        *(spec.alignment == "lower_right", is_grad, _INFINITE[spec.query.dtype], spec.scale),
    )


def _describe(front: Any, spec: _Spec, graph: Any, tensors: dict[str, Any]) -> list[Any]:
    """Add the node to a graph."""
    options: dict[str, Any] = {"attn_scale": spec.scale}
    if spec.alignment == "lower_right" and (spec.window_left >= 0 or spec.window_right >= 0):
        options["diagonal_alignment"] = front.diagonal_alignment.BOTTOM_RIGHT
    if spec.window_left >= 0:
        # The first hidden key.
        options["diagonal_band_left_bound"] = spec.window_left + 1
    if spec.window_right >= 0:
        options["diagonal_band_right_bound"] = spec.window_right
    if "query_lengths" in tensors:
        options |= {
            "use_padding_mask": True,
            "seq_len_q": tensors["query_lengths"],
            "seq_len_kv": tensors["key_lengths"],
        }
    if "mask" in tensors:
        options["bias"] = tensors["mask"]
    inputs = {"q": tensors["query"], "k": tensors["key"], "v": tensors["value"]}
    if isinstance(spec, AttentionSpec):
        out, logs = graph.sdpa(**inputs, generate_stats=spec.lse is not None, **options)
        return [out] if spec.lse is None else [out, logs]
    backward_inputs = {"o": tensors["out"], "dO": tensors["grad"], "stats": tensors["lse"]}
    return list(graph.sdpa_backward(**inputs, **backward_inputs, **options))


def _is_direct(array: ArraySpec) -> bool:
    """Return whether cuDNN takes an array in place: adjacent elements, and aligned rows."""
    size = array.dtype.itemsize
    return (
        array.ndim <= 4
        and is_aligned(array)
        and array.strides[-1] == size
        and all(
            step > 0 and step % 16 == 0
            for step, extent in zip(array.strides[:-1], array.shape[:-1], strict=True)
            if extent > 1
        )
    )


def _layout(array: ArraySpec, shape: Ints) -> TensorDescription:
    """Return the layout of an array in place, or without gaps."""
    if not _is_direct(array):
        return TensorDescription.packed(array.dtype, shape)
    packed = TensorDescription.packed(array.dtype, shape).strides
    steps = [step // array.dtype.itemsize for step in (*(0,) * (4 - array.ndim), *array.strides)]
    # An axis of one element may have any step.
    strides = [
        step if extent > 1 else packed_step
        for step, packed_step, extent in zip(steps, packed, shape, strict=True)
    ]
    return TensorDescription(array.dtype, shape, tuple(strides))


def _in_place(call: KernelCall, array: ArraySpec) -> int:
    """Return the address of an array with its layout."""
    return call.address_of(array) if _is_direct(array) else aligned(call, array)
