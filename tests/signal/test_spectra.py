"""Spectra, resampled signals and splines against SciPy."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import scipy.signal
import trio
from chosen import BACKEND, INLINE, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import CubicSpline
from test_filters import noise

import trio_accel as ta

no_stand_in = pytest.mark.skipif(IS_STAND_IN, reason="it has neither transforms nor solvers of systems")
pytestmark = no_stand_in
WINDOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "segments": {"nperseg": 64},
    "lengths": {"nperseg": 33, "noverlap": 10, "nfft": 64},
    "array": {"window": np.hamming(40), "nperseg": 40},
    "named": {"window": ("tukey", 0.3), "nperseg": 50, "fs": 8.0},
}


async def close(got: ta.AccelRef, want: Any, tolerance: float = 1e-10) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(
        await got.to_host(), want, rtol=0, atol=tolerance * (1e-6 + np.abs(want).max())
    )


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("name", WINDOWS)
async def test_spectra(device: ta.Device, name: str, dtype: str) -> None:
    for shape, axis in (((1000,), -1), ((2, 401, 3), 1)):
        x, how = noise(shape, dtype), WINDOWS[name]
        ref = await device.put(x)
        for more in ({}, {"scaling": "spectrum", "detrend": False}):
            frequencies, powers = await ta.signal.welch(ref, axis=axis, **how, **cast("Any", more))
            want = scipy.signal.welch(x, axis=axis, return_onesided=dtype[0] == "f", **how, **more)
            np.testing.assert_allclose(frequencies, want[0])
            await close(powers, want[1])
        for scaling, psd in (("spectrum", "spectrum"), ("density", "psd")):
            named: Any = {"axis": axis, "scaling": scaling}
            *axes, made = await ta.signal.stft(ref, **how, **named)
            *wanted, want = scipy.signal.stft(
                x, axis=axis, scaling=psd, return_onesided=dtype[0] == "f", **how
            )
            for one, other in zip(axes, wanted, strict=True):
                np.testing.assert_allclose(one, other)
            await close(made, want)


async def test_dtypes(device: ta.Device) -> None:
    x = noise(500, "float32")
    _, powers = await ta.signal.welch(await device.put(x), nperseg=100)
    await close(powers, scipy.signal.welch(x, nperseg=100)[1], 1e-5)
    _, powers = await ta.signal.welch(await device.put(np.arange(500) % 7), nperseg=100)
    await close(powers, scipy.signal.welch(np.arange(500) % 7, nperseg=100)[1])
    assert (await ta.signal.resample(await device.put(x), 30)).dtype == "float32"


@given(
    count=st.integers(1, 60),
    num=st.integers(1, 130),
    dtype=st.sampled_from(["float64", "complex128", "int32"]),
    axis=st.integers(0, 1),
)
@settings(max_examples=40, deadline=None)
def test_resampling(count: int, num: int, dtype: str, axis: int) -> None:
    x = noise((count, 3) if axis == 0 else (3, count), "float64" if dtype == "int32" else dtype)
    x = (9 * x).astype(dtype)

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            made = await ta.signal.resample(await device.put(x), num, axis)
            await close(made, scipy.signal.resample(x, num, axis=axis))

    trio.run(main)


@given(
    knots=st.integers(2, 30),
    boundary=st.sampled_from(["not-a-knot", "clamped", "natural"]),
    nu=st.integers(0, 3),
    dtype=st.sampled_from(["float64", "complex128"]),
    axis=st.integers(0, 2),
    seed=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_splines(knots: int, boundary: Any, nu: int, dtype: str, axis: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = np.cumsum(rng.uniform(0.1, 1, knots))
    y = noise([knots if place == axis else 2 for place in range(3)], dtype, seed)
    want = CubicSpline(x, y, axis, boundary)
    # Its coefficients have the axis of the pieces first, and ours have the others' values last.
    at = rng.uniform(x[0] - 0.1, x[-1] + 0.1, (5, 4))
    values = np.moveaxis(want(at, nu), (axis, axis + 1), (0, 1))

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            spline = await ta.signal.cubic_spline(x, await device.put(y), axis, boundary)
            await close(spline.c, want.c, 1e-9)
            for points in (at, await device.put(at)):
                made = await (await ta.signal.evaluate_spline(spline, points, nu)).to_host()
                np.testing.assert_allclose(made, values, rtol=0, atol=1e-8 * (1 + np.abs(values).max()))

    trio.run(main)


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    x = await device.put(noise(100))
    wrong: list[tuple[Any, str]] = [
        ({"window": np.ones((2, 2))}, "window must have nperseg=None elements"),
        ({"window": np.ones(20), "nperseg": 10}, "window must have nperseg=10 elements"),
        ({"nperseg": 10, "noverlap": 10}, "noverlap fewer"),
        ({"fs": 0}, "fs must be above 0"),
        ({"window": np.ones(101)}, "no more than the signal"),
        ({"nperseg": 10, "nfft": 9}, "nfft as many or more"),
        ({"window": "none of that name"}, "Invalid window name"),
        ({"scaling": "psd"}, "scaling must be 'density' or 'spectrum', got 'psd'"),
        ({"axis": 1}, "axis 1 is not there"),
    ]
    for named, told in wrong:
        for function in (ta.signal.welch, ta.signal.stft):
            with pytest.raises(ValueError, match=told):
                await function(x, **named)
    for function in (ta.signal.welch, ta.signal.stft):
        with pytest.raises(
            TypeError, match="x must be an AccelRef, got ndarray; copy it to the device first"
        ):
            await function(noise(9), axis=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nperseg from 1 to the 100 elements of the signal, got"):
        await ta.signal.welch(x, nperseg=200)
    with pytest.raises(ValueError, match="detrend must be 'constant' or False, got 'linear'"):
        await ta.signal.welch(x, detrend="linear")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num must be at least 1"):
        await ta.signal.resample(x, 0)
    with pytest.raises(TypeError, match=r"signal\.resample: x must be an AccelRef"):
        await ta.signal.resample(noise(9), 3)
    for knots in (np.arange(99), np.zeros(100), np.append(np.arange(99.0), np.nan), np.ones((100, 1)), 1.0):
        with pytest.raises(ValueError, match="x must be two or more ascending knots, one for each of 100"):
            await ta.signal.cubic_spline(knots, x)
    with pytest.raises(ValueError, match="bc_type must be one of not-a-knot, clamped, natural, got"):
        await ta.signal.cubic_spline(np.arange(100), x, 0, "periodic")  # type: ignore[arg-type]
    spline = await ta.signal.cubic_spline(np.arange(100), x)
    with pytest.raises(ValueError, match="nu must be from 0 to 3, got 4"):
        await ta.signal.evaluate_spline(spline, np.ones(3), 4)
