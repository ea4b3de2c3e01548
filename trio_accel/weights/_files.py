"""Files of weights: safetensors files, and the index of a model with several; all input is validated (D120).

The format: 8 bytes with the length of the header, the header in JSON, then the tensors' bytes in sequence
without gaps. Source: https://github.com/huggingface/safetensors, its section "Format".
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from operator import attrgetter
from typing import IO, Any, TypeAlias, cast

import attrs
import numpy as np
import numpy.typing as npt
from trio.lowlevel import enable_ki_protection

from ..actors import run_in_thread
from ..backends.base import DType, Ints, NotSupportedError

__all__ = ["Contents", "TensorInfo", "WeightsError", "inspect"]

StrPath: TypeAlias = str | os.PathLike[str]

LENGTH = 8
"""Bytes of the number that says how long the header is."""

LONGEST = 100_000_000
"""Bytes of the longest header, as in the format's own library."""

# The maximum number of commas and opening brackets; a tensor of two axes has eight. It bounds the objects of
# a header, because the parser, in C, lets no other thread run before the end of a list.
_MOST_MARKS = 1 << 18
_MOST_AXES = 64
_MOST_BYTES = (1 << 63) - 1
_METADATA = "__metadata__"

# The keys are names of dtypes: the hash of a low-precision one imports ml_dtypes, which takes 0.05 s.
_KINDS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64,)}
_NAMES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind, sizes in _KINDS.items() for bits in sizes},
}
_DTYPES = {name: DType(dtype) for dtype, name in _NAMES.items()}
# Element types of the format that devices do not have, with their bits.
_FOREIGN = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
_INDEX = ".json"


class WeightsError(ValueError):
    """A file of weights is cut off, damaged or not a safetensors file. The message names the file."""


@attrs.frozen(kw_only=True)
class TensorInfo:
    """The entry of a tensor in a header.

    Attributes:
        name: The name.
        format: The element type in the format's own terms, such as ``"BF16"``.
        shape: The number of elements along each axis.
        nbytes: The number of bytes in the file.
        offset: The position of the first byte in the file.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> DType:
        """The element type.

        Raises:
            NotSupportedError: Devices do not support this element type.
        """
        dtype = _DTYPES.get(self.format)
        if dtype is None:
            raise NotSupportedError(
                f"tensor {self.name!r} has the element type {self.format}, which no device has; "
                f"there are {', '.join(_DTYPES)}"
            )
        return dtype


@attrs.frozen(kw_only=True)
class Contents:
    """The contents of weights files.

    Attributes:
        tensors: Tensors by name, in the order of the files, and in each of their bytes.
        metadata: Texts by name, added by the writer; of several files, the first takes precedence.
    """

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """The total bytes of the tensors in the files."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def parse_header(text: bytes, data: int) -> Contents:
    """Parse a header, and check every value against the file.

    Args:
        text: The header without its length.
        data: The number of bytes after the header in the file.

    Raises:
        WeightsError: It is not a header, or does not fit the file; the message does not name the file.
    """
    if not text.startswith(b"{"):
        raise WeightsError("the header does not begin with {")
    entries = parse_json(text, "the header", _refuse, distinct=_distinct)
    metadata = _metadata_of(entries.pop(_METADATA, None))
    start = LENGTH + len(text)
    tensors = [_tensor_of(name, entry, start, data) for name, entry in entries.items()]
    tensors.sort(key=attrgetter("offset", "nbytes"))
    _check_tiling(tensors, start, data)
    return Contents(tensors={tensor.name: tensor for tensor in tensors}, metadata=metadata)


