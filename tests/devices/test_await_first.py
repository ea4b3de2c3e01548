"""A forgotten `await` before a method that makes an array: the error asks for it, and no warning follows."""

from __future__ import annotations

import gc
import operator
import re
import warnings
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

import trio_accel as ta

HOST = np.arange(4.0).reshape(2, 2)
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "ge")


def _makers(device: ta.Device, x: ta.AccelRef) -> dict[str, Callable[[], Any]]:
    return {
        "device.put(...)": lambda: device.put(HOST),
        "device.zeros(...)": lambda: device.zeros((2, 2)),
        "device.empty(...)": lambda: device.empty((2, 2)),
        "device.full(...)": lambda: device.full((2, 2), 1.0),
        "x.copy_to(...)": lambda: x.copy_to(device),
    }


def _uses(make: Callable[[], Any]) -> Generator[Callable[[], object], None, None]:
    for name in OPERATORS:
        function = getattr(operator, name)
        yield from (partial(function, make(), 1), partial(function, 2, make()))
    for function in (operator.neg, abs, len, list):
        yield partial(function, make())
    yield partial(operator.getitem, make(), 0)


async def test_an_operator_asks_for_the_await(device: ta.Device) -> None:
    x = await device.put(HOST)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method, make in _makers(device, x).items():
            for use in _uses(make):
                with pytest.raises(TypeError, match=rf"await it first: \(await {re.escape(method)}"):
                    use()
            with pytest.raises(AttributeError, match=r"the attribute 'shape'; await it first: .*b\.wait"):
                _ = make().shape
        gc.collect()


async def test_it_is_a_coroutine_as_before(device: ta.Device) -> None:
    x = await device.put(HOST)
    for make in _makers(device, x).values():
        assert (await make()).shape == (2, 2)
        async with trio.open_nursery() as nursery:  # noqa: ASYNC112  # a nursery takes only functions
            nursery.start_soon(make)
    with pytest.warns(RuntimeWarning, match="was never awaited"):
        device.put(HOST)


async def test_the_name_of_the_method_begins_its_errors(device: ta.Device) -> None:
    x = await device.put(HOST)
    for name, call in {
        "put": lambda: device.put(object()),  # type: ignore[arg-type]
        "full": lambda: device.full(-1, 0.0),
        "assign": lambda: x.assign(np.ones(7)),
        "fill": lambda: x.fill(1j),
        "to_host": lambda: x.to_host(out=np.ones(3)),
        "cast": lambda: x.cast("complex128").cast("float64"),
    }.items():
        with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
            await call()


async def test_a_started_call_has_the_name_of_its_function(device: ta.Device) -> None:
    x = await device.put(HOST[:1])
    with pytest.raises(ValueError, match=r"^linalg\.matmul: "):
        (x @ x).start()
