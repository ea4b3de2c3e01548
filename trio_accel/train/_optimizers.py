"""Optimizers with their numbers, and schedules of their rates."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs

from ..actors import fits, is_number, named_options, validator

__all__ = [
    "Optimizer",
    "Schedule",
    "adafactor",
    "adamw",
    "constant",
    "lion",
    "nadam",
    "sgd",
    "torch_optimizer",
    "warmup_cosine",
]

Schedule: TypeAlias = Callable[[int], float]
"""The rate of learning of a step, by its number from 1 on."""

_Plain: TypeAlias = float | bool | str | None
# Arrays that an optimizer keeps next to the parameters. Each has the size of the parameters.
_STATES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "nadam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
}
# The array of an optimizer with a state that depends on the parameters' shapes.
SHAPED = "optimizer"


def check_number(name: str, value: float, below: float = math.inf) -> float:
    """Return a number from 0 to below a bound, or raise a `ValueError` that names it."""
    # Integers may be too large for a float.
    if not is_number(value, 0.0, sys.float_info.max) or value >= below:
        raise ValueError(f"{name} must be a number from 0 to below {below:g}, got {value!r}")
    return float(value)


def as_schedule(name: str, lr: float | Schedule) -> Schedule:
    """Return a schedule as it is, and a rate as a schedule."""
    return lr if callable(lr) else constant(check_number(f"{name}: lr", lr))


def rate_of(rate: Schedule, step: int) -> float:
    """Return the rate of a step.

    Raises:
        ValueError: The rate of the schedule is not finite, or is below 0.
    """
    value = rate(step)
    if not 0 <= value < sys.float_info.max:
        raise ValueError(f"the schedule gives {value!r} for step {step}; a rate is finite and at least 0")
    return float(value)


@named_options
@attrs.frozen
class Optimizer:
    """An optimizer with its numbers; made by `adamw`, `sgd` and the other functions of `train`.

    Attributes:
        kind: The name of the function that made it; with `torch_optimizer`, ``"module:Class"``.
        rate: The rate of each step.
        numbers: The other numbers of its formula.
    """

    kind: str
    rate: Schedule
    numbers: Mapping[str, Any] = attrs.field(
        validator=validator(
            "be numbers by name",
            lambda value: fits(Mapping[str, _Plain | tuple[_Plain, ...]], value),
            TypeError,
        )
    )

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the arrays that it keeps next to the parameters."""
        if self.kind == "sgd" and not self.numbers["momentum"]:
            return ()
        largest = ("max_exp_avg_sq",) if self.numbers.get("amsgrad") and self.kind == "adamw" else ()
        return _STATES.get(self.kind, (SHAPED,)) + largest

    @property
    def has_shapes(self) -> bool:
        """Whether its state depends on the shapes of the parameters, so that ranks cannot share it."""
        return self.states == (SHAPED,)

    def rate_of(self, step: int) -> float:
        """Return the rate of a step.

        Raises:
            ValueError: The rate of the schedule is not finite, or is below 0.
        """
        return rate_of(self.rate, step)


def _betas(name: str, betas: tuple[float, float]) -> dict[str, float]:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{name}: betas must be two numbers, got {betas!r}")
    first, second = (check_number(f"{name}: betas", beta, below=1.0) for beta in betas)
    return {"beta1": first, "beta2": second}


def _numbers(function: str, **numbers: float) -> dict[str, float]:
    return {name: check_number(f"{function}: {name}", value) for name, value in numbers.items()}


def _check_switch(name: str, value: object) -> None:
    if value is not True and value is not False:
        raise TypeError(f"{name} must be True or False, got {value!r}")


def adamw(
    lr: float | Schedule = 1e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
) -> Optimizer:
    """Adam with decay apart from the gradient (Loshchilov and Hutter, 2019), as `torch.optim.AdamW`.

    Args:
        lr: The rate, or a schedule.
        betas: The decay of the mean gradient, and of the mean squared gradient.
        eps: Added to the denominator.
        weight_decay: The share of a parameter, times the rate, that a step takes away.
        amsgrad: Whether to use the maximum of the squares' mean instead of its last value (Reddi et al.,
            2018).

    Raises:
        TypeError: `amsgrad` is not a bool.
        ValueError: A number out of its range.
    """
    _check_switch("adamw: amsgrad", amsgrad)
    numbers: dict[str, Any] = {
        **_betas("adamw", betas),
        **_numbers("adamw", eps=eps, weight_decay=weight_decay),
    }
    return Optimizer("adamw", as_schedule("adamw", lr), {**numbers, "amsgrad": amsgrad})


def nadam(
    lr: float | Schedule = 2e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
) -> Optimizer:
    """Adam with Nesterov's momentum (Dozat, 2016), as `torch.optim.NAdam`.

    Args:
        lr: The rate, or a schedule.
        betas: See `adamw`.
        eps: See `adamw`.
        weight_decay: See `sgd`, or `adamw` with `decoupled_weight_decay`.
        momentum_decay: How fast the momentum rises to the first of `betas`.
        decoupled_weight_decay: Whether the decay is apart from the gradient.

    Raises:
        TypeError: `decoupled_weight_decay` is not a bool.
        ValueError: A number out of its range.
    """
    _check_switch("nadam: decoupled_weight_decay", decoupled_weight_decay)
    options = _numbers("nadam", eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay)
    numbers = {**_betas("nadam", betas), **options, "decoupled_weight_decay": decoupled_weight_decay}
    return Optimizer("nadam", as_schedule("nadam", lr), numbers)


