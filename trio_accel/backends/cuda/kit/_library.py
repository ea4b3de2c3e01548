"""A library of one CUDA device: the device as it sees it, and its vendor's errors."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from ...base import (
    ChunkKeeper,
    DeviceInfo,
    DType,
    LibraryError,
    NotSupportedError,
    checks,
)
from ...base.device_array import DeviceArray
from ...base.gpu.device import AddressDevice
from ...base.gpu.library import EnqueuingCall, EnqueuingLibrary
from ...base.kernels import KernelEntry, load_module_kernels
from ...base.ops import ArraySpec
from ..runtime._context import CudaContext, CudaMemoryError
from ..runtime._graphs import Graphs
from ..runtime._kernels import CudaKernels
from ..runtime._memory import CudaMemory, DeviceChunk
from ..runtime._stream import CudaStream

__all__ = ["CudaLibrary", "Errors", "KernelCall", "LibraryDevice", "ModuleLibrary", "factor_of"]


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
        addresses: Addresses of its blocks.
        end_loops: Called when the context counts as lost: each ends a loop that may otherwise never end.
    """

    def __init__(
        self, info: DeviceInfo, memory_limit: int, architecture: str, keeper: ChunkKeeper | None
    ) -> None:
        self.architecture: str = architecture
        context = CudaContext(info.index, info.name, is_alone=keeper is not None)
        try:
            self.addresses: CudaMemory = CudaMemory(context, info.name, memory_limit, keeper)
            kernels = CudaKernels(context, architecture, info.compute_units)
            super().__init__(info, self.addresses, context, kernels)
            self.graphs: Graphs = Graphs(context)
            self.end_loops: list[Callable[[], None]] = []
        except BaseException:
            context.release()
            raise

    def lent_to(self, other: AddressDevice[Any, Any, Any], array: ArraySpec) -> DeviceArray:
        """Return the address of an array for kernels of another device; see `AddressDevice.lent_to`."""
        if int(other.context.number) != int(self.context.number):
            self.addresses.open_to(array.block, int(other.context.number))
        return self.at(array)


KernelCall: TypeAlias = EnqueuingCall[LibraryDevice, CudaStream]

BACKEND = "cuda"
# Error of nvmath's bindings where a vendor's library has no such function; they do not export the class.
_NOT_FOUND = "FunctionNotFoundError"
# Statuses that say the same in all libraries: not enough memory; the library does not have the operation.
_EXHAUSTED = frozenset({"ALLOC_FAILED", "INSUFFICIENT_RESOURCES"})
_MISSING = frozenset({"NOT_SUPPORTED", "ARCH_MISMATCH", "MISSING_DEPENDENCY"})

Errors: TypeAlias = Mapping[type[Exception], type[enum.IntEnum]]
"""By the exception classes of a vendor's bindings, their enumerations of codes."""


class CudaLibrary(EnqueuingLibrary[LibraryDevice, CudaStream]):
    """Base of the libraries; see `EnqueuingLibrary`.

    Attributes:
        errors: By the exception classes of the vendor's bindings, whose `status` is its code, the bindings'
            enumerations of codes.
        refused: Names of those statuses that say that the operation, and not the library, is at fault.
    """

    backend: ClassVar[str] = BACKEND
    streams: ClassVar[type[Any]] = CudaStream
    errors: ClassVar[Errors] = {}
    refused: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, device: LibraryDevice, kernels: Mapping[str, KernelEntry] | None = None) -> None:
        self._context = device.context
        super().__init__(device, kernels)

    def _told(self, error: Exception) -> Exception:
        """Make the backends' own error of a failure."""
        if isinstance(error, CudaMemoryError):
            return self._device.exhausted(0)
        if type(error).__name__ == _NOT_FOUND:
            return NotSupportedError(
                f"{self.name}: {error}; the vendor's library is too old, or is the stand-in driver's",
                backend=BACKEND,
                device=self._device.info.name,
            )
        return self._error_of(error) if isinstance(error, tuple(self.errors)) else super()._told(error)

    def _error_of(self, error: Exception) -> Exception:
        """Describe a vendor's status."""
        # The library may have met what only the driver can name.
        self._context.look()
        failure = self._context.failure()
        if failure is not None:
            return failure
        status = getattr(error, "status", error)
        codes = next(codes for cls, codes in self.errors.items() if isinstance(error, cls))
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


