"""Python calls of a warm request, on the application's side: a measure without noise.

Half of them are Trio's, because a caller waits for another thread, and the loop turns until it is woken. A
step computed in place waits for neither.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from isolations import inline
from python_calls import python_calls

import trio_accel as ta
from trio_accel.backends.base import Isolation

X = np.linspace(-1.0, 1.0, 8 * 64, dtype=np.float32).reshape(8, 64)
W = np.linspace(-1.0, 1.0, 64 * 64, dtype=np.float32).reshape(64, 64)


@pytest.mark.skipif(hasattr(sys, "gettrace") and sys.gettrace() is not None, reason="traced")
@pytest.mark.parametrize(("steps", "most"), [(1, 150), (3, 170)])
@inline
async def test_a_request_takes_few_calls(device: ta.Device, steps: int, most: int) -> None:
    if device.info.backend != "cpu":
        pytest.skip("the bindings of a driver are Python here, too")
    w = await device.put(W)

    def request() -> Awaitable[Any]:
        y = X @ w
        if steps == 3:
            y = ta.arrays.softmax(ta.nn.relu(y) @ w, axis=1)
        return y.to_host()

    assert 100 < await python_calls(request) <= most


@inline
async def test_a_further_step_takes_a_handful(device: ta.Device) -> None:
    x = await device.put(W)

    def request(steps: int) -> Awaitable[Any]:
        y = x + 1
        for _ in range(steps):
            y = y + x
        return y.to_host()

    few, many = await python_calls(lambda: request(10)), await python_calls(lambda: request(60))
    assert (many - few) / 50 <= 8


@pytest.mark.skipif(hasattr(sys, "gettrace") and sys.gettrace() is not None, reason="traced")
async def test_each_of_many_dropped_arrays_takes_one_call(device: ta.Device, isolation: Isolation) -> None:
    arrays, count = [await device.put(W) for _ in range(1000)], 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    arrays.clear()
    sys.setprofile(None)
    # The finaliser of each, and the calls before the loop is woken.
    assert 1000 <= count < 1100


@ta.step
def one(x: Any, w: Any) -> Any:
    return (x @ w).to_host()


@ta.step
def three(x: Any, w: Any) -> Any:
    return ta.arrays.softmax(ta.nn.relu(x @ w) @ w, axis=1).to_host()


@ta.step
def changing(x: Any, w: Any, scale: float) -> Any:
    return ((x @ w) * scale).to_host()


STEP_CALLS = {
    "one": (60, 140),
    "three": (75, 140),
    "changing": (70, 140),
}
"""The most of a step: inline, where it is computed in place, and by a worker."""


@pytest.mark.skipif(hasattr(sys, "gettrace") and sys.gettrace() is not None, reason="traced")
@pytest.mark.parametrize("name", list(STEP_CALLS))
async def test_a_step_takes_fewer(device: ta.Device, name: str, isolation: Isolation) -> None:
    if device.info.backend != "cpu":
        pytest.skip("the bindings of a driver are Python here, too")
    w, numbers = await device.put(W), itertools.count()
    asks: dict[str, Callable[[], Awaitable[object]]] = {
        "one": lambda: one(X, w),
        "three": lambda: three(X, w),
        "changing": lambda: changing(X, w, float(next(numbers))),
    }
    most = STEP_CALLS[name][isolation == "process"]
    # A machine with other work has slow moments, after which a step uses the thread for a while.
    for _ in range(8):
        found = await python_calls(asks[name])
        if found <= most:
            break
    assert 20 < found <= most
