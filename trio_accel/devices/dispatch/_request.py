"""Requests of the application that a worker serves, and their host arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal, NoReturn, TypeAlias

import attrs
import numpy as np
import outcome
import trio

from ...actors import WAKE_VALUE, Waiter
from ...backends.base import DType, HostArray, Ints
from ...backends.base.contract.errors import NoEdgeError
from ...backends.base.contract.ops import DESCRIPTORS, ArraySpec, CopyFromHostSpec, CopyToHostSpec
from ..base._errors import out_of_descriptors
from ..base._host_pool import HostPool, SlabRegion
from ..base._waits import SubmissionTurn
from ..operations._operation import Launch
from ..wire import _orders
from ..wire._frames import close_all
from ..wire._protocol import Address, Message
from ..wire._specs import encode_array, result_of
from ._chunks import Chunk, Stay
from ._launch_encoding import TemplateTable, encode_launch
from ._link import WorkerLink

# D61: the next array is copied while one is transferred. A bound is needed, since promised memory is not all
# taken yet, and the machine's free memory does not tell.
_STAGED = 2 << 30

_transfers = itertools.count(1)


Stage: TypeAlias = Literal["queued", "sent", "copying", "unwinding", "left", "over"]
"""Where a request is in its life.

It waits in the application; a worker has it; its outcome is known, or will be its cancellation, and copies of
the program's arrays run; its asker waits for copies alone, or has gone, and the worker may go on; it is over.
Whether a worker has begun with it is told by a word of memory, and only a dead worker's counts (D58).
"""

Step: TypeAlias = Literal["send", "return", "withdraw", "end", "unwind", "leave", "complete", "finish"]
"""What happens to a request."""


@attrs.define(eq=False, repr=False)
class RemoteRequest(Waiter):
    """One request, from the moment it is handed over until its outcome; it may see several workers.

    Attributes:
        number: Its place in the order of the device's requests.
        library: Import path of the library that it goes to; "" for a lease.
        reads: Blocks that it reads.
        writes: Blocks that it changes.
        stage: Where it is in its life.
        losses: How often the context was lost while it was in flight.
        openings: How often a worker was lost while its library was opened, and nothing was in flight.
        turn: Its place behind those that it must follow, while it waits in the application.
        copies: Users of its host arrays now: copies that run, and a lost worker that is not dead yet.
        failure: Why one of these failed.
        is_suspect: Whether it may have caused a fault of the device: it runs alone (D136).
        rank: Its place among the suspects: the likeliest are last.
        edges: All that may happen to a request in each stage, and the next stage.
    """

    edges: ClassVar[Mapping[tuple[Stage, Step], Stage]] = {
        # D19: handed over in the order of its library, and behind what it must follow.
        ("queued", "send"): "sent",
        # D59: a lost worker had it, or had no memory for it; it has its old place.
        ("sent", "return"): "queued",
        ("queued", "withdraw"): "over",
        # Refused, or done. D4: a lost worker counts as a copy until it is dead.
        ("queued", "end"): "copying",
        ("sent", "end"): "copying",
        # Done, and no copy runs.
        ("sent", "finish"): "over",
        ("queued", "unwind"): "unwinding",
        ("sent", "unwind"): "unwinding",
        # The grace of a cancelled asker is over: copies of results are not waited for either.
        ("copying", "unwind"): "unwinding",
        # D72: buffers stay until the worker is done with them, however that ends.
        ("sent", "leave"): "left",
        ("left", "end"): "unwinding",
        ("left", "unwind"): "unwinding",
        ("copying", "complete"): "over",
        ("unwinding", "complete"): "over",
    }
    number: int
    library: str
    reads: frozenset[int]
    writes: frozenset[int]
    stage: Stage = attrs.field(default="queued", init=False)
    losses: int = attrs.field(default=0, init=False)
    openings: int = attrs.field(default=0, init=False)
    turn: SubmissionTurn | None = attrs.field(default=None, init=False)
    copies: int = attrs.field(default=0, init=False)
    failure: Exception | None = attrs.field(default=None, init=False)
    is_suspect: bool = attrs.field(default=False, init=False)
    rank: int = attrs.field(default=0, init=False)
    # Its outcome, while copies run.
    _error: BaseException | None = attrs.field(default=None, init=False)
    _on_cancel: Callable[[RemoteRequest], bool] | None = attrs.field(default=None, init=False)

    def is_apart_from(self, blocks: Collection[int]) -> bool:
        """Tell whether it uses none of these blocks."""
        return self.reads.isdisjoint(blocks) and self.writes.isdisjoint(blocks)

    def move(self, step: Step) -> None:
        """Go to the next stage.

        Raises:
            NoEdgeError: There is none.
        """
        stage = self.edges.get((self.stage, step))
        if stage is None:
            raise NoEdgeError(f"request {self.number} is {self.stage}: {step!r} does not lead on from there")
        self.stage = stage

    @property
    def has_room(self) -> bool:
        """Whether there is host memory for the staged transfers of its host arrays."""
        return True

    async def wait(self, on_cancel: Callable[[RemoteRequest], bool]) -> None:
        """Wait for the outcome.

        Args:
            on_cancel: Called when the waiting task is cancelled; returns whether the request is withdrawn
                at once. Otherwise its end is waited for.
        """
        if self.result is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            self.take()
            return
        self._on_cancel = on_cancel
        await self.park()

    def abort(self, raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        """Withdraw the request of a cancelled task, or note that the task waits for its end."""
        assert self._on_cancel is not None  # `wait` was called with it
        if not self._on_cancel(self):
            return super().abort(raise_cancel)
        self.move("withdraw")
        self.task = None
        self._let_go()
        return trio.lowlevel.Abort.SUCCEEDED

    def finish(self, error: BaseException | None) -> None:
        """Give the outcome when nothing uses the program's arrays any more; a copy may fail until then."""
        self.move("end")
        self._error = error
        self._go_on()

    def end_well(self) -> None:
        """Give the outcome of a request that went well, and of whose arrays none is copied."""
        self.move("finish")
        self.settle(WAKE_VALUE)

    def unwind(self) -> None:
        """Let a cancelled asker go when nothing uses the program's arrays any more, whatever the outcome."""
        self.move("unwind")
        self._go_on()

    def leave(self) -> None:
        """Let a cancelled asker go when no copy uses the program's arrays any more, whatever the worker does.

        The request keeps its buffers until its end at the worker.
        """
        self.move("leave")
        self._go_on()

    def copy_over(self) -> None:
        """Note the end of one use of its arrays."""
        self.copies -= 1
        self._go_on()

    def _go_on(self) -> None:
        """Give the outcome, if it is known and nothing uses the program's arrays any more."""
        stage = self.stage
        if self.copies or stage in ("queued", "sent"):
            return
        if stage != "left":
            # First of all: what is called from here on must find it over.
            self.move("complete")
            self._let_go()
        if stage == "copying":
            # Taken out: frames of an error that lives on refer to the request.
            error, self._error = self._error or self.failure, None
            self.settle(WAKE_VALUE if error is None else outcome.Error(error))
        elif self.task is not None:
            # An asker that has left by now has its cancellation.
            self.settle(self.cancellation())
        if stage == "unwinding":
            self._forget()

    def _let_go(self) -> None:
        """Give back the memory that it has taken for itself."""

    def _forget(self) -> None:
        """Hold nothing of the program: nobody waits for it."""


