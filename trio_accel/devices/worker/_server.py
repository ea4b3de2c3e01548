"""The worker's end: it takes messages, and the same engine serves them as on any other device."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import Context, copy_context
from itertools import starmap
from operator import add
from typing import Any

import attrs
import trio

from ...actors import ActorError, ActorStarted, ActorSystem, Event, MessageEvent, Ref, Restart, Subscription
from ...backends import resolve_for_worker
from ...backends.base import AccelDevice, AccelError, PlacedBlock, Strs
from ..base._errors import lost_descriptors
from ..base._options import DeviceOptions
from ..base._waits import Availability
from ..engine._context import ContextActor, Session, context_policy
from ..engine._library_opener import CloseLibrary, PrepareLibrary
from ..operations._blocks import BlockTable
from ..operations._hooks import EngineHook, Phase
from ..operations._operation import Launch
from ..wire import _answers, _orders
from ..wire._channel import Channel, EndOfChannel
from ..wire._frames import LOST, Received
from ..wire._messages import handlers
from ..wire._protocol import Address, Message, SharedPage, WorkerConfig
from ..wire._wire_values import encode_error, encode_event
from ._memory import RemoteCopies, WorkerBlocks, WorkerMemory, WorkerSlabs
from ._requests import WorkerRequests

# The maximum number of messages to handle before other tasks run.
_IN_A_ROW = 16
_FOREVER = 1e9


class WorkerServer:
    """The owner of the context in a worker. Everything runs in the one task that reads, or in callbacks."""

    def __init__(self, system: ActorSystem, channel: Channel, page: SharedPage, config: WorkerConfig) -> None:
        # No grace is needed here, because the application waits for operations, and ends a worker that does
        # not close.
        self.options: DeviceOptions = attrs.evolve(
            config.options, cancel_grace=_FOREVER, close_grace=_FOREVER
        )
        # D99: the libraries that the previous generation used.
        self.in_use: Strs = config.in_use
        # The device, once open.
        self.opened: AccelDevice
        self.hooks: list[EngineHook] = []
        self.next_generation: int = 0
        self.variables: Context | None = copy_context()
        self._grace = config.options.close_grace
        self._system = system
        self._channel = channel
        self._config = config
        self._availability = Availability()
        self.blocks: BlockTable = BlockTable(config.device, self._availability)
        self._table = WorkerBlocks(self.blocks)
        self._memory = WorkerMemory(channel)
        self._prepared = PreparedLibraries(self._memory)
        self._requests = WorkerRequests(channel, page, self.blocks, self._table, self._memory)
        self._copies = RemoteCopies(channel.send)
        self.events: EventForwarder = EventForwarder(system, channel, config.path)
        self._clock = LaunchClock(channel, self.hooks)
        # The engine calls them with each operation, and at each check.
        self.launching: Callable[[Launch], None] | None = self._requests.launching
        self.looked: Callable[[int], None] = page.show_looks
        self._serving = self._requests.serving
        self._context: Ref[ContextActor]
        # Set once the context has opened in advance the libraries named at its start.
        self._has_opened_ahead = trio.Event()
        self._is_lost = False
        # The number of messages that arrived together with the present one.
        self._received = 0
        self._nursery: trio.Nursery
        self._handlers = _HANDLERS(
            self, self._requests, self._copies, self._memory, self._memory.slabs, self._prepared
        )

    # The owner's methods, which the context calls.

    def open_device(self) -> AccelDevice:
        """Return the device, which is already open."""
        return self.opened

    def attach(self, session: Session) -> None:
        """Take the session of a spare context."""
        self._requests.session = session
        self.progressed: Callable[[], None] = session.context.report_progress
        self.blocks.release = session.engine.release_all

    def detach(self, error: BaseException | None) -> None:
        """End with the context. The application gets the error of its loss, if it is already known."""
        self._requests.session = None
        # Arrays dropped from now on end with the device.
        self.blocks.lose()
        if isinstance(error, Exception) and not self._requests.is_closing:
            self._lose(error)

    def prepared(self) -> None:
        """Record that the context has opened the libraries in advance."""
        self._has_opened_ahead.set()

    def program_opened(self, library: str, seconds: float, imports: float) -> None:
        """Report the duration of making a program."""
        self._channel.send(_answers.program_opened(library, int(seconds * 1e9), int(imports * 1e9)))

    def is_alone(self) -> bool:
        """Return whether the application has sent nothing else."""
        return self._received == 1 and len(self._serving) == 1

    # The only task.

    async def run(self, received: list[Received]) -> None:
        """Open the device, then serve until the application closes the channel, which ends the process.

        Args:
            received: The messages received so far.
        """
        try:
            self.opened = self._memory.device = await trio.to_thread.run_sync(self._open)
        except Exception as error:  # noqa: BLE001  # the application decides
            self._give_up(error)
            await trio.sleep_forever()
        handlers = self._handlers
        self._on_observe(self._config.is_observed, self._config.is_timed)
        async with trio.open_nursery() as self._nursery:
            self._requests.open(self._nursery)
            self._nursery.start_soon(self._memory.slabs.run)
            await self._stand_ready()
            # Imports and the context live as long as the process, so the collector need not scan them.
            gc.freeze()
            self._channel.send(_answers.ready(tuple(self.opened.libraries)), now=True)
            while True:
                self._received = len(received)
                for start in range(0, len(received), _IN_A_ROW):
                    if start:
                        # Launched operations may be done by now.
                        await trio.lowlevel.checkpoint()
                    for message, descriptors in received[start : start + _IN_A_ROW]:
                        if LOST in descriptors:
                            # D74: a descriptor was lost in transit, so the device would serve without a part
                            # of its memory.
                            self._give_up(lost_descriptors())
                        else:
                            handlers[message[0]](*message[1:], *descriptors)
                try:
                    received = await self._channel.receive()
                except EndOfChannel:
                    # The application has ended, or no longer needs this process.
                    os._exit(0)

    def _open(self) -> AccelDevice:
        backend, info = resolve_for_worker(self._config.device, self._config.backend)
        limit = self.options.memory_limit
        self._keeps_memory = info.keeps_memory
        keeper = self._memory if info.keeps_memory else None
        device = backend.open_device(info.index, memory_limit=limit, keeper=keeper)
        return self._copies.wrap(device)

    def _on_observe(self, is_observed: bool, is_timed: bool) -> None:
        self.events.observe(is_observed)
        self._clock.run(is_timed=is_timed)

    async def _close_library(self, number: int, path: str) -> None:
        with suppress(ActorError):
            await self._context.ask(CloseLibrary(path))
        self._channel.send(_answers.result(number, None), now=True)

    async def _stand_ready(self) -> None:
        """Start the context's actor before it is needed; its memory follows."""
        try:
            self._context = self._requests.context = await self._system.spawn(
                ContextActor,
                self,
                name="context",
                restart=Restart.TEMPORARY,
                policy=attrs.evolve(context_policy(self.options), grace=self._grace + 5.0),
            )
        except Exception as error:  # noqa: BLE001  # the application decides
            self._lose(error)
            await trio.sleep_forever()
        self._prepared.open(self.opened, self._context, self._nursery)
        self._nursery.start_soon(self._watch_context)

    async def _watch_context(self) -> None:
        """Report a failure of the context's actor that its libraries caused; its end has the error."""
        error = (await self._context.wait_terminated()).error
        if not self._requests.is_closing:
            self._lose(error or AccelError("the context ended by itself"))

    def _lose(self, error: BaseException) -> None:
        """Give the context up. The device knows whether any of its work may still write."""
        self._give_up(error, is_silent=self.opened.is_dead)

    def _give_up(self, error: BaseException, *, is_silent: bool = False) -> None:
        """Report the context's loss to the application, which ends this process.

        Args:
            error: The error of the loss.
            is_silent: Whether its kernels can no longer write to memory, so that the next worker need not
                wait (D4).
        """
        if not self._is_lost:
            self._is_lost = True
            self._channel.send(_answers.lost(encode_error(error), is_silent), now=True)

    def _on_start(self, generation: int, blocks: Iterable[Address]) -> None:
        session = self._requests.session
        if session is None:
            # The context was lost while it was a spare, and the application knows.
            return
        try:
            self._begin(session, generation, list(starmap(PlacedBlock, blocks)))
        except Exception as error:  # noqa: BLE001  # the application decides
            self._lose(error)
        else:
            self._channel.send(_answers.started(), now=True)

    def _begin(self, session: Session, generation: int, blocks: list[PlacedBlock]) -> None:
        # Freed chunks must be unmapped first, because `adopt` takes over every mapped chunk.
        self._prepared.remove_leaving()
        if self._keeps_memory:
            self.opened.adopt(blocks)
        self._prepared.begin(session, blocks)
        self._availability.begin(generation)
        for block in blocks:
            self._table.adopt(block.block, block.nbytes)
        session.generation = generation
        session.engine.begin(generation, self._table)
        # The actors of a spare are shown only once it serves.
        self.events.begin()
        self._nursery.start_soon(self._tell_prepared)

    async def _tell_prepared(self) -> None:
        """Report that the worker is complete, because all libraries to open in advance are open."""
        await self._has_opened_ahead.wait()
        await self._prepared.wait_over()
        self._channel.send(_answers.prepared(), now=True)

    def _on_slab(self, number: int, nbytes: int, *descriptors: int) -> None:
        self._memory.slabs.add(self.opened, number, nbytes, *descriptors)

    def _on_call(self, number: int, question: str, path: str) -> None:
        session = self._requests.session
        if session is None:
            return
        if question == "synchronize":
            self._nursery.start_soon(self._synchronize, number, session)
            return
        if question == "close":
            self._nursery.start_soon(self._close_library, number, path)
            return
        self.blocks.drain()
        memory = self.opened.memory()
        engine = session.engine
        in_flight = {library: queue.in_flight for library, queue in engine.queues().items()}
        value: Any = (
            engine.enqueuer.launched,
            engine.completer.completed,
            in_flight,
            attrs.astuple(memory),
            {path: (*attrs.astuple(used.plans), used.workspace) for path, used in engine.usage().items()},
            tuple(
                map(
                    add, attrs.astuple(self.opened.plan_counts), attrs.astuple(self._requests.bindings.counts)
                )
            ),
        )
        self._channel.send(_answers.result(number, value), now=True)

    async def _synchronize(self, number: int, session: Session) -> None:
        await session.engine.synchronize()
        self.blocks.drain()
        self._channel.send(_answers.result(number, None), now=True)

    def _on_poison(self, reason: str) -> None:
        self.opened.poison(reason)

    def _on_unslab(self, number: int) -> None:
        self._memory.slabs.remove(self.opened, number, self._wait_idle)

    async def _wait_idle(self) -> None:
        session = self._requests.session
        if session is not None:
            await session.engine.wait_idle()

    def _on_close(self) -> None:
        # Do this first, so that the end of the context is not reported as a loss.
        self._requests.is_closing = True
        self._requests.end_leases()
        self._nursery.start_soon(self._close)

    async def _close(self) -> None:
        await self._context.stop()
        self._channel.send(_answers.closed(), now=True)


