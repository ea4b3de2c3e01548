"""What a backend provides. The engine knows devices only through these protocols.

Methods may be called from the Trio thread and never block, unless they say so; blocking
ones are called in a worker thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import attrs
import numpy.typing as npt

from .ops import ArraySpec, OperationSpec

__all__ = [
    "AccelBackend",
    "AccelDevice",
    "AccelEvent",
    "AccelStream",
    "DeviceInfo",
    "Isolation",
    "KernelLibrary",
    "MemoryStatistics",
    "Waker",
]

Isolation = Literal["process", "inline"]


@attrs.frozen(kw_only=True)
class DeviceInfo:
    """What is known of a device without opening it.

    Attributes:
        backend: Name of its backend, such as ``"cpu"``.
        index: Number of the device within its backend.
        description: The vendor's name of the product.
        total_memory: Bytes of memory, of all its users together.
        compute_units: Processor cores or multiprocessors.
        isolations: Where its context can live, the default first.
    """

    backend: str
    index: int
    description: str
    total_memory: int
    compute_units: int
    isolations: tuple[Isolation, ...]

    @property
    def name(self) -> str:
        """The name that `open_device` takes, such as ``"cpu:0"``."""
        return f"{self.backend}:{self.index}"


@attrs.frozen(kw_only=True)
class MemoryStatistics:
    """Memory of one open device, in bytes.

    Attributes:
        used: Held by blocks now.
        reserved: Taken from the system, for blocks and kept for the next ones.
        peak: The most that was held at once.
        blocks: Number of blocks now.
        limit: The most that may be held.
    """

    used: int
    reserved: int
    peak: int
    blocks: int
    limit: int


class Waker(Protocol):
    """Something that a stream rings when an event is done."""

    def ring(self) -> None:
        """Ask for attention. Called from any thread; never blocks, never raises."""


class AccelEvent(Protocol):
    """A point in a stream: done when everything enqueued before it is."""

    @property
    def is_done(self) -> bool:
        """Whether the stream has passed this point."""
        ...

    @property
    def error(self) -> Exception | None:
        """What went wrong with the work between the stream's previous event and this one."""
        ...


class AccelStream(Protocol):
    """A queue of device work, executed in order."""

    @property
    def name(self) -> str:
        """Name for people: shown in traces and thread lists."""
        ...

    @property
    def failure(self) -> Exception | None:
        """Why the context cannot be used any more; None while it can. Rings may not come then."""
        ...

    def record(self) -> AccelEvent:
        """Make an event after everything enqueued so far."""
        ...

    def wait(self, event: AccelEvent) -> None:
        """Hold back what is enqueued from now on until an event (of any stream) is done."""

    def notify(self, event: AccelEvent, waker: Waker) -> None:
        """Ring once the event is done: at once if it is already."""

    def synchronize(self) -> None:
        """Block until everything enqueued is done."""

    def close(self) -> None:
        """Take no more work. What is enqueued still runs; does not wait for it."""


class KernelLibrary(Protocol):
    """One vendor library of one device: enqueues the operations that it has."""

    @property
    def name(self) -> str:
        """Name of the library, such as ``"blas"``."""
        ...

    @property
    def operations(self) -> frozenset[type[OperationSpec]]:
        """Specifications that `enqueue` takes."""
        ...

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        """Put an operation on a stream.

        Raises:
            NotSupportedError: The library has no such operation or dtype; nothing was enqueued.
            LibraryError: The library refused it; nothing was enqueued.
        """

    def close(self) -> None:
        """Give handles and workspaces back. The library's streams are idle."""


class AccelDevice(Protocol):
    """An open device: memory, streams and libraries of one context."""

    @property
    def info(self) -> DeviceInfo:
        """What the device is."""
        ...

    @property
    def libraries(self) -> Sequence[str]:
        """Names of the libraries that were found, sorted."""
        ...

    def open_stream(self, name: str) -> AccelStream:
        """Make a stream."""
        ...

    def open_library(self, name: str) -> KernelLibrary:
        """Load a library and make its handle. Blocks.

        Raises:
            NotSupportedError: The backend has no such library.
        """
        ...

    def allocate(self, block: int, nbytes: int) -> None:
        """Make a memory block under an id that the caller chose.

        Raises:
            OutOfMemoryError: There is not enough memory.
        """

    def free(self, block: int) -> None:
        """Give a memory block back. No work that uses it is enqueued."""

    def poison(self, reason: str) -> None:
        """Make the context unusable, as a fault on the device would: for tests of what happens then."""

    def host_view(self, array: ArraySpec) -> npt.NDArray[Any]:
        """A host array over device memory, where the host can address it.

        Raises:
            NotSupportedError: It cannot.
        """
        ...

    def memory(self) -> MemoryStatistics:
        """Count the memory."""
        ...

    def close(self, grace: float) -> bool:
        """Finish every stream and free everything; blocks for `grace` seconds at most.

        Returns:
            Whether all streams ended in time. Memory that one may still use is not freed.
        """
        ...


class AccelBackend(Protocol):
    """A kind of device."""

    @property
    def name(self) -> str:
        """Name of the backend: the part of a device's name before the colon."""
        ...

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """Find the devices; safe (and empty) where driver or hardware are missing. Blocks."""
        ...

    def unavailable_reason(self) -> str | None:
        """Why there is no device, and what to do about it; None where there is one. Blocks."""
        ...

    def open_device(self, index: int, *, memory_limit: int | None) -> AccelDevice:
        """Open a device that `list_devices` named. Blocks.

        Args:
            index: Number of the device.
            memory_limit: The most bytes that its blocks may take; None for what there is.
        """
        ...
