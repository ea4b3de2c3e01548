"""What the machine says of its processor and memory."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

__all__ = ["available_bytes", "model_name", "total_bytes", "usable_cores"]


@functools.cache
def model_name() -> str:
    """The vendor's name of the processor, as far as the system tells."""
    return _entry("/proc/cpuinfo", "model name") or platform.processor() or platform.machine() or "CPU"


def usable_cores() -> int:
    """Cores that this process may run on: fewer than there are where it is bound to some of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def total_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes() -> int:
    """Physical memory that could be had now; all of it where the system does not say."""
    kibibytes = _entry("/proc/meminfo", "MemAvailable").partition(" ")[0]
    return int(kibibytes) * 1024 if kibibytes else total_bytes()


def _entry(path: str, key: str) -> str:
    """The first entry of that name in one of Linux's tables; empty where there is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return ""
    entries = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in entries if name.strip() == key and value.strip()), "")
