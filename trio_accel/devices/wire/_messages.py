"""Kinds of messages between application and worker, each declared once, by the signature of a function.

The declaration says what a message is made of. Calling it makes one, a plain tuple whose first item is the
name. What reads it at the other end, where that does not trust the sender, follows from the annotations. A
declaration that does not fit is refused at import, by name.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from types import FunctionType, NoneType
from typing import (
    Annotated,
    Any,
    Generic,
    NoReturn,
    ParamSpec,
    TypeAlias,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from ._protocol import Message, NonsenseError

ParametersP = ParamSpec("ParametersP")

Data: TypeAlias = bytes | memoryview
Reader: TypeAlias = Callable[[Any], Any]
"""Called with a value of any kind; returns it as the type that was declared, or raises `NonsenseError`."""

_LARGEST = 2**63
SHORT_REPR = reprlib.Repr()
"""Texts of values that may be anything."""
SHORT_REPR.maxstring = SHORT_REPR.maxother = 60


def expect(is_so: object, what: str) -> None:
    """See that something is so; not for what happens with each operation, as the text takes long to make.

    Raises:
        NonsenseError: It is not.
    """
    if not is_so:
        raise NonsenseError(what)


def refuse(value: object, what: str) -> NoReturn:
    """Refuse a value that is not what was declared."""
    raise NonsenseError(f"{SHORT_REPR.repr(value)} is not of type {what}")


# Readers (D80). They must expect any value: a worker with damaged memory may send it.


def _integer(least: int, what: str) -> Reader:
    """Make a reader of whole numbers of 64 bits that are not less."""

    def read(value: Any) -> int:
        if type(value) is not int or not least <= value < _LARGEST:
            refuse(value, what)
        return value

    return read


def _of_type(kind: type, what: str) -> Reader:
    """Make a reader of values of exactly this type: a subclass may have methods of its own."""

    def read(value: Any) -> Any:
        if type(value) is not kind:
            refuse(value, what)
        return value

    return read


_count = _integer(0, "count")
_sequence, _table = _of_type(tuple, "sequence"), _of_type(dict, "table")
_PLAIN: dict[object, Reader] = {
    str: _of_type(str, "text"),
    bool: _of_type(bool, "truth value"),
    bytes: _of_type(bytes, "content"),
}

Count: TypeAlias = Annotated[int, _count]
"""A whole number of 63 bits, in a declaration."""

Integer: TypeAlias = Annotated[int, _integer(1 - _LARGEST, "integer")]
"""A whole number of 64 bits with a sign, likewise."""


def counts(number: int) -> Reader:
    """Make a reader of so many counts."""
    return _fields([_count] * number)


def _each(reader: Reader) -> Reader:
    """Make a reader of sequences of any length."""
    return lambda values: tuple([reader(item) for item in _sequence(values)])


def _fields(readers: Sequence[Reader]) -> Reader:
    """Make a reader of so many fields, each of which has its own reader."""

    def read(values: Any) -> tuple[Any, ...]:
        if len(_sequence(values)) != len(readers):
            refuse(values, f"sequence of {len(readers)}")
        return tuple([reader(field) for reader, field in zip(readers, values, strict=True)])

    return read


def _reader_of(hint: Any) -> Reader | None:
    """Find the reader of an annotation; None where there is none."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return cast("Reader", arguments[1])
    if origin not in (tuple, dict) and not (len(arguments) == 2 and NoneType in arguments):
        return _PLAIN.get(hint)
    parts = [_reader_of(argument) for argument in arguments if argument not in (..., NoneType)]
    readers = [part for part in parts if part is not None]
    if len(readers) != len(parts):
        return None
    last = readers[-1]
    if origin is dict:
        return lambda values: {name: last(value) for name, value in _table(values).items()}
    if origin is tuple:
        return _each(last) if ... in arguments else _fields(readers)
    return lambda value: None if value is None else last(value)


# The flag of a function whose parameter has a star: descriptors come with the message.
_VARIADIC = 4


def _parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Return the names of a function's parameters, and whether there is one with a star."""
    code = cast("FunctionType", function).__code__
    return [*code.co_varnames[: code.co_argcount]], bool(code.co_flags & _VARIADIC)


