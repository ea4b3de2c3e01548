"""Kinds of messages between application and worker. The signature of a function declares each one.

The declaration lists the fields of a message. Calling it makes one, a plain tuple with the name as its first
item. If the receiver does not trust the sender, the readers of the fields follow from the annotations. An
invalid declaration is refused at import, by name.
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
"""Called with any value; returns it as the declared type, or raises `NonsenseError`."""

_LARGEST = 2**63
SHORT_REPR = reprlib.Repr()
"""Texts of arbitrary values."""
SHORT_REPR.maxstring = SHORT_REPR.maxother = 60


def expect(is_so: object, problem: str) -> None:
    """Check a condition. Not for every operation, because making the text takes long.

    Raises:
        NonsenseError: The condition is false.
    """
    if not is_so:
        raise NonsenseError(problem)


def refuse(value: object, expected: str) -> NoReturn:
    """Refuse a value that does not fit its declaration."""
    raise NonsenseError(f"{SHORT_REPR.repr(value)} is not of type {expected}")


# Readers (D80). They must expect any value, because a worker with damaged memory may send it.


def _integer(minimum: int, expected: str) -> Reader:
    """Make a reader of 64-bit integers from `minimum`."""

    def read(value: Any) -> int:
        if type(value) is not int or not minimum <= value < _LARGEST:
            refuse(value, expected)
        return value

    return read


def _of_type(kind: type, expected: str) -> Reader:
    """Make a reader of values with exactly this type, because a subclass may have its own methods."""

    def read(value: Any) -> Any:
        if type(value) is not kind:
            refuse(value, expected)
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
"""A 63-bit unsigned integer, in a declaration."""

Integer: TypeAlias = Annotated[int, _integer(1 - _LARGEST, "integer")]
"""A 64-bit signed integer, in a declaration."""


def counts(number: int) -> Reader:
    """Make a reader of `number` counts."""
    return _fields([_count] * number)


def _sequence_of(reader: Reader) -> Reader:
    """Make a reader of sequences with any length."""
    return lambda values: tuple([reader(item) for item in _sequence(values)])


def _fields(readers: Sequence[Reader]) -> Reader:
    """Make a reader of fields, each with its own reader."""

    def read(values: Any) -> tuple[Any, ...]:
        if len(_sequence(values)) != len(readers):
            refuse(values, f"sequence of {len(readers)}")
        return tuple([reader(field) for reader, field in zip(readers, values, strict=True)])

    return read


def _reader_of(hint: Any) -> Reader | None:
    """Return the reader of an annotation; None if there is none."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return cast("Reader", arguments[1])
    if origin not in (tuple, dict) and not (len(arguments) == 2 and NoneType in arguments):
        return _PLAIN.get(hint)
    parts = [_reader_of(argument) for argument in arguments if argument not in (..., NoneType)]
    readers = [part for part in parts if part is not None]
    if len(readers) != len(parts):
        return None
    value_reader = readers[-1]
    if origin is dict:
        return lambda values: {name: value_reader(value) for name, value in _table(values).items()}
    if origin is tuple:
        return _sequence_of(value_reader) if ... in arguments else _fields(readers)
    return lambda value: None if value is None else value_reader(value)


# The flag of functions with a starred parameter, which means that descriptors are attached to the message.
_VARIADIC = 4


def _parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Return the names of a function's parameters, and whether one is starred."""
    code = cast("FunctionType", function).__code__
    return [*code.co_varnames[: code.co_argcount]], bool(code.co_flags & _VARIADIC)


class MessageKind(Generic[ParametersP]):
    """One kind of message; calling it makes a message.

    Attributes:
        name: The first item of its messages.
        fields: The names of the other items, in order.
        carries: Whether descriptors are attached.
        read: Reads the fields from JSON; None if it is not sent in JSON.
    """

    def __init__(self, declaration: Callable[ParametersP, None]) -> None:
        self.name: str = cast("FunctionType", declaration).__name__
        self.fields, self.carries = _parameters(declaration)
        self.read: Reader | None = None

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(self.fields)})"

    def __call__(self, *values: ParametersP.args, **named: ParametersP.kwargs) -> Message:
        """Make a message from its fields, in order."""
        assert len(values) == len(self.fields), self
        return self.name, *values


class Messages:
    """The kinds of messages that one end sends to the other.

    Args:
        are_read: Whether the receiver checks each field, because it does not trust the sender.

    Attributes:
        kinds: The kinds, by name.
        writers: For kinds with their own layout: encodes the fields, or returns None for JSON.
        readers: Decodes payloads with such a layout, by their first byte.
    """

    def __init__(self, *, are_read: bool) -> None:
        self.kinds: dict[object, MessageKind[...]] = {}
        self.writers: dict[object, Callable[..., bytes | None]] = {}
        self.readers: dict[int, Callable[[Data], Message]] = {}
        self._are_read = are_read

    def declare(
        self, *tags: int, write: Callable[..., bytes | None] | None = None, read: Reader | None = None
    ) -> Callable[[Callable[ParametersP, None]], MessageKind[ParametersP]]:
        """Declare a kind by a function without a body, with the fields as its parameters.

        Args:
            tags: The first bytes of payloads with a handwritten layout.
            write: Encodes the fields as a payload; None for JSON.
            read: Decodes the result of `write`.

        Raises:
            TypeError: An annotation lacks a reader, the layout has other fields, or another kind has the same
                name or tag.
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
    messages: Messages, *owners: type, leading: Sequence[str] = (), but: Sequence[MessageKind[...]] = ()
) -> Callable[..., dict[object, Callable[..., None]]]:
    """Find the methods that handle each kind of message: `on_chunk` or `_on_chunk` handles `chunk`.

    Args:
        messages: The messages of the other end.
        owners: The classes with these methods. The parameters of a method are the fields.
        leading: The names of parameters before the fields.
        but: The kinds that are handled elsewhere.

    Returns:
        A function that takes objects of these classes, and returns their methods by the name of the kind.

    Raises:
        TypeError: A kind lacks a method, has two, or its method has other parameters; or a method lacks a
            kind.
    """
    methods: dict[object, tuple[int, str]] = {}
    for index, owner in enumerate(owners):
        for name, method in vars(owner).items():
            start, _, taken = name.partition("on_")
            if start.strip("_") or not taken or not isinstance(method, FunctionType):
                continue
            kind, (parameters, carries) = messages.kinds.get(taken), _parameters(method)
            if kind is None or (parameters[1:], carries) != ([*leading, *kind.fields], kind.carries):
                raise TypeError(f"{method.__qualname__} takes {parameters[1:]}, and the message is {kind}")
            if taken in methods:
                raise TypeError(f"{method.__qualname__}: another method takes {kind}")
            methods[taken] = index, name
    for kind in messages.kinds.values():
        if (kind.name in methods) is (kind in but):
            raise TypeError(f"{kind} is taken by {'a' if kind in but else 'no'} method")
    return lambda *objects: {kind: getattr(objects[index], name) for kind, (index, name) in methods.items()}
