"""Replicas on devices: the routes of requests while a context is lost, and when a device ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import attrs
import numpy as np
import pytest
import trio

import trio_accel as ta
from trio_accel.patterns import (
    GetStatistics,
    NoReplicaError,
    Replica,
    ReplicaPool,
    ReplicaPoolStatistics,
    Submit,
)
from trio_accel.testing import inject_fault

# Two contexts of one device are two devices here, on a machine with one.
pytestmark = pytest.mark.filterwarnings("ignore:open_device. cpu.0 is open already:RuntimeWarning")

LOST = (ta.ContextLostError, ta.ActorFailedError, ta.StaleRefError)
REQUESTS = 400
ASKERS = 8


def named(name: str) -> Callable[[Any], Awaitable[str]]:
    async def model(item: Any) -> str:
        await trio.lowlevel.checkpoint()
        return name

    return model


async def test_a_replica_of_an_ended_device_gets_nothing(system: ta.System) -> None:
    devices = [await system.open_device("cpu") for _ in range(2)]
    replicas = {name: Replica(named(name), device=device) for name, device in zip("ab", devices, strict=True)}
    pool = await system.spawn(ReplicaPool, replicas)
    assert {await pool.ask(Submit(None)) for _ in range(4)} == {"a", "b"}
    await devices[0].close()
    assert devices[0].is_ended
    assert not devices[0].is_ready
    assert {await pool.ask(Submit(None)) for _ in range(4)} == {"b"}
    await devices[1].close()
    with pytest.raises(NoReplicaError, match="all 2 replicas"):
        await pool.ask(Submit(None))


@attrs.define(eq=False)
class Norms:
    """A model on a device that notes requests during the loss of its context."""

    device: ta.Device
    asked: int = 0
    asked_without_context: int = 0

    async def __call__(self, item: int) -> float:
        self.asked += 1
        self.asked_without_context += not self.device.is_ready
        norm = await self.device.ask(ta.linalg.Nrm2(np.array([3.0 * item, 4.0 * item])))
        return float(await norm.item())


async def lose_context(device: ta.Device) -> None:
    """Have the worker process killed at the next request, and wait for the next context."""
    wanted = device.generation + 1
    inject_fault(device, ta.linalg.Nrm2, kill=True)
    async with aclosing(device.watch_generation()) as generations:
        async for generation in generations:
            if generation == wanted:
                return


async def test_a_worker_killed_under_load(system: ta.System) -> None:
    """Each request has one outcome, and none is sent to the device without a context."""
    options = ta.DeviceOptions(isolation="process")
    devices = [await system.open_device("cpu", options=options) for _ in range(2)]
    models = [Norms(device) for device in devices]
    pool = await system.spawn(ReplicaPool, [Replica(each, device=each.device) for each in models])
    outcomes: dict[int, list[object]] = {}
    is_over = False

    async def ask() -> None:
        while not is_over or len(outcomes) < REQUESTS:
            item = len(outcomes)
            mine: list[object] = []
            outcomes[item] = mine
            try:
                with trio.fail_after(60):
                    mine.append(await pool.ask(Submit(item)))
            except LOST as error:
                mine.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(ASKERS):
            nursery.start_soon(ask)
        for _ in range(2):
            await lose_context(devices[0])
            before = models[0].asked
            # It takes part again.
            with trio.fail_after(60):
                while models[0].asked < before + 5:  # noqa: ASYNC110  # nobody tells of a call
                    await trio.sleep(0.005)
        is_over = True

    assert [each.asked_without_context for each in models] == [0, 0]
    assert {len(each) for each in outcomes.values()} == {1}
    results = {item: result for item, (result,) in outcomes.items() if isinstance(result, float)}
    assert results == pytest.approx({item: 5.0 * item for item in results})
    kinds = Counter(type(result).__name__ for (result,) in outcomes.values())
    # At most what was in flight at each loss has failed.
    assert kinds["float"] >= len(outcomes) - 2 * ASKERS
    statistics: ReplicaPoolStatistics = await pool.ask(GetStatistics())
    assert [each.begun for each in statistics.replicas] == [each.asked for each in models]
    assert sum(each.begun for each in statistics.replicas) == len(outcomes)
    assert sum(each.failed for each in statistics.replicas) == len(outcomes) - kinds["float"]
    assert statistics.in_flight == 0
    assert all(each.is_available for each in statistics.replicas)
    assert devices[1].generation == 1
    for device in devices:
        await device.close()
