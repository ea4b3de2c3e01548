"""Recursive filters against SciPy's, which go through a signal step by step."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import scipy.signal
import trio
from chosen import BACKEND, INLINE, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta

no_stand_in = pytest.mark.skipif(IS_STAND_IN, reason="it compiles each kernel for a second")
# Coefficients: an exponential average, a resonance, a delay, only taps, a factor, an integral.
FILTERS: dict[str, tuple[Any, Any]] = {
    "average": ([0.25], [1, -0.75]),
    "resonance": ([1.0], [2.0, -1.9, 1.8]),
    "delay": ([0, 0, 0, 1.0], [1.0]),
    "taps": ([1.0, -2.0, 3.0, 0.5], [4.0]),
    "factor": ([3.0], [2.0]),
    "integral": ([1], [1, -1]),
    "butterworth": scipy.signal.butter(4, 0.2),
    "complex": ([1.0, 1j], [1.0, -0.5j]),
}


def noise(shape: Any, dtype: str = "float64", seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    made = rng.normal(size=shape)
    return (made + 1j * rng.normal(size=shape) if dtype[0] == "c" else made).astype(dtype)


async def close(got: ta.AccelRef, want: Any, tolerance: float = 1e-9) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(await got.to_host(), want, rtol=0, atol=tolerance * (1 + np.abs(want).max()))


@pytest.mark.parametrize("name", FILTERS)
async def test_each_filter(device: ta.Device, name: str) -> None:
    b, a = FILTERS[name]
    for size in (1, 5, 64, 65, 200, 1000, 5000):
        for shape, axis in (((size,), -1), ((2, size, 3), 1)):
            x = noise(shape)
            ref = await device.put(x)
            await close(await ta.signal.lfilter(b, a, ref, axis), scipy.signal.lfilter(b, a, x, axis))
            order = max(len(a), len(b)) - 1
            if order:
                zi = noise([order if each == axis % x.ndim else extent for each, extent in enumerate(shape)])
                got = await ta.signal.lfilter(b, a, ref, axis, zi=zi)
                for one, want in zip(got, scipy.signal.lfilter(b, a, x, axis, zi=zi), strict=True):
                    await close(one, want)


@no_stand_in
@given(
    order=st.integers(1, 6),
    cut=st.floats(0.05, 0.9),
    kind=st.sampled_from(["low", "high"]),
    size=st.integers(1, 700),
    lines=st.integers(1, 3),
    split=st.integers(0, 700),
)
@settings(max_examples=25, deadline=None)
def test_a_signal_in_two_parts_is_that_in_one(
    order: int, cut: float, kind: Any, size: int, lines: int, split: int
) -> None:
    sos = scipy.signal.butter(order, cut, kind, output="sos")
    x, zi = noise((lines, size)), noise((len(sos), lines, 2), seed=2)
    want, last = scipy.signal.sosfilt(sos, x, zi=zi)
    place = min(split, size)

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            ref, states, parts = await device.put(x), await device.put(zi), []
            for part in (ref[:, :place], ref[:, place:]):
                if part.size:
                    made, states = await ta.signal.sosfilt(sos, part, zi=states)
                    parts.append(await made.to_host())
            np.testing.assert_allclose(np.hstack(parts), want, rtol=0, atol=1e-8 * (1 + np.abs(want).max()))
            await close(states, last, 1e-8)

    trio.run(main)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "int16", "complex128"])
async def test_dtypes(device: ta.Device, dtype: str) -> None:
    x = (8 * noise((2, 500), "float64" if dtype == "int16" else dtype)).astype(dtype)
    b, a = (np.array(each, "float32") for each in ([0.5, 0.25], [1, -0.5]))
    ref = await device.put(x)
    await close(await ta.signal.lfilter(b, a, ref), scipy.signal.lfilter(b, a, x), 2e-6)
    sos = scipy.signal.butter(4, 0.3, output="sos")
    await close(await ta.signal.sosfilt(sos, ref), scipy.signal.sosfilt(sos, x), 1e-9)


async def test_other_coefficients_of_one_shape(device: ta.Device) -> None:
    """A recording for one filter is not taken for another one."""
    x = noise(300)
    ref = await device.put(x)
    for seed in range(5):
        b, a = noise(3, seed=seed), np.array([1, -0.1 * seed, 0.2])
        await close(await ta.signal.lfilter(b, a, ref), scipy.signal.lfilter(b, a, x))


async def test_views(device: ta.Device) -> None:
    x = noise((4, 300))
    ref = await device.put(x)
    b, a = FILTERS["resonance"]
    await close(await ta.signal.lfilter(b, a, ref[::2, ::-1]), scipy.signal.lfilter(b, a, x[::2, ::-1]))
    await close(await ta.signal.lfilter(b, a, ref.T, 0), scipy.signal.lfilter(b, a, x.T, 0))


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    x = await device.put(noise((2, 9)))
    wrong: list[tuple[Any, Any, Any, str]] = [
        ([], [1], {}, "b and a must be vectors"),
        ([1], [0, 1], {}, r"a\[0\] not 0"),
        ([[1]], [1], {}, "b and a must be vectors"),
        (["a"], [1], {}, "lfilter"),
        ([1], [1, 1], {"axis": 2}, "axis 2 is not there"),
        ([1], [1, 1], {"zi": np.zeros(1)}, r"zi must have the shape \(2, 1\), got \(1,\)"),
    ]
    for b, a, named, told in wrong:
        with pytest.raises((TypeError, ValueError), match=told):
            await ta.signal.lfilter(b, a, x, **named)
    with pytest.raises(TypeError, match=r"^signal\.lfilter: x must be an AccelRef"):
        await ta.signal.lfilter([1], [1, 1], noise(9))
    for sos in (np.ones((2, 5)), 2 * np.ones((1, 6)), np.ones((0, 6))):
        with pytest.raises(ValueError, match=r"sos must have shape \(n, 6\), and ones as sos\[:, 3\]"):
            await ta.signal.sosfilt(sos, x)
    with pytest.raises(ValueError, match=r"sosfilt: zi must have the shape \(1, 2, 2\), got \(2, 2\)"):
        await ta.signal.sosfilt(np.ones((1, 6)), x, zi=np.zeros((2, 2)))


# Designs by their names: of an order, at cut-offs.
DESIGNS: dict[str, Any] = {
    "butter": scipy.signal.butter,
    "cheby1": lambda order, *how, **named: scipy.signal.cheby1(order, 1, *how, **named),
    "cheby2": lambda order, *how, **named: scipy.signal.cheby2(order, 40, *how, **named),
    "ellip": lambda order, *how, **named: scipy.signal.ellip(order, 1, 40, *how, **named),
    "bessel": scipy.signal.bessel,
}
BANDS: tuple[tuple[str, Any], ...] = (
    ("low", 0.001),
    ("low", 0.2),
    ("high", 0.001),
    ("high", 0.3),
    ("bandpass", (0.001, 0.01)),
    ("bandpass", (0.2, 0.4)),
    ("bandstop", (0.001, 0.01)),
    ("bandstop", (0.2, 0.4)),
)


def exact(b: Any, a: Any, x: Any, zi: Any) -> tuple[Any, Any]:
    """Filter by the difference equation itself, in NumPy's longest floats."""
    b, a, state = (np.asarray(each, np.longdouble) for each in (b, a, np.append(zi, 0)))
    b, a, made = b / a[0], a / a[0], np.empty(len(x), np.longdouble)
    for n, value in enumerate(x.astype(np.longdouble)):
        made[n] = state[0] + b[0] * value
        state[:-1] = state[1:] + b[1:] * value - a[1:] * made[n]
    return made, state[:-1]


