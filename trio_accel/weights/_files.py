"""Files of weights, open: safetensors files, the index of a model that has several; and what they hold."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

import attrs
import numpy as np
import numpy.typing as npt
import trio
from trio.lowlevel import enable_ki_protection

from ._header import LENGTH, LONGEST, Header, TensorInfo, WeightsError, check_text, parse_header, parse_json

__all__ = ["Contents", "OpenFile", "OpenFiles", "StrPath", "inspect", "paths_of"]

StrPath: TypeAlias = str | os.PathLike[str]

_INDEX = ".json"


class OpenFile:
    """One safetensors file, open for reading. Everything but `close` blocks.

    Args:
        path: Path of the file.

    Attributes:
        path: As given.
        header: Its header.

    Raises:
        WeightsError: It is no such file.
        OSError: It cannot be opened or read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # Without the flag, opening a pipe waits for its writer.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._as_opened = self._state()
            self.header: Header = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)

    def read(self, into: npt.NDArray[np.uint8], offset: int) -> None:
        """Fill an array with the bytes from an offset on.

        Raises:
            WeightsError: The file ends before.
        """
        view = into.data
        while view:
            count = os.preadv(self._descriptor, [view], offset)
            if not count:
                raise WeightsError(f"{self.path} ends at byte {offset}: it became shorter while it was read")
            view, offset = view[count:], offset + count

    def check_unchanged(self) -> None:
        """Require that it was not written to since it was opened, as far as its size and time tell.

        Raises:
            WeightsError: It was.
        """
        if self._state() != self._as_opened:
            raise WeightsError(f"{self.path} was changed while it was read")

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(f"{self.path} is a folder; give the file in it")
        if not stat.S_ISREG(found.st_mode):
            raise WeightsError(f"{self.path} is no regular file")
        return found.st_size, found.st_mtime_ns

    def _read_header(self) -> Header:
        size, _ = self._as_opened
        if size < LENGTH:
            raise WeightsError(f"{self.path} has {size} bytes, too few for a safetensors file")
        head = np.empty(LENGTH, np.uint8)
        self.read(head, 0)
        length = int.from_bytes(head.tobytes(), "little")
        if length > LONGEST:
            raise WeightsError(
                f"{self.path} claims a header of {length} bytes, more than the {LONGEST} that there may be"
            )
        if LENGTH + length > size:
            raise WeightsError(f"{self.path} claims a header of {length} bytes, but has {size}: cut off?")
        text = np.empty(length, np.uint8)
        self.read(text, LENGTH)
        try:
            return parse_header(text.tobytes(), size - LENGTH - length)
        except WeightsError as error:
            raise WeightsError(f"{self.path}: {error}") from None


class OpenFiles:
    """The files of one model, open. A context manager that closes them; opening blocks.

    Args:
        paths: One safetensors file, one index (``.json``) of several, or several of both.

    Attributes:
        files: The files.
        tensors: By name: which file, and where in it; in the order of the files.
        metadata: Additions of their writers.

    Raises:
        WeightsError: One is no such file, or they do not fit together.
        OSError: One cannot be opened or read.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self.files: list[OpenFile] = []
        self.tensors: dict[str, tuple[OpenFile, TensorInfo]] = {}
        self.metadata: dict[str, str] = {}
        with ExitStack() as stack:
            for path in paths:
                if not path.endswith(_INDEX):
                    self._add(stack, path, None)
                    continue
                for shard, names in _read_index(path).items():
                    self._add(stack, shard, names)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def check_unchanged(self) -> None:
        """See `OpenFile.check_unchanged`."""
        for file in self.files:
            file.check_unchanged()

    def _add(self, stack: ExitStack, path: str, names: set[str] | None) -> None:
        file = OpenFile(path)
        stack.callback(file.close)
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
    """Return the paths that a caller has given, as text.

    Raises:
        TypeError: It is no path.
        ValueError: There is no path.
    """
    several = [path] if isinstance(path, (str, bytes, os.PathLike)) else list(path)
    if not several:
        raise ValueError("path: give one file at least")
    found: list[str] = []
    for one in several:
        text: object = os.fspath(one) if isinstance(one, os.PathLike) else one
        if not isinstance(text, str):
            raise TypeError(f"path must be text or a path, got {text!r}")
        found.append(text)
    return found


def _read_index(path: str) -> Mapping[str, set[str]]:
    """Which files a model has, and which names are to be in each."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise WeightsError(f"{path} is no regular file")
        text = file.read(LONGEST + 1)
    if len(text) > LONGEST:
        raise WeightsError(f"{path} has more than {LONGEST} bytes: no index of a model")
    try:
        return _shards_of(path, parse_json(text, "the index"))
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None


def _shards_of(path: str, index: object) -> Mapping[str, set[str]]:
    places: Any = cast("dict[str, Any]", index).get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict):
        raise WeightsError("there is no weight_map, so it is no index of a model")
    folder = os.path.dirname(path)
    shards: dict[str, set[str]] = {}
    for name, place in cast("dict[str, object]", places).items():
        if not isinstance(place, str) or os.path.basename(place) != place or place in ("", ".", ".."):
            raise WeightsError(f"{name!r} must be in a file of the same folder, got {place!r:.80}")
        check_text(place)
        if "\0" in place:
            raise WeightsError(f"{name!r} must be in a file, and no file has the name {place!r:.80}")
        shards.setdefault(os.path.join(folder, place), set()).add(name)
    return shards


@attrs.frozen(kw_only=True)
class Contents:
    """Contents of files of weights.

    Attributes:
        tensors: By name, in the order of the files.
        metadata: Text by name, which the writer has added; of several files, the first has its way.
    """

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@enable_ki_protection
async def inspect(path: StrPath | Iterable[StrPath]) -> Contents:
    """Read what files of weights hold: their headers alone, in a thread.

    Args:
        path: As for `load`.

    Raises:
        WeightsError: A file is no safetensors file.
        OSError: A file cannot be opened or read.
    """
    return await trio.to_thread.run_sync(_contents, paths_of(path))


def _contents(paths: list[str]) -> Contents:
    with OpenFiles(paths) as files:
        tensors = {name: tensor for name, (_, tensor) in files.tensors.items()}
        return Contents(tensors=tensors, metadata=files.metadata)
