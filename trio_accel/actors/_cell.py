"""The permanent part of an actor, across all its incarnations."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import attrs
import trio

from ._errors import ActorRestartingError, ActorStoppedError, describe, leaves, safe_repr
from ._events import ActorTerminated
from ._handlers import ActorBase, Handler, HandlerTable
from ._incarnation import Incarnation
from ._mailbox import Mailbox
from ._messages import (
    AnyMessage,
    AwaitedStart,
    Envelope,
    Message,
    Request,
    TaskEvent,
    cells,
    lend,
    running,
)
from ._options import MailboxOptions, Policy, Restart
from ._outcomes import Outcomes
from ._restarts import StartGate
from ._system_state import SystemState, check_run, thread_ident
from ._tree import ActorSnapshot

__all__ = ["Terminated"]

_logger = logging.getLogger("trio_accel.actors")

_MIN_UNWIND = 0.1
"""Minimum time in seconds for a cancelled actor to unwind, even if its grace is shorter."""


class CellState(enum.StrEnum):
    """State of an actor, as shown in the tree."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    QUARANTINED = "quarantined"
    TERMINATED = "terminated"


_NO_CHILDREN: Mapping[str, Cell] = MappingProxyType({})


@attrs.frozen(kw_only=True)
class Terminated:
    """The end of an actor.

    Attributes:
        path: Path of the actor.
        reason: The reason, in words.
        error: Error of the last incarnation, even if the actor was stopped before the next incarnation could
            start; None if the last incarnation was stopped or ended on its own.
    """

    path: str
    reason: str
    error: BaseException | None


