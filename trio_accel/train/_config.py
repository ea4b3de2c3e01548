"""The configuration of a training: parallelism, precision, checkpoints, validation, hooks and loggers."""

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

# Larger scales overflow gradients of float32, and smaller scales leave no gradient of float16 above 0.
LEAST_SCALE, LARGEST_SCALE = 2.0**-24, 2.0**32

_COMPUTED = ("float16", "bfloat16", "float32", "float64")


def _one_of(*values: object) -> Validator:
    # An array as the value compares with each word element by element.
    return validator(
        f"be one of {', '.join(map(repr, values))}",
        lambda value: isinstance(value, (str, NoneType)) and value in values,
    )


# A field with None or a number above 0.
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

    The remaining factor, ``ranks / (pipeline * tensor)``, is the number of ranks with different samples.

    Attributes:
        pipeline: The number of stages of the model, each with some of its layers.
        tensor: The number of ranks that share each layer; see `column_linear`.
        schedule: The order of a pipeline's work: ``"1f1b"``, which keeps few parts of a batch at a time, or
            ``"gpipe"``. `Config.accumulate` is the number of parts.
        shard_optimizer: Whether each rank keeps only its share of the optimizer's arrays (ZeRO, stage 1;
            Rajbhandari et al., 2020). The results are the same except for rounding.
        bucket: The number of gradient bytes that are summed over the ranks at a time, during the backward
            pass.
    """

    pipeline: int = attrs.field(default=1, validator=must_be_whole(1))
    tensor: int = attrs.field(default=1, validator=must_be_whole(1))
    schedule: Order = attrs.field(default="1f1b", validator=_one_of(*get_args(Order)))
    shard_optimizer: bool = False
    bucket: int = attrs.field(default=25 << 20, validator=must_be_whole(1))

    def meshes(self, ranks: int) -> list[Mesh]:
        """Return the mesh of each rank.

        Raises:
            ValueError: The number of ranks is not a multiple of ``pipeline * tensor``.
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
    """The dtypes of a training.

    Attributes:
        compute: The dtype of parameters and gradients in the model's computations.
        master: The dtype of the optimizer's parameters and arrays. With bfloat16, the whole training is in
            bfloat16, so rounding loses steps below 2**-9 of a parameter.
        reduce: The dtype in which gradients are summed over the ranks; by default `compute`.
        scale: The initial factor of the loss, so that gradients of float16 do not vanish; from 2**-24 to
            2**32. After a step with infinite gradients, the step is skipped and the scale is halved. After
            `growth` good steps the scale is doubled, within the same bounds. By default 65536 with float16,
            and otherwise none.
        growth: The number of good steps until the scale is doubled.
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
        """The initial factor of the loss; None if the loss is not scaled."""
        return 65536.0 if self.scale is None and self.compute == "float16" else self.scale


@named_options
@attrs.frozen
class Checkpoint:
    """The location of a training's checkpoints, and when to write them.

    Attributes:
        folder: The folder; each checkpoint is a subfolder.
        every: The number of steps between checkpoints; None to write them only by `Trainer.save`, and for
            the best metric.
        keep: The number of checkpoints to keep; older ones are removed.
        load: The initial state of a trainer: ``"latest"`` for the newest complete checkpoint if there is any,
            a path for that checkpoint, or None to start from the beginning.
        best: A metric of `Config.validate`. The checkpoint with its best value is kept in addition to `keep`.
            A validation with a better value writes a checkpoint.
        mode: Whether the best value is the least (``"min"``) or the greatest (``"max"``).
    """

    folder: str | os.PathLike[str]
    every: int | None = attrs.field(
        default=cast("int | None", 1000), kw_only=True, validator=attrs.validators.optional(must_be_whole(1))
    )
    keep: int = attrs.field(default=3, kw_only=True, validator=must_be_whole(1))
    load: str | os.PathLike[str] | None = attrs.field(default="latest", kw_only=True)
    best: str | None = attrs.field(default=None, kw_only=True)
    mode: Literal["min", "max"] = attrs.field(default="min", kw_only=True, validator=_one_of("min", "max"))


@named_options
@attrs.frozen(kw_only=True)
class Config:
    """The configuration of a training.

    Attributes:
        optimizer: The optimizer, made by `adamw`, `sgd` and similar functions, or by `torch_optimizer`.
        groups: Parameters with their own rate or decay, and frozen parameters. Each group matches a
            parameter, and no parameter belongs to two groups.
        average: The decay of the parameters' moving average in each step, such as 0.999; None for no average.
            The average begins with the parameters after the first step.
        parallel: How the devices share the work.
        precision: The dtypes.
        accumulate: The number of parts of a rank's share of a batch; their gradients are added up, one part
            after the other.
        clip_norm: The maximum norm of all gradients together; longer ones are shortened.
        recompute: Patterns of layer names of a `Module`, such as ``"blocks.*"``, where ``*`` and ``?`` match
            no dot. The backward pass computes the inner results of these layers again.
        checkpoint: Where the state is saved; None for nowhere.
        validate: The batches of the validation, as for `Trainer.steps`. A function without arguments is
            called for each validation.
        validate_every: The number of steps between validations.
        hooks: Objects to call before and after each step, on a loss, and at the end.
        loggers: Objects to call with the figures of each step and validation.
        replays: The maximum number of times in a row that a step is repeated after a loss.
        timeout: The seconds until a step fails; None for no limit. The error names the late ranks and, on
            processors, the last exchange of each.
        on_nan: The reaction to a loss or gradient that is not finite: raise an error, skip the step, or stop
            the training. The state stays as it was before the step. A step is skipped in any case if its
            gradients are finite with the least scale of the loss; it is computed again to find out.
        tokens: Returns the number of tokens in a batch, for `Step.tokens_per_second`.
        seed: The seed of all random numbers of the model, together with the number of the step and the rank.
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
        """Names of the state's arrays next to the parameters and the buffers."""
        return self.optimizer.states + (() if self.average is None else (AVERAGE,))

    def __attrs_post_init__(self) -> None:
        if self.checkpoint is not None and self.checkpoint.best is not None and self.validate is None:
            raise ValueError("Config: Checkpoint.best names a metric of validate, which is None")
