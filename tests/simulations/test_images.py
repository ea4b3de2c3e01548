"""Filters, video effects and the analysis of an image: NumPy and SciPy, frame by frame."""

from __future__ import annotations

import analysis
import filters
import numpy as np
import pytest
import video
from scipy import ndimage
from simulation import to_host
from walking import put, walk

import trio_accel as ta

pytestmark = [pytest.mark.examples, pytest.mark.stand_in]


def bilateral(image: np.ndarray) -> np.ndarray:
    """One plane, in float64."""
    reach = filters.REACH
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(image, reach, "edge"), (2 * reach + 1,) * 2)
    places = np.arange(-reach, reach + 1)
    far = (places[:, None] ** 2 + places**2) / filters.FAR**2
    weights = np.exp(-(far + (windows - image[..., None, None]) ** 2 / filters.UNLIKE**2) / 2)
    smooth: np.ndarray = (weights * windows).sum((2, 3)) / weights.sum((2, 3))
    return smooth


async def test_filters_are_as_by_scipy(device: ta.Device) -> None:
    image = filters.scene(24, 40, 1)
    there = await put(device, image, np.zeros(image.shape, np.uint8))
    frame, drawing = await walk(filters.step_of(24, 40), there, 2)
    # Each step pans by two pixels.
    np.testing.assert_array_equal(frame, np.roll(image, -4, axis=2))
    smooth = np.stack([bilateral(plane.astype(float)) for plane in frame])
    grey = np.tensordot([0.299, 0.587, 0.114], smooth, 1)
    edges = np.hypot(*(ndimage.sobel(grey, axis, mode="nearest") for axis in (0, 1)))
    tone = np.clip(smooth, 0, 1)
    wanted = 255 * tone**2 * (3 - 2 * tone) * np.clip(1.3 - 1.5 * edges, 0, 1)
    # float32 may round to the neighbouring integer.
    assert np.abs(drawing - wanted).max() < 1.001
    assert np.mean(drawing == wanted.astype(np.uint8)) > 0.999


async def test_video_is_as_by_scipy(device: ta.Device) -> None:
    height, width = 24, 32
    light = np.zeros((3, height, width))
    there = await put(device, np.asarray(7.0), light.astype(np.float32), np.zeros(light.shape, np.uint8))
    time, found, screen = await walk(video.step_of(height, width), there, 3)
    rows, columns = np.indices((height, width))
    down, right = (height - 1) / 2, (width - 1) / 2
    turned = video.ZOOM * np.exp(-1j * video.TURN) * (columns - right + 1j * (rows - down))
    for frame in range(3):
        t = 7 + video.TIME * (frame + 1)
        at = [turned.imag + down, turned.real + right]
        planes = [ndimage.map_coordinates(light[c], at, order=1, mode="nearest") for c in range(3)]
        light = video.KEPT * np.stack(planes)
        for k in range(video.LIGHTS):
            y = (rows + 0.5) / height - 0.5 - 0.4 * np.sin((1 + 0.31 * k) * t + k)
            x = (columns + 0.5 - width / 2) / height - 0.7 * np.cos((0.7 + 0.23 * k) * t + 2 * k)
            colour = 0.6 + 0.5 * np.cos(2.1 * np.arange(3) + k)
            light += np.exp(-900 * (x * x + y * y)) * colour[:, None, None]
    glow = np.maximum(ndimage.correlate1d(light, video.BLUR, axis=1, mode="nearest") - video.LEAST, 0)
    glow = ndimage.correlate1d(glow, video.BLUR, axis=2, mode="nearest")
    dark = 1.1 - 1.6 * (((columns + 0.5) / width - 0.5) ** 2 + ((rows + 0.5) / height - 0.5) ** 2)
    wanted = 255 * np.clip(dark * (1 - np.exp(-1.5 * (light + glow))), 0, 1)
    assert time == pytest.approx(t)
    np.testing.assert_allclose(found, light, rtol=1e-4, atol=1e-6)
    assert light.max() > 0.5
    assert np.abs(screen - wanted).max() < 1.01


async def test_an_image_is_analysed_as_by_scipy(device: ta.Device) -> None:
    state, step = await analysis.start(device, 48, 3)
    for _ in range(2):
        _, image, labels, values, counts = await to_host(state := await step(*state))
    thresholds = np.histogram_bin_edges(image, analysis.BINS)[1:-1]
    least = thresholds[np.argmax([unlike(image, each) for each in thresholds])]
    wanted, count = ndimage.label(image > least)
    assert count > 3
    np.testing.assert_array_equal(labels, wanted)
    np.testing.assert_array_equal(values, np.arange(count + 1))
    np.testing.assert_array_equal(counts, np.bincount(wanted.ravel()))


def unlike(image: np.ndarray, threshold: float) -> float:
    """The difference of a threshold's two sides: the weighted square of the means' difference."""
    dark, light = image[image <= threshold], image[image > threshold]
    return float(dark.size * light.size * (dark.mean() - light.mean()) ** 2)