class EventForwarder:
    """Forwards events of actors below the context: always life events, and message events if observed.

    Args:
        system: The worker's own system.
        channel: The channel to the application.
        path: The path of the device's actor.
    """

    def __init__(self, system: ActorSystem, channel: Channel, path: str) -> None:
        self._system = system
        self._channel = channel
        self._below = f"{path}/context/"
        self._subscription: Subscription | None = None
        # The events from the time before the worker was active.
        self._early: list[Message] | None = []

    def begin(self) -> None:
        """Show the worker's actors from now on, because it is active."""
        early, self._early = self._early, None
        for message in early or ():
            self._channel.send(message)

    def observe(self, is_observed: bool) -> None:
        """Start or stop forwarding message events."""
        if is_observed and self._subscription is None:
            self._subscription = self._system.subscribe(self._observe_message)
        elif not is_observed and self._subscription is not None:
            self._subscription.close()
            self._subscription = None

    def tell(self, event: Event) -> None:
        """Forward an event."""
        path = event.path
        if not path.startswith(self._below):
            return
        actor_class = ""
        if isinstance(event, ActorStarted):
            with suppress(KeyError):
                actor_class = self._system.tree().find(path).actor_class
        message = _answers.event(encode_event(event), actor_class)
        if self._early is None:
            self._channel.send(message)
        else:
            # The tree shows only the actors of the active worker.
            self._early.append(message)

    def _observe_message(self, event: Event) -> None:
        if isinstance(event, MessageEvent):
            self.tell(event)


