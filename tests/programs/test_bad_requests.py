"""Bad requests among good ones: each costs its own caller an error, and the others nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio
from bad_requests import Picky

import trio_accel as ta
from trio_accel.patterns import Batcher, Submit

MANY = ta.Intensity(100, 60.0)
AT_ONCE = ta.Backoff(base=0.0)


@pytest.mark.parametrize(("method", "error"), [("double", ta.ActorFailedError), ("refusing", ValueError)])
async def test_two_bad_requests_at_once(device: ta.Device, method: str, error: type[Exception]) -> None:
    good, bad = await device.put(np.ones(4)), await device.put(-np.ones(4))
    async with ta.open_program(device, Picky, intensity=MANY, backoff=AT_ONCE) as program:
        right, refused = 0, 0

        async def ask(number: int) -> None:
            nonlocal right, refused
            for _ in range(10):
                if number < 2:
                    with pytest.raises(error, match="a number below zero"):
                        await program.ask(method, bad)
                    refused += 1
                else:
                    result = await program.ask(method, good)
                    np.testing.assert_array_equal(await result.to_host(), np.full(4, 2.0))
                    right += 1

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(ask, number)
        assert (right, refused) == (60, 20)
    assert device.generation == 1
    np.testing.assert_array_equal(await bad.to_host(), -np.ones(4))


async def test_a_request_bad_only_in_company(system: ta.System, device: ta.Device) -> None:
    async with ta.open_program(device, Picky) as program:

        async def sums(rows: list[Any]) -> Any:
            return await (await program.ask(Picky.apart, rows)).to_host()

        batcher = await system.spawn(
            Batcher[Any, Any], sums, max_size=8, max_wait=1.0, adaptive=False, name="batcher"
        )
        found: dict[int, float] = {}

        async def ask(number: int) -> None:
            found[number] = float(await batcher.ask(Submit(np.full(3, float(number)))))

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(ask, number)
        # Apart from one another both are good, and everybody gets an answer.
        assert found == {number: 3.0 * number for number in range(8)}
    assert all(not node.incarnation for node in system.tree().walk() if node.path.startswith(device.path))
