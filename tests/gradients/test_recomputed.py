"""Gradients of functions that compute their results again by `checkpoint`."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from gradient_cases import numbers

import trio_accel as ta

a: Any = ta.arrays
g = ta.gradients
STATE = np.array([1.0, 0.8])


async def test_a_checkpoint_has_the_same_gradient(device: ta.Device) -> None:
    w, x = await device.put(numbers((4, 4), 1)), await device.put(numbers((3, 4), 2))

    def layer(p: Any, x: Any, *, scale: float) -> Any:
        return a.tanh(x @ p["w"]) * scale + x

    def loss(p: Any, x: Any, layer: Any) -> Any:
        for _ in range(3):
            x = layer(p, x, scale=0.5)
        return a.sum(x * x)

    want = await ta.grad(loss, (0, 1))({"w": w}, x, layer)
    found = await ta.grad(loss, (0, 1))({"w": w}, x, g.checkpoint(layer))
    np.testing.assert_allclose(await found[0]["w"].to_host(), await want[0]["w"].to_host(), rtol=1e-12)
    np.testing.assert_allclose(await found[1].to_host(), await want[1].to_host(), rtol=1e-12)
    second = await g.hvp(lambda x: loss({"w": w}, x, g.checkpoint(layer)), (x,), (x,))
    right = await g.hvp(lambda x: loss({"w": w}, x, layer), (x,), (x,))
    np.testing.assert_allclose(await second[0].to_host(), await right[0].to_host(), rtol=1e-11)


async def test_the_plan_of_a_checkpoint_is_kept(device: ta.Device) -> None:
    x = await device.put(STATE)
    calls: list[int] = []

    def f(x: Any) -> Any:
        calls.append(1)
        return a.exp(x)

    loss = ta.grad(lambda x: a.sum(wrapped(x)))
    wrapped = g.checkpoint(f)
    for _ in range(4):
        await loss(x)
    # Once for each value, and once when the gradient was derived.
    assert len(calls) == 5


def test_names_are_documented() -> None:
    for name in ("scan", "checkpoint", "jacobian", "hessian", "hvp", "jvp"):
        assert inspect.getdoc(getattr(g, name)), name


@pytest.mark.parametrize("values", [(0.0, -0.0), (1, True), (2.0, 3.0)])
async def test_a_checkpoint_has_the_numbers_of_its_call(device: ta.Device, values: tuple[Any, Any]) -> None:
    """Equal numbers with other bits are others: `copysign` tells them apart."""
    x = await device.put(STATE)

    def f(x: Any, options: Any) -> Any:
        return x * np.copysign(2.0, options["scale"]) * (1 + abs(options["scale"]))

    wrapped = g.checkpoint(f)
    for value in values:
        found = await ta.grad(lambda x, v=value: a.sum(wrapped(x, {"scale": v}) ** 2))(x)
        factor = np.copysign(2.0, value) * (1 + abs(value))
        np.testing.assert_allclose(await found.to_host(), 2 * factor**2 * STATE, rtol=1e-12)
        cubed = await ta.grad(lambda x, v=value: a.sum(wrapped(x, {"scale": v})))(x)
        np.testing.assert_allclose(await cubed.to_host(), np.full(2, factor), rtol=1e-12)
