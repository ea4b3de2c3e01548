"""What the machine tells of its processor, and what its C library is told."""

from __future__ import annotations

import ctypes
import functools
import os
import platform

from ...base.host import table_entry

__all__ = ["keep_freed_memory", "model_name", "usable_cores"]


@functools.cache
def model_name() -> str:
    """The vendor's name of the processor, as far as the system tells."""
    return table_entry("/proc/cpuinfo", "model name") or platform.processor() or platform.machine() or "CPU"


def usable_cores() -> int:
    """Cores that this process may run on: fewer than there are where it is bound to some of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# glibc's malloc.h; others have no such function, or take no notice.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_KEPT = 128 << 20
# The largest that glibc takes.
_ALWAYS_MAPPED = 32 << 20


def keep_freed_memory() -> None:
    """Let the process keep up to 128 MiB that its kernels have freed, for the next ones.

    By default glibc gives the temporary arrays of a thread back to the system and takes them anew for
    each operation: a page fault for every 4 KiB. Without it a transform of 2**20 real numbers took 8.6 ms
    in a worker, with it 5.0 ms (two cores of an AMD EPYC). A program of its own may want otherwise,
    so this is for worker processes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_MMAP_THRESHOLD, _ALWAYS_MAPPED)