@attrs.define(eq=False)
class HostCopy:
    """A copy that the application makes between a host array and memory that it shares with the worker.

    Attributes:
        host: The array.
        is_upload: Whether it is read.
        region: Where it is copied to or from. None if that is the device's own memory: then the worker
            tells the address when its stream gets there.
        transfer: Number of a region that is not filled yet; the same for every worker.
        stage: Whether the copy is to run, runs, or has run.
    """

    host: HostArray
    is_upload: bool
    region: SlabRegion | None
    transfer: int = attrs.field(factory=lambda: next(_transfers))
    stage: Literal["planned", "running", "over"] = "planned"


class Staging:
    """Regions of the pool for staged transfers of other arrays, so many bytes at a time.

    Args:
        pool: Where they are.
        on_free: Called when some are given back.

    Attributes:
        pool: The pool; its own arrays need no region.
        limit: The most bytes at a time, unless one request needs more.
        taken: Bytes that are taken.
    """

    def __init__(self, pool: HostPool, on_free: Callable[[], None]) -> None:
        self.pool: HostPool = pool
        self.limit: int = _STAGED
        self.taken: int = 0
        self._on_free = on_free

    def take(self, nbytes: int) -> SlabRegion:
        """Take a region.

        Raises:
            OutOfMemoryError: The machine has not so much.
        """
        region = self.pool.stage(nbytes)
        self.taken += nbytes
        return region

    def give_back(self, copies: Iterable[HostCopy]) -> None:
        """Give the regions of a request back."""
        self.taken -= sum(copy.region.nbytes for copy in copies if copy.region is not None)
        self._on_free()


