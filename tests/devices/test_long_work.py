"""Progress of long work: its events, and the bars that show them."""

from __future__ import annotations

import functools
import gc
import io
import os
import re
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import rich.console
import trio
from chosen import INLINE, NAME
from tqdm import tqdm
from tqdm.asyncio import tqdm as async_tqdm

import trio_accel as ta
from trio_accel.devices.front import _memory
from trio_accel.patterns import ContinuousBatcher, Last, open_parts
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


def test_operations_are_distinguished_also_after_errors() -> None:
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
def test_listeners_must_be_synchronous_functions(listener: Any) -> None:
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
    # The last report arrives before the ask returns.
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


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pieces so small that arrays of a test have many."""
    monkeypatch.setattr(_memory, "_CHUNK_BYTES", 4096)


HOSTS = {
    "rows": np.arange(30_000.0).reshape(300, 100),
    "long rows": np.arange(6000, dtype=np.int32).reshape(2, 3000),
    "one axis": np.arange(20_001, dtype=np.uint8),
    "columns": np.arange(12_000.0).reshape(100, 120).T,
    "every second": np.arange(9000.0)[::2],
}


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("has_out", [False, True])
async def test_a_large_array_to_the_device_and_back(device: ta.Device, name: str, has_out: bool) -> None:
    host, events = HOSTS[name], list[ta.ProgressEvent]()
    out = np.empty(host.shape, host.dtype) if has_out else None
    with ta.watch_progress(events.append):
        x = await device.put(host)
        back = await x.to_host(out=out)
    assert back.flags.c_contiguous
    np.testing.assert_array_equal(back, host)
    if has_out:
        assert back is out
    for work in (f"copy to {device.name}", f"copy from {device.name}"):
        own = [event for event in events if event.name == work]
        done = [event.done for event in own]
        assert done == sorted(done)
        assert len(set(done)) > 2
        assert {(event.total, event.unit) for event in own} == {(host.nbytes, "B")}
        assert (own[-1].done, own[-1].is_over) == (host.nbytes, True)


@pytest.mark.usefixtures("pieces")
async def test_the_result_of_a_chain_arrives_in_pieces(device: ta.Device) -> None:
    host, events = np.arange(20_000.0).reshape(200, 100), list[ta.ProgressEvent]()
    x = await device.put(host)
    with ta.watch_progress(events.append):
        for _ in range(3):
            np.testing.assert_array_equal(await (x + 1.0).to_host(), host + 1)
    assert len({event.work for event in events}) == 3


@pytest.mark.usefixtures("pieces")
async def test_transfers_without_a_listener_are_one_operation(device: ta.Device) -> None:
    host = HOSTS["rows"]

    async def launched(listener: Any = None) -> int:
        before = (await device.statistics()).launched
        with nullcontext() if listener is None else ta.watch_progress(listener):
            await (await device.put(host)).to_host()
            await (await device.put(host[:3])).to_host()
        return (await device.statistics()).launched - before

    assert await launched() == 4
    assert await launched(lambda event: None) > 50


@pytest.mark.usefixtures("pieces")
async def test_small_transfers_report_nothing(device: ta.Device) -> None:
    events: list[ta.ProgressEvent] = []
    with ta.watch_progress(events.append):
        for host in (np.ones(512), np.float64(3), np.ones(0), np.ones((2, 0))):
            await (await device.put(host)).to_host()
        await device.put(list(range(9)))
    assert events == []


@pytest.mark.usefixtures("pieces")
async def test_a_later_operation_changes_no_array_being_read_in_pieces(device: ta.Device) -> None:
    x, found = await device.full((4000,), 1.0), list[Any]()

    async def read() -> None:
        with ta.watch_progress(lambda event: None):
            found.append(await x.to_host())

    for _ in range(20):
        found.clear()
        await x.fill(1.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.lowlevel.checkpoint()
            await x.fill(2.0)
        (host,) = found
        assert len(set(host.tolist())) == 1


WRONG: dict[str, Any] = {
    "no array": [1.0],
    "shape": np.empty(7000),
    "shape of more rows": np.empty((600, 100)),
    "dtype": np.empty((300, 100), np.float32),
    "overlapping": np.lib.stride_tricks.as_strided(np.empty(100), (300, 100), (0, 8)),
}


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_out_is_refused_as_without_a_listener(device: ta.Device, name: str) -> None:
    x, texts = await device.put(HOSTS["rows"]), list[str]()
    for listener in (None, lambda event: None):
        with (
            pytest.raises((TypeError, ValueError)) as refused,
            nullcontext() if listener is None else ta.watch_progress(listener),
        ):
            await x.to_host(out=WRONG[name])
        texts.append(str(refused.value))
    assert texts[0] == texts[1]
    assert "out must" in texts[0]


@pytest.mark.usefixtures("pieces")
async def test_a_failing_listener_ends_a_transfer_which_leaves_nothing(device: ta.Device) -> None:
    x = await device.put(HOSTS["rows"])
    used = (await device.statistics()).memory.used

    def fail(event: ta.ProgressEvent) -> None:
        raise KeyError("mine")

    out = np.empty((300, 100))
    with ta.watch_progress(fail):
        with pytest.raises(KeyError, match="mine"):
            await device.put(HOSTS["rows"])
        with pytest.raises(KeyError, match="mine"):
            await x.to_host()
        with pytest.raises(KeyError, match="mine"):
            await x.to_host(out=out)
    # No piece is written from here on.
    out[:] = -1.0
    await device.synchronize()
    assert (out == -1.0).all()
    # Pieces in flight keep the memory of an abandoned array until they have ended.
    with trio.fail_after(60):
        while (await device.statistics()).memory.used != used:
            gc.collect()
            await device.synchronize()


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("retry", [0, 1])
async def test_a_loss_in_the_middle_of_a_transfer(system: ta.System, retry: int) -> None:
    host, is_lost = HOSTS["rows"], False

    def lose(event: ta.ProgressEvent) -> None:
        nonlocal is_lost
        if not is_lost:
            is_lost = True
            ta.testing.poison(device)

    options = attrs.evolve(INLINE, retry=retry, intensity=ta.Intensity(99, 1.0))
    async with system.open_device(NAME, options=options) as device:
        with ta.watch_progress(lose):
            if not retry:
                with pytest.raises((ta.ContextLostError, ta.StaleRefError)):
                    await device.put(host)
            else:
                x = await device.put(host)
                np.testing.assert_array_equal(await x.to_host(), host)
                assert device.losses == 1


@pytest.mark.usefixtures("pieces")
async def test_a_full_queue_makes_it_one_operation(system: ta.System) -> None:
    host, events = HOSTS["rows"], list[ta.ProgressEvent]()
    async with system.open_device(NAME, options=attrs.evolve(INLINE, in_flight=3)) as device:
        x = await device.put(host)
        with ta.watch_progress(events.append):
            np.testing.assert_array_equal(await x.to_host(), host)
            np.testing.assert_array_equal(await (await device.put(host)).to_host(), host)
    read = [event for event in events if event.name == f"copy from {device.name}"]
    # Two operations, of one report and one end each.
    assert parts(read) == [(host.nbytes, host.nbytes)] * 4
    assert {event.name for event in events if event not in read} == {f"copy to {device.name}"}


@pytest.mark.usefixtures("pieces")
def test_transfers_of_code_that_blocks() -> None:
    events: list[ta.ProgressEvent] = []
    host = HOSTS["rows"]
    with ta.blocking(NAME, options=INLINE) as b, ta.watch_progress(events.append):
        np.testing.assert_array_equal(b.get(b.wait(b.device.put(host))), host)
        np.testing.assert_array_equal(np.asarray(b.xp.asarray(host)), host)
    assert len({event.work for event in events}) == 4


async def three_parts(batch: list[Any]) -> list[Any]:
    """Make a step of a model, which gives each sequence one part."""
    await trio.lowlevel.checkpoint()
    return [Last(["c"]) if len(one.parts) == 2 else ["ab"[len(one.parts)]] for one in batch]


async def test_a_sequence_of_a_batcher(system: ta.System) -> None:
    events: list[ta.ProgressEvent] = []
    batcher = await system.spawn(ContinuousBatcher[str, str], three_parts, name="batcher")
    for listener in (events.append, lambda event: None):
        with ta.watch_progress(listener):
            async with open_parts(batcher, "prompt") as parts:
                assert [part async for part in parts] == ["a", "b", "c"]
    assert [(event.name, event.done, event.unit) for event in events] == [
        ("sequence", count, "parts") for count in (1, 2, 3, 3)
    ]


def test_code_that_blocks(tmp_path: Path) -> None:
    events: list[ta.ProgressEvent] = []
    with ta.blocking(NAME, options=INLINE) as b, ta.watch_progress(events.append):
        x = b.wait(b.device.put(np.ones(3)))
        b.wait(functools.partial(ta.weights.save, tmp_path / "w", {"x": x}))
    assert parts(events) == [(24, 24), (24, 24)]


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The terminal that bars are shown on."""
    file = io.StringIO()
    terminal = rich.console.Console(file=file, width=100, force_terminal=True)
    monkeypatch.setattr("rich.get_console", lambda: terminal)
    monkeypatch.setattr("rich.progress.get_console", lambda: terminal)
    return file


