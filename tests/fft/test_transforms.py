"""Fourier transforms against NumPy in double precision."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND, INLINE
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_transforms import check, dtypes, normal, reference, result_dtype

import trio_accel as ta
from trio_accel import fft

KINDS = ["fft", "ifft", "rfft", "irfft"]
CASES = [(kind, dtype) for kind in KINDS for dtype in dtypes(kind)]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((16,), {}),
        ((2,), {}),
        ((13,), {}),
        ((3, 8), {}),
        ((3, 8), {"axis": 0}),
        ((3, 4, 5), {"axis": 1}),
        ((3, 4, 5), {"axis": -3}),
        ((8,), {"n": 5}),
        ((8,), {"n": 12}),
        ((3, 8), {"n": 1, "axis": 1}),
        ((4, 6), {"n": 9, "axis": 0, "norm": "ortho"}),
        ((12,), {"norm": "backward"}),
        ((12,), {"norm": "ortho"}),
        ((12,), {"norm": "forward"}),
        ((0, 8), {}),
    ],
    ids=str,
)
async def test_as_numpy(
    device: ta.Device, kind: str, dtype: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    a = normal(shape, dtype)
    expected = reference(kind, a, **options)
    result = await getattr(fft, kind)(await device.put(a), **options)
    assert result.dtype == result_dtype(kind, dtype)
    check(await result.to_host(), expected, dtype)


@pytest.mark.parametrize(("kind", "dtype"), CASES)
async def test_out_and_host_operands(device: ta.Device, kind: str, dtype: str) -> None:
    a = normal((3, 8), dtype)
    expected = reference(kind, a)
    out = await device.zeros(expected.shape, result_dtype(kind, dtype))
    assert await getattr(fft, kind)(a, out=out) is out
    check(await out.to_host(), expected, dtype)
    await device.synchronize()
    assert (await device.statistics()).memory.used == out.nbytes


async def test_a_signal_of_one_element(device: ta.Device) -> None:
    x = await device.put(np.array([3.0 + 1j]))
    assert (await (await fft.fft(x)).to_host()).tolist() == [3.0 + 1j]
    assert (await (await fft.rfft(await device.put(np.array([3.0])))).to_host()).tolist() == [3.0]
    assert (await (await fft.irfft(x, n=1)).to_host()).tolist() == [3.0]


async def test_there_and_back(device: ta.Device) -> None:
    a = normal((4, 101), "float64")
    spectrum = await fft.rfft(await device.put(a))
    assert spectrum.shape == (4, 51)
    np.testing.assert_allclose(await (await fft.irfft(spectrum, n=101)).to_host(), a, rtol=1e-12, atol=1e-12)


async def test_the_source_is_unchanged(device: ta.Device) -> None:
    a = normal((64,), "complex128")
    x = await device.put(a)
    await fft.fft(x)
    await fft.irfft(x)
    np.testing.assert_array_equal(await x.to_host(), a)


async def test_real_input_is_converted_on_the_device_and_the_conversion_freed(device: ta.Device) -> None:
    x = await device.put(normal((64,), "float64"))
    result = await fft.fft(x)
    await device.synchronize()
    statistics = await device.statistics()
    assert statistics.memory.used == x.nbytes + result.nbytes
    assert statistics.launched == 2


@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=3),
    axis=st.integers(0, 2),
    n=st.none() | st.integers(1, 20),
    norm=st.sampled_from([None, "backward", "ortho", "forward"]),
    single=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_random_arguments(
    kind: str, lengths: list[int], axis: int, n: int | None, norm: str | None, *, single: bool
) -> None:
    dtype = (
        ("float32" if single else "float64") if kind == "rfft" else "complex64" if single else "complex128"
    )
    a = normal(tuple(lengths), dtype)
    axis %= len(lengths)

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            result = await getattr(fft, kind)(await device.put(a), n, axis, norm)
            check(await result.to_host(), reference(kind, a, n=n, axis=axis, norm=norm), dtype)

    trio.run(main)


Ask = Callable[[ta.AccelRef, ta.AccelRef], Awaitable[object]]

WRONG: dict[str, tuple[Ask, type[Exception], str]] = {
    "axis": (
        lambda x, z: fft.fft(x, axis=1),
        ValueError,
        r"fft\.fft: axis 1 is not there in an array of shape \(8,\)",
    ),
    "negative axis": (lambda x, z: fft.ifft(z, axis=-2), ValueError, r"ifft: axis -2 is not there"),
    "axis 1.5": (
        lambda x, z: fft.fft(x, axis=1.5),  # type: ignore[arg-type]
        TypeError,
        r"fft: axis must be an integer, got 1\.5",
    ),
    "n 0": (lambda x, z: fft.rfft(x, n=0), ValueError, r"rfft: n must be at least 1, got 0"),
    "n -4": (lambda x, z: fft.irfft(z, n=-4), ValueError, r"irfft: n must be at least 1, got -4"),
    "n in text": (
        lambda x, z: fft.fft(x, n="4"),  # type: ignore[arg-type]
        TypeError,
        r"fft: n must be an integer or None, got '4'",
    ),
    "norm": (
        lambda x, z: fft.fft(x, norm="forwards"),  # type: ignore[arg-type]
        ValueError,
        r"norm must be 'backward', 'ortho' or 'forward', got 'forwards'",
    ),
    "empty norm": (lambda x, z: fft.fft(x, norm=""), ValueError, r"norm must be .*, got ''"),  # type: ignore[arg-type]
    "a list as norm": (
        lambda x, z: fft.fft(x, norm=["ortho"]),  # type: ignore[arg-type]
        ValueError,
        r"norm must be .*, got \['ortho'\]",
    ),
    "complex to rfft": (
        lambda x, z: fft.rfft(z),
        TypeError,
        r"rfft: a must be real, got complex128; use fft",
    ),
    "no axes": (
        lambda x, z: fft.fft(np.array(1.0), out=z),
        ValueError,
        r"fft: axis -1 is not there in an array of shape \(\)",
    ),
    "no elements": (
        lambda x, z: fft.fft(np.ones(0), out=z),
        ValueError,
        r"fft: axis 0 of a is empty \(shape \(0,\)\)",
    ),
    "one frequency": (
        lambda x, z: fft.irfft(np.ones(1, complex), out=x),
        ValueError,
        r"irfft: n: 1 frequency says nothing .*; give n",
    ),
    "integers": (
        lambda x, z: fft.fft(np.ones(8, np.int64), out=z),
        TypeError,
        r"fft: a must be float32, .*, got int64; convert it first: a\.astype\('float64'\)",
    ),
    "half precision": (
        lambda x, z: fft.rfft(np.ones(8, np.float16), out=z),
        TypeError,
        r"rfft: a must be float32 or float64, got float16; convert it first: a\.astype\('float32'\)",
    ),
    "out of another shape": (
        lambda x, z: fft.rfft(x, out=z),
        ValueError,
        r"rfft: out must have shape \(5,\) and dtype complex128, got shape \(8,\)",
    ),
    "out of another dtype": (
        lambda x, z: fft.fft(z, out=x),
        ValueError,
        r"fft: out must have shape \(8,\) and dtype complex128, got shape \(8,\) and dtype float64",
    ),
    "out is the source": (
        lambda x, z: fft.fft(z, out=z),
        ValueError,
        r"fft: out must not share memory with a; give one of them as a copy\(\)",
    ),
    "no device": (lambda x, z: fft.fft(np.ones(8)), TypeError, r"fft: no operand is on a device"),
    "a list": (
        lambda x, z: fft.fft([1.0], out=z),  # type: ignore[arg-type]
        TypeError,
        r"a must be an AccelRef or a NumPy array, got list",
    ),
}


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG.values(), ids=WRONG.keys())
async def test_wrong_arguments_are_refused_before_anything_is_launched(
    system: ta.System, device: ta.Device, wrong: Ask, error: type[Exception], message: str
) -> None:
    x, z = await device.put(np.ones(8)), await device.put(np.ones(8, complex))
    before = await device.statistics()
    with pytest.raises(error, match=message):
        await wrong(x, z)
    await device.synchronize()
    after = await device.statistics()
    assert (after.launched, after.memory.used) == (before.launched, before.memory.used)
    np.testing.assert_allclose((await (await fft.rfft(x)).to_host())[0], 8.0, rtol=1e-12)
    assert all(node.restarts == 0 for node in system.tree().walk())


async def test_a_length_beyond_all_memory(device: ta.Device) -> None:
    x = await device.put(np.ones(8))
    with pytest.raises(ta.OutOfMemoryError) as caught:
        await fft.rfft(x, n=2**50)
    assert caught.value.requested == (2**49 + 1) * 16
    assert (await (await fft.rfft(x)).to_host())[0] == 8.0
