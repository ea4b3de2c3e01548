"""Expressions of the program's own. Kernels of its own are refused: PyTorch compiles no source."""

from __future__ import annotations

from .arrays import compute

__all__ = ["compute"]
