"""Pickles with separate arrays, and errors with their frames: both are sent between nodes."""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ..actors._errors import describe

Parts: TypeAlias = "list[bytes | bytearray | memoryview]"
"""A pickle, and behind it what arrays hold."""

MOST_BYTES, MOST_PARTS = 1 << 30, 1 << 16
# Characters of an error's text and of its frames, and bytes of its pickle.
_MOST_OF_ERROR = 1 << 20


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if getattr(obj, "__module__", None) == "__main__" and isinstance(obj, type):
            raise TypeError(
                f"{obj.__qualname__} is a class of the started program (__main__), which other nodes cannot "
                "import: put it into a module"
            )
        return NotImplemented


def pack(value: object, *, is_whole: bool = False) -> Parts:
    """Convert a value to bytes; array contents are not copied, unless `is_whole` puts them into the pickle.

    Raises:
        TypeError: It cannot be pickled: an array of a device, a class of ``__main__``.
        ValueError: It is larger than `MOST_BYTES`.
    """
    text, buffers = io.BytesIO(), list[pickle.PickleBuffer]()

    def take(buffer: pickle.PickleBuffer) -> bool:
        # If a message has very many arrays, the remaining ones are in its pickle.
        if is_kept := len(buffers) + 1 < MOST_PARTS:
            buffers.append(buffer)
        return not is_kept

    try:
        _Pickler(text, 5, buffer_callback=None if is_whole else take).dump(value)
        parts: Parts = [memoryview(text.getvalue()), *[buffer.raw() for buffer in buffers]]
    except (pickle.PicklingError, AttributeError) as error:
        raise TypeError(f"this cannot go to another node: {error}") from error
    if (size := sum(map(len, parts))) > MOST_BYTES:
        raise ValueError(f"a message of {size} bytes is too large: at most {MOST_BYTES} go to another node")
    return parts


def packed(value: object) -> bytes:
    """Convert a value to bytes that `unpack` takes as its only part; raises as `pack` does."""
    return bytes(pack(value, is_whole=True)[0])


def unpack(parts: Sequence[bytes | bytearray | memoryview]) -> Any:
    """Return the value from parts made by `pack`.

    Raises:
        Exception: As unpickling does, if a module is missing here, or differs.
    """
    return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301  # the other end has proved the secret


def are_same(first: object, second: object) -> bool:
    """Return whether two values that were unpacked are the same by their contents.

    Their own bytes differ if one of them has an object twice where the other has two equal objects, or if the
    items of a set come in another order, as in a process with another hash seed.
    """
    if packed(first) == packed(second):
        return True
    try:
        return _canonical(first) == _canonical(second)
    except (ValueError, RecursionError):
        # A value that contains itself has no such bytes.
        return False


def _canonical(value: object) -> bytes:
    data = io.BytesIO()
    _CanonicalPickler(data, pickle.HIGHEST_PROTOCOL).dump(value)
    return data.getvalue()


class _CanonicalPickler(pickle.Pickler):
    """Writes equal values alike: each object as often as it occurs, and sets in the order of their bytes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # It remembers no object, so that one which occurs twice is written twice.
        self.fast = True

    def persistent_id(self, obj: Any) -> object:
        if type(obj) not in (set, frozenset):
            return None
        return type(obj).__name__, sorted(map(_canonical, obj))


def path_of(cls: type) -> str:
    """Return the path by which another node finds a class.

    Raises:
        ValueError: It would not find it.
    """
    path = f"{cls.__module__}:{cls.__qualname__}"
    if cls.__module__ == "__main__" or "<locals>" in path:
        raise ValueError(f"entity: another node cannot import {path}: put the class into a module")
    return path


@functools.cache
def digest_of(module: str) -> str:
    """Return the digest of a module's file when first seen; an empty text for a module without one."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest() if file else ""
    except OSError:
        return ""


def find(path: str, node: str) -> Any:
    """Return the class at a path.

    Raises:
        ImportError: There is none on this node.
    """
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"node {node} has no {path}: {error}") from error


def failure(error: BaseException, depth: int = 8) -> list[tuple[bytes, str, str]]:
    """Return an error and its causes, for `raised`: each as a pickle and a text, with its traceback."""
    text = describe(error)
    try:
        data = pickle.dumps(error)
        is_error = len(data) <= _MOST_OF_ERROR and isinstance(pickle.loads(data), Exception)  # noqa: S301  # our own bytes
    except Exception:  # noqa: BLE001  # a class may pickle to what nobody can read
        data, is_error = b"", False
    frames = "".join(traceback.format_tb(error.__traceback__))
    causes = failure(error.__cause__, depth - 1) if error.__cause__ and depth else []
    return [(data if is_error else b"", text[:_MOST_OF_ERROR], frames[-_MOST_OF_ERROR:]), *causes]


def raised(errors: Sequence[tuple[bytes, str, str]], node: str) -> Exception:
    """Return the first of some errors, each with the next one as its cause, and with its frames as a note."""
    cause: Exception | None = None
    for data, text, frames in reversed(errors):
        try:
            error: Exception = pickle.loads(data)  # noqa: S301  # the other end has proved the secret
        except Exception:  # noqa: BLE001  # this process lacks the class, or has another one
            error = RuntimeError(text)
        if frames:
            error.add_note(f"on node {node}:\n{frames}")
        error.__cause__, cause = cause, error
    assert cause is not None  # there is one at least
    return cause
