"""The actors of a worker as the application shows them."""

from __future__ import annotations

from typing import Any

import attrs

from ....actors import (
    ActorFailedError,
    ActorRestarted,
    ActorSnapshot,
    ActorStarted,
    ActorTerminated,
    Event,
    MessageCancelled,
    MessageCompleted,
    MessageDropped,
    MessageFailed,
    MessageStarted,
    SupervisorFailed,
)
from ...base._statistics import QueueStatistics
from ._channel import Message
from ._wire_errors import decode_error, encode_error

__all__ = ["Mirror", "decode_event", "encode_event"]

_CLASSES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        ActorStarted,
        ActorRestarted,
        ActorTerminated,
        SupervisorFailed,
        MessageStarted,
        MessageCompleted,
        MessageFailed,
        MessageCancelled,
        MessageDropped,
    )
}


# By the annotation of a field.
_TYPES: dict[object, Any] = {
    "str": str,
    "bool": bool,
    "int": int,
    "int | None": (int, type(None)),
    "float": (float, int),
    "object": object,
    "BaseException": BaseException,
    "BaseException | None": (BaseException, type(None)),
}


def encode_event(event: Event) -> Message:
    """An event as plain values; the message of a dead letter travels as its name alone."""
    fields: dict[str, object] = {}
    for field in attrs.fields(type(event)):
        value: object = getattr(event, field.name)
        if isinstance(value, BaseException):
            value = encode_error(value)
        elif field.name == "message":
            value = None
        fields[field.name] = value
    return type(event).__name__, fields


def decode_event(data: Any) -> Event:
    """What `encode_event` made.

    Raises:
        Exception: It is nothing that `encode_event` makes.
    """
    name, fields = data
    values: dict[str, object] = dict(fields)
    error: Any = fields.get("error")
    if error is not None:
        values["error"] = decode_error(error)
    event: Event = _CLASSES[name](**values)
    for field in attrs.fields(_CLASSES[name]):
        if not isinstance(values[field.name], _TYPES[field.type]):
            raise TypeError(f"{name}: {field.name} is no {field.type}")
    return event


@attrs.define
class _Node:
    actor_class: str
    state: str = "starting"
    incarnation: int = 0
    handled: int = 0
    failed: int = 0
    last_error: str | None = None


class Mirror:
    """The library actors of a worker, put together from its events and the requests that it serves."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        # By the import path of the library, as it was looked for last.
        self._of_library: dict[str, tuple[_Node, ...]] = {}

    def clear(self) -> None:
        """The worker is gone, and its actors with it."""
        self._nodes.clear()
        self._of_library.clear()

    def take(self, event: Event, actor_class: str) -> None:
        """Follow the life of an actor."""
        if not isinstance(event, (ActorStarted, ActorRestarted, ActorTerminated)):
            return
        self._of_library.clear()
        if isinstance(event, ActorTerminated):
            self._nodes.pop(event.path, None)
            return
        node = self._nodes.setdefault(event.path, _Node(actor_class))
        node.incarnation = event.incarnation
        node.state = "running"
        if isinstance(event, ActorRestarted):
            node.state = "restarting"
            if event.error is not None:
                node.last_error = f"{type(event.error).__name__}: {event.error}"

    def done(self, library: str, error: BaseException | None) -> None:
        """A request was served by the library at an import path, or crashed it."""
        nodes = self._of_library.get(library)
        if nodes is None:
            actor_class = library.rpartition(":")[2]
            nodes = tuple([node for node in self._nodes.values() if node.actor_class == actor_class])
            self._of_library[library] = nodes
        if error is not None and isinstance(error, ActorFailedError):
            for node in nodes:
                node.failed += 1
        else:
            for node in nodes:
                node.handled += 1

    def snapshots(self, queues: dict[str, QueueStatistics]) -> tuple[ActorSnapshot, ...]:
        """The actors now.

        Args:
            queues: Requests by the import path of the library.
        """
        by_class = {library.rpartition(":")[2]: queue for library, queue in queues.items()}
        none = QueueStatistics(waiting=0, in_flight=0)
        return tuple(
            ActorSnapshot(
                path=path,
                actor_class=node.actor_class,
                state=node.state,
                incarnation=node.incarnation,
                mailbox_depth=by_class.get(node.actor_class, none).waiting,
                deferred=by_class.get(node.actor_class, none).in_flight,
                handled=node.handled,
                failed=node.failed,
                last_error=node.last_error,
            )
            for path, node in self._nodes.items()
        )
