"""The stand-in cuBLAS computes the same as NumPy, and refuses the same as the real one."""

from __future__ import annotations

from collections.abc import Callable

PROGRAM = "check_cublas.py"


def test_cublas(succeed: Callable[..., str], check: str) -> None:
    succeed(PROGRAM, check)
