"""The messages of a worker as bytes that contain only values.

A worker runs foreign native code, so its messages may be anything. Unpickling them would let it run arbitrary
code in the application. The many answers to operations are a few words, packed in binary. All other messages
are JSON. Each message is checked here against its declaration (D80). The dispatch checks its contents:
requests, chunks, blocks.
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
"""The counts of a worker's memory, in this order."""

KINDS = Messages(are_read=True)
"""All messages of a worker."""

_answer = KINDS.declare()

# The first byte of a message: the encoding of the rest.
_JSON, _DONE, _GRANTED, _RESULTS, _COPY, _TIMES = 0, 1, 2, 3, 4, 7
_HEAD = struct.Struct("<BQ")
_THREE = struct.Struct("<BQQQ")
_HEAD_OF_RESULTS = struct.Struct("<BQII")
_HEAD_OF_COPY = struct.Struct("<B5QqQBB")
_ADDRESS = struct.Struct("<QQQQ")
_LENGTH = struct.Struct("<Q")
# The decoded values take some twenty times as much memory.
_MAX_ANSWER_BYTES = 16 << 20
_DTYPES = tuple(DType)
_NUMBERS = {member.value: number for number, member in enumerate(_DTYPES)}
_BYTES, _COMPLEX = "\0bytes", "\0complex"


# The declarations, with the readers of their fields.


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
    """Check that its text can be made from the received fields."""
    str(error)
    repr(error)
    if isinstance(error, BaseExceptionGroup):
        for member in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            _try_texts(member)
    if error.__cause__ is not None:
        _try_texts(error.__cause__)


def _write_done(number: int, addresses: Any, results: Sequence[bytes], trouble: object) -> bytes | None:
    """Encode an answer to a successful operation: only its places, or these with host arrays.

    The results follow the numbers of addresses and results, the addresses, and the lengths of the results.
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
    """Decode the result of `_write_done`."""
    if data[0] == _DONE:
        _, number = _HEAD.unpack_from(data)
        addresses = () if len(data) == _HEAD.size else tuple(_ADDRESS.iter_unpack(data[_HEAD.size :]))
        return "done", number, addresses, (), None
    _, number, address_count, count = _HEAD_OF_RESULTS.unpack_from(data)
    start = _HEAD_OF_RESULTS.size
    end = start + address_count * _ADDRESS.size
    addresses = tuple(_ADDRESS.iter_unpack(data[start:end]))
    start, end = end, end + count * _LENGTH.size
    lengths = [length for (length,) in _LENGTH.iter_unpack(data[start:end])]
    if end + sum(lengths) != len(data) or (len(addresses), len(lengths)) != (address_count, count):
        raise NonsenseError(
            f"results of {len(data)} bytes do not have the lengths that they are said to have"
        )
    results: list[bytes] = []
    for length in lengths:
        results.append(bytes(data[end : end + length]))
        end += length
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


# The encoded form of an error or an event, annotated with its decoder.
_Error: TypeAlias = Annotated[WireError, _error]
_Event: TypeAlias = Annotated[Message, _event]
_Address: TypeAlias = tuple[Count, Count, Count, Count]
_Trouble: TypeAlias = tuple[Annotated[str, _end], bool, bool, _Error | None, tuple[Integer, ...]]
_Memory: TypeAlias = Annotated[tuple[object, ...], counts(len(MEMORY))]
_Usage: TypeAlias = Annotated[tuple[object, ...], counts(len(USAGE))]
_KeptCounts: TypeAlias = Annotated[tuple[object, ...], counts(len(KEPT_COUNTS))]
_Counted: TypeAlias = tuple[Count, Count, dict[str, Count], _Memory, dict[str, _Usage], _KeptCounts]


@_answer
def ready(libraries: Strs) -> None:
    """The device is open, and has these libraries."""


@_answer
def started() -> None:
    """The context serves."""


@_answer
def prepared() -> None:
    """All libraries to open in advance are open."""


@_answer
def program_opened(library: str, taken: Count, imports: Count) -> None:
    """A program's library is open. The total nanoseconds, and those for the import of its module."""


@_answer
def progress(number: Count, text: Annotated[str, _report]) -> None:
    """The last value that a method has reported. The next one follows after `heard`, or before `done`."""


# The two are handwritten, because each timed operation needs one.
@KINDS.declare(_TIMES, write=_write_times, read=_read_times)
def times(number: Count, begun: Count, completed: Count) -> None:
    """The times when a launch began and was complete, in nanoseconds; sent before `done`."""


