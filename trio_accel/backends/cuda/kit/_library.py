"""A library of one CUDA device: its kernels, their plans, and its vendor's errors."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

import attrs

from ...base import AccelError, AccelStream, InThread, LibraryError, NotSupportedError, OutOfMemoryError
from ...base.kernels import Kernel, kernels_of, load_module_kernels
from ...base.ops import OperationSpec
from ..runtime._driver import CudaMemoryError
from ..runtime._stream import CudaStream
from ._call import Call
from ._device import LibraryDevice
from ._plans import PlanTable

__all__ = ["CudaLibrary", "Errors", "ModuleLibrary"]

BACKEND = "cuda"
# What nvmath's bindings raise where a vendor's library has no such function; they do not export the class.
_NOT_FOUND = "FunctionNotFoundError"
# Statuses that say the same in all libraries: not enough memory; the library does not have the operation.
_EXHAUSTED = frozenset({"ALLOC_FAILED", "INSUFFICIENT_RESOURCES"})
_MISSING = frozenset({"NOT_SUPPORTED", "ARCH_MISMATCH", "MISSING_DEPENDENCY"})
_PLANNED = InThread()

Errors: TypeAlias = Mapping[type[Exception], type[enum.IntEnum]]
"""By the exception classes of a vendor's bindings, their enumerations of codes."""


