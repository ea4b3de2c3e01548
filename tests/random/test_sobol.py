"""Sobol points: against SciPy's."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy.stats import qmc

import trio_accel as ta


def of_scipy(d: int, n: int, *, scramble: bool, seed: int, bits: int = 30) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for numbers other than powers of two
        return qmc.Sobol(d, scramble=scramble, bits=bits, rng=seed).random(n)


@pytest.mark.parametrize("isolation", ["inline", "process"])
@pytest.mark.parametrize("scramble", [False, True])
async def test_points_match_scipy(device: ta.Device, scramble: bool) -> None:
    for d, bits in ((1, 30), (7, 32), (40, 12)):
        points = ta.random.Sobol(device, d, scramble=scramble, bits=bits, seed=3)
        parts = [await (await points.random(n)).to_host() for n in (1, 0, 255, 300, 1)]
        expected = of_scipy(d, 557, scramble=scramble, seed=3, bits=bits)
        np.testing.assert_array_equal(np.concatenate(parts), expected)
        assert points.num_generated == 557


async def test_twenty_thousand_dimensions(device: ta.Device) -> None:
    points = ta.random.Sobol(device, 20_000, scramble=False)
    np.testing.assert_array_equal(
        await (await points.random_base2(3)).to_host(), of_scipy(20_000, 8, scramble=False, seed=0)
    )


async def test_any_part_is_made_at_once(device: ta.Device) -> None:
    points = ta.random.Sobol(device, 5, seed=8)
    scipys = qmc.Sobol(5, rng=8).fast_forward(100_003)
    assert points.fast_forward(100_003) is points
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = scipys.random(999)
    np.testing.assert_array_equal(await (await points.random(999)).to_host(), expected)
    again = await (await points.reset().fast_forward(100_003).random(999)).to_host()
    np.testing.assert_array_equal(again, expected)
    # The last points, which SciPy would step to.
    last = points.reset().fast_forward((1 << 30) - 3)
    assert (await last.random(3)).shape == (3, 5)
    with pytest.raises(ValueError, match=r"there are 2\*\*30 points, and 1073741824 are used; got n=1"):
        await last.random()


async def test_single_precision_is_below_one(device: ta.Device) -> None:
    double = await (await ta.random.Sobol(device, 3, seed=8).random(4096)).to_host()
    single = await (await ta.random.Sobol(device, 3, seed=8).random(4096, "float32")).to_host()
    assert single.dtype == np.float32
    np.testing.assert_array_equal(single, np.floor(double * 2**24) / 2**24)


async def test_points_are_balanced(device: ta.Device) -> None:
    points = await (await ta.random.Sobol(device, 4, seed=1).random_base2(10)).to_host()
    # Each interval of length 1/1024 has one point in each dimension.
    for column in points.T:
        assert sorted((column * 1024).astype(int)) == [*range(1024)]


async def test_wrong_arguments(device: ta.Device) -> None:
    for named, error, match in (
        ({"d": 0}, ValueError, "d must be from 1 to 21201, got 0"),
        ({"d": 21_202}, ValueError, "d must be from 1 to 21201, got 21202"),
        ({"d": 2, "bits": 33}, ValueError, "bits must be from 1 to 32, got 33"),
        ({"d": 2, "seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"d": 2, "seed": "x"}, TypeError, "seed must be an integer or None, got 'x'"),
        ({"d": 1.5}, TypeError, "float"),
    ):
        with pytest.raises(error, match=match):
            ta.random.Sobol(device, **named)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Sobol: device must be an open Device, got str"):
        ta.random.Sobol("cpu", 2)  # type: ignore[arg-type]
    points = ta.random.Sobol(device, 2)
    assert f"seed {points.seed}" in repr(points)
    with pytest.raises(ValueError, match="n must be at least 0, got -1"):
        await points.random(-1)
    with pytest.raises(ta.NotSupportedError, match="dtype must be float32 or float64, got int8"):
        await points.random(1, "int8")
    await points.random(3)
    with pytest.raises(ValueError, match=r"3 points and 2\*\*2 are not a power of two; use random"):
        await points.random_base2(2)
