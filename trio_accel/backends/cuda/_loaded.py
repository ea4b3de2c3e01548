"""Loads CUDA's libraries at its import, in a process that forks workers, so that workers have them.

Loading calls no driver and starts no thread, but takes a good part of a worker's start.
"""

from __future__ import annotations

from . import _probe_process
from .manifest import VERSIONS

# A missing or damaged library raises later, when a device is opened.
_probe_process.query_libraries(VERSIONS)