def lion(
    lr: float | Schedule = 1e-4, *, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
) -> Optimizer:
    """Steps by the sign of a mean gradient (Chen et al., 2023): algorithm 2 of that paper.

    Args:
        lr: The rate, or a schedule.
        betas: The share of the mean in the direction of a step, and the decay of the mean.
        weight_decay: See `adamw`.

    Raises:
        ValueError: A number out of its range.
    """
    numbers = {**_betas("lion", betas), **_numbers("lion", weight_decay=weight_decay)}
    return Optimizer("lion", as_schedule("lion", lr), numbers)


def adafactor(
    lr: float | Schedule = 1e-2,
    *,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Adam with a row and a column instead of each matrix of squares, as `torch.optim.Adafactor`.

    Shazeer and Stern (2018) describe it. It cannot be shared by `Parallel.shard_optimizer`, because its state
    depends on the shapes of the parameters.

    Args:
        lr: The largest relative rate, or a schedule of it.
        beta2_decay: The exponent of the step by which means of squares forget; at most 0.
        eps: The least square, by default the machine epsilon of the master dtype; and the least size of a
            parameter.
        d: The largest root mean square of an update; at least 1.
        weight_decay: See `adamw`.

    Raises:
        ValueError: A number out of its range.
    """
    if not is_number(beta2_decay, -sys.float_info.max, 0.0):
        raise ValueError(f"adafactor: beta2_decay must be a number of at most 0, got {beta2_decay!r}")
    if not isinstance(eps, (tuple, list)) or len(eps) != 2:
        raise ValueError(f"adafactor: eps must be None or a number, and a number, got {eps!r}")
    eps1 = None if eps[0] is None else check_number("adafactor: eps", eps[0])
    numbers = {"beta2_decay": float(beta2_decay), "eps": (eps1, check_number("adafactor: eps", eps[1]))}
    if check_number("adafactor: d", d) < 1.0:
        raise ValueError(f"adafactor: d must be at least 1, got {d!r}")
    return Optimizer(
        "adafactor",
        as_schedule("adafactor", lr),
        {**numbers, **_numbers("adafactor", d=d, weight_decay=weight_decay)},
    )


def sgd(lr: float | Schedule = 1e-3, *, momentum: float = 0.0, weight_decay: float = 0.0) -> Optimizer:
    """Gradient descent with momentum, as `torch.optim.SGD`.

    Args:
        lr: The rate, or a schedule.
        momentum: The decay of the earlier steps, below 1.
        weight_decay: The factor of the parameters in the gradient.

    Raises:
        ValueError: A number out of its range.
    """
    numbers = {
        "momentum": check_number("sgd: momentum", momentum, below=1.0),
        "weight_decay": check_number("sgd: weight_decay", weight_decay),
    }
    return Optimizer("sgd", as_schedule("sgd", lr), numbers)


def momentum_of(numbers: Mapping[str, float], step: int) -> tuple[float, float, float]:
    """Return the momentum of NAdam in a step and in the next one, and the product before the step."""

    def momentum(number: int) -> float:
        return numbers["beta1"] * (1.0 - 0.5 * math.exp(math.log(0.96) * number * numbers["momentum_decay"]))

    product = 1.0
    for number in range(1, step):
        product *= momentum(number)
        if product < 1e-30:
            break  # 1 - product is 1 in floating point
    return momentum(step), momentum(step + 1), product


def torch_optimizer(kind: type | str, lr: float | Schedule, **options: Any) -> Optimizer:
    """Any class of `torch.optim`, or another `torch.optim.Optimizer`, for models of `Module`.

    Its state must be tensors and numbers of each parameter, so LBFGS is refused when the trainer opens. It
    cannot be shared by `Parallel.shard_optimizer`.

    Args:
        kind: The class, or ``"module:Class"`` where the program does not import PyTorch, such as
            ``"torch.optim:RAdam"``. Workers import it.
        lr: The rate, or a schedule.
        **options: Its other options: numbers, bools, None, and tuples of them.

    Raises:
        TypeError: `kind` is neither a class nor a path.
        ValueError: `lr` is out of its range.
    """
    if isinstance(kind, type):
        kind = f"{kind.__module__}:{kind.__qualname__}"
    if not isinstance(kind, str) or kind.count(":") != 1:
        raise TypeError(f"torch_optimizer: kind must be a class or 'module:Class', got {kind!r}")
    return Optimizer(kind, as_schedule("torch_optimizer", lr), options)


def constant(rate: float) -> Schedule:
    """Return a schedule with a constant rate.

    Raises:
        ValueError: The rate is not a number from 0.
    """
    check_number("constant: rate", rate)
    return lambda step: rate


def warmup_cosine(rate: float, warmup: int, total: int, *, minimum: float = 0.0) -> Schedule:
    """Return a schedule that rises to a rate in the first steps, and falls by half a cosine to `minimum`.

    Args:
        rate: The largest rate.
        warmup: Steps in which it rises from 0; 0 for none.
        total: The step from which on it is `minimum`; more than `warmup`.
        minimum: The rate at the end.

    Raises:
        ValueError: `total` is not more than `warmup`, or a number is negative.
    """
    for name, value in (("rate", rate), ("warmup", warmup), ("total", total), ("minimum", minimum)):
        check_number(f"warmup_cosine: {name}", value)
    if not 0 <= warmup < total:
        raise ValueError(f"warmup_cosine: it needs 0 <= warmup < total, got {warmup!r} and {total!r}")

    def of(step: int) -> float:
        if step <= warmup:
            return rate * step / warmup
        share = min(1.0, (step - warmup) / (total - warmup))
        return minimum + (rate - minimum) * 0.5 * (1.0 + math.cos(math.pi * share))

    return of
