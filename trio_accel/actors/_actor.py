"""The base class of actors, an actor's context, and its timers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractContextManager, asynccontextmanager
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import outcome
import trio
from trio.lowlevel import enable_ki_protection

from ._cell import Cell, Terminated
from ._errors import MailboxFullError, safe_repr
from ._events import ActorRestarted
from ._handlers import ActorBase, HandlerTable, collect_handlers
from ._incarnation import Incarnation
from ._messages import AnyMessage, Envelope, EnvelopeState, Message
from ._numbers import is_number
from ._outcomes import DeferredReply
from ._ref import Ref, cell_behind
from ._supervisor import Spawner, Supervisor
from ._tree import ActorSnapshot, Reading

__all__ = ["Actor", "ActorContext", "RestartInfo", "Timer"]


class Timer:
    """A message that an actor sends to itself later. Made by `ActorContext.after` and `ActorContext.every`.

    It ends with the incarnation that made it, so later incarnations do not get its message.
    """

    # Invariant: the timer is in its incarnation's `timers` while a message from it may still be served.
    __slots__ = ("__weakref__", "_cell", "_due", "_incarnation", "_message", "_period", "_scope", "_sent")

    def __init__(
        self, cell: Cell, incarnation: Incarnation, message: AnyMessage, seconds: float, *, repeats: bool
    ) -> None:
        self._cell = cell
        self._incarnation = incarnation
        self._message = message
        self._due = trio.current_time() + seconds
        self._period = seconds if repeats else None
        self._scope = trio.CancelScope()
        # The last message, until the actor has served it.
        self._sent: Envelope | None = None
        incarnation.timers.add(self)
        incarnation.nursery.start_soon(self._run, name=f"timer of {cell.path}")

    def __repr__(self) -> str:
        how = "once" if self._period is None else f"every {self._period:g} s"
        return f"<Timer of {self._cell.path}: {safe_repr(self._message)}, {how}>"

    @enable_ki_protection
    def cancel(self) -> bool:
        """Stop the timer, and withdraw its message if one waits in the mailbox.

        Returns:
            Whether the timer was active. It is inactive after an earlier `cancel`, after the end of its
            incarnation, and from the moment when the actor begins to serve its only message.

        Raises:
            RuntimeError: You call this from another thread or Trio run.
        """
        self._cell.check_run("cancel")
        if self not in self._incarnation.timers:
            return False
        self._incarnation.timers.remove(self)
        self._scope.cancel(reason="the timer was cancelled")
        sent, self._sent = self._sent, None
        if sent is None:
            return True
        sent.on_done = None
        if sent.state == EnvelopeState.QUEUED:
            self._cell.mailbox.withdraw(sent)
            return True
        return self._period is not None

    @enable_ki_protection
    async def _run(self) -> None:
        with self._scope:
            await trio.sleep_until(self._due)
            self._send()
            while self._period is not None:
                # Ticks do not drift, and missed ticks are skipped.
                delay = trio.current_time() - self._due
                self._due += delay - delay % self._period + self._period
                await trio.sleep_until(self._due)
                if self._sent is None:
                    self._send()

    def _send(self) -> None:
        envelope = Envelope(self._cell, self._message, copy_context(), is_told=True)
        envelope.on_done = self._served
        self._sent = envelope
        try:
            # If the mailbox is full, the envelope waits for room, without a task.
            self._cell.mailbox.put(envelope, is_own=True)
        except MailboxFullError:
            # The mailbox has counted it as a dead letter and reported it to the observers.
            self._served()

    def _served(self, _: outcome.Outcome[object] | None = None) -> None:
        """Record that the actor served the message, or that the mailbox dropped it."""
        self._sent = None
        if self._period is None:
            self._incarnation.timers.discard(self)


def check_seconds(verb: str, seconds: float, *, is_period: bool) -> None:
    """Check a length of time.

    Raises:
        TypeError: `seconds` is not a number.
        ValueError: `seconds` is negative, infinite or NaN; or it is 0 for a period.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{verb}: seconds must be a number, got {safe_repr(seconds)}")
    if not (is_number(seconds, 0.0, sys.float_info.max) and (seconds > 0 or not is_period)):
        bound = "above 0" if is_period else "of at least 0"
        raise ValueError(f"{verb}: seconds must be a finite number {bound}, got {seconds!r}")


_RESERVED = frozenset({"name", "restart", "policy", "mailbox"})


