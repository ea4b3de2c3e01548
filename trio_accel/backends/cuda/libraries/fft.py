"""Fourier transforms by cuFFT."""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import attrs
from nvmath.bindings import cufft

from ...base import DType
from ...base.checks import check_transform_axes
from ...base.ops import FftSpec, OperationSpec
from ..kit._checks import check_dtype
from ..kit._device import LibraryDevice
from ..kit._library import CudaLibrary
from ..kit._plan_cache import PlanCache
from ..kit._workspace import Workspace
from ..runtime._stream import CudaStream
from ._fft_plans import Plan, Plans
from ._fft_steps import ALIGNMENT, TEMPORARIES, Convert, Transform, Zero, plan_transform

__all__ = ["FftLibrary"]

_REAL = {DType.complex64: DType.float32, DType.complex128: DType.float64}
_COMPLEX = {real: complex_ for complex_, real in _REAL.items()}
_DTYPES = {"c2c": {dtype: dtype for dtype in _REAL}, "r2c": _COMPLEX, "c2r": _REAL}

_MOST_PLANS = 64
_MOST_BOUND_PLANS = 256


@attrs.frozen(eq=False)
class _BoundPlan:
    """The plan of a transform with the plans of cuFFT for its steps.

    Attributes:
        steps: What to enqueue.
        sizes: Bytes of the temporary buffers.
        plans: All plans of the steps.
    """

    steps: tuple[Zero | Convert | tuple[Transform, Plan], ...]
    sizes: tuple[int, ...]
    plans: tuple[Plan, ...]

    @property
    def is_planned(self) -> bool:
        """Whether all plans are made."""
        for plan in self.plans:  # noqa: SIM110  # before each transform: a generator takes three times as long
            if plan.handle is None:
                return False
        return True


@attrs.frozen(eq=False)
class _Binding:
    """Where the source and the result of a transform lie.

    Attributes:
        addresses: Of both.
        only: Its plan, what that reads and writes, and whether it is the forward one: if executing it once is
            all that is to be done.
    """

    addresses: tuple[int, int]
    only: tuple[Plan, int, int, bool] | None


