"""The scale of a loss: its bounds, and infinite or NaN gradients at any scale."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import trio_accel as ta
from trio_accel import train
from trio_accel.train._config import LARGEST_SCALE, LEAST_SCALE

NARROW = train.Precision("float16", scale=1024.0)


class Line(train.CallModule):
    """The mean of the samples times a parameter; the root of a zero sample lacks a slope."""

    def initial(self, rng: np.random.Generator) -> Any:
        return {"w": np.ones(3)}

    def loss(self, parameters: Any, batch: Any) -> Any:
        x = batch["x"]
        return ta.arrays.mean(x @ parameters["w"]) + ta.arrays.mean(ta.arrays.sqrt(x * x * parameters["w"]))


def given(*firsts: float, dtype: str = "float16") -> list[train.Batch]:
    """Return batches of two samples, of ones but for the first number."""
    batches = [np.ones((2, 3), dtype) for _ in firsts]
    for batch, first in zip(batches, firsts, strict=True):
        batch[0, 0] = first
    return [{"x": batch} for batch in batches]


@pytest.fixture
def open_(system: ta.System) -> Callable[..., Any]:
    @asynccontextmanager
    async def opened(**changes: Any) -> AsyncGenerator[train.Trainer, None]:
        chosen = {"optimizer": train.sgd(1e-4), "precision": NARROW} | changes
        options = ta.DeviceOptions(isolation="inline")
        async with (
            system.open_devices(["cpu"] * 2, options=options) as devices,
            train.open_trainer(devices, Line, train.Config(**chosen)) as trainer,
        ):
            yield trainer

    return opened


@pytest.mark.parametrize("shard", [False, True])
async def test_a_gradient_that_no_scale_makes_finite_is_raised_at_once(
    open_: Callable[..., Any], shard: bool
) -> None:
    async with open_(parallel=train.Parallel(shard_optimizer=shard)) as trainer:
        steps = trainer.steps(given(1, 1, 0, 1))
        assert [(await anext(steps)).is_skipped for _ in range(2)] == [False, False]
        before = await trainer.parameters()
        says = (
            r"step 3: the loss is \d.*, the norm of its gradient nan whatever the scale is; the state is that"
        )
        with pytest.raises(train.NotFiniteError, match=says):
            await anext(steps)
        np.testing.assert_equal(await trainer.parameters(), before)
        assert trainer.progress == attrs_of(trainer, step=2, batches=2, good=2)


def attrs_of(trainer: train.Trainer, **expected: Any) -> Any:
    return type(trainer.progress)(scale=1024.0, **expected)


async def test_such_steps_are_skipped_with_a_warning_and_the_scale_stays(
    open_: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with open_(on_nan="skip") as trainer:
        found = [step.is_skipped async for step in trainer.steps(given(1, *[0] * 25, 1))]
        assert found == [False, *[True] * 25, False]
        assert trainer.progress == attrs_of(trainer, step=2, batches=27, good=2)
    told = [record.message.rpartition(": ")[2] for record in caplog.records if "skipped" in record.message]
    assert told == ["1", "10", "20"]


async def test_such_a_step_ends_the_training(
    open_: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with open_(on_nan="stop") as trainer:
        assert [step.number async for step in trainer.steps(given(1, 0, 1))] == [1]
    assert "gradient nan whatever the scale is: the training ends" in caplog.text
    # Nobody else gets it, so a program without logging prints it on its stderr.
    assert all(
        getattr(record, "is_untold", False) for record in caplog.records if record.name == "trio_accel.train"
    )


async def test_a_large_scale_falls_until_gradients_are_finite(
    open_: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with open_(precision=train.Precision("float16", scale=2.0**32)) as trainer:
        steps = [step async for step in trainer.steps(given(*[1] * 25))]
        skipped = [step.is_skipped for step in steps]
        # Gradients of at most 1 fit with a scale of at most 2**15.
        assert skipped == sorted(skipped, reverse=True)
        assert 15 <= sum(skipped) <= 18
        assert trainer.progress.scale == 2.0 ** (32 - sum(skipped))
    assert "with the scale 8.38861e+06; steps skipped in a row: 10" in caplog.text
    # Nobody else gets it, so a program without logging prints it on its stderr.
    assert all(
        getattr(record, "is_untold", False) for record in caplog.records if record.name == "trio_accel.train"
    )


async def test_a_scale_grows_to_its_bound_and_comes_back(open_: Callable[..., Any]) -> None:
    wide = train.Precision("float64", master="float64", scale=2.0**30, growth=1)
    async with open_(precision=wide) as trainer:
        steps = [step async for step in trainer.steps(given(*[1] * 40, dtype="float64"))]
        assert not any(step.is_skipped for step in steps)
        assert trainer.progress.scale == LARGEST_SCALE
    # In float16 it overflows after some steps, and is halved.
    scales = list[float]()
    async with open_(precision=train.Precision("float16", scale=1.0, growth=1)) as trainer:
        async for _ in trainer.steps(given(*[1] * 40)):
            scales.append(trainer.progress.scale)
    assert max(scales) <= 2.0**18
    assert min(scales[20:]) >= 2.0**13


async def test_losses_do_not_depend_on_the_scale(open_: Callable[..., Any]) -> None:
    found: list[list[float]] = []
    for scale in (None, LEAST_SCALE, 1.0, LARGEST_SCALE):
        wide = train.Precision("float64", master="float64", scale=scale)
        async with open_(precision=wide) as trainer:
            found.append([step.loss async for step in trainer.steps(given(1, 2, 3, 4, dtype="float64"))])
    assert found[1:] == found[:1] * 3


@pytest.mark.parametrize(
    "scale", [0.0, -1.0, math.nan, math.inf, LEAST_SCALE / 2, LARGEST_SCALE * 2, "1", True]
)
def test_scales_out_of_bounds(scale: Any) -> None:
    with pytest.raises(
        ValueError, match=r"Precision: scale must be a number from 5.96046e-08 to 4.29497e\+09"
    ):
        train.Precision("float16", scale=scale)


@pytest.mark.parametrize("scale", [LEAST_SCALE, 2.0**-16, 1.0, 1024.0])
async def test_a_gradient_is_unscaled_in_the_master_dtype(open_: Callable[..., Any], scale: float) -> None:
    """float16 holds no number above 65504, such as the reciprocal of the least scale."""
    precision = train.Precision("float16", scale=scale)
    async with open_(optimizer=train.sgd(0.5), precision=precision) as trainer:
        [step] = [step async for step in trainer.steps(given(1.0))]
        assert not step.is_skipped
        parameters: Any = await trainer.parameters()
    # float16 has multiples of 2**-24: each of two parts of the scaled slope is off by one at most.
    slopes = (1.0 - parameters["w"]) / 0.5
    np.testing.assert_allclose(slopes, 1.0 + 1.0 / 6.0, atol=max(2.0**-23 / scale, 1e-2))


class Faint(train.CallModule):
    """Its slope is 2**-26, and the numbers of float16 begin at 2**-24."""

    def initial(self, rng: np.random.Generator) -> Any:
        return {"w": np.ones(3)}

    def loss(self, parameters: Any, batch: Any) -> Any:
        return ta.arrays.sum(batch["x"] * parameters["w"] * 2.0**-12) * 2.0**-14


@pytest.mark.parametrize("scale", [1024.0, 2.0**20])
async def test_a_scale_keeps_gradients_that_vanish_in_the_backward_pass(
    system: ta.System, scale: float
) -> None:
    precision = train.Precision("float16", scale=scale)
    config = train.Config(optimizer=train.sgd(2.0**20), precision=precision)
    options = ta.DeviceOptions(isolation="inline")
    async with (
        system.open_device("cpu", options=options) as device,
        train.open_trainer([device], Faint, config) as trainer,
    ):
        [_] = [step async for step in trainer.steps([{"x": np.ones((1, 3), "float16")}])]
        parameters: Any = await trainer.parameters()
    np.testing.assert_array_equal(parameters["w"], 1.0 - 2.0**-6)
