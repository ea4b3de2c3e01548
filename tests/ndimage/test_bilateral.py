"""The bilateral filter against its definition, and against scikit-image in its correct cases."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from images import Array

import trio_accel as ta
from trio_accel import ndimage

PADDED = {
    "constant": "constant",
    "edge": "edge",
    "symmetric": "symmetric",
    "reflect": "reflect",
    "wrap": "wrap",
}


def defined(
    x: Array, size: int, deviation: float, spatial: float, bins: int, mode: Any, cval: float
) -> Array:
    """Compute it by definition, element for element."""
    half, low, high = size // 2, min(float(x.min()), 0), float(x.max())
    more: Any = {"constant_values": cval} if mode == "constant" else {}
    wide: Any = np.pad(x.astype(float) - low, half, mode, **more)
    out = np.empty(x.shape)
    for row, column in np.ndindex(x.shape):
        window = wide[row : row + size, column : column + size]
        steps = np.minimum(
            np.floor(abs(window - wide[row + half, column + half]) * bins / (high - low)), bins - 1
        )
        away = np.hypot(*(np.indices((size, size)) - half))
        weights = np.exp(-0.5 * (steps * high / bins / deviation) ** 2) * np.exp(-0.5 * (away / spatial) ** 2)
        out[row, column] = (window * weights).sum() / weights.sum() + low
    return out


@pytest.mark.parametrize("mode", PADDED)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
async def test_by_definition(device: ta.Device, mode: Any, dtype: str) -> None:
    x = np.random.default_rng(1).random((11, 12)).astype(dtype) - 0.3
    given: Any = {"win_size": 7, "sigma_spatial": 2.0, "bins": 50, "cval": 0.25}
    got = await ndimage.bilateral_filter(await device.put(x), sigma_color=0.4, mode=mode, **given).to_host()
    assert got.dtype == dtype
    wanted = defined(x, 7, 0.4, 2.0, 50, mode, 0.25)
    np.testing.assert_allclose(got, wanted, rtol=1e-5 if dtype == "float32" else 1e-12)


async def test_by_excluded_pixels(device: ta.Device) -> None:
    x = np.random.default_rng(2).random((9, 10))
    got = await ndimage.bilateral_filter(await device.put(x)).to_host()
    np.testing.assert_allclose(got, defined(x, 7, float(x.std()), 1, 10000, "constant", 0.0), rtol=1e-12)


async def test_an_even_image_stays(device: ta.Device) -> None:
    x = np.full((8, 8), 0.3)
    assert np.array_equal(await ndimage.bilateral_filter(await device.put(x)).to_host(), x)


async def test_edges_stay_and_noise_is_removed(device: ta.Device) -> None:
    clean = np.zeros((40, 40))
    clean[:, 20:] = 1
    noisy = clean + np.random.default_rng(3).normal(0, 0.05, clean.shape)
    got = await ndimage.bilateral_filter(
        await device.put(noisy), sigma_color=0.2, sigma_spatial=3, mode="edge"
    ).to_host()
    assert np.abs(got - clean).mean() < np.abs(noisy - clean).mean() / 3
    assert np.abs(got[:, 19:21] - clean[:, 19:21]).max() < 0.2


async def test_beside_scikit_image(device: ta.Device) -> None:
    denoise: Any = pytest.importorskip("skimage.restoration._denoise")
    if len(denoise._compute_spatial_lut(5, 1)) != 25:
        pytest.skip("this scikit-image looks distances up in the wrong row of a table")
    x = np.random.default_rng(4).random((20, 21))
    got = await ndimage.bilateral_filter(await device.put(x)).to_host()
    np.testing.assert_allclose(got, denoise.denoise_bilateral(x), rtol=1e-9)


@pytest.mark.parametrize(
    ("x", "kwargs", "error", "text"),
    [
        (np.ones((3, 3), np.uint8), {}, TypeError, "two axes of float32 or float64, got .* uint8; divide"),
        (np.ones(3), {}, TypeError, r"got shape \(3,\)"),
        (np.ones((3, 3)), {"channel_axis": -1}, ta.NotSupportedError, "filter each channel by itself"),
        (np.ones((3, 3)), {"mode": "mirror"}, ValueError, "mode must be one of constant, edge"),
        (np.ones((3, 3)), {"win_size": 4}, ValueError, "win_size must be odd, and from 1 to 1023, got 4"),
        (np.ones((3, 3)), {"sigma_spatial": 0}, ValueError, "must be above 0, got None, 0 and 10000"),
        (np.ones((3, 3)), {"sigma_color": math.nan}, ValueError, "sigma_color must be finite, got nan"),
    ],
)
async def test_bad_arguments(device: ta.Device, x: Array, kwargs: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=f"bilateral_filter.*{text}"):
        await ndimage.bilateral_filter(await device.put(x), **kwargs)
