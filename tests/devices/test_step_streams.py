"""Steps on streams of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio

import trio_accel as ta

X = np.arange(64, dtype=np.float32).reshape(8, 8)


def _product(x: Any, factor: float) -> Any:
    return (x @ x * factor).to_host()


async def test_bits_and_actors() -> None:
    """Steps of one name share an actor, and all give the bits of the calls."""
    async with ta.open_system("streams") as system:
        options = ta.DeviceOptions(in_place=False, isolation="inline")
        async with system.open_device("cpu", options=options) as device:
            x = await device.put(X)
            expected = await (x @ x * 2.0).to_host()
            steps = [ta.step(_product, stream=name) for name in ("", "one", "two", "one")]

            async def ask(step: Any) -> None:
                for _ in range(10):
                    np.testing.assert_array_equal(await step(x, 2.0), expected)

            async with trio.open_nursery() as nursery:
                for step in steps:
                    nursery.start_soon(ask, step)
            assert str(system.tree()).count("(GraphsActor)") == 3


async def test_two_streams_run_at_the_same_time() -> None:
    """A step continues while the stream of another one is held."""
    async with ta.open_system("streams") as system:
        options = ta.DeviceOptions(in_place=False, isolation="inline")
        async with system.open_device("cpu", options=options) as device:
            x = await device.put(X)
            slow, quick = ta.step(_product), ta.step(_product, stream="quick")
            expected = await slow(x, 2.0)
            await quick(x, 2.0)
            queues: Any = device
            held = next(
                queue
                for queue in queues.dispatch.session.engine.streams.all
                if queue.stream.name.endswith("graphs")
            )
            hold = held.stream.hold()
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(slow, x, 2.0)
                    with trio.fail_after(60):
                        np.testing.assert_array_equal(await quick(x, 2.0), expected)
                    hold.release()
            finally:
                hold.release()


@pytest.mark.parametrize("name", ["a b", "apart", "1"])
def test_a_name_is_an_identifier(name: str) -> None:
    with pytest.raises(ValueError, match=r"step: stream must be a name of letters, digits and underscores"):
        ta.step(_product, stream=name)
