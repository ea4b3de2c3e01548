"""Fused products by cuBLASLt, which knows matrices by columns: ours are made as transposes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, Literal, TypeAlias

import attrs
import numpy as np
from cuda.bindings import driver
from nvmath.bindings import cublas, cublasLt

from ...base import DType, HostArray, Ints, NotSupportedError, Strs, kernel
from ...base.contract.device_array import DeviceArray, broadcast
from ...base.contract.ops import ArraySpec, FusedMatmulSpec, OperationSpec, contiguous_strides, fused_dtypes
from ...base.kit.product_layouts import Product, broadcast_operands, plan_matmul
from ..kit._library import CudaLibrary, Errors, KernelCall, LibraryDevice
from ..runtime._context import CudaMemoryError
from ..runtime._stream import scratch
from ._cublas import KINDS

_Desc, _Layout, _Preference = (
    cublasLt.MatmulDescAttribute,
    cublasLt.MatrixLayoutAttribute,
    cublasLt.MatmulPreferenceAttribute,
)
_CODES = {dtype: kind.code for dtype, kind in KINDS.items()} | {
    DType.int8: 3,
    DType.int32: 10,
    DType.float8_e4m3fn: 28,
    DType.float8_e5m2: 29,
}
"""Codes of `cudaDataType`."""
_COMPUTE = {
    "tf32": cublas.ComputeType.COMPUTE_32F_FAST_TF32,
    "bf16": cublas.ComputeType.COMPUTE_32F_FAST_16BF,
    "bf16x9": cublas.ComputeType.COMPUTE_32F_EMULATED_16BFX9,
    "fixed_point": cublas.ComputeType.COMPUTE_64F_EMULATED_FIXEDPOINT,
}
# Rows of these types begin at multiples of this many bytes.
_ROWS = {DType.float8_e4m3fn: 16, DType.float8_e5m2: 16, DType.int8: 4}
_NAMES = {"relu_grad": "DRELU", "gelu_grad": "DGELU", "sum_a": "BGRADB", "sum_b": "BGRADA", "none": ""}
# The attributes for the addresses of a specification's arrays: the library's a is our b.
_POINTERS: Mapping[str, int] = {
    "bias": _Desc.BIAS_POINTER,
    "sums": _Desc.BIAS_POINTER,
    "aux": _Desc.EPILOGUE_AUX_POINTER,
    "saved": _Desc.EPILOGUE_AUX_POINTER,
    "scale_a": _Desc.B_SCALE_POINTER,
    "scale_b": _Desc.A_SCALE_POINTER,
    "scale_out": _Desc.D_SCALE_POINTER,
}
# Nothing there is read or written before a launch has put the address of its array there.
_SOMEWHERE = 256
_PER_ROW = int(cublasLt.MatmulMatrixScale.OUTER_VEC_32F)
_OF_BLOCKS = {
    **dict.fromkeys(("rows", "vectors"), int(cublasLt.MatmulMatrixScale.VEC128_32F)),
    "blocks": int(cublasLt.MatmulMatrixScale.BLK128x128_32F),
}

Order: TypeAlias = Literal["C", "F"]
"""See `EnqueuingCall.copy_of`."""
_Orders: TypeAlias = tuple[Order | None, Order | None]


@attrs.frozen(eq=False)
class MatmulProblem:
    """A nonempty product in cuBLASLt's layout: its first operand is b, and its second operand is a.

    Attributes:
        spec: The product. A product without inner elements multiplies zeros instead of a and b.
        is_zero: Whether it is such a product.
        product: Letters, sizes, leading dimensions and steps.
        orders: The orders in which a and b are copied before the call; None to read them in place.
        stack: The stack of both copies; None to keep their stacks.
        nbytes: Bytes of all arrays, with their gaps, one after the other.
    """

    spec: FusedMatmulSpec
    is_zero: bool
    product: Product
    orders: _Orders
    stack: Ints | None
    nbytes: int

    @classmethod
    def of(cls, spec: FusedMatmulSpec) -> MatmulProblem:
        """Choose the layout of a product.

        Raises:
            NotSupportedError: The library does not support these lengths.
        """
        _check_lengths(spec)
        _check_scales(spec)
        is_zero = not spec.a.shape[-1]
        spec = _with_zeros(spec) if is_zero else spec
        product, orders, stack = _lay_out(spec)
        return cls(spec, is_zero, product, orders, stack, _reach(spec, orders, stack or ()))


class MatmulDescriptors:
    """The library's descriptors of a product, and the algorithms that it recommends.

    Args:
        handle: The library's.
        problem: The product.
        most_workspace: The most bytes that an algorithm may take.
        count: The number of algorithms to request.

    Raises:
        NotSupportedError: cuBLASLt lacks an algorithm.

    Attributes:
        problem: The argument.
        fields: Fields of the specification whose addresses are passed in addition to a, b, c and the result.
        scale_strides: The required strides, in bytes, of block scales, by field.
        ways: The number of algorithms.
        workspace: Bytes that the chosen algorithm needs.
        close: Releases the descriptors. The library has copied the parts that running work needs.
    """

    __slots__ = (
        "_address",
        "_alpha",
        "_desc",
        "_factors",
        "_found",
        "_handle",
        "_layouts",
        "_pointer",
        "_way",
        "close",
        "fields",
        "problem",
        "scale_strides",
        "ways",
        "workspace",
    )

    def __init__(self, handle: int, problem: MatmulProblem, most_workspace: int, count: int) -> None:
        self._handle = handle
        self.problem: MatmulProblem = problem
        spec, product = problem.spec, problem.product
        self.fields: Strs = tuple([field for field in _POINTERS if getattr(spec, field) is not None])
        self.scale_strides: dict[str, tuple[int, int]] = _scale_strides(spec)
        self._pointer = np.full(1, _SOMEWHERE, np.int64)
        self._address = int(self._pointer.ctypes.data)
        compute, scale = _computed(spec)
        # Read by the library at each call.
        self._factors: HostArray = np.zeros(2, scale.dtype)
        self._alpha = int(self._factors.ctypes.data)
        with ExitStack() as undo:
            self._desc: int = cublasLt.matmul_desc_create(compute, _CODES[scale])
            undo.callback(cublasLt.matmul_desc_destroy, self._desc)
            for attribute, value in _attributes(spec, product).items():
                _set("matmul_desc", self._desc, attribute, value)
            self._layouts = _make_layouts(undo, spec, product)
            # Kept, as the ways are read from there at each launch.
            self._found = np.zeros(count, cublasLt.matmul_heuristic_result_dtype)
            self.ways: int = self._ask(most_workspace)
            if not self.ways:
                raise NotSupportedError(
                    f"blaslt: cuBLASLt does not support {_text(spec)} on this card", backend="cuda"
                )
            self.choose(0)
            self.close: Callable[[], None] = undo.pop_all().close

    def _ask(self, most_workspace: int) -> int:
        """Ask for ways; returns how many there are."""
        preference, count = cublasLt.matmul_preference_create(), np.zeros(1, np.int32)
        options = {_Preference[f"MIN_ALIGNMENT_{name}_BYTES"]: _alignment(self.problem) for name in "ABCD"}
        try:
            for attribute, value in {_Preference.MAX_WORKSPACE_BYTES: most_workspace, **options}.items():
                _set("matmul_preference", preference, attribute, value)
            with suppress(cublasLt.cuBLASLtError):
                # It fails if there is none.
                cublasLt.matmul_algo_get_heuristic(
                    self._handle,
                    self._desc,
                    *self._layouts,
                    preference,
                    len(self._found),
                    self._found.ctypes.data,
                    count.ctypes.data,
                )
        finally:
            cublasLt.matmul_preference_destroy(preference)
        return int(count[0])

    def choose(self, way: int) -> None:
        """Have it run in one of the ways; they are numbered from 0, the first one as the library advises."""
        self._way = int(self._found[way:].ctypes.data)
        self.workspace: int = int(self._found["workspace_size"][way])

    def run(
        self,
        factors: tuple[float, float],
        addresses: Sequence[int],
        pointers: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Enqueue it.

        Args:
            factors: Factors of the product, and of c.
            addresses: Addresses of b, a, c and the result.
            pointers: Addresses of the arrays named by `fields`.
            workspace: Address of `workspace` bytes.
            stream: Handle of the stream.
        """
        for field, address in zip(self.fields, pointers, strict=True):
            self._pointer[0] = address
            cublasLt.matmul_desc_set_attribute(self._desc, _POINTERS[field], self._address, 8)
        self._factors[0], self._factors[1] = factors
        b, a, c, out = addresses
        of_b, of_a, of_c, of_out = self._layouts
        cublasLt.matmul(
            self._handle,
            self._desc,
            self._alpha,
            b,
            of_b,
            a,
            of_a,
            self._alpha + self._factors.itemsize,
            c,
            of_c,
            out,
            of_out,
            self._way,
            workspace,
            self.workspace,
            stream,
        )


