"""The texts and notebook views of devices, groups, arrays and calls; none asks a device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chosen import INLINE, NAME

import trio_accel as ta
from trio_accel.devices.front._device import OpenDevice

# The methods of a value that a notebook calls.
METHODS: tuple[Callable[[Any], object], ...] = (repr, str, lambda one: getattr(one, "_repr_html_", str)())


def cells(html: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in rows]


async def test_a_table_of_a_device(device: ta.Device) -> None:
    table = dict(cells(device._repr_html_()))
    assert table["device"] == device.path
    assert table["state"] == "ready"
    assert (table["generation"], table["losses"]) == ("1", "0")
    assert table["isolation"] == device.isolation
    assert table["waiting requests"] == "0"
    await device.close()
    assert dict(cells(device._repr_html_()))["state"] == "closed"


async def test_a_table_of_a_group(system: ta.System) -> None:
    async with system.open_devices([NAME, NAME], options=INLINE) as group:
        head, *rows = cells(group._repr_html_())
        assert head == ["device", "hardware", "state", "generation", "waiting requests"]
        assert [row[0] for row in rows] == [device.path for device in group]
        assert {row[2] for row in rows} == {"ready"}
        await group.devices[0].close()
        assert [row[2] for row in cells(group._repr_html_())[1:]] == ["closed", "ready"]
    assert repr(group) == f"<DeviceGroup {group.path}, 0 devices>"


async def test_names_are_escaped(system: ta.System) -> None:
    device = await system.open_device(NAME, options=INLINE, name="<b>&")
    assert cells(device._repr_html_())[0] == ["device", f"{system.name}/&lt;b&gt;&amp;"]


async def test_nothing_is_asked(system: ta.System, monkeypatch: pytest.MonkeyPatch) -> None:
    async with system.open_devices([NAME], options=INLINE) as group:
        (device,) = group
        x = await device.put(np.eye(2))
        call = x @ x
        launched = (await device.statistics()).launched
        for name in ("ask", "ask_chain", "submit", "look_ahead"):
            monkeypatch.setattr(device, name, pytest.fail)
        monkeypatch.setattr(OpenDevice, "statistics", pytest.fail)
        shown = [method(one) for one in (device, group, x, call, x[0]) for method in METHODS]
        assert all(isinstance(text, str) for text in shown)
        monkeypatch.undo()
        assert repr(call) == "<Call linalg.matmul, not run>"
        await call
        assert repr(call) == "<Call linalg.matmul>"
        assert (await device.statistics()).launched == launched + 1
