"""Contractions by cuTENSOR: a plan for a specification, executed by addresses."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np
from nvmath.bindings import cutensor

from ...base.contract.ops import ContractionSpec
from ..runtime._context import CudaContext
from ..runtime._stream import capture_once
from ._cublas import Factors, Kind

__all__ = ["TensorPlan", "find"]

_logger = logging.getLogger("trio_accel.backends")

_IDENTITY = int(cutensor.Operator.OP_IDENTITY)
_ROOM = int(cutensor.WorksizePreference.WORKSPACE_DEFAULT)
_WORKSPACE = int(cutensor.PlanAttribute.REQUIRED_WORKSPACE)
# Bytes: as far as a plan's key tells of addresses, and as much as a thread reads at once.
_ALIGNMENT = 16
# Where nothing is read: what is captured there does not run.
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
    """How cuTENSOR computes contractions of one layout; nothing of it is on the device.

    Attributes:
        workspace: Bytes of workspace.
    """

    def __init__(self, handle: int, spec: ContractionSpec, kind: Kind) -> None:
        arrays, size = (spec.a, spec.b, spec.out), spec.out.dtype.itemsize
        compute = cutensor.ComputeDesc.COMPUTE_64F() if kind.is_double else cutensor.ComputeDesc.COMPUTE_32F()
        operands: list[tuple[int, list[int], int]] = []
        with ExitStack() as held:
            for term, array in zip(spec.terms, arrays, strict=True):
                axes = [axis for axis in zip(term, array.shape, array.strides, strict=True) if axis[1] > 1]
                tensor = cutensor.create_tensor_descriptor(
                    handle, len(axes), [extent for _, extent, _ in axes], [step // size for *_, step in axes],
                    kind.code, math.gcd(array.offset, _ALIGNMENT),
                )  # fmt: skip
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
    def of(cls, context: CudaContext, handle: int, spec: ContractionSpec, kind: Kind) -> TensorPlan | None:
        """Make a plan, and have its kernel loaded; blocks.

        Returns:
            The plan; None where cuTENSOR has none: steps from one element to the next must be above 0.

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
        factors = Factors()
        factors.put(kind, 1.0)
        with suppress(cutensor.cuTENSORError):
            # Its first launch has nothing to load then.
            capture_once(context, partial(plan.run, factors, _NOWHERE, _NOWHERE, _NOWHERE, _NOWHERE))
        return plan

    def run(self, factors: Factors, a: int, b: int, out: int, workspace: int, stream: int) -> None:
        """Enqueue ``out = alpha * a * b + beta * out``; without `beta`, `out` is not read."""
        cutensor.contract(
            self._handle, self._plan, factors.alpha, a, b, factors.beta, out, out, workspace, self.workspace,
            stream,
        )  # fmt: skip

    def close(self) -> None:
        """Give the plan back."""
        self._held.close()
