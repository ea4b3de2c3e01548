"""The messages of a worker as bytes that hold values and nothing else.

A worker runs native code of others, so its messages may be anything. To unpickle that would let it
run what it likes in the application. The answers to operations, of which there are many, are a few words
packed in binary. All other messages are JSON. Each message is checked here against its declaration (D80). The
dispatch checks what it is about: requests, chunks, blocks.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, SupportsIndex, TypeAlias, cast

import attrs

from ...actors import Event
from ...backends.base import ArraySpec, CacheCounts, DType, Ints, KeptCounts, MemoryStatistics, Strs
from ...backends.base.contract.program_definition import build, tree_of
from ._messages import SHORT_REPR, Count, Data, Integer, Messages, counts, refuse
from ._protocol import Codec, Message, NonsenseError
from ._wire_values import WireError, decode_error, decode_event

MEMORY = tuple(field.name for field in attrs.fields(MemoryStatistics))
KEPT_COUNTS = tuple(field.name for field in attrs.fields(KeptCounts))
USAGE = (*(field.name for field in attrs.fields(CacheCounts)), "workspace")
"""Counts of a worker's memory, in this order."""

KINDS = Messages(are_read=True)
"""All messages of a worker."""

_answer = KINDS.declare()

# First byte of a message: the encoding of the rest.
_JSON, _DONE, _GRANTED, _RESULTS, _COPY, _TIMES = 0, 1, 2, 3, 4, 7
_HEAD = struct.Struct("<BQ")
_THREE = struct.Struct("<BQQQ")
_HEAD_OF_RESULTS = struct.Struct("<BQII")
_HEAD_OF_COPY = struct.Struct("<B5QqQBB")
_ADDRESS = struct.Struct("<QQQQ")
_LENGTH = struct.Struct("<Q")
# The values that are read take some twenty times as much memory.
_MAX_ANSWER_BYTES = 16 << 20
_DTYPES = tuple(DType)
_NUMBERS = {member.value: number for number, member in enumerate(_DTYPES)}
_BYTES, _COMPLEX = "\0bytes", "\0complex"


# The declarations, with what reads their fields.


def _end(value: Any) -> str:
    if value not in ("done", "withdrawn"):
        refuse(value, "end of a request")
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
    if type(value) is not str:
        refuse(value, "text")
    build(tree_of(value), ())
    return value


def _try_texts(error: BaseException) -> None:
    """Check that its text can be made of the fields that were sent."""
    str(error)
    repr(error)
    if isinstance(error, BaseExceptionGroup):
        for member in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            _try_texts(member)
    if error.__cause__ is not None:
        _try_texts(error.__cause__)


def _write_done(number: int, addresses: Any, results: Sequence[bytes], trouble: object) -> bytes | None:
    """Write an answer to an operation that went well: its places alone, or with host arrays.

    These come behind the numbers of addresses and results, the addresses, and the lengths of the results.
    """
    if trouble is not None:
        return None
    if not results:
        if not addresses:
            return _HEAD.pack(_DONE, number)
        return b"".join([_HEAD.pack(_DONE, number), *[_ADDRESS.pack(*address) for address in addresses]])
    return b"".join(
        [
            _HEAD_OF_RESULTS.pack(_RESULTS, number, len(addresses), len(results)),
            *[_ADDRESS.pack(*address) for address in addresses],
            *[_LENGTH.pack(len(result)) for result in results],
            *results,
        ]
    )


def _read_done(data: Data) -> Message:
    """Read what `_write_done` wrote."""
    if data[0] == _DONE:
        _, number = _HEAD.unpack_from(data)
        addresses = () if len(data) == _HEAD.size else tuple(_ADDRESS.iter_unpack(data[_HEAD.size :]))
        return "done", number, addresses, (), None
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


def _write_granted(number: int, address: Any) -> bytes:
    return _HEAD.pack(_GRANTED, number) + _ADDRESS.pack(*address)


def _read_granted(data: Data) -> Message:
    return "granted", _HEAD.unpack_from(data)[1], _ADDRESS.unpack(data[_HEAD.size :])


def _write_times(number: int, begun: int, completed: int) -> bytes:
    return _THREE.pack(_TIMES, number, begun, completed)


def _read_times(data: Data) -> Message:
    return "times", *_THREE.unpack(data)[1:]


@functools.cache
def _layout(ndim: int) -> struct.Struct:
    return struct.Struct(f"<{ndim}Q{ndim}q")


def _write_copy(transfer: int, number: int, index: int, chunk: int, offset: int, array: Any) -> bytes:
    block, start, dtype, shape, strides = array
    head = _HEAD_OF_COPY.pack(
        _COPY, transfer, number, index, chunk, offset, block, start, _NUMBERS[dtype], len(shape)
    )
    return head + _layout(len(shape)).pack(*shape, *strides)


def _read_copy(data: Data) -> Message:
    head: Ints = _HEAD_OF_COPY.unpack_from(data)
    block, start, dtype, ndim = head[-4:]
    sizes = _layout(ndim).unpack(data[_HEAD_OF_COPY.size :])
    array = ArraySpec(block, start, _DTYPES[dtype], sizes[:ndim], sizes[ndim:])
    return "copy", *head[1:-4], array


