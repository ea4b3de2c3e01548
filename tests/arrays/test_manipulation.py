"""`roll`, `tile`, `repeat` and `pad`: against NumPy."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from chosen import BACKEND
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import trio_accel as ta
from trio_accel import arrays

INLINE = ta.DeviceOptions(isolation="inline")
MODES: tuple[arrays.PadMode, ...] = get_args(arrays.PadMode)
DTYPES = (
    "bool",
    "int8",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
some = settings(max_examples=20, deadline=None)


def numbers(shape: tuple[int, ...], dtype: str = "float64", seed: int = 1) -> Any:
    values = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 100, shape)
    return values.astype(ta.DType(dtype).dtype)


async def check(found: ta.AccelRef, want: Any) -> None:
    assert (found.shape, found.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(await found.to_host(), want)


@some
@given(data=st.data(), shape=SHAPES)
async def test_roll(data: st.DataObject, shape: tuple[int, ...]) -> None:
    host = numbers(shape)
    axes = tuple(data.draw(st.lists(st.integers(-len(shape), len(shape) - 1), max_size=3))) if shape else ()
    shifts = tuple(data.draw(st.integers(-12, 12)) for _ in axes)
    shift = data.draw(st.integers(-50, 50))
    async with ta.open_system("rolls") as system, system.open_device(BACKEND, options=INLINE) as device:
        x = (await device.put(host)).T
        await check(await arrays.roll(x, shift), np.roll(host.T, shift))
        if shape:
            await check(
                await arrays.roll(x, shifts or 0, axis=axes or 0), np.roll(host.T, shifts or 0, axes or 0)
            )
            await check(await arrays.roll(x, shift, axis=-1), np.roll(host.T, shift, -1))


@some
@given(shape=SHAPES, counts=st.lists(st.integers(0, 3), max_size=4), count=st.integers(0, 4), data=st.data())
async def test_tile_and_repeat(
    shape: tuple[int, ...], counts: list[int], count: int, data: st.DataObject
) -> None:
    host = numbers(shape)
    async with ta.open_system("tiles") as system, system.open_device(BACKEND, options=INLINE) as device:
        x = (await device.put(host)).T
        await check(await arrays.tile(x, counts), np.tile(host.T, counts))
        await check(await arrays.tile(x, count), np.tile(host.T, count))
        await check(await arrays.repeat(x, count), np.repeat(host.T, count))
        if shape:
            axis = data.draw(st.integers(-len(shape), len(shape) - 1))
            await check(await arrays.repeat(x, count, axis=axis), np.repeat(host.T, count, axis))


@some
@given(data=st.data(), shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=5))
async def test_pad(data: st.DataObject, shape: tuple[int, ...]) -> None:
    host = numbers(shape)
    async with ta.open_system("pads") as system, system.open_device(BACKEND, options=INLINE) as device:
        x = (await device.put(host))[(*(slice(None, None, -1),) * len(shape), ...)]
        host = np.flip(host)
        for mode in MODES:
            most = {"reflect": -1, "symmetric": 0, "wrap": 0}.get(mode, 9)
            widths = [
                tuple(data.draw(st.integers(0, extent + most if most < 9 else 7)) for _ in range(2))
                for extent in shape
            ]
            if not shape:
                await check(await arrays.pad(x, 2, mode=mode), host)
                continue
            await check(await arrays.pad(x, widths, mode=mode), np.pad(host, widths, mode=mode))
            narrow = min(extent + min(most, 0) for extent in shape)
            await check(
                await arrays.pad(x, min(narrow, 1), mode=mode), np.pad(host, min(narrow, 1), mode=mode)
            )


@pytest.mark.parametrize("size", [0, 1, 31, 255, 256, 257, 1025])
async def test_sizes(device: ta.Device, size: int) -> None:
    host = numbers((3, size))
    x = await device.put(host)
    await check(await arrays.roll(x, 100, axis=1), np.roll(host, 100, 1))
    await check(await arrays.roll(x, -2), np.roll(host, -2))
    await check(await arrays.tile(x, (2, 2)), np.tile(host, (2, 2)))
    await check(await arrays.repeat(x, 3, axis=1), np.repeat(host, 3, 1))
    await check(
        await arrays.pad(x, ((1, 0), (2, 3)), constant_values=-1),
        np.pad(host, ((1, 0), (2, 3)), constant_values=-1),
    )
    for mode in MODES[1:]:
        if size > 3:
            await check(
                await arrays.pad(x, ((0, 1), (3, 2)), mode=mode), np.pad(host, ((0, 1), (3, 2)), mode=mode)
            )


@pytest.mark.parametrize("dtype", DTYPES)
async def test_dtypes(device: ta.Device, dtype: str) -> None:
    host = numbers((3, 4), dtype)
    x = await device.put(host)
    await check(await arrays.roll(x, 1), np.roll(host, 1))
    await check(await arrays.tile(x, (2, 1)), np.tile(host, (2, 1)))
    await check(await arrays.repeat(x, 2), np.repeat(host, 2))
    await check(await arrays.pad(x, 1, constant_values=1), np.pad(host, 1, constant_values=1))
    await check(await arrays.pad(x, 2, mode="reflect"), np.pad(host, 2, mode="reflect"))


async def test_float8_is_moved_without_computation(device: ta.Device) -> None:
    x = await device.put(numbers((3, 2), "float8_e4m3fn"))
    host = (await x.to_host()).astype("f4")
    assert ((await (await arrays.tile(x, 2)).to_host()).astype("f4") == np.tile(host, 2)).all()
    assert ((await (await arrays.roll(x, 1)).to_host()).astype("f4") == np.roll(host, 1)).all()
    with pytest.raises(ta.NotSupportedError, match="float8"):
        await arrays.pad(x, 1)


async def test_extremes(device: ta.Device) -> None:
    for host in (
        np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324]),
        np.array([2**64 - 1, 2**63, 0], np.uint64),
        np.array([-(2**63), 2**63 - 1]),
    ):
        x = await device.put(host)
        found = await (await arrays.roll(x, 1)).to_host()
        assert found.tobytes() == np.roll(host, 1).tobytes()
        found = await (
            await arrays.pad(x, 1, constant_values=host.max() if host.dtype != float else np.nan)
        ).to_host()
        assert found[1:-1].tobytes() == host.tobytes()
    assert (await (await arrays.pad(x, 1, constant_values=-(2**63))).to_host())[0] == -(2**63)


async def test_each_is_one_launch(device: ta.Device) -> None:
    x = await device.put(numbers((4, 5)))
    for call in (
        lambda: arrays.roll(x, -2, axis=1),
        lambda: arrays.roll(x, 7),
        lambda: arrays.tile(x, (2, 3)),
        lambda: arrays.repeat(x, 3, axis=0),
        *[lambda mode=mode: arrays.pad(x, 2, mode=mode) for mode in MODES],
        lambda: arrays.arange(device, 9),
        lambda: arrays.tril(x),
        lambda: arrays.concat([x, x]),
        lambda: arrays.stack([x, x]),
    ):
        before = (await device.statistics()).launched
        await call()
        assert (await device.statistics()).launched == before + 1


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    x = await device.zeros((3, 4))
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: arrays.roll(x, 1, axis=2), ValueError, r"arrays\.roll: axis 2 is not there"),
        (lambda: arrays.roll(x, (1, 2), axis=0), ValueError, "one shift for each of the axes"),
        (lambda: arrays.tile(x, (2, -1)), ValueError, r"arrays\.tile: repetitions must be .* got \(2, -1\)"),
        (lambda: arrays.repeat(x, -1), ValueError, r"arrays\.repeat: repeats must be at least 0, got -1"),
        (lambda: arrays.repeat(x, 2, axis=5), ValueError, r"arrays\.repeat: axis 5"),
        (lambda: arrays.repeat(x, [1, 2, 3], axis=0), ta.NotSupportedError, r"await ta\.arrays\.take"),
        (lambda: arrays.pad(x, 1, mode="mean"), ValueError, "mode must be one of constant, edge"),
        (lambda: arrays.pad(x, 3, mode="reflect"), ValueError, r"\(3, 3\) of axis 0, .* at most 2"),
        (lambda: arrays.pad(x, ((0, 4), (0, 0)), mode="symmetric"), ValueError, "at most 3"),
        (lambda: arrays.pad(x, ((0, 0), (5, 0)), mode="wrap"), ValueError, "of axis 1, which has 4 elements"),
        (lambda: arrays.pad(x[:0], 1, mode="edge"), ValueError, "'edge' has values for at most 0"),
        (lambda: arrays.pad(x, -1), ValueError, "pad_width must be one integer of at least 0"),
        (lambda: arrays.pad(x, 0.5), ValueError, "pad_width must be one integer"),
        (lambda: arrays.pad(x, (1, 2, 3)), ValueError, "a pair for each of 2 axes, got"),
        (lambda: arrays.pad(x, 1, constant_values=1j), TypeError, "constant_values 1j is complex"),
    ]
    launched = (await device.statistics()).launched
    for call, error, text in wrong:
        with pytest.raises(error, match=text):
            await call()
    assert (await device.statistics()).launched == launched
