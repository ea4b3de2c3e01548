"""Gradients where an expression takes a shortcut at a single value.

`where(t == 0, 0, t * log(t))` avoids a NaN at 0. Its derivative there is the one around it, not that of the
constant 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trio_accel as ta

a: Any = ta.arrays
n: Any = ta.nn
X = np.array([0.3, -0.5, 0.8, 1.7])
COUNTS = np.array([0.0, 1.0, 0.0, 3.0])
CLASSES = np.array([0.0, 1.0, 1.0, 0.0])
OWN: Any = ta.jit.elementwise("where(t == 0, 0, t * exp(x))", inputs=["t", "x"])
FLIPPED: Any = ta.jit.elementwise("where(1 == t, x, t * x)", inputs=["t", "x"])
STEP: Any = ta.jit.elementwise("where(t == 0, 1, t * x)", inputs=["t", "x"])
GUARD: Any = ta.jit.elementwise("x / where(t == 0, 1, t)", inputs=["t", "x"])

# A function of a target, its target, and its derivative by it.
CASES: dict[str, tuple[Callable[[Any], Any], np.ndarray, np.ndarray]] = {
    "poisson": (lambda t: n.poisson_nll_loss(X, t, reduction="sum"), COUNTS, -X),
    "binary_cross_entropy_with_logits": (
        lambda t: n.binary_cross_entropy_with_logits(X, t, reduction="sum"),
        CLASSES,
        -X,
    ),
    "own": (lambda t: a.sum(OWN(t, X)), COUNTS, np.exp(X)),
    "constant first": (lambda t: a.sum(FLIPPED(t, X)), COUNTS, X),
    "another value": (lambda t: a.sum(STEP(t, X)), COUNTS, np.where(COUNTS == 0, 0.0, X)),
    "guard": (
        lambda t: a.sum(GUARD(t, X)),
        COUNTS,
        -np.where(COUNTS == 0, 0.0, X) / np.where(COUNTS == 0, 1.0, COUNTS) ** 2,
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_shortcut_has_the_derivative_around_it(device: ta.Device, name: str) -> None:
    f, target, want = CASES[name]
    found = await ta.grad(f)(await device.put(target))
    np.testing.assert_allclose(await found.to_host(), want, rtol=1e-12, atol=1e-15)


async def test_a_poisson_regression_with_zero_counts_by_a_model_of_the_counts(device: ta.Device) -> None:
    """The targets follow from parameters, and the gradient passes them."""
    w = await device.put(np.array(0.5))
    found = await ta.grad(lambda w: n.poisson_nll_loss(w * X, w * COUNTS, reduction="sum"))(w)
    # exp(w x) - w t w x, by w.
    np.testing.assert_allclose(await found.item(), (X * np.exp(0.5 * X) - 2 * 0.5 * COUNTS * X).sum())


SECOND: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    # The curvature of losses of x - t, and the mixed derivative -1 of x and a target of the logits.
    "huber_loss": (n.huber_loss, lambda x, t: np.array([[1.0, -1.0], [-1.0, 1.0]]) * (np.abs(x - t) <= 1)),
    "smooth_l1_loss": (
        n.smooth_l1_loss,
        lambda x, t: np.array([[1.0, -1.0], [-1.0, 1.0]]) * (np.abs(x - t) < 1),
    ),
    "binary_cross_entropy_with_logits": (
        n.binary_cross_entropy_with_logits,
        lambda x, t: np.array([[np.exp(-x) / (1 + np.exp(-x)) ** 2, -1.0], [-1.0, 0.0]]),
    ),
}


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("point", [(0.0, 0.0), (0.3, 0.3), (0.4, 1.0), (2.5, 0.0), (-1.2, 0.0)])
async def test_second_derivatives_of_losses(device: ta.Device, name: str, point: tuple[float, float]) -> None:
    f, want = SECOND[name]
    found = await ta.gradients.hessian(lambda p: f(p[:1], p[1:], reduction="sum"))(
        await device.put(np.array(point))
    )
    np.testing.assert_allclose(await found.to_host(), want(*point), rtol=1e-12, atol=1e-15)
