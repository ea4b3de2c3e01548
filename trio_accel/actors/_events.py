"""Events for a system's observers, and numbers for its meter."""

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
        pid: Number of the process that does or did its work; None for this process.
    """

    path: str
    pid: int | None = None


@attrs.frozen(kw_only=True)
class ActorStarted(ActorEvent):
    """An incarnation has started to accept messages.

    Attributes:
        incarnation: The incarnation's number, from 0.
    """

    incarnation: int


@attrs.frozen(kw_only=True)
class ActorRestarted(ActorEvent):
    """An incarnation ended, and another will follow.

    Attributes:
        error: The ended incarnation's error; None if it ended on its own or with its siblings.
        incarnation: Number of the next incarnation.
        delay: Time until its start, in seconds.
        has_progressed: Whether the ended incarnation had made progress (`ActorContext.report_progress`).
        is_paused: Whether the number of restarts exceeds the intensity, so that the delay is a pause
            (`Intensity.pause`).
    """

    error: BaseException | None
    incarnation: int
    delay: float
    has_progressed: bool = False
    is_paused: bool = False


@attrs.frozen(kw_only=True)
class ActorTerminated(ActorEvent):
    """An actor ended for good.

    Attributes:
        reason: The reason, in words.
        error: The actor's error; None if it was stopped or ended on its own.
    """

    reason: str
    error: BaseException | None


@attrs.frozen(kw_only=True)
class SupervisorFailed(ActorEvent):
    """A supervisor failed, because its children failed too often or one of them escalated.

    Attributes:
        error: The supervisor's error; the child's error is its cause.
    """

    error: BaseException


@attrs.frozen(kw_only=True)
class MessageEvent:
    """Something that happened to a message.

    Attributes:
        path: Path of the receiving actor. For a part of its work (`ActorContext.part`), the actor's path
            followed by the part's name.
        message_type: Name of the message class, of the operation that it carries, or of the part.
        number: Identifies the message among those to the same actor: all its events have the same number.
        context: The context variables of the handler: the sender's, as of the call. None if the
            actor lives in another process.
    """

    path: str
    message_type: str
    number: int = attrs.field(default=0, eq=False)
    context: Context | None = attrs.field(default=None, eq=False, repr=False)


@attrs.frozen(kw_only=True)
class MessageStarted(MessageEvent):
    """A handler has started.

    Attributes:
        queue_time: Seconds since the message was sent; 0 if it was sent before the first subscription.
    """

    queue_time: float


@attrs.frozen(kw_only=True)
class MessageCompleted(MessageEvent):
    """A reply was given, or a one-way message served.

    Attributes:
        queue_time: Seconds from sending to the handler's start.
        run_time: Seconds from the handler's start to the reply, even if deferred.
    """

    queue_time: float
    run_time: float


@attrs.frozen(kw_only=True)
class MessageFailed(MessageEvent):
    """A handler raised, or the deferred reply is an error.

    Attributes:
        queue_time: Seconds from sending to the handler's start.
        run_time: Seconds from the handler's start to the failure.
        error: The error of the handler, or the reply.
    """

    queue_time: float
    run_time: float
    error: BaseException


@attrs.frozen(kw_only=True)
class MessageCancelled(MessageEvent):
    """A caller was cancelled, and its request has unwound."""

    queue_time: float
    run_time: float


@attrs.frozen(kw_only=True)
class MessageWithdrawn(MessageEvent):
    """A caller was cancelled while its request was queued, so the request never runs.

    Attributes:
        queue_time: Seconds since the message was sent; 0 if it was sent before the first subscription.
    """

    queue_time: float


@attrs.frozen(kw_only=True)
class MessageDropped(MessageEvent):
    """A dead letter: a message that will not be served.

    Attributes:
        reason: The reason, in words.
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
    """Return Trio's clock with an arbitrary origin, because only differences matter."""
    clock = trio.lowlevel.current_clock()
    # Trio's own clock is `perf_counter` plus an offset, but takes four times as long to call.
    return perf_counter if type(clock).__name__ == "SystemClock" else clock.current_time


