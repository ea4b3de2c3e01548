"""The launch of an operation: from its library actor to the backend."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

from ...actors import ActorStoppedError
from ...backends.base import AccelDevice, AccelStream, Hold, KernelLibrary
from ...backends.base.fast_paths import current_fast_paths
from ...backends.base.ops import OperationSpec
from ..arrays._blocks import BlockTable
from ..base._alarms import Alarms
from ..completion._port import CompletionPort
from ..operations._hooks import EngineHook, Phase, enter, notify
from ..operations._operation import Launch
from ._context_state import ContextState
from ._in_flight import NOT_YET, InFlight
from ._lane import Lane
from ._meeting import PartInFlight, PartLaunch
from ._memory_in_use import MemoryInUse
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

    Args:
        context: The context.
        device: Its device.
        copies: Library that brings operands to the device.
        blocks: Has what the program has let go.
        memory: The blocks that are in use.
        watchdog: Looks after what is in flight.
        port: Sees the ends of operations.
        alarms: For faults that are injected.
        hooks: Who sees every operation.
        on_launch: Called before each launch, whatever becomes of it.
        may_defer: Whether nobody looks for the end of the next operation at once, with so many in flight.

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
        hooks: list[EngineHook],
        on_launch: Callable[[Launch], None] | None,
        may_defer: Callable[[int], bool],
    ) -> None:
        self._context = context
        self._device = device
        self._copies = copies
        self._blocks = blocks
        self._memory = memory
        self._watchdog = watchdog
        self._port = port
        self._alarms = alarms
        self._hooks = hooks
        self._on_launch = on_launch
        self._may_defer = may_defer if port.flushes and current_fast_paths().shared_events else _never
        # Of injected faults.
        self._holds: list[Hold] = []
        self.launched: int = 0

    def enqueue(
        self, launch: Launch, library: Kernels, lane: Lane, failure: Exception | None = None
    ) -> InFlight:
        """Give an operation to the backend; the caller sees to its reply.

        Args:
            launch: The validated operation. It was not handed over before, or its caller leaves the launch
                gate for it.
            library: Library that has it.
            lane: Stream to put it on.
            failure: What its preparation failed with: it is refused with that, as by the library.

        Raises:
            Exception: What the backend raised; nothing is in flight, and what was allocated is freed.
        """
        if self._context.is_lost:
            raise ActorStoppedError(f"{launch.name} was not started: the context is lost", path=lane.owner)
        has_staged = False
        memory, stream = self._memory, lane.stream
        try:
            if self._on_launch is not None:
                self._on_launch(launch)
            is_plain = launch.fault is None and not launch.arrivals and failure is None
            if is_plain and self._watchdog.idle is None and not self._hooks:
                launch.check_inputs()
            else:
                self._begin(launch, lane, failure)
            # What the program has let go by now is there for this operation.
            memory.exchange(self._blocks, launch.allocations)
            memory.order(stream, launch.reads, launch.writes)
            for copy in launch.staged:
                has_staged = True
                self._copies.enqueue(copy, stream)
            library.enqueue(launch.spec, stream)
            if launch.fault is not None:
                launch.fault.fault.behind(self._device, stream, sorted(launch.writes), self._holds)
        except Exception as error:
            self._abandon(launch, lane, error, has_staged=has_staged)
            self._context.locate(error, launch)
            raise
        operation = self._record(lane, launch, InFlight)
        if launch.fault is not None:
            launch.fault.fault.after()
        for output in launch.outputs:
            if output.is_released:
                # Before it was there: it goes when the operation is complete.
                memory.release(output.id)
        self.launched += 1
        return operation

    def enqueue_part(
        self, launch: PartLaunch, library: Kernels, lane: Lane, failure: Exception | None
    ) -> Generator[None, None, PartInFlight]:
        """Give a part of an operation that spans devices to the backend, in the steps of a `Meeting`.

        All parts take one step before any takes the next. What is thrown in between is what another part has
        failed with: then this one is not launched.

        Yields:
            When it has its memory and its operands; when its stream is held; and when its kernel is enqueued.

        Returns:
            The part in flight.

        Raises:
            Exception: As for `enqueue`.
        """
        self._make_ready(launch, lane, failure)
        stream, meeting = lane.stream, launch.meeting
        try:
            yield
            came = stream.record()
            meeting.enter(stream)
            yield
            library.enqueue(launch.spec, stream)
            if launch.fault is not None:
                launch.fault.fault.behind(self._device, stream, sorted(launch.writes), self._holds)
            yield
            ran = stream.record()
            meeting.leave(stream)
        except Exception as error:
            self._abandon(launch, lane, error, has_staged=bool(launch.staged))
            self._context.locate(error, launch)
            raise
        operation = self._record(lane, launch, PartInFlight)
        operation.join(meeting, came, ran)
        if launch.fault is not None:
            launch.fault.fault.after()
        self._memory.release_all([output.id for output in launch.outputs if output.is_released])
        self.launched += 1
        return operation

    def kernels_for(self, launch: Launch, library: Kernels) -> Kernels:
        """What the caller of `begin` is to call of the library."""
        return library

    def begin(self, launch: Launch, lane: Lane, failure: Exception | None) -> InFlight:
        """Do what comes before the call of the backend, which is its caller's.

        Returns:
            The operation in flight; `end` gives it its event.

        Raises:
            Exception: As for `enqueue`.
        """
        self._make_ready(launch, lane, failure)
        # Nobody else records anything until `end`.
        lane.stream.flush()
        operation = InFlight(launch, NOT_YET, self.launched)
        operation.occupy(self._memory.uses, lane.stream, is_whole=True)
        lane.operations.append(operation)
        lane.load.outstanding += 1
        launch.is_in_flight = True
        self._memory.release_all([output.id for output in launch.outputs if output.is_released])
        self.launched += 1
        return operation

    def end(self, operation: InFlight, lane: Lane, error: Exception | None) -> Exception | None:
        """The backend was called for an operation: what it has enqueued by now is waited for.

        Args:
            operation: The operation.
            lane: Where it is.
            error: What the backend has raised.

        Returns:
            What it has failed with, if it has.
        """
        launch, stream = operation.launch, lane.stream
        fault = None if launch.fault is None or error is not None else launch.fault.fault
        if fault is not None:
            try:
                fault.behind(self._device, stream, sorted(launch.writes), self._holds)
            except Exception as failed:  # noqa: BLE001  # it is the operation's
                error = failed
        operation.bind(stream, stream.record())
        if fault is not None:
            fault.after()
        return error

    def _make_ready(self, launch: Launch, lane: Lane, failure: Exception | None) -> None:
        """Do what comes before the call of the backend; raises as `enqueue` does."""
        if self._context.is_lost:
            raise ActorStoppedError(f"{launch.name} was not started: the context is lost", path=lane.owner)
        has_staged = False
        memory, stream = self._memory, lane.stream
        try:
            if self._on_launch is not None:
                self._on_launch(launch)
            self._begin(launch, lane, failure)
            memory.exchange(self._blocks, launch.allocations)
            memory.order(stream, launch.reads, launch.writes)
            for copy in launch.staged:
                has_staged = True
                self._copies.enqueue(copy, stream)
        except Exception as error:
            self._abandon(launch, lane, error, has_staged=has_staged)
            self._context.locate(error, launch)
            raise

    def end_holds(self) -> None:
        """Let go on what injected faults hold up."""
        for hold in self._holds:
            hold.release()

    def _begin(self, launch: Launch, lane: Lane, failure: Exception | None) -> None:
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
            hit.fault.before(self._device, lane.stream, self._alarms, self._holds)

    def _record(
        self, lane: Lane, launch: Launch, kind: type[InFlightT], *, is_whole: bool = True
    ) -> InFlightT:
        """Hold what was enqueued until it is done: the whole operation, or copies for it alone."""
        stream = lane.stream
        event = stream.record_deferred() if self._may_defer(len(lane.operations)) else stream.record()
        operation = kind(launch, event, self.launched)
        operation.occupy(self._memory.uses, stream, is_whole=is_whole)
        lane.operations.append(operation)
        lane.load.outstanding += 1
        launch.is_in_flight = True
        return operation

    def _abandon(self, launch: Launch, lane: Lane, error: Exception, *, has_staged: bool) -> None:
        """Clean up after a launch that failed; its error is the reply that follows.

        Args:
            launch: The operation.
            lane: Where it was to go.
            error: What it failed with.
            has_staged: Whether copies for it are enqueued already.
        """
        notify(self._hooks, Phase.COMPLETE, launch)
        notify(self._hooks, Phase.REPLY, launch)
        if has_staged:
            # The copies run all the same: what they use is held until they have.
            self._port.watch(lane.stream, self._record(lane, launch, InFlight, is_whole=False).event)
        else:
            notify(self._hooks, Phase.RELEASE, launch)
        made = {block for block, _ in launch.allocations}
        for output in launch.outputs:
            if output.id in made:
                output.spoil(launch.name, error)
        for block in made:
            self._memory.release(block)


def _never(_: int) -> bool:
    return False
