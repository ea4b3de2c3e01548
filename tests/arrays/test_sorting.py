"""`ta.arrays.sort` and its kind: against NumPy, bit for bit."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from chosen import BACKEND, INLINE
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta

xp = ta.arrays

SORTED = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
]
SIZES = (0, 1, 2, 31, 255, 256, 257, 1025)


def numbers(shape: Any, name: str, seed: int = 3) -> Any:
    """Repeated elements, with all special values of their dtype."""
    rng, dtype = np.random.default_rng(seed), ta.DType(name)
    if dtype.kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    x = rng.integers(-40, 40, shape)
    if not dtype.is_inexact:
        limits = np.iinfo(dtype.dtype)
        special = np.array([limits.min, limits.max, 0], dtype.dtype)
        return np.where(rng.random(shape) < 0.1, rng.choice(special, shape), (x % 100).astype(dtype.dtype))
    # Half of all NaN have their sign set, as processors make them.
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0])
    return np.where(rng.random(shape) < 0.2, rng.choice(special, shape), x / 4).astype(dtype.dtype)


def order(x: Any, axis: int = -1, *, descending: bool = False) -> Any:
    """The stable order, NaN being larger than all numbers."""
    key = x.astype(np.float32) if x.dtype.isbuiltin != 1 else x
    if not descending:
        return np.argsort(key, axis, kind="stable")
    return x.shape[axis] - 1 - np.flip(np.argsort(np.flip(key, axis), axis, kind="stable"), axis)


def assert_same(got: Any, want: Any) -> None:
    """Equal, with the signs of zeros; of NaN any will do."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if ta.DType.of(want.dtype).is_inexact:
        got, want = got.astype(np.float64), want.astype(np.float64)
        known = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got[known]), np.signbit(want[known]))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", SORTED)
async def test_every_dtype(device: ta.Device, name: str) -> None:
    for size in SIZES:
        x = numbers(size, name, size)
        on = await device.put(x)
        for descending in (False, True):
            want = order(x, descending=descending)
            assert_same(await (await xp.argsort(on, descending=descending)).to_host(), want)
            assert_same(await (await xp.sort(on, descending=descending)).to_host(), x[want])


@pytest.mark.parametrize("name", ["uint8", "bfloat16", "float32", "int64", "float64"])
async def test_every_axis_and_layout(device: ta.Device, name: str) -> None:
    x = numbers((5, 33, 4), name)
    on = await device.put(x)
    flat = await device.put(numbers(300, name))
    views = [
        (on, x),
        (on.T, x.T),
        (on[::-1, 3:20], x[::-1, 3:20]),
        (on[:, :1], x[:, :1]),
        (on[:0], x[:0]),
        (flat[::-3], numbers(300, name)[::-3]),
    ]
    for ref, host in views:
        for axis in range(-1, host.ndim):
            want = order(host, axis, descending=True)
            assert_same(await (await xp.argsort(ref, axis=axis, descending=True)).to_host(), want)
            ascending = np.take_along_axis(host, order(host, axis), axis)
            assert_same(await (await xp.sort(ref, axis=axis)).to_host(), ascending)


async def test_the_first_of_many(device: ta.Device) -> None:
    for name in ("float32", "int16", "bool", "uint64"):
        x = numbers((6, 257), name)
        on = await device.put(x)
        for k in (0, 1, 5, 257):
            for largest in (False, True):
                values, indices = await xp.top_k(on, k, largest=largest)
                want = order(x, descending=largest)[:, :k]
                assert_same(await indices.to_host(), want)
                assert_same(await values.to_host(), np.take_along_axis(x, want, -1))
        values, indices = await xp.top_k(on, 2, axis=0)
        want = order(x, 0, descending=True)[:2]
        assert_same(await indices.to_host(), want)
        assert_same(await values.to_host(), np.take_along_axis(x, want, 0))


