"""Normalizations of `ta.arrays`: against NumPy and SciPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.special
from array_numbers import INEXACT, REALS, numbers, wide
from chosen import BACKEND
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta

# A result rounded once; float32 next to the errors of its exponentials.
ROUNDED = {"float16": 6e-4, "bfloat16": 5e-3, "float32": 2e-6, "complex64": 1e-7}


def assert_near(got: Any, want: Any, name: str) -> None:
    tolerance = ROUNDED.get(name, 1e-12)
    assert np.shape(got) == np.shape(want)
    np.testing.assert_allclose(wide(got), want, rtol=tolerance, atol=tolerance * 1e-2)


def layer_norm(x: Any, weight: Any = 1, bias: Any = 0, axis: Any = -1, eps: float = 1e-5) -> Any:
    mean, var = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
    return (x - mean) / np.sqrt(var + eps) * weight + bias


def rms_norm(x: Any, weight: Any = 1, axis: Any = -1, eps: float = 1e-6) -> Any:
    return x / np.sqrt(np.mean(np.abs(x) ** 2, axis=axis, keepdims=True) + eps) * weight


def cosine(x: Any, y: Any, axis: Any = -1, keepdims: bool = False) -> Any:
    inner = np.sum(x.conj() * y, axis=axis, keepdims=keepdims)
    norms = [np.sqrt(np.sum(np.abs(each) ** 2, axis=axis, keepdims=keepdims)) for each in (x, y)]
    return inner / (np.maximum(norms[0], 1e-8) * np.maximum(norms[1], 1e-8))


WANTED = {
    "softmax": scipy.special.softmax,
    "log_softmax": scipy.special.log_softmax,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
}


@pytest.mark.parametrize("function", WANTED)
@pytest.mark.parametrize("name", REALS)
async def test_every_dtype(device: ta.Device, name: str, function: str) -> None:
    x = numbers((3, 40, 5), name)
    on = await device.put(x)
    for axis in (None, 1, -1, (0, 2)):
        found = await getattr(ta.arrays, function)(on, axis=axis)
        assert found.dtype == INEXACT[name]
        assert_near(await found.to_host(), WANTED[function](wide(x), axis=axis), found.dtype.value)


@pytest.mark.parametrize("name", ["complex64", "complex128"])
async def test_complex_numbers(device: ta.Device, name: str) -> None:
    x, y = numbers((4, 40), name), numbers((40,), name, seed=4)
    on, other = await device.put(x), await device.put(y)
    for function in ("layer_norm", "rms_norm"):
        found = await getattr(ta.arrays, function)(on, other)
        assert found.dtype == name
        assert_near(await found.to_host(), WANTED[function](wide(x), wide(y)), name)
    found = await ta.arrays.cosine_similarity(on, other)
    assert found.dtype == name
    assert_near(await found.to_host(), cosine(wide(x), wide(y)), name)
    with pytest.raises(TypeError, match=r"arrays\.softmax: max of complex"):
        await ta.arrays.softmax(on)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 255, 256, 257, 1024, 1025, 3000])
async def test_sizes_and_strides(device: ta.Device, size: int) -> None:
    x = numbers((6, size + 3), "float64")
    on = await device.put(x)
    for view, host in (
        *((on[::-2, 3:], x[::-2, 3:]), (on[:, 2:-1].T, x[:, 2:-1].T)),
        (on[1:5, ::-1], x[1:5, ::-1]),
    ):
        for function, axis in (("softmax", 0), ("log_softmax", 1), ("layer_norm", 0), ("rms_norm", None)):
            found = await getattr(ta.arrays, function)(view, axis=axis)
            assert_near(await found.to_host(), WANTED[function](host, axis=axis), "float64")


@pytest.mark.parametrize("shape", [(2, 140_000), (300, 500), (3, 90, 1000), (1000, 60)])
async def test_large_arrays(device: ta.Device, shape: tuple[int, ...]) -> None:
    x = numbers(shape, "float32")
    on = await device.put(x)
    for function, want in WANTED.items():
        for axis in (1, -1):
            found = await getattr(ta.arrays, function)(on, axis=axis)
            assert_near(await found.to_host(), want(x.astype(float), axis=axis), "float32")


async def test_sums_that_float16_does_not_hold(device: ta.Device) -> None:
    x = await device.zeros((2, 140_000), "float16")
    for axis in (1, None):
        size = 140_000 if axis else 280_000
        found = await ta.arrays.softmax(x, axis)
        np.testing.assert_array_equal(await found.to_host(), np.full((2, 140_000), np.float16(1 / size)))
    on = await device.put(np.full((3, 300), 6e4, np.float16))
    np.testing.assert_allclose(await (await ta.arrays.rms_norm(on)).to_host(), 1, rtol=1e-3)
    np.testing.assert_allclose(await (await ta.arrays.cosine_similarity(on, on)).to_host(), 1, rtol=1e-3)
    one_launch = await device.ask(ta.arrays.softmax.message(x, 1))
    np.testing.assert_array_equal(await one_launch.to_host(), np.full((2, 140_000), np.float16(1 / 140_000)))


async def test_weights_and_numbers(device: ta.Device) -> None:
    x, weight, bias = (
        numbers((5, 6, 7), "float32"),
        numbers((7,), "float32", 5),
        numbers((6, 1), "float64", 6),
    )
    on, w, b = [await device.put(each) for each in (x, weight, bias)]
    found = await ta.arrays.layer_norm(on, w, b, eps=0.5)
    assert found.dtype == "float64"
    want = layer_norm(x.astype(float), weight.astype(float), bias, eps=0.5)
    np.testing.assert_allclose(await found.to_host(), want, rtol=1e-12)
    found = await ta.arrays.layer_norm(on, 2, np.float32(3), axis=(0, 1))
    assert found.dtype == "float32"
    assert_near(await found.to_host(), layer_norm(x.astype(float), 2, 3, (0, 1)), "float32")
    found = await ta.arrays.layer_norm(on, eps=np.float64(1e-5))
    assert found.dtype == "float32"
    # The result has the broadcast shape.
    found = await ta.arrays.rms_norm(w, on)
    assert_near(await found.to_host(), rms_norm(np.broadcast_to(weight.astype(float), x.shape), x), "float32")


async def test_cosines(device: ta.Device) -> None:
    x, y = numbers((50, 1, 64), "float32"), numbers((20, 64), "float32", 4)
    on, other = await device.put(x), await device.put(y)
    found = await ta.arrays.cosine_similarity(on, other)
    assert (found.shape, found.dtype) == ((50, 20), "float32")
    assert_near(await found.to_host(), cosine(x.astype(float), y.astype(float)), "float32")
    found = await ta.arrays.cosine_similarity(on, other, (0, 1), keepdims=True)
    whole = np.broadcast_to(x.astype(float), (50, 20, 64)), np.broadcast_to(y.astype(float), (50, 20, 64))
    assert_near(await found.to_host(), cosine(*whole, (0, 1), keepdims=True), "float32")
    nothing = await ta.arrays.cosine_similarity(await device.zeros(4), await device.put(np.ones(4)))
    assert await nothing.item() == 0
    same = await ta.arrays.cosine_similarity(on, on)
    np.testing.assert_allclose(await same.to_host(), 1, rtol=1e-6)


async def test_nan_and_infinity(device: ta.Device) -> None:
    x = numbers((6, 40), "float32")
    x[1, 3], x[2, 4], x[3, :], x[4, 7], x[5, ::2] = np.nan, np.inf, -np.inf, -np.inf, 1e30
    on = await device.put(x)
    with np.errstate(all="ignore"):
        want = scipy.special.softmax(x, axis=1)
    np.testing.assert_allclose(await (await ta.arrays.softmax(on, 1)).to_host(), want, rtol=1e-6)
    found = await (await ta.arrays.log_softmax(on, 1)).to_host()
    assert np.isnan(found[1:4]).all()
    assert found[4, 7] == -np.inf
    assert np.isfinite(found[[0]]).all()


async def test_in_place_and_elsewhere(device: ta.Device) -> None:
    for shape in ((5, 300), (1, 140_000)):
        x = numbers(shape, "float32")
        on, want = await device.put(x), scipy.special.softmax(x.astype(float), axis=1)
        wider = await device.zeros(shape, "float64")
        assert await ta.arrays.softmax(on, 1, out=wider) is wider
        assert_near(await wider.to_host(), want, "float32")
        part = (await device.zeros((shape[1], 2 * shape[0]), "float32"))[:, ::2].T
        await ta.arrays.softmax(on, 1, out=part)
        assert_near(await part.to_host(), want, "float32")
        with pytest.raises(ValueError, match=r"arrays\.softmax: out must not share memory with x"):
            await ta.arrays.softmax(on, 1, out=on[:, ::-1])
        assert await ta.arrays.softmax(on, 1, out=on) is on
        assert_near(await on.to_host(), want, "float32")
        with pytest.raises(TypeError, match=r"arrays\.softmax: the result is of float32, which does not"):
            await ta.arrays.softmax(on, 1, out=await device.zeros(shape, "int32"))
    with pytest.raises(ValueError, match=r"arrays\.softmax: out must have shape \(1, 140000\)"):
        await ta.arrays.softmax(on, 1, out=await device.zeros(3, "float32"))


async def test_of_nothing(device: ta.Device) -> None:
    for shape in ((0, 4), (4, 0), (0,), (0, 140_000)):
        x = await device.zeros(shape)
        for function in WANTED:
            assert (await getattr(ta.arrays, function)(x, axis=-1)).shape == shape
    found = await ta.arrays.cosine_similarity(await device.zeros((2, 0)), await device.zeros((2, 0)))
    np.testing.assert_array_equal(await found.to_host(), [0, 0])
    alone = await device.put(np.array(3.0))
    assert await (await ta.arrays.softmax(alone)).item() == 1


async def test_in_a_graph(device: ta.Device) -> None:
    x = numbers((5, 300), "float32")
    if "graphs" not in device.libraries:
        pytest.skip("the backend has no graphs")

    async def step(x: ta.AccelRef) -> ta.AccelRef:
        return await ta.arrays.softmax(x, 1)

    graph = await ta.graphs.capture(device, step, await device.put(x))
    y = np.ascontiguousarray(x[::-1])
    found = await graph(await device.put(y))
    assert_near(await found.to_host(), scipy.special.softmax(y.astype(float), axis=1), "float32")


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    arrays: Any = ta.arrays
    x = await device.zeros((2, 3))
    with pytest.raises(ValueError, match=r"arrays\.layer_norm: the shapes .* do not broadcast to one"):
        await arrays.layer_norm(x, await device.zeros(4))
    for axis in (2, (0, 0)):
        with pytest.raises(ValueError, match=r"arrays\.softmax: axis .* of shape \(2, 3\)"):
            await arrays.softmax(x, axis)
    with pytest.raises(TypeError, match=r"arrays\.rms_norm: eps must be a number or an array, got str"):
        await arrays.rms_norm(x, eps="small")
    with pytest.raises(TypeError, match=r"arrays\.softmax: there is no option 'dim'"):
        await arrays.softmax(x, dim=1)
    long = await device.zeros(140_000)
    with pytest.raises(TypeError, match=r"arrays\.rms_norm: eps must be a number or an array, got str"):
        await arrays.rms_norm(long, eps="small")
    with pytest.raises(ta.NotSupportedError, match="float8"):
        await arrays.softmax(await device.zeros(140_000, "float8_e5m2"))


@settings(max_examples=20, deadline=None)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple),
    function=st.sampled_from(list(WANTED)),
    draw=st.data(),
)
async def test_any_shape(shape: tuple[int, ...], function: str, draw: st.DataObject) -> None:
    axes = tuple(draw.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    order = draw.draw(st.permutations(range(len(shape))))
    x = numbers(shape, "float64", seed=draw.draw(st.integers(0, 99)))
    options = ta.DeviceOptions(isolation="inline")
    async with ta.open_system("any") as system, system.open_device(BACKEND, options=options) as device:
        turned = np.ascontiguousarray(x.transpose(order))
        on = await device.put(turned)
        place = [order.index(axis) for axis in axes]
        found = await (await getattr(ta.arrays, function)(on, axis=place)).to_host()
        want = WANTED[function](x, axis=axes).transpose(order)
        np.testing.assert_allclose(found, want, rtol=1e-11, atol=1e-12)