def _set(kind: str, descriptor: int, attribute: int, value: int) -> None:
    """Set an attribute of a library descriptor."""
    dtype: type[np.generic] = getattr(cublasLt, f"get_{kind}_attribute_dtype")(attribute)
    word = np.array([value], dtype)
    getattr(cublasLt, f"{kind}_set_attribute")(descriptor, attribute, word.ctypes.data, word.nbytes)


def _make_layouts(undo: ExitStack, spec: FusedMatmulSpec, product: Product) -> list[int]:
    """Describe b, a, c and the result."""
    dtypes = fused_dtypes("blaslt", spec.a.dtype, spec.b.dtype, spec.out.dtype)
    op_a, op_b, m, n, k, lda, ldb, ldc = product.call
    of_b, of_a, of_out = product.steps
    layouts: list[int] = []
    for dtype, rows, columns, lead, step in (
        (spec.b.dtype, *((k, m) if op_a else (m, k)), lda, of_b),
        (spec.a.dtype, *((n, k) if op_b else (k, n)), ldb, of_a),
        (dtypes.c, m, n, ldc, of_out),
        (spec.out.dtype, m, n, ldc, of_out),
    ):
        layout = cublasLt.matrix_layout_create(_CODES[dtype], rows, columns, lead)
        undo.callback(cublasLt.matrix_layout_destroy, layout)
        layouts.append(layout)
        if product.batches > 1:
            _set("matrix_layout", layout, _Layout.BATCH_COUNT, product.batches)
            _set("matrix_layout", layout, _Layout.STRIDED_BATCH_OFFSET, step)
    return layouts


