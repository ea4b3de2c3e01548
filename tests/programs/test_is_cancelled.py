"""A program sees that its caller has left."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked
from watching_programs import Watches, looks, watches

import trio_accel as ta


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


async def begun(pipe: Path) -> None:
    with trio.fail_after(60):
        assert await trio.to_thread.run_sync(pipe.read_text, abandon_on_cancel=True) == "begun"


async def leave(pipe: Path, ask: Callable[[], Awaitable[object]]) -> None:
    """Ask, and leave once the call runs."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_ask, ask)
        await begun(pipe)
        nursery.cancel_scope.cancel()


async def _ask(ask: Callable[[], Awaitable[object]]) -> None:
    await ask()


async def opening(device: ta.Device) -> Any:
    return await ta.open_program(device, Watches, np.arange(3.0))


@pytest.mark.parametrize("method", [Watches.plain, Watches.declared, Watches.refuses])
async def test_a_method_ends_soon_after_its_asker_has_left(
    any_device: ta.Device, pipe: Path, method: Any
) -> None:
    program = await opening(any_device)
    for times in (1, 2, 3):
        await leave(pipe, lambda: program.ask(method, str(pipe)))
        with trio.fail_after(60):
            assert await program.ask(Watches.all_seen) == (False, [(False, True)] * times)


async def test_a_deadline_and_a_long_grace_are_seen_at_once(any_device: ta.Device, pipe: Path) -> None:
    program = await opening(any_device)
    with ta.cancel_grace(60.0), trio.fail_after(60):
        # It ends in time, so the caller gets its result although it was cancelled.
        async with trio.open_nursery() as nursery:
            answers: list[bool] = []

            async def ask() -> None:
                with trio.CancelScope() as scope:
                    nursery.start_soon(_cancel, pipe, scope)
                    answers.append(await program.ask(Watches.declared, str(pipe)))

            nursery.start_soon(ask)
        assert answers == [None]


async def _cancel(pipe: Path, scope: trio.CancelScope) -> None:
    await begun(pipe)
    scope.deadline = trio.current_time()


async def test_a_later_call_sees_only_its_own_asker(any_device: ta.Device, pipe: Path) -> None:
    program = await opening(any_device)
    # The second is the same call, by the same template; a call before has made that.
    await leave(pipe, lambda: program.ask(Watches.declared, str(pipe)))
    scopes = [trio.CancelScope(), trio.CancelScope()]

    async def ask(scope: trio.CancelScope) -> None:
        with scope:
            await program.ask(Watches.declared, str(pipe))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, scopes[0])
        await begun(pipe)
        nursery.start_soon(ask, scopes[1])
        await wait_all_tasks_blocked()
        for scope in scopes:
            scope.cancel()
            if scope is scopes[0]:
                await begun(pipe)
    with trio.fail_after(60):
        assert await program.ask(Watches.all_seen) == (False, [(False, True)] * 3)


@pytest.mark.parametrize("is_opened", [True, False], ids=["opened", "run"])
async def test_a_function_sees_it(any_device: ta.Device, pipe: Path, tmp_path: Path, is_opened: bool) -> None:
    x, note = await any_device.put(np.arange(3.0)), tmp_path / "note"
    async with ta.open_program(any_device, watches) as function:
        ask: Any = function.ask if is_opened else partial(ta.run, watches)
        await leave(pipe, lambda: ask(x, str(pipe), str(note)))
        with trio.fail_after(60):
            await any_device.synchronize()
            assert await ta.run(looks, x) is False
    assert note.read_text() == "(False, True)"


@pytest.mark.parametrize("isolation", ["inline"])  # a worker ends with its context
async def test_a_call_sees_that_its_context_is_lost(device: ta.Device, pipe: Path, tmp_path: Path) -> None:
    x, note = await device.put(np.arange(3.0)), tmp_path / "note"
    os.mkfifo(note)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_poison, device, pipe)
            with pytest.raises(ta.ContextLostError):
                await ta.run(watches, x, str(pipe), str(note))
        assert await trio.to_thread.run_sync(note.read_text) == "(False, True)"
        assert await ta.run(looks, await device.put(np.arange(3.0))) is False


async def _poison(device: ta.Device, pipe: Path) -> None:
    await begun(pipe)
    ta.testing.poison(device, "test")


def test_outside_of_a_call_nobody_has_left() -> None:
    assert ta.programs.is_cancelled() is False
