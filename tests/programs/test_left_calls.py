"""Callers leave calls at their deadlines; the calls continue, and harm nobody."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from left_programs import Waits, waits
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel import jit
from trio_accel.patterns import Batcher, Submit

LARGE = 1 << 17


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


async def begun(pipe: Path) -> int:
    """Wait until a call waits for the pipe; gives the end to close."""
    return await trio.to_thread.run_sync(os.open, pipe, os.O_WRONLY, abandon_on_cancel=True)


async def left(pipe: Path, ask: Callable[[], Awaitable[object]]) -> int:
    """Ask, and leave when the call runs; gives the end of the pipe that lets it continue."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            end, is_over = await started(nursery, pipe, ask)
            scope.cancel()
            with trio.CancelScope(shield=True), trio.move_on_after(5):
                await is_over.wait()
            if not is_over.is_set():
                os.close(end)
                pytest.fail("the asker has not left")
    return end


async def started(
    nursery: trio.Nursery, pipe: Path, ask: Callable[[], Awaitable[object]]
) -> tuple[int, trio.Event]:
    """Ask in a task; returns when the call waits for the pipe, with its end and the end of the task."""
    is_over = trio.Event()

    async def run() -> None:
        try:
            await ask()
        finally:
            is_over.set()

    nursery.start_soon(run)
    with trio.fail_after(60):
        return await begun(pipe), is_over


async def opening(device: ta.Device, **more: Any) -> tuple[Any, ta.AccelRef]:
    counts = await device.zeros(2)
    return await ta.open_program(device, Waits, np.arange(3.0), counts, **more), counts


@pytest.mark.parametrize("method", [Waits.plain, Waits.declared], ids=lambda one: one.__name__)
async def test_an_asker_leaves_a_method_that_runs(any_device: ta.Device, pipe: Path, method: Any) -> None:
    device = any_device
    program, _ = await opening(device)
    end = await left(pipe, lambda: program.ask(method, str(pipe)))
    # It waits for its turn after the call, and nothing was restarted.
    with trio.move_on_after(0) as at_once:
        await program.ask(Waits.quick)
    assert at_once.cancelled_caught
    os.close(end)
    assert await program.ask(Waits.quick) == 3.0
    await program.aclose()
    assert (await device.statistics()).in_flight == 0


async def test_an_update_that_its_asker_has_left_counts(device: ta.Device, pipe: Path) -> None:
    program, counts = await opening(device)
    os.close(await left(pipe, lambda: program.ask(Waits.counts_on, str(pipe))))
    np.testing.assert_array_equal(await counts.to_host(), [1.0, 1.0])
    assert not program.is_damaged


@pytest.mark.parametrize("count", [3, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("method", [Waits.plain, Waits.counts_on], ids=lambda one: one.__name__)
async def test_an_asker_leaves_with_its_host_array(
    device: ta.Device, pipe: Path, method: Any, count: int
) -> None:
    program, counts = await opening(device)
    x = np.full(count, 2.0)
    end = await left(pipe, lambda: program.ask(method, str(pipe), x))
    # It is the caller's own again.
    x[:] = np.nan
    os.close(end)
    assert await program.ask(Waits.quick) == 3.0
    np.testing.assert_array_equal(await counts.to_host(), [2.0 * (method is Waits.counts_on)] * 2)


@pytest.mark.parametrize("is_opened", [True, False], ids=["opened", "run"])
async def test_an_asker_leaves_a_function(
    any_device: ta.Device, pipe: Path, tmp_path: Path, is_opened: bool
) -> None:
    x = await any_device.put(np.arange(4.0))
    async with ta.open_program(any_device, waits) as function:
        ask: Any = function.ask if is_opened else partial(ta.run, waits)
        os.close(await left(pipe, lambda: ask(x, str(pipe))))
        (tmp_path / "file").touch()
        assert await ask(x, str(tmp_path / "file")) == 4.0


async def test_an_asker_leaves_a_kernel_written_as_a_function(device: ta.Device, pipe: Path) -> None:
    name = await device.put(np.frombuffer(str(pipe).encode().ljust(256, b"\0"), np.uint8))
    kernel = jit.Kernel(
        "unused",
        'extern "C" __global__ void unused(const unsigned char *name, int *out) {}',
        parameters={"name": jit.reads("uint8"), "out": jit.writes("int32", shape=lambda name: (2,))},
        grid=1,
        block=1,
        cpu="left_programs:waits_for",
    )
    end = await left(pipe, lambda: kernel(name))
    os.close(end)
    await device.synchronize()


@pytest.mark.parametrize("count", [3, LARGE], ids=["small", "large"])
async def test_a_pending_call_never_gets_uncopied_arrays(
    any_device: ta.Device, pipe: Path, tmp_path: Path, count: int
) -> None:
    note = tmp_path / "note"
    note.touch()
    program, _ = await opening(any_device)
    x = np.full(count, 7.0)
    async with trio.open_nursery() as nursery:
        end, _ = await started(nursery, pipe, lambda: program.ask(Waits.plain, str(pipe)))
        with trio.CancelScope() as scope:
            nursery.start_soon(_cancel_when_blocked, scope)  # noqa: ASYNC111  # what ends the scope
            await program.ask(Waits.notes, str(note), x)
        assert scope.cancelled_caught
        x[:] = -1.0
        os.close(end)
    assert await program.ask(Waits.quick) == 3.0
    # If it has run all the same, it got what was given.
    assert note.read_text() in ("", "7.0 7.0\n")


async def _cancel_when_blocked(scope: trio.CancelScope) -> None:
    await wait_all_tasks_blocked()
    scope.cancel()


@pytest.mark.parametrize("isolation", ["inline"])  # the worker's is closed first, within `close_grace`
async def test_who_opens_a_program_leaves_its_constructor(
    system: ta.System, device: ta.Device, pipe: Path
) -> None:
    counts = await device.zeros(2)
    opening: Any = partial(ta.open_program, device, Waits, counts, counts, name="waits")
    os.close(await left(pipe, lambda: opening(str(pipe))))
    async with opening() as program:
        assert await program.ask(Waits.quick) == 2.0


async def test_a_closed_program_holds_its_arrays_until_its_last_call_ends(
    any_device: ta.Device, pipe: Path
) -> None:
    device = any_device
    before = (await device.statistics()).memory.used
    weights, counts = await device.put(np.arange(LARGE, dtype=float)), await device.zeros(2)
    program = await ta.open_program(device, Waits, weights, counts)
    end = await left(pipe, lambda: program.ask(Waits.declared, str(pipe)))
    with trio.fail_after(60):
        await program.aclose()
    weights.release()
    counts.release()
    await device.zeros(1)
    assert (await device.statistics()).memory.used >= before + 8 * LARGE
    os.close(end)
    await device.synchronize()
    await device.zeros(1)
    assert (await device.statistics()).memory.used <= before + 64


async def test_a_batch_ends_at_its_deadline(system: ta.System, any_device: ta.Device, pipe: Path) -> None:
    program, _ = await opening(any_device)

    async def model(items: list[Any]) -> list[Any]:
        return [await program.ask(Waits.plain, item) for item in items]

    batches = await system.spawn(Batcher, model)
    os.close(await left(pipe, lambda: batches.ask(Submit(str(pipe)))))
    assert await program.ask(Waits.quick) == 3.0
