"""Gradients by complex arguments follow JAX's convention: the derivative by x, minus i times that by y."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gradient_cases import numbers

import trio_accel as ta

a: Any = ta.arrays
Z = numbers((4,), 1) + 1j * numbers((4,), 2)
W = numbers((4,), 3) + 1j * numbers((4,), 4)

# Functions of a vector, and their gradients in JAX's convention: of the real part of a holomorphic function
# it is the derivative.
CASES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "squared size": (lambda z: a.sum(a.abs(z) ** 2), lambda z: 2 * np.conj(z)),
    "size": (lambda z: a.sum(a.abs(z)), lambda z: np.conj(z) / np.abs(z)),
    "real part": (lambda z: a.sum(a.real(z * W)), lambda z: W),
    "imaginary part": (lambda z: a.sum(a.imag(z * W)), lambda z: -1j * W),
    "holomorphic": (lambda z: a.sum(a.real(a.exp(z) * W)), lambda z: np.exp(z) * W),
    "conjugate": (lambda z: a.sum(a.real(a.conj(z) * W)), lambda z: np.conj(W)),
    "angle": (lambda z: a.sum(a.angle(z)), lambda z: -1j / z),
    "product of two": (lambda z: a.real(ta.linalg.dot(z, z)), lambda z: 2 * z),
    "transform": (
        lambda z: a.sum(a.abs(ta.fft.fft(z)) ** 2),
        lambda z: 2 * len(Z) * np.conj(z),  # by Parseval
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_gradient_is_the_one_of_jax(device: ta.Device, name: str) -> None:
    f, want = CASES[name]
    found = await ta.grad(f)(await device.put(Z))
    assert found.dtype == "complex128"
    np.testing.assert_allclose(await found.to_host(), want(Z), rtol=1e-12)


async def test_the_square_of_a_size_by_one_number(device: ta.Device) -> None:
    """The example of JAX's documentation: |z|**2 at 1 + 2i."""
    found = await ta.grad(lambda z: a.abs(z) ** 2)(await device.put(np.array(1.0 + 2.0j)))
    assert await found.item() == 2.0 - 4.0j


async def test_real_and_complex_arguments_of_several_dtypes(device: ta.Device) -> None:
    hosts = {"c64": Z.astype("complex64"), "c128": W, "f32": Z.real.astype("float32"), "f64": W.imag.copy()}
    given = {name: await device.put(host) for name, host in hosts.items()}

    def f(p: Any) -> Any:
        return a.sum(a.real(p["c64"] * p["c128"]) * p["f32"] * p["f64"])

    found = await ta.grad(f)(given)
    x, y = (hosts[name].astype("float64") for name in ("f32", "f64"))
    z = hosts["c64"].astype("complex128")
    want = {
        "c64": W * x * y,
        "c128": z * x * y,
        "f32": (z * W).real * y,
        "f64": (z * W).real * x,
    }
    for name, slope in found.items():
        assert slope.dtype == given[name].dtype
        np.testing.assert_allclose(await slope.to_host(), want[name], rtol=3e-6)


async def test_a_vector_jacobian_product_of_a_holomorphic_function(device: ta.Device) -> None:
    value, pull = await ta.vjp(lambda z: a.exp(z) * W, await device.put(Z))
    np.testing.assert_allclose(await value.to_host(), np.exp(Z) * W, rtol=1e-14)
    g = numbers((4,), 7) + 1j * numbers((4,), 8)
    (found,) = await pull(g)
    np.testing.assert_allclose(await found.to_host(), g * np.exp(Z) * W, rtol=1e-12)


async def test_a_gradient_within_a_function_has_the_same_convention(device: ta.Device) -> None:
    def norm_of_gradient(z: Any) -> Any:
        g = ta.grad(lambda z: a.sum(a.real(z**3)))(z)
        return a.sum(a.real(g * W))

    found = await ta.grad(norm_of_gradient)(await device.put(Z))
    # The inner gradient is 3 z**2, and the outer one its derivative times W.
    np.testing.assert_allclose(await found.to_host(), 6 * Z * W, rtol=1e-12)


async def test_a_rule_of_the_program_has_the_same_convention(device: ta.Device) -> None:
    square = ta.custom_gradient(lambda z: z * z, lambda g, result, z: g * 2 * z)
    for f in (square, lambda z: z * z):
        found = await ta.grad(lambda z, f=f: a.sum(a.real(f(z) * W)))(await device.put(Z))
        np.testing.assert_allclose(await found.to_host(), 2 * Z * W, rtol=1e-12)


async def test_a_complex_fit_descends_along_the_conjugate(device: ta.Device) -> None:
    matrix = numbers((12, 4), 5) + 1j * numbers((12, 4), 6)
    right = numbers((12,), 7) + 1j * numbers((12,), 8)
    m, b, z = await device.put(matrix), await device.put(right), await device.put(np.zeros(4, "complex128"))
    loss = ta.value_and_grad(lambda z, m, b: a.sum(a.abs(m @ z - b) ** 2))
    rate = 0.9 / np.linalg.norm(matrix, 2) ** 2
    for _ in range(400):
        _, g = await loss(z, m, b)
        z = await (z - rate * a.conj(g))
    want = np.linalg.lstsq(matrix, right, rcond=None)[0]
    np.testing.assert_allclose(await z.to_host(), want, rtol=1e-6)


async def test_a_flat_array_refuses_complex_gradients(device: ta.Device) -> None:
    f = ta.gradients.flat_grad_and_value(lambda z: a.sum(a.abs(z) ** 2))
    with pytest.raises(TypeError, match="flat_grad_and_value: an array of real numbers cannot hold"):
        await f(await device.put(Z))


async def test_a_rule_for_real_numbers_refuses_complex_ones(device: ta.Device) -> None:
    x = await device.put(Z)
    with pytest.raises(ta.NotSupportedError, match="its rule is for real numbers, and these are complex"):
        await ta.grad(lambda z: a.sum(a.abs(ta.linalg.solveh_banded(np.ones((1, 4), complex), z))))(x)
