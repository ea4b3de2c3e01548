"""A network on several devices that average their gradients, while their workers are killed."""

from __future__ import annotations

import argparse
import itertools
import math
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
penalty = ta.jit.reduction("-y * log(p + 1e-12)")


async def train(
    rank: Rank, x: np.ndarray, y: np.ndarray, given: argparse.Namespace
) -> tuple[np.ndarray, np.ndarray, float]:
    """Train with the data of one rank; returns losses of all, all weights, and steps a second."""
    sizes: list[int] = [x.shape[1], *[given.width] * (2 if given.width else 0), y.shape[1]]
    rng, shapes = np.random.default_rng(0), list(itertools.pairwise(sizes))
    scale, ends = float(given.width > 0), list(itertools.accumulate(a * b for a, b in shapes))
    start = rng.normal(size=ends[-1])
    start *= np.concatenate([np.full(a * b, scale * math.sqrt(2 / a)) for a, b in shapes])
    points, labels = await rank.device.put(x), await rank.device.put(y)
    # All weights are one array. So a step has one array of gradients, which meets those of the others once.
    weights = await rank.device.put(start)

    async def step(weights: ta.AccelRef) -> tuple[ta.AccelRef, ta.AccelRef]:
        layers = [weights[end - a * b : end].reshape(a, b) for (a, b), end in zip(shapes, ends, strict=True)]
        inputs, gradients = [points], list[ta.AccelRef]()
        for layer in layers[:-1]:
            inputs.append(await ta.nn.relu(inputs[-1] @ layer))
        chances = await ta.arrays.softmax(inputs[-1] @ layers[-1], axis=1)
        slope = await ((chances - labels) / len(x))
        for number in reversed(range(len(layers))):
            gradients.insert(0, await (inputs[number].T @ slope).reshape(-1))
            if number:
                slope = await ta.nn.relu_grad(slope @ layers[number].T, inputs[number])
        return await ta.arrays.concat(gradients), await penalty(labels, chances)

    graph = await ta.graphs.capture(rank.device, step, weights)
    losses, began = list[ta.AccelRef](), 0.0
    for number in range(given.steps):
        began = trio.current_time() if number <= given.steps // 4 else began
        gradients, loss = await graph(weights)
        weights = await (weights - given.rate * await rank.all_reduce(gradients, "mean"))
        losses.append(loss)
    rate = (given.steps - given.steps // 4) / (trio.current_time() - began)
    means = await rank.all_reduce(await ta.arrays.stack(losses), "mean")
    return await means.to_host() / len(x), await weights.to_host(), rate


async def kill(devices: Iterable[ta.Device], every: float) -> None:
    """Kill the worker of one device after the other."""
    for device in itertools.cycle(devices):
        await trio.sleep(every)
        os.kill((await device.statistics()).pid or 0, signal.SIGKILL)


async def run(count: int, given: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Train on so many devices, of which one is killed every so often; returns losses and weights."""
    table = np.tile(np.loadtxt(DIGITS, delimiter=",")[:1792], (given.times, 1))  # each rank has as many rows
    x, y = table[:, :-1] / 16, np.eye(10)[table[:, -1].astype(int)]
    found: list[tuple[np.ndarray, np.ndarray, float]] = []
    hardware = [info.name for info in ta.list_devices() if info.name.startswith(given.backend)]
    names = list(itertools.islice(itertools.cycle(hardware), count))
    async with (
        ta.open_system("train") as system,
        system.open_devices(names, options=OPTIONS) as devices,
        ta.open_world(devices, retry=9) as world,
    ):

        async def train_one(rank: Rank) -> None:
            mine = slice(rank.number, None, count)
            found.append(await train(rank, x[mine], y[mine], given))

        async with trio.open_nursery() as killers:
            killers.start_soon(kill, devices, given.every if count > 1 else np.inf)
            async with trio.open_nursery() as ranks:
                for rank in world.ranks:
                    ranks.start_soon(train_one, rank)
            killers.cancel_scope.cancel()
        lost, (losses, weights, rate) = sum(device.losses for device in devices), found[0]
        speed = f"{rate:.1f} steps and {rate * len(x):.0f} images a second"
        print(f"{count} devices by {world.transport}, {lost} workers lost, {speed}: {losses[-1]:.6f}")
    assert all(np.array_equal(other, weights) for _, other, _ in found)
    return losses, weights


def main() -> int:
    """Return the exit code: 0 if losses and weights are those of one device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=float, default=2.0, help="seconds from one kill to the next, or inf")
    parser.add_argument("--backend", default="cpu", help="device to use, such as cpu or cuda:1")
    parser.add_argument(
        "--devices", type=int, nargs="+", default=[1, 2, 4], help="how many, one after another"
    )
    parser.add_argument("--width", type=int, default=0, help="of two hidden layers; 0 for none")
    parser.add_argument("--times", type=int, default=1, help="how often the batch has the 1792 digits")
    parser.add_argument("--rate", type=float, default=0.5, help="of learning")
    given = parser.parse_args()
    alone, *others = [trio.run(run, count, given) for count in given.devices]
    gap = max(float(np.abs(a - b).max()) for other in others for a, b in zip(alone, other, strict=True))
    print(f"largest difference to one device {gap:.0e}: {'right' if gap < 1e-9 else 'WRONG'}")
    return 0 if gap < 1e-9 else 1


if __name__ == "__main__":
    raise SystemExit(main())
