"""A small convolutional network learns handwritten digits, while the worker that computes it is killed."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import trio

import trio_accel as ta
from trio_accel import nn

DIGITS = Path(__file__).parent / "data" / "digits.csv.gz"
# Each operation returns new arrays and changes none in place, so it can run again after a loss.
OPTIONS = ta.DeviceOptions(isolation="process", retry=2)


async def scores(weights: list[ta.AccelRef], x: ta.AccelRef) -> tuple[ta.AccelRef, ...]:
    """Return scores of the digits, and the arrays that the gradients need."""
    made = await nn.conv2d(x, weights[0], weights[1], padding=1)
    pooled = await nn.max_pool2d(nn.relu(made), 2, return_indices=True)
    flat = pooled.output.reshape((len(x), -1))
    return await (flat @ weights[2] + weights[3]), made, flat, pooled.indices


async def step(weights: list[ta.AccelRef], x: ta.AccelRef, y: ta.AccelRef, rate: float) -> list[ta.AccelRef]:
    """Take a step of gradient descent on the cross-entropy, and return the new weights."""
    guess, made, flat, indices = await scores(weights, x)
    slope = await ((ta.arrays.softmax(guess, axis=1) - y) / len(x))
    spread = (slope @ weights[2].T).reshape(indices.shape)
    back = await nn.relu_grad(nn.max_pool_grad(spread, indices, made.shape), made)
    gradients = [
        nn.conv_weight_grad(x, weights[0].shape, back, padding=1),
        nn.conv_bias_grad(back),
        flat.T @ slope,
        ta.arrays.sum(slope, axis=0),
    ]
    return [await (w - rate * g) for w, g in zip(weights, gradients, strict=True)]


async def train(rounds: int, is_killed: bool, backend: str | None) -> list[np.ndarray]:
    """Train, kill the worker meanwhile if requested, and return the weights."""
    rng = np.random.default_rng(0)
    data = rng.permutation(np.loadtxt(DIGITS, np.float32, delimiter=","))
    x, y = data[:, :-1].reshape(-1, 1, 8, 8) / 16, data[:, -1].astype(int)
    sizes = {(8, 1, 3, 3): 0.3, (8,): 0, (128, 10): 0.1, (10,): 0}
    start = [rng.normal(scale=scale, size=shape).astype(np.float32) for shape, scale in sizes.items()]
    async with ta.open_system("digits") as system, system.open_device(backend, options=OPTIONS) as device:
        images, labels = await device.put(x), await device.put(np.eye(10, dtype=np.float32)[y])
        weights = [await device.put(one) for one in start]
        for first in [*range(0, 1500, 100)] * rounds:
            if is_killed and first == 700 and not device.losses:
                ta.testing.inject_fault(device, nn.ConvWeightGrad, kill=True)
            weights = await step(weights, images[first : first + 100], labels[first : first + 100], 1.0)
        best = await ta.arrays.argmax((await scores(weights, images[1500:]))[0], axis=1)
        is_right = await best.to_host() == y[1500:]
        print(f"{device.losses} workers lost, {is_right.mean():.1%} are told right")
        return [await one.to_host() for one in weights]


def main() -> int:
    """Return the exit code: 0 if the weights agree with a run without a kill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="number of passes over the training images")
    parser.add_argument("--backend", help="device to use, such as cpu")
    given = parser.parse_args()
    one, other = (trio.run(train, given.rounds, is_killed, given.backend) for is_killed in (False, True))
    gap = max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))
    print(f"largest difference of a weight {gap:.0e}: {'right' if gap < 1e-3 else 'WRONG'}")
    return 0 if gap < 1e-3 else 1


if __name__ == "__main__":
    raise SystemExit(main())
