"""The stand-in cuFFT computes the same as NumPy, and refuses the same as the real one."""

from __future__ import annotations

from collections.abc import Callable

PROGRAM = "check_cufft.py"


def test_cufft(succeed: Callable[..., str], check: str) -> None:
    succeed(PROGRAM, check)
