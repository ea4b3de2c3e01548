"""A `HotSwap` between programs of a worker device."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np
import pytest

import trio_accel as ta
from trio_accel.patterns import Deployment, HotSwap, Submit, Swap, SwapFailedError
from trio_accel.programs import Array

Opening = Callable[[], AbstractAsyncContextManager[Any]]


class Scale:
    """A model run by a program of a device."""

    def __init__(self, factor: Array) -> None:
        self.factor = factor

    @ta.programs.method(out=lambda x: (x.shape, "float64"))
    def run(self, x: Array) -> Array:
        return x * self.factor


async def test_a_program_on_a_worker_device(system: ta.System) -> None:
    device = await system.open_device("cpu", options=ta.DeviceOptions(isolation="process"))

    def scaled(factor: float) -> Opening:
        @asynccontextmanager
        async def open_model() -> AsyncGenerator[Any, None]:
            async with ta.open_program(device, Scale, np.array([factor])) as program:

                async def model(item: np.ndarray) -> np.ndarray:
                    result: np.ndarray = await (
                        await program.ask(Scale.run, await device.put(item))
                    ).to_host()
                    return result

                yield model

        return open_model

    async def check(model: Callable[[Any], Any]) -> None:
        if not np.isfinite(await model(np.ones(3))).all():
            raise ValueError("the model gives no numbers")

    ref = await system.spawn(HotSwap, Deployment(scaled(2.0), "2"), probe=check)
    x = np.arange(3.0)
    np.testing.assert_array_equal(await ref.ask(Submit(x)), 2 * x)
    await ref.ask(Swap(scaled(3.0), "3"))
    np.testing.assert_array_equal(await ref.ask(Submit(x)), 3 * x)
    with pytest.raises(SwapFailedError, match="gives no numbers"):
        await ref.ask(Swap(scaled(float("nan")), "nan"))
    np.testing.assert_array_equal(await ref.ask(Submit(x)), 3 * x)
    await ref.stop(drain=True)
