"""Steps of optimizers that make a new state, as one launch, and leave the old state as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..devices import AccelRef, Call
from ..jit import Elementwise
from ._config import Optimizer
from ._layout import Work

__all__: list[str] = []

# The formulas of `nn.adamw` and `nn.sgd`, which change their arrays in place.
_TEXTS = {
    "adamw": """
        a = exp_avg + share * (grad - exp_avg)
        b = beta2 * exp_avg_sq + other * grad * grad
        p = shrink * parameters - lr * a / (sqrt(b) / root + eps)""",
    "sgd": "p = parameters - lr * (grad + weight_decay * parameters)",
    "momentum": """
        a = momentum * momentum_buffer + (grad + weight_decay * parameters)
        p = parameters - lr * a""",
}
_STEPS = {
    # The results are in the order of the state.
    name: Elementwise[Any](
        text, outputs=tuple("pab"[: text.count("=")]), operation=f"train.{name}", precision="float32"
    )
    for name, text in _TEXTS.items()
}


def changed(
    optimizer: Optimizer, state: Mapping[str, AccelRef], gradient: Any, work: Work, dtype: str
) -> Call[Any]:
    """Return a call of a step of an optimizer, which makes a tuple of new arrays in the order of the state.

    Args:
        optimizer: The optimizer.
        state: The parameters, and then the optimizer's arrays, by name.
        gradient: The gradient, of their dtype.
        work: The step.
        dtype: The dtype of all of them.
    """
    fixed: dict[str, float] = {**optimizer.numbers}
    varying, step = {"lr": work.rate}, _STEPS["momentum" if len(state) == 2 else optimizer.kind]
    if optimizer.kind == "adamw":
        betas = fixed["beta1"], fixed["beta2"]
        # 1 - beta**step, without a loss of digits.
        first, second = (-math.expm1(work.number * (math.log(beta) if beta else -math.inf)) for beta in betas)
        varying = {"lr": work.rate / first, "root": math.sqrt(second)}
        varying["shrink"] = 1.0 - work.rate * fixed["weight_decay"]
        fixed |= {"share": 1.0 - betas[0], "other": 1.0 - betas[1]}
    given: dict[str, Any] = {name: one for name, one in fixed.items() if name in step.inputs}
    # Numbers that differ from step to step are arrays: other numbers belong to the structure of a request.
    given |= {name: np.array(one, dtype) for name, one in varying.items()}
    call: Call[Any] = step(grad=gradient, **given, **dict[str, Any](state))
    return call
