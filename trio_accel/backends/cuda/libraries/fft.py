"""Fourier transforms by cuFFT, and expressions that it computes for each element that it loads or stores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import ClassVar

import attrs
import numpy as np
from cuda.bindings import driver
from nvmath.bindings import cufft

from ...base import NATIVE, DeviceArray, DType, Ints, LibraryError, NotSupportedError, kernel
from ...base.contract.ops import ArraySpec, ExpressionSpec, FftSpec, FusedFftSpec, OperationSpec
from ...base.expressions import compiled
from ...base.gpu.driver import LoadedCode
from ...base.gpu.kernels import CompiledExpression
from ...base.kit.fft_steps import (
    OUT,
    SOURCE,
    Convert,
    FftStep,
    PlanKey,
    TransformPlan,
    View,
    Zero,
    goes_forward,
    scale_of,
    single,
)
from ..kit._library import CudaLibrary, Errors, KernelCall, LibraryDevice
from ..runtime._compiler import compiled as compile_source
from ..runtime._context import CudaContext
from ..runtime._stream import CudaStream

# The alignment of argument structures.
_ALIGNED = 16
# The names of each dtype: the suffix of function names, the element type, and the suffix of callback types.
_NAMES = {
    DType.float32: ("Real", "float", "REAL"),
    DType.float64: ("DoubleReal", "double", "REAL_DOUBLE"),
    DType.complex64: ("Complex", "float2", "COMPLEX"),
    DType.complex128: ("DoubleComplex", "double2", "COMPLEX_DOUBLE"),
}
_LOAD = """
__device__ {type} cufftJITCallbackLoad{name}(void *, unsigned long long i, void *info, void *)
{{
    const Arguments &arguments = *(const Arguments *)info;
    const auto x = compute(arguments, (Index)i, load_at(arguments, (Index)i)).x0;
    return {value};
}}
"""
# The element replaces the loaded one, whose load the compiler then removes.
_STORE = """
__device__ void cufftJITCallbackStore{name}(void *, unsigned long long i, {type} x, void *info, void *)
{{
    const Arguments &arguments = *(const Arguments *)info;
    Loaded loaded = load_at(arguments, (Index)i);
    loaded.x0 = {value};
    store_at(arguments, (Index)i, compute(arguments, (Index)i, loaded));
}}
"""


@attrs.frozen(eq=False)
class Callback:
    """The source of one callback, and its type in cuFFT."""

    source: compiled.KernelSource
    type: cufft.XtCallbackType

    @classmethod
    def load(cls, spec: ExpressionSpec) -> Callback:
        """Make a callback that computes an element instead of loading it."""
        return cls._create(spec, "LD", _LOAD, spec.results[0].dtype, ("x", "{type}{{x.re, x.im}}"))

    @classmethod
    def store(cls, spec: ExpressionSpec, scale: float) -> Callback:
        """Make a callback that multiplies an element, computes another one from it, and stores that."""
        by = f"* ({{part}}){scale.hex()}"
        return cls._create(
            spec, "ST", _STORE, spec.arrays[0].dtype, (f"x {by}", f"{{{{x.x {by}, x.y {by}}}}}")
        )

    @classmethod
    def _create(
        cls, spec: ExpressionSpec, side: str, text: str, dtype: DType, values: tuple[str, str]
    ) -> Callback:
        name, element, ending = _NAMES[dtype]
        value = values[dtype.kind == "complex"].format(type=element, part=element.removesuffix("2"))
        source = compiled.make_functions(spec, text.format(name=name, type=element, value=value))
        return cls(source, cufft.XtCallbackType[f"{side}_{ending}"])


class Callbacks:
    """The callbacks of one cuFFT plan, and the memory of their arguments.

    cuFFT takes the address of this memory when the plan is made, so it is written before transforms with
    other arguments. The context is current.

    Args:
        callbacks: A callback for loads, one for stores, or both.
        context: The device's context.
        architecture: Its compute capability.
    """

    def __init__(self, callbacks: Sequence[Callback], context: CudaContext, architecture: str) -> None:
        self._callbacks = callbacks
        self._context = context
        sizes = [-(-callback.source.arguments.size // _ALIGNED) * _ALIGNED for callback in callbacks]
        *self._offsets, self._size = accumulate(sizes, initial=0)
        self._uploaded_arguments = b""
        self._images = [_compiled(callback.source.text, architecture) for callback in callbacks]
        self._address = 0

    def set(self, handle: int) -> None:
        """Have an unmade plan call them, because cuFFT reads their code when it makes the plan."""
        self._address = int(self._context.check(driver.cuMemAlloc(self._size)))
        for callback, offset, image in zip(self._callbacks, self._offsets, self._images, strict=True):
            cufft.xt_set_jit_callback(handle, 0, image, len(image), callback.type, [self._address + offset])

    def tell(
        self, call: KernelCall, last_stream: CudaStream | None, values: Sequence[tuple[object, ...]]
    ) -> None:
        """Set their arguments from now on; earlier transforms read their own.

        Args:
            call: The launch.
            last_stream: The stream of the last transform.
            values: Arguments of each.
        """
        packed = bytearray(self._size)
        for callback, offset, arguments in zip(self._callbacks, self._offsets, values, strict=True):
            callback.source.arguments.pack_into(packed, offset, *arguments)
        if call.stream is not last_stream and last_stream is not None and not last_stream.is_destroyed:
            self._context.order(last_stream.handle, call.handle)
        if bytes(packed) != self._uploaded_arguments:
            call.stream.copy(self._address, call.uploaded(np.frombuffer(packed, np.uint8)), len(packed))
            self._uploaded_arguments = bytes(packed)

    def close(self) -> None:
        """Give the memory back: the plan is destroyed."""
        if self._address:
            driver.cuMemFree(self._address)


def _compiled(text: str, architecture: str) -> bytes:
    from cuda.core import ProgramOptions

    options = ProgramOptions(
        arch=f"sm_{architecture}", fma=False, link_time_optimization=True, relocatable_device_code=True
    )
    return compile_source(text, options, target="ltoir").code


# Versions of cuFFT (CUDA 13.3) with wrong callbacks of real numbers for some lengths.
_WRONG = range(12300, 12400)
# Longer transforms take several kernels. These are slower with callbacks than separate launches, and so are
# epilogs of real transforms (D173).
_MAX_ONE_KERNEL_LENGTH = 1 << 13
# The alignment of temporary buffers, like the alignment of device memory.
_ALIGNMENT = 256


# cuFFT's names of the kinds in double precision; in single precision they are the same.
_DOUBLE = {"c2c": "z2z", "r2c": "d2z", "c2r": "z2d"}
_FORWARD, _INVERSE = -1, 1


class _VendorPlan(LoadedCode):
    """One plan of cuFFT. To make one takes up to a second, and loads kernels. The context is current.

    Args:
        key: Its `PlanKey`.
        context: The device's context.
        callbacks: Called for its elements.

    Attributes:
        key: The argument.
        callbacks: The argument.
        size: Bytes of the work area that it needs.
        users: How many plans of ours execute it.
    """

    __slots__ = ("_area", "_execute", "_handle", "_signs", "_stream", "callbacks", "key", "size", "users")

    def __init__(self, key: PlanKey, context: CudaContext, callbacks: Callbacks | None = None) -> None:
        self.key: PlanKey = key
        self.callbacks: Callbacks | None = callbacks
        self.users: int = 0
        kind = _DOUBLE[key.kind] if key.is_double else key.kind
        self._execute: Callable[..., None] = getattr(cufft, f"exec_{kind}")
        self._signs: tuple[Ints, Ints] = ((_INVERSE,), (_FORWARD,)) if key.kind == "c2c" else ((), ())
        self._area = 0
        self._stream: CudaStream | None = None
        self._handle = cufft.create()
        # It may wait for the device.
        super().__init__(partial(cufft.destroy, self._handle))
        try:
            # The work area is one for all plans.
            cufft.set_auto_allocation(self._handle, 0)
            if callbacks is not None:
                callbacks.set(self._handle)
            layout = key.inembed, key.istride, key.idist, key.onembed, key.ostride, key.odist
            self.size: int = cufft.make_plan_many64(
                self._handle, len(key.lengths), key.lengths, *layout, cufft.Type[kind.upper()], key.batch
            )
            # The wait lets the tables arrive before they are used.
            context.settle()
        except BaseException:
            with suppress(cufft.cuFFTError):
                self.close()
            raise

    def close(self) -> None:
        """See `LoadedCode.close`."""
        super().close()
        if self.callbacks is not None:
            self.callbacks.close()

    def tell(self, call: KernelCall, values: list[tuple[object, ...]]) -> None:
        """Set the arguments of its callbacks."""
        if self.callbacks is not None:
            self.callbacks.tell(call, self._stream, values)

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
class _FftPlan:
    """The common plan of transforms with one layout.

    Attributes:
        steps: Steps to enqueue; a transform with the plan of cuFFT that it executes.
        workspace: Bytes of the temporary buffers, followed by cuFFT's work area, which its plans use one
            after the other.
        offsets: First byte of each of these.
        vendor_plans: The plans of cuFFT.
        sides: The prolog and the epilog of a transform with expressions: compiled code for a launch of its
            own, the source if cuFFT calls it, and None if it is missing.
    """

    steps: tuple[Zero | Convert | tuple[FftStep, _VendorPlan], ...] = ()
    workspace: int = 0
    offsets: Ints = (0,)
    vendor_plans: tuple[_VendorPlan, ...] = ()
    sides: tuple[CompiledExpression | compiled.KernelSource | None, ...] = (None, None)

    @property
    def kernels(self) -> list[CompiledExpression]:
        """The expressions with launches of their own."""
        return [side for side in self.sides if isinstance(side, CompiledExpression)]


class FftLibrary(CudaLibrary):
    """Transforms by cached plans, which are made where blocking is allowed.

    Plans that differ in direction, scaling or alignment execute the same plans of cuFFT.
    """

    name = "fft"
    errors: ClassVar[Errors] = {cufft.cuFFTError: cufft.Result}
    refused: ClassVar[frozenset[str]] = frozenset({"INVALID_SIZE", "INVALID_TYPE", "NOT_IMPLEMENTED"})
    # Each has tables in device memory.
    most_plans: ClassVar[int] = 256

    def __init__(self, device: LibraryDevice) -> None:
        super().__init__(device)
        self._vendor_plans: dict[tuple[PlanKey, Callbacks | None], _VendorPlan] = {}
        # Loads cuFFT, or raises if it is missing.
        cufft.get_version()

    def _plan(self, spec: FftSpec, device: LibraryDevice) -> _FftPlan:
        """Find the steps of a transform, and have cuFFT make missing plans; blocks."""
        if not math.prod(spec.out.shape):
            return _FftPlan()
        planned = TransformPlan(spec)
        held: dict[PlanKey, _VendorPlan] = {}
        try:
            for step in planned.steps:
                if isinstance(step, FftStep) and step.fit.key not in held:
                    held[step.fit.key] = self._hold(step.fit.key)
        except BaseException:
            self._release(held.values())
            raise
        steps = [(step, held[step.fit.key]) if isinstance(step, FftStep) else step for step in planned.steps]
        sizes = [*planned.sizes.values(), max((plan.size for plan in held.values()), default=0)]
        ends = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
        return _FftPlan(tuple(steps), ends[-1], tuple(ends[:-1]), tuple(held.values()))

    @kernel(FftSpec, backend="cuda", dtypes=NATIVE, plan=_plan)
    def _transform(self, spec: FftSpec, call: KernelCall) -> None:
        self._run_steps(call.plan, call, call.address_of(spec.source), call.address_of(spec.out))

    def _run_steps(self, plan: _FftPlan, call: KernelCall, *arrays: int) -> None:
        workspace, buffers = call.workspace(plan.workspace), list(arrays)
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

    def _plan_fused(self, spec: FusedFftSpec, device: LibraryDevice) -> _FftPlan:
        """Have cuFFT call the expressions, or compile them where it does not; blocks."""
        if not math.prod(spec.out.shape):
            return _FftPlan()
        try:
            return self._plan_callbacks(spec)
        except Exception as error:
            # If cuFFT refuses callbacks, or lacks them, expressions are launched.
            if not isinstance(
                self._as_backend_error(error), (NotSupportedError, LibraryError, cufft.cuFFTError)
            ):
                raise
        prolog, transform, epilog = spec.parts(spec.has_prolog, spec.has_epilog)
        expressions: list[CompiledExpression | None] = []
        try:
            for expression, has in ((prolog, spec.has_prolog), (epilog, spec.has_epilog)):
                source = compiled.make_kernel(expression, self.backend) if has else None
                expressions.append(None if source is None else CompiledExpression.load(source, device))
            return attrs.evolve(self._plan(transform, device), sides=tuple(expressions))
        except BaseException:
            # No plan owns them, so nothing else would unload them before the device ends.
            for loaded in expressions:
                if loaded is not None:
                    loaded.close()
            raise

    def _plan_callbacks(self, spec: FusedFftSpec) -> _FftPlan:
        """Have cuFFT call the expressions.

        Raises:
            NotSupportedError: The transform takes several steps.
            cuFFTError: cuFFT lacks callbacks for it.
        """
        # cuFFT destroys the source of a transform to real numbers, so it computes the prolog of any.
        has_prolog = spec.has_prolog or spec.kind == "c2r"
        scale = scale_of(spec)
        has_epilog = spec.has_epilog or scale != 1.0
        prolog, transform, epilog = spec.parts(has_prolog, has_epilog)
        match = single(transform)
        is_wrong = spec.kind != "c2c" and cufft.get_version() in _WRONG
        is_slow = max(spec.lengths) > _MAX_ONE_KERNEL_LENGTH or (spec.kind == "r2c" and spec.has_epilog)
        if match is None or is_wrong or is_slow or not (has_prolog or has_epilog):
            raise NotSupportedError("fft: callbacks go with one plan", backend=self.backend)
        sides = (
            Callback.load(prolog) if has_prolog else None,
            Callback.store(epilog, scale) if has_epilog else None,
        )
        callbacks = Callbacks(
            [callback for callback in sides if callback], self._context, self._device.architecture
        )
        plan = self._hold(match.key, callbacks)
        step = FftStep(match, SOURCE, OUT, goes_forward(transform))
        sources = tuple([None if callback is None else callback.source for callback in sides])
        return _FftPlan(((step, plan),), plan.size, (0,), (plan,), sources)

    @kernel(FusedFftSpec, backend="cuda", plan=_plan_fused)
    def _fused(self, spec: FusedFftSpec, call: KernelCall) -> None:
        plan: _FftPlan = call.plan
        prolog, transform, epilog = spec.parts(*[side is not None for side in plan.sides])
        if not plan.steps:
            return
        addresses: dict[int, int] = {}
        for array in (transform.source, transform.out):
            if array.block < 0:
                # An epilog that keeps the dtype is computed in place.
                in_place = array is transform.out and array.dtype is spec.out.dtype
                nbytes = array.size * array.dtype.itemsize
                addresses[array.block] = call.address_of(spec.out) if in_place else call.workspace(nbytes)

        def address(array: ArraySpec) -> int:
            return addresses[array.block] if array.block in addresses else call.address_of(array)

        arguments: list[tuple[object, ...]] = []
        for expression, side in zip((prolog, epilog), plan.sides, strict=True):
            if isinstance(side, compiled.KernelSource):
                arguments.append(compiled.elementwise_arguments(expression, side, address))
        for vendor_plan in plan.vendor_plans:
            vendor_plan.tell(call, arguments)
        load_side, store_side = plan.sides
        if isinstance(load_side, CompiledExpression):
            load_side.elementwise(prolog, call, address)
        self._run_steps(plan, call, address(transform.source), address(transform.out))
        if isinstance(store_side, CompiledExpression):
            store_side.elementwise(epilog, call, address)

    def captures(self, spec: OperationSpec) -> bool:
        """See `EnqueuingLibrary.captures`: the arguments of callbacks are in the memory of a plan."""
        return not isinstance(spec, FusedFftSpec)

    def _hold(self, key: PlanKey, callbacks: Callbacks | None = None) -> _VendorPlan:
        """Have one more plan execute a plan of cuFFT, which is made if it is not there."""
        plan = self._vendor_plans.get((key, callbacks))
        if plan is None:
            plan = self._vendor_plans[key, callbacks] = _VendorPlan(key, self._context, callbacks)
        plan.users += 1
        return plan

    def _release(self, vendor_plans: Iterable[_VendorPlan]) -> None:
        """Release one use of cuFFT's plans, and destroy plans without any use."""
        for plan in vendor_plans:
            plan.users -= 1
            if not plan.users:
                del self._vendor_plans[plan.key, plan.callbacks]
                plan.close()

    def _close_plan(self, plan: _FftPlan) -> None:
        self._release(plan.vendor_plans)
        for expression in plan.kernels:
            expression.close()

    def _is_busy(self, plan: _FftPlan) -> bool:
        return any(resource.is_busy for resource in (*plan.vendor_plans, *plan.kernels))


def _array(view: View, buffers: list[int]) -> DeviceArray:
    """Return the array, given the addresses of the buffers."""
    return DeviceArray(buffers[view.buffer], view.dtype, view.shape, view.strides)
