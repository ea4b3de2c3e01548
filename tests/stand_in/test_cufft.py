"""The stand-in cuFFT computes what NumPy does, and refuses what the real one refuses."""

from __future__ import annotations

from collections.abc import Callable

PROGRAM = "check_cufft.py"


def test_cufft(succeed: Callable[..., str], check: str) -> None:
    succeed(PROGRAM, check)
