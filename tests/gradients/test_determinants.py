"""Gradients of determinants are their cofactors, of singular matrices too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trio_accel as ta

a: Any = ta.arrays
l: Any = ta.linalg  # noqa: E741
DRAW = np.random.default_rng(3)


def of_rank(n: int, rank: int, *, is_complex: bool) -> Any:
    factors = [DRAW.normal(size=(n, rank)) + 1j * is_complex * DRAW.normal(size=(n, rank)) for _ in range(2)]
    product = factors[0] @ factors[1].T
    return product if is_complex else product.real


def cofactors(matrix: Any) -> Any:
    """Minors, each by NumPy."""
    n = len(matrix)
    found = np.empty((n, n), matrix.dtype)
    for i in range(n):
        for j in range(n):
            minor = np.delete(np.delete(matrix, i, 0), j, 1)
            found[i, j] = (-1) ** (i + j) * np.linalg.det(minor)
    return found


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize(
    ("n", "rank"), [(n, rank) for n in (1, 2, 3, 4, 5) for rank in range(max(n - 2, 0), n + 1)]
)
async def test_the_gradient_has_the_cofactors(device: ta.Device, n: int, rank: int, is_complex: bool) -> None:
    matrix = of_rank(n, rank, is_complex=is_complex)
    found = await ta.grad(lambda x: a.real(l.det(x)))(await device.put(matrix))
    # Of the real part of a holomorphic function, the gradient in JAX's convention is the derivative.
    np.testing.assert_allclose(await found.to_host(), cofactors(matrix), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [2, 3, 4])
async def test_second_derivatives_of_regular_matrices(device: ta.Device, n: int) -> None:
    matrix, w, direction = (DRAW.normal(size=(2, n, n)) for _ in range(3))

    def first(x: Any) -> Any:
        return a.sum(ta.grad(lambda x: a.sum(l.det(x)))(x) * w)

    found = await ta.grad(first)(await device.put(matrix))
    sides = []
    for sign in (1, -1):
        moved = matrix + sign * 1e-6 * direction
        sides.append((np.stack([cofactors(m) for m in moved]) * w).sum())
    got = (await found.to_host() * direction).sum()
    np.testing.assert_allclose(got, (sides[0] - sides[1]) / 2e-6, rtol=1e-6)
