"""Jacobians, Hessians and products with them, against central differences in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradient_cases import numbers

import trio_accel as ta

a: Any = ta.arrays
g = ta.gradients
X, V = numbers((4,), 1), numbers((4,), 2)
P = numbers((2, 3), 3)


def field(x: Any) -> Any:
    return a.sin(x) * a.sum(x * x) + a.exp(-x)


def field_of_numpy(x: Any) -> Any:
    return np.sin(x) * (x * x).sum() + np.exp(-x)


def potential(x: Any) -> Any:
    return a.sum(field(x) ** 2)


def differences(f: Any, x: Any, step: float = 1e-6) -> Any:
    """Return the Jacobian of a NumPy function: the axes of the result, then those of the argument."""
    columns = []
    for index in np.ndindex(x.shape):
        unit = np.zeros(x.shape)
        unit[index] = step
        columns.append((f(x + unit) - f(x - unit)) / (2 * step))
    return np.stack(columns, axis=-1).reshape(*np.shape(columns[0]), *x.shape)


def gradient_of_numpy(x: Any) -> Any:
    jacobian = np.diag(np.cos(x) * (x * x).sum() - np.exp(-x)) + np.outer(np.sin(x), 2 * x)
    return jacobian.T @ (2 * field_of_numpy(x))


async def test_a_jacobian(device: ta.Device) -> None:
    found = await g.jacobian(field)(await device.put(X))
    np.testing.assert_allclose(await found.to_host(), differences(field_of_numpy, X), rtol=1e-7, atol=1e-9)


async def test_a_jacobian_of_matrices_and_several_arguments(device: ta.Device) -> None:
    w, x = await device.put(P), await device.put(numbers((3, 2), 4))
    found = await g.jacobian(lambda w, x: a.tanh(w @ x), (0, 1))(w, x)
    host = numbers((3, 2), 4)
    for slope, want in zip(
        found,
        (differences(lambda w: np.tanh(w @ host), P), differences(lambda x: np.tanh(P @ x), host)),
        strict=True,
    ):
        assert slope.shape == want.shape
        np.testing.assert_allclose(await slope.to_host(), want, rtol=1e-7, atol=1e-9)


async def test_results_and_arguments_are_nested(device: ta.Device) -> None:
    given = {"x": await device.put(X), "s": await device.put(np.array(0.7))}

    def f(p: Any) -> Any:
        return {"scaled": p["x"] * p["s"], "total": (a.sum(p["x"] ** 2),)}

    found = await g.jacobian(f)(given)
    assert isinstance(found["total"], tuple)
    np.testing.assert_allclose(await found["scaled"]["x"].to_host(), 0.7 * np.eye(4))
    np.testing.assert_allclose(await found["scaled"]["s"].to_host(), X)
    np.testing.assert_allclose(await found["total"][0]["x"].to_host(), 2 * X)
    assert await found["total"][0]["s"].item() == 0.0


async def test_rows_are_split_over_requests(device: ta.Device) -> None:
    """A result of 600 elements takes several requests."""
    host = numbers((600,), 5)
    found = await g.jacobian(lambda x: a.sin(x) * a.roll(x, 1))(await device.put(host))
    want = np.diag(np.cos(host) * np.roll(host, 1)) + np.diag(np.sin(host)) @ np.roll(np.eye(600), 1, axis=0)
    np.testing.assert_allclose(await found.to_host(), want, rtol=1e-12, atol=1e-14)


async def test_a_hessian(device: ta.Device) -> None:
    found = await (await g.hessian(potential)(await device.put(X))).to_host()
    np.testing.assert_allclose(found, found.T, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found, differences(gradient_of_numpy, X), rtol=1e-6, atol=1e-6)


async def test_a_hessian_of_two_arguments_has_blocks(device: ta.Device) -> None:
    x, y = await device.put(X), await device.put(V)
    (xx, xy), (yx, yy) = await g.hessian(lambda x, y: a.sum(x * x * y), (0, 1))(x, y)
    np.testing.assert_allclose(await xx.to_host(), np.diag(2 * V))
    np.testing.assert_allclose(await xy.to_host(), np.diag(2 * X))
    np.testing.assert_allclose(await yx.to_host(), np.diag(2 * X))
    assert not (await yy.to_host()).any()


async def test_products_with_jacobian_and_hessian(device: ta.Device) -> None:
    x, v = await device.put(X), await device.put(V)
    value, derivative = await g.jvp(field, (x,), (v,))
    np.testing.assert_allclose(await value.to_host(), field_of_numpy(X), rtol=1e-14)
    jacobian = await (await g.jacobian(field)(x)).to_host()
    np.testing.assert_allclose(await derivative.to_host(), jacobian @ V, rtol=1e-12)
    hessian = await (await g.hessian(potential)(x)).to_host()
    (product,) = await g.hvp(potential, (x,), (v,))
    np.testing.assert_allclose(await product.to_host(), hessian @ V, rtol=1e-12)


async def test_a_product_along_a_complex_direction(device: ta.Device) -> None:
    z, w = X + 1j * V, V - 0.5j * X
    _, derivative = await g.jvp(lambda z: a.exp(z) * z, (await device.put(z),), (await device.put(w),))
    np.testing.assert_allclose(await derivative.to_host(), np.exp(z) * (1 + z) * w, rtol=1e-12)


async def test_a_jacobian_within_a_step_and_a_gradient(device: ta.Device) -> None:
    x = await device.put(X)

    @ta.step
    def inside(x: Any) -> Any:
        return g.jacobian(field)(x) * 1.0

    want = differences(field_of_numpy, X)
    np.testing.assert_allclose(await (await inside(x)).to_host(), want, rtol=1e-7, atol=1e-9)
    found = await ta.grad(lambda x: a.sum(g.jacobian(a.sin)(x) ** 2))(x)
    np.testing.assert_allclose(await found.to_host(), -2 * np.cos(X) * np.sin(X), rtol=1e-12)


async def test_other_results_come_with_the_value(device: ta.Device) -> None:
    x = await device.put(X)

    def f(x: Any) -> Any:
        y = a.sin(x)
        return a.sum(y * y), {"y": y, "label": "sines", "both": [y * 2, x]}

    (value, others), slope = await ta.value_and_grad(f, has_aux=True)(x)
    np.testing.assert_allclose(await value.item(), (np.sin(X) ** 2).sum())
    np.testing.assert_allclose(await slope.to_host(), np.sin(2 * X), rtol=1e-12)
    assert others["label"] == "sines"
    np.testing.assert_allclose(await others["y"].to_host(), np.sin(X))
    np.testing.assert_allclose(await others["both"][0].to_host(), 2 * np.sin(X))
    np.testing.assert_allclose(await others["both"][1].to_host(), X)
    slope, others = await ta.grad(f, has_aux=True)(x)
    np.testing.assert_allclose(await slope.to_host(), np.sin(2 * X), rtol=1e-12)
    with pytest.raises(TypeError, match=r"with has_aux, the function must return a pair \(value, others\)"):
        await ta.grad(a.sum, has_aux=True)(x)


async def test_vector_jacobian_products_of_several_results(device: ta.Device) -> None:
    x = await device.put(X)
    value, pull, others = await ta.vjp(
        lambda x: ({"sines": a.sin(x), "pair": (a.sum(x), x * x)}, a.cos(x)), x, has_aux=True
    )
    np.testing.assert_allclose(await value["pair"][1].to_host(), X * X)
    np.testing.assert_allclose(await others.to_host(), np.cos(X))
    (slope,) = await pull({"sines": V, "pair": (np.array(2.0), await device.put(V))})
    np.testing.assert_allclose(await slope.to_host(), np.cos(X) * V + 2.0 + 2 * X * V, rtol=1e-12)
    for wrong in (V, {"sines": V}, {"sines": V, "pair": (V,)}, {"sines": V, "pair": (V, V)}):
        with pytest.raises(ValueError, match="vjp: the gradient must"):
            await pull(wrong)


async def test_wrong_arguments_are_refused(device: ta.Device) -> None:
    x, z = await device.put(X), await device.put(X + 1j)
    with pytest.raises(ta.NotSupportedError, match="jacobian: arguments and results must be real"):
        await g.jacobian(lambda z: z * z)(z)
    with pytest.raises(ta.NotSupportedError, match="hvp: arguments and the value must be real"):
        await g.hvp(lambda z: a.sum(a.abs(z)), (z,), (z,))
    with pytest.raises(
        ValueError, match=r"jvp: a tangent must have the shape \(4,\) of its argument, got \(3,\)"
    ):
        await g.jvp(a.sin, (x,), (V[:3],))
    with pytest.raises(ValueError, match="jvp: tangents must have an array for each of 1 arguments, got 2"):
        await g.jvp(a.sin, (x,), (V, V))
    with pytest.raises(TypeError, match="jvp: primals must be a list or tuple of arguments, got AccelRef"):
        await g.jvp(a.sin, x, V)
    with pytest.raises(ValueError, match="hvp: the value must be a scalar"):
        await g.hvp(a.sin, (x,), (V,))


async def test_products_of_values_without_the_argument_are_zeros(device: ta.Device) -> None:
    x, empty = await device.put(X), await device.put(np.ones((0, 3)))
    (product,) = await g.hvp(lambda y: a.sum(x * x) + 0 * a.sum(a.sign(y)), (x,), (x,))
    np.testing.assert_array_equal(await product.to_host(), np.zeros(4))
    (product,) = await g.hvp(lambda y: a.sum(y * y) + a.sum(x), (empty,), (empty,))
    assert product.shape == (0, 3)
    _, derivative = await g.jvp(lambda y: a.sum(y * y) + a.sum(x), (empty,), (empty,))
    assert await derivative.item() == 0
