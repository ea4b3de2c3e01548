"""Errors, actor events and faults as plain tuples, as a worker process reports them.

Exceptions are not pickled, because unpickling calls arbitrary code of their class, and one end may be unable
to import a class of the other. Instead, the classes that both ends know are registered here.
"""

from __future__ import annotations

import builtins
import operator
import os
import traceback
from collections.abc import Callable
from typing import Any, SupportsIndex, TypeAlias, TypeVar, cast, get_args

import attrs
import trio

from ... import actors
from ...actors import ActorError, Event
from ...backends.base import AccelError, Strs
from ...backends.base.contract import errors
from ..operations._faults import Fault
from ._protocol import Message

T = TypeVar("T")

Fields: TypeAlias = tuple[tuple[object, ...], dict[str, object]]
"""The positional and keyword arguments that make an exception."""

WireError: TypeAlias = tuple[object, ...]
"""(registered name, fields, text, notes, traceback, cause): plain values at all levels."""

# Limits of depth and total number for causes and members of groups, because causes may form a circle.
_MAX_DEPTH = 8
_MAX_ERRORS = 64
# The innermost frames show the place of the error; the frames of an endless recursion repeat it a thousand
# times.
_MAX_FRAMES = 40
# The maximum characters of a text.
_MAX_TEXT = 1 << 16
_MAX_ITEMS = 1024
_MAX_NOTES = 64
_HEADING = "in the worker process:\n"
_GROUP = "ExceptionGroup"


def encode_error(error: BaseException) -> WireError:
    """Encode an error, its notes, its traceback and its causes as plain values.

    This succeeds whatever the exception's class does. The less is known of it, the more is sent as text.
    """
    return _Encoder().encode(error, _MAX_DEPTH)


def decode_error(data: WireError) -> Exception:
    """Decode an error from the result of `encode_error`. It was never raised, so it lacks a traceback."""
    name, fields, text, notes, frames, cause = cast(
        "tuple[str, Fields, str, tuple[str, ...], str, WireError | None]", data
    )
    error = _rebuild(name, fields, text)
    for note in notes:
        error.add_note(note)
    if frames:
        error.add_note(_HEADING + frames)
    if cause is not None:
        error.__cause__ = decode_error(cause)
    return error


@attrs.define
class _Encoder:
    """The encoder of one error with its causes and members."""

    remaining: int = _MAX_ERRORS

    def encode(self, error: BaseException, depth: int) -> WireError:
        self.remaining -= 1
        text = _had(lambda: _exact(str(error)), "(its text cannot be had: __str__ fails)")
        name, fields = self._describe(error, text, depth)
        cause = _had(lambda: error.__cause__, None)
        return (
            name,
            fields,
            f"{_name(error)}: {text}",
            _had(lambda: _notes(error), Strs()),
            _had(lambda: _traceback(error), ""),
            None if cause is None or not self._has_room(depth) else self.encode(cause, depth - 1),
        )

    def _has_room(self, depth: int) -> bool:
        return depth > 0 and self.remaining > 0

    def _describe(self, error: BaseException, text: str, depth: int) -> tuple[str, Fields]:
        """Return the class name with which an error is sent, and the arguments to make it again."""
        try:
            if issubclass(type(error), BaseExceptionGroup) and self._has_room(depth):
                return _GROUP, self._members(cast("BaseExceptionGroup[BaseException]", error), depth)
            return _described(error, text)
        except Exception:  # noqa: BLE001 - a foreign class may break anything it defines
            return _as_runtime_error(error, text)

    def _members(self, group: BaseExceptionGroup[BaseException], depth: int) -> Fields:
        message = group.message
        if type(group) not in (ExceptionGroup, BaseExceptionGroup):
            message = f"{_name(group)}: {message}"
        # `_has_room` is called for each, because the previous members have taken room.
        members = [self.encode(member, depth - 1) for member in group.exceptions if self._has_room(depth)]
        return (str(message), tuple(members)), {}


