"""Groups, selections and counts: against NumPy, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chosen import BACKEND, INLINE
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta

xp = ta.arrays

SIZES = (0, 1, 31, 255, 256, 257, 1025, 5000)
REAL = ("bool", "int8", "uint16", "int32", "uint64", "float16", "bfloat16", "float32", "float64")


def numbers(shape: Any, name: str, seed: int = 3) -> Any:
    rng, dtype = np.random.default_rng(seed), ta.DType(name)
    if dtype.kind == "bool":
        return rng.random(shape) < 0.3
    x = rng.integers(0, 6, shape)
    if not dtype.is_inexact:
        return x.astype(dtype.dtype)
    special = np.array([np.nan, -np.nan, np.inf, 0.0, -0.0])
    return np.where(rng.random(shape) < 0.2, rng.choice(special, shape), x / 2).astype(dtype.dtype)


async def hosts(refs: Any) -> list[Any]:
    return [await ref.to_host() for ref in refs]


def assert_equal(got: Any, want: Any) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        wide = other.astype(np.float64) if ta.DType.of(other.dtype).is_half else other
        np.testing.assert_array_equal(one.astype(wide.dtype), wide)


def grouped(x: Any) -> list[Any]:
    """The result of `numpy.unique`: NumPy itself has no bfloat16 there."""
    flat = x.reshape(-1)
    wide = flat.astype(np.float32) if flat.dtype.isbuiltin != 1 else flat
    _, indices, inverse, counts = np.unique(wide, True, True, True, equal_nan=False)
    return [flat[indices], indices, inverse.reshape(x.shape), counts]


@pytest.mark.parametrize("name", REAL)
async def test_unique(device: ta.Device, name: str) -> None:
    for size in SIZES[:-1]:
        x = numbers(size, name)
        on, (values, indices, inverse, counts) = await device.put(x), grouped(x)
        assert_equal(await hosts(await xp.unique_all(on)), [values, indices, inverse, counts])
        assert_equal(await hosts(await xp.unique_counts(on)), [values, counts])
        assert_equal(await hosts(await xp.unique_inverse(on)), [values, inverse])
        assert_equal([await (await xp.unique_values(on)).to_host()], [values])
    x = numbers((3, 4, 5), name)
    on = await device.put(x)
    assert_equal(await hosts(await xp.unique_all(on.T)), grouped(x.T))


@pytest.mark.skipif(BACKEND == "cuda", reason="complex numbers are not sorted there")
async def test_unique_complex_numbers(device: ta.Device) -> None:
    x = numbers(50, "int8") + 1j * numbers(50, "int32", 4)
    assert_equal(await hosts(await xp.unique_all(await device.put(x))), grouped(x))


@pytest.mark.parametrize("name", [*REAL, "complex64"])
async def test_runs(device: ta.Device, name: str) -> None:
    for size in SIZES:
        x = numbers(size, name)
        x = np.repeat(x, np.arange(size) % 4)
        starts = np.flatnonzero(np.concatenate([[True], x[1:] != x[:-1]]) if len(x) else [])
        found = await hosts(await xp.run_lengths(await device.put(x)))
        assert_equal(found, [x[starts], np.diff(starts, append=len(x))])


@pytest.mark.parametrize("name", [*REAL, "complex128"])
async def test_nonzero(device: ta.Device, name: str) -> None:
    for size in SIZES:
        x = numbers(size, name)
        assert_equal(await hosts(await xp.nonzero(await device.put(x))), np.nonzero(x))
    x = numbers((5, 6, 7), name)
    on = await device.put(x)
    assert_equal(await hosts(await xp.nonzero(on.T)), np.nonzero(x.T))
    assert_equal(await hosts(await xp.nonzero(on[::-1, ::2])), np.nonzero(x[::-1, ::2]))


@pytest.mark.parametrize("name", ["bool", "float16", "float8_e5m2", "int32", "float64", "complex128"])
async def test_selections(device: ta.Device, name: str) -> None:
    for size in SIZES:
        x = numbers(size, "int8").astype(ta.DType(name).dtype)
        mask = np.random.default_rng(size).random(size) < 0.4
        masked, on = await device.put(mask), await device.put(x)
        assert_equal([await (await xp.compress(masked, on)).to_host()], [x[mask]])
        assert_equal(await hosts(await xp.partition(masked, on)), [x[mask], x[~mask]])


async def test_selections_of_items(device: ta.Device) -> None:
    x = numbers((5, 6, 7), "float32")
    for axes in range(4):
        mask = np.asarray(np.random.default_rng(axes).random(x.shape[:axes]) < 0.5)
        for masked, host in ((mask, x), (mask.T, x.transpose(*range(axes)[::-1], *range(axes, 3)))):
            on = await device.put(host)
            assert_equal([await (await xp.compress(await device.put(masked), on)).to_host()], [host[masked]])
            found = await hosts(await xp.partition(masked, on))
            assert_equal(found, [host[masked], host[~masked]])
    on = await device.put(x)
    mask = np.arange(5) > 2
    assert_equal([await (await xp.compress(mask[::-1], on[::-1])).to_host()], [x[::-1][mask[::-1]]])
    assert_equal([await (await xp.compress(mask, on[:, :0])).to_host()], [x[:, :0][mask]])


async def test_a_selection_is_a_view_that_can_be_used(device: ta.Device) -> None:
    x = await device.put(np.arange(10.0))
    found = await xp.compress(np.arange(10) % 2 == 1, x)
    np.testing.assert_array_equal(await (await xp.add(found, found)).to_host(), [2, 6, 10, 14, 18])


async def test_bincount(device: ta.Device) -> None:
    for name in ("int8", "uint8", "int32", "uint64"):
        for size in SIZES:
            x = numbers(size, name)
            on = await device.put(x)
            for least in (0, 3, 5000):
                want = np.bincount(x.astype(np.int64), minlength=least)
                assert_equal([await (await xp.bincount(on, minlength=least)).to_host()], [want])
    x, weights = numbers(1000, "int16"), numbers((1000,), "int32", 7)
    found = await xp.bincount(await device.put(x), weights)
    np.testing.assert_allclose(await found.to_host(), np.bincount(x, weights), rtol=1e-14)


@settings(max_examples=15, deadline=None)
@given(x=st.lists(st.floats(-9, 9, width=32), max_size=60), bins=st.integers(1, 9), draw=st.data())
async def test_histograms(x: list[float], bins: int, draw: st.DataObject) -> None:
    edges = draw.draw(st.none() | st.lists(st.integers(-9, 9), min_size=2, max_size=6).map(sorted))
    limits = draw.draw(st.none() | st.just((-3.0, 4.5)))
    async with ta.open_system("counts") as system, system.open_device(BACKEND, options=INLINE) as device:
        host = np.array(x, np.float32)
        on = await device.put(host)
        given: Any = bins if edges is None else np.array(edges, np.float32)
        found = await hosts(await xp.histogram(on, given, range=limits))
        _, ends = np.histogram(host, given, limits)
        # As the function counts them: NumPy finds bins of one width by a division.
        np.testing.assert_allclose(found[1], ends, rtol=1e-6, atol=1e-5)
        np.testing.assert_array_equal(found[0], np.histogram(host, found[1])[0])


@settings(max_examples=60, deadline=None)
@given(
    bins=st.integers(1, 60),
    name=st.sampled_from(["float32", "float64", "int32"]),
    scale=st.sampled_from([1e-30, 1.0, 1e7]),
    away=st.sampled_from([0.0, -0.5, 1.0, 1e5]),
    jitter=st.sampled_from([0.0, 0.05, 0.12, 0.13, 0.4]),
    seed=st.integers(0, 10**6),
)
async def test_histograms_with_nearly_even_edges(
    bins: int, name: str, scale: float, away: float, jitter: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    places = np.arange(bins + 1) + generator.uniform(-jitter, jitter, bins + 1)
    edges = np.sort(((places / bins + away) * scale).astype("float64" if name == "int32" else name))
    near = [np.nextafter(edges, np.inf), np.nextafter(edges, -np.inf), edges, [0.0, -0.0]]
    inside = (generator.uniform(-0.1, 1.1, 200) + away) * scale
    x = np.concatenate([*near, inside, [np.nan, np.inf, -np.inf] if name != "int32" else []])
    x = np.clip(x, -(2**31), 2**31 - 128).astype(name) if name == "int32" else x.astype(name)
    weights = generator.integers(0, 9, len(x)) * 1.0
    known = x[~np.isnan(x)]
    async with ta.open_system("counts") as system, system.open_device(BACKEND, options=INLINE) as device:
        on = await device.put(x)
        for given_weights in (None, weights):
            found = await (await xp.histogram(on, edges, weights=given_weights)).counts.to_host()
            taken = None if given_weights is None else given_weights[~np.isnan(x)]
            np.testing.assert_array_equal(found, np.histogram(known, edges, weights=taken)[0])


async def test_histograms_of_other_types(device: ta.Device) -> None:
    for name in ("int16", "uint64", "float16", "float64"):
        x = numbers((20, 30), name)
        x = np.where(np.isfinite(x), x, x.dtype.type(1))
        counts, edges = await hosts(await xp.histogram((await device.put(x)).T, 4))
        want, ends = np.histogram(x, 4)
        np.testing.assert_array_equal(counts, want)
        np.testing.assert_allclose(edges.astype(np.float64), ends, rtol=1e-3)
    x = numbers(2000, "float32")
    counts, _ = await hosts(await xp.histogram(await device.put(x), np.linspace(0, 3, 6001)))
    np.testing.assert_array_equal(counts, np.histogram(x[~np.isnan(x)], np.linspace(0, 3, 6001))[0])


async def test_histograms_with_weights(device: ta.Device) -> None:
    x = np.append(numbers(1000, "float32"), np.float32([np.nan, 9, 9]))
    edges = np.array([-1, -0.5, 0.25, 9], np.float32)
    on = await device.put(x)
    for dtype in ("float64", "float32", "int16", "bool"):
        weights = numbers((1003,), dtype, 7)
        for one in (weights, await device.put(weights)):
            found = await hosts(await xp.histogram(on, edges, weights=one))
            want = np.histogram(x[~np.isnan(x)], edges, weights=weights[~np.isnan(x)].astype(float))[0]
            assert found[0].dtype == "float64"
            np.testing.assert_allclose(found[0], want, rtol=1e-12, atol=1e-12)
    # Elements go with their weights in C order, whatever the strides.
    table, weights = np.nan_to_num(numbers((20, 30), "float64")), np.arange(600.0).reshape(30, 20)
    found = await hosts(await xp.histogram((await device.put(table)).T, 4, weights=weights))
    np.testing.assert_allclose(found[0], np.histogram(table.T, found[1], weights=weights)[0], rtol=1e-12)
    with pytest.raises(ValueError, match=r"arrays\.histogram: weights must have the shape \(1003,\) of x"):
        await xp.histogram(on, edges, weights=weights)
    with pytest.raises(TypeError, match=r"arrays\.histogram: weights must be real"):
        await xp.histogram(on, edges, weights=x.astype(complex))


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    x, i = await device.zeros((2, 3)), await device.put(np.array([1, -1]))
    with pytest.raises(ValueError, match=r"arrays\.run_lengths: x must be a vector, got shape \(2, 3\)"):
        await xp.run_lengths(x)
    with pytest.raises(ValueError, match=r"arrays\.nonzero: x must have at least one axis"):
        await xp.nonzero(x[0, 0])
    with pytest.raises(TypeError, match=r"arrays\.compress: mask must be of bool, got float64"):
        await xp.compress(x, x)
    with pytest.raises(ValueError, match=r"mask of shape \(3,\) and x of shape \(2, 3\)"):
        await xp.partition(np.ones(3, bool), x)
    with pytest.raises(ta.LibraryError, match="an element of x is negative, or is not below 2"):
        await xp.bincount(i)
    with pytest.raises(TypeError, match=r"bincount: x must have an integer dtype, got float64"):
        await xp.bincount(x[0])
    with pytest.raises(ValueError, match=r"bincount: x must be a vector, .* got shape \(2, 3\)"):
        await xp.bincount(x)
    with pytest.raises(ValueError, match=r"bincount: weights must have the shape \(2,\) of x"):
        await xp.bincount(await device.put(np.array([1, 2])), np.ones(3))
    for bins, trouble in ((0, "at least 1"), (np.ones(1), "at least two"), (np.array([2, 1]), "ascending")):
        with pytest.raises(ValueError, match=f"histogram: .*{trouble}"):
            await xp.histogram(x, bins)
    for limits in ((2, 1), (0, np.inf)):
        with pytest.raises(ValueError, match="histogram: range must be finite and ascend"):
            await xp.histogram(x, range=limits)
    with pytest.raises(ValueError, match="histogram: pass range, because x has elements that are not finite"):
        await xp.histogram(np.nan * x)
    with pytest.raises(TypeError, match=r"histogram: bins must be an integer or an array of edges, got \["):
        await xp.histogram(x, [0, 1, 2])
    with pytest.raises(TypeError, match="histogram: x must be real"):
        await xp.histogram(await device.zeros(2, "complex64"))
