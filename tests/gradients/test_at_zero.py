"""Gradients at places where a formula divides by zero, has a tie, or computes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trio_accel as ta

a: Any = ta.arrays


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def second_softplus(x: Any) -> Any:
    return sigmoid(x) * sigmoid(-x)


def second_silu(x: Any) -> Any:
    return second_softplus(x) * (2 + x * (sigmoid(-x) - sigmoid(x)))


def second_mish(x: Any) -> Any:
    t, s, slope = np.tanh(np.log1p(np.exp(x))), sigmoid(x), second_softplus(x)
    of_t = 1 - t * t
    return 2 * of_t * s + x * (of_t * slope - 2 * t * of_t * s * s)


SECOND = {
    "softplus": (ta.nn.softplus, second_softplus),
    "log_sigmoid": (ta.nn.log_sigmoid, lambda x: -second_softplus(x)),
    "log_expit": (a.log_expit, lambda x: -second_softplus(x)),
    "silu": (ta.nn.silu, second_silu),
    "mish": (ta.nn.mish, second_mish),
    "logaddexp": (lambda x: a.logaddexp(x, 0 * x), second_softplus),
    "logaddexp2": (
        lambda x: a.logaddexp2(x, 0 * x),
        lambda x: np.log(2) * second_softplus(x * np.log(2)),
    ),
    "binary_cross_entropy_with_logits": (
        lambda x: ta.nn.binary_cross_entropy_with_logits(x, np.full(3, 0.5), reduction="none"),
        second_softplus,
    ),
    "soft_margin_loss": (
        lambda x: ta.nn.soft_margin_loss(x, np.ones(3), reduction="none"),
        second_softplus,
    ),
}
"""Functions, and their second derivatives by formulas."""


@pytest.mark.parametrize("name", SECOND)
async def test_second_derivatives_at_zero(device: ta.Device, name: str) -> None:
    function, second = SECOND[name]
    host = np.array([0.0, -0.7, 1.3])
    x = await device.put(host)
    found = await ta.grad(lambda x: a.sum(ta.grad(lambda x: a.sum(function(x)))(x)))(x)
    np.testing.assert_allclose(await found.to_host(), second(host), rtol=1e-10)


async def test_equal_infinities_share_the_gradient(device: ta.Device) -> None:
    x, y = [await device.put(np.array([np.inf, -np.inf])) for _ in range(2)]
    for function in (a.logaddexp, a.logaddexp2):
        found = await ta.grad(lambda x, y, f=function: a.sum(f(x, y)), argnums=(0, 1))(x, y)
        for one in found:
            assert (await one.to_host()).tolist() == [0.5, 0.5]


UNUSED = {
    "two conditions": (
        "d = sqrt(x)\nf = 0.0\nif d > 1.5: f = d * d\nif d > 0.5: f = f + d\nout = f",
        [0.0, 0.5, 1.25],
    ),
    "a sum in a branch": ("out = where(x > 0, sum(sqrt(x) for k in range(2)), 0)", [0.0, 1.0, 0.5]),
    "a condition of a sum": ("out = sum(sqrt(x) for k in range(2) if x > 0)", [0.0, 1.0, 0.5]),
    "a loop in a branch": (
        "t = x\nfor k in range(2):\n    t = sqrt(t)\nout = where(x > 0, t, 0)",
        [0.0, 0.25, 4**-0.75 / 4],
    ),
}


@pytest.mark.parametrize("name", UNUSED)
async def test_an_unused_branch_adds_nothing(device: ta.Device, name: str) -> None:
    text, expected = UNUSED[name]
    kernel = ta.jit.elementwise(text, inputs=["x"], outputs=None)
    found = await ta.grad(lambda x: a.sum(kernel(x)))(await device.put(np.array([0.0, 1.0, 4.0])))
    np.testing.assert_allclose(await found.to_host(), expected, rtol=1e-14)


POWERS = {
    "abs((x + 1j) ** (x + 1j))": lambda x: abs((x + 1j) ** (x + 1j)),
    "real(2 ** (1j * x))": lambda x: (2 ** (1j * x)).real,
}


@pytest.mark.parametrize("text", POWERS)
async def test_complex_exponents(device: ta.Device, text: str) -> None:
    host = np.array([1.0, 2.0])
    kernel = ta.jit.elementwise(text, inputs=["x"])
    found = await ta.grad(lambda x: a.sum(kernel(x)))(await device.put(host))
    differences = (POWERS[text](host + 1e-6) - POWERS[text](host - 1e-6)) / 2e-6
    np.testing.assert_allclose(await found.to_host(), differences, rtol=1e-8)


async def test_a_quotient_and_a_remainder(device: ta.Device) -> None:
    x, y = [await device.put(np.array([number], "float16")) for number in (3e4, 100.0)]
    found = await ta.grad(lambda x, y: a.sum(x / y) * 300, argnums=1)(x, y)
    assert (await found.to_host()).tolist() == [-900.0]  # 300 * 30000 is too large for float16
    one = await device.put(np.array([1.0, -1.0]))
    found = await ta.grad(lambda y: a.sum(a.remainder(one, y)))(await device.put(np.full(2, 0.1)))
    # As the remainder itself: 1.0 // 0.1 is 9, although 1.0 / 0.1 is rounded to 10.
    np.testing.assert_array_equal(await found.to_host(), -np.floor_divide([1.0, -1.0], 0.1))


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
async def test_angles_of_small_and_large_numbers(device: ta.Device, size: float) -> None:
    """The squares of these numbers do not fit into float32."""
    hosts = [np.array([0.0, sign * size], "float32") for sign in (3.0, -4.0)]
    y, x = [await device.put(host) for host in hosts]
    by_y, by_x = await ta.grad(lambda y, x: a.sum(a.atan2(y, x)) * size, argnums=(0, 1))(y, x)
    np.testing.assert_allclose(await by_y.to_host(), [0.0, -4 / 25], rtol=1e-6)
    np.testing.assert_allclose(await by_x.to_host(), [0.0, -3 / 25], rtol=1e-6)


@pytest.mark.parametrize(("shape", "other"), [((0, 3), (1, 3)), ((2, 0), (1, 1)), ((0, 3), (3,))])
async def test_broadcasting_along_empty_axes(
    device: ta.Device, shape: tuple[int, ...], other: tuple[int, ...]
) -> None:
    x, y = await device.put(np.zeros(shape)), await device.put(np.ones(other))
    found = await ta.grad(lambda y: a.sum(x * y))(y)
    np.testing.assert_array_equal(await found.to_host(), np.zeros(other))


@pytest.mark.parametrize("function", [a.mean, a.var], ids=["mean", "var"])
async def test_means_of_nothing(device: ta.Device, function: Any) -> None:
    found = await ta.grad(lambda x: a.sum(function(x, axis=0)))(await device.put(np.zeros((0, 3))))
    assert found.shape == (0, 3)


async def test_a_variance_of_one_element_with_a_correction(device: ta.Device) -> None:
    found = await ta.grad(lambda x: a.var(x, correction=1))(await device.put(np.ones(1)))
    assert np.isnan(await found.to_host()).all()


async def test_gradients_in_a_function_by_another_argument(device: ta.Device) -> None:
    """The arguments of the inner gradient are arrays, and the function reads calls of the outer one."""
    x, y = await device.put(np.array([3.0])), await device.put(np.array([2.0]))

    def f(x: Any, y: Any) -> Any:
        return a.sum(x * x * y)

    mixed = await ta.grad(lambda x, y: a.sum(ta.grad(f)(x, y)), argnums=1)(x, y)
    captured = await ta.grad(lambda y: a.sum(ta.grad(lambda x: f(x, y))(x)))(y)
    assert [(await one.to_host()).tolist() for one in (mixed, captured)] == [[6.0], [6.0]]


@pytest.mark.parametrize("stop", [10, 10**6])
async def test_loads_in_a_loop_that_breaks_early(device: ta.Device, stop: int) -> None:
    found = await _slope_of_loads(device, stop)
    assert (await found.to_host()).tolist() == [12.0, 6.0, 0.0]


@pytest.mark.parametrize(("start", "stop"), [(0, 10**14), (0, (1 << 63) - 1), (-(1 << 62) - 5, 1 << 62)])
async def test_loads_in_a_loop_with_bounds_too_far_apart(device: ta.Device, start: int, stop: int) -> None:
    with pytest.raises(ta.NotSupportedError, match="an element for each iteration within the loop's bounds"):
        await _slope_of_loads(device, stop, start)


async def _slope_of_loads(device: ta.Device, stop: int, start: int = 0) -> Any:
    kernel = ta.jit.elementwise(
        "t = 0.0 * w\nfor k in range(lo, hi):\n    if k >= lo + 3: break\n"
        "    t = t + x[(k - lo) & 1] * w\nout = t",
        inputs=["w", "x", "lo", "hi"],
    )
    w = await device.put(np.array([1.0, 2.0, 3.0]))
    x = await device.put(np.array([5.0, 1.0, 4.0]))
    return await ta.grad(lambda x: a.sum(kernel(w, x, start, stop)))(x)


@pytest.mark.parametrize("name", ["softplus", "logaddexp", "logaddexp2"])
async def test_second_derivatives_far_from_zero(device: ta.Device, name: str) -> None:
    """There exp(x) is infinite, and the second derivative is 0."""
    function, _ = SECOND[name]
    x = await device.put(np.array([-3000.0, 3000.0]))
    first = ta.gradients.grad(lambda x: a.sum(function(x)))
    slope, bend = await first(x), await ta.gradients.grad(lambda x: a.sum(first(x)))(x)
    assert (await slope.to_host()).tolist() == [0.0, 1.0]
    assert (await bend.to_host()).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0, 0)])
async def test_quantiles_of_nothing_have_gradients(device: ta.Device, shape: tuple[int, int]) -> None:
    x = await device.put(np.ones(shape))
    for function in (a.median, a.nanmedian, lambda x, axis: a.quantile(x, [0.2, 0.7], axis=axis)):
        found = await ta.gradients.grad(lambda x, function=function: a.sum(function(x, axis=1)))(x)
        assert found.shape == shape
        assert found.dtype == "float64"


@pytest.mark.parametrize(
    ("function", "dtype"), [(a.argmax, "int64"), (lambda x: a.sum(ta.linalg.eigvals(x)), "complex128")]
)
async def test_a_value_without_a_gradient_is_refused(device: ta.Device, function: Any, dtype: str) -> None:
    x = await device.put(np.eye(3))
    for make in (ta.gradients.grad, ta.gradients.flat_grad_and_value):
        with pytest.raises(TypeError, match=f"must return float numbers, got {dtype}"):
            await make(function)(x)


async def test_an_integer_value_has_no_vjp(device: ta.Device) -> None:
    x = await device.put(np.eye(3))
    value, pull = await ta.gradients.vjp(a.argmax, x)
    with pytest.raises(TypeError, match=r"vjp: the function must return float or complex numbers"):
        await pull(value)
