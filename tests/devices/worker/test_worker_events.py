"""Reports of a worker about its actors reach the application with all fields of an event."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from chosen import BACKEND

import trio_accel as ta
from trio_accel.devices.wire import _wire_values

VALUES: dict[str, object] = {
    "str": "x",
    "bool": True,
    "int": 3,
    "int | None": None,
    "float": 0.5,
    "object": None,
    "Context | None": None,
    "BaseException": ValueError("no"),
    "BaseException | None": ValueError("no"),
}


@pytest.mark.parametrize("name", sorted(_wire_values._EVENTS))
def test_every_event_arrives(name: str) -> None:
    cls: Any = _wire_values._EVENTS[name]
    event = cls(**{field.name: VALUES[str(field.type)] for field in attrs.fields(cls)})
    again = _wire_values.decode_event(_wire_values.encode_event(event))
    assert type(again) is cls
    for field in attrs.fields(cls):
        before, after = getattr(event, field.name), getattr(again, field.name)
        assert (type(after), str(after)) == (type(before), str(before))


@pytest.mark.skipif("process" not in ta.list_devices()[0].isolations, reason="there are no worker processes")
async def test_a_library_that_crashes_in_a_worker_costs_no_context(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="process")) as device:
        a = await device.put([[1.0, 2.0], [3.0, 4.0]])
        await ta.linalg.matmul(a, a)
        ta.testing.inject_fault(device, ta.linalg.Matmul, fail=RuntimeError("injected"))
        with pytest.raises(ta.ActorFailedError):
            await ta.linalg.matmul(a, a)
        assert (await (await ta.linalg.matmul(a, a)).to_host()).tolist() == [[7.0, 10.0], [15.0, 22.0]]
        assert device.generation == 1
