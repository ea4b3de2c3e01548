"""Gradients of random function compositions against central differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gradient_cases import numbers

import trio_accel as ta

a: Any = ta.arrays
l: Any = ta.linalg  # noqa: E741
n: Any = ta.nn

# Each function takes matrices of three rows and four columns, and returns another one. All are smooth.
OF_ONE: list[Callable[[Any], Any]] = [
    a.sin,
    a.tanh,
    a.expit,
    lambda x: a.exp(0.3 * x),
    lambda x: a.sqrt(1 + x * x),
    n.gelu,
    n.silu,
    lambda x: a.softmax(x, axis=1),
    lambda x: a.log_softmax(x, axis=0),
    lambda x: a.layer_norm(x, eps=0.1),
    lambda x: a.flip(x, axis=1),
    lambda x: a.roll(x, 1),
    lambda x: a.reshape(x.mT, (3, 4)),
    lambda x: a.concat([x[1:], x[:1]], axis=0),
    lambda x: a.cumulative_sum(x, axis=1) / 3,
    lambda x: x - a.mean(x, axis=0, keepdims=True),
    lambda x: a.broadcast_to(a.sum(x, axis=1, keepdims=True), (3, 4)),
    lambda x: a.take(x, np.array([2, 0, 2]), axis=0),
    lambda x: a.pad(x[:, 1:], [(0, 0), (1, 0)]),
    lambda x: a.stack([x[:, 0], x[:, 2], x[:, 2], x[:, 1]], axis=1),
    lambda x: l.inv(x @ x.mT + 5 * np.eye(3)) @ x,
    lambda x: l.expm(0.1 * a.tanh(x @ x.mT)) @ x,
    lambda x: a.logsumexp(x, axis=1, keepdims=True) * x,
    lambda x: a.real(ta.fft.ifft(ta.fft.fft(x, axis=1) * (1 + 0.5j), axis=1)),
    lambda x: a.sqrt(1 + a.var(x, axis=1, keepdims=True)) * x,
    lambda x: ta.ndimage.gaussian_filter(x, 0.7),
    lambda x: a.tril(x, k=1),
]
OF_TWO: list[Callable[[Any, Any], Any]] = [
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: x / (2 + y * y),
    a.hypot,
    a.logaddexp,
    lambda x, y: x @ (0.2 * (y.mT @ x)),
    lambda x, y: a.where(numbers((3, 4), 8) > 0, x, y),
    lambda x, y: l.einsum("ij,ij,kj->kj", x, y, 0.3 * x),
    lambda x, y: a.atan2(x, 2 + y * y),
    lambda x, y: l.solve(y @ y.mT + 5 * np.eye(3), x),
    lambda x, y: a.lerp(x, y, 0.3),
]


def composed(seed: int) -> Callable[[Any, Any], Any]:
    """Compose some functions, of two matrices and of earlier results."""
    rng = np.random.default_rng(seed)
    plan: list[tuple[Any, list[int]]] = []
    for count in range(2, 2 + int(rng.integers(2, 7))):
        functions, many = (OF_TWO, 2) if rng.random() < 0.4 else (OF_ONE, 1)
        # The latest result is an operand, so that all steps matter.
        operands = [count - 1, *rng.integers(0, count, many - 1).tolist()]
        plan.append((functions[int(rng.integers(len(functions)))], operands))

    def run(x: Any, y: Any) -> Any:
        made = [x, y]
        for f, operands in plan:
            made.append(f(*[made[k] for k in operands]))
        return made[-1] + made[0] * made[1]

    return run


# With the random expressions of test_derived.py there are 300.
@pytest.mark.parametrize("seed", range(180))
async def test_random_compositions(device: ta.Device, seed: int) -> None:
    f, hosts, weights = (
        composed(seed),
        [numbers((3, 4), seed), numbers((3, 4), seed + 1000)],
        numbers((3, 4), 7),
    )

    async def total(moved: list[Any]) -> float:
        made = await (await f(*[await device.put(one) for one in moved])).to_host()
        return float((made * weights).sum())

    on = [await device.put(one) for one in hosts]
    found = await ta.grad(lambda p: a.sum(f(*p) * weights))(on)
    for place, slope in enumerate(found):
        direction = numbers((3, 4), seed + 2000, -1.0, 1.0)
        sides = []
        for h in (1e-5, -1e-5):
            moved = list(hosts)
            moved[place] = hosts[place] + h * direction
            sides.append(await total(moved))
        want = (sides[0] - sides[1]) / 2e-5
        np.testing.assert_allclose((await slope.to_host() * direction).sum(), want, rtol=1e-6, atol=1e-7)


async def test_a_bilateral_filter_of_an_even_image_is_the_image(device: ta.Device) -> None:
    """Its differences and its deviation are 0."""
    for host in (np.full((4, 5), 0.7), np.zeros((4, 5)), np.full((3, 3), -2.0, "float32"), np.zeros((0, 4))):
        x = await device.put(host)
        found = await ta.grad(lambda x: a.sum(ta.ndimage.bilateral_filter(x) * 2.0))(x)
        assert found.dtype == host.dtype
        np.testing.assert_array_equal(await found.to_host(), np.full(host.shape, 2.0))


async def test_power_0_of_a_matrix_is_constant(device: ta.Device) -> None:
    x = await device.put(numbers((2, 3, 3)))
    found = await ta.grad(lambda x: a.sum(ta.linalg.matrix_power(x, 0) * x))(x)
    np.testing.assert_array_equal(await found.to_host(), np.broadcast_to(np.eye(3), (2, 3, 3)))
