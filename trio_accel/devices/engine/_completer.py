"""The end of operations in flight: detection, replies, and the release of their memory.

A cancelled caller waits for the end only during its grace.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar
from functools import partial
from typing import cast

import attrs
import trio

from ...actors import DirectReply, is_number
from ...backends.base import Refused
from ...backends.base.contract.ops import CopyFromHostSpec, CopyToHostSpec, HostUse
from ..base._errors import FailureClass, classify, leaves_unchanged
from ..base._host_pool import MAX_INLINE_BYTES
from ..base._port import CompletionPort, CompletionStrategy
from ..base._waits import Alarms
from ..operations._blocks import Block, bare
from ..operations._hooks import EngineHook, Phase, notify
from ..operations._operation import Launch
from ._context_state import ContextState
from ._in_flight import InFlight, MemoryInUse, Reply
from ._leases import Leases
from ._stream_queues import MOST_ON_A_STREAM, StreamQueue, StreamQueues

# Seconds between checks of a host array while it is being copied.
_COPYING = 0.001


class CancelGrace:
    """Limits how long a cancelled caller waits for its operation.

    Args:
        alarms: Calls back at the end of the grace. An operation's alarm is dropped when it is done, because
            the alarm keeps its arrays alive.
        seconds: The grace, unless the caller has chosen one.
    """

    def __init__(self, alarms: Alarms, seconds: float) -> None:
        self._alarms = alarms
        self._seconds = seconds

    def start(self, queue: StreamQueue, operation: InFlight, context: Context) -> None:
        """Start the grace of a cancelled caller with an operation in flight.

        Args:
            queue: The queue of the operation.
            operation: The operation.
            context: The context variables of the caller.
        """
        operation.has_grace = True
        if (asker := operation.launch.spec.asker) is not None:
            asker.has_left = True
        self._let_wait(operation, queue, grace_in(context, self._seconds))

    def _let_wait(self, operation: InFlight, queue: StreamQueue, seconds: float) -> None:
        deadline = trio.current_time() + seconds
        self._alarms.set(operation, deadline, lambda: self._leave(operation, queue))

    def _leave(self, operation: InFlight, queue: StreamQueue) -> None:
        """Let a cancelled caller leave; the operation and its buffers stay in flight."""
        is_free = _leave_hosts(operation.launch)
        if not is_free:
            if is_free is not None:
                self._let_wait(operation, queue, _COPYING)
            return
        operation.is_given_up = True
        if operation.reply is not None:
            operation.reply.cancelled()
        # A drain ignores operations without a caller, so it has to look again.
        queue.notify()


def _leave_hosts(launch: Launch) -> bool | None:
    """Detach an operation in flight from the program's host arrays, as far as possible.

    An unstarted copy is withdrawn if its target was made for it, and no other operation reads it. Arrays that
    an operation changes in place are read by others: for them, a private copy replaces a small host array.

    Returns:
        Whether the operation no longer uses any. False if that will be so soon, None if it may take as long
        as the operation.
    """
    is_seen = not launch.writes <= launch.new_blocks
    if launch.staged and not is_seen:
        # Do this first, because a kernel, perhaps code of the program, must not see missing data.
        launch.spec.is_withdrawn = True
    copies = [
        spec for spec in (launch.spec, *launch.staged) if isinstance(spec, (CopyFromHostSpec, CopyToHostSpec))
    ]
    is_free = True
    for item in launch.keep:
        if isinstance(item, (Block, tuple)):
            continue
        by = [spec for spec in copies if spec.host is item]
        if not by:
            # The operation itself uses the array while it runs.
            return None
        for spec in by:
            if spec.host.size:
                if spec.use is None:
                    return None
                is_free = _leave(spec.use, is_seen=is_seen) and is_free
    return is_free


def _leave(use: HostUse, *, is_seen: bool) -> bool:
    if not is_seen:
        return use.withdraw()
    return use.make_private(MAX_INLINE_BYTES)


_GRACE: ContextVar[float] = ContextVar("trio_accel.cancel_grace")


@contextmanager
def cancel_grace(seconds: float) -> Generator[None]:
    """Choose how long a cancelled caller waits, for the operations in the body.

    It takes precedence over ``DeviceOptions(cancel_grace=...)`` on every device. Tasks started in the body
    inherit it. It is read only when a caller is cancelled.

    >>> import trio_accel
    >>> with trio_accel.cancel_grace(5.0):
    ...     pass  # await trio_accel.linalg.matmul(a, b)

    Args:
        seconds: At least 0. ``math.inf`` waits until the operation has ended, as
            `trio.to_thread.run_sync` does.

    Raises:
        ValueError: `seconds` is not a number of at least 0.
    """
    if not is_number(seconds, 0.0):
        raise ValueError(f"cancel_grace: seconds must be a number of at least 0, got {seconds!r}")
    token = _GRACE.set(seconds)
    try:
        yield
    finally:
        _GRACE.reset(token)


def grace_in(context: Context, default: float) -> float:
    """Return the seconds chosen in a caller's context, or the default."""
    return context.get(_GRACE, default)


