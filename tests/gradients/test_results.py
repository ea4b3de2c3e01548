"""Gradients through functions with several results, of which a function may use some, all, or none."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chosen import IS_STAND_IN
from gradient_cases import numbers

import trio_accel as ta

a: Any = ta.arrays
la: Any = ta.linalg
# Python's warnings are errors here: nothing is left of calls that nobody has used.
pytestmark = pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no solvers")


def symmetric(n: int = 4) -> Any:
    x = numbers((n, n))
    return x + x.T


async def test_parts_that_nobody_uses_get_no_gradient(device: ta.Device) -> None:
    host = symmetric()
    x = await device.put(host)

    def f(x: Any) -> Any:
        w, v = la.eigh(x)
        u, s, vh = la.svd(x)
        del v, u, vh
        return a.sum(w * w) + a.sum(s * s)

    # Both are the square of the norm.
    np.testing.assert_allclose(await (await ta.grad(f)(x)).to_host(), 4.0 * host, rtol=1e-12)

    def constant(x: Any) -> Any:
        _, v = la.eigh(x)
        return a.sum(ta.stop_gradient(v)) + a.sum(la.slogdet(x)[0])

    assert not (await (await ta.grad(constant)(x)).to_host()).any()
    gc.collect()


async def test_a_part_that_is_used_twice(device: ta.Device) -> None:
    host = symmetric()
    x = await device.put(host)

    def f(x: Any) -> Any:
        made = la.eigh(x)
        w, _ = made
        return a.sum(w * made[0] * made[-2])

    np.testing.assert_allclose(await (await ta.grad(f)(x)).to_host(), 3.0 * host @ host, rtol=1e-11)


async def test_a_function_of_a_matrix_by_its_eigenvalues(device: ta.Device) -> None:
    """The same function as a series has the same gradient."""
    host, weights = 0.3 * symmetric(), numbers((4, 4), 7)
    weights = weights + weights.T
    x = await device.put(host)

    def by_values(x: Any) -> Any:
        w, v = la.eigh(x)
        return a.sum(((v * a.exp(w)) @ v.mT) * weights)

    found = await ta.grad(by_values)(x)
    want = await ta.grad(lambda x: a.sum(la.expm(x) * weights))(x)
    np.testing.assert_allclose(await found.to_host(), await want.to_host(), rtol=1e-10)


async def test_a_gradient_of_a_gradient(device: ta.Device) -> None:
    host = symmetric()
    x = await device.put(host)

    def inner(x: Any) -> Any:
        w, _ = la.eigh(x)
        return a.sum(w**3)

    # The inner gradient is 3 x @ x, and the outer function the square of its norm.
    slope: Any = ta.grad(inner)
    found = await ta.grad(lambda x: a.sum(slope(x) ** 2))(x)
    np.testing.assert_allclose(await found.to_host(), 36.0 * host @ host @ host, rtol=1e-10)


async def test_values_of_gathered_calls(device: ta.Device) -> None:
    host = numbers((3,))
    x = await device.put(host)

    def f(x: Any) -> Any:
        square, double, kept = ta.gather(x * x, x * 2.0, x)
        return a.sum(square * kept) + a.sum(double)

    np.testing.assert_allclose(await (await ta.grad(f)(x)).to_host(), 3.0 * host * host + 2.0, rtol=1e-14)


async def test_equal_eigenvalues(device: ta.Device) -> None:
    """The eigenvalues have a gradient, and the vectors none, as in PyTorch."""
    x = await device.put(np.eye(3))
    found = await ta.grad(lambda x: a.sum(la.eigh(x)[0] ** 3))(x)
    np.testing.assert_allclose(await found.to_host(), 3.0 * np.eye(3), atol=1e-14)
    of_vectors = await ta.grad(lambda x: a.sum(la.eigh(x)[1] ** 2 * numbers((3, 3))))(x)
    assert not np.isfinite(await of_vectors.to_host()).all()


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "full": (lambda x: la.svd(x[:, :2])[0], r"linalg\.svd has no gradient, .*; pass full_matrices=False"),
    "complete": (lambda x: la.qr(x[:, :2], "complete")[0], r"linalg\.qr has no gradient, .*mode='reduced'"),
    "generalised": (lambda x: la.eigh(x, b=x)[0], r"linalg\.eigh has no gradient, .* generalised problem"),
    "lu": (lambda x: la.lu(x)[0], r"linalg\.lu has no gradient, because nobody has written its rule"),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_what_has_no_gradient(device: ta.Device, kind: str) -> None:
    f, text = REFUSED[kind]
    x = await device.put(symmetric() + 9.0 * np.eye(4))
    with pytest.raises(ta.NotSupportedError, match=text):
        await ta.grad(lambda x: a.sum(f(x)))(x)
    gc.collect()
