"""How a model is trained: parallelism, optimizer, schedule, precision, checkpoints."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, Literal, TypeAlias, get_args

import attrs

from ..actors import Validator, is_number, must, must_be_whole, named_options
from ._mesh import Mesh, Order

__all__ = [
    "Checkpoint", "Config", "Optimizer", "Parallel", "Precision", "Schedule", "adamw", "constant", "sgd",
    "warmup_cosine",
]  # fmt: skip

Schedule: TypeAlias = Callable[[int], float]
"""The rate of learning of a step, by its number from 1 on."""

# Gradients of float32 overflow beyond the largest scale. No gradient of float16 is left below the least one.
LEAST_SCALE, LARGEST_SCALE = 2.0**-24, 2.0**32

_COMPUTED = ("float16", "bfloat16", "float32", "float64")
_WIDE = ("float32", "float64")


def _one_of(*values: object) -> Validator:
    # An array as the value compares with each word element by element.
    return must(
        f"be one of {', '.join(map(repr, values))}",
        lambda value: isinstance(value, (str, NoneType)) and value in values,
    )


def _number(name: str, value: float, below: float = math.inf) -> float:
    # Whole numbers may be too large for a float.
    if not is_number(value, 0.0, sys.float_info.max) or value >= below:
        raise ValueError(f"{name} must be a number from 0 to below {below:g}, got {value!r}")
    return float(value)


# A field that is None or a number above 0.
_positive = attrs.validators.optional(
    [
        must("be a number from 0", lambda value: is_number(value, 0.0, sys.float_info.max)),
        must("be a number above 0", lambda value: value > 0),
    ]
)


@named_options
@attrs.frozen
class Optimizer:
    """An optimizer with its numbers; made by `adamw` or `sgd`.

    Attributes:
        kind: The name of the function that made it.
        rate: The rate of each step.
        numbers: The other numbers of its formula.
    """

    kind: Literal["adamw", "sgd"]
    rate: Schedule
    numbers: Mapping[str, float]

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the arrays that it keeps beside the parameters, each of their size."""
        if self.kind == "adamw":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.numbers["momentum"] else ()

    def rate_of(self, step: int) -> float:
        """Return the rate of a step.

        Raises:
            ValueError: The schedule gives none that is finite and at least 0.
        """
        rate = self.rate(step)
        if not 0 <= rate < sys.float_info.max:
            raise ValueError(f"the schedule gives {rate!r} for step {step}; a rate is finite and at least 0")
        return float(rate)


def adamw(
    lr: float | Schedule = 1e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Optimizer:
    """Adam with decay apart from the gradient (Loshchilov and Hutter, 2019), as `torch.optim.AdamW`.

    Args:
        lr: The rate, or a schedule.
        betas: Shares of the means of gradients and of their squares that go on.
        eps: Added to what is divided by.
        weight_decay: Share of a parameter, times the rate, that a step takes away.

    Raises:
        ValueError: A number out of its range.
    """
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"adamw: betas must be two numbers, got {betas!r}")
    first, second = (_number("adamw: betas", beta, below=1.0) for beta in betas)
    numbers = {"beta1": first, "beta2": second, "eps": _number("adamw: eps", eps)}
    numbers["weight_decay"] = _number("adamw: weight_decay", weight_decay)
    return Optimizer("adamw", _schedule("adamw", lr), numbers)


def sgd(lr: float | Schedule = 1e-3, *, momentum: float = 0.0, weight_decay: float = 0.0) -> Optimizer:
    """Gradient descent with momentum, as `torch.optim.SGD`.

    Args:
        lr: The rate, or a schedule.
        momentum: Share of the earlier steps that goes on, below 1.
        weight_decay: Factor of the parameters that is added to the gradient.

    Raises:
        ValueError: A number out of its range.
    """
    numbers = {
        "momentum": _number("sgd: momentum", momentum, below=1.0),
        "weight_decay": _number("sgd: weight_decay", weight_decay),
    }
    return Optimizer("sgd", _schedule("sgd", lr), numbers)


def _schedule(name: str, lr: float | Schedule) -> Schedule:
    return lr if callable(lr) else constant(_number(f"{name}: lr", lr))


def constant(rate: float) -> Schedule:
    """Return the schedule that has one rate."""
    return lambda step: rate


def warmup_cosine(rate: float, warmup: int, total: int, *, least: float = 0.0) -> Schedule:
    """Return a schedule that rises to a rate in the first steps, and falls by half a cosine to `least`.

    Args:
        rate: The largest rate.
        warmup: Steps in which it rises from 0; 0 for none.
        total: The step from which on it is `least`; more than `warmup`.
        least: The rate at the end.

    Raises:
        ValueError: `total` is not more than `warmup`, or a number is negative.
    """
    for name, value in (("rate", rate), ("warmup", warmup), ("total", total), ("least", least)):
        _number(f"warmup_cosine: {name}", value)
    if not 0 <= warmup < total:
        raise ValueError(f"warmup_cosine: it needs 0 <= warmup < total, got {warmup!r} and {total!r}")

    def of(step: int) -> float:
        if step <= warmup:
            return rate * step / warmup
        share = min(1.0, (step - warmup) / (total - warmup))
        return least + (rate - least) * 0.5 * (1.0 + math.cos(math.pi * share))

    return of


