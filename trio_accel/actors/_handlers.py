"""Which method of an actor class serves which message class."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from ._messages import AnyMessage, Message, MessageClass, Request, RequestClass

if TYPE_CHECKING:
    from ._envelope import DeferredReply

__all__ = ["HandlerTable", "collect_handlers", "handles"]

ActorT = TypeVar("ActorT")
MessageT = TypeVar("MessageT")
ReplyT = TypeVar("ReplyT")

HandlerTable = dict[type[AnyMessage], Callable[..., Awaitable[object]]]
_MARK = "__trio_accel_handles__"

RequestHandler = Callable[[ActorT, MessageT], Awaitable["ReplyT | DeferredReply[ReplyT]"]]
MessageHandler = Callable[[ActorT, MessageT], Awaitable[None]]


@overload
def handles(
    message: RequestClass[MessageT, ActorT, ReplyT], /
) -> Callable[[RequestHandler[ActorT, MessageT, ReplyT]], RequestHandler[ActorT, MessageT, ReplyT]]: ...


@overload
def handles(
    message: MessageClass[MessageT, ActorT], /
) -> Callable[[MessageHandler[ActorT, MessageT]], MessageHandler[ActorT, MessageT]]: ...


def handles(message: object, /) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare an async method of an `Actor` as the handler of a message class.

    The handler's return type is checked against the reply type of the request. It may return a
    `DeferredReply` from ``self.context.defer()`` instead of the reply.

    Raises:
        TypeError: `message` is no `Request` or `Message` class, or the method is not ``async def``.
    """
    if not (isinstance(message, type) and issubclass(message, (Request, Message))):
        raise TypeError(f"handles: {message!r} is not a subclass of Request or Message")

    def mark(handler: Callable[..., Any]) -> Callable[..., Any]:
        if not inspect.iscoroutinefunction(handler):
            raise TypeError(
                f"handles: the handler of {message.__name__}, {handler!r}, must be an 'async def' method"
            )
        setattr(handler, _MARK, message)
        return handler

    return mark


def collect_handlers(cls: type) -> HandlerTable:
    """Find the handlers of an actor class, inherited ones included.

    Raises:
        TypeError: Two handlers of one class take the same message class.
    """
    table: HandlerTable = {}
    for base in reversed(cls.__mro__):
        own: dict[type[AnyMessage], str] = {}
        for name, attribute in vars(base).items():
            message = cast("type[AnyMessage] | None", getattr(attribute, _MARK, None))
            if message is None:
                continue
            if message in own:
                raise TypeError(
                    f"{base.__name__}: {own[message]} and {name} both handle {message.__name__}; keep one"
                )
            own[message] = name
            # By name, so that an override without the decorator is the one that runs.
            table[message] = getattr(cls, name)
    return table
