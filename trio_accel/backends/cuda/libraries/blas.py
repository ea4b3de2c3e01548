"""Dense linear algebra: cuBLAS. Products here; all else, and the handle, in modules of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeAlias

import attrs
from nvmath.bindings import cublas

from ...base import AccelStream, DType
from ...base.contract.device_array import DeviceArray
from ...base.contract.ops import MatmulSpec, OperationSpec
from ...base.gpu.driver import Function, with_axes
from ...base.kit.checks import INEXACT, INTEGERS
from ...base.kit.kernels import kernel
from ...base.kit.launch_cache import GraphCall, Key
from ...base.kit.product_layouts import Product, broadcast_operands, plan_gemm, plan_matmul, vectors
from ..kit._library import Errors, KernelCall, LibraryDevice, factor_of
from ..runtime._stream import CudaStream
from ._cublas import HOST, KINDS, Factors, Kind
from ._routines import RoutineLibrary

__all__ = ["BlasLibrary"]

# As in integers.cu.
_INTEGER_PRODUCT = "QQQqqqqqqqqii"

_Span: TypeAlias = tuple[int, int]
_Arguments: TypeAlias = tuple[Kind, Product, Factors, int, int, int]


@attrs.frozen(eq=False)
class _Multiply:
    """The plan of a product.

    Attributes:
        run: Enqueues it.
        graph: By which its graphs are known; None where it is no single call of the library.
        spans: How far a, b and the result reach around their first elements.
    """

    run: Callable[[Any, KernelCall], None]
    graph: GraphCall | None = None
    spans: tuple[_Span, _Span, _Span] = ((0, 0), (0, 0), (0, 0))


class BlasLibrary(RoutineLibrary):
    """cuBLAS, by its routines for mixed types; missing ones by kernels of the backend's own."""

    name = "blas"
    errors: ClassVar[Errors] = {cublas.cuBLASError: cublas.Status}
    refused: ClassVar[frozenset[str]] = frozenset({"INVALID_VALUE"})

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._integers: Function | None = None
        # By identity: a member's hash takes longer than all the rest.
        self._prepared: set[int] = {id(DType.float32)}

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        """Load what products of a type need, or compile it, once; see `KernelLibrary.prepare`."""
        if type(spec) is not MatmulSpec and spec.operation != "linalg.gemm":
            return super().prepare(spec)
        dtype = spec.inputs()[0].dtype
        if id(dtype) in self._prepared:
            return None
        return partial(self._in_context, self._load, dtype)

    def _load(self, dtype: DType) -> None:
        kind = KINDS.get(dtype)
        if kind is not None:
            self._blas.warm(kind)
        elif dtype in INTEGERS:
            self._load_integers()
        self._prepared.add(id(dtype))

    def _load_integers(self) -> Function:
        """Load the product of whole numbers, modulo two to the power of their bits; compiling it blocks."""
        if self._integers is None:
            nbytes = with_axes(_INTEGER_PRODUCT, 3, 0).size
            self._integers = self._device.kernels.function("integers", "multiply", nbytes)
        return self._integers

    def attach(self, stream: CudaStream) -> None:
        """Take the workspace of cuBLAS; see `EnqueuingLibrary.attach`."""
        self._blas.select(stream, HOST)

    def _destroy(self) -> None:
        self._device.graphs.drop(self)
        super()._destroy()

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        """Put an operation on a stream; see `KernelLibrary.enqueue`."""
        if type(spec) is not MatmulSpec or type(stream) is not CudaStream or not self._replay(spec, stream):
            super().enqueue(spec, stream)

    def _replay(self, spec: MatmulSpec, stream: CudaStream) -> bool:
        """Replay the graph of a product, if there is one: for that no context need be current."""
        if stream.is_closed or self._context.is_lost:
            return False
        plan = self._find_plan(spec)
        if plan is None or plan.graph is None:
            return False
        within, (of_a, of_b, of_out) = self._device.address_within, plan.spans
        a, b, out = within(spec.a, of_a), within(spec.b, of_b), within(spec.out, of_out)
        if not self._device.graphs.replay((plan.graph, stream, a, b, out), stream):
            return False
        self._plans.note_launch(plan)
        return True

    def _plan_matmul(self, spec: MatmulSpec, device: LibraryDevice) -> _Multiply:
        dtype = spec.out.dtype
        if not spec.out.size:
            return _Multiply(_nothing)
        if not spec.a.size:
            # A sum of nothing.
            return _Multiply(lambda spec, call: call.fill(spec.out, 0))
        kind = KINDS.get(dtype)
        if kind is None:
            return _Multiply(self._multiply_integers)
        product = plan_matmul((spec.a.shape, spec.b.shape), (spec.a.strides, spec.b.strides), dtype.itemsize)
        if not _is_one_call(product):
            return _Multiply(partial(self._multiply_plain, kind, product))
        graph, span = GraphCall(self), self._device.span
        run = partial(self._multiply_by_graph, kind, product, graph)
        return _Multiply(run, graph, (span(spec.a), span(spec.b), span(spec.out)))

    def _multiply_plain(self, kind: Kind, product: Product, spec: MatmulSpec, call: KernelCall) -> None:
        factors = self._blas.plain[kind.is_double]
        self._multiply(call, kind, product, factors, spec, call.at(spec.out))

    def _multiply_by_graph(
        self, kind: Kind, product: Product, graph: GraphCall, spec: MatmulSpec, call: KernelCall
    ) -> None:
        """Launch a graph from the third time on that it is the same product at the same place."""
        a, b, out = call.at(spec.a), call.at(spec.b), call.at(spec.out)
        key = graph, call.stream, a, b, out
        # There is no graph yet: what has one does not come here.
        self._call_by_graph(key, call.stream, (kind, product, self._blas.plain[kind.is_double], a, b, out))

    def _multiply_integers(self, spec: MatmulSpec, call: KernelCall) -> None:
        """Launch a thread for each element, without tiles: right, and far from what the device could do."""
        multiply = self._load_integers()
        a, b, out = call.array(spec.a), call.array(spec.b), call.array(spec.out)
        batch, left, right = broadcast_operands((a.shape, b.shape), (a.strides, b.strides))
        multiply.run(
            call.handle, out.size, with_axes(_INTEGER_PRODUCT, 3, len(batch)), a.address, b.address,
            out.address, out.size, left.shape[0], right.shape[1], left.shape[1], *left.strides,
            *right.strides, a.dtype.itemsize, len(batch), *batch, *left.batch_strides, *right.batch_strides,
        )  # fmt: skip

    def _plan_gemm(self, spec: Any, device: LibraryDevice) -> _Multiply:
        dtype = spec.c.dtype
        kind = KINDS[dtype]
        if not spec.a.size or not spec.c.size:
            return _Multiply(self._scale_only)
        shapes: Any = spec.a.shape, spec.b.shape, spec.c.shape
        product = plan_gemm(
            (spec.trans_a, spec.trans_b),
            shapes,
            (spec.a.strides, spec.b.strides, spec.c.strides),
            dtype.itemsize,
            is_complex=dtype.kind == "complex",
        )
        graph = GraphCall(self) if _is_one_call(product) else None
        return _Multiply(partial(self._multiply_with_factors, kind, product, graph))

    @kernel(MatmulSpec, backend="cuda", dtypes=(*INEXACT, *INTEGERS), plan=_plan_matmul, is_quick=True)
    @kernel("linalg.gemm", backend="cuda", dtypes=INEXACT, plan=_plan_gemm, is_quick=True)
    def _product(self, spec: Any, call: KernelCall) -> None:
        call.plan.run(spec, call)

    def _scale_only(self, spec: Any, call: KernelCall) -> None:
        """Scale the output alone, as the product is a sum of nothing."""
        _, beta = _factors_of(spec)
        if beta:
            c = spec.c
            self._scale(call, beta, c, vectors(c.shape, c.dtype.itemsize, c.strides))
        else:
            call.fill(spec.c, 0)

    def _multiply_with_factors(
        self, kind: Kind, product: Product, graph: GraphCall | None, spec: Any, call: KernelCall
    ) -> None:
        factors, stream = self._blas.factors, call.stream
        alpha, beta = _factors_of(spec)
        factors.put(kind, alpha, beta)
        a, b, c = call.at(spec.a), call.at(spec.b), call.array(spec.c)
        # By zero it is no product, and cuBLAS enqueues something else than one or two kernels.
        if graph is not None and alpha:
            key = graph, stream, a, b, c.address, factors.packed()
            if not self._device.graphs.replay(key, stream):
                self._call_by_graph(key, stream, (kind, product, factors, a, b, c.address))
            return
        if not product.is_c_packed:
            self._multiply(call, kind, product, factors, spec, c.address)
            return
        room = call.room(c)
        if beta:
            call.convert(c, room)
        self._multiply(call, kind, product, factors, spec, room.address)
        call.convert(room, c)

    def _multiply(
        self, call: KernelCall, kind: Kind, product: Product, factors: Factors, spec: Any, c: int
    ) -> None:
        """Call cuBLAS; `c` is the address of the result."""
        self._blas.select(call.stream, HOST)
        if product.packing_a is None and product.packing_b is None:
            a, b = call.at(spec.a), call.at(spec.b)
        else:
            a, b = self._packed_operands(call, product, call.array(spec.a), call.array(spec.b))
        self._blas.multiply(kind, product, factors, a, b, c)

    def _call_by_graph(self, key: Key, stream: CudaStream, arguments: _Arguments) -> None:
        """Make a graph for a key if it is time to, and do without if not."""
        graphs = self._device.graphs
        is_due = not stream.is_capturing and graphs.is_due(key)
        if is_due and graphs.capture(key, partial(self._call_captured, stream, arguments)):
            return
        self._blas.select(stream, HOST)
        self._blas.multiply(*arguments)

    def _call_captured(self, stream: CudaStream, arguments: _Arguments, capturing: int) -> None:
        self._blas.select_for_capture(stream, capturing)
        self._blas.multiply(*arguments)

    def _packed_operands(
        self, call: KernelCall, product: Product, a: DeviceArray, b: DeviceArray
    ) -> tuple[int, int]:
        """Copy operands that cannot be read in place; returns the addresses of both."""
        if product.is_in_full:
            a, b = _in_full(a, b)
        addresses = [
            operand.address
            if packing is None
            else call.copy_of(operand, conjugate=packing == "conjugate").address
            for operand, packing in ((a, product.packing_a), (b, product.packing_b))
        ]
        return addresses[0], addresses[1]


def _nothing(spec: MatmulSpec, call: KernelCall) -> None:
    """Enqueue nothing: the result is empty."""


def _is_one_call(product: Product) -> bool:
    is_as_it_lies = product.packing_a is None and product.packing_b is None and not product.is_c_packed
    return product.is_single and is_as_it_lies


def _factors_of(spec: Any) -> tuple[complex, complex]:
    dtype = spec.c.dtype
    return factor_of("blas", "alpha", spec.alpha, dtype), factor_of("blas", "beta", spec.beta, dtype)


def _in_full(a: DeviceArray, b: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
    """Return both operands of a product with all batches, in place, without a copy."""
    batch, left, right = broadcast_operands((a.shape, b.shape), (a.strides, b.strides))
    full_a, full_b = (
        DeviceArray(
            array.address, array.dtype, (*batch, *operand.shape), (*operand.batch_strides, *operand.strides)
        )
        for array, operand in ((a, left), (b, right))
    )
    return full_a, full_b
