"""Cosine and sine transforms against SciPy in double precision."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import scipy.fft
import trio
from chosen import BACKEND, INLINE, IS_STAND_IN
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_transforms import Array, check, normal

import trio_accel as ta
from trio_accel import fft

NAMES = ["dct", "idct", "dst", "idst"]
NORMS = [None, "backward", "ortho", "forward"]
no_stand_in = pytest.mark.skipif(IS_STAND_IN, reason="it compiles each kernel for a second")


def reference(name: str, a: Array, *arguments: Any, **options: Any) -> Array:
    """SciPy's transform; it forgets `orthogonalize` of complex arrays, so their parts are transformed."""
    function = getattr(scipy.fft, name)
    if a.dtype.kind == "c":
        result: Array = reference(name, a.real, *arguments, **options)
        return result + 1j * reference(name, a.imag, *arguments, **options)
    wide: Array = function(a.astype(float), *arguments, **options)
    return wide


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 16, 31])
async def test_lengths(device: ta.Device, name: str, kind: Any, n: int) -> None:
    if kind == 1 and "dct" in name and n == 1:
        pytest.skip("it is not defined")
    a = normal((3, n), "float64")
    ref = await device.put(a)
    for norm in NORMS:
        result = await getattr(fft, name)(ref, kind, norm=norm)
        assert result.dtype == "float64"
        check(await result.to_host(), reference(name, a, kind, norm=norm), "float64")


@no_stand_in
@given(
    name=st.sampled_from(NAMES),
    kind=st.sampled_from([1, 2, 3, 4]),
    shape=st.lists(st.integers(2, 9), min_size=1, max_size=3),
    axis=st.integers(-1, 2),
    n=st.none() | st.integers(2, 20),
    norm=st.sampled_from(NORMS),
    orthogonalize=st.sampled_from([None, False, True]),
    dtype=st.sampled_from(["float32", "float64", "complex64", "complex128"]),
)
@settings(max_examples=40, deadline=None)
def test_random_arguments(
    name: str,
    kind: Any,
    shape: list[int],
    axis: int,
    n: int | None,
    norm: Any,
    orthogonalize: Any,
    dtype: str,
) -> None:
    a, place = normal(tuple(shape), dtype), axis % len(shape)

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            result = await getattr(fft, name)(
                await device.put(a), kind, n, place, norm, orthogonalize=orthogonalize
            )
            assert result.dtype == dtype
            expected = reference(name, a, kind, n, place, norm, orthogonalize=orthogonalize)
            check(await result.to_host(), expected, dtype)

    trio.run(main)


@no_stand_in
@given(
    name=st.sampled_from([f"{name}n" for name in NAMES]),
    kind=st.sampled_from([1, 2, 3, 4]),
    shape=st.lists(st.integers(2, 5), min_size=3, max_size=3),
    axes=st.none() | st.permutations([0, 1, 2]).map(lambda axes: axes[:2]),
    is_cut=st.booleans(),
    norm=st.sampled_from(NORMS),
)
@settings(max_examples=20, deadline=None)
def test_several_axes(
    name: str, kind: Any, shape: list[int], axes: list[int] | None, norm: Any, *, is_cut: bool
) -> None:
    a, s = normal(tuple(shape), "float64"), [4, 3] if is_cut else None

    async def main() -> None:
        async with ta.open_system("test") as system, system.open_device(BACKEND, options=INLINE) as device:
            result = await getattr(fft, name)(await device.put(a), kind, s, axes, norm)
            check(await result.to_host(), reference(name, a, kind, s, axes, norm), "float64")

    trio.run(main)


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
async def test_views_arrays_of_the_host_and_out(device: ta.Device, dtype: str) -> None:
    a = normal((5, 8), dtype)
    expected = reference("dct", a[:, ::-2], 3, axis=0)
    out = await device.zeros(expected.shape, dtype)
    assert await fft.dct(a[:, ::-2], 3, axis=0, out=out) is out
    check(await out.to_host(), expected, dtype)
    ref = await device.put(a)
    check(await (await fft.dct(ref[:, ::-2], 3, axis=0)).to_host(), expected, dtype)
    # The source is read before the result is written.
    assert await fft.dctn(ref, out=ref) is ref
    check(await ref.to_host(), reference("dctn", a), dtype)


async def test_intermediate_arrays_are_freed(device: ta.Device) -> None:
    x = await device.put(normal((64, 8), "complex128"))
    result = await fft.dctn(x, 4, s=(33, 16))
    await device.synchronize()
    assert (await device.statistics()).memory.used == x.nbytes + result.nbytes


