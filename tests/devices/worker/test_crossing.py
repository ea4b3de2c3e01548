"""Objects that reach a worker, and objects that cannot."""

from __future__ import annotations

import sys
import types
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import ClassVar

import attrs
import numpy as np
import pytest
from chosen import BACKEND
from processes import until
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.backends.base.contract.ops import ArraySpec, OperationSpec, updates
from trio_accel.devices import Operation, Planned, Planner
from trio_accel.devices.dispatch import _requests


@attrs.frozen
class OnlyHereSpec(OperationSpec):
    x: ArraySpec = updates()  # noqa: RUF009  # a field specifier


@attrs.frozen
class OddSpec(OperationSpec):
    what: object
    x: ArraySpec = updates()  # noqa: RUF009  # a field specifier


@attrs.frozen(eq=False)
class OnlyHere(Operation[ta.linalg.BlasActor, ta.AccelRef]):
    """Its specification is of a module that other processes do not have."""

    x: ta.AccelRef
    library: ClassVar[str] = "trio_accel.linalg:BlasActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        return Planned(OnlyHereSpec(planner.update("x", self.x)), self.x)


@attrs.frozen(eq=False)
class Odd(Operation[ta.linalg.BlasActor, ta.AccelRef]):
    """Its specification holds what cannot cross."""

    x: ta.AccelRef
    library: ClassVar[str] = "trio_accel.linalg:BlasActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        return Planned(OddSpec({1, 2}, planner.update("x", self.x)), self.x)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules that this process has made for itself."""
    made = types.ModuleType("made_here_only")
    for cls in (OnlyHereSpec, OddSpec):
        monkeypatch.setattr(cls, "__module__", "made_here_only")
        setattr(made, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, "made_here_only", made)
    return


@pytest.fixture
async def isolated(system: ta.System) -> AsyncGenerator[ta.Device, None]:
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation="process")) as device:
        yield device


async def test_a_specification_that_the_worker_does_not_know_is_refused(
    isolated: ta.Device, module: None
) -> None:
    x = await isolated.put(np.ones(3))
    # As it is, and in a repeated form.
    for _ in range(4):
        with pytest.raises(ModuleNotFoundError, match="made_here_only"):
            await isolated.ask(OnlyHere(x))
    # An ask before its launch harms nothing; but others count on the outcome of a submission.
    assert (await (await ta.linalg.nrm2(x)).item()) == pytest.approx(3**0.5)
    pending = isolated.submit(OnlyHere(x))
    follower = isolated.submit(ta.linalg.Nrm2(x))
    with pytest.raises(ModuleNotFoundError):
        await pending.wait()
    with pytest.raises(ta.InputFailedError, match="OnlyHere"):
        await follower.wait()
    with pytest.raises(ta.StaleRefError, match=r"spoiled by .*OnlyHere"):
        await x.to_host()
    assert isolated.generation == 1


async def test_a_specification_with_unsendable_contents_is_refused(isolated: ta.Device, module: None) -> None:
    x = await isolated.put(np.ones(3))
    with pytest.raises(TypeError, match=r"OddSpec\.what is \{1, 2\}"):
        await isolated.ask(Odd(x))
    np.testing.assert_array_equal(await x.to_host(), np.ones(3))
    assert isolated.generation == 1


async def test_memory_released_while_a_worker_starts_is_not_kept_by_it(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process", intensity=ta.Intensity(100, 60.0))
    async with system.open_device(BACKEND, options=options) as device:
        kept = await device.put(np.ones(30_000))
        for _ in range(3):
            dropped = [await device.put(np.ones(1000)) for _ in range(20)]
            generation = device.generation
            device.dispatch.process.kill()
            async with aclosing(device.watch_generation()) as generations:
                async for current in generations:
                    if current > generation:
                        break
                    # Also in the midst of the start.
                    dropped.pop()
            dropped.clear()
            await device.synchronize()
            assert (await device.statistics()).memory.blocks == 1
        np.testing.assert_array_equal(await kept.to_host(), np.ones(30_000))


async def test_small_dropped_memory_waits_for_a_request_and_other_memory_does_not(
    isolated: ta.Device,
) -> None:
    dispatch = isolated.dispatch
    small, large = await isolated.put(np.ones(1000)), await isolated.put(np.ones(1 << 23))
    many = [await isolated.put(np.ones(1)) for _ in range(64)]
    small.release()
    await wait_all_tasks_blocked()
    assert len(dispatch._sender._released) == 1
    large.release()
    await wait_all_tasks_blocked()
    assert not dispatch._sender._released
    for ref in many:
        ref.release()
    await wait_all_tasks_blocked()
    assert not dispatch._sender._released
    kept = await isolated.put(np.ones(1000))
    (await isolated.put(np.ones(1000))).release()
    assert len(dispatch._sender._released) == 1
    await kept.fill(2)
    assert not dispatch._sender._released
    assert (await isolated.statistics()).memory.blocks == 1


async def test_large_dropped_memory_wakes_nobody_while_requests_come_and_go(
    isolated: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, host = isolated.state.blocks, np.ones(1 << 20)
    await until(lambda: not blocks.is_watched)
    # Otherwise it may come to rest in between on a busy machine.
    monkeypatch.setattr(_requests, "_DRAINED", 60.0)
    ref = await isolated.put(host)
    assert blocks.is_watched
    before = blocks._notifier.notifications
    for _ in range(5):
        ref = await isolated.put(host)
    assert blocks._notifier.notifications == before
    assert (await isolated.statistics()).memory.blocks == 1
    ref.release()


async def test_large_dropped_memory_wakes_after_a_long_time_without_requests(isolated: ta.Device) -> None:
    blocks, host = isolated.state.blocks, np.ones(1 << 20)
    ref = await isolated.put(host)
    # No request takes this one along: somebody looks for a while yet.
    await isolated.put(host)
    await until(lambda: not blocks.is_watched)
    assert not blocks.dropped
    before = blocks._notifier.notifications
    del ref
    assert blocks._notifier.notifications == before + 1
    await until(lambda: not blocks.dropped)
    assert (await isolated.statistics()).memory.blocks == 0


async def test_a_return_of_dropped_memory_looks_again_on_the_next_worker(
    isolated: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = np.ones(1 << 20)
    await isolated.put(host)
    isolated.dispatch.process.kill()
    await until(lambda: isolated.generation == 2)
    await until(lambda: not isolated.state.blocks.is_watched)
    # Longer than a slow machine takes for an array.
    monkeypatch.setattr(_requests, "_DRAINED", 1.0)
    ref = await isolated.put(host)
    assert isolated.state.blocks.is_watched
    before = isolated.state.blocks._notifier.notifications
    del ref
    assert isolated.state.blocks._notifier.notifications == before
    await until(lambda: not isolated.state.blocks.is_watched)
    assert (await isolated.statistics()).memory.blocks == 0
