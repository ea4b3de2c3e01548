"""Protocols of a backend. The engine knows devices only through these protocols.

The Trio thread may call any method that is not marked as blocking, because such methods never block. Blocking
methods are called in a worker thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from .device_info import BackendReport, DeviceInfo, DeviceLink
from .dtypes import DType, Strs
from .errors import NotSupportedError
from .ops import ArraySpec, OperationSpec

__all__ = [
    "AccelBackend",
    "AccelDevice",
    "AccelEvent",
    "AccelStream",
    "CacheCounts",
    "ChunkKeeper",
    "CollectiveLibrary",
    "InThread",
    "KeptCounts",
    "KernelLibrary",
    "Lease",
    "LibraryUsage",
    "MemoryStatistics",
    "PlacedBlock",
    "Poison",
    "StreamPause",
    "Waker",
]

Poison = Literal["illegal_address", "trap", "assert"]
"""Ways in which a kernel loses its context; a backend that has no kernels takes them for the same."""


@attrs.frozen(kw_only=True)
class MemoryStatistics:
    """Memory of one open device, in bytes.

    Attributes:
        used: Held by blocks now.
        reserved: Taken from the system, for blocks and as spare memory for later ones.
        peak: The most that blocks held at once.
        blocks: Number of blocks now.
        limit: The most that may be held.
        workspace: Held by libraries for themselves, in addition to the blocks.
        foreign: Reserved by other libraries of the same process, such as PyTorch and CuPy, as far as they
            report it. The limit does not include it.
    """

    used: int
    reserved: int
    peak: int
    blocks: int
    limit: int
    workspace: int = 0
    foreign: int = 0


@attrs.define(eq=False)
class CacheCounts:
    """Counts of a cache's entries; its owner counts, and others read.

    Attributes:
        hits: The number of look-ups that found an entry.
        created: The number of entries made.
        evicted: The number of entries removed to make room for others.
    """

    hits: int = 0
    created: int = 0
    evicted: int = 0


@attrs.define(eq=False)
class KeptCounts:
    """Counts of cached plans in a table; its owner counts, and others read.

    Attributes:
        unplanned: Requests that were served without a plan, because their key had none yet.
        hits: Requests that found their plan.
        recorded: Plans made.
        bound: Bindings of plans to blocks.
        armed: Bindings with prepared kernels, and launches that the driver has captured.
        refused: Requests with a key that cannot have a plan.
        evicted: Plans removed to make room for others.
    """

    unplanned: int = 0
    hits: int = 0
    recorded: int = 0
    bound: int = 0
    armed: int = 0
    refused: int = 0
    evicted: int = 0


@attrs.define(eq=False)
class LibraryUsage:
    """Plans and workspace of a device's library; the device counts, and others read.

    Attributes:
        plans: The plans of its operations: each launch by a plan has found one, or had one made.
        workspace: Bytes that it holds for itself, as in `MemoryStatistics.workspace`. If several libraries
            share a stream, its workspace counts for the last one that used it.
    """

    plans: CacheCounts = attrs.field(factory=CacheCounts)
    workspace: int = 0


@attrs.frozen(kw_only=True)
class CollectiveLibrary:
    """A vendor's library for collectives between devices of a backend, such as NCCL.

    Attributes:
        title: Its name.
        package: Python package of its bindings.
        missing: The message that the bindings are not installed.
        reductions: The dtypes that it supports for each reduction.
        actor: Import path of the actor that serves collectives.
        control: Import path of the actor that aborts communicators.
        is_apart: Whether each rank must have a device of its own.
    """

    title: str
    package: str
    missing: str
    reductions: Mapping[str, frozenset[DType]]
    actor: str = "trio_accel.collectives:CommunicatorActor"
    control: str = "trio_accel.collectives:CommunicatorControlActor"
    is_apart: bool = True


class PlacedBlock(NamedTuple):
    """A block and its place.

    Attributes:
        block: Id of the block.
        nbytes: The requested number of bytes.
        chunk: Id of the chunk.
        offset: Bytes from the chunk's start.
    """

    block: int
    nbytes: int
    chunk: int
    offset: int


class ChunkKeeper(Protocol):
    """Keeps the chunks of a device, which outlive the process that made them.

    Called while the device allocates, frees or adopts, in the same thread: must not use the device.
    """

    def keep(self, chunk: int, nbytes: int, descriptor: int) -> None:
        """Keep a new chunk, which holds no block yet.

        Args:
            chunk: Its id, which no chunk known to the device had before.
            nbytes: Its size.
            descriptor: Its memory. The device still owns it: duplicate or send it before this returns.
        """

    def drop(self, chunk: int) -> None:
        """Give a chunk back that holds no block, and that the device no longer uses."""


class StreamPause(Protocol):
    """A hold of a stream."""

    def release(self) -> None:
        """Let the stream go on. From any thread; more than once does nothing."""


class Lease(Protocol):
    """An array that the program has for a while, without a copy."""

    @property
    def array(self) -> object:
        """The array for the program: a NumPy array if the host can address the memory."""
        ...

    def take_back(self) -> tuple[AccelStream, AccelEvent] | None:
        """End the lease: `array` must no longer be used. Call it only once.

        Returns:
            An event, with its stream, that is done when the program's work on its own streams is; the memory
            is in use until then. None if the program cannot enqueue anything.

        Raises:
            AccelError: The end of the program's work cannot be observed.
        """
        ...


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
        """The error of the work between the stream's previous event and this one; None on success."""
        ...