def parse_json(
    text: bytes,
    label: str,
    number: Callable[[str], object] = float,
    *,
    distinct: Callable[[list[tuple[str, object]]], object],
) -> Any:
    """Parse untrusted text in a thread, while the loop continues.

    Errors have no part of a text that is not JSON, because it may be a secret in another file.

    Args:
        text: The text.
        label: Its name in errors.
        number: Called with each number that is not an integer.
        distinct: Makes an object of its names and values, and refuses a duplicate name.

    Raises:
        WeightsError: It is not JSON, has too much in it, or has a duplicate name in an object.
    """
    # NumPy counts without the interpreter's lock.
    codes = np.frombuffer(text, np.uint8)
    marks = sum(int(np.count_nonzero(codes == ord(mark))) for mark in ",[{")
    if marks > _MOST_MARKS:
        raise WeightsError(
            f"{label} has {marks} commas and opening brackets, more than {_MOST_MARKS}: those of "
            f"{_MOST_MARKS // 8} tensors"
        )
    try:
        return json.loads(
            text.decode(),
            object_pairs_hook=distinct,
            parse_constant=number,
            parse_float=number,
            parse_int=_parse_int,
        )
    except RecursionError:
        raise WeightsError(f"{label} is nested too deeply") from None
    except WeightsError:
        raise
    except UnicodeDecodeError as error:
        raise WeightsError(f"{label} is not JSON: it is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise WeightsError(f"{label} is not JSON: it is wrong at character {error.pos}") from None
    except ValueError:
        raise WeightsError(f"{label} is not JSON: a number has thousands of digits") from None


def check_text(text: str) -> None:
    """Require that a text can be written, because JSON has escapes for halves of a surrogate pair.

    Raises:
        WeightsError: The text has a half of a pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise WeightsError(f"{_shown(text)} is not text: it has a lone surrogate") from None


def encode_header(arrays: Iterable[tuple[str, DType, Ints, int]], metadata: Mapping[str, str]) -> bytes:
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
    entries = dict(pairs)
    if len(entries) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise WeightsError(f"it has {name!r} twice")
    for name in entries:
        check_text(name)
    return entries


def _distinct_in_index(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Do the same for an index, without its names in errors: any JSON file may have been taken for one."""
    try:
        return _distinct(pairs)
    except WeightsError:
        raise WeightsError("a name is there twice, or is not text") from None


def _parse_int(digits: str) -> int:
    # This is a Python function, so that the lock can be released between many numbers with thousands of
    # digits.
    return int(digits)


def _refuse(number: str) -> None:
    raise WeightsError(f"the header has {number[:40]} where integers belong")


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
        raise WeightsError(f"{name!r} needs data_offsets of a beginning and an end, got {offsets}")
    begin, end = offsets
    if end > data:
        raise WeightsError(f"{name!r} ends at byte {end} of the data, of which there are {data}: cut off?")
    # Also next to an axis of 0, because NumPy cannot make such an array.
    if math.prod(filter(None, shape)) * bits // 8 > _MOST_BYTES:
        raise WeightsError(f"{name!r} has a shape of more elements than memory can have: {shape}")
    if math.prod(shape) * bits != 8 * (end - begin):
        raise WeightsError(f"{name!r} takes {end - begin} bytes, which is not what {element} {shape} takes")
    return TensorInfo(name=name, format=str(element), shape=shape, nbytes=end - begin, offset=start + begin)


def _bits(element: str) -> int:
    dtype = _DTYPES.get(element)
    return _FOREIGN.get(element, 0) if dtype is None else 8 * dtype.itemsize


def _numbers(name: str, field: str, value: object, max_count: int) -> Ints:
    numbers = cast("list[Any]", value)
    if not isinstance(value, (list, tuple)) or len(numbers) > max_count:
        raise WeightsError(f"{name!r}: {field} must be a list of at most {max_count}, got {_shown(numbers)}")
    for number in numbers:
        if type(number) is not int or not 0 <= number <= _MOST_BYTES:
            raise WeightsError(f"{name!r}: {field} must hold sizes, got {_shown(number)}")
    return tuple(numbers)


def _check_tiling(tensors: list[TensorInfo], start: int, data: int) -> None:
    """Require that each byte of the data belongs to one tensor."""
    end, previous_name = start, "the header"
    for tensor in tensors:
        if tensor.offset != end:
            problem = "overlap" if tensor.offset < end else "have a hole between them"
            raise WeightsError(f"{previous_name} and {tensor.name!r} {problem}")
        end, previous_name = tensor.offset + tensor.nbytes, repr(tensor.name)
    if end != start + data:
        raise WeightsError(f"{start + data - end} bytes behind {previous_name} belong to no tensor")


def _shown(value: object) -> str:
    # The file determines the sizes, so limit the lines and digits of an error.
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of more than 128 bits"
    kind = type(value)
    text = repr(value) if kind not in (dict, list, tuple) else f"a {'dict' if kind is dict else 'list'}"
    return text if len(text) <= 80 else f"{text[:80]}…"


class OpenFile:
    """An open safetensors file, for reading. Everything but `close` blocks.

    Args:
        path: Path of the file.

    Attributes:
        path: The argument.
        header: Its header.

    Raises:
        WeightsError: It is not such a file.
        OSError: It cannot be opened or read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open_regular(path)
        try:
            self._as_opened = self._state()
            self.header: Contents = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close it."""
        self._file.close()

    def read(self, into: npt.NDArray[np.uint8], offset: int) -> None:
        """Fill an array with the bytes from an offset on.

        Raises:
            WeightsError: The file ends before.
        """
        view = into.data
        while view:
            count = os.preadv(self._file.fileno(), [view], offset)
            if not count:
                raise WeightsError(f"{self.path} ends at byte {offset}: it became shorter while it was read")
            view, offset = view[count:], offset + count

    def check_unchanged(self) -> None:
        """Require an unchanged file since it was opened, as far as size and time can show it.

        Raises:
            WeightsError: The file was changed.
        """
        if self._state() != self._as_opened:
            raise WeightsError(f"{self.path} was changed while it was read")

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def _read_header(self) -> Contents:
        size, _ = self._as_opened
        if size < LENGTH:
            raise WeightsError(f"{self.path} has {size} bytes, too few for a safetensors file")
        head = np.empty(LENGTH, np.uint8)
        self.read(head, 0)
        length = int.from_bytes(head.tobytes(), "little")
        # Errors leave the number out, because it shows bytes of the file, which may be a secret.
        if length > LONGEST:
            raise WeightsError(
                f"{self.path} is not a safetensors file: by its first {LENGTH} bytes, its header has more "
                f"than {LONGEST} bytes"
            )
        if LENGTH + length > size:
            raise WeightsError(
                f"{self.path} has {size} bytes, fewer than its header by its first {LENGTH} bytes: cut off?"
            )
        text = np.empty(length, np.uint8)
        self.read(text, LENGTH)
        try:
            return parse_header(text.tobytes(), size - LENGTH - length)
        except WeightsError as error:
            raise WeightsError(f"{self.path}: {error}") from None


class OpenFiles(ExitStack):
    """The files of one model, open. A context manager that closes them; opening blocks.

    Args:
        paths: One safetensors file, one index (``.json``) of several, or several of both.

    Attributes:
        files: The files.
        tensors: The file of each tensor, and its position there, by name; in the order of the files.
        metadata: Texts added by the writers.

    Raises:
        WeightsError: A file is not such a file, or the files do not fit together.
        OSError: One cannot be opened or read.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        super().__init__()
        self.files: list[OpenFile] = []
        self.tensors: dict[str, tuple[OpenFile, TensorInfo]] = {}
        self.metadata: dict[str, str] = {}
        try:
            for path in paths:
                shards = _read_index(path) if path.endswith(_INDEX) else {path: None}
                for shard, names in shards.items():
                    self._add(shard, names)
        except BaseException:
            self.close()
            raise

    def check_unchanged(self) -> None:
        """See `OpenFile.check_unchanged`."""
        for file in self.files:
            file.check_unchanged()

    def _add(self, path: str, names: set[str] | None) -> None:
        file = OpenFile(path)
        self.callback(file.close)
        self.files.append(file)
        self.metadata = {**file.header.metadata, **self.metadata}
        missing = (names or set[str]()) - file.header.tensors.keys()
        if missing:
            raise WeightsError(f"{path} does not hold {min(missing)!r}, which its index says")
        for name, tensor in file.header.tensors.items():
            if names is not None and name not in names:
                continue
            if name in self.tensors:
                raise WeightsError(f"{self.tensors[name][0].path} and {path} both hold {name!r}")
            self.tensors[name] = file, tensor


def paths_of(path: StrPath | Iterable[StrPath]) -> list[str]:
    """Return the caller's paths as text.

    Raises:
        TypeError: `path` is not a path.
        ValueError: `path` is empty.
    """
    several = [path] if isinstance(path, (str, bytes, os.PathLike)) else list(path)
    if not several:
        raise ValueError("path: give one file at least")
    paths: list[str] = []
    for item in several:
        text: object = os.fspath(item)
        if not isinstance(text, str):
            raise TypeError(f"path must be text or a path, got {text!r}")
        paths.append(text)
    return paths


def open_regular(path: str) -> IO[bytes]:
    """Open a file for reading.

    Raises:
        WeightsError: It is a pipe or a device.
        OSError: It is a folder, or cannot be opened.
    """
    # Without the flag, opening a pipe waits for its writer.
    file = open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise WeightsError(f"{path} is not a regular file")
    return file


def _read_index(path: str) -> Mapping[str, set[str]]:
    """Read the files of a model, and the names expected in each."""
    with open_regular(path) as file:
        text = file.read(LONGEST + 1)
    if len(text) > LONGEST:
        raise WeightsError(f"{path} has more than {LONGEST} bytes: no index of a model")
    try:
        return _shards_of(path, parse_json(text, "the index", distinct=_distinct_in_index))
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None


def _shards_of(path: str, index: object) -> Mapping[str, set[str]]:
    weight_map: Any = cast("dict[str, Any]", index).get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise WeightsError("weight_map is missing, so it is not an index of a model")
    folder = os.path.dirname(path)
    shards: dict[str, set[str]] = {}
    for name, file_name in cast("dict[str, object]", weight_map).items():
        if (
            not isinstance(file_name, str)
            or os.path.basename(file_name) != file_name
            or file_name in ("", ".", "..")
        ):
            raise WeightsError(f"{name!r} must be in a file of the same folder, got {file_name!r:.80}")
        check_text(file_name)
        if "\0" in file_name:
            raise WeightsError(f"{name!r} must be in a file, and no file has the name {file_name!r:.80}")
        shards.setdefault(os.path.join(folder, file_name), set()).add(name)
    return shards


@enable_ki_protection
async def inspect(path: StrPath | Iterable[StrPath]) -> Contents:
    """Read only the headers of weights files, in a thread.

    Args:
        path: See `load`.

    Raises:
        WeightsError: A file is not a safetensors file.
        OSError: A file cannot be opened or read.
    """
    return await run_in_thread(_contents, paths_of(path))


def _contents(paths: list[str]) -> Contents:
    with OpenFiles(paths) as files:
        tensors = {name: tensor for name, (_, tensor) in files.tensors.items()}
        return Contents(tensors=tensors, metadata=files.metadata)
