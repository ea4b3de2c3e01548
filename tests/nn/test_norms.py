"""Normalizations against their formulas in float64, and their gradients against differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from array_numbers import numbers
from differences import gradient, widest

import trio_accel as ta
from trio_accel import nn

SHAPE = (3, 4, 2, 5)
# A result rounded once.
TOLERANCES = {"float16": 6e-4, "bfloat16": 5e-3, "float32": 1e-6, "float64": 1e-12}


def normalized(x: Any, axes: Any, eps: float = 1e-5, is_centred: bool = True) -> Any:
    d = x - x.mean(axes, keepdims=True) if is_centred else x
    return d / np.sqrt((d * d).mean(axes, keepdims=True) + eps)


def spread(x: Any, ndim: int) -> Any:
    return np.reshape(x, (-1, *(1,) * (ndim - 2)))


def group_norm(x: Any, groups: int, weight: Any = 1, bias: Any = 0, eps: float = 1e-5) -> Any:
    apart = x.reshape(len(x), groups, -1)
    y = normalized(apart, -1, eps).reshape(x.shape)
    return y * spread(weight, x.ndim) + spread(bias, x.ndim)


def batch_norm(x: Any, weight: Any = 1, bias: Any = 0, eps: float = 1e-5) -> Any:
    y = normalized(x, (0, *range(2, x.ndim)), eps)
    return y * spread(weight, x.ndim) + spread(bias, x.ndim)


def assert_near(got: Any, want: Any, name: str) -> None:
    tolerance = TOLERANCES[name]
    assert np.shape(got) == np.shape(want)
    np.testing.assert_allclose(widest(got), want, rtol=tolerance, atol=tolerance)


def data(name: str, shape: tuple[int, ...] = SHAPE) -> tuple[Any, Any, Any]:
    channels = shape[1:2]
    return numbers(shape, name), numbers(channels, name, 5), numbers(channels, name, 6)


@pytest.mark.parametrize("isolation", ["inline", "process"])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "int32"])
async def test_forward(device: ta.Device, name: str) -> None:
    x, weight, bias = data(name)
    given = [await device.put(each) for each in (x, weight, bias)]
    wide, made = [widest(each) for each in (x, weight, bias)], "float64" if name == "int32" else name
    for found, want in (
        (await nn.batch_norm_training(*given), batch_norm(*wide)),
        (await nn.instance_norm(*given, eps=0.1), group_norm(wide[0], 4, *wide[1:], eps=0.1)),
        (await nn.group_norm(given[0], 2, *given[1:]), group_norm(wide[0], 2, *wide[1:])),
        (await nn.group_norm(given[0], 1), group_norm(wide[0], 1)),
    ):
        y = found.y if isinstance(found, nn.BatchNormResult) else found
        assert y.dtype == made
        assert_near(await y.to_host(), want, made)


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), SHAPE])
async def test_statistics_of_batches(device: ta.Device, shape: tuple[int, ...]) -> None:
    x, weight, bias = data("float32", shape)
    axes, count = (0, *range(2, x.ndim)), x.size // 4
    on = await device.put(x)
    running = await device.put(np.arange(4.0)), await device.put(np.arange(1.0, 5))
    made = await nn.batch_norm_training(
        on, weight, bias, running_mean=running[0], running_var=running[1], momentum=0.3
    )
    wide = widest(x)
    assert made.mean.dtype == "float32"
    np.testing.assert_allclose(await made.mean.to_host(), wide.mean(axes), rtol=1e-6)
    np.testing.assert_allclose(await made.var.to_host(), wide.var(axes), rtol=1e-6)
    moved = [0.7 * np.arange(4.0) + 0.3 * wide.mean(axes), 0.7 * np.arange(1.0, 5)]
    moved[1] += 0.3 * wide.var(axes) * count / (count - 1)
    for each, want in zip(running, moved, strict=True):
        np.testing.assert_allclose(await each.to_host(), want, rtol=1e-6)
    # The statistics of a batch make the same of it.
    again = await nn.batch_norm(on, made.mean, made.var, weight, bias)
    np.testing.assert_allclose(await again.to_host(), await made.y.to_host(), rtol=1e-5, atol=1e-6)
    half = await nn.batch_norm_training(await device.put(x.astype("f2")))
    assert (half.y.dtype, half.mean.dtype) == ("float16", "float32")


async def test_few_long_rows(device: ta.Device) -> None:
    x = numbers((2, 3, 140_000), "float32")
    on = await device.put(x)
    found = await (await nn.instance_norm(on)).to_host()
    assert_near(found, normalized(widest(x), 2), "float32")
    made = await nn.batch_norm_training(on)
    assert_near(await made.y.to_host(), batch_norm(widest(x)), "float32")


def want_of(function: str, x: Any, weight: Any, bias: Any) -> Any:
    if function == "batch_norm_training":
        return batch_norm(x, weight, bias)
    return group_norm(x, 4 if function == "instance_norm" else 2, weight, bias)


@pytest.mark.parametrize("function", ["batch_norm_training", "instance_norm", "group_norm"])
async def test_gradients_by_channel(device: ta.Device, function: str) -> None:
    x, weight, bias = data("float64")
    grad = numbers(SHAPE, "float64", 7)
    more = (2,) if function == "group_norm" else ()
    call: Any = getattr(nn, f"{function}_grad")
    found = await call(await device.put(grad), await device.put(x), *more, weight)
    for got, want in (
        (found.x, gradient(lambda each: want_of(function, each, weight, bias), x, grad)),
        (found.weight, gradient(lambda each: want_of(function, x, each, bias), weight, grad)),
        (found.bias, gradient(lambda each: want_of(function, x, weight, each), bias, grad)),
    ):
        np.testing.assert_allclose(await got.to_host(), want, rtol=1e-6, atol=1e-8)
    plain = await call(await device.put(grad), x, *more)
    want = gradient(lambda each: want_of(function, each, 1, 0), x, grad)
    np.testing.assert_allclose(await plain.x.to_host(), want, rtol=1e-6, atol=1e-8)
    for name in ("float16", "float32"):
        narrow, wide = [(grad.astype(name), x.astype(name)), (widest(grad.astype(name)), x.astype(name))]
        low = await call(await device.put(narrow[0]), narrow[1], *more, weight.astype(name))
        high = await call(await device.put(wide[0]), widest(wide[1]), *more, widest(weight.astype(name)))
        for got, expected in zip(low, high, strict=True):
            assert got.dtype == name
            assert_near(await got.to_host(), await expected.to_host(), name)


@pytest.mark.parametrize("shape", [(3, 5), (5,), (4, 1, 5), (4, 3, 5)])
@pytest.mark.parametrize("axis", [-1, (0, -1), None])
async def test_gradients_of_layers(device: ta.Device, axis: Any, shape: tuple[int, ...]) -> None:
    x, grad, weight = (
        numbers((4, 3, 5), "float64"),
        numbers((4, 3, 5), "float64", 7),
        numbers(shape, "float64", 8),
    )
    axes = tuple(range(3)) if axis is None else axis
    on, g, w = [await device.put(each) for each in (x, grad, weight)]
    layer = await nn.layer_norm_grad(g, on, w, axis=axis)
    rms = await nn.rms_norm_grad(g, on, w, axis=axis)
    for got, want in (
        (layer.x, gradient(lambda each: normalized(each, axes) * weight, x, grad)),
        (layer.weight, gradient(lambda each: normalized(x, axes) * each, weight, grad)),
        (layer.bias, gradient(lambda each: x * 0 + each, weight, grad)),
        (rms.x, gradient(lambda each: normalized(each, axes, 1e-6, False) * weight, x, grad)),
        (rms.weight, gradient(lambda each: normalized(x, axes, 1e-6, False) * each, weight, grad)),
    ):
        assert got.shape == want.shape
        np.testing.assert_allclose(await got.to_host(), want, rtol=1e-6, atol=1e-8)


async def test_gradients_of_layers_without_factors(device: ta.Device) -> None:
    x, grad = numbers((4, 3, 5), "float64"), numbers((4, 3, 5), "float64", 7)
    found = await nn.layer_norm_grad(await device.put(grad), await device.put(x), axis=(1, 2))
    want = gradient(lambda each: normalized(each, (1, 2)), x, grad)
    np.testing.assert_allclose(await found.x.to_host(), want, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(
        await found.weight.to_host(), (grad * normalized(x, (1, 2))).sum(0), rtol=1e-12
    )
    np.testing.assert_allclose(await found.bias.to_host(), grad.sum(0), rtol=1e-12)


async def test_gradients_of_layers_are_along_the_last_axis_by_default(device: ta.Device) -> None:
    x, grad = numbers((4, 3, 5), "float64"), numbers((4, 3, 5), "float64", 7)
    on, g = await device.put(x), await device.put(grad)
    layer, rms = await nn.layer_norm_grad(g, on), await nn.rms_norm_grad(g, on)
    for got, want in (
        (layer.x, gradient(lambda each: normalized(each, -1), x, grad)),
        (rms.x, gradient(lambda each: normalized(each, -1, 1e-6, False), x, grad)),
    ):
        np.testing.assert_allclose(await got.to_host(), want, rtol=1e-6, atol=1e-8)


async def test_launches(device: ta.Device) -> None:
    x = await device.put(np.ones((4, 6, 3), np.float32))
    w, v = [await device.put(np.ones(6, np.float32)) for _ in range(2)]
    for call, count in [
        (lambda: nn.batch_norm(x, w, w), 1),
        (lambda: nn.batch_norm_training(x), 3),
        (lambda: nn.batch_norm_training(x, running_mean=w, running_var=v), 4),
        (lambda: nn.instance_norm(x, w), 1),
        (lambda: nn.group_norm(x, 3, w, w), 1),
        (lambda: nn.batch_norm_training_grad(x, x, w), 3),
        (lambda: nn.group_norm_grad(x, x, 3, w), 4),
        (lambda: nn.layer_norm_grad(x, x), 4),
        (lambda: nn.rms_norm_grad(x, x), 3),
    ]:
        before = (await device.statistics()).launched
        await call()
        assert (await device.statistics()).launched - before == count


async def test_in_place_and_elsewhere(device: ta.Device) -> None:
    x, weight, bias = data("float64")
    for function, more in ((nn.instance_norm, ()), (nn.group_norm, (2,))):
        call: Any = function
        on = await device.put(x)
        assert await call(on, *more, weight, bias, out=on) is on
        want = group_norm(x, 2 if more else 4, weight, bias)
        np.testing.assert_allclose(await on.to_host(), want, rtol=1e-12, atol=1e-12)
        turned = (await device.empty(SHAPE[::-1])).T
        assert await call(await device.put(x), *more, weight, bias, out=turned) is turned
        np.testing.assert_allclose(await turned.to_host(), want, rtol=1e-12, atol=1e-12)


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    call: Any = nn
    x, w = await device.zeros(SHAPE), await device.zeros(4)
    cases = (
        (lambda: call.batch_norm(x, w[:3], w), ValueError, r"running_mean must have shape \(4,\)"),
        (lambda: call.batch_norm(x, 0, 1), TypeError, "running_mean must be an AccelRef"),
        (lambda: call.batch_norm(x, w, w, eps=-1), ValueError, "eps must be from 0 below inf, got -1"),
        (lambda: call.batch_norm(w, w, w), ValueError, r"batch_norm: x must have shape \(N, C\), got shape"),
        (lambda: call.batch_norm_training(x, running_mean=w), ValueError, "must be given together"),
        (lambda: call.batch_norm_training(x[:1, :, 0, 0]), ValueError, "must have two elements at least"),
        (lambda: call.batch_norm_training(x, momentum=1.5), ValueError, "momentum must be from 0 up to 1"),
        (lambda: call.instance_norm(x[:, :, 0, 0]), ValueError, r"x must have shape \(N, C, ...\)"),
        (lambda: call.instance_norm(x, 1j), TypeError, "instance_norm: weight must be real"),
        (lambda: call.group_norm(x, 3), ValueError, "must divide the 4 channels of x, got 3"),
        (lambda: call.group_norm(x, 2.0), TypeError, "num_groups must be an integer"),
        (lambda: call.group_norm(x, 2, out=w), ValueError, r"group_norm: out must have shape \(3, 4, 2, 5\)"),
        (lambda: call.group_norm_grad(w, x, 2), ValueError, "group_norm_grad: grad must have the shape"),
        (lambda: call.layer_norm_grad(x, x, w), ValueError, r"weight of shape \(4,\) does not broadcast"),
        (lambda: call.layer_norm_grad(x, x, axis=4), ValueError, "layer_norm_grad: axis 4 is not there"),
        (lambda: call.rms_norm_grad(x, x, eps="a"), TypeError, "eps must be a real number, got 'a'"),
    )
    for asked, error, match in cases:
        with pytest.raises(error, match=match):
            await asked()