class AccelStream(Protocol):
    """A queue of device work, executed in order."""

    @property
    def name(self) -> str:
        """Name for people: shown in traces and thread lists."""
        ...

    @property
    def failure(self) -> Exception | None:
        """Why the context is no longer usable; None while it is. Afterwards rings may not arrive."""
        ...

    @property
    def is_preparing(self) -> bool:
        """Whether code is compiled now that an operation may wait for: then nothing here counts as stuck."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether it is closed and everything enqueued is done, or never will be."""
        ...

    def record(self) -> AccelEvent:
        """Make an event after everything enqueued so far."""
        ...

    def wait(self, event: AccelEvent) -> None:
        """Hold back what is enqueued from now on until an event (of any stream) is done."""

    def hold(self, waker: Waker | None = None) -> StreamPause:
        """Hold back what is enqueued from now on until the hold is released.

        A held stream is like a stuck one: `close` does not wait for it, and `failure` still reports a lost
        context.

        Args:
            waker: Rung when the stream reaches the hold, and everything before it is done.

        Raises:
            ContextPoisonedError: The context is lost.
        """
        ...

    def crash(self) -> None:
        """Let the process die of a native fault (SIGSEGV) when the stream gets here: for tests.

        Raises:
            ContextPoisonedError: The context is lost.
        """

    def notify(self, event: AccelEvent, waker: Waker) -> None:
        """Ring once the event is done: at once if it is already."""

    def synchronize(self) -> None:
        """Block until everything enqueued is done."""

    def close(self) -> None:
        """Take no more work. Enqueued work still runs; does not wait for it."""


@attrs.frozen
class InThread:
    """Result of `KernelLibrary.prepare` for an operation that blocks in each `enqueue`.

    The engine then calls `enqueue` in a thread.

    Attributes:
        plan: Preparation that blocks, as for other operations; None if there is nothing to do.
        is_short: Whether this operation does not block, so that it needs no thread. But it runs code of the
            program's own: if it fails, the engine waits for the work that it has enqueued by then, as in a
            thread.
    """

    plan: Callable[[], None] | None = None
    is_short: bool = False

    def __call__(self) -> None:
        """Do it."""
        if self.plan is not None:
            self.plan()


