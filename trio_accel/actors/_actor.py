"""The base class of actors, what one sees of its surroundings, and its timers."""

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
    """A message that an actor tells itself later. Made by `ActorContext.after` and `ActorContext.every`.

    It ends with the incarnation that made it: no later one is told its message.
    """

    # Invariant: it is among the timers of its incarnation while a message of it may still be served.
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
        # The last message, until it was served.
        self._sent: Envelope | None = None
        incarnation.timers.add(self)
        incarnation.nursery.start_soon(self._run, name=f"timer of {cell.path}")

    def __repr__(self) -> str:
        how = "once" if self._period is None else f"every {self._period:g} s"
        return f"<Timer of {self._cell.path}: {safe_repr(self._message)}, {how}>"

    @enable_ki_protection
    def cancel(self) -> bool:
        """Tell nothing any more: a message that waits in the mailbox is taken out of it.

        Returns:
            Whether it was not over. It is over when it was cancelled before, when its incarnation has ended,
            or when its only message is being served or was.

        Raises:
            RuntimeError: Called from another thread or Trio run.
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
                # The times of the ticks do not drift; those that have passed meanwhile are left out.
                late = trio.current_time() - self._due
                self._due += late - late % self._period + self._period
                await trio.sleep_until(self._due)
                if self._sent is None:
                    self._send()

    def _send(self) -> None:
        envelope = Envelope(self._cell, self._message, copy_context(), is_told=True)
        envelope.on_done = self._served
        self._sent = envelope
        try:
            # It may have to wait for room in the mailbox, without a task.
            self._cell.mailbox.put(envelope, is_own=True)
        except MailboxFullError:
            # A dead letter, which was counted and told to the observers.
            self._served()

    def _served(self, _: outcome.Outcome[object] | None = None) -> None:
        """Note that the message was served, or dropped by the mailbox."""
        self._sent = None
        if self._period is None:
            self._incarnation.timers.discard(self)


def check_seconds(verb: str, seconds: float, *, is_period: bool) -> None:
    """Refuse what is no length of time.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative, infinite or not a number; or a period of 0.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{verb}: seconds must be a number, got {safe_repr(seconds)}")
    if not (is_number(seconds, 0.0, sys.float_info.max) and (seconds > 0 or not is_period)):
        least = "above 0" if is_period else "of at least 0"
        raise ValueError(f"{verb}: seconds must be a finite number {least}, got {seconds!r}")


_RESERVED = frozenset({"name", "restart", "policy", "mailbox"})


class Actor(ActorBase):
    """State and handlers of an actor; one instance is one incarnation.

    ``__init__`` is run again at each restart with the same arguments, so it must be cheap and
    must not keep anything that has to be given back: that belongs into `lifespan`.

    Attributes:
        context: The actor's view of its surroundings; set before `lifespan` is entered.
        ends_together: Whether actors of this class that were started one after the other end at the same
            time, as none of them needs another. Otherwise actors end in reverse start order.
    """

    context: ActorContext
    __handlers__: ClassVar[HandlerTable] = {}

    if not TYPE_CHECKING:  # a type checker would find every attribute with it

        def __getattr__(self, name: str) -> object:
            if name == "context" or hasattr(Ref, name):
                cls = type(self).__name__
                spawn = f"ref = await system.spawn({cls}, ...), then await ref.ask(...)"
                raise AttributeError(f"{cls} gets {name!r} when it is spawned: {spawn}")
            # The look-up is repeated for its error, which may be one of a property.
            return object.__getattribute__(self, name)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # The signature of `object.__init__` is left out, because reading it takes 3 % of `import trio_accel`.
        own = None if cls.__init__ is object.__init__ else inspect.signature(cls.__init__)
        if own is not None and (taken := _RESERVED.intersection(own.parameters)):
            what = "the parameter another name" if len(taken) == 1 else "the parameters other names"
            raise TypeError(
                f"{cls.__name__}: __init__ takes {' and '.join(sorted(taken))}, which spawn() keeps for "
                f"itself; give {what}"
            )
        if inspect.isasyncgenfunction(cls.lifespan) or inspect.iscoroutinefunction(cls.lifespan):
            raise TypeError(f"{cls.__name__}: lifespan must be decorated with @asynccontextmanager")
        cls.__handlers__ = collect_handlers(cls)

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None]:
        """Hold the resources of one incarnation: override as an async context manager.

        Code before ``yield`` runs before the first message, code behind it after the
        last one, when the actor's children have ended. A failure on either side is a crash.
        """
        yield


@attrs.frozen(kw_only=True)
class RestartInfo:
    """Reason of this incarnation.

    Attributes:
        number: 0 for the first incarnation, then counting up.
        error: The error that ended the previous incarnation; None for the first, if it ended by itself, and
            once this one has ended.
    """

    number: int
    error: BaseException | None


