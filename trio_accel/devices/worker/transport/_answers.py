"""The messages of a worker as bytes that hold values and nothing else.

A worker runs native code of others, so its messages may be anything. To unpickle that would let it
run what it likes in the application. The answers to operations, of which there are many, are a few words
packed in binary. All other messages are JSON. Each message is checked here against the layout that its kind
has. The dispatch checks what it is about: requests, chunks, blocks.
"""

from __future__ import annotations

import array
import functools
import json
import reprlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex, TypeAlias, cast

import attrs

from ....actors import Event
from ....backends.base import CacheCounts, DType, MemoryStatistics
from ....backends.base.ops import ArraySpec
from ....backends.base.program_definition import build, tree_of
from ._protocol import Codec, Message, NonsenseError
from ._wire_values import decode_error, decode_event

__all__ = ["ANSWERS", "MEMORY", "USAGE"]

MEMORY = tuple(field.name for field in attrs.fields(MemoryStatistics))
USAGE = (*(field.name for field in attrs.fields(CacheCounts)), "workspace")
"""Counts of a worker's memory, in this order."""

_Data: TypeAlias = bytes | memoryview
_Reader: TypeAlias = Callable[[Any], Any]

# First byte of a message: the encoding of the rest.
_JSON, _DONE, _GRANTED, _RESULT, _COPY, _SEVERAL, _DONES, _TIMES = range(8)
_TAG_OF_DONES = bytes([_DONES])
_HEAD = struct.Struct("<BQ")
_THREE = struct.Struct("<BQQQ")
_HEAD_OF_RESULTS = struct.Struct("<BQII")
_HEAD_OF_COPY = struct.Struct("<B5QqQBB")
_ADDRESS = struct.Struct("<QQQQ")
_LENGTH = struct.Struct("<Q")
_WORDS_OF_ADDRESS = _ADDRESS.size // _LENGTH.size
# The values that are read take some twenty times as much memory.
_LONGEST = 16 << 20
_LARGEST = 2**63
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_DTYPES = tuple(DType)
_NUMBERS = {member.value: number for number, member in enumerate(_DTYPES)}
_BYTES, _COMPLEX = "\0bytes", "\0complex"


def _encode(message: Message) -> bytes:
    kind = message[0]
    if kind == "done":
        _, number, addresses, results, trouble = cast("tuple[Any, ...]", message)
        if trouble is None:
            if not results:
                return _brief(_DONE, number, addresses)
            return _with_results(number, addresses, results)
    elif (pack := _PACKED.get(cast("str", kind))) is not None:
        return pack(*message[1:])
    text = b"\0" + _to_json(message).encode()
    if len(text) > _LONGEST:
        raise ValueError(f"a message of {len(text)} bytes is too long; allowed: {_LONGEST}")
    return text


def _with_results(number: int, addresses: Sequence[Any], results: Sequence[bytes]) -> bytes:
    """Head, the numbers of addresses and results, the addresses, the lengths of the results, and these."""
    return b"".join(
        [
            _HEAD_OF_RESULTS.pack(_RESULT, number, len(addresses), len(results)),
            *[_ADDRESS.pack(*address) for address in addresses],
            *[_LENGTH.pack(len(result)) for result in results],
            *results,
        ]
    )


def _read_results(data: _Data) -> Message:
    """Read what `_with_results` wrote."""
    _, number, address_count, count = _HEAD_OF_RESULTS.unpack_from(data)
    start = _HEAD_OF_RESULTS.size
    behind = start + address_count * _ADDRESS.size
    addresses = tuple(_ADDRESS.iter_unpack(data[start:behind]))
    start, behind = behind, behind + count * _LENGTH.size
    lengths = [length for (length,) in _LENGTH.iter_unpack(data[start:behind])]
    if behind + sum(lengths) != len(data) or (len(addresses), len(lengths)) != (address_count, count):
        raise NonsenseError(
            f"results of {len(data)} bytes do not have the lengths that they are said to have"
        )
    results: list[bytes] = []
    for length in lengths:
        results.append(bytes(data[behind : behind + length]))
        behind += length
    return "done", number, addresses, tuple(results), None


def _brief(tag: int, number: int, addresses: Any) -> bytes:
    if not addresses:
        return _HEAD.pack(tag, number)
    return b"".join([_HEAD.pack(tag, number), *[_ADDRESS.pack(*address) for address in addresses]])


def _copy(transfer: int, number: int, index: int, chunk: int, offset: int, array: Any) -> bytes:
    block, start, dtype, shape, strides = array
    head = _HEAD_OF_COPY.pack(
        _COPY, transfer, number, index, chunk, offset, block, start, _NUMBERS[dtype], len(shape)
    )
    return head + _layout(len(shape)).pack(*shape, *strides)


def _granted(number: int, address: int) -> bytes:
    return _brief(_GRANTED, number, (address,))


