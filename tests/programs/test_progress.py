"""Methods report progress to their callers."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from watching_programs import Watches, counts

import trio_accel as ta
from trio_accel.programs import on_progress, report_progress

VALUES: list[Any] = [
    None,
    True,
    3,
    0.25,
    float("inf"),
    "ä\ud800",
    b"\0\xff",
    1 + 2j,
    [1, [2]],
    (),
    {"loss": (1.5, None)},
    -1,
]


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


async def opening(device: ta.Device) -> Any:
    return await ta.open_program(device, Watches, np.arange(3.0))


def hearing(heard: list[Any], pipe: Path) -> Callable[[Any], None]:
    """Make a callback that lets the method continue."""

    def hear(value: Any) -> None:
        heard.append(value)
        os.close(os.open(pipe, os.O_WRONLY))

    return hear


async def test_each_value_arrives_that_the_method_waits_for(any_device: ta.Device, pipe: Path) -> None:
    program, heard = await opening(any_device), list[Any]()
    with on_progress(hearing(heard, pipe)), trio.fail_after(60):
        assert await program.ask(Watches.reports, VALUES, str(pipe)) == len(VALUES)
    assert repr(heard) == repr(VALUES)


@pytest.mark.parametrize("way", ["method", "declared", "function", "run"])
async def test_values_arrive_in_order_and_the_last_before_the_result(any_device: ta.Device, way: str) -> None:
    x = await any_device.put(np.arange(3.0))
    program, heard = await opening(any_device), list[int]()
    async with ta.open_program(any_device, counts) as function:
        ask: Any = {
            "method": partial(program.ask, Watches.reports, list(range(300))),
            "declared": partial(program.ask, Watches.counts, 300),
            "function": partial(function.ask, x, 0, 300),
            "run": partial(ta.run, counts, x, 0, 300),
        }[way]
        for _ in range(4):
            heard.clear()
            with on_progress(heard.append):
                await ask()
            assert heard[-1] == 299
            assert heard == sorted(set(heard))
        heard.clear()
        # Nobody listens.
        await ask()
    assert heard == []


async def test_no_value_arrives_after_the_result(any_device: ta.Device) -> None:
    program, heard = await opening(any_device), list[str]()
    with on_progress(heard.append):
        assert await program.ask(Watches.goes_on) == 7
    before = list(heard)
    assert before.count("own") <= 1
    assert set(before) <= {"own", "late"}
    for _ in range(20):
        assert await program.ask(Watches.all_seen) == (False, [])
    assert await program.ask(Watches.stops) == 8
    assert heard == before


async def test_callbacks_get_the_reports_of_their_own_asks(any_device: ta.Device) -> None:
    program = await opening(any_device)
    heard: dict[int, list[int]] = {}

    async def ask(number: int) -> None:
        heard[number] = []
        with on_progress(heard[number].append):
            assert await program.ask(Watches.reports, [number, number + 1]) == 2

    async with trio.open_nursery() as nursery:
        for number in range(0, 60, 10):
            nursery.start_soon(ask, number)
    assert all(values[-1] == number + 1 for number, values in heard.items())
    assert all(set(values) <= {number, number + 1} for number, values in heard.items())


async def test_a_callback_runs_with_the_context_of_its_asker(any_device: ta.Device) -> None:
    program, found = await opening(any_device), list[str]()
    variable = ContextVar("variable", default="none")
    variable.set("asker's")
    with on_progress(lambda value: found.append(variable.get())):
        await program.ask(Watches.reports, [1])
    assert found == ["asker's"]


async def test_an_error_of_the_callback_ends_the_ask(any_device: ta.Device, pipe: Path) -> None:
    program = await opening(any_device)

    def fails(value: object) -> None:
        raise ZeroDivisionError(f"at {value}")

    with on_progress(fails), trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            # The method writes to the pipe, so somebody must read.
            nursery.start_soon(partial(trio.to_thread.run_sync, pipe.read_text))
            with pytest.raises(ZeroDivisionError, match="at begun"):
                await program.ask(Watches.reports_and_waits, str(pipe))
        with pytest.raises(ZeroDivisionError, match="at 1"):
            await program.ask(Watches.reports, [1])
        # The method has seen that its caller has left; it did not end by its own limit.
        ((_, last),) = (await _seen(program))[1]
        assert last


async def _seen(program: Any) -> Any:
    with on_progress(print):
        return await program.ask(Watches.all_seen)


async def test_a_call_that_runs_again_reports_from_its_beginning(
    system: ta.System, pipe: Path, tmp_path: Path
) -> None:
    options = ta.DeviceOptions(isolation="process", retry=1, retry_suspects=True)
    async with system.open_device("cpu", options=options) as device:
        program, heard = await opening(device), list[str]()

        def hear(value: str) -> None:
            heard.append(value)
            if value == "first":
                os.close(os.open(pipe, os.O_WRONLY))

        with on_progress(hear), trio.fail_after(60):
            assert await program.ask(Watches.dies_once, str(pipe), str(tmp_path / "note")) == "done"
    assert heard == ["first", "first", "last"]


async def test_a_value_of_another_type_is_refused_in_the_method(any_device: ta.Device) -> None:
    program, heard = await opening(any_device), list[Any]()
    with on_progress(heard.append):
        array, keys, long = await program.ask(Watches.reports_wrongly, np.arange(3.0))
    assert array.startswith("TypeError: report_progress: value must be")
    assert keys.startswith("TypeError: report_progress: value: the keys of a dict must be strings")
    assert long.startswith("ValueError: report_progress: the value is 1048578 characters")
    assert heard == []


def test_outside_of_a_call_a_value_is_checked_and_dropped() -> None:
    report_progress({"loss": 0.5})
    with pytest.raises(TypeError, match="must be"):
        report_progress(object())


def test_a_callback_that_cannot_be_called_is_refused() -> None:
    async def hear(value: object) -> None: ...

    for wrong in (None, 3, hear):
        callback: Any = wrong
        with (
            pytest.raises(TypeError, match="on_progress: callback must be a function"),
            on_progress(callback),
        ):
            pass
