"""Events of a worker's actors as plain values."""

from __future__ import annotations

from typing import Any

import attrs

from ....actors import (
    ActorRestarted,
    ActorStarted,
    ActorTerminated,
    Event,
    MessageCancelled,
    MessageCompleted,
    MessageDropped,
    MessageFailed,
    MessageStarted,
    MessageWithdrawn,
    SupervisorFailed,
)
from ._codec import Message
from ._wire_errors import decode_error, encode_error

__all__ = ["decode_event", "encode_event"]

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
        MessageWithdrawn,
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
    "Context | None": type(None),
    "BaseException": BaseException,
    "BaseException | None": (BaseException, type(None)),
}


def encode_event(event: Event) -> Message:
    """An event as plain values; of a dead letter only the name of its message is sent, and no context."""
    fields: dict[str, object] = {}
    for field in attrs.fields(type(event)):
        value: object = getattr(event, field.name)
        if isinstance(value, BaseException):
            value = encode_error(value)
        elif field.name in ("message", "context"):
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