class FftLibrary(CudaLibrary):
    """Transforms by plans that are cached, and made where that may block."""

    name: ClassVar[str] = "fft"
    statuses: ClassVar[type[Exception] | None] = cufft.cuFFTError
    codes: ClassVar[type[enum.IntEnum] | None] = cufft.Result
    refused: ClassVar[frozenset[str]] = frozenset({"INVALID_SIZE", "INVALID_TYPE", "NOT_IMPLEMENTED"})
    exhausted: ClassVar[frozenset[str]] = frozenset({"ALLOC_FAILED"})
    missing: ClassVar[frozenset[str]] = frozenset({"NOT_SUPPORTED", "MISSING_DEPENDENCY"})

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._table = {FftSpec: self._enqueue_transform}
        self._fft_plans = Plans(self._context, _MOST_PLANS)
        self._bound_plans: OrderedDict[tuple[object, ...], _BoundPlan] = OrderedDict()
        # What was asked last: an operation is prepared, and then enqueued.
        self._last: tuple[OperationSpec | None, _BoundPlan | None] = (None, None)
        self._plan_cache: PlanCache[_Binding] = PlanCache(device.addresses)
        self._area = Workspace(self._context)
        self._buffers = tuple(Workspace(self._context) for _ in TEMPORARIES)
        # Loads cuFFT, or says that it is missing.
        cufft.get_version()

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        """Name the plans that have to be made; see `KernelLibrary.prepare`."""
        if type(spec) is not FftSpec:
            return None
        last, bound = self._last
        if last is not spec:
            bound = self._bound_plans.get(_key(spec))
        if bound is not None and bound.is_planned:
            self._last = spec, bound
            return None
        return partial(self._in_context, self._plan, spec)

    def _enqueue_transform(self, spec: FftSpec, stream: CudaStream) -> None:
        binding = self._plan_cache.find(spec, stream)
        if binding is not None and binding.only is not None:
            plan, source, out, is_forward = binding.only
            if plan.handle is not None:
                self._fft_plans.use(plan)
                area = self._area.reserve(stream, plan.size) if plan.size else 0
                plan.run(stream, area, source, out, is_forward=is_forward)
                return
        last, bound = self._last
        if last is not spec or bound is None:
            bound = self._plan(spec)
        if binding is None:
            binding = self._bind(spec, bound)
            self._plan_cache.store(spec, stream, binding)
        self._run_steps(bound, binding.addresses, stream)

    def _bind(self, spec: FftSpec, bound: _BoundPlan) -> _Binding:
        addresses = self._device.address(spec.source), self._device.address(spec.out)
        if len(bound.steps) == 1 and isinstance(bound.steps[0], tuple) and not any(bound.sizes):
            transform, plan = bound.steps[0]
            if len(transform.fit.offsets) == 1:
                from_source, from_out = transform.fit.offsets[0]
                source, out = addresses[transform.source] + from_source, addresses[transform.out] + from_out
                return _Binding(addresses, (plan, source, out, transform.is_forward))
        return _Binding(addresses, None)

    def _run_steps(self, bound: _BoundPlan, addresses: tuple[int, int], stream: CudaStream) -> None:
        """Enqueue all steps of a transform."""
        arrays = self._device.arrays
        buffers = [*addresses]
        if any(bound.sizes):
            buffers += [
                buffer.reserve(stream, size) if size else 0
                for buffer, size in zip(self._buffers, bound.sizes, strict=True)
            ]
        most = 0
        for plan in bound.plans:
            most = max(most, plan.size)
            self._fft_plans.use(plan)
        area = self._area.reserve(stream, most) if most else 0
        for step in bound.steps:
            if isinstance(step, tuple):
                transform, plan = step
                plan.execute(
                    stream,
                    area,
                    buffers[transform.source],
                    buffers[transform.out],
                    is_forward=transform.is_forward,
                    offsets=transform.fit.offsets,
                )
            elif isinstance(step, Convert):
                source, out = step.source.at(buffers), step.out.at(buffers)
                arrays.convert(stream, source, out, scale=step.scale, conjugate=step.conjugate)
            else:
                arrays.fill(stream, step.out.at(buffers), 0)

    def _plan(self, spec: FftSpec) -> _BoundPlan:
        """Find the steps of a transform and make its plans, unless they are there; blocks."""
        key = _key(spec)
        bound = self._bound_plans.pop(key, None) or self._bind_plan(spec)
        self._bound_plans[key] = bound
        if len(self._bound_plans) > _MOST_BOUND_PLANS:
            self._bound_plans.popitem(last=False)
        # None of them has to go for another.
        for plan in bound.plans:
            if plan.handle is not None:
                self._fft_plans.use(plan)
        for plan in bound.plans:
            if plan.handle is None:
                self._fft_plans.make(plan)
        self._last = spec, bound
        return bound

    def _bind_plan(self, spec: FftSpec) -> _BoundPlan:
        _check(spec)
        if not math.prod(spec.out.shape):
            return _BoundPlan((), (0,) * len(TEMPORARIES), ())
        planned = plan_transform(spec)
        plans: dict[object, Plan] = {}
        steps: list[Zero | Convert | tuple[Transform, Plan]] = []
        for step in planned.steps:
            if isinstance(step, Transform):
                key = step.fit.key
                steps.append((step, plans.setdefault(key, self._fft_plans.find(key))))
            else:
                steps.append(step)
        return _BoundPlan(tuple(steps), planned.sizes, tuple(plans.values()))

    def _destroy(self) -> None:
        self._fft_plans.destroy()
        for workspace in (self._area, *self._buffers):
            workspace.close()


def _key(spec: FftSpec) -> tuple[object, ...]:
    """What the steps of a transform depend on."""
    source, out = spec.source, spec.out
    return (
        *(spec.kind, spec.direction, spec.lengths, spec.axes, spec.norm),
        # Types are compared by identity: cheaper than their hash, which is NumPy's.
        *(source.shape, source.strides, id(source.dtype), source.offset % ALIGNMENT),
        *(out.shape, out.strides, id(out.dtype), out.offset % ALIGNMENT),
    )


def _check(spec: FftSpec) -> None:
    """Refuse what is no transform.

    Raises:
        NotSupportedError: A type that has none.
        LibraryError: Axes or lengths that are none.
    """
    operation = f"{spec.direction} {spec.kind} transform"
    results = _DTYPES[spec.kind]
    check_dtype(operation, spec.source.dtype, results)
    check_dtype(f"{operation} of {spec.source.dtype} to", spec.out.dtype, (results[spec.source.dtype],))
    check_transform_axes(spec)
