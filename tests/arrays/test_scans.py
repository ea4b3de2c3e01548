"""Sums up to each element, differences, and reductions of segments: against NumPy in wider types."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND, INLINE
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta

xp = ta.arrays

SIZES = (0, 1, 31, 64, 65, 255, 256, 257, 1025, 20000)
RESULTS = {
    **dict.fromkeys(("bool", "int8", "int32", "int64"), "int64"),
    **dict.fromkeys(("uint8", "uint64"), "uint64"),
    **{name: name for name in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")},
}
ROUNDED = {"float16": 6e-4, "bfloat16": 5e-3, "float32": 7e-8, "complex64": 1e-7}


def numbers(shape: Any, name: str, seed: int = 3) -> Any:
    rng, dtype = np.random.default_rng(seed), ta.DType(name)
    if dtype.kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if not dtype.is_inexact:
        limits = np.iinfo(dtype.dtype)
        return rng.integers(limits.min // 64, limits.max // 64, shape).astype(dtype.dtype)
    x = rng.uniform(0.9, 1.1, shape)
    return (x + 0.1j * rng.uniform(-1, 1, shape) if dtype.kind == "complex" else x).astype(dtype.dtype)


def assert_close(got: Any, want: Any, name: str) -> None:
    assert got.dtype == ta.DType(name).dtype
    assert got.shape == want.shape
    if not ta.DType(name).is_inexact:
        np.testing.assert_array_equal(got, want)
        return
    wide = complex if name.startswith("complex") else float
    np.testing.assert_allclose(got.astype(wide), want, rtol=ROUNDED.get(name, 1e-11))


def wide_of(name: str) -> Any:
    return {"complex": complex, "float": float, "uint": np.uint64}.get(ta.DType(name).kind, np.int64)


@pytest.mark.parametrize("name", RESULTS)
async def test_every_dtype(device: ta.Device, name: str) -> None:
    for size in SIZES:
        x = numbers(size, name)
        on = await device.put(x)
        want = np.cumsum(x, dtype=wide_of(RESULTS[name]))
        # Larger sums are infinite in float16.
        assert_close(await (await xp.cumulative_sum(on)).to_host(), want, RESULTS[name])
        want = np.cumprod(x[:60], dtype=wide_of(RESULTS[name]))
        assert_close(await (await xp.cumulative_prod(on[:60])).to_host(), want, RESULTS[name])


async def test_every_axis_and_layout(device: ta.Device) -> None:
    for shape in ((5, 70, 3), (4097, 2, 3), (3, 4097), (70, 70, 70)):
        x = numbers(shape, "float32")
        on = await device.put(x)
        for ref, host in ((on, x), (on.T, x.T), (on[::-1, 1:], x[::-1, 1:]), (on[:0], x[:0])):
            for axis in range(host.ndim):
                for initial in (False, True):
                    found = await xp.cumulative_sum(ref, axis=axis, include_initial=initial)
                    ahead = [(int(initial) * (one == axis), 0) for one in range(host.ndim)]
                    want = np.pad(np.cumsum(host, axis, np.float64), ahead)
                    assert_close(await found.to_host(), want, "float32")


async def test_the_first_one(device: ta.Device) -> None:
    for size in SIZES:
        on = await device.put(numbers(size, "int32"))
        found = await (await xp.cumulative_prod(on, include_initial=True)).to_host()
        np.testing.assert_array_equal(found, np.cumprod([1, *numbers(size, "int32").astype(np.int64)]))


async def test_elements_are_converted_before_they_are_added(device: ta.Device) -> None:
    x = np.full(1000, 100, np.int8)
    on = await device.put(x)
    for dtype in ("int8", "uint16", "float32", "complex64"):
        found = await (await xp.cumulative_sum(on, dtype=dtype)).to_host()
        np.testing.assert_array_equal(found, np.cumsum(x.astype(dtype), dtype=dtype))
    half = await device.put(np.array([1.6, 1.6]))
    np.testing.assert_array_equal(await (await xp.cumulative_sum(half, dtype="int32")).to_host(), [1, 2])


async def test_infinities_and_nan_stay(device: ta.Device) -> None:
    x = np.array([1, np.inf, 2, -np.inf, 3, np.nan, 4], np.float32)
    with np.errstate(invalid="ignore"):
        want = np.cumsum(x)
    np.testing.assert_array_equal(await (await xp.cumulative_sum(await device.put(x))).to_host(), want)


async def test_an_array_to_write_to(device: ta.Device) -> None:
    x = await device.put(np.arange(6.0).reshape(2, 3))
    out = await device.zeros((2, 4))
    assert await xp.cumulative_sum(x, axis=1, include_initial=True, out=out) is out
    np.testing.assert_array_equal(await out.to_host(), [[0, 0, 1, 3], [0, 3, 7, 12]])
    view = (await device.zeros((8, 4)))[1::4].T
    assert await xp.cumulative_sum(x.T, axis=0, include_initial=True, out=view) is view
    np.testing.assert_array_equal(await view.to_host(), [[0, 0], [0, 3], [1, 7], [3, 12]])
    with pytest.raises(ValueError, match=r"arrays\.cumulative_sum: out must have shape \(2, 3\)"):
        await xp.cumulative_sum(x, axis=1, out=out)
    with pytest.raises(ValueError, match=r"arrays\.cumulative_prod: out must not share memory with x"):
        await xp.cumulative_prod(x, axis=1, out=x)


@pytest.mark.parametrize("name", RESULTS)
async def test_segments(device: ta.Device, name: str) -> None:
    x = numbers(3000, name)
    on = await device.put(x)
    offsets = np.sort(np.random.default_rng(2).integers(0, 3001, 40)).astype(np.int32)
    offsets[5] = offsets[6]
    for op, function in (("sum", np.sum), ("prod", np.prod)):
        if op == "prod" and ta.DType(name).is_inexact:
            continue
        want = [function(x[i:j].astype(wide_of(RESULTS[name]))) for i, j in pairwise(offsets)]
        found = await (await xp.segmented_reduce(on, offsets, op)).to_host()  # type: ignore[arg-type]
        assert_close(found, np.array(want), RESULTS[name])
    if ta.DType(name).kind != "complex":
        offsets = np.unique(offsets).astype(np.uint64)
        for op, function in (("min", np.min), ("max", np.max)):
            want = [function(x[i:j]) for i, j in pairwise(offsets)]
            found = await (await xp.segmented_reduce(on, offsets, op)).to_host()  # type: ignore[arg-type]
            np.testing.assert_array_equal(found.astype(float), np.array(want).astype(float))


async def test_offsets_that_lead_outside_are_an_error(device: ta.Device) -> None:
    x = await device.put(np.arange(5.0))
    for offsets in ([0, 6], [-1, 3], [0, 3, 2], [2**62, 2**62 + 1]):
        with pytest.raises(ta.LibraryError, match="offsets must ascend, from 0 on to at most 5"):
            await xp.segmented_reduce(x, np.array(offsets))
    with pytest.raises(ta.LibraryError, match="a segment is empty, and 'min' has no result of nothing"):
        await xp.segmented_reduce(x, np.array([0, 2, 2, 5]), "min")
    assert (await xp.segmented_reduce(x, np.array([2]))).shape == (0,)
    nan = await device.put(np.array([1, np.nan, 2]))
    assert np.isnan(await (await xp.segmented_reduce(nan, np.array([0, 3]), "max")).to_host()).all()


@settings(max_examples=15, deadline=None)
@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple),
    name=st.sampled_from(["int8", "uint32", "float16", "complex128"]),
    n=st.integers(0, 3),
    draw=st.data(),
)
async def test_differences(shape: tuple[int, ...], name: str, n: int, draw: st.DataObject) -> None:
    axis, x = draw.draw(st.integers(-len(shape), len(shape) - 1)), numbers(shape, name)
    async with ta.open_system("scans") as system, system.open_device(BACKEND, options=INLINE) as device:
        found = await (await xp.diff(await device.put(x), axis=axis, n=n)).to_host()
        want = np.diff(x, n, axis)
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("dtype", ["float64", "uint8", "bool"])
async def test_zero_subtractions_return_a_copy_of_only_the_array(device: ta.Device, dtype: str) -> None:
    x = np.arange(6).reshape(2, 3).astype(dtype)
    on, beside = await device.put(x), np.ones((2, 1))
    for options in ({}, {"prepend": beside}, {"append": beside}, {"prepend": beside, "append": beside}):
        found = await xp.diff(on, n=0, **options)
        want: Any = np.diff(x, 0, **options)
        assert found.dtype == dtype
        np.testing.assert_array_equal(await found.to_host(), want)
        await found.fill(0)
        np.testing.assert_array_equal(await on.to_host(), x)
    with pytest.raises(ValueError, match="diff: axis 2 is not there"):
        await xp.diff(on, n=0, axis=2)


async def test_differences_of_joined_arrays(device: ta.Device) -> None:
    x = numbers((3, 4), "int32")
    on = await device.put(x)
    for axis, ahead in ((0, x[:1]), (1, x[:, :2])):
        found = await xp.diff(on, axis=axis, prepend=ahead, append=on)
        np.testing.assert_array_equal(await found.to_host(), np.diff(x, axis=axis, prepend=ahead, append=x))


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    x, z = await device.zeros((2, 3)), await device.zeros(3, "complex64")
    with pytest.raises(ValueError, match=r"arrays\.cumulative_sum: axis must be given for .* shape \(2, 3\)"):
        await xp.cumulative_sum(x)
    with pytest.raises(ValueError, match=r"arrays\.cumulative_sum: axis 2 is not there"):
        await xp.cumulative_sum(x, axis=2)
    with pytest.raises(TypeError, match="nothing"):
        await xp.cumulative_sum(x, axis=0, dtype="nothing")
    with pytest.raises(TypeError, match=r"arrays\.cumulative_prod: dtype must be complex"):
        await xp.cumulative_prod(z, dtype="float32")
    with pytest.raises(TypeError, match=r"arrays\.segmented_reduce: offsets must have an integer dtype"):
        await xp.segmented_reduce(x[0], x[0])
    with pytest.raises(ValueError, match=r"arrays\.segmented_reduce: op must be .* got 'mean'"):
        await xp.segmented_reduce(x[0], np.array([0, 1]), "mean")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"arrays\.segmented_reduce: x must be real"):
        await xp.segmented_reduce(z, np.array([0, 1]), "max")
    with pytest.raises(TypeError, match="diff: x must be of numbers, got bool"):
        await xp.diff(await device.zeros(3, "bool"))
    with pytest.raises(ValueError, match="diff: n must not be negative, got -1"):
        await xp.diff(x, n=-1)
    with pytest.raises(ValueError, match="diff: axis 2 is not there"):
        await xp.diff(x, axis=2)


def same(found: Any, wanted: Any) -> None:
    """Compare also NaN, infinity and signs of zeros."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    for one, other in ((found.real, wanted.real), (found.imag, wanted.imag)):
        np.testing.assert_array_equal(one, other)
        known = ~np.isnan(other)
        np.testing.assert_array_equal(np.signbit(one)[known], np.signbit(other)[known])


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
async def test_nothing_comes_before_the_first_element(device: ta.Device, dtype: str) -> None:
    endless = complex(0.5, np.inf)
    rows: list[list[Any]] = [[-0.0], [-0.0] * 3, [np.nan, 1, 2], [1, np.nan, 2], [np.inf, 2]]
    if "complex" in dtype:
        rows += [[endless], [endless, 1], [1, endless, 2], [complex(-0.0, -0.0)] * 2]
    else:
        # The signs of complex zero products depend on their order, and many elements have their own order.
        rows += [[-0.0] * 3000]
    ufuncs = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
    for values in rows:
        x = np.array(values, dtype)
        both = np.stack([x, x], 1)
        on, apart = await device.put(x), await device.put(both)
        offsets = np.array([0, 1, len(x)][: 1 + min(len(x), 2)])
        for name, ufunc in ufuncs.items():
            if "complex" in dtype and name in ("max", "min"):
                continue
            scan: Any = getattr(ta.arrays, f"cumulative_{name}")
            with np.errstate(all="ignore"):
                same(await (await scan(on)).to_host(), ufunc.accumulate(x))
                same(await (await scan(apart, axis=0)).to_host(), ufunc.accumulate(both, 0))
                parts = await ta.arrays.segmented_reduce(on, await device.put(offsets), name)  # type: ignore[arg-type]
                same(await parts.to_host(), ufunc.reduceat(x, offsets[:-1]))
                total = await getattr(ta.arrays, name)(on)
                same(await total.to_host(), getattr(np, name)(x))
