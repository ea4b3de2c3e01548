"""Convolutions and functions of signals against SciPy in double precision."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import scipy.fft
import scipy.signal
import trio
from chosen import BACKEND, INLINE, IS_STAND_IN
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference_transforms import COMPLEX, TOLERANCE, Array, normal

import trio_accel as ta
from trio_accel import fft

WIDE = {"float32": "float64", "complex64": "complex128"}
no_stand_in = pytest.mark.skipif(IS_STAND_IN, reason="it compiles each kernel for a second")


async def check(result: ta.AccelRef, expected: Array, dtype: str) -> None:
    assert (result.shape, result.dtype) == (expected.shape, dtype)
    size = max(np.abs(expected).max(initial=0), 1e-30)
    np.testing.assert_allclose(await result.to_host(), expected, rtol=0, atol=8 * TOLERANCE[dtype] * size)


def wide(array: Array) -> Array:
    return array.astype(WIDE.get(str(array.dtype), array.dtype))


@no_stand_in
@given(
    name=st.sampled_from(["fftconvolve", "oaconvolve", "convolve", "correlate"]),
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=3),
    mode=st.sampled_from(["full", "same", "valid"]),
    dtype=st.sampled_from(list(TOLERANCE)),
)
@settings(max_examples=40, deadline=None)
def test_all_axes(name: str, shapes: list[tuple[int, int]], mode: Any, dtype: str) -> None:
    one, two = (normal(shape, dtype, seed) for seed, shape in enumerate(zip(*shapes, strict=True)))
    try:
        # By sums: independent of transforms.
        function = scipy.signal.correlate if name == "correlate" else scipy.signal.convolve
        expected = function(wide(one), wide(two), mode, method="direct")
    except ValueError:
        assume(False)

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            await check(await getattr(fft, name)(await device.put(one), two, mode), expected, dtype)

    trio.run(main)


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
@pytest.mark.parametrize(
    ("first", "second", "axes"),
    [
        ((5, 7), (1, 2), 1),
        ((5, 7), (5, 2), 1),
        ((1, 7), (5, 2), [1]),
        ((5, 7, 4), (5, 2, 3), [1, 2]),
        ((3, 2), (3, 6), -1),
        ((5, 1), (1, 3), None),
        ((4, 1), (4, 1), 1),
        ((6, 1), (2, 1), 0),
    ],
)
async def test_some_axes(
    device: ta.Device, first: tuple[int, ...], second: tuple[int, ...], axes: Any, mode: Any, dtype: str
) -> None:
    one, two = normal(first, dtype), normal(second, dtype, 1)
    expected = scipy.signal.fftconvolve(wide(one), wide(two), mode, axes)
    await check(await fft.fftconvolve(one, await device.put(two), mode, axes), expected, dtype)


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize(
    ("first", "second", "axes"),
    [
        ((100,), (3,), None),
        ((3,), (100,), None),
        ((31,), (3,), None),
        ((40,), (2,), None),
        ((4, 90), (4, 5), 1),
        ((60, 5), (3, 4), None),
        ((60, 5), (3, 4), (1, 0)),
        ((15,), (2,), 0),
        ((2, 70, 3), (1, 4, 2), (1, 2)),
        ((1, 80), (3, 4), 1),
    ],
)
async def test_in_blocks(
    device: ta.Device, first: tuple[int, ...], second: tuple[int, ...], axes: Any, mode: Any, dtype: str
) -> None:
    one, two = normal(first, dtype), normal(second, dtype, 1)
    expected = scipy.signal.fftconvolve(wide(one), wide(two), mode, axes)
    await check(await fft.oaconvolve(await device.put(one), two, mode, axes), expected, dtype)
    # A view with gaps, and an array to write to.
    gaps = await device.put(np.repeat(one, 2, -1))
    out = await device.zeros(expected.shape, dtype)
    assert await fft.oaconvolve(gaps[..., ::2], await device.put(two), mode, axes, out=out) is out
    await check(out, expected, dtype)


async def test_out_and_memory(device: ta.Device) -> None:
    one, two = normal((100,), "float64"), normal((9,), "float64", 1)
    signal = await device.put(one)
    expected = scipy.signal.convolve(one, two, "same", method="direct")
    assert await fft.convolve(signal, two, "same", out=signal) is signal
    await check(signal, expected, "float64")
    await fft.correlate(await device.put(two + 1j), normal((100,), "complex128"))
    await device.synchronize()
    assert (await device.statistics()).memory.used == signal.nbytes


@pytest.mark.parametrize("n", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_hilbert(device: ta.Device, n: int, dtype: str) -> None:
    a = normal((3, n, 2), dtype)
    for length in (None, 1, 6, 9):
        expected = scipy.signal.hilbert(wide(a), length, 1)
        await check(await fft.hilbert(await device.put(a), length, 1), expected, COMPLEX[dtype])


@no_stand_in
@given(
    n=st.integers(1, 12),
    m=st.none() | st.integers(1, 20),
    w=st.none() | st.floats(-3, 3).map(lambda angle: np.exp(1j * angle)),
    radius=st.floats(0.9, 1.1),
    axis=st.integers(0, 1),
    dtype=st.sampled_from(list(TOLERANCE)),
)
@settings(max_examples=20, deadline=None)
def test_czt(n: int, m: int | None, w: complex | None, radius: float, axis: int, dtype: str) -> None:
    a = normal((n, 3) if axis == 0 else (3, n), dtype)
    # The definition: powers of the points.
    count = n if m is None else m
    ratio = np.exp(-2j * np.pi / count) if w is None else w
    points = radius * ratio ** -np.arange(count)
    matrix = points[:, None] ** -np.arange(n)
    expected = np.moveaxis(np.tensordot(matrix, wide(a), axes=(1, axis)), 0, axis)

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            result = await fft.czt(await device.put(a), m, w, radius, axis=axis)
            await check(result, expected, COMPLEX[dtype])

    trio.run(main)


@pytest.mark.parametrize("endpoint", [False, True])
@pytest.mark.parametrize("fn", [0.5, (0.2, 0.9), 1.5])
async def test_zoom_fft(device: ta.Device, fn: Any, endpoint: bool) -> None:
    for dtype in ("float64", "complex64"):
        a = normal((9, 2), dtype)
        for m in (None, 2, 30):
            expected = scipy.signal.zoom_fft(wide(a), fn, m, fs=3, endpoint=endpoint, axis=0)
            result = await fft.zoom_fft(await device.put(a), fn, m, fs=3, endpoint=endpoint, axis=0)
            await check(result, expected, COMPLEX[dtype])


@pytest.mark.parametrize("n", [1, 2, 7, 8])
async def test_frequencies_and_their_order(device: ta.Device, n: int) -> None:
    for dtype in ("float32", "float64"):
        for name in ("fftfreq", "rfftfreq"):
            result = await getattr(fft, name)(device, n, 0.1, dtype=dtype)
            await check(result, getattr(scipy.fft, name)(n, 0.1), dtype)
    a = normal((n, 3, 2), "float64")
    x = await device.put(a)
    for name in ("fftshift", "ifftshift"):
        for axes in (None, 1, (0, 2), -1, ()):
            moved = await (await getattr(fft, name)(x, axes)).to_host()
            np.testing.assert_array_equal(moved, getattr(np.fft, name)(a, axes))
    flags = await device.put(np.array([True, False, False]))
    assert (await (await fft.fftshift(flags)).to_host()).tolist() == [False, True, False]


def test_next_fast_len() -> None:
    for real in (False, True):
        for target in (1, 7, 11, 1021, 8193):
            assert fft.next_fast_len(target, real) == scipy.fft.next_fast_len(target, real)
    # Up to SciPy's limit, and above it.
    for target in (10**6 + 3, 2**31 - 1, 10**12 + 39, 2**58 + 1, (2**64 - 1) // 22):
        for real in (False, True):
            assert fft.next_fast_len(target, real) == scipy.fft.next_fast_len(target, real)
    for target in (-1, 2**62, 2**63 - 1):
        with pytest.raises(ValueError, match="next_fast_len: target must be from 0 to"):
            fft.next_fast_len(target)


ONES = np.ones((4, 6))
REFUSED: dict[str, tuple[Callable[[Any, ta.Device], Awaitable[Any]], type[Exception], str]] = {
    "dtypes": (
        lambda x, _: fft.fftconvolve(x, np.ones((4, 6), np.float32)), TypeError,
        r"fftconvolve: operands must share a dtype, got in1 float64, in2 float32",
    ),
    "integers": (
        lambda x, _: fft.convolve(np.ones((4, 6), np.int32), x), TypeError,
        r"convolve: in1 must be float32, .* got int32; convert it first: in1\.astype\('float64'\)",
    ),
    "no device": (lambda x, _: fft.convolve(ONES, ONES), TypeError, r"convolve: no operand is on a device"),
    "mode": (lambda x, _: fft.convolve(x, x, "all"), ValueError, r"convolve: mode must be 'full', 'same' or"),
    "direct": (
        lambda x, _: fft.convolve(x, x, method="direct"), ta.NotSupportedError, r"method 'direct' is not",
    ),
    "method": (
        lambda x, _: fft.correlate(x, x, "same", "best"), ValueError,
        r"correlate: method must be 'auto'",
    ),
    "number of axes": (
        lambda x, _: fft.convolve(x, x[0]), ValueError,
        r"convolve: in1 and in2 must have elements",
    ),
    "no elements": (lambda x, _: fft.convolve(x, x[:0]), ValueError, r"got shapes \(4, 6\) and \(0, 6\)"),
    "neither is larger": (
        lambda x, _: fft.convolve(x[:2], x[:, :2], "valid"), ValueError,
        r"convolve: for 'valid', one array must be the larger one along all axes, got shapes",
    ),
    "broadcast": (
        lambda x, _: fft.fftconvolve(x, x[:2], axes=1), ValueError, r"do not broadcast along axis 0",
    ),
    "axes": (
        lambda x, _: fft.fftconvolve(x, x, axes=(0, -2)), ValueError,
        r"fftconvolve: axes must be distinct",
    ),
    "an axis": (
        lambda x, _: fft.fftconvolve(x, x, axes=2), ValueError,
        r"fftconvolve: axes: 2 is not there in",
    ),
    "out": (
        lambda x, _: fft.convolve(x, x, out=x), ValueError,
        r"convolve: out must have shape \(7, 11\) and dtype float64, got shape \(4, 6\)",
    ),
    "complex signal": (
        lambda x, _: fft.hilbert(ONES + 1j, out=x), TypeError,
        r"hilbert: x must be float32 or float64, got complex128",
    ),
    "N": (lambda x, _: fft.hilbert(x, 0), ValueError, r"hilbert: N must be at least 1, got 0"),
    "m": (lambda x, _: fft.czt(x, 0), ValueError, r"czt: m must be at least 1, got 0"),
    "no points": (lambda x, _: fft.czt(x[:, :0]), ValueError, r"czt: axis 1 of x is empty"),
    "none to zoom": (
        lambda x, _: fft.zoom_fft(x[:, :0], 0.5, 4), ValueError,
        r"^fft.zoom_fft: axis 1 of x is empty",
    ),
    "fn": (
        lambda x, _: fft.zoom_fft(x, [1, 2, 3]), ValueError,
        r"zoom_fft: fn must be a frequency or two, got \[",
    ),
    "an end": (
        lambda x, _: fft.zoom_fft(x, 1, 1, endpoint=True), ValueError,
        r"zoom_fft: m must be at least 2",
    ),
    "no length": (lambda _, device: fft.fftfreq(device, 0), ValueError, r"fftfreq: n must be at least 1"),
    "no time": (lambda _, device: fft.rfftfreq(device, 4, 0), ValueError, r"and d not 0, got n 4 and d 0"),
    "dtype": (
        lambda _, device: fft.fftfreq(device, 4, dtype="int64"), TypeError,
        r"fftfreq: dtype must be float32 or",
    ),
    "shift of no array": (
        lambda x, _: fft.fftshift([1]), TypeError,
        r"fftshift: x must be an AccelRef, got list",
    ),
    "shift of no axis": (lambda x, _: fft.fftshift(x, 3), ValueError, r"fftshift: axes: 3 is not there"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_refused_before_anything_is_launched(device: ta.Device, case: str) -> None:
    call, error, match = REFUSED[case]
    x = await device.put(normal((4, 6), "float64"))
    await device.synchronize()
    before = (await device.statistics()).launched
    with pytest.raises(error, match=match):
        await call(x, device)
    assert (await device.statistics()).launched == before


@pytest.mark.parametrize("name", ["fftconvolve", "oaconvolve", "convolve", "correlate"])
async def test_arrays_without_axes_are_multiplied(device: ta.Device, name: str) -> None:
    one, two = np.array(1 + 2j), np.array(3 - 1j)
    for mode in ("full", "same", "valid"):
        found = await getattr(fft, name)(await device.put(one), two, mode)
        np.testing.assert_allclose(await found.to_host(), getattr(scipy.signal, name)(one, two, mode))
