"""Copies to another order of axes, against NumPy: also by squares, if an array has them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from chosen import IS_STAND_IN

import trio_accel as ta

SHAPES = [(33, 65), (16, 17), (15, 40), (40, 3, 35), (5, 32, 2, 31), (1, 64, 1, 64), (70, 129, 2)]


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "complex64", "complex128"])
async def test_any_order_of_axes(device: ta.Device, dtype: str) -> None:
    for shape in SHAPES[:4] if IS_STAND_IN else SHAPES:
        host = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
        x = await device.put(host)
        for order in itertools.permutations(range(len(shape))):
            copied = await ta.arrays.permute_dims(x, order).copy()
            assert copied.spec.is_contiguous
            np.testing.assert_array_equal(await copied.to_host(), host.transpose(order))


async def test_parts_of_arrays(device: ta.Device) -> None:
    """Nothing outside the part is written."""
    host = np.arange(80 * 90, dtype=np.int32).reshape(80, 90)
    x = await device.put(host)
    out = await device.zeros((100, 100), "int32")
    await out[7:77, 5:65].assign(x[3:63, 11:81].T)
    expected = np.zeros((100, 100), np.int32)
    expected[7:77, 5:65] = host[3:63, 11:81].T
    np.testing.assert_array_equal(await out.to_host(), expected)
    turned = await x[::-1, ::2].T.copy()
    np.testing.assert_array_equal(await turned.to_host(), host[::-1, ::2].T)
