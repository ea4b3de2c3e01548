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
from ..kit._plan_cache import Known
from ..kit._workspace import Workspace
from ..runtime._stream import CudaStream
from ._fft_plans import Plan, Plans
from ._fft_steps import ALIGNMENT, TEMPORARIES, Convert, Transform, Zero, recipe_of

__all__ = ["FftLibrary"]

_REAL = {DType.complex64: DType.float32, DType.complex128: DType.float64}
_COMPLEX = {real: complex_ for complex_, real in _REAL.items()}
_DTYPES = {"c2c": {dtype: dtype for dtype in _REAL}, "r2c": _COMPLEX, "c2r": _REAL}

_MOST_PLANS = 64
_MOST_RECIPES = 256


@attrs.frozen(eq=False)
class _Course:
    """A recipe with its plans.

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
class _Found:
    """Where the source and the result of a transform lie.

    Attributes:
        places: Their addresses.
        only: Its plan, what that reads and writes, and whether it is the forward one: if executing it once is
            all that is to be done.
    """

    places: tuple[int, int]
    only: tuple[Plan, int, int, bool] | None


class FftLibrary(CudaLibrary):
    """Transforms by plans that are kept, and made where that may block."""

    name: ClassVar[str] = "fft"
    statuses: ClassVar[type[Exception] | None] = cufft.cuFFTError
    codes: ClassVar[type[enum.IntEnum] | None] = cufft.Result
    refused: ClassVar[frozenset[str]] = frozenset({"INVALID_SIZE", "INVALID_TYPE", "NOT_IMPLEMENTED"})
    exhausted: ClassVar[frozenset[str]] = frozenset({"ALLOC_FAILED"})
    missing: ClassVar[frozenset[str]] = frozenset({"NOT_SUPPORTED", "MISSING_DEPENDENCY"})

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._table = {FftSpec: self._enqueue_transform}
        self._plans = Plans(self._context, _MOST_PLANS)
        self._courses: OrderedDict[tuple[object, ...], _Course] = OrderedDict()
        # What was asked last: an operation is prepared, and then enqueued.
        self._last: tuple[OperationSpec | None, _Course | None] = (None, None)
        self._known: Known[_Found] = Known(device.addresses)
        self._area = Workspace(self._context)
        self._buffers = tuple(Workspace(self._context) for _ in TEMPORARIES)
        # Loads cuFFT, or says that it is missing.
        cufft.get_version()

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        """Name the plans that have to be made; see `KernelLibrary.prepare`."""
        if type(spec) is not FftSpec:
            return None
        last, course = self._last
        if last is not spec:
            course = self._courses.get(_key(spec))
        if course is not None and course.is_planned:
            self._last = spec, course
            return None
        return partial(self._in_context, self._plan, spec)

    def _enqueue_transform(self, spec: FftSpec, stream: CudaStream) -> None:
        found = self._known.find(spec, stream)
        if found is not None and found.only is not None:
            plan, source, out, is_forward = found.only
            if plan.handle is not None:
                self._plans.use(plan)
                area = self._area.reserve(stream, plan.size) if plan.size else 0
                plan.run(stream, area, source, out, is_forward=is_forward)
                return
        last, course = self._last
        if last is not spec or course is None:
            course = self._plan(spec)
        if found is None:
            found = self._find(spec, course)
            self._known.keep(spec, stream, found)
        self._run(course, found.places, stream)

    def _find(self, spec: FftSpec, course: _Course) -> _Found:
        places = self._device.address(spec.source), self._device.address(spec.out)
        if len(course.steps) == 1 and isinstance(course.steps[0], tuple) and not any(course.sizes):
            transform, plan = course.steps[0]
            if len(transform.fit.offsets) == 1:
                from_source, from_out = transform.fit.offsets[0]
                source, out = places[transform.source] + from_source, places[transform.out] + from_out
                return _Found(places, (plan, source, out, transform.is_forward))
        return _Found(places, None)

    def _run(self, course: _Course, places: tuple[int, int], stream: CudaStream) -> None:
        """Enqueue all steps of a transform."""
        arrays = self._device.arrays
        addresses = [*places]
        if any(course.sizes):
            addresses += [
                buffer.reserve(stream, size) if size else 0
                for buffer, size in zip(self._buffers, course.sizes, strict=True)
            ]
        most = 0
        for plan in course.plans:
            most = max(most, plan.size)
            self._plans.use(plan)
        area = self._area.reserve(stream, most) if most else 0
        for step in course.steps:
            if isinstance(step, tuple):
                transform, plan = step
                plan.execute(
                    stream,
                    area,
                    addresses[transform.source],
                    addresses[transform.out],
                    is_forward=transform.is_forward,
                    offsets=transform.fit.offsets,
                )
            elif isinstance(step, Convert):
                source, out = step.source.at(addresses), step.out.at(addresses)
                arrays.convert(stream, source, out, scale=step.scale, conjugate=step.conjugate)
            else:
                arrays.fill(stream, step.out.at(addresses), 0)

    def _plan(self, spec: FftSpec) -> _Course:
        """Find the steps of a transform and make its plans, unless they are there; blocks."""
        key = _key(spec)
        course = self._courses.pop(key, None) or self._course(spec)
        self._courses[key] = course
        if len(self._courses) > _MOST_RECIPES:
            self._courses.popitem(last=False)
        # None of them has to go for another.
        for plan in course.plans:
            if plan.handle is not None:
                self._plans.use(plan)
        for plan in course.plans:
            if plan.handle is None:
                self._plans.make(plan)
        self._last = spec, course
        return course

    def _course(self, spec: FftSpec) -> _Course:
        _check(spec)
        if not math.prod(spec.out.shape):
            return _Course((), (0,) * len(TEMPORARIES), ())
        recipe = recipe_of(spec)
        plans: dict[object, Plan] = {}
        steps: list[Zero | Convert | tuple[Transform, Plan]] = []
        for step in recipe.steps:
            if isinstance(step, Transform):
                key = step.fit.key
                steps.append((step, plans.setdefault(key, self._plans.find(key))))
            else:
                steps.append(step)
        return _Course(tuple(steps), recipe.sizes, tuple(plans.values()))

    def _destroy(self) -> None:
        self._plans.destroy()
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
