"""The permanent part of an actor: its task, mailbox and counters, over all its incarnations."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ._actor import Actor
from ._envelope import AwaitedStart, Envelope
from ._errors import ActorRestartingError, ActorStoppedError
from ._events import ActorStarted, ActorTerminated
from ._failures import describe, is_fatal, leaves, safe_repr, single
from ._incarnation import Incarnation
from ._mailbox import Mailbox
from ._messages import AnyMessage, Message, Request
from ._options import MailboxOptions, Policy, Restart
from ._outcomes import Outcomes
from ._runs import check_run, thread_ident
from ._start_gate import StartGate
from ._tasks import cells, lend, running

if TYPE_CHECKING:
    from ._handlers import Handler, HandlerTable
    from ._supervisor import Supervisor
    from ._system_state import SystemState

__all__ = ["Cell", "CellState", "Terminated"]

_logger = logging.getLogger("trio_accel.actors")

_MIN_UNWIND = 0.1
"""Seconds that a cancelled actor gets to unwind even if its grace is shorter."""


class CellState(enum.StrEnum):
    """What an actor is doing, as the tree shows it."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    QUARANTINED = "quarantined"
    TERMINATED = "terminated"


@attrs.frozen(kw_only=True)
class Terminated:
    """The end of an actor.

    Attributes:
        path: Path of the actor.
        reason: Why it ended, in words.
        error: What its last incarnation failed with, also if it was stopped before the next could
            start; None if that was stopped or ended by itself.
    """

    path: str
    reason: str
    error: BaseException | None


