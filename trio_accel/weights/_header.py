"""The header of a safetensors file: read with suspicion, and written.

The format: 8 bytes with the length of the header, the header in JSON, then the tensors' bytes, one behind the
other without holes. Source: https://github.com/huggingface/safetensors, its section "Format".
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, cast

import attrs
import numpy as np

from ..backends.base import DType, NotSupportedError

__all__ = [
    "LENGTH",
    "LONGEST",
    "Header",
    "TensorInfo",
    "WeightsError",
    "check_text",
    "encode_header",
    "parse_header",
    "parse_json",
]

LENGTH = 8
"""Bytes of the number that says how long the header is."""

LONGEST = 100_000_000
"""Bytes of the longest header, as in the format's own library."""

# Of commas and opening brackets; a tensor of two axes has eight. So a header that is read makes no more than
# about 0.3 GiB of objects, however few bytes it has for each.
_MOST_MARKS = 1 << 21
# So many are parsed in C, in about 10 ms, during which no other thread runs.
_AT_ONCE = 1 << 15
_MOST_AXES = 64
_MOST_BYTES = (1 << 63) - 1
_METADATA = "__metadata__"

# By the names of dtypes: to hash those of low precision imports ml_dtypes, which takes 0.05 s.
_NAMES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "complex64": "C64",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}
_DTYPES = {name: DType(dtype) for dtype, name in _NAMES.items()}
# Element types of the format that devices do not have, with their bits.
_FOREIGN = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}


class WeightsError(ValueError):
    """A file of weights is cut off, damaged or no safetensors file. The message names the file."""


@attrs.frozen(kw_only=True)
class TensorInfo:
    """Entry of a tensor in a header.

    Attributes:
        name: Its name.
        format: Its element type in the format's own words, such as ``"BF16"``.
        shape: Elements along each axis.
        nbytes: Bytes that it takes in the file.
        offset: Where its bytes begin, from the start of the file.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> DType:
        """Its element type.

        Raises:
            NotSupportedError: Devices have no such element type.
        """
        dtype = _DTYPES.get(self.format)
        if dtype is None:
            raise NotSupportedError(
                f"tensor {self.name!r} has the element type {self.format}, which no device has; "
                f"there are {', '.join(_DTYPES)}"
            )
        return dtype


@attrs.frozen(kw_only=True)
class Header:
    """Header of a file.

    Attributes:
        tensors: By name, in the order of their bytes.
        metadata: Text by name, which the writer has added.
    """

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]


def parse_header(text: bytes, data: int) -> Header:
    """Read a header and hold every word of it against the file.

    Args:
        text: The header without its length.
        data: Bytes of the file behind it.

    Raises:
        WeightsError: It is no header, or not that of this file; the message does not name the file.
    """
    if not text.startswith(b"{"):
        raise WeightsError("the header does not begin with {")
    entries = parse_json(text, "the header", _refuse)
    metadata = _metadata_of(entries.pop(_METADATA, None))
    start = LENGTH + len(text)
    tensors = [_tensor_of(name, entry, start, data) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_tiling(tensors, start, data)
    return Header(tensors={tensor.name: tensor for tensor in tensors}, metadata=metadata)


def parse_json(text: bytes, what: str, number: Callable[[str], object] = float) -> Any:
    """Parse what a stranger has written, in a thread, while the loop goes on.

    Args:
        text: The text.
        what: Its name in errors.
        number: Called with a number that is no whole one.

    Raises:
        WeightsError: It is no JSON, has too much in it, or has a name twice in one object.
    """
    # NumPy counts without the interpreter's lock.
    codes = np.frombuffer(text, np.uint8)
    marks = sum(int(np.count_nonzero(codes == ord(mark))) for mark in ",[{")
    if marks > _MOST_MARKS:
        raise WeightsError(
            f"{what} has {marks} commas and opening brackets, more than {_MOST_MARKS}: those of "
            f"{_MOST_MARKS // 8} tensors"
        )
    decoder: Any = json.JSONDecoder(
        object_pairs_hook=_distinct, parse_constant=number, parse_float=number, parse_int=_whole
    )
    if marks > _AT_ONCE:
        # The scanner in C keeps the lock to the end of a list; the one in Python gives it away everywhere.
        decoder.parse_object, decoder.parse_array = JSONObject, JSONArray
        decoder.scan_once = py_make_scanner(decoder)
    try:
        return decoder.decode(text.decode())
    except RecursionError:
        raise WeightsError(f"{what} is nested too deeply") from None
    except WeightsError:
        raise
    except ValueError as error:
        # Also what is no UTF-8, and numbers with thousands of digits.
        raise WeightsError(f"{what} is no JSON: {error}") from None


def check_text(text: str) -> None:
    """Require that a text can be written: JSON has escapes for halves of a surrogate pair.

    Raises:
        WeightsError: It has one without the other.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise WeightsError(f"{_shown(text)} is no text: it has a lone surrogate") from None


