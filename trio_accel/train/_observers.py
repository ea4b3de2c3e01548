"""Hooks and loggers: the objects of a program that a trainer calls."""

from __future__ import annotations

import csv
import importlib.util
import inspect
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import attrs
import trio

__all__ = ["CsvLogger", "Hook", "Logger", "RecorderLogger", "Step", "TensorBoardLogger"]

HookResult: TypeAlias = "Awaitable[None] | None"


class Hook:
    """A base class with methods that a trainer calls; derive from it, and define the methods that you need.

    A method may be async. An error that it raises ends the training, and `Trainer.steps` raises it. The
    methods run in the Trio loop, so put blocking work into `trio.to_thread.run_sync`.
    `SystemOptions.held_after` warns of a line that holds the loop.
    """

    def before_step(self, trainer: Any, batch: Mapping[str, Any]) -> HookResult:
        """Called with the batch before each step, but not again before a repetition."""

    def after_step(self, trainer: Any, step: Any) -> HookResult:
        """Called with each `Step` when it is committed and validated, before `Trainer.steps` yields it."""

    def on_loss(self, trainer: Any, error: Exception) -> HookResult:
        """Called with the error of a lost rank, before the work is done again."""

    def at_end(self, trainer: Any, error: Exception | None) -> HookResult:
        """Called when `Trainer.steps` has no more steps, with None, or when it raises an error.

        A caller who leaves the loop early, or is cancelled, ends it without this.
        """


async def call_hooks(hooks: Iterable[Hook], method: str, *arguments: object) -> None:
    """Call a method of each hook, one after the other; raise the error of a hook."""
    for hook in hooks:
        result = getattr(hook, method)(*arguments)
        if inspect.isawaitable(result):
            await result


class Logger(ABC):
    """A base class for receivers of a training's figures; derive from it. A thread calls it."""

    @abstractmethod
    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step.

        Args:
            step: The number of the step. It rises, unless a training continues from an older checkpoint; then
                figures of this step and later ones are replaced.
            figures: Numbers by name: ``"loss"``, ``"gradient_norm"``, ``"rate"``, ``"rate_1"`` of the first
                group, ``"tokens_per_second"``, ``"seconds"``, ``"workers_lost"``; and ``"validation_loss"``
                and the like after a validation.
        """


async def log_figures(loggers: Sequence[Logger], step: int, figures: Mapping[str, float]) -> None:
    """Pass figures to all loggers in one thread; raise the error of a logger."""

    def log() -> None:
        for logger in loggers:
            logger.log(step, figures)

    await trio.to_thread.run_sync(log)


class CsvLogger(Logger):
    """A logger that writes a table with a row for each step.

    An earlier row of the same step or a later one is removed first. So each step has one row, even if a
    training continues from a checkpoint.

    Args:
        path: The file. Its folder must exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        # The names of the columns, and the step of the last row; None before the first call.
        self._names: list[str] | None = None
        self._last = 0

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Append a row; a new name becomes a column.

        Raises:
            ValueError: The file has a row without a step.
        """
        row = {"step": step, **figures}
        if self._names is None or step <= self._last or not row.keys() <= {*self._names}:
            self._rewrite(step, row)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._names or ()).writerow(row)
        self._last = step

    def _rewrite(self, step: int, row: Mapping[str, float]) -> None:
        rows: list[dict[str, Any]] = []
        if self._path.exists():
            # Other bytes than UTF-8 become text, so that the error has none of them.
            with self._path.open(newline="", encoding="utf-8", errors="replace") as file:
                # A killed program may have left the beginning of a row.
                rows = [
                    record
                    for record in csv.DictReader(file)
                    if None not in record.values() and record.get("step")
                ]
        if not all(record["step"].isdecimal() for record in rows):
            raise ValueError(f"{self._path} is not a log of training: a step is not an integer")
        previous_rows = [record for record in rows if int(record["step"]) < step]
        self._names = [*dict.fromkeys(name for record in (*previous_rows[:1], row) for name in record)]
        beside = self._path.with_name(f".{self._path.name}-new")
        with beside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._names)
            writer.writeheader()
            writer.writerows(previous_rows)
        beside.replace(self._path)


class TensorBoardLogger(Logger):
    """A logger that writes scalars for TensorBoard; it needs the extra `tensorboard`.

    Args:
        folder: The folder of the events. TensorBoard leaves out earlier events of the first logged step and
            of later steps.

    Raises:
        ImportError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if importlib.util.find_spec("tensorboardX") is None:
            raise ImportError("TensorBoardLogger needs tensorboardX: pip install tensorboardX")
        self._folder = os.fspath(folder)
        self._writer: Any = None
        self._last = 0

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Write each figure as a scalar, and flush."""
        if self._writer is None or step <= self._last:
            self.close()
            # The trainer calls this in a thread, because the import takes long.
            package: Any = importlib.import_module("tensorboardX")
            self._writer = package.SummaryWriter(self._folder, purge_step=step)
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
        self._last = step

    def close(self) -> None:
        """Close the file of events; a further call of `log` opens another one."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None


class _Gauge(Protocol):
    def set(self, value: float, /) -> object: ...


class _MetricsRecorder(Protocol):
    def gauge(self, name: str, help: str = "", /) -> _Gauge: ...  # noqa: A002  # as in telemetry


class RecorderLogger(Logger):
    """A logger that shows the last figures in the telemetry, as gauges ``train_loss`` and the like.

    Args:
        recorder: The recorder of ``with ta.telemetry.record(system) as recorder``.
    """

    def __init__(self, recorder: _MetricsRecorder) -> None:
        self._recorder = recorder

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Set a gauge for each finite figure."""
        for name, value in {"step": step, **figures}.items():
            if math.isfinite(value):
                self._recorder.gauge(f"train_{name}").set(value)


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