def _described(error: BaseException, text: str) -> tuple[str, Fields]:
    for cls in type(error).__mro__:
        name = _NAMES.get(cls)
        if name is None:
            continue
        is_itself = cls is type(error)
        if cls is Exception and not is_itself:
            break
        prefix = "" if is_itself else f"{_name(error)}: "
        return name, _fields_of(cls)(error, prefix, text)
    return _as_runtime_error(error, text)


def _as_runtime_error(error: BaseException, text: str) -> tuple[str, Fields]:
    return RuntimeError.__name__, ((f"{_name(error)}: {text}",), {})


def _fields_of(cls: type[BaseException]) -> Callable[[Any, str, str], Fields]:
    """Return the function that takes an exception of a registered class apart.

    It gets the exception, a prefix for its message, and its text.
    """
    for base, function in _FIELDS:
        if issubclass(cls, base):
            return function
    return _plain_fields


def _accel_fields(error: AccelError, prefix: str, text: str) -> Fields:
    cls = next(cls for cls in type(error).__mro__ if cls in _NAMES)
    fields: dict[str, object] = {
        str(field.alias): _plain(getattr(error, field.name))
        for field in attrs.fields(cast("type[AccelError]", cls))
    }
    if prefix:
        fields["message"] = f"{prefix}{error.message}"
    return (), fields


def _os_fields(error: OSError, prefix: str, text: str) -> Fields:
    if error.errno is None:
        return _plain_fields(error, prefix, text)
    arguments = [error.errno, f"{prefix}{error.strerror}" if prefix else error.strerror]
    if error.filename is not None:
        arguments.append(error.filename)
    if error.filename2 is not None:
        arguments += [None, error.filename2]  # the argument in between is for another operating system
    return tuple(map(_plain, arguments)), {}


def _named_fields(*names: str) -> Callable[[Any, str, str], Fields]:
    """Make the function for a class that stores its arguments, and fields with these names."""

    def fields(error: BaseException, prefix: str, text: str) -> Fields:
        arguments, _ = _plain_fields(error, prefix, text)
        return arguments, {name: _plain(getattr(error, name)) for name in names}

    return fields


def _unicode_fields(error: UnicodeDecodeError | UnicodeEncodeError, prefix: str, text: str) -> Fields:
    content = error.object if isinstance(error.object, str) else bytes(error.object)
    start, end = error.start, error.end
    if len(content) > _MAX_TEXT:
        content = content[start : min(end, start + _MAX_TEXT)]
        start, end = 0, len(content)
    return (str(error.encoding), content, start, end, f"{prefix}{error.reason}"), {}


def _plain_fields(error: BaseException, prefix: str, text: str) -> Fields:
    """Return the arguments of an exception that only stores them."""
    if not prefix and all(_is_plain(argument) for argument in error.args):
        return error.args, {}
    return (f"{prefix}{text}",), {}


# The first matching entry counts.
_FIELDS: tuple[tuple[type[BaseException], Callable[[Any, str, str], Fields]], ...] = (
    (AccelError, _accel_fields),
    (ActorError, lambda error, prefix, text: ((f"{prefix}{text}",), {"path": str(error.path)})),
    (OSError, _os_fields),
    (ImportError, _named_fields("name", "path")),
    (NameError, _named_fields("name")),
    (AttributeError, _named_fields("name")),
    (UnicodeDecodeError, _unicode_fields),
    (UnicodeEncodeError, _unicode_fields),
)


def _registry() -> dict[str, type[Exception]]:
    classes: dict[str, type[Exception]] = {}
    sources = (
        ("trio.", trio, Exception),
        ("", builtins, Exception),
        ("trio_accel.", errors, AccelError),
        ("trio_accel.", actors, ActorError),
    )
    for prefix, module, base in sources:
        for name in getattr(module, "__all__", vars(module)):
            value = getattr(module, name)
            if isinstance(value, type) and issubclass(value, base) and not issubclass(value, ExceptionGroup):
                classes[f"{prefix}{value.__name__}"] = value
    return classes


