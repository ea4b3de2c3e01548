"""The methods that serve an actor class's messages, by message class."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ClassVar, Final, TypedDict, TypeVar, Unpack, cast, overload

import attrs
from trio.lowlevel import disable_ki_protection, enable_ki_protection

from ._messages import AnyMessage, Message, MessageClass, Request, RequestClass
from ._outcomes import DeferredReply

__all__ = ["UNAVAILABLE", "fast_path", "handles", "message_target"]

ActorT = TypeVar("ActorT")
MessageT = TypeVar("MessageT")
ReplyT = TypeVar("ReplyT")

HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])

_MARK = "__trio_accel_handles__"
_QUICK = "__trio_accel_quick__"
_BASES = (Request, Message)


class _Unavailable(enum.Enum):
    UNAVAILABLE = "unavailable"


UNAVAILABLE: Final = _Unavailable.UNAVAILABLE
"""The result of an attempt that would have to wait."""

RequestHandler = Callable[[ActorT, MessageT], Awaitable[ReplyT | DeferredReply[ReplyT]]]
MessageHandler = Callable[[ActorT, MessageT], Awaitable[None]]


@attrs.frozen
class HandlerGroup:
    """Handlers that run concurrently.

    Attributes:
        name: The group's name within the actor class.
        limit: The maximum number of handlers that run at once.
    """

    name: str
    limit: int


@attrs.frozen
class _Mark:
    message: type[AnyMessage]
    group: HandlerGroup | None
    ki_protected: bool
    reads: bool


@attrs.frozen
class Handler:
    """The method that serves a message class.

    Attributes:
        function: The unbound method.
        group: The handler's group, if any.
        attempt: Serves the message without waiting, if possible; None without a `fast_path` method.
        reads: Whether it changes nothing.
    """

    function: Callable[..., Coroutine[object, object, object]]
    group: HandlerGroup | None
    attempt: Callable[..., object] | None
    reads: bool


# Matches class names in a declaration: "Counter", "counters.Counter", "Box[int]", "Counter | Timer".
_TARGET = re.compile(r"(?:^|(?<=[\s|.]))\w+(?=\s*(?:[|\[]|$))")

HandlerTable = dict[type[AnyMessage], Handler]


class ActorBase:
    """The interface of an actor's class to the runtime; see `Actor`."""

    __handlers__: ClassVar[HandlerTable] = {}
    # Errors that crash an actor without a logged traceback. Their cause is logged elsewhere as a warning, so
    # the crash is one only if it is printed.
    expected_crashes: ClassVar[tuple[type[Exception], ...]] = ()
    # Whether a crash is printed in a program without logging, because no caller gets its error.
    prints_crashes: ClassVar[bool] = False
    # Whether it starts with the context variables of its spawner. Otherwise it starts with the system's,
    # because it serves others for longer, and would keep the values of its first caller alive.
    inherits_context: ClassVar[bool] = True
    # Whether consecutively started actors end at the same time, because they do not need each other.
    ends_together: ClassVar[bool] = False


class _HandlerOptions(TypedDict, total=False):
    """The options of a handler, for requests and one-way messages."""

    group: str | None
    limit: int | None
    ki_protected: bool
    reads: bool


@overload
def handles(
    message: RequestClass[MessageT, ActorT, ReplyT],
    /,
    **running: Unpack[_HandlerOptions],
) -> Callable[[RequestHandler[ActorT, MessageT, ReplyT]], RequestHandler[ActorT, MessageT, ReplyT]]: ...


@overload
def handles(
    message: MessageClass[MessageT, ActorT],
    /,
    **running: Unpack[_HandlerOptions],
) -> Callable[[MessageHandler[ActorT, MessageT]], MessageHandler[ActorT, MessageT]]: ...