_PACKED: dict[str, Callable[..., bytes]] = {
    "granted": _granted,
    "copy": _copy,
    "times": functools.partial(_THREE.pack, _TIMES),
}


@functools.cache
def _layout(ndim: int) -> struct.Struct:
    return struct.Struct(f"<{ndim}Q{ndim}q")


def _encode_all(messages: Sequence[Message]) -> bytes:
    words = _words_of(messages)
    if words is not None:
        return _TAG_OF_DONES + words.tobytes()
    parts = [bytes([_SEVERAL])]
    for message in messages:
        data = _encode(message)
        parts += (_LENGTH.pack(len(data)), data)
    return b"".join(parts)


def _words_of(messages: Sequence[Message]) -> array.array[int] | None:
    """Pack answers to operations that went well as words: number, count of addresses, these; else None.

    Many askers get these together, so that each takes a third of the time of a message by itself.
    """
    words: list[int] = []
    for message in messages:
        if message[0] != "done":
            return None
        _, number, addresses, results, trouble = cast("tuple[Any, ...]", message)
        if results or trouble is not None:
            return None
        words += (number, len(addresses))
        for address in addresses:
            words += address
    return array.array("Q", words)


def _plain(value: object) -> object:
    """Write a value that JSON has no form for."""
    if isinstance(value, bytes):
        return {_BYTES: value.decode("latin-1")}
    if isinstance(value, complex):
        return {_COMPLEX: [value.real, value.imag]}
    if isinstance(value, SupportsIndex):
        return int(value)
    raise TypeError(f"{_SHORT.repr(value)} cannot be sent: it is no plain value")


# Made once: an encoder takes longer to make than a message to encode.
_to_json = json.JSONEncoder(default=_plain, separators=(",", ":")).encode


def _decode(data: _Data) -> Message | list[Message]:
    try:
        if data[0] == _DONES:
            return _read_dones(data)
        if data[0] == _SEVERAL:
            return _read_several(data)
        return _read(data)
    except NonsenseError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever it stumbles over is the worker's doing
        raise NonsenseError(f"{type(error).__name__}: {error}") from None


