"""The program in CuPy."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from library_programs import LibraryProgram

from trio_accel.programs import Array

cupy: Any = import_module("cupy")  # no dependency


class CupyProgram(LibraryProgram):
    """On CUDA."""

    xp = cupy

    def taken(self, array: Array) -> Any:
        return cupy.from_dlpack(array)
