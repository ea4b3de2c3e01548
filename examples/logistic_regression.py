"""Train a logistic regression on a device with Newton's method. Data and weights stay on the device."""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import trio
from scipy.optimize import minimize

import trio_accel as ta

ridge = ta.jit.elementwise("h + c * (i(0) == i(1))")
curvature = ta.jit.elementwise("x / (4 * square(cosh(z / 2)))")


def samples(count: int, features: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random points, and random labels from a logistic model of the points."""
    random = np.random.default_rng(0)
    x = random.standard_normal((count, features))
    chances = 1 / (1 + np.exp(-x @ np.linspace(-1, 1, features)))
    return x, (random.random(count) < chances).astype(float)


async def train(device: ta.Device, x: np.ndarray, y: np.ndarray, penalty: float) -> tuple[np.ndarray, int]:
    """Return the weights and the number of steps.

    The weights equal scikit-learn's ``LogisticRegression(C=1 / penalty, fit_intercept=False)``.
    """
    points, labels = await device.put(x), await device.put(y)
    weights = await device.zeros(x.shape[1])
    for step in range(1, 51):
        scores = await (points @ weights)
        slope = points.T @ (ta.arrays.expit(scores) - labels) + penalty * weights
        hessian = ridge(points.T @ curvature(points, scores[:, None]), penalty)
        change = await ta.linalg.solve(hessian, slope)
        weights = await (weights - change)
        if await ta.linalg.vector_norm(change, ord=np.inf).item() < 1e-10:
            return await weights.to_host(), step
    raise RuntimeError("no convergence in 50 steps")


def expected(x: np.ndarray, y: np.ndarray, penalty: float) -> np.ndarray:
    """Return the weights that SciPy finds on the host, in float64."""

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        scores = x @ weights
        slope = x.T @ (1 / (1 + np.exp(-scores)) - y) + penalty * weights
        return float(np.sum(np.logaddexp(0, scores) - y * scores) + penalty / 2 * weights @ weights), slope

    return minimize(loss, np.zeros(x.shape[1]), jac=True, tol=1e-12).x


async def run(count: int, penalty: float, backend: str | None) -> float:
    """Return the largest difference from the host's weights."""
    x, y = samples(count, 20)
    async with ta.open_system("train") as system, system.open_device(backend) as device:
        weights, steps = await train(device, x, y, penalty)
    print(f"{count} points, {steps} steps on {device.info.name}")
    print("right on", f"{np.mean((x @ weights > 0) == y):.1%} of them")
    return float(np.abs(weights - expected(x, y, penalty)).max())


def main() -> int:
    """Return the exit code: 0 if the weights equal SciPy's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--penalty", type=float, default=1.0, help="factor of the L2 penalty")
    parser.add_argument("--backend", help="device to use, such as cpu or cuda:1")
    given = parser.parse_args()
    difference = trio.run(partial(run, given.samples, given.penalty, given.backend))
    is_right = difference < 1e-6
    print(f"largest difference of a weight {difference:.0e}: {'right' if is_right else 'WRONG'}")
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
