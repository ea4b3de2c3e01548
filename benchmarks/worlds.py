"""Worlds of devices in workers: ``python -m benchmarks.worlds [LOSSES] [RANKS] [DEVICE]``.

Prints how long copies and sums between workers take beside NumPy's. Then a rank is lost so many times in
each way, while a task asks for sums all the time. Each sum is right, or an error that names the rank. All
arrays are the same at the end. Times of losses are from the loss to the end of the first sum that was begun
behind it.
"""

# ruff: noqa: T201

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np
import trio

import trio_accel as ta
from trio_accel.collectives import RankFailedError, World

BYTES = 64 << 20
WAYS = ("kill", "poison", "stop")


async def seconds(function: Callable[[], Awaitable[object]], times: int = 15) -> float:
    """Return the median time of a call."""
    taken: list[float] = []
    for _ in range(times + 2):
        start = time.perf_counter()
        await function()
        taken.append(time.perf_counter() - start)
    # The first ones compile, and make memory.
    return statistics.median(taken[2:])


async def compare(world: World) -> None:
    """Print the times of copies and sums, beside NumPy's on the same data."""
    host = np.ones(BYTES // 4, np.float32)
    other, out = host.copy(), np.empty_like(host)

    async def add() -> None:
        np.add(host, other, out=out)

    arrays = [await device.put(host) for device in world.devices]
    small = [await device.put(np.ones(64, np.float32)) for device in world.devices]
    large = await world.devices[0].zeros(4 * BYTES, "uint8")
    source = np.ones(4 * BYTES, np.uint8)
    target = np.zeros_like(source)

    async def copy() -> None:
        np.copyto(target, source)

    for name, ours, theirs in (
        ("copy_to, four times as much", lambda: large.copy_to(world.devices[1]), copy),
        ("all_reduce", lambda: world.all_reduce(arrays), add),
        ("all_reduce in place", lambda: world.all_reduce(arrays, "mean", out=arrays), add),
    ):
        mine, numpys = await seconds(ours), await seconds(theirs)
        times = f"{1e3 * mine:.1f} ms, NumPy {1e3 * numpys:.1f} ms: {numpys / mine:.2f}"
        print(f"{name} of {BYTES >> 20} MiB: {times}")
    print(f"all_reduce of 256 bytes: {1e6 * await seconds(lambda: world.all_reduce(small), 200):.0f} µs")


async def lose(world: World, how: str, losses: int) -> None:
    """Lose a rank so many times, under load."""
    hosts = [np.random.default_rng(rank).normal(size=1 << 16) for rank in range(world.size)]
    total = sum(hosts[1:], start=hosts[0])
    arrays = [await device.put(host) for device, host in zip(world.devices, hosts, strict=True)]
    right = failed = 0
    ended: list[tuple[float, float]] = []

    async def ask() -> None:
        nonlocal right, failed
        while True:
            start = time.perf_counter()
            try:
                made = await world.all_reduce(arrays)
                sums = [await one.to_host() for one in made]
            except (RankFailedError, ta.ContextLostError, ta.CompletionTimeoutError):
                failed += 1
                continue
            assert all(np.array_equal(one, total) for one in sums)
            right += 1
            ended.append((start, time.perf_counter()))

    healed: list[float] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        for number in range(losses):
            await trio.sleep(0.3)
            device = world.devices[number % world.size]
            pid, generation = (await device.statistics()).pid, device.generation
            assert pid is not None
            lost = time.perf_counter()
            if how == "poison":
                ta.testing.poison(device)
            else:
                os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            while device.generation == generation or not (ended and ended[-1][0] > lost):  # noqa: ASYNC110
                await trio.sleep(0.001)
            healed.append(next(end for start, end in ended if start > lost) - lost)
        nursery.cancel_scope.cancel()
    for array, host in zip(arrays, hosts, strict=True):
        assert (await array.to_host()).tobytes() == host.tobytes()
    print(
        f"{how}, {losses} times: right again after {1e3 * statistics.median(healed):.0f} ms, at most "
        f"{1e3 * max(healed):.0f} ms; {right} sums right, {failed} failed; all arrays as they were"
    )


async def run(losses: int, ranks: int, device: str) -> None:
    """Measure one world, and another whose workers are given up soon."""
    hasty = ta.DeviceOptions(
        isolation="process",
        spares=1,
        heartbeat_timeout=0.3,
        stuck_after=0.3,
        intensity=ta.Intensity(10_000, 1.0),
    )
    for options in (ta.DeviceOptions(isolation="process"), hasty):
        async with (
            ta.open_system("worlds") as system,
            system.open_devices([device] * ranks, options=options) as devices,
            ta.open_world(devices) as world,
        ):
            if options is not hasty:
                print(f"{ranks} ranks on {world.devices[0].info.name}, {os.cpu_count()} processors")
                await compare(world)
                continue
            for how in WAYS if losses else ():
                await lose(world, how, losses)


def main() -> None:
    """Read the arguments, and measure."""
    losses, ranks, device = (*sys.argv[1:], *("20", "2", "cpu")[len(sys.argv) - 1 :])
    warnings.filterwarnings("ignore", "open_device", RuntimeWarning)
    trio.run(partial(run, int(losses), int(ranks), device))


if __name__ == "__main__":
    main()
