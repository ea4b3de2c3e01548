"""Gradients of losses by their targets, and by other arguments after the prediction."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import trio_accel as ta

n: Any = ta.nn
DRAW = np.random.default_rng(5)
X, Y, V, W = (DRAW.uniform(0.2, 0.8, (3, 4)) for _ in range(4))
SIGNS = np.where(Y > 0.5, 1.0, -1.0)
CASES: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    **{
        name: (getattr(n, name), (X, Y))
        for name in (
            *("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy", "kl_div"),
            *("binary_cross_entropy_with_logits", "poisson_nll_loss"),
        )
    },
    "kl_div of logarithms": (partial(n.kl_div, log_target=True, reduction="batchmean"), (X, Y)),
    "counts": (partial(n.poisson_nll_loss, log_input=False, reduction="sum"), (X, Y)),
    "variances": (n.gaussian_nll_loss, (X, Y, V)),
    "weights": (n.binary_cross_entropy, (X, Y, W[0])),
    "weights of classes": (
        lambda x, y, w: n.binary_cross_entropy_with_logits(x, y, pos_weight=w),
        (X, Y, W[0]),
    ),
    "soft margins": (n.soft_margin_loss, (X, SIGNS)),
    "ranks": (partial(n.margin_ranking_loss, margin=0.7), (X, Y, SIGNS)),
    "of each": (lambda x, y: ta.arrays.sum(n.mse_loss(x, y, reduction="none") * V), (X, Y)),
}


@pytest.mark.parametrize("name", CASES)
async def test_slopes_by_all_arguments(device: ta.Device, name: str) -> None:
    f, hosts = CASES[name]
    places = list(range(len(hosts)))
    slopes = await ta.grad(f, places)(*[await device.put(host) for host in hosts])
    for place, slope in zip(places, slopes, strict=True):
        found, direction = await slope.to_host(), DRAW.normal(size=hosts[place].shape)
        sides = []
        for step in (1e-6, -1e-6):
            moved = [host + step * direction * (at == place) for at, host in enumerate(hosts)]
            sides.append(float(await f(*[await device.put(host) for host in moved]).item()))
        np.testing.assert_allclose(
            (found * direction).sum(), (sides[0] - sides[1]) / 2e-6, rtol=2e-7, atol=1e-8
        )


async def test_a_target_that_follows_from_the_prediction(device: ta.Device) -> None:
    found = await ta.grad(lambda x: n.mse_loss(x, x * 3.0))(await device.put(X))
    np.testing.assert_allclose(await found.to_host(), 8 * X / X.size, rtol=1e-14)
