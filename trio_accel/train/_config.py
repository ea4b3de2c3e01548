"""How a model is trained: parallelism, precision, checkpoints, validation, and who is told."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, cast, get_args

import attrs
import numpy as np

from ..actors import Validator, is_number, must_be_whole, named_options, validator
from ._groups import ParameterGroup
from ._mesh import Mesh, Order
from ._observers import Hook, Logger
from ._optimizers import Optimizer

__all__ = ["Checkpoint", "Config", "Parallel", "Precision"]

# The state of the moving averages.
AVERAGE = "average"

# Gradients of float32 overflow beyond the largest scale. No gradient of float16 is left below the least one.
LEAST_SCALE, LARGEST_SCALE = 2.0**-24, 2.0**32

_COMPUTED = ("float16", "bfloat16", "float32", "float64")


def _one_of(*values: object) -> Validator:
    # An array as the value compares with each word element by element.
    return validator(
        f"be one of {', '.join(map(repr, values))}",
        lambda value: isinstance(value, (str, NoneType)) and value in values,
    )


# A field that is None or a number above 0.
_positive = attrs.validators.optional(
    [
        validator("be a number from 0", lambda value: is_number(value, 0.0, sys.float_info.max)),
        validator("be a number above 0", lambda value: value > 0),
    ]
)


_share = validator("be a number from 0 to below 1", lambda value: is_number(value, 0.0, 1.0) and value < 1)


def _are_batches(value: Any) -> bool:
    if value is None or callable(value):
        return True
    if isinstance(value, (list, tuple)):
        return all(isinstance(batch, Mapping) for batch in cast("Iterable[object]", value))
    is_iterable = hasattr(value, "__iter__") or hasattr(value, "__aiter__")
    return is_iterable and not isinstance(value, (str, bytes, Mapping, np.ndarray))


_batches = validator("be batches or a function of these", _are_batches, TypeError)


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
        master: That of the parameters that the optimizer changes, and of what it keeps. With bfloat16 all
            of the training is in bfloat16: steps below 2**-9 of a parameter are lost by rounding.
        reduce: That in which gradients are summed over the ranks; by default `compute`.
        scale: Factor of the loss at the beginning, so that gradients of float16 do not vanish; from 2**-24
            to 2**32. It is halved after a step whose gradients it makes infinite, which is skipped, and
            doubled after `growth` good ones, within the same bounds. By default 65536 with float16, and none
            otherwise.
        growth: See `scale`.
    """

    compute: str = attrs.field(default="float32", validator=_one_of(*_COMPUTED))
    master: str = attrs.field(default="float32", kw_only=True, validator=_one_of(*_COMPUTED[1:]))
    reduce: str | None = attrs.field(default=None, kw_only=True, validator=_one_of(None, *_COMPUTED))
    scale: float | None = attrs.field(
        default=None,
        kw_only=True,
        validator=attrs.validators.optional(
            validator(
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
        best: A metric of `Config.validate`. The checkpoint of its best value is kept, whatever `keep` is. A
            validation with a better value writes a checkpoint.
        mode: Whether the best value is the least (``"min"``) or the greatest (``"max"``).
    """

    folder: str | os.PathLike[str]
    every: int = attrs.field(default=1000, kw_only=True, validator=must_be_whole(0))
    keep: int = attrs.field(default=3, kw_only=True, validator=must_be_whole(1))
    load: str | os.PathLike[str] | None = attrs.field(default="latest", kw_only=True)
    best: str | None = attrs.field(default=None, kw_only=True)
    mode: Literal["min", "max"] = attrs.field(default="min", kw_only=True, validator=_one_of("min", "max"))


@named_options
@attrs.frozen(kw_only=True)
class Config:
    """How a model is trained.

    Attributes:
        optimizer: See `adamw`, `sgd` and their like, and `torch_optimizer`.
        groups: Parameters with a rate or a decay of their own, or that are frozen. Each group matches a
            parameter, and no parameter belongs to two groups.
        average: Share of the moving average of the parameters that goes on in each step, such as 0.999; None
            for no average. The average begins with the parameters after the first step.
        parallel: How the devices share the work.
        precision: Element types.
        accumulate: Parts of a rank's share of a batch whose gradients are added up, one after the other.
        clip_norm: The largest norm of all gradients together; longer ones are shortened.
        recompute: Layers of a `Module` whose inner results are computed again in the backward pass, by their
            names: ``"blocks.*"``, where ``*`` and ``?`` match no dot.
        checkpoint: Where the state is kept; None for nowhere.
        validate: Batches of the validation, as for `Trainer.steps`; a function of no argument is called for
            each validation.
        validate_every: Steps from one validation to the next.
        hooks: What is called before and after each step, on a loss, and at the end.
        loggers: What gets the figures of each step and validation.
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
        validator=validator(
            "be an optimizer, such as train.adamw(1e-3)",
            lambda value: isinstance(value, Optimizer),
            TypeError,
        )
    )
    groups: Sequence[ParameterGroup] = ()
    average: float | None = attrs.field(default=None, validator=attrs.validators.optional(_share))
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    accumulate: int = attrs.field(default=1, validator=must_be_whole(1))
    clip_norm: float | None = attrs.field(default=None, validator=_positive)
    recompute: Sequence[str] = ()
    checkpoint: Checkpoint | None = attrs.field(default=None)
    validate: Any = attrs.field(default=None, validator=_batches)
    validate_every: int = attrs.field(default=500, validator=must_be_whole(1))
    hooks: Sequence[Hook] = ()
    loggers: Sequence[Logger] = ()
    replays: int = attrs.field(default=8, validator=must_be_whole(0))
    timeout: float | None = attrs.field(default=None, validator=_positive)
    on_nan: Literal["raise", "skip", "stop"] = attrs.field(
        default="raise", validator=_one_of("raise", "skip", "stop")
    )
    tokens: Callable[[Any], int] | None = None
    seed: int = attrs.field(default=0, validator=must_be_whole(0))

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the arrays of the state next to the parameters and the buffers."""
        return self.optimizer.states + (() if self.average is None else (AVERAGE,))

    def __attrs_post_init__(self) -> None:
        if self.checkpoint is not None and self.checkpoint.best is not None and self.validate is None:
            raise ValueError("Config: Checkpoint.best names a metric of validate, which is None")
