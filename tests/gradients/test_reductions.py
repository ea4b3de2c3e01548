"""Gradients of `jit.reduction`, and of loops with loads that do not depend on the element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trio_accel as ta

a: Any = ta.arrays
X = np.random.default_rng(3).standard_normal((3, 4))
W = np.random.default_rng(4).standard_normal(4)

# Text, reduction, last step, and the same by NumPy for an axis.
CASES: dict[str, tuple[str, str, str | None, Any]] = {
    "sum": ("x * x * w", "sum", None, lambda x, w, axis: np.sum(x * x * w, axis)),
    "mean": ("x * w", "mean", None, lambda x, w, axis: np.mean(x * w, axis)),
    "prod": ("x + w", "prod", None, lambda x, w, axis: np.prod(x + w, axis)),
    "max": ("sin(x) * w", "max", None, lambda x, w, axis: np.max(np.sin(x) * w, axis)),
    "root mean square": (
        "x * w",
        "sum",
        "sqrt(a * a + n)",
        lambda x, w, axis: np.sqrt(np.sum(x * w, axis) ** 2 + (12 if axis is None else x.shape[axis])),
    ),
}


def central(f: Any, x: Any) -> Any:
    """Central differences of a function with one array."""
    step, made = 1e-6, np.empty_like(x)
    for place in np.ndindex(x.shape):
        off = np.zeros_like(x)
        off[place] = step
        made[place] = (f(x + off) - f(x - off)) / (2 * step)
    return made


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("case", CASES)
async def test_a_reduction_has_the_gradient_of_central_differences(
    device: ta.Device, case: str, axis: int | None, keepdims: bool
) -> None:
    text, reduce, post, by_numpy = CASES[case]
    kernel = ta.jit.reduction(text, reduce, post=post, inputs=["x", "w"])
    x, w = await device.put(X), await device.put(W)

    def loss(x: Any, w: Any) -> Any:
        return a.sum(a.sin(kernel(x, w=w, axis=axis, keepdims=keepdims)))

    by_x, by_w = await ta.grad(loss, argnums=(0, 1))(x, w)
    want_x = central(lambda x: np.sin(by_numpy(x, W, axis)).sum(), X)
    want_w = central(lambda w: np.sin(by_numpy(X, w, axis)).sum(), W)
    np.testing.assert_allclose(await by_x.to_host(), want_x, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(await by_w.to_host(), want_w, rtol=1e-6, atol=1e-8)


async def test_a_reduction_that_takes_steps_has_zeros(device: ta.Device) -> None:
    kernel, x = ta.jit.reduction("x", "argmax"), await device.put(X)
    found = await ta.grad(lambda x: a.sum(kernel(x, axis=0).cast("float64")))(x)
    np.testing.assert_array_equal(await found.to_host(), np.zeros_like(X))


async def test_refusals_name_the_reason(device: ta.Device) -> None:
    fold, x = ta.jit.reduction("x", "a * b", identity=1, name="fold"), await device.put(X)
    with pytest.raises(ta.NotSupportedError, match="fold has no gradient, because it combines values by"):
        await ta.grad(fold)(x)
    with pytest.raises(ta.NotSupportedError, match="it writes to an array that the value"):
        await ta.grad(lambda x: a.sum(a.exp(x, out=x)))(x)

    async def late(x: Any) -> Any:
        return await a.sum(x)

    with pytest.raises(TypeError, match="value_and_grad: the function must not be async"):
        await ta.grad(late)(x)


async def test_each_element_loads_the_same_elements_in_a_loop(device: ta.Device) -> None:
    """The indices of the gradient vary only with the iteration, and its values only with the element."""
    kernel = ta.jit.elementwise(
        "y = 0.0\nfor j in range(k):\n    y = y + x[j]", inputs=["x", "k"], outputs="y"
    )
    x, w = await device.put(X[0]), await device.put(W)
    found = await ta.grad(lambda x: a.sum(w * kernel(x, 3, shape=(4,))))(x)
    np.testing.assert_allclose(await found.to_host(), [W.sum()] * 3 + [0])