# The form in which an error or an event is sent, annotated with what makes it again.
_Error: TypeAlias = Annotated[WireError, _error]
_Event: TypeAlias = Annotated[Message, _event]
_Place: TypeAlias = tuple[Count, Count, Count, Count]
_Trouble: TypeAlias = tuple[Annotated[str, _end], bool, bool, _Error | None, tuple[Integer, ...]]
_Memory: TypeAlias = Annotated[tuple[object, ...], counts(len(MEMORY))]
_Usage: TypeAlias = Annotated[tuple[object, ...], counts(len(USAGE))]
_Kept: TypeAlias = Annotated[tuple[object, ...], counts(len(KEPT_COUNTS))]
_Counted: TypeAlias = tuple[Count, Count, dict[str, Count], _Memory, dict[str, _Usage], _Kept]


@_answer
def ready(libraries: Strs) -> None:
    """The device is open, and has these libraries."""


@_answer
def started() -> None:
    """The context serves."""


@_answer
def prepared() -> None:
    """All is open that was to be opened ahead."""


@_answer
def made(library: str, taken: Count, imports: Count) -> None:
    """A program's library is open; nanoseconds that this took, those of them for the import of its module."""


@_answer
def progress(number: Count, text: Annotated[str, _report]) -> None:
    """The last value that a method has reported; the next once it is heard, or ahead of `done`."""


# The two are written by hand: where launches are timed, each operation has one.
@KINDS.declare(_TIMES, write=_write_times, read=_read_times)
def times(number: Count, begun: Count, completed: Count) -> None:
    """The times when a launch began and was complete, in nanoseconds: ahead of `done`."""


# These are written by hand: each operation has one, and where all went well its head is all that there is.
@KINDS.declare(_DONE, _RESULTS, write=_write_done, read=_read_done)
def done(
    number: Count, addresses: tuple[_Place, ...], results: tuple[bytes, ...], trouble: _Trouble | None
) -> None:
    """The end of a request or a lease; exactly one for each.

    The bytes are those of host arrays. `trouble` is None if it was launched and all went well, otherwise
    "done" or "withdrawn", whether it was launched, whether its fault has struck, its error, and ids of
    invalid blocks. Where all went well, blocks that are where they were before are not named; otherwise all
    are that it has made and that are there.
    """


# These are written by hand: a world of devices holds its arrays for each collective.
@KINDS.declare(_GRANTED, write=_write_granted, read=_read_granted)
def granted(number: Count, address: _Place) -> None:
    """A block is held; without a place where it was borrowed."""


# These are written by hand: the message itself tells how many axes an array has.
@KINDS.declare(_COPY, write=_write_copy, read=_read_copy)
def copy(transfer: int, number: int, index: int, chunk: int, offset: int, array: Message) -> None:
    """Copy from or to the host array of this index of a request: the stream is there."""


@_answer
def chunk(number: Count, nbytes: Count, *descriptors: int) -> None:
    """Memory was made; before any block in it is named."""


@_answer
def unchunk(number: Count) -> None:
    """That memory is gone."""


@_answer
def result(number: Count, value: _Counted | None) -> None:
    """The answer to a question.

    To "count" these are: launched, completed, in flight by library, memory, plans and workspace by library.
    """


@_answer
def event(event: _Event, actor_class: str) -> None:
    """An event of the worker's actors."""


@_answer
def log(name: str, level: Count, text: str) -> None:
    """A record of the logs: logger, level, text."""


@_answer
def lost(error: _Error, is_silent: bool) -> None:
    """The context is gone, nothing more is launched; whether nothing of it writes any more."""


@_answer
def closed() -> None:
    """The context has ended in order."""


# The functions from here on turn messages into bytes, and bytes into messages.


def _encode(message: Message) -> bytes:
    write = KINDS.writers.get(message[0])
    if write is not None and (packed := write(*message[1:])) is not None:
        return packed
    text = b"\0" + _to_json(message).encode()
    if len(text) > _MAX_ANSWER_BYTES:
        raise ValueError(f"a message of {len(text)} bytes is too long; allowed: {_MAX_ANSWER_BYTES}")
    return text


def _plain(value: object) -> object:
    """Write a value that JSON has no form for."""
    if isinstance(value, bytes):
        return {_BYTES: value.decode("latin-1")}
    if isinstance(value, complex):
        return {_COMPLEX: [value.real, value.imag]}
    if isinstance(value, SupportsIndex):
        return int(value)
    raise TypeError(f"{SHORT_REPR.repr(value)} cannot be sent: it is not a plain value")


# Made once: an encoder takes longer to make than a message to encode.
_to_json = json.JSONEncoder(default=_plain, separators=(",", ":")).encode


def _decode(data: Data) -> Message:
    try:
        return KINDS.readers.get(data[0], _read_json)(data)
    except NonsenseError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever it stumbles over is the worker's doing
        raise NonsenseError(f"{type(error).__name__}: {error}") from None


def _read_json(data: Data) -> Message:
    if data[0] != _JSON or len(data) > _MAX_ANSWER_BYTES:
        raise NonsenseError(f"{len(data)} bytes that begin with {data[0]} are not a message")
    name, *fields = _tuples(_from_json(str(data[1:], "ascii")))
    kind = KINDS.kinds.get(name) if type(name) is str else None
    if kind is None or kind.read is None:
        raise NonsenseError(f"unknown message {SHORT_REPR.repr(name)}")
    try:
        return kind.name, *kind.read(tuple(fields))
    except Exception as error:  # noqa: BLE001  # as above
        raise NonsenseError(f"{name}: {error}") from None


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

ANSWERS = Codec(_encode, _decode)
"""Codec of a worker's messages to the application (D80).

Reading makes errors, events and arrays of their fields, so the values differ from the written ones in these.

Raises:
    NonsenseError: While reading: it is no message of a worker.
    TypeError: While writing: a value is not plain.
"""
