"""Ends the requests to a worker: copies of host arrays, outcomes, and effects on the written arrays.

* `CopyService` copies host arrays in threads. A request's outcome waits for its copies, because they use the
  program's arrays.
* `OutcomePolicy` gives every request its only outcome: after an answer of the worker (`done`, `end_plainly`),
  after the loss of the worker (`sort`, `without_lost`, `fail_if_guilty`), or without any run (`refuse`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import trio
from trio.lowlevel import enable_ki_protection

from ...backends.base import (
    AccelError,
    CompletionTimeoutError,
    DeviceLostError,
    HostArray,
    OutOfMemoryError,
    StaleRefError,
)
from ..base._errors import IN_FLIGHT, OPENING, lost
from ..base._host_pool import COPIES_AT_ONCE, Copying
from ..engine._device_state import DeviceState
from ..operations._blocks import Block
from ..operations._hooks import Phase, notify
from ..operations._operation import Launch
from ..wire._protocol import Address
from ._link import WorkerLink
from ._loss import LossPolicy
from ._request import HostCopy, LeaseRequest, OperationRequest, RemoteRequest, Suspicion


class CopyService:
    """Copies between host arrays of requests and memory shared with the worker, in threads.

    If the application has the device's own memory mapped, the copy uses that memory while the worker holds a
    stream (`copy_on_device`). Otherwise the device transfers from and to a region of the pool of host memory.
    Such a region is filled as soon as the request is sent (`stage`), or read after the request is done
    (`fetch`).

    Attributes:
        begun: The number of copies so far.
    """

    def __init__(self) -> None:
        self.begun: int = 0
        # The running copies, with their requests.
        self._running: dict[Copying, tuple[OperationRequest, HostCopy]] = {}
        self._changed = trio.lowlevel.ParkingLot()
        self._limiter = trio.CapacityLimiter(COPIES_AT_ONCE)
        self._nursery: trio.Nursery

    def open(self, nursery: trio.Nursery) -> None:
        """Begin; copies run in tasks of the nursery."""
        self._nursery = nursery

    def stage(self, request: OperationRequest, filled: Callable[[HostCopy], None]) -> None:
        """Fill the regions of a sent request, unless the filling has already begun.

        Args:
            request: The request.
            filled: Called with each copy on the Trio thread, when its region is filled or never will be.
        """
        for copy in request.hosts.copies:
            if copy.is_upload and copy.region is not None and copy.stage == "planned":
                self._start(request, copy, _memory(copy), partial(filled, copy))

    def fetch(self, request: OperationRequest) -> None:
        """Copy the worker's results from regions to the arrays of a completed request."""
        for copy in request.hosts.copies:
            if not copy.is_upload and copy.region is not None:
                self._start(request, copy, _memory(copy), lambda: None)

    def copy_on_device(
        self,
        request: OperationRequest,
        copy: HostCopy,
        view: Callable[[], HostArray],
        copied: Callable[[], None],
    ) -> None:
        """Copy from or to memory of the device, while the worker holds a stream there.

        Args:
            request: Its request, which stores the error of a failed copy.
            copy: The copy.
            view: Returns the array over the device's memory.
            copied: Called after the copy, even if it has failed.
        """
        try:
            memory = view()
        except Exception as error:  # noqa: BLE001  # no address space, or no descriptor for the mapping
            request.failure = error
            copied()
        else:
            self._start(request, copy, memory, copied)

    def cancel(self, request: RemoteRequest) -> None:
        """Let the running copies of a request end early; does not wait for them."""
        for copying, (owner, _) in self._running.items():
            if owner is request:
                copying.cancel()

    def unwind(self, request: RemoteRequest) -> None:
        """Let the running copies of a request end early, and its cancelled caller leave after them."""
        self.cancel(request)
        request.unwind()

    def cancel_on_device(self) -> None:
        """Let all copies from and to the device's memory end early, because their purpose is lost."""
        for copying, (_, copy) in self._running.items():
            if copy.region is None:
                copying.cancel()

    async def wait_off_device(self) -> None:
        """Wait until no copy touches the device's memory."""
        while any(copy.region is None for _, copy in self._running.values()):
            await self._changed.park()

    async def wait_idle(self) -> None:
        """Wait until no copy runs."""
        while self._running:
            await self._changed.park()

    def _start(
        self,
        request: OperationRequest,
        copy: HostCopy,
        memory: HostArray,
        copied: Callable[[], None],
    ) -> None:
        self.begun += 1
        copy.stage = "running"
        copying = Copying(memory, copy.host) if copy.is_upload else Copying(copy.host, memory)
        # The request's outcome waits for this count, because the copy touches the program's array until then.
        request.copies += 1
        self._running[copying] = request, copy
        self._nursery.start_soon(self._copy, request, copying, copy, copied)

    @enable_ki_protection
    async def _copy(
        self, request: OperationRequest, copying: Copying, copy: HostCopy, copied: Callable[[], None]
    ) -> None:
        try:
            await trio.to_thread.run_sync(copying.run, limiter=self._limiter)
        except Exception as error:  # noqa: BLE001  # the system cannot start a thread
            request.failure = error
        finally:
            copy.stage = "over"
            del self._running[copying]
            self._changed.unpark_all()
            copied()
            request.copy_over()


