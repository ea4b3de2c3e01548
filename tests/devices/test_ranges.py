"""Ranges of NVIDIA's profilers around launches, seen by a package that notes them in a file."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import trio
from blocking_library import Scale
from chosen import BACKEND

import trio_accel as ta
from trio_accel.backends.base import Isolation
from trio_accel.backends.base.contract.ops import FillSpec
from trio_accel.devices import LibraryActor, Operation, Planned, Planner

# Its import is also noted.
NOTING = """
import json, os, threading

def note(*what):
    log = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, (json.dumps([os.getpid(), threading.get_native_id(), *what]) + "\\n").encode())
    os.close(log)

class Domain:
    def __init__(self, name):
        self.name = name
    def get_event_attributes(self, message=None, color=None, category=None, payload=None):
        note("register", message, category)
        return self.name, message, category
    def push_range(self, attributes):
        note("push", *attributes)
    def pop_range(self):
        note("pop")

get_domain = Domain
note("import")
"""
MISSING = "raise ModuleNotFoundError(\"No module named 'nvtx'\")"

Note = list[Any]


@attrs.frozen
class Noted:
    """The noted calls of the package."""

    log: Path

    def notes(self, kind: str = "") -> list[Note]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [note for note in map(json.loads, lines) if not kind or note[2] == kind]

    def ranges(self) -> list[tuple[str, str]]:
        """Operation and library of each range; every one ends in its thread before the next begins there."""
        threads: dict[tuple[int, int], list[str]] = defaultdict(list)
        for process, thread, kind, *_ in self.notes():
            if kind in ("push", "pop"):
                threads[process, thread].append(kind)
        for kinds in threads.values():
            assert kinds == ["push", "pop"] * (len(kinds) // 2)
        pushed = self.notes("push")
        assert {note[3] for note in pushed} <= {"trio_accel"}
        return [(name, category) for *_, name, category in pushed]


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Noted:
    log = tmp_path / "log"
    write_package(tmp_path, monkeypatch, NOTING.format(log=str(log)))
    return Noted(log)


def write_package(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Have a package of this source found as nvtx, also by workers."""
    (folder / "nvtx.py").write_text(source)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvtx"]:
        monkeypatch.delitem(sys.modules, name)
    # Objects that the import leaves here are removed at the end of the test.
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.delitem(sys.modules, "nvtx")


@attrs.frozen(eq=False)
class Misplaced(Operation[LibraryActor, ta.AccelRef]):
    """An operation that its library refuses when it is enqueued."""

    x: ta.AccelRef
    library: ClassVar[str] = "trio_accel.linalg:BlasActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        return Planned(FillSpec(1.0, planner.update("x", self.x)), self.x)


def options(isolation: Isolation, *, nvtx: bool = True) -> ta.DeviceOptions:
    return ta.DeviceOptions(isolation=isolation, nvtx=nvtx)


async def test_each_operation_is_one_range(system: ta.System, isolation: Isolation, noted: Noted) -> None:
    async with system.open_device(BACKEND, options=options(isolation)) as device:
        x = await device.put(np.eye(3))
        for _ in range(3):
            x = await ta.linalg.matmul(x, x)
        np.testing.assert_array_equal(await x.to_host(), np.eye(3))
        # The copies of an operand precede the range of its operation, and get no range of their own.
        np.testing.assert_array_equal(
            await (await ta.linalg.matmul(x, 2 * np.eye(3))).to_host(), 2 * np.eye(3)
        )
    product, read = ("linalg.Matmul", "blas"), ("devices.ToHost", "memory")
    assert noted.ranges() == [("devices.Put", "memory"), *[product] * 3, read, product, read]
    processes = {note[0] for note in noted.notes("push")}
    assert len(processes) == 1
    assert (processes == {os.getpid()}) == (isolation == "inline")
    # The names are registered once.
    assert len(noted.notes("register")) == 3


async def test_a_refused_operation_has_a_range(system: ta.System, isolation: Isolation, noted: Noted) -> None:
    async with system.open_device(BACKEND, options=options(isolation)) as device:
        x = await device.put(np.arange(3.0))
        for _ in range(2):
            with pytest.raises(ta.NotSupportedError, match="FillSpec"):
                await device.ask(Misplaced(x))
        assert await ta.linalg.dot(await device.put(np.ones(3)), np.ones(3)) is not None
    names = [name for name, _ in noted.ranges()]
    assert names == ["devices.Put", *["test_ranges.Misplaced"] * 2, "devices.Put", "linalg.Dot"]


@pytest.mark.parametrize("said", ["enqueue", "refused"])
async def test_a_launch_in_a_thread_has_its_range_there(
    system: ta.System, isolation: Isolation, noted: Noted, tmp_path: Path, said: str
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    async with system.open_device(BACKEND, options=options(isolation)) as device:
        x = await device.put(np.arange(3.0))
        pending = device.submit(Scale(x, 2.0, pipe))
        await trio.to_thread.run_sync(pipe.write_text, said)
        if said == "enqueue":
            await pending.wait()
            np.testing.assert_array_equal(await x.to_host(), [0.0, 2.0, 4.0])
        else:
            with pytest.raises(ta.LibraryError, match="no room"):
                await pending.wait()
    ranges = noted.ranges()
    assert ranges.count(("blocking_library.Scale", "blas")) == 1
    assert len(ranges) == (3 if said == "enqueue" else 2)
    put, scale = noted.notes("push")[:2]
    assert put[0] == scale[0]
    assert put[1] != scale[1]


@pytest.mark.filterwarnings("ignore:open_device:RuntimeWarning")
async def test_the_part_of_each_rank_has_a_range(system: ta.System, noted: Noted) -> None:
    async with (
        system.open_device(BACKEND, options=options("inline")) as first,
        system.open_device(BACKEND, options=options("inline")) as second,
        ta.open_world([first, second]) as world,
    ):
        xs = [await device.put(np.eye(3)) for device in world.devices]
        for product in await world.run(lambda rank, xs: ta.linalg.Matmul(xs[0], xs[1]), xs):
            np.testing.assert_array_equal(await product.to_host(), np.eye(3))
    names = [name for name, _ in noted.ranges()]
    assert names.count("linalg.Matmul") == 2


async def test_nothing_is_imported_when_it_is_off(
    system: ta.System, isolation: Isolation, noted: Noted
) -> None:
    async with system.open_device(BACKEND, options=options(isolation, nvtx=False)) as device:
        x = await device.put(np.eye(3))
        await ta.linalg.matmul(x, x)
    assert noted.notes() == []


async def test_the_package_is_missing(
    system: ta.System, isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path, monkeypatch, MISSING)
    with pytest.raises(ta.NotSupportedError, match=r"nvtx .*pip install '\.\[nvtx\]'"):
        await system.open_device(BACKEND, options=options(isolation))


async def test_the_package_itself(system: ta.System, isolation: Isolation) -> None:
    """No profiler is attached to a test, so it only does no harm."""
    pytest.importorskip("nvtx")
    async with system.open_device(BACKEND, options=options(isolation)) as device:
        x = await device.put(np.eye(3))
        np.testing.assert_array_equal(await (await ta.linalg.matmul(x, x)).to_host(), np.eye(3))


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_the_option_is_a_switch(value: Any) -> None:
    with pytest.raises(TypeError, match="nvtx must be True or False"):
        ta.DeviceOptions(nvtx=value)
