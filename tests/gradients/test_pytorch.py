"""Gradients against PyTorch's in float64, if it is installed and has the function."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from gradient_cases import (
    CASES_OF_ELEMENTS,
    LABELS,
    MASK,
    MEANS,
    ROWS,
    SIGNS,
    TARGETS,
    VARIANCES,
    Case,
    X,
    Y,
    numbers,
)
from gradient_cases_of_arrays import CASES_OF_ARRAYS, NANS
from gradient_cases_of_libraries import CASES_OF_LIBRARIES, NORM_ORDERS, NORMS, SHIFT
from gradient_cases_of_results import CASES_OF_RESULTS, OF_SVD, SHAPES
from gradient_cases_of_slopes import CASES_OF_SLOPES

import trio_accel as ta

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
a: Any = ta.arrays
F: Any = torch.nn.functional
T: Any = torch.linalg
S: Any = torch.special
R: Any = torch.fft
t = torch.tensor
CASES = CASES_OF_ELEMENTS | CASES_OF_ARRAYS | CASES_OF_LIBRARIES | CASES_OF_RESULTS | CASES_OF_SLOPES
SHIFTS = t(SHIFT)

# Functions with one name and one argument, or two, in both libraries.
OF_ELEMENTS = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "digamma", "erf", "erfc",
    "erfinv", "exp", "exp2", "expm1", "frac", "i0", "log", "log10", "log1p", "log2", "logit",
    "negative", "positive", "real", "reciprocal", "rsqrt", "sin", "sinc", "sinh", "sqrt", "square",
    "tan", "tanh", "add", "atan2", "copysign", "divide", "fmax", "fmin", "hypot", "logaddexp", "logaddexp2",
    "maximum", "minimum", "multiply", "pow", "remainder", "subtract", "xlogy", "fmod",
)  # fmt: skip
OTHER_NAMES = {
    "degrees": torch.rad2deg,
    "radians": torch.deg2rad,
    "gammaln": torch.lgamma,
    "i1": S.i1,
    "entr": S.entr,
    "erfcx": S.erfcx,
    "log_ndtr": S.log_ndtr,
    "ndtr": S.ndtr,
    "ndtri": S.ndtri,
    "xlog1py": S.xlog1py,
    "log_expit": F.logsigmoid,
    "expit": torch.sigmoid,
}
ACTIVATIONS = (
    "celu", "elu", "gelu", "glu", "hardshrink", "hardswish", "hardtanh", "leaky_relu", "mish",
    "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softshrink", "softsign", "tanhshrink",
)  # fmt: skip


def of_target(name: str) -> Callable[..., Any]:
    return lambda x: getattr(F, name)(x, t(TARGETS[name]))


def spectrum(f: Any, **how: Any) -> Callable[..., Any]:
    """A transform of real or complex numbers, with its parts mixed as in the cases."""

    def run(x: Any, y: Any = None) -> Any:
        z = f(x if y is None else torch.complex(x, y), **how)
        return (z * (0.7 - 1.3j)).real if z.is_complex() else z

    return run


def with_nan(f: Any, **how: Any) -> Callable[..., Any]:
    return lambda x: f(torch.where(t(NANS), np.nan, x), **how)


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.layer_norm(x, weight.shape, weight, bias)


def joined(parts: Any) -> Any:
    return torch.cat([one.reshape(-1) for one in parts])


def of_eigh(x: Any) -> Any:
    w, v = T.eigh(x + x.mT)
    return joined([w, v * v, (v * torch.exp(w * 0.1)[..., None, :]) @ v.mT])


def of_svd(x: Any, kind: str = "all", *, is_full: bool = False) -> Any:
    return joined(OF_SVD[kind](*T.svd(x, full_matrices=is_full)))


def mixed(z: Any) -> Any:
    return (z * (0.7 - 1.3j)).real


def of_complex(x: Any) -> Any:
    z = x[0] + 1j * x[1]
    w, v = T.eigh(z + z.mH)
    u, s, vh = T.svd(z, full_matrices=False)
    sign, logarithm = T.slogdet(z)
    values, vectors = T.eig(z)
    made = [w, v.abs() ** 2, u.abs() ** 2, s, vh.abs() ** 2, *map(mixed, T.qr(z)), mixed(u @ vh)]
    return joined([*made, mixed(sign), logarithm, mixed(values * values), vectors.abs() ** 2])


def normalized_batch(x: Any, w: Any = None, b: Any = None, eps: float = 1e-5) -> Any:
    others = (0, *range(2, x.ndim))
    made = F.batch_norm(x, None, None, w, b, training=True, eps=eps)
    return made, x.mean(others), x.var(others, correction=0)


def of_generalised(x: Any, y: Any) -> Any:
    """The problem for the inverse of the triangular factor."""
    root = T.inv(T.cholesky(y @ y.mT + SHIFTS))
    w, v = T.eigh(root @ (x + x.mT) @ root.mT)
    return joined([w, (root.mT @ v) ** 2])


def of_lu(x: Any) -> Any:
    return mixed(T.lu_factor(x[0] + 1j * x[1])[0]) if x.shape == (2, 4, 4) else T.lu_factor(x)[0]


def of_lu_solve(x: Any, b: Any, k: int) -> Any:
    return T.lu_solve(*T.lu_factor(x), b, adjoint=bool(k)) ** 2


def parts_of_polar(x: Any, left: bool = False) -> Any:
    w, s, vh = T.svd(x, full_matrices=False)
    return w @ vh, (w * s[..., None, :]) @ w.mT if left else (vh.mT * s[..., None, :]) @ vh


def parts_of_lstsq(x: Any, b: Any) -> Any:
    solution = T.lstsq(x, b, driver="gels")[0] if x.shape[0] >= x.shape[1] else T.pinv(x) @ b
    residuals = ((b - x @ solution) ** 2).sum(0) if x.shape[0] > x.shape[1] else x[:0, 0]
    return solution, residuals, T.svdvals(x)


def of_polar(x: Any, left: bool) -> Any:
    return joined(parts_of_polar(x, left))


def of_slogdet(x: Any) -> Any:
    sign, logarithm = T.slogdet(x + SHIFTS)
    return joined([sign, logarithm * sign])


def slope_of(f: Any, **how: Any) -> Callable[..., Any]:
    """The gradient of a loss by its first argument, which has a gradient in turn."""

    def run(*given: Any) -> Any:
        g, x = given if len(given) > 1 else (torch.tensor(1.5, dtype=torch.float64), *given)
        (made,) = torch.autograd.grad(f(x, **how), x, g, create_graph=True)
        # Some do not depend on the argument.
        return made + 0 * x

    return run


LOSSES: dict[str, Callable[..., Any]] = {
    **{
        name: lambda x, name=name, **how: getattr(F, name)(x, t(TARGETS[name]), **how)
        for name in (
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
            "hinge_embedding_loss",
            "huber_loss",
            "l1_loss",
            "mse_loss",
            "poisson_nll_loss",
            "smooth_l1_loss",
            "soft_margin_loss",
        )
    },
    "gaussian_nll_loss": lambda x, **how: F.gaussian_nll_loss(x, t(Y), torch.ones(X), **how),
    # PyTorch warns of its mean.
    "kl_div": lambda x, reduction="": (
        F.kl_div(x, t(Y), reduction=reduction or "sum") / (1 if reduction else x.numel())
    ),
}
TORCH: dict[str, Callable[..., Any] | list[Callable[..., Any] | None]] = {
    **{f"arrays.{name}": getattr(torch, name) for name in OF_ELEMENTS},
    **{f"arrays.{name}": f for name, f in OTHER_NAMES.items()},
    **{f"nn.{name}": getattr(F, name) for name in ACTIVATIONS},
    **{f"nn.{name}": of_target(name) for name in TARGETS if hasattr(F, name)},
    **{
        f"nn.{name}_grad": [slope_of(f), slope_of(f, reduction="none"), slope_of(f, reduction="sum")]
        for name, f in LOSSES.items()
    },
    "nn.cross_entropy_grad": [
        slope_of(lambda x: F.cross_entropy(x, t(LABELS))),
        slope_of(lambda x: F.cross_entropy(x, t(LABELS), reduction="sum")),
        slope_of(lambda x: F.cross_entropy(x, t(LABELS), reduction="none")),
        slope_of(lambda x: F.cross_entropy(x, t(2), label_smoothing=0.2)),
    ],
    "arrays.lerp": torch.lerp,
    "nn.log_sigmoid": F.logsigmoid,
    # PyTorch's own has 1/6 in float32.
    "nn.hardsigmoid": lambda x: F.relu6(x + 3) / 6,
    # PyTorch warns of its mean.
    "nn.kl_div": lambda x: F.kl_div(x, t(Y), reduction="sum") / x.numel(),
    "nn.threshold": lambda x: F.threshold(x, 0.3, 0.1),
    "nn.gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, t(Y), torch.ones(X)),
    "nn.hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, t(SIGNS)),
    "nn.margin_ranking_loss": lambda x, y: F.margin_ranking_loss(x, y, t(SIGNS), margin=0.3),
    "nn.cosine_embedding_loss": lambda x, y: F.cosine_embedding_loss(x, y, t([1, -1, 1]), margin=-0.5),
    "nn.triplet_margin_loss": lambda x, y, z: F.triplet_margin_loss(x, y, z, margin=3.0),
    "nn.pairwise_distance": F.pairwise_distance,
    "nn.normalize": lambda x: F.normalize(x, dim=0),
    "nn.softmin": lambda x: F.softmin(x, dim=1),
    "nn.nll_loss": lambda x: F.nll_loss(x, t(LABELS)),
    "nn.linear": [F.linear, F.linear],
    "nn.embedding": lambda w: F.embedding(t(ROWS), w),
    "nn.prelu": lambda x, w: F.prelu(x, w[:, 0]),
    "nn.batch_norm_training": [
        *[lambda x, w, b: joined(normalized_batch(x, w, b))] * 3, lambda x: normalized_batch(x)[0],
        *[lambda x, w, b, k=k: normalized_batch(x, w, b, 0.1)[k] + (w * b).sum() for k in (1, 2)],
    ],
    "nn.batch_norm": lambda x, w, b: F.batch_norm(x, t(MEANS), t(VARIANCES), w, b),
    "nn.group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "nn.instance_norm": lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    "nn.scaled_dot_product_attention": [
        F.scaled_dot_product_attention,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, t(MASK), enable_gqa=True),
    ],
    **{
        f"nn.conv{k}d": [
            getattr(F, f"conv{k}d"), partial(getattr(F, f"conv{k}d"), padding="same"),
            partial(getattr(F, f"conv{k}d"), stride=2, padding=1, dilation=2, groups=2),
        ]
        for k in (1, 2, 3)
    },
    **{
        f"nn.conv_transpose{k}d": [
            getattr(F, f"conv_transpose{k}d"),
            partial(getattr(F, f"conv_transpose{k}d"), stride=2, padding=1, output_padding=1, groups=2),
        ]
        for k in (1, 2, 3)
    },
    **{f"nn.{kind}_pool{k}d": [
        partial(getattr(F, f"{kind}_pool{k}d"), kernel_size=2),
        partial(getattr(F, f"{kind}_pool{k}d"), kernel_size=3, stride=2, padding=1, ceil_mode=True,
                **({"count_include_pad": False} if kind == "avg" else {})),
    ] for kind in ("max", "avg") for k in (1, 2, 3)},
    **{f"nn.adaptive_{kind}_pool{k}d": partial(getattr(F, f"adaptive_{kind}_pool{k}d"), output_size=2)
       for kind in ("max", "avg") for k in (1, 2, 3)},
    # Reductions, shapes, parts and scans.
    **{f"arrays.{name}": [torch.sum if name == "sum" else torch.mean, last]
       for name, last in (("sum", lambda x: torch.sum(x, 0, keepdim=True)),
                          ("mean", lambda x: torch.mean(x, -1, keepdim=True)))},
    **{
        f"arrays.{name}": [f, partial(f, dim=0), partial(f, dim=(0, -1), keepdim=True)]
        for name, f in (("max", torch.amax), ("min", torch.amin))
    },
    "arrays.prod": [torch.prod, lambda x: torch.prod(x, 0)],
    **{f"arrays.{name}": [lambda x, f=f: f(x, correction=0), lambda x, f=f: f(x, 0, correction=1)]
       for name, f in (("var", torch.var), ("std", torch.std))},
    "arrays.nansum": [with_nan(torch.nansum, dim=0), with_nan(torch.nansum, dim=-1, keepdim=True)],
    "arrays.nanmean": [with_nan(torch.nanmean, dim=0), with_nan(torch.nanmean, dim=-1, keepdim=True)],
    "arrays.nan_to_num": with_nan(torch.nan_to_num),
    "arrays.logsumexp": [
        lambda x: torch.logsumexp(x, 0), lambda x: torch.logsumexp(x, (0, 1), keepdim=True),
    ],
    "arrays.softmax": lambda x: torch.softmax(x, 1),
    "arrays.log_softmax": lambda x: torch.log_softmax(x, 0),
    "arrays.layer_norm": layer_norm,
    "arrays.rms_norm": lambda x, w: F.rms_norm(x, (4,), w, 1e-6),
    "arrays.cov": [torch.cov, lambda x: torch.cov(x, correction=0)],
    "arrays.corrcoef": torch.corrcoef,
    "arrays.cosine_similarity": lambda x, y: torch.cosine_similarity(x, y, dim=0),
    "arrays.quantile": [
        lambda x: torch.quantile(x, 0.3, dim=1),
        lambda x: torch.quantile(x, torch.tensor([0.1, 0.9], dtype=torch.float64)),
    ],
    "arrays.nanmedian": [
        with_nan(torch.nanquantile, q=0.5), with_nan(torch.nanquantile, q=0.5, dim=0, keepdim=True),
    ],
    "arrays.nanquantile": [
        with_nan(torch.nanquantile, q=0.3, dim=1),
        with_nan(torch.nanquantile, q=t([0.0, 0.9, 1.0], dtype=torch.float64)),
        lambda x: torch.nanquantile(x, 0.6, dim=0, keepdim=True),
    ],
    "arrays.nanpercentile": with_nan(torch.nanquantile, q=t([0.25, 0.6], dtype=torch.float64), dim=1),
    "arrays.where": lambda x, y: torch.where(t(Y > 0.5), x, y),
    "arrays.broadcast_to": lambda x: torch.broadcast_to(x, (2, 3, 4)),
    "arrays.concat": lambda x, y: torch.concat([x, 2 * y, x], 1),
    "arrays.stack": lambda x, y: torch.stack([x, y * y, x], 1),
    "arrays.clip": [
        lambda x: torch.clip(x, -1, 1), torch.clip, lambda x: torch.clip(x, max=0.5),
    ],
    "arrays.diag": lambda x: torch.diag(x, 1),
    "arrays.diagonal": [
        torch.diagonal, lambda x: torch.diagonal(x, 2), lambda x: torch.diagonal(x, -1, -2, -1),
    ],
    "arrays.flip": [lambda x: torch.flip(x, (0, 1)), lambda x: torch.flip(x, (1,))],
    "arrays.rot90": [torch.rot90, lambda x: torch.rot90(x, 3, (2, 0))],
    "arrays.roll": [lambda x: torch.roll(x, 2), lambda x: torch.roll(x, (1, -2), (0, 1))],
    "arrays.tile": [lambda x: torch.tile(x, (2,)), lambda x: torch.tile(x, (2, 1, 3))],
    "arrays.repeat": [
        lambda x: torch.repeat_interleave(x, 2), lambda x: torch.repeat_interleave(x, 3, 0),
    ],
    "arrays.pad": [
        lambda x: F.pad(x, (1, 1, 1, 1)), lambda x: F.pad(x, (0, 3, 1, 2), value=2.0),
        *[lambda x, mode=mode: F.pad(x[None], (0, 3, 1, 2), mode)[0] for mode in ("replicate", "reflect")],
    ],
    "arrays.tril": lambda x: torch.tril(x, -1),
    "arrays.triu": lambda x: torch.triu(x, 1),
    "arrays.cumulative_sum": lambda x: torch.cumsum(x, 0),
    "arrays.cumulative_prod": [lambda x: torch.cumprod(x, 0), lambda x: torch.cumprod(x, 0)],
    "arrays.cumulative_max": lambda x: torch.cummax(x, 1)[0],
    "arrays.cumulative_min": lambda x: torch.cummin(x, 0)[0],
    "arrays.cumulative_logsumexp": [
        lambda x: torch.logcumsumexp(x, 0), lambda x: torch.logcumsumexp(x, 0),
    ],
    "arrays.sort": [lambda x: torch.sort(x)[0], lambda x: torch.sort(x, 0, descending=True)[0]],
    "arrays.take": [lambda x: x[:, [2, 0, 0, -1]], lambda x: x[LABELS], lambda x: x[ROWS]],
    "arrays.take_along_axis": lambda x: torch.take_along_dim(x, t([[3, 0], [1, 1], [0, 2]]), 1),
    "arrays.diff": [torch.diff, lambda x, y: torch.diff(x, n=2, dim=0, prepend=y)],
    "arrays.trapezoid": [
        lambda y: torch.trapezoid(y, dx=0.5), lambda y, x: torch.trapezoid(y, x[:, None], dim=0),
    ],
    # Matrices.
    "linalg.matmul": [torch.matmul] * 8,
    "linalg.solve": [lambda x, b: T.solve(x + SHIFTS, b)] * 3,
    "linalg.inv": lambda x: T.inv(x + SHIFTS),
    "linalg.det": lambda x: T.det(x + SHIFTS),
    "linalg.cholesky": [lambda x: T.cholesky(x @ x.mT + SHIFTS),
                        lambda x: T.cholesky(x @ x.mT + SHIFTS, upper=True)],
    "linalg.multi_dot": [lambda *xs: T.multi_dot(xs)] * 2,
    "linalg.cond": [lambda x, p=p: T.cond(x + SHIFTS, p) for p in (None, -2)],
    "arrays.gradient": lambda x: torch.gradient(x, spacing=0.5, dim=1)[0],
    "linalg.expm": torch.matrix_exp,
    "linalg.pinv": [T.pinv, T.pinv],
    "linalg.matrix_power": [lambda x, k=k: T.matrix_power(x + SHIFTS, k) for k in (3, -2, 1)],
    "linalg.svdvals": T.svdvals,
    "linalg.eigvalsh": lambda x: T.eigvalsh(x + x.mT),
    "linalg.eigvals": lambda x: mixed(T.eigvals(x)),
    "linalg.solve_triangular": [
        lambda x, b: T.solve_triangular(x + SHIFTS, b, upper=True),
        lambda x, b: T.solve_triangular((x + SHIFTS).mT, b, upper=True),
        lambda x, b: T.solve_triangular((x + SHIFTS).mT, b, upper=True, unitriangular=True),
        lambda x, b: T.solve_triangular((x + SHIFTS).mT, b, upper=False, unitriangular=True),
    ],
    "linalg.cho_solve": [
        lambda x, b, up=up: torch.cholesky_solve(b, T.cholesky(x @ x.mT + SHIFTS, upper=up), upper=up)
        for up in (False, True)
    ],
    "linalg.einsum": [
        lambda *xs, text=text: torch.einsum(text, *xs)
        for text in (
            *("ij,jk->ki", "bij,j->b", "...ij,jk->...ki", "...i,...i", "a...,b...->ab..."),
            *("ij,jk->ik", "ij,ij->", "ij,kj->k", "ii", "ii->i", "iij,jki->k", "ij->j", "ij,kj"),
        )
    ],
    "linalg.tensordot": [
        lambda x, y: torch.tensordot(x, y, 1), lambda x, y: torch.tensordot(x, y, ((0, 2), (1, 0))),
        lambda x, y: torch.tensordot(x, y, 0),
    ],
    "linalg.kron": torch.kron,
    "linalg.cross": [T.cross, lambda x, y: T.cross(x, y, dim=0)],
    "linalg.outer": torch.outer,
    "linalg.trace": torch.trace,
    "linalg.vecdot": lambda x, y: T.vecdot(x, y, dim=0),
    "linalg.vector_norm": [
        T.vector_norm, *[lambda x, k=k: T.vector_norm(x, k, 1, keepdim=True) for k in NORM_ORDERS],
    ],
    "linalg.matrix_norm": [
        lambda x, k=k: T.matrix_norm(x, k) for k in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)
    ],
    "linalg.dot": torch.dot,
    # Several results.
    "arrays.broadcast_arrays": lambda x, y: torch.mul(*torch.broadcast_tensors(x, y)),
    "arrays.meshgrid": [
        lambda x, y, z: joined(torch.meshgrid(x, y * y, z, indexing="xy")[1:]),
        lambda x, y: joined(torch.meshgrid(x, y * x, indexing="ij")),
    ],
    "arrays.split": lambda x: joined([one * one for one in torch.tensor_split(x, (1, 3), 1)[1:]]),
    "arrays.unstack": lambda x: torch.mul(*torch.unbind(x, 1)[:2]),
    "arrays.top_k": lambda x: torch.topk(x, 3)[0],
    "linalg.eigh": [
        of_eigh, of_eigh, of_complex, lambda x: T.eigh(x + x.mT)[0] ** 3, lambda x: T.eigh(x + x.mT)[1] ** 2,
        *[of_generalised] * 3,
    ],
    "linalg.svd": [
        *[lambda x, kind=kind: of_svd(x, kind) for _ in SHAPES for kind in OF_SVD],
        *[lambda x: T.svdvals(x) ** 2] * 2, partial(of_svd, is_full=True),
    ],
    "linalg.qr": [
        *[lambda x: joined(T.qr(x))] * len(SHAPES), *[lambda x, k=k: T.qr(x)[k] for k in (0, 1)],
        *[lambda x: T.qr(x)[1]] * len(SHAPES), lambda x: joined(T.qr(x, "complete")),
    ],
    "linalg.lu": [of_lu] * 6,
    "linalg.lu_solve": [
        *[lambda x, b, k=k: of_lu_solve(x, b, k) for k in (0, 1, 1)],
        *[lambda x, b, k=k: of_lu_solve(x, b[:, None], k)[:, 0] for k in (0, 1, 1)],
    ],
    "linalg.lstsq": [
        *[lambda x, b: joined(parts_of_lstsq(x, b)) for _ in range(3)],
        *[lambda x, b, k=k: parts_of_lstsq(x, b[:, None])[k].reshape(-1) for k in (0, 1, 2)],
    ],
    "linalg.polar": [
        *[lambda x, left=left: of_polar(x, left) for _ in SHAPES for left in (False, True)],
        *[lambda x, k=k: parts_of_polar(x)[k] for k in (0, 1)],
    ],
    "linalg.slogdet": [
        of_slogdet, lambda x: T.slogdet(x + SHIFTS)[1], lambda x: T.slogdet(x + SHIFTS)[0] * x.sum(),
    ],
    "linalg.eig": lambda x: joined([mixed(T.eig(x)[0] ** 2), T.eig(x)[1].abs() ** 2]),
    # Transforms.
    **{
        f"fft.{name}": [
            *[spectrum(getattr(R, name), norm=norm) for norm in NORMS],
            *[spectrum(getattr(R, name), n=k, dim=0) for k in (2, 5)],
        ]
        for name in ("fft", "ifft", "rfft", "ihfft")
    },
    **{
        f"fft.{name}": [
            *[spectrum(getattr(R, name), norm=norm) for norm in NORMS],
            *[spectrum(getattr(R, name), n=k, dim=0) for k in (3, 4, 8)],
        ]
        for name in ("irfft", "hfft")
    },
    **{
        f"fft.{name}": [
            spectrum(getattr(R, name)), spectrum(getattr(R, name), s=(2, 5), dim=(2, 0), norm="ortho"),
        ]
        for name in ("fftn", "ifftn", "fft2", "ifft2", "rfftn", "rfft2", "irfftn", "irfft2")
    },
    "fft.fftshift": [R.fftshift, lambda x: R.fftshift(x, 1)],
    "fft.ifftshift": R.ifftshift,
}  # fmt: skip


def twins() -> list[tuple[str, int]]:
    """Return the names and numbers of cases that PyTorch also has."""
    return [
        (name, number)
        for name, torchs in sorted(TORCH.items())
        for number in range(len(torchs) if isinstance(torchs, list) else 1)
    ]


@pytest.mark.parametrize(("name", "number"), twins())
async def test_gradients_match_pytorch(device: ta.Device, name: str, number: int) -> None:
    ours, torchs = CASES[name], TORCH[name]
    case: Case = ours[number] if isinstance(ours, list) else ours
    f: Any = torchs[number] if isinstance(torchs, list) else torchs
    tensors = [torch.tensor(one, requires_grad=True) for one in case.values()]
    made = f(*tensors)
    weights = numbers(tuple(made.shape), 99)
    (made * torch.tensor(weights)).sum().backward()
    arrays = [await device.put(one) for one in case.values()]
    value, found = await ta.value_and_grad(lambda p: a.sum(case.f(*p) * weights))(arrays)
    np.testing.assert_allclose(await value.item(), float((made.detach().numpy() * weights).sum()), rtol=1e-9)
    for slope, tensor in zip(found, tensors, strict=True):
        want = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        np.testing.assert_allclose(await slope.to_host(), want.numpy(), rtol=1e-9, atol=1e-12)


def stable_slope(row: Any, q: float) -> Any:
    """Return the gradient of a quantile: equal elements keep their order, so the first of NaNs counts."""
    order = np.argsort(row, kind="stable")
    slope, place = np.zeros_like(row), q * max(int((~np.isnan(row)).sum()) - 1, 0)
    slope[order[math.floor(place)]] += 1 - place % 1
    slope[order[math.ceil(place)]] += place % 1
    return slope


async def test_quantiles_of_equal_elements_and_of_nothing_but_nan(device: ta.Device) -> None:
    """PyTorch from 2.14 on chooses any of equal elements, so only the sums over these are the same."""
    host = np.array([[1, np.nan, 3, 2], [np.nan] * 4, [np.nan, np.nan, 5, np.nan], [1, 1, 2, 1]])
    for dtype in ("float64", "float32"):
        x_host = host.astype(dtype)
        x, tensor = await device.put(x_host), torch.tensor(x_host, requires_grad=True)
        for q in (0.0, 0.3, 0.5, 1.0):
            (want,) = torch.autograd.grad(torch.nanquantile(tensor, q, dim=1).sum(), tensor)
            found = await ta.grad(lambda x, q=q: a.sum(a.nanquantile(x, q, axis=1)))(x)
            assert found.dtype == dtype
            slopes = await found.to_host()
            np.testing.assert_allclose(slopes, [stable_slope(row, q) for row in x_host], rtol=1e-6)
            for row, slope, wanted in zip(x_host, slopes, want.numpy(), strict=True):
                for value in row:
                    equal = np.isnan(row) if np.isnan(value) else row == value
                    np.testing.assert_allclose(slope[equal].sum(), wanted[equal].sum(), rtol=1e-6, atol=1e-7)
