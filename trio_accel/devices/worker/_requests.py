"""The requests that a worker serves: from a message to a launch, and from its end to an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import attrs
import trio

from ...actors import ActorStoppedError, DirectReply, Message, Ref, Request, idle_actor
from ...backends.base import ContextLostError, HostArray, Ints, NotSupportedError, PlacedBlock
from ...backends.base.kit.kept_plans import KeptPlans
from ..base._bridge import LoopNotifier
from ..base._errors import WithdrawnError
from ..engine._context import ContextActor, Session
from ..engine._engine import Engine
from ..operations._blocks import BlockTable
from ..operations._operation import Launch
from ..wire import _answers
from ..wire._channel import Channel
from ..wire._protocol import ALLOCATIONS, NAME, OUTPUTS, Address, SharedPage
from ..wire._wire_values import encode_error
from ._launch_decoding import LaunchTemplate, decode_launch
from ._memory import WorkerBlocks, WorkerMemory


@attrs.define(eq=False, repr=False)
class WorkerRequests:
    """Has requests launched, and answers them.

    Args:
        channel: Where the answers go.
        page: Where the application sees what is begun.
        blocks: Where dropped blocks go.
        table: Blocks by their ids.
        memory: Chunks, and host memory of the application.

    Attributes:
        serving: The requests that are not answered, by number.
        session: The context that serves them, while there is one.
        context: The actor of that context.
        is_closing: Whether the application wants the context to end.
    """

    _channel: Channel
    _page: SharedPage
    _blocks: BlockTable
    _table: WorkerBlocks
    _memory: WorkerMemory
    serving: dict[int, _Serving] = attrs.field(factory=dict[int, "_Serving"])
    session: Session | None = None
    context: Ref[ContextActor] = attrs.field(init=False)
    is_closing: bool = False
    # Events that are set when the application gives a leased array back, by the number of the lease.
    _leases: dict[int, trio.Event] = attrs.field(factory=dict[int, trio.Event])
    # Arrays that the application has borrowed, by the number of the request, with the engine that reads them.
    _borrowed: dict[int, tuple[PlacedBlock, Engine]] = attrs.field(
        factory=dict[int, "tuple[PlacedBlock, Engine]"], init=False
    )
    # Words of libraries that were being opened when the context turned out lost.
    _opening: set[int] = attrs.field(factory=set[int])
    # Launch templates that were used by now; and all, as they came.
    _templates: dict[int, LaunchTemplate] = attrs.field(factory=dict[int, LaunchTemplate])
    _told_templates: dict[int, Any] = attrs.field(factory=dict[int, Any])
    # Templates with the blocks of a launch.
    bindings: KeptPlans[LaunchTemplate] = attrs.field(factory=KeptPlans["LaunchTemplate"], init=False)
    _nursery: trio.Nursery = attrs.field(init=False)

    def open(self, nursery: trio.Nursery) -> None:
        """Begin; leases are held by tasks of the nursery."""
        self._nursery = nursery

    def on_release(self, blocks: Ints) -> None:
        """Give back what the application has let go."""
        self._table.let_go(blocks)
        self._blocks.drain()

    def on_request(self, number: int, word: int, invalidates: bool, launch: Any, released: Ints) -> None:
        """Serve a request that was sent whole."""
        session = self.session
        if released:
            self._table.let_go(released)
        if session is None:
            return
        self._table.name(launch[ALLOCATIONS])
        results: list[HostArray] = []
        try:
            decoded = decode_launch(launch, number, self._table, self._memory.slabs.array, results)
        except Exception as error:  # noqa: BLE001  # a module of the program's that this process does not have
            invalid = launch[OUTPUTS] if invalidates else ()
            self._cannot_read(number, launch[NAME], launch[ALLOCATIONS], invalid, error, session.engine)
            return
        self._serve(_Serving(decoded, word, session, self, results, invalidates=invalidates))

    def on_template(self, number: int, launch: Any) -> None:
        """Take note of a launch template."""
        # It is decoded with its first operation, so that an error in it is the error of that operation.
        self._told_templates[number] = launch

    def on_forget_templates(self, numbers: Ints) -> None:
        """Forget templates that are not named again."""
        forgotten = [self._templates.pop(number, None) for number in numbers]
        for number in numbers:
            del self._told_templates[number]
        for plan in tuple(self.bindings.plans.values()):
            if plan.value in forgotten:
                self.bindings.end(plan)

    def on_replay(
        self,
        number: int,
        word: int,
        invalidates: bool,
        template: int,
        blocks: Ints,
        released: Ints,
        packed: tuple[bytes, ...],
    ) -> None:
        """Serve a request that differs from earlier ones in its blocks and packed scalars alone."""
        session = self.session
        if released:
            self._table.let_go(released)
        if session is None:
            return
        found, table = self._templates.get(template), self._table
        results: list[HostArray] = []
        try:
            if found is None:
                found = self._templates[template] = LaunchTemplate(
                    self._told_templates[template], template, self.bindings
                )
            binding = found.bind(blocks)
            if not binding.is_found(table):
                table.name(binding.allocations)
                binding.find(table)
            launch = found.launch(number, blocks, binding, self._memory.slabs.array, packed, results)
        except Exception as error:  # noqa: BLE001  # the same, or memory that is not here
            allocations: tuple[tuple[int, int], ...]
            outputs: Ints
            name, _, _, allocations, outputs, _ = self._told_templates[template]
            wanted = [(blocks[position], nbytes) for position, nbytes in allocations]
            table.name(wanted)
            invalid = [blocks[position] for position in outputs] if invalidates else []
            self._cannot_read(number, name, wanted, invalid, error, session.engine)
            return
        self._serve(_Serving(launch, word, session, self, results, invalidates=invalidates))

    def _serve(self, serving: _Serving) -> None:
        """Have an operation launched, now if nothing is before it."""
        launch, session = serving.launch, serving.session
        self.serving[launch.number] = serving
        if launch.spec.asker is not None:
            launch.spec.asker.notify = LoopNotifier(partial(self._tell_progress, serving)).notify
        library = session.libraries.get(launch.library)
        actor = None if library is None else idle_actor(library, serving)
        if actor is None or not actor.launch_here(launch, serving):
            done = partial(self.done, serving)
            session.submissions.submit(self.context, launch, done, invalidates=serving.invalidates)
        elif serving.is_done:
            # The operation may have failed before it was in flight.
            session.engine.over(launch)
        if self._blocks.dropped:
            # A launch here and now would have given dropped blocks back.
            self._blocks.drain()

    def _cannot_read(
        self,
        number: int,
        name: str,
        allocations: Iterable[tuple[int, int]],
        invalid: Sequence[int],
        error: Exception,
        engine: Engine,
    ) -> None:
        """Refuse a request that means nothing here."""
        _all_addresses(allocations, engine)
        for block in invalid:
            self._table[block].mark_damaged(name, error)
        self._end(number, "done", False, False, encode_error(error), tuple(invalid))

    def _end(self, number: int, *trouble: Any) -> None:
        """Answer a request that has no results, with its trouble if there is any."""
        self._channel.send(_answers.done(number, (), (), trouble or None), now=True)

    def done(self, serving: _Serving, error: BaseException | None) -> None:
        """Answer what was served, or has failed."""
        launch, engine = serving.launch, serving.session.engine
        number = launch.number
        if launch.spec.asker is not None and launch.spec.asker.reports:
            # Reports of progress go ahead of the answer, which is the last that is said of a request.
            serving.is_heard = True
            self._tell_progress(serving)
        del self.serving[number]
        if engine.is_lost and not self.is_closing:
            # The application decides about its outcome: it sorts all requests when it hears of the loss.
            return
        if isinstance(error, ContextLostError) and not self.is_closing and self._is_sorted(serving, error):
            return
        if error is not None and isinstance(error, WithdrawnError):
            self._withdrawn(launch, engine)
            return
        addresses = _new_addresses(launch, engine) if engine.fresh else ()
        is_fine = error is None and launch.fault is None and serving.is_launched and not launch.damaged
        trouble = None
        if not is_fine:
            plain = None if error is None else encode_error(error)
            is_hit = launch.fault is not None and launch.fault.is_struck
            trouble = "done", serving.is_launched, is_hit, plain, tuple(launch.damaged)
            addresses = _all_addresses(launch.allocations, engine)
        made = serving.results
        results = tuple([array.tobytes() for array in made]) if made and error is None else ()
        # A plain tuple: each operation has one, and a declaration takes a call.
        answer = "done", number, addresses, results, trouble
        self._channel.send(answer, now=not self.serving)

    def _is_sorted(self, serving: _Serving, error: ContextLostError) -> bool:
        """Tell whether the application decides about a request whose library was not open at the loss."""
        launch, word = serving.launch, serving.word
        if serving.is_launched or isinstance(error.__cause__, ActorStoppedError):
            return not serving.is_launched
        # The opening found the loss. Where something was in flight, that or the opening may be to blame, so
        # the first request that waited counts as begun: a suspect as the others are (D136).
        made = {block for block, _ in launch.allocations}
        if not serving.session.engine.streams.in_flight or not launch.writes <= made:
            return False
        if word not in self._opening:
            self._opening.add(word)
            self._page.words[word] = launch.number
        return True

    def launching(self, launch: Launch) -> None:
        """Note that an operation is begun: after this process's death it counts as in flight."""
        number = launch.number
        serving = self.serving[number]
        serving.is_launched = True
        # D58: written before the launch. If the process dies in between, the request counts as begun, which
        # is safe; the other way round it could run twice.
        self._page.words[serving.word] = number

    def on_cancel(self, number: int) -> None:
        """Withdraw a request, if it is not launched yet."""
        serving, session = self.serving.get(number), self.session
        if serving is None or session is None:
            return
        if session.submissions.withdraw(serving.launch):
            del self.serving[number]
            self._withdrawn(serving.launch, session.engine)
        elif (asker := serving.launch.spec.asker) is not None:
            asker.has_left = True

    def on_left(self, number: int) -> None:
        """Have a request not run, unless it has begun: host arrays of its asker do not come any more."""
        serving = self.serving.get(number)
        # Others have no such arrays, or are copies; their specifications may be those of a template.
        if serving is not None and serving.launch.staged:
            serving.launch.spec.is_withdrawn = True

    def on_heard(self, number: int) -> None:
        """Tell of the next progress of a request: the application has taken the last."""
        serving = self.serving.get(number)
        if serving is not None:
            serving.is_heard = True
            self._tell_progress(serving)

    def _tell_progress(self, serving: _Serving) -> None:
        """Tell of the progress of a request, unless the last was not heard yet: so nothing piles up."""
        number, asker = serving.launch.number, serving.launch.spec.asker
        if asker is None or not serving.is_heard or self.serving.get(number) is not serving:
            return
        text = asker.take()
        if text is not None:
            serving.is_heard = False
            self._channel.send(_answers.progress(number, text), now=True)

    def _withdrawn(self, launch: Launch, engine: Engine) -> None:
        _all_addresses(launch.allocations, engine)
        self._end(launch.number, "withdrawn", False, False, None, ())

    def on_lease(self, number: int, block: int, write: bool, released: Ints) -> None:
        """Hold a block, and tell its place once it is its turn."""
        if released:
            self.on_release(released)
        session = self.session
        if session is not None:
            over = self._leases[number] = trio.Event()
            # Its turn is taken now, in the order of messages: a task would take it after later requests.
            lease = session.engine.leases.hold(block, write=write)
            self._nursery.start_soon(self._hold, number, block, lease, over)

    async def _hold(self, number: int, block: int, lease: Any, over: trio.Event) -> None:
        session = self.session
        async with lease:
            address = None if session is None else session.engine.placed(block)
            if address is not None and not over.is_set():
                self._channel.send(_answers.granted(number, address[:]), now=True)
                await over.wait()
        del self._leases[number]
        self._end(number)

    def on_borrow(
        self,
        number: int,
        released: Ints,
        place: Address,
        size: int,
        stays: bool,
        *descriptors: int,
    ) -> None:
        """Know a block of another device until `on_unlease`; operations read it."""
        if released:
            self._table.let_go(released)
        block, session = PlacedBlock(*place), self.session
        try:
            self._memory.borrow(block, size, *descriptors, stays=stays)
        except Exception as error:  # noqa: BLE001  # the system or the driver refused it: the asker's error
            refused = NotSupportedError(
                f"borrow: the worker cannot map the memory: {error}", operation="borrow"
            )
            self._end(number, "done", False, False, encode_error(refused), ())
            return
        if session is not None:
            self._table.adopt(block.block, block.nbytes)
            session.engine.adopt((block.block,))
            self._borrowed[number] = block, session.engine
            self._channel.send(_answers.granted(number, (block.block, block.nbytes, 0, 0)), now=True)

    async def _give_back_later(self, number: int, place: PlacedBlock, engine: Engine) -> None:
        # The memory goes back behind all operations that read it: then its owner may change it.
        async with engine.leases.hold(place.block, write=True):
            pass
        self._give_back(number, place, engine)

    def _give_back(self, number: int, place: PlacedBlock, engine: Engine) -> None:
        self._table.remove(place.block)
        # The context may be gone, and all blocks with it: the end of a lease can come behind its end.
        if self.session is not None and self.session.engine is engine:
            engine.release_all((place.block,))
        self._memory.give_back(place.chunk)
        self._end(number)

    def on_unlease(self, number: int) -> None:
        """End a lease: the application has given the block back."""
        borrowed = self._borrowed.pop(number, None)
        if borrowed is None:
            if number in self._leases:
                self._leases[number].set()
        elif borrowed[1].leases.is_idle(borrowed[0].block):
            # The chunk goes at once: what the application asks for next is not to find it mapped.
            self._give_back(number, *borrowed)
        else:
            self._nursery.start_soon(self._give_back_later, number, *borrowed)

    def end_leases(self) -> None:
        """End all leases: the context is to end."""
        for number in (*self._leases, *self._borrowed):
            self.on_unlease(number)


