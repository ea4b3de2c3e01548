"""Calls of Python functions: a cost of the loop's thread that no other load changes."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from types import FrameType

__all__ = ["python_calls"]

_WARM, _ROUNDS = 10, 20


async def python_calls(request: Callable[[], Awaitable[object]]) -> int:
    """Count the calls of Python functions in this thread for one warm request: the least of some."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    for _ in range(_WARM):
        await request()
    found: list[int] = []
    for _ in range(_ROUNDS):
        count = 0
        sys.setprofile(profile)
        await request()
        sys.setprofile(None)
        found.append(count)
    return min(found)
