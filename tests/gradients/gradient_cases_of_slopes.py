"""Cases of gradients: training, and the gradients of `nn`, whose gradients are second derivatives."""

from __future__ import annotations

from typing import Any

import numpy as np
from gradient_cases import IMAGE, ROWS, Case, X, Y

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


CASES_OF_SLOPES: dict[str, Case | list[Case]] = {
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
