"""Losses of margins and likelihoods, distances, and optimizers: against their formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
from array_numbers import numbers
from differences import gradient, widest

import trio_accel as ta
from trio_accel import nn

TOLERANCES = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 3e-6, "float64": 1e-12}
REDUCTIONS = ("none", "mean", "sum")
SHAPE = (6, 5)
SIGNS = np.where(np.arange(30).reshape(SHAPE) % 3, 1.0, -1.0)
COUNTS = np.arange(30).reshape(SHAPE) % 4 + 0.0
WEIGHTS = np.array([0.5, 2.0, 1.0, 0.25, 3.0])
SHARES = scipy.special.expit(numbers(SHAPE, "float64", 5))


def poisson(x: Any, target: Any, log_input: bool = True, full: bool = False, eps: float = 1e-8) -> Any:
    made = np.exp(x) - target * x if log_input else x - target * np.log(x + eps)
    large = np.maximum(target, 1)
    stirling = np.where(target > 1, target * np.log(large) - target + 0.5 * np.log(2 * np.pi * large), 0)
    return made + full * stirling


def gaussian(x: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6) -> Any:
    made = -scipy.stats.norm.logpdf(x, target, np.sqrt(np.maximum(var, eps)))
    return made - (not full) * 0.5 * np.log(2 * np.pi)


Case = tuple[str, Callable[..., Any], Any, Any, tuple[Any, ...], dict[str, Any]]
# Function, its formula, x, the target, more arguments, and options.
CASES: list[Case] = [
    (
        "binary_cross_entropy",
        lambda x, t, w=1.0: -w * (t * np.log(x) + (1 - t) * np.log1p(-x)),
        SHARES,
        COUNTS / 4,
        (WEIGHTS,),
        {},
    ),
    (
        "soft_margin_loss",
        lambda x, t: np.logaddexp(0, -t * x),
        numbers(SHAPE, "float64") * 3,
        SIGNS,
        (),
        {},
    ),
    (
        "hinge_embedding_loss",
        lambda x, t, margin=1.0: np.where(t > 0, x, np.maximum(margin - x, 0)),
        numbers(SHAPE, "float64"),
        SIGNS,
        (),
        {"margin": 0.75},
    ),
    ("poisson_nll_loss", poisson, numbers(SHAPE, "float64"), COUNTS, (), {"full": True}),
    ("poisson_nll_loss", poisson, SHARES + 0.5, COUNTS, (), {"log_input": False, "eps": 0.25}),
    ("gaussian_nll_loss", gaussian, numbers(SHAPE, "float64"), COUNTS, (SHARES + 0.5,), {"full": True}),
    ("gaussian_nll_loss", gaussian, numbers(SHAPE, "float64"), COUNTS, (0.25,), {"eps": 0.5}),
]
each_case = pytest.mark.parametrize(
    ("function", "formula", "x", "target", "more", "options"), CASES, ids=[one[0] for one in CASES]
)


def reduce(x: Any, reduction: str) -> Any:
    return x if reduction == "none" else getattr(np, reduction)(x)


def narrow(x: Any, name: str) -> Any:
    return np.asarray(x).astype(ta.DType(name).dtype)


@each_case
@pytest.mark.parametrize("name", TOLERANCES)
async def test_losses_and_gradients(
    device: ta.Device,
    function: str,
    formula: Callable[..., Any],
    x: Any,
    target: Any,
    more: tuple[Any, ...],
    options: dict[str, Any],
    name: str,
) -> None:
    given, wanted = narrow(x, name), narrow(target, name)
    others = [narrow(one, name) for one in more]
    wide = [widest(one) for one in others]
    on = await device.put(given)
    for reduction in REDUCTIONS:
        want = reduce(formula(widest(given), widest(wanted), *wide, **options), reduction)
        found = await getattr(nn, function)(on, wanted, *others, reduction=reduction, **options)
        assert (found.dtype, found.shape) == (name, np.shape(want))
        np.testing.assert_allclose(
            widest(await found.to_host()), want, rtol=TOLERANCES[name], atol=TOLERANCES[name] / 4
        )
        if name != "float64":
            continue
        grad = numbers(SHAPE, "float64", 7) if reduction == "none" else 1.5
        slope = gradient(
            lambda moved, r=reduction: reduce(formula(moved, target, *wide, **options), r), x, grad
        )
        found = await getattr(nn, f"{function}_grad")(
            grad, on, wanted, *others, reduction=reduction, **options
        )
        np.testing.assert_allclose(await found.to_host(), slope, rtol=1e-6, atol=1e-8)


async def test_ranks(device: ta.Device) -> None:
    x1, x2 = numbers(SHAPE, "float64"), numbers(SHAPE, "float64", 9)
    on = await device.put(x1)

    def formula(x1: Any) -> Any:
        return np.maximum(0.3 - SIGNS * (x1 - x2), 0)

    for reduction in REDUCTIONS:
        options: dict[str, Any] = {"margin": 0.3, "reduction": reduction}
        found = await nn.margin_ranking_loss(on, x2, SIGNS, **options)
        np.testing.assert_allclose(await found.to_host(), reduce(formula(x1), reduction), rtol=1e-12)
        slope = await nn.margin_ranking_loss_grad(1.5, on, x2, SIGNS, **options)
        want = gradient(lambda moved, r=reduction: reduce(formula(moved), r), x1, 1.5)
        np.testing.assert_allclose(await slope.to_host(), want, rtol=1e-6, atol=1e-8)


async def test_extreme_probabilities(device: ta.Device) -> None:
    x = await device.put(np.array([0.0, 1.0, 0.0, 1.0]))
    found = await nn.binary_cross_entropy(x, np.array([0.0, 1.0, 1.0, 0.0]), reduction="none")
    np.testing.assert_allclose(await found.to_host(), [0, 0, 100, 100])
    slope = await nn.binary_cross_entropy_grad(1, x, np.array([0.0, 1.0, 1.0, 0.0]), reduction="sum")
    assert np.isfinite(await slope.to_host()).all()


@pytest.mark.parametrize("name", TOLERANCES)
async def test_distances(device: ta.Device, name: str) -> None:
    a, b, c = (numbers((7, 9), name, seed) for seed in (1, 2, 3))
    wide = [widest(one) for one in (a, b, c)]
    on, near = await device.put(a), {"rtol": 3 * TOLERANCES[name], "atol": TOLERANCES[name]}

    def apart(x: Any, y: Any) -> Any:
        return np.linalg.norm(x - y + 1e-6, axis=-1)

    found = await nn.pairwise_distance(on, b, keepdims=True)
    np.testing.assert_allclose(widest(await found.to_host()), apart(*wide[:2])[:, None], **near)
    found = await nn.normalize(on)
    np.testing.assert_allclose(
        widest(await found.to_host()), wide[0] / np.linalg.norm(wide[0], axis=1, keepdims=True), **near
    )
    target = np.where(np.arange(7) % 2, 1.0, -1.0)
    cosines = (wide[0] * wide[1]).sum(1) / np.prod([np.linalg.norm(one, axis=1) for one in wide[:2]], 0)
    want = np.where(target > 0, 1 - cosines, np.maximum(cosines - 0.1, 0))
    for reduction in REDUCTIONS:
        found = await nn.cosine_embedding_loss(on, b, narrow(target, name), margin=0.1, reduction=reduction)
        np.testing.assert_allclose(widest(await found.to_host()), reduce(want, reduction), **near)
    farther = np.maximum(1.0 + apart(wide[0], wide[1]) - apart(wide[0], wide[2]), 0)
    found = await nn.triplet_margin_loss(on, b, c, reduction="none")
    np.testing.assert_allclose(
        widest(await found.to_host()), farther, rtol=near["rtol"], atol=8 * near["atol"]
    )


async def test_zero_vectors(device: ta.Device) -> None:
    zeros = await device.zeros((2, 3))
    np.testing.assert_array_equal(await (await nn.normalize(zeros)).to_host(), np.zeros((2, 3)))
    found = await nn.cosine_embedding_loss(zeros, np.ones((2, 3)), np.ones(2), reduction="none")
    np.testing.assert_allclose(await found.to_host(), [1, 1])


async def test_losses_refuse_invalid_arguments(device: ta.Device) -> None:
    x = await device.zeros((2, 3))
    with pytest.raises(ValueError, match=r"nn\.soft_margin_loss: reduction must be"):
        await nn.soft_margin_loss(x, np.ones((2, 3)), reduction="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nn\.triplet_margin_loss: reduction must be"):
        await nn.triplet_margin_loss(x, x, x, reduction="batchmean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nn\.hinge_embedding_loss: .*shape"):
        await nn.hinge_embedding_loss(x, np.ones((2, 2)))
    with pytest.raises(TypeError, match=r"nn\.poisson_nll_loss"):
        await nn.poisson_nll_loss(x, "counts")  # type: ignore[arg-type]


def decayed(p: Any, g: Any, decay: float) -> Any:
    return g + decay * p


def adadelta(
    p: Any, grads: Any, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, decay: float = 0.0
) -> Any:
    a, b = np.zeros_like(p), np.zeros_like(p)
    for grad in grads:
        g = decayed(p, grad, decay)
        a = rho * a + (1 - rho) * g * g
        d = np.sqrt(b + eps) / np.sqrt(a + eps) * g
        b = rho * b + (1 - rho) * d * d
        p = p - lr * d
    return p


def adagrad(
    p: Any, grads: Any, lr: float = 1e-2, lr_decay: float = 0.0, eps: float = 1e-10, decay: float = 0.0
) -> Any:
    total = np.zeros_like(p)
    for number, grad in enumerate(grads):
        g = decayed(p, grad, decay)
        total = total + g * g
        p = p - lr / (1 + number * lr_decay) * g / (np.sqrt(total) + eps)
    return p


def adamax(
    p: Any, grads: Any, lr: float = 2e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8, decay: float = 0.0
) -> Any:
    m, u = np.zeros_like(p), np.zeros_like(p)
    for step, grad in enumerate(grads, 1):
        g = decayed(p, grad, decay)
        m, u = betas[0] * m + (1 - betas[0]) * g, np.maximum(betas[1] * u, np.abs(g) + eps)
        p = p - lr / (1 - betas[0] ** step) * m / u
    return p


def lion(p: Any, grads: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99), decay: float = 0.0) -> Any:
    m = np.zeros_like(p)
    for grad in grads:
        p = p * (1 - lr * decay) - lr * np.sign(betas[0] * m + (1 - betas[0]) * grad)
        m = betas[1] * m + (1 - betas[1]) * grad
    return p


def radam(
    p: Any, grads: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8, decay: float = 0.0
) -> Any:
    m, v = np.zeros_like(p), np.zeros_like(p)
    most = 2 / (1 - betas[1]) - 1
    for t, grad in enumerate(grads, 1):
        g = decayed(p, grad, decay)
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        length = most - 2 * t * betas[1] ** t / (1 - betas[1] ** t)
        change = m / (1 - betas[0] ** t)
        if length > 5:
            part = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
            change = change * np.sqrt(part) * np.sqrt(1 - betas[1] ** t) / (np.sqrt(v) + eps)
        p = p - lr * change
    return p


def rmsprop(
    p: Any,
    grads: Any,
    lr: float = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    decay: float = 0.0,
    momentum: float = 0.0,
) -> Any:
    v, buffer = np.zeros_like(p), np.zeros_like(p)
    for grad in grads:
        g = decayed(p, grad, decay)
        v = alpha * v + (1 - alpha) * g * g
        buffer = momentum * buffer + g / (np.sqrt(v) + eps)
        p = p - lr * buffer
    return p


# Optimizer, its formula, how many states it has, whether it has the number of a step, and options.
STEPS: list[tuple[str, Callable[..., Any], int, bool, dict[str, Any]]] = [
    ("adadelta", adadelta, 2, False, {"lr": 0.5, "rho": 0.8, "weight_decay": 0.1}),
    ("adagrad", adagrad, 1, True, {"lr": 0.1, "lr_decay": 0.5, "weight_decay": 0.1}),
    ("adamax", adamax, 2, True, {"lr": 0.1, "betas": (0.5, 0.9), "weight_decay": 0.1}),
    ("lion", lion, 1, False, {"lr": 0.1, "betas": (0.5, 0.8), "weight_decay": 0.1}),
    ("radam", radam, 2, True, {"lr": 0.1, "weight_decay": 0.1}),
    ("rmsprop", rmsprop, 1, False, {"lr": 0.1, "alpha": 0.9, "weight_decay": 0.1}),
    ("rmsprop", rmsprop, 2, False, {"lr": 0.1, "momentum": 0.9}),
]


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("function", "formula", "states", "is_numbered", "options"), STEPS)
async def test_optimizers(
    device: ta.Device,
    function: str,
    formula: Callable[..., Any],
    states: int,
    is_numbered: bool,
    options: dict[str, Any],
    name: str,
) -> None:
    p, grads = numbers((4, 5), name), [numbers((4, 5), name, seed) for seed in range(8)]
    on = await device.put(p)
    wide = "float32" if name == "float16" else name
    kept = [await device.zeros((4, 5), wide) for _ in range(states)]
    for step, grad in enumerate(grads, 1):
        number = [step] if is_numbered else []
        assert await getattr(nn, function)(on, grad, *kept, *number, **options) is on
    given = {{"weight_decay": "decay"}.get(key, key): value for key, value in options.items()}
    want = formula(widest(p), [widest(grad) for grad in grads], **given)
    near = {"float16": 8e-3, "float32": 1e-5, "float64": 1e-12}[name]
    np.testing.assert_allclose(widest(await on.to_host()), want, rtol=near, atol=near)


async def test_optimizers_refuse_invalid_arguments(device: ta.Device) -> None:
    p, state = await device.zeros(3), await device.zeros(3)
    with pytest.raises(ValueError, match=r"nn\.adagrad: step must be at least 1, got 0"):
        await nn.adagrad(p, p, state, 0)
    with pytest.raises(ValueError, match=r"nn\.rmsprop: momentum and momentum_buffer go together"):
        await nn.rmsprop(p, state, state, momentum=0.9)
    with pytest.raises(ValueError, match=r"nn\.adadelta: rho"):
        await nn.adadelta(p, state, state, state, rho=1.5)
    with pytest.raises(ValueError, match=r"nn\.lion: .*shape"):
        await nn.lion(p, np.zeros(4), state)


async def test_distances_of_complex_vectors_are_real(device: ta.Device) -> None:
    a, b = np.array([[1 + 2j, 3j], [4, 5 + 1j]]), np.array([[0, 1j], [1, 1 + 0j]])
    made = await nn.pairwise_distance(await device.put(a), await device.put(b), eps=0.0)
    np.testing.assert_allclose(await made.to_host(), np.linalg.norm(a - b, axis=-1), rtol=1e-15)
