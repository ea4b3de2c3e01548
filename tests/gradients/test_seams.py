"""Gradients of activations at 0, at their bounds, at infinities and at NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trio_accel as ta

n: Any = ta.nn
a: Any = ta.arrays
POINTS = np.array([
    0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, -6.0, 20.0, -20.0, 1e-30, -1e-30,
    1e30, -1e30, np.inf, -np.inf,
])  # fmt: skip
SMOOTH = (
    "celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "log_sigmoid",
    "mish", "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softshrink", "softsign", "tanhshrink",
)  # fmt: skip
# The limits of slopes other than 0 and 1 at 0.
AT_ZERO = {
    "sigmoid": 0.25,
    "log_sigmoid": 0.5,
    "softplus": 0.5,
    "gelu": 0.5,
    "silu": 0.5,
    "mish": 0.6,
    "selu": None,
    "relu": 0.0,
    "relu6": 0.0,
    "hardsigmoid": 1 / 6,
    "hardswish": 0.5,
    "tanhshrink": 0.0,
}


async def slope(device: ta.Device, f: Any, points: Any) -> Any:
    return await (await ta.grad(lambda x: a.sum(f(x)))(await device.put(points))).to_host()


@pytest.mark.parametrize("name", SMOOTH)
async def test_derived_slopes_match_slopes_by_hand(device: ta.Device, name: str) -> None:
    """The derived gradient is the function `nn` has for it, also where a branch of the expression ends."""
    found = await slope(device, getattr(n, name), POINTS)
    x = await device.put(POINTS)
    want = await (await getattr(n, f"{name}_grad")(await device.put(np.ones_like(POINTS)), x)).to_host()
    np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-30)
    assert np.isfinite(found).all()
    expected = AT_ZERO.get(name)
    if expected is not None:
        np.testing.assert_allclose(found[:2], expected, rtol=1e-12)


@pytest.mark.parametrize("name", SMOOTH)
async def test_slopes_between_the_bounds_match_differences(device: ta.Device, name: str) -> None:
    """A slope is between the differences on both sides of each point."""
    points = POINTS[:12]
    f = getattr(n, name)
    found = await slope(device, f, points)
    values = [await (await f(await device.put(points + h))).to_host() for h in (-1e-6, 0.0, 1e-6)]
    left, right = (values[1] - values[0]) / 1e-6, (values[2] - values[1]) / 1e-6
    low, high = np.minimum(left, right) - 1e-5, np.maximum(left, right) + 1e-5
    assert ((low <= found) & (found <= high)).all(), (points, found, left, right)


@pytest.mark.parametrize(
    "name", ["expit", "log_expit", "sinc", "logaddexp2", "lerp", "xlogy", "entr", "logaddexp"]
)
async def test_slopes_of_functions_with_branches(device: ta.Device, name: str) -> None:
    """At the border of an expression's two branches, the slope is the function's."""
    points = np.array([0.0, 1e-8, -1e-8, 0.05, 1.0, -1.0, 30.0, -700.0])
    functions: dict[str, tuple[Any, Any]] = {
        "expit": (a.expit, 1 / (2 + 2 * np.cosh(points))),
        "log_expit": (a.log_expit, 1 / (1 + np.exp(points))),
        "sinc": (
            a.sinc,
            [0.0, -(np.pi**2) / 3 * 1e-8, np.pi**2 / 3 * 1e-8, -0.164087893, -1.0, 1.0, 1 / 30, -1 / 700],
        ),
        "logaddexp2": (lambda x: a.logaddexp2(x, x * 1.0), np.ones(8)),
        "logaddexp": (lambda x: a.logaddexp(x, x * 1.0), np.ones(8)),
        "lerp": (lambda x: a.lerp(x * 0.0 + 1.0, x * 0.0 + 3.0, x), 2 * np.ones(8)),
        "xlogy": (lambda x: a.xlogy(x, 2.0), np.log(2.0) * np.ones(8)),
        "entr": (lambda x: a.entr(a.abs(x) + 1.0), -np.sign(points) * (np.log(np.abs(points) + 1.0) + 1.0)),
    }
    f, want = functions[name]
    np.testing.assert_allclose(await slope(device, f, points), want, rtol=1e-8 if name == "sinc" else 1e-12)


async def test_nan_stays_nan_or_has_no_slope(device: ta.Device) -> None:
    """The slope of NaN is NaN, or the slope of the branch chosen by a comparison with a bound."""
    for name in SMOOTH:
        found = await slope(device, getattr(n, name), np.array([np.nan]))
        assert np.isnan(found[0]) or 0 <= found[0] <= 1, (name, found)


async def test_equal_elements_have_a_deviation_without_slope(device: ta.Device) -> None:
    """As in PyTorch: the quotient by the deviation would be NaN."""
    x = await device.put(np.array([[2.0, 2.0, 2.0], [1.0, 2.0, 3.0]]))
    found = await (await ta.grad(lambda x: a.sum(a.std(x, axis=1)))(x)).to_host()
    np.testing.assert_allclose(found[0], 0.0)
    np.testing.assert_allclose(found[1], np.array([-1.0, 0.0, 1.0]) / np.sqrt(6.0))


async def test_a_second_where_keeps_nan_out_of_the_gradient(device: ta.Device) -> None:
    """The branch not chosen has the gradient 0 * inf, unless its argument is another one."""
    x = np.array([0.0, 4.0])

    def good(x: Any) -> Any:
        return a.where(x > 0, a.sqrt(a.where(x > 0, x, 1)), 0)

    np.testing.assert_array_equal(await slope(device, good, x), [0.0, 0.25])
    assert np.isnan(await slope(device, lambda x: a.where(x > 0, a.sqrt(x), 0), x)).tolist() == [True, False]


@pytest.mark.parametrize(
    ("text", "points", "want"),
    [
        ("where(x > 0, sqrt(x), 0)", [0.0, 4.0, -4.0], [0.0, 0.25, 0.0]),
        ("where(x < 1, exp(x), x)", [1000.0, 0.0, np.nan], [1.0, 1.0, 1.0]),
        ("t = log(x); where(x > 0, t * t, -1 / x)", [1.0, -2.0, 0.0], [0.0, 0.25, np.inf]),
        ("where(x > 0, where(x > 1, sqrt(x - 1), x * x), exp(-x))", [5.0, 0.5, -800.0], [0.25, 1.0, -np.inf]),
        ("t = sqrt(x); where(x > 0, 3 * t, 0) + where(x > 0, 0, 2)", [0.0, 9.0], [0.0, 0.5]),
        ("where(x > 0, float64(sqrt(x)), 0)", [0.0, 4.0], [0.0, 0.25]),
    ],
)
async def test_an_unchosen_branch_adds_nothing(
    device: ta.Device, text: str, points: list[float], want: list[float]
) -> None:
    """In one expression, an infinite derivative of the other branch is not multiplied by 0."""
    *lines, last = text.split("; ")
    kernel = ta.jit.elementwise("; ".join([*lines, f"y = {last}"]))
    np.testing.assert_array_equal(await slope(device, kernel, np.array(points)), want)


async def test_branches_choose_between_signs_of_zero(device: ta.Device) -> None:
    """A sum with the 0 of the other branch would change the sign."""
    kernel: Any = ta.jit.elementwise("where(x > 0, x, x * 0.5)")
    x = await device.put(np.array([1.0, -1.0]))
    found = await (await ta.grad(lambda x: a.sum(kernel(x) * -0.0))(x)).to_host()
    assert np.signbit(found).all()


@pytest.mark.parametrize(
    "text",
    [
        "minimum(maximum(x, -1), 2)",
        "maximum(-1, minimum(2, x))",
        "minimum(maximum(minimum(maximum(x, -5), 7), low), 2)",
        "clip(x, low, 2)",
        "t = maximum(x, low); s = 0 * x\nfor k in range(3):\n    s = s + minimum(t, 2)\ny = s / 3",
        "s = maximum(x, low)\nfor k in range(3):\n    s = minimum(s, 2)\ny = 1 * s",
    ],
)
async def test_bounds_of_bounds(device: ta.Device, text: str) -> None:
    """The gradient is 0 at both bounds, outside them, and at NaN."""
    kernel: Any = ta.jit.elementwise(text if "y = " in text else f"y = {text}", inputs=None)
    points = np.array([-9.0, -1.0, -0.5, 0.0, 1.5, 2.0, 9.0, np.nan])
    low = {"low": -1.0} if "low" in text else {}
    found = await slope(device, lambda x: kernel(x=x, **low), points)
    np.testing.assert_array_equal(found, [0, 0, 1, 1, 1, 0, 0, 0])


async def test_a_value_between_bounds_may_be_read_twice(device: ta.Device) -> None:
    kernel: Any = ta.jit.elementwise("t = maximum(x, 0); y = minimum(t, 2) + t * t")
    found = await slope(device, kernel, np.array([-1.0, 0.0, 1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(found, [0, 0, 3, 4, 6])


async def test_the_slope_of_expm1_has_all_digits(device: ta.Device) -> None:
    points = np.array([-40.0, -1.0, 1e-9, 3.0])
    np.testing.assert_allclose(await slope(device, a.expm1, points), np.exp(points), rtol=1e-15)
