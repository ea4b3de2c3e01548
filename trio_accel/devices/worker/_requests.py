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
    """Launches requests, and answers them.

    Args:
        channel: The channel for answers.
        page: Shows the application which requests have begun.
        blocks: Receives dropped blocks.
        table: The blocks by id.
        memory: The chunks, and the application's host memory.

    Attributes:
        serving: The unanswered requests, by number.
        session: The context that serves them, if any.
        context: The actor of that context.
        is_closing: Whether the application has ordered the end of the context.
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
    # Set when the application returns a leased array, by the number of the lease.
    _leases: dict[int, trio.Event] = attrs.field(factory=dict[int, trio.Event])
    # The arrays that the application has borrowed, by request number, with the engine that reads them.
    _borrowed: dict[int, tuple[PlacedBlock, Engine]] = attrs.field(
        factory=dict[int, "tuple[PlacedBlock, Engine]"], init=False
    )
    # The words of libraries still opening when the context was found lost.
    _opening: set[int] = attrs.field(factory=set[int])
    # The decoded, used launch templates; below, all templates in their encoded form.
    _templates: dict[int, LaunchTemplate] = attrs.field(factory=dict[int, LaunchTemplate])
    _told_templates: dict[int, Any] = attrs.field(factory=dict[int, Any])
    # Templates bound to the blocks of a launch.
    bindings: KeptPlans[LaunchTemplate] = attrs.field(factory=KeptPlans["LaunchTemplate"], init=False)
    _nursery: trio.Nursery = attrs.field(init=False)

    def open(self, nursery: trio.Nursery) -> None:
        """Begin; tasks of the nursery hold leases."""
        self._nursery = nursery

    def on_release(self, blocks: Ints) -> None:
        """Free blocks that the application has released."""
        self._table.let_go(blocks)
        self._blocks.drain()

    def on_request(self, number: int, word: int, invalidates: bool, launch: Any, released: Ints) -> None:
        """Serve a request sent without a template."""
        session = self.session
        if released:
            self._table.let_go(released)
        if session is None:
            return
        self._table.name(launch[ALLOCATIONS])
        results: list[HostArray] = []
        try:
            decoded = decode_launch(launch, number, self._table, self._memory.slabs.array, results)
        except Exception as error:  # noqa: BLE001  # this process lacks a module of the program
            invalid = launch[OUTPUTS] if invalidates else ()
            self._cannot_read(number, launch[NAME], launch[ALLOCATIONS], invalid, error, session.engine)
            return
        self._serve(_Serving(decoded, word, session, self, results, invalidates=invalidates))

    def on_template(self, number: int, launch: Any) -> None:
        """Store a launch template."""
        # The first operation decodes the template, so that an error in it becomes the error of that
        # operation.
        self._told_templates[number] = launch

    def on_forget_templates(self, numbers: Ints) -> None:
        """Forget unused templates."""
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
        """Serve a request that differs from earlier requests only in its blocks and packed scalars."""
        session = self.session
        if released:
            self._table.let_go(released)
        if session is None:
            return
        launch_template, table = self._templates.get(template), self._table
        results: list[HostArray] = []
        try:
            if launch_template is None:
                launch_template = self._templates[template] = LaunchTemplate(
                    self._told_templates[template], template, self.bindings
                )
            binding = launch_template.bind(blocks)
            if not binding.is_found(table):
                table.name(binding.allocations)
                binding.find(table)
            launch = launch_template.launch(
                number, blocks, binding, self._memory.slabs.array, packed, results
            )
        except Exception as error:  # noqa: BLE001  # as in `on_request`, or missing memory
            allocations: tuple[tuple[int, int], ...]
            outputs: Ints
            name, _, _, allocations, outputs, _ = self._told_templates[template]
            new_blocks = [(blocks[position], nbytes) for position, nbytes in allocations]
            table.name(new_blocks)
            invalid = [blocks[position] for position in outputs] if invalidates else []
            self._cannot_read(number, name, new_blocks, invalid, error, session.engine)
            return
        self._serve(_Serving(launch, word, session, self, results, invalidates=invalidates))

    def _serve(self, serving: _Serving) -> None:
        """Launch an operation, at once if no other precedes it."""
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
            # An immediate launch would have freed dropped blocks.
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
        """Refuse a request that cannot be decoded here."""
        _all_addresses(allocations, engine)
        for block in invalid:
            self._table[block].mark_damaged(name, error)
        self._end(number, "done", False, False, encode_error(error), tuple(invalid))

    def _end(self, number: int, *trouble: Any) -> None:
        """Answer a request without results, with its trouble if any."""
        self._channel.send(_answers.done(number, (), (), trouble or None), now=True)

    def done(self, serving: _Serving, error: BaseException | None) -> None:
        """Answer a served or failed request."""
        launch, engine = serving.launch, serving.session.engine
        number = launch.number
        if launch.spec.asker is not None and launch.spec.asker.reports:
            # Progress reports precede the answer, which is the last message about a request.
            serving.is_heard = True
            self._tell_progress(serving)
        del self.serving[number]
        if engine.is_lost and not self.is_closing:
            # The application decides about its outcome, when it sorts all requests after the loss.
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
        host_results = serving.results
        results = tuple([array.tobytes() for array in host_results]) if host_results and error is None else ()
        # A plain tuple, because each operation makes one, and a constructor costs a call.
        answer = "done", number, addresses, results, trouble
        self._channel.send(answer, now=not self.serving)

    def _is_sorted(self, serving: _Serving, error: ContextLostError) -> bool:
        """Return whether the application decides about a request that waited for its library at the loss."""
        launch, word = serving.launch, serving.word
        if serving.is_launched or isinstance(error.__cause__, ActorStoppedError):
            return not serving.is_launched
        # The opening detected the loss. If operations were in flight, they or the opening may be the cause.
        # So the first request that waited counts as begun: it becomes a suspect like the others (D136).
        new_blocks = {block for block, _ in launch.allocations}
        if not serving.session.engine.streams.in_flight or not launch.writes <= new_blocks:
            return False
        if word not in self._opening:
            self._opening.add(word)
            self._page.words[word] = launch.number
        return True

    def launching(self, launch: Launch) -> None:
        """Record the beginning of an operation: after this process's death it counts as in flight."""
        number = launch.number
        serving = self.serving[number]
        serving.is_launched = True
        # D58: this is written before the launch. If the process dies in between, the request counts as begun,
        # which is safe. In the opposite order it could run twice.
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

    def on_caller_left(self, number: int) -> None:
        """Prevent a request from running, unless it has begun: its caller's host arrays will not arrive."""
        serving = self.serving.get(number)
        # Other requests do not have such arrays, or are copies. Their specifications may belong to a
        # template.
        if serving is not None and serving.launch.staged:
            serving.launch.spec.is_withdrawn = True

    def on_heard(self, number: int) -> None:
        """Send the next progress of a request, because the application has received the previous one."""
        serving = self.serving.get(number)
        if serving is not None:
            serving.is_heard = True
            self._tell_progress(serving)

    def _tell_progress(self, serving: _Serving) -> None:
        """Send the progress of a request, once the previous one was received, so that no backlog grows."""
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
        """Hold a block, and send its place at its turn."""
        if released:
            self.on_release(released)
        session = self.session
        if session is not None:
            over = self._leases[number] = trio.Event()
            # The turn is taken now, in the order of messages. A task would take it after later requests.
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
        address: Address,
        size: int,
        stays: bool,
        *descriptors: int,
    ) -> None:
        """Make a block of another device readable for operations until `on_unlease`."""
        if released:
            self._table.let_go(released)
        block, session = PlacedBlock(*address), self.session
        try:
            self._memory.borrow(block, size, *descriptors, stays=stays)
        except Exception as error:  # noqa: BLE001  # the system or the driver refused it
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

    async def _give_back_later(self, number: int, placed: PlacedBlock, engine: Engine) -> None:
        # The memory is returned after all operations that read it, because then its owner may change it.
        async with engine.leases.hold(placed.block, write=True):
            pass
        self._give_back(number, placed, engine)

    def _give_back(self, number: int, placed: PlacedBlock, engine: Engine) -> None:
        self._table.remove(placed.block)
        # The context may have ended with all its blocks, because the end of a lease can follow it.
        if self.session is not None and self.session.engine is engine:
            engine.release_all((placed.block,))
        self._memory.give_back(placed.chunk)
        self._end(number)

    def on_unlease(self, number: int) -> None:
        """End a lease, because the application has returned the block."""
        borrowed = self._borrowed.pop(number, None)
        if borrowed is None:
            if number in self._leases:
                self._leases[number].set()
        elif borrowed[1].leases.is_idle(borrowed[0].block):
            # The chunk is unmapped at once, because the application's next request must not find it mapped.
            self._give_back(number, *borrowed)
        else:
            self._nursery.start_soon(self._give_back_later, number, *borrowed)

    def end_leases(self) -> None:
        """End all leases, because the context is to end."""
        for number in (*self._leases, *self._borrowed):
            self.on_unlease(number)


