"""A kernel library of the CPU backend."""

from __future__ import annotations

from typing import Any, ClassVar

from ...base.library import ComputingLibrary
from ..runtime._stream import CpuStream

__all__ = ["CpuLibrary"]


<<<<<<< HEAD
class CpuLibrary(ComputingLibrary):
    """One library of an open device; see `ComputingLibrary`."""
=======
class HostDevice(AccelDevice, Protocol):
    """An open device whose kernels compute with arrays of the host."""

    def host_view(self, array: ArraySpec, /, *, write: bool = True) -> HostArray:
        """Make the array of a specification; see `CpuMemory.view`.

        Raises:
            KeyError: No block has this id.
            ValueError: The array is not within it.
        """
        ...

    def exhausted(self, requested: int) -> OutOfMemoryError:
        """Make the error for memory that a kernel needs for itself, and the machine does not have."""
        ...


@attrs.define(eq=False)
class KernelCall:
    """One launch: its stream runs it, and its kernel is called with it, in the thread of the stream.

    Attributes:
        device: The device.
        stream: The stream.
        plan: Result of the kernel's `plan` function; None if it has none.
    """

    _function: Callable[..., object]
    _spec: OperationSpec
    plan: Any
    device: HostDevice
    stream: AccelStream
    _rooms: tuple[HostArray, ...] = attrs.field(default=(), init=False)

    def array(self, array: ArraySpec, *, write: bool = True) -> HostArray:
        """Return an array, as a view of its memory; see `HostDevice.host_view`."""
        return self.device.host_view(array, write=write)

    def at(self, array: ArraySpec) -> int:
        """Return the address of an array's first element; raises as `array` does."""
        return int(self.device.host_view(array).ctypes.data)

    def peers(self, peers: Peers) -> list[HostArray]:
        """Return the arrays that the other parts of an operation lend, in the order of `Peers.arrays`."""
        owners: Any = [peer.owner for peer in peers.arrays]
        return [owner.host_view(peer.array) for owner, peer in zip(owners, peers.arrays, strict=True)]

    def workspace(self, nbytes: int) -> int:
        """Return the address of so many bytes of memory, until the kernel returns; 0 for none.

        Raises:
            MemoryError: There is not so much; the operation fails with an `OutOfMemoryError`.
        """
        if nbytes <= 0:
            return 0
        room = np.empty(nbytes, np.uint8)
        self._rooms = (*self._rooms, room)
        return int(room.ctypes.data)

    def status(self, words: StatusArray) -> int:
        """The address of status words, which are zero now; a kernel may also write to the array itself."""
        words.fill(0)
        return int(words.ctypes.data)

    def __call__(self) -> None:
        """Run the kernel, and look at the status words if there are any."""
        spec = self._spec
        described = spec.descriptor()
        if described.peers and getattr(spec, described.peers).failure is not None:
            # Another part of the operation has failed.
            return
        try:
            returned = self._function(spec, self)
            if returned is not None:
                raise _returned(self._function, returned)
            if described.has_status:
                spec.check_status()
        except AccelError as error:
            error.device = self.device.info.name
            raise
        except MemoryError as error:
            # Count the memory of kernels themselves: NumPy tells how much it has, others do not.
            shape, dtype = getattr(error, "shape", ()), getattr(error, "dtype", None)
            requested = math.prod(shape) * dtype.itemsize if isinstance(dtype, np.dtype) else 0
            raise self.device.exhausted(requested) from error


def _returned(function: Callable[..., object], value: object) -> TypeError:
    return TypeError(
        f"the kernel {getattr(function, '__qualname__', function)} must compute and return None, it returned "
        f"{type(value).__name__}"
    )


class CpuLibrary(TableLibrary):
    """One library of an open device: its kernels run in the threads of streams.

    Args:
        name: Name of the library.
        device: The device.
        kernels: The functions among its kernels.
    """
>>>>>>> i

    backend: ClassVar[str] = "cpu"
    streams: ClassVar[type[Any]] = CpuStream
