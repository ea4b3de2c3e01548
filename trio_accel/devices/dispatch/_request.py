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

from ...actors import WAKE_VALUE, TaskEvent, Waiter
from ...backends.base import DType, HostArray, Ints
from ...backends.base.contract.errors import NoEdgeError
from ...backends.base.contract.ops import ArraySpec, CopyFromHostSpec, CopyToHostSpec
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

# D61: the next array is copied while one is transferred. A bound is needed, because promised memory is not
# yet all in use, and the machine's free memory does not show it.
_STAGED = 2 << 30

_transfers = itertools.count(1)


Stage: TypeAlias = Literal["queued", "sent", "copying", "unwinding", "left", "over"]
"""The stage of a request's life.

* ``queued``: it waits in the application.
* ``sent``: a worker has it.
* ``copying``: its outcome is known, and copies of the program's arrays run.
* ``unwinding``: its outcome will be its cancellation, and copies of the program's arrays run.
* ``left``: its cancelled caller waits only for copies, or has left, and the worker may continue with it.
* ``over``: it has ended.

The stage does not show whether a worker has begun with it. A word of shared memory does, which is read only
for a dead worker (D58).
"""

Step: TypeAlias = Literal["send", "return", "withdraw", "end", "unwind", "leave", "complete", "finish"]
"""An event in a request's life."""