def encode_header(
    arrays: Iterable[tuple[str, DType, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """Write a header, its length included, for arrays (name, dtype, shape, bytes) in this order.

    Raises:
        NotSupportedError: The format does not have an element type.
        ValueError: A name, or the length of all, is not valid in the format.
    """
    entries: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape, nbytes in arrays:
        if name == _METADATA:
            raise ValueError(f"save: no array can have the name {name!r}, which the format has for text")
        if dtype.value not in _NAMES:
            raise NotSupportedError(f"save: {name!r} is {dtype}, which the format safetensors does not have")
        entries[name] = {"dtype": _NAMES[dtype.value], "shape": shape, "data_offsets": (end, end + nbytes)}
        end += nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    # The data begin at a multiple of 8.
    text += b" " * (-len(text) % LENGTH)
    if len(text) > LONGEST:
        raise ValueError(f"save: the header would take {len(text)} bytes; the format has {LONGEST} at most")
    return len(text).to_bytes(LENGTH, "little") + text


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise WeightsError(f"it has {name!r} twice")
    for name in found:
        check_text(name)
    return found


def _whole(digits: str) -> int:
    # In Python, so that the lock can be given away between two of many numbers with thousands of digits.
    return int(digits)


def _refuse(number: str) -> None:
    raise WeightsError(f"the header has {number[:40]} where whole numbers belong")


def _metadata_of(value: object) -> Mapping[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise WeightsError(f"{_METADATA} must be an object, got {_shown(value)}")
    entries = cast("dict[str, object]", value)
    for name, text in entries.items():
        if not isinstance(text, str):
            raise WeightsError(f"{_METADATA}: {name!r} must be text, got {_shown(text)}")
        check_text(text)
    return cast("dict[str, str]", entries)


def _tensor_of(name: str, entry: object, start: int, data: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise WeightsError(f"{name!r} must be an object, got {_shown(entry)}")
    fields = cast("dict[str, object]", entry)
    missing = {"dtype", "shape", "data_offsets"} - fields.keys()
    if missing:
        raise WeightsError(f"{name!r} has no {', '.join(sorted(missing))}")
    element = fields["dtype"]
    bits = _bits(element) if isinstance(element, str) else 0
    if not bits:
        raise WeightsError(f"{name!r} has the element type {_shown(element)}, which is none of the format")
    shape = _numbers(name, "shape", fields["shape"], _MOST_AXES)
    offsets = _numbers(name, "data_offsets", fields["data_offsets"], 2)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise WeightsError(f"{name!r} has no beginning and end, but data_offsets {offsets}")
    begin, end = offsets
    if end > data:
        raise WeightsError(f"{name!r} ends at byte {end} of the data, of which there are {data}: cut off?")
    # Beside a zero, too: NumPy makes no such array.
    if math.prod(filter(None, shape)) * bits // 8 > _MOST_BYTES:
        raise WeightsError(f"{name!r} has a shape of more elements than memory can have: {shape}")
    if math.prod(shape) * bits != 8 * (end - begin):
        raise WeightsError(f"{name!r} takes {end - begin} bytes, which is not what {element} {shape} takes")
    return TensorInfo(name=name, format=str(element), shape=shape, nbytes=end - begin, offset=start + begin)


def _bits(element: str) -> int:
    dtype = _DTYPES.get(element)
    return _FOREIGN.get(element, 0) if dtype is None else 8 * dtype.itemsize


def _numbers(name: str, field: str, value: object, most: int) -> tuple[int, ...]:
    numbers = cast("list[Any]", value)
    if not isinstance(value, list) or len(numbers) > most:
        raise WeightsError(f"{name!r}: {field} must be a list of at most {most}, got {_shown(numbers)}")
    for number in numbers:
        if type(number) is not int or not 0 <= number <= _MOST_BYTES:
            raise WeightsError(f"{name!r}: {field} must hold sizes, got {_shown(number)}")
    return tuple(numbers)


def _check_tiling(tensors: list[TensorInfo], start: int, data: int) -> None:
    """Require that each byte of the data belongs to one tensor."""
    end, before = start, "the header"
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlap" if tensor.offset < end else "have a hole between them"
            raise WeightsError(f"{before} and {tensor.name!r} {what}")
        end, before = tensor.offset + tensor.nbytes, repr(tensor.name)
    if end != start + data:
        raise WeightsError(f"{start + data - end} bytes behind {before} belong to no tensor")


def _shown(value: object) -> str:
    # Sizes of the file's own choosing: neither an error of many lines, nor digits without end.
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of more than 128 bits"
    kind = type(value)
    text = repr(value) if kind not in (dict, list) else f"a {kind.__name__}"
    return text if len(text) <= 80 else f"{text[:80]}…"
