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


async def test_what_is_refused(device: ta.Device) -> None:
    x, weight = await device.zeros((3, 6), "float32"), np.zeros((9, 6), np.float32)
    with pytest.raises(ValueError, match=r"x must have shape \(..., k\) and weight \(n, k\)"):
        await linear(x, weight.T)
    with pytest.raises(ValueError, match="activation must be None, 'relu' or 'gelu', got 'tanh'"):
        await linear(x, weight, None, "tanh")
    with pytest.raises(ValueError, match=r"bias must have shape \(9,\)"):
        await linear(x, weight, np.zeros(6, np.float32))
    with pytest.raises(TypeError, match="bias must have dtype float32, got float64"):
        await linear(x, weight, np.zeros(9))
    with pytest.raises(TypeError, match="no products of dtypes float32 and float64"):
        await linear(x, weight.astype(float))
    with pytest.raises(ValueError, match="out must not share memory with x"):
        await linear(x, np.zeros((6, 6), np.float32), out=x)
