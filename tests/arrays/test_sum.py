"""`ta.arrays.sum`: against NumPy in float64, for all dtypes, by the rules of the array API standard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chosen import BACKEND
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta

# By the dtype of the array, the dtype of its sum.
SUMS = {
    **dict.fromkeys(("bool", "int8", "int16", "int32", "int64"), "int64"),
    **dict.fromkeys(("uint8", "uint16", "uint32", "uint64"), "uint64"),
    **{name: name for name in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")},
}
# Units in the last place of a sum rounded once; for float64 the error of the order.
ROUNDED = {"float16": 5e-4, "bfloat16": 4e-3, "float32": 6e-8, "complex64": 9e-8}


def numbers(shape: tuple[int, ...], name: str, seed: int = 3) -> Any:
    rng, dtype = np.random.default_rng(seed), ta.DType(name)
    if dtype.kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if not dtype.is_inexact:
        limits = np.iinfo(dtype.dtype)
        return rng.integers(limits.min // 64, limits.max // 64, shape).astype(dtype.dtype)
    x = rng.uniform(0.5, 1, shape)
    return (x + 1j * rng.uniform(0.5, 1, shape) if dtype.kind == "complex" else x).astype(dtype.dtype)


def in_float64(x: Any, **options: Any) -> Any:
    kind = ta.DType.of(x.dtype).kind
    wide = {"complex": complex, "float": float, "uint": np.uint64}.get(kind, np.int64)
    return np.sum(x.astype(wide), **options)


def assert_sum(got: Any, want: Any, name: str) -> None:
    if name in ("int64", "uint64"):
        np.testing.assert_array_equal(got, want)
        return
    wide = complex if name.startswith("complex") else float
    np.testing.assert_allclose(got.astype(wide), want, rtol=ROUNDED.get(name, 1e-14))


@pytest.mark.parametrize("name", SUMS)
async def test_every_dtype(device: ta.Device, name: str) -> None:
    x = numbers((7, 30, 11), name)
    on = await device.put(x)
    for axis in (None, 0, -1, (0, 2), (1,), ()):
        found = await ta.arrays.sum(on, axis)
        assert found.dtype == SUMS[name]
        want = in_float64(x, axis=axis)
        assert found.shape == np.shape(want)
        assert_sum(await found.to_host(), want, SUMS[name])


@settings(max_examples=15, deadline=None)
@given(
    shape=st.lists(st.integers(0, 6), max_size=4).map(tuple),
    name=st.sampled_from(["int8", "uint32", "float32", "complex128"]),
    keepdims=st.booleans(),
    draw=st.data(),
)
async def test_any_shape(shape: tuple[int, ...], name: str, keepdims: bool, draw: st.DataObject) -> None:
    axes = draw.draw(st.sets(st.integers(0, len(shape) - 1)) if shape else st.just(set[int]()))
    x, axis = numbers(shape, name), tuple(axes) if draw.draw(st.booleans()) else None
    options = ta.DeviceOptions(isolation="inline")
    async with ta.open_system("sums") as system, system.open_device(BACKEND, options=options) as device:
        found = await ta.arrays.sum(await device.put(x), axis, keepdims=keepdims)
        want = in_float64(x, axis=axis, keepdims=keepdims)
        assert found.shape == np.shape(want)
        assert_sum(await found.to_host(), want, SUMS[name])


async def test_a_sum_of_nothing_is_zero(device: ta.Device) -> None:
    empty = await device.zeros((3, 0, 2), "float32")
    np.testing.assert_array_equal(await (await ta.arrays.sum(empty, 1)).to_host(), np.zeros((3, 2)))
    assert (await (await ta.arrays.sum(empty)).to_host()) == 0


async def test_elements_are_converted_before_they_are_added(device: ta.Device) -> None:
    x = await device.put(np.full(1000, 100, np.int8))
    for dtype, want in (("float32", 100_000), ("int8", np.int8(-96)), ("int32", 100_000), (np.uint16, 34464)):
        found = await ta.arrays.sum(x, dtype=dtype)
        assert found.dtype == ta.DType.of(dtype)
        assert (await found.to_host()) == want
    with pytest.raises(TypeError, match="nothing"):
        await ta.arrays.sum(x, dtype="nothing")


async def test_an_array_to_write_to(device: ta.Device) -> None:
    x = await device.put(np.arange(6.0).reshape(2, 3))
    out = await device.zeros(2)
    assert await ta.arrays.sum(x, 1, out=out) is out
    np.testing.assert_array_equal(await out.to_host(), [3, 12])
    with pytest.raises(ValueError, match=r"arrays\.sum: out must have shape \(3,\)"):
        await ta.arrays.sum(x, 0, out=out)
    with pytest.raises(ValueError, match=r"arrays\.sum: out must not share memory with x"):
        await ta.arrays.sum(x, 1, out=x[0, :2])
    with pytest.raises(
        TypeError, match=r"arrays\.sum: the result is of float64, which does not become int32"
    ):
        await ta.arrays.sum(x, 1, out=await device.zeros(2, "int32"))


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    x = await device.zeros((2, 3))
    for axis in (2, -3, (0, 0)):
        with pytest.raises(ValueError, match=r"arrays\.sum: axis .* of shape \(2, 3\)"):
            await ta.arrays.sum(x, axis)
    with pytest.raises(TypeError, match=r"arrays\.sum: .*no operand is on a device"):
        await ta.arrays.sum(np.zeros(3))
    with pytest.raises(ta.NotSupportedError, match="float8"):
        await ta.arrays.sum(await device.zeros(3, "float8_e4m3fn"))


async def test_the_actor_has_a_name_and_a_stream_of_its_own(device: ta.Device) -> None:
    await ta.arrays.sum(await device.zeros(3))
    await ta.jit.elementwise("x + 1")(await device.zeros(3))
    classes = {node.actor_class for node in device.system.tree().walk()}
    assert {"ArraysActor", "JitActor"} <= classes
