"""Trainers against a training only by NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from train_models import CallMlp, NumpyMlp, StagedMlp, batches, reference

import trio_accel as ta
from trio_accel import train

OPTIONS = ta.DeviceOptions(isolation="process", retry=2, intensity=ta.Intensity(99, 1.0))
WIDE = train.Precision(compute="float64", master="float64")
MODULES = [NumpyMlp, CallMlp]


def config(**changes: Any) -> train.Config:
    given: dict[str, Any] = {"optimizer": train.adamw(1e-2, weight_decay=0.1), "precision": WIDE}
    return train.Config(**(given | changes))


async def trained(
    ranks: int,
    module: Any,
    chosen: train.Config,
    steps: int,
    *,
    size: int = 64,
    options: ta.DeviceOptions = OPTIONS,
    each: Any = None,
) -> tuple[list[float], Mapping[str, Any], list[train.Step]]:
    """Train, and return losses, parameters, and the steps."""
    done: list[train.Step] = []
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * ranks, options=options) as devices,
        train.open_trainer(devices, module, chosen) as trainer,
    ):
        async for step in trainer.steps(batches(size), until=steps):
            done.append(step)
            if each is not None:
                await each(trainer, step)
        parameters = await trainer.parameters()
    return [step.loss for step in done], parameters, done


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...], tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, array in expected[1].items():
        np.testing.assert_allclose(found[1][name], array, rtol=0, atol=tolerance, err_msg=name)


@contextmanager
def raises_inside(kind: type[Exception], says: str) -> Iterator[None]:
    """Expect one error, in groups of the nurseries that it passed."""
    with pytest.RaisesGroup(pytest.RaisesExc(kind, match=says), flatten_subgroups=True):
        yield


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
async def test_losses_and_parameters_match_one_processor(ranks: int, module: Any) -> None:
    found = await trained(ranks, module, config(), 12)
    assert_same(found, reference(12, 64))
    assert [step.number for step in found[2]] == [*range(1, 13)]
    assert {step.samples for step in found[2]} == {64}
    assert not any(step.replays or step.is_skipped for step in found[2])


@pytest.mark.parametrize("module", MODULES)
async def test_options_of_a_training_match_the_formulas(module: Any) -> None:
    """A schedule, clipping, parts of a batch, rows that the ranks cannot share equally, sharded arrays."""
    rate = train.warmup_cosine(2e-2, 4, 20)
    optimizer = train.adamw(rate, weight_decay=0.1)
    for shard in (False, True):
        chosen = config(
            optimizer=optimizer, clip_norm=0.5, accumulate=3, parallel=train.Parallel(shard_optimizer=shard)
        )
        found = await trained(3, module, chosen, 10, size=50)
        assert_same(found, reference(10, 50, lr=rate, clip=0.5))
        assert [step.rate for step in found[2]] == [rate(number) for number in range(1, 11)]


@pytest.mark.parametrize("module", MODULES)
async def test_momentum(module: Any) -> None:
    found = await trained(2, module, config(optimizer=train.sgd(5e-2, momentum=0.9, weight_decay=0.01)), 10)
    expected = reference(10, 64, lr=train.constant(5e-2), decay=0.01, momentum=0.9)
    assert_same(found, expected)


MESHES = [(2, 1, 1, "1f1b"), (2, 1, 1, "gpipe"), (1, 2, 1, "1f1b"), (2, 2, 1, "1f1b"), (2, 1, 2, "1f1b")]


@pytest.mark.parametrize(("pipeline", "tensor", "data", "order"), MESHES)
async def test_pipelines_and_shared_layers_have_the_losses_of_one_processor(
    pipeline: int, tensor: int, data: int, order: Any
) -> None:
    parallel = train.Parallel(pipeline=pipeline, tensor=tensor, schedule=order)
    chosen = config(parallel=parallel, accumulate=4, clip_norm=0.5)
    found = await trained(pipeline * tensor * data, StagedMlp, chosen, 8)
    losses, expected = reference(8, 64, clip=0.5)
    np.testing.assert_allclose(found[0], losses, rtol=0, atol=1e-12)
    axes = {"w1": 1, "b1": 0, "w2": 0}
    for name, array in expected.items():
        parts = found[1][name]
        if tensor > 1:
            parts = np.concatenate(parts, axis=axes[name]) if name in axes else parts[1]
        np.testing.assert_allclose(parts, array, rtol=0, atol=1e-12, err_msg=name)
