"""Loads CUDA's libraries when it is imported: in a process whose forks, the workers, are to have them.

To load them calls no driver and starts no thread, but takes a good part of a worker's start.
"""

from __future__ import annotations

from . import _probe_process
from .manifest import VERSIONS

# A library that is missing or damaged is an error where a device is opened.
_probe_process.look(VERSIONS)
