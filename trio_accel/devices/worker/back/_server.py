"""The worker's side: it takes requests and has them launched by the same engine as any other."""

from __future__ import annotations

import gc
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from typing import Any, TypeAlias

import attrs
import numpy.typing as npt
import trio

from ....actors import ActorStarted, DirectReply, Event, MessageEvent, Ref, Restart, Subscription, at_rest
from ....backends import resolve_for_worker
from ....backends.base import AccelDevice, AccelError, PlacedBlock
from ..._options import DeviceOptions
from ...arrays._blocks import BlockTable
from ...base._availability import Availability
from ...base._errors import WithdrawnError
from ...base._shortage import lost_descriptors
from ...engine._context import ContextActor, Session, context_policy
from ...engine._engine import Engine
from ...engine._library_opener import load_library
from ...front._system import System
from ...operations._hooks import EngineHook
from ...operations._operation import Launch
from ..transport._answers import ANSWERS
from ..transport._channel import LOST, Channel, EndOfChannel, Message, Received
from ..transport._frames import Place, WorkerConfig, place_of, plain_place
from ..transport._launches import ALLOCATIONS, NAME, OUTPUTS, decode_launch
from ..transport._mirror import encode_event
from ..transport._page import SharedPage
from ..transport._templates import Form
from ..transport._wire_errors import encode_error
from ._blocks import WorkerBlocks
from ._ready_libraries import ReadyLibraries
from ._remote_copies import RemoteCopies
from ._slabs import WorkerSlabs

__all__ = ["WorkerSide"]

# So many messages are taken before other tasks have their turn.
_IN_A_ROW = 16


class _Serving(DirectReply):
    """A request that is being served.

    Attributes:
        launch: What is launched.
        word: Shared word of its library.
        results: Host arrays that travel with the reply.
        spoils: Whether its outputs are spoiled also if it was never launched, because others count on it.
        session: The context that serves it.
        side: Tells the application what becomes of it.
        is_launched: Whether the library has begun.
        places: Where those of its new blocks lie of which the application does not know it, if that was
            looked up by now.
        payload: The answer as it travels if all goes well, if it was prepared by now.
    """

    __slots__ = (
        "is_launched",
        "launch",
        "payload",
        "places",
        "results",
        "session",
        "side",
        "spoils",
        "word",
    )

    def __init__(
        self, launch: Launch, word: int, session: Session, side: WorkerSide, *, spoils: bool
    ) -> None:
        # Without the call of the base's, which takes longer than it does anything.
        self.message = launch
        self.outcomes = None
        self.is_done = False
        self.launch: Launch = launch
        self.word: int = word
        self.results: Sequence[npt.NDArray[Any]] = ()
        self.spoils: bool = spoils
        self.session: Session = session
        self.side: WorkerSide = side
        self.is_launched: bool = False
        self.places: tuple[Place, ...] | None = None
        self.payload: bytes | None = None

    def look_last(self, look: Callable[[], None]) -> bool:
        """Prepare the answer while the device works; nobody else looks for its end."""
        self._prepare()
        return False

    def attend(self, attend: Callable[[], Awaitable[None]], herald: _Herald) -> bool:
        """Prepare the answer while the device works; the task of the strategy looks for its end."""
        self._prepare()
        if self.payload is not None and self.launch.fault is None:
            self.side.announce(self, herald)
        return False

    def _prepare(self) -> None:
        engine = self.session.engine
        self.places = _new_places(self.launch, engine) if engine.fresh else ()
        if not self.results:
            # As `WorkerSide.done` makes it.
            self.payload = ANSWERS.encode(("done", self.launch.number, self.places, (), None))

    def deliver(self, error: BaseException | None) -> None:
        """Take the outcome of what was launched without the library's mailbox."""
        if error is not None and self.spoils:
            for output in self.launch.outputs:
                output.spoil(self.launch.name, error)
        self.side.done(self, error)


