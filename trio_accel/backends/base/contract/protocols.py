"""Protocols of a backend. The engine knows devices only through these protocols.

Methods may be called from the Trio thread and never block, unless they say so; blocking
ones are called in a worker thread.
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
        reserved: Taken from the system, for blocks and kept for the next ones.
        peak: The most that was held at once.
        blocks: Number of blocks now.
        limit: The most that may be held.
        workspace: Held by libraries for themselves, beside the blocks.
        foreign: Reserved by other libraries of the same process, such as PyTorch and CuPy, where they tell.
            The limit concerns it not.
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
    """Counts of the entries of a cache; its owner counts, and others read.

    Attributes:
        found: How often one was there.
        made: How many were made.
        evicted: How many of those made way for others.
    """

    found: int = 0
    made: int = 0
    evicted: int = 0


@attrs.define(eq=False)
class KeptCounts:
    """Counts of a table of kept plans; its owner counts, and others read.

    Attributes:
        seen: Requests of a key without a plan that were served without one.
        found: Requests that found their plan.
        recorded: Plans that were made.
        bound: Bindings of plans to blocks.
        armed: Bindings whose kernels were prepared, and launches that the driver has captured.
        refused: Requests whose key can have no plan.
        evicted: Plans that made way for others.
    """

    seen: int = 0
    found: int = 0
    recorded: int = 0
    bound: int = 0
    armed: int = 0
    refused: int = 0
    evicted: int = 0


@attrs.define(eq=False)
class LibraryUsage:
    """Plans and workspace of one library of a device; the device counts, and others read.

    Attributes:
        plans: The plans of its operations: each launch by a plan has found one, or had one made.
        workspace: Bytes that it holds for itself, as in `MemoryStatistics.workspace`. Where several libraries
            share a stream, its workspace counts for the last one that used it.
    """

    plans: CacheCounts = attrs.field(factory=CacheCounts)
    workspace: int = 0


@attrs.frozen(kw_only=True)
class CollectiveLibrary:
    """A vendor's library by which devices of a backend meet, such as NCCL.

    Attributes:
        title: Its name.
        package: Python package of its bindings.
        missing: Tells that they are not installed.
        reductions: The dtypes that it has for each reduction.
        actor: Import path of the actor that serves collectives.
        control: Import path of the actor that gives communicators up.
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
        nbytes: Bytes that were asked for.
        chunk: Id of the chunk.
        offset: Bytes from the chunk's start.
    """

    block: int
    nbytes: int
    chunk: int
    offset: int


class ChunkKeeper(Protocol):
    """Keeps the chunks of a device beyond the process that made them.

    Called while the device allocates, frees or adopts, in that thread: must not use the device.
    """

    def keep(self, chunk: int, nbytes: int, descriptor: int) -> None:
        """Keep a chunk that was made; it holds no block yet.

        Args:
            chunk: Its id, which no chunk that the device knows had before.
            nbytes: Its size.
            descriptor: Its memory. Stays the device's: duplicate or send it before this returns.
        """

    def drop(self, chunk: int) -> None:
        """Give a chunk back: it holds no block, and the device does not use it any more."""


class StreamPause(Protocol):
    """A hold of a stream."""

    def release(self) -> None:
        """Let the stream go on. From any thread; more than once does nothing."""


class Lease(Protocol):
    """An array that the program has for a while, without a copy."""

    @property
    def array(self) -> object:
        """The array for the program: a NumPy array where the host can address the memory."""
        ...

    def take_back(self) -> tuple[AccelStream, AccelEvent] | None:
        """End it: `array` is not to be used any more. Once only.

        Returns:
            An event, with its stream, that is done when the program's work on its own streams is; the memory
            is in use until then. None where the program cannot enqueue anything.

        Raises:
            AccelError: The end of the program's work cannot be told.
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
        """The error of the work between the stream's previous event and this one; None if it went well."""
        ...


