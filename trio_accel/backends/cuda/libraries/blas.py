"""Dense linear algebra: cuBLAS. Products here; vectors, and the handle, in modules of their own."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeAlias

from nvmath.bindings import cublas

from ...base import AccelStream, DType
from ...base.checks import INEXACT
from ...base.ops import AxpySpec, DotSpec, GemmSpec, MatmulSpec, Nrm2Spec, OperationSpec, ScalSpec
from ..kit._checks import check_dtype, check_same_dtype, factor_of
from ..kit._device import LibraryDevice
from ..kit._layouts import Product, broadcast_operands, plan_gemm, plan_matmul
from ..kit._library import CudaLibrary
from ..runtime._device_array import DeviceArray
from ..runtime._graphs import Call, Key
from ..runtime._stream import CudaStream
from ._cublas import DEFAULT, HOST, KINDS, Cublas, Factors, Kind
from ._integers import IntegerProducts
from ._vectors import VectorRoutines

__all__ = ["BlasLibrary"]

_MOST_PLANS = 1024
# Sums of products: those of float32 take an H200 some 14 us, where the loop takes 20 for each.
_LIGHT = 1 << 27
_INTEGERS = tuple(dtype for dtype in DType if dtype.kind in ("int", "uint"))
_WITH_INTEGERS = (*INEXACT, *_INTEGERS)

_Span: TypeAlias = tuple[int, int]

_Run: TypeAlias = Callable[[Any, CudaStream], None]
"""Enqueues an operation whose types and layouts were seen before."""

_Arguments: TypeAlias = tuple[Kind, Product, Factors, int, int, int]


class BlasLibrary(CudaLibrary):
    """cuBLAS, by its routines for mixed types; what it does not have by kernels of the backend's own.

    A product of certain types and layouts is planned once.
    """

    name: ClassVar[str] = "blas"
    statuses: ClassVar[type[Exception] | None] = cublas.cuBLASError
    codes: ClassVar[type[enum.IntEnum] | None] = cublas.Status
    refused: ClassVar[frozenset[str]] = frozenset({"INVALID_VALUE"})
    exhausted: ClassVar[frozenset[str]] = frozenset({"ALLOC_FAILED"})
    missing: ClassVar[frozenset[str]] = frozenset({"NOT_SUPPORTED", "ARCH_MISMATCH"})

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._blas = Cublas(device)
        try:
            self._vectors = VectorRoutines(device, self._blas)
        except BaseException:
            self._blas.destroy()
            raise
        self._integers: IntegerProducts | None = None
        # By identity, as in the caches below.
        self._prepared: set[int] = {id(DType.float32)}
        self._runs: dict[object, _Run] = {}
        # By the same keys, launch templates of those that may become graphs: the call, whether it is light,
        # and how far its arrays reach.
        self._templates: dict[object, tuple[Call, bool, _Span, _Span, _Span]] = {}
        self._table = {
            MatmulSpec: self._matmul,
            GemmSpec: self._gemm,
            AxpySpec: self._vectors.axpy,
            ScalSpec: self._vectors.scal,
            DotSpec: self._vectors.dot,
            Nrm2Spec: self._vectors.nrm2,
        }

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        """Load what products of a type need, or compile it, once; see `KernelLibrary.prepare`."""
        if type(spec) is not MatmulSpec and type(spec) is not GemmSpec:
            return None
        dtype = spec.a.dtype
        if id(dtype) in self._prepared:
            return None
        return partial(self._load, dtype)

    def _load(self, dtype: DType) -> None:
        kind = KINDS.get(dtype)
        if kind is not None:
            self._blas.warm(kind)
        elif dtype in _INTEGERS:
            self._load_integers()
        self._prepared.add(id(dtype))

    def _load_integers(self) -> None:
        if self._integers is None:
            self._integers = IntegerProducts(self._device.kernels)

    def _destroy(self) -> None:
        self._device.graphs.drop(self)
        self._blas.destroy()

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        """Put an operation on a stream; see `KernelLibrary.enqueue`."""
        if type(spec) is not MatmulSpec or type(stream) is not CudaStream or not self._replay(spec, stream):
            super().enqueue(spec, stream)

    def _replay(self, spec: MatmulSpec, stream: CudaStream) -> bool:
        """Replay the graph of a product, if there is one: for that no context need be current."""
        if stream.is_closed or self._context.is_lost:
            return False
        bound = self._bind(spec, stream)
        if bound is None:
            return False
        key, is_light = bound
        if not is_light:
            stream.begin_heavy()
        if not self._device.graphs.replay(key, stream):
            return False
        stream.is_light = is_light
        return True

    def _bind(self, spec: MatmulSpec, stream: CudaStream) -> tuple[Key, bool] | None:
        """What a product is called that was planned before, and whether it is light."""
        a, b, out = spec.a, spec.b, spec.out
        dtype = a.dtype
        template = self._templates.get((id(dtype), a.shape, a.strides, b.shape, b.strides))
        if template is None or dtype is not b.dtype or dtype is not out.dtype:
            return None
        call, is_light, of_a, of_b, of_out = template
        within = self._device.address_within
        key: Key = (call, stream, within(a, of_a), within(b, of_b), within(out, of_out))
        return key, is_light

    def _matmul(self, spec: MatmulSpec, stream: CudaStream) -> None:
        a, b, out = spec.a, spec.b, spec.out
        dtype = a.dtype
        if dtype is not b.dtype or dtype is not out.dtype:
            check_same_dtype("matmul", a, b, out)
        # By its identity: a member's hash takes longer than all the rest.
        key = id(dtype), a.shape, a.strides, b.shape, b.strides
        run = self._runs.get(key)
        if run is None:
            run = self._keep(key, self._plan_matmul(spec, key))
        run(spec, stream)

    def _plan_matmul(self, spec: MatmulSpec, key: object) -> _Run:
        dtype = spec.a.dtype
        check_dtype("matmul", dtype, _WITH_INTEGERS)
        if not spec.out.size:
            return _nothing
        if not spec.a.size:
            return self._zeros
        kind = KINDS.get(dtype)
        if kind is None:
            return self._multiply_integers
        shapes, strides = (spec.a.shape, spec.b.shape), (spec.a.strides, spec.b.strides)
        plan = plan_matmul(shapes, strides, dtype.itemsize)
        if _is_one_call(plan):
            call, span = Call(self), self._device.span
            self._templates[key] = call, _is_light(plan), span(spec.a), span(spec.b), span(spec.out)
            return partial(self._multiply_by_graph, kind, plan, call)
        return partial(self._multiply_plain, kind, plan)

    def _multiply_plain(self, kind: Kind, plan: Product, spec: MatmulSpec, stream: CudaStream) -> None:
        address = self._device.address
        a, b, out = address(spec.a), address(spec.b), address(spec.out)
        self._multiply(stream, kind, plan, self._blas.plain[kind.is_double], spec, a, b, out)

    def _multiply_by_graph(
        self, kind: Kind, plan: Product, call: Call, spec: MatmulSpec, stream: CudaStream
    ) -> None:
        """By a graph from the third time on that it is the same product at the same place."""
        address = self._device.address
        a, b, out = address(spec.a), address(spec.b), address(spec.out)
        key = call, stream, a, b, out
        # There is no graph yet: what has one does not come here.
        self._call_by_graph(key, stream, (kind, plan, self._blas.plain[kind.is_double], a, b, out))

    def _multiply_integers(self, spec: MatmulSpec, stream: CudaStream) -> None:
        self._load_integers()
        assert self._integers is not None
        at = self._device.at
        self._integers.multiply(stream, at(spec.a), at(spec.b), at(spec.out))

    def _zeros(self, spec: MatmulSpec, stream: CudaStream) -> None:
        """A sum of nothing."""
        self._device.arrays.fill(stream, self._device.at(spec.out), 0)

    def _gemm(self, spec: GemmSpec, stream: CudaStream) -> None:
        a, b, c = spec.a, spec.b, spec.c
        types = id(a.dtype), id(b.dtype), id(c.dtype)
        letters = spec.transpose_a, spec.transpose_b
        key = types, letters, a.shape, a.strides, b.shape, b.strides, c.strides
        run = self._runs.get(key)
        if run is None:
            run = self._keep(key, self._plan_gemm(spec))
        run(spec, stream)

    def _plan_gemm(self, spec: GemmSpec) -> _Run:
        dtype = check_same_dtype("gemm", spec.a, spec.b, spec.c)
        check_dtype("gemm", dtype, INEXACT)
        kind = KINDS[dtype]
        if not spec.a.size or not spec.c.size:
            return partial(self._scale, kind)
        shapes: Any = spec.a.shape, spec.b.shape, spec.c.shape
        plan = plan_gemm(
            (spec.transpose_a, spec.transpose_b),
            shapes,
            (spec.a.strides, spec.b.strides, spec.c.strides),
            dtype.itemsize,
            is_complex=dtype.kind == "complex",
        )
        call = Call(self) if _is_one_call(plan) else None
        return partial(self._multiply_with_factors, kind, plan, call)

    def _scale(self, kind: Kind, spec: GemmSpec, stream: CudaStream) -> None:
        """A product that is a sum of nothing."""
        _, beta = _factors_of(spec)
        c = self._device.at(spec.c)
        if not c.size:
            return
        if beta:
            self._vectors.scale(stream, kind, beta, c)
        else:
            self._device.arrays.fill(stream, c, 0)

    def _multiply_with_factors(
        self, kind: Kind, plan: Product, call: Call | None, spec: GemmSpec, stream: CudaStream
    ) -> None:
        at, factors = self._device.at, self._blas.factors
        alpha, beta = _factors_of(spec)
        factors.put(kind, alpha, beta)
        a, b, c = at(spec.a), at(spec.b), at(spec.c)
        # By zero it is no product, and cuBLAS enqueues something else than one or two kernels.
        if call is not None and alpha:
            key = call, stream, a.address, b.address, c.address, factors.packed()
            if not self._device.graphs.replay(key, stream):
                self._call_by_graph(key, stream, (kind, plan, factors, a.address, b.address, c.address))
            return
        if not plan.is_c_packed:
            self._multiply(stream, kind, plan, factors, spec, a.address, b.address, c.address)
            return
        room = self._blas.room(stream, 2, c)
        if beta:
            self._device.arrays.convert(stream, c, room)
        self._multiply(stream, kind, plan, factors, spec, a.address, b.address, room.address)
        self._device.arrays.convert(stream, room, c)

    def _multiply(
        self,
        stream: CudaStream,
        kind: Kind,
        plan: Product,
        factors: Factors,
        spec: MatmulSpec | GemmSpec,
        a: int,
        b: int,
        c: int,
    ) -> None:
        """Call cuBLAS; `a`, `b` and `c` are addresses."""
        self._blas.select(stream, HOST)
        if plan.packing_a is not None or plan.packing_b is not None:
            at = self._device.at
            a, b = self._packed_operands(stream, plan, at(spec.a), at(spec.b))
        self._call(kind, plan, factors, a, b, c)

    def _call_by_graph(self, key: Key, stream: CudaStream, arguments: _Arguments) -> None:
        """Make a graph for a key if it is time to, and do without if not."""
        graphs = self._device.graphs
        if graphs.is_due(key) and graphs.capture(key, partial(self._call_captured, stream, arguments)):
            return
        self._blas.select(stream, HOST)
        self._call(*arguments)

    def _call_captured(self, stream: CudaStream, arguments: _Arguments, capturing: int) -> None:
        self._blas.select_for_capture(stream, capturing)
        self._call(*arguments)

    def _call(self, kind: Kind, plan: Product, factors: Factors, a: int, b: int, c: int) -> None:
        first, second = (b, a) if plan.is_swapped else (a, b)
        handle, code, compute = self._blas.handle, kind.code, kind.compute
        op_a, op_b, m, n, k, lda, ldb, ldc = plan.call
        if plan.is_single:
            cublas.gemm_ex_64(
                handle, op_a, op_b, m, n, k, factors.alpha, first, code, lda, second, code, ldb,
                factors.beta, c, code, ldc, compute, DEFAULT,
            )  # fmt: skip
            return
        step_a, step_b, step_c = plan.steps
        for group in plan.groups:
            from_a, from_b = (group.b, group.a) if plan.is_swapped else (group.a, group.b)
            cublas.gemm_strided_batched_ex_64(
                handle, op_a, op_b, m, n, k, factors.alpha, first + from_a, code, lda, step_a,
                second + from_b, code, ldb, step_b, factors.beta, c + group.c, code, ldc, step_c,
                plan.batches, compute, DEFAULT,
            )  # fmt: skip

    def _packed_operands(
        self, stream: CudaStream, plan: Product, a: DeviceArray, b: DeviceArray
    ) -> tuple[int, int]:
        """Lay out what cannot be read as it lies; returns the addresses of both."""
        if plan.is_in_full:
            a, b = _in_full(a, b)
        operands = (a, plan.packing_a), (b, plan.packing_b)
        # All memory first: there may not be so much.
        rooms = [
            operand if packing is None else self._blas.room(stream, number, operand)
            for number, (operand, packing) in enumerate(operands)
        ]
        for (operand, packing), room in zip(operands, rooms, strict=True):
            if packing is not None:
                self._device.arrays.convert(stream, operand, room, conjugate=packing == "conjugate")
        return rooms[0].address, rooms[1].address

    def _keep(self, key: object, run: _Run) -> _Run:
        if len(self._runs) >= _MOST_PLANS:
            first = next(iter(self._runs))
            del self._runs[first]
            self._templates.pop(first, None)
        self._runs[key] = run
        return run


def _nothing(spec: MatmulSpec, stream: CudaStream) -> None:
    """The result is empty."""


def _is_one_call(plan: Product) -> bool:
    is_as_it_lies = plan.packing_a is None and plan.packing_b is None and not plan.is_c_packed
    return plan.is_single and is_as_it_lies


def _is_light(plan: Product) -> bool:
    """Whether it takes no longer than a program takes to launch it."""
    _, _, m, n, k, *_ = plan.call
    return m * n * k <= _LIGHT


def _factors_of(spec: GemmSpec) -> tuple[complex, complex]:
    dtype = spec.c.dtype
    return factor_of("blas", "alpha", spec.alpha, dtype), factor_of("blas", "beta", spec.beta, dtype)


def _in_full(a: DeviceArray, b: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
    """Both operands of a product with all batches, as they lie: without a copy."""
    batch, left, right = broadcast_operands((a.shape, b.shape), (a.strides, b.strides))
    full_a, full_b = (
        DeviceArray(
            array.address, array.dtype, (*batch, *operand.shape), (*operand.batch_strides, *operand.strides)
        )
        for array, operand in ((a, left), (b, right))
    )
    return full_a, full_b