@attrs.define(eq=False, repr=False)
class RemoteRequest(Waiter):
    """One request, from its submission until its outcome; several workers may get it.

    Attributes:
        number: Its position in the order of the device's requests.
        library: The import path of its library; "" for a lease.
        reads: The blocks that it reads.
        writes: The blocks that it changes.
        stage: Its stage.
        losses: The number of times that the context was lost while it was in flight.
        openings: The number of times that a worker was lost while its library was opened, and nothing was in
            flight.
        turn: Its turn after the requests that it must follow, while it waits in the application.
        copies: The number of current users of its host arrays: running copies, and a lost worker until its
            death.
        failure: The reason why a copy failed.
        is_suspect: Whether it may have caused a fault of the device, so that it runs without other requests
            (D136).
        rank: Its position among the suspects: the likeliest come last.
        edges: All possible steps in each stage, and the next stage.
    """

    edges: ClassVar[Mapping[tuple[Stage, Step], Stage]] = {
        # D19: sent in the order of its library, and after the requests that it must follow.
        ("queued", "send"): "sent",
        # D59: its worker was lost, or did not have enough memory. It returns to its old position.
        ("sent", "return"): "queued",
        ("queued", "withdraw"): "over",
        # Refused or done. D4: a lost worker counts as a copy until it is dead.
        ("queued", "end"): "copying",
        ("sent", "end"): "copying",
        # Done, and no copy runs.
        ("sent", "finish"): "over",
        ("queued", "unwind"): "unwinding",
        ("sent", "unwind"): "unwinding",
        # The grace of a cancelled caller is over, so even copies of results are not awaited.
        ("copying", "unwind"): "unwinding",
        # D72: buffers stay until the worker no longer uses them, however that ends.
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
    # Whether its caller has left its wait half-way, so that the request ends alone.
    _is_deserted: bool = attrs.field(default=False, init=False)
    # The outcome, while copies run.
    _error: BaseException | None = attrs.field(default=None, init=False)
    _on_cancel: Callable[[RemoteRequest], bool] | None = attrs.field(default=None, init=False)

    def is_apart_from(self, blocks: Collection[int]) -> bool:
        """Return whether it uses none of these blocks."""
        return self.reads.isdisjoint(blocks) and self.writes.isdisjoint(blocks)

    def move(self, step: Step) -> None:
        """Move to the next stage.

        Raises:
            NoEdgeError: This step is impossible in the present stage.
        """
        stage = self.edges.get((self.stage, step))
        if stage is None:
            raise NoEdgeError(f"request {self.number} is {self.stage}: {step!r} does not lead on from there")
        self.stage = stage

    @property
    def has_room(self) -> bool:
        """Whether host memory is available for the staged transfers of its host arrays."""
        return True

    async def wait(self, on_cancel: Callable[[RemoteRequest], bool]) -> None:
        """Wait for the outcome.

        Args:
            on_cancel: Called when the waiting task is cancelled; returns whether the request is withdrawn
                immediately. Otherwise the task waits for its end.
        """
        if self.result is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            self.take()
            return
        self._on_cancel = on_cancel
        await self.park()

    def abort(self, raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        """Withdraw a cancelled task's request, or note that the task waits for its end."""
        assert self._on_cancel is not None  # set by `wait`
        if not self._on_cancel(self):
            return super().abort(raise_cancel)
        self.move("withdraw")
        self.task = None
        self._let_go()
        return trio.lowlevel.Abort.SUCCEEDED

    def end_alone(self, on_cancel: Callable[[RemoteRequest], bool]) -> None:
        """Withdraw it, or let it end without a caller, because the await of its caller was closed.

        Args:
            on_cancel: As for `wait`, which the caller may not have reached.
        """
        self._is_deserted = True
        self._on_cancel = on_cancel
        if not self.is_cancelled:
            self.desert()
        if self.stage == "over":
            self._forget()

    def finish(self, error: BaseException | None) -> None:
        """Deliver the outcome once nothing uses the program's arrays; until then a copy may fail."""
        self.move("end")
        self._error = error
        self._go_on()

    def end_well(self) -> None:
        """Deliver plain success of a request without copies."""
        self.move("finish")
        self.settle(WAKE_VALUE)

    def unwind(self) -> None:
        """Let a cancelled caller leave once nothing uses the program's arrays, whatever the outcome."""
        self.move("unwind")
        self._go_on()

    def leave(self) -> None:
        """Let a cancelled caller leave once no copy uses the program's arrays, whatever the worker does.

        The request keeps its buffers until the worker has ended it.
        """
        self.move("leave")
        self._go_on()

    def copy_over(self) -> None:
        """Record that one use of its arrays has ended."""
        self.copies -= 1
        self._go_on()

    def _go_on(self) -> None:
        """Deliver the outcome, if it is known and nothing uses the program's arrays any longer."""
        stage = self.stage
        if self.copies or stage in ("queued", "sent"):
            return
        if stage != "left":
            # Do this first, because every callee must find the request ended.
            self.move("complete")
            self._let_go()
        if stage == "copying":
            # The error is taken out, because its frames refer to the request.
            error, self._error = self._error or self.failure, None
            self.settle(WAKE_VALUE if error is None else outcome.Error(error))
        elif self.task is not None:
            # A departed caller has already received its cancellation.
            self.settle(self.cancellation())
        if stage == "unwinding" or self._is_deserted:
            self._forget()

    def _let_go(self) -> None:
        """Free the memory that it has allocated for itself."""

    def _forget(self) -> None:
        """Drop all references to the program, because nobody waits for the request."""


@attrs.define(eq=False)
class HostCopy:
    """A copy by the application between a host array and memory that it shares with the worker.

    Attributes:
        host: The array.
        is_upload: Whether the array is read.
        region: The region to copy to or from. None for the device's own memory: then the worker sends the
            address when its stream gets there.
        transfer: The number of an unfilled region; the same for every worker.
        stage: The stage of the copy.
    """

    host: HostArray
    is_upload: bool
    region: SlabRegion | None
    transfer: int = attrs.field(factory=lambda: next(_transfers))
    stage: Literal["planned", "running", "over"] = "planned"


class Staging:
    """Regions of the pool for staged transfers of other arrays, with a limit on their bytes.

    Args:
        pool: The pool of host memory.
        on_free: Called when regions are returned.

    Attributes:
        pool: The pool; its own arrays need no region.
        limit: The maximum number of bytes in use, unless a single request needs more.
        taken: The number of bytes in use.
    """

    def __init__(self, pool: HostPool, on_free: Callable[[], None]) -> None:
        self.pool: HostPool = pool
        self.limit: int = _STAGED
        self.taken: int = 0
        self._on_free = on_free

    def take(self, nbytes: int) -> SlabRegion:
        """Take a region.

        Raises:
            OutOfMemoryError: The machine does not have enough memory.
        """
        region = self.pool.stage(nbytes)
        self.taken += nbytes
        return region

    def give_back(self, copies: Iterable[HostCopy]) -> None:
        """Return the regions of a request."""
        self.taken -= sum(copy.region.nbytes for copy in copies if copy.region is not None)
        self._on_free()


@attrs.define(eq=False, repr=False)
class HostArrays:
    """The host arrays of one request; they are the same for every worker.

    Args:
        by_value: The maximum size in bytes of an array sent within the message.
        staging: The memory for the device's own transfers. None if the application has the device's memory
            mapped.

    Attributes:
        copies: The arrays that the application copies, by index.
        is_used: Whether any array was described to a worker individually, and not by a template.
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
        """Return whether a launch's arrays fit into the staging memory, or would be the first there."""
        staging = self.staging
        if staging is None or not staging.taken or self.copies:
            return True
        needed = [
            host.nbytes for host in _copied(launch) if host.nbytes > self._by_value and not self.address(host)
        ]
        return not needed or staging.taken + sum(needed) <= staging.limit

    def are_direct(self, launch: Launch) -> bool:
        """Return whether the device itself transfers an array of the program for a launch."""
        return any(host.size and self.address(host) is not None for host in _copied(launch))

    def are_written(self, launch: Launch) -> bool:
        """Return whether a worker writes to memory of the application for this launch."""
        if not isinstance(launch.spec, CopyToHostSpec):
            return False
        is_staged = any(copy.region is not None for copy in self.copies)
        return is_staged or self.address(launch.spec.host) is not None

    @property
    def is_copied(self) -> bool:
        """Whether no array of the program is read any longer."""
        return all(copy.stage == "over" for copy in self.copies if copy.is_upload)

    def begin(self) -> None:
        """Begin the message to a worker, before its first host array."""
        self.filled.clear()
        self._next = 0

    def tell(self, host: HostArray, *, is_upload: bool) -> Message:
        """Encode how a host array is read or filled: by the device itself, by value, or by a copy."""
        self.is_used = True
        address = self.address(host)
        if address is not None:
            return address
        if host.nbytes > self._by_value:
            return self._copy(host, is_upload=is_upload)
        return ("value", encode_array(host)) if is_upload else self.fill_later(host)

    def fill_later(self, host: HostArray) -> Message:
        """Encode how a host array is filled from the reply."""
        self.is_used = True
        self.filled.append(host)
        return result_of(host)

    def fits(self, results: Sequence[bytes]) -> bool:
        """Return whether the results are as long as the host arrays that they fill."""
        return [host.nbytes for host in self.filled] == list(map(len, results))

    def fill(self, results: Sequence[bytes]) -> None:
        """Fill host arrays from a reply that `fits`, with their elements in C order."""
        for host, data in zip(self.filled, results, strict=True):
            np.copyto(host, np.ndarray(host.shape, host.dtype, data))

    def clear(self) -> None:
        """Return regions to the pool, because the request has ended."""
        copies, self.copies = self.copies, []
        self.filled.clear()
        if self.staging is not None and copies:
            self.staging.give_back(copies)

    def address(self, host: HostArray) -> Message | None:
        """Return the address of a host array in memory shared with the worker; None if it is elsewhere."""
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
    """Return the host arrays that a launch copies from and to."""
    specs = (launch.spec, *launch.staged)
    return [spec.host for spec in specs if isinstance(spec, (CopyFromHostSpec, CopyToHostSpec))]


def _shared(slab: int, offset: int, host: HostArray, transfer: int | None) -> Message:
    return "shared", slab, offset, DType.of(host.dtype).value, host.shape, transfer


@attrs.define(eq=False)
class Suspicion:
    """A device fault caused by one of several requests (D136).

    Attributes:
        cause: The loss of the context.
        generation: The lost generation of the device.
        remaining: The numbers of the suspects without a faultless run since.
    """

    cause: Exception
    generation: int
    remaining: set[int]


class OperationRequest(RemoteRequest):
    """A launch in a worker.

    Attributes:
        launch: The launch.
        suspicion: The last device fault that it may have caused.
        hosts: Its host arrays.
        shortages: The number of times that garbage was collected because of too little memory for it.
        is_overtaken: Whether another run may read data that a later request has written and not damaged.
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
        """Whether its outputs become invalid even if it was never launched, because it was submitted."""
        return self.on_done is not None

    @property
    def makes_all_it_writes(self) -> bool:
        """Whether it changes no existing array."""
        return self.writes <= {block for block, _ in self.launch.allocations}

    @property
    def needed(self) -> frozenset[int]:
        """The blocks that another run needs in the state of the first run."""
        return self.reads - self.writes if self.launch.may_repeat else self.reads

    def may_run_again(self, needed: Collection[int]) -> bool:
        """Return whether it may run again on its own: it only overwrites, and does not meet other devices.

        Args:
            needed: The blocks that must stay unchanged for earlier requests, which also run again.
        """
        if self.launch.spec.runs_once or self.is_overtaken:
            return False
        if self.makes_all_it_writes:
            return True
        return self.writes.isdisjoint(self.needed) and self.writes.isdisjoint(needed)

    @property
    def has_room(self) -> bool:
        """Whether host memory is available for the staged transfers of its host arrays."""
        staging = self.hosts.staging
        return staging is None or not staging.taken or self.hosts.fit(self.launch)

    def message(self, word: int, released: Ints, templates: TemplateTable) -> Message:
        """Encode the message to the worker with these templates.

        Raises:
            InputFailedError, StaleRefError: One of its arrays is no longer valid.
            OutOfMemoryError: There is not enough host memory for a staged transfer.
            TypeError: The specification holds a value that cannot be encoded.
        """
        # The inputs are checked when the request is sent, and not when it was made, because one may have
        # failed or been released while it waited.
        self.launch.check_inputs()
        hosts, launch = self.hosts, self.launch
        # D59: a request sent to a lost worker without a template has copies known by index, and keeps them.
        template_parts = None if hosts.is_used else templates.find(launch, hosts.address)
        if template_parts is not None:
            template, blocks, packed = template_parts
            described = launch.spec.described
            if described.has_status:
                words = [getattr(launch.spec, described.fields[index].name) for index in described.status]
                hosts.filled = [status for status in words if status is not None]
            # A plain tuple, like the next one: this runs for each operation, and a constructor costs a call.
            return "replay", self.number, word, self.invalidates, template, blocks, released, packed
        # A template may have been used for a lost worker.
        if hosts.is_used or hosts.filled:
            hosts.begin()
        read, write = partial(hosts.tell, is_upload=True), partial(hosts.tell, is_upload=False)
        encoded_launch = encode_launch(launch, read, write, hosts.fill_later)
        return "request", self.number, word, self.invalidates, encoded_launch, released

    def _let_go(self) -> None:
        if self.hosts.is_used:
            self.hosts.clear()

    def _forget(self) -> None:
        self.launch.forget()


class LeaseRequest(RemoteRequest):
    """Memory that the program holds. It survives the worker, and holds the same memory in the next one."""

    __slots__ = ("address", "array", "granted")

    def __init__(self, number: int, array: ArraySpec, *, write: bool) -> None:
        block = frozenset([array.block])
        super().__init__(number, "", frozenset() if write else block, block if write else frozenset())
        self.array: ArraySpec = array
        self.granted: TaskEvent = TaskEvent()
        # The address, once the lease is granted.
        self.address: Address | None = None

    def end(self) -> None:
        """End the lease, because the worker has returned the block or has ended."""
        self.move("end")
        self.move("complete")


@attrs.frozen(eq=False)
class Place:
    """The place of a block.

    Attributes:
        chunk: The memory.
        offset: The offset of the block in bytes.
        nbytes: The size of the block.
    """

    chunk: Chunk
    offset: int
    nbytes: int


class BorrowRequest(LeaseRequest):
    """A leased array that operations of another device read. The next worker gets it again.

    Args:
        number: Its position in the order of the device's requests.
        array: The layout of the array, with its block's id in these operations.
        location: Its place.
        chunk: The number of its memory on this device: `Chunk.number` of its own memory, else `Chunk.abroad`.
        on_end: Called when no worker of this device reads it any longer.
        stay: Determines how long the worker keeps the memory mapped; None while it reads the array.

    Attributes:
        chunk: Its memory.
    """

    __slots__ = ("_number", "_on_end", "_place", "_stay", "chunk")

    def __init__(
        self,
        number: int,
        array: ArraySpec,
        location: Place,
        chunk: int,
        on_end: Callable[[], None],
        *,
        stay: Stay | None,
    ) -> None:
        # It counts as a writer, so that waiting requests that read the array follow it.
        super().__init__(number, array, write=True)
        self._place = location
        self._number = chunk
        self._on_end = on_end
        self._stay = stay
        self.chunk: Chunk = location.chunk

    def send(self, worker: WorkerLink, released: Ints) -> None:
        """Send it to a worker, with the chunk's descriptor unless the worker has mapped it.

        Raises:
            OutOfMemoryError: There are too many open files.
        """
        location, chunk, stay = self._place, self.chunk, self._stay
        is_own = self._number == chunk.number
        is_known = is_own or worker in chunk.borrowers
        stays = stay is not None and not stay.is_over and not is_own
        address = self.array.block, location.nbytes, self._number, location.offset
        descriptors: list[int] = []
        try:
            if not is_known:
                descriptors.append(chunk.open_to_read())
            worker.send(
                _orders.borrow(self.number, released, address, chunk.nbytes, stays), descriptors, now=True
            )
        except OSError as error:
            raise out_of_descriptors(location.nbytes, error) from error
        finally:
            close_all(descriptors)
        if stay is not None and stays:
            stay.add(chunk, worker)

    def record_mapped(self, worker: WorkerLink) -> None:
        """Record that a worker has the chunk mapped."""
        if worker in self.chunk.borrowers:
            self.chunk.borrowers[worker] = True

    def end(self) -> None:
        """End the request: no worker of this device reads the array any longer."""
        super().end()
        self._on_end()