class KernelLibrary(Protocol):
    """One vendor library of one device: enqueues the operations that it has."""

    @property
    def name(self) -> str:
        """Name of the library, such as ``"blas"``."""
        ...

    @property
    def operations(self) -> frozenset[str]:
        """Names of the operations that `enqueue` takes; see `OperationSpec.operation`."""
        ...

    def prepare(self, spec: OperationSpec) -> Callable[[], None] | None:
        """Return the preparation after which an operation like this one is enqueued without blocking.

        The engine calls this before every launch, so it must be quick. It refuses nothing, because `enqueue`
        does. The same preparation may be needed again later, because a library keeps a limited number of
        plans. An `enqueue` without it blocks instead.

        Returns:
            A blocking function, to be called in a thread while nothing else of the library is called; it
            raises the errors of `enqueue`. `InThread` if every `enqueue` blocks even so. None if there is
            nothing to do, as in nearly all cases.
        """
        ...

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        """Put an operation on a stream.

        If `prepare` returns `InThread`, it is called in a thread. Meanwhile nothing else of the library is
        called, nor enqueued on the stream; but the context may be lost, and the device closed.

        Raises:
            NotSupportedError: The library lacks this operation or dtype; nothing was enqueued.
            LibraryError: The library refused the operation; nothing was enqueued.
        """

    def close(self) -> None:
        """Give handles and workspaces back. The library's streams are idle."""


