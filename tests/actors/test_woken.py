"""The outcome that wakes tasks without a value."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from trio_accel.actors import WAKE_VALUE


async def test_it_wakes_any_number_of_tasks_any_number_of_times() -> None:
    told: list[object] = []
    parked: list[trio.lowlevel.Task] = []

    async def wait() -> None:
        for _ in range(3):
            parked.append(trio.lowlevel.current_task())
            told.append(await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.SUCCEEDED))

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(wait)
        for _ in range(3):
            await trio.testing.wait_all_tasks_blocked()
            for task in parked:
                trio.lowlevel.reschedule(task, WAKE_VALUE)
            parked.clear()
    assert told == [None] * 12


async def test_it_is_an_outcome() -> None:
    def generator() -> object:
        return (yield)

    async def agen() -> object:
        yield (yield)

    started = generator()
    next(started)
    with pytest.raises(StopIteration) as stopped:
        WAKE_VALUE.send(started)
    assert stopped.value.value is None
    waiting = agen()
    await anext(waiting)
    assert await WAKE_VALUE.asend(waiting) is None
    await waiting.aclose()
    assert WAKE_VALUE.unwrap() is None
