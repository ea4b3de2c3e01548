"""Your own class on a device: a classifier with weights that outlive its worker process."""

from __future__ import annotations

import argparse

import numpy as np
import trio

import trio_accel as ta
from trio_accel.programs import Array


class Classifier:
    """Softmax regression. With NumPy arrays it also works without a device."""

    def __init__(self, weights: Array, *, rate: float = 0.2) -> None:
        self.weights, self.rate = weights, rate

    @ta.programs.method(updates=["self.weights"])
    def learn(self, x: Array, labels: Array) -> float:
        """Take a step of gradient descent in place, and return the loss."""
        shares, chosen = self._shares(x), (np.arange(len(x)), labels)
        loss = -np.log(shares[chosen]).mean()
        shares[chosen] -= 1.0
        self.weights -= self.rate / len(x) * (x.T @ shares)
        return float(loss)

    @ta.programs.method(out=lambda x: ((x.shape[0],), "int64"))
    def classify(self, x: Array) -> Array:
        """Return the likeliest class of each row."""
        return self._shares(x).argmax(axis=1)

    def _shares(self, x: Array) -> Array:
        shares = np.exp(x @ self.weights)
        return shares / shares.sum(axis=1, keepdims=True)


def samples(count: int) -> tuple[Array, Array]:
    """Return points around three centres, with a column of ones, and the number of each point's centre."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, count)
    points = np.array([[0.0, 2.0, 1.0], [2.0, -1.0, 1.0], [-2.0, -1.0, 1.0]])[labels]
    return points + rng.normal(size=points.shape) * [0.5, 0.5, 0.0], labels


async def run(steps: int, faults: int) -> bool:
    """Return whether the weights equal the result of a run without a device."""
    (x, labels), options = samples(600), ta.DeviceOptions(isolation="process", retry=1)
    async with ta.open_system("own") as system, system.open_device("cpu", options=options) as device:
        weights = await device.zeros((3, 3))
        async with ta.open_program(device, Classifier, weights) as program:
            for step in range(steps):
                await program.ask(Classifier.learn, x, labels)
                if step < faults:  # the next worker continues with the same weights
                    ta.testing.inject_fault(device, program.operation(Classifier.classify), kill=True)
                    await program.ask(Classifier.classify, x)
            loss = await program.ask(Classifier.learn, x, labels)
            classes = await (await program.ask(Classifier.classify, x)).to_host()
        lost, wrong = device.generation - 1, np.count_nonzero(classes - labels)
        print(f"{steps + 1} steps, {lost} workers lost, loss {loss:.3f}, {wrong} wrong")
        plain = Classifier(np.zeros((3, 3)))
        for _ in range(steps + 1):
            plain.learn(x, labels)
        return np.array_equal(await weights.to_host(), plain.weights)


def main() -> int:
    """Return the exit code: 0 if the result is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=2, help="how many times to kill the worker")
    is_wrong = not trio.run(run, 39, parser.parse_args().faults)
    print("weights as without a device:", "WRONG" if is_wrong else "right")
    return is_wrong


if __name__ == "__main__":
    import own_program  # because workers cannot import its class from `__main__`

    raise SystemExit(own_program.main())