def as_scipy(got: Any, scipys: Any, true: Any) -> None:
    """Compare errors: ours are at most twice SciPy's, and finite elements there are finite here."""
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(scipys))
    finite = np.isfinite(scipys) & np.isfinite(true)
    if finite.any():
        ours, theirs = (np.abs(each[finite] - true[finite]).max() for each in (got, scipys))
        assert ours <= 2 * theirs + 8 * np.finfo(got.dtype).eps * np.abs(true[finite]).max()


@pytest.mark.parametrize("name", DESIGNS)
async def test_errors_are_at_most_scipys(device: ta.Device, name: str) -> None:
    x = noise(500) + 1
    for dtype in ("float64", "float32"):
        signal_ = x.astype(dtype)
        ref = await device.put(signal_)
        for order in range(1, 9):
            for kind, cut in BANDS:
                b, a = (each.astype(dtype) for each in DESIGNS[name](order, cut, kind))
                zi = noise(len(a) - 1, dtype, order)
                true, end = exact(b, a, signal_, zi)
                made, last = await ta.signal.lfilter(b, a, ref, zi=zi)
                want, state = scipy.signal.lfilter(b, a, signal_, zi=zi)
                as_scipy(await made.to_host(), want, true)
                as_scipy(await last.to_host(), state, end)


