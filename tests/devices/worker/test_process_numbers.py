"""The process number of a worker is in every place that an operator reads."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import AsyncGenerator
from typing import Any

import attrs
import numpy as np
import pytest
from chosen import BACKEND, NAME
from isolated import options
from processes import until

import trio_accel as ta
from trio_accel.devices.dispatch._answers import record_of
from trio_accel.devices.wire._wire_values import _EVENTS, decode_event, encode_event

CONTEXT = f"test/{NAME}/context"


@pytest.fixture
async def device(system: ta.System) -> AsyncGenerator[ta.Device, None]:
    async with system.open_device(BACKEND, options=options()) as device:
        yield device


async def kill(device: ta.Device, pid: int) -> None:
    generation = device.generation
    os.kill(pid, signal.SIGKILL)
    await until(lambda: device.generation > generation)


async def test_the_tree_and_the_statistics_name_the_worker(system: ta.System, device: ta.Device) -> None:
    pids = []
    for _ in range(2):
        node = system.tree().find(CONTEXT)
        pid = node.pid
        assert pid is not None
        assert (await device.statistics()).pid == pid
        assert f"context (WorkerContextActor) running, process {pid}" in str(system.tree())
        pids.append(pid)
        await kill(device, pid)
    assert len({*pids, os.getpid()}) == 3
    (launcher,) = [node for node in system.tree().walk() if node.actor_class == "LauncherActor"]
    assert launcher.pid not in (None, *pids, os.getpid())
    # Records of this process lack a number.
    assert system.tree().find(f"test/{NAME}").pid is None


async def test_there_is_no_number_inline(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="inline")) as device:
        assert (await device.statistics()).pid is None
        assert {node.pid for node in system.tree().walk()} == {None}


async def test_events_of_actors_name_the_worker(system: ta.System) -> None:
    events: list[ta.Event] = []
    with system.subscribe(events.append, messages=False):
        async with system.open_device(BACKEND, options=options()) as device:
            x = await device.put(np.ones(3))
            first = (await device.statistics()).pid
            assert first is not None
            await kill(device, first)
            await ta.linalg.scal(2.0, x)
            second = (await device.statistics()).pid
    lives = [event for event in events if isinstance(event, ta.ActorEvent)]
    assert [(type(event), event.pid) for event in lives if event.path == CONTEXT] == [
        (ta.ActorStarted, first),
        (ta.ActorRestarted, first),
        (ta.ActorStarted, second),
        (ta.ActorTerminated, second),
    ]
    below = {event.pid for event in lives if event.path == f"{CONTEXT}/blas"}
    assert below == {second}
    assert {event.pid for event in lives if event.path == f"test/{NAME}"} == {None}


async def test_the_log_names_the_worker(
    system: ta.System, device: ta.Device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trio_accel")
    first = (await device.statistics()).pid
    assert first is not None
    await kill(device, first)
    second = (await device.statistics()).pid
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert ("INFO", f"device {device.path}: worker process {first} was killed by SIGKILL") in told
    assert ("INFO", f"device {device.path}: worker process {second} serves generation 2") in told
    # The device's own record of the loss is the only warning.
    (crashed,) = [text for level, text in told if level == "INFO" and "crashed" in text]
    assert crashed.startswith(f"actor {CONTEXT} in process {first} crashed: ContextLostError: ")
    (lost,) = [text for level, text in told if level == "WARNING"]
    assert lost.startswith(f"device {device.path} lost its context of generation 1")


def test_a_record_of_a_worker_has_its_number() -> None:
    record = record_of("mine", logging.ERROR, "100 %d", 4711, "app/cpu:0")
    text = "%(process)d %(processName)s %(name)s %(levelname)s %(message)s"
    assert logging.Formatter(text).format(record) == "4711 trio_accel worker mine ERROR 100 %d"


async def test_log_records_of_a_worker_have_its_number(
    device: ta.Device, caplog: pytest.LogCaptureFixture
) -> None:
    ta.testing.inject_fault(device, ta.linalg.Scal, fail=RuntimeError("broken"))
    with pytest.raises(ta.ActorFailedError):
        await ta.linalg.scal(2.0, await device.put(np.ones(3)))

    def crashes() -> list[logging.LogRecord]:
        return [record for record in caplog.records if "/blas crashed" in record.getMessage()]

    # It may follow the reply.
    await until(lambda: bool(crashes()))
    (record,) = crashes()
    assert record.process == (await device.statistics()).pid
    assert record.process != os.getpid()


async def test_long_errors_stay_in_their_line(system: ta.System, device: ta.Device) -> None:
    ta.testing.inject_fault(device, ta.linalg.Scal, fail=RuntimeError("first\n" + "x" * 500))
    with pytest.raises(ta.ActorFailedError):
        await ta.linalg.scal(2.0, await device.put(np.ones(3)))
    await until(lambda: system.tree().find(f"{CONTEXT}/blas").last_error is not None)
    node = system.tree().find(f"{CONTEXT}/blas")
    assert node.last_error == "RuntimeError: first\n" + "x" * 500
    assert attrs.evolve(node, children=()).summary.endswith(
        "last error: RuntimeError: first " + "x" * 79 + "…"
    )
    assert len(str(system.tree()).splitlines()) == len(list(system.tree().walk()))


@pytest.mark.parametrize("cls", _EVENTS.values(), ids=_EVENTS)
def test_every_field_of_an_event_crosses(cls: type[Any]) -> None:
    """A field of an unknown type would be the end of a worker with correct messages."""
    values: dict[str, Any] = {
        "bool": True,
        "str": "x",
        "int": 3,
        "int | None": 4711,
        "float": 0.5,
        "object": None,
        "Context | None": None,
        "BaseException": ValueError("x"),
        "BaseException | None": ValueError("x"),
    }
    fields = {field.name: values[field.type] for field in attrs.fields(cls)}
    event = decode_event(encode_event(cls(**fields)))
    assert type(event) is cls
    for name, value in fields.items():
        assert str(getattr(event, name)) == str(value)
