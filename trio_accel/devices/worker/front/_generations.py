"""The generations of a device: each is one worker that serves, until it is lost."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import ClassVar, TypeAlias

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ....actors import Actor, ActorContext, ActorSnapshot
from ....backends.base import ContextLostError
from ...base._errors import damage_to_memory
from ...base._waits import Alarms
from ...engine._device_state import DeviceState
from ..launcher._launcher import Launcher
from ._answers import AnswerHandler
from ._calls import Questions
from ._chunks import ChunkTable
from ._copy_service import CopyService
from ._link import WorkerLink, died
from ._outcomes import OutcomePolicy
from ._pool import WorkerPool
from ._request import OperationRequest, RemoteRequest
from ._requests import RequestSender, RequestTable

__all__ = ["Generations", "WorkerContextActor"]

_logger = logging.getLogger("trio_accel.devices")

_CLOSING = 1.0
# A context that follows a loss gets one request at a time, until one has completed, and no longer than this.
_CAREFUL = 0.2

_Serve: TypeAlias = Callable[[ActorContext], AbstractAsyncContextManager[None]]


@attrs.define(eq=False, repr=False)
class Generations:
    """The loop over generations: one worker after the other serves; requests of a lost one are sorted.

    Args:
        device: The device.
        chunks: Its memory.
        copies: Copies host arrays of requests.
        outcomes: Gives requests their outcomes.
        pool: The workers.
        sender: Has the requests, and the worker that serves.
        calls: Calls of workers beside requests.
        alarms: Times at which cancelled requests are left.

    Attributes:
        answers: Takes what the workers tell.
        last_error: Error of the last worker's loss, or the reason why none came up.
    """

    _device: DeviceState
    _chunks: ChunkTable
    _copies: CopyService
    _outcomes: OutcomePolicy
    _pool: WorkerPool
    _sender: RequestSender
    _calls: Questions
    _alarms: Alarms
    answers: AnswerHandler = attrs.field(init=False)
    last_error: BaseException | None = attrs.field(default=None, init=False)
    _context: ActorContext | None = attrs.field(default=None, init=False)
    _requests: RequestTable = attrs.field(init=False)
    _nursery: trio.Nursery = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._requests = self._sender.requests
        device, chunks, copies, pool = self._device, self._chunks, self._copies, self._pool
        requests, outcomes = self._requests, self._outcomes
        self.answers = AnswerHandler(
            device, requests, chunks, copies, outcomes, pool, self._alarms, self._calls, self._lose
        )

    def open(self, launcher: Launcher, nursery: trio.Nursery) -> None:
        """Begin; workers are served by tasks of the nursery."""
        self._nursery = nursery
        self.answers.open(nursery)
        self._pool.open(launcher, nursery, self.answers.handle, self._ended)

    @asynccontextmanager
    async def serve(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Serve with one worker, until it is lost or the context's actor ends."""
        try:
            link = await self._pool.take()
        except Exception as error:
            self.last_error = error
            raise
        try:
            # No operation may run on the memory while a copy of the last generation still writes to it.
            await self._copies.wait_off_device()
            # Before the addresses are sent: the worker refuses blocks that overlap.
            self._chunks.drop_unsound()
            self._chunks.drop_empty()
            number = self._device.generation + 1
            self._context = context
            self._pool.in_use.begin()
            # A worker may have told of its actors and died before it served.
            self.answers.actors.clear()
            addresses = tuple(self._chunks.blocks.values())
            link.is_asked = partial(self._asks, link)
            link.send(("start", number, addresses), now=True)
            await link.wait(lambda: link.is_started)
            context.show(self._snapshots)
            context.show_process(link.process.pid)
            self._begin(context, link, number, [block for block, *_ in addresses])
            yield
            await self._close(link)
        finally:
            self._lose(link, died("was ended with its context", self._device.name))
            link.condemn("was ended with its context")

    def _asks(self, link: WorkerLink) -> bool:
        """Tell whether a worker is to answer something: at first, that it serves."""
        return not link.is_serving or bool(self._requests.sent or len(self._calls))

    def _snapshots(self) -> tuple[ActorSnapshot, ...]:
        link = self._sender.link
        return self.answers.actors.snapshots({} if link is None else self._requests.queues_by(link.started))

    def _begin(self, context: ActorContext, link: WorkerLink, number: int, told: Iterable[int]) -> None:
        self.answers.on_first_success = partial(self._progress, context)
        self._sender.begin(link, told)
        self._device.availability.begin(number)
        path, pid = self._device.path, link.process.pid
        extra = {"device": path, "pid": pid, "generation": number}
        _logger.info("device %s: worker process %d serves generation %d", path, pid, number, extra=extra)
        self._open_requests()
        self._pool.refill()

    def _progress(self, context: ActorContext) -> None:
        """Report progress: the context has completed a request without an error."""
        context.report_progress()
        self._requests.hurry()

    def _open_requests(self) -> None:
        """Hand over what waits; after a loss one request at a time, until one has completed."""
        intensity = self._device.options.intensity
        is_careful = self._device.losses.count > 0 and (intensity is None or not intensity.counts_progress)
        self._requests.open(carefully=is_careful)
        if is_careful:
            self._alarms.set(self._requests, trio.current_time() + _CAREFUL, self._requests.hurry)

    async def _close(self, link: WorkerLink) -> None:
        """End a worker in order: waiting requests are refused, and its own are finished within the grace."""
        self._outcomes.is_closing = True
        for request in self._requests.take_waiting():
            self._outcomes.refuse(request, self._outcomes.closed())
        link.send(("close",), now=True)
        seconds = self._device.options.close_grace + _CLOSING
        with trio.move_on_after(seconds, shield=True), suppress(Exception):
            # A worker that dies over that is closed as well.
            await link.wait(lambda: not link.is_started)

    def end(self, given_up: BaseException | None, arrays: str) -> None:
        """End the device: no worker follows.

        Args:
            given_up: Why, where it was not closed.
            arrays: Text on the fate of its arrays.
        """
        error = self._outcomes.closed()
        if given_up is not None:
            error.message = f"{self._device.path}: the device was given up: {given_up}{arrays}"
            error.generation = self._device.generation
        for request in (*self._requests.close(), *self._requests.take_waiting()):
            again = attrs.evolve(error)
            again.__cause__ = given_up
            self._outcomes.refuse(request, again)
        self._calls.lose()

    def _ended(self, link: WorkerLink) -> None:
        """Lose the context of a worker that has ended by itself, or was killed."""
        self._lose(link, died(link.how or "ended", self._device.name))

    def _lose(self, link: WorkerLink, error: Exception) -> None:
        """Lose the context: sort its requests by whether they were begun, and have it replaced."""
        if not link.is_serving:
            return
        # First of all: from here on `is_serving` is false, so a second report of the same loss does nothing,
        # and new requests wait in the table.
        self._sender.end()
        self.last_error = error
        self._device.memory_failure = self._device.memory_failure or damage_to_memory(error)
        self._device.blocks.drain()
        self._device.availability.interrupt()
        self.answers.actors.clear()
        self._copies.cancel_on_device()
        self._chunks.missing.clear()
        self._calls.lose()
        self._alarms.drop(self._requests)
        had = self._requests.close()
        if not link.is_silent:
            self._keep_until_gone(link, had)
        for request in had:
            self._alarms.drop(request)
            if isinstance(request, OperationRequest):
                # Its outputs may have been made anew, or not at all.
                self._chunks.forget_addresses(request.launch.allocations)
        # D59: unbegun requests go back to their old places in the queue, before the actor's crash starts the
        # next generation.
        self._requests.put_back(self._outcomes.sort(had, link, error))
        if self._context is not None and not self._outcomes.is_closing:
            self._context.crash(error)

    def _keep_until_gone(self, link: WorkerLink, requests: Iterable[RemoteRequest]) -> None:
        """Memory that a lost worker may still write to counts as used until it is dead (D4)."""
        written = [
            request
            for request in requests
            if isinstance(request, OperationRequest) and request.hosts.is_written
        ]
        if written:
            for request in written:
                request.copies += 1
            self._nursery.start_soon(self._wait_until_gone, link, written)

    @enable_ki_protection
    async def _wait_until_gone(self, link: WorkerLink, written: list[OperationRequest]) -> None:
        # No deadline: the worker is being killed, and until it is dead it may write to these arrays.
        with trio.CancelScope(shield=True):
            await link.wait_gone()
        for request in written:
            request.copy_over()


class WorkerContextActor(Actor):
    """One incarnation is one generation of the device, served by one worker."""

    # The device logs each loss.
    expected_crashes: ClassVar[tuple[type[Exception], ...]] = (ContextLostError,)

    def __init__(self, serve: _Serve) -> None:
        self._serve = serve

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        """Hold a worker; when it is lost, the incarnation ends with it."""
        async with self._serve(context):
            yield