<<<<<<< HEAD
=======
Order: TypeAlias = Literal["C", "F"]
"""Order of matrices: by rows, or by columns as LAPACK wants them; those of a stack follow one another."""


class KernelCall:
    """One launch: addresses of its arrays, workspace, status words and plan.

    A kernel is called as ``kernel(spec, call)`` and enqueues on `stream`, with the context current. Memory of
    the call is its own until its work is done.

    Attributes:
        device: The device.
        stream: Where to enqueue.
        plan: Result of the kernel's `plan` function; None if it has none.
    """

    __slots__ = ("_behind", "_judges", "_library", "_region", "_spec", "_words", "device", "plan", "stream")

    def __init__(
        self, device: LibraryDevice, spec: OperationSpec, stream: CudaStream, plan: Any, library: str
    ) -> None:
        self.device: LibraryDevice = device
        self.stream: CudaStream = stream
        self.plan: Any = plan
        self._spec = spec
        self._library = library
        self._region: Region | None = None
        # Work to enqueue behind the kernel.
        self._behind: list[Callable[[], None]] = []
        # Status words: where they are on the device and on the host, and what looks at them.
        self._words: list[tuple[int, StatusArray]] = []
        self._judges: list[Callable[[], None]] = []

    @property
    def handle(self) -> int:
        """The stream, as vendors' libraries want it."""
        return self.stream.handle

    def at(self, array: ArraySpec) -> int:
        """Return the address of an array's first element."""
        return self.device.address(array)

    def array(self, array: ArraySpec, *, write: bool = True) -> DeviceArray:
        """Return the address and layout of an array."""
        return self.device.at(array)

    def peers(self, peers: Peers) -> list[DeviceArray]:
        """Return the addresses of arrays that the other parts of an operation lend, in their order."""
        return [cast("LibraryDevice", one.owner).lent_to(self.device, one.array) for one in peers.arrays]

    def workspace(self, nbytes: int) -> int:
        """Return the address of so many bytes of device memory, aligned to 256; 0 for none.

        Raises:
            OutOfMemoryError: The device's memory limit leaves not so much.
        """
        if nbytes <= 0:
            return 0
        if self._region is None:
            self._region = self.device.arena.begin(self.stream, self._library)
        return self._region.take(nbytes)

    def workspace_array(self, dtype: DType, shape: tuple[int, ...]) -> DeviceArray:
        """Return an array without gaps in workspace; raises as `workspace` does."""
        return DeviceArray.packed(self.workspace(math.prod(shape) * dtype.itemsize), dtype, shape)

    def host_workspace(self, nbytes: int) -> int:
        """Return the address of so many bytes of host memory; 0 for none."""
        if nbytes <= 0:
            return 0
        room = np.empty(nbytes, np.uint8)
        # The driver reads it when the stream gets there, so it must live until then.
        self.stream.after(partial(_let_go, room))
        return int(room.ctypes.data)

    def uploaded(self, words: npt.NDArray[Any]) -> int:
        """Upload the elements of a host array to workspace; they are read at once. Returns the address."""
        place, pinned = self.workspace(words.nbytes), self.device.pinned
        host = pinned.take(words.nbytes)
        # The driver would copy from pageable memory while its caller waits; pinned memory it reads later.
        ctypes.memmove(host, words.ctypes.data, words.nbytes)
        self.device.context.check(driver.cuMemcpyHtoDAsync(place, host, words.nbytes, self.handle))
        self.stream.after(partial(pinned.give_back, words.nbytes, host))
        return place

    def room(self, like: DeviceArray) -> DeviceArray:
        """Workspace for an array of this shape and dtype, in C order."""
        return DeviceArray.packed(self.workspace(like.nbytes), like.dtype, like.shape)

    def copy_of(
        self, array: ArraySpec | DeviceArray, order: Order = "C", *, conjugate: bool = False
    ) -> DeviceArray:
        """Copy an array to workspace, without gaps.

        Args:
            array: The array.
            order: Order of its matrices in the copy. A matrix by columns is its transpose by rows, and the
                returned array describes that transpose.
            conjugate: Whether to conjugate the elements.
        """
        source = _turned(self.array(array) if isinstance(array, ArraySpec) else array, order)
        packed = self.room(source)
        self.device.arrays.convert(self.stream, source, packed, conjugate=conjugate)
        return packed

    def packed(self, array: ArraySpec, order: Order = "C") -> int:
        """Return the address of an array's elements without gaps: its own, or that of a copy."""
        if array.is_contiguous and (order == "C" or array.ndim < 2):
            return self.device.address(array)
        source = _turned(self.array(array), order)
        return source.address if source.is_contiguous else self.copy_of(array, order).address

    def result(self, array: ArraySpec, order: Order = "C", *, is_updated: bool = False) -> int:
        """Return the address to write an array to, without gaps: its own, or that of workspace.

        Workspace is copied to the array behind the kernel.

        Args:
            array: The array.
            order: Order of its matrices there.
            is_updated: Whether the kernel reads its contents, too.
        """
        if array.is_contiguous and (order == "C" or array.ndim < 2):
            return self.device.address(array)
        target = _turned(self.array(array), order)
        if target.is_contiguous:
            return target.address
        packed = self.copy_of(array, order) if is_updated else self.room(target)
        arrays, stream = self.device.arrays, self.stream
        self._behind.append(lambda: arrays.convert(stream, packed, target))
        return packed.address

    def convert(
        self, source: DeviceArray, out: DeviceArray, *, scale: float = 1.0, conjugate: bool = False
    ) -> None:
        """Enqueue ``out = source * scale``; see `ArrayKernels.convert`."""
        self.device.arrays.convert(self.stream, source, out, scale=scale, conjugate=conjugate)

    def fill(self, array: ArraySpec | DeviceArray, value: complex) -> None:
        """Enqueue that every element is set to one value."""
        out = self.array(array) if isinstance(array, ArraySpec) else array
        self.device.arrays.fill(self.stream, out, value)

    def status(self, words: StatusArray) -> int:
        """Return the address of device memory for status words, which are zero now.

        The kernel's words are in `words` when the operation is complete; then
        `OperationSpec.check_status` is asked.
        """
        if self._spec.check_status not in self._judges:
            self._judges.append(self._spec.check_status)
        return self._zeroed(words)

    def words(self, count: int, judge: Callable[[StatusArray], None]) -> int:
        """Return the address of so many status words of the kernel's own, 32 bits each, which are zero now.

        Args:
            count: How many.
            judge: Called with the words that the kernel has written, when the operation is complete; an error
                of it is the error of the operation. It is short. It may be called in a thread of the device.
        """
        words = np.zeros(count, np.int32)
        self._judges.append(partial(judge, words))
        return self._zeroed(words)

    def _zeroed(self, words: StatusArray) -> int:
        nbytes = max(words.nbytes, 1)
        address = self.workspace(nbytes)
        self.device.context.check(driver.cuMemsetD8Async(address, 0, nbytes, self.handle))
        self._words.append((address, words))
        return address

    def end(self) -> None:
        """Enqueue what belongs behind the kernel; called by the library."""
        for enqueue in self._behind:
            enqueue()
        if self._words:
            self._fetch_words()

    def release(self) -> None:
        """Leave the workspace to the next operation: the kernel is enqueued, or has failed."""
        if self._region is not None:
            self._region.end()

    def _fetch_words(self) -> None:
        """Have the status words copied to pinned memory, and looked at when the operation is complete."""
        pinned, check, judges = self.device.pinned, self.device.context.check, self._judges
        taken = [(words, pinned.take(words.nbytes)) for _, words in self._words]
        for (address, words), (_, host) in zip(self._words, taken, strict=True):
            check(driver.cuMemcpyDtoHAsync(host, address, words.nbytes, self.handle))

        def finish() -> None:
            for words, host in taken:
                ctypes.memmove(words.ctypes.data, host, words.nbytes)
                pinned.give_back(words.nbytes, host)
            for judge in judges:
                judge()

        self.stream.after(finish)


def _let_go(room: object) -> None:
    """Drop the last reference."""


def _turned(array: DeviceArray, order: Order) -> DeviceArray:
    """Return the array, or its matrices transposed, which are by rows where these are by columns."""
    return array if order == "C" or len(array.shape) < 2 else transposed(array)


>>>>>>> i
def factor_of(library: str, name: str, value: complex, dtype: DType) -> complex:
    """Take a factor to what a type can hold, as cuBLAS gets it.

    Raises:
        LibraryError: It has an imaginary part and the type has none, or more digits than a double.
    """
    try:
        return complex(checks.scalar_of(library, name, value, dtype))
    except OverflowError as error:
        raise LibraryError(
            f"{name}: {value!r} is outside the range of {dtype}", library=library, code="invalid_value"
        ) from error
