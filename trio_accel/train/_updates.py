"""Steps of optimizers that make a new state without changing the old one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from .. import arrays
from ..devices import AccelRef
from ..jit import Elementwise
from ._config import AVERAGE, Config
from ._groups import GroupPart, decays_of, within
from ._layout import FlatLayout, Work
from ._optimizers import SHAPED, momentum_of

__all__: list[str] = []

# The formulas of `nn.adamw` and its like, which change their arrays in place. The results are in the order of
# the state.
_ADAM = """
    a = exp_avg + share * (grad - exp_avg)
    b = beta2 * exp_avg_sq + other * grad * grad"""
_TEXTS = {
    "adamw": f"{_ADAM}\n p = shrink * parameters - lr * a / (sqrt(b) / root + eps)",
    "amsgrad": f"""{_ADAM}
    c = maximum(max_exp_avg_sq, b)
    p = shrink * parameters - lr * a / (sqrt(c) / root + eps)""",
    "lion": """
    d = grad - exp_avg
    a = exp_avg + other * d
    p = shrink * parameters - lr * sign(exp_avg + share * d)""",
    "nadam": """
    g = grad + decay * parameters
    a = exp_avg + share * (g - exp_avg)
    b = beta2 * exp_avg_sq + other * g * g
    p = shrink * parameters - (lr * g + ahead * a) / (sqrt(b) / root + eps)""",
    "sgd": "p = parameters - lr * (grad + decay * parameters)",
    "momentum": """
    a = momentum * momentum_buffer + (grad + decay * parameters)
    p = parameters - lr * a""",
}


@cache
def _step_of(kind: str, states: int, has_average: bool) -> Elementwise[Any]:
    text = "\n".join(line.strip() for line in _TEXTS[kind].split("\n"))
    outputs = [*"pabc"[: 1 + states]]
    if has_average:
        text, outputs = f"{text}\nv = {AVERAGE} + part * (p - {AVERAGE})", [*outputs, "v"]
    return Elementwise[Any](text, outputs=tuple(outputs), operation=f"train.{kind}", precision="float32")


def _elementwise(
    config: Config, state: Mapping[str, Any], gradient: Any, work: Work, group: tuple[float, float]
) -> Any:
    """Return a call of an optimizer step for the parameters of one group; see `changed`."""
    optimizer, dtype = config.optimizer, config.precision.master
    numbers, (rate, decay), number = optimizer.numbers, group, work.number
    kind = (
        "momentum" if "momentum_buffer" in state else "amsgrad" if numbers.get("amsgrad") else optimizer.kind
    )
    fixed, varying = {**numbers, "decay": decay}, {"lr": rate}
    if kind not in ("sgd", "momentum"):
        betas = fixed["beta1"], fixed["beta2"]
        fixed |= {"share": 1.0 - betas[0], "other": 1.0 - betas[1]}
        is_apart = numbers.get("decoupled_weight_decay", True)
        varying["shrink"] = 1.0 - rate * decay * is_apart
        # 1 - beta**step, without a loss of digits.
        first, second = (-math.expm1(number * (math.log(beta) if beta else -math.inf)) for beta in betas)
        varying["root"] = math.sqrt(second)
        if kind == "nadam":
            momentum, after, product = momentum_of(numbers, number)
            product *= momentum
            varying |= {
                "lr": rate * (1 - momentum) / (1 - product),
                "ahead": rate * after / (1 - product * after),
            }
            fixed["decay"] = 0.0 if is_apart else decay
        elif kind != "lion":
            varying["lr"] = rate / first
    if AVERAGE in state:
        varying["part"] = _part(config, number)
    step = _step_of(kind, len(optimizer.states), AVERAGE in state)
    inputs: dict[str, Any] = {name: value for name, value in fixed.items() if name in step.inputs}
    # Numbers that differ from step to step are arrays: other numbers belong to the structure of a request.
    inputs |= {name: np.array(value, dtype) for name, value in varying.items() if name in step.inputs}
    return step(grad=gradient, **inputs, **state)


def _part(config: Config, number: int) -> float:
    """Return the weight of the parameters in their moving average after a step."""
    return 1.0 if number == 1 or config.average is None else 1.0 - config.average


def changed(
    config: Config,
    state: Mapping[str, AccelRef],
    gradient: Any,
    work: Work,
    layouts: Mapping[str, FlatLayout],
    parts: Sequence[GroupPart],
    rank_slice: slice,
) -> list[Any]:
    """Return calls of an optimizer step, which make new arrays in the order of the state.

    Args:
        config: The configuration.
        state: The parameters, and then the other arrays of the state, by name.
        gradient: The gradient, of their dtype.
        work: The step.
        layouts: The layouts of the arrays in the flat ones.
        parts: The parts of each group.
        rank_slice: The slice of the rank.
    """
    groups = [*zip(work.rates, decays_of(config.optimizer, config.groups), strict=True)]
    if config.optimizer.has_shapes:
        return _factored(config, state, gradient, work, layouts, parts, groups)
    spans = within(parts, rank_slice)
    if len(spans) == 1:
        # The parts leave no gaps, so the only one is the whole slice of the rank, and needs no views.
        step = _elementwise(config, state, gradient, work, groups[spans[0][0]])
        return [step[index] for index in range(len(state))]
    steps = [
        _elementwise(
            config, {name: array[span] for name, array in state.items()}, gradient[span], work, groups[group]
        )
        for group, span in spans
    ]
    return [arrays.concat([step[index] for step in steps], axis=None) for index in range(len(state))]


def shaped_beginning(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return Adafactor's initial state, with the names of `torch.optim.Adafactor`."""
    state: dict[str, Any] = {}
    for name, shape in shapes.items():
        if len(shape) > 1:
            state[f"{name}/row_var"] = np.zeros((*shape[:-1], 1))
            state[f"{name}/col_var"] = np.zeros((*shape[:-2], 1, shape[-1]))
        else:
            state[f"{name}/variance"] = np.zeros(tuple(shape))
    return state


