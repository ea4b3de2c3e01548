"""The launch of an operation: from its library actor to the backend, in the loop or by way of a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import attrs

from ...actors import ActorStoppedError
from ...backends.base import AccelDevice, AccelEvent, AccelStream, HostArray, KernelLibrary, StreamPause
from ...backends.base.contract.ops import CopyFromHostSpec, CopySpec, HostUse, OperationSpec
from ...backends.base.kit.modules import import_extra
from ..base._bridge import CallThread, failure_of
from ..base._port import CompletionPort
from ..base._waits import Alarms
from ..operations._blocks import BlockTable
from ..operations._hooks import EngineHook, Phase, enter, notify
from ..operations._operation import Launch
from ._completer import Completer
from ._context_state import ContextState, Watchdog
from ._in_flight import NOT_YET, InFlight, MemoryInUse, Reply
from ._leases import LaunchGate
from ._stream_queues import StreamQueue

Enqueue: TypeAlias = "Callable[[OperationSpec, AccelStream], None]"


@attrs.define(eq=False)
class Enqueuer:
    """The launch: operations go to the backend, with memory for results, behind the work they follow.

    Each launch takes the same steps: `begin` makes it ready, the backend is called, `end_call` follows, and
    `add` puts it among what is in flight. `enqueue` takes them in a row. A kernel that blocks is called in a
    thread, so its operation is added before the call, and `bind` gives it its event.

    Args:
        context: The context.
        device: Its device.
        copies: Library that brings operands to the device.
        blocks: Blocks that the program has let go.
        memory: The blocks that are in use.
        watchdog: Watches operations in flight.
        port: Sees the ends of operations.
        alarms: For faults that are injected.
        hooks: See every operation at every step.
        launching: Called with each operation before its launch, also if that fails; or None.
        ranges: Encloses the calls of the backend in ranges of profilers; or None.

    Attributes:
        launched: How many operations were enqueued.
    """

    _context: ContextState
    _device: AccelDevice
    _copies: KernelLibrary
    _blocks: BlockTable
    _memory: MemoryInUse
    _watchdog: Watchdog
    _port: CompletionPort
    _alarms: Alarms
    _hooks: Sequence[EngineHook]
    _launching: Callable[[Launch], None] | None
    _ranges: Ranges | None
    launched: int = 0
    # Holds of injected faults.
    _holds: list[StreamPause] = attrs.field(factory=list[StreamPause])

    def enqueue(
        self, launch: Launch, library: KernelLibrary, queue: StreamQueue, failure: Exception | None = None
    ) -> InFlight:
        """Give an operation to the backend; the caller sees to its reply.

        Args:
            launch: The validated operation. It was not handed over before, or its caller leaves the launch
                gate for it.
            library: Library that has it.
            queue: Stream to put it on.
            failure: Error of its preparation: it is refused with that, as by the library.

        Raises:
            Exception: The error of the backend; nothing is in flight, and what was allocated is freed.
        """
        self.begin(launch, queue, failure)
        stream = queue.stream
        try:
            self.call_of(launch, library)(launch.spec, stream)
            if launch.fault is not None:
                self.end_call(launch, stream)
        except Exception as error:
            self.abandon(launch, queue, error)
            raise
        # The event is recorded behind the call, so that it covers all that the call has enqueued.
        return self.add(launch, queue, stream.record())

    def begin(
        self,
        launch: Launch,
        queue: StreamQueue,
        failure: Exception | None,
        later: list[Callable[[], object]] | None = None,
    ) -> None:
        """Take the steps before the call of the backend; raises as `enqueue` does.

        Args:
            launch: The operation.
            queue: Stream to put it on.
            failure: Error of its preparation.
            later: Takes the work for the stream before the call, which the stream's thread does then. None:
                it is done now.
        """
        if self._context.is_lost:
            raise ActorStoppedError(f"{launch.name} was not started: the context is lost", path=queue.owner)
        has_staged = False
        memory, stream = self._memory, queue.stream
        try:
            # D58: before the driver is called, which may never return: the other process must know what had
            # begun.
            if self._launching is not None:
                self._launching(launch)
            # The usual launch has no fault, no arrival and no hook: its operands are all that is looked at,
            # without a call.
            is_plain = launch.fault is None and not launch.arrivals and failure is None
            if is_plain and self._watchdog.idle is None and not self._hooks:
                for _, used in launch.uses:
                    if used.is_released or used.damaged_by is not None:
                        launch.check_inputs()
            else:
                self._check(launch, queue, failure)
            # Memory that the program has let go by now is there for this operation.
            memory.exchange(self._blocks, launch.allocations)
            if later is not None:
                events: list[AccelEvent] = []
                memory.order(stream, launch.reads, launch.writes, events.append)
                later += [partial(stream.wait, event) for event in events]
                later += [self._copy_later(copy, stream) for copy in launch.staged]
                return
            # The waits come before the copies, which write to memory that earlier work may still use.
            memory.order(stream, launch.reads, launch.writes)
            for copy in launch.staged:
                # The flag is set before the call: one that fails may have enqueued a part.
                has_staged = True
                self._copies.enqueue(copy, stream)
        except Exception as error:
            self.abandon(launch, queue, error, has_staged=has_staged)
            raise

    def _copy_later(self, copy: CopyFromHostSpec | CopySpec, stream: AccelStream) -> Callable[[], object]:
        """Return the call that enqueues a copy; until then, the use of a host array can be withdrawn."""
        if isinstance(copy, CopySpec):
            return partial(self._copies.enqueue, copy, stream)
        use = HostUse(copy.host)
        copy.note_use(use)

        def enqueue(host: HostArray) -> None:
            now = copy if host is copy.host else CopyFromHostSpec(host, copy.out)
            self._copies.enqueue(now, stream)
            copy.note_use(now.use)

        return partial(use.run, enqueue)

    def end_call(self, launch: Launch, stream: AccelStream) -> None:
        """Take the steps on the stream behind the call of the backend: the injected fault."""
        if launch.fault is not None:
            launch.fault.fault.behind(self._device, stream, sorted(launch.writes), self._holds)

    def add(self, launch: Launch, queue: StreamQueue, event: AccelEvent) -> InFlight:
        """Put an operation among what is in flight, until its event is done.

        Args:
            launch: The operation.
            queue: Its stream.
            event: Event behind its work; `NOT_YET` if its kernel is still to be called.
        """
        operation = self._hold(launch, queue, event, is_whole=True)
        if launch.fault is not None and event is not NOT_YET:
            launch.fault.fault.after()
        for output in launch.outputs:
            if output.is_released:
                # Its program released it before it existed: it is freed when the operation is complete.
                self._memory.release(output.id)
        self.launched += 1
        return operation

    def bind(
        self, operation: InFlight, queue: StreamQueue, error: Exception | None, event: AccelEvent | None
    ) -> Exception | None:
        """Give an operation its event that was added before the backend was called for it.

        Args:
            operation: The operation.
            queue: Its stream.
            event: Its event, if that is recorded.
            error: Error of the backend. Work that was enqueued by then is waited for all the same.

        Returns:
            Its error, if it has failed.
        """
        launch, stream = operation.launch, queue.stream
        is_launched = error is None
        try:
            if is_launched:
                self.end_call(launch, stream)
        except Exception as failed:  # noqa: BLE001  # it is the operation's
            error = failed
        # The thread has recorded none where the loop has to put a fault in between, or where the stream has
        # refused.
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
            queue: Its stream.
            error: Its error.
            has_staged: Whether copies for it are enqueued already; by default, if it has any.
        """
        notify(self._hooks, launch, Phase.COMPLETE, Phase.REPLY)
        if bool(launch.staged) if has_staged is None else has_staged:
            # The copies run all the same: their memory is held until they have.
            stream = queue.stream
            copies = self._hold(launch, queue, stream.record(), is_whole=False)
            self._port.watch(stream, copies.event)
        else:
            notify(self._hooks, launch, Phase.RELEASE)
        made = launch.made
        launch.mark_damaged(error, made)
        self._memory.release_all(made)
        self._context.locate(error, launch)

    def call_of(self, launch: Launch, library: KernelLibrary) -> Enqueue:
        """Return the function to call for a launch, in the loop or in a thread: the backend's library."""
        call = library.enqueue if self._ranges is None else self._ranges.around(launch, library)
        return partial(self._with_copies, call, launch.behind) if launch.behind else call

    def _with_copies(
        self, call: Enqueue, behind: Sequence[CopySpec], spec: OperationSpec, stream: AccelStream
    ) -> None:
        call(spec, stream)
        for copy in behind:
            self._copies.enqueue(copy, stream)

    def end_holds(self) -> None:
        """Release the holds of injected faults."""
        for hold in self._holds:
            hold.release()

    def _check(self, launch: Launch, queue: StreamQueue, failure: Exception | None) -> None:
        """Tell of a launch that starts the watchdog or is observed, and check that it may be."""
        if self._watchdog.idle is not None:
            # The watchdog starts before the call: a driver that never returns must be seen, too.
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

    def _hold(self, launch: Launch, queue: StreamQueue, event: AccelEvent, *, is_whole: bool) -> InFlight:
        """Put enqueued work in flight until it is done: the whole operation, or copies for it alone."""
        operation = InFlight(launch, event, self.launched)
        operation.occupy(self._memory.uses, queue.stream, is_whole=is_whole)
        queue.operations.append(operation)
        queue.load.outstanding += 1
        launch.is_in_flight = True
        return operation