@pytest.mark.parametrize("name", ["bool", "int8", "uint16", "bfloat16", "float32", "uint64", "float64"])
async def test_a_few_of_very_many(device: ta.Device, name: str) -> None:
    # On GPUs, parts of 16384 elements or eight times as many as are wanted give their first ones each.
    for shape, k in [((32767,), 3), ((32768,), 3), ((3, 40_001), 100), ((70_003,), 5000), ((2, 200_000), 17)]:
        x = numbers(shape, name)
        on = await device.put(x)
        for largest in (False, True):
            values, indices = await xp.top_k(on, k, largest=largest)
            want = order(x, descending=largest)[..., :k]
            assert_same(await indices.to_host(), want)
            assert_same(await values.to_host(), np.take_along_axis(x, want, -1))


@pytest.mark.parametrize(("name", "bits"), [("float16", 16), ("float32", 32), ("float64", 64)])
@pytest.mark.parametrize("size", [5, 5000])
async def test_nan_of_each_sign_and_payload(device: ta.Device, name: str, bits: int, size: int) -> None:
    """A card that sorts by bits takes a NaN with a sign for the smallest number."""
    x = numbers((size,), name)
    x[:5] = 0.0, np.nan, -np.nan, np.inf, 0.0
    # Quiet NaNs with a payload, with and without a sign.
    x.view(f"u{bits // 8}")[[1, 2]] |= 1
    x[size - 1] = -np.nan
    on = await device.put(x)
    for descending in (False, True):
        want = order(x, descending=descending)
        assert_same(await (await xp.argsort(on, descending=descending)).to_host(), want)
        assert_same(await (await xp.sort(on, descending=descending)).to_host(), x[want])


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.floats(width=32), min_size=1, max_size=40),
    count=st.integers(1, 4),
    descending=st.booleans(),
)
async def test_any_numbers(rows: list[float], count: int, descending: bool) -> None:
    x = np.array([rows[i:] + rows[:i] for i in range(count)], np.float32)
    async with ta.open_system("sorts") as system, system.open_device(BACKEND, options=INLINE) as device:
        on = await device.put(x)
        found = await (await xp.argsort(on, descending=descending)).to_host()
        np.testing.assert_array_equal(found, order(x, descending=descending))
        for row, host in enumerate(x):
            ordered = await (await xp.sort(on[row], descending=descending)).to_host()
            assert_same(ordered, host[order(host, descending=descending)])


KINDS = ("bool", "int8", "int16", "int32", "int64", "uint32", "uint64", "float16", "float32", "float64")


