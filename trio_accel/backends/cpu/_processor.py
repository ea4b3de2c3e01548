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
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def usable_cores() -> int:
    """Cores that this process may run on: fewer than there are where it is bound to some of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def total_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes() -> int:
    """Physical memory that nothing uses; all of it where the system does not count."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError):
        return total_bytes()
