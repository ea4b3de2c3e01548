"""Integers: exact products of random bits, counts of trials and events, orders and choices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta

kinds = pytest.mark.parametrize("kind", ["philox4x32_10", "mrg32k3a", "xorwow"])
M1 = 2**32 - 209


def expected(words: np.ndarray, kind: str, low: int, width: int) -> list[int]:
    """Upper parts of products, in Python integers."""
    base, digits = (M1, 4) if kind == "mrg32k3a" else (1 << 32, 2)
    many = 2 if width > 1 << 32 and width < 1 << 64 else 1
    found: list[int] = []
    for row in words.reshape(-1, digits * many).tolist():
        longs = []
        for number in range(many):
            part = row[digits * number : digits * (number + 1)]
            longs.append(sum(word * base**place for place, word in enumerate(part)) % (1 << 64))
        total = sum(one << 64 * place for place, one in enumerate(longs))
        found.append(low + (total * width >> 64 * many))
    return found


RANGES = [
    ("int8", -128, 128),
    ("int8", 3, 4),
    ("uint8", 0, 7),
    ("int16", -7, 1000),
    ("uint16", 0, 1 << 16),
    ("int32", -(1 << 31), 1 << 31),
    ("uint32", 5, 1 << 32),
    ("int64", -(1 << 63), 1 << 63),
    ("int64", -5, 1 << 32),
    ("int64", -(1 << 62) - 1, 1 << 63),
    ("uint64", 0, 1 << 64),
    ("uint64", 1, 1 << 64),
    ("uint64", (1 << 64) - 3, 1 << 64),
]


@kinds
async def test_integers_are_upper_parts_of_products(device: ta.Device, kind: Any) -> None:
    for dtype, low, high in RANGES:
        width = high - low
        count = (4 if kind == "mrg32k3a" else 2) * (2 if 1 << 32 < width < 1 << 64 else 1)
        one, two = (ta.random.Generator(device, kind, seed=9) for _ in range(2))
        drawn = await (await one.integers((20, 10), low, high, dtype)).to_host()
        words = await (await two.bits((200, count))).to_host()
        assert (drawn.dtype, drawn.shape) == (dtype, (20, 10))
        assert drawn.reshape(-1).tolist() == expected(words, kind, low, width)
        assert one.state == two.state or kind == "philox4x32_10"


@settings(max_examples=30, deadline=None)
@given(
    low=st.integers(-(1 << 63), (1 << 63) - 1), width=st.integers(1, 1 << 64), seed=st.integers(0, 2**64 - 1)
)
def test_any_range(low: int, width: int, seed: int) -> None:
    high = min(low + width, 1 << 63)

    async def main() -> None:
        async with ta.open_system("ranges") as system, system.open_device("cpu") as device:
            one, two = (ta.random.Generator(device, "xorwow", seed) for _ in range(2))
            drawn = await (await one.integers(9, low, high)).to_host()
            words = await (await two.bits(9 * (4 if 1 << 32 < high - low < 1 << 64 else 2))).to_host()
            assert drawn.tolist() == expected(words, "xorwow", low, high - low)

    trio.run(main)


@kinds
async def test_integers_are_uniform(device: ta.Device, kind: Any) -> None:
    generator = ta.random.Generator(device, kind, seed=8)
    for dtype, low, high in (("int8", -128, 128), ("uint16", 3, 20), ("int32", 0, 1000)):
        drawn = await (await generator.integers(100_000, low, high, dtype)).to_host()
        counts = np.bincount(drawn.astype(np.int64) - low, minlength=high - low)
        assert scipy.stats.chisquare(counts).pvalue > 0.001
    for dtype in ("int64", "uint64"):
        info = np.iinfo(dtype)
        drawn = await (await generator.integers(20_000, info.min, info.max, dtype, endpoint=True)).to_host()
        assert scipy.stats.kstest(drawn / 2.0**64 + (dtype == "int64") / 2, "uniform").pvalue > 0.001


def fits(drawn: np.ndarray, distribution: Any) -> float:
    """P value of a chi-square test over bins with at least 20 expected numbers each."""
    edges = np.unique(distribution.ppf(np.linspace(0, 1, min(200, len(drawn) // 20) + 1)[1:-1]))
    mass = np.diff(np.concatenate([[0], distribution.cdf(edges), [1]]))
    counts = np.bincount(np.searchsorted(edges, drawn, side="left"), minlength=len(mass))
    is_there = mass * len(drawn) > 5
    assert counts[~is_there].sum() < 50
    observed = np.append(counts[is_there], counts[~is_there].sum())
    share = np.append(mass[is_there], mass[~is_there].sum()) * len(drawn)
    kept = share > 0
    return float(
        scipy.stats.chisquare(observed[kept], share[kept] * observed[kept].sum() / share[kept].sum()).pvalue
    )


@pytest.mark.parametrize("lam", [0.3, 4.0, 9.999, 10.0, 12.5, 40.0, 3e3, 1e7])
async def test_poisson(device: ta.Device, lam: float) -> None:
    drawn = await (await ta.random.Generator(device, seed=21).poisson((1000, 100), lam)).to_host()
    assert (drawn.dtype, drawn.shape) == (np.int64, (1000, 100))
    assert fits(drawn.reshape(-1), scipy.stats.poisson(lam)) > 0.001


@pytest.mark.parametrize(
    ("n", "p"),
    [
        (1, 0.3),
        (20, 0.4),
        (40, 0.25),
        (41, 0.25),
        (100, 0.5),
        (1000, 0.97),
        (10**6, 1e-6),
        (10**7, 0.3),
        (300, 0.999),
    ],
)
async def test_binomial(device: ta.Device, n: int, p: float) -> None:
    drawn = await (await ta.random.Generator(device, seed=21).binomial(100_000, n, p)).to_host()
    assert 0 <= drawn.min() <= drawn.max() <= n
    assert fits(drawn, scipy.stats.binom(n, p)) > 0.001


async def test_large_means_are_nearly_normal(device: ta.Device) -> None:
    generator = ta.random.Generator(device, seed=22)
    for mean in (1e11, 1e15):
        drawn = await (await generator.poisson(20_000, mean)).to_host()
        assert scipy.stats.kstest((drawn - mean) / mean**0.5, "norm").pvalue > 0.001
        drawn = await (await generator.binomial(20_000, 4 * mean, 0.25)).to_host()
        assert scipy.stats.kstest((drawn - mean) / (0.75 * mean) ** 0.5, "norm").pvalue > 0.001


async def test_certain_counts_and_arrays_of_parameters(device: ta.Device) -> None:
    generator = ta.random.Generator(device, seed=21)
    for n, p, result in ((9, 0.0, 0), (9, 1.0, 9), (0, 0.5, 0), (1 << 52, 1.0, 1 << 52)):
        assert (await (await generator.binomial(50, n, p)).to_host() == result).all()
    assert not (await (await generator.poisson(50, 0)).to_host()).any()
    means = np.array([0.0, 3.0, 50.0])
    drawn = await (await generator.poisson((20_000, 3), await device.put(means))).to_host()
    np.testing.assert_allclose(drawn.mean(0), means, atol=0.2)
    drawn = await (await generator.binomial((20_000, 3), np.array([10, 100, 1000]), 0.4)).to_host()
    np.testing.assert_allclose(drawn.mean(0), [4, 40, 400], rtol=0.01)


@kinds
async def test_permutations(device: ta.Device, kind: Any) -> None:
    generator = ta.random.Generator(device, kind, seed=4)
    order = await (await generator.permutation(1000)).to_host()
    assert sorted(order) == [*range(1000)]
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(300):
        found = tuple((await (await generator.permutation(3)).to_host()).tolist())
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 6
    assert scipy.stats.chisquare([*counts.values()]).pvalue > 0.001
    rows = np.arange(24).reshape(4, 3, 2)
    mixed = await (await generator.permutation(rows)).to_host()
    np.testing.assert_array_equal(mixed[np.argsort(mixed[:, 0, 0])], rows)
    assert (await generator.permutation(0)).shape == (0,)
    assert (await generator.permutation(np.empty((0, 3)))).shape == (0, 3)
    assert (await generator.permutation(await device.put(np.arange(5.0)))).dtype is ta.DType.float64


@kinds
async def test_choices_with_replacement(device: ta.Device, kind: Any) -> None:
    generator = ta.random.Generator(device, kind, seed=4)
    drawn = await (await generator.choice(7, (100, 200))).to_host()
    assert (drawn.shape, drawn.dtype) == ((100, 200), np.int64)
    assert scipy.stats.chisquare(np.bincount(drawn.reshape(-1), minlength=7)).pvalue > 0.001
    rows = np.arange(12.0).reshape(4, 3)
    taken = await (await generator.choice(await device.put(rows), (5, 2))).to_host()
    assert taken.shape == (5, 2, 3)
    np.testing.assert_array_equal(taken, rows[(taken[..., 0] / 3).astype(int)])
    assert (await generator.choice(3)).shape == ()
    assert (await generator.choice(np.empty((0, 3)), 0)).shape == (0, 3)


async def test_choices_with_weights(device: ta.Device) -> None:
    generator = ta.random.Generator(device, seed=4)
    p = np.array([0.1, 0.0, 0.25, 0.6, 0.05])
    counts = np.bincount(await (await generator.choice(5, 20_000, p=p)).to_host(), minlength=5)
    assert counts[1] == 0
    assert scipy.stats.chisquare(counts[p > 0], 20_000 * p[p > 0]).pvalue > 0.001
    names = await (await generator.choice(np.array([3.0, 5.0]), 50, p=[0, 1])).to_host()
    assert (names == 5).all()


async def test_choices_without_replacement(device: ta.Device) -> None:
    generator = ta.random.Generator(device, seed=4)
    drawn = await (await generator.choice(50, (5, 9), replace=False)).to_host()
    assert (drawn.shape, len(np.unique(drawn))) == ((5, 9), 45)
    p = np.array([0.5, 0.0, 0.3, 0.2])
    pairs = [tuple(await (await generator.choice(4, 2, False, p)).to_host()) for _ in range(400)]
    # The second one is drawn from the rest: in proportion to the weights.
    left = {(a, b): p[a] * p[b] / (1 - p[a]) for a in (0, 2, 3) for b in (0, 2, 3) if a != b}
    assert set(pairs) <= set(left)
    observed = [pairs.count(pair) for pair in left]
    assert scipy.stats.chisquare(observed, 400 * np.array([*left.values()])).pvalue > 0.001


async def test_wrong_arguments(device: ta.Device) -> None:
    generator = ta.random.Generator(device, seed=1)
    refused: list[tuple[type[Exception], str, str, tuple[Any, ...]]] = [
        (
            ValueError,
            "high must be above low, and both within int8, got -129 and 5",
            "integers",
            (3, -129, 5, "int8"),
        ),
        (ValueError, "both within uint64, got -1 and 5", "integers", (3, -1, 5, "uint64")),
        (TypeError, "dtype must be an integer dtype, got float32", "integers", (3, 0, 5, "float32")),
        (ValueError, "poisson: lam must be finite and >= 0, got -1", "poisson", (3, -1)),
        (ValueError, "poisson: lam must be at most 4503599627370496", "poisson", (3, 1e16)),
        (ValueError, "binomial: p must be at most 1, got 1.5", "binomial", (3, 5, 1.5)),
        (ValueError, "binomial: n must be an integer, got 2.5", "binomial", (3, 2.5, 0.5)),
        (ValueError, "permutation: the number must be at least 0, got -1", "permutation", (-1,)),
        (ValueError, "permutation: an array must have an axis", "permutation", (np.array(3),)),
        (TypeError, "permutation: the number must be an integer, got 2.5", "permutation", (2.5,)),
        (ValueError, "choice: 3 must be drawn of only 0", "choice", (0, 3)),
        (ValueError, "choice: 3 must be drawn of only 2, replace=False", "choice", (2, 3, False)),
        (ValueError, "choice: 2 must be drawn of only 1, replace=False", "choice", (2, 2, False, [0, 1])),
        (ValueError, r"choice: p must have shape \(2,\), got \(3,\)", "choice", (2, 3, True, [0, 1, 0])),
        (ValueError, "choice: p must add up to 1, got 1.5", "choice", (2, 3, True, [0.5, 1])),
        (ValueError, "choice: p must be finite and >= 0, got -0.5", "choice", (2, 3, True, [1.5, -0.5])),
    ]
    for error, match, name, arguments in refused:
        with pytest.raises(error, match=match):
            await getattr(generator, name)(*arguments)
    assert (await device.statistics()).launched == 0
    weights = await device.put(np.ones(1))
    with pytest.raises(TypeError, match="p must be in host memory"):
        await generator.choice(1, 1, True, weights)  # type: ignore[arg-type]
    for n, p in (([5.0, 2.5], 0.5), ([5.0, 1.0], [0.5, 2.0]), ([-1.0, 3.0], 0.5)):
        with pytest.raises(ta.LibraryError, match="n must be an integer from 0 to 2"):
            await generator.binomial(
                2, await device.put(np.array(n)), await device.put(np.broadcast_to(p, 2).copy())
            )