class MessageKind(Generic[ParametersP]):
    """One kind of message; calling it makes a message.

    Attributes:
        name: The first item of its messages.
        fields: Names of the others, in order.
        carries: Whether descriptors come with it.
        read: Reads the fields as JSON has them; None where it is not sent in JSON.
    """

    def __init__(self, declaration: Callable[ParametersP, None]) -> None:
        self.name: str = cast("FunctionType", declaration).__name__
        self.fields, self.carries = _parameters(declaration)
        self.read: Reader | None = None

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(self.fields)})"

    def __call__(self, *values: ParametersP.args, **named: ParametersP.kwargs) -> Message:
        """Make a message; its fields are given by their places."""
        assert len(values) == len(self.fields), self
        return self.name, *values


class Messages:
    """The kinds of messages that one end sends to the other.

    Args:
        are_read: Whether the receiver checks each field, as it does not trust the sender.

    Attributes:
        kinds: The kinds, by name.
        writers: Makes bytes of the fields of a kind that has a layout of its own, or None for JSON.
        readers: What reads a payload with such a layout, by its first byte.
    """

    def __init__(self, *, are_read: bool) -> None:
        self.kinds: dict[object, MessageKind[...]] = {}
        self.writers: dict[object, Callable[..., bytes | None]] = {}
        self.readers: dict[int, Callable[[Data], Message]] = {}
        self._are_read = are_read

    def declare(
        self, *tags: int, write: Callable[..., bytes | None] | None = None, read: Reader | None = None
    ) -> Callable[[Callable[ParametersP, None]], MessageKind[ParametersP]]:
        """Declare a kind by a function without a body: its fields are the parameters.

        Args:
            tags: First bytes of the payloads of a kind that has a layout of its own, made by hand.
            write: Makes a payload of the fields; None for JSON.
            read: Reads what `write` has made.

        Raises:
            TypeError: An annotation has no reader, the layout is for other fields, or another kind has the
                name or a tag.
        """

        def make(declaration: Callable[ParametersP, None]) -> MessageKind[ParametersP]:
            kind = MessageKind(declaration)
            if self.kinds.setdefault(kind.name, kind) is not kind:
                raise TypeError(f"{kind}: another kind has the name")
            if self._are_read:
                hints = get_type_hints(declaration, include_extras=True)
                readers = [_reader_of(hints.get(field)) for field in kind.fields]
                if None not in readers:
                    kind.read = _fields(cast("list[Reader]", readers))
                elif write is None:
                    field = kind.fields[readers.index(None)]
                    raise TypeError(f"{kind}: no reader fits the annotation of {field}")
            if write is not None and read is not None:
                if _parameters(write)[0] != kind.fields:
                    raise TypeError(f"{kind} does not fit its writer, which takes {_parameters(write)[0]}")
                self.writers[kind.name] = write
                for tag in tags:
                    if self.readers.setdefault(tag, read) is not read:
                        raise TypeError(f"{kind}: another kind has the tag {tag}")
            return kind

        return make


def handlers(
    messages: Messages, *owners: type, given: Sequence[str] = (), but: Sequence[MessageKind[...]] = ()
) -> Callable[..., dict[object, Callable[..., None]]]:
    """Find the methods that take each kind of message: `on_chunk` or `_on_chunk` takes `chunk`.

    Args:
        messages: What the other end sends.
        owners: Classes that have these methods. A method's parameters are the fields.
        given: Names of parameters ahead of the fields.
        but: Kinds that are taken elsewhere.

    Returns:
        Called with objects of these classes, it returns their methods by the name of the kind.

    Raises:
        TypeError: A kind has no method, or two, or one with other parameters; or a method has no kind.
    """
    found: dict[object, tuple[int, str]] = {}
    for place, owner in enumerate(owners):
        for name, method in vars(owner).items():
            start, _, taken = name.partition("on_")
            if start.strip("_") or not taken or not isinstance(method, FunctionType):
                continue
            kind, (parameters, carries) = messages.kinds.get(taken), _parameters(method)
            if kind is None or (parameters[1:], carries) != ([*given, *kind.fields], kind.carries):
                raise TypeError(f"{method.__qualname__} takes {parameters[1:]}, and the message is {kind}")
            if taken in found:
                raise TypeError(f"{method.__qualname__}: another method takes {kind}")
            found[taken] = place, name
    for kind in messages.kinds.values():
        if (kind.name in found) is (kind in but):
            raise TypeError(f"{kind} is taken by {'a' if kind in but else 'no'} method")
    return lambda *objects: {kind: getattr(objects[place], name) for kind, (place, name) in found.items()}
