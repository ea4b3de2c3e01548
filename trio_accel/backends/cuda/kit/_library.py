"""A library of one CUDA device: the device as it sees it, and its vendor's errors."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from cuda.bindings import driver

from ...base import AccelError, ChunkKeeper, DeviceInfo, DType, LibraryError, NotSupportedError
from ...base.gpu.device import AddressDevice
from ...base.gpu.library import EnqueuingCall, EnqueuingLibrary
from ...base.kit import checks
from ...base.kit.kernels import KernelEntry, load_module_kernels
from ..runtime._context import CudaContext, CudaMemoryError
from ..runtime._graphs import Graphs
from ..runtime._kernels import CudaKernels
from ..runtime._memory import CudaMemory, DeviceChunk
from ..runtime._stream import CudaStream


class LibraryDevice(AddressDevice[CudaStream, DeviceChunk, CudaContext]):
    """The context, the memory and the kernels of one device. Blocks while it is made.

    Args:
        info: Description of the device.
        memory_limit: The most bytes that its blocks may take.
        architecture: Its compute capability, such as ``"90"``.
        keeper: Gets the chunks that blocks are placed in.

    Attributes:
        architecture: Its compute capability.
        graphs: Graphs of calls that libraries launch again and again.
        end_loops: Called when the context counts as lost: each ends a loop that may otherwise never end.
    """

    def __init__(
        self, info: DeviceInfo, memory_limit: int, architecture: str, keeper: ChunkKeeper | None
    ) -> None:
        self.architecture: str = architecture
        context = CudaContext(info.index, info.name, is_alone=keeper is not None)
        try:
            memory = CudaMemory(context, info.name, memory_limit, keeper)
            kernels = CudaKernels(context, architecture, info.compute_units)
            super().__init__(info, memory, context, kernels)
            self.graphs: Graphs = Graphs(context, self.plan_counts)
            self.end_loops: list[Callable[[], None]] = []
        except BaseException:
            context.release()
            raise


KernelCall: TypeAlias = EnqueuingCall[LibraryDevice, CudaStream]


def read_now(device: LibraryDevice, stream: CudaStream, address: int, nbytes: int) -> bytes:
    """Wait for the work that is enqueued on a stream, and read some bytes of the device; blocks.

    Raises:
        ContextPoisonedError: The context is lost.
        RuntimeError: The stream is closed.
    """
    stream.check()
    host = device.pinned.take(nbytes)
    stream.copy_out(host, address, nbytes)
    device.context.check(driver.cuStreamSynchronize(stream.handle))
    content = ctypes.string_at(host, nbytes)
    device.pinned.give_back(nbytes, host)
    return content


BACKEND = "cuda"
# nvmath's error if a vendor's library lacks a function; the bindings do not export the class.
_NOT_FOUND = "FunctionNotFoundError"
# Statuses with the same meaning in all libraries: too little memory; the library lacks the operation.
_EXHAUSTED = frozenset({"ALLOC_FAILED", "INSUFFICIENT_RESOURCES"})
_MISSING = frozenset({"NOT_SUPPORTED", "ARCH_MISMATCH", "MISSING_DEPENDENCY"})

Errors: TypeAlias = Mapping[type[Exception], type[enum.IntEnum]]
"""By the exception classes of a vendor's bindings, their enumerations of codes."""


class CudaLibrary(EnqueuingLibrary[LibraryDevice, CudaStream]):
    """Base of the libraries; see `EnqueuingLibrary`.

    Attributes:
        errors: For the exception classes of the vendor's bindings, whose `status` is a code, the bindings'
            enumerations of codes.
        refused: Names of statuses that blame the operation, and not the library.
    """

    backend: ClassVar[str] = BACKEND
    streams: ClassVar[type[Any]] = CudaStream
    errors: ClassVar[Errors] = {}
    refused: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, device: LibraryDevice, kernels: Mapping[str, KernelEntry] | None = None) -> None:
        self._context = device.context
        super().__init__(device, kernels)

    def _as_backend_error(self, error: Exception) -> Exception:
        """Make the backends' own error of a failure."""
        if isinstance(error, CudaMemoryError):
            return self._device.exhausted(0)
        if type(error).__name__ == _NOT_FOUND:
            return NotSupportedError(
                f"{self.name}: {error}; the vendor's library is too old, or is the stand-in driver's",
                backend=BACKEND,
                device=self._device.info.name,
            )
        converted = super()._as_backend_error(error)
        if isinstance(converted, AccelError):
            return converted
        # A library, or a kernel that calls the driver by itself, may have met what only the driver can name.
        self._context.detect_loss()
        failure = self._context.failure()
        codes = next((codes for cls, codes in self.errors.items() if isinstance(error, cls)), None)
        return failure or (error if codes is None else self._of_status(error, codes))

    def _of_status(self, error: Exception, codes: type[enum.IntEnum]) -> Exception:
        """Describe a vendor's status."""
        status = getattr(error, "status", error)
        name = codes(status).name if isinstance(status, int) else str(status)
        if name in _EXHAUSTED:
            return self._device.exhausted(0)
        if name in _MISSING:
            return NotSupportedError(f"{self.name}: {error}", backend="cuda")
        if name in self.refused:
            return LibraryError(f"{self.name} refused: {error}", library=self.name, code=name)
        # Its state cannot be trusted: the actor restarts with a new handle.
        return error


class ModuleLibrary(CudaLibrary):
    """Kernels of a module, found by its import path. Blocks while the module is imported.

    Args:
        library: The import path.
        device: The device.
        available: Libraries that the device has, for the error.

    Raises:
        NotSupportedError: The module does not exist, or it lacks kernels for this backend.
    """

    def __init__(self, library: str, device: LibraryDevice, available: Sequence[str]) -> None:
        self.name = library
        super().__init__(device, load_module_kernels(library, BACKEND, available, device.info.name))


def factor_of(library: str, name: str, value: complex, dtype: DType) -> complex:
    """Convert a factor to a value that a type can hold, in the form for cuBLAS.

    Raises:
        LibraryError: The factor has an imaginary part and the type is real, or it has more digits than a
            double.
    """
    try:
        return complex(checks.scalar_of(library, name, value, dtype))
    except OverflowError as error:
        raise LibraryError(
            f"{name}: {value!r} is outside the range of {dtype}", library=library, code="invalid_value"
        ) from error