@attrs.define(eq=False)
class Completer:
    """Detects the ends of operations, and replies.

    Args:
        context: The context.
        queues: Its streams, with the operations in flight.
        memory: The blocks that they use.
        leases: The leases, which also have ends to detect.
        alarms: The alarms of operations with waiting cancelled callers.
        hooks: Receive every operation.
        is_alone: Returns whether the operation that is being launched is the only request.
        strategy: The way to learn of completions.

    Attributes:
        queues: The streams, with the operations in flight.
        port: Detects the ends of operations.
        completed: The number of completed operations, with or without an error.
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
    completed: int = 0

    def __attrs_post_init__(self) -> None:
        self.port = self._strategy.open(self.reap)

    def see_to(self, operation: InFlight, queue: StreamQueue, reply: Reply) -> None:
        """Let the caller poll for the end of a very short operation, or have the loop detect it (D38)."""
        port = self.port
        # D38: only a lone caller polls, because polls for one operation would delay the replies to others.
        if not (port.polls and self._is_alone()):
            port.watch(queue.stream, operation.event)
        elif port.is_quick:
            if not reply.poll_once_more(partial(self._poll, queue, operation)):
                self._poll(queue, operation)
        elif not (
            isinstance(reply, DirectReply)
            and port.may_spin(queue.stream)
            and reply.poll_first(partial(self._spin, queue, operation, reply))
        ):
            port.watch(queue.stream, operation.event)

    async def _spin(self, queue: StreamQueue, operation: InFlight, reply: DirectReply) -> None:
        """Spin-wait for an operation in its caller's task. If that takes too long, the port watches it."""
        is_done = False
        try:
            is_done = await self.port.spin(
                queue.stream, operation.event, lambda: self._is_alone() and not reply.is_done
            )
        finally:
            # Also if the await is closed while it polls.
            if not is_done and not reply.is_done:
                self.port.watch(queue.stream, operation.event)
        # The context may have been lost while the task polled. Then `fail_all` has replied.
        if is_done and not operation.is_lost:
            self._reap(queue)

    def _poll(self, queue: StreamQueue, operation: InFlight) -> None:
        """Reply if the operation is done, or will be in a moment. Otherwise the port watches it."""
        if not self.port.poll(operation.event):
            self.port.watch(queue.stream, operation.event)
        elif not operation.is_lost:
            self._reap(queue)

    def reap(self) -> None:
        """Reply to all completed operations. Called on the Trio thread after a wake-up."""
        if self._leases.tails:
            self._leases.reap()
        # Iterate over a copy, because a retired queue leaves the list with its last operation.
        for queue in tuple(self.queues.all):
            if queue.operations:
                self._reap(queue)

    def reap_ended(self) -> None:
        """Reply to operations that succeeded before the context was lost."""
        for queue in tuple(self.queues.all):
            operations, load = queue.operations, queue.load
            while operations and operations[0].event.is_done and operations[0].event.error is None:
                load.outstanding -= 1
                load.finished += 1
                self._finish(operations.popleft(), queue)

    def _reap(self, queue: StreamQueue) -> None:
        operations, load = queue.operations, queue.load
        was_full, finished = load.outstanding >= MOST_ON_A_STREAM, load.finished
        # A stream runs in order: while its first operation is not done, no later one is.
        while operations and operations[0].event.is_done:
            load.outstanding -= 1
            load.finished += 1
            self._finish(operations.popleft(), queue)
        if load.finished == finished:
            return
        # Queues of other libraries on the same stream may also have waited for room.
        for neighbour in tuple(self.queues.all) if was_full else (queue,):
            if neighbour.load is load and neighbour.changed is not None:
                neighbour.notify()
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
                launch.heal(None)
                reply.set(None)
                if queue.on_progress is not None:
                    # D75: only the first success of an incarnation is reported; later ones only pay for a
                    # check.
                    on_progress, queue.on_progress = queue.on_progress, None
                    on_progress()
            else:
                self._mark_damaged(launch, error, is_damaged=True)
                self._tell(operation, reply, error)
            if self._hooks:
                notify(self._hooks, launch, Phase.REPLY)
        # The memory is freed after the reply: a task that this wakes runs later, and finds it free.
        operation.vacate(self._memory.unpin)
        launch.forget()
        if self._hooks and not operation.is_lost:
            notify(self._hooks, launch, Phase.RELEASE)

    def watch(self, operation: InFlight, queue: StreamQueue) -> None:
        """Detect the end of an operation that a thread has enqueued, and open the stream to others again."""
        if operation.event.is_done:
            # Short work is done before the loop learns that it was enqueued, so nothing else would wake it.
            self._reap(queue)
        else:
            self.port.watch(queue.stream, operation.event)
        self.queues.notify(queue.load)

    def refuse(self, operation: InFlight, error: Exception) -> None:
        """Fail an operation that a thread failed to enqueue. Its enqueued part still runs."""
        launch, reply = operation.launch, operation.reply
        # Take the reply before `_tell`, which may lose the context: `fail_all` would reply a second time.
        operation.reply = None
        self.completed += 1
        notify(self._hooks, launch, Phase.COMPLETE)
        # A library that refuses has not changed anything; a program's own method may have.
        is_damaged = classify(error) is FailureClass.SUSPECT or isinstance(error, Refused)
        self._mark_damaged(launch, error, is_damaged=is_damaged)
        self._memory.release_all(launch.new_blocks)
        if reply is not None:
            self._tell(operation, reply, error)
        notify(self._hooks, launch, Phase.REPLY)

    def _mark_damaged(self, launch: Launch, error: Exception, *, is_damaged: bool) -> None:
        """Invalidate the arrays that a failed operation made, and the changed ones if they are damaged."""
        is_damaged = is_damaged and not leaves_unchanged(error)
        launch.mark_damaged(error, None if is_damaged else launch.new_blocks)

    def _tell(self, operation: InFlight, reply: Reply, error: Exception) -> None:
        # This may lose the context. The operation has already left its queue, or lost its reply there, so
        # `fail_all` skips it.
        self._context.locate(error, operation.launch)
        if classify(error) is FailureClass.SUSPECT:
            reply.fail_as_crash(error)
            if operation.crash is not None:
                operation.crash(error)
        else:
            # Others may still wait for the event, which keeps its error. The caller's frames, which are added
            # when the error is raised there, would keep the arrays that the operation was to make alive.
            bare_error = bare(error).with_traceback(error.__traceback__)
            reply.fail(cast("Exception", bare_error))

    def fail_all(self, cause: BaseException | None) -> None:
        """Fail everything in flight, because the context is lost."""
        for queue in self.queues.all:
            for operation in queue.operations:
                operation.is_given_up = True
                if not operation.is_lost:
                    operation.is_lost = True
                    if (asker := operation.launch.spec.asker) is not None:
                        # A kernel may still run: an inline kernel runs to its end.
                        asker.has_left = True
                    self._fail(operation, cause)
            # The queue counts as lost only now, because then a drain or a lease stops its `wait_changed`.
            queue.is_lost = True
            queue.notify()

    def _fail(self, operation: InFlight, cause: BaseException | None) -> None:
        launch, reply = operation.launch, operation.reply
        launch.mark_damaged(cause)
        if reply is not None:
            notify(self._hooks, launch, Phase.COMPLETE)
            reply.fail(self._context.lost(launch, cause))
            notify(self._hooks, launch, Phase.REPLY)
        notify(self._hooks, launch, Phase.RELEASE)
