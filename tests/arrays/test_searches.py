"""Searches and counts among integers of other dtypes, and very narrow bins: against Python."""

from __future__ import annotations

import bisect
import itertools
from typing import Any

import numpy as np
import pytest

import trio_accel as ta
from trio_accel import arrays

SIGNED, UNSIGNED = ("int8", "int32", "int64"), ("uint8", "uint64")
PAIRS = [pair for a, b in itertools.product(SIGNED, UNSIGNED) for pair in ((a, b), (b, a))]


def numbers(dtype: str) -> Any:
    """Numbers that float64 cannot distinguish, and both ends, in order."""
    limits = np.iinfo(dtype)
    near = (-2, -1, 0, 1, 5, 2**53, 2**53 + 1, 2**62, 2**62 + 1, 2**63 - 2, 2**63 - 1, 2**63, 2**63 + 1)
    ends = (limits.min, limits.min + 1, limits.max - 1, limits.max)
    return np.array(sorted({one for one in (*near, *ends) if limits.min <= one <= limits.max}), dtype)


@pytest.mark.parametrize(("edge", "dtype"), PAIRS)
async def test_whole_numbers_are_compared_exactly(device: ta.Device, edge: str, dtype: str) -> None:
    edges, x = numbers(edge), numbers(dtype)
    on, at = await device.put(edges), await device.put(x)
    plain, values = edges.tolist(), x.tolist()
    for side, find in (("left", bisect.bisect_left), ("right", bisect.bisect_right)):
        found = await arrays.searchsorted(on, at, side=side)  # type: ignore[arg-type]
        assert (await found.to_host()).tolist() == [find(plain, one) for one in values]
        binned = await arrays.digitize(at, on, right=side == "left")
        assert (await binned.to_host()).tolist() == [find(plain, one) for one in values]
        falling = await arrays.digitize(at, edges[::-1].copy(), right=side == "left")
        assert (await falling.to_host()).tolist() == [len(plain) - find(plain, one) for one in values]
    counted = await (await arrays.histogram(at, on)).counts.to_host()
    places = [
        min(bisect.bisect_right(plain, one), len(plain) - 1) for one in values if plain[0] <= one <= plain[-1]
    ]
    assert counted.tolist() == [places.count(number) for number in range(1, len(plain))]


KINDS = ("bool", *SIGNED, *UNSIGNED, "float16", "float32", "float64")


def even_edges(dtype: str) -> list[Any]:
    """Evenly spaced edges, near 0 and from one end of a dtype to the other, and equal edges."""
    if dtype == "bool":
        return [np.array([False, True])]
    near = [np.array(edges, dtype) for edges in (range(0, 12, 2), [0, 1], [3, 3, 3], [0, 4, 4])]
    if dtype.startswith("float"):
        return near
    limits = np.iinfo(dtype)
    step = (limits.max - limits.min) // 3
    ends = [limits.min + step * number for number in range(3)]
    return [*near, *(np.array(edges, dtype) for edges in ([limits.min, limits.max], [*ends, limits.max]))]


@pytest.mark.parametrize("edge", KINDS)
async def test_bins_of_one_width_are_counted_exactly_in_any_pair_of_dtypes(
    device: ta.Device, edge: str
) -> None:
    for dtype, edges in itertools.product(KINDS, even_edges(edge)):
        x = np.array([0, 1], bool) if dtype == "bool" else np.arange(12).astype(dtype)
        if np.dtype(dtype).kind in "iu" and np.dtype(edge).kind in "iu":
            x = np.concatenate([x, numbers(dtype)])
        plain = edges.tolist()
        counted = await (await arrays.histogram(await device.put(x), edges)).counts.to_host()
        places = [
            min(bisect.bisect_right(plain, one), len(plain) - 1)
            for one in x.tolist()
            if plain[0] <= one <= plain[-1]
        ]
        expected = [places.count(number) for number in range(1, len(plain))]
        assert counted.tolist() == expected, (dtype, plain)


@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_sets_of_whole_numbers_are_exact(device: ta.Device, first: str, second: str) -> None:
    x, y = numbers(first), numbers(second)[::2].copy()
    on, at = await device.put(x), await device.put(y)
    among = set(y.tolist())
    assert (await (await arrays.isin(on, at)).to_host()).tolist() == [one in among for one in x.tolist()]
    assert (await (await arrays.intersect1d(on, at)).to_host()).tolist() == [
        n for n in x.tolist() if n in among
    ]
    assert (await (await arrays.setdiff1d(on, at)).to_host()).tolist() == [
        n for n in x.tolist() if n not in among
    ]


@pytest.mark.parametrize(
    ("dtype", "ends", "bins"),
    [
        ("float64", (1.0, 1.0 + 4e-16), 10),
        ("float64", (1.0, 1.0 + 4e-16), 10**15),
        ("float64", (-1e17, -1e17 + 64), 100),
        ("float32", (1.0, 1.001), 20_000),
        ("float16", (0.0, 1.0), 20_000),
        ("int64", (2**62, 2**62 + 1), 10),
    ],
)
async def test_more_bins_than_numbers_are_refused(
    device: ta.Device, dtype: str, ends: tuple[float, float], bins: int
) -> None:
    x = np.array(ends, dtype)
    with pytest.raises(ValueError, match=rf"^arrays\.histogram: {bins} bins are too many"):
        await arrays.histogram(await device.put(x), bins)


async def test_bins_with_an_infinite_width(device: ta.Device) -> None:
    x = np.array([-1.6e308, -1e307, 1e307, 1.6e308])
    found = await arrays.histogram(await device.put(x), 4)
    np.testing.assert_allclose(await found.edges.to_host(), [-1.6e308, -0.8e308, 0, 0.8e308, 1.6e308])
    assert (await found.counts.to_host()).tolist() == [1, 1, 1, 1]
