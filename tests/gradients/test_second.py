"""Gradients of gradients against central differences of gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chosen import BACKEND
from gradient_cases import Case, numbers
from test_functions import CASES, NUMBERED

import trio_accel as ta

a: Any = ta.arrays


@pytest.mark.parametrize(("name", "number"), NUMBERED)
async def test_second_derivatives_match_differences(device: ta.Device, name: str, number: int) -> None:
    cases = CASES[name]
    case: Case = cases[number] if isinstance(cases, list) else cases
    hosts = case.values()
    try:
        shape = (await (case.f(*[await device.put(one) for one in hosts]) * 1.0)).shape
    except ta.NotSupportedError as error:
        if BACKEND == "cpu":
            raise
        pytest.skip(str(error))
    weights = numbers(shape, 99)
    along = [numbers(one.shape, 50 + place, -1.0, 1.0) for place, one in enumerate(hosts)]

    def loss(parameters: Any) -> Any:
        """The square gives linear functions a second derivative."""
        made = case.f(*parameters)
        return a.sum((made + 0.1 * made * made) * weights)

    def slope(parameters: Any) -> Any:
        """Return the derivative along a direction."""
        found: Any = ta.grad(loss)(parameters)
        total: Any = 0.0
        for one, direction in zip(found, along, strict=True):
            total = total + a.sum(one * direction)
        return total

    async def slope_at(step: float) -> float:
        moved = [await device.put(one + step * other) for one, other in zip(hosts, others, strict=True)]
        found = await ta.grad(loss)(moved)
        parts = [(await one.to_host() * other).sum() for one, other in zip(found, along, strict=True)]
        return float(sum(parts))

    others = [numbers(one.shape, 70 + place, -1.0, 1.0) for place, one in enumerate(hosts)]
    second = await ta.grad(slope)([await device.put(one) for one in hosts])
    parts = [(await one.to_host() * other).sum() for one, other in zip(second, others, strict=True)]
    want = (await slope_at(1e-5) - await slope_at(-1e-5)) / 2e-5
    np.testing.assert_allclose(sum(parts), want, rtol=1e-5, atol=1e-6)


async def test_the_sign_of_a_complex_number_turns_with_it(device: ta.Device) -> None:
    """The sign of a real number is a step."""
    host, direction, weights = numbers((2, 5)), numbers((2, 5), 1), numbers((5,), 2)

    def f(x: Any) -> Any:
        return a.sum(a.real(a.sign(x[0] + 1j * x[1]) * (0.7 - 1.3j)) * weights)

    found = await (await ta.grad(f)(await device.put(host))).to_host()
    sides = [await f(await device.put(host + step * direction)).item() for step in (1e-6, -1e-6)]
    np.testing.assert_allclose((found * direction).sum(), (sides[0] - sides[1]) / 2e-6, rtol=1e-7)
    at_zero = await ta.grad(f)(await device.put(np.zeros((2, 5))))
    assert not (await at_zero.to_host()).any()


async def test_labels_of_small_dtypes_on_the_device(device: ta.Device) -> None:
    host = numbers((3, 4))
    labels = await device.put(np.array([1, 3, 0], "uint8"))
    for f in (ta.nn.cross_entropy, ta.nn.nll_loss):

        def slope(x: Any, labels: Any, f: Any = f) -> Any:
            return a.sum(ta.grad(lambda x: f(x, labels, reduction="sum"))(x) * x)

        found = await ta.grad(slope)(await device.put(host), labels)
        want = await ta.grad(slope)(await device.put(host), np.array([1, 3, 0]))
        np.testing.assert_array_equal(await found.to_host(), await want.to_host())


@pytest.mark.parametrize("name", ["expm", "sqrtm"])
async def test_large_gradients_of_matrix_functions_keep_their_digits(device: ta.Device, name: str) -> None:
    """The gradient is a block of a matrix, and a larger norm makes `expm` square more often."""
    x = await device.put(numbers((4, 4), 0, -0.5, 0.5) + 2.0 * np.eye(4))
    v, weights = await device.put(numbers((4, 4), 1)), numbers((4, 4), 2)

    def loss(x: Any, factor: float) -> Any:
        made = a.real(getattr(ta.linalg, name)(x))
        return a.sum((made + made * made) * weights) * factor

    for derive in (
        lambda factor: ta.grad(lambda x: loss(x, factor))(x),
        lambda factor: ta.gradients.hvp(lambda x: loss(x, factor), (x,), (v,)),
    ):
        found = [await derive(factor) for factor in (1.0, 2.0**40)]
        small, large = [await (one[0] if isinstance(one, tuple) else one).to_host() for one in found]
        np.testing.assert_allclose(large / 2.0**40, small, rtol=1e-12, atol=1e-14)
