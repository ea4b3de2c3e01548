"""What the machine says of its processor and memory."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_bytes", "model_name", "total_bytes", "usable_cores"]

_GROUPS = Path("/sys/fs/cgroup")


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
    return min([int(kibibytes) * 1024 if kibibytes else total_bytes(), *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """What each control group (version 2) that this process is in has left: a container's limit is one."""
    folder = _GROUPS / _entry("/proc/self/cgroup", "0").lstrip(":/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(_GROUPS):
            return
        limit = _text(group / "memory.max").strip()
        if limit.isdecimal():
            # The cache of files is counted, but makes room; shared memory is not on these lists.
            lines = (line.partition(" ") for line in _text(group / "memory.stat").splitlines())
            cache = sum(int(size) for name, _, size in lines if name in ("active_file", "inactive_file"))
            used = int(_text(group / "memory.current").strip() or 0)
            yield max(0, int(limit) - used + cache)


def _entry(path: str, key: str) -> str:
    """The first entry of that name in one of Linux's tables; empty where there is none."""
    entries = (line.partition(":") for line in _text(Path(path)).splitlines())
    return next((value.strip() for name, _, value in entries if name.strip() == key and value.strip()), "")


def _text(path: Path) -> str:
    """What a file of the system says; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux, or no such group
        return ""