class Actor(ActorBase):
    """State and handlers of an actor; one instance is one incarnation.

    Each restart calls ``__init__`` again with the same arguments. So make it cheap, and acquire
    resources in `lifespan` instead, because it can release them.

    Attributes:
        context: The actor's view of its surroundings; set before `lifespan` is entered.
        ends_together: Whether consecutively started actors of this class end at the same time, because they
            do not need each other. Otherwise actors end in reverse start order.
    """

    context: ActorContext
    __handlers__: ClassVar[HandlerTable] = {}

    if not TYPE_CHECKING:  # a type checker would find every attribute with it

        def __getattr__(self, name: str) -> object:
            if name == "context" or hasattr(Ref, name):
                cls = type(self).__name__
                spawn = f"ref = await system.spawn({cls}, ...), then await ref.ask(...)"
                raise AttributeError(f"{cls} gets {name!r} when it is spawned: {spawn}")
            # Repeat the look-up for its error, which a property may have raised.
            return object.__getattribute__(self, name)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # Skip the signature of `object.__init__`, because reading it takes 3 % of `import trio_accel`.
        signature = None if cls.__init__ is object.__init__ else inspect.signature(cls.__init__)
        if signature is not None and (taken := _RESERVED.intersection(signature.parameters)):
            advice = "the parameter another name" if len(taken) == 1 else "the parameters other names"
            raise TypeError(
                f"{cls.__name__}: __init__ takes {' and '.join(sorted(taken))}, which spawn() keeps for "
                f"itself; give {advice}"
            )
        if inspect.isasyncgenfunction(cls.lifespan) or inspect.iscoroutinefunction(cls.lifespan):
            raise TypeError(f"{cls.__name__}: lifespan must be decorated with @asynccontextmanager")
        cls.__handlers__ = collect_handlers(cls)

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        """Hold the resources of one incarnation: override as an async context manager.

        Code before ``yield`` runs before the first message. Code after it runs after the last message, when
        the actor's children have ended. A failure on either side is a crash.
        """
        yield


@attrs.frozen(kw_only=True)
class RestartInfo:
    """The reason for an incarnation.

    Attributes:
        number: 0 for the first incarnation, then counting up.
        error: The error that ended the previous incarnation. None for the first incarnation, after one that
            ended without an error, and once this one has ended.
    """

    number: int
    error: BaseException | None


