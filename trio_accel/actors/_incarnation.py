"""One incarnation of an actor: how it serves messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import Context
from typing import Protocol

import attrs
import outcome
import trio
from trio.lowlevel import enable_ki_protection

from ._errors import check_printable, drop_frames, is_fatal
from ._handlers import UNAVAILABLE, ActorBase, Handler, HandlerGroup, HandlerTable
from ._mailbox import Mailbox
from ._messages import EXPIRED, Envelope, EnvelopeState, Party, TaskEvent, running
from ._outcomes import DeferredReply, Outcomes
from ._tree import ActorSnapshot, Reading

_NEVER = float("inf")


class Host(Party, Protocol):
    """The interface of a cell to its incarnation."""

    handlers: HandlerTable
    outcomes: Outcomes
    stop_reason: str | None
    is_draining: bool

    @property
    def mailbox(self) -> Mailbox:
        """The queue of waiting messages."""
        ...

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the cause of a request's end to report to its caller."""
        ...


class _Watched(Protocol):
    def remove_watcher(self, watcher: Incarnation) -> None: ...


class _Timer(Protocol):
    def cancel(self) -> bool: ...


@attrs.define(eq=False, repr=False)
class Incarnation:
    """One incarnation: serves the messages of an actor until it crashes, finishes, or is asked to end."""

    cell: Host
    number: int
    outcomes: Outcomes = attrs.field(init=False)
    actor: ActorBase = attrs.field(init=False)
    nursery: trio.Nursery = attrs.field(init=False)
    current: Envelope | None = None
    pending_crash: BaseException | None = None
    is_finished: bool = False
    # The name of a one-way message that crashed it, for the log, because no caller gets the error.
    crash_message: str | None = None
    watched: set[_Watched] = attrs.field(factory=set[_Watched])
    # Timers that may still send a message; cancelled when this incarnation ends (D121).
    timers: set[_Timer] = attrs.field(factory=set[_Timer])
    # Whether it has stopped serving messages.
    has_served: bool = False
    # Returns the actors below this one in other processes, for the tree.
    shown: Callable[[], tuple[ActorSnapshot, ...]] | None = None
    # Returns a text about this incarnation, for the tree.
    note: Callable[[], str] | None = None
    # Returns figures about this incarnation, for the tree.
    readings: Callable[[], Iterable[Reading]] | None = None
    # Messages of handler groups, by the tasks that serve them.
    grouped: dict[trio.lowlevel.Task, Envelope] = attrs.field(
        factory=dict[trio.lowlevel.Task, Envelope], init=False
    )
    _running: dict[HandlerGroup, int] = attrs.field(factory=dict[HandlerGroup, int])
    _group_left: TaskEvent | None = None

    def __attrs_post_init__(self) -> None:
        self.outcomes = self.cell.outcomes

    @property
    def serving(self) -> tuple[Envelope, ...]:
        """The messages being served now."""
        current = () if self.current is None else (self.current,)
        # Several tasks may work on a message.
        return tuple(dict.fromkeys((*self.grouped.values(), *current)))

    def crash(self, error: BaseException) -> None:
        """Crash before the next message."""
        if self.pending_crash is None:
            self.pending_crash = error
            # The actor's own task raises the error, and may be asleep in the mailbox.
            self.cell.mailbox.wake()

    def finish(self) -> None:
        """End before the next message, without an error, unless a crash was requested first."""
        if self.pending_crash is None:
            self.is_finished = True
            self.cell.mailbox.wake()

    def unwatch_all(self) -> None:
        """Stop watching all other actors."""
        for watched in tuple(self.watched):
            watched.remove_watcher(self)

    def end_serving(self) -> None:
        """Cancel the timers, because this incarnation no longer serves messages."""
        self.has_served = True
        for timer in tuple(self.timers):
            timer.cancel()

    async def serve(self, idle_context: Context) -> None:  # noqa: ASYNC910  # the mailbox checkpoints
        """Serve messages until the incarnation ends.

        Args:
            idle_context: The context to wait in.

        Raises:
            BaseException: The error that crashed the incarnation.
        """
        cell, mailbox, handlers = self.cell, self.cell.mailbox, self.cell.handlers
        task = trio.lowlevel.current_task()
        while self._drains_on() if cell.stop_reason is not None else not self.is_finished:
            # An idle actor must not keep its last message alive.
            envelope = None
            envelope = await mailbox.receive(task, idle_context)
            if envelope is None:
                if self.pending_crash is not None:
                    # Raised here, in the actor's own task: the crash may have come from another task.
                    error, self.pending_crash = self.pending_crash, None
                    raise error
                continue
            handler = handlers[type(envelope.message)]
            if handler.group is not None:
                await self._start_grouped(handler, handler.group, envelope)
                continue
            self.current = envelope
            try:
                if handler.attempt is None:
                    await self._dispatch(handler, envelope, task)
                    continue
                envelope = None
                envelope = self._serve_row(task)
                if envelope is not None:
                    await self._dispatch(handlers[type(envelope.message)], envelope, task, was_tried=True)
            finally:
                self.current = None
        # Wait for group handlers after the last message, because they have already started.
        while any(self._running.values()):
            await self._wait_group()

    def _drains_on(self) -> bool:
        """Return whether a draining incarnation still has messages, or open requests that may send more."""
        cell = self.cell
        if not cell.is_draining:
            return False
        if self.outcomes.deferred:
            # A drain also waits for deferred replies, asleep in the mailbox.
            self.outcomes.on_settled = cell.mailbox.wake
        return bool(self.outcomes.deferred) or any(self._running.values()) or not cell.mailbox.is_empty

    def _serve_row(self, task: trio.lowlevel.Task) -> Envelope | None:
        """Serve the current message and its successors without waiting; return the first that must wait."""
        mailbox, handlers = self.cell.mailbox, self.cell.handlers
        while (envelope := self.current) is not None:
            attempt = handlers[type(envelope.message)].attempt
            if attempt is None or not self._serve_now(attempt, envelope, task):
                return envelope
            self.current = mailbox.receive_next()
        return None

    def _serve_now(
        self, attempt: Callable[..., object], envelope: Envelope, task: trio.lowlevel.Task
    ) -> bool:
        """Serve one message without waiting, as `_dispatch` does; False if it has started but has to wait."""
        if (envelope.raise_cancel is not None or envelope.deadline != _NEVER) and self._is_over(envelope):
            return True
        if self.outcomes.observers.sees_messages:
            self.outcomes.observe_start(envelope)
        try:
            reply = self._try(attempt, envelope, task)
            if reply is UNAVAILABLE:
                return False
            self._returned(envelope, reply)
        except BaseException as error:  # noqa: ASYNC103  # what is fatal is raised
            if not self._fail(envelope, error):
                raise
        return True  # noqa: ASYNC104  # it is no fatal one

    async def _dispatch(  # noqa: C901  # calls that would make it shorter take as long as what they do
        self, handler: Handler, envelope: Envelope, task: trio.lowlevel.Task, *, was_tried: bool = False
    ) -> None:
        """Serve one message; its envelope is resolved, deferred or stashed when this returns or raises.

        Args:
            handler: The message's handler.
            envelope: The message.
            task: The calling task.
            was_tried: Whether the handler's `attempt` was already called, and has to wait.
        """
        outcomes = self.outcomes
        if handler.attempt is None:
            if (envelope.raise_cancel is not None or envelope.deadline != _NEVER) and self._is_over(envelope):
                return  # noqa: ASYNC910  # the mailbox checkpoints
            if outcomes.observers.sees_messages:
                outcomes.observe_start(envelope)
        elif not was_tried and self._serve_now(handler.attempt, envelope, task):
            return  # noqa: ASYNC910  # the mailbox checkpoints
        reply: object = None
        try:
            if handler.attempt is not None:
                await _take_context(task, envelope.context)
            running = handler.function(self.actor, envelope.message)
            if envelope.is_told or envelope.on_done is not None:
                # It does not have a caller that could cancel it.
                reply = await running
            else:
                with trio.CancelScope() as scope:
                    envelope.run_in(scope)
                    if envelope.deadline != _NEVER:
                        # D132: Trio passes the deadline to inner scopes, so the handler's own requests end
                        # then too.
                        scope.deadline = envelope.ends_at
                    reply = await running
                if scope.cancelled_caught:
                    outcomes.end_cancelled(envelope)
                    return
                # The handler has returned, so a later cancellation of the caller must not cancel the scope.
                envelope.scope = None
            self._returned(envelope, reply)
        except BaseException as error:  # noqa: ASYNC103  # what is fatal is raised
            if not self._fail(envelope, error):
                raise
            return  # noqa: ASYNC104, ASYNC910  # it is no fatal one

    def serve_at_once(
        self, envelope: Envelope, attempt: Callable[..., object], task: trio.lowlevel.Task
    ) -> bool:
        """Serve a message without waiting, in a task other than the actor's; see `Cell.serve_at_once`."""
        if self.outcomes.observers.sees_messages:
            envelope.queued_at = self.outcomes.observers.now()
            self.outcomes.observe_start(envelope)
        envelope.state = EnvelopeState.RUNNING
        self.current = envelope
        try:
            reply = self._try(attempt, envelope, task)
            if reply is not UNAVAILABLE:
                self._returned(envelope, reply)
                return True
        except BaseException as error:  # noqa: ASYNC103, BLE001  # the actor's task crashes with it
            if not self._fail(envelope, error):
                drop_frames(error)
                self.crash(error)
            return True  # noqa: ASYNC104  # and what is fatal raised by it
        finally:
            self.current = None
        # The attempt would have to wait and did nothing, so the actor's own task serves the message.
        envelope.state = EnvelopeState.QUEUED
        return False

    def _try(self, attempt: Callable[..., object], envelope: Envelope, task: trio.lowlevel.Task) -> object:
        """Serve a message without waiting, in its context; the task must be the current one."""
        if task.context is envelope.context:
            return attempt(self.actor, envelope.message)
        return envelope.context.run(attempt, self.actor, envelope.message)

    def _fail(self, envelope: Envelope, error: BaseException) -> bool:
        """Settle a message after its handler raised; return whether the actor continues."""
        self.outcomes.failed += 1
        if self.outcomes.reply_with(envelope, error):
            return True
        self.outcomes.fail(envelope, self.cell.cause_of(error))
        if envelope.is_told and not is_fatal(error):
            self.crash_message = envelope.message.operation
        return False

    def _returned(self, envelope: Envelope, reply: object) -> None:
        """Settle a message after its handler returned, unless it is deferred.

        Raises:
            RuntimeError: The request is deferred, and the handler returned something other than its reply.
        """
        outcomes, state = self.outcomes, envelope.state
        if state == EnvelopeState.RUNNING:
            outcomes.handled += 1
            envelope.resolve(outcome.Value(reply))
            if outcomes.observers.sees_messages:
                outcomes.observe_end(envelope)
            return
        if state == EnvelopeState.STASHING:
            if envelope.is_cancelled:
                outcomes.unwind(envelope)
            else:
                self.cell.mailbox.stash(envelope)
            return
        if state == EnvelopeState.DEFERRED and not _is_reply_to(reply, envelope):
            # D87: a handler that returns something else may have forgotten the reply, and its caller would
            # wait forever.
            raise RuntimeError(
                f"the handler of {envelope.message.shown_name} in {envelope.cell.path} deferred its reply "
                f"and returned {type(reply).__name__}; return what self.context.defer() returned, or do not "
                "defer"
            )
        outcomes.handled += 1

    def _is_over(self, envelope: Envelope) -> bool:
        """Return whether a request must not run: its caller was cancelled or its deadline has passed."""
        outcomes = self.outcomes
        if envelope.is_cancelled:
            outcomes.unwind(envelope)
            return True
        if envelope.deadline != _NEVER and envelope.deadline <= trio.current_time():
            outcomes.expired += 1
            outcomes.observe_drop(envelope, "its deadline had passed")
            envelope.resolve(outcome.Value(EXPIRED))
            return True
        return False

    async def _start_grouped(self, handler: Handler, group: HandlerGroup, envelope: Envelope) -> None:  # noqa: ASYNC910  # the mailbox checkpoints
        """Serve a message concurrently with others, as soon as its group has a free slot."""
        counts = self._running
        try:
            with trio.CancelScope() as scope:  # noqa: ASYNC912  # there may be nothing to wait for
                envelope.run_in(scope)
                while counts.get(group, 0) >= group.limit:
                    await self._wait_group()
                    await trio.lowlevel.checkpoint_if_cancelled()
        except BaseException:
            # The message has not started: the next incarnation serves it, or it is refused with the queue.
            if envelope.is_cancelled:
                self.outcomes.unwind(envelope)
            else:
                self.cell.mailbox.put_back(envelope)
            raise
        if scope.cancelled_caught:
            self.outcomes.unwind(envelope)
            return  # noqa: ASYNC910  # the mailbox checkpoints
        envelope.scope = None
        counts[group] = counts.get(group, 0) + 1
        self.nursery.start_soon(self._run_grouped, handler, group, envelope)

    @enable_ki_protection
    async def _run_grouped(self, handler: Handler, group: HandlerGroup, envelope: Envelope) -> None:
        with running(self.cell) as task:
            self.grouped[task] = envelope
            try:
                await self._dispatch(handler, envelope, task)
            except BaseException as error:
                check_printable(error)
                raise
            finally:
                del self.grouped[task]
                self._running[group] -= 1
                if self._group_left is not None:
                    self._group_left.set()
                # A drain also waits for group handlers, asleep in the mailbox.
                if self.cell.is_draining:
                    self.cell.mailbox.wake()

    async def _wait_group(self) -> None:
        """Wait until a handler of any group has ended."""
        self._group_left = TaskEvent()
        await self._group_left.wait()
        self._group_left = None


async def _take_context(task: trio.lowlevel.Task, context: Context) -> None:  # noqa: ASYNC910  # it is the task's already
    """Run the current task in a context from now on."""
    if task.context is not context:
        # Takes effect at the checkpoint.
        task.context = context
        await trio.lowlevel.cancel_shielded_checkpoint()


def _is_reply_to(reply: object, envelope: Envelope) -> bool:
    return isinstance(reply, DeferredReply) and reply.is_of(envelope)
