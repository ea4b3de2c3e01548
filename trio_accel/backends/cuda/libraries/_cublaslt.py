"""Products in the terms of cuBLASLt: by columns, so that ours are made as transposes; and its descriptors."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
from nvmath.bindings import cublas, cublasLt

from ...base import DType, NotSupportedError
from ...base.ops import ArraySpec, FusedMatmulSpec, contiguous_strides, fused_dtypes
from ...base.product_layouts import Product, broadcast_operands, plan_matmul

__all__ = ["Numbers", "Order", "Problem", "Routine"]

_Desc, _Layout, _Preference = (
    cublasLt.MatmulDescAttribute,
    cublasLt.MatrixLayoutAttribute,
    cublasLt.MatmulPreferenceAttribute,
)
_CODES = {
    DType.float32: 0,
    DType.float64: 1,
    DType.float16: 2,
    DType.int8: 3,
    DType.int32: 10,
    DType.bfloat16: 14,
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
_FORMATS = {0: "f", 1: "d", 10: "i"}
# Nothing there is read or written before a launch has put the address of its array there.
_SOMEWHERE = 256
_PER_ROW = int(cublasLt.MatmulMatrixScale.OUTER_VEC_32F)

Order: TypeAlias = Literal["C", "F"]
"""See `EnqueuingCall.copy_of`."""


class Numbers:
    """Two factors in host memory, which cuBLASLt reads at the call.

    Attributes:
        alpha: Address of the first one.
        beta: Address of the second one.
    """

    __slots__ = ("_buffer", "_view", "alpha", "beta")

    def __init__(self) -> None:
        self._buffer = bytearray(32)
        self._view = (ctypes.c_char * 32).from_buffer(self._buffer)
        self.alpha: int = ctypes.addressof(self._view)
        self.beta: int = self.alpha + 16

    def put(self, code: int, alpha: float, beta: float) -> None:
        """Write both, as numbers of a type."""
        kind = int if code == _CODES[DType.int32] else float
        struct.pack_into(_FORMATS[code], self._buffer, 0, kind(alpha))
        struct.pack_into(_FORMATS[code], self._buffer, 16, kind(beta))


@attrs.frozen(eq=False, kw_only=True)
class Problem:
    """A product as cuBLASLt gets it: its first operand is b, and its second one a.

    Attributes:
        product: Letters, sizes and leading dimensions.
        orders: How a and b are copied ahead of the call; None where they are read in place.
        stack: The stack that both are laid out in; None where they are as they are.
        codes: Types of b, a, c and the result.
        steps: From one product of a stack to the next, of the same.
        compute: Type of the sums, and the way to them.
        scale: Type of the factors.
        values: Attributes of its descriptor.
        pointers: Attributes that are addresses, and the fields of the specification.
        alignments: Of the same four.
        nbytes: As far as all arrays reach, with their gaps, one behind the other.
        is_zero: Whether the product adds nothing, so that zeros are multiplied in place of a and b.
        text: What it is, for an error.
    """

    product: Product
    orders: tuple[Order | None, Order | None]
    stack: tuple[int, ...] | None
    codes: tuple[int, int, int, int]
    steps: tuple[int, int, int, int]
    compute: int
    scale: int
    values: Mapping[int, int]
    pointers: tuple[tuple[int, str], ...]
    alignments: tuple[int, int, int, int]
    nbytes: int
    is_zero: bool
    text: str

    @classmethod
    def of(cls, spec: FusedMatmulSpec) -> Problem:
        """Put a product that is not empty in these terms.

        Raises:
            NotSupportedError: The library has it not.
        """
        dtype = spec.a.dtype
        _check_lengths(spec)
        is_zero = not spec.a.shape[-1]
        if is_zero:
            spec = _with_zeros(spec)
        keeps_stack = spec.sums is not None or (spec.bias is not None and spec.bias.ndim > 1)
        product, orders, stack = _lay_out(spec, keeps_stack)
        _, dtypes = fused_dtypes("blaslt", dtype, spec.b.dtype, spec.out.dtype)
        compute, scale = _computed(spec)
        if product.batches > 1 and spec.scale_a is not None and spec.scale_a.ndim:
            raise NotSupportedError(f"blaslt: CUDA has no {_text(spec)} of a stack", backend="cuda")
        of_b, of_a, of_c = product.steps
        values, pointers = _attributes(spec, product)
        return cls(
            product=product,
            orders=("C", "C") if is_zero else orders,
            stack=stack,
            codes=(_CODES[spec.b.dtype], _CODES[dtype], _CODES[dtypes.c], _CODES[spec.out.dtype]),
            steps=(of_b, of_a, of_c, of_c),
            compute=compute,
            scale=scale,
            values=values,
            pointers=pointers,
            alignments=_alignments(spec, orders),
            nbytes=_reach(spec, orders, stack or ()),
            is_zero=is_zero,
            text=_text(spec),
        )

    def places(self, source: int, out: int) -> list[int]:
        """Return places for `pointers`, where there is room for what is written and for what is read."""
        return [out if field in ("saved", "sums") else source for _, field in self.pointers]


# Rows of these types begin at multiples of so many bytes.
_ROWS = {DType.float8_e4m3fn: 16, DType.float8_e5m2: 16, DType.int8: 4}


def _check_lengths(spec: FusedMatmulSpec) -> None:
    """Refuse lengths that the library refuses of a type, before it is asked."""
    nbytes = _ROWS.get(spec.a.dtype)
    if nbytes is None:
        return
    for name, length, dtype in (
        ("k", spec.a.shape[-1], spec.a.dtype),
        ("n", spec.out.shape[-1], spec.out.dtype),
    ):
        if length * dtype.itemsize % nbytes:
            raise NotSupportedError(
                f"blaslt: CUDA has products of {spec.a.dtype} to {spec.out.dtype} where {name} is a multiple "
                f"of {nbytes // dtype.itemsize}, got {length}: a {spec.a.shape}, b {spec.b.shape}",
                backend="cuda",
            )


def _wanted(spec: FusedMatmulSpec) -> tuple[Order | None, Order | None]:
    """Tell how the operands have to lie; None where both ways are read."""
    if spec.a.dtype in _ROWS:
        # Both along the axis that is added along.
        return "C", "F"
    # An operand whose sums are wanted, across it.
    return "F" if spec.epilogue == "sum_a" else None, "C" if spec.epilogue == "sum_b" else None


def _with_zeros(spec: FusedMatmulSpec) -> FusedMatmulSpec:
    """Have the least product of zeros in place of one that adds nothing, which the library does not take."""
    size, made = spec.a.dtype.itemsize, dict[str, ArraySpec]()
    shapes = (*spec.a.shape[:-1], 16), (*spec.b.shape[:-2], 16, spec.b.shape[-1])
    orders: tuple[Order, Order] = "C", "F"
    for field, array, shape, order in zip("ab", (spec.a, spec.b), shapes, orders, strict=True):
        made[field] = attrs.evolve(array, offset=0, shape=shape, strides=_packed(shape, size, order))
    cls: Any = spec
    evolved: FusedMatmulSpec = attrs.evolve(cls, **made)
    return evolved


def _lay_out(
    spec: FusedMatmulSpec, keeps_stack: bool
) -> tuple[Product, tuple[Order | None, Order | None], tuple[int, ...] | None]:
    """Find the one call for both operands, and which of them are copied to be read by it."""
    size, shapes, wanted = spec.a.dtype.itemsize, (spec.a.shape, spec.b.shape), _wanted(spec)
    plan = partial(plan_matmul, itemsize=size, is_fused=True, keeps_stack=keeps_stack)
    orders: list[Order | None] = [
        None if order is None or _lies(one, order) else order
        for one, order in zip((spec.a, spec.b), wanted, strict=True)
    ]
    strides = [
        one.strides if order is None else _packed(one.shape, size, order)
        for one, order in zip((spec.a, spec.b), orders, strict=True)
    ]
    product, stack = plan(shapes, (strides[0], strides[1])), None
    if product.is_in_full:
        stack, *_ = broadcast_operands(shapes, (spec.a.strides, spec.b.strides))
        in_full: list[Order] = [order or "C" for order in wanted]
        shapes = (*stack, *shapes[0][-2:]), (*stack, *shapes[1][-2:])
        of_a, of_b = (_packed(shape, size, order) for shape, order in zip(shapes, in_full, strict=True))
        product = plan(shapes, (of_a, of_b))
        orders = [*in_full]
    elif product.packing_a or product.packing_b:
        packings = product.packing_a, product.packing_b
        orders = ["C" if packing else order for packing, order in zip(packings, orders, strict=True)]
    if wanted[0] == "F" and not product.call[1]:
        # A row or a column lies both ways; it is to be the library's transpose.
        op_a, _, m, n, k, lda, _, ldc = product.call
        product = attrs.evolve(product, call=(op_a, 1, m, n, k, lda, n, ldc))
    return product, (orders[0], orders[1]), stack


def _packed(shape: tuple[int, ...], size: int, order: Order) -> tuple[int, ...]:
    if order == "C":
        return contiguous_strides(shape, size)
    *leads, down, across = contiguous_strides((*shape[:-2], shape[-1], shape[-2]), size)
    return (*leads, across, down)


def _lies(array: ArraySpec, order: Order) -> bool:
    """Tell whether an operand lies as it has to, with rows that begin where they may."""
    nbytes, size = _ROWS.get(array.dtype, array.dtype.itemsize), array.dtype.itemsize
    if order == "C" and array.is_contiguous:
        return array.offset % nbytes == 0
    (*leads, down, across), (rows, columns) = array.strides, array.shape[-2:]
    step, within, length = (down, across, columns) if order == "C" else (across, down, rows)
    # What is a row or a column may have any strides.
    is_matrix = min(rows, columns) > 1 and within == size and step >= length * size
    is_aligned = not any(one % nbytes for one in (*leads, step, array.offset))
    return is_matrix and is_aligned and min(leads, default=0) >= 0


def _reach(spec: FusedMatmulSpec, orders: tuple[Order | None, Order | None], stack: tuple[int, ...]) -> int:
    """Return how much memory has what a call reads and writes, if each array is in a place of its own."""
    total = 0
    for one in (*spec.inputs(), *spec.outputs()):
        steps = zip(one.shape, one.strides, strict=True)
        total += one.dtype.itemsize + sum((extent - 1) * abs(step) for extent, step in steps if extent)
    for one, order in zip((spec.a, spec.b), orders, strict=True):
        if order is not None:
            shape = (*stack, *one.shape[-2:]) if stack else one.shape
            total += math.prod(shape) * one.dtype.itemsize
    return total


def _alignments(
    spec: FusedMatmulSpec, orders: tuple[Order | None, Order | None]
) -> tuple[int, int, int, int]:
    """Return to how many bytes the library's four operands are aligned; a copy is to more."""
    a, b = (16 if order else _alignment(one) for one, order in zip((spec.a, spec.b), orders, strict=True))
    out = _alignment(spec.out)
    c = 16 if spec.c is None or not spec.c.is_contiguous else _alignment(spec.c)
    return b, a, c, out