class LaunchClock:
    """Records the times of launches and completions.

    Args:
        channel: The channel to the application.
        hooks: The hooks of the worker's engine.
    """

    def __init__(self, channel: Channel, hooks: list[EngineHook]) -> None:
        self._channel = channel
        self._hooks = hooks
        self._begun: dict[int, int] = {}

    def run(self, *, is_timed: bool) -> None:
        """Start or stop recording times."""
        if is_timed and self._see not in self._hooks:
            self._hooks.append(self._see)
        elif not is_timed and self._see in self._hooks:
            self._hooks.remove(self._see)
            self._begun.clear()

    def _see(self, phase: Phase, launch: Launch) -> None:
        if phase is Phase.ENQUEUE:
            self._begun[launch.number] = time.monotonic_ns()
        elif phase is Phase.COMPLETE:
            begun = self._begun.pop(launch.number, None)
            if begun is not None:
                # The answer follows.
                self._channel.send(_answers.times(launch.number, begun, time.monotonic_ns()))


@attrs.define(eq=False)
class _Prepared:
    """A library opened in advance.

    Attributes:
        blocks: The places of its blocks at the time of the order.
        is_over: Set when it is open, or cannot be opened.
        is_closed: Whether the application has closed it.
    """

    blocks: tuple[PlacedBlock, ...]
    is_closed: bool = False
    is_over: trio.Event = attrs.field(factory=trio.Event)


