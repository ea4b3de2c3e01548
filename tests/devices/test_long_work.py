"""Progress of long work: its events, and the bars that show them."""

from __future__ import annotations

import functools
import io
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.console
import trio
from chosen import INLINE, NAME
from tqdm import tqdm

import trio_accel as ta
from trio_accel.programs import Array, report_progress


class Reports:
    """A program that reports."""

    def values(self, values: list[Any]) -> int:
        for value in values:
            report_progress(value)
        return len(values)

    def items(self, count: int) -> Any:
        yield from range(count)


def reported(x: Array) -> Array:
    report_progress((1, 2))
    return x


def parts(events: list[ta.ProgressEvent]) -> list[tuple[float, float | None]]:
    return [(event.done, event.total) for event in events]


def test_events_of_ones_own_work() -> None:
    events: list[ta.ProgressEvent] = []
    with ta.watch_progress(events.append):
        with ta.track_progress("mine", total=3, unit="rows") as report:
            report(1)
            report(2, 4, note="so far")
        with ta.track_progress("silent"):
            pass
    with ta.track_progress("unheard") as report:
        report(1)
    first = ta.ProgressEvent(work=events[0].work, name="mine", done=1, total=3, unit="rows")
    assert events[0] == first
    assert [(event.done, event.total, event.note, event.is_over) for event in events] == [
        (1, 3, "", False),
        (2, 4, "so far", False),
        (2, 4, "so far", True),
    ]


def test_works_are_told_apart_also_after_errors() -> None:
    events: list[ta.ProgressEvent] = []
    with ta.watch_progress(events.append):
        for _ in range(2):
            with suppress(KeyError), ta.track_progress("mine") as report:
                report(1)
                raise KeyError
    assert [event.is_over for event in events] == [False, True, False, True]
    assert len({event.work for event in events}) == 2


def test_an_inner_listener_replaces_the_outer_one() -> None:
    outer: list[ta.ProgressEvent] = []
    inner: list[ta.ProgressEvent] = []
    with ta.watch_progress(outer.append), ta.watch_progress(inner.append), ta.track_progress("w") as report:
        report(1)
    assert (len(outer), len(inner)) == (0, 2)


async def _listen(event: ta.ProgressEvent) -> None:
    raise AssertionError


@pytest.mark.parametrize("listener", [None, _listen])
def test_listeners_are_functions_that_are_not_async(listener: Any) -> None:
    with (
        pytest.raises(TypeError, match="watch_progress: listener must be a function that is not async, got"),
        ta.watch_progress(listener),
    ):
        pass


async def test_weights(device: ta.Device, tmp_path: Path) -> None:
    x = await device.put(np.ones(3 << 20, np.float32))
    events: list[ta.ProgressEvent] = []
    with ta.watch_progress(events.append):
        await ta.weights.save(tmp_path / "w", {"x": x})
        await ta.weights.load(device, tmp_path / "w")
    for name in ("save weights", "load weights"):
        own = [event for event in events if event.name == name]
        assert parts(own[:-1]) == [(n << 22, 3 << 22) for n in (1, 2, 3)]
        assert own[-1].is_over
        assert {event.unit for event in own} == {"B"}


async def test_an_error_of_the_listener_ends_the_work(device: ta.Device, tmp_path: Path) -> None:
    x = await device.put(np.ones(3))

    def fail(event: ta.ProgressEvent) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), ta.watch_progress(fail):
        await ta.weights.save(tmp_path / "w", {"x": x})
    assert os.listdir(tmp_path) == []


async def test_calls_of_programs(device: ta.Device) -> None:
    events: list[ta.ProgressEvent] = []
    async with ta.open_program(device, Reports) as program:
        for value in (3, 0.5, (1, 4), "loading", {"of": "its own"}, True):
            with ta.watch_progress(events.append):
                assert await program.ask("values", [value]) == 1
    # The last report comes before the ask returns.
    assert parts(events[::2]) == [(3, None), (0.5, None), (1, 4), (0, None)]
    assert [event.note for event in events[::2]] == ["", "", "", "loading"]
    assert [event.is_over for event in events] == [False, True] * 4


async def test_functions(device: ta.Device) -> None:
    events: list[ta.ProgressEvent] = []
    with ta.watch_progress(events.append):
        y = await ta.run(reported, await device.put(np.ones(2)))
    assert (await y.to_host()).tolist() == [1, 1]
    assert parts(events) == [(1, 2), (1, 2)]


async def test_on_progress_comes_first(device: ta.Device) -> None:
    events: list[ta.ProgressEvent] = []
    values: list[Any] = []
    async with ta.open_program(device, Reports) as program:
        with ta.watch_progress(events.append), ta.programs.on_progress(values.append):
            await program.ask("values", [3])
    assert (events, values) == ([], [3])


async def test_streams(device: ta.Device) -> None:
    events: list[ta.ProgressEvent] = []
    async with ta.open_program(device, Reports) as program:
        with ta.watch_progress(events.append):
            async with program.stream("items", 3) as items:
                assert [item async for item in items] == [0, 1, 2]
    assert parts(events) == [(1, None), (2, None), (3, None), (3, None)]
    assert {event.unit for event in events} == {"items"}


async def test_tasks_inherit_the_listener(system: ta.System) -> None:
    events: list[ta.ProgressEvent] = []

    async def work() -> None:
        with ta.track_progress("task") as report:
            await trio.lowlevel.checkpoint()
            report(1)

    with ta.watch_progress(events.append):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            nursery.start_soon(work)
    assert len({event.work for event in events}) == 2


def test_code_that_blocks(tmp_path: Path) -> None:
    events: list[ta.ProgressEvent] = []
    with ta.blocking(NAME, options=INLINE) as b, ta.watch_progress(events.append):
        x = b.wait(b.device.put(np.ones(3)))
        b.wait(functools.partial(ta.weights.save, tmp_path / "w", {"x": x}))
    assert parts(events) == [(24, 24), (24, 24)]


def test_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    console = rich.console.Console(file=io.StringIO(), width=100, force_terminal=True)
    monkeypatch.setattr("rich.get_console", lambda: console)
    monkeypatch.setattr("rich.progress.get_console", lambda: console)
    with ta.show_progress():
        with ta.track_progress("load [/] weights", total=3_000_000, unit="B") as report:
            report(1_500_000)
        with ta.track_progress("train", unit="steps") as report:
            report(7, note="loss 0.12 [/]")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "load [/] weights" in shown
    assert "1.5 MB/3.0 MB" in shown
    assert "7  steps  loss 0.12 [/]" in shown


def test_tqdm_can_show_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the guide has it."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # it would start a thread
    bars: dict[int, Any] = {}
    file = io.StringIO()

    def show(event: ta.ProgressEvent) -> None:
        bar = bars.get(event.work)
        if bar is None:
            bar = bars[event.work] = tqdm(total=event.total, desc=event.name, unit=event.unit, file=file)
        bar.update(event.done - bar.n)
        if event.is_over:
            bar.close()

    with ta.watch_progress(show), ta.track_progress("mine", total=4, unit="rows") as report:
        report(1)
        report(4)
    (bar,) = bars.values()
    assert (bar.n, bar.total, bar.disable) == (4, 4, True)
    assert "mine: 100%" in file.getvalue()
