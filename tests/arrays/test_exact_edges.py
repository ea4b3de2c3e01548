"""Integers of 64 bits among floating-point edges, and in bins with ends of integers: against Python."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import trio_accel as ta
from trio_accel import arrays

WHOLE = ("int64", "uint64")
FLOATS = ("float16", "float32", "float64")


def integers(dtype: str) -> Any:
    """Return integers that float64 cannot distinguish, and both ends, in order."""
    limits = np.iinfo(dtype)
    near = [2**p + d for p in (0, 10, 24, 53, 54, 60, 62, 63) for d in (-2, -1, 0, 1, 2, 3)]
    found = {*near, *(-one for one in near), limits.min, limits.min + 1, limits.max - 1, limits.max}
    return np.array(sorted(one for one in found if limits.min <= one <= limits.max), dtype)


def floats(dtype: str) -> Any:
    """Return numbers between and at the integers, and outside them, in order."""
    near = [0.5, 1.0, 1.5, 2.0**10, 2.0**24, 2.0**53, 2.0**53 + 2, 2.0**54 + 4, 2.0**62, 2.0**63 - 1024]
    near += [2.0**63, 2.0**63 + 2048, 2.0**64 - 2048, 2.0**64, 1e30, math.inf]
    with np.errstate(over="ignore"):
        return np.unique(np.array([0.0, *near, *(-one for one in near)]).astype(dtype))


def exact(values: Any) -> list[Any]:
    """Return numbers that Python compares exactly: it compares an integer with a float so."""
    return [
        value if isinstance(value, int) or math.isinf(value) else Fraction(value) for value in values.tolist()
    ]


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("edge", FLOATS)
async def test_integers_among_floating_edges_are_compared_exactly(
    device: ta.Device, dtype: str, edge: str
) -> None:
    for edges, x in ((floats(edge), integers(dtype)), (integers(dtype), floats(edge))):
        on, at = await device.put(edges), await device.put(np.append(x, x.dtype.type(7)))
        plain, values = exact(edges), [*exact(x), 7]
        for side, find in (("left", bisect.bisect_left), ("right", bisect.bisect_right)):
            wanted = [find(plain, one) for one in values]
            found = await arrays.searchsorted(on, at, side=side)  # type: ignore[arg-type]
            assert (await found.to_host()).tolist() == wanted, side
            binned = await arrays.digitize(at, on, right=side == "left")
            assert (await binned.to_host()).tolist() == wanted, side
        places = [
            min(bisect.bisect_right(plain, one), len(plain) - 1)
            for one in values
            if plain[0] <= one <= plain[-1]
        ]
        counted = await (await arrays.histogram(at, on)).counts.to_host()
        assert counted.tolist() == [places.count(number) for number in range(1, len(plain))]


async def test_nan_is_above_all_integers(device: ta.Device) -> None:
    on = await device.put(integers("int64"))
    for side in ("left", "right"):
        found = await arrays.searchsorted(on, np.array([np.nan, -np.inf]), side=side)  # type: ignore[arg-type]
        assert (await found.to_host()).tolist() == [len(on), 0]
    assert (await (await arrays.histogram(np.array([np.nan, 3.0]), on)).counts.to_host()).sum() == 1
    edges = np.array([0.0, 2.0**62, np.nan])
    found = await arrays.searchsorted(await device.put(edges), integers("uint64"), side="right")
    want = [1 if one < 2**62 else 2 for one in integers("uint64").tolist()]
    assert (await found.to_host()).tolist() == want


def counted(x: Any, edges: Any, low: Any, high: Any) -> list[int]:
    """Count integers by inner edges, and by unrounded ends."""
    inner, bins = exact(edges[1:-1]), [0] * (len(edges) - 1)
    for one in x.tolist():
        if low <= one <= high:
            bins[bisect.bisect_right(inner, one)] += 1
    return bins


RANGES: list[Any] = [
    None, (0, 2**64 - 1), (-(2**63), 2**63 - 1), (2**53 + 1, 2**63 - 1), (2**53 + 3, 2**54 + 1), (0, 1),
    (-(2**70), 2**70), (2**62 + 1, 2**64 + 1), (2**64, 2**65), (-(2**65), -(2**64)), (0.5, 2.0**63),
    (-(2**63) + 1, -(2**53) - 1), (-3, 2**62 + 1), (-1, -1), (5, 5), (-(2**53) - 1, 2**53 + 1),
    (-(2**64), -(2**63)), (-(2**60), 0),
]  # fmt: skip


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_the_ends_of_a_range_are_not_rounded(
    system: ta.System, dtype: str, isolation: ta.Isolation
) -> None:
    x = integers(dtype)
    options = ta.DeviceOptions(isolation=isolation)
    async with system.open_device(name="ends", options=options) as device:
        on = await device.put(x)
        for limits in RANGES if isolation == "inline" else RANGES[:2]:
            for bins in (1, 3, 10, *([1 << 17] if limits is None else [])):
                found = await arrays.histogram(on, bins, range=limits)
                low, high = limits or (int(x[0]), int(x[-1]))
                edges = await found.edges.to_host()
                np.testing.assert_allclose(edges[[0, -1]], [float(low), float(high)], atol=0.5)
                if low == high:
                    low, high = low - 0.5, high + 0.5
                assert (await found.counts.to_host()).tolist() == counted(x, edges, low, high), (limits, bins)


@pytest.mark.parametrize("dtype", WHOLE)
async def test_each_integer_is_in_a_bin_of_their_own_ends(device: ta.Device, dtype: str) -> None:
    """The float64 next to the least integer may be above it."""
    for first in (2**53 + 3, 2**62 + 511, 2**63 - 5000):
        x = np.array([first, first + 2000, first + 4099], dtype)
        counts = (await arrays.histogram(await device.put(x), 2)).counts
        weighed = (await arrays.histogram(await device.put(x), 2, weights=np.array([1.0, 2.0, 4.0]))).counts
        assert (await counts.to_host()).sum() == 3
        assert (await weighed.to_host()).sum() == 7


@pytest.mark.parametrize("limits", [(0, 10**400), (-(10**400), 0), (0.0, math.inf), (math.nan, 1.0)])
async def test_a_range_beyond_all_numbers_is_refused(device: ta.Device, limits: Any) -> None:
    with pytest.raises(ValueError, match=r"^arrays\.histogram: range must be finite and ascend"):
        await arrays.histogram(await device.put(integers("int64")), 3, range=limits)
