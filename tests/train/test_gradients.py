"""Gradients of functions of own operations, each entry of the tables against central differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

import trio_accel as ta
from trio_accel import arrays, linalg, nn, train
from trio_accel.train._rules import CONSTANT, ELEMENTS, RULES

A, L, N = (cast_any for cast_any in (arrays, linalg, nn))
call: Any = None


def numbers(shape: tuple[int, ...], seed: int = 0, low: float = -2.0, high: float = 2.0) -> Any:
    return np.random.default_rng(seed).uniform(low, high, shape)


@attrs.frozen
class Case:
    """A function of parameters, and where they lie."""

    f: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ((3, 4),)
    low: float = -2.0
    high: float = 2.0

    def values(self) -> list[Any]:
        return [numbers(shape, seed, self.low, self.high) for seed, shape in enumerate(self.shapes)]


def one(f: Callable[[Any], Any], low: float = -2.0, high: float = 2.0) -> Case:
    return Case(f, ((3, 4),), low, high)


def two(f: Callable[[Any, Any], Any], low: float = -2.0, high: float = 2.0) -> Case:
    """Both arguments, of which each is broadcast along an axis."""
    return Case(f, ((3, 1, 4), (2, 1)), low, high)


X, LABELS, ROWS = (3, 4), np.array([1, 3, 0]), np.array([[0, 2], [4, 0]])
Y = np.random.default_rng(9).uniform(0.1, 0.9, X)
SIGNS = np.where(Y > 0.5, 1.0, -1.0)
MASK = np.random.default_rng(8).uniform(size=(5, 6)) > 0.3
HIDDEN = np.where(MASK, 0.0, -1.5)
HEADS = ((2, 5, 4), (2, 6, 4), (2, 6, 3))
IMAGE = (2, 4, 6, 5)
_ = None
a: Any = arrays
n: Any = nn
la: Any = linalg
CASES: dict[str, Case | list[Case]] = {
    "arrays.acos": one(a.acos, -0.9, 0.9),
    "arrays.acosh": one(a.acosh, 1.2, 3.0),
    "arrays.asin": one(a.asin, -0.9, 0.9),
    "arrays.atanh": one(a.atanh, -0.9, 0.9),
    "arrays.clip": one(lambda x: a.clip(x, -1, 0.5)),
    "arrays.gammaln": one(a.gammaln, 0.5, 4.0),
    **{f"arrays.{name}": one(getattr(a, name), 0.2, 3.0) for name in ("log", "log10", "log1p", "log2")},
    **{f"arrays.{name}": one(getattr(a, name), 0.2, 3.0) for name in ("rsqrt", "sqrt", "cbrt")},
    "arrays.logit": one(a.logit, 0.1, 0.9),
    "arrays.divide": two(a.divide, 0.5, 2.0),
    "arrays.pow": [
        two(a.pow, 0.5, 2.0), one(lambda x: x**3), one(lambda x: x**2.0 + x**0), one(lambda x: 1.5**x)
    ],
    "arrays.lerp": Case(a.lerp, ((3, 4), (4,), (3, 1))),
    "arrays.where": two(lambda x, y: a.where(Y > 0.5, x[:, 0], y[0])),
    "nn.prelu": Case(n.prelu, ((2, 3, 4), (4,))),
    "nn.threshold": one(lambda x: n.threshold(x, 0.3, 0.1)),
    "nn.hardtanh": one(lambda x: n.hardtanh(x, -0.5, 0.7)),
    "nn.leaky_relu": one(lambda x: n.leaky_relu(x, 0.2)),
    "nn.gelu": [one(n.gelu), one(lambda x: n.gelu(x, approximate="tanh"))],
    "AccelRef.T": one(lambda x: x.T),
    "AccelRef.__getitem__": [
        one(lambda x: x[1]), one(lambda x: x[-1, 1:3]), one(lambda x: x[:, None, 2:]), one(lambda x: x[..., 1]),
    ],
    "AccelRef.copy": [one(lambda x: x.copy()), one(lambda x: x.cast("float64"))],
    "AccelRef.mT": Case(lambda x: x.mT, ((2, 3, 4),)),
    "AccelRef.reshape": one(lambda x: x.reshape(2, -1)),
    "AccelRef.transpose": Case(lambda x: x.transpose(1, 2, 0), ((2, 3, 4),)),
    "arrays.broadcast_to": Case(lambda x: a.broadcast_to(x, (2, 3, 4)), ((3, 1),)),
    "arrays.concat": Case(lambda x, y: a.concat([x, 2 * y, x], axis=1), ((3, 4), (3, 2))),
    "arrays.cumulative_sum": [one(lambda x: a.cumulative_sum(x, axis=1)), Case(a.cumulative_sum, ((5,),))],
    "arrays.expand_dims": one(lambda x: a.expand_dims(x, axis=1)),
    "arrays.flip": [one(a.flip), one(lambda x: a.flip(x, axis=1))],
    "arrays.layer_norm": [
        Case(a.layer_norm, ((3, 4), (4,), (4,))),
        Case(lambda x, w: a.layer_norm(x, w, axis=(0, 1), eps=0.1), ((3, 4), (4,))),
        one(a.layer_norm),
    ],
    "arrays.log_softmax": one(lambda x: a.log_softmax(x, axis=1)),
    "arrays.logsumexp": [one(lambda x: a.logsumexp(x, axis=0)), one(lambda x: a.logsumexp(x, keepdims=True))],
    "arrays.matrix_transpose": Case(a.matrix_transpose, ((2, 3, 4),)),
    "arrays.max": [one(lambda x: a.max(x, axis=1)), one(a.max)],
    "arrays.mean": [one(a.mean), one(lambda x: a.mean(x, axis=-1, keepdims=True))],
    "arrays.min": [one(lambda x: a.min(x, axis=(0, 1))), one(lambda x: a.min(x, axis=0, keepdims=True))],
    "arrays.moveaxis": Case(lambda x: a.moveaxis(x, 0, -1), ((2, 3, 4),)),
    "arrays.pad": [one(lambda x: a.pad(x, ((1, 2), (0, 3)))), one(lambda x: a.pad(x, 1))],
    "arrays.permute_dims": Case(lambda x: a.permute_dims(x, (2, 0, 1)), ((2, 3, 4),)),
    "arrays.reshape": one(lambda x: a.reshape(x, (4, 3))),
    "arrays.rms_norm": [Case(a.rms_norm, ((3, 4), (4,))), one(lambda x: a.rms_norm(x, axis=0, eps=0.1))],
    "arrays.roll": [one(lambda x: a.roll(x, 2, axis=1)), one(lambda x: a.roll(x, (1, -2), axis=(0, 1)))],
    "arrays.softmax": one(lambda x: a.softmax(x, axis=1)),
    "arrays.split": [
        one(lambda x: a.split(x, 2, axis=1).part(1) * x[:, :2]),
        one(lambda x: a.split(x, [1], axis=0).part(0) + a.sum(a.split(x, [1], axis=0).part(1))),
    ],
    "arrays.squeeze": Case(lambda x: a.squeeze(x, axis=1), ((3, 1, 4),)),
    "arrays.stack": Case(lambda x, y: a.stack([x, y * y, x], axis=1), ((3, 4), (3, 4))),
    "arrays.std": one(lambda x: a.std(x, axis=1, correction=1)),
    "arrays.sum": [one(a.sum), one(lambda x: a.sum(x, axis=(0,), keepdims=True))],
    "arrays.swapaxes": Case(lambda x: a.swapaxes(x, 0, 2), ((2, 3, 4),)),
    "arrays.take": [
        Case(lambda x: a.take(x, ROWS, axis=0), ((5, 4),)),
        Case(lambda x: a.take(x, np.array([0, -1, 0]), axis=1), ((2, 5, 3),)),
        Case(lambda x: a.take(x, np.array([3, 3])), ((5,),)),
    ],
    "arrays.tril": one(lambda x: a.tril(x, k=1)),
    "arrays.triu": one(a.triu),
    "arrays.unstack": one(lambda x: a.unstack(x, axis=1).part(2) * 2),
    "arrays.var": [one(a.var), one(lambda x: a.var(x, axis=0, correction=1, keepdims=True))],
    "linalg.dot": Case(la.dot, ((5,), (5,))),
    "linalg.einsum": [
        Case(lambda x, y: la.einsum("bij,jk->bik", x, y), ((2, 3, 4), (4, 5))),
        Case(lambda x, y: la.einsum("ij,kj", x, y), ((3, 4), (2, 4))),
        Case(lambda x, y: la.einsum("ij,k->k", x, y), ((3, 4), (2,))),
    ],
    "linalg.matmul": [
        Case(la.matmul, first_and_second)
        for first_and_second in (
            ((3, 4), (4, 2)), ((4,), (4, 2)), ((3, 4), (4,)), ((4,), (4,)), ((2, 3, 4), (4, 5)),
            ((3, 4), (5, 4, 2)), ((2, 1, 3, 4), (5, 4, 2)), ((4,), (2, 4, 3)),
        )
    ],
    "linalg.matrix_transpose": Case(la.matrix_transpose, ((2, 3, 4),)),
    "linalg.outer": Case(la.outer, ((3,), (4,))),
    "linalg.vecdot": [Case(la.vecdot, ((3, 4), (3, 4))), Case(la.vecdot, ((2, 3, 4), (3, 1)))][:1],
    "linalg.vector_norm": [one(la.vector_norm), one(lambda x: la.vector_norm(x, axis=1, keepdims=True))],
    "nn.adaptive_avg_pool1d": Case(lambda x: n.adaptive_avg_pool1d(x, 3), ((2, 3, 7),)),
    "nn.adaptive_avg_pool2d": Case(lambda x: n.adaptive_avg_pool2d(x, (3, 2)), (IMAGE,)),
    "nn.adaptive_avg_pool3d": Case(lambda x: n.adaptive_avg_pool3d(x, 2), ((1, 2, 3, 4, 3),)),
    "nn.avg_pool1d": Case(lambda x: n.avg_pool1d(x, 3, 2, 1), ((2, 3, 7),)),
    "nn.avg_pool2d": Case(lambda x: n.avg_pool2d(x, 2, padding=1, count_include_pad=False), (IMAGE,)),
    "nn.avg_pool3d": Case(lambda x: n.avg_pool3d(x, 2), ((1, 2, 3, 4, 3),)),
    "nn.batch_norm_training": [
        Case(lambda x, w, b: n.batch_norm_training(x, w, b).part("y"), ((4, 3, 2), (3,), (3,))),
        Case(lambda x: n.batch_norm_training(x, eps=0.1).part(0), ((4, 3),)),
    ],
    "nn.binary_cross_entropy": one(lambda x: n.binary_cross_entropy(x, Y), 0.1, 0.9),
    "nn.binary_cross_entropy_with_logits": one(lambda x: n.binary_cross_entropy_with_logits(x, Y)),
    "nn.conv1d": Case(lambda x, w, b: n.conv1d(x, w, b, padding=1), ((2, 3, 7), (4, 3, 3), (4,))),
    "nn.conv2d": Case(
        lambda x, w, b: n.conv2d(x, w, b, stride=2, padding=1, groups=2), (IMAGE, (6, 2, 3, 2), (6,))
    ),
    "nn.conv3d": Case(lambda x, w: n.conv3d(x, w, dilation=2), ((1, 2, 3, 4, 3), (2, 2, 2, 2, 2))),
    "nn.cross_entropy": [
        one(lambda x: n.cross_entropy(x, LABELS)),
        one(lambda x: n.cross_entropy(x, LABELS, reduction="none", label_smoothing=0.1)),
    ],
    "nn.embedding": Case(lambda w: n.embedding(ROWS, w), ((5, 3),)),
    "nn.gaussian_nll_loss": one(lambda x: n.gaussian_nll_loss(x, Y, np.ones(X))),
    "nn.glu": one(lambda x: n.glu(x, axis=1)),
    "nn.group_norm": Case(lambda x, w, b: n.group_norm(x, 2, w, b), ((2, 4, 3), (4,), (4,))),
    "nn.hinge_embedding_loss": one(lambda x: n.hinge_embedding_loss(x, SIGNS)),
    "nn.huber_loss": Case(n.huber_loss, (X, X)),
    "nn.instance_norm": Case(n.instance_norm, ((2, 3, 5), (3,), (3,))),
    "nn.kl_div": one(lambda x: n.kl_div(x, Y, reduction="batchmean")),
    "nn.l1_loss": Case(n.l1_loss, (X, X)),
    "nn.linear": [
        Case(n.linear, ((2, 3, 4), (5, 4), (5,))), Case(n.linear, ((3, 4), (5, 4))), Case(n.linear, ((4,), (5, 4), (5,))),
    ],
    "nn.margin_ranking_loss": Case(lambda x, y: n.margin_ranking_loss(x, y, SIGNS, margin=0.5), (X, X)),
    "nn.max_pool1d": Case(lambda x: n.max_pool1d(x, 3, 2, 1), ((2, 3, 7),)),
    "nn.max_pool2d": Case(lambda x: n.max_pool2d(x, (2, 3), padding=1), (IMAGE,)),
    "nn.max_pool3d": Case(lambda x: n.max_pool3d(x, 2), ((1, 2, 3, 4, 3),)),
    "nn.mse_loss": [Case(n.mse_loss, (X, X)), Case(lambda x, y: n.mse_loss(x, y, reduction="none"), (X, X))],
    "nn.poisson_nll_loss": one(lambda x: n.poisson_nll_loss(x, Y)),
    "nn.scaled_dot_product_attention": [
        Case(n.scaled_dot_product_attention, HEADS),
        Case(lambda q, k, v: n.scaled_dot_product_attention(q, k, v, MASK, scale=0.7), HEADS),
        Case(lambda q, k, v: n.scaled_dot_product_attention(q, k, v, HIDDEN, is_causal=True), HEADS),
    ],
    "nn.smooth_l1_loss": Case(n.smooth_l1_loss, (X, X)),
    "nn.soft_margin_loss": one(lambda x: n.soft_margin_loss(x, SIGNS)),
    "tensor.einsum": Case(lambda x, y: ta.tensor.einsum("ij,jk->ki", x, y), ((3, 4), (4, 5))),  # type: ignore[arg-type]
}  # fmt: skip
for name, rules in ELEMENTS.items():
    room, _, base = name.partition(".")
    CASES.setdefault(name, (two if "x2" in rules else one)(getattr(getattr(ta, room), base)))
NUMBERED = [
    (name, number)
    for name, cases in sorted(CASES.items())
    for number in range(len(cases) if isinstance(cases, list) else 1)
]


def test_each_entry_of_the_tables_has_a_case() -> None:
    assert {*CASES} == {*ELEMENTS, *RULES}
    assert not CONSTANT & {*CASES}


@pytest.mark.parametrize(("name", "number"), NUMBERED)
async def test_gradients_are_those_of_differences(device: ta.Device, name: str, number: int) -> None:
    cases = CASES[name]
    case = cases[number] if isinstance(cases, list) else cases
    values = case.values()

    async def weighted(given: list[Any]) -> Any:
        found = await case.f(*given)
        return found.shape, await found.to_host()

    shape, _ = await weighted([await device.put(one) for one in values])
    weights = numbers(shape, 99)

    def f(parameters: Any) -> Any:
        return arrays.sum(case.f(*parameters) * weights)

    on = [await device.put(one) for one in values]
    value, found = await train.value_and_grad(f)(on)
    np.testing.assert_allclose(await value.item(), await total(device, case, values, weights), rtol=1e-12)
    for place, slope in enumerate(found):
        assert (slope.shape, slope.dtype) == (values[place].shape, "float64")
        got = await slope.to_host()
        # Along some directions: each element for itself would ask a thousand times.
        for seed in range(3):
            direction = numbers(values[place].shape, 50 + seed, -1.0, 1.0)
            sides = []
            for sign in (1, -1):
                moved = [one.copy() for one in values]
                moved[place] += sign * 1e-5 * direction
                sides.append(await total(device, case, moved, weights))
            want = (sides[0] - sides[1]) / 2e-5
            np.testing.assert_allclose((got * direction).sum(), want, rtol=1e-6, atol=1e-8)


async def total(device: ta.Device, case: Case, values: list[Any], weights: Any) -> float:
    made = await case.f(*[await device.put(one) for one in values])
    return float((await made.to_host() * weights).sum())