def test_bars(console: io.StringIO) -> None:
    with ta.show_progress():
        with ta.track_progress("load [/] weights", total=3_000_000, unit="B") as report:
            report(1_500_000)
        with ta.track_progress("train", unit="steps") as report:
            report(7, note="loss 0.12 [/]")
    shown = console.getvalue()
    assert "load [/] weights" in shown
    assert "1.5 MB/3.0 MB" in shown
    assert "7  steps  loss 0.12 [/]" in shown


def test_a_loop_of_much_work_keeps_few_bars(console: io.StringIO) -> None:
    with ta.show_progress(), ta.track_progress("the loop") as loop:
        for number in range(50):
            loop(number)
            with ta.track_progress(f"step {number}.") as report:
                report(1)
        before = len(console.getvalue())
    last = console.getvalue()[before:]
    # With the loop's own they are eight.
    assert set(re.findall(r"step (\d+)\.", last)) == {str(number) for number in range(43, 50)}
    assert "the loop" in last


class Bars:
    """Bars of tqdm, as in the guide."""

    def __init__(self) -> None:
        self.made: dict[int, Any] = {}
        self.file = io.StringIO()

    def show(self, event: ta.ProgressEvent) -> None:
        bar = self.made.get(event.work)
        if bar is None:
            bar = tqdm(total=event.total, desc=event.name, unit=event.unit, file=self.file)
            self.made[event.work] = bar
        bar.update(event.done - bar.n)
        if event.is_over:
            bar.close()


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Bars:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # it would start a thread
    return Bars()


