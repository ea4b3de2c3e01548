"""Softmax regression on several devices that average their gradients, while their workers are killed."""

from __future__ import annotations

import argparse
import itertools
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import trio

import trio_accel as ta
from trio_accel.collectives import Rank

DIGITS = Path(__file__).parent / "data" / "digits.csv.gz"
# Each step makes new arrays and changes none in place, so what a loss has hit can run again.
OPTIONS = ta.DeviceOptions(isolation="process", spares=1, retry=9, intensity=ta.Intensity(99, 1.0))
difference = ta.jit.elementwise("(p - y) / rows")
penalty = ta.jit.reduction("-y * log(p + 1e-12)")
descend = ta.jit.elementwise("w - 0.5 * g")


async def train(rank: Rank, x: np.ndarray, y: np.ndarray, steps: int) -> tuple[list[float], np.ndarray]:
    """Train with the data of one rank; returns the mean losses of all the data, and the weights."""
    points, labels = await rank.device.put(x), await rank.device.put(y)
    weights = await rank.device.zeros((x.shape[1], y.shape[1]))
    losses: list[float] = []
    for _ in range(steps):
        chances = await ta.arrays.softmax(await ta.linalg.matmul(points, weights), axis=1)
        slope = await ta.linalg.matmul(points.T, await difference(chances, labels, len(x)))
        weights = await descend(weights, await rank.all_reduce(slope, "mean"))
        loss = await rank.all_reduce(await penalty(labels, chances), "mean")
        losses.append(await loss.item() / len(x))
    return losses, await weights.to_host()


async def kill(devices: Iterable[ta.Device], every: float) -> None:
    """Kill the worker of one device after the other."""
    for device in itertools.cycle(devices):
        await trio.sleep(every)
        os.kill((await device.statistics()).pid or 0, signal.SIGKILL)


async def run(count: int, steps: int, every: float, backend: str) -> tuple[np.ndarray, np.ndarray]:
    """Train on so many devices, of which one is killed every so often; returns losses and weights."""
    table = np.loadtxt(DIGITS, delimiter=",")[:1792]  # each rank has as many rows
    x, y = table[:, :-1] / 16, np.eye(10)[table[:, -1].astype(int)]
    found: list[tuple[list[float], np.ndarray]] = []
    hardware = [info.name for info in ta.list_devices() if info.name.startswith(backend)]
    names = list(itertools.islice(itertools.cycle(hardware), count))
    async with (
        ta.open_system("train") as system,
        system.open_devices(names, options=OPTIONS) as devices,
        ta.open_world(devices, retry=9) as world,
    ):

        async def train_one(rank: Rank) -> None:
            mine = slice(rank.number, None, count)
            found.append(await train(rank, x[mine], y[mine], steps))

        start = trio.current_time()
        async with trio.open_nursery() as killers:
            killers.start_soon(kill, devices, every)
            async with trio.open_nursery() as ranks:
                for rank in world.ranks:
                    ranks.start_soon(train_one, rank)
            killers.cancel_scope.cancel()
        lost, rate = sum(device.losses for device in devices), steps / (trio.current_time() - start)
        way = f"{count} devices by {world.transport}"
        print(f"{way}, {lost} workers lost, {rate:.0f} steps a second: {found[0][0][-1]:.6f}")
    assert all(np.array_equal(weights, found[0][1]) for _, weights in found)
    return np.array(found[0][0]), found[0][1]


def main() -> int:
    """Return the exit code: 0 if losses and weights are those of one device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=float, default=2.0, help="seconds from one kill to the next")
    parser.add_argument("--backend", default="cpu", help="device to use, such as cpu or cuda:1")
    given = parser.parse_args()
    alone, *others = [
        trio.run(run, count, given.steps, given.every if count > 1 else np.inf, given.backend)
        for count in (1, 2, 4)
    ]
    gap = max(float(np.abs(a - b).max()) for other in others for a, b in zip(alone, other, strict=True))
    print(f"largest difference to one device {gap:.0e}: {'right' if gap < 1e-9 else 'WRONG'}")
    return 0 if gap < 1e-9 else 1


if __name__ == "__main__":
    raise SystemExit(main())
