"""The permanent part of an actor: its task, mailbox and counters, over all its incarnations."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import attrs
import outcome
import trio

from ._actor import Actor
from ._context import ActorContext, RestartInfo
from ._envelope import EXPIRED, Envelope, EnvelopeState, crash_error
from ._errors import ActorStoppedError
from ._failures import is_fatal, single
from ._mailbox import CONTROL, Mailbox
from ._options import Directive, MailboxOptions, Policy, Restart

if TYPE_CHECKING:
    from ._supervisor import Supervisor
    from ._system import System

__all__ = ["Cell", "CellState", "Terminated"]

_NEVER = float("inf")
_logger = logging.getLogger("trio_accel.actors")


class CellState(enum.StrEnum):
    """What an actor is doing, as the tree shows it."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    TERMINATED = "terminated"


@attrs.frozen(kw_only=True)
class Terminated:
    """The end of an actor.

    Attributes:
        path: Path of the actor.
        reason: Why it ended, in words.
        error: What made it fail; None if it was stopped or ended by itself.
    """

    path: str
    reason: str
    error: BaseException | None


class Cell:
    """One actor, from spawn to its permanent end.

    The cell's task shields itself once it has started: only its supervisor (or `Ref.cancel`)
    ends it, so that a cancelled program still stops its actors in order. The supervisor bounds
    that by the `grace` of each actor's policy.
    """

    __slots__ = (
        "_args",
        "_backoff_scope",
        "_base_context",
        "_cancel_reason",
        "_children",
        "_ended",
        "_kwargs",
        "_nursery",
        "_pending_crash",
        "_started",
        "_stop_reason",
        "actor_class",
        "attempt",
        "current",
        "deferred",
        "expired",
        "failed",
        "handled",
        "handlers",
        "incarnation",
        "last_error",
        "last_failure_time",
        "mailbox",
        "mailbox_options",
        "path",
        "policy",
        "restart",
        "state",
        "supervisor",
        "system",
        "terminated",
    )

    def __init__(
        self,
        supervisor: Supervisor,
        path: str,
        actor_class: type[Actor],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        *,
        restart: Restart,
        policy: Policy,
        mailbox: MailboxOptions,
    ) -> None:
        self.supervisor = supervisor
        self.system: System = supervisor.system
        self.path = path
        self.actor_class = actor_class
        self.handlers = actor_class.__handlers__
        self.restart = restart
        self.policy = policy
        self.mailbox_options = mailbox
        self.mailbox = Mailbox(path, mailbox)
        self.state = CellState.STARTING
        self.incarnation = 0
        self.handled = 0
        self.failed = 0
        self.expired = 0
        self.last_error: BaseException | None = None
        self.last_failure_time = float("-inf")
        self.attempt = 0
        self.current: Envelope | None = None
        self.deferred: set[Envelope] = set()
        self.terminated: Terminated | None = None
        self._args = args
        self._kwargs = kwargs
        self._base_context = copy_context()
        self._nursery: trio.Nursery | None = None
        self._children: Supervisor | None = None
        self._backoff_scope: trio.CancelScope | None = None
        self._ended: trio.Event | None = None
        self._stop_reason: str | None = None
        self._cancel_reason: str | None = None
        self._pending_crash: Exception | None = None
        self._started = False

    # -- what others ask of the cell ------------------------------------------------------

    @property
    def children(self) -> Supervisor | None:
        """The supervisor of this incarnation's children, if it has any."""
        return self._children

    def supervisor_of_children(self) -> Supervisor:
        """The supervisor of this incarnation's children, made on first use."""
        if self._nursery is None:
            raise RuntimeError(f"spawn: actor {self.path} has no running incarnation to hold children")
        if self._children is None:
            self._children = type(self.supervisor)(
                self.system, self.path, self._nursery, self.policy.intensity
            )
        return self._children

    def request_stop(self, reason: str) -> None:
        """End after the message being served; messages still queued are refused."""
        if self._stop_reason is None:
            self._stop_reason = reason
        if self.state is CellState.RUNNING:
            self.state = CellState.STOPPING
        self.mailbox.wake_for_control()
        if self._backoff_scope is not None:
            self._backoff_scope.cancel(reason=reason)

    def request_crash(self, error: Exception) -> None:
        """Crash the running incarnation before its next message."""
        if self._nursery is not None and self._pending_crash is None:
            self._pending_crash = error
            self.mailbox.wake_for_control()

    def cancel(self, reason: str) -> None:
        """End now; the message being served is cancelled."""
        if self._cancel_reason is None:
            self._cancel_reason = reason
        self.request_stop(reason)
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel(reason=reason)

    async def wait_terminated(self) -> Terminated:
        """Wait for the permanent end."""
        if self.terminated is None:
            if self._ended is None:
                self._ended = trio.Event()
            await self._ended.wait()
        else:
            await trio.lowlevel.checkpoint()
        assert self.terminated is not None
        return self.terminated

    # -- life -----------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run incarnations until the actor ends for good. This is the cell's task.

        Raises:
            Exception: The first incarnation could not start; the original error.
            ActorFailedError: The supervisor has to fail with this actor.
        """
        task = trio.lowlevel.current_task()
        self.system.cells[task] = self
        error: BaseException | None = None
        try:
            with trio.CancelScope() as scope:
                while True:
                    error = await self._run_incarnation(scope, task_status)
                    if not self._started:
                        break
                    delay = None
                    if self._stop_reason is None:
                        delay = self.supervisor.decide(self, error)
                    if delay is None:
                        break
                    await self._back_off(delay)
                    if self._stop_reason is not None:
                        break
        except BaseException as escalated:
            error = error or escalated
            raise
        finally:
            del self.system.cells[task]
            self._terminate(error)
        if not self._started and error is not None:
            raise error

    async def _run_incarnation(
        self, scope: trio.CancelScope, task_status: trio.TaskStatus[None]
    ) -> BaseException | None:
        """Run one incarnation to its end; returns what it failed with."""
        error: BaseException | None = None
        try:
            async with trio.open_nursery() as self._nursery:
                if self._cancel_reason is not None:
                    self._nursery.cancel_scope.cancel(reason=self._cancel_reason)
                actor = self.actor_class(*self._args, **self._kwargs)
                actor.context = context = ActorContext(
                    self, RestartInfo(number=self.incarnation, error=self.last_error)
                )
                try:
                    async with actor.lifespan(context):
                        try:
                            self._has_started(scope, task_status)
                            await self._serve(actor)
                        finally:
                            await self._stop_children()
                finally:
                    # Children spawned by a lifespan that failed while starting.
                    await self._stop_children()
        except BaseException as raised:
            error = single(raised)
            if is_fatal(raised):
                raise
        finally:
            self._nursery = self._children = self.current = self._pending_crash = None
            self.incarnation += 1
        if self._cancel_reason is not None and error is None:
            self._stop_reason = self._cancel_reason
        if error is not None:
            self.last_error = error
            if self._started:
                _logger.warning("actor %s crashed: %r", self.path, error, exc_info=error)
        return error

    def _has_started(self, scope: trio.CancelScope, task_status: trio.TaskStatus[None]) -> None:
        self.state = CellState.RUNNING if self._stop_reason is None else CellState.STOPPING
        if not self._started:
            self._started = True
            scope.shield = True
            task_status.started()

    async def _stop_children(self) -> None:
        if self._children is not None:
            # The supervisor bounds this by the children's own graces.
            with trio.CancelScope(shield=True):
                await self._children.stop_all("its supervisor ended")

    async def _serve(self, actor: Actor) -> None:
        mailbox, handlers, base = self.mailbox, self.handlers, self._base_context
        while self._stop_reason is None:
            envelope = await mailbox.receive(base)
            if envelope == CONTROL:
                if self._pending_crash is not None:
                    error, self._pending_crash = self._pending_crash, None
                    raise error
                continue
            assert isinstance(envelope, Envelope)
            self.current = envelope
            try:
                await self._dispatch(actor, handlers[type(envelope.message)], envelope)
            finally:
                self.current = None

    async def _dispatch(self, actor: Actor, handler: Callable[..., Any], envelope: Envelope) -> None:
        """Serve one message; its envelope is resolved or deferred when this returns or raises."""
        if envelope.is_cancelled:
            envelope.unwind()
            return
        if envelope.deadline != _NEVER and envelope.deadline <= trio.current_time():
            self.expired += 1
            envelope.resolve(outcome.Value(EXPIRED))
            return
        reply: object = None
        try:
            if envelope.is_told:
                reply = await handler(actor, envelope.message)
            else:
                with trio.CancelScope() as scope:
                    envelope.scope = scope
                    reply = await handler(actor, envelope.message)
                if scope.cancelled_caught:
                    self.deferred.discard(envelope)
                    envelope.unwind()
                    return
                envelope.scope = None
        except BaseException as error:
            self.failed += 1
            if not self._is_reply(envelope, error):
                self._fail(envelope, error)
                raise
        else:
            self.handled += 1
            if envelope.state is not EnvelopeState.DEFERRED:
                envelope.resolve(outcome.Value(reply))

    def _is_reply(self, envelope: Envelope, error: BaseException) -> bool:
        """Whether the policy lets the actor live on: then the asker gets the exception itself."""
        if is_fatal(error) or self.policy.directive_for(error) is not Directive.RESUME:
            return False
        if envelope.is_told or not envelope.fail(error):
            _logger.warning("%s resumed after %r in %s", self.path, error, envelope.message.operation)
        self.deferred.discard(envelope)
        return True

    def _fail(self, envelope: Envelope, error: BaseException) -> None:
        self.deferred.discard(envelope)
        if is_fatal(error):
            cause: BaseException = ActorStoppedError(
                f"actor {self.path} was cancelled: {self._cancel_reason or 'its supervisor ended'}",
                path=self.path,
            )
        else:
            cause = error
        envelope.fail(crash_error(self.path, envelope.message, cause))

    async def _back_off(self, delay: float) -> None:
        self.state = CellState.RESTARTING
        with trio.CancelScope() as self._backoff_scope:
            if delay > 0:
                await trio.sleep(delay)
            else:
                # A restart loop must let others run, and see a cancellation.
                await trio.lowlevel.checkpoint()
        self._backoff_scope = None

    def _terminate(self, error: BaseException | None) -> None:
        self.state = CellState.TERMINATED
        reason = self._stop_reason or (f"it failed: {error!r}" if error is not None else "it ended")
        self.terminated = Terminated(path=self.path, reason=reason, error=error)
        for envelope in self.mailbox.close(f"actor {self.path} has ended: {reason}"):
            stopped = ActorStoppedError(
                f"actor {self.path} ended before it came to {envelope.message.operation}: {reason}",
                path=self.path,
            )
            stopped.__cause__ = error
            envelope.fail(stopped)
        for envelope in self.deferred:
            cause = error or ActorStoppedError(f"actor {self.path} has ended: {reason}", path=self.path)
            envelope.fail(crash_error(self.path, envelope.message, cause))
        self.deferred.clear()
        self.supervisor.forget(self)
        if self._ended is not None:
            self._ended.set()
