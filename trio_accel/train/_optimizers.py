"""Steps of optimizers that make a new state, as one launch, and leave the old state as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..backends.base import DType
from ..devices import AccelRef, Call
from ..jit import Elementwise
from ._config import Optimizer
from ._layout import Work

__all__: list[str] = []

# The formulas of `nn.adamw` and `nn.sgd`, which change their arrays in place.
_TEXTS = {
    "adamw": (
        "a = exp_avg + share * (grad - exp_avg); b = beta * exp_avg_sq + other * grad * grad;"
        "p = shrink * param - lr * a / (sqrt(b) / root + eps)"
    ),
    "sgd": "p = param - lr * (grad + weight_decay * param)",
    "sgd_momentum": "a = momentum * buffer + (grad + weight_decay * param); p = param - lr * a",
}
_INPUTS = {
    "adamw": "param exp_avg exp_avg_sq grad lr root shrink share beta other eps",
    "sgd": "param grad lr weight_decay",
    "sgd_momentum": "param buffer grad lr weight_decay momentum",
}
_STEPS = {
    name: Elementwise[Any](
        text,
        inputs=_INPUTS[name].split(),
        outputs=("p", "a", "b")[: text.count("=")],
        operation=f"train.{name}",
        precision="float32",
    )
    for name, text in _TEXTS.items()
}


def changed(
    optimizer: Optimizer, state: Mapping[str, AccelRef], gradient: Any, work: Work, dtype: str
) -> Call[Any]:
    """Return a call of a step of an optimizer, which makes a tuple of new arrays in the order of the state.

    Args:
        optimizer: The optimizer.
        state: The parameters, and then the optimizer's arrays.
        gradient: The gradient, of their dtype.
        work: The step.
        dtype: The dtype of all of them.
    """
    numbers, rate = optimizer.numbers, work.rate
    name: str = optimizer.kind
    # Numbers that differ from step to step are arrays: other numbers belong to the structure of a request.
    varying, fixed = [rate], [numbers["weight_decay"]]
    if name == "adamw":
        # 1 - beta**step, without a loss of digits.
        first, second = (
            -math.expm1(work.number * (math.log(beta) if beta else -math.inf))
            for beta in (numbers["beta1"], numbers["beta2"])
        )
        varying = [rate / first, math.sqrt(second), 1.0 - rate * numbers["weight_decay"]]
        fixed = [1.0 - numbers["beta1"], numbers["beta2"], 1.0 - numbers["beta2"], numbers["eps"]]
    elif optimizer.states:
        name, fixed = "sgd_momentum", [*fixed, numbers["momentum"]]
    element = DType.of(dtype).dtype
    return _STEPS[name](*state.values(), gradient, *[np.array(one, element) for one in varying], *fixed)
