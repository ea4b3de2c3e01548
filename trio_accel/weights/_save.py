"""From arrays to a file."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import trio
from trio.lowlevel import enable_ki_protection

from ..devices import AccelRef
from ._files import StrPath, paths_of
from ._header import WeightsError, encode_header

__all__ = ["save"]

_PIECE = 4 << 20


@enable_ki_protection
async def save(
    path: StrPath,
    arrays: Mapping[str, AccelRef],
    *,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Write arrays of a device to a safetensors file, in pieces of 4 MiB.

    The file appears under its name when it is complete; one that was there before is replaced. If the call
    fails or is cancelled, nothing has changed.

    A file that is replaced keeps its mode; a new one has that of the process's umask. A symbolic link stays,
    and the file to which it points is written. Another hard link keeps the file as it was. What is there and
    is no regular file, such as a pipe, is refused.

    Args:
        path: The file to write.
        arrays: The arrays by name. An array that is not C-contiguous is copied on its device first.
        metadata: Text by name to be stored with them.
        progress: Called with the bytes of arrays that are written, and those there are in all.

    Raises:
        NotSupportedError: The format does not have an element type: complex128.
        TypeError, ValueError: A name, an array or a text is of another type, or not valid.
        WeightsError: The path is that of a pipe or a device.
        OSError: The file cannot be written.
        StaleRefError: An array must not be used any more.
        ContextLostError, DeviceLostError: The device was lost meanwhile.
    """
    [target] = paths_of(path)
    _check(arrays, metadata or {})
    # As the format's own library does: the largest elements first, so that all are aligned.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header = encode_header(
        ((name, array.dtype, array.shape, array.nbytes) for name, array in ordered), metadata or {}
    )
    target = await trio.to_thread.run_sync(os.path.realpath, target)
    file = await trio.to_thread.run_sync(_make, target, header)
    try:
        await _write_all(file, dict(ordered), progress)
        await trio.to_thread.run_sync(_finish, file, target)
    finally:
        _discard(file)


async def _write_all(
    file: IO[bytes], arrays: Mapping[str, AccelRef], progress: Callable[[int, int], object] | None
) -> None:
    total, done = sum(array.nbytes for array in arrays.values()), 0
    for array in arrays.values():
        flat = (array if array.spec.is_contiguous else await array.copy()).reshape(-1)
        step = max(1, _PIECE // flat.dtype.itemsize)
        host = flat.device.host_empty(min(step, flat.size), flat.dtype)
        for start in range(0, flat.size, step):
            part = flat[start : start + step]
            piece = await part.to_host(out=host[: part.size])
            await trio.to_thread.run_sync(_write, file, piece)
            done += part.nbytes
            if progress is not None:
                progress(done, total)


def _check(arrays: Mapping[str, object], metadata: Mapping[str, object]) -> None:
    for name, array in arrays.items():
        if not isinstance(name, str):
            raise TypeError(f"save: arrays must have names of text, got {name!r}")
        if not isinstance(array, AccelRef):
            raise TypeError(f"save: arrays[{name!r}] must be an AccelRef, got {type(array).__name__}")
    for name, text in metadata.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"save: metadata must be text by name, got {name!r}: {text!r}")


def _make(target: str, header: bytes) -> IO[bytes]:
    """Make a file beside the target, under a new name."""
    name = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{secrets.token_hex(8)}")
    mode = _mode_of(target)
    # From its beginning no more may read it than may read the one before; the umask takes bits away.
    file = open(  # noqa: SIM115  # closed by who asked
        name,
        "xb",
        buffering=0,
        opener=lambda path, flags: os.open(path, flags, 0o666 if mode is None else mode),
    )
    try:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        _write_bytes(file, memoryview(header))
    except BaseException:
        _discard(file)
        raise
    return file


def _mode_of(target: str) -> int | None:
    """Find the permissions of the file that is to be replaced; None if there is none."""
    try:
        found = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found):
        raise IsADirectoryError(f"save: {target} is a folder")
    if not stat.S_ISREG(found):
        raise WeightsError(f"save: {target} is there and no regular file, so it is not replaced")
    return found & 0o777


def _discard(file: IO[bytes]) -> None:
    file.close()
    # If all went well, it has another name by now.
    with suppress(FileNotFoundError):
        os.unlink(file.name)


def _write(file: IO[bytes], piece: npt.NDArray[Any]) -> None:
    _write_bytes(file, piece.view(np.uint8).data)


def _write_bytes(file: IO[bytes], view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


def _finish(file: IO[bytes], target: str) -> None:
    os.fsync(file.fileno())
    os.replace(file.name, target)
