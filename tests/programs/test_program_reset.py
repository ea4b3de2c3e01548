"""`Program.reset`: a program is made again in place, and others wait meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from reset_programs import FAILS, Tally
from sample_programs import Counter, scaled
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.patterns import Batcher, Submit
from trio_accel.programs import Program, _program
from trio_accel.testing import inject_fault, poison

AT_ONCE = ta.Backoff(base=0.0, maximum=0.0)
MANY = ta.Intensity(1000, 60.0)


def opening(device: ta.Device, counts: Any = None, **more: Any) -> Any:
    factors = {"a": np.full(2, 3.0), "b": np.ones((2, 2), np.float32)}
    first = np.zeros(2) if counts is None else counts
    return ta.open_program(device, Tally, first, factors=factors, name="tally", backoff=AT_ONCE, **more)


def recovering(**more: Any) -> ta.DeviceOptions:
    return ta.DeviceOptions(intensity=MANY, backoff=AT_ONCE, **{"isolation": "process", **more})


async def counted(program: Program[Tally]) -> float:
    return float((await program.ask(Tally.about))["counts"])


@asynccontextmanager
async def running(program: Program[Tally], path: Path) -> AsyncGenerator[None, None]:
    """A call is running inside the ``with``, and ends after it."""
    os.mkfifo(path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(program.ask, Tally.wait, str(path))
        # There is one who reads then.
        descriptor = await trio.to_thread.run_sync(os.open, path, os.O_WRONLY)
        try:
            yield
        finally:
            os.close(descriptor)


async def test_damaged_state_is_made_again(system: ta.System, device: ta.Device) -> None:
    counts = await device.put(np.full(2, 5.0))
    async with opening(device, counts) as program:
        assert not program.is_damaged
        with pytest.raises(ta.ActorFailedError, match="in the middle"):
            await program.ask(Tally.half)
        assert program.is_damaged
        for arguments in ({}, {"step": 2.0}):
            with pytest.raises(ta.StaleRefError, match=r"reset: counts: its contents were spoiled by .*half"):
                await program.reset(**arguments)
        await program.reset(counts=np.full(2, 7.0))
        assert not program.is_damaged
        assert float(await (await program.ask(Tally.add)).to_host()) == 7.0
        # An array of the caller's own is the state from then on.
        mine = await device.put(np.full(2, 20.0))
        await program.reset(mine, step=4.0)
        await program.ask(Tally.add)
        np.testing.assert_array_equal(await mine.to_host(), [24, 24])
        found = await program.ask(Tally.about)
        assert found == {"counts": 24.0, "factor": 3.0, "step": 4.0, "more": [], "calls": 1}
        nodes = [node.path for node in system.tree().walk() if "tally" in node.path]
        assert nodes == [f"{device.path}/context/tally", f"{device.path}/context/tally/program"]
    assert device.generation == 1


async def test_without_arguments_the_arrays_stay(device: ta.Device) -> None:
    async with opening(device) as program:
        await program.ask(Tally.add)
        await program.ask(Tally.about)
        await program.reset()
        found = await program.ask(Tally.about)
        # Not the host array that it was opened with: the array of the device.
        assert (found["counts"], found["calls"]) == (1.0, 1)


async def test_frozen_arrays_are_replaced(device: ta.Device) -> None:
    first, second = await device.put(np.full(2, 3.0)), await device.put(np.full(2, 4.0))
    async with ta.open_program(device, Tally, np.zeros(2), factors={"a": first}) as program:
        for _ in range(2):
            await program.reset()
            with pytest.raises(ValueError, match="is open with this array"):
                first.release()
        await program.reset(factors={"a": second}, extra=1)
        await program.reset(other=2)
        found = await program.ask(Tally.about)
        assert (found["factor"], found["more"]) == (4.0, ["extra", "other"])
        first.release()
        with pytest.raises(ValueError, match="is open with this array"):
            second.release()
    second.release()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"wrong": object()}, TypeError, "wrong"),
        ({"counts": np.zeros(3)}, ValueError, r"counts must be float64 of shape \(2,\)"),
        ({"counts": np.zeros(2, np.float32)}, ValueError, "counts must be float64"),
        ({"factors": {"b": np.ones((2, 2), np.float32)}}, ValueError, r"needs an array factors\['a'\]"),
        ({"extra": np.ones(3)}, ValueError, "was opened without an array more"),
        ({"counts": np.full(2, FAILS)}, LookupError, "it does not count from there"),
    ],
)
async def test_a_reset_that_fails_replaces_nothing(
    device: ta.Device, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    async with opening(device) as program:
        await program.ask(Tally.add)
        for _ in range(2):
            with pytest.raises(error, match=text):
                await program.reset(**arguments)
            assert await counted(program) == 1.0
        with pytest.raises(TypeError, match="reset: Tally"):
            await program.reset(np.zeros(2), counts=np.zeros(2))
        await program.reset(counts=np.full(2, 8.0))
        assert await counted(program) == 8.0


async def test_arrays_that_cannot_be_used(system: ta.System, device: ta.Device) -> None:
    released = await device.zeros(2)
    released.release()
    async with opening(device) as program, system.open_device("cpu") as other:
        with pytest.raises(ValueError, match="not on"):
            await program.reset(counts=await other.zeros(2))
        with pytest.raises(ta.StaleRefError, match="released"):
            await program.reset(counts=released)
        await program.ask(Tally.add)
        assert await counted(program) == 1.0


async def test_who_asks_waits_and_runs_on_the_new_state(device: ta.Device, tmp_path: Path) -> None:
    found: list[float] = []
    old = await device.zeros(2)
    async with opening(device, old) as program:

        async def ask() -> None:
            found.append(float(await (await program.ask(Tally.add)).to_host()))

        async with trio.open_nursery() as nursery, running(program, tmp_path / "pipe"):
            for start in (100.0, 200.0):
                nursery.start_soon(program.reset, np.full(2, start))
                await wait_all_tasks_blocked()
            for _ in range(50):
                nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            assert not found
        # Each ran once, on the state of the last reset.
        assert sorted(found) == [200.0 + number for number in range(50)]
        assert await counted(program) == 250.0
        # Calls before the reset have ended, on the old state.
        np.testing.assert_array_equal(await old.to_host(), [1, 1])


async def test_waiting_is_bounded(device: ta.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_program, "_MOST_PARKED", 3)
    refused: list[str] = []
    async with opening(device) as program:

        async def ask() -> None:
            try:
                await program.ask(Tally.add)
            except ta.QueueFullError as error:
                refused.append(str(error))

        async with trio.open_nursery() as nursery, running(program, tmp_path / "pipe"):
            nursery.start_soon(program.reset)
            await wait_all_tasks_blocked()
            for _ in range(5):
                nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            assert len(refused) == 2
            assert "3 calls wait already for the reset of program 'tally'" in refused[0]
        assert await counted(program) == 4.0


async def test_a_reset_cancelled_while_a_call_runs(device: ta.Device, tmp_path: Path) -> None:
    async with opening(device) as program, trio.open_nursery() as nursery:
        async with running(program, tmp_path / "pipe"):
            with trio.CancelScope() as scope:
                nursery.start_soon(_cancel_when_blocked, scope)  # noqa: ASYNC111  # what ends the scope
                nursery.start_soon(program.ask, Tally.add)
                await program.reset(counts=np.full(2, 50.0))
            assert scope.cancelled_caught
            await wait_all_tasks_blocked()
        assert await counted(program) == 2.0


async def _cancel_when_blocked(scope: trio.CancelScope) -> None:
    await wait_all_tasks_blocked()
    scope.cancel()


@pytest.mark.parametrize("checkpoints", range(0, 40, 3))
async def test_a_reset_cancelled_anywhere(device: ta.Device, checkpoints: int) -> None:
    async with opening(device) as program:
        await program.ask(Tally.add)
        async with trio.open_nursery() as nursery:

            async def cancel(scope: trio.CancelScope) -> None:
                for _ in range(checkpoints):
                    await trio.lowlevel.checkpoint()
                scope.cancel()

            with trio.CancelScope() as scope:
                nursery.start_soon(cancel, scope)  # noqa: ASYNC111  # a scope that is left may be cancelled
                await program.reset(counts=np.full(2, 50.0))
        # Either all of it happened, or nothing.
        assert await counted(program) == (1.0 if scope.cancelled_caught else 50.0)
        await program.reset(counts=np.full(2, 60.0))
        assert await counted(program) == 60.0


async def test_an_ended_program_lives_again(system: ta.System, device: ta.Device) -> None:
    async with opening(device, intensity=ta.Intensity(0, 60.0)) as program:
        for _ in range(3):
            with pytest.raises(ta.ActorFailedError, match="broken"):
                await program.ask(Tally.breaks)
            with pytest.raises(ta.ActorFailedError, match="has ended for good"):
                await program.ask(Tally.about)
            assert program.has_ended
            await program.reset()
            assert not program.has_ended
            assert await counted(program) == 0.0
    async with ta.open_program(device, scaled, intensity=ta.Intensity(0, 60.0)) as function:
        with pytest.raises(ta.ActorFailedError):
            await function.ask(np.ones(2), "no factor")  # type: ignore[arg-type]
        await function.reset()
        np.testing.assert_array_equal(await (await function.ask(np.ones(2))).to_host(), [2, 2])
        with pytest.raises(TypeError):
            await function.reset(factor=3.0)  # type: ignore[call-arg]
    assert device.generation == 1


async def test_a_closed_program_is_not_reset(device: ta.Device, tmp_path: Path) -> None:
    ends: list[str] = []
    program = await opening(device)

    async def told(ask: Any, *args: Any) -> None:
        with pytest.raises(ta.ActorStoppedError, match="'tally' is closed"):
            await ask(*args)
        ends.append("told")

    async with trio.open_nursery() as nursery, running(program, tmp_path / "pipe"):
        nursery.start_soon(told, program.reset)
        await wait_all_tasks_blocked()
        nursery.start_soon(told, program.ask, Tally.add)
        nursery.start_soon(told, program.reset)
        await wait_all_tasks_blocked()
        nursery.start_soon(program.aclose)
        await wait_all_tasks_blocked()
    assert len(ends) == 3
    assert not program.is_damaged
    await told(program.reset)


async def test_a_close_cancelled_during_a_reset(device: ta.Device) -> None:
    for checkpoints in range(0, 30, 3):
        program = await opening(device)
        async with trio.open_nursery() as nursery:

            async def reset(program: Program[Tally] = program) -> None:
                with pytest.raises(ta.ActorStoppedError):
                    await program.reset(counts=np.full(2, 4.0))

            async with trio.open_nursery() as inner:
                inner.start_soon(_reset_or_closed, program)
                for _ in range(checkpoints):
                    await trio.lowlevel.checkpoint()
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await program.aclose()
            nursery.start_soon(reset)
        # Its name is free, and nothing has its actor.
        assert not [path for path in device.libraries if "tally" in path]


async def _reset_or_closed(program: Program[Tally]) -> None:
    with suppress(ta.ActorStoppedError):
        await program.reset(counts=np.full(2, 4.0))


async def test_a_step_of_a_graph_cannot_reset(device: ta.Device) -> None:
    x = await device.zeros(2)
    async with opening(device) as program:

        async def step() -> ta.AccelRef:
            await program.reset(counts=np.full(2, 4.0))
            return await ta.linalg.scal(2.0, x)

        with pytest.raises(ta.NotSupportedError, match="reset"):
            await ta.graphs.capture(device, step)
        assert await counted(program) == 0.0


async def test_inline_all_arrays_are_sent_again_after_a_loss(system: ta.System) -> None:
    async with system.open_device("cpu", options=recovering(isolation="inline")) as device:
        factors = {"a": np.full(2, 3.0), "b": np.ones((2, 2), np.float32)}
        async with opening(device, np.full(2, 5.0)) as program:
            poison(device)
            with pytest.raises(ta.ContextLostError):
                await program.ask(Tally.add)
            with pytest.raises(ta.StaleRefError):
                await program.ask(Tally.add)
            assert program.is_damaged
            with pytest.raises(ta.StaleRefError, match=r"reset: factors.* lost with generation 1"):
                await program.reset(counts=np.full(2, 6.0))
            await program.reset(counts=np.full(2, 6.0), factors=factors)
            await program.ask(Tally.add)
            assert await counted(program) == 7.0
            assert device.generation == 2


async def test_after_the_loss_of_a_worker(system: ta.System) -> None:
    async with (
        system.open_device("cpu", options=recovering(retry=1, spares=1)) as device,
        opening(device, np.full(2, 5.0)) as program,
    ):
        for number in range(3):
            inject_fault(device, program.operation(Tally.add), kill=True)
            with pytest.raises(ta.ContextLostError):
                await program.ask(Tally.add)
            assert program.is_damaged
            await program.reset(counts=np.full(2, 10.0 * number))
            await program.ask(Tally.add)
            # The next worker makes it of the new arrays.
            inject_fault(device, program.operation(Tally.about), kill=True)
            assert await counted(program) == 10.0 * number + 1


async def test_a_loss_during_a_reset(system: ta.System, tmp_path: Path) -> None:
    async with system.open_device("cpu", options=recovering(retry=1)) as device, opening(device) as program:
        for number in range(8):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_reset_or_lost, program, float(number))
                for _ in range(2 * number):
                    await trio.lowlevel.checkpoint()
                pid = (await device.statistics()).pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            assert await counted(program) in {0.0, number}
            await program.reset(counts=np.zeros(2))


async def _reset_or_lost(program: Program[Tally], start: float) -> None:
    with suppress(ta.ContextLostError):
        await program.reset(counts=np.full(2, start))


async def test_a_batcher_in_front_waits(system: ta.System, device: ta.Device) -> None:
    counts = await device.zeros(1)
    async with ta.open_program(device, Counter, counts) as program, trio.open_nursery() as nursery:

        async def model(rows: list[np.ndarray]) -> list[int]:
            await program.ask(Counter.add, np.sum(rows, axis=0))
            return [len(rows)] * len(rows)

        batcher = await system.spawn(Batcher[Any, Any], model, max_size=4, max_wait=0.0, name="batcher")
        for _ in range(64):
            nursery.start_soon(batcher.ask, Submit(np.ones(1)))
        for _ in range(5):
            await program.reset()
    assert await counts.to_host() == [64]