@pytest.mark.parametrize("name", DESIGNS)
async def test_long_signals_stay_bounded(device: ta.Device, name: str) -> None:
    """Poles that rounding moves out of the unit circle show after thousands of samples."""
    x = noise(100_000) + 1
    for dtype in ("float64", "float32"):
        signal_ = x.astype(dtype)
        ref = await device.put(signal_)
        for order, (kind, cut) in zip((1, 2, 3, 4, 5, 6, 7, 8), BANDS, strict=True):
            sos = DESIGNS[name](order, cut, kind, output="sos").astype(dtype)
            true = scipy.signal.sosfilt(sos.astype(np.longdouble), signal_)
            made = await (await ta.signal.sosfilt(sos, ref)).to_host()
            as_scipy(made, scipy.signal.sosfilt(sos, signal_), true)
            b, a = (each.astype(dtype) for each in DESIGNS[name](order, cut, kind))
            with np.errstate(all="ignore"):
                true = scipy.signal.lfilter(*(each.astype(np.longdouble) for each in (b, a)), signal_)
            made = await (await ta.signal.lfilter(b, a, ref)).to_host()
            as_scipy(made, scipy.signal.lfilter(b, a, signal_), true)


async def test_a_butterworth_of_80_hertz_in_a_million_samples(device: ta.Device) -> None:
    x = noise((1, 1_000_000))
    b, a = scipy.signal.butter(4, 80, fs=44100)
    made = await (await ta.signal.lfilter(b, a, await device.put(x))).to_host()
    true = scipy.signal.lfilter(*(each.astype(np.longdouble) for each in (b, a)), x)
    as_scipy(made, scipy.signal.lfilter(b, a, x), true)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
async def test_a_bad_sample_affects_only_later_samples(device: ta.Device, bad: float) -> None:
    x = noise((2, 700))
    x[0, 300] = bad
    ref = await device.put(x)
    for b, a in (*FILTERS.values(), ([1 / 3] * 3, [1.0]), ([1.0, 0.5], [1.0, 0.0]), (np.ones(65), [2.0])):
        if np.iscomplexobj(b):
            continue
        order = max(len(a), len(b)) - 1
        got = await ta.signal.lfilter(b, a, ref, zi=np.ones((2, order)))
        with np.errstate(all="ignore"):
            want = scipy.signal.lfilter(b, a, x, zi=np.ones((2, order)))
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(await one.to_host(), other, rtol=0, atol=1e-9)
    sos = scipy.signal.butter(3, 0.3, output="sos")
    with np.errstate(all="ignore"):
        want = scipy.signal.sosfilt(sos, x)
    np.testing.assert_allclose(await (await ta.signal.sosfilt(sos, ref)).to_host(), want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 5), (3, 0, 2)])
async def test_no_elements(device: ta.Device, shape: tuple[int, ...]) -> None:
    """Nothing is filtered, and states stay."""
    x = np.zeros(shape, "float32")
    ref = await device.put(x)
    for b, a in (([1.0, 2.0], [1.0, 0.5]), ([1.0, 2.0], [1.0]), ([1.0], [2.0])):
        for axis in range(x.ndim):
            zi = noise([max(len(a), len(b)) - 1 if each == axis else n for each, n in enumerate(shape)])
            made, last = await ta.signal.lfilter(b, a, ref, axis, zi=zi)
            assert (made.shape, made.dtype) == (shape, "float64")
            np.testing.assert_array_equal(await last.to_host(), zi)
    made = await ta.signal.sosfilt(scipy.signal.butter(4, 0.2, output="sos"), ref)
    assert made.shape == shape


async def test_scaled_coefficients(device: ta.Device) -> None:
    """`a[0]` divides all others, in the dtype of the result; orders of the two differ."""
    x = noise((2, 200), "complex64")
    ref = await device.put(x)
    for b, a in (([1.0, 2.0, 3.0], [4.0, 1.0]), ([2.0], [3.0, 1.0, 0.5, 0.25]), ([1j], [2.0 - 1j, 1.0])):
        few, many = (np.array(each, "complex64") for each in (b, a))
        await close(await ta.signal.lfilter(few, many, ref), scipy.signal.lfilter(few, many, x), 1e-6)
    long = np.r_[1.0, 0.01 * noise(40)]
    await close(await ta.signal.lfilter([1.0], long, ref), scipy.signal.lfilter([1.0], long, x), 1e-9)


@pytest.mark.parametrize("isolation", ["process"])
async def test_a_kill_in_the_middle_changes_no_bit(device: ta.Device) -> None:
    ref = await device.put(noise(3000))
    sos, results = scipy.signal.butter(6, 0.2, output="sos"), set[bytes]()
    for turn in range(4):
        if turn:
            pid = (await device.statistics()).pid
            assert pid
            os.kill(pid, signal.SIGKILL)
        results.add((await (await ta.signal.sosfilt(sos, ref)).to_host()).tobytes())
    assert len(results) == 1
