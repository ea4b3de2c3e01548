"""Gradients of norms: of narrow dtypes, at zeros, and to the second order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trio_accel as ta

a: Any = ta.arrays
l: Any = ta.linalg  # noqa: E741
NORMS = {
    "vector_norm": l.vector_norm,
    "nrm2": l.nrm2,
    "matrix_norm": lambda x: l.matrix_norm(a.reshape(x, (-1, 3))),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("host", [[0.0, 3.0, 4.0], [1.0, 2.0, -2.0]])
async def test_the_hessian_is_the_projection_beside_the_vector(
    device: ta.Device, name: str, host: list[float]
) -> None:
    x, size = np.array(host), np.linalg.norm(host)
    f, given = NORMS[name], await device.put(x)
    rows = [
        await ta.grad(lambda x, k=k: ta.grad(f)(x)[k])(given)  # a row of the Hessian
        for k in range(3)
    ]
    found = np.stack([await row.to_host() for row in rows])
    np.testing.assert_allclose(found, (np.eye(3) - np.outer(x, x) / size**2) / size, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", NORMS)
async def test_zeros_have_the_gradient_0_and_no_second_one(device: ta.Device, name: str) -> None:
    f, x = NORMS[name], await device.put(np.zeros(3))
    assert not (await (await ta.grad(f)(x)).to_host()).any()
    second = await ta.grad(lambda x: a.sum(ta.grad(lambda x: f(x) ** 2)(x)))(x)
    assert np.isnan(await second.to_host()).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("order", [2, 3, 1.5])
async def test_powers_that_overflow_in_the_dtype(device: ta.Device, dtype: str, order: float) -> None:
    largest = 200.0 if dtype == "float16" else 1e25
    host = np.array([largest, -largest / 2, largest / 4], dtype)
    found = await ta.grad(lambda x: l.vector_norm(x, ord=order))(await device.put(host))
    x = host.astype("float64")
    size = (np.abs(x) ** order).sum() ** (1 / order)
    want = np.sign(x) * (np.abs(x) / size) ** (order - 1)
    np.testing.assert_allclose(await found.to_host(), want, rtol=5e-3 if dtype == "float16" else 1e-5)


@pytest.mark.parametrize("order", [2, 3, 4.0])
async def test_complex_norms_of_rows(device: ta.Device, order: float) -> None:
    z = np.array([[1 + 2j, -1j, 0.5], [2.0, 1 - 1j, 1j]])
    found = await ta.grad(lambda z: a.sum(l.vector_norm(z, axis=1, ord=order)))(await device.put(z))
    size = (np.abs(z) ** order).sum(1, keepdims=True) ** (1 / order)
    want = np.conj(z) * np.abs(z) ** (order - 2) / size ** (order - 1)
    np.testing.assert_allclose(await found.to_host(), want, rtol=1e-12)
