"""`concat` and `stack`: against NumPy, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chosen import BACKEND
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import arrays

INLINE = ta.DeviceOptions(isolation="inline")


def numbers(shape: tuple[int, ...], dtype: str = "float64", seed: int = 1) -> Any:
    values = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 100, shape)
    return values.astype(ta.DType(dtype).dtype)


async def check(found: ta.AccelRef, want: Any) -> None:
    assert (found.shape, found.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(await found.to_host(), want)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(0, 4), min_size=1, max_size=3), count=st.integers(1, 4))
async def test_any_axis_and_any_lengths(data: st.DataObject, shape: list[int], count: int) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    hosts = []
    for number in range(count):
        shape[axis] = data.draw(st.integers(0, 5))
        hosts.append(numbers(tuple(shape), seed=number))
    new = data.draw(st.integers(-len(shape) - 1, len(shape)))
    async with ta.open_system("joins") as system, system.open_device(BACKEND, options=INLINE) as device:
        refs = [await device.put(host) for host in hosts]
        await check(await arrays.concat(refs, axis=axis), np.concatenate(hosts, axis))
        await check(await arrays.concat(refs, axis=None), np.concatenate(hosts, None))
        await check(await arrays.stack([refs[0]] * count, axis=new), np.stack([hosts[0]] * count, new))


@pytest.mark.parametrize("size", [0, 1, 31, 255, 256, 257, 1025])
async def test_strides_and_host_arrays(device: ta.Device, size: int) -> None:
    host = numbers((4, size))
    x = await device.put(host)
    views: list[Any] = [lambda a: a, lambda a: a[::-1, ::-1], lambda a: a[::2]]
    for view in views:
        await check(await arrays.concat([x, view(x), host]), np.concatenate([host, view(host), host]))
    await check(await arrays.concat([x.T, x.T], axis=1), np.concatenate([host.T, host.T], 1))
    await check(await arrays.concat([x.T, x], axis=None), np.concatenate([host.T, host], None))
    row = arrays.broadcast_to(x[:1], (4, size))
    await check(
        await arrays.stack([row, x], axis=1), np.stack([np.broadcast_to(host[:1], (4, size)), host], 1)
    )


PROMOTED = [
    (("int8", "int64"), "int64"),
    (("uint8", "int8"), "int16"),
    (("float16", "float32"), "float32"),
    (("float32", "complex64"), "complex64"),
    (("float64", "complex64"), "complex128"),
    (("bfloat16", "float32"), "float32"),
    (("bool", "bool"), "bool"),
    (("uint64", "uint8"), "uint64"),
    (("float8_e4m3fn", "float8_e4m3fn"), "float8_e4m3fn"),
]


@pytest.mark.parametrize(("dtypes", "wanted"), PROMOTED)
async def test_dtypes_are_promoted(device: ta.Device, dtypes: tuple[str, ...], wanted: str) -> None:
    hosts = [numbers((2, 3), dtype) for dtype in dtypes]
    found = await arrays.stack([await device.put(host) for host in hosts])
    assert found.dtype == wanted
    want = np.stack([host.astype(ta.DType(wanted).dtype) for host in hosts])
    np.testing.assert_array_equal((await found.to_host()).astype(complex), want.astype(complex))


async def test_an_array_to_write_to(device: ta.Device) -> None:
    host = numbers((2, 3))
    x, whole = await device.put(host), await device.zeros((8, 3))
    out = whole[::-2]
    assert await arrays.concat([x, x], out=out) is out
    np.testing.assert_array_equal((await whole.to_host())[::-2], np.concatenate([host, host]))
    assert not (await whole.to_host())[::2].any()
    with pytest.raises(ValueError, match=r"arrays\.concat: out must not share memory with arrays\[1\]"):
        await arrays.concat([x, whole[:1]], out=whole[:3])
    with pytest.raises(ValueError, match=r"arrays\.concat: out must have shape \(4, 3\) and dtype float64"):
        await arrays.concat([x, x], out=whole)


async def test_bits_stay(device: ta.Device) -> None:
    special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 5e-324])
    special.view(np.uint64)[2] |= 0x123
    x = await device.put(special)
    found = await (await arrays.stack([x[::-1], x])).to_host()
    np.testing.assert_array_equal(found.view(np.uint64), np.stack([special[::-1], special]).view(np.uint64))


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    x = await device.zeros((2, 3))
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: arrays.concat([]), TypeError, r"arrays\.concat: no operand is on a device"),
        (lambda: arrays.concat([np.zeros(3)]), TypeError, "no operand is on a device"),
        (
            lambda: arrays.concat([x, x[:, :2]]),
            ValueError,
            r"same shape but for axis 0, got \(2, 3\) and, as number 1, \(2, 2\)",
        ),
        (lambda: arrays.concat([x, x[0]]), ValueError, "same shape but for axis 0"),
        (
            lambda: arrays.concat([x, x], axis=2),
            ValueError,
            r"arrays\.concat: axis 2 is not there in an array of shape \(2, 3\)",
        ),
        (lambda: arrays.stack([x, x[:1]]), ValueError, r"arrays\.stack: arrays must be of one shape"),
        (lambda: arrays.stack([x, x], axis=3), ValueError, r"arrays\.stack: axis"),
        (
            lambda: arrays.stack([x, np.zeros((2, 3), int)]),
            TypeError,
            r"arrays\[0\] is float64 and arrays\[1\] is int64",
        ),
        (
            lambda: arrays.stack([x, [1]]),
            TypeError,
            r"arrays\.stack: arrays\[1\] must be an AccelRef or a NumPy array",
        ),
    ]
    for call, error, text in wrong:
        with pytest.raises(error, match=text):
            await call()
    halves = [await device.zeros(3, dtype) for dtype in ("float16", "bfloat16")]
    with pytest.raises(TypeError, match="float16, bfloat16 do not promote to a common dtype"):
        await arrays.concat(halves)