def _new_places(launch: Launch, engine: Engine) -> tuple[Place, ...]:
    """Where the blocks lie that an operation has made, unless they lie where they did before."""
    fresh = engine.fresh
    blocks = [block for block, _ in launch.allocations if block in fresh]
    fresh.difference_update(blocks)
    return _places(blocks, engine)


def _places(blocks: Iterable[int], engine: Engine) -> tuple[Place, ...]:
    """Where blocks lie; nothing of those that are freed."""
    return tuple([place[:] for block in blocks if (place := engine.placed(block)) is not None])


def _all_places(allocations: Iterable[tuple[int, int]], engine: Engine) -> tuple[Place, ...]:
    """Where the blocks lie that an operation was to make, of which the application forgets it.

    It takes no note of what it does not keep. So these are told again with whatever makes them next.
    """
    places = _places([block for block, _ in allocations], engine)
    engine.fresh.update([block for block, *_ in places])
    return places


_Herald: TypeAlias = Callable[[Callable[[], None]], None]


class WorkerSide:
    """Owner of the context in a worker; everything runs in the one task that reads, or by callbacks."""

    def __init__(self, system: System, channel: Channel, page: SharedPage, config: WorkerConfig) -> None:
        self.options: DeviceOptions = attrs.evolve(
            # Those who wait for an operation are in the application, which also ends a worker that closes.
            config.options,
            cancel_grace=_FOREVER,
            close_grace=_FOREVER,
        )
        self.hooks: list[EngineHook] = []
        self.next_generation: int = 0
        self.variables: Context = copy_context()
        self._below = f"{config.path}/context/"
        self._grace = config.options.close_grace
        self._system = system
        self._channel = channel
        self._page = page
        self._start = page.start
        self._config = config
        self._availability = Availability()
        self.blocks: BlockTable = BlockTable(config.device, self._availability)
        self._table = WorkerBlocks(self.blocks)
        self._serving: dict[int, _Serving] = {}
        # Those that were used by now; and all, as they came.
        self._forms: dict[int, Form] = {}
        self._told_forms: dict[int, Any] = {}
        self._leases: dict[int, trio.Event] = {}
        # Size and descriptor of those that the application has not acknowledged.
        self._told_chunks: dict[int, tuple[int, int]] = {}
        self._device: AccelDevice
        self._ready_libraries: ReadyLibraries
        self._copies = RemoteCopies(channel.send)
        self._slabs = WorkerSlabs()
        self._session: Session | None = None
        self._context: Ref[ContextActor]
        self._subscription: Subscription | None = None
        # Events of the time in which it stood ready.
        self._early: list[Message] | None = []
        self._is_closing = False
        self._is_lost = False
        # How many messages came together, of which one is being handled, and whether another is next.
        self._received = 0
        self._is_followed = False
        self._nursery: trio.Nursery
        self._handlers: dict[str, Callable[..., None]] = {
            "start": self._on_start,
            "chunk": self._on_chunk,
            "slab": self._on_slab,
            "request": self._on_request,
            "form": self._on_form,
            "forget_forms": self._on_forget_forms,
            "again": self._on_again,
            "lease": self._on_lease,
            "unlease": self._on_unlease,
            "cancel": self._on_cancel,
            "copied": self._copies.copied,
            "filled": self._slabs.filled,
            "release": self._on_release,
            "call": self._on_call,
            "poison": self._on_poison,
            "observe": self._on_observe,
            "close": self._on_close,
            "unchunk": self._on_unchunk,
            "kept": self._forget_told,
            "tell_chunk": self._on_tell_chunk,
            "unslab": self._on_unslab,
            "warm": self._warm,
        }

    # What the context asks of its owner.

    @property
    def opened(self) -> AccelDevice:
        """The device is open already."""
        return self._device

    def open_device(self) -> AccelDevice:
        """The device is open already."""
        return self._device

    def attach(self, session: Session) -> None:
        """The context stands ready."""
        self._session = session
        self.blocks.release = session.engine.release_all

    def detach(self, error: BaseException | None) -> None:
        """It is gone; the application hears what it was lost to, if that is known by now."""
        self._session = None
        # What is dropped from now on is gone with the device.
        self.blocks.lose()
        if isinstance(error, Exception) and not self._is_closing:
            self._lose(error)

    # Chunks, for the device: called while it allocates, on the Trio thread or in that of `adopt`.

    def keep(self, chunk: int, nbytes: int, descriptor: int) -> None:
        """Give memory that was made to the application, too.

        Raises:
            MemoryError: There are too many open files.
        """
        try:
            # The application may have no room for it now, and ask again.
            self._told_chunks[chunk] = nbytes, os.dup(descriptor)
            self._tell_chunk(chunk)
        except OSError as error:
            self._forget_told(chunk)
            raise MemoryError(f"a chunk of {nbytes} bytes: {error}") from error

    def drop(self, chunk: int) -> None:
        """Memory is gone."""
        self._forget_told(chunk)
        self._channel.send(("unchunk", chunk))

    def _tell_chunk(self, chunk: int) -> None:
        told = self._told_chunks.get(chunk)
        if told is not None:
            nbytes, descriptor = told
            self._channel.send(("chunk", chunk, nbytes), (descriptor,))

    def _forget_told(self, chunk: int) -> None:
        """The application has its descriptor, or needs none any more."""
        told = self._told_chunks.pop(chunk, None)
        if told is not None:
            os.close(told[1])

    # The one task.

    async def run(self, received: list[Received]) -> None:
        """Open the device, then serve until the application closes the channel, which ends the process.

        Args:
            received: What has come by now.
        """
        try:
            self._device = await trio.to_thread.run_sync(self._open)
        except Exception as error:  # noqa: BLE001  # the application decides
            self._give_up(error)
            await trio.sleep_forever()
        handlers: dict[Any, Callable[..., None]] = self._handlers
        for path in self._config.warm:
            self._warm(path)
        self._on_observe(self._config.is_observed)
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._slabs.run)
            await self._stand_ready()
            gc.freeze()
            self._channel.send(("ready", tuple(self._device.libraries)), now=True)
            while True:
                self._received = len(received)
                for start in range(0, len(received), _IN_A_ROW):
                    if start:
                        # What is launched by now may be done.
                        await trio.lowlevel.checkpoint()
                    some = received[start : start + _IN_A_ROW]
                    last = some.pop()
                    self._is_followed = True
                    for message, descriptors in some:
                        handlers[message[0]](*message[1:], *descriptors)
                    self._is_followed = False
                    message, descriptors = last
                    handlers[message[0]](*message[1:], *descriptors)
                try:
                    received = await self._channel.receive()
                except EndOfChannel:
                    # The application is gone, or has no more use for this process.
                    os._exit(0)

    def _open(self) -> AccelDevice:
        backend, info = resolve_for_worker(self._config.device)
        limit = self.options.memory_limit
        device = backend.open_device(info.index, memory_limit=limit, keeper=self)
        self._ready_libraries = ReadyLibraries(device)
        # The engine has one, and the memory actor.
        self._ready_libraries.load("memory")
        return self._copies.wrap(device, self._ready_libraries)

    def _lose(self, error: BaseException) -> None:
        """Give the context up; the device says whether anything of it may still write."""
        self._give_up(error, is_silent=self._device.is_dead)

    def _give_up(self, error: BaseException, *, is_silent: bool = False) -> None:
        """Tell the application what the context is lost to; it ends this process.

        Args:
            error: What it is lost to.
            is_silent: Whether nothing of it writes to memory any more, so that the next need not wait.
        """
        if not self._is_lost:
            self._is_lost = True
            self._channel.send(("lost", encode_error(error), is_silent), now=True)

    def _warm(self, path: str) -> None:
        """Load a library now, so that its first operation need not wait for it."""
        # If it cannot be loaded, whoever uses it hears of it.
        with suppress(Exception):
            self._ready_libraries.load(load_library(path, "a worker").library)

    def _on_tell_chunk(self, chunk: int) -> None:
        # Otherwise the application asks again.
        with suppress(OSError):
            self._tell_chunk(chunk)

    def _on_chunk(self, number: int, nbytes: int, descriptor: int) -> None:
        if descriptor == LOST:
            self._give_up(lost_descriptors())
            return
        self._device.map_chunk(number, nbytes, descriptor)

    def _on_slab(self, number: int, nbytes: int, descriptor: int) -> None:
        if descriptor == LOST:
            self._give_up(lost_descriptors())
            return
        self._slabs.add(self._device, number, nbytes, descriptor)

    def _on_start(self, generation: int, places: Iterable[Any]) -> None:
        session = self._session
        if session is None:
            # It was lost while it stood ready, and the application knows.
            return
        try:
            self._begin(session, generation, [place_of(place) for place in places])
        except Exception as error:  # noqa: BLE001  # the application decides
            self._lose(error)
        else:
            self._channel.send(("started",), now=True)

    async def _stand_ready(self) -> None:
        """Have the context's actor run before anybody needs it; what it needs of the memory follows."""
        try:
            self._context = await self._system.spawn(
                ContextActor,
                self,
                name="context",
                restart=Restart.TEMPORARY,
                policy=attrs.evolve(context_policy(self.options), grace=self._grace + 5.0),
            )
        except Exception as error:  # noqa: BLE001  # the application decides
            self._lose(error)
            await trio.sleep_forever()
        self._nursery.start_soon(self._watch_context)

    def _begin(self, session: Session, generation: int, blocks: list[PlacedBlock]) -> None:
        self._device.adopt(blocks)
        self._availability.begin(generation)
        for block in blocks:
            self._table.adopt(block.block, block.nbytes)
        session.generation = generation
        session.engine.begin(generation, self._table)
        early, self._early = self._early, None
        for message in early or ():
            self._channel.send(message)

    async def _watch_context(self) -> None:
        """See the context's actor fail over its libraries: what it failed with is known at its end."""
        error = (await self._context.wait_terminated()).error
        if not self._is_closing:
            self._lose(error or AccelError("the context ended by itself"))

    def _on_request(self, number: int, word: int, spoils: bool, data: Any, released: tuple[int, ...]) -> None:
        session = self._session
        if released:
            self._table.let_go(released)
        if session is None:
            return
        self._table.name(data[ALLOCATIONS])
        results: list[npt.NDArray[Any]] = []
        try:
            launch = decode_launch(data, number, self._table, self._slabs.array, results)
        except Exception as error:  # noqa: BLE001  # a module of the program's that this process does not have
            damaged = data[OUTPUTS] if spoils else ()
            self._cannot_read(number, data[NAME], data[ALLOCATIONS], damaged, error, session.engine)
            return
        serving = _Serving(launch, word, session, self, spoils=spoils)
        serving.results = results
        self._serve(serving)

    def _on_form(self, form: int, data: Any) -> None:
        # It is read with the first operation, as whatever is wrong with it concerns that.
        self._told_forms[form] = data

    def _on_forget_forms(self) -> None:
        self._forms.clear()
        self._told_forms.clear()

    def _on_again(
        self,
        number: int,
        word: int,
        spoils: bool,
        form: int,
        blocks: tuple[int, ...],
        released: tuple[int, ...],
    ) -> None:
        session = self._session
        if released:
            self._table.let_go(released)
        if session is None:
            return
        again, table = self._forms.get(form), self._table
        try:
            if again is None:
                again = self._forms[form] = Form(self._told_forms[form])
            made = again.on(blocks)
            if not made.is_found(table):
                table.name(made.allocations)
                made.find(table)
            launch = again.launch(number, blocks, made, self._slabs.array)
        except Exception as error:  # noqa: BLE001  # the same, or memory that is not here
            allocations: tuple[tuple[int, int], ...]
            outputs: tuple[int, ...]
            name, _, _, allocations, outputs, _ = self._told_forms[form]
            wanted = [(blocks[place], nbytes) for place, nbytes in allocations]
            table.name(wanted)
            damaged = [blocks[place] for place in outputs] if spoils else []
            self._cannot_read(number, name, wanted, damaged, error, session.engine)
            return
        self._serve(_Serving(launch, word, session, self, spoils=spoils))

    def _serve(self, serving: _Serving) -> None:
        """Have an operation launched, now if nothing is before it."""
        launch, session = serving.launch, serving.session
        self._serving[launch.number] = serving
        library = session.libraries.get(launch.library)
        actor = None if library is None else at_rest(library)
        served = actor is not None and actor.launch_here(launch, serving)
        if served is False:
            done = partial(self.done, serving)
            session.submissions.submit(self._context, launch, done, spoils=serving.spoils)
        elif served is True:
            # It has failed.
            session.engine.over(launch)
        if self.blocks.dropped:
            # It was not launched here and now, which gives them back.
            self.blocks.drain()

    def _cannot_read(
        self,
        number: int,
        name: str,
        allocations: Iterable[tuple[int, int]],
        damaged: Sequence[int],
        error: Exception,
        engine: Engine,
    ) -> None:
        """Refuse a request that means nothing here."""
        _all_places(allocations, engine)
        for block in damaged:
            self._table[block].spoil(name, error)
        trouble = "done", False, False, encode_error(error), tuple(damaged)
        self._channel.send(("done", number, (), (), trouble), now=True)

    def done(self, serving: _Serving, error: BaseException | None) -> None:
        """Answer what was served, or has failed."""
        launch, engine = serving.launch, serving.session.engine
        number = launch.number
        del self._serving[number]
        if engine.is_lost and not self._is_closing:
            # The application decides what becomes of it.
            return
        if error is not None and isinstance(error, WithdrawnError):
            self._withdrawn(launch, engine)
            return
        places = serving.places
        if places is None:
            places = _new_places(launch, engine) if engine.fresh else ()
        is_fine = error is None and launch.fault is None and serving.is_launched
        for block in launch.outputs:
            is_fine = is_fine and block.damaged_by is None
        trouble = None
        if not is_fine:
            damaged = [block.id for block in launch.outputs if block.damaged_by is not None]
            plain = None if error is None else encode_error(error)
            is_hit = launch.fault is not None and launch.fault.is_struck
            trouble = "done", serving.is_launched, is_hit, plain, tuple(damaged)
            places = _all_places(launch.allocations, engine)
        if not serving.results:
            payload = serving.payload if is_fine else None
            answer = "done", number, places, (), trouble
            self._channel.post(answer, now=not self._serving, payload=payload)
            return
        results = tuple([array.tobytes() for array in serving.results]) if error is None else ()
        self._channel.send(("done", number, places, results, trouble), now=not self._serving)

    def announce(self, serving: _Serving, herald: _Herald) -> None:
        """Say what will be answered; that all went well is then shown as soon as it is seen.

        The application need not wait for the answer to be given, sent and read. Whatever it works on is
        there: it is the only one that the application has asked for.
        """
        launch = serving.launch
        for block in launch.outputs:
            if block.damaged_by is not None:
                return
        self._channel.post(("prepared", launch.number, serving.places), now=True)
        herald(partial(self._page.end, launch.number))

    def on_launch(self, launch: Launch) -> None:
        """Note that an operation is begun: after this process's death it counts as in flight."""
        number = launch.number
        serving = self._serving[number]
        serving.is_launched = True
        self._start(serving.word, number)

    def may_defer(self, in_flight: int) -> bool:
        """Nobody looks for its end before the next is launched."""
        return self._is_followed

    def is_alone(self) -> bool:
        """Whether the application has sent nothing else."""
        return self._received == 1 and len(self._serving) == 1

    def on_look(self, number: int) -> None:
        """Show the application that the engine looks after what is in flight."""
        self._page.look(number)

    def _on_cancel(self, number: int) -> None:
        serving, session = self._serving.get(number), self._session
        if serving is None or session is None or not session.submissions.withdraw(serving.launch):
            return
        del self._serving[number]
        self._withdrawn(serving.launch, session.engine)

    def _withdrawn(self, launch: Launch, engine: Engine) -> None:
        _all_places(launch.allocations, engine)
        self._channel.send(("done", launch.number, (), (), ("withdrawn", False, False, None, ())), now=True)

    def _on_release(self, released: tuple[int, ...]) -> None:
        self._table.let_go(released)
        self.blocks.drain()

    def _on_lease(self, number: int, block: int, write: bool, released: tuple[int, ...]) -> None:
        if released:
            self._on_release(released)
        if self._session is not None:
            over = self._leases[number] = trio.Event()
            # The order is that of the messages, so its turn is taken before the next one is read.
            lease = self._session.engine.leases.hold(block, write=write)
            self._nursery.start_soon(self._lease, number, block, lease, over)

    async def _lease(self, number: int, block: int, lease: Any, over: trio.Event) -> None:
        session = self._session
        async with lease:
            place = None if session is None else session.engine.placed(block)
            if place is not None and not over.is_set():
                self._channel.send(("granted", number, plain_place(place)), now=True)
                await over.wait()
        del self._leases[number]
        self._channel.send(("done", number, (), (), None), now=True)

    def _on_unlease(self, number: int) -> None:
        if number in self._leases:
            self._leases[number].set()

    def _on_call(self, number: int, what: str) -> None:
        session = self._session
        if session is None:
            return
        if what == "synchronize":
            self._nursery.start_soon(self._synchronize, number, session)
            return
        self.blocks.drain()
        memory = self._device.memory()
        engine = session.engine
        in_flight = {library: queue.in_flight for library, queue in engine.queues().items()}
        value = (
            engine.launched,
            engine.completed,
            in_flight,
            (memory.used, memory.reserved, memory.peak, memory.blocks, memory.limit),
        )
        self._channel.send(("result", number, value), now=True)

    async def _synchronize(self, number: int, session: Session) -> None:
        await session.engine.synchronize()
        self.blocks.drain()
        self._channel.send(("result", number, None), now=True)

    def _on_poison(self, reason: str) -> None:
        self._device.poison(reason)

    def _on_unchunk(self, number: int) -> None:
        # It may have been given back by this worker itself.
        with suppress(KeyError, ValueError):
            self._device.unmap_chunk(number)

    def _on_unslab(self, number: int) -> None:
        # Specifications that were made of forms may have arrays in it.
        for form in self._forms.values():
            form.forget_hosts()
        self._slabs.remove(self._device, number, self._rest)

    async def _rest(self) -> None:
        if self._session is not None:
            await self._session.engine.rest()

    def _on_close(self) -> None:
        self._is_closing = True
        for over in self._leases.values():
            over.set()
        self._nursery.start_soon(self._close)

    async def _close(self) -> None:
        await self._context.stop()
        self._channel.send(("closed",), now=True)

    # Events.

    def observe_life(self, event: Event) -> None:
        """Tell the application of the actors below the context."""
        self._tell(event)

    def _on_observe(self, is_observed: bool) -> None:
        if is_observed and self._subscription is None:
            self._subscription = self._system.subscribe(self._observe_message)
        elif not is_observed and self._subscription is not None:
            self._subscription.close()
            self._subscription = None

    def _observe_message(self, event: Event) -> None:
        if isinstance(event, MessageEvent):
            self._tell(event)

    def _tell(self, event: Event) -> None:
        path = event.path
        if not path.startswith(self._below):
            return
        actor_class = ""
        if isinstance(event, ActorStarted):
            with suppress(KeyError):
                actor_class = self._system.tree().find(path).actor_class
        message: Message = ("event", encode_event(event), actor_class)
        if self._early is None:
            self._channel.send(message)
        else:
            # The tree shows the actors of the worker that serves.
            self._early.append(message)


_FOREVER = 1e9
