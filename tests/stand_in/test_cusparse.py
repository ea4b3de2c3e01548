"""The stand-in cuSPARSE computes what SciPy does, and refuses what the real one refuses."""

from __future__ import annotations

from collections.abc import Callable

PROGRAM = "check_cusparse.py"


def test_cusparse(succeed: Callable[..., str], check: str) -> None:
    succeed(PROGRAM, check)
