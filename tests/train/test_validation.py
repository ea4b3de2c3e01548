"""Validation on all ranks, the best checkpoint, and the state kept by a resumed training."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_lost_ranks import disturb
from test_trainer import OPTIONS, config, raises_inside
from train_models import CallMlp, NumpyMlp, batches, digits, reference, slopes

import trio_accel as ta
from trio_accel import train

pytestmark = pytest.mark.filterwarnings("ignore:.*was never awaited:RuntimeWarning")

INLINE = ta.DeviceOptions(isolation="inline")
SHARD = train.Parallel(shard_optimizer=True)


def held_out(size: int = 20, count: int = 50) -> list[train.Batch]:
    """The last images in batches, the last one smaller: with three ranks, one of these gets none."""
    x, y = (one[-count - 2 :] for one in digits())
    return [{"x": x[at : at + size], "y": y[at : at + size]} for at in range(0, len(x), size)]


class Measured(CallMlp):
    """It also returns the number of right images."""

    def validate(self, parameters: Any, batch: Any) -> Mapping[str, Any]:
        hidden = ta.nn.relu(batch["x"] @ parameters["w1"] + parameters["b1"])
        scores = hidden @ parameters["w2"] + parameters["b2"]
        is_right = ta.arrays.equal(ta.arrays.argmax(scores, axis=1), batch["y"])
        return {
            "loss": ta.nn.cross_entropy(scores, batch["y"]),
            "right": ta.arrays.mean(is_right.cast("float64")),
        }


def metrics_of(parameters: Mapping[str, Any]) -> dict[str, float]:
    """Compute the metrics of all images at once, by NumPy."""
    x, y = (np.concatenate([batch[name] for batch in held_out()]) for name in ("x", "y"))
    hidden = np.maximum(x @ parameters["w1"] + parameters["b1"], 0)
    right = (hidden @ parameters["w2"] + parameters["b2"]).argmax(axis=1) == y
    return {"loss": slopes(parameters, x, y)[0], "right": float(right.mean())}


async def trained(
    module: Any, chosen: train.Config, until: int, *, ranks: int = 3, options: Any = INLINE, each: Any = None
) -> tuple[list[train.Step], train.Trainer, dict[str, Any]]:
    steps: list[train.Step] = []
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * ranks, options=options) as devices,
        train.open_trainer(devices, module, chosen) as trainer,
    ):
        async for step in trainer.steps(batches(64), until=until):
            steps.append(step)
            if each is not None:
                await each(trainer, step)
        found = await trainer.parameters()
        if chosen.average is not None:
            found |= {"averages": await trainer.parameters(averaged=True)}
        if chosen.average is not None and chosen.validate is not None:
            found |= {"averaged": await trainer.validate(averaged=True)}
    return steps, trainer, found


@pytest.mark.parametrize("ranks", [1, 3])
async def test_metrics_match_all_samples_at_once(ranks: int) -> None:
    chosen = config(validate=held_out(), validate_every=4, average=0.5, parallel=SHARD)
    steps, _, found = await trained(Measured, chosen, 8, ranks=ranks)
    assert [step.number for step in steps if step.metrics] == [4, 8]
    assert steps[-1].metrics == pytest.approx(metrics_of(found), abs=1e-12)
    assert steps[3].metrics == pytest.approx(metrics_of(reference(4, 64)[1]), abs=1e-12)
    # The training is not disturbed by it.
    np.testing.assert_allclose([step.loss for step in steps], reference(8, 64)[0], rtol=0, atol=1e-12)
    assert found["averaged"] == pytest.approx(metrics_of(found["averages"]), abs=1e-12)
    assert found["averaged"] != steps[-1].metrics


@pytest.mark.parametrize("module", [CallMlp, NumpyMlp])
async def test_workers_die_between_validations(module: Any) -> None:
    quiet, _, expected = await trained(
        CallMlp, config(validate=held_out(), validate_every=1, average=0.9), 9, ranks=1
    )

    async def each(trainer: train.Trainer, step: train.Step) -> None:
        await disturb(trainer, step)

    chosen = config(validate=held_out(), validate_every=1, average=0.9, parallel=SHARD)
    steps, trainer, found = await trained(module, chosen, 9, options=OPTIONS, each=each)
    assert trainer.workers_lost == 2
    for own, other in zip(steps, quiet, strict=True):
        assert own.metrics == pytest.approx(other.metrics, abs=1e-12)
        assert own.loss == pytest.approx(other.loss, abs=1e-12)
    assert found["averaged"] == pytest.approx(expected["averaged"], abs=1e-12)


class Losses(train.Hook):
    """Counts losses of ranks."""

    def __init__(self) -> None:
        self.losses = 0

    def on_loss(self, trainer: Any, error: Exception) -> None:
        self.losses += 1


async def test_a_worker_dies_in_a_validation() -> None:
    hook, killed = Losses(), list[int]()

    def validate() -> Iterator[train.Batch]:
        for number, batch in enumerate(held_out()):
            if number == 1 and not killed:
                ta.testing.poison(trainer.devices[1])
                killed.append(number)
            yield batch

    chosen = config(validate=validate, validate_every=2, hooks=[hook])
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * 2, options=OPTIONS) as devices,
        train.open_trainer(devices, NumpyMlp, chosen) as trainer,
    ):
        found = [step async for step in trainer.steps(batches(64), until=2)]
        assert trainer.workers_lost == 1
    assert hook.losses == 1
    assert found[1].metrics["loss"] == pytest.approx(metrics_of(reference(2, 64)[1])["loss"], abs=1e-12)


def scored(*values: float) -> Any:
    """Return a model with these values of its metric, one for each validation."""

    left = list(values)

    class Scored(CallMlp):
        def validate(self, parameters: Any, batch: Any) -> Mapping[str, Any]:
            return {"score": ta.arrays.mean(batch["x"]) * 0.0 + left.pop(0)}

    return Scored


ONE = [{"x": np.ones((2, 64)), "y": np.zeros(2, np.int64)}]


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("max", (0.1, 0.9, 0.5, 0.6, 0.7, 0.8), 2),
        ("min", (0.5, 0.9, 0.1, 0.6, 0.1, 0.8), 3),
        ("min", (math.nan, 0.9, math.nan, 0.6, 0.7, math.inf), 4),
        ("max", (math.nan, math.nan, math.nan, math.nan, math.nan, math.nan), None),
    ],
)
async def test_the_best_checkpoint_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: Any, values: tuple[float, ...], best: int | None
) -> None:
    kept = train.Checkpoint(tmp_path, every=5, keep=1, best="score", mode=mode)
    chosen = config(checkpoint=kept, validate=ONE, validate_every=1)
    _, trainer, _ = await trained(scored(*values), chosen, 6, ranks=1)
    names = {f"step-{number:08}" for number in {best or 5, 5 if best != 6 else 6}}
    assert {*os.listdir(tmp_path)} == names
    assert trainer.best == (None if best is None else (best, values[best - 1]))
    bad = sum(not math.isfinite(value) for value in values)
    told = [one for one in caplog.records if "the metric 'score' after step" in one.message]
    assert len(told) == bad


async def test_a_training_continues_with_averages_groups_and_the_best_metric(tmp_path: Path) -> None:
    """Each part has another number of ranks; the rows of the log equal those of one training."""
    groups = [
        train.ParameterGroup(lambda name: name[0] == "b", lr=1e-3, weight_decay=0.0),
        train.ParameterGroup(lambda name: name == "w1", is_frozen=True),
    ]
    given: dict[str, Any] = {"groups": groups, "average": 0.8, "validate": held_out(), "validate_every": 2}
    quiet = config(**given, loggers=[train.CsvLogger(tmp_path / "quiet.csv")])
    steps, _, expected = await trained(CallMlp, quiet, 12, ranks=1)
    values = {step.number: step.metrics["loss"] for step in steps if step.metrics}
    kept = train.Checkpoint(tmp_path / "runs", every=3, keep=2, best="loss")
    found: dict[str, Any] = {}
    for ranks, until, parallel in ((2, 5, SHARD), (3, 9, SHARD), (1, 12, train.Parallel())):
        log = train.CsvLogger(tmp_path / "log.csv")
        chosen = config(**given, checkpoint=kept, parallel=parallel, loggers=[log])
        _, trainer, found = await trained(CallMlp, chosen, until, ranks=ranks)
        # A best step after the last checkpoint is also part of a checkpoint.
        done = {number: value for number, value in values.items() if number <= until}
        least = min(done, key=lambda number: done[number])
        assert trainer.best == (least, pytest.approx(done[least], abs=1e-12))
    for name in ("w2", "b1", "b2"):
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-12)
        np.testing.assert_allclose(found["averages"][name], expected["averages"][name], rtol=0, atol=1e-12)
    rows, other = (read(tmp_path / name) for name in ("log.csv", "quiet.csv"))
    assert [row["step"] for row in rows] == [str(number) for number in range(1, 13)]
    for row, wanted in zip(rows, other, strict=True):
        for name in ("loss", "rate", "rate_1", "gradient_norm", "validation_loss"):
            assert bool(row[name]) == bool(wanted[name])
            assert float(row[name] or 0) == pytest.approx(float(wanted[name] or 0), abs=1e-11)


def read(path: Path) -> list[dict[str, str]]:
    import csv

    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("changes", [{"average": None}, {"groups": []}])
async def test_a_checkpoint_of_another_training(tmp_path: Path, changes: dict[str, Any]) -> None:
    kept = train.Checkpoint(tmp_path, every=1)
    frozen = [train.ParameterGroup(lambda name: name == "w1", is_frozen=True)]
    given: dict[str, Any] = {"checkpoint": kept, "average": 0.9, "groups": frozen}
    await trained(CallMlp, config(**given), 1)
    with raises_inside(train.CheckpointError, "its optimizer keeps|is of another model: parameters: 'w1'"):
        await trained(CallMlp, config(**(given | changes)), 2)


async def test_a_checkpoint_of_another_frozen_part(tmp_path: Path) -> None:
    frozen = [train.ParameterGroup(lambda name: name == "w1", is_frozen=True)]
    given: dict[str, Any] = {"checkpoint": train.Checkpoint(tmp_path, every=1), "groups": frozen}
    await trained(CallMlp, config(**given), 1)
    with raises_inside(train.CheckpointError, "another model: parameters that are not trained differ"):
        await trained(CallMlp, config(**given, seed=1), 2)


async def test_empty_and_short_loaders() -> None:
    async def ending() -> AsyncIterator[train.Batch]:
        yield held_out()[-1]

    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * 3, options=INLINE) as devices,
        train.open_trainer(devices, Measured, config()) as trainer,
    ):
        short = {name: one[:2] for name, one in held_out()[0].items()}
        empty = {name: one[:0] for name, one in short.items()}
        # Two of three ranks have a sample, and a batch may have none.
        found = await trainer.validate([short, empty, *held_out()])
        assert await trainer.validate([*held_out(), short]) == pytest.approx(found, abs=1e-12)
        assert (await trainer.validate(ending)).keys() == {"loss", "right"}
        used = iter(held_out())
        await trainer.validate(used)
        for bad in (used, [], [empty], lambda: iter(())):
            with pytest.raises(ValueError, match="the batches are empty; give a list or a function"):
                await trainer.validate(bad)
        with pytest.raises(ValueError, match=r"averaged needs Config.average, which is None"):
            await trainer.validate(held_out(), averaged=True)
        with pytest.raises(TypeError, match="validate: batches must be given"):
            await trainer.validate()
        with suppress(KeyError):
            await trainer.validate([{"x": short["x"]}])
        assert (await anext(trainer.steps(batches(64)))).loss == pytest.approx(
            reference(1, 64)[0][0], abs=1e-12
        )


async def test_a_refused_validation_ends_the_training() -> None:
    chosen = config(validate=iter(held_out()), validate_every=1)
    with raises_inside(ValueError, "the batches are empty"):
        await trained(CallMlp, chosen, 3)
    kept = train.Checkpoint("unused", best="accuracy", load=None)
    chosen = config(validate=held_out(), validate_every=1, checkpoint=kept)
    with raises_inside(ValueError, "metric 'accuracy' does not exist; available: 'loss'"):
        await trained(CallMlp, chosen, 3)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: config(validate="text"), "validate must be batches or a function of these"),
        (lambda: config(validate_every=0), "validate_every must be an integer of at least 1"),
        (lambda: config(checkpoint=train.Checkpoint("x", best="loss")), "best names a metric of validate"),
        (lambda: train.Checkpoint("x", mode="least"), "mode must be one of 'min', 'max', got 'least'"),  # type: ignore[arg-type]
    ],
)
def test_the_configuration(make: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        make()