async def put_and_fetch(device: ta.Device) -> None:
    await (await device.put(HOSTS["rows"])).to_host()


async def call_a_program(device: ta.Device) -> None:
    async with ta.open_program(device, Reports) as program:
        await program.ask("values", [(1, 4), (4, 4)])


async def read_a_stream(device: ta.Device) -> None:
    async with (
        ta.open_program(device, Reports) as program,
        program.stream("items", 3) as items,
    ):
        assert [item async for item in items] == [0, 1, 2]


async def read_a_sequence(device: ta.Device) -> None:
    batcher = await device.system.spawn(ContinuousBatcher[str, str], three_parts, name="batcher")
    async with open_parts(batcher, "prompt") as parts:
        assert [part async for part in parts] == ["a", "b", "c"]
    await batcher.stop()


SHOWN: dict[str, tuple[Any, list[str], list[float]]] = {
    "transfers": (put_and_fetch, ["copy to ", "copy from ", "240.0 kB/240.0 kB"], [240_000, 240_000]),
    "a call": (call_a_program, ["Reports.values", "4/4"], [4]),
    "a stream": (read_a_stream, ["Reports.items", "3  items"], [3]),
    "a sequence": (read_a_sequence, ["sequence", "3  parts"], [3]),
}


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("work", SHOWN)
async def test_both_libraries_show_it(device: ta.Device, console: io.StringIO, bars: Bars, work: str) -> None:
    run, texts, done = SHOWN[work]
    with ta.show_progress():
        await run(device)
    assert [text for text in texts if text not in console.getvalue()] == []
    with ta.watch_progress(bars.show):
        await run(device)
    assert [bar.n for bar in bars.made.values()] == done
    assert all(bar.disable for bar in bars.made.values())
    assert texts[0] in bars.file.getvalue()


async def test_tqdm_wraps_an_iterator(device: ta.Device, bars: Bars) -> None:
    async with ta.open_program(device, Reports) as program, program.stream("items", 3) as items:
        assert [item async for item in async_tqdm(items, desc="items", total=3, file=bars.file)] == [0, 1, 2]
    assert "items: 100%" in bars.file.getvalue()


def test_tqdm_can_show_events(bars: Bars) -> None:
    with ta.watch_progress(bars.show), ta.track_progress("mine", total=4, unit="rows") as report:
        report(1)
        report(4)
    (bar,) = bars.made.values()
    assert (bar.n, bar.total, bar.disable) == (4, 4, True)
    assert "mine: 100%" in bars.file.getvalue()