@attrs.define(eq=False, repr=False)
class ActorContext(Spawner):
    """The surroundings of one incarnation.

    Call its methods on the Trio thread of its system; in another thread or run they raise `RuntimeError`.

    Attributes:
        restart: The reason for this incarnation.
    """

    _cell: Cell
    _incarnation: Incarnation
    restart: RestartInfo
    _supervisor_of_children: Callable[[], Supervisor]

    @property
    def path(self) -> str:
        """The actor's path, such as ``"demo/cpu:0/context"``."""
        return self._cell.path

    @property
    def ref(self) -> Ref[Any]:
        """The actor's own address, to pass to others."""
        return Ref(self._cell)

    @property
    def deadline(self) -> float:
        """The time on Trio's clock when the current request's caller gives up; infinity without a deadline.

        The handler's own cancel scope has this deadline, so the handler's requests to other actors end then
        too. If the handler starts a task elsewhere, pass the deadline on: ``trio.CancelScope(deadline=...)``.
        The deadline is infinite for a request that runs on without its caller (`abandon_on_cancel`).
        """
        current = self._cell.current
        if current is None:
            return float("inf")
        if current.last_poll is not None and not current.is_abandonable:
            # The request runs in the caller's task, which has not computed its deadline from its scopes yet.
            return trio.current_effective_deadline()
        return current.ends_at

    def _supervisor_of(self, actor_class: Callable[..., object]) -> Supervisor:
        if self._cell.incarnation is not self._incarnation:
            name = getattr(actor_class, "__name__", actor_class)
            raise RuntimeError(f"spawn: this incarnation of {self.path} has ended and starts no {name}")
        return self._supervisor_of_children()

    @enable_ki_protection
    def defer(self, *, on_cancel: Callable[[], None] | None = None) -> DeferredReply[Any]:
        """Keep the current request open: reply later, and serve the next message now.

        Return the `DeferredReply` from the handler. Any other return value is an error of the handler, unless
        you have already given the reply. The reply survives a restart of the actor, and fails when the actor
        ends for good.

        Args:
            on_cancel: Called on the Trio thread, once, when the caller is cancelled. If it raises, the error
                is logged and crashes the actor, unless this incarnation has ended; the reply stays open.

        Raises:
            RuntimeError: The actor is not serving a request, or the request is already deferred.
        """
        envelope = self._cell.current
        if envelope is None or envelope.is_told or envelope.state != EnvelopeState.RUNNING:
            raise RuntimeError(f"defer: actor {self.path} is serving no request that could be deferred")
        envelope.state = EnvelopeState.DEFERRED
        self._cell.outcomes.deferred.add(envelope)
        if on_cancel is not None:
            envelope.on_cancel = on_cancel
            envelope.on_failed_hook = self.crash
            if envelope.raise_cancel is not None:
                envelope.call_hook()
        return DeferredReply(envelope, self._cell.outcomes)

    @enable_ki_protection
    def stash(self, message: AnyMessage) -> None:
        """Set the current message aside, and let the handler return; the caller continues to wait.

        `unstash_all` and a restart put stashed messages back at the front of the mailbox. The handler's
        result is then not a reply. If the handler raises, the message is not stashed.

        Raises:
            RuntimeError: The actor is not serving this message.
            MailboxFullError: The stash is full (`MailboxOptions.stash`).
        """
        cell = self._cell
        envelope = cell.current
        if envelope is None or envelope.message is not message or envelope.state != EnvelopeState.RUNNING:
            raise RuntimeError(
                f"stash: actor {self.path} is not serving {safe_repr(message)}; stash what the handler got"
            )
        stashing = sum(served.state == EnvelopeState.STASHING for served in self._incarnation.serving)
        limit = cell.mailbox_options.stash
        if cell.mailbox.stashed + stashing >= limit:
            raise MailboxFullError(
                f"stash of {self.path} is full ({limit} messages); "
                "call unstash_all(), or raise MailboxOptions.stash",
                path=self.path,
            )
        # Stash it only when the handler has returned, because until then the handler may still fail.
        envelope.state = EnvelopeState.STASHING

    @enable_ki_protection
    def unstash_all(self) -> None:
        """Put the stashed messages back at the front of the mailbox, in their order."""
        self._cell.check_run("unstash_all")
        self._cell.mailbox.unstash_all()

    @enable_ki_protection
    def watch(self, ref: Ref[Any], *, to: Message[Any] | Callable[[Terminated], Message[Any]]) -> None:
        """Get a message when another actor has ended for good, or now if it already has.

        The message overtakes all others, even in a full mailbox. The watch ends with this incarnation, so
        call this in `lifespan` to repeat it after each restart.

        Args:
            ref: The actor to watch; a second watch of the same actor replaces the first.
            to: The message to this actor, or a function that makes it from a `Terminated`.

        Raises:
            TypeError: This actor does not handle the message. If this turns out only at the end of the
                watched actor, or if the function raises, this actor crashes.
        """
        self._cell.check_run("watch")
        cell_behind(ref).check_run("watch")
        if not callable(to):
            self._cell.check(to, Message, "watch")
        notify = partial(self._notify, cell_behind(ref), to, copy_context())
        cell_behind(ref).add_watcher(self._incarnation, notify)

    @enable_ki_protection
    def unwatch(self, ref: Ref[Any]) -> None:
        """Stop watching an actor."""
        self._cell.check_run("unwatch")
        cell_behind(ref).remove_watcher(self._incarnation)

    @enable_ki_protection
    def after(self, seconds: float, message: Message[Any], /) -> Timer:
        """Send a message to this actor after some seconds, on Trio's clock.

        The message enters the mailbox last, as if another task had sent it. If the mailbox is full, its
        overflow policy applies: by default the message waits for room; otherwise the mailbox drops a message
        as a dead letter. While you stop the actor with ``drain=True``, its timers continue as long as
        requests are open.

        The timer ends with this incarnation, which withdraws an unserved message. Call this in `lifespan` to
        repeat it after each restart. The message carries the caller's context variables. The order of timers
        for the same moment is undefined.

        Args:
            seconds: The delay; 0 means the next turn of the loop.
            message: The message.

        Raises:
            TypeError: This actor does not handle the message, or `seconds` is not a number.
            ValueError: `seconds` is negative, infinite or NaN.
            RuntimeError: This incarnation no longer serves messages, or you call this from another thread or
                Trio run.
        """
        return self._start_timer("after", seconds, message, repeats=False)

    @enable_ki_protection
    def every(self, seconds: float, message: Message[Any], /) -> Timer:
        """Send a message to this actor periodically, first after one period; otherwise as `after`.

        The ticks are multiples of the period from now, however long the actor takes. A tick is skipped while
        the previous message is unserved, so at most one message waits.

        Args:
            seconds: The period, above 0.
            message: The message to repeat.

        Raises:
            TypeError, RuntimeError: As for `after`.
            ValueError: `seconds` is 0, negative, infinite or NaN.
        """
        return self._start_timer("every", seconds, message, repeats=True)

    def _start_timer(self, verb: str, seconds: float, message: Message[Any], *, repeats: bool) -> Timer:
        self._cell.check(message, Message, verb)
        check_seconds(verb, seconds, is_period=repeats)
        if self._cell.incarnation is not self._incarnation or self._incarnation.has_served:
            raise RuntimeError(
                f"{verb}: this incarnation of {self.path} has ended and serves no {message.shown_name}"
            )
        return Timer(self._cell, self._incarnation, message, seconds, repeats=repeats)

    def _notify(
        self,
        watched: Cell,
        to: Message[Any] | Callable[[Terminated], Message[Any]],
        context: Context,
        terminated: Terminated,
    ) -> None:
        """Notify this actor of another's end; a failure must not affect the other actor, which calls this."""
        watched.remove_watcher(self._incarnation)
        try:
            message = to(terminated) if callable(to) else to
            self._cell.check(message, Message, "watch")
        except Exception as error:  # noqa: BLE001  # whatever it is, it is this actor's
            self.crash(error)
            return
        self._cell.mailbox.put_control(Envelope(self._cell, message, context, is_told=True))

    def part(self, name: str, *, queue_time: float = 0.0) -> AbstractContextManager[None]:
        """Present a block of the current task as a part of this actor's work.

        Observers and meters see the block as a message to an actor `name` below this actor, with `name` as
        its message type too. So it has a row in timelines, a span in traces, and its times in metrics. It
        fails or is cancelled as the block does. It costs nothing without observers and meters.

        Args:
            name: The name of the part; use only a few different names.
            queue_time: The time in seconds that the part has waited before.
        """
        return self._cell.outcomes.part(name, queue_time)

    @enable_ki_protection
    def show(self, actors: Callable[[], tuple[ActorSnapshot, ...]]) -> None:
        """Show actors of another process in the tree, as children of this incarnation.

        Args:
            actors: Called for every snapshot, on the Trio thread; it must be quick and must not raise.
        """
        self._incarnation.shown = actors

    @enable_ki_protection
    def show_note(self, note: Callable[[], str]) -> None:
        """Show a text in this incarnation's line of the tree.

        Args:
            note: Called for every snapshot, on the Trio thread; it must be quick and must not raise.
        """
        self._incarnation.note = note

    @enable_ki_protection
    def show_readings(self, readings: Callable[[], Iterable[Reading]]) -> None:
        """Show figures of this incarnation in snapshots, and so in metrics.

        Args:
            readings: Called for every snapshot, on the Trio thread; it must be quick and must not raise.
        """
        self._incarnation.readings = readings

    @enable_ki_protection
    def show_process(self, pid: int) -> None:
        """Show in the tree and in events that this incarnation works in another process.

        Args:
            pid: The process number.
        """
        self._cell.pid = pid

    @enable_ki_protection
    def report_progress(self) -> None:
        """Report to the supervisor that this incarnation has done some of its work.

        An actor that fails after progress is not in a crash loop. `Intensity.counts_progress` and
        `Policy.backoff_after_progress` define its supervisor's reaction; by default progress makes no
        difference (D75). A second report does nothing, nor does a report after the incarnation has ended.
        """
        cell = self._cell
        if cell.incarnation is self._incarnation and cell.progressed_at is None:
            cell.progressed_at = trio.current_time()

    @enable_ki_protection
    def observe_restarts(self, observer: Callable[[ActorRestarted], None]) -> None:
        """Observe restarts of this incarnation's children; the observer runs before the child's backoff.

        Args:
            observer: Called on the Trio thread; it must be quick and must not raise. A second observer
                replaces the first.
        """
        if self._cell.incarnation is self._incarnation:
            self._supervisor_of_children().on_restart = observer

    @property
    def is_stopping(self) -> bool:
        """Whether this actor was asked to end, and will not restart."""
        return self._cell.stop_reason is not None

    @enable_ki_protection
    def stop(self) -> None:
        """End this actor after the current message; even a permanent actor does not restart."""
        self._cell.check_run("stop")
        self._cell.request_stop("it stopped itself")

    @enable_ki_protection
    def finish(self) -> None:
        """End this incarnation after the current message, because its work is done.

        The restart type decides what follows: a permanent actor restarts and keeps its mailbox; a transient
        or temporary actor ends for good. Does nothing after the incarnation has ended, or while you stop it
        with ``drain=True``, because it then serves the queued messages.
        """
        self._cell.check_run("finish")
        if self._cell.incarnation is self._incarnation:
            self._incarnation.finish()

    @enable_ki_protection
    def crash(self, error: Exception) -> None:
        """Crash this incarnation before its next message, as if a handler had raised the error.

        Does nothing after the incarnation has ended.
        """
        self._cell.check_run("crash")
        if self._cell.incarnation is self._incarnation:
            self._incarnation.crash(error)
