"""Activations, losses and normalizations where a step of their formula is infinite, and the result is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dnn_references import NUMPYS, TOLERANCE, Array

import trio_accel as ta
from trio_accel import nn

INF, NAN = math.inf, math.nan
SELU = 1.6732632423543772, 1.0507009873554805

# For each activation, with options: its value and its slope on a straight line far below 0, then far above.
LINES: list[tuple[str, dict[str, Any], tuple[float, float, float, float]]] = [
    ("relu", {}, (0, 0, 0, 1)),
    ("relu6", {}, (0, 0, 6, 0)),
    ("leaky_relu", {}, (0, 0.01, 0, 1)),
    ("leaky_relu", {"negative_slope": 0.0}, (0, 0, 0, 1)),
    ("prelu", {"weight": 0.25}, (0, 0.25, 0, 1)),
    ("prelu", {"weight": 0.0}, (0, 0, 0, 1)),
    ("threshold", {"threshold": 1.0, "value": 3.0}, (3, 0, 0, 1)),
    ("threshold", {"threshold": 1.0, "value": -INF}, (-INF, 0, 0, 1)),
    ("hardshrink", {}, (0, 1, 0, 1)),
    ("softshrink", {}, (0.5, 1, -0.5, 1)),
    ("elu", {}, (-1, 0, 0, 1)),
    ("elu", {"alpha": 0.0}, (0, 0, 0, 1)),
    ("selu", {}, (-SELU[0] * SELU[1], 0, 0, SELU[1])),
    ("celu", {"alpha": 2.0}, (-2, 0, 0, 1)),
    ("silu", {}, (0, 0, 0, 1)),
    ("mish", {}, (0, 0, 0, 1)),
    ("gelu", {}, (0, 0, 0, 1)),
    ("gelu", {"approximate": "tanh"}, (0, 0, 0, 1)),
    ("softplus", {}, (0, 0, 0, 1)),
    ("softplus", {"beta": 8.0}, (0, 0, 0, 1)),
    ("softsign", {}, (-1, 0, 1, 0)),
    ("hardtanh", {}, (-1, 0, 1, 0)),
    ("hardsigmoid", {}, (0, 0, 1, 0)),
    ("hardswish", {}, (0, 0, 0, 1)),
    ("sigmoid", {}, (0, 0, 1, 0)),
    ("log_sigmoid", {}, (0, 1, 0, 0)),
    ("tanhshrink", {}, (1, 1, -1, 1)),
    ("tanh", {}, (-1, 0, 1, 0)),
]


def near(found: Array, wanted: Any, dtype: str, what: str) -> None:
    with np.errstate(over="ignore"):
        rounded = np.asarray(wanted, float).astype(NUMPYS[dtype]).astype(float)
    least = 1e-7 if dtype == "float16" else 1e-30
    np.testing.assert_allclose(found.astype(float), rounded, rtol=TOLERANCE[dtype], atol=least, err_msg=what)


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_activations_far_from_zero(device: ta.Device, dtype: str) -> None:
    far = {"float16": 65504.0, "float64": 1.7e308}.get(dtype, 3e38)
    points = np.array([-INF, -far, far, INF, NAN]).astype(NUMPYS[dtype])
    x, exact = await device.put(points), points.astype(float)
    for name, options, (below, slope_below, above, slope_above) in LINES:
        value, slope = np.where(exact < 0, below, above), np.where(exact < 0, slope_below, slope_above)
        wanted = value + np.where(slope == 0, 0, slope * np.where(slope == 0, 0, exact))
        wanted[-1] = NAN
        what = f"{name} {options}"
        function = getattr(nn, name, None) or getattr(ta.arrays, name)
        near(await (await function(x, **options)).to_host(), wanted, dtype, what)
        made = await (await getattr(nn, f"{name}_grad")(2.0, x, **options)).to_host()
        near(made[:-1], 2 * slope[:-1], dtype, f"{what}, gradient")


# For each loss, with options: the predictions, the targets, more arrays; then losses and gradients.
LOSSES: list[tuple[str, dict[str, Any], tuple[list[float], ...], list[float], list[float]]] = [
    (
        "binary_cross_entropy_with_logits", {},
        ([INF, -INF, INF, -INF, INF, -INF], [1, 0, 0, 1, 0.5, 0.5]),
        [0, 0, INF, INF, INF, INF], [0, 0, 1, -1, 0.5, -0.5],
    ),
    (
        "binary_cross_entropy_with_logits", {"weight": 0.0},
        ([INF, -INF, INF, 3.0], [0, 1, 0.5, 0]), [0, 0, 0, 0], [0, 0, 0, 0],
    ),
    (
        "binary_cross_entropy_with_logits", {"pos_weight": 0.0},
        ([-INF, INF, -INF], [1, 1, 0.5]), [0, 0, 0], [0, 0, 0],
    ),
    ("binary_cross_entropy", {}, ([0, 1, 0, 1], [0, 1, 1, 0]), [0, 0, 100, 100], [0, 0, -1e12, 1e12]),
    (
        "kl_div", {"log_target": True},
        ([-2, -0.5, -INF, -1, -INF, NAN], [-INF, 0, -INF, -900, 0, -INF]),
        [0, 0.5, 0, 0, INF, NAN], [0, -1, 0, 0, -1, NAN],
    ),
    (
        "kl_div", {},
        ([-2, -0.5, -INF, -INF, NAN], [0, 1, 0, 1, 0]), [0, 0.5, 0, INF, NAN], [0, -1, 0, -1, NAN],
    ),
    (
        "poisson_nll_loss", {},
        ([-INF, -INF, INF, INF, 0], [0, 2, 0, 2, 0]), [0, INF, INF, INF, 1], [0, -2, INF, INF, 1],
    ),
    (
        "poisson_nll_loss", {"log_input": False, "eps": 0.0},
        ([0, 0, INF, INF], [0, 2, 0, 2]), [0, INF, INF, INF], [1, -INF, 1, 1],
    ),
    ("poisson_nll_loss", {"full": True}, ([-INF, 0], [0, 1]), [0, 0 + 1], [0, 0]),
    ("soft_margin_loss", {}, ([INF, -INF, INF, -INF], [1, -1, -1, 1]), [0, 0, INF, INF], [0, 0, 1, -1]),
    ("hinge_embedding_loss", {}, ([INF, INF, -INF], [1, -1, -1]), [INF, 0, INF], [1, 0, -1]),
    ("huber_loss", {}, ([INF, -INF], [0, 0]), [INF, INF], [1, -1]),
    ("smooth_l1_loss", {"beta": 0.0}, ([INF, 2.0, 2.0], [0, 2.0, 0]), [INF, 0, 2], [1, 0, 1]),
    ("l1_loss", {}, ([INF, -INF], [0, 0]), [INF, INF], [1, -1]),
    (
        "gaussian_nll_loss", {},
        ([1, INF, 1], [1, 0, 0], [INF, 1, INF]), [INF, INF, INF], [0, INF, 0],
    ),
    ("margin_ranking_loss", {}, ([INF, -INF], [0, 0], [1, 1]), [0, INF], [0, -1]),
]  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_certain_losses(device: ta.Device, dtype: str) -> None:
    for name, options, arrays, losses, slopes in LOSSES:
        given = [await device.put(np.array(one, float).astype(NUMPYS[dtype])) for one in arrays]
        what = f"{name} {options}"
        found = await getattr(nn, name)(*given, **options, reduction="none")
        near(await found.to_host(), losses, dtype, what)
        total = await getattr(nn, name)(*given, **options, reduction="sum")
        near(await total.to_host(), sum(losses), dtype, f"{what}, sum")
        made = await getattr(nn, f"{name}_grad")(1.0, *given, **options, reduction="none")
        if not (name == "binary_cross_entropy" and dtype == "float16"):
            near(await made.to_host(), slopes, dtype, f"{what}, gradient")


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_labels_of_classes_that_cannot_be(device: ta.Device, dtype: str) -> None:
    logits = np.array([[-INF, 0.0, 0.0], [0.0, -INF, -INF], [0.0, -INF, 0.0]])
    weight, half = np.array([0.0, 1.0, 2.0]), math.log(2)
    x, w = [await device.put(one.astype(NUMPYS[dtype])) for one in (logits, weight)]
    for labels, wanted in (([1, 0, 2], [half, 0, half]), ([0, 1, 1], [INF, INF, INF])):
        y = await device.put(np.array(labels))
        found = await nn.cross_entropy(x, y, reduction="none")
        near(await found.to_host(), wanted, dtype, "cross_entropy")
        found = await nn.nll_loss(await ta.arrays.log_softmax(x, axis=1), y, reduction="none")
        near(await found.to_host(), wanted, dtype, "nll_loss")
    # A class without weight adds nothing, even if it cannot be; nor does it to a smoothed label.
    y = await device.put(np.array([0, 0, 2]))
    found = await nn.cross_entropy(x, y, w, reduction="none")
    near(await found.to_host(), [0, 0, 2 * half], dtype, "weights")
    found = await nn.nll_loss(x, y, w, reduction="none")
    near(await found.to_host(), [0, 0, 0], dtype, "weights of nll_loss")
    smooth = await nn.cross_entropy(x[:1], y[:1], w, reduction="none", label_smoothing=0.3)
    near(await smooth.to_host(), [0.1 * 3 * half], dtype, "smoothed")
    made = await nn.cross_entropy_grad(1.0, x, y, reduction="sum")
    near(
        await made.to_host(), [[-1, 0.5, 0.5], [0, 0, 0], [0.5, 0, -0.5]], dtype, "gradient of cross_entropy"
    )


async def part_of(name: str, results: Any) -> ta.AccelRef:
    part: ta.AccelRef = getattr(await results, name)
    return part


# Functions of rows: the power of a factor of the vectors `x` and `y` in the result, and the function of these
# and of a gradient without a factor. Without `eps`, the rest does not depend on the factor.
SCALED: dict[str, tuple[int, Callable[..., Any]]] = {
    "normalize": (0, lambda x, y, g: nn.normalize(x, axis=-1, eps=0.0)),
    "cosine_similarity": (0, lambda x, y, g: ta.arrays.cosine_similarity(x, y, eps=0.0)),
    "pairwise_distance": (1, lambda x, y, g: nn.pairwise_distance(x, y, eps=0.0)),
    "std": (1, lambda x, y, g: ta.arrays.std(x, axis=-1, correction=1)),
    "nanstd": (1, lambda x, y, g: ta.arrays.nanstd(x, axis=-1)),
    "zscore": (0, lambda x, y, g: ta.arrays.zscore(x, axis=-1)),
    "skew": (0, lambda x, y, g: ta.arrays.skew(x, axis=-1)),
    "kurtosis": (0, lambda x, y, g: ta.arrays.kurtosis(x, axis=-1)),
}
# They are for large vectors only: the square of a small one is negligible next to `eps`.
LARGE: dict[str, tuple[int, Callable[..., Any]]] = {
    "layer_norm": (0, lambda x, y, g: ta.arrays.layer_norm(x, 2.0, 1.0, eps=0.0)),
    "rms_norm": (0, lambda x, y, g: ta.arrays.rms_norm(x, 2.0, eps=0.0)),
    "instance_norm": (0, lambda x, y, g: nn.instance_norm(x, eps=0.0)),
    "group_norm": (0, lambda x, y, g: nn.group_norm(x, 2, eps=0.0)),
    "batch_norm": (0, lambda x, y, g: part_of("y", nn.batch_norm_training(x, eps=0.0))),
    "layer_norm_grad": (-1, lambda x, y, g: part_of("x", nn.layer_norm_grad(g, x, 2.0, eps=0.0))),
    "rms_norm_grad": (-1, lambda x, y, g: part_of("x", nn.rms_norm_grad(g, x, eps=0.0))),
    "group_norm_grad": (-1, lambda x, y, g: part_of("x", nn.group_norm_grad(g, x, 2, eps=0.0))),
    "instance_norm_grad": (-1, lambda x, y, g: part_of("x", nn.instance_norm_grad(g, x, eps=0.0))),
    "batch_norm_grad": (-1, lambda x, y, g: part_of("x", nn.batch_norm_training_grad(g, x, eps=0.0))),
    "weights": (0, lambda x, y, g: part_of("weight", nn.batch_norm_training_grad(g, x, eps=0.0))),
    "cosine_embedding_loss": (0, lambda x, y, g: nn.cosine_embedding_loss(x, y, np.ones((3, 4)))),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_rows_with_overflowing_squares(device: ta.Device, dtype: str) -> None:
    power = {"float16": 11, "float64": 1021}.get(dtype, 124)
    grid = np.arange(3 * 4 * 7, dtype=float).reshape(3, 4, 7)
    x, y = [np.sin(grid * 1.3 + shift).astype(NUMPYS[dtype]) for shift in (0, 0.5)]
    grad = await device.put(np.cos(grid).astype(NUMPYS[dtype]))
    plain = [await device.put(one) for one in (x, y)]
    for sign in (1, -1) if dtype == "float64" else (1,):
        factor = 2.0 ** (sign * power)
        large = [await device.put((one.astype(float) * factor).astype(NUMPYS[dtype])) for one in (x, y)]
        for name, (degree, function) in (SCALED | (LARGE if sign > 0 else {})).items():
            if degree < 0 and dtype != "float64":
                # A gradient is too small for the dtype.
                continue
            wanted = (await (await function(*plain, grad)).to_host()).astype(float)
            found = (await (await function(*large, grad)).to_host()).astype(float) / factor**degree
            np.testing.assert_allclose(found, wanted, rtol=4 * TOLERANCE[dtype], atol=1e-12, err_msg=name)