@attrs.define(eq=False, repr=False)
class _Serving(DirectReply):
    """A request that is being served.

    Attributes:
        launch: The launch.
        word: Shared word of its library.
        results: Host arrays that are sent with the reply.
        invalidates: Whether its outputs are invalid also if it was never launched, as others count on it.
        session: The context that serves it.
        requests: Tells the application its outcome.
        is_launched: Whether the library has begun.
        is_heard: Whether the application has taken the last progress, if there was any.
    """

    launch: Launch
    word: int
    session: Session
    requests: WorkerRequests
    invalidates: bool = attrs.field(kw_only=True)
    results: Sequence[HostArray] = ()
    is_launched: bool = False
    is_heard: bool = True
    # The launch is the message for the library's actor.
    message: Request[Any, Any] | Message[Any] = attrs.field(
        init=False, default=attrs.Factory(attrgetter("launch"), takes_self=True)
    )

    def poll_first(self, poll: Callable[[], Awaitable[None]]) -> bool:
        """Poll for nothing: no task of the worker waits for the end."""
        return False

    def deliver(self, error: BaseException | None) -> None:
        """Take the outcome of what was launched without the library's mailbox."""
        if error is not None and self.invalidates:
            self.launch.mark_damaged(error)
        self.requests.done(self, error)


def _new_addresses(launch: Launch, engine: Engine) -> tuple[Address, ...]:
    """Return the places of blocks that an operation has made, where they are new to the application."""
    fresh = engine.fresh
    blocks = [block for block, _ in launch.allocations if block in fresh]
    fresh.difference_update(blocks)
    return _addresses(blocks, engine)


def _all_addresses(allocations: Iterable[tuple[int, int]], engine: Engine) -> tuple[Address, ...]:
    """Return the places of blocks that a failed operation was to make; the application forgets these.

    They are not noted as told, so the next operation that makes these blocks tells them again.
    """
    addresses = _addresses([block for block, _ in allocations], engine)
    engine.fresh.update([block for block, *_ in addresses])
    return addresses


def _addresses(blocks: Iterable[int], engine: Engine) -> tuple[Address, ...]:
    """Return the places of blocks, without those that are freed."""
    return tuple([address[:] for block in blocks if (address := engine.placed(block)) is not None])
