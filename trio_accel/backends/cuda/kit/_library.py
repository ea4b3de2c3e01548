"""A library of one CUDA device: its kernels, their plans, and its vendor's errors."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, TypeAlias

from ...base import AccelError, AccelStream, LibraryError, NotSupportedError, OutOfMemoryError
from ...base.kernels import KernelEntry, load_module_kernels
from ...base.library import TableLibrary
from ...base.ops import OperationSpec
from ..runtime._driver import CudaMemoryError
from ..runtime._stream import CudaStream
from ._call import Call
from ._device import LibraryDevice

__all__ = ["CudaLibrary", "Errors", "ModuleLibrary"]

BACKEND = "cuda"
# What nvmath's bindings raise where a vendor's library has no such function; they do not export the class.
_NOT_FOUND = "FunctionNotFoundError"
# Statuses that say the same in all libraries: not enough memory; the library does not have the operation.
_EXHAUSTED = frozenset({"ALLOC_FAILED", "INSUFFICIENT_RESOURCES"})
_MISSING = frozenset({"NOT_SUPPORTED", "ARCH_MISMATCH", "MISSING_DEPENDENCY"})

Errors: TypeAlias = Mapping[type[Exception], type[enum.IntEnum]]
"""By the exception classes of a vendor's bindings, their enumerations of codes."""


class CudaLibrary(TableLibrary):
    """Base of the libraries. Made in a thread, with the device's context current.

    A subclass declares its kernels by `kernel`, makes its handle in `__init__` and destroys it in `_destroy`.
    Kernels enqueue, and are called with the context current.

    Attributes:
        errors: By the exception classes of the vendor's bindings, whose `status` is its code, the bindings'
            enumerations of codes.
        refused: Names of those statuses that say that the operation, and not the library, is at fault.
        is_captured: Whether what a kernel enqueues depends on nothing but its specification and its plan, and
            on the host nothing follows, so that it can be captured and launched again.
    """

    backend: ClassVar[str] = BACKEND
    errors: ClassVar[Errors] = {}
    refused: ClassVar[frozenset[str]] = frozenset()
    is_captured: ClassVar[bool] = True

    def __init__(self, device: LibraryDevice, kernels: Mapping[str, KernelEntry] | None = None) -> None:
        self._device = device
        self._context = device.context
        self._is_closed = False
        super().__init__(device, kernels, device.usage_of(self.name).plans)

    @property
    def device(self) -> LibraryDevice:
        """The device that it is open on."""
        return self._device

    def _planning(self, spec: OperationSpec, kernel: KernelEntry) -> Callable[[], None]:
        return partial(self._in_context, self._make_plan, spec, kernel)

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        """Put an operation on a stream; see `KernelLibrary.enqueue`."""
        if type(stream) is not CudaStream and not isinstance(stream, CudaStream):
            raise TypeError(f"stream: the CUDA backend enqueues on its own streams, not on {stream!r}")
        kernel = self._kernel_of(spec)
        context = self._context
        if stream.is_closed or context.is_lost:
            stream.check()
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

    def _run(self, kernel: KernelEntry, spec: OperationSpec, stream: CudaStream) -> None:
        """Have a kernel enqueue an operation, with what belongs behind it."""
        call = Call(self._device, spec, stream, self._plan_of(spec, kernel), self.name)
        try:
            if kernel.function(spec, call) is not None:
                raise TypeError(f"the kernel at {kernel.where} must enqueue and return None")
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
    """Kernels of a module that is found by its import path. Blocks while the module is imported.

    Args:
        library: The import path.
        device: The device.
        known: Libraries that the device has, for the error.

    Raises:
        NotSupportedError: There is no such module, or it has no kernels for this backend.
    """

    def __init__(self, library: str, device: LibraryDevice, known: Sequence[str]) -> None:
        self.name = library
        super().__init__(device, load_module_kernels(library, BACKEND, known, device.info.name))
