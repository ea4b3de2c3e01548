"""`AccelRef.assign`: the same elements as NumPy's assignment to the same view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND, INLINE
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import trio_accel as ta

ORDER = (
    "bool",
    "uint8",
    "uint64",
    "int8",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    "complex128",
)


def numbers(shape: tuple[int, ...], dtype: str = "float64", seed: int = 1) -> Any:
    values = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 100, shape)
    return values.astype(ta.DType(dtype).dtype)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
async def test_any_part_of_any_array(data: st.DataObject, shape: tuple[int, ...]) -> None:
    host, value = numbers(shape), numbers(shape, seed=2)
    index = data.draw(hnp.basic_indices(shape, allow_newaxis=True, max_dims=5))
    values = numbers(np.asarray(host[index]).shape, seed=3)
    async with ta.open_system("parts") as system, system.open_device(BACKEND, options=INLINE) as device:
        for source in (values, await device.put(values), values.astype("i2")):
            x = await device.put(value)
            view = x[index]
            assert await view.assign(source) is view
            want = value.copy()
            want[index] = values
            np.testing.assert_array_equal(await x.to_host(), want)


SIZES = (0, 1, 31, 255, 256, 257, 1025)
VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda x: x,
    "steps": lambda x: x[::2, 1::3],
    "backwards": lambda x: x[::-1, ::-2],
    "transposed": lambda x: x.T,
    "rows": lambda x: x[1:3],
}


@pytest.mark.parametrize("size", SIZES)
async def test_sizes_and_strides(device: ta.Device, size: int) -> None:
    host = numbers((5, size))
    x = await device.put(host)
    for number, view in enumerate(VIEWS.values()):
        for shape in (view(host).shape, view(host).shape[1:], (1, *view(host).shape[1:]), ()):
            values = numbers(shape, seed=number)
            view(host)[...] = values
            await view(x).assign(values)
            np.testing.assert_array_equal(await x.to_host(), host)
            view(host)[...] = values + 1
            await view(x).assign(await device.put(values + 1))
            np.testing.assert_array_equal(await x.to_host(), host)


async def test_zero_negative_and_transposed_strides_of_the_source(device: ta.Device) -> None:
    host, values = numbers((6, 4)), numbers((4, 6), seed=4)
    x, y = await device.put(host), await device.put(values)
    for of in (lambda y: y.T, lambda y: y.T[::-1, ::-1], lambda y: y[1:2, :4], lambda y: y[::-1, 2][None, :]):
        host[...] = of(values)
        await x.assign(of(y))
        np.testing.assert_array_equal(await x.to_host(), host)
    await x[:, 1:].assign(ta.arrays.broadcast_to(y[0, :1], (6, 3)))
    host[:, 1:] = values[0, 0]
    np.testing.assert_array_equal(await x.to_host(), host)


OVERLAPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "forwards": (lambda x: x[1:], lambda x: x[:-1]),
    "backwards": (lambda x: x[:-1], lambda x: x[1:]),
    "reversed": (lambda x: x, lambda x: x[::-1]),
    "transposed": (lambda x: x, lambda x: x.T),
    "one row": (lambda x: x, lambda x: x[1]),
    "itself": (lambda x: x[::2], lambda x: x[::2]),
}


@pytest.mark.parametrize("name", OVERLAPS)
async def test_a_source_that_overlaps_is_read_as_it_was(device: ta.Device, name: str) -> None:
    target, source = OVERLAPS[name]
    host = numbers((20, 20))
    x = await device.put(host)
    target(host)[...] = source(host).copy()
    await target(x).assign(source(x))
    np.testing.assert_array_equal(await x.to_host(), host)


@pytest.mark.parametrize("dtype", ORDER)
async def test_dtypes_are_converted_within_their_kind(device: ta.Device, dtype: str) -> None:
    wanted = ta.DType(dtype)
    kinds = ("bool", "uint", "int", "float", "complex")
    for other in map(ta.DType, ORDER):
        host = numbers((3, 4), other.value)
        for value in (host, await device.put(host)):
            x = await device.zeros((6, 4), dtype)
            if kinds.index(other.kind) > kinds.index(wanted.kind):
                where = rf"assign: value is of {other}, which does not become {dtype}"
                with pytest.raises(TypeError, match=where):
                    await x[::2].assign(value)
                continue
            await x[::2].assign(value)
            np.testing.assert_array_equal((await x.to_host())[::2], host.astype(wanted.dtype))
            assert not (await x.to_host())[1::2].any()


async def test_bits_stay(device: ta.Device) -> None:
    special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 5e-324, np.finfo(float).max])
    special.view(np.uint64)[2] |= 0x123
    x = await device.zeros((7, 2))
    for value in (special, await device.put(special)):
        await x[:, 1].assign(value)
        np.testing.assert_array_equal(
            (await x.to_host())[:, 1].copy().view(np.uint64), special.view(np.uint64)
        )


async def test_numbers(device: ta.Device) -> None:
    x = await device.zeros((3, 4), "int64")
    for value in (7, 2**63 - 1, np.int8(-3), 4.0, True):
        await x[1:, ::2].assign(value)
        got = await x.to_host()
        assert (got[1:, ::2] == int(value)).all()
        assert not got[0].any()
        assert not got[:, 1::2].any()


async def test_invalid_assignments_are_refused(device: ta.Device) -> None:
    x = await device.zeros((3, 4))
    wrong: list[tuple[Any, type[Exception], str]] = [
        (np.zeros(3), ValueError, r"value of shape \(3,\) does not broadcast to the array's \(3, 4\)"),
        (np.zeros((2, 3, 4)), ValueError, "does not broadcast"),
        (1j, TypeError, "is complex, the array is float64"),
        (np.zeros(4, complex), TypeError, "value is of complex128, which does not become float64"),
        ([1.0] * 4, TypeError, "value must be an AccelRef, a NumPy array or a number, got list"),
        (x.copy, TypeError, "value must be an AccelRef"),
        (np.zeros(4, "U1"), TypeError, "value"),
        (np.ma.masked_array(np.zeros((3, 4)), True), TypeError, "masked"),
    ]
    launched = (await device.statistics()).launched
    for value, error, text in wrong:
        with pytest.raises(error, match=text):
            await x.assign(value)
    assert (await device.statistics()).launched == launched
    with pytest.raises(TypeError, match=r"await ref\[index\]\.assign\(value\)"):
        x[0] = 1.0  # type: ignore[index]
    y = await device.zeros(4)
    y.release()
    with pytest.raises(ta.StaleRefError, match=r"assign: value"):
        await x.assign(y)


async def test_an_array_of_another_device(device: ta.Device) -> None:
    async with device.system.open_device(BACKEND, options=INLINE) as other:
        x, y = await device.zeros((3, 4)), await other.zeros(4)
        with pytest.raises(ValueError, match=r"value is on .*: await value\.copy_to\(device\)"):
            await x.assign(y)
        await x[1].assign(await y.copy_to(device))


async def test_the_order_of_operations_is_kept(device: ta.Device) -> None:
    x, y = await device.zeros((100, 100)), await device.put(numbers((100, 100)))
    pending = [device.submit(ta.devices.Assign(x[row], y[row])) for row in range(50)]
    total = await ta.arrays.sum(x)
    assert await total.item() == numbers((100, 100))[:50].sum()
    for one in pending:
        await one.wait()
