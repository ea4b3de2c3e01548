"""The file of a timeline: trace events as Perfetto reads them, well nested, with arrows to operations."""

from __future__ import annotations

import itertools
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio

import trio_accel as ta


@attrs.frozen
class Product(ta.Request["Worker", None]):
    pass


@attrs.frozen
class Nap(ta.Request["Worker", None]):
    pass


class Worker(ta.Actor):
    def __init__(self, x: ta.AccelRef) -> None:
        self.x = x

    @ta.handles(Product)
    async def product(self, message: Product) -> None:
        await ta.linalg.matmul(self.x, self.x)

    @ta.handles(Nap)
    async def nap(self, message: Nap) -> None:
        await trio.sleep_forever()


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a file, each checked against the format."""
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        assert event["ph"] in "MXisf"
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            continue
        assert event["ts"] >= 0.0
        assert event["ph"] != "X" or event["dur"] >= 0.0
    check_rows(events)
    return events


def check_rows(events: list[dict[str, Any]]) -> None:
    """No slices of one row overlap, and all rows have names."""
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    names = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert rows.keys() <= names
    for slices in rows.values():
        slices.sort()
        for (_, end), (begin, _) in itertools.pairwise(slices):
            assert begin >= end - 1e-3


def slices(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


async def test_messages_and_operations_with_arrows(
    system: ta.System, device: ta.Device, tmp_path: Path
) -> None:
    x = await device.put(np.eye(16))
    worker = await system.spawn(Worker, x, name="worker")
    path = tmp_path / "trace.json"
    with ta.telemetry.timeline(system, path) as timeline:
        await worker.ask(Product())
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(ta.linalg.matmul, x, x)
        await device.submit(ta.linalg.Scal(1.0, x)).wait()
    events = read(path)
    assert timeline.events == len(events)
    operations = slices(events, "linalg.Matmul")
    assert len(operations) == 11
    assert len(slices(events, "ask linalg.Matmul")) == 10
    (message,) = slices(events, "Product")
    assert message["args"]["outcome"] == "completed"
    pid = system.tree().find(f"{device.path}/context").pid
    assert {event["pid"] for event in operations} == {pid or message["pid"]}
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == 12
    for number, begin in begins.items():
        assert begin["ts"] <= ends[number]["ts"]
    inside = [event for event in begins.values() if event["tid"] == message["tid"]]
    assert len(inside) == 1  # the requests of the actor, within its message
    assert message["ts"] <= inside[0]["ts"] <= message["ts"] + message["dur"]


async def test_cancelled_failed_and_unfinished(
    system: ta.System, device: ta.Device, tmp_path: Path, nursery: trio.Nursery
) -> None:
    x = await device.put(np.eye(4))
    worker = await system.spawn(Worker, x, name="worker")
    path = tmp_path / "trace.json"
    with ta.telemetry.timeline(system, path):
        with trio.move_on_after(0.01):
            await worker.ask(Nap())
        ta.testing.inject_fault(device, ta.linalg.Matmul, fail=ta.LibraryError("no", library="blas", code=7))
        with pytest.raises(ta.LibraryError):
            await ta.linalg.matmul(x, x)
        nursery.start_soon(worker.ask, Nap())
        await trio.testing.wait_all_tasks_blocked()
    nursery.cancel_scope.cancel()
    events = read(path)
    assert [event["args"]["outcome"] for event in slices(events, "Nap")] == ["cancelled", "unfinished"]
    (ask,) = slices(events, "ask linalg.Matmul")
    assert ask["args"]["outcome"].startswith("failed: LibraryError")


async def test_every_opened_system(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(LookupError), ta.telemetry.timeline(None, path):  # noqa: PT012  # it is whole then, too
        async with ta.open_system("one") as one, one.open_device("cpu") as device:
            await device.zeros((2,))
        raise LookupError
    assert len(slices(read(path), "devices.Empty")) == 1


async def test_a_file_that_cannot_be_written(system: ta.System, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), ta.telemetry.timeline(system, tmp_path / "no" / "trace.json"):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /dev/full")
async def test_a_full_disk(system: ta.System, device: ta.Device, caplog: pytest.LogCaptureFixture) -> None:
    with ta.telemetry.timeline(system, "/dev/full"):
        await device.zeros((2,))
    assert "cannot be written" in caplog.text
