"""Files in the place of a chunk: to map one of them would be a danger to the process that does."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

__all__ = ["UNFIT", "sealed"]

_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# linux/memfd.h
_HUGE = 0x4


def sealed(nbytes: int, seals: int = _FIXED, flags: int = 0) -> int:
    """A descriptor of anonymous memory with these seals."""
    descriptor = os.memfd_create("chunk of a test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _unsealable(nbytes: int, _: Path) -> int:
    descriptor = os.memfd_create("chunk of a test", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    return descriptor


def _file(nbytes: int, folder: Path) -> int:
    path = folder / "file"
    path.write_bytes(bytes(nbytes))
    return os.open(path, os.O_RDWR)


def _again(nbytes: int, flags: int) -> int:
    descriptor = sealed(nbytes)
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    finally:
        os.close(descriptor)


def _huge(nbytes: int, _: Path) -> int:
    try:
        return sealed(max(nbytes, 2 << 20), flags=_HUGE)
    except OSError as error:
        pytest.skip(f"no huge pages: {error}")


def _pipe(_nbytes: int, _: Path) -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def _folder(_nbytes: int, folder: Path) -> int:
    return os.open(folder, os.O_RDONLY)


UNFIT: dict[str, Callable[[int, Path], int]] = {
    "not sealed": lambda nbytes, _: sealed(nbytes, 0),
    "can never be sealed": _unsealable,
    "seals to come": lambda nbytes, _: sealed(nbytes, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW),
    "can be cut": lambda nbytes, _: sealed(nbytes, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL),
    "no writing": lambda nbytes, _: sealed(nbytes, _FIXED | fcntl.F_SEAL_WRITE),
    "a file": _file,
    "for reading": lambda nbytes, _: _again(nbytes, os.O_RDONLY),
    "a path": lambda nbytes, _: _again(nbytes, os.O_PATH),
    "huge pages": _huge,
    "a pipe": _pipe,
    "a folder": _folder,
    "a device": lambda *_: os.open("/dev/zero", os.O_RDWR),
}
"""What makes each, of so many bytes, in a folder of its own; by what is wrong with it."""
