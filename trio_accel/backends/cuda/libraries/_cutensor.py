"""Contractions by cuTENSOR: a plan for a specification, executed by addresses."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np
from nvmath.bindings import cutensor

from ...base.ops import ArraySpec, ContractionSpec
from ..kit._library import LibraryDevice
from ..runtime._stream import capture_once
from ._cublas import Factors, Kind

__all__ = ["Cutensor", "TensorPlan"]

_logger = logging.getLogger("trio_accel.backends")

_IDENTITY = int(cutensor.Operator.OP_IDENTITY)
_DEFAULT = int(cutensor.WorksizePreference.WORKSPACE_DEFAULT)
# Bytes: as far as a plan's key tells of addresses, and as much as a thread reads at once.
_ALIGNMENT = 16
# Of small tensors, sums are cut into parts: as much as cuBLAS is given.
_LEAST_WORKSPACE = 32 << 20
# Where nothing is read: what is captured there does not run.
_NOWHERE = 1 << 40


class TensorPlan:
    """How cuTENSOR computes contractions of one layout.

    Attributes:
        workspace: Bytes of workspace.
    """

    __slots__ = ("_handle", "_held", "_plan", "workspace")

    def __init__(self, handle: int, plan: int, held: ExitStack) -> None:
        self._handle, self._plan, self._held = handle, plan, held
        buffer = np.zeros(1, np.uint64)
        attribute = cutensor.PlanAttribute.REQUIRED_WORKSPACE
        cutensor.plan_get_attribute(handle, plan, attribute, buffer.ctypes.data, buffer.nbytes)
        self.workspace: int = int(buffer[0])

    def run(self, factors: Factors, a: int, b: int, out: int, workspace: int, stream: int) -> None:
        """Enqueue ``out = alpha * a * b + beta * out``; without `beta`, `out` is not read."""
        cutensor.contract(
            self._handle, self._plan, factors.alpha, a, b, factors.beta, out, out, workspace, self.workspace,
            stream,
        )  # fmt: skip

    def close(self) -> None:
        """Give the plan back; nothing of it is on the device."""
        self._held.close()


class Cutensor:
    """The library on a device. Made in a thread, with the context current; that blocks."""

    def __init__(self, device: LibraryDevice) -> None:
        self._context = device.context
        with ExitStack() as held:
            self._handle: int = cutensor.create()
            held.callback(cutensor.destroy, self._handle)
            self._preference: int = cutensor.create_plan_preference(
                self._handle, cutensor.Algo.DEFAULT, cutensor.JitMode.NONE
            )
            held.callback(cutensor.destroy_plan_preference, self._preference)
            self._held = held.pop_all()

    @classmethod
    def find(cls, device: LibraryDevice) -> Cutensor | None:
        """Load the library; None where it is not installed, or cannot be used."""
        try:
            return cls(device)
        except Exception as error:  # noqa: BLE001  # whatever is wrong with it, there is another way
            device.context.query()
            _logger.info("contractions go without cuTENSOR, which is slower for some: %s", error)
            return None

    def destroy(self) -> None:
        """Give the handle back; the context is current."""
        self._held.close()

    def plan(self, spec: ContractionSpec, kind: Kind) -> TensorPlan | None:
        """Make a plan, and have its kernel loaded; blocks.

        Returns:
            The plan; None where cuTENSOR has none: steps from one element to the next must be above 0.

        Raises:
            ContextPoisonedError: The context is lost.
        """
        arrays = spec.a, spec.b, spec.out
        size = spec.out.dtype.itemsize
        # An axis of one element is none, whatever its stride.
        axes = [
            [axis for axis in zip(term.encode(), array.shape, array.strides, strict=True) if axis[1] > 1]
            for term, array in zip(spec.terms, arrays, strict=True)
        ]
        if any(step <= 0 or step % size for row in axes for *_, step in row):
            return None
        try:
            with ExitStack() as held:
                made = self._describe(axes, arrays, kind, held)
                plan = TensorPlan(self._handle, made, held.pop_all())
        except cutensor.cuTENSORError as error:
            self._context.query()
            _logger.debug("cuTENSOR has no plan for %s: %s", spec, error)
            return None
        factors = Factors()
        factors.put(kind, 1.0)
        with suppress(cutensor.cuTENSORError):
            # Its first launch has nothing to load then.
            capture_once(self._context, partial(plan.run, factors, *[_NOWHERE] * 4))
        return plan

    def _describe(
        self, axes: list[list[tuple[int, int, int]]], arrays: Sequence[ArraySpec], kind: Kind, held: ExitStack
    ) -> int:
        """Make descriptors and a plan, which are given back with `held`."""
        handle, size = self._handle, arrays[0].dtype.itemsize
        operands: list[tuple[int, list[int]]] = []
        for row, array in zip(axes, arrays, strict=True):
            modes, extents, steps = ([axis[part] for axis in row] for part in range(3))
            tensor = cutensor.create_tensor_descriptor(
                handle, len(row), extents, [step // size for step in steps], kind.code,
                math.gcd(array.offset, _ALIGNMENT),
            )  # fmt: skip
            held.callback(cutensor.destroy_tensor_descriptor, tensor)
            operands.append((tensor, modes))
        (a, of_a), (b, of_b), (out, of_out) = operands
        compute = cutensor.ComputeDesc.COMPUTE_64F() if kind.is_double else cutensor.ComputeDesc.COMPUTE_32F()
        contraction = cutensor.create_contraction(
            handle, a, of_a, _IDENTITY, b, of_b, _IDENTITY, out, of_out, _IDENTITY, out, of_out, compute
        )
        held.callback(cutensor.destroy_operation_descriptor, contraction)
        wanted = cutensor.estimate_workspace_size(handle, contraction, self._preference, _DEFAULT)
        # No more than copies of all three take on the other way.
        most = max(sum(array.size for array in arrays) * size, _LEAST_WORKSPACE)
        plan = cutensor.create_plan(handle, contraction, self._preference, min(wanted, most))
        held.callback(cutensor.destroy_plan, plan)
        return plan