def _alignment(array: ArraySpec) -> int:
    """Return to how many bytes an array is aligned, up to 16; blocks are."""
    return array.offset % 16 & -(array.offset % 16) or 16


def _computed(spec: FusedMatmulSpec) -> tuple[int, int]:
    """Return the types of sums and of factors."""
    way = _COMPUTE.get(spec.precision)
    if spec.a.dtype is DType.float64:
        return int(way or cublas.ComputeType.COMPUTE_64F), 1
    if spec.a.dtype is DType.int8 and spec.out.dtype is not DType.float32:
        return int(cublas.ComputeType.COMPUTE_32I), 10 if spec.out.dtype is DType.int32 else 0
    return int(way or cublas.ComputeType.COMPUTE_32F), 0


_NAMES = {"relu_grad": "DRELU", "gelu_grad": "DGELU", "sum_a": "BGRADB", "sum_b": "BGRADA", "none": ""}
# By the fields of a specification: the attribute for their address, and that for the way of scales.
_SCALES: Mapping[str, tuple[int, int]] = {
    "scale_a": (_Desc.B_SCALE_POINTER, _Desc.B_SCALE_MODE),
    "scale_b": (_Desc.A_SCALE_POINTER, _Desc.A_SCALE_MODE),
    "scale_out": (_Desc.D_SCALE_POINTER, _Desc.D_SCALE_MODE),
}


