"""The stand-in cuBLAS computes what NumPy does, and refuses what the real one refuses."""

from __future__ import annotations

from collections.abc import Callable

PROGRAM = "check_cublas.py"


def test_cublas(succeed: Callable[..., str], check: str) -> None:
    succeed(PROGRAM, check)
