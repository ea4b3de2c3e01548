"""Minutes of everything at once: each request has one outcome, and nothing grows."""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from collections import Counter

import numpy as np
import pytest
import trio
from chosen import BACKEND
from holdings import Holdings
from processes import launcher, until, workers
from recovery_load import AT_ONCE
from scale import scaled
from test_recovery_soak import (
    FAULTS,
    LOST,
    TASKS,
    Client,
    check_outcomes,
    settled,
    strike,
    wait_idle,
)

import trio_accel as ta

SECONDS = float(os.environ.get("TRIO_ACCEL_SOAK_SECONDS", scaled(480.0, 8.0)))
PARTS = 6
MIB = 1 << 20
# Additions to the faults of any backend: faults of kernels.
KERNELS = {
    "trap": {"poison": True, "how": "trap"},
    "assert": {"poison": True, "how": "assert"},
    "endless": {"hang": True, "how": "kernel"},
    "writing": {"hang": True, "how": "writing"},
    "killed-while-writing": {"kill": True, "how": "writing"},
}


@pytest.mark.timeout(SECONDS * 1.5 + 120)
async def test_minutes_of_everything(system: ta.System, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fault in KERNELS.items():
        monkeypatch.setitem(FAULTS, name, fault)
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}, {SECONDS:g} s")
    options = ta.DeviceOptions(
        isolation="process",
        spares=1,
        retry=1,
        retry_suspects=True,
        in_flight=8,
        stuck_after=scaled(1.0, 3.0),
        cancel_grace=2.0,
        close_grace=2.0,
        heartbeat_timeout=scaled(1.0, 3.0),
        intensity=ta.Intensity(100_000, 60.0),
        backoff=AT_ONCE,
    )
    outcomes: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    held: list[Holdings] = []
    async with system.open_device(BACKEND, options=options) as device:
        clients = [Client(device, random.Random(seed + number), outcomes) for number in range(TASKS)]
        source = random.Random(seed)
        for _ in range(PARTS):
            # In between everything comes to rest, so that what is held can be counted.
            with trio.move_on_after(SECONDS / PARTS):
                async with trio.open_nursery() as nursery:
                    for client in clients:
                        nursery.start_soon(client.run)
                    nursery.start_soon(strike, device, source, hits)
            del nursery
            with trio.fail_after(60):
                await settled(device)
                await wait_idle(device)
            await _check_arrays(clients)
            with trio.fail_after(60):
                await _everything(device)
            await until(lambda: len(workers(launcher())) == 2 and device.dispatch.spares == 1, 30)
            with trio.fail_after(60):
                # Memory open to a killed worker is kept until the worker is dead.
                while (await device.statistics()).memory.blocks:
                    gc.collect()
                    await trio.sleep(0.01)
            held.append(await Holdings.now(device))
            print(time.strftime("%X"), held[-1])
        print(dict(outcomes), dict(hits), f"generation {device.generation}")
        check_outcomes(outcomes, parts=PARTS)
        assert device.generation > 3
        assert set(KERNELS) <= set(hits) or SECONDS < 60
    _check_flat(held)


async def _everything(device: ta.Device) -> None:
    """Do some of everything, because a new worker holds less than a worker with loaded and planned libraries.

    A fault that waits for its operation may also end that worker.
    """
    while True:
        client = Client(device, random.Random(1), Counter())
        try:
            for step in (client.put, client.read, client.scale, client.add, client.multiply, client.chain):
                await step()
        except LOST:
            continue
        return


async def _check_arrays(clients: list[Client]) -> None:
    """Undamaged arrays are as expected; then nobody holds any."""
    for client in clients:
        for array in client.arrays:
            if "damaged" not in repr(array.ref):
                np.testing.assert_array_equal(await array.ref.to_host(), array.host)
        client.arrays.clear()


def _check_flat(held: list[Holdings]) -> None:
    """Neither process, descriptor nor memory has grown from the first parts to the last."""

    def median(name: str, parts: list[Holdings]) -> float:
        return statistics.median(getattr(part, name) for part in parts)

    first, last = held[: PARTS // 2], held[PARTS // 2 :]
    assert {part.processes for part in held} == {4}
    assert {(part.blocks, part.used) for part in held} == {(0, 0)}
    assert median("descriptors", last) <= median("descriptors", first) + 2
    assert median("threads", last) <= median("threads", first) + 2
    assert median("reserved", last) <= 2 * median("reserved", first)
    assert median("resident", last) <= median("resident", first) + 64 * MIB
    assert median("device_free", last) >= median("device_free", first) - 256 * MIB