class PreparedLibraries:
    """Opens libraries in advance, before and after the worker takes over.

    Before the takeover, another worker is active. A library with blocks from its start, such as a program,
    may read them at the reported places. If they have moved by the takeover, or are freed, the library is
    dropped (D115).

    Args:
        memory: Maps the chunks.
    """

    def __init__(self, memory: WorkerMemory) -> None:
        self._memory = memory
        self._device: AccelDevice
        self._context: Ref[ContextActor]
        self._nursery: trio.Nursery
        self._prepared: dict[str, _Prepared] = {}
        # The libraries in the process of opening.
        self._running: set[_Prepared] = set()
        # Freed chunks that stay mapped while a library opened in advance has blocks in them.
        self._leaving: set[int] = set()
        self._has_begun = False

    def open(self, device: AccelDevice, context: Ref[ContextActor], nursery: trio.Nursery) -> None:
        """Begin, with the context of the worker."""
        self._device = device
        self._context = context
        self._nursery = nursery

    def on_prepare(self, library: str, blocks: Iterable[Address]) -> None:
        """Open a library in advance.

        Args:
            library: The import path of its actor.
            blocks: The places of the blocks that it has from its start.
        """
        prepared = _Prepared(tuple(starmap(PlacedBlock, blocks)))
        if not self._has_begun:
            try:
                self._device.expect(prepared.blocks)
            except ValueError:
                # A place is outside of the mapped chunks. The library is opened when it is used.
                return
            self._prepared[library] = prepared
        self._running.add(prepared)
        self._nursery.start_soon(self._prepare, library, prepared)

    async def _prepare(self, path: str, prepared: _Prepared) -> None:
        # If the context is ending, nothing is opened in advance.
        with suppress(ActorError):
            await self._context.ask(PrepareLibrary(path))
        self._running.discard(prepared)
        prepared.is_over.set()

    async def wait_over(self) -> None:
        """Wait until no library is being opened in advance."""
        while self._running:
            await next(iter(self._running)).is_over.wait()

    def on_forget(self, library: str) -> None:
        """Close a library opened in advance, because the application has closed it."""
        prepared = self._prepared.get(library)
        if prepared is not None:
            prepared.is_closed = True
        self._nursery.start_soon(self._close, library)

    async def _close(self, path: str) -> None:
        prepared = self._prepared.get(path)
        if prepared is not None:
            await prepared.is_over.wait()
        with suppress(ActorError):
            await self._context.ask(CloseLibrary(path))
        if self._prepared.get(path) is prepared:
            self._prepared.pop(path, None)

    def begin(self, session: Session, blocks: Iterable[PlacedBlock]) -> None:
        """Take over: drop libraries opened with since moved blocks.

        Args:
            session: The context.
            blocks: All blocks, with their places.
        """
        self._has_begun = True
        placements = {placement.block: placement for placement in blocks}
        prepared = dict(self._prepared)
        self._prepared.clear()
        for path, library in prepared.items():
            if any(placements.get(placement.block) != placement for placement in library.blocks):
                # D115: its objects refer to addresses that may now belong to another block.
                session.discard(path)
                if not library.is_closed:
                    self.on_prepare(path, ())

    def on_unchunk(self, number: int) -> None:
        """Unmap a freed chunk, after closing the libraries opened in advance with blocks in it."""
        paths = [
            path
            for path, prepared in self._prepared.items()
            if any(placement.chunk == number for placement in prepared.blocks)
        ]
        if paths:
            self._leaving.add(number)
            self._nursery.start_soon(self._remove_chunk, number, paths)
        else:
            self._memory.remove_chunk(number)

    async def _remove_chunk(self, number: int, paths: list[str]) -> None:
        for path in paths:
            await self._close(path)
        if number in self._leaving:
            self._leaving.remove(number)
            self._memory.remove_chunk(number)

    def remove_leaving(self) -> None:
        """Unmap freed chunks, before the worker takes over all mapped chunks."""
        for number in self._leaving:
            self._memory.remove_chunk(number)
        self._leaving.clear()


_HANDLERS = handlers(
    _orders.ORDERS,
    *(WorkerServer, WorkerRequests, RemoteCopies, WorkerMemory, WorkerSlabs, PreparedLibraries),
    but=(_orders.config,),
)
