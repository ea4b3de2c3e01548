"""Losses of workers change nothing but the time: each step equals the step of one undisturbed processor."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from test_trainer import OPTIONS, assert_same, config, trained
from train_models import CallMlp, DyingMlp, NumpyMlp, PartedMlp, StagedMlp, batches, reference

import trio_accel as ta
from trio_accel import train

STOPPABLE = ta.DeviceOptions(isolation="process", spares=1, stuck_after=0.7, intensity=ta.Intensity(99, 1.0))
FAULTS = {3: "kill", 8: "poison", 13: "stop"}


async def pid(device: ta.Device) -> int:
    found = (await device.statistics()).pid
    assert found is not None
    return found


async def disturb(trainer: train.Trainer, step: train.Step) -> None:
    """Hurt a rank just before the next step."""
    kind = FAULTS.get(step.number)
    device = trainer.devices[step.number % len(trainer.devices)]
    if kind == "poison":
        ta.testing.poison(device)
    elif kind is not None:
        os.kill(await pid(device), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


@pytest.mark.parametrize(
    ("module", "ranks", "parallel"),
    [
        (NumpyMlp, 2, train.Parallel()),
        (NumpyMlp, 4, train.Parallel(shard_optimizer=True)),
        (CallMlp, 2, train.Parallel()),
        (CallMlp, 4, train.Parallel(shard_optimizer=True)),
        (StagedMlp, 2, train.Parallel(pipeline=2)),
        (StagedMlp, 4, train.Parallel(pipeline=2, tensor=2)),
        *[
            pytest.param(module, 8, parallel, marks=pytest.mark.slow)
            for module, parallel in (
                (NumpyMlp, train.Parallel(shard_optimizer=True)),
                (StagedMlp, train.Parallel(pipeline=2)),
                (StagedMlp, train.Parallel(tensor=2)),
                (StagedMlp, train.Parallel(pipeline=2, tensor=2)),
            )
        ],
    ],
)
async def test_workers_are_killed_poisoned_and_stopped(
    module: Any, ranks: int, parallel: train.Parallel
) -> None:
    chosen = config(parallel=parallel, accumulate=parallel.pipeline)
    found = await trained(ranks, module, chosen, 16, options=STOPPABLE, each=disturb)
    if parallel.tensor == 1:
        assert_same(found, reference(16, 64))
    np.testing.assert_allclose(found[0], reference(16, 64)[0], rtol=0, atol=1e-12)
    steps = found[2]
    assert [step.number for step in steps] == [*range(1, 17)]
    assert steps[-1].workers_lost == len(FAULTS)


@pytest.mark.parametrize("ranks", [2, 3])
async def test_a_worker_dies_inside_of_a_step(tmp_path: Path, ranks: int) -> None:
    """Each rank dies once in its gradients, when others may have their part of the sum."""
    found: list[train.Step] = []

    def numbered() -> Any:
        for number, batch in enumerate(batches(64)):
            yield {**batch, "number": np.full(64, number)}

    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * ranks, options=OPTIONS) as devices,
        train.open_trainer(devices, DyingMlp, config(), folder=str(tmp_path)) as trainer,
    ):
        found = [step async for step in trainer.steps(numbered(), until=8)]
        parameters = await trainer.parameters()
    assert_same(([step.loss for step in found], parameters), reference(8, 64))
    # Step 2 r + 1 kills rank r: the device asks again, or the step is done again.
    assert found[-1].workers_lost == ranks
    assert sorted(os.listdir(tmp_path)) == [str(rank) for rank in range(ranks)]


@pytest.mark.parametrize("times", [2, 9])
async def test_ranks_that_do_not_meet_do_the_step_again(tmp_path: Path, times: int) -> None:
    given = [{**batch, "number": np.full(64, at)} for at, batch in zip(range(3), batches(64), strict=False)]
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * 2, options=OPTIONS) as devices,
        train.open_trainer(devices, PartedMlp, config(), folder=str(tmp_path), times=times) as trainer,
    ):
        steps = trainer.steps(given)
        if times > trainer.config.replays:
            # The other rank may report it, because its part was ended by this.
            with pytest.raises(ta.collectives.RankFailedError, match=r"no longer meet|rank has failed"):
                [step async for step in steps]
            assert trainer.progress.step == 1
            assert trainer.config.replays <= len(os.listdir(tmp_path)) <= trainer.config.replays + 1
            return
        found = [step async for step in steps]
        # Once more where a rank had not ended when the others tried again.
        assert found[1].replays in (times, times + 1)
        assert [found[0].replays, found[2].replays] == [0, 0]
        assert_same(([step.loss for step in found], await trainer.parameters()), reference(3, 64))
    assert found[-1].workers_lost == 0


async def test_a_rank_that_dies_again_and_again_ends_the_training(tmp_path: Path) -> None:
    options = ta.DeviceOptions(isolation="process", intensity=ta.Intensity(99, 1.0))
    number = np.zeros(64, np.int64)
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * 2, options=options) as devices,
        train.open_trainer(devices, DyingMlp, config(replays=2), folder=str(tmp_path), again=True) as trainer,
    ):
        steps = trainer.steps({**batch, "number": number} for batch in batches(64))
        with pytest.raises(ta.collectives.RankFailedError, match="rank 0"):
            await anext(steps)
        assert trainer.progress.step == 0
        assert trainer.workers_lost == 3
        with trio.fail_after(60):
            assert (await trainer.parameters())["w1"].shape == (64, 16)