@attrs.define(eq=False, repr=False)
class Cell:
    """One actor from spawn to its permanent end, as others refer to it: to send messages and to end it."""

    system: SystemState
    path: str
    actor_class: type[ActorBase]
    restart: Restart = attrs.field(kw_only=True)
    policy: Policy = attrs.field(kw_only=True)
    mailbox_options: MailboxOptions = attrs.field(kw_only=True)
    handlers: HandlerTable = attrs.field(init=False)
    outcomes: Outcomes = attrs.field(init=False)
    mailbox: Mailbox = attrs.field(init=False)
    state: CellState = CellState.STARTING
    incarnation: Incarnation | None = None
    # Children of the incarnation.
    children: Mapping[str, Cell] = _NO_CHILDREN
    number: int = -1
    # The process that does the last incarnation's work, if not this one.
    pid: int | None = None
    last_error: BaseException | None = None
    # The time when the current or last incarnation first made progress.
    progressed_at: float | None = None
    gate: StartGate = attrs.field(factory=StartGate)
    stop_reason: str | None = None
    is_draining: bool = False
    terminated: Terminated | None = None
    _cancel_reason: str | None = None
    _ended: TaskEvent | None = None
    _watchers: dict[Incarnation, Callable[[Terminated], None]] = attrs.field(
        factory=dict[Incarnation, Callable[[Terminated], None]], init=False
    )

    def __attrs_post_init__(self) -> None:
        self.handlers = self.actor_class.__handlers__
        self.outcomes = Outcomes(self.path, self.system, self.policy)
        self.mailbox = Mailbox(self.outcomes, self.handlers, self.mailbox_options)

    @property
    def current(self) -> Envelope | None:
        """The message that the current task is serving; None in tasks that do not belong to the actor."""
        incarnation, task = self.incarnation, trio.lowlevel.current_task()
        if incarnation is None or cells.get(task) is not self:
            return None
        # Group messages have their own tasks.
        return incarnation.grouped.get(task, incarnation.current)

    @contextmanager
    def acting_for(self, caller: trio.lowlevel.Task) -> Generator[None]:
        """Let the current task work for the actor, on the message of another of its tasks."""
        incarnation = self.incarnation
        with running(self) as task:
            envelope = None if incarnation is None else incarnation.grouped.get(caller)
            if incarnation is None or envelope is None:
                yield
                return
            incarnation.grouped[task] = envelope
            try:
                yield
            finally:
                del incarnation.grouped[task]

    @property
    def awaited(self) -> Envelope | AwaitedStart | None:
        """The current task's work that another actor may wait for: a message, or the actor's start."""
        return self.current or self.gate.awaited_start

    def check(self, message: AnyMessage, base: type, verb: str) -> Handler:
        """Return the handler of a message; raise if there is none, or if the message needs another verb."""
        if thread_ident() != self.system.thread:
            self.check_run(verb)
        handler = self.handlers.get(type(message))
        if handler is None or not isinstance(message, base):
            raise TypeError(f"{verb}: {self._what_is_wrong(message, base, verb)}")
        return handler

    def check_run(self, verb: str) -> None:
        """Raise `RuntimeError` in another thread or Trio run."""
        check_run(self.system.thread, verb, f"actor {self.path}")

    def _what_is_wrong(self, message: object, base: type, verb: str) -> str:
        name, message_repr = type(message).__name__, safe_repr(message)
        if isinstance(message, type) and issubclass(message, (Request, Message)):
            return f"{message.__name__} is a class; make a message of it: {message.__name__}(...)"
        if not isinstance(message, (Request, Message)):
            taken = sorted(f"{verb}({cls.__name__}(...))" for cls in self.handlers if issubclass(cls, base))
            calls = f": {', '.join(taken)}" if taken else ""
            return (
                f"{message_repr} is not a message; give an instance of a subclass of {base.__name__}{calls}"
            )
        if not isinstance(message, base):
            kind, use = ("Request", "ask()") if isinstance(message, Request) else ("Message", "tell()")
            return f"{name} is a {kind}, which goes with {use}; here a {base.__name__} is needed"
        message_names = ", ".join(sorted(cls.__name__ for cls in self.handlers)) or "no message"
        return (
            f"{self.actor_class.__name__} ({self.path}) does not handle {name}; "
            f"declare one with @handles({name}), or send what it handles: {message_names}"
        )

    def serve_at_once(self, envelope: Envelope, attempt: Callable[..., object]) -> bool:
        """Serve a message in the sender's task, on behalf of the actor's task, which waits for a message.

        Call it only while the mailbox is idle.

        Returns:
            Whether it was served; if not, nothing has changed.
        """
        assert self.incarnation is not None  # it is who waits
        # The actor's own task must not wake meanwhile, or two tasks would serve at once.
        self.mailbox.replace_receiver()
        task = trio.lowlevel.current_task()
        previous = lend(task, self)
        try:
            return self.incarnation.serve_at_once(envelope, attempt, task)
        finally:
            lend(task, previous)
            self.mailbox.restore_receiver()

    def request_stop(self, reason: str, *, drain: bool = False) -> None:
        """End after the current message, or after all queued messages; refuse new messages."""
        if self.stop_reason is None:
            self.stop_reason = reason
            self.is_draining = drain
        elif not drain:
            self.is_draining = False
        if self.state is CellState.RUNNING:
            self.state = CellState.STOPPING
        self.mailbox.refuse(f"actor {self.path} is stopping: {reason}")
        # An idle actor sleeps in its mailbox, so wake it to make it notice the stop.
        self.mailbox.wake()
        self.gate.shut(reason)

    def cancel(self, reason: str) -> None:
        """End now, and cancel the current messages."""
        if self._cancel_reason is None:
            self._cancel_reason = reason
        self.request_stop(reason)
        if self.incarnation is not None:
            self.incarnation.nursery.cancel_scope.cancel(reason=reason)

    @property
    def is_running(self) -> bool:
        """Whether the actor's incarnation accepts messages."""
        return self.state is CellState.RUNNING

    @property
    def is_quarantined(self) -> bool:
        """Whether the actor was abandoned, because it was cancelled but did not end."""
        return self.state is CellState.QUARANTINED

    def quarantine(self) -> None:
        """Abandon the actor because it was cancelled but did not end; fail its open requests."""
        if self.is_quarantined:
            return
        self.state = CellState.QUARANTINED
        self.system.quarantined += 1
        reason = f"actor {self.path} was cancelled and does not end; it is given up"
        _logger.error(reason, extra={"path": self.path})
        self.mailbox.close(reason, None)
        serving = () if self.incarnation is None else self.incarnation.serving
        for envelope in (*serving, *self.outcomes.deferred):
            self.outcomes.fail(envelope, ActorStoppedError(reason, path=self.path))

    def cancel_if_asked(self, scope: trio.CancelScope) -> None:
        """Cancel a starting incarnation if its end was already requested."""
        if self._cancel_reason is not None:
            scope.cancel(reason=self._cancel_reason)

    async def stop(self, reason: str, *, drain: bool = False) -> None:
        """Stop gracefully, then by cancellation; otherwise abandon the actor.

        Returns when the actor has ended, or when it was cancelled and did not end within its grace again. It
        is then in quarantine, and only the end of the system waits for it.
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
        """The time in seconds for a cancelled actor to unwind."""
        return max(self.policy.grace, _MIN_UNWIND)

    async def wait_terminated(self) -> Terminated:
        """Wait for the permanent end."""
        while self.terminated is None:
            if self._ended is None:
                self._ended = TaskEvent()
            await self._ended.wait()
        await trio.lowlevel.checkpoint()
        return self.terminated

    def add_watcher(self, watcher: Incarnation, notify: Callable[[Terminated], None]) -> None:
        """Call `notify` at the permanent end, or now if it has passed, unless the watcher ends before."""
        if self.terminated is not None:
            notify(self.terminated)
            return
        self._watchers[watcher] = notify
        watcher.watched.add(self)

    def remove_watcher(self, watcher: Incarnation) -> None:
        """Cancel the callback of a watcher."""
        watcher.watched.discard(self)
        self._watchers.pop(watcher, None)

    def snapshot(self, children: tuple[ActorSnapshot, ...]) -> ActorSnapshot:
        """Take a snapshot of this actor, with its children's snapshots."""
        error, incarnation = self.last_error, self.incarnation
        shown = incarnation.shown() if incarnation is not None and incarnation.shown is not None else ()
        return ActorSnapshot(
            path=self.path,
            actor_class=self.actor_class.__name__,
            state=str(self.state),
            incarnation=max(self.number, 0),
            pid=None if incarnation is None else self.pid,
            mailbox_depth=self.mailbox.depth,
            mailbox_peak=self.mailbox.peak,
            mailbox_waiting=self.mailbox.waiting,
            stashed=self.mailbox.stashed,
            dropped=self.mailbox.dropped,
            running=len(incarnation.serving) if incarnation is not None else 0,
            handled=self.outcomes.handled,
            failed=self.outcomes.failed,
            expired=self.outcomes.expired,
            deferred=len(self.outcomes.deferred),
            note=None if incarnation is None or incarnation.note is None else incarnation.note(),
            readings=()
            if incarnation is None or incarnation.readings is None
            else tuple([attrs.evolve(reading, path=self.path) for reading in incarnation.readings()]),
            last_error=None if error is None else describe(error),
            children=children + shown,
        )

    def begin_incarnation(self) -> Incarnation:
        """Create the next incarnation, which is current from now on."""
        self.number += 1
        self.pid = None
        self.progressed_at = None
        self.incarnation = Incarnation(self, self.number)
        return self.incarnation

    def end_incarnation(self) -> None:
        """Record that the incarnation has ended, and its children with it."""
        self.incarnation = None
        self.children = _NO_CHILDREN

    def resume(self) -> None:
        """Record that the incarnation accepts messages."""
        if not self.is_quarantined:
            self.state = CellState.RUNNING if self.stop_reason is None else CellState.STOPPING
        self.mailbox.resume()

    def suspend(self) -> None:
        """Let messages wait for the next incarnation, unless the end was requested."""
        if self.stop_reason is None:
            self.state = CellState.RESTARTING
            self.mailbox.suspend()

    def close(self, error: BaseException | None) -> None:
        """End for good, and refuse queued messages."""
        self.state = CellState.TERMINATED
        reason = self.stop_reason or (
            f"it failed: {describe(error)}" if error is not None else "it ended by itself"
        )
        self.terminated = Terminated(path=self.path, reason=reason, error=error)
        self.mailbox.close(f"actor {self.path} has ended: {reason}", error)
        for request in tuple(self.outcomes.deferred):
            cause = error or ActorStoppedError(f"actor {self.path} has ended: {reason}", path=self.path)
            self.outcomes.fail(request, self.cause_of(cause))

    def announce_end(self) -> None:
        """Notify everyone who waits for the permanent end."""
        terminated = self.terminated
        assert terminated is not None  # it is closed
        self.gate.end()
        if self._ended is not None:
            self._ended.set()
        watchers, self._watchers = self._watchers, {}
        for notify in tuple(watchers.values()):
            notify(terminated)
        if self.system.observers.is_anyone:
            self.system.observers.emit_life(
                ActorTerminated(
                    path=self.path, pid=self.pid, reason=terminated.reason, error=terminated.error
                )
            )

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the cause to report to a caller: for a cancellation, its reason."""
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
        # The supervisor has not yet decided whether the actor restarts.
        return ActorStoppedError(
            f"actor {self.path} ended: another of its messages or a child failed", path=self.path
        )