def _computed(spec: FusedMatmulSpec) -> tuple[int, DType]:
    """Return the types of sums and factors."""
    types, dtype, out = cublas.ComputeType, spec.a.dtype, spec.out.dtype
    if dtype is DType.int8 and out is not DType.float32:
        return int(types.COMPUTE_32I), DType.int32 if out is DType.int32 else DType.float32
    default = types.COMPUTE_64F if dtype is DType.float64 else types.COMPUTE_32F
    return int(_COMPUTE.get(spec.precision, default)), fused_dtypes("blaslt", dtype, spec.b.dtype, out).factor


def _attributes(spec: FusedMatmulSpec, product: Product) -> dict[int, int]:
    """Return the values of a descriptor's attributes."""
    op_a, op_b, *_ = product.call
    parts = [_NAMES.get(spec.epilogue, spec.epilogue.upper())]
    parts += ["AUX"] * (spec.saved is not None) + ["BIAS"] * (spec.bias is not None)
    parts += ["BGRAD"] * (spec.sums is not None and spec.aux is not None)
    values: dict[int, int] = {
        _Desc.TRANSA: op_a,
        _Desc.TRANSB: op_b,
        _Desc.EPILOGUE: cublasLt.Epilogue["_".join(filter(None, parts)) or "DEFAULT"],
        _Desc.FAST_ACCUM: spec.precision == "fast",
        **{_POINTERS[field]: _SOMEWHERE for field in _POINTERS if getattr(spec, field) is not None},
    }
    vector = spec.sums if spec.bias is None else spec.bias
    if vector is not None:
        values[_Desc.BIAS_DATA_TYPE] = _CODES[vector.dtype]
        values[_Desc.BIAS_BATCH_STRIDE] = vector.shape[-1] if vector.ndim > 1 else 0
    rows = spec.saved if spec.aux is None else spec.aux
    if rows is not None:
        is_bits = rows.dtype is DType.uint8
        values[_Desc.EPILOGUE_AUX_LD] = length = rows.shape[-1] * (8 if is_bits else 1)
        values[_Desc.EPILOGUE_AUX_BATCH_STRIDE] = rows.shape[-2] * length
        if not is_bits:
            values[_Desc.EPILOGUE_AUX_DATA_TYPE] = _CODES[rows.dtype]
    if spec.scale_a is not None and spec.scale_a.ndim:
        if product.batches > 1:
            raise NotSupportedError(f"blaslt: CUDA does not support {_text(spec)} of a stack", backend="cuda")
        # Both have numbers for rows or blocks, or neither.
        values[_Desc.A_SCALE_MODE] = values[_Desc.B_SCALE_MODE] = _PER_ROW
        if spec.scale_kinds != ("rows", "rows"):
            values[_Desc.B_SCALE_MODE], values[_Desc.A_SCALE_MODE] = (_OF_BLOCKS[x] for x in spec.scale_kinds)
    return values