class CudaLibrary:
    """Base of the libraries. Made in a thread, with the device's context current.

    A subclass declares its kernels by `kernel`, makes its handle in `__init__` and destroys it in `_destroy`.
    A kernel is called as ``kernel(spec, call)``, its `plan` function, if it has one, as ``plan(spec)``: both
    are methods.

    Attributes:
        name: Name of the library, such as ``"blas"``.
        errors: By the exception classes of the vendor's bindings, whose `status` is its code, the bindings'
            enumerations of codes.
        refused: Names of those statuses that say that the operation, and not the library, is at fault.
        most_plans: How many plans are kept.
        is_captured: Whether what a kernel enqueues depends on nothing but its specification and its plan, and
            on the host nothing follows, so that it can be captured and launched again.
    """

    name: str
    errors: ClassVar[Errors] = {}
    refused: ClassVar[frozenset[str]] = frozenset()
    most_plans: ClassVar[int] = 1024
    is_captured: ClassVar[bool] = True

    def __init__(self, device: LibraryDevice) -> None:
        self._device = device
        self._context = device.context
        self._is_closed = False
        self._kernels = self._declared()
        counts = device.usage_of(self.name).plans
        self._plans = PlanTable(self.most_plans, self._close_plan, self._is_busy, counts)
        # What was asked last: an operation is prepared, and then enqueued.
        self._last: tuple[OperationSpec | None, Any] = (None, None)

    @property
    def device(self) -> LibraryDevice:
        """The device that it is open on."""
        return self._device

    def _declared(self) -> dict[type[OperationSpec], Kernel]:
        """The kernels, as methods of this object."""
        found: dict[type[OperationSpec], Kernel] = {}
        for cls in reversed(type(self).__mro__):
            found.update(kernels_of(vars(cls), BACKEND))
        return {
            spec: attrs.evolve(
                kernel,
                function=partial(kernel.function, self),
                plan=None if kernel.plan is None else partial(kernel.plan, self),
            )
            for spec, kernel in found.items()
        }

    @property
    def operations(self) -> frozenset[type[OperationSpec]]:
        """Specifications that `enqueue` takes."""
        return frozenset(self._kernels)

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        """Make the plan of an operation, if it has none yet; see `KernelLibrary.prepare`."""
        kernel = self._kernels.get(spec.operation)
        if kernel is None or not kernel.prepares:
            return None
        if kernel.is_blocking:
            is_planned = kernel.plan is None or kernel.is_quick or self._find_plan(spec) is not None
            return _PLANNED if is_planned else InThread(self._planning(spec, kernel))
        return None if self._find_plan(spec) is not None else self._planning(spec, kernel)

    def _planning(self, spec: OperationSpec, kernel: Kernel) -> Callable[[], None]:
        assert kernel.plan is not None
        return partial(self._in_context, self._make_plan, spec, kernel.plan)

    def _key_of(self, spec: OperationSpec) -> tuple[object, ...]:
        """What the plan of an operation depends on; by default layouts and exact values."""
        return spec.descriptor().plan_key(spec)

    def _find_plan(self, spec: OperationSpec) -> Any:
        """The plan of an operation; None if it has none yet."""
        last, plan = self._last
        if last is not spec:
            plan = self._plans.find(self._key_of(spec))
            self._last = spec, plan
        return plan

    def _make_plan(self, spec: OperationSpec, make: Callable[..., Any]) -> Any:
        plan = make(spec)
        self._plans.store(self._key_of(spec), plan)
        self._last = spec, plan
        return plan

    def _plan_of(self, spec: OperationSpec, kernel: Kernel) -> Any:
        """The plan of an operation, which is made now if nobody has prepared it; the context is current."""
        if kernel.plan is None:
            return None
        plan = self._find_plan(spec)
        if plan is None:
            plan = self._make_plan(spec, kernel.plan)
        self._plans.note_launch(plan)
        return plan

    def _close_plan(self, plan: Any) -> None:
        """A plan makes way for another; by default there is nothing to give back."""

    def _is_busy(self, plan: Any) -> bool:
        """Whether a stream may still use a plan; by default they are values."""
        return False

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        """Put an operation on a stream; see `KernelLibrary.enqueue`."""
        if type(stream) is not CudaStream and not isinstance(stream, CudaStream):
            raise TypeError(f"stream: the CUDA backend enqueues on its own streams, not on {stream!r}")
        kernel = self._kernels.get(spec.operation)
        if kernel is None:
            raise NotSupportedError(
                f"the CUDA backend's library {self.name!r} has no {type(spec).__name__}",
                backend="cuda",
                device=self._device.info.name,
            )
        context = self._context
        if stream.is_closed or context.is_lost:
            stream.check()
        stream.begin_heavy()
        # Like `with context`, which takes longer as it remembers what a whole thread has to restore.
        is_foreign = context.make_current()
        try:
            if kernel.is_blocking:
                # In a thread of the engine: the device may be closed meanwhile.
                with stream.in_use():
                    self._run(kernel, spec, stream)
            else:
                self._run(kernel, spec, stream)
        except Exception as error:
            told = self._told(error)
            if told is error:
                raise
            raise told from error
        finally:
            if is_foreign:
                context.restore()

    def _run(self, kernel: Kernel, spec: OperationSpec, stream: CudaStream) -> None:
        """Have a kernel enqueue an operation, with what belongs behind it."""
        call = Call(self._device, spec, stream, self._plan_of(spec, kernel), self.name)
        try:
            kernel.function(spec, call)
            call.end()
        finally:
            call.release()

    def attach(self, stream: CudaStream) -> None:
        """Take what the library needs for a stream, ahead of operations there; the context is current."""

    def close(self) -> None:
        """Give handles and workspaces back; a lost context keeps them, as it would refuse to."""
        if not self._context.is_dead and not self._is_closed:
            self._is_closed = True
            with self._context:
                self._plans.clear()
                self._destroy()

    def _destroy(self) -> None:
        """Destroy the handle; the context is current."""

    def _in_context(self, function: Callable[..., object], *arguments: object) -> None:
        """Call something with the context current; what fails is told in the errors of backends."""
        try:
            with self._context:
                function(*arguments)
        except Exception as error:
            told = self._told(error)
            if told is error:
                raise
            raise told from error

    def _told(self, error: Exception) -> Exception:
        """What failed, in the errors of backends."""
        if isinstance(error, AccelError):
            error.device = self._device.info.name
            return error
        if isinstance(error, CudaMemoryError):
            return self._exhausted()
        if type(error).__name__ == _NOT_FOUND:
            return NotSupportedError(
                f"{self.name}: {error}; the vendor's library that is installed is too old for it",
                backend=BACKEND,
                device=self._device.info.name,
            )
        if not isinstance(error, tuple(self.errors)):
            return error
        return self._error_of(error)

    def _error_of(self, error: Exception) -> Exception:
        """What a vendor's status means."""
        # The library may have met what only the driver can name.
        self._context.look()
        failure = self._context.failure()
        if failure is not None:
            return failure
        status = getattr(error, "status", error)
        codes = next(codes for cls, codes in self.errors.items() if isinstance(error, cls))
        name = codes(status).name if isinstance(status, int) else str(status)
        if name in _EXHAUSTED:
            return self._exhausted()
        if name in _MISSING:
            return NotSupportedError(f"{self.name}: {error}", backend="cuda")
        if name in self.refused:
            return LibraryError(f"{self.name} refused: {error}", library=self.name, code=name)
        # Its state cannot be trusted: the actor restarts with a new handle.
        return error

    def _exhausted(self) -> OutOfMemoryError:
        return self._device.addresses.exhausted(0)


class ModuleLibrary(CudaLibrary):
    """Kernels of a module that is found by its import path: functions, as ``kernel(spec, call)``.

    A `plan` function of one is called as ``plan(spec, device)``. Blocks while the module is imported.

    Args:
        library: The import path.
        device: The device.
        known: Libraries that the device has, for the error.

    Raises:
        NotSupportedError: There is no such module, or it has no kernels for this backend.
    """

    def __init__(self, library: str, device: LibraryDevice, known: Sequence[str]) -> None:
        self.name = library
        self._known = known
        super().__init__(device)

    def _declared(self) -> dict[type[OperationSpec], Kernel]:
        device = self._device
        return {
            spec: attrs.evolve(
                kernel, plan=None if kernel.plan is None else partial(_planned, kernel.plan, device)
            )
            for spec, kernel in load_module_kernels(self.name, BACKEND, self._known, device.info.name).items()
        }


def _planned(make: Callable[..., Any], device: LibraryDevice, spec: OperationSpec) -> Any:
    return make(spec, device)
