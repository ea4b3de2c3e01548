"""The program in PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from library_programs import LibraryProgram

from trio_accel.programs import Array

torch: Any = import_module("torch")  # without types, as PyTorch is not a dependency


class TorchProgram(LibraryProgram):
    """On the CPU and on CUDA."""

    xp = torch

    def taken(self, array: Array) -> Any:
        return torch.from_dlpack(array)