@attrs.define(eq=False, repr=False)
class HostArrays:
    """The host arrays of one request; they are the same for every worker.

    Args:
        by_value: Bytes up to which arrays are sent in the messages.
        staging: Memory that the device transfers from and to by itself. None if the application has the
            device's memory mapped.

    Attributes:
        copies: The arrays that the application copies, by index.
        is_used: Whether there are any that a worker was told of one by one, and not by a template.
        staging: The argument.
        filled: The arrays that are filled from the reply.
    """

    _by_value: int
    staging: Staging | None
    copies: list[HostCopy] = attrs.field(factory=list[HostCopy])
    is_used: bool = False
    filled: list[HostArray] = attrs.field(factory=list["HostArray"])
    _next: int = 0

    def fit(self, launch: Launch) -> bool:
        """Tell whether what the arrays of a launch need of host memory is there, or would be the first."""
        staging = self.staging
        if staging is None or not staging.taken or self.copies:
            return True
        needed = [
            host.nbytes for host in _copied(launch) if host.nbytes > self._by_value and not self.address(host)
        ]
        return not needed or staging.taken + sum(needed) <= staging.limit

    def are_direct(self, launch: Launch) -> bool:
        """Tell whether the device itself transfers an array of the program for a launch."""
        return any(host.size and self.address(host) is not None for host in _copied(launch))

    def are_written(self, launch: Launch) -> bool:
        """Tell whether a worker that has a launch writes to memory of the application."""
        if not isinstance(launch.spec, CopyToHostSpec):
            return False
        is_staged = any(copy.region is not None for copy in self.copies)
        return is_staged or self.address(launch.spec.host) is not None

    @property
    def is_copied(self) -> bool:
        """Whether no array of the program is read any more."""
        return all(copy.stage == "over" for copy in self.copies if copy.is_upload)

    def begin(self) -> None:
        """Begin the message to a worker, with the first host array."""
        self.filled.clear()
        self._next = 0

    def tell(self, host: HostArray, *, is_upload: bool) -> Message:
        """Tell how a host array is read, or filled: by the device itself, by value, or by a copy."""
        self.is_used = True
        address = self.address(host)
        if address is not None:
            return address
        if host.nbytes > self._by_value:
            return self._copy(host, is_upload=is_upload)
        return ("value", encode_array(host)) if is_upload else self.fill_later(host)

    def fill_later(self, host: HostArray) -> Message:
        """Tell how a host array is filled from the reply."""
        self.is_used = True
        self.filled.append(host)
        return result_of(host)

    def fits(self, results: Sequence[bytes]) -> bool:
        """Tell whether these are as long as the host arrays that are filled from the reply."""
        return [host.nbytes for host in self.filled] == list(map(len, results))

    def fill(self, results: Sequence[bytes]) -> None:
        """Fill host arrays from the reply, which `fits`: it has their elements in C order."""
        for host, data in zip(self.filled, results, strict=True):
            np.copyto(host, np.ndarray(host.shape, host.dtype, data))

    def clear(self) -> None:
        """Give regions of the pool back: the request is over."""
        copies, self.copies = self.copies, []
        self.filled.clear()
        if self.staging is not None and copies:
            self.staging.give_back(copies)

    def address(self, host: HostArray) -> Message | None:
        """Return the place of a host array in memory that the worker shares; None if it is elsewhere."""
        if self.staging is None or not host.flags.c_contiguous:
            return None
        address = self.staging.pool.find(host)
        return None if address is None else _shared(*address, host, None)

    def _copy(self, host: HostArray, *, is_upload: bool) -> Message:
        index, self._next = self._next, self._next + 1
        if index == len(self.copies):
            region = None if self.staging is None else self.staging.take(host.nbytes)
            self.copies.append(HostCopy(host, is_upload, region))
        copy = self.copies[index]
        region = copy.region
        if region is None:
            return "copy", index
        is_filled = copy.stage == "over" or not is_upload
        return _shared(region.slab.number, region.offset, host, None if is_filled else copy.transfer)


