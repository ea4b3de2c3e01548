"""Training over a world: each step is committed on all ranks, or on none.

`Trainer` owns the committed state of a training: the arrays of all ranks in `Replicas.states`, and the
numbers in `Trainer.progress` (steps, used batches, scale of the loss, best metric). A training runs
`Trainer.step` once for each batch. The order in it matters:

1. `before_step` hooks run, and the batch is checked, because each part of each rank needs a sample.
2. `Replicas.compute` makes the next state from the committed one, on all ranks. It never writes to the
   committed state, so a step can run again: after the loss of a context, `_again` calls the hooks' `on_loss`
   and repeats the step, at most `Config.replays` times. `_is_loss` separates losses from errors of the model,
   which would only fail again.
3. The loss and the norm of the gradient are checked. If both are finite, `Replicas.commit` makes the new
   state the committed one, without an `await`. Otherwise the state stays. `_has_overflown` finds out whether
   only the scale of the loss is to blame, and `_goes_on` skips the step, raises `NotFiniteError` or ends the
   training.
4. `_count` updates the progress. From here on the step counts, so errors of validation, loggers and hooks do
   not undo it.
5. `_validated` computes the metrics that are due, before the checkpoint is written, because a best value
   belongs to its checkpoint.
6. `_save_behind` copies the state on the devices, and writes a checkpoint while further steps run. It waits
   for the copy only. The lock `_saving` admits one write at a time, so a second checkpoint waits for the
   first.
7. Loggers and `after_step` hooks get the `Step`, and `Steps` yields it.

`TrainingProgress.batches` is the position in the training data. A `Source` keeps a batch until `Steps` leaves
out the batches before that position. So a batch with a failed step is used again, and no batch is used twice,
even after a checkpoint is loaded. A skipped step also uses up its batch.

`open_trainer` shields the last checkpoint from cancellation, so that closing a trainer does not lose it.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

import attrs
import numpy as np
import trio

from ..actors import ActorRestartingError, bind_arguments, opens, warn_untold
from ..backends.base import CompletionTimeoutError, ContextLostError, InputFailedError, StaleRefError
from ..backends.base.kit.ranks import ENDED
from ..collectives import open_world
from ..devices import Device, ProgressReport, show_progress, track_progress
from ._batches import END, Source, Sources, iterator_of, next_of
from ._checkpoints import Identity, TrainingProgress, load, name_of, write
from ._config import AVERAGE, LARGEST_SCALE, LEAST_SCALE, Config
from ._groups import rates_of
from ._layout import Batch, FlatLayout, Work, base_of, check_batch, rows_of, shared, shared_loosely
from ._module import Metrics, Module
from ._named_state import flattened, parameters_of, state_dict_of
from ._observers import Step, call_hooks, figures_of, log_figures, note_of
from ._replicas import CallModule, CallReplicas, ProgramReplicas, Replicas, States

__all__ = ["Batches", "NotFiniteError", "Steps", "Trainer", "open_trainer"]

_logger = logging.getLogger("trio_accel.train")

T = TypeVar("T")

Batches: TypeAlias = (
    Iterable[Batch] | AsyncIterable[Batch] | Callable[[int], Iterable[Batch] | AsyncIterable[Batch]]
)
"""Batches of all ranks together; or a function that gets the number of the first batch, and returns them."""

_Cells: TypeAlias = "list[tuple[Mapping[str, FlatLayout], list[dict[str, Any]]]]"
_MANY_SKIPPED = 10
_LOSSES = (ContextLostError, StaleRefError, InputFailedError, ActorRestartingError)


class NotFiniteError(FloatingPointError):
    """The loss or the gradient of a step is not finite; the step has not changed the state."""


@opens("the training is not open yet: async with open_trainer(...) as trainer")
async def open_trainer(
    devices: Iterable[Device],
    module: type[Module | CallModule],
    config: Config,
    **options: Any,
) -> AsyncGenerator[Trainer, None]:
    """Open a model on a world of devices, for steps that all ranks commit or none.

    Each device is a rank with the whole model, and gets its share of each batch. A step reads the state and
    makes the next one. If a rank is lost during a step, its arrays survive, and all ranks repeat the step. So
    no sample is skipped or used twice, and the losses equal those of an undisturbed training, bit for bit if
    the model is deterministic.

    Args:
        devices: The devices, in rank order. Prefer devices in workers (`isolation="process"`), because their
            arrays survive a loss; inline devices lose theirs with the context.
        module: The model's class: a `Module` (PyTorch), or a `CallModule` (own operations).
        config: The configuration of the training.
        options: Arguments of `Module.configure`, or of the constructor of a `CallModule`.

    Raises:
        TypeError: `module` is not a model class, or its constructor does not take the options.
        ValueError: Devices or options do not fit.
        CheckpointError: The checkpoint is incomplete, or belongs to another model.
    """
    model_class: object = module
    if not isinstance(model_class, type) or not issubclass(model_class, (Module, CallModule)):
        advice = ""
        if isinstance(model_class, (Module, CallModule)):
            name = type(model_class).__name__
            advice = (
                f"; pass the class: open_trainer(devices, {name}, config, ...), with the model's arguments"
            )
        raise TypeError(
            f"open_trainer: module must be a class of train.Module or its like, got {model_class!r}{advice}"
        )
    kind: Any = ProgramReplicas
    if issubclass(model_class, CallModule):
        kind = CallReplicas
        bind_arguments(f"open_trainer: {model_class.__name__}", inspect.signature(model_class), (), options)
    async with open_world(devices) as world, trio.open_nursery() as nursery:
        replicas = kind(world, config, module, options)
        trainer = Trainer(replicas, world.devices, config, nursery)
        await trainer.begin()
        yield trainer
        nursery.cancel_scope.cancel(reason="the trainer is closed")
        # Let a checkpoint in progress finish.
        with trio.CancelScope(shield=True):
            await trainer.wait_saved()


class Trainer:
    """A model on a world of devices; made by `open_trainer`.

    Attributes:
        devices: The devices, in rank order.
        config: The configuration.
        progress: The committed numbers of the training: steps, batches, the scale and the best metric.
        snapshot_bytes: The bytes on each device that the second copy of the state takes.
    """

    def __init__(
        self, replicas: Replicas[Any], devices: tuple[Device, ...], config: Config, nursery: trio.Nursery
    ) -> None:
        self.devices: tuple[Device, ...] = devices
        self.config: Config = config
        self.progress: TrainingProgress = TrainingProgress(scale=config.precision.first_scale or 1.0)
        self.snapshot_bytes: int = 0
        self._replicas = replicas
        self._nursery = nursery
        self._lost = self._losses()
        self._saving = trio.Lock()
        # The states that are being read, and the next end of a reader.
        self._read: dict[object, States] = {}
        self._unread = trio.Event()
        # The number of steps skipped in a row.
        self._skipped = 0
        self.sources: Sources = Sources(self.begin_task)

    def __repr__(self) -> str:
        return f"<Trainer of {len(self.devices)} ranks, step {self.progress.step}>"

    def _losses(self) -> int:
        return sum(device.losses for device in self.devices)

    @property
    def workers_lost(self) -> int:
        """The number of workers lost since the trainer was opened."""
        return self._losses() - self._lost

    async def begin(self) -> None:
        """Make the initial state, or read a checkpoint."""
        config, replicas = self.config, self._replicas
        beginnings = await replicas.begin_all()
        self._identity = Identity(config.optimizer.kind, [*config.states], base_of(replicas.base))
        ranks = self._replicas.meshes[0].data if config.parallel.shard_optimizer else 1
        begun = {cell: flattened(config, named, ranks) for cell, named in beginnings.items()}
        checkpoint, cells = config.checkpoint, [layouts for layouts, _ in begun.values()]
        saved_state = None if checkpoint is None else await load(checkpoint, self._identity, cells)
        if saved_state is not None:
            self.progress, states = saved_state
            if config.precision.first_scale is None:
                self.progress = attrs.evolve(self.progress, scale=1.0)
            for (_, flat), state in zip(begun.values(), states, strict=True):
                for name, array in flat.items():
                    array[: len(state[name])] = state[name]
        replicas.layouts = [begun[mesh.cell][0] for mesh in replicas.meshes]
        replicas.states = [
            await replicas.put_state(mesh.rank, begun[mesh.cell][1]) for mesh in replicas.meshes
        ]
        self.snapshot_bytes = sum(array.nbytes for array in replicas.states[0].values())
        await replicas.open()

    async def wait_saved(self) -> None:
        """Wait until no checkpoint is being written."""
        async with self._saving:
            pass

    async def parameters(self, *, averaged: bool = False) -> dict[str, np.ndarray]:
        """Return the committed trained parameters, as host arrays by name.

        If ranks share layers, each value is a list of parts, in rank order.

        Args:
            averaged: Whether to return their moving averages; see `Config.average`.

        Raises:
            ValueError: `averaged` is True, but the training keeps no averages; or two stages of a pipeline
                have parameters of the same name.
        """
        name = self._name_of("parameters", averaged=averaged)
        with self._reading() as states:
            copied = partial(parameters_of, self._replicas, states, name)
            return (await self._retry("a copy to the host", copied))[0]

    async def state_dict(self, *, averaged: bool = False) -> dict[str, np.ndarray]:
        """Return the committed model for export: parameters, also frozen ones, and persistent buffers.

        For a `Module`, the names are the keys of the model's `state_dict`, so that a new model takes the
        arrays by ``load_state_dict(..., strict=True)``. Trained parameters have the dtype
        `Precision.master`, which floating buffers have at least. Other arrays have their dtype in
        `configure`, but float16 and bfloat16 become float32. For a `CallModule`, the names are those of
        `initial`. If ranks share layers, each value is a list of parts, in rank order.

        Args:
            averaged: Whether to return the moving averages of trained parameters; see `Config.average`.

        Raises:
            NotSupportedError: The model's `state_dict` has an entry that is neither a parameter nor a buffer.
            ValueError: `averaged` is True, but the training keeps no averages; two stages of a pipeline have
                entries of the same name; or `configure` makes other frozen parameters than before.
        """
        name = self._name_of("state_dict", averaged=averaged)
        master = self.config.precision.master
        with self._reading() as states:
            copied = partial(state_dict_of, self._replicas, states, name, master)
            return (await self._retry("a copy to the host", copied))[0]

    def _name_of(self, function: str, *, averaged: bool) -> str:
        if averaged and self.config.average is None:
            raise ValueError(f"{function}: averaged needs Config.average, which is None")
        return AVERAGE if averaged else "parameters"

    async def validate(self, batches: Any = None, *, averaged: bool = False) -> dict[str, float]:
        """Compute the metrics of batches on all ranks, without gradients.

        `validate` of the model returns the metrics, and the trainer averages them over all samples. A batch
        may have fewer samples than there are ranks.

        Args:
            batches: An iterable of batches, plain or async, or a function without arguments that returns one;
                by default, `Config.validate`.
            averaged: Whether to take the moving averages of the parameters; see `Config.average`.

        Returns:
            The metrics by name.

        Raises:
            TypeError: `batches` and `Config.validate` are None.
            ValueError: The batches have no sample, the averages are missing, or the names of the metrics
                differ between batches.
            RankFailedError: See `steps`.
        """
        name = self._name_of("validate", averaged=averaged)
        source = self.config.validate if batches is None else batches
        if source is None:
            raise TypeError("validate: batches must be given, because Config.validate is None")
        iterator = iterator_of(source() if callable(source) else source)
        sums, rows, data = dict[str, float](), 0, self._replicas.meshes[0].data
        while (batch := await next_of(iterator)) is not END:
            check_batch(batch, takes_cuda=self._replicas.takes_cuda)
            shares = shared_loosely(batch, data)
            if not shares:
                continue
            label = f"the validation after step {self.progress.step}"
            results, _ = await self._retry(label, partial(self._replicas.evaluate, name, shares))
            if (rows and sums.keys() != results[0].keys()) or not results[0]:
                raise ValueError(f"validate: the model gives the metrics {[*results[0]]}, before {[*sums]}")
            for share, metrics in zip(shares, results, strict=True):
                count = rows_of(share) if share else 0
                rows += count
                for metric, value in metrics.items():
                    sums[metric] = sums.get(metric, 0.0) + count * value
        if not rows:
            raise ValueError(
                "validate: the batches are empty; give a list or a function, because an iterator "
                "is empty from the second validation on"
            )
        return {metric: total / rows for metric, total in sums.items()}

    async def _validated(self) -> tuple[dict[str, float], bool]:
        """Return the metrics due after a step, and whether they are the best so far."""
        progress, checkpoint = self.progress, self.config.checkpoint
        if self.config.validate is None or progress.step % self.config.validate_every:
            return {}, False
        metrics = await self.validate()
        for name, value in metrics.items():
            if not math.isfinite(value):
                warn_untold(_logger.name, "the metric %r after step %d is %s", name, progress.step, value)
        if checkpoint is None or checkpoint.best is None:
            return metrics, False
        if checkpoint.best not in metrics:
            there = ", ".join(map(repr, metrics))
            raise ValueError(
                f"Checkpoint.best: metric {checkpoint.best!r} does not exist; available: {there}"
            )
        value, sign = metrics[checkpoint.best], 1 if checkpoint.mode == "min" else -1
        if not math.isfinite(value) or (progress.best is not None and sign * value >= sign * progress.best):
            return metrics, False
        self.progress = attrs.evolve(progress, best=value, best_step=progress.step)
        return metrics, True

    @property
    def base(self) -> int:
        """The checksum of the frozen parameters; 0 without any."""
        return self._identity.base

    @property
    def best(self) -> tuple[int, float] | None:
        """The step with the best value of `Checkpoint.best`, and that value; None before the first one."""
        return None if self.progress.best is None else (self.progress.best_step, self.progress.best)

    async def save(self, folder: str | Path | None = None) -> Path:
        """Write a checkpoint of the committed state, and wait until it is complete.

        Args:
            folder: The folder for the checkpoint; by default the folder of `Config.checkpoint`.

        Returns:
            The checkpoint, a folder with safetensors files.
        """
        checkpoint = self.config.checkpoint
        if folder is None:
            if checkpoint is None:
                raise ValueError("save: folder must be given, because Config.checkpoint is None")
            folder = Path(checkpoint.folder)
        return await self._write(Path(folder))

    async def _write(
        self,
        folder: Path,
        *,
        is_behind: bool = False,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> Path:
        """Write a checkpoint after the previous one; it counts as started once steps may go on."""
        keep = 3 if self.config.checkpoint is None else self.config.checkpoint.keep
        async with self._saving:
            progress, target = self.progress, folder / name_of(self.progress)
            with self._reading() as states:
                cells, _ = await self._retry("the copy for a checkpoint", partial(self._copied, states))
            task_status.started()
            args = target, keep, progress, self._identity, cells
            with trio.CancelScope(shield=is_behind):
                await self._retry("a checkpoint", lambda: write(*args))
        return target

    @contextmanager
    def _reading(self) -> Generator[States]:
        """Keep the committed state: a step in progress may commit another one, but the next step waits."""
        reader, states = object(), self._replicas.states
        self._read[reader] = states
        try:
            yield states
        finally:
            del self._read[reader]
            self._unread.set()
            self._unread = trio.Event()

    async def _copied(self, committed: States) -> _Cells:
        """Copy the state for a checkpoint on the devices."""
        replicas = self._replicas
        cells: dict[int, tuple[Mapping[str, FlatLayout], list[dict[str, Any]]]] = {}
        for mesh, layouts, state in zip(replicas.meshes, replicas.layouts, committed, strict=True):
            _, states = cells.setdefault(mesh.cell, (layouts, []))
            if not states or replicas.is_apart:
                arrays = {name: array for name, array in state.items() if not states or name not in layouts}
                states.append({name: await array.copy() for name, array in arrays.items()})
        return [*cells.values()]

    async def _save_behind(self, *, is_best: bool) -> None:
        """Write a checkpoint while steps go on, if it is due or the best so far."""
        checkpoint = self.config.checkpoint
        if checkpoint is None:
            return
        if is_best or (checkpoint.every and not self.progress.step % checkpoint.every):
            await self._nursery.start(partial(self._write, Path(checkpoint.folder), is_behind=True))

    def steps(self, batches: Batches, *, until: int | None = None, progress: bool = False) -> Steps:
        """Train, and yield each step after all ranks have committed it.

        The next batch is fetched during a step, from a plain iterable in a thread. An iterable begins with
        the first batch of the training, so the trainer skips the batches that a loaded checkpoint or an
        earlier call has used. An iterator continues where an earlier call of this trainer left it: first with
        a fetched but unused batch, or the batch of a failed step.

        Args:
            batches: Batches of all ranks together: dicts of host arrays, with a row for each sample. The
                ranks get equal shares of the rows, as far as these can be divided.
            until: The number of the last step; None for all batches.
            progress: Whether to show a progress bar on the terminal, as `show_progress` around the loop does.

        Raises:
            NotFiniteError: A loss or gradient is not finite, and `Config.on_nan` is ``"raise"``.
            RankFailedError: A rank failed by an error of the model, or was lost more often in a row than
                `Config.replays`.
            ValueError: A batch has fewer samples than there are ranks, a schedule gives an invalid rate, or a
                validation is refused; see `validate`.
            Exception: A hook or a logger has raised it. The last step is committed.
        """
        first, batch_source = self.progress.batches, batches
        source = batch_source(first) if callable(batch_source) else batch_source
        return Steps(self, source, first if callable(batch_source) else 0, until, is_shown=progress)

    def begin_task(self, task: Callable[[], Awaitable[None]]) -> None:
        """Start a task that ends with the trainer, at the latest."""
        self._nursery.start_soon(task)

    async def step(self, batch: Batch) -> Step | None:
        """Compute and commit a step; None if the training ends here."""
        began, config, progress = trio.current_time(), self.config, self.progress
        await call_hooks(config.hooks, "before_step", self, batch)
        rates = rates_of(config.optimizer, config.groups, progress.step + 1)
        data = self._replicas.meshes[0].data
        check_batch(batch, takes_cuda=self._replicas.takes_cuda)
        # Each part of each rank needs at least one sample.
        shared(batch, data * config.accumulate)
        number, rows = progress.step + 1, rows_of(batch)
        works = [
            Work(number, rates, progress.scale, rows_of(share) / rows, share) for share in shared(batch, data)
        ]
        # The step writes to the state before the committed one.
        while any(states is not self._replicas.states for states in self._read.values()):
            await self._unread.wait()
        result, replays = await self._retry(f"step {number}", lambda: self._replicas.compute(works))
        is_finite = math.isfinite(result["loss"]) and math.isfinite(result["norm"])
        has_overflown = not is_finite and await self._has_overflown(works, result)
        if is_finite:
            self._replicas.commit()
        elif not self._goes_on(number, result, has_overflown=has_overflown):
            return None
        self._count(is_finite=is_finite, has_overflown=has_overflown)
        metrics = dict[str, float]()
        if is_finite:
            metrics, is_best = await self._validated()
            await self._save_behind(is_best=is_best)
        step = Step(
            number=self.progress.step,
            loss=result["loss"],
            gradient_norm=result["norm"],
            rate=rates[0],
            samples=rows,
            tokens=0 if config.tokens is None else config.tokens(batch),
            seconds=trio.current_time() - began,
            replays=replays,
            workers_lost=self.workers_lost,
            is_skipped=not is_finite,
            metrics=metrics,
        )
        if is_finite and config.loggers:
            await log_figures(config.loggers, step.number, figures_of(step, rates))
        await call_hooks(config.hooks, "after_step", self, step)
        return step

    async def _retry(self, label: str, work: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        """Do repeatable work, again after each loss; return its result and the number of losses."""
        for replays in itertools.count():
            try:
                return await work(), replays
            except Exception as error:
                if not _is_loss(error) or replays >= self.config.replays:
                    raise
                _logger.warning("%s is done again: %s", label, error)
                await call_hooks(self.config.hooks, "on_loss", self, error)
        raise AssertionError

    async def _has_overflown(self, works: Sequence[Work], result: Metrics) -> bool:
        """Return whether only the scale made a gradient infinite: with the least scale it is finite."""
        if self.config.precision.first_scale is None or not math.isfinite(result["loss"]):
            return False
        least_scaled = [attrs.evolve(work, scale=LEAST_SCALE) for work in works]
        label = f"step {works[0].number} with the least scale"
        least_result, _ = await self._retry(label, lambda: self._replicas.compute(least_scaled))
        return math.isfinite(least_result["norm"])

    def _goes_on(self, number: int, result: Metrics, *, has_overflown: bool) -> bool:
        """Return whether to skip a step that is not finite, or raise the error by `on_nan`."""
        text = f"step {number}: the loss is {result['loss']}, the norm of its gradient {result['norm']}"
        if has_overflown:
            text += f" with the scale {self.progress.scale:g}"
        elif self.config.precision.first_scale is not None:
            text += " whatever the scale is"
        if has_overflown or self.config.on_nan == "skip":
            self._skipped += 1
            is_first = self._skipped == 1 and not has_overflown
            if is_first or self._skipped % _MANY_SKIPPED == 0:
                warn_untold(_logger.name, "%s; steps skipped in a row: %d", text, self._skipped)
            return True
        if self.config.on_nan == "raise":
            raise NotFiniteError(f"{text}; the state is that of before the step")
        warn_untold(_logger.name, "%s: the training ends", text)
        return False

    def _count(self, *, is_finite: bool, has_overflown: bool) -> None:
        progress, precision = self.progress, self.config.precision
        step, scale, good = progress.step + is_finite, progress.scale, progress.good + is_finite
        if is_finite:
            self._skipped = 0
        if has_overflown:
            scale, good = max(scale / 2, LEAST_SCALE), 0
        elif precision.first_scale is not None and good >= precision.growth:
            scale, good = min(scale * 2, LARGEST_SCALE), 0
        batches = progress.batches + 1
        self.progress = attrs.evolve(progress, step=step, batches=batches, scale=scale, good=good)


def _is_loss(error: BaseException | None) -> bool:
    """Return whether the loss of a context has caused an error."""
    while error is not None:
        if isinstance(error, CompletionTimeoutError):
            # A deadline of a whole step involves no lost context.
            return error.generation is not None
        # A rank's NCCL may fail before anybody knows that another rank was lost.
        if isinstance(error, _LOSSES) or getattr(error, "code", None) == ENDED:
            return True
        error = error.__cause__
    return False


class Steps:
    """Steps of a training, for ``async for``; made by `Trainer.steps`."""

    def __init__(
        self, trainer: Trainer, batches: Any, position: int, until: int | None, *, is_shown: bool
    ) -> None:
        self._trainer, self._until, self._batches, self._position = trainer, until, batches, position
        self._bar, self._is_shown = ExitStack(), is_shown
        self._report: ProgressReport | None = None
        # The source of the batches, with its iterator, while there are steps.
        self._opened: tuple[Source, Any] | None = None
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Step:
        if self._is_over:
            raise StopAsyncIteration
        if self._opened is None:
            self._opened = self._trainer.sources.of(self._batches, self._position)
            if self._is_shown:
                self._bar.enter_context(show_progress())
            tracked = track_progress("train", total=self._until, unit="steps")
            self._report = self._bar.enter_context(tracked)
        try:
            step = await self._next(self._opened[0])
        except BaseException as error:
            self._opened[0].rest()
            self._opened, self._is_over = None, True
            self._bar.close()
            if isinstance(error, Exception):
                failure = None if isinstance(error, StopAsyncIteration) else error
                hooks = self._trainer.config.hooks
                await call_hooks(hooks, "at_end", self._trainer, failure)  # noqa: ASYNC102  # not cancelled
            raise
        if self._report is not None:
            self._report(step.number, note=note_of(step))
        return step

    async def _next(self, source: Source) -> Step:
        progress, until = self._trainer.progress, math.inf if self._until is None else self._until
        if progress.step >= until:
            raise StopAsyncIteration
        batch = await source.batch(progress.batches, is_last=progress.step + 1 >= until)
        if (step := await self._trainer.step(batch)) is None:
            raise StopAsyncIteration
        source.leave_out(self._trainer.progress.batches)
        return step
