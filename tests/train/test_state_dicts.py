"""State dicts of trainers without PyTorch: parameters, frozen ones, averages and buffers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from test_lost_ranks import pid
from test_trainer import OPTIONS, config
from train_models import BufferedMlp, CallMlp, NumpyMlp, StagedMlp, batches, start

import trio_accel as ta
from trio_accel import train

INLINE = ta.DeviceOptions(isolation="inline")


async def exported(
    chosen: train.Config, module: Any, *, steps: int = 4, ranks: int = 2, is_killed: bool = False
) -> list[dict[str, Any]]:
    """Train, and return the state dict, the parameters, and the averages if there are any."""
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * ranks, options=OPTIONS if is_killed else INLINE) as devices,
        train.open_trainer(devices, module, chosen) as trainer,
    ):
        async for step in trainer.steps(batches(64), until=steps):
            if is_killed and step.number in (2, 4):
                os.kill(await pid(trainer.devices[0]), signal.SIGKILL)
        arrays: list[Any] = [await trainer.state_dict(), await trainer.parameters()]
        if chosen.average is None:
            with pytest.raises(ValueError, match="state_dict: averaged needs"):
                await trainer.state_dict(averaged=True)
        else:
            arrays += await trainer.state_dict(averaged=True), await trainer.parameters(averaged=True)
        return arrays


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("module", [NumpyMlp, CallMlp])
async def test_models_without_buffers(module: Any) -> None:
    found, parameters, averages, average_parameters = await exported(config(average=0.5), module)
    assert_equal(found, parameters)
    assert_equal(averages, average_parameters)
    assert not np.array_equal(averages["w1"], found["w1"])


@pytest.mark.parametrize("module", [NumpyMlp, CallMlp])
async def test_frozen_groups_are_included(module: Any) -> None:
    groups = [train.ParameterGroup(lambda name: name == "w1", is_frozen=True)]
    if module is NumpyMlp:
        # The stand-in trains all parameters, so only the beginning is exported.
        found, parameters = await exported(config(groups=groups), module, steps=0)
    else:
        found, parameters = await exported(config(groups=groups), module)
    expected = start(np.random.default_rng(0), 16)
    assert list(found) == list(expected)
    np.testing.assert_array_equal(found["w1"], expected["w1"])
    assert_equal(parameters, {name: found[name] for name in ("b1", "w2", "b2")})


@pytest.mark.parametrize("is_killed", [False, True])
async def test_buffers_have_their_dtypes(is_killed: bool, tmp_path: Path) -> None:
    """Rank 0 sees half of the rows; a worker is lost in a step, and before the export."""
    expected, mean = [batch for _, batch in zip(range(6), batches(64), strict=False)], 0.0
    checkpoint = train.Checkpoint(tmp_path, every=4)
    found, parameters = await exported(config(checkpoint=checkpoint), BufferedMlp, is_killed=is_killed)
    assert list(found) == [*parameters, "seen", "mean"]
    assert (found["seen"].dtype, int(found["seen"])) == (np.dtype(np.int64), 4 * 32)
    mean = sum(batch["x"][:32].mean() for batch in expected[:4])
    assert (found["mean"].dtype, found["mean"].shape) == (np.dtype(np.float64), (1, 2))
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-15)
    # Another trainer continues with them.
    narrow = train.Checkpoint(tmp_path, every=100)
    found, _ = await exported(config(checkpoint=narrow), BufferedMlp, steps=6)
    assert int(found["seen"]) == 6 * 32


async def test_shared_layers_are_parts_as_in_parameters() -> None:
    chosen = config(parallel=train.Parallel(pipeline=2, tensor=2), accumulate=2)
    found, parameters = await exported(chosen, StagedMlp, ranks=4)
    assert [len(parts) for parts in found.values()] == [2, 2, 2, 2]
    assert_equal(found, parameters)


async def test_integers_that_the_state_does_not_hold() -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(ValueError, match=r"buffer 'seed' has integers beyond 2\*\*53"),
        flatten_subgroups=True,
    ):
        await exported(config(), LargeIntegers)


class LargeIntegers(NumpyMlp):
    def start(self, seed: int, options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return super().start(seed, options)[0], {"seed": np.array(2**53 + 1)}


async def test_an_export_during_steps_is_of_one_step() -> None:
    """Buffers and parameters belong together, and no step writes to a copy under a read."""
    by_step: dict[int, dict[str, Any]] = {}
    found: list[dict[str, Any]] = []
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * 2, options=INLINE) as devices,
    ):
        async with train.open_trainer(devices, BufferedMlp, config()) as trainer:
            async for step in trainer.steps(batches(64), until=30):
                by_step[step.number] = await trainer.state_dict()
        async with (
            train.open_trainer(devices, BufferedMlp, config()) as trainer,
            trio.open_nursery() as nursery,
        ):

            async def read() -> None:
                while True:
                    found.append(await trainer.state_dict())

            nursery.start_soon(read)
            async for _ in trainer.steps(batches(64), until=30):
                pass
            nursery.cancel_scope.cancel()
    assert len({int(arrays["seen"]) for arrays in found}) > 5
    for arrays in found:
        if number := int(arrays["seen"]) // 32:
            assert_equal(arrays, by_step[number])
