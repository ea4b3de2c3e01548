"""What the machine says of its processor."""

from __future__ import annotations

import functools
import os
import platform

from ...base.host import table_entry

__all__ = ["model_name", "usable_cores"]


@functools.cache
def model_name() -> str:
    """The vendor's name of the processor, as far as the system tells."""
    return table_entry("/proc/cpuinfo", "model name") or platform.processor() or platform.machine() or "CPU"


def usable_cores() -> int:
    """Cores that this process may run on: fewer than there are where it is bound to some of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
