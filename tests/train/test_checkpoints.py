"""Checkpoints: complete or missing, of any number of ranks, and refused if they are of something else."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import trio
from test_lost_ranks import pid
from test_trainer import OPTIONS, assert_same, config, raises_inside
from train_models import CallMlp, NumpyMlp, StagedMlp, batches, reference

import trio_accel as ta
from trio_accel import train

SHARD = train.Parallel(shard_optimizer=True)


async def go_on(
    ranks: int, module: Any, chosen: train.Config, until: int, **options: Any
) -> tuple[list[float], dict[str, Any], train.Trainer]:
    """Train up to a step from whatever the checkpoint has; returns the losses of these steps."""
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * ranks, options=OPTIONS) as devices,
        train.open_trainer(devices, module, chosen, **options) as trainer,
    ):
        losses = [step.loss async for step in trainer.steps(batches(64), until=until)]
        return losses, await trainer.parameters(), trainer


@pytest.mark.parametrize("module", [NumpyMlp, CallMlp])
async def test_a_training_continues_with_another_number_of_ranks(tmp_path: Path, module: Any) -> None:
    """Each time the losses continue like those of one processor that has seen all batches once."""
    kept = train.Checkpoint(tmp_path, every=3, keep=2)
    losses: list[float] = []
    parameters: dict[str, Any] = {}
    for ranks, parallel, until in ((2, SHARD, 6), (3, SHARD, 9), (1, SHARD, 12), (2, train.Parallel(), 15)):
        chosen = config(checkpoint=kept, parallel=parallel, clip_norm=0.5)
        found, parameters, _ = await go_on(ranks, module, chosen, until)
        losses += found
    assert_same((losses, parameters), reference(15, 64, clip=0.5))
    assert sorted(os.listdir(tmp_path)) == ["step-00000012", "step-00000015"]


async def test_ranks_that_share_layers_go_on(tmp_path: Path) -> None:
    parallel = train.Parallel(pipeline=2, tensor=2)
    chosen = config(checkpoint=train.Checkpoint(tmp_path, every=4), parallel=parallel, accumulate=2)
    first, _, _ = await go_on(4, StagedMlp, chosen, 4)
    second, _, _ = await go_on(4, StagedMlp, chosen, 8)
    np.testing.assert_allclose(first + second, reference(8, 64)[0], rtol=0, atol=1e-12)


async def test_files_can_be_read_by_others(tmp_path: Path) -> None:
    _, parameters, _ = await go_on(2, NumpyMlp, config(checkpoint=train.Checkpoint(tmp_path, every=2)), 2)
    found = safetensors.numpy.load_file(tmp_path / "step-00000002" / "model-000.safetensors")
    assert found.keys() == parameters.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, parameters[name])
    state = safetensors.numpy.load_file(tmp_path / "step-00000002" / "optimizer-000-000.safetensors")
    assert {*state} == {"exp_avg", "exp_avg_sq"}


async def test_incomplete_checkpoints_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chosen = config(checkpoint=train.Checkpoint(tmp_path, every=2))
    await go_on(2, NumpyMlp, chosen, 4)
    (tmp_path / "step-00000004" / "training.json").unlink()
    # A killed writer leaves a folder of another name.
    shutil.copytree(tmp_path / "step-00000002", tmp_path / ".step-00000009-abcd")
    (tmp_path / "step-nine").mkdir()
    losses, parameters, trainer = await go_on(2, NumpyMlp, chosen, 5)
    assert len(losses) == 3
    assert trainer.progress.step == 5
    np.testing.assert_allclose(losses, reference(5, 64)[0][2:], rtol=0, atol=1e-12)
    assert parameters["w1"].shape == (64, 16)
    assert "step-00000004 is damaged and left out: training.json is missing" in caplog.text


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ({}, {"width": 8}, r"'w1' has the shape \(64, 16\), and \(64, 8\) is wanted"),
        ({"optimizer": train.sgd(1e-2)}, {}, "is of adamw with 1 parts of the model, and this is sgd with 1"),
    ],
)
async def test_checkpoints_of_something_else(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    chosen = config(checkpoint=train.Checkpoint(tmp_path, every=2))
    await go_on(1, NumpyMlp, chosen, 2)
    with raises_inside(train.CheckpointError, says):
        await go_on(1, NumpyMlp, config(checkpoint=chosen.checkpoint, **changes), 4, **options)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("text", r"step-00000002: training.json cannot be read: "),
        ("cut", r"step-00000002: model-000.safetensors has \d+ bytes, and \d+ were written"),
        ("gone", "step-00000002: model-000.safetensors is missing"),
    ],
)
async def test_half_of_a_checkpoint(tmp_path: Path, damage: str, says: str) -> None:
    chosen = config(checkpoint=train.Checkpoint(tmp_path, every=2))
    await go_on(1, NumpyMlp, chosen, 2)
    folder = tmp_path / "step-00000002"
    model, about = folder / "model-000.safetensors", folder / "training.json"
    if damage == "text":
        about.write_text(about.read_text()[:-20])
    elif damage == "cut":
        model.write_bytes(model.read_bytes()[:-100])
    else:
        model.unlink()
    with raises_inside(train.CheckpointError, says):
        await go_on(1, NumpyMlp, chosen, 4)


async def test_workers_die_while_checkpoints_are_written(tmp_path: Path) -> None:
    """The steps continue; the folder has only complete checkpoints, and the newest one can be resumed."""
    chosen = config(checkpoint=train.Checkpoint(tmp_path, every=1, keep=20))
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * 2, options=OPTIONS) as devices,
        train.open_trainer(devices, NumpyMlp, chosen) as trainer,
    ):
        async for step in trainer.steps(batches(64), until=10):
            if step.number % 3 == 0:
                os.kill(await pid(trainer.devices[0]), signal.SIGKILL)
        assert trainer.workers_lost >= 2
    names = sorted(os.listdir(tmp_path))
    assert names[-1] == "step-00000010"
    assert all("training.json" in os.listdir(tmp_path / name) for name in names)
    at = 10
    losses, _, _ = await go_on(2, NumpyMlp, chosen, at + 2)
    np.testing.assert_allclose(losses, reference(at + 2, 64)[0][at:], rtol=0, atol=1e-12)


async def test_a_checkpoint_by_hand(tmp_path: Path) -> None:
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * 2, options=OPTIONS) as devices,
        train.open_trainer(devices, NumpyMlp, config()) as trainer,
    ):
        async for _ in trainer.steps(batches(64), until=3):
            pass
        with pytest.raises(ValueError, match=r"folder must be given, because Config.checkpoint is None"):
            await trainer.save()
        path = await trainer.save(tmp_path / "mine")
        # A second one of the same step takes the place of the first one.
        assert path == await trainer.save(tmp_path / "mine")
    assert path == tmp_path / "mine" / "step-00000003"
    chosen = config(checkpoint=train.Checkpoint(tmp_path / "other", every=None, load=path))
    losses, parameters, _ = await go_on(1, NumpyMlp, chosen, 6)
    expected, arrays = reference(6, 64)
    assert_same((losses, parameters), (expected[3:], arrays))
    assert not (tmp_path / "other").exists()


async def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a checkpoint by hand is raised, and nothing is left of it."""

    async def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trio_accel.weights.save", full)
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"], options=OPTIONS) as devices,
        train.open_trainer(devices, NumpyMlp, config()) as trainer,
    ):
        with pytest.raises(OSError, match="No space left"):
            await trainer.save(tmp_path)
        await trio.lowlevel.checkpoint()
    assert not os.listdir(tmp_path)