@pytest.mark.skipif(BACKEND != "cpu", reason="of NaN any will do elsewhere")
@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 90)),
    name=st.sampled_from(KINDS),
    different=st.sampled_from([2, 5, 10**6]),
    descending=st.booleans(),
    k=st.integers(0, 9),
    seed=st.integers(0, 10**6),
)
async def test_every_sort_is_stable_to_the_bit(
    shape: tuple[int, int], name: str, different: int, descending: bool, k: int, seed: int
) -> None:
    x, generator = numbers(shape, name, seed), np.random.default_rng(seed)
    if different > 100:
        # No two are equal, or hardly any.
        x = generator.permutation(x.size).reshape(shape).astype(x.dtype)
    elif x.dtype.kind == "f":
        # Of NaN, each has bits of its own.
        bits = x.view(f"u{x.itemsize}")
        bits[np.isnan(x)] += generator.integers(0, different, np.isnan(x).sum()).astype(bits.dtype)
    want = order(x, descending=descending)
    async with ta.open_system("sorts") as system, system.open_device(BACKEND, options=INLINE) as device:
        on = await device.put(x)
        ordered = await (await xp.sort(on, descending=descending)).to_host()
        assert ordered.tobytes() == np.take_along_axis(x, want, -1).tobytes()
        found = await (await xp.argsort(on, descending=descending)).to_host()
        np.testing.assert_array_equal(found, want)
        k = min(k, shape[1])
        values, places = await xp.top_k(on, k, largest=descending)
        np.testing.assert_array_equal(await places.to_host(), want[:, :k])
        first = np.take_along_axis(x, want[:, :k], -1)
        assert (await values.to_host()).tobytes() == first.tobytes()
        flat = x.reshape(-1)
        _, indices = np.unique(flat, return_index=True, equal_nan=False)
        once = flat[indices]
        assert (await (await xp.unique_values(on)).to_host()).tobytes() == once.tobytes()


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 3000),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    method=st.sampled_from(get_args(xp.QuantileMethod)),
    name=st.sampled_from(["int16", "float64"]),
    has_nan=st.booleans(),
)
async def test_quantiles_need_no_whole_order(
    size: int, shares: list[float], method: Any, name: str, has_nan: bool
) -> None:
    x = np.random.default_rng(size).integers(-500, 500, size).astype(name)
    if has_nan and name == "float64":
        x[size // 2] = np.nan
    async with ta.open_system("shares") as system, system.open_device("cpu", options=INLINE) as device:
        on = await device.put(x)
        found = await (await xp.quantile(on, shares, method=method)).to_host()
        np.testing.assert_allclose(found, np.quantile(x, shares, method=method), rtol=1e-12)
        np.testing.assert_array_equal(await (await xp.median(on)).to_host(), np.median(x))


async def test_an_array_to_write_to(device: ta.Device) -> None:
    x = await device.put(np.array([3.0, 1.0, 2.0]))
    out = await device.zeros(3)
    assert await xp.sort(x, out=out) is out
    np.testing.assert_array_equal(await out.to_host(), [1, 2, 3])
    with pytest.raises(ValueError, match=r"arrays\.sort: out must not share memory with x"):
        await xp.sort(x, out=x)
    with pytest.raises(ValueError, match=r"arrays\.argsort: out must have shape \(3,\) and dtype int64"):
        await xp.argsort(x, out=out)


@pytest.mark.parametrize("side", ["left", "right"])
async def test_searches(device: ta.Device, side: Any) -> None:
    for name, other in (("float32", "float32"), ("int8", "int64"), ("uint16", "float64"), ("bfloat16",) * 2):
        for size in (0, 1, 31, 257):
            x1, x2 = numbers(size, name), numbers((7, 9), other, 5)
            kind = np.float32 if name == "bfloat16" else x1.dtype
            sorter = order(x1)
            want = np.searchsorted(
                x1.astype(kind)[sorter], x2.astype(kind if other == name else x2.dtype), side
            )
            edges, x = await device.put(x1[sorter]), await device.put(x2.T)
            found = await xp.searchsorted(edges, x.T, side=side)
            assert_same(await found.to_host(), want)
            found = await xp.searchsorted(
                await device.put(x1), x.T, side=side, sorter=sorter.astype(np.int32)
            )
            assert_same(await found.to_host(), want)


async def test_a_sorter_that_leads_outside_is_an_error(device: ta.Device) -> None:
    x = await device.put(np.arange(3.0))
    for index in (3, -1):
        with pytest.raises(ta.LibraryError, match="an index of sorter is out of range for 3 elements"):
            await xp.searchsorted(x, x, sorter=np.array([0, 1, index]))
    np.testing.assert_array_equal(await (await xp.searchsorted(x, x)).to_host(), [0, 1, 2])


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    x, z = await device.zeros((2, 3)), await device.zeros(3, "complex64")
    with pytest.raises(ValueError, match=r"arrays\.sort: axis 2 is not there in an array of shape \(2, 3\)"):
        await xp.sort(x, axis=2)
    with pytest.raises(TypeError, match=r"arrays\.sort: axis must be an integer, got 1\.0"):
        await xp.sort(x, axis=1.0)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"arrays\.argsort: x must be real, because complex numbers cannot be compared"
    ):
        await xp.argsort(z)
    with pytest.raises(TypeError, match=r"arrays\.sort: descending must be True or False, got 1"):
        await xp.sort(x, descending=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"arrays\.top_k: k must be from 0 to the 3 elements .* got 4"):
        await xp.top_k(x, 4)
    with pytest.raises(ValueError, match=r"arrays\.searchsorted: x1 must be a vector"):
        await xp.searchsorted(x, x)
    with pytest.raises(ValueError, match=r"arrays\.searchsorted: side must be 'left' or 'right', got 'up'"):
        await xp.searchsorted(x[0], x, side="up")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"arrays\.searchsorted: sorter must have an integer dtype, got float64"
    ):
        await xp.searchsorted(x[0], x, sorter=x[0])
    half, whole = await device.zeros(3, "bfloat16"), await device.zeros(3, "int64")
    with pytest.raises(TypeError, match=r"x1 of bfloat16 and x2 of int64 do not promote to a common dtype"):
        await xp.searchsorted(half, whole)