def _copied(launch: Launch) -> list[HostArray]:
    """Host arrays that a launch copies from and to."""
    specs = (launch.spec, *launch.staged)
    return [spec.host for spec in specs if isinstance(spec, (CopyFromHostSpec, CopyToHostSpec))]


def _shared(slab: int, offset: int, host: HostArray, transfer: int | None) -> Message:
    return "shared", slab, offset, DType.of(host.dtype).value, host.shape, transfer


@attrs.define(eq=False)
class Suspicion:
    """A fault of the device that one of several requests has caused (D136).

    Attributes:
        cause: The loss of the context.
        generation: The device's generation that was lost.
        left: Numbers of the suspects that have not run since without a fault.
    """

    cause: Exception
    generation: int
    left: set[int]


class OperationRequest(RemoteRequest):
    """A launch in a worker.

    Attributes:
        launch: The launch.
        suspicion: The last fault of the device that it may have caused.
        hosts: Its host arrays.
        shortages: How often garbage was collected as there was not enough memory for it.
        is_overtaken: Whether another run may see what a later request has written, which damages nothing.
    """

    __slots__ = ("hosts", "is_overtaken", "launch", "shortages", "suspicion")

    def __init__(self, number: int, launch: Launch, hosts: HostArrays) -> None:
        super().__init__(number, launch.library, launch.reads, launch.writes)
        self.launch: Launch = launch
        self.suspicion: Suspicion | None = None
        self.hosts: HostArrays = hosts
        self.shortages: int = 0
        self.is_overtaken: bool = False

    @property
    def invalidates(self) -> bool:
        """Whether its outputs are invalid also if it was never launched: it was submitted."""
        return self.on_done is not None

    @property
    def makes_all_it_writes(self) -> bool:
        """Whether it changes no array that was there before."""
        return self.writes <= {block for block, _ in self.launch.allocations}

    @property
    def needed(self) -> frozenset[int]:
        """Blocks that must be as they were when it first ran, for another run."""
        return self.reads - self.writes if self.launch.may_repeat else self.reads

    def may_run_again(self, needed: Collection[int]) -> bool:
        """Tell whether it may run again alone: what it changes it overwrites, and it meets no other device.

        Args:
            needed: Blocks that requests before it need as they were, which run again, too.
        """
        if self.launch.spec.runs_once or self.is_overtaken:
            return False
        if self.makes_all_it_writes:
            return True
        return self.writes.isdisjoint(self.needed) and self.writes.isdisjoint(needed)

    @property
    def has_room(self) -> bool:
        """Whether there is host memory for the staged transfers of its host arrays."""
        staging = self.hosts.staging
        return staging is None or not staging.taken or self.hosts.fit(self.launch)

    def message(self, word: int, released: Ints, templates: TemplateTable) -> Message:
        """Make the message to the worker that has these templates.

        Raises:
            InputFailedError, StaleRefError: An array of it must not be used any more.
            OutOfMemoryError: There is no host memory for a staged transfer.
            TypeError: The specification holds a value that cannot cross.
        """
        # The inputs are checked as the request is sent, and not as it was made: one may have failed or gone
        # while it waited.
        self.launch.check_inputs()
        hosts, launch = self.hosts, self.launch
        # D59: one that went to a lost worker array by array has copies that are known by index, and keeps
        # them.
        found = None if hosts.is_used else templates.find(launch, hosts.address)
        if found is not None:
            template, blocks, packed = found
            described = DESCRIPTORS[type(launch.spec)]
            if described.has_status:
                words = [getattr(launch.spec, described.fields[index].name) for index in described.status]
                hosts.filled = [one for one in words if one is not None]
            # A plain tuple, as the next: each operation has one, and a declaration takes a call.
            return "replay", self.number, word, self.invalidates, template, blocks, released, packed
        # It may have gone to a lost worker by a template.
        if hosts.is_used or hosts.filled:
            hosts.begin()
        read, write = partial(hosts.tell, is_upload=True), partial(hosts.tell, is_upload=False)
        whole = encode_launch(launch, read, write, hosts.fill_later)
        return "request", self.number, word, self.invalidates, whole, released

    def _let_go(self) -> None:
        if self.hosts.is_used:
            self.hosts.clear()

    def _forget(self) -> None:
        self.launch.forget()