def handles(
    message: object,
    /,
    *,
    group: str | None = None,
    limit: int | None = None,
    ki_protected: bool = False,
    reads: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare an async method of an `Actor` as the handler of a message class.

    Type checkers compare the handler's return type with the reply type of the request. The handler may return
    a `DeferredReply` from ``self.context.defer()`` instead of the reply.

    Handlers run one at a time, in message order. Handlers with a `group` run concurrently with all others,
    but at most `limit` of the group at once. At the limit, the group's next message waits, and so do the
    messages after it.

    Args:
        message: Class of the messages that the method serves.
        group: Name of a group of handlers; without a group, handlers run one at a time.
        limit: The maximum number of the group's handlers that run at once; the same for all of them.
        ki_protected: Whether to defer Ctrl-C while the method or its `fast_path` attempt runs, as
            `trio.lowlevel.enable_ki_protection` does. Use it for code that must not be interrupted between
            two lines. The main task gets the interrupt instead. Otherwise any line may raise
            `KeyboardInterrupt`, as everywhere in a Trio program.
        reads: Whether the method changes nothing of the actor. Then a `cluster.DurableEntity` neither stores
            the message nor runs it again. Other actors ignore it.

    Raises:
        TypeError: `message` is not a `Request` or `Message` class, `reads` is not a bool, or the method is
            not ``async def`` or does not accept the message.
        ValueError: Only one of `group` and `limit` was given, or the limit is below 1.
    """
    if inspect.isfunction(message):
        raise TypeError(
            f"handles: {message.__qualname__} needs the message class that it serves: @handles(SomeMessage)"
        )
    if not (isinstance(message, type) and issubclass(message, (Request, Message))) or message in _BASES:
        raise TypeError(f"handles: {message!r} is not a subclass of Request or Message")
    if not isinstance(cast("object", reads), bool):
        raise TypeError(f"handles({message.__name__}): reads must be True or False, got {reads!r}")
    handler_group = _group(message.__name__, group, limit)
    mark = _Mark(cast("type[Message[Any]]", message), handler_group, ki_protected, reads)

    def decorate(handler: Callable[..., Any]) -> Callable[..., Any]:
        _check_function(handler, mark.message)
        setattr(handler, _MARK, mark)
        return handler

    return decorate


def fast_path(attempt: Callable[[Any, Any], object], /) -> Callable[[HandlerT], HandlerT]:
    """Serve messages without waiting when possible, for a handler that seldom waits; costs a third less.

    Use this decorator below `handles`, without a group. The runtime first calls the attempt in the message's
    context. If the actor is idle, this happens at once in the caller's task; exceptions and deferred replies
    work the same there. The attempt must be quick, because other tasks cannot run meanwhile.

    Args:
        attempt: A function of the actor and the message. It returns the handler's result, or
            `UNAVAILABLE` before it has changed anything, so that the handler runs.
    """
    if inspect.iscoroutinefunction(attempt):
        raise TypeError(f"quick: {attempt.__qualname__} must not be async: it is not to wait")

    def decorate(handler: HandlerT) -> HandlerT:
        setattr(handler, _QUICK, attempt)
        return handler

    return decorate


def _check_function(handler: Callable[..., Any], message: type[AnyMessage]) -> None:
    name = getattr(handler, "__qualname__", repr(handler))
    if not inspect.iscoroutinefunction(handler):
        raise TypeError(f"handles({message.__name__}): {name} must be an 'async def' method")
    try:
        inspect.signature(handler).bind(None, None)
    except TypeError:
        signature = inspect.signature(handler)
        raise TypeError(
            f"handles({message.__name__}): {name}{signature} must take two arguments: self, and the message"
        ) from None


def _group(message: str, name: str | None, limit: int | None) -> HandlerGroup | None:
    if name is None and limit is None:
        return None
    if name is None or limit is None or isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(
            f"handles({message}): a group needs a name and a limit of at least 1, "
            f"got group={name!r}, limit={limit!r}"
        )
    return HandlerGroup(name, limit)


def collect_handlers(cls: type) -> HandlerTable:
    """Find the handlers of an actor class, including inherited handlers.

    Raises:
        TypeError: Two handlers in one class serve the same message class; a message class belongs to another
            actor class; an override is not a handler, or handles another message class; or a group
            has two limits.
    """
    table: HandlerTable = {}
    for base in reversed(cls.__mro__):
        names: dict[type[AnyMessage], str] = {}
        for name, attribute in vars(base).items():
            mark = cast("_Mark | None", getattr(attribute, _MARK, None))
            if mark is None:
                continue
            if mark.message in names:
                raise TypeError(
                    f"{base.__name__}: {names[mark.message]} and {name} both handle {mark.message.__name__}; "
                    "keep one"
                )
            names[mark.message] = name
            _check_target(base, mark.message)
            # The look-up by name also finds an override without the decorator, which is the method to run.
            function = getattr(cls, name)
            reads = cast("_Mark", getattr(function, _MARK, mark)).reads
            _check_override(cls, name, function, mark.message)
            # The runtime defers Ctrl-C during its own work. It may interrupt user code, as everywhere in
            # Trio, unless the handler asks otherwise.
            hold = enable_ki_protection if mark.ki_protected else disable_ki_protection
            attempt = cast("Callable[..., object] | None", getattr(function, _QUICK, None))
            table[mark.message] = Handler(
                hold(function), mark.group, None if attempt is None else hold(attempt), reads
            )
    _check_groups(cls, table)
    return table


def _check_override(cls: type, name: str, function: Callable[..., Any], message: type[AnyMessage]) -> None:
    """Check that the override of a handler handles the same message class."""
    mark = cast("_Mark | None", getattr(function, _MARK, None))
    if mark is None:
        _check_function(function, message)
    elif mark.message is not message:
        raise TypeError(
            f"{cls.__name__}: {name} handles {mark.message.__name__}, but overrides the handler of "
            f"{message.__name__}; give it another name"
        )


def _check_target(cls: type, message: type[AnyMessage]) -> None:
    """Check that a handler's message is not declared for another actor class."""
    target = message_target(message)
    names = {base.__name__ for base in cls.__mro__}
    if target is not None and not names.intersection(_TARGET.findall(target)):
        declared = (
            f'Request["{cls.__name__}", ...]'
            if issubclass(message, Request)
            else f'Message["{cls.__name__}"]'
        )
        raise TypeError(
            f"{cls.__name__}: {message.__name__} is declared for {target}, so {cls.__name__} cannot handle "
            f"it; declare it as {message.__name__}({declared}), or let {cls.__name__} inherit from {target}"
        )


def message_target(message: type[AnyMessage]) -> str | None:
    """Return the name of the actor class that a message class is declared for; None if it is generic."""
    for base in message.__mro__:
        for declared in getattr(base, "__orig_bases__", ()):
            arguments = getattr(declared, "__args__", ())
            if getattr(declared, "__origin__", None) in (Request, Message) and arguments:
                first = arguments[0]
                if isinstance(first, TypeVar) or first is Any:
                    return None
                return getattr(first, "__forward_arg__", None) or getattr(first, "__name__", None)
    return None


def _check_groups(cls: type, table: HandlerTable) -> None:
    limits: dict[str, int] = {}
    for handler in table.values():
        if handler.group is not None:
            limit = limits.setdefault(handler.group.name, handler.group.limit)
            if limit != handler.group.limit:
                raise TypeError(
                    f"{cls.__name__}: group {handler.group.name!r} has the limits {limit} and "
                    f"{handler.group.limit}; give its handlers one"
                )