def _attributes(
    spec: FusedMatmulSpec, product: Product
) -> tuple[dict[int, int], tuple[tuple[int, str], ...]]:
    """Return the values of a descriptor's attributes, and which of them are addresses of which arrays."""
    op_a, op_b, *_ = product.call
    values: dict[int, int] = {
        _Desc.TRANSA: op_a, _Desc.TRANSB: op_b, _Desc.EPILOGUE: _epilogue(spec),
        _Desc.FAST_ACCUM: int(spec.precision == "fast"),
    }  # fmt: skip
    pointers: list[tuple[int, str]] = []
    for field in ("bias", "sums"):
        vector: ArraySpec | None = getattr(spec, field)
        if vector is not None:
            pointers.append((_Desc.BIAS_POINTER, field))
            values[_Desc.BIAS_DATA_TYPE] = _CODES[vector.dtype]
            values[_Desc.BIAS_BATCH_STRIDE] = vector.shape[-1] if vector.ndim > 1 else 0
    for field in ("aux", "saved"):
        rows: ArraySpec | None = getattr(spec, field)
        if rows is not None:
            pointers.append((_Desc.EPILOGUE_AUX_POINTER, field))
            values.update(_rows(rows))
    for field, (attribute, mode) in _SCALES.items():
        scale: ArraySpec | None = getattr(spec, field)
        if scale is not None:
            pointers.append((attribute, field))
            if scale.ndim:
                values[mode] = _PER_ROW
    return values, tuple(pointers)


