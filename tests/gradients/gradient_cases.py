"""Gradient cases: element-wise functions, and functions of `nn`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import numpy as np

import trio_accel as ta

a: Any = ta.arrays
n: Any = ta.nn
matmul: Any = ta.linalg.matmul


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


X, LABELS, ROWS = (3, 4), np.array([1, 3, 0]), np.array([[0, 2], [4, 0]])
Y = numbers(X, 9, 0.1, 0.9)
SIGNS = np.where(Y > 0.5, 1.0, -1.0)
# The place of a function's arguments.
RANGES = dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (-0.9, 0.9))
RANGES |= dict.fromkeys(("log", "log10", "log1p", "log2", "rsqrt", "sqrt", "cbrt", "entr"), (0.2, 3.0))
RANGES |= dict.fromkeys(("gamma", "gammaln", "digamma"), (-0.9, -0.1))
RANGES |= {"binary_cross_entropy": (0.1, 0.9), "acosh": (1.2, 3.0), "erfcinv": (0.2, 1.8)}
RANGES |= dict.fromkeys(("logit", "ndtri"), (0.1, 0.9))
TARGETS: dict[str, Any] = {
    **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "kl_div"), Y),
    **dict.fromkeys(("l1_loss", "mse_loss", "poisson_nll_loss", "smooth_l1_loss"), Y),
    **dict.fromkeys(("hinge_embedding_loss", "soft_margin_loss"), SIGNS),
    "cross_entropy": LABELS,
}
OPTIONS: dict[str, tuple[Any, ...]] = {"threshold": (0.3, 0.1), "gaussian_nll_loss": (Y, np.ones(X))}


def of_first(name: str) -> Case:
    """A function of `nn`, of its first argument."""
    f = getattr(n, name)
    rest = OPTIONS.get(name, (TARGETS[name],) if name in TARGETS else ())
    return Case(lambda x: f(x, *rest), (X,), *RANGES.get(name, (-2.0, 2.0)))


OF_FIRST = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "celu", "cross_entropy", "elu",
    "gaussian_nll_loss", "gelu", "glu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh",
    "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "leaky_relu", "log_sigmoid", "mish",
    "mse_loss", "poisson_nll_loss", "relu", "relu6", "selu", "sigmoid", "silu", "smooth_l1_loss",
    "soft_margin_loss", "softplus", "softshrink", "softsign", "tanhshrink", "threshold",
)  # fmt: skip
OF_ONE = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cbrt", "conj", "cos", "cosh", "degrees",
    "digamma", "entr", "erf", "erfc", "erfcinv", "erfcx", "erfinv", "exp", "exp2", "expit", "expm1", "frac",
    "gamma", "gammaln", "i0", "i1", "log", "log10", "log1p", "log2", "log_expit", "log_ndtr", "logit",
    "ndtr", "ndtri", "negative", "positive", "radians", "real", "reciprocal", "rsqrt", "sin", "sinc",
    "sinh", "sqrt", "square", "tan", "tanh",
)  # fmt: skip
OF_TWO = (
    "add", "atan2", "copysign", "divide", "fmax", "fmin", "fmod", "hypot", "logaddexp", "logaddexp2",
    "maximum", "minimum", "multiply", "pow", "rel_entr", "remainder", "subtract", "xlog1py", "xlogy",
)  # fmt: skip
# Gradients given by expressions also have gradients.
GRADIENTS = [
    name.removeprefix("nn.")
    for name, (word, _) in ta.gradients.words().items()
    if word == "derived" and name.endswith("_grad") and name not in ("nn.prelu_grad", "nn.threshold_grad")
]
IMAGE = (5, 4, 3)
MEANS, VARIANCES, MASK = numbers((4,)), numbers((4,), 1, 0.5, 2.0), numbers((3, 5), 3)


def convolutions(f: Any, axes: int) -> list[Case]:
    """Image convolutions with this many axes: plain ones, and with all options."""
    options = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}
    return [
        Case(f, ((2, 4, *IMAGE[:axes]), (3, 4, *(2,) * axes), (3,))),
        Case(partial(f, padding="same"), ((4, *IMAGE[:axes]), (3, 4, *(3,) * axes))),
        Case(partial(f, **options), ((2, 4, *IMAGE[:axes]), (6, 2, *(2,) * axes), (6,))),
    ]


def pools(kind: str, f: Any, axes: int) -> list[Case]:
    """Image pools with this many axes: plain ones, and with options."""
    if kind.startswith("adaptive"):
        return [Case(lambda x: f(x, 2), ((2, 3, *IMAGE[:axes]),))]
    options = {"stride": 2, "padding": 1, "ceil_mode": True}
    options |= {"count_include_pad": False} if kind == "avg" else {}
    return [
        Case(lambda x: f(x, 2), ((3, *IMAGE[:axes]),)),
        Case(lambda x: f(x, 3, **options), ((2, 3, *IMAGE[:axes]),)),
    ]


CASES_OF_ELEMENTS: dict[str, Case | list[Case]] = {
    **{f"nn.{name}": of_first(name) for name in OF_FIRST},
    **{f"arrays.{name}": Case(getattr(a, name), (X,), *RANGES.get(name, (-2.0, 2.0))) for name in OF_ONE},
    # Both arguments are broadcast along an axis.
    **{
        f"arrays.{name}": Case(getattr(a, name), ((3, 1, 4), (2, 1)), 0.5, 2.0 + ("i" in name))
        for name in OF_TWO
    },
    **{f"nn.{name}": Case(getattr(n, name), (X, X), 0.6, 0.9) for name in GRADIENTS},
    "arrays.where": Case(lambda x, y: a.where(Y > 0.5, x, y), (X, (4,))),
    "arrays.softmax": Case(lambda x: a.softmax(x, axis=1)),
    "arrays.log_softmax": Case(lambda x: a.log_softmax(x, axis=0)),
    "AccelRef.T": Case(lambda x: x.T),
    "AccelRef.__getitem__": [
        Case(lambda x: x[1]), Case(lambda x: x[-1, 1:3]),
        Case(lambda x: x[:, None, 2:]), Case(lambda x: x[..., 1]),
    ],
    "AccelRef.copy": [Case(lambda x: x.copy()), Case(lambda x: x.cast("float64"))],
    "AccelRef.mT": Case(lambda x: x.mT, ((2, 3, 4),)),
    "AccelRef.reshape": Case(lambda x: x.reshape(2, -1)),
    "arrays.broadcast_to": Case(lambda x: a.broadcast_to(x, (2, 3, 4)), ((3, 1),)),
    "arrays.concat": Case(lambda x, y: a.concat([x, 2 * y, x], axis=1), ((3, 4), (3, 2))),
    "arrays.expand_dims": Case(lambda x: a.expand_dims(x, axis=1)),
    "arrays.layer_norm": [
        Case(a.layer_norm, ((3, 4), (4,), (4,))),
        Case(lambda x, w: a.layer_norm(x, w, axis=-1, eps=0.1), ((3, 4), (4,))),
        Case(a.layer_norm),
    ],
    "arrays.logsumexp": [
        Case(lambda x: a.logsumexp(x, axis=0)), Case(lambda x: a.logsumexp(x, keepdims=True)),
    ],
    "arrays.matrix_transpose": Case(a.matrix_transpose, ((2, 3, 4),)),
    "arrays.mean": [Case(a.mean), Case(lambda x: a.mean(x, axis=-1, keepdims=True))],
    "arrays.moveaxis": Case(lambda x: a.moveaxis(x, 0, -1), ((2, 3, 4),)),
    "arrays.permute_dims": Case(lambda x: a.permute_dims(x, (2, 0, 1)), ((2, 3, 4),)),
    "arrays.reshape": Case(lambda x: a.reshape(x, (4, 3))),
    "arrays.rms_norm": [Case(a.rms_norm, ((3, 4), (4,))), Case(lambda x: a.rms_norm(x, axis=0, eps=0.1))],
    "arrays.squeeze": Case(lambda x: a.squeeze(x, axis=1), ((3, 1, 4),)),
    "arrays.stack": Case(lambda x, y: a.stack([x, y * y, x], axis=1), ((3, 4), (3, 4))),
    "arrays.sum": [Case(a.sum), Case(lambda x: a.sum(x, axis=(0,), keepdims=True))],
    "arrays.swapaxes": Case(lambda x: a.swapaxes(x, 0, 2), ((2, 3, 4),)),
    "linalg.matmul": [
        Case(matmul, shapes)
        for shapes in (
            ((3, 4), (4, 2)), ((4,), (4, 2)), ((3, 4), (4,)), ((4,), (4,)), ((2, 3, 4), (4, 5)),
            ((3, 4), (5, 4, 2)), ((2, 1, 3, 4), (5, 4, 2)), ((4,), (2, 4, 3)),
        )
    ],
    "nn.batch_norm": [
        Case(lambda x, w, b: n.batch_norm(x, MEANS, VARIANCES, w, b), ((2, 4, 3), (4,), (4,))),
        Case(lambda x: n.batch_norm(x, MEANS, VARIANCES, eps=0.1), ((2, 4),)),
    ],
    **{f"nn.conv{k}d": convolutions(getattr(n, f"conv{k}d"), k) for k in (1, 2, 3)},
    **{
        f"nn.conv_transpose{k}d": [
            Case(getattr(n, f"conv_transpose{k}d"), ((2, 4, *IMAGE[:k]), (4, 3, *(2,) * k), (3,))),
            Case(
                partial(getattr(n, f"conv_transpose{k}d"), stride=2, padding=1, output_padding=1, groups=2),
                ((4, *IMAGE[:k]), (4, 3, *(3,) * k), (6,)),
            ),
        ]
        for k in (1, 2, 3)
    },
    **{
        f"nn.{kind}_pool{k}d": pools(kind, getattr(n, f"{kind}_pool{k}d"), k)
        for kind in ("max", "avg", "adaptive_max", "adaptive_avg") for k in (1, 2, 3)
    },
    "nn.group_norm": [
        Case(lambda x, w, b: n.group_norm(x, 2, w, b), ((2, 4, 3, 2), (4,), (4,))),
        Case(lambda x, b: n.group_norm(x, 4, 1, b, eps=0.1), ((2, 4, 3), (4,))),
    ],
    "nn.instance_norm": Case(n.instance_norm, ((2, 4, 3, 2), (4,), (4,))),
    "nn.margin_ranking_loss": [
        Case(lambda x, y: n.margin_ranking_loss(x, y, SIGNS, margin=0.3), (X, X)),
        Case(lambda x, y: n.margin_ranking_loss(x, y, SIGNS, reduction="none"), (X, X)),
    ],
    "nn.prelu": Case(n.prelu, ((3, 4, 2), (4, 1))),
    "nn.scaled_dot_product_attention": [
        Case(n.scaled_dot_product_attention, ((2, 3, 4), (2, 5, 4), (2, 5, 6))),
        Case(lambda q, k, v: n.scaled_dot_product_attention(q, k, v, None, 0.0, True, 0.3),
             ((2, 4, 3, 4), (2, 4, 3, 4), (2, 4, 3, 4))),
        Case(lambda q, k, v: n.scaled_dot_product_attention(q, k, v, MASK, enable_gqa=True),
             ((2, 4, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4))),
    ],
    "nn.embedding": Case(lambda w: n.embedding(ROWS, w), ((5, 3),)),
    # Other derived functions.
    "arrays.heaviside": Case(lambda y: a.heaviside(np.array([0.0, 1.0, -1.0, 0.0]), y), (X,)),
    "arrays.nextafter": Case(lambda x: a.nextafter(x, 9.0)),
    "arrays.lerp": [
        Case(a.lerp, (X, X, (4,))), Case(lambda x, y: a.lerp(x, y, 0.0), (X, X)),
        Case(lambda x, w: a.lerp(x, np.ones(4), w), (X, X)),
    ],
    "nn.prelu_grad": Case(n.prelu_grad, (X, X, (4,)), 0.5),
    "nn.threshold_grad": Case(lambda g, x: n.threshold_grad(g, x, 0.1, 2.0), (X, X), 0.5),
    "nn.softmax_grad": Case(lambda g, x: n.softmax_grad(g, x, axis=1), (X, X)),
    "nn.log_softmax_grad": Case(lambda g, x: n.log_softmax_grad(g, x, axis=0), (X, X)),
    **{
        f"nn.lp_pool{k}d": [
            Case(lambda x, f=n.__dict__[f"lp_pool{k}d"]: f(x, 3, 2), ((2, 3, *IMAGE[:k]),)),
            Case(lambda x, f=n.__dict__[f"lp_pool{k}d"]: f(x, 2.0, 3, 2, padding=1), ((3, *IMAGE[:k]),)),
        ]
        for k in (1, 2, 3)
    },
    "nn.nll_loss": [
        Case(lambda x: n.nll_loss(x, LABELS)),
        Case(lambda x: n.nll_loss(x, np.asarray(2), reduction="sum"), ((4,),)),
        Case(lambda x: n.nll_loss(x, np.array([[0, 9], [2, 1]]), Y[0], ignore_index=9), ((2, 4, 2),)),
        Case(lambda x: n.nll_loss(x, LABELS, Y[0], ignore_index=3, reduction="none")),
    ],
    "nn.normalize": Case(lambda x: n.normalize(x, axis=0)),
    "nn.pairwise_distance": Case(n.pairwise_distance, (X, X)),
    "nn.softmin": Case(lambda x: n.softmin(x, axis=1)),
    "nn.cosine_embedding_loss": Case(
        lambda x, y: n.cosine_embedding_loss(x, y, np.array([1.0, -1.0, 1.0]), margin=-0.5), (X, X)
    ),
    "nn.triplet_margin_loss": Case(lambda x, y, z: n.triplet_margin_loss(x, y, z, margin=3.0), (X, X, X)),
    "nn.linear": [
        Case(n.linear, ((2, 3, 4), (5, 4), (5,))), Case(n.linear, ((3, 4), (5, 4))),
        *[
            Case(lambda x, w, b, kind=kind: n.linear(x, w, b, kind), ((2, 3, 4), (5, 4), (5,)))
            for kind in ("relu", "gelu")
        ],
    ],
}  # fmt: skip
