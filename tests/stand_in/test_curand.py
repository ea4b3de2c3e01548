"""The stand-in cuRAND draws what the real one does, and refuses what the real one refuses."""

from __future__ import annotations

from collections.abc import Callable

PROGRAM = "check_curand.py"


def test_curand(succeed: Callable[..., str], check: str) -> None:
    succeed(PROGRAM, check)
