"""Arguments that a method keeps after its call, on every backend: it is reported, or the call fails."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND, IS_STAND_IN
from keeping_programs import Keeps, Lets

import trio_accel as ta

pytestmark = pytest.mark.skipif(
    BACKEND == "cuda" and not IS_STAND_IN, reason="NumPy shows what the programs take"
)
X = np.arange(8.0)


def told_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record.getMessage() for record in caplog.records if record.name == "trio_accel.backends"]
    return [text.partition(" after its call")[0] for text in records]


@pytest.mark.parametrize("method", [Keeps.by_dlpack, Keeps.by_interface, Keeps.the_object])
async def test_a_kept_read_argument_is_reported_once(
    any_device: ta.Device, caplog: pytest.LogCaptureFixture, method: Any
) -> None:
    x = await any_device.put(X)
    async with ta.open_program(any_device, Keeps) as program:
        for _ in range(3):
            assert await program.ask(method, x) == X.sum()
        assert await program.ask(Keeps.count) == 3
    assert told_in(caplog) == [f"keeping_programs.Keeps.{method.__name__} keeps x"]


@pytest.mark.parametrize("method", [Keeps.target, Keeps.out])
async def test_a_kept_written_argument_fails_the_call(any_device: ta.Device, method: Any) -> None:
    intensity, backoff = ta.Intensity(100, 60.0), ta.Backoff(base=0.0)
    targets = [await any_device.put(X)] if method is Keeps.target else []
    async with ta.open_program(any_device, Keeps, intensity=intensity, backoff=backoff) as program:
        with pytest.raises(
            ta.ActorFailedError, match=f"RuntimeError: .* keeps {method.__name__} after its call"
        ):
            await program.ask(method, X, *targets)
        del targets
        # The instance that kept it was released.
        assert await program.ask(Keeps.count) == 0


async def test_returned_arguments_and_garbage_are_not_kept(
    any_device: ta.Device, caplog: pytest.LogCaptureFixture
) -> None:
    x, target = await any_device.put(X), await any_device.put(X)
    async with ta.open_program(any_device, Lets) as program:
        gc.disable()
        try:
            for _ in range(3):
                assert await program.ask(Lets.reads, x) == 2 * X.sum()
                given = await program.ask(Lets.gives, x)
                for made in (*given.values(), await program.ask(Lets.leaves_cycle, x, target)):
                    np.testing.assert_array_equal(await made.to_host(), X)
        finally:
            gc.enable()
    assert not told_in(caplog)
