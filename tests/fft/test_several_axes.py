"""Transforms of several axes, and the Hermitian ones, against NumPy and SciPy in double precision."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND, INLINE
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_transforms import COMPLEX, check, dtypes, normal, reference, result_dtype

import trio_accel as ta
from trio_accel import fft

OF_REAL = ["rfft2", "rfftn", "ihfft2", "ihfftn"]
TO_REAL = ["irfft2", "irfftn", "hfft2", "hfftn"]
KINDS = ["fft2", "fftn", "ifft2", "ifftn", *OF_REAL, *TO_REAL]
NORMS = [None, "backward", "ortho", "forward"]


CASES = [(kind, dtype) for kind in KINDS for dtype in dtypes(kind)]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((6, 8), {}),
        ((5, 7), {}),
        ((3, 4, 6), {}),
        ((3, 4, 6), {"axes": (0, 2)}),
        ((3, 4, 6), {"axes": (-1, -3)}),
        ((3, 4, 6), {"axes": [1]}),
        ((3, 4, 6), {"s": (5, 3), "axes": (2, 0)}),
        ((3, 4, 6), {"s": [2, -1], "axes": (0, 1), "norm": "ortho"}),
        ((2, 3, 2, 3, 4), {"axes": (0, 1, 3, 4), "norm": "forward"}),
        ((4, 6), {"norm": "ortho"}),
        ((4, 6), {"norm": "forward"}),
        ((0, 3, 4), {"axes": (1, 2)}),
        ((0, 3), {"s": (2, 4), "axes": (0, 1)}),
    ],
    ids=str,
)
async def test_as_numpy_and_scipy(
    device: ta.Device, kind: str, dtype: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    a = normal(shape, dtype)
    expected = reference(kind, a, **options)
    result = await getattr(fft, kind)(await device.put(a), **options)
    assert result.dtype == result_dtype(kind, dtype)
    check(await result.to_host(), expected, dtype)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, dtype) for kind in ("hfft", "ihfft") for dtype in dtypes(kind)]
)
@pytest.mark.parametrize(
    "options",
    [{}, {"n": 5}, {"n": 12, "axis": 0}, {"axis": 0, "norm": "ortho"}, {"norm": "forward"}],
    ids=str,
)
async def test_hermitian_transforms_as_numpy(
    device: ta.Device, kind: str, dtype: str, options: dict[str, Any]
) -> None:
    a = normal((4, 8), dtype)
    result = await getattr(fft, kind)(await device.put(a), **options)
    assert result.dtype == result_dtype(kind, dtype)
    check(await result.to_host(), reference(kind, a, **options), dtype)


@pytest.mark.slow
@given(
    kind=st.sampled_from(KINDS),
    shape=st.lists(st.integers(2, 6), min_size=2, max_size=4),
    norm=st.sampled_from(NORMS),
    single=st.booleans(),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_random_arguments(kind: str, shape: list[int], norm: str | None, data: Any, *, single: bool) -> None:
    name = "float32" if single else "float64"
    a = normal(tuple(shape), name if kind in OF_REAL else COMPLEX[name])
    count = data.draw(st.integers(1, len(shape)))
    named = data.draw(st.permutations(range(-len(shape), 0)))[:count]
    axes = data.draw(st.sampled_from([None, named]))
    s = data.draw(st.none() | st.lists(st.integers(1, 9) | st.just(-1), min_size=count, max_size=count))

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            result = await getattr(fft, kind)(await device.put(a), s, axes, norm)
            check(await result.to_host(), reference(kind, a, s=s, axes=axes, norm=norm), str(a.dtype))

    trio.run(main)


@pytest.mark.parametrize(("kind", "dtype"), CASES)
async def test_out_and_host_operands(device: ta.Device, kind: str, dtype: str) -> None:
    a = normal((3, 4, 6), dtype)
    expected = reference(kind, a)
    out = await device.zeros(expected.shape, result_dtype(kind, dtype))
    assert await getattr(fft, kind)(a, out=out) is out
    check(await out.to_host(), expected, dtype)
    await device.synchronize()
    assert (await device.statistics()).memory.used == out.nbytes


async def test_there_and_back(device: ta.Device) -> None:
    a = normal((5, 6, 7), "float64")
    x = await device.put(a)
    spectrum = await fft.rfftn(x)
    assert spectrum.shape == (5, 6, 4)
    np.testing.assert_allclose(
        await (await fft.irfftn(spectrum, (5, 6, 7), (0, 1, 2))).to_host(), a, atol=1e-12
    )
    half = await fft.ihfftn(x)
    np.testing.assert_allclose(await (await fft.hfftn(half, (5, 6, 7), (0, 1, 2))).to_host(), a, atol=1e-12)
    np.testing.assert_array_equal(await x.to_host(), a)


async def test_a_plane_wave_is_one_frequency(device: ta.Device) -> None:
    # Against the definition, and no other library: exp(2 pi i k.x / n) has its energy in k alone.
    shape, k = (4, 6, 5), (3, 1, 2)
    grid = np.meshgrid(*(np.arange(n) for n in shape), indexing="ij")
    phase = sum(2 * np.pi * f * x / n for f, x, n in zip(k, grid, shape, strict=True))
    spectrum = await (await fft.fftn(await device.put(np.exp(1j * phase)))).to_host()
    expected = np.zeros(shape)
    expected[k] = np.prod(shape)
    np.testing.assert_allclose(spectrum, expected, atol=1e-12 * np.prod(shape))


async def test_real_input_is_converted_on_the_device_and_the_conversion_freed(device: ta.Device) -> None:
    x = await device.put(normal((8, 8), "float64"))
    result = await fft.fft2(x)
    await device.synchronize()
    statistics = await device.statistics()
    assert statistics.memory.used == x.nbytes + result.nbytes
    assert statistics.launched == 2


Ask = Callable[[ta.AccelRef, ta.AccelRef], Awaitable[object]]

WRONG: dict[str, tuple[Ask, type[Exception], str]] = {
    "axis that is not there": (
        lambda x, z: fft.fftn(x, axes=(0, 2)),
        ValueError,
        r"fft\.fftn: axes: 2 is not there in an array of shape \(4, 6\)",
    ),
    "axis twice": (
        lambda x, z: fft.ifftn(z, axes=(0, -2)),
        ValueError,
        r"fft\.ifftn: axes must be distinct, got \(0, -2\) for a of shape \(4, 6\)",
    ),
    "no axes": (
        lambda x, z: fft.rfftn(x, axes=()),
        ValueError,
        r"fft\.rfftn: axes must name at least one axis, got none for a of shape \(4, 6\)",
    ),
    "a scalar": (
        lambda x, z: fft.fftn(np.array(1.0), out=z),
        ValueError,
        r"fft\.fftn: axes must name at least one axis, got none for a of shape \(\)",
    ),
    "one axis for two": (
        lambda x, z: fft.fft2(np.ones(4), out=z),
        ValueError,
        r"fft\.fft2: axes: -2 is not there in an array of shape \(4,\)",
    ),
    "one length for two axes": (
        lambda x, z: fft.irfftn(z, s=(4,), axes=(0, 1)),
        ValueError,
        r"fft\.irfftn: s must have a length for each of axes, got s \(4,\) and axes \(0, 1\)",
    ),
    "more lengths than axes": (
        lambda x, z: fft.fftn(x, s=(4, 4, 4)),
        ValueError,
        r"fft\.fftn: s must have a length for each axis, got \(4, 4, 4\) for \(4, 6\)",
    ),
    "no points": (
        lambda x, z: fft.hfftn(z, s=(4, 0)),
        ValueError,
        r"fft\.hfftn: s must be at least 1, got \(4, 0\)",
    ),
    "fewer points": (lambda x, z: fft.fftn(z, s=(4, -2)), ValueError, r"s must be at least 1, got \(4, -2\)"),
    "half of a point": (
        lambda x, z: fft.fftn(x, s=2.5),  # type: ignore[arg-type]
        TypeError,
        r"fftn: s must be an integer, several, or None, got 2\.5",
    ),
    "half a point": (
        lambda x, z: fft.fftn(x, s=(4, 2.5)),  # type: ignore[arg-type]
        TypeError,
        r"fftn: s must be an integer, several, or None, got 2\.5",
    ),
    "axes in text": (
        lambda x, z: fft.fftn(x, axes="01"),  # type: ignore[arg-type]
        TypeError,
        r"fftn: axes must be an integer, several, or None, got '01'",
    ),
    "norm": (
        lambda x, z: fft.ihfftn(x, norm="unitary"),  # type: ignore[arg-type]
        ValueError,
        r"ihfftn: norm must be 'backward', 'ortho' or 'forward', got 'unitary'",
    ),
    "complex to ihfftn": (
        lambda x, z: fft.ihfftn(z),
        TypeError,
        r"ihfftn: a must be real, got complex128; use ifft",
    ),
    "no elements": (
        lambda x, z: fft.fftn(np.ones((0, 4)), out=z),
        ValueError,
        r"fftn: axis 0 of a is empty \(shape \(0, 4\)\)",
    ),
    "no elements where the length is that of a": (
        lambda x, z: fft.ifftn(np.ones((4, 0)), (4, -1), out=z),
        ValueError,
        r"ifftn: axis 1 of a is empty \(shape \(4, 0\)\)",
    ),
    "one frequency": (
        lambda x, z: fft.irfftn(np.ones((4, 1), complex), out=x),
        ValueError,
        r"irfftn: s: 1 frequency says nothing .*; give s",
    ),
    "integers": (
        lambda x, z: fft.fftn(np.ones((4, 6), np.int64), out=z),
        TypeError,
        r"fftn: a must be float32, .*, got int64; convert it first: a\.astype\('float64'\)",
    ),
    "out of another shape": (
        lambda x, z: fft.rfft2(x, out=z),
        ValueError,
        r"rfft2: out must have shape \(4, 4\) and dtype complex128, got shape \(4, 6\)",
    ),
    "out is the source": (
        lambda x, z: fft.fft2(z, out=z),
        ValueError,
        r"fft2: out must not share memory with a; give one of them as a copy\(\)",
    ),
    "no device": (lambda x, z: fft.fft2(np.ones((4, 6))), TypeError, r"fft2: no operand is on a device"),
}


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG.values(), ids=WRONG.keys())
async def test_wrong_arguments_are_refused_before_anything_is_launched(
    system: ta.System, device: ta.Device, wrong: Ask, error: type[Exception], message: str
) -> None:
    x, z = await device.put(np.ones((4, 6))), await device.put(np.ones((4, 6), complex))
    before = await device.statistics()
    with pytest.raises(error, match=message):
        await wrong(x, z)
    await device.synchronize()
    after = await device.statistics()
    assert (after.launched, after.memory.used) == (before.launched, before.memory.used)
    np.testing.assert_allclose((await (await fft.rfft2(x)).to_host())[0, 0], 24.0, rtol=1e-12)
    assert all(node.restarts == 0 for node in system.tree().walk())