# These are handwritten, because each operation needs one, and a plain success consists only of the head.
@KINDS.declare(_DONE, _RESULTS, write=_write_done, read=_read_done)
def done(
    number: Count, addresses: tuple[_Address, ...], results: tuple[bytes, ...], trouble: _Trouble | None
) -> None:
    """The end of a request or a lease; exactly one for each.

    The results are bytes of host arrays. `trouble` is None if it was launched and succeeded. Otherwise it
    contains "done" or "withdrawn", whether it was launched, whether its fault has struck, its error, and the
    ids of invalid blocks. After a success, blocks with unchanged places are left out. Otherwise all existing
    blocks that it has made are listed.
    """


# These are handwritten, because a world of devices leases its arrays for each collective.
@KINDS.declare(_GRANTED, write=_write_granted, read=_read_granted)
def granted(number: Count, address: _Address) -> None:
    """A block is held; its place is not meaningful if it was borrowed."""


# These are handwritten, because the message itself contains the number of an array's axes.
@KINDS.declare(_COPY, write=_write_copy, read=_read_copy)
def copy(transfer: int, number: int, index: int, chunk: int, offset: int, array: Message) -> None:
    """Copy from or to the host array with this index of a request, because the stream is there."""


@_answer
def chunk(number: Count, nbytes: Count, *descriptors: int) -> None:
    """Memory was made; sent before any block in it is used."""


@_answer
def unchunk(number: Count) -> None:
    """Memory was freed."""


@_answer
def result(number: Count, value: _Counted | None) -> None:
    """The answer to a question.

    For "count" it contains: launched, completed, in flight by library, memory, plans and workspace by
    library.
    """


@_answer
def event(event: _Event, actor_class: str) -> None:
    """An event of the worker's actors."""


@_answer
def log(name: str, level: Count, text: str) -> None:
    """A log record: logger, level, text."""


@_answer
def lost(error: _Error, is_silent: bool) -> None:
    """The context is lost, and launches nothing more. `is_silent`: it no longer writes to memory."""


@_answer
def closed() -> None:
    """The context has ended in order."""


# The functions below encode messages as bytes, and decode them.


def _encode(message: Message) -> bytes:
    write = KINDS.writers.get(message[0])
    if write is not None and (packed := write(*message[1:])) is not None:
        return packed
    text = b"\0" + _to_json(message).encode()
    if len(text) > _MAX_ANSWER_BYTES:
        raise ValueError(f"a message of {len(text)} bytes is too long; allowed: {_MAX_ANSWER_BYTES}")
    return text


def _plain(value: object) -> object:
    """Encode a value that JSON cannot represent."""
    if isinstance(value, bytes):
        return {_BYTES: value.decode("latin-1")}
    if isinstance(value, complex):
        return {_COMPLEX: [value.real, value.imag]}
    if isinstance(value, SupportsIndex):
        return int(value)
    raise TypeError(f"{SHORT_REPR.repr(value)} cannot be sent: it is not a plain value")


# Made once, because making an encoder takes longer than encoding a message.
_to_json = json.JSONEncoder(default=_plain, separators=(",", ":")).encode


def _decode(data: Data) -> Message:
    try:
        return KINDS.readers.get(data[0], _read_json)(data)
    except NonsenseError:
        raise
    except Exception as error:  # noqa: BLE001  # any failure is caused by the worker
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
    """Convert JSON's arrays to tuples."""
    if type(value) is list:
        # A text with too deep nesting ends in RecursionError, which `_decode` converts to nonsense of the
        # worker.
        return tuple([_tuples(item) for item in cast("Sequence[Any]", value)])
    if type(value) is dict:
        return {name: _tuples(item) for name, item in cast("Mapping[str, Any]", value).items()}
    return value


def _value(fields: dict[str, Any]) -> object:
    if _BYTES in fields:
        return str(fields[_BYTES]).encode("latin-1")
    if _COMPLEX in fields:
        real, imaginary = fields[_COMPLEX]
        return complex(real, imaginary)
    return fields


_from_json = json.JSONDecoder(object_hook=_value).decode

ANSWERS = Codec(_encode, _decode)
"""The codec of a worker's messages to the application (D80).

Decoding makes errors, events and arrays from their fields, so these values differ from the encoded ones.

Raises:
    NonsenseError: While decoding: it is not a message of a worker.
    TypeError: While encoding: a value is not plain.
"""
