"""Names of metrics by the rules of Prometheus, over the metrics of a system in which everything is used."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest
import trio
from telemetry.promlint import problems

import trio_accel as ta
from trio_accel.patterns import (
    Batcher,
    ContinuousBatcher,
    Deployment,
    FairScheduler,
    FairSubmit,
    HotSwap,
    Last,
    Pages,
    RunningSequence,
    Submit,
    Swap,
)
from trio_accel.telemetry import Recorder, exposition, record

PROMTOOL = shutil.which("promtool")


class Shown(ta.Actor):
    """Shows the figures of pages, as an example service does."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    @asynccontextmanager
    async def lifespan(self, context: ta.ActorContext) -> AsyncGenerator[None, None]:
        context.show_readings(self._pages.readings)
        yield


async def same(item: Any) -> Any:
    await trio.lowlevel.checkpoint()
    return item


async def fail(item: Any) -> Any:
    await trio.lowlevel.checkpoint()
    raise ValueError(item)


class Opening:
    async def __aenter__(self) -> Any:
        return same

    async def __aexit__(self, *_: object) -> None:
        pass


async def step(batch: list[RunningSequence[int, int]]) -> list[Last[int]]:
    await trio.lowlevel.checkpoint()
    return [Last([1, 2]) for _ in batch]


async def use(system: ta.System, device: ta.Device) -> None:
    """Have each pattern that shows figures answer, refuse and fail."""
    batcher = await system.spawn(Batcher, same, max_size=2, name="batches")
    await batcher.ask(Submit(1))
    failing = await system.spawn(Batcher, fail, max_size=2, name="fails")
    with suppress(ta.ActorError, ValueError):
        await failing.ask(Submit(1))
    fair = await system.spawn(FairScheduler, batcher, weights={"gold": 2.0}, max_in_flight=2, name="fair")
    await fair.ask(FairSubmit(2, tenant="gold"))
    sequences = await system.spawn(ContinuousBatcher[int, int], step, name="sequences")
    await sequences.ask(Submit(1))
    swap: ta.Ref[HotSwap[Any, Any]] = await system.spawn(HotSwap, Deployment(Opening, "v1"), name="model")
    await swap.ask(Submit(1))
    await swap.ask(Swap(Opening, "v2"))
    pages = Pages(await device.put(np.zeros((8, 4, 2))), size=4)
    await system.spawn(Shown, pages, name="pages")
    with pages.open([1, 2, 3]):
        x = await device.put(np.eye(8))
        for _ in range(4):
            await ta.linalg.matmul(x, x)


@pytest.fixture
async def recorder() -> AsyncGenerator[Recorder, None]:
    """A recorder of a system with devices of both isolations, patterns, and figures of its own."""
    isolated = ta.DeviceOptions(isolation="process")
    async with (
        ta.open_system("shop") as system,
        system.open_device("cpu") as device,
        system.open_device("cpu", options=isolated, name="worker") as worker,
    ):
        with record(system) as recorder:
            await use(system, device)
            await worker.put(np.ones(8))
            recorder.counter("tokens").add(2, model="small")
            recorder.counter("words_total").add(2)
            recorder.gauge("open_chats").set(3)
            recorder.histogram("answer_seconds").observe(0.25)
            await recorder.refresh()
            yield recorder


async def test_all_names_follow_the_rules(recorder: Recorder) -> None:
    text = exposition(recorder)
    for name in (
        "pages_limit",
        "batch_size",
        "sequences",
        "model_swaps",
        "device_plan_caches",
        "device_arrays",
    ):
        assert f"# TYPE trio_accel_{name}" in text
    assert problems(text) == []


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
async def test_promtool_has_no_complaints(recorder: Recorder) -> None:
    told = await trio.run_process(
        [str(PROMTOOL), "check", "metrics"],
        stdin=exposition(recorder).encode(),
        capture_stdout=True,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert (told.returncode, told.stdout.decode()) == (0, "")


BAD = """
# TYPE a_chats_total gauge
a_chats_total 1
# HELP a_chats_count Chats.
# TYPE a_chats_count gauge
a_chats_count 1
# HELP a_wait_milliseconds Time.
# TYPE a_wait_milliseconds gauge
a_wait_milliseconds{quantile="0.5"} 1
# HELP a_wait_ms Time.
# TYPE a_wait_ms gauge
a_wait_ms{le="1"} 1
# HELP a_openChats_gauge Chats.
# TYPE a_openChats_gauge gauge
a_openChats_gauge 1
# HELP a_tokens Tokens.
# TYPE a_tokens counter
a_tokens 1
# HELP a:rate Rate.
# TYPE a:rate gauge
a:rate 1
"""
BROKEN = {
    "a_chats_total": {"no help text", "only a counter has the suffix _total"},
    "a_chats_count": {"only a histogram or a summary has the suffix _count or _sum"},
    "a_wait_milliseconds": {"use a base unit", "only a summary has the label quantile"},
    "a_wait_ms": {"units are not abbreviated", "only a histogram has the label le"},
    "a_openChats_gauge": {"names are in snake_case", "the type is not a part of the name"},
    "a_tokens": {"a counter has the suffix _total"},
    "a:rate": {"a colon is for recording rules"},
}


def test_broken_rules_are_found() -> None:
    found = [one.rpartition(": ")[::2] for one in problems(BAD)]
    assert {name: {rule for other, rule in found if other == name} for name, _ in found} == BROKEN


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
async def test_promtool_finds_them_too() -> None:
    told = await trio.run_process(
        [str(PROMTOOL), "check", "metrics"],
        stdin=BAD.encode(),
        capture_stdout=True,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert told.returncode == 3
    lines = told.stdout.decode().splitlines()
    names = {line.split()[0].removesuffix(":") for line in lines}
    assert BROKEN.keys() <= names
    assert len(lines) == sum(map(len, BROKEN.values())), lines


@pytest.mark.parametrize("name", ["chats_count", "chats_sum", "chats_bucket", "chats_created"])
async def test_a_name_that_a_histogram_would_have_is_refused(system: ta.System, name: str) -> None:
    """A gauge `chats_count` and a histogram `chats` would be one line of the metrics."""
    with record(system) as recorder:
        for make in (recorder.counter, recorder.gauge, recorder.histogram):
            with pytest.raises(ValueError, match=f"must not end in .*got '{name}'"):
                make(name)


async def test_only_a_counter_has_the_suffix_of_counters(system: ta.System) -> None:
    with record(system) as recorder:
        assert recorder.counter("chats_total") is recorder.counter("chats")
        for make in (recorder.gauge, recorder.histogram):
            with pytest.raises(ValueError, match=r"must not end in .*got 'turns_total'"):
                make("turns_total")