def _read_several(data: _Data) -> list[Message]:
    messages: list[Message] = []
    start = 1
    while start < len(data):
        (length,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size
        _check(length <= len(data) - start, "one of several messages is cut off")
        messages.append(_read(data[start : start + length]))
        start += length
    return messages


def _read_dones(data: _Data) -> list[Message]:
    words = array.array("Q")
    words.frombytes(data[1:])
    numbers = words.tolist()
    messages: list[Message] = []
    start, end = 0, len(numbers)
    while start < end:
        addresses: tuple[Any, ...] = ()
        after = start + 2 + numbers[start + 1] * _WORDS_OF_ADDRESS
        if after != start + 2:
            _check(after <= end, "one of several answers is cut off")
            addresses = tuple(
                [
                    tuple(numbers[first : first + _WORDS_OF_ADDRESS])
                    for first in range(start + 2, after, _WORDS_OF_ADDRESS)
                ]
            )
        messages.append(("done", numbers[start], addresses, (), None))
        start = after
    return messages


def _read(data: _Data) -> Message:
    tag = data[0]
    if tag == _DONE:
        _, number = _HEAD.unpack_from(data)
        addresses = () if len(data) == _HEAD.size else tuple(_ADDRESS.iter_unpack(data[_HEAD.size :]))
        return "done", number, addresses, (), None
    if tag == _RESULT:
        return _read_results(data)
    if tag == _GRANTED:
        (address,) = _ADDRESS.iter_unpack(data[_HEAD.size :])
        return "granted", _HEAD.unpack_from(data)[1], address
    if tag == _COPY:
        return _read_copy(data)
    if tag == _TIMES:
        return "times", *_THREE.unpack(data)[1:]
    if tag != _JSON or len(data) > _LONGEST:
        raise NonsenseError(f"{len(data)} bytes that begin with {tag} are no message")
    kind, *fields = _tuples(_from_json(str(data[1:], "ascii")))
    reader = _READERS.get(kind) if type(kind) is str else None
    if reader is None:
        raise NonsenseError(f"there is no message {_SHORT.repr(kind)}")
    try:
        return kind, *reader(tuple(fields))
    except Exception as error:  # noqa: BLE001  # as above
        raise NonsenseError(f"{kind}: {error}") from None


def _read_copy(data: _Data) -> Message:
    head: tuple[int, ...] = _HEAD_OF_COPY.unpack_from(data)
    block, start, dtype, ndim = head[-4:]
    sizes = _layout(ndim).unpack(data[_HEAD_OF_COPY.size :])
    array = ArraySpec(block, start, _DTYPES[dtype], sizes[:ndim], sizes[ndim:])
    return "copy", *head[1:-4], array


def _tuples(value: Any) -> Any:
    """Make tuples of JSON's arrays."""
    if type(value) is list:
        # A text that is nested too deeply ends in RecursionError, which `_decode` makes nonsense of the
        # worker's.
        return tuple([_tuples(item) for item in cast("Sequence[Any]", value)])
    if type(value) is dict:
        return {name: _tuples(item) for name, item in cast("Mapping[str, Any]", value).items()}
    return value


def _value(found: dict[str, Any]) -> object:
    if _BYTES in found:
        return str(found[_BYTES]).encode("latin-1")
    if _COMPLEX in found:
        real, imaginary = found[_COMPLEX]
        return complex(real, imaginary)
    return found


_from_json = json.JSONDecoder(object_hook=_value).decode

# Readers of the messages (D80). They must expect any value: a worker with damaged memory may send it.


def _check(is_good: object, what: str) -> None:
    if not is_good:
        raise NonsenseError(what)


def _refuse(value: object, what: str) -> NoReturn:
    raise NonsenseError(f"{_SHORT.repr(value)} is no {what}")


def _integer(least: int, what: str) -> _Reader:
    """Make a reader of whole numbers of 64 bits that are not less."""

    def read(value: Any) -> int:
        if type(value) is not int or not least <= value < _LARGEST:
            _refuse(value, what)
        return value

    return read


def _of_type(kind: type, what: str) -> _Reader:
    """Make a reader of values of exactly this type: a subclass may have methods of its own."""

    def read(value: Any) -> Any:
        if type(value) is not kind:
            _refuse(value, what)
        return value

    return read


def _each(reader: _Reader) -> _Reader:
    """Make a reader of sequences of any length."""

    def read(values: Any) -> tuple[Any, ...]:
        return tuple([reader(item) for item in _sequence(values)])

    return read


def _fields(*readers: _Reader) -> _Reader:
    """Make a reader of so many fields, each of which has its own reader."""

    def read(values: Any) -> tuple[Any, ...]:
        if len(_sequence(values)) != len(readers):
            _refuse(values, f"sequence of {len(readers)}")
        return tuple([reader(field) for reader, field in zip(readers, values, strict=True)])

    return read


def _by_name(reader: _Reader) -> _Reader:
    """Make a reader of counts by library."""

    def read(values: Any) -> dict[str, Any]:
        return {name: reader(value) for name, value in _table(values).items()}

    return read


def _or_none(reader: _Reader) -> _Reader:
    return lambda value: None if value is None else reader(value)


def _end(value: Any) -> str:
    if value not in ("done", "withdrawn"):
        _refuse(value, "end of a request")
    return str(value)


def _error(value: Any) -> Exception:
    error = decode_error(value)
    _try_texts(error)
    return error


def _event(value: Any) -> Event:
    event = decode_event(value)
    error: BaseException | None = getattr(event, "error", None)
    if error is not None:
        _try_texts(error)
    return event


def _report(value: Any) -> str:
    build(tree_of(_text(value)), ())
    return str(value)


def _try_texts(error: BaseException) -> None:
    """Check that its text can be made of the fields that were sent."""
    str(error)
    repr(error)
    if isinstance(error, BaseExceptionGroup):
        for member in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            _try_texts(member)
    if error.__cause__ is not None:
        _try_texts(error.__cause__)


_sequence, _table = _of_type(tuple, "sequence"), _of_type(dict, "table")
_count, _any_integer = _integer(0, "count"), _integer(1 - _LARGEST, "integer")
_text, _flag, _content = _of_type(str, "text"), _of_type(bool, "truth value"), _of_type(bytes, "content")
_address = _fields(*[_count] * _WORDS_OF_ADDRESS)
_trouble = _fields(_end, _flag, _flag, _or_none(_error), _each(_any_integer))
_memory, _usage = _fields(*[_count] * len(MEMORY)), _by_name(_fields(*[_count] * len(USAGE)))
_counted = _fields(_count, _count, _by_name(_count), _memory, _usage)

_READERS: dict[str, _Reader] = {
    "ready": _fields(_each(_text)),
    "started": _fields(),
    "prepared": _fields(),
    "made": _fields(_text, _count, _count),
    "progress": _fields(_count, _report),
    "done": _fields(_count, _each(_address), _each(_content), _or_none(_trouble)),
    "chunk": _fields(_count, _count),
    "unchunk": _fields(_count),
    "result": _fields(_count, _or_none(_counted)),
    "event": _fields(_event, _text),
    "log": _fields(_text, _count, _text),
    "lost": _fields(_error, _flag),
    "closed": _fields(),
}

ANSWERS = Codec(_encode, _encode_all, _decode)
"""Codec of a worker's messages to the application (D80).

Reading makes errors, events and arrays of their fields, so the values differ from the written ones in these.

Raises:
    NonsenseError: While reading: it is no message of a worker.
    TypeError: While writing: a value is not plain.
"""