_CLASSES = _registry()
_NAMES: dict[type, str] = {cls: name for name, cls in _CLASSES.items()}


def _rebuild(name: str, fields: Fields, text: str) -> Exception:
    arguments, keywords = fields
    if name == _GROUP:
        message, members = cast("tuple[str, tuple[WireError, ...]]", arguments)
        return ExceptionGroup(message, [decode_error(member) for member in members])
    try:
        return _CLASSES[name](*arguments, **keywords)
    except Exception:  # noqa: BLE001 - arguments that the class refuses, or a name of another version
        return RuntimeError(text)


def _name(error: BaseException) -> str:
    cls = type(error)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _had(get: Callable[[], T], otherwise: T) -> T:
    """Return something of an exception, or `otherwise`, because a foreign class may break anything."""
    try:
        return get()
    except Exception:  # noqa: BLE001 - see the docstring
        return otherwise


def _notes(error: BaseException) -> Strs:
    # `__notes__` may contain any objects.
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    return tuple(_exact(note) for note in notes[:_MAX_NOTES])


def _traceback(error: BaseException) -> str:
    """Return the traceback as text, because nothing may keep the frames, and the arrays in them, alive."""
    # The module's loader provides the source lines, and may belong to the program.
    return "".join(traceback.format_tb(error.__traceback__, limit=-_MAX_FRAMES)).rstrip()


_EXACT = frozenset({type(None), bool, int, float, complex, str, bytes})


def _is_plain(value: object) -> bool:
    if type(value) is tuple:
        items = cast("tuple[object, ...]", value)
        return len(items) <= _MAX_ITEMS and all(_is_plain(item) for item in items)
    if type(value) is str or type(value) is bytes:
        return len(value) <= _MAX_TEXT
    return type(value) in _EXACT


def _plain(value: object) -> object:
    """Convert a field's value to a plain one: itself, its number or string, or its text."""
    if _is_plain(value):
        return value
    if isinstance(value, str):
        return _exact(value)
    if isinstance(value, SupportsIndex):
        return operator.index(value)
    if isinstance(value, os.PathLike):
        return _plain(os.fspath(cast("os.PathLike[str]", value)))
    return _had(lambda: _exact(repr(value)), f"({type(value).__qualname__}: __repr__ fails)")


def _exact(text: str) -> str:
    # A subclass of `str` may have its own methods.
    exact = text if type(text) is str else str.__str__(text)
    return exact if len(exact) <= _MAX_TEXT else f"{exact[:_MAX_TEXT]} ... ({len(exact)} characters)"


_EVENTS: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(Event)}


# The types of values by the field's annotation.
_TYPES_OF_FIELDS: dict[object, Any] = {
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
    """Encode an event as plain values, without contexts; a dead letter only has its message's name."""
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
    """Decode a result of `encode_event`.

    Raises:
        Exception: `encode_event` did not make this.
    """
    name, fields = data
    values: dict[str, object] = dict(fields)
    error: Any = fields.get("error")
    if error is not None:
        values["error"] = decode_error(error)
    event: Event = _EVENTS[name](**values)
    for field in attrs.fields(_EVENTS[name]):
        if not isinstance(values[field.name], _TYPES_OF_FIELDS[field.type]):
            raise TypeError(f"{name}: {field.name} is not of type {field.type}")
    return event


def encode_fault(fault: Fault) -> Message:
    """Encode a fault as plain values."""
    return fault.kind, fault.how, fault.seconds, None if fault.error is None else encode_error(fault.error)


def decode_fault(data: Any) -> Fault:
    """Decode a fault from the result of `encode_fault`."""
    kind, how, seconds, error = data
    return Fault(kind=kind, how=how, seconds=seconds, error=None if error is None else decode_error(error))