class AccelStream(Protocol):
    """A queue of device work, executed in order."""

    @property
    def name(self) -> str:
        """Name for people: shown in traces and thread lists."""
        ...

    @property
    def failure(self) -> Exception | None:
        """The reason why the context cannot be used any more; None while it can. Rings may not come then."""
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

        A stream that is held is like one that is stuck: `close` does not wait for it, and a lost
        context is reported by `failure` all the same.

        Args:
            waker: Rung when the stream gets there: everything before is done.

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
    """Answer of `KernelLibrary.prepare` for an operation whose `enqueue` blocks, each time.

    The engine calls `enqueue` in a thread then.

    Attributes:
        plan: Preparation that blocks, as for other operations; None if there is nothing to do.
        is_short: Whether this one does not block, so that it needs no thread. But it runs code of the
            program's own: if it fails, the work that it has enqueued by then is waited for, as in a thread.
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

        Asked before every launch, so it must be quick; it refuses nothing, as `enqueue` will. The same
        preparation may be needed again later: a library keeps only so many plans. An `enqueue` without it
        blocks instead.

        Returns:
            Something that blocks, to be called in a thread while nothing else of the library is called;
            it raises what `enqueue` would. `InThread` if `enqueue` blocks all the same, each time. None if
            there is nothing to do, as nearly always.
        """
        ...

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        """Put an operation on a stream.

        Where `prepare` returns `InThread`, it is called in a thread. Meanwhile nothing else of the library is
        called, nor enqueued on the stream; but the context may be lost, and the device closed.

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
        """Description of the device."""
        ...

    @property
    def libraries(self) -> Sequence[str]:
        """Names of the libraries that were found, sorted."""
        ...

    @property
    def validated_blocks(self) -> Collection[int]:
        """Blocks of whose contents it knows something. Who is about to write to one calls `renew` before."""
        ...

    @property
    def kept(self) -> KeptCounts:
        """Counts of the plans that its libraries keep, but for `usage`."""
        ...

    def open_stream(self, name: str, priority: int = 0) -> AccelStream:
        """Make a stream.

        Args:
            name: For people.
            priority: Work of a stream with a higher one is begun first, where the device can choose. Beyond
                what it has, its highest or lowest is meant; a device without priorities has one.
        """
        ...

    def open_library(self, name: str) -> KernelLibrary:
        """Load a library and make its handle, for the caller alone. Blocks; several threads may call it.

        Raises:
            NotSupportedError: The backend has no such library.
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
        """Forget what is known of the contents of a memory block: they change, or it is another one."""

    def map_chunk(self, chunk: int, nbytes: int, descriptor: int, *, write: bool = True) -> None:
        """Make a chunk of another process addressable, to adopt blocks in it later.

        Until then it is not the device's own: nothing is placed in it, and it is not dropped.

        Args:
            chunk: Its id; those of chunks that are made from now on are larger.
            nbytes: Its size.
            descriptor: Its memory. Taken over, and closed even if this fails.
            write: Whether the device may write to it. Else a write is a fault, and nothing is changed.

        Raises:
            ValueError: There is a chunk of this id, or the memory is smaller.
            OSError: It cannot be mapped.
        """

    def map_peer(self, chunk: int, owner: AccelDevice, number: int) -> None:
        """Make a chunk of another open device of this process addressable, to be read; see `reaches`.

        Its memory stays until `unmap_chunk`, also if the owner is closed meanwhile.

        Args:
            chunk: Its id here.
            owner: The device that has it, of the same backend.
            number: Its id there.

        Raises:
            KeyError: The owner has no such chunk.
            AccelError: It cannot be mapped.
        """

    def unmap_chunk(self, chunk: int) -> None:
        """Forget a mapped chunk that is not the device's own yet.

        Raises:
            KeyError: There is no such chunk.
        """

    def expect(self, blocks: Iterable[PlacedBlock]) -> None:
        """Note the places of blocks in chunks, for libraries that are opened ahead of `adopt`, or on loan.

        They may be read. Another process may write to them and free them. `adopt` replaces their places,
        and forgets those that it does not name; `free` forgets one, and leaves its memory as it is.

        Args:
            blocks: The blocks and their places. Those that are the device's own stay as they are.

        Raises:
            ValueError: One is outside of the chunks. Nothing was noted.
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
        """Take a `register_host` back: nothing that is enqueued uses the memory. Blocks."""

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

        Where a real fault would take more with it than this device, it only counts as lost.

        Args:
            reason: Text of the errors that the device does not report itself.
            how: Which fault, where the device has several.
            stream: Where it happens: what is enqueued there from now on is not done before it is seen.
        """

    def give_up(self, reason: str) -> None:
        """Count the context as lost for a reason that the device does not know of.

        Running work that can be ended ends: a loop of a graph begins no other turn. The rest runs on.
        """

    @property
    def is_dead(self) -> bool:
        """Whether the hardware itself has ended the context, so that nothing of it writes any more.

        A context that is lost for another reason may still write. The process that takes its memory over
        waits for the end of this one.
        """
        ...

    def reaches(self, peer: DeviceInfo) -> bool:
        """Tell whether kernels of this one can read memory of another device of the backend, once mapped."""
        ...

    def lend(self, array: ArraySpec, *, write: bool, stream: object = None) -> Lease:
        """Lend the program an array without a copy; no operation with it is in flight.

        The memory is not freed until the lease is taken back and its event is done; `close` waits for
        both within its grace.

        Args:
            array: The array.
            write: Whether it is to be changed.
            stream: The program's own stream, in whatever form, on which it will use the array; None for
                the one that is used by default.

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
        """Count plans and workspace of its libraries, by their names; without those that have neither.

        The counts belong to the device: a library that is opened again goes on with them.
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

    A class may derive from it: then it has what is said here of a backend without workers, without a driver,
    and whose memory the host cannot address.
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
        """File of a function `driver_in_use() -> str | None`, which says if this process has initialised it.

        Workers are forks of a process that has imported modules of the program's, and a fork can use no
        driver that was initialised before. So a child tries the modules first, and calls the function after
        each import. Its text goes on behind "the import of NAME". The child loads the file by its path,
        without the package: the file must import nothing but the standard library. None: the backend has no
        driver.
        """
        return None

    @property
    def collectives(self) -> CollectiveLibrary | None:
        """The vendor's library of collectives, whose operations its library ``"communicators"`` has."""
        return None

    @property
    def adds_in_order(self) -> bool:
        """Whether a scatter adds in the order of the elements, so that equal calls have equal sums."""
        return False

    @property
    def unjoined(self) -> frozenset[str]:
        """Functions whose bits depend on what else an expression has: those are not joined in a chain."""
        return frozenset()

    def list_devices(self) -> tuple[DeviceInfo, ...]:
        """Find the devices; safe (and empty) where driver or hardware are missing. Blocks."""
        ...

    def unavailable_reason(self, index: int | None = None) -> str | None:
        """Tell why there is no device, and what to do about it; None where there is one. Blocks.

        Args:
            index: Ask for one device: None for one that can be used, and where there is none of that number.
        """
        return None

    def describe(self) -> BackendReport:
        """Tell of the devices and of what they compute with, also of what is missing. Blocks.

        Opens no device, and loads nothing that a device would need into this process.
        """
        ...

    def links(self) -> tuple[DeviceLink, ...]:
        """Tell how its devices reach one another, and the processor (``"cpu:0"``). Blocks; opens no device.

        Pairs that it leaves out reach one another by copies in host memory.
        """
        return ()

    def open_device(
        self, index: int, *, memory_limit: int | None, keeper: ChunkKeeper | None = None
    ) -> AccelDevice:
        """Open a device that `list_devices` named. Blocks.

        Args:
            index: Number of the device.
            memory_limit: The most bytes that its blocks may take; None for what there is.
            keeper: Gets the chunks that blocks are placed in, to keep them beyond this process;
                without one memory is private and ends with the process. A worker has one if
                `DeviceInfo.keeps_memory`.

        Raises:
            NotSupportedError: There is a keeper, and no memory that outlives its process.
        """
        ...

    def prepare_worker(self) -> None:
        """Called first in a process that will serve one device of this kind and nothing else.

        From then on the other methods may use the driver in this process, to spare the start of another.
        """

    def map_host(self, descriptor: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Map a chunk for the host, in a process that need not have the device open.

        Args:
            descriptor: The chunk's memory, as a keeper gets it. Stays the caller's.
            nbytes: Its size.

        Returns:
            An array over the chunk; the mapping goes with the last array over it.

        Raises:
            NotSupportedError: The host cannot address it.
            ValueError: The memory is smaller.
            OSError: It cannot be mapped.
        """
        raise NotSupportedError("the host cannot address the memory of the device", backend=self.name)
