"""Mistakes of a first hour: each error names the fault, the value, and the way out."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND, INLINE
from isolations import inline

import trio_accel as ta
from trio_accel import arrays, linalg, nn

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.filterwarnings("ignore:<Call .* was never awaited:RuntimeWarning"),
]

# Python's own messages about its objects name no remedy.
OF_PYTHON = re.compile(
    r"object (is not|does not|has no)|unhashable|cannot pickle|takes \d+ positional|\bat 0x"
)


class Given:
    """The arguments of the mistakes."""

    def __init__(self, system: ta.System, device: ta.Device, x: ta.AccelRef, single: ta.AccelRef) -> None:
        self.system = system
        self.device: Any = device
        self.x: Any = x
        self.single: Any = single
        self.host = np.ones((3, 3))


async def _with(manager: Any) -> None:
    with manager:
        pass


async def _async_for(items: Any) -> None:
    async for _ in items:
        pass


async def _in_nursery(start: str, *args: Any) -> None:
    async with trio.open_nursery() as nursery:
        begun = getattr(nursery, start)(*args)
        if begun is not None:
            await begun


def _holding_itself() -> list[Any]:
    held: list[Any] = [1.0]
    held.append(held)
    return held


CLASS_FIRST = r"^capture: device must be an open Device, got \w+; pass the device before it$"
MISTAKES: dict[str, tuple[Callable[[Given], Any], type[Exception], str]] = {
    "async for over an array": (
        lambda g: _async_for(g.x),
        TypeError,
        r"^an AccelRef is not iterable: .*; use await ref\.to_host\(\)$",
    ),
    "async for over a call": (
        lambda g: _async_for(g.x + 1),
        TypeError,
        r"^a Call is not iterable: its elements are on the device; use await call\.to_host\(\)$",
    ),
    "async for over a stream": (
        lambda g: _async_for(ta.stream(g.device, [g.host])),
        TypeError,
        r"async with ta\.stream\(\.\.\.\)",
    ),
    "async for over a lease": (
        lambda g: _async_for(g.x.lease()),
        TypeError,
        r"^`async for` needs an open block; the array is not leased yet: async with ref\.lease\(\) as array$",
    ),
    "a plain with over a lease": (
        lambda g: _with(g.x.lease()),
        TypeError,
        r"async with ref\.lease\(\) as array$",
    ),
    "an awaited lease": (lambda g: g.x.lease(), TypeError, r"async with ref\.lease\(\) as array$"),
    "an awaited loan": (lambda g: g.device.borrow(g.x), TypeError, r"async with device\.borrow\(ref\)"),
    "an awaited world": (
        lambda g: ta.open_world([g.device]),
        TypeError,
        r"async with ta\.open_world\(devices\)",
    ),
    "an awaited group": (
        lambda g: g.system.open_devices("cpu"),
        TypeError,
        r"async with system\.open_devices",
    ),
    "start_soon of a call": (
        lambda g: _in_nursery("start_soon", g.x + 1),
        TypeError,
        r"(?s)^Trio was expecting .*<Call arrays\.add>.*start_soon\(arrays\.add, \.\.\.\)",
    ),
    "start of a call": (
        lambda g: _in_nursery("start", g.x + 1),
        TypeError,
        (
            r"^<Call arrays\.add, not run> is not an async function;"
            r" .*: nursery\.start_soon\(ta\.arrays\.add, \.\.\.\)$"
        ),
    ),
    "a call that is called": (
        lambda g: (g.x + 1)(2),
        TypeError,
        r"^<Call arrays\.add, not run> is not an async function;",
    ),
    "a nested list of arrays": (
        lambda g: arrays.stack([[g.x, g.x]]),
        TypeError,
        r"^arrays\.stack: an operand is a list, which holds an array; pass its arrays one by one",
    ),
    "a dict of arrays": (
        lambda g: arrays.sum({"a": g.x}),
        TypeError,
        r"^arrays\.sum: an operand is a dict, which holds an array;",
    ),
    "a list that holds itself": (
        lambda g: g.device.put(_holding_itself()),
        ValueError,
        r"host must be nested at most 64 deep; does a list",
    ),
    "None in place of an array": (
        lambda g: g.device.put(None),
        TypeError,
        r"^put: host must be an array, got None$",
    ),
    "a dict in place of an array": (
        lambda g: g.device.put({"a": 1}),
        TypeError,
        r"^put: host must be an array, got \{'a': 1\}; put each of its arrays by itself$",
    ),
    "a mask as an index": (
        lambda g: g.x[g.host > 0],
        TypeError,
        r"; an array of bool and of shape \(3, 3\) would make a copy: .* await ta\.arrays\.compress\(",
    ),
    "axes that repeat": (
        lambda g: g.x.transpose(0, 0),
        ValueError,
        r"axes must name each axis of shape \(3, 3\) once, got \(0, 0\)$",
    ),
    "an array for out by its place": (
        lambda g: g.x.to_host(g.host),
        TypeError,
        r"^to_host: too many positional arguments; give out= by name$",
    ),
    "a name for a device": (
        lambda g: g.x.copy_to("cpu"),
        TypeError,
        r"^copy_to: device must be an open Device, got str; open it: await system\.open_device\('cpu'\)$",
    ),
    "a step before the device": (
        lambda g: ta.graphs.capture(_holding_itself, g.device),
        TypeError,
        CLASS_FIRST,
    ),
    "a method of another room": (
        lambda g: g.device.matmul(g.x, g.x),
        AttributeError,
        r"^a Device has no attribute 'matmul'; write ta\.linalg\.matmul$",
    ),
    "a pickled device": (
        lambda g: pickle.dumps(g.device),
        TypeError,
        r"^a Device belongs to its process .*to_host",
    ),
    "a copied device": (lambda g: copy.deepcopy(g.device), TypeError, r"^a Device belongs to its process"),
    "a pickled system": (lambda g: pickle.dumps(g.system), TypeError, r"^a System belongs to its process"),
    "a pickled array": (
        lambda g: pickle.dumps(g.x),
        TypeError,
        r"^an AccelRef is bound to its device .*to_host",
    ),
    "a float32 batch and float64 weights": (
        lambda g: nn.linear(g.single, g.x),
        TypeError,
        r"^nn\.linear: .* a dtype, got x float32, weight float64; write await weight\.cast\('float32'\)$",
    ),
    "a float32 batch of the host": (
        lambda g: nn.linear(g.host.astype("f4"), g.x),
        TypeError,
        r"got x float32, weight float64; write x\.astype\('float64'\)$",
    ),
    "a float32 bias": (
        lambda g: nn.linear(g.x, g.x, g.single[0]),
        TypeError,
        r"bias must have dtype float64, got float32; write await bias\.cast\('float64'\)$",
    ),
    "a fused product of two dtypes": (
        lambda g: linalg.fused_matmul(g.single, g.x),
        TypeError,
        r"operands must share a dtype, got a float32, b float64; write await b\.cast\('float32'\)$",
    ),
}


@inline
@pytest.mark.parametrize("kind", MISTAKES)
async def test_a_mistake(system: ta.System, device: ta.Device, kind: str) -> None:
    make, error, text = MISTAKES[kind]
    x, single = await device.put(np.ones((3, 3))), await device.put(np.ones((3, 3), "f4"))

    async def ask() -> None:
        made = make(Given(system, device, x, single))
        if isinstance(made, Awaitable):
            await made

    with pytest.raises((error, ExceptionGroup)) as caught:  # noqa: ASYNC401  # with a group or without
        await ask()
    found: BaseException = caught.value
    while isinstance(found, ExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, error)
    assert re.search(text, str(found)), str(found)
    assert not OF_PYTHON.search(str(found)) or kind == "a method of another room"


@inline
async def test_mistakes_with_groups(system: ta.System, device: ta.Device) -> None:
    x = await device.put(np.ones(2))
    async with system.open_devices([BACKEND], options=INLINE, name="group") as group:
        wrong: Any = group
        with pytest.raises(TypeError, match=r"^a DeviceGroup cannot be indexed; .*: devices\.devices\[0\]$"):
            wrong[0]
        with pytest.raises(AttributeError, match=r"'put'; its devices have it: group\.devices\[0\]\.put$"):
            await wrong.put(np.ones(2))
        with pytest.raises(AttributeError, match=r"^a DeviceGroup has no attribute 'nothing'$"):
            wrong.nothing  # noqa: B018
        with pytest.raises(
            TypeError, match=r"got DeviceGroup; pass one of its devices, such as group\.devices\[0\]$"
        ):
            await x.copy_to(wrong)
        with pytest.raises(TypeError, match="a DeviceGroup belongs to its process"):
            pickle.dumps(wrong)
        assert group.devices[0].options is not None
