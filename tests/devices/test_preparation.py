"""Plans of a library are made in a thread, so the loop and the other libraries continue."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import trio
from isolations import inline
from manual_backend import ManualBackend
from planning_library import Negate
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel import linalg
from trio_accel.devices import Fill
from trio_accel.devices.engine import _context_state


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """The source of a plan: a reader waits until somebody has written."""
    path = tmp_path / "plan"
    os.mkfifo(path)
    return path


async def begun(pipe: Path) -> int:
    """Wait until a plan is being made; gives the end to write it to."""
    return await trio.to_thread.run_sync(os.open, pipe, os.O_WRONLY)


def finish(end: int, plan: str = "a plan") -> None:
    """Give the plan to whoever reads it."""
    os.write(end, plan.encode())
    os.close(end)


class Asker:
    """Runs one ask in a task of its own."""

    def __init__(self, nursery: trio.Nursery, device: ta.Device, operation: Negate) -> None:
        self.scope = trio.CancelScope()
        self.outcome: object = None
        self.is_over = trio.Event()
        nursery.start_soon(self._run, device, operation)

    async def _run(self, device: ta.Device, operation: Negate) -> None:
        with self.scope:
            try:
                self.outcome = await device.ask(operation)
            except Exception as error:  # noqa: BLE001  # looked at by the test
                self.outcome = error
        if self.scope.cancelled_caught:
            self.outcome = "cancelled"
        self.is_over.set()


async def test_others_continue_during_planning(device: ta.Device, pipe: Path, nursery: trio.Nursery) -> None:
    x = await device.put(np.ones(3))
    asker = Asker(nursery, device, Negate(x, pipe))
    end = await begun(pipe)
    y = await device.put(np.arange(4.0))
    assert await (await ta.linalg.dot(y, y)).item() == 14.0
    assert asker.outcome is None
    finish(end)
    await asker.is_over.wait()
    assert asker.outcome is x
    np.testing.assert_array_equal(await x.to_host(), -np.ones(3))
    assert await device.ask(Negate(x, pipe)) is x  # by the existing plan
    np.testing.assert_array_equal(await x.to_host(), np.ones(3))


@inline
async def test_a_plan_finds_previously_dropped_memory(
    device: ta.Device, pipe: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody else gives it back meanwhile.
    monkeypatch.setattr(_context_state, "_INTERVAL", 60.0)
    x = await device.put(np.ones(3))
    large = await device.put(np.ones(2 << 20))
    assert device.state.blocks.is_watched
    del large
    session = device.dispatch.session  # type: ignore[union-attr]
    assert session.engine.device.memory().blocks == 2
    asker = Asker(nursery, device, Negate(x, pipe))
    end = await begun(pipe)
    blocks = session.engine.device.memory().blocks
    finish(end)
    await asker.is_over.wait()
    assert asker.outcome is x
    assert blocks == 1


async def test_the_order_is_kept(device: ta.Device, pipe: Path, tmp_path: Path) -> None:
    x = await device.put(np.ones(3))
    other = tmp_path / "other"
    os.mkfifo(other)
    pending = [device.submit(Negate(x, pipe)), device.submit(Fill(x, 5.0)), device.submit(Negate(x, other))]
    first = await begun(pipe)
    with pytest.raises(OSError, match="No such device"):
        os.open(other, os.O_WRONLY | os.O_NONBLOCK)  # nobody reads it yet
    finish(first)
    finish(await begun(other))
    for one in pending:
        await one.wait()
    np.testing.assert_array_equal(await x.to_host(), np.full(3, -5.0))


async def test_a_refused_plan_is_the_askers_problem(
    system: ta.System, device: ta.Device, pipe: Path, nursery: trio.Nursery
) -> None:
    x = await device.put(np.ones(3))
    asker = Asker(nursery, device, Negate(x, pipe))
    finish(await begun(pipe), "refused")
    await asker.is_over.wait()
    assert isinstance(asker.outcome, ta.LibraryError)
    assert asker.outcome.operation == "planning_library.Negate"
    asker = Asker(nursery, device, Negate(x, pipe))
    finish(await begun(pipe))
    await asker.is_over.wait()
    assert asker.outcome is x
    assert {node.restarts for node in system.tree().walk()} == {0}
    await device.synchronize()
    assert not (await device.statistics()).queues  # nothing waits for its turn


async def test_a_plan_that_breaks_restarts_its_library(
    system: ta.System, device: ta.Device, pipe: Path, nursery: trio.Nursery
) -> None:
    x = await device.put(np.ones(3))
    asker = Asker(nursery, device, Negate(x, pipe))
    finish(await begun(pipe), "broken")
    await asker.is_over.wait()
    assert isinstance(asker.outcome, ta.ActorFailedError)
    asker = Asker(nursery, device, Negate(x, pipe))
    finish(await begun(pipe))
    await asker.is_over.wait()
    assert asker.outcome is x
    assert system.tree().find(f"test/{device.name}/context/planning_library:PlanningActor").restarts == 1


async def test_a_context_lost_by_planning_is_replaced(
    device: ta.Device, pipe: Path, nursery: trio.Nursery
) -> None:
    x = await device.put(np.ones(3))
    asker = Asker(nursery, device, Negate(x, pipe))
    finish(await begun(pipe), "lost")
    await asker.is_over.wait()
    assert isinstance(asker.outcome, ta.ContextPoisonedError)
    y = await device.put(np.ones(3))
    assert device.generation == 2
    asker = Asker(nursery, device, Negate(y, pipe))
    finish(await begun(pipe))
    await asker.is_over.wait()
    assert asker.outcome is y


@inline
async def test_a_context_is_lost_meanwhile(device: ta.Device, pipe: Path, nursery: trio.Nursery) -> None:
    x, y = await device.put(np.ones(3)), await device.put(np.ones(3))
    asker = Asker(nursery, device, Negate(x, pipe))
    end = await begun(pipe)
    ta.testing.inject_fault(device, ta.linalg.Dot, fail=ta.ContextPoisonedError("gone"))
    with pytest.raises(ta.ContextPoisonedError):
        await ta.linalg.dot(y, y)
    finish(end)
    await asker.is_over.wait()
    assert isinstance(asker.outcome, ta.StaleRefError)
    assert device.generation == 2


async def test_a_cancelled_asker_is_let_go_when_the_plan_is_there(
    device: ta.Device, pipe: Path, nursery: trio.Nursery
) -> None:
    x = await device.put(np.ones(3))
    asker = Asker(nursery, device, Negate(x, pipe))
    end = await begun(pipe)
    asker.scope.cancel()
    # One that looks for its answer on its own hears of that in its next turn, a worker before it answers
    # this.
    await wait_all_tasks_blocked()
    await device.statistics()
    writer = device.submit(Fill(x, 5.0))
    finish(end)
    await asker.is_over.wait()
    assert asker.outcome == "cancelled"
    await writer.wait()
    np.testing.assert_array_equal(await x.to_host(), np.full(3, 5.0))
    assert await device.ask(Negate(x, pipe)) is x
    np.testing.assert_array_equal(await x.to_host(), np.full(3, -5.0))


async def test_hooks_see_a_refused_plan_as_they_see_a_refused_launch(
    manual: ta.Device, backend: ManualBackend
) -> None:
    def refuse() -> None:
        raise ta.LibraryError("no plan", library="blas", code="size")

    phases: list[str] = []
    manual.state.hooks.append(lambda phase, launch: phases.append(f"{launch.name} {phase.value}"))
    x = await manual.put(np.ones(3))
    phases.clear()
    backend.device.prepare[linalg.scal.spec] = refuse
    with pytest.raises(ta.LibraryError, match="no plan"):
        await ta.linalg.scal(2.0, x)
    steps = ["validate", "enqueue", "complete", "reply", "release"]
    assert phases == [f"linalg.Scal {step}" for step in steps]
    del backend.device.prepare[linalg.scal.spec]
    await ta.linalg.scal(2.0, x)
    np.testing.assert_array_equal(await x.to_host(), np.full(3, 2.0))
    await wait_all_tasks_blocked()
