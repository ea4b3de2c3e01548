"""Functions that run as one operation, without opening."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import many_functions
import numpy as np
import pytest
import run_functions as fns
import trio

import trio_accel as ta


def programs_of(system: ta.System, device: ta.Device) -> set[str]:
    prefix = f"{device.path}/context/"
    found = {node.path.removeprefix(prefix) for node in system.tree().walk() if node.path.startswith(prefix)}
    return {path.removesuffix("/program") for path in found if path.endswith("/program")}


async def test_a_function_runs_in_the_process_of_its_array(system: ta.System, device: ta.Device) -> None:
    x = await device.put(np.arange(6.0))
    for _ in range(3):
        await ta.run(fns.double, x)
    doubled = await ta.run(fns.double, x)
    assert doubled.device is device
    np.testing.assert_array_equal(await doubled.to_host(), np.arange(6.0) * 2)
    places, values = await ta.run(fns.peaks, doubled, count=2)
    assert (await places.to_host()).tolist() == [5, 4]
    assert (await values.to_host()).tolist() == [10.0, 8.0]
    assert programs_of(system, device) == {"double-1", "peaks-1"}


async def test_nested_arguments_and_results(device: ta.Device) -> None:
    a, b = await device.put(np.ones(3)), np.arange(3.0)
    found = await ta.run(fns.pairs, {"a": a, "b": b}, weights=[b, a])
    np.testing.assert_array_equal(await found["sum"].to_host(), [1.0, 2.0, 3.0])
    assert found["names"] == ["a", "b"]
    assert found["none"] is None
    assert (await found["part"].to_host()).tolist() == [1.0, 1.0]


async def test_a_declared_result_and_an_update(device: ta.Device) -> None:
    x = await device.put(np.zeros(4))
    assert await ta.run(fns.add_one, x) is None
    y = await ta.run(fns.declared, x)
    assert (await y.to_host()).tolist() == [2.0] * 4
    with pytest.raises(ta.ActorFailedError, match="above the limit"):
        await ta.run(fns.add_one, x, limit=0.5)
    with pytest.raises(ta.StaleRefError):
        await x.to_host()


async def test_an_ended_function_is_opened_again(device: ta.Device) -> None:
    for _ in range(12):
        x = await device.put(np.zeros(4))
        with pytest.raises(ta.ActorFailedError):
            await ta.run(fns.add_one, x, limit=0.5)
    x = await device.put(np.zeros(4))
    await ta.run(fns.add_one, x)
    assert (await x.to_host()).tolist() == [1.0] * 4
    assert device.generation == 1


@pytest.mark.parametrize(
    ("function", "args", "error", "text"),
    [
        (fns.odd, ("OddError",), fns.OddError, r"not \(2, 2\)"),
        (fns.odd, ("KeyError",), KeyError, r"not \(2, 2\)"),
        (fns.odd, ("StopIteration",), ta.programs.Refused, r"not \(2, 2\)"),
        (fns.raises_late, (), RuntimeError, r"after \(2, 2\)"),
        (fns.a_set, (), TypeError, r"run_functions\.a_set: its result must be an array.*got set"),
    ],
)
async def test_an_error_is_the_askers_own(
    system: ta.System,
    device: ta.Device,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    error: type[Exception],
    text: str,
) -> None:
    x = await device.put(np.ones((2, 2)))
    async with trio.open_nursery() as nursery:

        async def good() -> None:
            for _ in range(10):
                assert (await (await ta.run(fns.double, x)).to_host()).tolist() == [[2.0, 2.0]] * 2

        nursery.start_soon(good)
        for _ in range(10):
            with pytest.raises(error, match=text):
                await ta.run(function, x, *args)
    assert all(not node.incarnation for node in system.tree().walk() if node.path.startswith(device.path))
    np.testing.assert_array_equal(await x.to_host(), np.ones((2, 2)))


async def test_results_share_no_memory_with_arguments(device: ta.Device) -> None:
    x = await device.put(np.arange(3.0))
    back = await ta.run(fns.view_of, x)
    await ta.run(fns.add_one, x)
    assert (await back.to_host()).tolist() == [2.0, 1.0, 0.0]


async def test_a_kept_array_cannot_be_written(device: ta.Device) -> None:
    x = await device.put(np.arange(3.0))
    assert await ta.run(fns.nothing, x) is None
    with pytest.raises(ValueError, match="read-only"):
        await ta.run(fns.kept, await device.put(np.zeros(3)))
    assert (await x.to_host()).tolist() == [0.0, 1.0, 2.0]


def _closure() -> Callable[[Any], Any]:
    return lambda x: x


async def test_functions_that_cannot_run(device: ta.Device) -> None:
    x = await device.put(np.ones(2))
    for function, error, text in (
        (lambda x: x, ValueError, "run: .*defined in a function; move it to the level of its module"),
        (_closure(), ValueError, "defined in a function"),
        (fns.asynchronous, TypeError, "is async, and it runs in a thread"),
        (fns.generator, TypeError, "yields, but an ask has a single reply"),
        (fns.instance, TypeError, "run: .*must be a class or a function"),
        (fns.Callable, TypeError, "run: Callable is a class, and must be a function; see open_program"),
        (3, TypeError, "run: .*must be a class or a function"),
    ):
        with pytest.raises(error, match=text):
            await ta.run(function, x)
    made: dict[str, Any] = {"__name__": "__main__"}
    exec("def double(x):\n    return x", made)
    with pytest.raises(ValueError, match="__main__"):
        await ta.run(made["double"], x)
    with pytest.raises(TypeError, match=r"peaks: there is no option 'number'; there are count, spectrum"):
        await ta.run(fns.peaks, x, number=3)


async def test_a_function_needs_an_array_of_one_device(system: ta.System, device: ta.Device) -> None:
    with pytest.raises(TypeError, match="run: double must get an array of a device"):
        await ta.run(fns.double, np.ones(3))
    with pytest.warns(RuntimeWarning, match="open already"):
        opening = await system.open_device("cpu", options=device.options)
    async with opening as other:
        x, y = await device.put(np.ones(3)), await other.put(np.ones(3))
        with pytest.raises(ValueError, match="device"):
            await ta.run(fns.pairs, {"a": x}, [y, x])
        assert (await ta.run(fns.double, y)).device is other
    with pytest.raises((ta.DeviceLostError, ta.StaleRefError)):
        await ta.run(fns.double, y)


async def test_a_loss_costs_nothing_but_time(device: ta.Device) -> None:
    if device.isolation == "inline":
        pytest.skip("inline arrays are lost with their context")
    x = await device.put(np.arange(3.0))
    await ta.run(fns.double, x)
    async with ta.open_program(device, fns.nothing) as program:
        ta.testing.inject_fault(device, program.operation(), kill=True)
        with pytest.raises(ta.ContextLostError):
            await program.ask(x)
    assert device.generation == 2
    for _ in range(3):
        assert (await (await ta.run(fns.double, x)).to_host()).tolist() == [0.0, 2.0, 4.0]


async def test_several_first_runs_open_once(system: ta.System, device: ta.Device) -> None:
    x = await device.put(np.ones(2))
    with trio.move_on_after(0):
        await ta.run(fns.slow, x)
    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(ta.run, fns.double, x)
        for _ in range(4):
            nursery.start_soon(ta.run, fns.slow, x)
    assert len(programs_of(system, device)) == 2


async def test_the_functions_used_last_stay_open(system: ta.System, device: ta.Device) -> None:
    x = await device.put(np.ones(2))
    functions = [getattr(many_functions, f"numbered_{number}") for number in range(40)]
    for number, function in enumerate(functions):
        assert (await (await ta.run(function, x)).to_host()).tolist() == [1.0 + number] * 2
        await ta.run(functions[0], x)
    found = programs_of(system, device)
    assert len(found) == 32
    assert "numbered_0-1" in found
    assert "numbered_1-1" not in found
    async with trio.open_nursery() as nursery:
        for function in functions:
            nursery.start_soon(ta.run, function, x)
    await ta.run(fns.double, x)
    assert len(programs_of(system, device)) <= 32


@pytest.mark.slow
async def test_ten_thousand_calls_grow_nothing(device: ta.Device) -> None:
    x = await device.put(np.ones(2))

    async def some(count: int) -> None:
        for number in range(count):
            await ta.run((fns.double, fns.declared)[number % 2], x)
            if not number % 50:
                with pytest.raises(KeyError):
                    await ta.run(fns.odd, x, "KeyError")

    def blocks() -> int:
        """Pieces of memory given out by Python: an object has at least one."""
        gc.collect()
        return sys.getallocatedblocks()

    await some(2000)
    statistics = await device.statistics()
    pid, used = statistics.pid, statistics.memory.used
    before, resident = blocks(), _resident(pid)
    await some(10_000)
    assert blocks() - before < 2000
    # 200 bytes for each call would be two megabytes.
    assert _resident(pid) - resident < 2_000_000
    await device.put(np.ones(1))
    assert (await device.statistics()).memory.used <= used + 64


def _resident(pid: int | None) -> int:
    """Resident bytes of a worker; 0 for none."""
    if pid is None:
        return 0
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
