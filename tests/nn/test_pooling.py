"""Pooling against loops over windows in float64, and its gradients against differences."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND, INLINE
from dnn_references import NUMPYS, TOLERANCE, Array, check, numbers, pool_windows, pooled, shares, slope
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import nn

MAX: list[Any] = [nn.max_pool1d, nn.max_pool2d, nn.max_pool3d]
AVG: list[Any] = [nn.avg_pool1d, nn.avg_pool2d, nn.avg_pool3d]
LP: list[Any] = [nn.lp_pool1d, nn.lp_pool2d, nn.lp_pool3d]
ADAPTIVE_MAX: list[Any] = [nn.adaptive_max_pool1d, nn.adaptive_max_pool2d, nn.adaptive_max_pool3d]
ADAPTIVE_AVG: list[Any] = [nn.adaptive_avg_pool1d, nn.adaptive_avg_pool2d, nn.adaptive_avg_pool3d]


def most(values: Array, _: Any) -> Any:
    return values.max()


def place_of_most(shape: tuple[int, ...]) -> Any:
    def find(values: Array, there: list[tuple[int, ...]]) -> Any:
        return np.ravel_multi_index(there[int(np.argmax(values))], shape)

    return find


def mean(values: Array, _: Any) -> Any:
    return values.mean()


def averaged(
    x: Array, windows: Any, padded: list[tuple[int, int]] | None, divisor: int | None = None
) -> Array:
    """Means with counts that include the positions within a padding, if there is one."""
    out = pooled(x, windows, lambda values, _: values.sum())
    for index in np.ndindex(*out.shape[2:]):
        lists = [one[i] for one, i in zip(windows, index, strict=True)]
        bounds = padded or [(0, extent) for extent in x.shape[2:]]
        count = sum(
            all(low <= at < high for at, (low, high) in zip(place, bounds, strict=True))
            for place in itertools.product(*lists)
        )
        out[(..., *index)] /= divisor or count
    return out


@st.composite
def pools(draw: st.DrawFn) -> tuple[Any, ...]:
    dims = draw(st.integers(1, 3))
    few = st.lists(st.integers(1, 3), min_size=dims, max_size=dims)
    window, stride, dilation = draw(few), draw(few), draw(few)
    padding = [(draw(st.integers(0, k // 2)), draw(st.integers(0, k // 2))) for k in window]
    spatial = [d * (k - 1) + 1 + draw(st.integers(0, 3)) for d, k in zip(dilation, window, strict=True)]
    # Few values, so that several are the greatest.
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    x = rng.integers(-3, 4, (draw(st.integers(1, 2)), 2, *spatial)).astype(float)
    return x, window, stride, padding, dilation, draw(st.booleans())


@given(problem=pools())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_sizes(problem: tuple[Any, ...]) -> None:
    x, window, stride, padding, dilation, is_ceil = problem
    dims = len(window)
    windows = pool_windows(x.shape[2:], window, stride, padding, dilation, is_ceil=is_ceil)
    plain = pool_windows(x.shape[2:], window, stride, padding, [1] * dims, is_ceil=is_ceil)
    bounds = [
        (-before, extent + behind) for extent, (before, behind) in zip(x.shape[2:], padding, strict=True)
    ]

    async def main() -> None:
        async with ta.open_system("any") as system, system.open_device(BACKEND, options=INLINE) as device:
            ref = await device.put(x)
            found = await MAX[dims - 1](ref, window, stride, padding, dilation, is_ceil, return_indices=True)
            check(await found.output.to_host(), pooled(x, windows, most))
            indices = pooled(x, windows, place_of_most(x.shape[2:]))
            np.testing.assert_array_equal(await found.indices.to_host(), indices)
            alone = await MAX[dims - 1](ref, window, stride, padding, dilation, is_ceil)
            np.testing.assert_array_equal(await alone.to_host(), await found.output.to_host())
            for counts_pad, divisor in ((True, None), (False, None), (True, 5)):
                options = (window, stride, padding, is_ceil, counts_pad, divisor)
                made = await AVG[dims - 1](ref, *options)
                expected = averaged(x, plain, bounds if counts_pad else None, divisor)
                check(await made.to_host(), expected, terms=27)
                # The map is linear: the transposed one has the same product.
                grad = numbers(expected.shape, seed=7)
                back = await (await nn.avg_pool_grad(await device.put(grad), x.shape, *options)).to_host()
                np.testing.assert_allclose((back * x).sum(), (expected * grad).sum(), rtol=1e-11, atol=1e-11)
            made = await LP[dims - 1](ref, 3, window, stride, is_ceil, padding=padding)
            expected = pooled(x, plain, lambda values, _: (np.abs(values) ** 3).sum() ** (1 / 3))
            check(await made.to_host(), expected, terms=27)

    trio.run(main)


@pytest.mark.parametrize("dims", [1, 2, 3])
async def test_adaptive_pooling(device: ta.Device, dims: int) -> None:
    x = numbers((2, 3, *(7, 4, 5)[:dims]))
    ref = await device.put(x)
    for wanted in ((3, 4, 2)[:dims], (7, 1, 9)[:dims]):
        windows = shares(x.shape[2:], wanted)
        found = await ADAPTIVE_MAX[dims - 1](ref, wanted, return_indices=True)
        check(await found.output.to_host(), pooled(x, windows, most))
        expected = pooled(x, windows, place_of_most(x.shape[2:]))
        np.testing.assert_array_equal(await found.indices.to_host(), expected)
        made = await ADAPTIVE_AVG[dims - 1](ref, wanted)
        check(await made.to_host(), pooled(x, windows, mean), terms=60)
        # Without an axis for the batch.
        alone = await ADAPTIVE_AVG[dims - 1](ref[0], wanted)
        check(await alone.to_host(), pooled(x, windows, mean)[0], terms=60)
        grad = numbers(made.shape, seed=4)
        back = await nn.adaptive_avg_pool_grad(await device.put(grad), x.shape)
        total = (pooled(x, windows, mean) * grad).sum()
        np.testing.assert_allclose((await back.to_host() * x).sum(), total, rtol=1e-11)
        back = await nn.max_pool_grad(await device.put(grad), found.indices, x.shape)
        total = (pooled(x, windows, most) * grad).sum()
        np.testing.assert_allclose((await back.to_host() * x).sum(), total, rtol=1e-11)
    kept = await ADAPTIVE_AVG[dims - 1](ref, [None] * dims)
    check(await kept.to_host(), x)


@pytest.mark.parametrize(("dtype", "far"), [("float16", 1e4), ("bfloat16", 1e20), ("float32", 1e25)])
@pytest.mark.parametrize("p", [2, 3])
async def test_norms_of_windows_fit_even_if_powers_overflow(
    device: ta.Device, dtype: str, far: float, p: int
) -> None:
    x = (numbers((1, 2, 6), "float64") * far).astype(ta.DType(dtype).dtype)
    made = await nn.lp_pool1d(await device.put(x), p, 2)
    exact = (np.abs(x.astype(float)).reshape(1, 2, 3, 2) ** p).sum(axis=-1) ** (1 / p)
    np.testing.assert_allclose((await made.to_host()).astype(float), exact, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_each_dtype(device: ta.Device, dtype: str) -> None:
    x = numbers((2, 3, 6, 7), dtype)
    windows = pool_windows((6, 7), (3, 2), (2, 2), [(1, 1), (1, 1)], (1, 1), is_ceil=False)
    exact, ref = x.astype(float), await device.put(x)
    found = await nn.max_pool2d(ref, (3, 2), 2, 1, return_indices=True)
    assert isinstance(found, nn.MaxPoolResult)
    np.testing.assert_array_equal((await found.output.to_host()).astype(float), pooled(exact, windows, most))
    assert found.indices.dtype == "int64"
    mean_of = averaged(exact, windows, [(-1, 7), (-1, 8)])
    out = await device.zeros((2, 3, 3, 8), dtype)
    view = out[..., ::2]
    assert await nn.avg_pool2d(ref, (3, 2), 2, 1, out=view) is view
    check(await view.to_host(), mean_of, dtype, terms=6)
    check(await (await nn.avg_pool2d(ref[1], (3, 2), 2, 1)).to_host(), mean_of[1], dtype, terms=6)
    norm = pooled(exact, windows, lambda values, _: (values**2).sum() ** 0.5)
    made = await nn.lp_pool2d(ref, 2, (3, 2), 2, padding=1)
    check(await made.to_host(), norm, dtype, terms=6)
    grad = numbers(mean_of.shape, dtype, 3)
    back = await nn.avg_pool_grad(await device.put(grad), x.shape, (3, 2), 2, 1)
    expected = slope(
        lambda moved: averaged(moved, windows, [(-1, 7), (-1, 8)]),
        exact[:1, :1],
        grad.astype(float)[:1, :1],
        1.0,
    )
    check((await back.to_host())[:1, :1], expected, dtype, terms=6)
    # If one element is much greater than the others, small steps change no index.
    back = await nn.max_pool_grad(await device.put(grad), found.indices, x.shape)
    expected = slope(
        lambda moved: pooled(moved, windows, most), exact[:1, :1], grad.astype(float)[:1, :1], 1e-6
    )
    assert (
        np.abs((await back.to_host())[:1, :1].astype(float) - expected).max()
        < max(TOLERANCE[dtype], 1e-8) * 9
    )


async def test_special_values(device: ta.Device) -> None:
    x = np.array([[[1.0, np.nan, 2, -np.inf, -np.inf, -np.inf, np.inf, 5, np.nan, np.nan]]])
    ref = await device.put(x)
    found = await nn.max_pool1d(ref, 2, return_indices=True)
    np.testing.assert_array_equal(await found.output.to_host(), [[[np.nan, 2, -np.inf, np.inf, np.nan]]])
    np.testing.assert_array_equal(await found.indices.to_host(), [[[1, 2, 4, 6, 8]]])
    # A place of the padding is never the greatest.
    found = await nn.max_pool1d(ref[..., 3:5], 3, 1, 1, return_indices=True)
    np.testing.assert_array_equal(await found.indices.to_host(), [[[0, 0]]])
    found = await nn.adaptive_max_pool1d(ref, 5, return_indices=True)
    np.testing.assert_array_equal(await found.indices.to_host(), [[[1, 2, 4, 6, 8]]])
    means = await nn.avg_pool1d(ref, 2)
    np.testing.assert_array_equal(await means.to_host(), [[[np.nan, -np.inf, -np.inf, np.inf, np.nan]]])


async def test_an_index_outside_fails_the_operation(device: ta.Device) -> None:
    grad = await device.put(np.ones((1, 2, 3)))
    for index in (-1, 7):
        indices = np.array([[[0, 1, 2], [3, index, 6]]])
        with pytest.raises(
            ta.OutOfRangeError, match=f"indices: {index} is outside of the input, which has 7"
        ) as caught:
            await nn.max_pool_grad(grad, indices, (1, 2, 7))
        assert (caught.value.index, caught.value.length) == (index, 7)
    back = await nn.max_pool_grad(grad, np.array([[[0, 1, 1], [6, 6, 6]]], np.int32), (1, 2, 7))
    np.testing.assert_array_equal(await back.to_host(), [[[1, 2, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 3]]])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
async def test_halves_are_rounded_as_by_numpy(device: ta.Device, dtype: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(NUMPYS[dtype])
    with np.errstate(invalid="ignore"):
        numbers_alone = every[~np.isnan(every)]
    ref = await device.put(numbers_alone[None])
    alone = await nn.max_pool1d(ref, 1)
    np.testing.assert_array_equal((await alone.to_host())[0].view(np.uint16), numbers_alone.view(np.uint16))
    rng = np.random.default_rng(0)
    pairs = numbers_alone[rng.integers(0, len(numbers_alone), (1, 1 << 16))]
    # Of neighbours, so that the mean is between two numbers as often as not.
    pairs[0, 1::2] = (pairs[0, ::2].view(np.uint16) ^ rng.integers(0, 64, 1 << 15).astype(np.uint16)).view(
        NUMPYS[dtype]
    )
    with np.errstate(invalid="ignore"):
        pairs = np.nan_to_num(pairs.astype(np.float32), posinf=0, neginf=0).astype(NUMPYS[dtype])
    pairs = np.where(np.abs(pairs.astype(np.float32)) < 1e38, pairs, 0).astype(NUMPYS[dtype])
    expected = (np.float32(0) + pairs.astype(np.float32).reshape(-1, 2).sum(1)) / np.float32(2)
    found = await nn.avg_pool1d(await device.put(pairs), 2)
    np.testing.assert_array_equal(
        (await found.to_host())[0].view(np.uint16), expected.astype(NUMPYS[dtype]).view(np.uint16)
    )
