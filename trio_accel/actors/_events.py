"""Events for the observers of a system, and numbers for its meter."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import Context
from time import perf_counter
from typing import Protocol, Self, TypeAlias

import attrs
import trio

from ._errors import safe_repr

__all__ = [
    "ActorEvent",
    "ActorRestarted",
    "ActorStarted",
    "ActorTerminated",
    "Event",
    "Measured",
    "MessageCancelled",
    "MessageCompleted",
    "MessageDropped",
    "MessageEvent",
    "MessageFailed",
    "MessageStarted",
    "MessageWithdrawn",
    "Meter",
    "Observer",
    "Subscription",
    "SupervisorFailed",
    "note_end",
]

_logger = logging.getLogger("trio_accel.actors")


@attrs.frozen(kw_only=True)
class ActorEvent:
    """Something that happened to an actor.

    Attributes:
        path: Path of the actor.
        pid: Number of the process in which it does its work, or did; None where that is this one.
    """

    path: str
    pid: int | None = None


@attrs.frozen(kw_only=True)
class ActorStarted(ActorEvent):
    """An incarnation takes messages.

    Attributes:
        incarnation: Its number, from 0.
    """

    incarnation: int


@attrs.frozen(kw_only=True)
class ActorRestarted(ActorEvent):
    """An incarnation ended, and another will follow.

    Attributes:
        error: Its error; None if it ended by itself or with its siblings.
        incarnation: Number of the one that follows.
        delay: Seconds until it is started.
        has_progressed: Whether the one that ended had made progress (`ActorContext.report_progress`).
        is_paused: Whether there were more restarts than the intensity allows: the delay is a pause
            (`Intensity.pause`).
    """

    error: BaseException | None
    incarnation: int
    delay: float
    has_progressed: bool = False
    is_paused: bool = False


@attrs.frozen(kw_only=True)
class ActorTerminated(ActorEvent):
    """The actor ended for good.

    Attributes:
        reason: Why, in words.
        error: Its error; None if it was stopped or ended by itself.
    """

    reason: str
    error: BaseException | None


@attrs.frozen(kw_only=True)
class SupervisorFailed(ActorEvent):
    """A supervisor gives up: its children failed too often, or one of them escalated.

    Attributes:
        error: Its error; the child's error is the cause.
    """

    error: BaseException


@attrs.frozen(kw_only=True)
class MessageEvent:
    """Something that happened to a message.

    Attributes:
        path: Path of the actor it was sent to. For a part of its work (`ActorContext.part`), the path
            of the actor and the name of the part.
        message_type: Name of its class, of the operation it carries, or of the part.
        number: Tells it from other messages of the same actor: all events of one message have the same.
        context: Context variables that it is served with: those of its sender at the time. None where the
            actor lives in another process.
    """

    path: str
    message_type: str
    number: int = attrs.field(default=0, eq=False)
    context: Context | None = attrs.field(default=None, eq=False, repr=False)


@attrs.frozen(kw_only=True)
class MessageStarted(MessageEvent):
    """A handler begins.

    Attributes:
        queue_time: Seconds from sending to now; 0 for one sent before anyone observed.
    """

    queue_time: float


@attrs.frozen(kw_only=True)
class MessageCompleted(MessageEvent):
    """The reply was given, or a told message served.

    Attributes:
        queue_time: Seconds from sending to the handler's start.
        run_time: Seconds from there to the reply, deferred ones included.
    """

    queue_time: float
    run_time: float


@attrs.frozen(kw_only=True)
class MessageFailed(MessageEvent):
    """The handler raised, or the deferred reply is an error.

    Attributes:
        queue_time: Seconds from sending to the handler's start.
        run_time: Seconds from there to the failure.
        error: Error of the handler, or the reply.
    """

    queue_time: float
    run_time: float
    error: BaseException


@attrs.frozen(kw_only=True)
class MessageCancelled(MessageEvent):
    """The asker was cancelled, and the request unwound."""

    queue_time: float
    run_time: float


@attrs.frozen(kw_only=True)
class MessageWithdrawn(MessageEvent):
    """Its asker was cancelled while it was queued: it never runs.

    Attributes:
        queue_time: Seconds from sending to now; 0 for one sent before anyone observed.
    """

    queue_time: float


@attrs.frozen(kw_only=True)
class MessageDropped(MessageEvent):
    """A dead letter: a message that will not be served.

    Attributes:
        reason: Why, in words.
        message: The message itself.
    """

    reason: str
    message: object


Event: TypeAlias = (
    ActorStarted
    | ActorRestarted
    | ActorTerminated
    | SupervisorFailed
    | MessageStarted
    | MessageCompleted
    | MessageFailed
    | MessageCancelled
    | MessageWithdrawn
    | MessageDropped
)
Observer: TypeAlias = Callable[[Event], None]


def _quick_clock() -> Callable[[], float]:
    """Trio's clock, but for where it begins: only differences count."""
    clock = trio.lowlevel.current_clock()
    # Trio's own is this one with an offset. By way of Trio it takes four times as long.
    return perf_counter if type(clock).__name__ == "SystemClock" else clock.current_time