class LeaseRequest(RemoteRequest):
    """Memory that the program holds; it survives the worker, and holds the same in the next."""

    __slots__ = ("address", "array", "granted")

    def __init__(self, number: int, array: ArraySpec, *, write: bool) -> None:
        block = frozenset([array.block])
        super().__init__(number, "", frozenset() if write else block, block if write else frozenset())
        self.array: ArraySpec = array
        self.granted: trio.Event = trio.Event()
        # Its place, once it is granted.
        self.address: Address | None = None

    def end(self) -> None:
        """End: the worker has given the block back, or there is none."""
        self.move("end")
        self.move("complete")


@attrs.frozen(eq=False)
class Place:
    """The place of a block.

    Attributes:
        chunk: The memory.
        offset: Bytes from its start.
        nbytes: Size of the block.
    """

    chunk: Chunk
    offset: int
    nbytes: int


class BorrowRequest(LeaseRequest):
    """An array that was lent, and that operations read; the next worker has it, too.

    Args:
        number: Its place in the order of the device's requests.
        array: What is read, with the id that its block has for these operations.
        place: Where it is.
        chunk: Number of its memory at this device: the device's own, or that of others.
        on_end: Called when no worker of this device reads it any more.
        stay: Says how long the worker keeps the memory mapped; None for no longer than it reads the array.

    Attributes:
        chunk: Its memory.
    """

    __slots__ = ("_number", "_on_end", "_place", "_stay", "chunk")

    def __init__(
        self,
        number: int,
        array: ArraySpec,
        place: Place,
        chunk: int,
        on_end: Callable[[], None],
        *,
        stay: Stay | None,
    ) -> None:
        # A borrowing counts as a writer: while requests wait, those that read it come behind.
        super().__init__(number, array, write=True)
        self._place = place
        self._number = chunk
        self._on_end = on_end
        self._stay = stay
        self.chunk: Chunk = place.chunk

    def send(self, worker: WorkerLink, released: Ints) -> None:
        """Send it to a worker, with the descriptor of the chunk where the worker does not have it mapped.

        Raises:
            OutOfMemoryError: There are too many open files.
        """
        place, chunk, stay = self._place, self.chunk, self._stay
        is_own = self._number == chunk.number
        is_known = is_own or worker in chunk.borrowers
        stays = stay is not None and not stay.is_over and not is_own
        address = self.array.block, place.nbytes, self._number, place.offset
        descriptors: list[int] = []
        try:
            if not is_known:
                descriptors.append(chunk.open_to_read())
            worker.send(
                _orders.borrow(self.number, released, address, chunk.nbytes, stays), descriptors, now=True
            )
        except OSError as error:
            raise out_of_descriptors(place.nbytes, error) from error
        finally:
            close_all(descriptors)
        if stay is not None and stays:
            stay.add(chunk, worker)

    def known(self, worker: WorkerLink) -> None:
        """Note that a worker has it mapped."""
        if worker in self.chunk.borrowers:
            self.chunk.borrowers[worker] = True

    def end(self) -> None:
        """End: no worker of this device reads it any more."""
        super().end()
        self._on_end()
