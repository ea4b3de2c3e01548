"""Activations against their formulas in float64, and their gradients against differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from array_numbers import numbers
from chosen import BACKEND
from differences import gradient, widest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

import trio_accel as ta
from trio_accel import nn

TOLERANCES = {"float16": 6e-4, "bfloat16": 4e-3, "float32": 2e-6, "float64": 1e-13}


def gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "none":
        return x * special.ndtr(x)
    return x * special.expit(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


def glu(x: Any, axis: int = -1) -> Any:
    first, second = np.split(x, 2, axis)
    return first * special.expit(second)


def celu(x: Any, alpha: float = 1.0) -> Any:
    return np.maximum(x, 0) + np.minimum(0, alpha * np.expm1(x / alpha))


def elu(x: Any, alpha: float = 1.0) -> Any:
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def softplus(x: Any, beta: float = 1.0) -> Any:
    return np.logaddexp(0, beta * x) / beta


SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
WANTED: dict[str, Callable[..., Any]] = {
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "leaky_relu": lambda x, negative_slope=0.01: np.where(x > 0, x, x * negative_slope),
    "elu": elu,
    "selu": lambda x: SELU[1] * elu(x, SELU[0]),
    "celu": celu,
    "gelu": gelu,
    "silu": lambda x: x * special.expit(x),
    "mish": lambda x: x * np.tanh(softplus(x)),
    "softplus": softplus,
    "softsign": lambda x: x / (1 + np.abs(x)),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0: np.clip(x, min_val, max_val),
    "hardsigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "sigmoid": special.expit,
    "log_sigmoid": special.log_expit,
    "tanhshrink": lambda x: x - np.tanh(x),
    "glu": glu,
    "threshold": lambda x, threshold=0.0, value=0.0: np.where(x > threshold, x, value),
    "hardshrink": lambda x, lambd=0.5: np.where(np.abs(x) <= lambd, 0, x),
    "softshrink": lambda x, lambd=0.5: np.sign(x) * np.maximum(np.abs(x) - lambd, 0),
    "prelu": lambda x, weight=0.25: np.where(x > 0, x, x * weight),
}
# Functions without numbers of their own.
NEEDED = {"threshold": {"threshold": 1.0, "value": -2.0}, "prelu": {"weight": 0.25}}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, NEEDED.get(name, {})) for name in WANTED),
    ("hardshrink", {"lambd": 2.0}),
    ("softshrink", {"lambd": 2.0}),
    ("leaky_relu", {"negative_slope": 0.3}),
    ("elu", {"alpha": 0.5}),
    ("celu", {"alpha": 2.5}),
    ("gelu", {"approximate": "tanh"}),
    ("softplus", {"beta": 3.0}),
    ("hardtanh", {"min_val": -0.5, "max_val": 2.0}),
    ("glu", {"axis": 0}),
]
each_function = pytest.mark.parametrize(
    ("function", "options"), OPTIONS, ids=[f"{name}-{'-'.join(options)}" for name, options in OPTIONS]
)


def assert_near(got: Any, want: Any, name: str) -> None:
    tolerance = TOLERANCES[name]
    np.testing.assert_allclose(widest(got), want, rtol=tolerance, atol=tolerance / 10)


@each_function
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
async def test_every_dtype(device: ta.Device, name: str, function: str, options: dict[str, Any]) -> None:
    x = (numbers((4, 50), name) * 4).astype(ta.DType(name).dtype)
    on, call = await device.put(x), getattr(nn, function)
    found = await call(on, **options)
    assert found.dtype == name
    want = WANTED[function](widest(x), **options)
    assert found.shape == want.shape
    assert_near(await found.to_host(), want, name)
    elsewhere = await device.empty(want.shape, name)
    assert await call(on, **options, out=elsewhere) is elsewhere
    np.testing.assert_array_equal(widest(await elsewhere.to_host()), widest(await found.to_host()))


def smooth(function: str, shape: tuple[int, ...], seed: int = 3) -> Any:
    """Numbers near the kinks of a function."""
    x = np.random.default_rng(seed).normal(size=shape) * 3
    kinks = (-3.0, -1.0, -0.5, 0.0, 1.0, 2.0, 3.0, 6.0)
    return np.where(np.min([np.abs(x - kink) for kink in kinks], axis=0) < 1e-3, x + 0.01, x)


@each_function
async def test_gradients_match_differences(device: ta.Device, function: str, options: dict[str, Any]) -> None:
    x = smooth(function, (6, 10))
    value = WANTED[function](x, **options)
    grad = numbers(value.shape, "float64", 5)
    found = await getattr(nn, f"{function}_grad")(await device.put(grad), await device.put(x), **options)
    assert (found.shape, found.dtype) == (x.shape, "float64")
    if function == "glu":
        want = gradient(lambda moved: glu(moved, **options), x, grad)
    else:
        ahead, behind = [WANTED[function](x + step, **options) for step in (1e-5, -1e-5)]
        want = grad * (ahead - behind) / 2e-5
    np.testing.assert_allclose(await found.to_host(), want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("function", [*WANTED, "tanh"])
async def test_gradients_of_narrow_dtypes_match_float64(device: ta.Device, name: str, function: str) -> None:
    x = smooth(function, (4, 50)).astype(ta.DType(name).dtype)
    grad = numbers((4, 25 if function == "glu" else 50), name, 5)
    call = getattr(nn, f"{function}_grad")
    found = await call(await device.put(grad), await device.put(x), **NEEDED.get(function, {}))
    assert found.dtype == name
    want = await call(await device.put(widest(grad)), widest(x), **NEEDED.get(function, {}))
    assert_near(await found.to_host(), await want.to_host(), name)


async def test_tanh_and_the_softmaxes(device: ta.Device) -> None:
    x, grad = smooth("tanh", (3, 4, 5)), numbers((3, 4, 5), "float64", 5)
    on, g = await device.put(x), await device.put(grad)
    found = await nn.tanh_grad(g, on)
    np.testing.assert_allclose(await found.to_host(), grad / np.cosh(x) ** 2, rtol=1e-12)
    for function, want in (
        (nn.softmax_grad, special.softmax),
        (nn.log_softmax_grad, special.log_softmax),
    ):
        for axis in (None, 1, -1, (0, 2)):
            got = await (await function(g, on, axis)).to_host()
            expected = gradient(lambda moved, f=want, a=axis: f(moved, axis=a), x, grad)
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8)
    half = await nn.softmax_grad(await device.put(grad.astype("f2")), await device.put(x.astype("f2")), 1)
    assert half.dtype == "float16"


@pytest.mark.parametrize("function", [nn.softmax_grad, nn.log_softmax_grad])
@pytest.mark.parametrize("number", [1e300, 1.0, -1, True, 10**400, np.float32(2), np.nan])
async def test_the_gradients_of_softmaxes_take_no_numbers(
    device: ta.Device, function: Any, number: Any
) -> None:
    for name in ("float32", "float64"):
        x = await device.put(numbers((4, 4), name, 4))
        with pytest.raises(TypeError, match=rf"nn\.{function.__name__}: grad must be an AccelRef or a NumPy"):
            await function(number, x)
    assert device.generation == 1


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
async def test_large_elements(device: ta.Device, name: str) -> None:
    most = float(np.finfo(name).max) / 8
    x = np.array([-most, -1000, -100, -89, 100, 1000, most], name)
    on, ones = await device.put(x), await device.put(np.ones(7, name))
    wide = widest(x)
    with np.errstate(all="ignore"):
        for function, want in WANTED.items():
            if function == "glu":
                continue
            options = NEEDED.get(function, {})
            for made in (
                await getattr(nn, function)(on, **options),
                await getattr(nn, f"{function}_grad")(ones, on, **options),
            ):
                assert np.isfinite(widest(await made.to_host())).all(), function
            got = widest(await (await getattr(nn, function)(on, **options)).to_host())
            expected = want(wide, **options).astype(name).astype(float)
            finite = np.isfinite(expected)
            np.testing.assert_allclose(
                got[finite], expected[finite], rtol=TOLERANCES[name] * 4, atol=1e-37, err_msg=function
            )
    got = await (await nn.gelu_grad(ones, on, "tanh")).to_host()
    np.testing.assert_array_equal(got, [0, 0, 0, 0, 1, 1, 1])
    got = await (await nn.tanh_grad(ones, on)).to_host()
    assert np.isfinite(got).all()


async def test_nan_stays(device: ta.Device) -> None:
    x = await device.put(np.full((2, 2), np.nan))
    for function in WANTED:
        found = await getattr(nn, function)(x, **NEEDED.get(function, {}))
        assert np.isnan(await found.to_host()).all(), function


async def test_whole_numbers_and_numbers(device: ta.Device) -> None:
    x = await device.put(np.arange(-3, 9, dtype=np.int8))
    for function, dtype in (("relu", "int8"), ("relu6", "int8"), ("silu", "float64"), ("elu", "float64")):
        found = await getattr(nn, function)(x)
        assert found.dtype == dtype
        want = WANTED[function](np.arange(-3.0, 9))
        np.testing.assert_allclose(widest(await found.to_host()), want, rtol=1e-13)
    on = await device.put(np.ones(3, np.float32))
    assert (await nn.leaky_relu(on, np.float64(0.1))).dtype == "float32"
    broad = await nn.relu_grad(np.float32(2), on)
    np.testing.assert_array_equal(await broad.to_host(), [2, 2, 2])
    assert await nn.relu(on, out=on) is on
    message = nn.elu.message(on, alpha=2.0)
    assert (await device.ask(message)).shape == (3,)


async def test_each_is_one_launch(device: ta.Device) -> None:
    x = await device.put(np.ones((4, 6), np.float32))
    for call in (
        nn.gelu(x),
        nn.gelu_grad(x, x, "tanh"),
        nn.mish_grad(x, x),
        nn.glu(x),
        nn.softmax_grad(x, x, 1),
    ):
        before = (await device.statistics()).launched
        await call
        assert (await device.statistics()).launched == before + 1


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    call: Any = nn
    x = await device.zeros((3, 3))
    with pytest.raises(ValueError, match=r"nn\.gelu: approximate must be 'none' or 'tanh', got 'erf'"):
        await call.gelu(x, "erf")
    with pytest.raises(ValueError, match=r"nn\.gelu_grad: approximate must be 'none' or 'tanh', got 'erf'"):
        await call.gelu_grad(x, x, "erf")
    with pytest.raises(ValueError, match=r"nn\.glu: axis 1 must have an even number of elements"):
        await call.glu(x, 1)
    with pytest.raises(TypeError, match=r"nn\.glu: out must be an AccelRef, got int"):
        await call.glu(x[:, :2], out=3)
    with pytest.raises(ValueError, match=r"nn\.glu: axis 2 is not there in an array of shape \(3, 3\)"):
        await call.glu(x, 2)
    with pytest.raises(TypeError, match=r"nn\.glu: x must be an AccelRef or a NumPy array, got int"):
        await call.glu(3)
    with pytest.raises(ValueError, match=r"nn\.glu_grad: grad must have shape \(4, 1\), got shape \(4,\)"):
        await call.glu_grad(await device.zeros(4), await device.zeros((4, 2)))
    with pytest.raises(TypeError, match=r"nn\.elu: there is no option 'slope'"):
        await call.elu(x, slope=1.0)
    with pytest.raises(TypeError, match=r"nn\.silu: "):
        await call.silu(await device.zeros(3, "complex64"))
    with pytest.raises(ValueError, match=r"nn\.relu_grad: the shapes .* do not broadcast"):
        await call.relu_grad(await device.zeros(4), x)
    with pytest.raises(ta.NotSupportedError, match="float8"):
        await call.sigmoid(await device.zeros(3, "float8_e5m2"))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([name for name in WANTED if name != "glu"]),
    st.lists(st.floats(-700, 700), min_size=1, max_size=20),
)
async def test_any_numbers(function: str, elements: list[float]) -> None:
    options = ta.DeviceOptions(isolation="inline")
    async with ta.open_system("any") as system, system.open_device(BACKEND, options=options) as device:
        x = np.array(elements)
        given = NEEDED.get(function, {})
        found = await (await getattr(nn, function)(await device.put(x), **given)).to_host()
        np.testing.assert_allclose(found, WANTED[function](x, **given), rtol=1e-11, atol=1e-15)
