"""A loss under many clients: their retries stay within the budget, from the clients to the devices."""

from __future__ import annotations

from collections import Counter

import attrs
import numpy as np
import pytest
import trio

import trio_accel as ta
from trio_accel.patterns import GetStatistics, Replica, ReplicaPool, ReplicaPoolStatistics, RetryBudget, retry
from trio_accel.testing import inject_fault

# Two contexts of one device are two devices here, on a machine with one.
pytestmark = pytest.mark.filterwarnings("ignore:open_device. cpu.0 is open already:RuntimeWarning")

CLIENTS = 32
LOSSES = 2
SHARE = 0.1
LOST = (ta.ContextLostError, ta.ActorFailedError, ta.StaleRefError, ta.NotExecutedError)
ORDER = 160


@attrs.define(eq=False)
class Products:
    """A model on a device: each request is a product of its own, which may be computed twice."""

    device: ta.Device
    asked: int = 0

    async def __call__(self, item: int) -> float:
        self.asked += 1
        matrix = np.full((ORDER, ORDER), float(item))
        product = await self.device.ask(ta.linalg.Matmul(matrix, matrix))
        return float((await product.to_host())[0, 0])


@pytest.mark.slow
async def test_after_a_loss_the_retries_of_32_clients_stay_within_their_budget(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process", retry=0)
    devices = [await system.open_device("cpu", options=options) for _ in range(2)]
    models = [Products(device) for device in devices]
    pool = await system.spawn(ReplicaPool, [Replica(each, device=each.device) for each in models])
    # The window is longer than the test, so the law holds for all of it.
    budget = RetryBudget(share=SHARE, minimum=0.0, within=600.0)
    backoff = ta.Backoff(initial=0.01, base=0.01, maximum=0.05)
    ask = retry(pool, budget=budget, attempts=5, backoff=backoff, may_run_twice=True)
    kinds: Counter[str] = Counter()
    is_over = False

    async def client() -> None:
        while not is_over:
            item = kinds.total() % 100
            with trio.fail_after(60):
                try:
                    assert await ask(item) == ORDER * float(item) ** 2
                    kinds["answered"] += 1
                except LOST:
                    kinds["lost"] += 1

    async with trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
            nursery.start_soon(client)
        for _ in range(LOSSES):
            answered = kinds["answered"]
            generations = [device.generation for device in devices]
            for device in devices:
                inject_fault(device, ta.linalg.Matmul, kill=True)
            with trio.fail_after(60):
                while (  # noqa: ASYNC110  # nobody tells of all this at once
                    not all(device.is_ready for device in devices)
                    or [device.generation for device in devices] == generations
                    or kinds["answered"] < answered + CLIENTS
                ):
                    await trio.sleep(0.005)
        is_over = True

    statistics: ReplicaPoolStatistics = await pool.ask(GetStatistics())
    requests = kinds.total()
    retries = statistics.begun - requests
    assert sum(each.asked for each in models) == statistics.begun
    # Each failed attempt was tried again, or its error was the client's because the budget had no retry.
    assert statistics.failed == retries + kinds["lost"]
    assert kinds["lost"] == budget.denied > 0
    assert 0 < retries <= SHARE * requests
    for device in devices:
        await device.close()
