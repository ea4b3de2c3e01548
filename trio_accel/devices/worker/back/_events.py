"""Events of a worker's actors, told to the application."""

from __future__ import annotations

from contextlib import suppress

from ....actors import ActorStarted, Event, MessageEvent, Subscription, System
from ..transport._channel import Channel
from ..transport._codec import Message
from ..transport._events import encode_event

__all__ = ["EventForwarder"]


class EventForwarder:
    """Tells of the actors below the context: of their lives always, of their messages if somebody observes.

    Args:
        system: The worker's own.
        channel: Where the application is told.
        path: Path of the device's actor.
    """

    def __init__(self, system: System, channel: Channel, path: str) -> None:
        self._system = system
        self._channel = channel
        self._below = f"{path}/context/"
        self._subscription: Subscription | None = None
        # Events of the time in which the worker stood ready.
        self._early: list[Message] | None = []

    def begin(self) -> None:
        """The worker serves: its actors are shown from now on."""
        early, self._early = self._early, None
        for message in early or ():
            self._channel.send(message)

    def observe(self, is_observed: bool) -> None:
        """Begin or end to tell of messages."""
        if is_observed and self._subscription is None:
            self._subscription = self._system.subscribe(self._observe_message)
        elif not is_observed and self._subscription is not None:
            self._subscription.close()
            self._subscription = None

    def tell(self, event: Event) -> None:
        """Tell of an event."""
        path = event.path
        if not path.startswith(self._below):
            return
        actor_class = ""
        if isinstance(event, ActorStarted):
            with suppress(KeyError):
                actor_class = self._system.tree().find(path).actor_class
        message: Message = ("event", encode_event(event), actor_class)
        if self._early is None:
            self._channel.send(message)
        else:
            # The tree shows the actors of the worker that serves.
            self._early.append(message)

    def _observe_message(self, event: Event) -> None:
        if isinstance(event, MessageEvent):
            self.tell(event)