def _scale_strides(spec: FusedMatmulSpec) -> dict[str, tuple[int, int]]:
    """Return how scales of blocks have to lie: by columns of a row's, or by padded rows of a block's."""
    of_a, of_b = spec.scale_kinds
    if spec.scale_a is None or spec.scale_b is None or of_a == "one" or of_a == of_b == "rows":
        return {}
    (*_, rows, along), columns = spec.scale_a.shape, spec.scale_b.shape[-1]
    padded = -(-along // 4) * 16
    return {
        "scale_a": (padded, 4) if of_a == "blocks" else (4, 4 * rows),
        "scale_b": (4, padded) if of_b == "blocks" else (4 * columns, 4),
    }


def _text(spec: FusedMatmulSpec) -> str:
    """Describe a product in words."""
    there = {"bias": "a bias", "saved": "aux", "sums": "sums", "scale_out": "scale_out"}
    extras = [text for field, text in there.items() if getattr(spec, field) is not None]
    extras += [f"scales of {kind}" for kind in dict.fromkeys(spec.scale_kinds) if kind != "one"]
    with_ = f" with {', '.join(extras)}" if extras else ""
    return (
        f"{spec.epilogue!r}{with_} of {spec.a.dtype} {spec.a.shape} and {spec.b.dtype} {spec.b.shape} to "
        f"{spec.out.dtype} with precision {spec.precision!r}"
    )


def _check_lengths(spec: FusedMatmulSpec) -> None:
    """Refuse lengths that the library refuses of a type, before it is asked."""
    nbytes = _ROWS.get(spec.a.dtype, 1)
    for name, array in (("k", spec.a), ("n", spec.out)):
        length, size = array.shape[-1], array.dtype.itemsize
        if length * size % nbytes:
            raise NotSupportedError(
                f"blaslt: CUDA has products of {spec.a.dtype} to {spec.out.dtype} where {name} is a multiple "
                f"of {nbytes // size}, got {length}: a {spec.a.shape}, b {spec.b.shape}",
                backend="cuda",
            )


def _check_scales(spec: FusedMatmulSpec) -> None:
    """Refuse block scales that the library does not support, before it is called."""
    if not _scale_strides(spec):
        return
    for name, length, kind in zip("mn", spec.out.shape[-2:], spec.scale_kinds, strict=True):
        if kind != "blocks" and length % 4:
            raise NotSupportedError(
                f"blaslt: CUDA has scales of parts of rows where {name} is a multiple of 4, got {length}: a "
                f"{spec.a.shape}, b {spec.b.shape}",
                backend="cuda",
            )
    if spec.scale_kinds == ("blocks", "blocks"):
        raise NotSupportedError(
            f"blaslt: CUDA has scales of 128 by 128 elements of one operand, and not of both: a "
            f"{spec.a.shape}, b {spec.b.shape}; give a or b one scale for 128 elements of each row or column",
            backend="cuda",
        )


def _with_zeros(spec: FusedMatmulSpec) -> FusedMatmulSpec:
    """Replace a product of empty sums, which the library refuses, by the smallest product of zeros."""
    a, b, size = spec.a, spec.b, spec.a.dtype.itemsize
    shapes = (*a.shape[:-1], 16), (*b.shape[:-2], 16, b.shape[-1])
    cls: Any = spec
    # Without blocks, block scales do not exist.
    no_scales = dict.fromkeys(_scale_strides(spec))
    evolved: FusedMatmulSpec = attrs.evolve(
        cls,
        **no_scales,
        a=attrs.evolve(a, offset=0, shape=shapes[0], strides=_packed(shapes[0], size, "C")),
        b=attrs.evolve(b, offset=0, shape=shapes[1], strides=_packed(shapes[1], size, "F")),
    )
    return evolved


def _lay_out(spec: FusedMatmulSpec) -> tuple[Product, _Orders, Ints | None]:
    """Find the one call for both operands, and which of them are copied to be read by it, in which stack."""
    size, operands, shapes = spec.a.dtype.itemsize, (spec.a, spec.b), (spec.a.shape, spec.b.shape)
    # Some types must be contiguous along the inner axis. An operand with sums must be contiguous across it.
    required: _Orders = (
        "F" if spec.epilogue == "sum_a" else "C" if spec.a.dtype in _ROWS else None,
        "C" if spec.epilogue == "sum_b" else "F" if spec.a.dtype in _ROWS else None,
    )
    orders: list[Order | None] = [
        None if order is None or _lies(operand, order) else order
        for operand, order in zip(operands, required, strict=True)
    ]
    first, second = (
        operand.strides if order is None else _packed(operand.shape, size, order)
        for operand, order in zip(operands, orders, strict=True)
    )
    keeps_stack = spec.sums is not None or (spec.bias is not None and spec.bias.ndim > 1)
    plan = partial(plan_matmul, itemsize=size, is_fused=True, keeps_stack=keeps_stack)
    product, stack = plan(shapes, (first, second)), None
    if product.is_in_full:
        stack, *_ = broadcast_operands(shapes, (spec.a.strides, spec.b.strides))
        in_full: list[Order] = [order or "C" for order in required]
        shapes = (*stack, *shapes[0][-2:]), (*stack, *shapes[1][-2:])
        first, second = (_packed(shape, size, order) for shape, order in zip(shapes, in_full, strict=True))
        product = plan(shapes, (first, second))
        orders = [*in_full]
    elif product.packing_a or product.packing_b:
        packings = product.packing_a, product.packing_b
        orders = ["C" if packing else order for packing, order in zip(packings, orders, strict=True)]
    if required[0] == "F" and not product.call[1]:
        # A row or a column is stored both ways, but here it must be the library's transpose.
        op_a, _, m, n, k, lda, _, ldc = product.call
        product = attrs.evolve(product, call=(op_a, 1, m, n, k, lda, n, ldc))
    return product, (orders[0], orders[1]), stack


def _packed(shape: Ints, size: int, order: Order) -> Ints:
    if order == "C":
        return contiguous_strides(shape, size)
    *leads, down, across = contiguous_strides((*shape[:-2], shape[-1], shape[-2]), size)
    return (*leads, across, down)


def _lies(array: ArraySpec, order: Order) -> bool:
    """Return whether an operand is stored as required, with aligned rows."""
    nbytes, size = _ROWS.get(array.dtype, array.dtype.itemsize), array.dtype.itemsize
    if order == "C" and array.is_contiguous:
        return array.offset % nbytes == 0
    (*leads, down, across), (rows, columns) = array.strides, array.shape[-2:]
    step, within, length = (down, across, columns) if order == "C" else (across, down, rows)
    # A row or a column may have any strides.
    is_matrix = min(rows, columns) > 1 and within == size and step >= length * size
    is_aligned = not any(number % nbytes for number in (*leads, step, array.offset))
    return is_matrix and is_aligned and min(leads, default=0) >= 0


def _reach(spec: FusedMatmulSpec, orders: _Orders, stack: Ints) -> int:
    """Return how much memory has what a call reads and writes, if each array is in a place of its own."""
    total = 0
    for array in (*spec.inputs(), *spec.outputs()):
        steps = zip(array.shape, array.strides, strict=True)
        total += array.dtype.itemsize + sum((extent - 1) * abs(step) for extent, step in steps if extent)
    for array, order in zip((spec.a, spec.b), orders, strict=True):
        if order is not None:
            total += math.prod((stack or array.shape[:-2]) + array.shape[-2:]) * array.dtype.itemsize
    return total


def _alignment(problem: MatmulProblem) -> int:
    """Return to how many bytes, up to 16, the operands and the result are aligned; copies and blocks are."""
    spec = problem.spec
    in_place = [
        operand for operand, order in zip((spec.a, spec.b), problem.orders, strict=True) if order is None
    ]
    if spec.c is not None and spec.c.is_contiguous:
        in_place.append(spec.c)
    return math.gcd(16, spec.out.offset, *[array.offset for array in in_place])


# NVIDIA's advice for Hopper, as for cuBLAS.
_WORKSPACE = 32 << 20
# An algorithm that needs more memory is not tried before its first use.
_MOST_TRIED = 256 << 20
# The number of algorithms to measure, and of runs for each.
_WAYS, _TIMES = 8, 10


class BlasLtLibrary(CudaLibrary):
    """cuBLASLt: one call for each product. A plan has the algorithm, which the library is asked for once."""

    name = "blaslt"
    errors: ClassVar[Errors] = {cublasLt.cuBLASLtError: cublas.Status}
    refused: ClassVar[frozenset[str]] = frozenset({"INVALID_VALUE"})
    # Graphs launch its products one by one: no captured one was replayed on a card yet.
    is_captured: ClassVar[bool] = False

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._handle: int = cublasLt.create()

    def _destroy(self) -> None:
        cublasLt.destroy(self._handle)

    def _key_of(self, spec: OperationSpec) -> tuple[object, ...]:
        key: tuple[object, ...] = getattr(spec, "key", ())
        return key or super()._key_of(spec)

    def _close_plan(self, plan: tuple[MatmulDescriptors, ...]) -> None:
        for routine in plan:
            routine.close()

    def _plan(self, spec: FusedMatmulSpec, device: LibraryDevice) -> tuple[MatmulDescriptors, ...]:
        """Ask the library for an algorithm, and try it out: its first call loads code, and may wait."""
        if not spec.out.size:
            if spec.sums is not None and spec.sums.size and spec.aux is None:
                raise NotSupportedError(
                    f"blaslt: CUDA does not support sums with an empty product, got shape {spec.out.shape}",
                    backend="cuda",
                )
            return ()
        problem = MatmulProblem.of(spec)
        routine = MatmulDescriptors(self._handle, problem, _WORKSPACE, _WAYS if spec.is_tuned else 1)
        with ExitStack() as undo:
            undo.callback(routine.close)
            # Without memory for it, it runs as the library advises.
            with suppress(CudaMemoryError):
                if spec.is_tuned or problem.nbytes <= _MOST_TRIED:
                    self._try(routine)
            undo.pop_all()
        return (routine,)

    def _try(self, routine: MatmulDescriptors) -> None:
        """Run it in each of its ways on zeros, and choose the fastest one; waits for a stream of its own."""
        nbytes, check = routine.problem.nbytes, self._context.check
        with scratch(self._context, nbytes, nbytes, _WORKSPACE) as (stream, (source, out, workspace)):
            # An array must not be written to where another one is written.
            pointers = [out if field in ("saved", "sums") else source for field in routine.fields]

            def run(way: int, times: int) -> float:
                routine.choose(way)
                check(driver.cuStreamSynchronize(stream))
                start = perf_counter()
                for _ in range(times):
                    routine.run((1, 0), (source, source, 0, out), pointers, workspace, stream)
                check(driver.cuStreamSynchronize(stream))
                return perf_counter() - start

            took: list[float] = []
            for way in range(routine.ways):
                took.append(run(way, 1))
                if routine.ways > 1:
                    took[way] = run(way, _TIMES)
            routine.choose(took.index(min(took)))

    @kernel(FusedMatmulSpec, backend="cuda", plan=_plan)
    def _fused_matmul(self, spec: FusedMatmulSpec, call: KernelCall) -> None:
        if not call.plan:
            if spec.sums is not None:
                call.fill(spec.sums, 0)
            return
        routine: MatmulDescriptors = call.plan[0]
        a, b = (
            _operand(call, array, order, routine.problem)
            for array, order in zip((spec.a, spec.b), routine.problem.orders, strict=True)
        )
        out = call.address_of(spec.out)
        # With a factor of 0, c is not read. With float8, c must not be the result, because the types differ.
        c = call.packed(spec.c) if spec.c is not None and spec.beta else 0
        strides = routine.scale_strides
        pointers = [
            _scales(call, getattr(spec, field), strides[field])
            if field in strides
            else call.packed(getattr(spec, field))
            for field in routine.fields
        ]
        workspace = call.workspace(routine.workspace)
        routine.run((spec.alpha, spec.beta), (b, a, c, out), pointers, workspace, call.handle)


def _scales(call: KernelCall, array: ArraySpec, strides: tuple[int, int]) -> int:
    """Return the address of block scales in the required layout."""
    if array.strides[-2:] == strides and not array.offset % 16:
        return call.address_of(array)
    nbytes = max(extent * step for extent, step in zip(array.shape[-2:], strides, strict=True))
    # All axes before have one element.
    room = DeviceArray(
        call.workspace(nbytes), array.dtype, array.shape, (*[nbytes] * (array.ndim - 2), *strides)
    )
    call.convert(call.array(array), room)
    return room.address


def _operand(call: KernelCall, array: ArraySpec, order: Order | None, problem: MatmulProblem) -> int:
    """Return the address of an operand in the required layout, or of zeros if nothing is added."""
    if problem.is_zero:
        room = call.workspace(problem.nbytes)
        call.stream.set_bytes(room, 0, problem.nbytes)
        return room
    if order is None:
        return call.address_of(array)
    source = call.array(array)
    if problem.stack is not None:
        source = broadcast(source, (*problem.stack, *source.shape[-2:]))
    return call.copy_of(source, order).address
