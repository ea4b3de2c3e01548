"""The requests of a step with own operations, and what happens if a rank is lost in one of them."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import trio
from test_trainer import OPTIONS, WIDE, assert_same, config
from train_models import CallMlp, batches, reference

import trio_accel as ta
from trio_accel import train
from trio_accel.devices import opened

INLINE = ta.DeviceOptions(isolation="inline")
GRADIENT = "train.samples, arrays.reshape, linalg.matmul, arrays.reshape, arrays.add, nn.relu and "
CHANGE = "train.adamw, arrays.multiply, arrays.sum, AccelRef.to_host"


async def requests(devices: Sequence[ta.Device], steps: Any, count: int) -> list[list[str]]:
    """Return the requests of each rank in the last of some steps."""
    found: list[list[str]] = [[] for _ in devices]
    for _ in range(count - 1):
        await anext(steps)
    with ExitStack() as stack:
        for device, names in zip(devices, found, strict=True):

            def seen(phase: Any, launch: Any, names: list[str] = names) -> None:
                if phase.value == "validate":
                    names.append(launch.name)

            stack.enter_context(opened(device).observed(seen, lambda ask: ask))
        await anext(steps)
    return found


@pytest.mark.parametrize(
    ("changes", "size", "expected"),
    [
        ({}, 64, [GRADIENT, "collectives.sum", CHANGE]),
        (
            {"clip_norm": 0.5},
            64,
            [GRADIENT, "collectives.sum", "arrays.multiply, arrays.sum", "arrays.multiply, train."],
        ),
        ({"accumulate": 2}, 64, [GRADIENT, GRADIENT, "collectives.sum", CHANGE]),
        # More samples than a request takes with it are put on the device first.
        ({}, 800, ["devices.Put", "devices.Put", "arrays.reshape, linalg.matmul", "collectives.sum", CHANGE]),
        (
            {"parallel": train.Parallel(shard_optimizer=True)},
            64,
            [GRADIENT, "collectives.sum", CHANGE, "collectives.Join"],
        ),
    ],
)
async def test_a_step_is_few_requests(
    system: ta.System, changes: dict[str, Any], size: int, expected: list[str]
) -> None:
    async with (
        system.open_devices(["cpu"] * 2, options=INLINE) as devices,
        train.open_trainer(devices, CallMlp, config(**changes)) as trainer,
    ):
        for names in await requests(trainer.devices, trainer.steps(batches(size)), 12):
            assert len(names) == len(expected)
            assert all(name.startswith(one) for name, one in zip(names, expected, strict=True)), names


@pytest.mark.parametrize("precision", [train.Precision(), WIDE, train.Precision("float16", scale=8.0)])
async def test_all_ranks_have_the_same_bits(system: ta.System, precision: train.Precision) -> None:
    def given() -> Any:
        for batch in batches(49):
            yield {**batch, "x": batch["x"].astype(precision.compute)}

    async with (
        system.open_devices(["cpu"] * 3, options=INLINE) as devices,
        train.open_trainer(devices, CallMlp, config(precision=precision)) as trainer,
    ):
        async for _ in trainer.steps(given(), until=9):
            first, *others = trainer._replicas.states
            for name, array in first.items():
                expected = await array.to_host()
                for other in others:
                    np.testing.assert_array_equal(await other[name].to_host(), expected, strict=True)


OPTIMIZERS = [
    train.adamw(1e-2, weight_decay=0.1),
    train.adamw(1e-2, betas=(0.0, 0.5)),
    train.sgd(1e-2, weight_decay=0.1),
    train.sgd(1e-2, momentum=0.9, weight_decay=0.1),
]


class Line(train.CallModule):
    """A loss with the mean of the samples for a gradient."""

    def initial(self, rng: np.random.Generator) -> Any:
        return {"w": rng.uniform(0.1, 1.0, 33)}

    def loss(self, parameters: Any, batch: Any) -> Any:
        return ta.arrays.mean(batch["x"] @ parameters["w"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
async def test_optimizers_match_the_bits_of_updates_in_place(
    system: ta.System, optimizer: train.Optimizer, dtype: str
) -> None:
    rng, numbers = np.random.default_rng(5), optimizer.numbers
    given = [{"x": rng.normal(size=(2, 33)).astype(dtype)} for _ in range(6)]
    chosen = config(optimizer=optimizer, precision=train.Precision(dtype, master=dtype))
    async with (
        system.open_device("cpu", options=INLINE) as device,
        train.open_trainer([device], Line, chosen) as trainer,
    ):
        first = await trainer.parameters()
        w = await device.put(first["w"])
        states = [await device.zeros(33, dtype) for _ in optimizer.states]
        async for step in trainer.steps(given):
            x = await device.put(given[step.number - 1]["x"])
            gradient = await ta.grad(lambda w, x=x: ta.arrays.mean(x @ w))(w)
            named: dict[str, Any] = {"lr": step.rate, "weight_decay": numbers["weight_decay"]}
            if optimizer.kind == "adamw":
                named |= {"betas": (numbers["beta1"], numbers["beta2"]), "eps": numbers["eps"]}
                await ta.nn.adamw(w, gradient, states[0], states[1], step.number, **named)
            else:
                await ta.nn.sgd(w, gradient, *states, momentum=numbers["momentum"], **named)
            found = await trainer.parameters()
            np.testing.assert_array_equal(found["w"], await w.to_host(), strict=True)
    assert step.number == 6
    assert not np.array_equal(found["w"], first["w"])


@pytest.mark.parametrize("operation", [ta.linalg.Matmul, "collectives.sum", "train.adamw"])
async def test_a_rank_is_killed_in_an_operation_of_a_step(operation: Any) -> None:
    """Each rank is killed once, and its request runs again or all ranks do the step again."""
    options = ta.DeviceOptions(isolation="process", intensity=ta.Intensity(99, 1.0))
    losses: list[float] = []
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * 2, options=options) as devices,
        train.open_trainer(devices, CallMlp, config()) as trainer,
    ):
        async for step in trainer.steps(batches(64), until=10):
            losses.append(step.loss)
            if step.number in (3, 7):
                ta.testing.inject_fault(trainer.devices[step.number // 5], operation, kill=True)
        assert trainer.workers_lost == 2
        assert_same((losses, await trainer.parameters()), reference(10, 64))


async def test_workers_die_at_any_time() -> None:
    """A rank dies at a random moment of a step, again and again: no step is lost, and none counts twice."""
    source, losses = random.Random(7), list[float]()
    numbers: list[int] = []

    async def kill(pid: int, delay: float) -> None:
        # clock: any moment will do
        await trio.sleep(delay)
        os.kill(pid, signal.SIGKILL)

    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * 2, options=OPTIONS) as devices,
        train.open_trainer(devices, CallMlp, config()) as trainer,
        trio.open_nursery() as nursery,
    ):
        async for step in trainer.steps(batches(64), until=90):
            numbers.append(step.number)
            losses.append(step.loss)
            if step.number % 10 == 9:
                pid = (await source.choice(trainer.devices).statistics()).pid
                assert pid is not None
                nursery.start_soon(kill, pid, source.uniform(0, 1.5) * step.seconds)
        assert numbers == [*range(1, 91)]
        assert trainer.workers_lost >= 8
        assert_same((losses, await trainer.parameters()), reference(90, 64), 1e-10)


async def test_samples_of_other_kinds(system: ta.System) -> None:
    """Lists, rows with gaps, and arrays of another order equal plain arrays."""
    found: list[float] = []
    x, y = np.arange(256.0).reshape(4, 64) / 256, np.arange(4)
    kinds: list[Any] = [
        {"x": x, "y": y},
        {"x": x.tolist(), "y": y},
        {"x": np.repeat(x, 2, axis=0)[::2], "y": np.repeat(y, 2)[::2]},
        {"x": np.asfortranarray(x), "y": y.tolist()},
    ]
    for given in kinds:
        async with (
            system.open_devices(["cpu"] * 2, options=INLINE) as devices,
            train.open_trainer(devices, CallMlp, config()) as trainer,
        ):
            found.append([step.loss async for step in trainer.steps([given] * 3)][-1])
    assert found[1:] == found[:1] * 3
