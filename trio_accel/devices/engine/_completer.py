"""The end of operations in flight: it is seen, their askers are told, and their memory is given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import attrs

from ...actors import DirectReply
from ...backends.base import Refused
from ..arrays._blocks import bare
from ..base._errors import FailureClass, classify, leaves_unchanged
from ..base._waits import Alarms
from ..completion._port import CompletionPort, CompletionStrategy
from ..operations._hooks import EngineHook, Phase, notify
from ..operations._operation import Launch
from ._context_state import ContextState
from ._in_flight import InFlight, MemoryInUse, Reply
from ._leases import Leases
from ._stream_queues import MOST_ON_A_STREAM, StreamQueue, StreamQueues

__all__ = ["Completer"]


@attrs.define(eq=False)
class Completer:
    """The ends of operations: seen, and replied to.

    Args:
        context: The context.
        queues: Its streams, with the operations in flight.
        memory: The blocks that they use.
        leases: Leases, which have ends to see, too.
        alarms: Alarms of operations whose cancelled askers wait.
        hooks: See every operation.
        is_alone: Whether the operation that is being launched is the only request.
        strategy: How completions are learned of.

    Attributes:
        queues: The streams, with the operations in flight.
        port: Sees the ends of operations.
        completed: How many operations have completed, with or without an error.
    """

    _context: ContextState
    queues: StreamQueues
    _memory: MemoryInUse
    _leases: Leases
    _alarms: Alarms
    _hooks: Sequence[EngineHook]
    _is_alone: Callable[[], bool]
    _strategy: CompletionStrategy
    port: CompletionPort = attrs.field(init=False)
    completed: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.port = self._strategy.open(self.reap)

    def see_to(self, operation: InFlight, queue: StreamQueue, reply: Reply) -> None:
        """Have the asker see the end of a very short operation, and the loop see the ends of others (D38)."""
        port = self.port
        if not (port.polls and self._is_alone()):
            port.watch(queue.stream, operation.event)
        elif port.is_quick:
            if not reply.look_last(partial(self._poll, queue, operation)):
                self._poll(queue, operation)
        elif not (
            isinstance(reply, DirectReply)
            and port.may_spin(queue.stream)
            and reply.poll_first(partial(self._spin, queue, operation, reply))
        ):
            port.watch(queue.stream, operation.event)

    async def _spin(self, queue: StreamQueue, operation: InFlight, reply: DirectReply) -> None:
        """Spin-wait for an operation in its asker's task; one that is not done by then is watched."""
        is_done = await self.port.spin(
            queue.stream, operation.event, lambda: self._is_alone() and not reply.is_done
        )
        if not is_done:
            if not reply.is_done:
                self.port.watch(queue.stream, operation.event)
        elif not operation.is_lost:
            self._reap(queue)

    def _poll(self, queue: StreamQueue, operation: InFlight) -> None:
        """Reply if the operation is done, or will be in a moment; else it is watched from now on."""
        if not self.port.poll(operation.event):
            self.port.watch(queue.stream, operation.event)
        elif not operation.is_lost:
            self._reap(queue)

    def reap(self) -> None:
        """Reply to everything that is done. Called on the Trio thread after a wake-up."""
        if self._leases.tails:
            self._leases.reap()
        for queue in tuple(self.queues.all):
            if queue.operations:
                self._reap(queue)

    def reap_ended(self) -> None:
        """Reply to operations that had ended well when the context was lost."""
        for queue in tuple(self.queues.all):
            operations, load = queue.operations, queue.load
            while operations and operations[0].event.is_done and operations[0].event.error is None:
                load.outstanding -= 1
                load.finished += 1
                self._finish(operations.popleft(), queue)

    def _reap(self, queue: StreamQueue) -> None:
        operations, load = queue.operations, queue.load
        was_full, finished = load.outstanding >= MOST_ON_A_STREAM, load.finished
        while operations and operations[0].event.is_done:
            load.outstanding -= 1
            load.finished += 1
            self._finish(operations.popleft(), queue)
        if load.finished == finished:
            return
        for other in tuple(self.queues.all) if was_full else (queue,):
            if other.load is load and other.changed is not None:
                other.notify()
        if queue.on_idle is not None:
            self.queues.sweep(queue)

    def _finish(self, operation: InFlight, queue: StreamQueue) -> None:
        launch, reply = operation.launch, operation.reply
        error = operation.event.error if operation.after is None else operation.failure()
        launch.is_in_flight = False
        if operation.has_grace:
            self._alarms.drop(operation)
        if reply is not None and not operation.is_lost:
            self.completed += 1
            if self._hooks:
                notify(self._hooks, launch, Phase.COMPLETE)
            if error is None:
                reply.set(None)
                if queue.on_progress is not None:
                    on_progress, queue.on_progress = queue.on_progress, None
                    on_progress()
            else:
                self._report(operation, reply, error)
            if self._hooks:
                notify(self._hooks, launch, Phase.REPLY)
        # After the reply: a task that it wakes runs later, and finds the memory given back.
        operation.vacate(self._memory.unpin)
        launch.forget()
        if self._hooks and not operation.is_lost:
            notify(self._hooks, launch, Phase.RELEASE)

    def watch(self, operation: InFlight, queue: StreamQueue) -> None:
        """Have the end of an operation seen that a thread has enqueued; the stream is others' again."""
        if operation.event.is_done:
            # Short work is over before the loop learns that it was enqueued: nothing else has to wake it.
            self._reap(queue)
        else:
            self.port.watch(queue.stream, operation.event)
        self.queues.notify(queue.load)

    def refuse(self, operation: InFlight, error: Exception) -> None:
        """Fail an operation that a thread has failed to enqueue: the part that it has enqueued still runs."""
        launch, reply = operation.launch, operation.reply
        operation.reply = None
        self.completed += 1
        notify(self._hooks, launch, Phase.COMPLETE)
        made = {block for block, _ in launch.allocations}
        # A library that refuses has not begun to change anything; a method of a program may have.
        is_damaged = classify(error) is FailureClass.SUSPECT or isinstance(error, Refused)
        self._spoil(launch, error, is_damaged=is_damaged)
        self._memory.release_all(made)
        if reply is not None:
            self._tell(operation, reply, error)
        notify(self._hooks, launch, Phase.REPLY)

    def _report(self, operation: InFlight, reply: Reply, error: Exception) -> None:
        self._spoil(operation.launch, error, is_damaged=True)
        self._tell(operation, reply, error)

    def _spoil(self, launch: Launch, error: Exception, *, is_damaged: bool) -> None:
        """Refuse the use of arrays that a failed operation has made, and of changed ones if damaged."""
        made = {block for block, _ in launch.allocations}
        is_damaged = is_damaged and not leaves_unchanged(error)
        for output in launch.outputs:
            if is_damaged or output.id in made:
                output.spoil(launch.name, error)

    def _tell(self, operation: InFlight, reply: Reply, error: Exception) -> None:
        self._context.locate(error, operation.launch)
        if classify(error) is FailureClass.SUSPECT:
            reply.fail_as_crash(error)
            if operation.crash is not None:
                operation.crash(error)
        else:
            # The event has the error as long as others may wait for it. The asker's frames, which this gets
            # when it is raised there, would keep the arrays that the operation was to make.
            told = bare(error).with_traceback(error.__traceback__)
            reply.fail(cast("Exception", told))

    def fail_all(self, cause: BaseException | None) -> None:
        """Fail everything in flight: the context is gone."""
        for queue in self.queues.all:
            for operation in queue.operations:
                operation.is_given_up = True
                if not operation.is_lost:
                    operation.is_lost = True
                    self._fail(operation, cause)
            # Only now: `wait_changed` of a drain or a lease gives up on it.
            queue.is_lost = True
            queue.notify()

    def _fail(self, operation: InFlight, cause: BaseException | None) -> None:
        launch, reply = operation.launch, operation.reply
        for block in launch.outputs:
            block.spoil(launch.name, cause)
        if reply is not None:
            notify(self._hooks, launch, Phase.COMPLETE)
            reply.fail(self._context.lost(launch, cause))
            notify(self._hooks, launch, Phase.REPLY)
        notify(self._hooks, launch, Phase.RELEASE)
