"""Fourier transforms by cuFFT."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate
from typing import ClassVar

import attrs
from nvmath.bindings import cufft

from ...base.checks import NATIVE
from ...base.device_array import DeviceArray
from ...base.fft_layouts import PlanKey, View
from ...base.fft_steps import Convert, Transform, TransformPlan, Zero
from ...base.kernels import kernel
from ...base.ops import FftSpec
from ..kit._device import LibraryDevice
from ..kit._library import Call, CudaLibrary, Errors
from ._fft_plans import VendorPlan

__all__ = ["FftLibrary"]

# Of temporary buffers, as of device memory.
_ALIGNMENT = 256


@attrs.frozen(eq=False)
class _Plan:
    """What the transforms of one layout have in common.

    Attributes:
        steps: What to enqueue; a transform with the plan of cuFFT that it executes.
        workspace: Bytes of the temporary buffers, and behind them of the work area of cuFFT, which its plans
            use one after the other.
        offsets: Where each of these begins.
        vendor_plans: The plans of cuFFT.
    """

    steps: tuple[Zero | Convert | tuple[Transform, VendorPlan], ...] = ()
    workspace: int = 0
    offsets: tuple[int, ...] = (0,)
    vendor_plans: tuple[VendorPlan, ...] = ()


class FftLibrary(CudaLibrary):
    """Transforms by plans that are cached, and made where that may block.

    Plans that differ in direction, scaling or alignment execute the same plans of cuFFT.
    """

    name = "fft"
    errors: ClassVar[Errors] = {cufft.cuFFTError: cufft.Result}
    refused: ClassVar[frozenset[str]] = frozenset({"INVALID_SIZE", "INVALID_TYPE", "NOT_IMPLEMENTED"})
    # Each has tables in device memory.
    most_plans: ClassVar[int] = 256

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._vendor_plans: dict[PlanKey, VendorPlan] = {}
        # Loads cuFFT, or says that it is missing.
        cufft.get_version()

    def _plan(self, spec: FftSpec, device: LibraryDevice) -> _Plan:
        """Find the steps of a transform, and have cuFFT make the plans that are not there; blocks."""
        if not math.prod(spec.out.shape):
            return _Plan()
        planned = TransformPlan(spec)
        held: dict[PlanKey, VendorPlan] = {}
        try:
            for step in planned.steps:
                if isinstance(step, Transform) and step.fit.key not in held:
                    held[step.fit.key] = self._hold(step.fit.key)
        except BaseException:
            self._release(held.values())
            raise
        steps = [
            (step, held[step.fit.key]) if isinstance(step, Transform) else step for step in planned.steps
        ]
        sizes = [*planned.sizes.values(), max((plan.size for plan in held.values()), default=0)]
        ends = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
        return _Plan(tuple(steps), ends[-1], tuple(ends[:-1]), tuple(held.values()))

    @kernel(FftSpec, backend="cuda", dtypes=NATIVE, plan=_plan)
    def _transform(self, spec: FftSpec, call: Call) -> None:
        plan: _Plan = call.plan
        workspace = call.workspace(plan.workspace)
        buffers = [call.at(spec.source), call.at(spec.out)]
        buffers += [workspace + offset for offset in plan.offsets]
        for step in plan.steps:
            if isinstance(step, tuple):
                transform, vendor_plan = step
                source, out = buffers[transform.source], buffers[transform.out]
                for from_source, from_out in transform.fit.offsets:
                    vendor_plan.run(
                        call.stream, buffers[-1], source + from_source, out + from_out, transform.is_forward
                    )
            elif isinstance(step, Convert):
                from_, to = _array(step.source, buffers), _array(step.out, buffers)
                call.convert(from_, to, scale=step.scale, conjugate=step.conjugate)
            else:
                call.fill(_array(step.out, buffers), 0)

    def _hold(self, key: PlanKey) -> VendorPlan:
        """Have one more plan execute a plan of cuFFT, which is made if it is not there."""
        plan = self._vendor_plans.get(key)
        if plan is None:
            plan = self._vendor_plans[key] = VendorPlan(key, self._context)
        plan.users += 1
        return plan

    def _release(self, vendor_plans: Iterable[VendorPlan]) -> None:
        """Have one plan less execute plans of cuFFT; those that none executes any more are destroyed."""
        for plan in vendor_plans:
            plan.users -= 1
            if not plan.users:
                del self._vendor_plans[plan.key]
                plan.destroy()

    def _close_plan(self, plan: _Plan) -> None:
        self._release(plan.vendor_plans)

    def _is_busy(self, plan: _Plan) -> bool:
        return any(vendor_plan.is_busy for vendor_plan in plan.vendor_plans)


def _array(view: View, buffers: list[int]) -> DeviceArray:
    """The array, once it is known where the buffers lie."""
    return DeviceArray(buffers[view.buffer], view.dtype, view.shape, view.strides)
