"""Layers of linear maps, against NumPy in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from chosen import IS_STAND_IN
from dnn_references import check, numbers

import trio_accel as ta
from trio_accel import nn

pytestmark = pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no cuBLASLt")

linear: Any = nn.linear


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stack", [(), (5,), (2, 3), (0,)])
async def test_any_shape(device: ta.Device, isolation: str, stack: tuple[int, ...], dtype: str) -> None:
    x, weight, bias = numbers((*stack, 6), dtype), numbers((9, 6), dtype, 1), numbers((9,), dtype, 2)
    wide = [one.astype(float) for one in (x, weight, bias)]
    ref = await device.put(x)
    check(await (await linear(ref, weight)).to_host(), wide[0] @ wide[1].T, dtype, 6)
    found = await linear(ref, weight, bias, "relu")
    check(await found.to_host(), np.maximum(wide[0] @ wide[1].T + wide[2], 0), dtype, 6)
    out = await device.empty((*stack, 9), dtype)
    assert await linear(ref, weight, bias, "gelu", out=out) is out
    z = wide[0] @ wide[1].T + wide[2]
    expected = z * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    check(await out.to_host(), expected, dtype, 6)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stack", [(), (5,), (2, 3), (0,)])
async def test_gradients(device: ta.Device, isolation: str, stack: tuple[int, ...], dtype: str) -> None:
    x, weight, grad = numbers((*stack, 6), dtype), numbers((9, 6), dtype, 1), numbers((*stack, 9), dtype, 2)
    wide = [one.astype(float) for one in (x, weight, grad)]
    ref, back = await device.put(x), await device.put(grad)
    check(await (await nn.linear_input_grad(back, weight)).to_host(), wide[2] @ wide[1], dtype, 9)
    found = await nn.linear_weight_grad(back, ref)
    rows = [one.reshape(math.prod(stack), one.shape[-1]) for one in (wide[0], wide[2])]
    check(await found.weight.to_host(), rows[1].T @ rows[0], dtype, 6)
    check(await found.bias.to_host(), rows[1].sum(0), dtype, 6)
    into, of = await device.empty(x.shape, dtype), await device.empty(weight.shape, dtype)
    assert await nn.linear_input_grad(back, weight, out=into) is into
    assert (await nn.linear_weight_grad(back, ref, out=of)).weight is of
    check(await into.to_host(), wide[2] @ wide[1], dtype, 9)
    check(await of.to_host(), rows[1].T @ rows[0], dtype, 6)


async def test_gradients_of_a_loss(device: ta.Device) -> None:
    # Central differences of half the sum of squares, because its gradient by the result is the result.
    x, weight, bias = numbers((4, 3), "float64"), numbers((5, 3), "float64", 1), numbers((5,), "float64", 2)

    def loss(*changed: np.ndarray[Any, Any]) -> float:
        one, two, three = changed
        return float(np.square(one @ two.T + three).sum() / 2)

    given = [x, weight, bias]
    ref = await device.put(x)
    y = await linear(ref, weight, bias)
    found = [await nn.linear_input_grad(y, weight), *await nn.linear_weight_grad(y, ref)]
    for place, array in enumerate(given):
        expected = np.zeros(array.shape)
        for index in np.ndindex(array.shape):
            step = np.zeros(array.shape)
            step[index] = 1e-5
            ahead, behind = ([*given[:place], array + one, *given[place + 1 :]] for one in (step, -step))
            expected[index] = (loss(*ahead) - loss(*behind)) / 2e-5
        np.testing.assert_allclose(await found[place].to_host(), expected, rtol=1e-7, atol=1e-8)


async def test_gradients_of_views(device: ta.Device) -> None:
    x, grad = numbers((4, 3, 12), "float32"), numbers((4, 3, 9), "float32", 1)
    ref, back = await device.put(x), await device.put(grad)
    found = await nn.linear_weight_grad(back, ref[..., ::2])
    rows = grad.astype(float).reshape(-1, 9), x[..., ::2].astype(float).reshape(-1, 6)
    check(await found.weight.to_host(), rows[0].T @ rows[1], "float32", 6)
    check(await found.bias.to_host(), rows[0].sum(0), "float32", 6)
    with pytest.raises(ValueError, match=r"axes of grad but the last one .* await grad.copy\(\)"):
        await nn.linear_weight_grad(back[::2], ref[::2])


async def test_gradients_refuse_invalid_arguments(device: ta.Device) -> None:
    x, grad = await device.zeros((3, 6), "float32"), await device.zeros((3, 9), "float32")
    with pytest.raises(ValueError, match=r"grad must have shape \(..., n\) and weight \(n, k\)"):
        await nn.linear_input_grad(grad, np.zeros((6, 9), np.float32))
    with pytest.raises(ValueError, match=r"grad must have shape \(..., n\) and x \(..., k\)"):
        await nn.linear_weight_grad(grad, x[:2])
    with pytest.raises(ValueError, match=r"grad must have shape \(..., n\) and x \(..., k\)"):
        await nn.linear_weight_grad(await device.zeros((), "float32"), x[0, 0])
    with pytest.raises(TypeError, match=r"got grad float32, x float64; write x\.astype\('float32'\)$"):
        await nn.linear_weight_grad(grad, np.zeros((3, 6)))
    with pytest.raises(TypeError, match="of int8 there are products to int32 with neither bias"):
        await nn.linear_weight_grad(await device.zeros((4, 8), "int8"), await device.zeros((4, 8), "int8"))
    with pytest.raises(ValueError, match="out must not share memory with grad"):
        await nn.linear_input_grad(grad, np.zeros((9, 9), np.float32), out=grad)


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    x, weight = await device.zeros((3, 6), "float32"), np.zeros((9, 6), np.float32)
    with pytest.raises(ValueError, match=r"x must have shape \(..., k\) and weight \(n, k\)"):
        await linear(x, weight.T)
    with pytest.raises(ValueError, match="activation must be None, 'relu' or 'gelu', got 'tanh'"):
        await linear(x, weight, None, "tanh")
    with pytest.raises(ValueError, match=r"bias must have shape \(9,\)"):
        await linear(x, weight, np.zeros(6, np.float32))
    with pytest.raises(TypeError, match="bias must have dtype float32, got float64"):
        await linear(x, weight, np.zeros(9))
    with pytest.raises(TypeError, match=r"got x float32, weight float64; write weight\.astype\('float32'\)$"):
        await linear(x, weight.astype(float))
    with pytest.raises(ValueError, match="out must not share memory with x"):
        await linear(x, np.zeros((6, 6), np.float32), out=x)
