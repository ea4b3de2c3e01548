"""Figures of the program's own and of patterns: in snapshots, metrics and the dashboard."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from telemetry.read_snapshot import read_snapshot
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.patterns import (
    Batcher,
    ContinuousBatcher,
    Deployment,
    FairScheduler,
    FairSubmit,
    HotSwap,
    Last,
    RunningSequence,
    Submit,
    Swap,
)
from trio_accel.telemetry import Recorder, exposition, record


def samples(recorder: Recorder) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All samples of the metrics by name and labels, except the system's."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(exposition(recorder)):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "system"}
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


async def test_own_figures_are_in_metrics_and_in_snapshots(system: ta.System) -> None:
    values = np.array([0.1, 0.2, 3.0, 3.0, 50.0])
    with record(system) as recorder:
        tokens = recorder.counter("tokens", "Tokens that were made.")
        tokens.add(3)
        tokens.add(4.5, model="small")
        assert recorder.counter("tokens") is tokens
        recorder.gauge("temperature_celsius").set(20)
        recorder.gauge("temperature_celsius").set(-5)
        spread = recorder.histogram("lengths", bounds=[0.2, 3.0])
        for value in values:
            spread.observe(value)
        answers = recorder.histogram("answer_seconds", bounds=[0.2, 3.0])
        answers.observe(0.5)
        answers.observe(-2.0)
        found = samples(recorder)
        snapshot = recorder.snapshot()
    assert found["tokens_total", ()] == 3
    assert found["tokens_total", (("model", "small"),)] == 4.5
    assert found["temperature_celsius", ()] == -5
    for bound in (0.2, 3.0, math.inf):
        end = "+Inf" if bound == math.inf else str(bound)
        assert found["lengths_bucket", (("le", end),)] == np.count_nonzero(values <= bound)
    assert found["lengths_count", ()] == len(values)
    assert found["lengths_sum", ()] == pytest.approx(values.sum())
    assert found["answer_seconds_sum", ()] == -1.5
    assert found["answer_seconds_count", ()] == 2
    assert read_snapshot(snapshot.to_json()) == snapshot


async def test_actors_of_different_kinds_share_metrics(system: ta.System, autojump_clock: MockClock) -> None:
    async def model(items: list[int]) -> list[int]:
        await trio.sleep(1.0)
        return items

    with record(system) as recorder:
        batcher = await system.spawn(Batcher, model, max_size=2, name="batches")
        fair = await system.spawn(
            FairScheduler, batcher, weights={"gold": 2.0}, max_in_flight=2, max_queued=1, name="fair"
        )

        async def ask() -> None:
            with contextlib.suppress(ta.MailboxFullError):
                await fair.ask(FairSubmit(2, tenant="gold"))

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
                await wait_all_tasks_blocked()
        found = samples(recorder)
    batches, path = ("path", "test/batches"), ("path", "test/fair")
    assert found["trio_accel_batch_size_sum", (batches,)] == 3
    assert found["trio_accel_batch_size_count", (batches,)] == 3
    assert found["trio_accel_queue_wait_seconds_sum", (path,)] == pytest.approx(1.0)
    for actor in (path, batches):
        assert found["trio_accel_requests_total", (("outcome", "answered"), actor)] == 3
    assert found["trio_accel_refused_requests_total", (path, ("tenant", "gold"))] == 1


async def test_labels_have_a_bound(system: ta.System) -> None:
    with record(system) as recorder:
        requests = recorder.counter("requests")
        for number in range(1000):
            requests.add(client=str(number))
        found = {
            labels: value for (name, labels), value in samples(recorder).items() if name == "requests_total"
        }
    assert sum(found.values()) == 1000
    assert len(found) == 101
    assert found[(("client", "(other)"),)] == 900


@pytest.mark.parametrize("name", ["", "2x", "a b", "trio_accel_x", "ä", "x" * 101, 3])
async def test_a_bad_name_is_refused(system: ta.System, name: Any) -> None:
    with record(system) as recorder, pytest.raises(ValueError, match="a metric's name"):
        recorder.counter(name)


async def test_bad_values_are_refused(system: ta.System) -> None:
    with record(system) as recorder:
        counter = recorder.counter("tokens")
        with pytest.raises(ValueError, match="only rises"):
            counter.add(-1)
        with pytest.raises(ValueError, match="finite"):
            counter.add(math.nan)
        with pytest.raises(TypeError, match="number"):
            counter.add("1")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="label"):
            counter.add(path="x")
        with pytest.raises(ValueError, match="tokens is a counter already"):
            recorder.gauge("tokens")
        with pytest.raises(ValueError, match="rise"):
            recorder.histogram("lengths", bounds=[2.0, 1.0])


async def test_a_batcher_shows_sizes_waits_and_outcomes(system: ta.System, autojump_clock: MockClock) -> None:
    async def model(items: list[int]) -> list[int]:
        await trio.sleep(1.0)
        return items

    batcher = await system.spawn(Batcher, model, max_size=3, max_in_flight=1, capacity=4, name="batches")

    async def ask(number: int) -> None:
        with contextlib.suppress(ta.MailboxFullError):
            await batcher.ask(Submit(number))

    with record(system) as recorder:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 0)
            await trio.sleep(0.5)
            for number in range(5):
                nursery.start_soon(ask, number)
        found = samples(recorder)
    path = ("path", "test/batches")
    # A single one, and at its end three and one more: the last of them waits for both.
    sizes = [
        found["trio_accel_batch_size_bucket", (("le", end), path)] for end in ("1.0", "2.0", "4.0", "+Inf")
    ]
    assert sizes == [2, 2, 3, 3]
    assert found["trio_accel_batch_size_sum", (path,)] == 5
    assert found["trio_accel_queue_wait_seconds_count", (path,)] == 5
    assert found["trio_accel_queue_wait_seconds_sum", (path,)] == pytest.approx(3 * 0.5 + 1.5, abs=0.02)
    assert found["trio_accel_requests_total", (("outcome", "answered"), path)] == 5
    assert found["trio_accel_refused_requests_total", (path, ("tenant", ""))] == 1


async def test_a_continuous_batcher_shows_its_sequences_in_metrics(
    system: ta.System, autojump_clock: MockClock
) -> None:
    async def step(batch: list[RunningSequence[int, int]]) -> list[Last[int]]:
        await trio.sleep(1.0)
        return [Last([1, 2, 3]) for _ in batch]

    def cost_of(item: int) -> float:
        return float(item)

    batcher = await system.spawn(
        ContinuousBatcher[int, int], step, cost=cost_of, max_cost=5, name="sequences"
    )
    await wait_all_tasks_blocked()
    with record(system) as recorder:
        async with trio.open_nursery() as nursery:
            for item in (2, 3, 4):
                nursery.start_soon(batcher.ask, Submit(item))
                await wait_all_tasks_blocked()
            await trio.sleep(1.5)
            found = samples(recorder)
    path = ("path", "test/sequences")
    # The first was the only one in its step; the second is in a step, and the third does not fit into it.
    assert found["trio_accel_sequences", (path, ("state", "running"))] == 1
    assert found["trio_accel_sequences", (path, ("state", "waiting"))] == 1
    assert found["trio_accel_sequence_cost", (path,)] == 3
    assert found["trio_accel_parts_total", (path,)] == 3
    assert found["trio_accel_time_to_first_part_seconds_sum", (path,)] == pytest.approx(1.0)


async def test_a_fair_scheduler_shows_refusals_by_tenant(
    system: ta.System, autojump_clock: MockClock
) -> None:
    async def model(item: int) -> int:
        await trio.sleep(1.0)
        return item

    fair = await system.spawn(FairScheduler, model, weights={"gold": 2.0}, max_queued=1, name="fair")

    async def ask(tenant: str) -> None:
        with contextlib.suppress(ta.MailboxFullError):
            await fair.ask(FairSubmit(0, tenant=tenant))

    with record(system) as recorder:
        async with trio.open_nursery() as nursery:
            for tenant in ("gold", "gold", "gold", "secret key", "secret key", "another", "another"):
                nursery.start_soon(ask, tenant)
                await wait_all_tasks_blocked()
        found = samples(recorder)
        text = exposition(recorder)
    path = ("path", "test/fair")
    assert found["trio_accel_refused_requests_total", (path, ("tenant", "gold"))] == 1
    # Keys of strangers have no end, and must not appear in metrics.
    assert found["trio_accel_refused_requests_total", (path, ("tenant", "(other)"))] == 2
    assert "secret" not in text
    assert found["trio_accel_requests_total", (("outcome", "answered"), path)] == 4
    assert found["trio_accel_queue_wait_seconds_count", (path,)] == 4
    assert found["trio_accel_queue_wait_seconds_sum", (path,)] == pytest.approx(0 + 1 + 2 + 3)


async def test_a_hot_swap_shows_its_swaps(system: ta.System, autojump_clock: MockClock) -> None:
    async def model(item: int) -> int:
        await trio.lowlevel.checkpoint()
        return item

    class Opening:
        async def __aenter__(self) -> Any:
            return model

        async def __aexit__(self, *_: object) -> None:
            pass

    def broken() -> Any:
        raise OSError("no such file")

    swap = await system.spawn(HotSwap, Deployment(Opening, "v1"), name="model")
    with record(system) as recorder:
        await swap.ask(Swap(Opening, "v2"))
        with pytest.raises(ta.patterns.SwapFailedError):
            await swap.ask(Swap(broken, "v3"))
        found = samples(recorder)
    for outcome in ("swapped", "failed"):
        labels = (("outcome", outcome), ("path", "test/model"))
        assert found["trio_accel_model_swaps_total", labels] == 1
