"""Fourier transforms by cuFFT."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import ClassVar, TypeAlias

import attrs
from nvmath.bindings import cufft

from ...base.checks import NATIVE
from ...base.device_array import DeviceArray
from ...base.fft_steps import Convert, PlanKey, Transform, TransformPlan, View, Zero
from ...base.gpu.driver import LoadedCode
from ...base.kernels import kernel
from ...base.ops import FftSpec
from ..kit._library import CudaLibrary, Errors, KernelCall, LibraryDevice
from ..runtime._context import CudaContext
from ..runtime._stream import CudaStream

__all__ = ["FftLibrary"]

# Of temporary buffers, as of device memory.
_ALIGNMENT = 256


_Execute: TypeAlias = Callable[..., None]

# By kind, and whether it is of double precision: the type and what executes it.
_TYPES: dict[tuple[str, bool], tuple[cufft.Type, _Execute]] = {
    ("c2c", False): (cufft.Type.C2C, cufft.exec_c2c),
    ("c2c", True): (cufft.Type.Z2Z, cufft.exec_z2z),
    ("r2c", False): (cufft.Type.R2C, cufft.exec_r2c),
    ("r2c", True): (cufft.Type.D2Z, cufft.exec_d2z),
    ("c2r", False): (cufft.Type.C2R, cufft.exec_c2r),
    ("c2r", True): (cufft.Type.Z2D, cufft.exec_z2d),
}
_FORWARD, _INVERSE = -1, 1


class _VendorPlan(LoadedCode):
    """One plan of cuFFT. To make one takes up to a second, and loads kernels. The context is current.

    Args:
        key: Its `VendorPlanKey`.
        context: The device's context.

    Attributes:
        key: As given.
        size: Bytes of the work area that it needs.
        users: How many plans of ours execute it.
    """

    __slots__ = ("_area", "_execute", "_handle", "_signs", "_stream", "key", "size", "users")

    def __init__(self, key: PlanKey, context: CudaContext) -> None:
        self.key: PlanKey = key
        self.users: int = 0
        kind, self._execute = _TYPES[key.kind, key.is_double]
        self._signs: tuple[tuple[int, ...], tuple[int, ...]] = (
            ((_INVERSE,), (_FORWARD,)) if key.kind == "c2c" else ((), ())
        )
        self._area = 0
        self._stream: CudaStream | None = None
        self._handle = cufft.create()
        # It may wait for the device.
        super().__init__(partial(cufft.destroy, self._handle))
        try:
            # The work area is one for all plans.
            cufft.set_auto_allocation(self._handle, 0)
            self.size: int = cufft.make_plan_many64(
                self._handle,
                len(key.lengths),
                key.lengths,
                *(key.inembed, key.istride, key.idist),
                *(key.onembed, key.ostride, key.odist),
                kind,
                key.batch,
            )
            # Else the tables are still on their way when they are used.
            context.settle()
        except BaseException:
            with suppress(cufft.cuFFTError):
                self.close()
            raise

    def run(self, stream: CudaStream, area: int, source: int, out: int, is_forward: bool) -> None:
        """Enqueue the transform once."""
        if stream is not self._stream:
            cufft.set_stream(self._handle, stream.handle)
            self._stream = stream
        if area != self._area and self.size:
            cufft.set_work_area(self._handle, area)
            self._area = area
        self._runs[stream] = stream.timeline.sequence + 1
        self._execute(self._handle, source, out, *self._signs[is_forward])


@attrs.frozen(eq=False)
class _Plan:
    """The common plan of the transforms of one layout.

    Attributes:
        steps: Steps to enqueue; a transform with the plan of cuFFT that it executes.
        workspace: Bytes of the temporary buffers, and behind them of the work area of cuFFT, which its plans
            use one after the other.
        offsets: First byte of each of these.
        vendor_plans: The plans of cuFFT.
    """

    steps: tuple[Zero | Convert | tuple[Transform, _VendorPlan], ...] = ()
    workspace: int = 0
    offsets: tuple[int, ...] = (0,)
    vendor_plans: tuple[_VendorPlan, ...] = ()


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
        self._vendor_plans: dict[PlanKey, _VendorPlan] = {}
        # Loads cuFFT, or says that it is missing.
        cufft.get_version()

    def _plan(self, spec: FftSpec, device: LibraryDevice) -> _Plan:
        """Find the steps of a transform, and have cuFFT make the plans that are not there; blocks."""
        if not math.prod(spec.out.shape):
            return _Plan()
        planned = TransformPlan(spec)
        held: dict[PlanKey, _VendorPlan] = {}
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
    def _transform(self, spec: FftSpec, call: KernelCall) -> None:
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

    def _hold(self, key: PlanKey) -> _VendorPlan:
        """Have one more plan execute a plan of cuFFT, which is made if it is not there."""
        plan = self._vendor_plans.get(key)
        if plan is None:
            plan = self._vendor_plans[key] = _VendorPlan(key, self._context)
        plan.users += 1
        return plan

    def _release(self, vendor_plans: Iterable[_VendorPlan]) -> None:
        """Have one plan less execute plans of cuFFT; those that none executes any more are destroyed."""
        for plan in vendor_plans:
            plan.users -= 1
            if not plan.users:
                del self._vendor_plans[plan.key]
                plan.close()

    def _close_plan(self, plan: _Plan) -> None:
        self._release(plan.vendor_plans)

    def _is_busy(self, plan: _Plan) -> bool:
        return any(vendor_plan.is_busy for vendor_plan in plan.vendor_plans)


def _array(view: View, buffers: list[int]) -> DeviceArray:
    """Return the array, given the addresses of the buffers."""
    return DeviceArray(buffers[view.buffer], view.dtype, view.shape, view.strides)
