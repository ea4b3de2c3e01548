"""A kernel library of the CPU backend."""

from __future__ import annotations

from typing import Any, ClassVar

from ...base.kit.library import ComputingLibrary
from ..runtime._stream import CpuStream


class CpuLibrary(ComputingLibrary):
    """One library of an open device; see `ComputingLibrary`."""

    backend: ClassVar[str] = "cpu"
    streams: ClassVar[type[Any]] = CpuStream
