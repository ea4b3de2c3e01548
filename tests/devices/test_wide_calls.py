"""Calls with thousands of operands: twice as many take twice as many steps of Python, and no more."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND, INLINE

import trio_accel as ta
from trio_accel import arrays

FEW, MANY = 300, 600


def _calls(x: Any, count: int) -> list[Any]:
    return [x * float(number) for number in range(count)]


def _pairs(x: Any, count: int) -> Any:
    made = _calls(x, count)
    while len(made) > 1:
        made = [
            *(one + other for one, other in zip(made[::2], made[1::2], strict=False)),
            *made[len(made) & ~1 :],
        ]
    return made[0]


def _row(x: Any, count: int) -> Any:
    for _ in range(count):
        x = x * 1.0
    return x


FORMS: dict[str, tuple[Callable[[Any, int], Any], Callable[[int], Any]]] = {
    "a stack of calls": (lambda x, n: arrays.stack(_calls(x, n)), lambda n: np.outer(np.arange(n), [1, 2])),
    "calls side by side": (
        lambda x, n: arrays.concat(_calls(x, n)),
        lambda n: np.outer(np.arange(n), [1, 2]).ravel(),
    ),
    "a stack of arrays": (lambda x, n: arrays.stack([x] * n), lambda n: np.tile([1.0, 2.0], (n, 1))),
    "a stack of host arrays": (
        lambda x, n: arrays.stack([x, *[np.array([1.0, 2.0])] * (n - 1)]),
        lambda n: np.tile([1.0, 2.0], (n, 1)),
    ),
    "a sum in pairs": (_pairs, lambda n: np.array([1, 2]) * (n * (n - 1) // 2)),
    "a row of calls": (_row, lambda n: np.array([1.0, 2.0])),
}


async def _steps_of(ask: Callable[[], Awaitable[Any]]) -> tuple[int, Any]:
    """Count the functions that run in this thread for a call; those of C too."""
    steps = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal steps
        steps += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        made = await ask()
    finally:
        sys.setprofile(None)
    return steps, made


@pytest.mark.parametrize("form", FORMS)
async def test_the_steps_grow_with_the_operands(form: str) -> None:
    make, expected = FORMS[form]
    async with ta.open_system("s") as system, system.open_device(BACKEND, options=INLINE) as device:
        x = await device.put(np.array([1.0, 2.0]))
        # Requirements of any call are there by then. The calls below are recorded, because they are new
        # chains.
        await make(x, FEW // 2)
        counted: dict[int, int] = {}
        for number in (FEW, MANY):
            counted[number], made = await _steps_of(lambda number=number: make(x, number))  # type: ignore[misc]
            np.testing.assert_array_equal(await made.to_host(), expected(number))
        assert counted[MANY] < 2.5 * counted[FEW]