@attrs.define(eq=False, repr=False)
class Observers:
    """The observers and the meter of a system.

    Attributes:
        of_messages: Observers that want events of messages; without any, these cost nothing.
        of_every_message: The ones that want events of all messages: without any, an actor may be
            served past its mailbox, and other processes tell nothing of theirs.
        numbers: Counts messages.
        meter: Measures messages, if there is one.
        sees_messages: Whether messages are observed or measured; if not, this costs nothing.
        now: Trio's clock, but for where it begins.
    """

    meter: Meter | None = None
    sees_messages: bool = False
    now: Callable[[], float] = attrs.field(factory=_quick_clock)
    of_messages: tuple[Observer, ...] = ()
    of_every_message: tuple[Observer, ...] = ()
    numbers: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))
    # Observers of any events.
    _for_life: tuple[Observer, ...] = ()
    _on_change: dict[object, Callable[[], None]] = attrs.field(factory=dict[object, Callable[[], None]])

    @property
    def is_anyone(self) -> bool:
        """Whether anyone listens at all."""
        return bool(self._for_life)

    def add(self, observer: Observer, *, messages: bool = True, every: bool = True) -> Subscription:
        """Call an observer from now on; see `System.subscribe`."""
        subscription = Subscription(self, observer)
        self._for_life = (*self._for_life, subscription.deliver)
        if messages:
            self.of_messages = (*self.of_messages, subscription.deliver)
            if every:
                self.of_every_message = (*self.of_every_message, subscription.deliver)
            self._changed()
        return subscription

    def remove(self, observer: Observer) -> None:
        """Stop calling it."""
        self.of_messages = _without(observer, self.of_messages)
        self.of_every_message = _without(observer, self.of_every_message)
        self._for_life = _without(observer, self._for_life)
        self._changed()

    def measure(self, meter: Meter) -> ExitStack:
        """Have all messages measured from now on.

        Raises:
            RuntimeError: Another does so already.
        """
        if self.meter is not None:
            raise RuntimeError("measure: the messages of this system are measured already")
        self.meter = meter
        self._changed()
        measuring = ExitStack()
        measuring.callback(self._end_measuring)
        return measuring

    def _end_measuring(self) -> None:
        self.meter = None
        self._changed()

    def on_change(self, key: object, callback: Callable[[], None]) -> None:
        """Call back when others listen than before; for actors that live elsewhere."""
        self._on_change[key] = callback

    def off_change(self, key: object) -> None:
        """Do not call back."""
        self._on_change.pop(key, None)

    def emit(self, event: Event) -> None:
        """Tell everyone of a message. An observer that raises is logged and goes on listening."""
        self._tell(self.of_messages, event)

    def emit_life(self, event: Event) -> None:
        """Tell everyone of an actor."""
        self._tell(self._for_life, event)

    def _tell(self, observers: tuple[Observer, ...], event: Event) -> None:
        for observer in observers:
            try:
                observer(event)
            except Exception:
                # It is called from the middle of the runtime: nothing there is prepared for it.
                _logger.exception("an observer failed on %s", safe_repr(event))

    def _changed(self) -> None:
        self.sees_messages = self.meter is not None or bool(self.of_messages)
        for callback in tuple(self._on_change.values()):
            callback()


def _without(observer: Observer, observers: tuple[Observer, ...]) -> tuple[Observer, ...]:
    return tuple(known for known in observers if known != observer)


class Subscription:
    """An observer's subscription; close it, or use it as a context manager."""

    __slots__ = ("_is_closed", "_observer", "_observers")

    def __init__(self, observers: Observers, observer: Observer) -> None:
        self._observers = observers
        self._observer = observer
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def deliver(self, event: Event) -> None:
        """Pass an event on."""
        if not self._is_closed:
            self._observer(event)

    def close(self) -> None:
        """Listen no more, from now on: also not to an event that is being delivered."""
        self._is_closed = True
        self._observers.remove(self.deliver)


class Measured(Protocol):
    """Takes what became of the messages of one type to one actor.

    It is used on the Trio thread, from inside the runtime, for every message: it must be quick and must not
    raise. For most messages it is only a list that grows.
    """

    @property
    def times(self) -> list[float]:
        """Takes two numbers for each message that has ended: seconds in the queue, and thereafter."""
        ...

    @property
    def most(self) -> int:
        """The most numbers in `times` before `count` is called."""
        ...

    def count(self) -> None:
        """Empty `times`."""
        ...

    def failed(self, error: BaseException) -> None:
        """Count a failure of the message whose times were added last."""
        ...

    def cancelled(self) -> None:
        """Count a cancellation of the message whose times were added last, which has unwound."""
        ...

    def dropped(self) -> None:
        """Count a dead letter; it has no times."""
        ...


class Meter(Protocol):
    """Measures the messages of a system; see `System.measure`."""

    def measured(self, path: str, message_type: str) -> Measured:
        """Takes the ends of the messages of one type to one actor; the runtime keeps it."""
        ...


def note_end(
    measured: Measured,
    queue_time: float,
    run_time: float,
    error: BaseException | None = None,
    *,
    cancelled: bool = False,
) -> None:
    """Tell of a message that has ended.

    Args:
        measured: Takes it.
        queue_time: Seconds from sending to the start.
        run_time: Seconds from there to the end.
        error: Its error.
        cancelled: Whether its asker was cancelled.
    """
    times = measured.times
    times += (queue_time, run_time)
    if len(times) >= measured.most:
        measured.count()
    if cancelled:
        measured.cancelled()
    elif error is not None:
        measured.failed(error)