@attrs.define(eq=False, repr=False)
class Observers:
    """The observers and the meter of a system.

    Attributes:
        of_messages: Observers of message events; without observers, these events cost nothing.
        of_every_message: Observers of all message events. Without them, actors may serve messages
            outside their mailboxes, and other processes do not send events of their messages.
        numbers: Counts messages.
        meter: Measures messages, if set.
        sees_messages: Whether messages are observed or measured; otherwise both cost nothing.
        now: Trio's clock with an arbitrary origin.
    """

    meter: Meter | None = None
    sees_messages: bool = False
    now: Callable[[], float] = attrs.field(factory=_quick_clock)
    of_messages: tuple[Observer, ...] = ()
    of_every_message: tuple[Observer, ...] = ()
    numbers: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))
    # Observers of both actor and message events.
    _for_life: tuple[Observer, ...] = ()
    _on_change: dict[object, Callable[[], None]] = attrs.field(factory=dict[object, Callable[[], None]])

    @property
    def is_anyone(self) -> bool:
        """Whether there are any observers."""
        return bool(self._for_life)

    def add(self, observer: Observer, *, messages: bool = True, every: bool = True) -> Subscription:
        """Subscribe an observer; see `System.subscribe`."""
        subscription = Subscription(self, observer)
        self._for_life = (*self._for_life, subscription.deliver)
        if messages:
            self.of_messages = (*self.of_messages, subscription.deliver)
            if every:
                self.of_every_message = (*self.of_every_message, subscription.deliver)
            self._changed()
        return subscription

    def remove(self, observer: Observer) -> None:
        """Unsubscribe an observer."""
        self.of_messages = _without(observer, self.of_messages)
        self.of_every_message = _without(observer, self.of_every_message)
        self._for_life = _without(observer, self._for_life)
        self._changed()

    def measure(self, meter: Meter) -> ExitStack:
        """Install a meter for all messages from now on.

        Raises:
            RuntimeError: A meter is already installed.
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
        """Register a callback for changes of observers or meter; for actors in other processes."""
        self._on_change[key] = callback

    def off_change(self, key: object) -> None:
        """Unregister a callback."""
        self._on_change.pop(key, None)

    def emit(self, event: Event) -> None:
        """Deliver a message event to the observers. An observer's error is logged; it stays subscribed."""
        self._tell(self.of_messages, event)

    def emit_life(self, event: Event) -> None:
        """Deliver an actor event to the observers."""
        self._tell(self._for_life, event)

    def _tell(self, observers: tuple[Observer, ...], event: Event) -> None:
        for observer in observers:
            try:
                observer(event)
            except Exception:
                # The runtime calls observers in places that cannot handle an exception.
                _logger.exception("an observer failed on %s", safe_repr(event))

    def _changed(self) -> None:
        self.sees_messages = self.meter is not None or bool(self.of_messages)
        for callback in tuple(self._on_change.values()):
            callback()


def _without(observer: Observer, observers: tuple[Observer, ...]) -> tuple[Observer, ...]:
    return tuple(subscriber for subscriber in observers if subscriber != observer)


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
        """Pass an event to the observer."""
        if not self._is_closed:
            self._observer(event)

    def close(self) -> None:
        """Unsubscribe now, even from an event in delivery."""
        self._is_closed = True
        self._observers.remove(self.deliver)


class Measured(Protocol):
    """Receives the measurements of one message type to one actor.

    The runtime uses it on the Trio thread for every message, so its methods must be quick and must not raise.
    For most messages the runtime only extends a list.
    """

    @property
    def times(self) -> list[float]:
        """The list to extend by two numbers per ended message: its queue time and its run time in seconds."""
        ...

    @property
    def max_times(self) -> int:
        """The maximum length of `times`; the runtime calls `count` when it is reached."""
        ...

    def count(self) -> None:
        """Process and clear `times`."""
        ...

    def failed(self, error: BaseException) -> None:
        """Count a failure of the last message in `times`."""
        ...

    def cancelled(self) -> None:
        """Count a cancellation of the last message in `times`, which has unwound."""
        ...

    def dropped(self) -> None:
        """Count a dead letter, which does not appear in `times`."""
        ...


class Meter(Protocol):
    """Measures the messages of a system; see `System.measure`."""

    def measured(self, path: str, message_type: str) -> Measured:
        """Return the receiver for one message type to one actor; the runtime keeps it."""
        ...


def note_end(
    measured: Measured,
    queue_time: float,
    run_time: float,
    error: BaseException | None = None,
    *,
    cancelled: bool = False,
) -> None:
    """Record the end of a message.

    Args:
        measured: The receiver.
        queue_time: Seconds from sending to the handler's start.
        run_time: Seconds from the handler's start to the end.
        error: The message's error.
        cancelled: Whether its caller was cancelled.
    """
    times = measured.times
    times += (queue_time, run_time)
    if len(times) >= measured.max_times:
        measured.count()
    if cancelled:
        measured.cancelled()
    elif error is not None:
        measured.failed(error)
