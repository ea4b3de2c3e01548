"""Dense linear algebra by cuBLAS: products by its routines for mixed types, and all else by those for one."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

import attrs
import numpy as np
from cuda.bindings import driver
from nvmath.bindings import cublas

from ...base import INEXACT, INTEGERS, NATIVE, AccelStream, DType, Ints, check_dtype, kernel
from ...base.contract.device_array import DeviceArray, broadcast
from ...base.contract.ops import ArraySpec, MatmulSpec, OperationSpec, contiguous_strides
from ...base.gpu.driver import KernelFunction, with_axes
from ...base.kit.blas import BlasPlan, BlasRoutine, Matrix, ScalarArgument, plan_routine
from ...base.kit.captured_calls import GraphCall, Key
from ...base.kit.product_layouts import Product, broadcast_operands, plan_gemm, plan_matmul, vectors
from ..kit._library import CudaLibrary, Errors, KernelCall, LibraryDevice, factor_of
from ..runtime._stream import CudaStream
from ._cublas import DEVICE, HOST, KINDS, Cublas, CublasType, HostFactors

# The layout matches the structure in norms.cu, with its padding.
_NORM = struct.Struct("<QQqqi4x")
# float16 is computed in float32, where its denormal numbers are normal ones.
_NORM_TYPES = {dtype: number for number, dtype in enumerate((DType.bfloat16, *NATIVE))}
_NORM_THREADS = 1024
_INDEX = struct.Struct("<QQq")
# Each array as a vector: bytes to its first element, and elements from one to the next.
_Vectors: TypeAlias = list[tuple[int, int]]

_MATRICES = ("linalg.symm", "linalg.syrk", "linalg.syr2k", "linalg.trmm", "linalg.trsm")
# Operations with routines that wait for the device at their first call.
_TRIED = frozenset({*_MATRICES, "linalg.asum", "linalg.iamax", "linalg.rot"})
# Larger arrays need the same kernels as arrays of this size.
_WARM_UP_EXTENT = 512


class RoutineLibrary(CudaLibrary):
    """Operations on vectors, and on symmetric, Hermitian and triangular matrices.

    Arrays other than vectors are packed into a vector. Making the library compiles a kernel of the backend's
    own, which blocks.
    """

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._index_from_zero = device.kernels.function("norms", "index_from_zero", _INDEX.size)
        self._norm_again = device.kernels.function("norms", "norm_again", _NORM.size)
        self._blas = Cublas(device, self.name)
        self._tried: set[tuple[object, ...]] = set()

    def _plan_vectors(self, spec: Any, device: LibraryDevice) -> tuple[_Vectors | None]:
        """See the operands as vectors; None if they are none."""
        strides = [getattr(spec, name).strides for name in ("x", "y") if hasattr(spec, name)]
        return (vectors(spec.x.shape, spec.x.dtype.itemsize, *strides),)

    def _plan_index(self, spec: Any, device: LibraryDevice) -> tuple[_Vectors | None]:
        """See the operand as a vector in its own order, from which the index counts."""
        return self._plan_vectors(spec, device) if spec.x.strides[0] > 0 else (None,)

    def _plan_norm(self, spec: Any, device: LibraryDevice) -> tuple[_Vectors | None]:
        """Return the same; refuse a result of another type than that of absolute values."""
        real = KINDS[spec.x.dtype].real
        check_dtype("cuda", f"norm of {spec.x.dtype} to", spec.out.dtype, (real,))
        return self._plan_vectors(spec, device)

    def _vectors(
        self, call: KernelCall, read: Sequence[ArraySpec], updated: Sequence[ArraySpec] = ()
    ) -> list[int]:
        """Return the address of each operand as a vector, and its step; others are packed first."""
        (vectors,) = call.plan
        if vectors is None:
            addresses = [call.packed(array) for array in read]
            addresses += [call.result(array, is_updated=True) for array in updated]
            return [number for address in addresses for number in (address, 1)]
        pairs = zip((*read, *updated), vectors, strict=True)
        return [
            number for array, (offset, step) in pairs for number in (call.address_of(array) + offset, step)
        ]

    @kernel("linalg.axpy", backend="cuda", dtypes=INEXACT, plan=_plan_vectors, is_quick=True)
    def _axpy(self, spec: Any, call: KernelCall) -> None:
        kind, blas = KINDS[spec.y.dtype], self._blas
        alpha = factor_of("blas", "alpha", spec.alpha, spec.y.dtype)
        if not spec.y.size:
            return
        x, x_step, y, y_step = self._vectors(call, [spec.x], [spec.y])
        blas.select(call.stream, HOST)
        blas.factors.put(kind, alpha)
        cublas.axpy_ex_64(
            blas.handle,
            spec.y.size,
            blas.factors.alpha,
            kind.factor,
            x,
            kind.code,
            x_step,
            y,
            kind.code,
            y_step,
            kind.factor,
        )

    @kernel("linalg.scal", backend="cuda", dtypes=INEXACT, plan=_plan_vectors, is_quick=True)
    def _scal(self, spec: Any, call: KernelCall) -> None:
        self._scale(call, factor_of("blas", "alpha", spec.alpha, spec.x.dtype), spec.x, call.plan[0])

    def _scale(self, call: KernelCall, alpha: complex, array: ArraySpec, vectors: _Vectors | None) -> None:
        """Enqueue ``array = alpha * array``."""
        kind, x = KINDS[array.dtype], call.array(array)
        if not x.size:
            return
        if vectors is None and not alpha.imag:
            call.convert(x, x, scale=alpha.real)
            return
        offset, step = (0, 1) if vectors is None else vectors[0]
        address = call.result(array, is_updated=True) if vectors is None else x.address + offset
        self._blas.scale(call.stream, kind, alpha, x.size, address, step)

    @kernel("linalg.dot", backend="cuda", dtypes=INEXACT, plan=_plan_vectors, is_quick=True)
    def _dot(self, spec: Any, call: KernelCall) -> None:
        if not spec.x.size:
            call.fill(spec.out, 0)
            return
        kind = KINDS[spec.out.dtype]
        x, x_step, y, y_step = self._vectors(call, [spec.x, spec.y])
        self._blas.select(call.stream, DEVICE)
        cublas.dot_ex_64(
            self._blas.handle,
            spec.x.size,
            x,
            kind.code,
            x_step,
            y,
            kind.code,
            y_step,
            call.address_of(spec.out),
            kind.code,
            kind.factor,
        )

    @kernel("linalg.nrm2", backend="cuda", dtypes=INEXACT, plan=_plan_norm, is_quick=True)
    def _nrm2(self, spec: Any, call: KernelCall) -> None:
        if not spec.x.size:
            call.fill(spec.out, 0)
            return
        kind, size, out = KINDS[spec.x.dtype], spec.x.size, call.address_of(spec.out)
        real = KINDS[kind.real]
        x, step = self._vectors(call, [spec.x])
        self._blas.select(call.stream, DEVICE)
        cublas.nrm2ex_64(self._blas.handle, size, x, kind.code, step, out, real.code, real.factor)
        number = _NORM_TYPES.get(spec.x.dtype)
        if number is not None:
            # To cuBLAS denormal numbers are zeros.
            self._norm_again.run(
                call.handle, _NORM_THREADS, _NORM, x, out, size, step, number, threads=_NORM_THREADS
            )

    @kernel("linalg.asum", backend="cuda", dtypes=NATIVE, plan=_plan_norm, is_quick=True)
    def _asum(self, spec: Any, call: KernelCall) -> None:
        if spec.x.size:
            self._reduce(call, "asum", spec.x, call.address_of(spec.out))
        else:
            call.fill(spec.out, 0)

    @kernel("linalg.iamax", backend="cuda", dtypes=NATIVE, plan=_plan_index, is_quick=True)
    def _iamax(self, spec: Any, call: KernelCall) -> None:
        position = call.workspace(8)
        self._reduce(call, "i{}amax", spec.x, position)
        self._index_from_zero.run(call.handle, 1, _INDEX, position, call.address_of(spec.out), spec.x.size)

    def _reduce(self, call: KernelCall, name: str, x: ArraySpec, out: int) -> None:
        """Enqueue what makes a number in device memory of a vector."""
        vector = self._vectors(call, [x])
        self._blas.select(call.stream, DEVICE)
        self._blas.invoke(KINDS[x.dtype], name, x.size, *vector, out)

    @kernel("linalg.swap", backend="cuda", dtypes=tuple(DType))
    def _swap(self, spec: Any, call: KernelCall) -> None:
        x, y = call.array(spec.x), call.array(spec.y)
        copy = call.copy_of(x)
        call.convert(y, x)
        call.convert(copy, y)

    @kernel("linalg.rot", backend="cuda", dtypes=NATIVE, plan=_plan_vectors, is_quick=True)
    def _rot(self, spec: Any, call: KernelCall) -> None:
        sine = factor_of("blas", "s", spec.s, spec.x.dtype)
        if spec.x.size:
            vectors = self._vectors(call, (), [spec.x, spec.y])
            self._blas.select(call.stream, HOST)
            self._blas.invoke(KINDS[spec.x.dtype], "rot", spec.x.size, *vectors, complex(spec.c), sine)

    def _plan_matrices(self, spec: Any, device: LibraryDevice) -> BlasPlan:
        return plan_routine(spec)

    @kernel(*_MATRICES, backend="cuda", dtypes=NATIVE, plan=_plan_matrices, is_quick=True)
    def _matrices(self, spec: Any, call: KernelCall) -> None:
        plan: BlasPlan = call.plan
        routine = plan.routine_for(spec)
        if routine is None:
            return
        if "out" in plan.steps and spec.b != spec.out:
            call.convert(broadcast(call.array(spec.b), spec.out.shape), call.array(spec.out))
        arrays = {field: call.array(getattr(spec, field)) for field in plan.steps}
        copies = {field: call.copy_of(arrays[field], order) for field, order in plan.copies.items()}
        addresses = {field: array.address for field, array in {**arrays, **copies}.items()}
        self._blas.select(call.stream, HOST)
        kind = KINDS[spec.a.dtype]
        batched = _batched(plan)
        # D135: a captured graph would read the lists again at each replay, and they are not kept that long.
        if batched is not None and not call.stream.is_capturing:
            lists = {field: call.uploaded(plan.addresses(field, addresses[field])) for field in plan.steps}
            self._invoke(kind, batched, spec, lists)
        else:
            for call_addresses in plan.calls(addresses):
                self._invoke(kind, routine, spec, call_addresses)
        for field in copies.keys() & {"c", "out"}:
            call.convert(copies[field], arrays[field])

    def _invoke(
        self, kind: CublasType, routine: BlasRoutine, spec: Any, addresses: Mapping[str, int]
    ) -> None:
        arguments: list[str | complex] = []
        for value in routine.arguments:
            if isinstance(value, ScalarArgument):
                arguments.append(factor_of("blas", value.field, value.of(spec), spec.a.dtype))
            else:
                arguments.append(addresses[value.field] if isinstance(value, Matrix) else value)
        # This one writes to an array of its own, which may be the operand.
        result = arguments[-2:] if routine.name == "trmm" else ()
        self._blas.invoke(kind, routine.name, *arguments, *result)

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        """Try a routine out before it is enqueued for the first time: it waits for the device then."""
        if spec.operation not in _TRIED:
            return None
        dtype = spec.inputs()[0].dtype
        if self._find_plan(spec) is not None or dtype not in NATIVE:
            return None
        key: tuple[object, ...] = spec.operation, dtype
        if spec.operation in _MATRICES:
            is_stack = spec.outputs()[0].ndim > 2
            spec = _small_spec(spec, (1,) * is_stack)
            key = spec.descriptor().plan_key(spec)
        return None if key in self._tried else partial(self._in_context, self._try_out, spec, key)

    def _try_out(self, spec: OperationSpec, key: tuple[object, ...]) -> None:
        arrays = _arrays(spec)
        kind, room = KINDS[spec.inputs()[0].dtype], 16 * _WARM_UP_EXTENT**2
        with self._blas.scratch(len(arrays) * (room + 8)) as (stream, base):
            addresses = {field: base + number * room for number, field in enumerate(arrays)}
            if spec.operation in _MATRICES:
                plan = plan_routine(spec)
                for routine in (plan.routine, plan.plain):
                    if routine is not None:
                        self._invoke(kind, routine, spec, addresses)
                batched = _batched(plan)
                if batched is not None:
                    words, lists = np.array([*addresses.values()], np.uint64), base + len(arrays) * room
                    copied = driver.cuMemcpyHtoDAsync(lists, words.ctypes.data, words.nbytes, stream)
                    self._context.check(copied)
                    list_addresses = {field: lists + 8 * number for number, field in enumerate(arrays)}
                    self._invoke(kind, batched, spec, list_addresses)
            elif spec.operation == "linalg.rot":
                self._blas.invoke(kind, "rot", 1000, base, 1, base + 16 * 1000, 1, 1 + 0j, 0j)
            else:
                name = "asum" if spec.operation == "linalg.asum" else "i{}amax"
                self._blas.set_mode(DEVICE)
                self._blas.invoke(kind, name, 1000, base + 256, 1, base)
        self._tried.add(key)

    def _destroy(self) -> None:
        self._blas.destroy()


def _batched(plan: BlasPlan) -> BlasRoutine | None:
    """Return the one call for all matrices of a stack, which takes lists of addresses; None without one."""
    if not plan.stack or plan.routine is None or plan.routine.name != "trsm":
        return None
    return BlasRoutine("trsm_batched", (*plan.routine.arguments, math.prod(plan.stack)))


def _small_spec(spec: Any, stack: Ints) -> Any:
    """Return an operation of one matrix that needs the same kernels: sizes with as many bits are one size."""
    arrays = {name: _small_array(array, stack) for name, array in _arrays(spec).items() if array}
    return attrs.evolve(spec, **arrays)


def _arrays(spec: Any) -> dict[str, ArraySpec | None]:
    return {field.name: getattr(spec, field.name) for field in spec.descriptor().fields if field.is_array}


def _small_array(array: ArraySpec, stack: Ints) -> ArraySpec:
    rows, columns = (
        min(1 << max(extent - 1, 0).bit_length(), _WARM_UP_EXTENT) for extent in array.shape[-2:]
    )
    size, is_by_rows = array.dtype.itemsize, array.strides[-2] >= array.strides[-1]
    strides = contiguous_strides((rows, columns), size) if is_by_rows else (size, rows * size)
    return ArraySpec(0, 0, array.dtype, (*stack, rows, columns), (*(0,) * len(stack), *strides))


# The layout matches the structure in integers.cu.
_INTEGER_PRODUCT = "QQQqqqqqqqqii"

_Span: TypeAlias = tuple[int, int]
_Arguments: TypeAlias = tuple[CublasType, Product, HostFactors, int, int, int]


@attrs.frozen(eq=False)
class _Multiply:
    """The plan of a product.

    Attributes:
        run: Enqueues it.
        graph: The key of its graphs; None if it is not a single call of the library.
        spans: The bytes of a, b and the result before and after their first elements.
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
        self._integers: KernelFunction | None = None
        # The set holds identities: a member's hash takes longer than all the rest.
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

    def _load_integers(self) -> KernelFunction:
        """Load the product of integers, modulo two to the power of their bits; compiling it blocks."""
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
        graph, span = GraphCall(self) if _is_one_call(product) else None, self._device.span
        run = partial(self._multiply_without_factors, kind, product, graph)
        return _Multiply(run, graph, (span(spec.a), span(spec.b), span(spec.out)))

    def _multiply_without_factors(
        self, kind: CublasType, product: Product, graph: GraphCall | None, spec: MatmulSpec, call: KernelCall
    ) -> None:
        """Launch a graph from the third time on that it is the same product at the same place."""
        factors, out = self._blas.plain[kind.is_double], call.address_of(spec.out)
        if graph is None:
            self._multiply(call, kind, product, factors, spec, out)
            return
        a, b = call.address_of(spec.a), call.address_of(spec.b)
        # There is no graph yet, because launches with a graph do not get here.
        self._call_by_graph((graph, call.stream, a, b, out), (kind, product, factors, a, b, out))

    def _multiply_integers(self, spec: MatmulSpec, call: KernelCall) -> None:
        """Launch a thread for each element, without tiles: correct, but slower than the device allows."""
        multiply = self._load_integers()
        a, b, out = call.array(spec.a), call.array(spec.b), call.array(spec.out)
        batch, lhs, rhs = broadcast_operands((a.shape, b.shape), (a.strides, b.strides))
        multiply.run(
            call.handle,
            out.size,
            with_axes(_INTEGER_PRODUCT, 3, len(batch)),
            a.address,
            b.address,
            out.address,
            out.size,
            lhs.shape[0],
            rhs.shape[1],
            lhs.shape[1],
            *lhs.strides,
            *rhs.strides,
            a.dtype.itemsize,
            len(batch),
            *batch,
            *lhs.batch_strides,
            *rhs.batch_strides,
        )

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
        """Only scale the output, because the product is an empty sum."""
        _, beta = _factors_of(spec)
        if beta:
            c = spec.c
            self._scale(call, beta, c, vectors(c.shape, c.dtype.itemsize, c.strides))
        else:
            call.fill(spec.c, 0)

    def _multiply_with_factors(
        self, kind: CublasType, product: Product, graph: GraphCall | None, spec: Any, call: KernelCall
    ) -> None:
        factors, stream = self._blas.factors, call.stream
        alpha, beta = _factors_of(spec)
        factors.put(kind, alpha, beta)
        a, b, c = call.address_of(spec.a), call.address_of(spec.b), call.array(spec.c)
        # A factor of zero makes no product: cuBLAS then enqueues something else than one or two kernels.
        if graph is not None and alpha:
            key = graph, stream, a, b, c.address, factors.packed()
            if not self._device.graphs.replay(key, stream):
                self._call_by_graph(key, (kind, product, factors, a, b, c.address))
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
        self, call: KernelCall, kind: CublasType, product: Product, factors: HostFactors, spec: Any, c: int
    ) -> None:
        """Call cuBLAS; `c` is the address of the result."""
        self._blas.select(call.stream, HOST)
        if product.packing_a is None and product.packing_b is None:
            a, b = call.address_of(spec.a), call.address_of(spec.b)
        else:
            a, b = self._packed_operands(call, product, call.array(spec.a), call.array(spec.b))
        self._blas.multiply(kind, product, factors, a, b, c)

    def _call_by_graph(self, key: Key, arguments: _Arguments) -> None:
        """Make a graph for a key if it is time to, and do without if not."""
        graphs, stream = self._device.graphs, key[1]
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
    batch, lhs, rhs = broadcast_operands((a.shape, b.shape), (a.strides, b.strides))
    full_a, full_b = (
        DeviceArray(
            array.address, array.dtype, (*batch, *operand.shape), (*operand.batch_strides, *operand.strides)
        )
        for array, operand in ((a, lhs), (b, rhs))
    )
    return full_a, full_b
