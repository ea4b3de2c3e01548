"""The launch of an operation: from its library actor to the backend, in the loop or in a thread.

`Enqueuer` launches in four steps: `begin` checks the inputs, allocates the outputs, makes the stream wait for
earlier work and copies staged operands; the backend is called; `end_call` puts an injected fault on the
stream; `add` puts the operation in flight. `enqueue` takes all steps in the loop.

`ThreadedLaunches` is for backend calls that block (D111). The loop runs `begin`, which collects the
stream's work in `later` instead of doing it, and `add` with the event `NOT_YET`. A thread runs
`ThreadedCall.make`: it puts `later` on the stream, calls the backend and records the event. Then the loop
runs `Enqueuer.bind`.

These orders matter:

* `launching` is called before the driver, which may never return: the other process must know what had begun
  (D58). The watchdog starts before the call for the same reason.
* The stream waits before it runs staged copies, because they write to memory that earlier work may use.
* The event is recorded after the call, so that it covers everything that the call has enqueued.
* A threaded operation is in flight before its thread begins, so that a lost context fails it like the others.
  It keeps its place in the launch order until `_end`, because later operations cannot wait for an event that
  does not exist yet. Holding the stream instead would hang: a driver that loads a kernel waits for held
  streams (D50).
* While a thread calls the backend, `CompletionPort.calls` keeps the port from polling, because it would take
  the interpreter's lock from the thread.

If a launch fails, its operation must not be in flight, and its outputs must be freed. `abandon` does both,
and keeps the memory of already enqueued copies until they have run. A threaded operation is in flight by
then, so `Completer.refuse` fails it, and its work still has to end on the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import attrs

from ...actors import ActorStoppedError
from ...backends.base import (
    AccelDevice,
    AccelEvent,
    AccelStream,
    HostArray,
    KernelLibrary,
    StreamPause,
    function_of,
)
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
    """Passes operations to the backend, with memory for their results, after the work that they follow.

    Each launch takes the same steps: `begin` prepares it, the backend is called, `end_call` follows, and
        `add`
    puts it in flight. `enqueue` takes all of them. A kernel that blocks is called in a thread, so its
    operation is added before the call, and `bind` assigns its event.

    Args:
        context: The context.
        device: Its device.
        copies: The library that copies operands to the device.
        blocks: The blocks that the program has released.
        memory: The blocks in use.
        watchdog: Watches operations in flight.
        port: Detects the ends of operations.
        alarms: For injected faults.
        hooks: Receive every operation at every step.
        launching: Called with each operation before its launch, even if the launch fails; or None.
        ranges: Encloses backend calls in profiler ranges; or None.

    Attributes:
        launched: The number of enqueued operations.
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
    # The holds of injected faults.
    _holds: list[StreamPause] = attrs.field(factory=list[StreamPause])

    def enqueue(
        self, launch: Launch, library: KernelLibrary, queue: StreamQueue, failure: Exception | None = None
    ) -> InFlight:
        """Pass an operation to the backend; the caller arranges its reply.

        Args:
            launch: The validated operation. It is new, or its caller leaves the launch gate for it.
            library: Its library.
            queue: The stream to put it on.
            failure: The error of its preparation. The operation is refused with it, as if by the library.

        Raises:
            Exception: The backend's error. Nothing is in flight, and allocated memory is freed.
            Exception: The error of the backend; nothing is in flight, and the allocated memory is freed.
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
        # The event is recorded after the call, so that it covers everything that the call has enqueued.
        return self.add(launch, queue, stream.record())

    def begin(
        self,
        launch: Launch,
        queue: StreamQueue,
        failure: Exception | None,
        later: list[Callable[[], object]] | None = None,
    ) -> None:
        """Take the steps before the backend call; raises as `enqueue` does.

        Args:
            launch: The operation.
            queue: The stream to put it on.
            failure: The error of its preparation.
            later: Collects the work on the stream, which a thread does right before the call. None if it is
                done now.
        """
        if self._context.is_lost:
            raise ActorStoppedError(
                f"{function_of(launch.name)} was not started: the context is lost", path=queue.owner
            )
        has_staged = False
        memory, stream = self._memory, queue.stream
        try:
            # D58: this precedes the driver call, which may never return. The other process must know what had
            # begun.
            if self._launching is not None:
                self._launching(launch)
            # The usual launch does not involve a fault, an arrival or a hook. Only its operands are checked,
            # without a Python call.
            is_plain = launch.fault is None and not launch.arrivals and failure is None
            if is_plain and self._watchdog.idle is None and not self._hooks:
                for _, used in launch.uses:
                    if used.is_released or used.damaged_by is not None:
                        launch.check_inputs()
            else:
                self._check(launch, queue, failure)
            # Memory that the program has released by now is available to this operation.
            memory.exchange(self._blocks, launch.allocations)
            if later is not None:
                events: list[AccelEvent] = []
                memory.order(stream, launch.reads, launch.writes, events.append)
                later += [partial(stream.wait, event) for event in events]
                later += [self._copy_later(copy, stream) for copy in launch.staged]
                return
            # The waits precede the copies, which write to memory that earlier work may still use.
            memory.order(stream, launch.reads, launch.writes)
            for copy in launch.staged:
                # The flag is set before the call, because a failed call may have enqueued a part.
                has_staged = True
                self._copies.enqueue(copy, stream)
        except Exception as error:
            self.abandon(launch, queue, error, has_staged=has_staged)
            raise

    def _copy_later(self, copy: CopyFromHostSpec | CopySpec, stream: AccelStream) -> Callable[[], object]:
        """Return the call that enqueues a copy. Until it runs, the use of a host array can be withdrawn."""
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
        """Put the injected fault on the stream, after the backend call."""
        if launch.fault is not None:
            launch.fault.fault.after_enqueue(self._device, stream, sorted(launch.writes), self._holds)

    def add(self, launch: Launch, queue: StreamQueue, event: AccelEvent) -> InFlight:
        """Put an operation in flight, until its event is done.

        Args:
            launch: The operation.
            queue: Its stream.
            event: The event after its work; `NOT_YET` if its kernel is still to be called.
        """
        operation = self._hold(launch, queue, event, is_whole=True)
        if launch.fault is not None and event is not NOT_YET:
            launch.fault.fault.after()
        for output in launch.outputs:
            if output.is_released:
                # The program released it before it existed: free it when the operation is complete.
                self._memory.release(output.id)
        self.launched += 1
        return operation

    def bind(
        self, operation: InFlight, queue: StreamQueue, error: Exception | None, event: AccelEvent | None
    ) -> Exception | None:
        """Assign the event of an operation added before its backend call.

        Args:
            operation: The operation.
            queue: Its stream.
            event: Its event, if recorded.
            error: The backend's error. Already enqueued work is awaited nevertheless.

        Returns:
            The error of the operation, if it failed.
        """
        launch, stream = operation.launch, queue.stream
        is_launched = error is None
        try:
            if is_launched:
                self.end_call(launch, stream)
        except Exception as failed:  # noqa: BLE001  # it belongs to the operation
            error = failed
        # The thread recorded no event if the loop has to put a fault before it, or if the stream refused.
        operation.bind(stream, stream.record() if event is None else event)
        if launch.fault is not None and is_launched:
            launch.fault.fault.after()
        return error

    def abandon(
        self, launch: Launch, queue: StreamQueue, error: Exception, *, has_staged: bool | None = None
    ) -> None:
        """Clean up after a failed launch; its error is the reply that follows.

        Args:
            launch: The operation.
            queue: Its stream.
            error: Its error.
            has_staged: Whether copies for it are already enqueued; by default, if it has any.
        """
        notify(self._hooks, launch, Phase.COMPLETE, Phase.REPLY)
        if bool(launch.staged) if has_staged is None else has_staged:
            # The copies run nevertheless, so their memory is held until then.
            stream = queue.stream
            copies = self._hold(launch, queue, stream.record(), is_whole=False)
            self._port.watch(stream, copies.event)
        else:
            notify(self._hooks, launch, Phase.RELEASE)
        new_blocks = launch.new_blocks
        launch.mark_damaged(error, new_blocks)
        self._memory.release_all(new_blocks)
        self._context.locate(error, launch)

    def call_of(self, launch: Launch, library: KernelLibrary) -> Enqueue:
        """Return the backend function to call for a launch, in the loop or in a thread."""
        call = library.enqueue if self._ranges is None else self._ranges.around(launch, library)
        return partial(self._with_copies, call, launch.result_copies) if launch.result_copies else call

    def _with_copies(
        self, call: Enqueue, copies: Sequence[CopySpec], spec: OperationSpec, stream: AccelStream
    ) -> None:
        call(spec, stream)
        for copy in copies:
            self._copies.enqueue(copy, stream)

    def end_holds(self) -> None:
        """Release the holds of injected faults."""
        for hold in self._holds:
            hold.release()

    def _check(self, launch: Launch, queue: StreamQueue, failure: Exception | None) -> None:
        """Check a launch that starts the watchdog, is observed, or has a fault, a failure or arrivals."""
        if self._watchdog.idle is not None:
            # The watchdog starts before the call, because it must see a driver that never returns.
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
            hit.fault.before_enqueue(self._device, queue.stream, self._alarms, self._holds)

    def _hold(self, launch: Launch, queue: StreamQueue, event: AccelEvent, *, is_whole: bool) -> InFlight:
        """Put enqueued work in flight until it is done: the whole operation, or only its copies."""
        operation = InFlight(launch, event, self.launched)
        operation.occupy(self._memory.uses, queue.stream, is_whole=is_whole)
        queue.operations.append(operation)
        queue.load.outstanding += 1
        launch.is_in_flight = True
        return operation


@attrs.define(eq=False)
class ThreadedCall:
    """The backend call of an operation already in flight.

    Attributes:
        operation: The operation.
        queue: Its stream.
        later: The work to put on the stream before the call; None if it is there, as for a call in the loop.
        event: The event after its work, once recorded. The loop records it if it puts an injected fault
            before it.
    """

    operation: InFlight
    queue: StreamQueue
    later: list[Callable[[], object]] | None
    event: AccelEvent | None = None

    def make(self, call: Enqueue) -> None:
        """Put everything on the stream, in order; raises as the backend does."""
        operation, stream = self.operation, self.queue.stream
        if operation.is_lost:
            # It was handed to the thread in advance, and its context is lost.
            return
        try:
            for put in self.later or ():
                put()
            if not hasattr(operation.launch.spec, "is_withdrawn"):
                call(operation.launch.spec, stream)
        finally:
            if operation.launch.fault is None:
                # The event is recorded here, because the thread may be in its next call before the loop runs.
                # A closed stream refuses.
                with suppress(RuntimeError):
                    self.event = stream.record()


class ThreadedLaunches:
    """Launches operations in three steps, so that the loop runs while the backend enqueues (D111).

    In the loop, an operation gets its memory, its operands and its place in flight. In a thread, the stream
    gets its waits for earlier work, the backend is called, and the event is recorded. In the loop again, the
    event is published.

    Until then the operation keeps its place in the launch order, so operations that follow it are not
    launched. A hold on the device instead would hang, because a driver that loads a kernel waits for held
    streams (D50).

    A queue may hand calls to its thread in advance (`StreamQueue.hands_ahead`). By the launch order, these do
    not touch memory of earlier operations before they are enqueued. So no work on a stream waits for work
    that the same thread has still to put there.

    A short call is made in the loop, in the same steps.

    Args:
        gate: The operations that wait to be launched.
        enqueuer: Takes the steps in the loop.
        completer: Replies.
    """

    def __init__(self, gate: LaunchGate, enqueuer: Enqueuer, completer: Completer) -> None:
        self._gate = gate
        self._enqueuer = enqueuer
        self._completer = completer

    def begin(
        self, launch: Launch, queue: StreamQueue, failure: Exception | None, *, is_here: bool = False
    ) -> ThreadedCall:
        """Take the first step; the caller arranges the reply, and takes the second step.

        Args:
            launch: The operation.
            queue: Its stream.
            failure: The error of its preparation.
            is_here: Whether the backend is called in the loop.

        Raises:
            Exception: See `Enqueuer.enqueue`.
        """
        later: list[Callable[[], object]] | None = None if is_here else []
        try:
            self._enqueuer.begin(launch, queue, failure, later)
        except BaseException:
            self._gate.leave(launch)
            raise
        # The operation is in flight before the thread begins, so that a lost context fails it like the
        # others.
        operation = self._enqueuer.add(launch, queue, NOT_YET)
        if not is_here:
            self._gate.keep(launch)
            # The loop puts the fault after this call, so the thread must not make another call before.
            queue.is_alone = launch.fault is not None
            queue.take()
        return ThreadedCall(operation, queue, later)

    def start(self, call: ThreadedCall, library: KernelLibrary, reply: Reply) -> None:
        """Call the backend; the third step follows on its own."""
        operation, queue = call.operation, call.queue
        backend = self._enqueuer.call_of(operation.launch, library)
        if call.later is None:
            self._call_here(call, backend, reply)
            return
        # The port stops polling, because it would keep taking the interpreter's lock from the thread.
        self._completer.port.calls += 1
        if queue.thread is None:
            try:
                queue.thread = CallThread(f"{queue.stream.name} launches")
            except RuntimeError as error:
                # The system cannot start another thread.
                self._end(call, error)
                return
        queue.thread.call(partial(call.make, backend), partial(self._end, call))

    def _call_here(self, call: ThreadedCall, backend: Enqueue, reply: Reply) -> None:
        operation, queue = call.operation, call.queue
        error: Exception | None = None
        try:
            call.make(backend)
        except Exception as raised:  # noqa: BLE001  # it belongs to the operation
            error = failure_of(raised.with_traceback(raised.__traceback__ and raised.__traceback__.tb_next))
        error = self._enqueuer.bind(operation, queue, error, call.event)
        self._gate.leave(operation.launch)
        if error is None:
            self._completer.see_to(operation, queue, reply)
        else:
            self._completer.refuse(operation, error)
            self._completer.watch(operation, queue)

    def _end(self, call: ThreadedCall, error: Exception | None) -> None:
        """Take the third step, after the thread has returned."""
        operation, queue = call.operation, call.queue
        self._completer.port.calls -= 1
        if operation.is_lost:
            # Its context is lost: the memory and streams are no longer used.
            return
        queue.give_back()
        error = self._enqueuer.bind(operation, queue, error, call.event)
        self._gate.launched(operation.launch)
        if error is not None:
            self._completer.refuse(operation, error)
        self._completer.watch(operation, queue)


class Ranges:
    """Encloses each backend call of an operation in a range of NVIDIA's profilers.

    Ranges nest by thread, and a profiler assigns kernels to the range of the thread that launches them. So
    each range begins and ends in the calling thread, where no hook is called: see decision 142.
    """

    def __init__(self) -> None:
        # The domain does nothing if no profiler is attached.
        self._domain: Any = import_extra("nvtx", "nvtx").get_domain("trio_accel")
        # The attributes by operation and library name, because registering takes longer than a range.
        self._attributes: dict[tuple[str, str], Any] = {}

    def around(self, launch: Launch, library: KernelLibrary) -> Enqueue:
        """Return the library's call for this launch, in its range."""
        key = launch.name, library.name
        if key not in self._attributes:
            # The name of a program's own library ends with the digest of its code.
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
