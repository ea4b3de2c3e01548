"""Moments of equal, or nearly equal, elements, against SciPy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from scipy import stats

import trio_accel as ta

EPS = 2.0**-52
NAMES = ("skew", "kurtosis", "zscore")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
async def test_statistics_of_equal_elements_are_nan(device: ta.Device, dtype: str) -> None:
    for count in (1, 2, 3, 10, 100, 1000, 12345):
        for value in (0.1, 1.0, -0.7, 1e10, 1e-9, 1 / 3, 0.0, 3e38, 3e300):
            if value == 3e300 and dtype == "float32":
                continue
            x = await device.put(np.full((count,), value, dtype))
            for name in NAMES:
                found: Any = await (await getattr(ta.arrays, name)(x)).to_host()
                assert np.isnan(found).all(), (name, count, value)


async def test_of_nearly_equal_elements_as_scipy(device: ta.Device) -> None:
    rng = np.random.default_rng(0)
    normal = rng.normal(size=9)
    for values in (
        *(np.array([1, 1 + ulps * EPS]) for ulps in (1, 2, 4, 8)),
        *(np.array([0.1] * 10 + [0.1 + ulps * EPS / 16]) for ulps in (1, 2, 4, 40, 400)),
        normal,
        normal + 1e6,
        np.array([1, np.nan, 2.0]),
        np.array([np.inf, 1.0]),
    ):
        x = await device.put(values)
        for name in NAMES:
            found = await (await getattr(ta.arrays, name)(x)).to_host()
            with warnings.catch_warnings(), np.errstate(invalid="ignore"):
                warnings.simplefilter("ignore", RuntimeWarning)
                wanted = getattr(stats, name)(values)
                # The mean is rounded by the order of its terms, which devices choose.
                error = np.nan_to_num(EPS * np.abs(values).max() / np.ptp(values))
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e2 * error, err_msg=name)