@named_options
@attrs.frozen(kw_only=True)
class Parallel:
    """How the devices share the work.

    The ranks that are left over are those that have other samples: ``ranks / (pipeline * tensor)``.

    Attributes:
        pipeline: Stages of the model, each with some of its layers.
        tensor: Ranks that share each layer; see `column_linear`.
        schedule: The order of a pipeline's work: ``"1f1b"``, which keeps few parts of a batch at a time, or
            ``"gpipe"``. `Config.accumulate` is the number of parts.
        shard_optimizer: Whether each rank keeps its share of the optimizer's arrays alone (ZeRO, stage 1;
            Rajbhandari et al., 2020). The results are the same but for rounding.
        bucket: Bytes of gradients that are summed over the ranks at a time, while the backward pass goes on.
    """

    pipeline: int = attrs.field(default=1, validator=must_be_whole(1))
    tensor: int = attrs.field(default=1, validator=must_be_whole(1))
    schedule: Order = attrs.field(default="1f1b", validator=_one_of(*get_args(Order)))
    shard_optimizer: bool = False
    bucket: int = attrs.field(default=25 << 20, validator=must_be_whole(1))

    def meshes(self, ranks: int) -> list[Mesh]:
        """Return the place of each rank.

        Raises:
            ValueError: So many ranks cannot share the work so.
        """
        data, rest = divmod(ranks, self.pipeline * self.tensor)
        if rest or not data:
            raise ValueError(
                f"{ranks} ranks are not a multiple of pipeline {self.pipeline} x tensor {self.tensor}"
            )
        return [Mesh(data, self.pipeline, self.tensor, rank) for rank in range(ranks)]


@named_options
@attrs.frozen
class Precision:
    """Element types of a training.

    Attributes:
        compute: That of the model's parameters and gradients where it computes.
        master: That of the parameters that the optimizer changes, and of what it keeps.
        reduce: That in which gradients are summed over the ranks; by default `compute`.
        scale: Factor of the loss at the beginning, so that gradients of float16 do not vanish; from 2**-24
            to 2**32. It is halved after a step whose gradients it makes infinite, which is skipped, and
            doubled after `growth` good ones, within the same bounds. By default 65536 with float16, and none
            otherwise.
        growth: See `scale`.
    """

    compute: str = attrs.field(default="float32", validator=_one_of(*_COMPUTED))
    master: str = attrs.field(default="float32", kw_only=True, validator=_one_of(*_WIDE))
    reduce: str | None = attrs.field(default=None, kw_only=True, validator=_one_of(None, *_COMPUTED))
    scale: float | None = attrs.field(
        default=None,
        kw_only=True,
        validator=attrs.validators.optional(
            must(
                f"be a number from {LEAST_SCALE:g} to {LARGEST_SCALE:g}",
                lambda value: is_number(value, LEAST_SCALE, LARGEST_SCALE),
            )
        ),
    )
    growth: int = attrs.field(default=2000, kw_only=True, validator=must_be_whole(1))

    @property
    def first_scale(self) -> float | None:
        """The factor of the loss at the beginning; None if the loss is not scaled."""
        return 65536.0 if self.scale is None and self.compute == "float16" else self.scale


@named_options
@attrs.frozen
class Checkpoint:
    """Where the state of a training is written to, and read from.

    Attributes:
        folder: The folder; each checkpoint is a folder in it.
        every: Steps from one to the next; 0 for none but by `Trainer.save`.
        keep: How many stay; older ones are removed.
        load: What a trainer begins with: ``"latest"`` for the newest whole one if there is any, None for
            nothing, or the path of one.
    """

    folder: str | os.PathLike[str]
    every: int = attrs.field(default=1000, kw_only=True, validator=must_be_whole(0))
    keep: int = attrs.field(default=3, kw_only=True, validator=must_be_whole(1))
    load: str | os.PathLike[str] | None = attrs.field(default="latest", kw_only=True)


@named_options
@attrs.frozen(kw_only=True)
class Config:
    """How a model is trained.

    Attributes:
        optimizer: See `adamw` and `sgd`.
        parallel: How the devices share the work.
        precision: Element types.
        accumulate: Parts of a rank's share of a batch whose gradients are added up, one after the other.
        clip_norm: The largest norm of all gradients together; longer ones are shortened.
        checkpoint: Where the state is kept; None for nowhere.
        replays: How often in a row a step is done again after a loss.
        timeout: Seconds that a step may take before it fails; None for any time. The error names the ranks
            that are late, and on processors what each came to last.
        on_nan: What happens where a loss or a gradient is not finite: an error, the step is skipped, or the
            training ends. The state is that of before in any case. A step is skipped without that, if its
            gradients are finite with the least scale of the loss: it is computed once more to find out.
        tokens: Tells how many tokens a batch has, for `Step.tokens_per_second`.
        seed: All random numbers of the model come from this, the number of the step, and the rank.
    """

    optimizer: Optimizer = attrs.field(
        validator=must(
            "be an optimizer, such as train.adamw(1e-3)",
            lambda value: isinstance(value, Optimizer),
            TypeError,
        )
    )
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    accumulate: int = attrs.field(default=1, validator=must_be_whole(1))
    clip_norm: float | None = attrs.field(default=None, validator=_positive)
    checkpoint: Checkpoint | None = None
    replays: int = attrs.field(default=8, validator=must_be_whole(0))
    timeout: float | None = attrs.field(default=None, validator=_positive)
    on_nan: Literal["raise", "skip", "stop"] = attrs.field(
        default="raise", validator=_one_of("raise", "skip", "stop")
    )
    tokens: Callable[[Any], int] | None = None
    seed: int = attrs.field(default=0, validator=must_be_whole(0))
