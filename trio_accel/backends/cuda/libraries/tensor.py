"""Tensor contractions by cuTENSOR, or by transposes and cuBLAS's products of matrix stacks."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack, suppress
from functools import partial
from typing import ClassVar

import attrs
import numpy as np
from nvmath.bindings import cublas, cutensor

from ...base.contract.device_array import DeviceArray
from ...base.contract.ops import ContractionSpec
from ...base.kit.checks import INEXACT
from ...base.kit.kernels import kernel
from ...base.kit.product_layouts import Contraction, plan_contraction
from ..kit._library import CudaLibrary, Errors, KernelCall, LibraryDevice, factor_of
from ..runtime._context import CudaContext
from ..runtime._stream import CudaStream, capture_once
from ._cublas import HOST, KINDS, Cublas, CublasType, HostFactors

_logger = logging.getLogger("trio_accel.backends")

_IDENTITY = int(cutensor.Operator.OP_IDENTITY)
_ROOM = int(cutensor.WorksizePreference.WORKSPACE_DEFAULT)
_WORKSPACE = int(cutensor.PlanAttribute.REQUIRED_WORKSPACE)
# Bytes: the alignment that a plan's key records, and the size of a thread's reads.
_ALIGNMENT = 16
# An address that nothing reads, because a call captured there does not run.
_NOWHERE = 1 << 40


def find(context: CudaContext) -> int:
    """Load the library, and make a handle; 0 where it is not installed, or cannot be used. Blocks."""
    try:
        return cutensor.create()
    except Exception as error:  # noqa: BLE001  # whatever is wrong with it, there is another way
        context.query()
        _logger.info("contractions go without cuTENSOR, which is slower for some: %s", error)
        return 0


class TensorPlan:
    """A plan of cuTENSOR's contractions of one layout; nothing of it is on the device.

    Attributes:
        workspace: Bytes of workspace.
    """

    def __init__(self, handle: int, spec: ContractionSpec, kind: CublasType) -> None:
        arrays, size = (spec.a, spec.b, spec.out), spec.out.dtype.itemsize
        compute = cutensor.ComputeDesc.COMPUTE_64F() if kind.is_double else cutensor.ComputeDesc.COMPUTE_32F()
        operands: list[tuple[int, list[int], int]] = []
        with ExitStack() as held:
            for term, array in zip(spec.terms, arrays, strict=True):
                axes = [axis for axis in zip(term, array.shape, array.strides, strict=True) if axis[1] > 1]
                tensor = cutensor.create_tensor_descriptor(
                    handle,
                    len(axes),
                    [extent for _, extent, _ in axes],
                    [step // size for *_, step in axes],
                    kind.code,
                    math.gcd(array.offset, _ALIGNMENT),
                )
                held.callback(cutensor.destroy_tensor_descriptor, tensor)
                operands.append((tensor, [ord(letter) for letter, *_ in axes], _IDENTITY))
            a, b, out = operands
            contraction = cutensor.create_contraction(handle, *a, *b, *out, *out[:2], compute)
            held.callback(cutensor.destroy_operation_descriptor, contraction)
            preference = cutensor.create_plan_preference(handle, cutensor.Algo.DEFAULT, cutensor.JitMode.NONE)
            held.callback(cutensor.destroy_plan_preference, preference)
            # With less than it asks for, it falls back to kernels that may take twenty times as long.
            room = cutensor.estimate_workspace_size(handle, contraction, preference, _ROOM)
            self._plan: int = cutensor.create_plan(handle, contraction, preference, room)
            held.callback(cutensor.destroy_plan, self._plan)
            self._handle, self._held = handle, held.pop_all()
        buffer = np.zeros(1, np.uint64)
        cutensor.plan_get_attribute(handle, self._plan, _WORKSPACE, buffer.ctypes.data, buffer.nbytes)
        self.workspace: int = int(buffer[0])

    @classmethod
    def of(
        cls, context: CudaContext, handle: int, spec: ContractionSpec, kind: CublasType
    ) -> TensorPlan | None:
        """Make a plan, and have its kernel loaded; blocks.

        Returns:
            The plan; None if cuTENSOR has none, because steps from one element to the next must be above 0.

        Raises:
            ContextPoisonedError: The context is lost.
        """
        steps = [
            step
            for array in (spec.a, spec.b, spec.out)
            # An axis of one element is none, whatever its stride.
            for extent, step in zip(array.shape, array.strides, strict=True)
            if extent > 1
        ]
        if any(step <= 0 or step % spec.out.dtype.itemsize for step in steps):
            return None
        try:
            plan = cls(handle, spec, kind)
        except cutensor.cuTENSORError as error:
            context.query()
            _logger.debug("cuTENSOR has no plan for %s: %s", spec, error)
            return None
        factors = HostFactors()
        factors.put(kind, 1.0)
        with suppress(cutensor.cuTENSORError):
            # Its first launch has nothing to load then.
            capture_once(context, partial(plan.run, factors, _NOWHERE, _NOWHERE, _NOWHERE, _NOWHERE))
        return plan

    def run(self, factors: HostFactors, a: int, b: int, out: int, workspace: int, stream: int) -> None:
        """Enqueue ``out = alpha * a * b + beta * out``; without `beta`, `out` is not read."""
        cutensor.contract(
            self._handle,
            self._plan,
            factors.alpha,
            a,
            b,
            factors.beta,
            out,
            out,
            workspace,
            self.workspace,
            stream,
        )

    def close(self) -> None:
        """Give the plan back."""
        self._held.close()


@attrs.frozen(eq=False)
class _ContractionPlan:
    """The plan that contractions of one layout share.

    Attributes:
        kind: The type of the elements.
        contraction: The products; None where nothing is added, as an array is empty.
        routine: The plan of cuTENSOR; None where cuBLAS multiplies.
    """

    kind: CublasType
    contraction: Contraction | None = None
    routine: TensorPlan | None = None


class TensorLibrary(CudaLibrary):
    """Contractions by cuTENSOR, and by a cuBLAS handle of its own."""

    name = "tensor"
    errors: ClassVar[Errors] = {
        cublas.cuBLASError: cublas.Status,
        cutensor.cuTENSORError: cutensor.Status,
    }
    refused: ClassVar[frozenset[str]] = frozenset({"INVALID_VALUE"})

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._blas = Cublas(device, self.name)
        self._handle: int = find(self._context)

    def attach(self, stream: CudaStream) -> None:
        """Take the workspace of cuBLAS; see `EnqueuingLibrary.attach`."""
        self._blas.select(stream, HOST)

    def _destroy(self) -> None:
        self._blas.destroy()
        if self._handle:
            cutensor.destroy(self._handle)

    def _close_plan(self, plan: _ContractionPlan) -> None:
        if plan.routine is not None:
            plan.routine.close()

    def _plan(self, spec: ContractionSpec, device: LibraryDevice) -> _ContractionPlan:
        """Find the products, and have cuBLAS load what it multiplies this type with; blocks."""
        kind, arrays = KINDS[spec.out.dtype], (spec.a, spec.b, spec.out)
        if not all(array.size for array in arrays):
            return _ContractionPlan(kind)
        a, b, out = arrays
        shapes, strides = (a.shape, b.shape, out.shape), (a.strides, b.strides, out.strides)
        contraction = plan_contraction(spec.terms, shapes, strides, out.dtype.itemsize)
        routine = None
        if contraction.product.is_packed and self._handle:
            routine = TensorPlan.of(self._context, self._handle, spec, kind)
        if routine is None:
            self._blas.warm(kind)
        return _ContractionPlan(kind, contraction, routine)

    @kernel(ContractionSpec, backend="cuda", dtypes=INEXACT, plan=_plan)
    def _contract(self, spec: ContractionSpec, call: KernelCall) -> None:
        plan: _ContractionPlan = call.plan
        alpha, beta = (factor_of("tensor", name, getattr(spec, name), spec.out.dtype) for name in _FACTORS)
        if plan.contraction is None:
            self._scale(spec, call, plan.kind, beta)
            return
        (of_a, of_b, of_out), product = plan.contraction
        routine, blas = plan.routine, self._blas
        out = _in_order(call.array(spec.out), of_out)
        target = call.room(out) if product.is_c_packed and routine is None else out
        if beta and spec.c is not None and (target is not out or spec.c != spec.out):
            call.convert(_in_order(call.array(spec.c), of_out), target)
        blas.factors.put(plan.kind, alpha, beta)
        if routine is not None:
            room = call.workspace(routine.workspace)
            routine.run(
                blas.factors, call.address_of(spec.a), call.address_of(spec.b), out.address, room, call.handle
            )
            return
        operands = (spec.a, of_a, product.packing_a), (spec.b, of_b, product.packing_b)
        a, b = (
            call.address_of(array)
            if packing is None
            else call.copy_of(_in_order(call.array(array), order)).address
            for array, order, packing in operands
        )
        blas.select(call.stream, HOST)
        blas.multiply(plan.kind, product, blas.factors, a, b, target.address)
        if target is not out:
            call.convert(target, out)

    def _scale(self, spec: ContractionSpec, call: KernelCall, kind: CublasType, beta: complex) -> None:
        """Scale what is added: the product is a sum of nothing."""
        out = call.array(spec.out)
        if not out.size:
            return
        if not beta or spec.c is None:
            call.fill(out, 0)
            return
        room = call.room(out)
        call.convert(call.array(spec.c), room)
        self._blas.scale(call.stream, kind, beta, room.size, room.address)
        call.convert(room, out)


_FACTORS = ("alpha", "beta")


def _in_order(array: DeviceArray, order: tuple[int, ...]) -> DeviceArray:
    """Return an array with its axes in another order."""
    shape, strides = (tuple(row[axis] for axis in order) for row in (array.shape, array.strides))
    return DeviceArray(array.address, array.dtype, shape, strides)
