"""Bases of messages: their type parameters say who takes them and what comes back."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

__all__ = ["AnyMessage", "Message", "MessageClass", "Request", "RequestClass"]

ActorT_contra = TypeVar("ActorT_contra", contravariant=True)
ReplyT_co = TypeVar("ReplyT_co", covariant=True)
MessageT_co = TypeVar("MessageT_co", covariant=True)
# Seen from the class object, the actor is something that comes out.
TargetT_co = TypeVar("TargetT_co", covariant=True)


class _Named:
    __slots__ = ()

    @property
    def operation(self) -> str:
        """Name of the message in snapshots and errors."""
        return type(self).__name__


class Request(_Named, Generic[ActorT_contra, ReplyT_co]):
    """Base of messages that are asked: a frozen attrs class for one actor class and one reply type.

    >>> import attrs
    >>> @attrs.frozen
    ... class Add(Request["Counter", int]):
    ...     n: int = 1
    """

    __slots__ = ()

    @classmethod
    def __types__(cls) -> tuple[ActorT_contra, ReplyT_co]:
        """Carries the type parameters to type checkers."""
        raise TypeError("a message class has no value of its types")


class Message(_Named, Generic[ActorT_contra]):
    """Base of messages that are told: a frozen attrs class for one actor class, without a reply."""

    __slots__ = ()

    @classmethod
    def __actor__(cls) -> ActorT_contra:  # type: ignore[misc]  # never called: only carries the type
        """Carries the type parameter to type checkers."""
        raise TypeError("a message class has no value of its types")


AnyMessage = Request[Any, Any] | Message[Any]


class RequestClass(Protocol[MessageT_co, TargetT_co, ReplyT_co]):
    """The class object of a request, as type checkers see it."""

    def __call__(self, *args: Any, **kwargs: Any) -> MessageT_co: ...

    def __types__(self) -> tuple[TargetT_co, ReplyT_co]: ...


class MessageClass(Protocol[MessageT_co, TargetT_co]):
    """The class object of a told message, as type checkers see it."""

    def __call__(self, *args: Any, **kwargs: Any) -> MessageT_co: ...

    def __actor__(self) -> TargetT_co: ...