class AccelDevice(Protocol):
    """An open device: memory, streams and libraries of one context."""

    @property
    def info(self) -> DeviceInfo:
        """Description of the device."""
        ...

    @property
    def libraries(self) -> Sequence[str]:
        """Names of the available libraries, sorted."""
        ...

    @property
    def validated_blocks(self) -> Collection[int]:
        """Blocks with contents that it relies on. Call `renew` before you write to one."""
        ...

    @property
    def plan_counts(self) -> KeptCounts:
        """Counts of the plans that its libraries keep, but for `usage`."""
        ...

    def open_stream(self, name: str, priority: int = 0) -> AccelStream:
        """Make a stream.

        Args:
            name: A name for people.
            priority: Work of a stream with a higher priority begins first, if the device can choose. Numbers
                out of range mean the highest or lowest; a device without priorities has a single one.
        """
        ...

    def open_library(self, name: str) -> KernelLibrary:
        """Load a library and make its handle, for this caller only. Blocks; several threads may call it.

        Raises:
            NotSupportedError: The backend lacks this library.
        """
        ...

    def allocate(self, block: int, nbytes: int, /) -> None:
        """Make a memory block under an id that the caller chose.

        Raises:
            OutOfMemoryError: There is not enough memory.
        """

    def free(self, block: int) -> None:
        """Give a memory block back. No work that uses it is enqueued."""

    def renew(self, block: int) -> None:
        """Forget facts about the contents of a memory block: they change, or the block is a new one."""

    def map_chunk(self, chunk: int, nbytes: int, descriptor: int, *, write: bool = True) -> None:
        """Make a chunk of another process addressable, to adopt blocks in it later.

        Until then it is not the device's own: nothing is placed in it, and it is not dropped.

        Args:
            chunk: Its id; later chunks of this device get larger ids.
            nbytes: Its size.
            descriptor: Its memory. Taken over, and closed even if this fails.
            write: Whether the device may write to it. Otherwise a write is a fault, and nothing is changed.

        Raises:
            ValueError: There is a chunk of this id, or the memory is smaller.
            OSError: It cannot be mapped.
        """

    def map_peer(self, chunk: int, owner: AccelDevice, number: int) -> None:
        """Make a chunk of another open device in this process readable; see `reaches`.

        Its memory stays until `unmap_chunk`, also if the owner is closed meanwhile.

        Args:
            chunk: Its id here.
            owner: The device that owns it, of the same backend.
            number: Its id there.

        Raises:
            KeyError: The owner lacks this chunk.
            AccelError: The chunk cannot be mapped.
        """

    def unmap_chunk(self, chunk: int) -> None:
        """Forget a mapped chunk that the device has not adopted yet.

        Raises:
            KeyError: The chunk does not exist.
        """

    def expect(self, blocks: Iterable[PlacedBlock]) -> None:
        """Note the places of blocks in chunks, for libraries that are opened before `adopt`, or on loan.

        The blocks may be read. Another process may write to them and free them. `adopt` replaces their
        places, and forgets blocks that it does not name; `free` forgets a block, and leaves its memory as it
        is.

        Args:
            blocks: The blocks and their places. The device's own blocks stay as they are.

        Raises:
            ValueError: A block is outside of the chunks. Nothing was noted.
        """

    def adopt(self, blocks: Iterable[PlacedBlock]) -> None:
        """Take over every mapped chunk, with all the blocks in them.

        From now on they are as if the device had made them: blocks are placed in their gaps, and
        empty ones may be given back at once. The memory limit counts the blocks, and does not keep
        them out.

        Args:
            blocks: All blocks in the chunks mapped so far: the rest of each chunk is free memory.

        Raises:
            RuntimeError: The device was opened without a keeper.
            ValueError: A block exists already, overlaps another, or is outside of the mapped
                chunks. Nothing was taken over.
        """

    def placement(self, block: int, /) -> PlacedBlock:
        """Return the place of a block.

        Raises:
            KeyError: No block has this id.
        """
        ...

    def register_host(self, array: npt.NDArray[np.uint8]) -> None:
        """Let the device transfer from and to memory of the host by itself. Blocks.

        Args:
            array: Contiguous. Its memory stays until it is unregistered, or the device is closed.
        """

    def unregister_host(self, array: npt.NDArray[np.uint8]) -> None:
        """Undo `register_host`. No enqueued work uses the memory. Blocks."""

    def spin(self, stream: AccelStream, block: int | None = None) -> StreamPause:
        """Hold a stream back by work of the device that does not end by itself: for tests.

        Args:
            stream: One of this device.
            block: Memory that the work writes to, again and again, for as long.

        Raises:
            ContextPoisonedError: The context is lost.
        """
        ...

    def poison(self, reason: str, how: Poison = "illegal_address", stream: AccelStream | None = None) -> None:
        """Make the context unusable, as a fault on the device would: for tests of what happens then.

        If a real fault would affect more than this device, the context only counts as lost.

        Args:
            reason: Text of the errors that the device does not report itself.
            how: The kind of fault, if the device has several.
            stream: The stream of the fault: work enqueued there from now on is not done before the fault is
                seen.
        """

    def give_up(self, reason: str) -> None:
        """Count the context as lost for a reason that the device does not know of.

        Running work that can be ended ends: a loop of a graph begins no other turn. The rest runs on.
        """

    @property
    def is_dead(self) -> bool:
        """Whether the hardware itself has ended the context, so that it no longer writes to memory.

        A context that is lost for another reason may still write. The process that takes over its memory
        waits until this process has ended.
        """
        ...

    def reaches(self, peer: DeviceInfo) -> bool:
        """Return whether kernels of this device can read mapped memory of another device."""
        ...

    def lend(self, array: ArraySpec, *, write: bool, stream: object = None) -> Lease:
        """Lend the program an array without a copy; no operation with it is in flight.

        The memory is not freed until the lease is taken back and its event is done; `close` waits for
        both within its grace.

        Args:
            array: The array.
            write: Whether the program may change it.
            stream: The program's own stream, in any form, on which it will use the array; None for the
                default stream.

        Raises:
            NotSupportedError: The backend cannot lend it, or not on a stream.
            TypeError: `stream` is not a stream.
            ContextPoisonedError: The context is lost.
        """
        ...

    def memory(self) -> MemoryStatistics:
        """Count the memory."""
        ...

    def usage(self) -> Mapping[str, LibraryUsage]:
        """Count plans and workspace of its libraries, by name; libraries with neither are left out.

        The counts belong to the device: a library that is opened again continues them.
        """
        ...

    def close(self, grace: float) -> bool:
        """Finish every stream and free everything; blocks for `grace` seconds at most.

        Chunks that a keeper has are its own: they are forgotten here, and not dropped.

        Returns:
            Whether all streams ended in time. Memory that one may still use is not freed.
        """
        ...


