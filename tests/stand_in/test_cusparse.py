"""The stand-in cuSPARSE computes the same as SciPy, and refuses the same as the real one."""

from __future__ import annotations

from collections.abc import Callable

PROGRAM = "check_cusparse.py"


def test_cusparse(succeed: Callable[..., str], check: str) -> None:
    succeed(PROGRAM, check)
