"""Gradients of functions of own operations: each function of the table against central differences."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import numpy as np
import pytest
import scipy.sparse
from chosen import BACKEND

import trio_accel as ta

a: Any = ta.arrays
n: Any = ta.nn
l: Any = ta.linalg  # noqa: E741
x_: Any = ta.fft
i_: Any = ta.ndimage
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
# Where the arguments of a function lie.
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
# Gradients that are expressions have gradients, too.
GRADIENTS = [
    name.removeprefix("nn.")
    for name, (word, _) in ta.gradients.words().items()
    if word == "derived" and name.endswith("_grad") and name not in ("nn.prelu_grad", "nn.threshold_grad")
]
IMAGE = (5, 4, 3)
MEANS, VARIANCES, MASK = numbers((4,)), numbers((4,), 1, 0.5, 2.0), numbers((3, 5), 3)


def convolutions(f: Any, axes: int) -> list[Case]:
    """Convolutions of images of so many axes: plain ones, and with all options."""
    options = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}
    return [
        Case(f, ((2, 4, *IMAGE[:axes]), (3, 4, *(2,) * axes), (3,))),
        Case(partial(f, padding="same"), ((4, *IMAGE[:axes]), (3, 4, *(3,) * axes))),
        Case(partial(f, **options), ((2, 4, *IMAGE[:axes]), (6, 2, *(2,) * axes), (6,))),
    ]


def pools(kind: str, f: Any, axes: int) -> list[Case]:
    """Pools of images of so many axes: plain ones, and with options."""
    if kind.startswith("adaptive"):
        return [Case(lambda x: f(x, 2), ((2, 3, *IMAGE[:axes]),))]
    options = {"stride": 2, "padding": 1, "ceil_mode": True}
    options |= {"count_include_pad": False} if kind == "avg" else {}
    return [
        Case(lambda x: f(x, 2), ((3, *IMAGE[:axes]),)),
        Case(lambda x: f(x, 3, **options), ((2, 3, *IMAGE[:axes]),)),
    ]


NANS = np.array([[True, False, False, False], [False, False, True, False], [False] * 4])
SHIFT = np.diag([5.0, 6.0, 7.0, 8.0])
NORMS = (None, "ortho", "forward")
NORM_ORDERS = (1, 2, 3, np.inf, -np.inf)
MODES = ("reflect", "mirror", "nearest", "wrap", "constant")
WEIGHTS = np.array([0.5, -1.0, 2.0, 0.3, 0.7])


def parts(z: Any) -> Any:
    """The real and imaginary parts of complex numbers, mixed by weights."""
    return a.real(z * (0.7 - 1.3j)) if z.dtype.kind == "complex" else z


CASES: dict[str, Case | list[Case]] = {
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
    # Reductions.
    **{
        f"arrays.{name}": [
            Case(getattr(a, name)), Case(lambda x, f=a.__dict__[name]: f(x, axis=0)),
            Case(lambda x, f=a.__dict__[name]: f(x, axis=(0, -1), keepdims=True), ((2, 3, 4),)),
        ]
        for name in ("max", "min", "nanmax", "nanmin", "prod", "ptp")
    },
    **{
        f"arrays.{name}": [
            Case(lambda x, f=a.__dict__[name]: f(a.where(NANS, np.nan, x), axis=0)),
            Case(lambda x, f=a.__dict__[name]: f(a.where(NANS, np.nan, x), axis=-1, keepdims=True)),
        ]
        for name in ("nansum", "nanmean", "nanprod", "nanvar", "nanstd")
    },
    **{
        f"arrays.{name}": [
            Case(getattr(a, name)), Case(lambda x, f=a.__dict__[name]: f(x, axis=0, correction=1)),
            Case(lambda x, f=a.__dict__[name]: f(x, axis=-1, keepdims=True)),
        ]
        for name in ("var", "std")
    },
    "arrays.zscore": Case(lambda x: a.zscore(x, axis=1, correction=1)),
    "arrays.skew": Case(lambda x: a.skew(x, axis=1)),
    "arrays.kurtosis": Case(lambda x: a.kurtosis(x, axis=0, keepdims=True)),
    "arrays.cosine_similarity": Case(lambda x, y: a.cosine_similarity(x, y, axis=0), (X, X)),
    "arrays.average": [
        Case(a.average), Case(lambda x, w: a.average(x, axis=1, weights=w), (X, X), 0.5),
        Case(lambda x, w: a.average(x, axis=0, weights=w), (X, (3,)), 0.5),
    ],
    "arrays.cov": [Case(a.cov), Case(lambda x: a.cov(x, correction=0), ((5,),))],
    "arrays.corrcoef": Case(a.corrcoef),
    "arrays.median": [Case(a.median), Case(lambda x: a.median(x, axis=0, keepdims=True))],
    "arrays.quantile": [
        Case(lambda x: a.quantile(x, 0.3, axis=1)), Case(lambda x: a.quantile(x, [0.1, 0.9])),
    ],
    "arrays.percentile": Case(lambda x: a.percentile(x, 30.0, axis=(0, 1), keepdims=True)),
    # Other shapes and parts.
    "AccelRef.transpose": Case(lambda x: x.transpose((2, 0, 1)), ((2, 3, 4),)),
    "arrays.clip": [
        Case(lambda x: a.clip(x, -1, 1)), Case(a.clip, (X, (4,), (3, 1))),
        Case(lambda x: a.clip(x, max=0.5)),
    ],
    "arrays.diag": [Case(lambda x: a.diag(x, k=1), ((3,),)), Case(lambda x: a.diag(x, k=-1), ((2, 3),))],
    **{
        f"{room}.diagonal": [
            Case(f), Case(lambda x, f=f: f(x, offset=2)), Case(lambda x, f=f: f(x, offset=-1), ((2, 4, 3),)),
        ]
        for room, f in (("arrays", a.diagonal), ("linalg", ta.linalg.diagonal))
    },
    "linalg.matrix_transpose": Case(ta.linalg.matrix_transpose, ((2, 3, 4),)),
    "arrays.flip": [Case(a.flip), Case(lambda x: a.flip(x, axis=1))],
    "arrays.rot90": [Case(a.rot90), Case(lambda x: a.rot90(x, 3, axes=(2, 0)), ((2, 3, 4),))],
    "arrays.roll": [
        Case(lambda x: a.roll(x, 2)), Case(lambda x: a.roll(x, (1, -2), axis=(0, 1))),
        Case(lambda x: a.roll(x, 1, axis=-1)),
    ],
    "arrays.tile": [Case(lambda x: a.tile(x, 2)), Case(lambda x: a.tile(x, (2, 1, 3))),
                    Case(lambda x: a.tile(x, (2,)), ((2, 3, 4),))],
    "arrays.repeat": [Case(lambda x: a.repeat(x, 2)), Case(lambda x: a.repeat(x, 3, axis=0))],
    "arrays.sliding_window_view": [
        Case(lambda x: a.sliding_window_view(x, (2, 3))), Case(lambda x: a.sliding_window_view(x, 2, axis=1)),
    ],
    "arrays.pad": [
        Case(lambda x: a.pad(x, 1)), Case(lambda x: a.pad(x, [(1, 2), (0, 3)], constant_values=2.0)),
        *[Case(lambda x, mode=mode: a.pad(x, [(1, 2), (0, 3)], mode=mode))
          for mode in ("edge", "reflect", "symmetric", "wrap")],
        Case(lambda x: a.pad(x, [(2, 3)], mode="wrap"), ((3,),)),
        Case(lambda x: a.pad(x, [(2, 0)], mode="edge"), ((1,),)),
    ],
    "arrays.tril": Case(lambda x: a.tril(x, k=-1)),
    "arrays.triu": Case(lambda x: a.triu(x, k=1), ((2, 3, 4),)),
    # Scans, orders and elements.
    "arrays.cumulative_sum": [
        Case(a.cumulative_sum, ((5,),)), Case(lambda x: a.cumulative_sum(x, axis=0, include_initial=True)),
    ],
    "arrays.cumulative_prod": [Case(a.cumulative_prod, ((5,),)),
        Case(lambda x: a.cumulative_prod(x, axis=0))],
    "arrays.cumulative_max": Case(lambda x: a.cumulative_max(x, axis=1)),
    "arrays.cumulative_min": Case(a.cumulative_min, ((7,),)),
    "arrays.cumulative_logsumexp": [
        Case(a.cumulative_logsumexp, ((5,),)), Case(lambda x: a.cumulative_logsumexp(x, axis=0)),
    ],
    "arrays.sort": [Case(a.sort), Case(lambda x: a.sort(x, axis=0, descending=True))],
    "arrays.take": [
        Case(lambda x: a.take(x, np.array([2, 0, 0, -1]), axis=1)), Case(lambda x: a.take(x, LABELS),
            ((4,),)),
        Case(lambda x: a.take(x, ROWS, axis=0), ((5, 3),)),
    ],
    "arrays.take_along_axis": [
        Case(lambda x: a.take_along_axis(x, np.array([[3, 0], [1, 1], [0, 2]]), axis=1)),
        Case(lambda x: a.take_along_axis(x, np.array([[3, 0], [1, 1]]), axis=1), ((1, 4),)),
    ],
    "arrays.gather_nd": Case(lambda x: a.gather_nd(x, (np.array([0, 2, 0]), np.array([1, 1, 1])))),
    "arrays.segmented_reduce": Case(
        lambda x: a.segmented_reduce(x, np.array([0, 2, 2, 5])), ((5,),)
    ),
    "arrays.diff": [
        Case(a.diff), Case(lambda x, y: a.diff(x, axis=0, n=2, prepend=y), (X, (1, 4))),
    ],
    "arrays.trapezoid": [
        Case(lambda y: a.trapezoid(y, dx=0.5)), Case(lambda y, x: a.trapezoid(y, x, axis=0), (X, (3,))),
    ],
    "arrays.nan_to_num": Case(lambda x: a.nan_to_num(a.where(NANS, np.nan, x))),
    "arrays.polyval": Case(a.polyval, ((4,), (3, 2))),
    "arrays.vander": [Case(a.vander, ((3,),)), Case(lambda x: a.vander(x, 4, increasing=True), ((3,),))],
    "arrays.select": Case(
        lambda x, y, z: a.select([Y > 0.7, Y > 0.4], [x, y], z), (X, (4,), (3, 1))
    ),
    "arrays.unwrap": Case(lambda x: a.unwrap(x * 3.0)),
    # Matrices.
    "linalg.solve": [
        Case(lambda x, b: l.solve(x + SHIFT, b), ((4, 4), (4, 2))),
        Case(lambda x, b: l.solve(x + SHIFT, b), ((4, 4), (4,))),
        Case(lambda x, b: l.solve(x + SHIFT, b), ((2, 4, 4), (2, 4, 3))),
    ],
    "linalg.solve_tridiagonal": [
        Case(lambda d, b: l.solve_tridiagonal(d * 0.3, d + 5.0, d * 0.2, b), ((5,), (5, 2))),
        Case(lambda d, b: l.solve_tridiagonal(d * 0.3, d + 5.0, d * 0.2, b), ((5,), (5,))),
    ],
    "linalg.inv": Case(lambda x: l.inv(x + SHIFT), ((2, 4, 4),)),
    "linalg.det": Case(lambda x: l.det(x + SHIFT), ((2, 4, 4),)),
    "linalg.cholesky": [
        Case(lambda x: l.cholesky(x @ x.mT + SHIFT), ((4, 4),)),
        Case(lambda x: l.cholesky(x @ x.mT + SHIFT, upper=True), ((2, 4, 4),)),
    ],
    "linalg.expm": Case(l.expm, ((3, 3),)),
    "linalg.pinv": [Case(l.pinv, ((5, 3),)), Case(l.pinv, ((3, 5),))],
    "linalg.matrix_power": [Case(lambda x, k=k: l.matrix_power(x + SHIFT, k), ((4, 4),)) for k in (3, -2, 1)],
    "linalg.svdvals": Case(l.svdvals, ((2, 4, 3),)),
    "linalg.eigvalsh": Case(lambda x: l.eigvalsh(x + x.mT), ((4, 4),)),
    "linalg.einsum": [
        Case(lambda x, y: l.einsum("ij,jk->ki", x, y), ((3, 4), (4, 2))),
        Case(lambda x, y: l.einsum("bij,j->b", x, y), ((2, 3, 4), (4,))),
        Case(lambda x: l.einsum("ij->j", x)), Case(lambda x, y: l.einsum("ij,kj", x, y), (X, (2, 4))),
    ],
    "tensor.einsum": Case(lambda x, y: ta.tensor.einsum("ij,jk->ki", x, y), ((3, 4), (4, 2))),
    "tensor.contract": Case(lambda x, y: ta.tensor.contract("ij,jk->ki", x, y, alpha=2.0), ((3, 4), (4, 2))),
    "tensor.permute": Case(lambda x: ta.tensor.permute("ij->ji", x, alpha=2.0)),
    "tensor.reduce": Case(lambda x: ta.tensor.reduce("ij->j", x)),
    "linalg.tensordot": [
        Case(lambda x, y: l.tensordot(x, y, axes=1), ((3, 4), (4, 2))),
        Case(lambda x, y: l.tensordot(x, y, axes=((0, 2), (1, 0))), ((3, 4, 2), (2, 3, 5))),
        Case(lambda x, y: l.tensordot(x, y, axes=0), ((3,), (2,))),
    ],
    "linalg.kron": Case(l.kron, ((2, 3), (3, 2))),
    "linalg.cross": [Case(l.cross, ((4, 3), (4, 3))), Case(lambda x, y: l.cross(x, y, axis=0), ((3, 2),
        (3, 1)))],
    "linalg.outer": Case(l.outer, ((3,), (4,))),
    "linalg.trace": [Case(l.trace), Case(lambda x: l.trace(x, offset=1), ((2, 3, 4),))],
    "linalg.vecdot": Case(lambda x, y: l.vecdot(x, y, axis=0), (X, X)),
    "linalg.vector_norm": [
        Case(l.vector_norm),
        *[Case(lambda x, k=k: l.vector_norm(x, axis=1, ord=k, keepdims=True)) for k in NORM_ORDERS],
    ],
    "linalg.matrix_norm": [
        Case(lambda x, k=k: l.matrix_norm(x, ord=k), ((2, 3, 4),))
        for k in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)
    ],
    "linalg.dot": Case(l.dot, ((4,), (4,))),
    "linalg.asum": Case(l.asum, ((4,),)),
    "linalg.nrm2": Case(l.nrm2, ((4,),)),
    # Transforms.
    **{
        f"fft.{name}": [
            Case(lambda x, f=x_.__dict__[name], norm=norm: parts(f(x, norm=norm))) for norm in NORMS
        ] + [Case(lambda x, f=x_.__dict__[name], k=k: parts(f(x, k, 0))) for k in (2, 5)]
        for name in ("fft", "ifft", "rfft", "ihfft")
    },
    **{
        f"fft.{name}": [
            Case(lambda x, y, f=x_.__dict__[name], norm=norm: parts(f(x + 1j * y, norm=norm)), (X, X))
            for norm in NORMS
        ] + [Case(lambda x, y, f=x_.__dict__[name], k=k: parts(f(x + 1j * y, k, 0)),
            (X, X)) for k in (3, 4, 8)]
        for name in ("irfft", "hfft")
    },
    **{
        f"fft.{name}": [
            Case(lambda x, f=x_.__dict__[name]: parts(f(x)), ((2, 3, 4),)),
            Case(lambda x, f=x_.__dict__[name]: parts(f(x, (2, 5), (2, 0), "ortho")), ((2, 3, 4),)),
        ]
        for name in ("fftn", "ifftn", "fft2", "ifft2", "rfftn", "rfft2")
    },
    **{
        f"fft.{name}": [
            Case(lambda x, y, f=x_.__dict__[name]: parts(f(x + 1j * y)), ((2, 3, 4), (2, 3, 4))),
            Case(lambda x, y, f=x_.__dict__[name]: parts(f(x + 1j * y, (2, 5), (2, 0), "ortho")),
                (IMAGE, IMAGE)),
        ]
        for name in ("irfftn", "irfft2")
    },
    **{
        f"fft.{name}": [
            Case(lambda x, f=x_.__dict__[name], kind=kind, norm=norm: f(x, kind, norm=norm))
            for kind in (2, 3) for norm in NORMS
        ] + [Case(lambda x, f=x_.__dict__[name]: f(x, 2, 5, 0))]
        for name in ("dct", "idct", "dst", "idst")
    },
    **{
        f"fft.{name}": Case(lambda x, f=x_.__dict__[name]: f(x, 2, norm="forward"), ((2, 3, 4),))
        for name in ("dctn", "idctn", "dstn", "idstn")
    },
    "fft.fftshift": [Case(x_.fftshift, ((3, 5),)), Case(lambda x: x_.fftshift(x, axes=1), ((3, 5),))],
    "fft.ifftshift": Case(x_.ifftshift, ((3, 5),)),
    **{
        f"fft.{name}": [
            Case(lambda x, y, f=x_.__dict__[name], mode=mode: f(x, y, mode), shapes)
            for mode in ("full", "same", "valid") for shapes in (((7,), (3,)), ((5, 6), (2, 3)))
        ]
        for name in ("convolve", "correlate", "fftconvolve", "oaconvolve")
    },
    # Filters.
    **{
        f"ndimage.{name}1d": [
            Case(lambda x, f=i_.__dict__[f"{name}1d"], mode=mode, k=k, o=o: f(
                x, WEIGHTS[:k], axis=1, mode=mode, origin=o),
                 ((3, 6),))
            for mode in MODES for k, o in ((3, 0), (4, 0), (5, 1))
        ]
        for name in ("correlate", "convolve")
    },
    **{
        f"ndimage.{name}": [
            Case(lambda x, f=i_.__dict__[name], mode=mode: f(x, np.outer(WEIGHTS[:3], WEIGHTS[:2]),
                mode=mode),
                 ((5, 6),))
            for mode in MODES
        ]
        for name in ("correlate", "convolve")
    },
    "ndimage.gaussian_filter": [
        Case(lambda x: i_.gaussian_filter(x, 1.0), ((6, 7),)),
        Case(lambda x: i_.gaussian_filter(x, [0.7, 0.0], order=[1, 0], mode=["wrap", "nearest"]), ((6, 7),)),
    ],
    "ndimage.gaussian_filter1d": Case(lambda x: i_.gaussian_filter1d(x, 0.8, axis=0, mode="mirror"),
        ((6, 2),)),
    "ndimage.gaussian_laplace": Case(lambda x: i_.gaussian_laplace(x, 0.8), ((6, 7),)),
    "ndimage.laplace": Case(lambda x: i_.laplace(x, mode="wrap"), ((6, 7),)),
    "ndimage.sobel": Case(lambda x: i_.sobel(x, axis=0), ((6, 7),)),
    "ndimage.prewitt": Case(lambda x: i_.prewitt(x, mode="constant"), ((6, 7),)),
    "ndimage.uniform_filter": Case(lambda x: i_.uniform_filter(x, (3, 4)), ((6, 7),)),
    "ndimage.uniform_filter1d": Case(lambda x: i_.uniform_filter1d(x, 4, axis=0), ((6, 2),)),
    "signal.lfilter": Case(lambda x: ta.signal.lfilter([1.0, 0.5], [1.0, -0.3, 0.2], x, axis=0), ((6, 2),)),
    "signal.sosfilt": Case(lambda x: ta.signal.sosfilt([[1.0, 0.5, 0.2, 1.0, -0.3, 0.1]], x), ((2, 6),)),
    "nn.normalize": Case(lambda x: n.normalize(x, axis=0)),
    "nn.pairwise_distance": Case(n.pairwise_distance, (X, X)),
    "nn.softmin": Case(lambda x: n.softmin(x, axis=1)),
    "nn.cosine_embedding_loss": Case(
        lambda x, y: n.cosine_embedding_loss(x, y, np.array([1.0, -1.0, 1.0]), margin=-0.5), (X, X)
    ),
    "nn.triplet_margin_loss": Case(lambda x, y, z: n.triplet_margin_loss(x, y, z, margin=3.0), (X, X, X)),
    "nn.linear": [Case(n.linear, ((2, 3, 4), (5, 4), (5,))), Case(n.linear, ((3, 4), (5, 4)))],
}  # fmt: skip
# They take more than arrays, and have tests of their own below.
ELSEWHERE = ("signal.evaluate_spline", "sparse.spmm", "sparse.spmv")
NUMBERED = [
    (name, number)
    for name, cases in sorted(CASES.items())
    for number in range(len(cases) if isinstance(cases, list) else 1)
]


def test_each_function_with_a_gradient_has_a_case() -> None:
    found = {name for name, (word, _) in ta.gradients.words().items() if word in ("derived", "rule")}
    assert {name for name in CASES if not name.startswith("AccelRef.")} == found - set(ELSEWHERE)


@pytest.mark.parametrize(("name", "number"), NUMBERED)
async def test_gradients_are_those_of_differences(device: ta.Device, name: str, number: int) -> None:
    cases = CASES[name]
    case = cases[number] if isinstance(cases, list) else cases
    values = case.values()
    try:
        # Views of arrays are arrays, which are no calls.
        shape = (await (case.f(*[await device.put(one) for one in values]) * 1.0)).shape
    except ta.NotSupportedError as error:
        if BACKEND == "cpu":
            raise
        pytest.skip(str(error))
    weights = numbers(shape, 99)

    def f(parameters: Any) -> Any:
        return a.sum(case.f(*parameters) * weights)

    value, found = await ta.value_and_grad(f)([await device.put(one) for one in values])
    np.testing.assert_allclose(await value.item(), await total(device, case, values, weights), rtol=1e-12)
    for place, slope in enumerate(found):
        assert (slope.shape, slope.dtype) == (values[place].shape, "float64")
        # Along a direction: each element for itself would ask a thousand times.
        direction = numbers(values[place].shape, 50, -1.0, 1.0)
        sides = []
        for sign in (1, -1):
            moved = [one.copy() for one in values]
            moved[place] += sign * 1e-5 * direction
            sides.append(await total(device, case, moved, weights))
        want = (sides[0] - sides[1]) / 2e-5
        np.testing.assert_allclose((await slope.to_host() * direction).sum(), want, rtol=1e-6, atol=1e-8)


async def total(device: ta.Device, case: Case, values: list[Any], weights: Any) -> float:
    made = await (case.f(*[await device.put(one) for one in values]) * 1.0)
    return float((await made.to_host() * weights).sum())


async def test_products_with_sparse_matrices(device: ta.Device) -> None:
    """The matrix is no array of the tape; the dense factor is."""
    dense = np.array([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]])
    matrix = await ta.sparse.csr(device, scipy.sparse.csr_array(dense))
    weights = numbers((2, 4))
    x, v = await device.put(numbers((3, 4))), await device.put(numbers((3,)))
    found = await ta.grad(lambda x: a.sum(ta.sparse.spmm(matrix, x, alpha=2.0) * weights))(x)
    np.testing.assert_allclose(await found.to_host(), 2 * dense.T @ weights)
    found = await ta.grad(lambda v: a.sum(ta.sparse.spmv(matrix, v) * weights[:, 0]))(v)
    np.testing.assert_allclose(await found.to_host(), dense.T @ weights[:, 0])


async def test_a_spline_has_the_derivative_of_its_pieces(device: ta.Device) -> None:
    knots = np.linspace(0.0, 3.0, 8)
    spline = await ta.signal.cubic_spline(knots, await device.put(np.sin(knots)))
    x = await device.put(np.array([0.3, 1.1, 2.6]))
    found = await ta.grad(lambda x: a.sum(ta.signal.evaluate_spline(spline, x)))(x)
    want = await ta.signal.evaluate_spline(spline, x, 1)
    np.testing.assert_allclose(await found.to_host(), await want.to_host())


async def test_parameters_in_dicts_and_lists_that_are_used_twice_or_never(device: ta.Device) -> None:
    given = {
        "w": [await device.put(numbers((3,))), await device.put(numbers((3,), 1))],
        "never": await device.put(Y),
    }

    def f(p: Any, x: Any) -> Any:
        return a.sum(p["w"][0] * p["w"][0] * x + a.exp(p["w"][1]) * p["w"][0])

    x = await device.put(numbers((3,), 2))
    value, found = await ta.value_and_grad(f)(given, x)
    w, v, hosts = numbers((3,)), numbers((3,), 1), numbers((3,), 2)
    np.testing.assert_allclose(await value.item(), (w * w * hosts + np.exp(v) * w).sum(), rtol=1e-14)
    np.testing.assert_allclose(await found["w"][0].to_host(), 2 * w * hosts + np.exp(v), rtol=1e-14)
    np.testing.assert_allclose(await found["w"][1].to_host(), np.exp(v) * w, rtol=1e-14)
    assert not (await found["never"].to_host()).any()
    alone = await ta.grad(f)(given, x)
    np.testing.assert_array_equal(await alone["w"][1].to_host(), await found["w"][1].to_host())


# Powers whose base is 0, negative or positive, with exponents of any sign.
BASES = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0, 3.0, -2.0, -2.0])
EXPONENTS = np.array([0.0, 1.0, 2.0, 0.5, 3.0, -1.0, 0.0, -1.5, 2.5, 0.0, 3.0])


def slopes_of_powers(a: Any, b: Any) -> tuple[Any, Any]:
    """The derivatives of a ** b, as PyTorch has them: a power of 0 does not change with its exponent."""
    with np.errstate(all="ignore"):
        of_base = np.where(b == 0, 0.0, b * a ** (b - 1))
        of_exponent = np.where((a == 0) & (b >= 0), 0.0, a**b * np.log(a))
    return of_base, of_exponent


@pytest.mark.parametrize("dtype", ["float64", "float32"])
async def test_powers_of_arrays(device: ta.Device, dtype: str) -> None:
    hosts = BASES.astype(dtype), EXPONENTS.astype(dtype)
    a_on, b_on = [await device.put(one) for one in hosts]
    want = slopes_of_powers(BASES, EXPONENTS)
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    both = await ta.grad(lambda p: a.sum(p[0] ** p[1]))([a_on, b_on])
    alone = [
        await ta.grad(lambda p: a.sum(p ** hosts[1]))(a_on),
        await ta.grad(lambda p: a.sum(hosts[0] ** p))(b_on),
    ]
    for found in (both, alone):
        for slope, expected in zip(found, want, strict=True):
            assert slope.dtype == dtype
            np.testing.assert_allclose(await slope.to_host(), expected, rtol=tolerance)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 0.5, -1, -2, 0.0, 2.0, np.float64(0.0), np.float32(2.0)])
async def test_powers_with_numbers(device: ta.Device, number: Any) -> None:
    for place, host in enumerate((BASES, np.array([0.0, 0.5, 1.0, 2.0, -1.0]))):
        if place == 1 and number < 0:
            continue
        x = await device.put(host)
        f = (lambda p: a.sum(p**number)) if place == 0 else (lambda p: a.sum(number**p))
        want = slopes_of_powers(*((host, np.float64(number)) if place == 0 else (np.float64(number), host)))[
            place
        ]
        np.testing.assert_allclose(await (await ta.grad(f)(x)).to_host(), want, rtol=1e-12)


OPERATORS = ["add", "sub", "mul", "truediv", "pow", "mod", "matmul"]


@pytest.mark.parametrize("is_reflected", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
async def test_operators_with_what_is_on_the_host(device: ta.Device, name: str, is_reflected: bool) -> None:
    f, host = getattr(operator, name), numbers((3, 3), 1, 0.3, 2.0)
    x, direction = await device.put(host), numbers((3, 3), 2)
    for other in (
        2.7,
        2,
        np.float64(1.3),
        np.float32(1.5),
        numbers((3, 3), 3, 0.3, 2.0),
        numbers((3,), 4, 0.3, 2.0),
    ):
        if name == "matmul" and not np.ndim(other):
            continue
        of: Any = (
            (lambda p, other=other: f(other, p)) if is_reflected else (lambda p, other=other: f(p, other))
        )
        found = await ta.grad(lambda p, of=of: a.sum(of(p)))(x)
        want = (of(host + 1e-6 * direction).sum() - of(host - 1e-6 * direction).sum()) / 2e-6
        np.testing.assert_allclose((await found.to_host() * direction).sum(), want, rtol=1e-7)


@pytest.mark.filterwarnings("error:.*was never awaited:RuntimeWarning")
async def test_nothing_is_left_of_calls_that_nobody_else_has_made(device: ta.Device) -> None:
    """Neither by gradients of some arguments alone, nor by a refusal after some of them were made."""
    x, w, v = [await device.put(numbers(shape, 1)) for shape in ((3, 4), (4, 4), (4,))]
    hosts = [numbers(shape, 2) for shape in ((3, 4), (4, 4), (4,))]
    for f, given in (
        (lambda p: a.sum(hosts[0] @ p), v),
        (lambda p: a.sum(p @ hosts[1]), v),
        (lambda p: a.sum(n.linear(x, w, p)), v),
        (lambda p: a.sum(a.layer_norm(x, 1, p)), v),
        (lambda p: a.sum(a.layer_norm(x, p, 0)), v),
        (lambda p: a.sum(n.batch_norm(x, v, v * v + 1.0, 1, p)), v),
    ):
        assert (await ta.grad(f)(given)).shape == given.shape
    refused: list[Callable[[Any], Any]] = [
        lambda p: a.sum(a.exp(ta.ndimage.median_filter(p * 2.0, 3) + p)),
        lambda p: n.mse_loss(p * 2.0, p + 1.0), lambda p: a.exp(p) * 2.0,
    ]  # fmt: skip
    for f in refused:
        with pytest.raises((ta.NotSupportedError, ValueError)):
            await ta.value_and_grad(f)(x)
    gc.collect()