def _memory(copy: HostCopy) -> HostArray:
    assert copy.region is not None
    return copy.region.array(copy.host.shape, copy.host.dtype)


# The trouble report of an operation without trouble: its outcome, whether it was launched, whether an
# injected fault struck, its error, and its invalid blocks.
_FINE: Any = "done", True, False, None, ()
# At the end of a launch, hooks are notified of all its phases. `Launch.times` has the times.
_PHASES = (Phase.ENQUEUE, Phase.COMPLETE, Phase.REPLY, Phase.RELEASE)


class OutcomePolicy:
    """The rules by which every request gets its only outcome.

    Args:
        device: The device of the requests.
        copies: Copies their host arrays.

    Attributes:
        is_closing: Whether the device is being closed, so that no request runs again.
    """

    def __init__(self, device: DeviceState, copies: CopyService) -> None:
        self.is_closing: bool = False
        self._device = device
        self._copies = copies
        self._policy = LossPolicy(device.options)

    def done(
        self,
        request: OperationRequest,
        addresses: tuple[Address, ...],
        results: tuple[Any, ...],
        trouble: Any,
    ) -> tuple[Sequence[Address], BaseException | None] | None:
        """End an operation that the worker has ended.

        Args:
            request: Its request.
            addresses: The addresses of its new blocks that are not yet known here.
            results: The contents of the host arrays that the reply fills.
            trouble: The worker's report, in the form of `_FINE`; None if the operation was launched and
                succeeded.

        Returns:
            The addresses in blocks that the program's arrays still use, and the error of the operation. None
            if memory was short and garbage may hold some. Then the request has no outcome yet, and must be
            sent once more.
        """
        launch, device = request.launch, self._device
        error: BaseException | None = None
        is_launched, invalid = True, ()
        if trouble is not None or request.failure is not None:
            fate, is_launched, is_hit, reported_error, invalid = trouble or _FINE
            if fate == "withdrawn":
                self._copies.unwind(request)
                return (), None
            if self._may_try_again(request, reported_error, is_launched=is_launched):
                return None
            error = self._error_of(reported_error or request.failure, is_launched=is_launched)
            if is_hit:
                _strike(launch)
        if error is not None or results or request.hosts.is_used:
            self._copy(request, results, error)
        generation = device.availability.generation
        live_blocks: list[int] = []
        for block in launch.keep:
            # If the caller has left, its arrays are already released.
            if isinstance(block, Block) and not block.is_released:
                # The block has an older generation if it was planned while the device had no context.
                block.generation = generation
                live_blocks.append(block.id)
        if invalid or request.failure is not None:
            # If a copy failed, all written arrays are invalid.
            launch.mark_damaged(error, None if request.failure is not None else invalid)
        launch.heal(error)
        if is_launched and device.hooks:
            notify(device.hooks, launch, *_PHASES)
        # Deliver the outcome last, because its callback may use the arrays at once.
        request.finish(error)
        return [address for address in addresses if address[0] in live_blocks] if addresses else (), error

    def end_plainly(self, request: OperationRequest, results: Sequence[bytes]) -> None:
        """End a successful operation, as `done` does without copies and hooks.

        Args:
            request: Its request.
            results: The contents of the host arrays that the reply fills; their lengths must match.
        """
        for host, data in zip(request.hosts.filled, results, strict=True):
            host[...] = np.ndarray(host.shape, host.dtype, data)
        launch, generation = request.launch, self._device.availability.generation
        for block in launch.keep:
            if isinstance(block, Block) and not block.is_released:
                block.generation = generation
        for output in launch.outputs:
            if output.damaged_by is not None:
                launch.heal(None)
                break
        request.end_well()

    def _copy(self, request: OperationRequest, results: Any, error: BaseException | None) -> None:
        """Fill the host arrays of an operation, unless it failed."""
        if error is not None or request.stage == "left":
            self._copies.cancel(request)
        else:
            request.hosts.fill(results)
            self._copies.fetch(request)

    def _may_try_again(
        self, request: OperationRequest, error: Exception | None, *, is_launched: bool
    ) -> bool:
        # A launch may have changed parts of an array in place.
        is_as_it_was = not is_launched or request.reads.isdisjoint(request.writes)
        # If the device's whole memory is too little, garbage cannot help, and its collection blocks the loop.
        is_short = isinstance(error, OutOfMemoryError) and error.requested <= error.total
        # Do not repeat it twice, or after other requests may have been refused because of it.
        return is_short and is_as_it_was and not (request.shortages or request.invalidates or self.is_closing)

    def _error_of(self, error: Exception | None, *, is_launched: bool) -> Exception | None:
        is_late = error is not None and self.is_closing and not is_launched
        return self.closed() if is_late else error

    def sort(
        self,
        requests: Iterable[RemoteRequest],
        link: WorkerLink,
        cause: Exception,
        done: Mapping[str, int],
        lost_blocks: Collection[int] = (),
    ) -> list[RemoteRequest]:
        """Sort the requests of a lost worker: end those that fail, and return the others.

        Args:
            requests: The requests, in their order.
            link: The worker.
            cause: The reason for its loss.
            done: The number of requests that each library has completed in this worker.
            lost_blocks: The blocks whose memory was lost with the worker.

        Returns:
            The requests for the next worker, in the same order.
        """
        requests = list(requests)
        begun = [
            request
            for request in requests
            if isinstance(request, OperationRequest) and _has_begun(request, link)
        ]
        if link.is_stuck and begun:
            requests.remove(begun[0])
            self._end_stuck(begun.pop(0))
        _mark_overtaken(begun)
        for request in requests:
            if isinstance(request, LeaseRequest) and request.stage == "left":
                # End these leases before any other request, because the end of a borrowed array may end a
                # lease on this device.
                request.end()
        suspects = self._policy.suspects(begun, done) if link.has_faulted else []
        suspicion = Suspicion(cause, self._device.generation, {request.number for request in suspects})
        for rank, suspect in enumerate(suspects):
            suspect.rank, suspect.suspicion = rank, suspicion
        if not begun:
            requests = [request for request in requests if not self._fails_to_open(request, link, cause)]
        repeated: list[RemoteRequest] = []
        needed: set[int] = set()
        for request in requests:
            if self._runs_again(request, link, cause, suspects, needed, lost_blocks):
                repeated.append(request)
                if isinstance(request, OperationRequest):
                    needed |= request.needed
        return repeated

    def _fails_to_open(self, request: RemoteRequest, link: WorkerLink, cause: Exception) -> bool:
        """Fail a request if its library was being opened at repeated losses; return whether it failed.

        Nothing was in flight, so the library's import may have ended the process. If the request ran again,
        it would end all workers, and so the device for all of its users.
        """
        if not isinstance(request, OperationRequest) or request.library in link.used:
            return False
        request.openings += 1
        is_over = self._policy.is_opened_too_often(request.openings) and not request.is_cancelled
        if is_over:
            error = lost(cause, OPENING, "ask again", is_closing=self.is_closing)
            self._device.locate(error, request.launch.name)
            self.refuse(request, error)
        return is_over

    def _end_stuck(self, request: OperationRequest) -> None:
        """Fail the operation that began first, because it is stuck and the others wait for it."""
        _strike(request.launch)
        stuck = CompletionTimeoutError("it did not complete, and the worker's loop stood still with it")
        self._device.locate(stuck, request.launch.name)
        self._end_in_flight(request, stuck)

    def _runs_again(
        self,
        request: RemoteRequest,
        link: WorkerLink,
        cause: Exception,
        suspects: list[OperationRequest],
        needed: Collection[int],
        lost_blocks: Collection[int],
    ) -> bool:
        """Return whether a request runs again; otherwise end it, except leases.

        Args:
            request: The request.
            link: The lost worker.
            cause: The reason for its loss.
            suspects: The requests that may have caused the loss.
            needed: The blocks that earlier requests, which run again, need unchanged.
            lost_blocks: The blocks whose memory was lost with the worker.
        """
        if isinstance(request, LeaseRequest):
            # The program's view of the memory survives the worker.
            return request.stage == "sent"
        assert isinstance(request, OperationRequest)
        if _has_begun(request, link):
            request.is_suspect = request in suspects
            # D136: if there are suspects, the loss counts only for them, because an innocent request may meet
            # a fault of each bad request.
            request.losses += request.is_suspect or not suspects
            _strike(request.launch)
            is_repeatable = request.may_run_again(needed) and request.is_apart_from(lost_blocks)
            is_to_blame = suspects == [request]
            reason = self._policy.why_it_fails(
                request.losses, is_repeatable=is_repeatable, is_to_blame=is_to_blame
            )
            if reason is not None:
                self._fail_in_flight(request, cause, self._device.generation, reason)
                return False
            # Drop an injected fault that has struck, because it would end the next context as well.
            request.launch = request.launch.without_fault()
        if request.is_cancelled:
            self._copies.unwind(request)
            return False
        return True

    def without_lost(
        self, requests: Iterable[RemoteRequest], lost_blocks: Collection[int]
    ) -> Iterable[RemoteRequest]:
        """Refuse requests that use blocks lost with a worker; yield the others for the next worker."""
        generation = self._device.generation
        for request in requests:
            if request.is_apart_from(lost_blocks):
                for block in request.launch.keep if isinstance(request, OperationRequest) else ():
                    # The next worker, and so the next generation, makes the block.
                    if isinstance(block, Block) and not block.is_released:
                        block.generation = generation + 1
                yield request
                continue
            try:
                for argument, block in request.launch.uses if isinstance(request, OperationRequest) else ():
                    block.check(argument)
                error = StaleRefError(
                    "its memory was lost with the worker of the device; make it again",
                    device=self._device.name,
                    generation=generation,
                )
            except StaleRefError as stale:
                error = stale
            self.refuse(request, error)

    def fail_if_guilty(self, request: RemoteRequest) -> bool:
        """Fail a suspect if all other suspects have run without a fault; return whether it failed.

        It does not fail if the options of the device let it run again.
        """
        assert isinstance(request, OperationRequest)  # leases cannot be suspects
        suspicion = request.suspicion
        reason = self._policy.why_it_fails(request.losses, is_repeatable=True, is_to_blame=True)
        if suspicion is None or suspicion.remaining != {request.number} or reason is None:
            return False
        self._fail_in_flight(request, suspicion.cause, suspicion.generation, reason)
        return True

    def _fail_in_flight(
        self, request: OperationRequest, cause: Exception, generation: int, reason: str
    ) -> None:
        """Fail an operation in flight at a loss; `reason` is not empty if it caused the loss."""
        self._policy.guilty[request.library] += bool(reason) and not self.is_closing
        advice = request.launch.advice(is_kept=self._device.info.keeps_memory)
        error = lost(cause, IN_FLIGHT, advice, is_closing=self.is_closing, blame=reason)
        error.generation = generation
        self._device.locate(error, request.launch.name)
        self._end_in_flight(request, error)

    def _end_in_flight(self, request: OperationRequest, error: AccelError) -> None:
        launch = request.launch
        launch.mark_damaged(error)
        notify(self._device.hooks, launch, *_PHASES)
        # Copies not yet begun never run; the outcome waits for running copies.
        self._copies.cancel(request)
        request.finish(error)

    def refuse(self, request: RemoteRequest, error: Exception) -> None:
        """End a request that no worker has begun, with an error or its cancellation."""
        if isinstance(request, LeaseRequest):
            request.failure = error
            request.granted.set()
            # The end of another request's borrowed array may just have ended this lease.
            if request.stage != "over":
                request.end()
            return
        assert isinstance(request, OperationRequest)
        if request.invalidates:
            request.launch.mark_damaged(error)
        if request.is_cancelled:
            self._copies.unwind(request)
        else:
            self._copies.cancel(request)
            request.finish(error)

    def end_lease(self, request: LeaseRequest) -> None:
        """End a lease before its turn, because its array was released or the device is being closed."""
        released = StaleRefError(
            "lease: its memory was released", device=self._device.name, generation=self._device.generation
        )
        self.refuse(request, self.closed() if self.is_closing else released)

    def closed(self) -> DeviceLostError:
        """Make the error of a request after the device was closed."""
        return DeviceLostError("the device is closed", device=self._device.name)


def _has_begun(request: RemoteRequest, link: WorkerLink) -> bool:
    """Return whether a worker had begun with an operation."""
    # D58: before each launch, the worker writes the request's number to the shared word of its library. A
    # library launches in the order of numbers, so the word shows which requests a killed worker had begun.
    return isinstance(request, OperationRequest) and request.number <= link.started(request.library)


def _mark_overtaken(begun: Sequence[OperationRequest]) -> None:
    """Mark requests that must not run again, because a later request may have changed data that they read."""
    # D185: a failed idempotent request does not mark its arrays as damaged, so no other check would notice
    # that they have later contents.
    written: set[int] = set()
    for request in reversed(begun):
        request.is_overtaken = not written.isdisjoint(request.needed)
        if request.launch.may_repeat:
            written |= request.writes


def _strike(launch: Launch) -> None:
    """Record that an injected fault of a launch has struck."""
    if launch.fault is not None:
        launch.fault.strike()
