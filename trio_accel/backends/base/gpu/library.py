"""Libraries of a GPU, and a launch as their kernels see it: they enqueue, by addresses."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import numpy as np

from ..contract.device_array import DeviceArray, transposed
from ..contract.dtypes import DType, HostArray, Ints
from ..contract.errors import AccelError
from ..contract.ops import ArraySpec, OperationSpec, StatusArray
from ..contract.protocols import AccelStream
from ..kit.kernels import KernelEntry
from ..kit.library import TableLibrary
from .device import AddressDevice
from .driver import GpuStream
from .workspace import WorkspaceRegion

DeviceT = TypeVar("DeviceT", bound=AddressDevice[Any, Any, Any])
StreamT = TypeVar("StreamT", bound=GpuStream)

Order: TypeAlias = Literal["C", "F"]
"""Order of matrices: by rows, or by columns as LAPACK wants them; those of a stack follow one another."""


class EnqueuingCall(Generic[DeviceT, StreamT]):
    """One launch: addresses of its arrays, workspace, status words and plan.

    A kernel is called as ``kernel(spec, call)`` and enqueues on `stream`, with the context current. Memory of
    the call is its own until its work is done.

    Attributes:
        device: The device.
        stream: The stream to enqueue on.
        plan: Result of the kernel's `plan` function; None without one.
    """

    __slots__ = ("_behind", "_judges", "_library", "_region", "_spec", "_words", "device", "plan", "stream")

    def __init__(
        self, device: DeviceT, spec: OperationSpec, stream: StreamT, plan: Any, library: str
    ) -> None:
        self.device: DeviceT = device
        self.stream: StreamT = stream
        self.plan: Any = plan
        self._spec = spec
        self._library = library
        self._region: WorkspaceRegion | None = None
        # Work to enqueue after the kernel.
        self._behind: list[Callable[[], None]] = []
        # Status words: their addresses on the device and on the host, and the functions that judge them.
        self._words: list[tuple[int, StatusArray]] = []
        self._judges: list[Callable[[], None]] = []

    @property
    def handle(self) -> int:
        """The stream, as vendors' libraries want it."""
        return self.stream.handle

    def address_of(self, array: ArraySpec) -> int:
        """Return the address of an array's first element."""
        return self.device.address(array)

    def array(self, array: ArraySpec, *, write: bool = True) -> DeviceArray:
        """Return the address and layout of an array."""
        return self.device.device_array(array)

    def workspace(self, nbytes: int) -> int:
        """Take `nbytes` bytes of device memory, and return the address, aligned to 256; 0 for none.

        Raises:
            OutOfMemoryError: The device's memory limit leaves too little.
        """
        if nbytes <= 0:
            return 0
        if self._region is None:
            self._region = self.device.arena.begin(self.stream, self._library)
        return self._region.take(nbytes)

    def workspace_array(self, dtype: DType, shape: Ints) -> DeviceArray:
        """Return an array without gaps in workspace; raise as `workspace` does."""
        return DeviceArray.packed(self.workspace(math.prod(shape) * dtype.itemsize), dtype, shape)

    def host_workspace(self, nbytes: int) -> int:
        """Take `nbytes` bytes of host memory, and return the address; 0 for none."""
        if nbytes <= 0:
            return 0
        room = np.empty(nbytes, np.uint8)
        # The driver reads it when the stream gets there, so it must live until then.
        self.stream.after(partial(_let_go, room))
        return int(room.ctypes.data)

    def uploaded(self, words: HostArray) -> int:
        """Upload the elements of a host array to workspace; they are read at once. Returns the address."""
        address, pinned = self.workspace(words.nbytes), self.device.pinned
        host = pinned.take(words.nbytes)
        # From pageable memory a driver copies while its caller waits; pinned memory it reads later.
        ctypes.memmove(host, words.ctypes.data, words.nbytes)
        self.stream.copy_in(address, host, words.nbytes)
        self.stream.after(partial(pinned.give_back, words.nbytes, host))
        return address

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
        """Return the address of an array's elements without gaps: in the array itself, or in a copy."""
        if array.is_contiguous and (order == "C" or array.ndim < 2):
            return self.device.address(array)
        source = _turned(self.array(array), order)
        return source.address if source.is_contiguous else self.copy_of(array, order).address

    def result(self, array: ArraySpec, order: Order = "C", *, is_updated: bool = False) -> int:
        """Return the address to write an array to, without gaps: in the array itself, or in workspace.

        Workspace is copied to the array after the kernel.

        Args:
            array: The array.
            order: Order of its matrices at that address.
            is_updated: Whether the kernel also reads the contents.
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
        """Return the address of `count` zeroed status words of the kernel's own, 32 bits each.

        Args:
            count: The number of words.
            judge: Called with the words that the kernel has written, when the operation is complete. Its
                error becomes the error of the operation. It must be short. It may be called in a thread of
                the device.
        """
        words = np.zeros(count, np.int32)
        self._judges.append(partial(judge, words))
        return self._zeroed(words)

    def _zeroed(self, words: StatusArray) -> int:
        nbytes = max(words.nbytes, 1)
        address = self.workspace(nbytes)
        self.stream.set_bytes(address, 0, nbytes)
        self._words.append((address, words))
        return address

    def end(self) -> None:
        """Enqueue the work after the kernel; called by the library."""
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
        pinned, judges = self.device.pinned, self._judges
        taken = [(words, pinned.take(words.nbytes)) for _, words in self._words]
        for (address, words), (_, host) in zip(self._words, taken, strict=True):
            self.stream.copy_out(host, address, words.nbytes)

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


class EnqueuingLibrary(TableLibrary, Generic[DeviceT, StreamT]):
    """Base of the libraries. Made in a thread, with the device's context current.

    A backend sets its name, its class of streams, and the conversion of its errors. A subclass declares its
    kernels by `kernel`, makes its handle in `__init__` and destroys it in `_destroy`. Kernels enqueue, and
    are called with the context current.

    Args:
        device: The device.
        kernels: The kernels by the names of their operations; the kernels of the class are added.

    Attributes:
        streams: The class of the backend's streams.
        is_captured: The result of `captures` for all its kernels.
        watched: Counts captures of its kernels that are valid only until an event.
        epoch: Counts those events.
    """

    streams: ClassVar[type[Any]]
    is_captured: ClassVar[bool] = True

    def __init__(self, device: DeviceT, kernels: Mapping[str, KernelEntry] | None = None) -> None:
        self._device = device
        self._is_closed = False
        self.watched: int = 0
        self.epoch: int = 0
        super().__init__(device, kernels, device.usage_of(self.name).plans)

    def captures(self, spec: OperationSpec) -> bool:
        """Return whether an operation's enqueued work can be captured and launched again.

        It depends on nothing but its specification and its plan, and on the host nothing follows.
        """
        return self.is_captured

    def _planning(self, spec: OperationSpec, kernel: KernelEntry) -> Callable[[], None]:
        return partial(self._in_context, self._make_plan, spec, kernel)

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        """Put an operation on a stream; see `KernelLibrary.enqueue`."""
        if type(stream) is not self.streams and not isinstance(stream, self.streams):
            raise self._foreign(stream)
        on: Any = stream
        kernel = self._kernel_of(spec)
        context = self._device.context
        if on.is_closed or context.is_lost:
            on.check()
        # `with context` does the same, but takes longer: it remembers what a whole thread has to restore.
        is_foreign = context.make_current()
        try:
            if kernel.is_blocking:
                # D111: in a thread of the engine, so the device may be closed meanwhile.
                with on.in_use():
                    self._run(kernel, spec, on)
            else:
                self._run(kernel, spec, on)
        except Exception as error:
            self._raise_told(error)
            raise
        finally:
            if is_foreign:
                context.restore()

    def _run(self, kernel: KernelEntry, spec: OperationSpec, stream: StreamT) -> None:
        """Have a kernel enqueue an operation, and the work after it."""
        call = EnqueuingCall(self._device, spec, stream, self._plan_of(spec, kernel), self.name)
        try:
            if kernel.function(spec, call) is not None:
                raise TypeError(f"the kernel at {kernel.location} must enqueue and return None")
            call.end()
        finally:
            call.release()

    def attach(self, stream: StreamT) -> None:
        """Take the library's resources for a stream, before operations there; the context is current."""

    def close(self) -> None:
        """Give handles and workspaces back; a dead context keeps them, because it would refuse to."""
        if not self._device.context.is_dead and not self._is_closed:
            self._is_closed = True
            with self._device.context:
                self._plans.clear()
                self._destroy()

    def _destroy(self) -> None:
        """Destroy the handle; the context is current."""

    def _in_context(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function with the context current; convert its errors to those of backends."""
        try:
            with self._device.context:
                function(*arguments)
        except Exception as error:
            self._raise_told(error)
            raise

    def _raise_told(self, error: Exception) -> None:
        """Raise an error as one of the backends' own, if it is not one already."""
        converted = self._as_backend_error(error)
        if converted is not error:
            raise converted from error

    def _as_backend_error(self, error: Exception) -> Exception:
        """Convert a failure to an error of backends; a backend adds the errors of its vendor."""
        if isinstance(error, AccelError):
            error.device = self._device.info.name
        return error
