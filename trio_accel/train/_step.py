"""The result of a step, and its figures for loggers and a progress bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

__all__ = ["Step"]


@attrs.frozen(kw_only=True)
class Step:
    """A finished step.

    Attributes:
        number: The number of the step, from 1 on. A skipped step has the number of the last committed one.
        loss: The mean loss of all samples, before the step.
        gradient_norm: The norm of the gradient, before it was clipped.
        rate: The rate of the optimizer; groups may have others.
        samples: The total number of samples.
        tokens: The number of tokens, by `Config.tokens`; 0 if that is None.
        seconds: The duration, including all replays.
        replays: The number of times that the step ran again after a loss.
        workers_lost: The number of workers lost since the trainer was opened.
        is_skipped: Whether the step has changed nothing, because a loss or gradient was not finite.
        metrics: The metrics of the validation after the step, by name; empty without a validation.
    """

    number: int
    loss: float
    gradient_norm: float
    rate: float
    samples: int
    tokens: int
    seconds: float
    replays: int
    workers_lost: int
    is_skipped: bool
    metrics: Mapping[str, float] = attrs.field(factory=dict[str, float])

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second."""
        return self.tokens / self.seconds


def figures_of(step: Step, rates: Sequence[float]) -> dict[str, float]:
    """Return the figures of a step for loggers."""
    names = ("loss", "gradient_norm", "rate", "tokens_per_second", "seconds", "workers_lost")
    return {
        **{name: getattr(step, name) for name in names},
        **{f"rate_{number}": rate for number, rate in enumerate(rates) if number},
        **{f"validation_{name}": value for name, value in step.metrics.items()},
    }


def note_of(step: Step) -> str:
    """Return the figures of a step for its progress bar."""
    note = f"loss {step.loss:.4f}  rate {step.rate:.2e}"
    if step.tokens:
        note += f"  {step.tokens_per_second:,.0f} tokens/s"
    if step.workers_lost:
        note += f"  {step.workers_lost} workers lost"
    return note