def _epilogue(spec: FusedMatmulSpec) -> int:
    parts = [_NAMES.get(spec.epilogue, spec.epilogue.upper())]
    parts += ["AUX"] * (spec.saved is not None) + ["BIAS"] * (spec.bias is not None)
    parts += ["BGRAD"] * (spec.sums is not None and spec.aux is not None)
    return int(cublasLt.Epilogue["_".join(filter(None, parts)) or "DEFAULT"])


def _rows(aux: ArraySpec) -> dict[int, int]:
    """Tell how what an activation leaves lies: of bits, by their numbers."""
    if aux.dtype is DType.uint8:
        length = 8 * aux.shape[-1]
        return {_Desc.EPILOGUE_AUX_LD: length, _Desc.EPILOGUE_AUX_BATCH_STRIDE: aux.shape[-2] * length}
    length = aux.shape[-1]
    return {
        _Desc.EPILOGUE_AUX_DATA_TYPE: _CODES[aux.dtype],
        _Desc.EPILOGUE_AUX_LD: length,
        _Desc.EPILOGUE_AUX_BATCH_STRIDE: aux.shape[-2] * length,
    }


def _text(spec: FusedMatmulSpec) -> str:
    """Tell what a product is."""
    there = {"bias": "a bias", "saved": "aux", "sums": "sums", "scale_out": "scale_out"}
    more = [text for field, text in there.items() if getattr(spec, field) is not None]
    if spec.scale_a is not None and spec.scale_a.ndim:
        more.append("scales of rows")
    with_ = f" with {', '.join(more)}" if more else ""
    return (
        f"{spec.epilogue!r}{with_} of {spec.a.dtype} {spec.a.shape} and {spec.b.dtype} {spec.b.shape} to "
        f"{spec.out.dtype} with precision {spec.precision!r}"
    )


