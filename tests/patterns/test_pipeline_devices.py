"""Pipelines with stages on devices: items are copied there, and a killed worker costs a few."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, NamedTuple

import attrs
import numpy as np
import outcome
import pytest
import scipy.sparse
import trio

import trio_accel as ta
from trio_accel.patterns import (
    GetStatistics,
    Pipeline,
    PipelineStage,
    PipelineStatistics,
    RetryBudget,
    RetryPolicy,
    Submit,
    open_results,
)
from trio_accel.testing import inject_fault

# Two contexts of one device are two devices here, on a machine with one.
pytestmark = pytest.mark.filterwarnings("ignore:open_device. cpu.0 is open already:RuntimeWarning")


class Pair(NamedTuple):
    first: Any
    second: Any


@attrs.frozen
class Record:
    array: Any
    _hidden: Any
    number: int = 3


@dataclasses.dataclass(frozen=True)
class Data:
    array: Any
    number: int = 4


WRAPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "itself": (lambda x: x, lambda item: item),
    "tuple": (lambda x: (1, x), lambda item: item[1]),
    "list": (lambda x: [x, "text"], lambda item: item[0]),
    "dictionary": (lambda x: {"x": x, 2: None}, lambda item: item["x"]),
    "named tuple": (lambda x: Pair(None, x), lambda item: item.second),
    "attrs": (lambda x: Record(None, x), lambda item: item._hidden),
    "dataclass": (Data, lambda item: item.array),
    "several": (lambda x: Record([Pair(0, {"x": x})], 1), lambda item: item.array[0].second["x"]),
}


@pytest.mark.parametrize("how", WRAPS)
async def test_arrays_are_copied_to_the_device_of_a_stage(system: ta.System, how: str) -> None:
    wrap, taken_out = WRAPS[how]
    devices = [await system.open_device("cpu") for _ in range(2)]
    got: list[Any] = []

    async def take(item: Any) -> Any:
        got.append(item)
        await trio.lowlevel.checkpoint()
        return item

    pipeline = await system.spawn(
        Pipeline, PipelineStage(take, device=devices[0]), PipelineStage(take, device=devices[1])
    )
    given = wrap(await devices[0].put(np.arange(4.0)))
    result = await pipeline.ask(Submit(given))
    first, second = got
    assert first is given
    assert result is second
    assert type(second) is type(given)
    there = taken_out(second)
    assert there.device is devices[1]
    np.testing.assert_array_equal(await there.to_host(), np.arange(4.0))
    got.clear()
    del result, second, there
    await devices[1].synchronize()
    assert (await devices[1].statistics()).memory.blocks == 0


async def test_a_sparse_matrix_is_also_copied(system: ta.System) -> None:
    devices = [await system.open_device("cpu") for _ in range(2)]
    dense = np.diag([1.0, 2.0, 3.0])

    async def multiply(matrix: ta.sparse.CsrMatrix) -> Any:
        assert matrix.device is devices[1]
        return await (await ta.sparse.spmv(matrix, np.ones(3))).to_host()

    pipeline = await system.spawn(Pipeline, PipelineStage(multiply, device=devices[1]))
    matrix = await ta.sparse.csr(devices[0], scipy.sparse.csr_array(dense))
    np.testing.assert_array_equal(await pipeline.ask(Submit(matrix)), [1.0, 2.0, 3.0])


async def lose_context(device: ta.Device) -> None:
    """Have the worker process killed at the next request, and wait for the next context."""
    wanted = device.generation + 1
    inject_fault(device, ta.linalg.Nrm2, kill=True)
    async with aclosing(device.watch_generation()) as generations:
        async for generation in generations:
            if generation == wanted:
                return


async def pass_on(item: Any) -> Any:
    await trio.lowlevel.checkpoint()
    return item


LOST = (ta.ContextLostError, ta.ActorFailedError, ta.StaleRefError)
WORKERS, ITEMS, KILLS = 2, 300, 2


@pytest.mark.parametrize("is_tried_again", [False, True])
async def test_a_worker_killed_in_the_middle(system: ta.System, is_tried_again: bool) -> None:
    """A loss costs what the stage had in flight, or nothing where it tries again."""
    options = ta.DeviceOptions(isolation="process")
    device = await system.open_device("cpu", options=options)
    budget = RetryBudget(share=1.0, minimum=100.0)
    again = RetryPolicy(budget=budget, attempts=5, may_run_twice=True) if is_tried_again else None

    async def norm(item: int) -> ta.AccelRef:
        return await device.ask(ta.linalg.Nrm2(np.array([3.0 * item, 4.0 * item])))

    async def to_host(norm: ta.AccelRef) -> float:
        return float(await norm.item())

    pipeline = await system.spawn(
        Pipeline,
        pass_on,
        PipelineStage(norm, workers=WORKERS, retry=again),
        PipelineStage(to_host, retry=again),
    )
    found: list[Any] = []
    losses = 0
    async with open_results(pipeline, range(ITEMS), limit=16, outcomes=True) as results:
        async for result in results:
            found.append(result)
            if len(found) in (50, 150):
                losses += 1
                await lose_context(device)
    assert (losses, device.generation) == (KILLS, KILLS + 1)
    assert len(found) == ITEMS
    right = [item for item, result in enumerate(found) if result == outcome.Value(5.0 * item)]
    failed = [result for result in found if isinstance(result, outcome.Error)]
    assert len(right) + len(failed) == ITEMS
    assert all(isinstance(result.error, LOST) for result in failed)
    if is_tried_again:
        assert not failed
    else:
        # The items in the two stages of the device, and the items between them, whose arrays are there.
        assert 1 <= len(failed) <= KILLS * (WORKERS + 2)
    statistics: PipelineStatistics = await pipeline.ask(GetStatistics())
    assert (statistics.answered, statistics.failed) == (len(right), len(failed))
    await device.close()


# Traces.