@attrs.define(eq=False, repr=False)
class _Serving(DirectReply):
    """A request in service.

    Attributes:
        launch: The launch.
        word: The shared word of its library.
        results: The host arrays to send with the reply.
        invalidates: Whether its outputs become invalid even if it was never launched, because others use
            them.
        session: The context that serves it.
        requests: Reports its outcome to the application.
        is_launched: Whether the library has begun.
        is_heard: Whether the application has received the last progress, if any.
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
        """Return false, because no task of the worker waits for the end."""
        return False

    def deliver(self, error: BaseException | None) -> None:
        """Take the outcome of a launch that bypassed the library's mailbox."""
        if error is not None and self.invalidates:
            self.launch.mark_damaged(error)
        self.requests.done(self, error)


def _new_addresses(launch: Launch, engine: Engine) -> tuple[Address, ...]:
    """Return the places of an operation's new blocks that the application does not know yet."""
    fresh = engine.fresh
    blocks = [block for block, _ in launch.allocations if block in fresh]
    fresh.difference_update(blocks)
    return _addresses(blocks, engine)


def _all_addresses(allocations: Iterable[tuple[int, int]], engine: Engine) -> tuple[Address, ...]:
    """Return the places of blocks that a failed operation was to make. The application forgets them.

    They are not marked as reported, so the next operation that makes these blocks reports them again.
    """
    addresses = _addresses([block for block, _ in allocations], engine)
    engine.fresh.update([block for block, *_ in addresses])
    return addresses


def _addresses(blocks: Iterable[int], engine: Engine) -> tuple[Address, ...]:
    """Return the places of blocks, without the freed blocks."""
    return tuple([address[:] for block in blocks if (address := engine.placed(block)) is not None])