class Cell:
    """One actor, from spawn to its permanent end.

    The cell's task shields itself: only its supervisor (or `Ref.cancel`) ends it, so that a
    cancelled program still stops its actors in order. The supervisor bounds that by the `grace`
    of each actor's policy.
    """

    __slots__ = (
        "_args",
        "_cancel_reason",
        "_ended",
        "_is_started",
        "_kwargs",
        "_watchers",
        "actor_class",
        "gate",
        "handlers",
        "incarnation",
        "is_draining",
        "last_error",
        "mailbox",
        "mailbox_options",
        "number",
        "outcomes",
        "path",
        "pid",
        "policy",
        "progressed_at",
        "restart",
        "state",
        "stop_reason",
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
        self.supervisor: Supervisor = supervisor
        self.system: SystemState = supervisor.system
        self.path: str = path
        self.actor_class: type[Actor] = actor_class
        self.handlers: HandlerTable = actor_class.__handlers__
        self.restart: Restart = restart
        self.policy: Policy = policy
        self.mailbox_options: MailboxOptions = mailbox
        self.outcomes: Outcomes = Outcomes(path, self.system, policy)
        self.mailbox: Mailbox = Mailbox(self.outcomes, self.handlers, mailbox)
        self.state: CellState = CellState.STARTING
        self.incarnation: Incarnation | None = None
        self.number: int = -1
        # Of the process in which the last incarnation does its work, if that is another one.
        self.pid: int | None = None
        self.last_error: BaseException | None = None
        # When the incarnation, or the one that has ended, first made progress.
        self.progressed_at: float | None = None
        self.gate: StartGate = StartGate()
        self.stop_reason: str | None = None
        self.is_draining: bool = False
        self.terminated: Terminated | None = None
        self._args = args
        self._kwargs = kwargs
        self._cancel_reason: str | None = None
        self._ended: trio.Event | None = None
        self._watchers: dict[Incarnation, Callable[[Terminated], None]] | None = None
        self._is_started = False

    @property
    def current(self) -> Envelope | None:
        """The message that the running task is serving; None in a task that is not the actor's own."""
        incarnation, task = self.incarnation, trio.lowlevel.current_task()
        if incarnation is None or cells.get(task) is not self:
            return None
        return incarnation.envelope_of(task) if incarnation.grouped else incarnation.current

    @property
    def awaited(self) -> Envelope | AwaitedStart | None:
        """What another may be waiting for that the running task works on: a message, or the actor's start."""
        return self.current or self.gate.awaited_start

    def check(self, message: AnyMessage, base: type, verb: str) -> Handler:
        """Find the handler of a message; refuse one that there is none for, or that is sent the wrong way."""
        if thread_ident() != self.system.thread:
            self.check_run(verb)
        handler = self.handlers.get(type(message))
        if handler is None or not isinstance(message, base):
            raise TypeError(f"{verb}: {self._what_is_wrong(message, base)}")
        return handler

    def check_run(self, verb: str) -> None:
        """Refuse another thread or Trio run."""
        check_run(self.system.thread, verb, f"actor {self.path}")

    def _what_is_wrong(self, message: object, base: type) -> str:
        name, given = type(message).__name__, safe_repr(message)
        if isinstance(message, type) and issubclass(message, (Request, Message)):
            return f"{message.__name__} is a class; make a message of it: {message.__name__}(...)"
        if not isinstance(message, (Request, Message)):
            return f"{given} is no message; give an instance of a subclass of {base.__name__}"
        if not isinstance(message, base):
            kind, use = ("Request", "ask()") if isinstance(message, Request) else ("Message", "tell()")
            return f"{name} is a {kind}, which goes with {use}; here a {base.__name__} is needed"
        known = ", ".join(sorted(cls.__name__ for cls in self.handlers)) or "no message"
        return (
            f"{self.actor_class.__name__} ({self.path}) has no handler for {name}; "
            f"declare one with @handles({name}), or send what it handles: {known}"
        )

    def serve_at_once(self, envelope: Envelope, attempt: Callable[..., object]) -> bool:
        """Serve a message in the task that sends it, in place of the actor's, which waits for one.

        Only while the mailbox is idle.

        Returns:
            Whether it was served; if not, nothing has happened.
        """
        assert self.incarnation is not None  # it is who waits
        self.mailbox.replace_receiver()
        task = trio.lowlevel.current_task()
        before = lend(task, self)
        try:
            return self.incarnation.serve_at_once(envelope, attempt, task)
        finally:
            lend(task, before)
            self.mailbox.restore_receiver()

    def request_stop(self, reason: str, *, drain: bool = False) -> None:
        """End after the message being served, or after all that are queued; take no new ones."""
        if self.stop_reason is None:
            self.stop_reason = reason
            self.is_draining = drain
        elif not drain:
            self.is_draining = False
        if self.state is CellState.RUNNING:
            self.state = CellState.STOPPING
        self.mailbox.refuse(f"actor {self.path} is stopping: {reason}")
        self.mailbox.wake()
        self.gate.shut(reason)

    def cancel(self, reason: str) -> None:
        """End now; the messages being served are cancelled."""
        if self._cancel_reason is None:
            self._cancel_reason = reason
        self.request_stop(reason)
        if self.incarnation is not None:
            self.incarnation.nursery.cancel_scope.cancel(reason=reason)

    @property
    def is_quarantined(self) -> bool:
        """Whether it was given up: cancelled, and it did not end."""
        return self.state is CellState.QUARANTINED

    def quarantine(self) -> None:
        """Give it up: it was cancelled and does not end. Nobody waits for its replies any more."""
        if self.is_quarantined:
            return
        self.state = CellState.QUARANTINED
        self.system.quarantined += 1
        why = f"actor {self.path} was cancelled and does not end; it is given up"
        _logger.error(why)
        self.mailbox.close(why, None)
        serving = () if self.incarnation is None else self.incarnation.serving
        for envelope in (*serving, *self.outcomes.deferred):
            self.outcomes.fail(envelope, ActorStoppedError(why, path=self.path))

    def cancel_if_asked(self, scope: trio.CancelScope) -> None:
        """Cancel an incarnation that begins although its end was asked for."""
        if self._cancel_reason is not None:
            scope.cancel(reason=self._cancel_reason)

    async def stop(self, reason: str, *, drain: bool = False) -> None:
        """Stop gracefully, then by cancellation; then give it up.

        Returns when it has ended, or when it was cancelled and did not end within its grace
        again: it is in quarantine then, and only the end of the system waits for it.
        """
        self.request_stop(reason, drain=drain)
        with trio.move_on_after(self.policy.grace):
            await self.wait_terminated()
            return
        self.cancel(f"{reason}; it did not stop within its grace of {self.policy.grace:g} s")
        with trio.move_on_after(self.unwind_grace):
            await self.wait_terminated()
            return
        self.quarantine()

    @property
    def unwind_grace(self) -> float:
        """Seconds that it gets to unwind once it is cancelled."""
        return max(self.policy.grace, _MIN_UNWIND)

    async def wait_terminated(self) -> Terminated:
        """Wait for the permanent end."""
        while self.terminated is None:
            if self._ended is None:
                self._ended = trio.Event()
            await self._ended.wait()
        await trio.lowlevel.checkpoint()
        return self.terminated

    def add_watcher(self, watcher: Incarnation, notify: Callable[[Terminated], None]) -> None:
        """Call back at the permanent end, unless the watcher ends before."""
        if self._watchers is None:
            self._watchers = {}
        self._watchers[watcher] = notify

    def remove_watcher(self, watcher: Incarnation) -> None:
        """Do not call back."""
        if self._watchers is not None:
            self._watchers.pop(watcher, None)

    def make_instance(self) -> Actor:
        """Make the instance of an incarnation."""
        return self.actor_class(*self._args, **self._kwargs)

    @enable_ki_protection
    async def run(self) -> None:
        """Run incarnations until the actor ends for good. This is the cell's task.

        Raises:
            ActorFailedError: The supervisor has to fail with this actor.
        """
        error: BaseException | None = None
        try:
            with trio.CancelScope(shield=True), running(self):
                while True:
                    error = None
                    error = await self._live()
                    if not self._is_started or self.stop_reason is not None:
                        break
                    if not await self.supervisor.next_incarnation(self, error):
                        break
        except BaseException as escalated:
            # What the supervisor fails with is caused by what this actor failed with.
            error = error or single(escalated)
            raise
        finally:
            self._terminate(error)

    async def _live(self) -> BaseException | None:
        """Run one incarnation to its end; returns what it failed with."""
        self.number += 1
        self.pid = None
        self.progressed_at = None
        incarnation = self.incarnation = Incarnation(self, self.number)
        error: BaseException | None = None
        try:
            await incarnation.run(self._has_started)
        except BaseException as raised:  # noqa: ASYNC103  # what is fatal is raised
            error = single(raised)
            if is_fatal(raised):
                raise
        finally:
            self.incarnation = None
        if error is not None:
            self.last_error = error
            if self._is_started:
                where = "" if self.pid is None else f" in process {self.pid}"
                # Of a message that was told, nobody else hears.
                over = "" if incarnation.told is None else f" over {incarnation.told}"
                level = logging.ERROR if over else logging.WARNING
                text = "actor %s%s crashed%s: %s"
                trace = None if isinstance(error, self.actor_class.expected_crashes) else error
                _logger.log(level, text, self.path, where, over, safe_repr(error), exc_info=trace)
        if self._is_started and self.stop_reason is None:
            self.state = CellState.RESTARTING
            self.mailbox.suspend()
        return error  # noqa: ASYNC910  # its caller checkpoints

    def _has_started(self) -> None:
        self._is_started = True
        if not self.is_quarantined:
            self.state = CellState.RUNNING if self.stop_reason is None else CellState.STOPPING
        self.mailbox.resume()
        if self.system.observers.is_anyone:
            self.system.observers.emit_life(
                ActorStarted(path=self.path, pid=self.pid, incarnation=self.number)
            )
        self.gate.begin()

    def _terminate(self, error: BaseException | None) -> None:
        self.state = CellState.TERMINATED
        reason = self.stop_reason or (
            f"it failed: {describe(error)}" if error is not None else "it ended by itself"
        )
        self.terminated = terminated = Terminated(path=self.path, reason=reason, error=error)
        self.mailbox.close(f"actor {self.path} has ended: {reason}", error)
        for request in tuple(self.outcomes.deferred):
            cause = error or ActorStoppedError(f"actor {self.path} has ended: {reason}", path=self.path)
            self.outcomes.fail(request, self.cause_of(cause))
        self.supervisor.forget(self)
        self.gate.end()
        if self._ended is not None:
            self._ended.set()
        watchers, self._watchers = self._watchers, None
        for notify in tuple((watchers or {}).values()):
            notify(terminated)
        if self.system.observers.is_anyone:
            self.system.observers.emit_life(
                ActorTerminated(path=self.path, pid=self.pid, reason=reason, error=error)
            )

    def cause_of(self, error: BaseException) -> BaseException:
        """What an asker is told that its request has ended with: of a cancellation, why it was cancelled."""
        if not any(isinstance(leaf, trio.Cancelled) for leaf in leaves(error)):
            return error
        if self._cancel_reason is not None:
            return ActorStoppedError(
                f"actor {self.path} was cancelled: {self._cancel_reason}", path=self.path
            )
        if self.stop_reason is not None:
            return ActorStoppedError(f"actor {self.path} has ended: {self.stop_reason}", path=self.path)
        if self.gate.swept is not None:
            return ActorRestartingError(
                f"actor {self.path} restarts: a sibling failed, and its strategy restarts both",
                path=self.path,
            )
        # Whether it is restarted is not decided yet.
        return ActorStoppedError(
            f"actor {self.path} ended: another of its messages or a child failed", path=self.path
        )