async def test_a_batch_without_elements(device: ta.Device) -> None:
    x = await device.put(np.ones((0, 5)))
    assert (await fft.dct(x)).shape == (0, 5)
    assert (await fft.dst(x, n=7)).shape == (0, 7)


async def test_a_transform_of_a_thousand_elements_keeps_its_digits(device: ta.Device) -> None:
    for dtype in ("float32", "float64"):
        a = normal((1009,), dtype)
        ref = await device.put(a)
        for kind in (1, 2, 3, 4):
            back = await fft.idct(await fft.dct(ref, kind), kind)  # type: ignore[arg-type]
            check(await back.to_host(), a, dtype)


REFUSED: dict[str, tuple[Callable[[Any], Awaitable[Any]], type[Exception], str]] = {
    "another type": (lambda x: fft.dct(x, 5), ValueError, r"dct: type must be 1, 2, 3 or 4, got 5"),
    "True": (lambda x: fft.dct(x, True), ValueError, r"dct: type must be 1, 2, 3 or 4, got True"),
    "one element": (
        lambda x: fft.dct(x, 1, 1),
        ValueError,
        r"dct: type 1 takes at least 2 elements along an axis, got \[1\]",
    ),
    "its inverse": (lambda x: fft.idct(x, 1, 1), ValueError, r"idct: type 1 takes at least 2"),
    "a length below 1": (lambda x: fft.idst(x, 2, 0), ValueError, r"idst: type 2 takes at least 1"),
    "no whole length": (lambda x: fft.dct(x, 2, 4.5), TypeError, r"dct: n must be an integer or None"),
    "norm": (lambda x: fft.dst(x, norm="other"), ValueError, r"dst: norm must be 'backward', 'ortho' or"),
    "axis": (
        lambda x: fft.dst(x, axis=2),
        ValueError,
        r"dst: axis 2 is not there in an array of shape \(4, 6\)",
    ),
    "axes": (lambda x: fft.dctn(x, axes=(0, 0)), ValueError, r"dctn: axes must be distinct"),
    "s": (lambda x: fft.dctn(x, s=(1, 2, 3)), ValueError, r"dctn: s must have a length for each axis"),
    "no elements": (
        lambda x: fft.dct(x[:, :0]),
        ValueError,
        r"dct: axis 1 of a is empty \(shape \(4, 0\)\)",
    ),
    "integers": (
        lambda x: fft.dct(np.ones(8, np.int64), out=x),
        TypeError,
        r"dct: a must be float32, .*, got int64; convert it first: a\.astype\('float64'\)",
    ),
    "out": (
        lambda x: fft.dct(x, n=5, out=x),
        ValueError,
        r"dct: out must have shape \(4, 5\) and dtype float64, got shape \(4, 6\) and dtype float64",
    ),
    "out is not an array": (
        lambda x: fft.dct(x, out=3),
        TypeError,
        r"dct: out must be an AccelRef, got int",
    ),
    "no device": (lambda x: fft.dct(np.ones(8)), TypeError, r"dct: no operand is on a device"),
    "no array": (
        lambda x: fft.dct([1.0], out=x),
        TypeError,
        r"dct: a must be an AccelRef or a NumPy array, got list",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_refused_before_anything_is_launched(device: ta.Device, case: str) -> None:
    call, error, match = REFUSED[case]
    x = await device.put(normal((4, 6), "float64"))
    await device.synchronize()
    before = (await device.statistics()).launched
    with pytest.raises(error, match=match):
        await call(x)
    assert (await device.statistics()).launched == before


async def test_half_precision_is_refused_with_a_remedy(device: ta.Device) -> None:
    x = await device.put(np.ones(8, np.float16))
    for name in ("dct", "fft", "rfft"):
        with pytest.raises(TypeError, match=r"got float16; convert it first: await a\.cast\('float32'\)"):
            await getattr(fft, name)(x)
    result = await fft.dct(await x.cast("float32"))
    np.testing.assert_allclose(await result.to_host(), [16, *[0] * 7], atol=1e-5)


async def test_the_matrix_is_orthogonal(device: ta.Device) -> None:
    # Norms of vectors stay, which no library is asked about.
    a = normal((7,), "float64")
    for name in ("dct", "dst"):
        for kind in (1, 2, 3, 4):
            result = await (await getattr(fft, name)(await device.put(a), kind, norm="ortho")).to_host()
            assert math.isclose(np.linalg.norm(result), np.linalg.norm(a), rel_tol=1e-13)
