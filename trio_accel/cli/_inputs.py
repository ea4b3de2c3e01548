"""The files that the demo reads and writes: the carried ones and the user's."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from trio_accel.cli._run import InputError

__all__ = ["check_output", "describe_os_error", "read_input"]

MOST_BYTES = 256 << 20
"""Size of the largest file that is read."""

# As much of a file as is read before it is clear that the rest is worth reading.
_HEAD_BYTES = 64


def read_input(path: Path | None, carried: str, is_plausible: Callable[[bytes], bool]) -> tuple[str, bytes]:
    """Read the user's file, or the one that comes with the package for ``None``. Blocking.

    Args:
        path: The user's file.
        carried: Name of the other.
        is_plausible: Whether a file that begins like this is worth reading; otherwise only its beginning is.

    Returns:
        The file's name in messages, and its content.

    Raises:
        InputError: It is missing, unreadable, empty or beyond the limit.
    """
    source = files("trio_accel.cli") / "data" / carried if path is None else path
    try:
        if path is not None and path.is_dir():
            raise InputError(f"cannot read {path}: it is a directory")
        with source.open("rb") as file:
            # A pipe may give fewer bytes at once, but these in the end.
            content = file.read(_HEAD_BYTES)
            if is_plausible(content):
                content += file.read(MOST_BYTES)
    except OSError as error:
        raise InputError(f"cannot read {source}: {describe_os_error(error)}") from error
    except MemoryError:
        raise InputError(f"cannot read {source}: it does not fit into memory") from None
    if not content:
        raise InputError(f"{source} is empty")
    if len(content) > MOST_BYTES:
        raise InputError(f"{source} is too large: files of at most {MOST_BYTES >> 20} MiB are read")
    return (carried if path is None else str(path)), content


def check_output(path: Path) -> None:
    """Refuse a PNG path that cannot be written, before anything is computed.

    Raises:
        InputError: It does not end in .png, is a directory, or may not be written.
    """
    if path.suffix.lower() != ".png":
        raise InputError(f"cannot write {path}: the picture is a PNG, so the name must end in .png")
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a directory")
    target = path if path.exists() else path.absolute().parent
    if not target.exists():
        raise InputError(f"cannot write {path}: there is no directory {path.parent}")
    if not path.exists() and not target.is_dir():
        raise InputError(f"cannot write {path}: {path.parent} is not a directory")
    if not os.access(target, os.W_OK):
        raise InputError(f"cannot write {path}: permission denied")


def describe_os_error(error: OSError) -> str:
    """Return the reason of an ``OSError`` in lower case, without errno and path."""
    return (error.strerror or str(error)).lower()