class AccelBackend(Protocol):
    """A kind of device.

    A class that derives from it inherits the behaviour of a backend without workers, without a driver, and
    with memory that the host cannot address.
    """

    @property
    def name(self) -> str:
        """Name of the backend: the part of a device's name before the colon."""
        ...

    @property
    def shares_memory_with_host(self) -> bool:
        """Whether `map_host` works: the host copies to chunks by itself."""
        return False

    @property
    def preload(self) -> Strs:
        """Modules that its workers need, to be imported before they start; usually the backend's own.

        They are imported once, in another process; workers are forks of it, and so are ready sooner. An
        import must open no file that stays open, make no call to a driver, and start no thread that does not
        end before a fork: OpenBLAS ends its own. Empty: each worker is a fresh interpreter.
        """
        return ()

    @property
    def driver_check(self) -> str | None:
        """File of a function `driver_in_use() -> str | None`: whether this process has initialised it.

        Workers are forks of a process that has imported the program's modules, and a fork cannot use a driver
        that was initialised before. So a child tries the modules first, and calls the function after each
        import. Its result completes the sentence "the import of NAME". The child loads the file by its path,
        without the package: the file must import nothing but the standard library. None: the backend lacks a
        driver.
        """
        return None

    @property
    def collectives(self) -> CollectiveLibrary | None:
        """The vendor's library of collectives, which the library ``"communicators"`` calls."""
        return None

    @property
    def adds_in_order(self) -> bool:
        """Whether a scatter adds in the order of the elements, so that equal calls have equal sums."""
        return False

    @property
    def unjoined(self) -> frozenset[str]:
        """Functions with bits that depend on the rest of the expression, so that chains do not fuse them."""
        return frozenset()

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """Find the devices; safe (and empty) where driver or hardware are missing. Blocks."""
        ...

    def unavailable_reason(self, index: int | None = None) -> str | None:
        """Return why no device is available, and the remedy; None if there is one. Blocks.

        Args:
            index: The number of one device; None for any usable device, and if no device has the number.
        """
        return None

    def describe(self) -> BackendReport:
        """Describe the devices and their software, including missing software. Blocks.

        Opens no device, and loads no device library into this process.
        """
        ...

    def links(self) -> tuple[DeviceLink, ...]:
        """Return the links between its devices and to the processor (``"cpu:0"``). Blocks; opens no device.

        Pairs that it leaves out are linked by copies in host memory.
        """
        return ()

    def open_device(
        self, index: int, *, memory_limit: int | None, keeper: ChunkKeeper | None = None
    ) -> AccelDevice:
        """Open a device that `list_devices` named. Blocks.

        Args:
            index: Number of the device.
            memory_limit: The most bytes that its blocks may take; None for all memory.
            keeper: Gets the chunks of blocks, which then outlive this process. Without it, memory is private
                and ends with the process. A worker has a keeper if `DeviceInfo.keeps_memory`.

        Raises:
            NotSupportedError: There is a keeper, but the backend's memory cannot outlive its process.
        """
        ...

    def prepare_worker(self) -> None:
        """Called first in a process that will serve one device of this kind and nothing else.

        From then on the other methods may use the driver in this process, to spare the start of another.
        """

    def map_host(self, descriptor: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Map a chunk for the host, in a process that need not have the device open.

        Args:
            descriptor: The chunk's memory, as a keeper gets it. The caller still owns it.
            nbytes: Its size.

        Returns:
            An array over the chunk; the mapping ends with the last array over it.

        Raises:
            NotSupportedError: The host cannot address it.
            ValueError: The memory is smaller.
            OSError: It cannot be mapped.
        """
        raise NotSupportedError("the host cannot address the memory of the device", backend=self.name)
