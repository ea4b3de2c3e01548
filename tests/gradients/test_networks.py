"""Gradients through layers that draw numbers, or change arrays in place."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from gradient_cases import numbers

import trio_accel as ta

a: Any = ta.arrays
n: Any = ta.nn
HOST = numbers((6, 50))
each_kind = pytest.mark.parametrize("kind", ["philox4x32_10", "mrg32k3a", "xorwow"])


@each_kind
async def test_dropout_has_the_gradient_of_its_mask(device: ta.Device, kind: Any) -> None:
    x, weights = await device.put(HOST), numbers(HOST.shape, 1)
    y, mask = await n.dropout(x, 0.3, generator=ta.random.Generator(device, kind, seed=7))
    generator = ta.random.Generator(device, kind, seed=7)
    value, found = await ta.value_and_grad(
        lambda x: a.sum(n.dropout(x, 0.3, generator=generator)[0] ** 2 * weights)
    )(x)
    kept = await mask.to_host()
    assert 0.5 < kept.mean() < 0.9
    made = await y.to_host()
    np.testing.assert_allclose(await value.item(), (made**2 * weights).sum(), rtol=1e-12)
    np.testing.assert_allclose(await found.to_host(), 2 * made * weights * kept / 0.7, rtol=1e-12)


@each_kind
async def test_a_gradient_draws_one_mask(device: ta.Device, kind: Any) -> None:
    """Looking for a layout draws nothing, so the state of a generator is the state after one call."""
    x = await device.put(HOST)
    other, generator = [ta.random.Generator(device, kind, seed=7) for _ in range(2)]
    await n.dropout(x, 0.3, generator=other)
    made = n.dropout(x, generator=generator)[0]
    assert made.shape == HOST.shape
    made.close()
    assert generator.state["position"] == 0
    await ta.grad(lambda x: a.sum(n.dropout(x * 2.0, 0.3, generator=generator)[0]))(x)
    assert generator.state == other.state
    np.testing.assert_array_equal(
        await (await generator.bits((5,))).to_host(), await (await other.bits((5,))).to_host()
    )


async def test_second_derivatives_have_the_same_mask(device: ta.Device) -> None:
    x, weights = await device.put(HOST), numbers(HOST.shape, 1)
    _, mask = await n.dropout(x, 0.3, generator=ta.random.Generator(device, seed=7))
    generator = ta.random.Generator(device, seed=7)

    def loss(x: Any) -> Any:
        return a.sum(n.dropout(x, 0.3, generator=generator)[0] ** 3 * weights)

    inner: Any = ta.grad(loss)
    found = await ta.grad(lambda x: a.sum(inner(x)))(x)
    want = 6 * HOST * weights * await mask.to_host() / 0.7**3
    np.testing.assert_allclose(await found.to_host(), want, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
async def test_gradients_of_dropout_have_the_dtype_of_the_elements(device: ta.Device, dtype: str) -> None:
    x = await device.put(HOST.astype(dtype))
    generator = ta.random.Generator(device, seed=7)
    found = await ta.grad(lambda x: a.sum(n.dropout(x, generator=generator)[0]))(x)
    assert found.dtype == dtype
    assert set(np.unique(await found.to_host())) == {0.0, 2.0}


async def test_a_function_that_changes_when_it_runs_again_has_no_vjp(device: ta.Device) -> None:
    x, generator = await device.put(HOST), ta.random.Generator(device, seed=7)
    moved = {name: await device.zeros(50, "float64") for name in ("running_mean", "running_var")}
    for f, told in (
        (lambda x: n.dropout(x, generator=generator)[0], "nn.dropout would draw other numbers"),
        (lambda x: x * generator.uniform(HOST.shape, "float64"), "random.uniform would draw other numbers"),
        (
            lambda x: n.batch_norm_training(x, **moved)[0],
            "nn.batch_norm_training would move its running statistics again",
        ),
    ):
        text = f"vjp: the function runs again for each gradient, and {told}; use value_and_grad"
        with pytest.raises(ta.NotSupportedError, match=text):
            await ta.vjp(f, x)
    gc.collect()


async def test_a_batch_norm_moves_its_statistics_once(device: ta.Device) -> None:
    host, weights = numbers((5, 3, 2)), numbers((5, 3, 2), 1)
    x, mean, var = [await device.put(one) for one in (host, np.zeros(3), np.ones(3))]

    def f(x: Any) -> Any:
        made, _, _ = n.batch_norm_training(x, running_mean=mean, running_var=var)
        return a.sum(made * weights)

    found = await ta.grad(f)(x)
    np.testing.assert_allclose(await mean.to_host(), 0.1 * host.mean((0, 2)), rtol=1e-12)
    np.testing.assert_allclose(await var.to_host(), 0.9 + 0.1 * host.var((0, 2), ddof=1), rtol=1e-12)
    want = await n.batch_norm_training_grad(await device.put(weights), x)
    np.testing.assert_allclose(await found.to_host(), await want[0].to_host(), rtol=1e-12)
    # Running statistics that the value depends on are refused.
    with pytest.raises(ta.NotSupportedError, match="batch_norm_training has no gradient by running_mean"):
        await ta.grad(lambda m: a.sum(n.batch_norm_training(x, running_mean=m * 1.0, running_var=var)[0]))(
            mean
        )
    gc.collect()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
async def test_gradients_of_statistics_have_the_dtype_of_the_elements(device: ta.Device, dtype: str) -> None:
    host = HOST.astype(dtype)
    found = await ta.grad(lambda x: a.sum(n.batch_norm_training(x)[2]).cast(dtype))(await device.put(host))
    assert found.dtype == dtype
    wide = host.astype("float64")
    np.testing.assert_allclose(await found.to_host(), 2 * (wide - wide.mean(0)) / 6, rtol=2e-3, atol=1e-3)
