"""The launch of an operation: from its library actor to the backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from ...actors import ActorStoppedError
from ...backends.base import AccelDevice, AccelEvent, AccelStream, Hold, KernelLibrary
from ...backends.base.ops import OperationSpec
from ..arrays._blocks import BlockTable
from ..base._alarms import Alarms
from ..completion._port import CompletionPort
from ..operations._hooks import Phase, enter, notify
from ..operations._operation import Launch
from ._context_state import ContextState, EngineObserver
from ._in_flight import NOT_YET, InFlight, MemoryInUse
from ._stream_queues import StreamQueue
from ._watchdog import Watchdog

__all__ = ["Enqueuer", "Kernels"]

InFlightT = TypeVar("InFlightT", bound=InFlight)


class Kernels(Protocol):
    """What a launch needs of a library; see `KernelLibrary`."""

    @property
    def name(self) -> str:
        """Name of the library."""
        ...

    def enqueue(self, spec: OperationSpec, stream: AccelStream) -> None:
        """Put an operation on a stream."""


class Enqueuer:
    """Gives operations to the backend, with memory for their results and behind the work that they follow.

    Each launch takes the same steps: `begin` makes it ready, the backend is called, `end_call` follows, and
    `add` puts it among what is in flight. `enqueue` takes them in a row. A kernel that blocks is called in a
    thread, so its operation is added before the call, and `bind` gives it its event. The parts of an
    operation that spans devices take each step together.

    Args:
        context: The context.
        device: Its device.
        copies: Library that brings operands to the device.
        blocks: Has what the program has let go.
        memory: The blocks that are in use.
        watchdog: Looks after what is in flight.
        port: Sees the ends of operations.
        alarms: For faults that are injected.
        observer: Is told of each launch.

    Attributes:
        launched: How many operations were enqueued.
    """

    def __init__(
        self,
        context: ContextState,
        device: AccelDevice,
        copies: KernelLibrary,
        blocks: BlockTable,
        memory: MemoryInUse,
        watchdog: Watchdog,
        port: CompletionPort,
        alarms: Alarms,
        *,
        observer: EngineObserver,
    ) -> None:
        self._context = context
        self._device = device
        self._copies = copies
        self._blocks = blocks
        self._memory = memory
        self._watchdog = watchdog
        self._port = port
        self._alarms = alarms
        self._hooks = observer.hooks
        self._observer = observer if observer.counts_launches else None
        # Of injected faults.
        self._holds: list[Hold] = []
        self.launched: int = 0

    def enqueue(
        self, launch: Launch, library: Kernels, queue: StreamQueue, failure: Exception | None = None
    ) -> InFlight:
        """Give an operation to the backend; the caller sees to its reply.

        Args:
            launch: The validated operation. It was not handed over before, or its caller leaves the launch
                gate for it.
            library: Library that has it.
            queue: Stream to put it on.
            failure: What its preparation failed with: it is refused with that, as by the library.

        Raises:
            Exception: What the backend raised; nothing is in flight, and what was allocated is freed.
        """
        self.begin(launch, queue, failure)
        stream = queue.stream
        try:
            library.enqueue(launch.spec, stream)
            if launch.fault is not None:
                self.end_call(launch, stream)
        except Exception as error:
            self.abandon(launch, queue, error)
            raise
        return self.add(launch, queue, stream.record(), InFlight)

    def begin(
        self,
        launch: Launch,
        queue: StreamQueue,
        failure: Exception | None,
        later: list[Callable[[], object]] | None = None,
    ) -> None:
        """Do what comes before the call of the backend; raises as `enqueue` does.

        Args:
            launch: The operation.
            queue: Stream to put it on.
            failure: What its preparation failed with.
            later: Gets what is to be put on the stream before the call, which a thread does that has the
                stream. None: it is done now.
        """
        if self._context.is_lost:
            raise ActorStoppedError(f"{launch.name} was not started: the context is lost", path=queue.owner)
        has_staged = False
        memory, stream = self._memory, queue.stream
        try:
            if self._observer is not None:
                self._observer.launching(launch)
            is_plain = launch.fault is None and not launch.arrivals and failure is None
            if is_plain and self._watchdog.idle is None and not self._hooks:
                launch.check_inputs()
            else:
                self._check(launch, queue, failure)
            # What the program has let go by now is there for this operation.
            memory.exchange(self._blocks, launch.allocations)
            if later is not None:
                events: list[AccelEvent] = []
                memory.order(stream, launch.reads, launch.writes, events.append)
                later += [partial(stream.wait, event) for event in events]
                later += [partial(self._copies.enqueue, copy, stream) for copy in launch.staged]
                return
            memory.order(stream, launch.reads, launch.writes)
            for copy in launch.staged:
                has_staged = True
                self._copies.enqueue(copy, stream)
        except Exception as error:
            self.abandon(launch, queue, error, has_staged=has_staged)
            raise

    def end_call(self, launch: Launch, stream: AccelStream) -> None:
        """Do what follows the call of the backend on the stream: the fault that is injected."""
        if launch.fault is not None:
            launch.fault.fault.behind(self._device, stream, sorted(launch.writes), self._holds)

    def add(self, launch: Launch, queue: StreamQueue, event: AccelEvent, kind: type[InFlightT]) -> InFlightT:
        """Put an operation among what is in flight, until its event is done.

        Args:
            launch: The operation.
            queue: Where it is, or will be.
            event: Behind what was enqueued for it; `NOT_YET` if its kernel is still to be called.
            kind: Class of the operation in flight.
        """
        operation = self._hold(launch, queue, event, kind, is_whole=True)
        if launch.fault is not None and event is not NOT_YET:
            launch.fault.fault.after()
        for output in launch.outputs:
            if output.is_released:
                # Before it was there: it goes when the operation is complete.
                self._memory.release(output.id)
        self.launched += 1
        return operation

    def bind(
        self, operation: InFlight, queue: StreamQueue, error: Exception | None, event: AccelEvent | None
    ) -> Exception | None:
        """Give an operation its event that was added before the backend was called for it.

        Args:
            operation: The operation.
            queue: Where it is.
            event: Its event, if that is recorded.
            error: What the backend has raised. What it has enqueued by then is waited for all the same.

        Returns:
            What it has failed with, if it has.
        """
        launch, stream = operation.launch, queue.stream
        is_launched = error is None
        try:
            if is_launched:
                self.end_call(launch, stream)
        except Exception as failed:  # noqa: BLE001  # it is the operation's
            error = failed
        operation.bind(stream, stream.record() if event is None else event)
        if launch.fault is not None and is_launched:
            launch.fault.fault.after()
        return error

    def abandon(
        self, launch: Launch, queue: StreamQueue, error: Exception, *, has_staged: bool | None = None
    ) -> None:
        """Clean up after a launch that failed; its error is the reply that follows.

        Args:
            launch: The operation.
            queue: Where it was to go.
            error: What it failed with.
            has_staged: Whether copies for it are enqueued already; by default, if it has any.
        """
        notify(self._hooks, Phase.COMPLETE, launch)
        notify(self._hooks, Phase.REPLY, launch)
        if bool(launch.staged) if has_staged is None else has_staged:
            # The copies run all the same: what they use is held until they have.
            stream = queue.stream
            copies = self._hold(launch, queue, stream.record(), InFlight, is_whole=False)
            self._port.watch(stream, copies.event)
        else:
            notify(self._hooks, Phase.RELEASE, launch)
        made = {block for block, _ in launch.allocations}
        for output in launch.outputs:
            if output.id in made:
                output.spoil(launch.name, error)
        for block in made:
            self._memory.release(block)
        self._context.locate(error, launch)

    def kernels_for(self, launch: Launch, library: Kernels) -> Kernels:
        """What those who call the backend by themselves are to call of the library."""
        return library

    def end_holds(self) -> None:
        """Let go on what injected faults hold up."""
        for hold in self._holds:
            hold.release()

    def _check(self, launch: Launch, queue: StreamQueue, failure: Exception | None) -> None:
        """Tell of a launch that begins something or is watched, and look whether it may be."""
        if self._watchdog.idle is not None:
            # Before it is enqueued: a driver that never returns is to be seen, too.
            self._watchdog.begin()
        if self._hooks:
            enter(self._hooks, launch)
        launch.check_inputs()
        if failure is not None:
            raise failure
        for arrival in launch.arrivals:
            if arrival.failure is not None:
                raise arrival.failure
        hit = launch.fault
        if hit is not None:
            hit.strike()
            hit.fault.before(self._device, queue.stream, self._alarms, self._holds)

    def _hold(
        self, launch: Launch, queue: StreamQueue, event: AccelEvent, kind: type[InFlightT], *, is_whole: bool
    ) -> InFlightT:
        """Hold what is enqueued until it is done: the whole operation, or copies for it alone."""
        operation = kind(launch, event, self.launched)
        operation.occupy(self._memory.uses, queue.stream, is_whole=is_whole)
        queue.operations.append(operation)
        queue.load.outstanding += 1
        launch.is_in_flight = True
        return operation