def _factored(
    config: Config,
    state: Mapping[str, AccelRef],
    gradient: Any,
    work: Work,
    layouts: Mapping[str, FlatLayout],
    parts: Sequence[GroupPart],
    groups: Sequence[tuple[float, float]],
) -> list[Any]:
    """Return calls of an Adafactor step, parameter by parameter; see `changed`."""
    layout, after, shaped_states = layouts["parameters"], list[Any](), dict[str, Any]()
    shaped = layouts[SHAPED].views(state[SHAPED])
    for name, span, shape in layout.entries():
        group = next(part.group for part in parts if span.stop <= part.stop)
        param, g = (array[span].reshape(shape) for array in (state["parameters"], gradient))
        param_states = {
            key.rpartition("/")[2]: array for key, array in shaped.items() if key.rpartition("/")[0] == name
        }
        new_param, states = _adafactor(config, param, g, param_states, work.number, groups[group])
        after.append(new_param)
        shaped_states |= {f"{name}/{key}": array for key, array in states.items()}
    flats = [arrays.concat(after, axis=None)]
    flats.append(arrays.concat([shaped_states[name] for name in layouts[SHAPED].names], axis=None))
    if AVERAGE in state:
        share = np.array(_part(config, work.number), config.precision.master)
        flats.append(state[AVERAGE] + (flats[0] - state[AVERAGE]) * share)
    return flats


def _adafactor(
    config: Config,
    param: Any,
    g: Any,
    states: Mapping[str, Any],
    number: int,
    group: tuple[float, float],
) -> tuple[Any, dict[str, Any]]:
    """Return calls of a parameter and its states after a step, by the formulas of PyTorch."""
    dtype, (rate, decay), numbers = config.precision.master, group, config.optimizer.numbers
    eps1, smallest = numbers["eps"]
    eps1 = float(np.finfo(dtype).eps) if eps1 is None else eps1
    # Numbers that differ from step to step are arrays.
    forget = np.array(number ** numbers["beta2_decay"], dtype)
    relative = np.array(min(rate, number**-0.5), dtype)
    shrink = np.array(1.0 - rate * decay, dtype)
    size = float(max(math.prod(param.shape), 1))
    squares = g * g
    if "row_var" in states:
        row, column = states["row_var"], states["col_var"]
        row = row + (arrays.mean(squares, axis=-1, keepdims=True) - row) * forget
        column = column + (arrays.mean(squares, axis=-2, keepdims=True) - column) * forget
        estimate = row @ column / arrays.maximum(arrays.mean(row, axis=-2, keepdims=True), eps1)
        after = {"row_var": row, "col_var": column}
    else:
        estimate = states["variance"] + (squares - states["variance"]) * forget
        after = {"variance": estimate}
    update = g / arrays.sqrt(arrays.maximum(estimate, eps1 * eps1))
    length = arrays.maximum(arrays.sqrt(arrays.sum(update * update) / size) / numbers["d"], 1.0)
    step = arrays.maximum(arrays.sqrt(arrays.sum(param * param) / size), smallest) * relative
    return param * shrink - update * (step / length), after