@attrs.define(eq=False, repr=False)
class ActorContext(Spawner):
    """The surroundings of one incarnation.

    Its methods are for the Trio thread of its system; in another thread or run they raise `RuntimeError`.

    Attributes:
        restart: Why this incarnation exists.
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
        """The actor's own address, to hand out to others."""
        return Ref(self._cell)

    @property
    def deadline(self) -> float:
        """When the asker being served gives up, on Trio's clock; infinity without a deadline.

        The handler's own cancel scope has it, so what the handler asks of others ends then, too. A task that
        the handler starts elsewhere has to be given it: ``trio.CancelScope(deadline=...)``. It is infinite
        for a request that its asker leaves to itself (`abandon_on_cancel`).
        """
        current = self._cell.current
        if current is None:
            return float("inf")
        if current.last_poll is not None and not current.is_abandonable:
            # It is served in the task that asks, whose scopes were not looked at before.
            return trio.current_effective_deadline()
        return current.ends_at

    def _supervisor_of(self, actor_class: Callable[..., object]) -> Supervisor:
        if self._cell.incarnation is not self._incarnation:
            name = getattr(actor_class, "__name__", actor_class)
            raise RuntimeError(f"spawn: this incarnation of {self.path} has ended and starts no {name}")
        return self._supervisor_of_children()

    @enable_ki_protection
    def defer(self, *, on_cancel: Callable[[], None] | None = None) -> DeferredReply[Any]:
        """Keep the request being served open: its reply is given later, the next message comes at once.

        The handler returns the `DeferredReply`; if it returns anything else, that is an error of the handler,
        unless the reply was given by then. It survives a restart of the actor, and is failed
        when the actor ends for good.

        Args:
            on_cancel: Called on the Trio thread, once, when the asker is cancelled. An error of it is
                logged and crashes the actor, if this incarnation still lives; the reply stays open.

        Raises:
            RuntimeError: No request is being served, or it is deferred already.
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
        """Set the message being served aside; its asker goes on waiting. The handler returns then.

        `unstash_all` and a restart put messages that were set aside back in front of the mailbox. The
        handler's result is no reply then; if it raises, the message is not set aside.

        Raises:
            RuntimeError: It is not the message being served.
            MailboxFullError: So many are set aside already (`MailboxOptions.stash`).
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
        # Set aside only when the handler has returned: until then the message is its own.
        envelope.state = EnvelopeState.STASHING

    @enable_ki_protection
    def unstash_all(self) -> None:
        """Put the messages that were set aside back in front of the mailbox, in their order."""
        self._cell.check_run("unstash_all")
        self._cell.mailbox.unstash_all()

    @enable_ki_protection
    def watch(self, ref: Ref[Any], *, to: Message[Any] | Callable[[Terminated], Message[Any]]) -> None:
        """Be told when another actor has ended for good; at once if it has already.

        The message comes before all others, whatever the mailbox holds. The watch ends with this
        incarnation: put it into `lifespan` to have it in each.

        Args:
            ref: Whom to watch; a second watch of the same actor takes the place of the first.
            to: The message to this actor, or a function that makes it from how the other ended.

        Raises:
            TypeError: This actor does not handle the message. If that is known only at the other's
                end, or if the function raises, this actor crashes.
        """
        self._cell.check_run("watch")
        cell_behind(ref).check_run("watch")
        if not callable(to):
            self._cell.check(to, Message, "watch")
        notify = partial(self._notify, cell_behind(ref), to, copy_context())
        cell_behind(ref).add_watcher(self._incarnation, notify)

    @enable_ki_protection
    def unwatch(self, ref: Ref[Any]) -> None:
        """Watch an actor no more."""
        self._cell.check_run("unwatch")
        cell_behind(ref).remove_watcher(self._incarnation)

    @enable_ki_protection
    def after(self, seconds: float, message: Message[Any], /) -> Timer:
        """Tell this actor a message in some seconds, on Trio's clock.

        It comes last in the mailbox, as if another task had told it. If that is full, its overflow policy
        holds: by default the message waits for room, otherwise one is dropped and is a dead letter. While
        the actor is stopped with ``drain=True``, its timers go on as long as requests are open.

        The timer ends with this incarnation: a message that was not served by then is withdrawn. Put it into
        `lifespan` to have it in each. The message is served with the context variables of the caller. Timers
        of the same moment have no order.

        Args:
            seconds: From now; 0 is the next turn of the loop.
            message: The message.

        Raises:
            TypeError: This actor does not handle the message, or `seconds` is not a number.
            ValueError: `seconds` is negative, infinite or not a number.
            RuntimeError: This incarnation serves no messages any more; or this is called from another thread
                or Trio run.
        """
        return self._start_timer("after", seconds, message, repeats=False)

    @enable_ki_protection
    def every(self, seconds: float, message: Message[Any], /) -> Timer:
        """Tell this actor a message again and again, first in so many seconds; otherwise as `after`.

        Each time is a multiple of the period from now, whatever the actor does. When the last message was
        not served by then, this time is left out: there is never more than one of them.

        Args:
            seconds: The period, above 0.
            message: The message of each time.

        Raises:
            TypeError, RuntimeError: As for `after`.
            ValueError: `seconds` is not above 0, infinite or not a number.
        """
        return self._start_timer("every", seconds, message, repeats=True)

    def _start_timer(self, verb: str, seconds: float, message: Message[Any], *, repeats: bool) -> Timer:
        self._cell.check(message, Message, verb)
        check_seconds(verb, seconds, is_period=repeats)
        if self._cell.incarnation is not self._incarnation or self._incarnation.has_served:
            raise RuntimeError(
                f"{verb}: this incarnation of {self.path} has ended and serves no {message.operation}"
            )
        return Timer(self._cell, self._incarnation, message, seconds, repeats=repeats)

    def _notify(
        self,
        watched: Cell,
        to: Message[Any] | Callable[[Terminated], Message[Any]],
        context: Context,
        terminated: Terminated,
    ) -> None:
        """Tell this actor of another's end; called by the other, which must not suffer from a failure."""
        watched.remove_watcher(self._incarnation)
        try:
            message = to(terminated) if callable(to) else to
            self._cell.check(message, Message, "watch")
        except Exception as error:  # noqa: BLE001  # whatever it is, it is this actor's
            self.crash(error)
            return
        self._cell.mailbox.put_control(Envelope(self._cell, message, context, is_told=True))

    def part(self, name: str, *, queue_time: float = 0.0) -> AbstractContextManager[None]:
        """Show a block, run in the current task, as a part of what this actor does.

        Observers and meters are told of it as of a message to an actor `name` below this one, of a type of
        the same name. So it has a row in timelines, a span in traces, and its times in metrics. It fails or
        is cancelled as the block does. Costs nothing while no one looks.

        Args:
            name: Name of the part; there must be few of them.
            queue_time: Seconds that it has waited before.
        """
        return self._cell.outcomes.part(name, queue_time)

    @enable_ki_protection
    def show(self, actors: Callable[[], tuple[ActorSnapshot, ...]]) -> None:
        """Show actors in the tree as children of this incarnation that live elsewhere, in another process.

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
        """Show in the tree and in events that this incarnation does its work in another process.

        Args:
            pid: Number of the process.
        """
        self._cell.pid = pid

    @enable_ki_protection
    def report_progress(self) -> None:
        """Tell the supervisor that this incarnation has done some of its work.

        An actor that fails after progress is in no crash loop. `Intensity.counts_progress` and
        `Policy.backoff_after_progress` say how its supervisor takes that; by default it makes no difference
        (D75). Does nothing when the incarnation has ended already, or has reported before.
        """
        cell = self._cell
        if cell.incarnation is self._incarnation and cell.progressed_at is None:
            cell.progressed_at = trio.current_time()

    @enable_ki_protection
    def observe_restarts(self, observer: Callable[[ActorRestarted], None]) -> None:
        """Be told of each restart of a child of this incarnation, before the child waits for it.

        Args:
            observer: Called on the Trio thread; it must be quick and must not raise. A second one takes
                the place of the first.
        """
        if self._cell.incarnation is self._incarnation:
            self._supervisor_of_children().on_restart = observer

    @property
    def is_stopping(self) -> bool:
        """Whether this actor was asked to end, and is not started again."""
        return self._cell.stop_reason is not None

    @enable_ki_protection
    def stop(self) -> None:
        """End this actor after the message being served. A permanent actor is not restarted either."""
        self._cell.check_run("stop")
        self._cell.request_stop("it stopped itself")

    @enable_ki_protection
    def finish(self) -> None:
        """End this incarnation after the message being served: its work is done.

        The restart type decides what follows: a permanent actor is started anew and keeps its
        mailbox; a transient or temporary one ends for good. Does nothing when the incarnation has
        ended already, or is stopped with ``drain=True``, which serves what is queued.
        """
        self._cell.check_run("finish")
        if self._cell.incarnation is self._incarnation:
            self._incarnation.finish()

    @enable_ki_protection
    def crash(self, error: Exception) -> None:
        """Crash this incarnation before its next message, as if a handler had raised the error.

        Does nothing when the incarnation has ended already.
        """
        self._cell.check_run("crash")
        if self._cell.incarnation is self._incarnation:
            self._incarnation.crash(error)
