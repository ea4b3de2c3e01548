"""Says whether a process has initialised CUDA; see `AccelBackend.driver_check`.

Loaded by its path, in a process without the package: it must import nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["driver_in_use"]

_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_FILES = "/proc/self/fd"


def driver_in_use() -> str | None:
    """Say that this process has initialised CUDA; None if it has not."""
    if _has_device_open() or _is_initialised():
        return "its import initialises CUDA, which a fork could not use then"
    return None


def _has_device_open() -> bool:
    for descriptor in os.listdir(_FILES):
        try:
            if os.readlink(f"{_FILES}/{descriptor}").startswith("/dev/nvidia"):
                return True
        except FileNotFoundError:
            # That of the listing.
            continue
    return False


def _is_initialised() -> bool:
    """Ask each driver that is loaded: it may keep no file open."""
    with open("/proc/self/maps", "rb") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip() for line in maps if b"/libcuda.so" in line}
    for path in paths:
        # This loads nothing anew.
        driver = ctypes.CDLL(os.fsdecode(path), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        if driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED:
            return True
    return False
