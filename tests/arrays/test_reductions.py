"""Reductions of `ta.arrays`: against NumPy and SciPy in float64, by the rules of the array API standard."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import scipy.special
from array_numbers import DTYPES, INEXACT, REALS, numbers, wide
from chosen import BACKEND
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta

SIZES = (1, 31, 32, 33, 255, 256, 257, 1025)
# Relative errors of a result rounded once, and of float64.
ROUNDED = {"float16": 5e-4, "bfloat16": 4e-3, "float32": 6e-8, "complex64": 9e-8}
# By the dtype of the array, the dtype of its variance.
REAL = {**INEXACT, "complex64": "float32", "complex128": "float64"}


def assert_near(got: Any, want: Any, name: str, *, rtol: float = 1e-12) -> None:
    got, want = wide(np.asarray(got)), np.asarray(want)
    assert got.shape == want.shape
    tolerance = max(ROUNDED.get(name, 0.0) * 1.01, rtol)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * 1e-2)


async def ask(device: ta.Device, name: str, x: Any, *arguments: Any, **options: Any) -> tuple[Any, str]:
    found = await getattr(ta.arrays, name)(await device.put(x), *arguments, **options)
    return await found.to_host(), found.dtype.value


@pytest.mark.parametrize("name", DTYPES)
async def test_every_dtype(device: ta.Device, name: str) -> None:
    x = numbers((3, 40, 5), name)
    for axis in (None, 1, (0, 2)):
        for function in ("any", "all", "count_nonzero"):
            got, dtype = await ask(device, function, x, axis)
            np.testing.assert_array_equal(got, getattr(np, function)(x, axis=axis))
            assert dtype == ("int64" if function == "count_nonzero" else "bool")
        got, dtype = await ask(device, "mean", x, axis)
        assert dtype == INEXACT[name]
        assert_near(got, np.mean(wide(x), axis=axis), dtype)
        for function in ("var", "std"):
            got, dtype = await ask(device, function, x, axis)
            assert dtype == REAL[name]
            assert_near(got, getattr(np, function)(wide(x), axis=axis), dtype)


@pytest.mark.parametrize("name", REALS)
async def test_ordered_dtypes(device: ta.Device, name: str) -> None:
    x = numbers((3, 40, 5), name)
    for axis in (None, 0, -2):
        for function in ("argmin", "argmax"):
            got, dtype = await ask(device, function, x, axis)
            np.testing.assert_array_equal(got, getattr(np, function)(wide(x), axis=axis))
            assert dtype == "int64"
    for axis in (None, 1, (0, 2)):
        for function in ("min", "max"):
            got, dtype = await ask(device, function, x, axis)
            np.testing.assert_array_equal(wide(got), getattr(np, function)(wide(x), axis=axis))
            assert dtype == name
        got, dtype = await ask(device, "logsumexp", x, axis)
        assert dtype == INEXACT[name]
        assert_near(got, scipy.special.logsumexp(wide(x), axis=axis), dtype, rtol=1e-6)


@pytest.mark.parametrize("name", DTYPES)
async def test_products(device: ta.Device, name: str) -> None:
    x = numbers((9, 4), name)
    got, dtype = await ask(device, "prod", x, 0)
    want = {"bool": "int64", "u": "uint64", "i": "int64"}.get(name if name == "bool" else name[0], name)
    assert dtype == want
    assert_near(got, np.prod(wide(x), axis=0), dtype)
    got, dtype = await ask(device, "prod", x, 0, dtype="complex128")
    assert dtype == "complex128"
    assert_near(got, np.prod(x.astype(complex), axis=0), dtype)


async def test_extremes_of_whole_numbers(device: ta.Device) -> None:
    for name in ("int8", "int64", "uint64"):
        limits = np.iinfo(name)
        x = np.array([limits.min, 5, limits.max, limits.min], name)
        assert (await ask(device, "min", x))[0] == limits.min
        assert (await ask(device, "max", x))[0] == limits.max
        assert (await ask(device, "argmin", x))[0] == 0
        assert (await ask(device, "argmax", x))[0] == 2
        same = np.full(300, limits.max, name)
        assert (await ask(device, "argmin", same))[0] == 0
    # Before they are added, they are floating: int64 would overflow.
    assert (await ask(device, "mean", np.full(8, 2**62)))[0] == 2.0**62


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
async def test_nan_and_infinity(device: ta.Device, name: str) -> None:
    for size in (5, 300):
        for at in (0, 3, size - 1):
            x = numbers((size,), name)
            x[at], x[1] = np.nan, np.inf
            for function in ("min", "max", "mean", "var", "std", "prod", "sum", "logsumexp"):
                assert np.isnan((await ask(device, function, x))[0]), function
            x[size - 1] = np.nan
            for function in ("argmin", "argmax"):
                assert (await ask(device, function, x))[0] == at
            assert (await ask(device, "any", x))[0]
            assert (await ask(device, "count_nonzero", x))[0] == size
    x = numbers((40,), name)
    x[7] = np.inf
    assert (await ask(device, "logsumexp", x))[0] == np.inf
    assert (await ask(device, "max", x))[0] == np.inf
    x[:] = -np.inf
    assert (await ask(device, "logsumexp", x))[0] == -np.inf
    assert (await ask(device, "argmax", x))[0] == 0
    assert not (await ask(device, "any", np.array([0.0, -0.0]).astype(x.dtype)))[0]


async def test_of_nothing(device: ta.Device) -> None:
    x = np.zeros((3, 0, 2), np.float32)
    for function, want in (
        *(("sum", 0), ("prod", 1), ("any", 0), ("all", 1), ("count_nonzero", 0)),
        *(("mean", np.nan), ("var", np.nan), ("std", np.nan)),
    ):
        got, _ = await ask(device, function, x, 1)
        np.testing.assert_array_equal(got, np.full((3, 2), want))
    for function in ("min", "max", "argmin", "argmax", "logsumexp"):
        with pytest.raises(
            ValueError, match=rf"arrays\.{function}: axes \(1,\) of shape \(3, 0, 2\) are empty"
        ):
            await ask(device, function, x, 1)
        assert (await ask(device, function, x, 2 if "arg" in function else (0, 2)))[0].size == 0
    assert (await ask(device, "logsumexp", np.zeros((0, 4)), 1))[0].shape == (0,)


async def test_degrees_of_freedom(device: ta.Device) -> None:
    x = numbers((5, 7), "float32")
    for correction in (0, 1, 1.5, 6):
        got, _ = await ask(device, "var", x, 1, correction=correction, keepdims=True)
        assert_near(got, np.var(x.astype(float), axis=1, ddof=correction, keepdims=True), "float32")
    got, _ = await ask(device, "std", x, 1, correction=7)
    np.testing.assert_array_equal(got, np.full(5, np.inf))
    assert np.isnan((await ask(device, "var", x[:1, :1], correction=1))[0])


async def test_a_variance_far_from_zero(device: ta.Device) -> None:
    rng = np.random.default_rng(8)
    x = (rng.normal(size=(4, 5000)) + 1e4).astype(np.float32)
    assert_near((await ask(device, "var", x, 1))[0], np.var(x.astype(float), axis=1), "float32")
    y = rng.normal(size=5000) + 1e9
    np.testing.assert_allclose((await ask(device, "std", y))[0], np.std(y), rtol=1e-9)
    assert (await ask(device, "var", np.full((3, 1000), 0.1, np.float16), 1))[0].max() == 0
    # The sum is more than float16 holds, the mean is not.
    assert (await ask(device, "mean", np.full(100_000, 6e4, np.float16)))[0] == np.float16(6e4)


@pytest.mark.parametrize("size", SIZES)
async def test_sizes_and_strides(device: ta.Device, size: int) -> None:
    x = numbers((6, size + 3), "float64")
    on = await device.put(x)
    for view, host in (
        *((on[::-2, 3:], x[::-2, 3:]), (on[:, 2:-1].T, x[:, 2:-1].T)),
        (on[1:5, ::-1], x[1:5, ::-1]),
    ):
        for axis in (0, 1, None):
            for function in ("mean", "var", "max", "logsumexp"):
                want = scipy.special.logsumexp if function == "logsumexp" else getattr(np, function)
                got = await getattr(ta.arrays, function)(view, axis)
                np.testing.assert_allclose(await got.to_host(), want(host, axis=axis), rtol=1e-12)


async def test_few_long_rows_are_made_in_steps(device: ta.Device) -> None:
    x = numbers((2, 140_000), "float16")
    for axis, keepdims in ((1, True), (None, False)):
        got, dtype = await ask(device, "var", x, axis, keepdims=keepdims)
        assert dtype == "float16"
        assert_near(got, np.var(x.astype(float), axis=axis, keepdims=keepdims), "float16")
        got, _ = await ask(device, "logsumexp", x, axis, keepdims=keepdims)
        want = scipy.special.logsumexp(x.astype(float), axis=axis, keepdims=keepdims)
        assert_near(got, want, "float16")
    on, out = await device.put(x), await device.zeros(2, "float32")
    assert await ta.arrays.std(on, 1, correction=2, out=out) is out
    assert_near(await out.to_host(), np.std(x.astype(float), axis=1, ddof=2), "float32")
    for shape in ((1, 2), (2, 1), (3,)):
        with pytest.raises(ValueError, match=r"arrays\.std: out must have shape \(2,\), got shape"):
            await ta.arrays.std(on, 1, out=await device.zeros(shape, "float16"))
    message = ta.arrays.std.message(on, 1, correction=2)
    assert_near(await (await device.ask(message)).to_host(), np.std(x.astype(float), axis=1), "float16")


@settings(max_examples=20, deadline=None)
@given(
    shape=st.lists(st.integers(0, 6), max_size=4).map(tuple),
    name=st.sampled_from(["bool", "int16", "float32", "complex128"]),
    function=st.sampled_from(["mean", "var", "prod", "count_nonzero", "all"]),
    keepdims=st.booleans(),
    draw=st.data(),
)
async def test_any_shape(
    shape: tuple[int, ...], name: str, function: str, keepdims: bool, draw: st.DataObject
) -> None:
    axes = draw.draw(st.sets(st.integers(0, len(shape) - 1)) if shape else st.just(set[int]()))
    x, axis = numbers(shape, name), tuple(axes) if draw.draw(st.booleans()) else None
    options = ta.DeviceOptions(isolation="inline")
    async with ta.open_system("any") as system, system.open_device(BACKEND, options=options) as device:
        got, dtype = await ask(device, function, x, axis, keepdims=keepdims)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            # Of no elements.
            warnings.simplefilter("ignore", RuntimeWarning)
            want = getattr(np, function)(wide(x), axis=axis, keepdims=keepdims)
        assert_near(got, want, dtype)


async def test_an_array_to_write_to(device: ta.Device) -> None:
    x = numbers((3, 4), "float32")
    on = await device.put(x)
    for function in ("mean", "var", "max", "logsumexp"):
        for keepdims in (False, True):
            out = await device.zeros((3, 1) if keepdims else 3, "float64")
            assert await getattr(ta.arrays, function)(on, 1, keepdims=keepdims, out=out) is out
            want = await getattr(ta.arrays, function)(on, 1, keepdims=keepdims)
            assert_near(await out.to_host(), wide(await want.to_host()), "float32")
            with pytest.raises(ValueError, match=rf"arrays\.{function}: out must not share memory with x"):
                await getattr(ta.arrays, function)(on, 1, out=on[0, :3])
            with pytest.raises(ValueError, match=rf"arrays\.{function}: out must have shape \(4,\)"):
                await getattr(ta.arrays, function)(on, 0, out=out)
        with pytest.raises(TypeError, match=rf"arrays\.{function}: the result is of float32, which does not"):
            await getattr(ta.arrays, function)(on, 1, out=await device.zeros(3, "int32"))


@pytest.mark.parametrize("shape", [(4, 5, 6), (2, 1, 140_000)])
async def test_a_view_to_write_to(device: ta.Device, shape: tuple[int, ...]) -> None:
    x = numbers(shape, "float32")
    on = await device.put(x)
    for axis, keepdims in ((2, True), (2, False), ((0, 2), True)):
        want = np.var(x.astype(float), axis=axis, keepdims=keepdims)
        whole = await device.zeros((*want.shape[:-1], 3 * want.shape[-1], 2), "float32")
        out = whole[..., ::-3, 1]
        assert await ta.arrays.var(on, axis, keepdims=keepdims, out=out) is out
        assert_near(await out.to_host(), want, "float32")
        assert np.count_nonzero(await whole.to_host()) == want.size


WRITTEN: dict[str, Any] = {
    "transposed": lambda whole: whole.T,
    "backwards": lambda whole: whole.T[::-1, ::-1],
    "every second": lambda whole: whole[:4:2, 1:].T,
}


@pytest.mark.parametrize("layout", WRITTEN)
async def test_views_of_any_strides_to_write_to(device: ta.Device, layout: str) -> None:
    x = numbers((3, 2, 7), "float64")
    on, view = await device.put(x), WRITTEN[layout]
    extents = (4, 4) if layout == "every second" else (2, 3)
    for function in ("sum", "prod", "mean", "max", "argmin", "any", "count_nonzero", "var", "logsumexp"):
        want = await getattr(ta.arrays, function)(on, 2)
        whole = await device.zeros(extents, want.dtype)
        out = view(whole)
        assert out.shape == (3, 2)
        assert await getattr(ta.arrays, function)(on, 2, out=out) is out
        expected = np.zeros(extents, want.dtype.dtype)
        view(expected)[...] = await want.to_host()
        np.testing.assert_array_equal(await whole.to_host(), expected, err_msg=function)


async def test_views_that_repeat_or_overlap_are_not_written_to(device: ta.Device) -> None:
    on = await device.put(numbers((3, 4), "float64"))
    cube = await device.put(numbers((2, 2, 5), "float64"))
    lone, line = await device.zeros(1), await device.zeros(3)
    for function in ("sum", "max", "var"):
        of = getattr(ta.arrays, function)
        with pytest.raises(ValueError, match=rf"arrays\.{function}: out .*(share memory|overlap|repeat)"):
            await of(on, 1, out=ta.arrays.broadcast_to(lone, 3))
        with pytest.raises(ValueError, match=rf"arrays\.{function}: out .*(share memory|overlap|repeat)"):
            await of(cube, 2, out=ta.arrays.sliding_window_view(line, 2))
        for out in (on[:, 0], on[0, :3], on.reshape(-1)[::-5]):
            with pytest.raises(ValueError, match=rf"arrays\.{function}: out must not share memory with x"):
                await of(on, 1, out=out)


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    arrays: Any = ta.arrays
    x, z = await device.zeros((2, 3)), await device.zeros(3, "complex64")
    for function in (arrays.max, arrays.var, arrays.logsumexp):
        for axis in (2, -3, (0, 0)):
            with pytest.raises(ValueError, match=r"arrays\.\w+: axis .* of shape \(2, 3\)"):
                await function(x, axis)
        with pytest.raises(TypeError, match="no operand is on a device"):
            await function(np.zeros(3))
        with pytest.raises(ta.NotSupportedError, match="float8"):
            await function(await device.zeros(3, "float8_e4m3fn"))
        with pytest.raises(TypeError, match=r"arrays\.\w+: there is no option 'axes'; did you mean 'axis'"):
            await function(x, axes=1)
    for function in (arrays.min, arrays.argmax, arrays.logsumexp):
        with pytest.raises(TypeError, match=r"of complex64: complex numbers cannot be compared"):
            await function(z)
    with pytest.raises(TypeError, match=r"arrays\.argmin: axis must be one axis or None"):
        await arrays.argmin(x, (0, 1))
    with pytest.raises(TypeError, match=r"arrays\.max: there is no option 'dtype'"):
        await arrays.max(x, dtype="int8")
    with pytest.raises(TypeError, match=r"mean.* missing .*required .*argument: 'x'"):
        await arrays.mean()
