"""Cases of gradients: training, and the gradients of `nn`, with second derivatives for gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from gradient_cases import IMAGE, LABELS, RANGES, ROWS, TARGETS, Case, X, Y
from gradient_cases import OPTIONS as ARGUMENTS

import trio_accel as ta

a: Any = ta.arrays
n: Any = ta.nn
OPTIONS: dict[str, Any] = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}
WINDOWS: dict[str, Any] = {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}
PLACES = np.random.default_rng(3).permuted(np.tile(np.arange(9), (2, 3, 1)), axis=-1)[..., :4]


def joined(parts: Any) -> Any:
    return a.concat(list(parts), axis=None)


def norms(f: Any, shape: tuple[int, ...], factors: tuple[int, ...], **how: Any) -> list[Case]:
    """The gradients of a norm: all of them, with factors and without, and each one."""
    return [
        Case(lambda g, x, w: joined(f(g, x, weight=w, **how)), (shape, shape, factors)),
        Case(lambda g, x: joined(f(g, x, **how)), (shape, shape)),
        *[Case(lambda g, x, k=k: f(g, x, eps=0.1, **how)[k], (shape, shape)) for k in (0, 1)],
    ]


def of_loss(name: str, *rest: Any, **how: Any) -> list[Case]:
    """The gradient of a loss: of a number by each reduction, and by its other arguments."""
    f, at = getattr(n, f"{name}_grad"), RANGES.get(name, (-2.0, 2.0))
    rest = rest or ARGUMENTS.get(name, (TARGETS[name],) if name in TARGETS else ())
    return [
        Case(lambda g, x: f(g, x, *rest, **how), ((), X), *at),
        Case(lambda g, x: f(g, x, *rest, **how, reduction="none"), (X, X), *at),
        Case(lambda x: f(1.5, x, *rest, **how, reduction="sum"), (X,), *at),
    ]


LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
)
WITH_OPTIONS: dict[str, list[Case]] = {
    "binary_cross_entropy": [
        Case(n.binary_cross_entropy_grad, ((), X, X, (4,)), 0.1, 0.9),
    ],
    "binary_cross_entropy_with_logits": [
        Case(
            lambda g, x, y, w, v: n.binary_cross_entropy_with_logits_grad(g, x, y, w, pos_weight=v),
            ((), X, X, (4,), (3, 1)),
            0.1,
            0.9,
        ),
    ],
    "gaussian_nll_loss": [
        Case(lambda g, x, y, v: n.gaussian_nll_loss_grad(g, x, y, v, full=True), ((), X, X, (3, 1)), 0.2),
    ],
    "huber_loss": [Case(lambda g, x, y: n.huber_loss_grad(g, x, y, delta=0.7), ((), X, X))],
    "kl_div": [
        Case(lambda g, x, y: n.kl_div_grad(g, x, y, reduction="batchmean", log_target=True), ((), X, X)),
        Case(lambda g, x, y: n.kl_div_grad(g, x, y, reduction="batchmean"), ((), X, X), 0.2),
    ],
    "mse_loss": [Case(lambda g, x, y: n.mse_loss_grad(g, x, y, reduction="sum"), ((), X, X))],
    "poisson_nll_loss": [
        Case(lambda g, x, y: n.poisson_nll_loss_grad(g, x, y, log_input=False, full=True), ((), X, X), 0.2),
    ],
    "smooth_l1_loss": [Case(partial(n.smooth_l1_loss_grad, beta=beta), ((), X, X)) for beta in (0.7, 0.0)],
}


def of_attention(*shapes: tuple[int, ...], **how: Any) -> Case:
    """The gradients of an attention, with a result and logarithms that follow from its arguments."""

    def f(g: Any, q: Any, k: Any, v: Any) -> Any:
        made = n.scaled_dot_product_attention(q, k, v, **how, return_lse=True)
        return joined(n.scaled_dot_product_attention_grad(g, q, k, v, made[0], made[1], **how))

    return Case(f, shapes)


HEADS = (2, 4, 5, 2), (2, 4, 5, 3), (2, 4, 6, 3), (2, 4, 6, 2)
LENGTHS = {"query_lengths": np.array([5, 3]), "key_lengths": np.array([6, 4])}


CASES_OF_SLOPES: dict[str, Case | list[Case]] = {
    "nn.scaled_dot_product_attention_grad": [
        of_attention(*HEADS),
        of_attention(*HEADS, is_causal=True, scale=0.3),
        of_attention(*HEADS, window_size=(1, 2)),
        of_attention(*HEADS, attn_mask=np.arange(30).reshape(5, 6) % 7 > 2),
        of_attention(*HEADS, attn_mask=np.where(np.arange(30).reshape(5, 6) < 7, -np.inf, 0.5)),
        of_attention(*HEADS, **LENGTHS, is_causal=True, causal_alignment="lower_right"),
        of_attention(*HEADS[:2], (2, 2, 6, 3), (2, 2, 6, 2), enable_gqa=True),
        of_attention((5, 2), (5, 3), (6, 3), (6, 2), key_lengths=np.array(4)),
    ],
    "nn.batch_norm_training": [
        *[
            Case(lambda x, w, b: joined(n.batch_norm_training(x, w, b)), (shape, (3,), (3,)))
            for shape in ((4, 3), (4, 3, 2), (2, 3, 2, 2))
        ],
        Case(lambda x: n.batch_norm_training(x)[0], ((4, 3),)),
        *[
            Case(lambda x, w, b, k=k: n.batch_norm_training(x, w, b, eps=0.1)[k] + a.sum(w * b),
                 ((4, 3, 2), (3,), (3,)))
            for k in (1, 2)
        ],
    ],
    "nn.batch_norm_training_grad": norms(n.batch_norm_training_grad, (4, 3, 2), (3,)),
    "nn.instance_norm_grad": norms(n.instance_norm_grad, (2, 3, 4), (3,)),
    "nn.group_norm_grad": norms(n.group_norm_grad, (2, 4, 3), (4,), num_groups=2),
    "nn.layer_norm_grad": [
        *norms(n.layer_norm_grad, (3, 4), (4,)), *norms(n.layer_norm_grad, (2, 3, 4), (3, 1), axis=(-2, -1)),
    ],
    "nn.rms_norm_grad": norms(n.rms_norm_grad, (3, 4), (4,)),
    "nn.conv_input_grad": [
        Case(lambda w, g: n.conv_input_grad((2, 4, 5), w, g), ((3, 4, 2), (2, 3, 4))),
        Case(lambda w, g: n.conv_input_grad((2, 4, 5, 4), w, g, **OPTIONS), ((6, 2, 2, 2), (2, 6, 3, 2))),
        Case(lambda w, g: n.conv_input_grad((1, 2, *IMAGE), w, g, padding="same"),
             ((3, 2, 3, 3, 3), (1, 3, *IMAGE))),
    ],
    "nn.conv_weight_grad": [
        Case(lambda x, g: n.conv_weight_grad(x, (3, 4, 2), g), ((2, 4, 5), (2, 3, 4))),
        Case(lambda x, g: n.conv_weight_grad(x, (6, 2, 2, 2), g, **OPTIONS), ((2, 4, 5, 4), (2, 6, 3, 2))),
    ],
    **{f"nn.{name}_grad": [*of_loss(name), *WITH_OPTIONS.get(name, [])] for name in LOSSES},
    "nn.margin_ranking_loss_grad": [
        Case(lambda g, x, y, z: n.margin_ranking_loss_grad(g, x, y, z, margin=0.3, reduction="none"),
             (X, X, X, X)),
    ],
    "nn.cross_entropy_grad": [
        *of_loss("cross_entropy", LABELS)[::2],
        Case(lambda g, x: n.cross_entropy_grad(g, x, LABELS, reduction="none"), ((3,), X)),
        Case(lambda g, x: n.cross_entropy_grad(g, x, np.asarray(2), label_smoothing=0.2), ((), (4,))),
        *[
            Case(lambda g, x, w, how=how: n.cross_entropy_grad(
                g, x, np.array([[0, 9], [2, 1]]), w, ignore_index=9, label_smoothing=0.3, reduction=how),
                 (shape, (2, 4, 2), (4,)), 0.2)
            for how, shape in (("mean", ()), ("sum", ()), ("none", (2, 2)))
        ],
        Case(lambda g, x: n.cross_entropy_grad(g, x, LABELS, Y[0], ignore_index=3), ((), X)),
    ],
    "nn.conv_bias_grad": Case(n.conv_bias_grad, ((2, 3, 4, 2),)),
    "nn.linear_input_grad": Case(n.linear_input_grad, ((2, 3, 5), (5, 4))),
    "nn.linear_weight_grad": Case(lambda g, x: joined(n.linear_weight_grad(g, x)), ((2, 3, 5), (2, 3, 4))),
    "nn.avg_pool_grad": [
        Case(lambda g: n.avg_pool_grad(g, (2, 3, 5), 2), ((2, 3, 2),)),
        Case(lambda g: n.avg_pool_grad(g, (2, 3, 5, 4), **WINDOWS, count_include_pad=False), ((2, 3, 3, 3),)),
        Case(lambda g: n.avg_pool_grad(g, (1, 2, *IMAGE), 2, 1), ((1, 2, 4, 3, 2),)),
    ],
    "nn.adaptive_avg_pool_grad": Case(lambda g: n.adaptive_avg_pool_grad(g, (2, 3, 5, 4)), ((2, 3, 2, 3),)),
    "nn.max_pool_grad": Case(lambda g: n.max_pool_grad(g, PLACES, (2, 3, 9)), ((2, 3, 4),)),
    "nn.embedding_grad": [
        Case(lambda g: n.embedding_grad(g, ROWS, 5), ((2, 2, 3),)),
        Case(lambda g: n.embedding_grad(g, ROWS, 5, -1), ((2, 2, 3),)),
    ],
    "nn.gelu_grad": [
        Case(n.gelu_grad, (X, X)), Case(lambda g, x: n.gelu_grad(g, x, "tanh"), (X, X)),
        Case(lambda x: n.gelu_grad(2.0, x)),
    ],
    "nn.glu_grad": [
        Case(n.glu_grad, ((3, 2), X)), Case(lambda g, x: n.glu_grad(g, x, 0), ((2, 3), (4, 3))),
    ],
    "nn.dropout_grad": Case(lambda g: n.dropout_grad(g, Y > 0.5, 0.25)),
}  # fmt: skip