class Routine:
    """The descriptors of a problem, and the ways to solve it that the library advises.

    Args:
        handle: The library's.
        problem: The problem.
        most_workspace: Bytes that a way may take.
        count: How many to ask for.

    Raises:
        NotSupportedError: There is no way.

    Attributes:
        problem: As given.
        workspace: Bytes that it needs.
    """

    __slots__ = (
        "_address", "_desc", "_found", "_handle", "_layouts", "_pointer", "_way", "problem", "workspace",
    )  # fmt: skip

    def __init__(self, handle: int, problem: Problem, most_workspace: int, count: int) -> None:
        self._handle = handle
        self.problem: Problem = problem
        self._layouts: list[int] = []
        self._pointer = np.full(1, _SOMEWHERE, np.int64)
        self._address = int(self._pointer.ctypes.data)
        self._desc: int = cublasLt.matmul_desc_create(problem.compute, problem.scale)
        try:
            for attribute, value in problem.values.items():
                word = np.array([value], cublasLt.get_matmul_desc_attribute_dtype(attribute))
                cublasLt.matmul_desc_set_attribute(self._desc, attribute, word.ctypes.data, word.nbytes)
            for attribute, _ in problem.pointers:
                self._point(attribute, _SOMEWHERE)
            self._make_layouts()
            # Kept, as the ways are read from there at each launch.
            self._found = self._ask(most_workspace, count)
            self.choose(0)
        except BaseException:
            self.close()
            raise

    def _make_layouts(self) -> None:
        problem = self.problem
        op_a, op_b, m, n, k, *leading = problem.product.call
        sizes = (k, m) if op_a else (m, k), (n, k) if op_b else (k, n), (m, n), (m, n)
        for code, (rows, columns), step, ld in zip(
            problem.codes, sizes, problem.steps, (*leading, leading[-1]), strict=True
        ):
            layout = cublasLt.matrix_layout_create(code, rows, columns, ld)
            self._layouts.append(layout)
            if problem.product.batches > 1:
                count, distance = np.array([problem.product.batches], np.int32), np.array([step], np.int64)
                for attribute, word in (
                    (_Layout.BATCH_COUNT, count),
                    (_Layout.STRIDED_BATCH_OFFSET, distance),
                ):
                    cublasLt.matrix_layout_set_attribute(layout, attribute, word.ctypes.data, word.nbytes)

    def _ask(self, most_workspace: int, count: int) -> npt.NDArray[Any]:
        """Ask for ways."""
        preference = cublasLt.matmul_preference_create()
        try:
            names = "A", "B", "C", "D"
            numbers: dict[int, npt.NDArray[Any]] = {
                _Preference.MAX_WORKSPACE_BYTES: np.array([most_workspace], np.uint64)
            }
            for name, nbytes in zip(names, self.problem.alignments, strict=True):
                numbers[_Preference[f"MIN_ALIGNMENT_{name}_BYTES"]] = np.array([nbytes], np.uint32)
            for attribute, word in numbers.items():
                cublasLt.matmul_preference_set_attribute(preference, attribute, word.ctypes.data, word.nbytes)
            found = np.zeros(count, cublasLt.matmul_heuristic_result_dtype)
            ways = np.zeros(1, np.int32)
            with suppress(cublasLt.cuBLASLtError):
                # It fails if there is none.
                cublasLt.matmul_algo_get_heuristic(
                    self._handle, self._desc, *self._layouts, preference, count, found.ctypes.data,
                    ways.ctypes.data,
                )  # fmt: skip
        finally:
            cublasLt.matmul_preference_destroy(preference)
        if not ways[0]:
            raise NotSupportedError(
                f"blaslt: cuBLASLt has no {self.problem.text} on this card", backend="cuda"
            )
        return found[: int(ways[0])]

    @property
    def ways(self) -> int:
        """How many ways there are."""
        return len(self._found)

    def choose(self, way: int) -> None:
        """Have it run in one of the ways; they are numbered from 0, the first one as the library advises."""
        self._way = int(self._found[way:].ctypes.data)
        self.workspace = int(self._found["workspace_size"][way])

    def _point(self, attribute: int, address: int) -> None:
        self._pointer[0] = address
        cublasLt.matmul_desc_set_attribute(self._desc, attribute, self._address, 8)

    def run(
        self, numbers: Numbers, places: Sequence[int], pointers: Sequence[int], workspace: int, stream: int
    ) -> None:
        """Enqueue it.

        Args:
            numbers: The factors.
            places: Addresses of b, a, c and the result.
            pointers: Addresses of the arrays that `Problem.pointers` names.
            workspace: Address of `workspace` bytes.
            stream: Where to.
        """
        for (attribute, _), address in zip(self.problem.pointers, pointers, strict=True):
            self._point(attribute, address)
        b, a, c, out = places
        of_b, of_a, of_c, of_out = self._layouts
        cublasLt.matmul(
            self._handle, self._desc, numbers.alpha, b, of_b, a, of_a, numbers.beta, c, of_c, out, of_out,
            self._way, workspace, self.workspace, stream,
        )  # fmt: skip

    def close(self) -> None:
        """Give the descriptors back; the library has copied what it needs of them."""
        for layout in self._layouts:
            cublasLt.matrix_layout_destroy(layout)
        self._layouts.clear()
        if self._desc:
            cublasLt.matmul_desc_destroy(self._desc)
            self._desc = 0
