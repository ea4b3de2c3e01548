"""A program that looks at the mappings and open files of its worker, and tries to change its arguments."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Sequence

from trio_accel.programs import Array

_PUNCH_HOLE = 1 | 2


class Mapped:
    """Looks at the shared memory of its process."""

    def inodes(self) -> list[int]:
        """Return its memory."""
        return sorted({inode for _, inode in (*_mappings(), *_descriptors())})

    def has(self, memory: Sequence[int]) -> list[str]:
        """Return its access to some memory: permissions of mappings, and access of descriptors."""
        return [f"map {mode}" for mode, inode in _mappings() if inode in memory] + [
            f"descriptor {access}" for access, inode in _descriptors() if inode in memory
        ]

    def punch(self, memory: Sequence[int]) -> list[bool]:
        """Try to empty some memory; returns for each descriptor whether that succeeded."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
        return [
            libc.fallocate(number, _PUNCH_HOLE, 0, os.fstat(number).st_size) == 0
            for number in _memory_files()
            if os.fstat(number).st_ino in memory
        ]

    def overwrite(self, array: Array) -> None:
        """Write to the memory of an argument as native code with an error does."""
        ctypes.memset(array.ctypes.data, 255, 8)

    def refuse(self, array: Array) -> None:
        """Fail, with the argument in the frame."""
        raise ValueError(f"{array.size} elements are not what was wanted")


def _mappings() -> list[tuple[str, int]]:
    with open("/proc/self/maps") as file:
        lines = [line.split(maxsplit=5) for line in file if "memfd:trio_accel (" in line]
    return [(line[1], int(line[4])) for line in lines]


def _memory_files() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the list itself
        if "memfd:trio_accel (" in target:
            found.append(int(name))
    return found


def _descriptors() -> list[tuple[str, int]]:
    names = {os.O_RDONLY: "read", os.O_RDWR: "write"}
    return [
        (names[fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE], os.fstat(number).st_ino)
        for number in _memory_files()
    ]
