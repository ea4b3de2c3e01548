"""Cascades: cheap models first, until a stage is confident enough of its answer."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeAlias, get_args

import attrs

from ..actors import checked_options, must_be_number, must_be_one_of, named_options
from ._checks import ModelOutputError
from ._submit import CallStatistics, ItemT, Model, ResultT, Tally, TaskSubmitActor, as_callable, is_model

__all__ = [
    "Cascade",
    "CascadeAnswer",
    "CascadeStatistics",
    "DeclinedStage",
    "NoAnswerError",
    "Stage",
    "StageStatistics",
]

Unsure: TypeAlias = Literal["last", "best", "raise"]


@named_options
@attrs.frozen
class Stage(Generic[ItemT, ResultT]):
    """A model of a cascade.

    Attributes:
        name: The name in answers and statistics.
        model: The model.
        confidence: Returns the model's confidence in a result, as a number other than NaN. It must be quick.
            A stage without it answers every request, so it is the last one.
        threshold: The least confidence with which it answers.
        falls_through: Errors after which the next stage is called: of the model, of `confidence`, or
            `ModelOutputError` if `confidence` returned no number. The caller gets other errors.
    """

    name: str
    model: Model[ItemT, ResultT] = attrs.field(validator=is_model)
    confidence: Callable[[ResultT], float] | None = attrs.field(default=None, kw_only=True)
    threshold: float = attrs.field(default=0.0, kw_only=True)
    falls_through: tuple[type[Exception], ...] = attrs.field(default=(), kw_only=True)

    def __attrs_post_init__(self) -> None:
        if math.isnan(must_be_number("Stage: threshold", self.threshold)):
            raise ValueError("Stage: threshold must be a number, got NaN")
        if not isinstance(self.falls_through, tuple) or not all(map(_is_error, self.falls_through)):
            raise TypeError(
                f"Stage: falls_through must be a tuple of exception classes, got {self.falls_through!r}"
            )

    def confidence_in(self, result: ResultT) -> float | None:
        """Return the confidence of the stage in a result; None without a `confidence` function.

        Raises:
            ModelOutputError: The confidence is NaN, or not a number.
        """
        if self.confidence is None:
            return None
        value = self.confidence(result)
        try:
            confidence = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ModelOutputError(
                f"the confidence of stage {self.name!r} is not a number: {value!r}"
            ) from error
        if math.isnan(confidence):
            raise ModelOutputError(f"the confidence of stage {self.name!r} is NaN")
        return confidence


@attrs.frozen(kw_only=True)
class DeclinedStage:
    """The reason why a stage did not answer.

    Attributes:
        stage: Its name.
        confidence: How sure it was; None if it failed.
        error: Its error; None if it was not sure enough.
    """

    stage: str
    confidence: float | None
    error: Exception | None


@attrs.frozen(kw_only=True)
class CascadeAnswer(Generic[ResultT]):
    """The reply of a cascade.

    Attributes:
        result: The result of the stage's model.
        stage: The name of the stage that answered.
        confidence: The confidence; None if the stage has no `confidence`.
        is_confident: Whether the confidence was sufficient. If not, no stage was confident enough.
        declined: The other stages, in call order.
    """

    result: ResultT
    stage: str
    confidence: float | None
    is_confident: bool
    declined: tuple[DeclinedStage, ...]


@attrs.frozen(kw_only=True)
class StageStatistics(CallStatistics):
    """Counts of a stage's calls. A call fails if its `confidence` is not a number.

    Attributes:
        name: The stage.
        unsure: The number of results below the threshold; part of `answered`.
    """

    name: str
    unsure: int = 0

    @property
    def sure(self) -> int:
        """The number of results that the cascade returned at once."""
        return self.answered - self.unsure


@attrs.frozen(kw_only=True)
class CascadeStatistics(CallStatistics):
    """Counts of a cascade's calls, and of its stages.

    Attributes:
        stages: A record for each stage, in order.
    """

    stages: tuple[StageStatistics, ...]


class NoAnswerError(Exception):
    """No stage of a cascade has answered; the last stage's error, if it failed, is the `__cause__`.

    Attributes:
        declined: The called stages, in order.
    """

    def __init__(self, message: str, declined: tuple[DeclinedStage, ...]) -> None:
        super().__init__(message, declined)
        self.declined: tuple[DeclinedStage, ...] = declined

    def __str__(self) -> str:
        return str(self.args[0])


class Cascade(TaskSubmitActor[ItemT, CascadeAnswer[ResultT]], Generic[ItemT, ResultT]):
    """Calls its stages in order until one is confident enough; a `SubmitActor` with `CascadeAnswer` replies.

    Each call runs in its own task, so a slow stage does not delay other calls. For errors, cancellation and
    restarts see `TaskSubmitActor`. Its statistics are `CascadeStatistics`.

    Args:
        stages: The stages, cheapest first.
        unsure: The reaction if no stage is confident enough. ``"last"`` returns the result of the last stage
            that did not fail. ``"best"`` returns the result with the highest confidence, and the earlier one
            of equals. ``"raise"`` raises a `NoAnswerError`, which is also raised if all stages fail.

    Raises:
        ValueError: `stages` is empty, two stages share a name, or a stage follows one that always answers.
        TypeError: A stage is not a `Stage`.
    """

    @checked_options
    def __init__(self, stages: Sequence[Stage[ItemT, ResultT]], *, unsure: Unsure = "last") -> None:
        self._stages = tuple(stages)
        self._unsure: Unsure = unsure
        self._counted = [Tally() for _ in self._stages]
        for stage in self._stages:
            if not isinstance(stage, Stage):
                raise TypeError(f"Cascade: stages must be Stage(name, model), got {stage!r}")
        names = [stage.name for stage in self._stages]
        if not names:
            raise ValueError("Cascade: there must be at least one stage")
        if len(set(names)) < len(names):
            raise ValueError(f"Cascade: each stage must have a name of its own, got {names}")
        for stage in self._stages[:-1]:
            if stage.confidence is None:
                raise ValueError(
                    f"Cascade: stage {stage.name!r} needs confidence=, because without it no later stage "
                    "would be asked"
                )
        must_be_one_of("Cascade: unsure", unsure, get_args(Unsure))

    async def answer(self, item: ItemT) -> CascadeAnswer[ResultT]:
        """Call the stages with one item.

        Raises:
            NoAnswerError: No stage has answered.
            Exception: An error of a stage that does not fall through.
        """
        declined: list[DeclinedStage] = []
        unsure: list[CascadeAnswer[ResultT]] = []
        for stage, counted in zip(self._stages, self._counted, strict=True):
            name = stage.name
            try:
                with counted:
                    result = await as_callable(stage.model)(item)
                    confidence = stage.confidence_in(result)
            except Exception as error:
                if not isinstance(error, stage.falls_through):
                    raise
                declined.append(DeclinedStage(stage=name, confidence=None, error=error))
                continue
            is_sure = confidence is None or confidence >= stage.threshold
            answer = CascadeAnswer(
                result=result,
                stage=name,
                confidence=confidence,
                is_confident=is_sure,
                declined=tuple(declined),
            )
            if is_sure:
                return answer
            counted["unsure"] += 1
            unsure.append(answer)
            declined.append(DeclinedStage(stage=name, confidence=confidence, error=None))
        if not unsure or self._unsure == "raise":
            reasons = "; ".join(f"{stage.stage}: {_reason_of(stage)}" for stage in declined)
            text = f"no stage of {self.context.path} has answered: {reasons}"
            raise NoAnswerError(text, tuple(declined)) from declined[-1].error
        best = max(unsure, key=operator.attrgetter("confidence")) if self._unsure == "best" else unsure[-1]
        return attrs.evolve(best, declined=tuple(stage for stage in declined if stage.stage != best.stage))

    def statistics(self) -> CascadeStatistics:
        """Return the counts so far."""
        return CascadeStatistics(
            **self._tally,
            stages=tuple(
                StageStatistics(name=stage.name, **counted)
                for stage, counted in zip(self._stages, self._counted, strict=True)
            ),
        )


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _reason_of(stage: DeclinedStage) -> str:
    if stage.error is None:
        return f"confidence {stage.confidence}"
    return f"{type(stage.error).__name__}: {stage.error}"