@attrs.define(eq=False)
class ThreadedCall:
    """The call of the backend for one operation, which is in flight already.

    Attributes:
        operation: The operation.
        queue: Its stream.
        later: Work for the stream before the call; None if it is there already, as the call is made in the
            loop.
        event: Event behind its work, once that is recorded. An injected fault comes in between, in the loop.
    """

    operation: InFlight
    queue: StreamQueue
    later: list[Callable[[], object]] | None
    event: AccelEvent | None = None

    def make(self, call: Enqueue) -> None:
        """Put everything on the stream, in order; raises as the backend does."""
        operation, stream = self.operation, self.queue.stream
        if operation.is_lost:
            # It was handed over ahead, and its context is gone.
            return
        try:
            for put in self.later or ():
                put()
            if not hasattr(operation.launch.spec, "is_withdrawn"):
                call(operation.launch.spec, stream)
        finally:
            if operation.launch.fault is None:
                # Recorded here, as the thread may be at the next call before the loop looks. A closed stream
                # refuses.
                with suppress(RuntimeError):
                    self.event = stream.record()


class ThreadedLaunches:
    """Launches in three steps, so that the loop goes on while the backend enqueues an operation (D111).

    In the loop, an operation gets its memory, its operands and its place among what is in flight. In a
    thread, waits for the work that it follows are put on the stream, the backend is called, and the event is
    recorded. In the loop again, others learn of the event.

    Until then it keeps its place in the launch order: operations that follow it are not launched. A hold on
    the device instead would hang, as a driver that loads a kernel waits for held streams (D50).

    A queue may hand calls over ahead (`StreamQueue.hands_ahead`). By the launch order, these do not touch
    memory of earlier ones that are not enqueued yet. So no work on a stream waits for work that the same
    thread has still to put there.

    A call that is short is made in the loop, in the same steps.

    Args:
        gate: Operations that wait to be launched.
        enqueuer: Does the steps in the loop.
        completer: Replies.
    """

    def __init__(self, gate: LaunchGate, enqueuer: Enqueuer, completer: Completer) -> None:
        self._gate = gate
        self._enqueuer = enqueuer
        self._completer = completer

    def begin(
        self, launch: Launch, queue: StreamQueue, failure: Exception | None, *, is_here: bool = False
    ) -> ThreadedCall:
        """Take the first step; its caller sees to the reply, and takes the second one.

        Args:
            launch: The operation.
            queue: Its stream.
            failure: Error of its preparation.
            is_here: Whether the call is made in the loop.

        Raises:
            Exception: See `Enqueuer.enqueue`.
        """
        later: list[Callable[[], object]] | None = None if is_here else []
        try:
            self._enqueuer.begin(launch, queue, failure, later)
        except BaseException:
            self._gate.leave(launch)
            raise
        # The operation is in flight before the thread begins: a loss of the context fails it as it does the
        # others.
        operation = self._enqueuer.add(launch, queue, NOT_YET)
        if not is_here:
            self._gate.keep(launch)
            # The loop puts the fault behind this call: a next call of the thread would come before it.
            queue.is_alone = launch.fault is not None
            queue.take()
        return ThreadedCall(operation, queue, later)

    def start(self, call: ThreadedCall, library: KernelLibrary, reply: Reply) -> None:
        """Call the backend; the third step follows by itself."""
        operation, queue = call.operation, call.queue
        backend = self._enqueuer.call_of(operation.launch, library)
        if call.later is None:
            self._call_here(call, backend, reply)
            return
        # The port stops polling: it would keep taking the interpreter's lock from the thread.
        self._completer.port.calls += 1
        if queue.thread is None:
            try:
                queue.thread = CallThread(f"{queue.stream.name} launches")
            except RuntimeError as error:
                # The system has no thread left.
                self._end(call, error)
                return
        queue.thread.call(partial(call.make, backend), partial(self._end, call))

    def _call_here(self, call: ThreadedCall, backend: Enqueue, reply: Reply) -> None:
        operation, queue = call.operation, call.queue
        error: Exception | None = None
        try:
            call.make(backend)
        except Exception as raised:  # noqa: BLE001  # it is the operation's
            error = failure_of(raised.with_traceback(raised.__traceback__ and raised.__traceback__.tb_next))
        error = self._enqueuer.bind(operation, queue, error, call.event)
        self._gate.leave(operation.launch)
        if error is None:
            self._completer.see_to(operation, queue, reply)
        else:
            self._completer.refuse(operation, error)
            self._completer.watch(operation, queue)

    def _end(self, call: ThreadedCall, error: Exception | None) -> None:
        """Take the third step: the thread has returned."""
        operation, queue = call.operation, call.queue
        self._completer.port.calls -= 1
        if operation.is_lost:
            # Lost with its context, whose memory and streams are not used any more.
            return
        queue.give_back()
        error = self._enqueuer.bind(operation, queue, error, call.event)
        self._gate.launched(operation.launch)
        if error is not None:
            self._completer.refuse(operation, error)
        self._completer.watch(operation, queue)


class Ranges:
    """Encloses each call of the backend for an operation in a range of NVIDIA's profilers.

    Ranges nest by thread, and a profiler assigns kernels to the range of the thread that launches them. So
    each begins and ends in the thread that calls, where no hook is called: see decision 142.
    """

    def __init__(self) -> None:
        # One that does nothing, where no profiler is attached.
        self._domain: Any = import_extra("nvtx", "nvtx").get_domain("trio_accel")
        # The attributes, by the names of operation and library: to register them takes longer than a range.
        self._attributes: dict[tuple[str, str], Any] = {}

    def around(self, launch: Launch, library: KernelLibrary) -> Enqueue:
        """Return the call of the library for this launch, in its range."""
        key = launch.name, library.name
        if key not in self._attributes:
            # One of a program's own has the digest of its code behind its name.
            category = library.name.partition("?")[0]
            self._attributes[key] = self._domain.get_event_attributes(message=launch.name, category=category)
        attributes = self._attributes[key]

        def call(spec: OperationSpec, stream: AccelStream) -> None:
            self._domain.push_range(attributes)
            try:
                library.enqueue(spec, stream)
            finally:
                self._domain.pop_range()

        return call
