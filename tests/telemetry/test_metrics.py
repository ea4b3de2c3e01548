"""Metrics as Prometheus reads them, by its own parsers."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Iterable

import attrs
import numpy as np
import pytest
import trio
import trio.testing
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families as parse_text

import trio_accel as ta
from trio_accel.telemetry import KeptRow, Recorder, exposition, prometheus, record


@attrs.frozen
class Sleep(ta.Request["Sleeper", int]):
    seconds: float
    error: Exception | None = None


class Sleeper(ta.Actor):
    @ta.handles(Sleep)
    async def sleep(self, message: Sleep) -> int:
        await trio.sleep(message.seconds)
        if message.error is not None:
            raise message.error
        return 1


RESUME = ta.Policy(directives={ValueError: ta.Directive.RESUME})


@pytest.fixture
async def recorder() -> AsyncGenerator[Recorder, None]:
    """A program with 3 served requests of 2 s one after the other, and a failed one; on a mock clock."""
    async with ta.open_system("shop") as system:
        sleeper = await system.spawn(Sleeper, name='slee"per\\\n', policy=RESUME)
        with record(system) as recorder:
            for _ in range(3):
                await sleeper.ask(Sleep(2.0))
            with pytest.raises(ValueError, match="no"):
                await sleeper.ask(Sleep(0.5, ValueError("no")))
            yield recorder


PATH = 'shop/slee"per\\\n'


def openmetrics(recorder: Recorder) -> str:
    registry = CollectorRegistry()
    registry.register(prometheus(recorder))
    encode, _ = choose_encoder("application/openmetrics-text")
    return encode(registry).decode()


def parse_openmetrics(text: str) -> list[Metric]:
    # It lacks types.
    return list(openmetrics_parser.text_string_to_metric_families(text))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def values(families: Iterable[Metric]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


FORMATS: dict[str, Callable[[Recorder], Iterable[Metric]]] = {
    "text": lambda recorder: parse_text(exposition(recorder)),
    "openmetrics": lambda recorder: parse_openmetrics(openmetrics(recorder)),
}


@pytest.mark.parametrize("read", FORMATS.values(), ids=FORMATS.keys())
async def test_the_parsers_of_both_formats_find_the_events(
    autojump_clock: trio.testing.MockClock, recorder: Recorder, read: Callable[[Recorder], Iterable[Metric]]
) -> None:
    found = values(read(recorder))

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset({"system": "shop", **labels}.items())]

    of_sleep = {"path": PATH, "message_type": "Sleep"}
    assert value("trio_accel_messages_total", **of_sleep, outcome="completed") == 3
    assert value("trio_accel_messages_total", **of_sleep, outcome="failed") == 1
    assert value("trio_accel_message_run_seconds_count", **of_sleep) == 4
    assert value("trio_accel_message_run_seconds_sum", **of_sleep) == pytest.approx(6.5)
    buckets = [("0.25", 0), ("0.5", 1), ("1.0", 1), ("2.5", 4), ("+Inf", 4)]
    for bound, count in buckets:
        assert value("trio_accel_message_run_seconds_bucket", **of_sleep, le=bound) == count
    assert value("trio_accel_message_queue_seconds_bucket", **of_sleep, le="1e-05") == 4
    assert value("trio_accel_message_latency_seconds", **of_sleep, percentile="99") == pytest.approx(2.0)
    assert value("trio_accel_uptime_seconds") == pytest.approx(6.5)
    assert value("trio_accel_actors", state="running") == 2
    assert value("trio_accel_mailbox_messages", path=PATH) == 0
    assert value("trio_accel_dead_letters_total") == 0


@pytest.mark.parametrize("read", FORMATS.values(), ids=FORMATS.keys())
async def test_names_follow_the_conventions(
    autojump_clock: trio.testing.MockClock, recorder: Recorder, read: Callable[[Recorder], Iterable[Metric]]
) -> None:
    families = list(read(recorder))
    assert len({family.name for family in families}) == len(families) >= 20
    for family in families:
        assert family.name.startswith("trio_accel_")
        assert family.documentation.endswith(".")
        assert family.type in {"counter", "gauge", "histogram"}
        if "seconds" in family.documentation.lower() and family.type != "counter":
            assert family.name.endswith("_seconds"), family.name
        for sample in family.samples:
            assert (family.type == "counter") is sample.name.endswith("_total")
            assert sample.labels["system"] == "shop"


@pytest.mark.slow
async def test_labels_are_bounded() -> None:
    many, most = 1200, 30
    async with ta.open_system("shop") as system:
        with record(system, operations=most) as recorder:
            for _ in range(many):
                sleeper = await system.spawn(Sleeper)
                await sleeper.ask(Sleep(0.0))
            found = values(parse_text(exposition(recorder)))
    paths = {dict(labels)["path"] for name, labels in found if name == "trio_accel_mailbox_messages"}
    assert len(paths) == 1001
    assert "(other)" in paths
    messages = {
        dict(labels)["path"]: value
        for (name, labels), value in found.items()
        if name == "trio_accel_messages_total" and ("outcome", "completed") in labels
    }
    assert len(messages) == most + 1
    assert sum(messages.values()) == many


async def test_a_device_in_metrics() -> None:
    async with ta.open_system("shop") as system, system.open_device("cpu") as device:
        with record(system) as recorder:
            array = await device.put(np.ones(1000))
            await recorder.refresh()
            found = values(parse_openmetrics(openmetrics(recorder)))
            of_device = {"system": "shop", "device": "shop/cpu:0"}

            def value(name: str, **labels: str) -> float:
                return found[name, frozenset({**of_device, **labels}.items())]

            assert value("trio_accel_device_up") == 1
            assert value("trio_accel_device_generation") == 1
            assert value("trio_accel_device_losses_total") == 0
            assert value("trio_accel_device_launches_total") == 1
            assert value("trio_accel_device_memory_bytes", kind="used") >= array.nbytes
            assert value("trio_accel_device_memory_limit_bytes") > array.nbytes
            assert value("trio_accel_device_arrays_bytes", path="") == array.nbytes


async def test_plan_caches_in_metrics() -> None:
    options = ta.DeviceOptions(isolation="process")
    async with ta.open_system("shop") as system, system.open_device("cpu", options=options) as device:
        with record(system) as recorder:
            x = await device.put(np.ones((8, 8)))
            for _ in range(6):
                await ta.linalg.matmul(x, x)
            for _ in range(3):
                await (x + 1.0).to_host()
            await recorder.refresh()
            rows = {row.side: row for row in recorder.snapshot().devices[0].plan_caches}
            assert set(rows) == {"application", "link", "executor"}
            assert rows["application"] == KeptRow(side="application", recorded=1, hits=2)
            assert (rows["link"].recorded, rows["link"].evicted) == (2, 0)
            found = values(parse_openmetrics(openmetrics(recorder)))
    for event in ("unplanned", "hits", "recorded", "bound", "armed", "refused", "evicted"):
        for side, row in rows.items():
            labels = {"system": "shop", "device": "shop/cpu:0", "side": side, "event": event}
            assert found["trio_accel_device_plan_caches_total", frozenset(labels.items())] == getattr(
                row, event
            )
    assert not any(name.startswith("trio_accel_device_plans") for name, _ in found)


async def test_a_registry_asks_in_its_own_thread(
    autojump_clock: trio.testing.MockClock, recorder: Recorder
) -> None:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(prometheus(recorder))
    text = await trio.to_thread.run_sync(generate_latest, registry)
    assert b"trio_accel_uptime_seconds" in text


async def test_each_text_is_of_its_moment(autojump_clock: trio.testing.MockClock, recorder: Recorder) -> None:
    registry = CollectorRegistry()
    registry.register(prometheus(recorder))
    for seconds in (6.5, 7.5):
        found = values(parse_text(generate_latest(registry).decode()))
        uptime = found["trio_accel_uptime_seconds", frozenset({("system", "shop")})]
        assert uptime == pytest.approx(seconds)
        await trio.sleep(1.0)


async def test_openmetrics_has_units(autojump_clock: trio.testing.MockClock, recorder: Recorder) -> None:
    units = {family.name: family.unit for family in parse_openmetrics(openmetrics(recorder))}
    assert units["trio_accel_message_run_seconds"] == "seconds"
    assert units["trio_accel_device_memory_bytes"] == "bytes"
    assert units["trio_accel_messages"] == ""


@pytest.mark.parametrize("use", [exposition, prometheus])
async def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[Recorder], object]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    async with ta.open_system("shop") as system:
        with record(system) as recorder, pytest.raises(ta.NotSupportedError, match=r"\[metrics\]"):
            use(recorder)
