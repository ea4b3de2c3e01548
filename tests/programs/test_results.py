"""Undeclared results: a kind that came twice in a row is expected, and comes with the call."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import result_functions as fns
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta

X = np.arange(12.0).reshape(4, 3)
MANY = ta.Intensity(100, 60.0)
AT_ONCE = ta.Backoff(base=0.0)


async def operations(device: ta.Device, program: Any, *args: Any, **kwargs: Any) -> tuple[int, Any]:
    """How many operations a call is, and its result."""
    before = (await device.statistics()).completed
    result = await program.ask(*args, **kwargs)
    return (await device.statistics()).completed - before, result


async def test_a_result_repeated_in_a_row_comes_with_the_call(device: ta.Device) -> None:
    x = await device.put(X)
    async with ta.open_program(device, fns.rows) as program:
        for count, expected in ((2, 2), (2, 2), (2, 1), (2, 1), (3, 2), (3, 2), (3, 1), (2, 1)):
            number, result = await operations(device, program, x, count)
            np.testing.assert_array_equal(await result.to_host(), X[:count] * 2)
            # The values of a call are also known: a request for 2 rows expects 2 rows again.
            assert number == expected, count
        # Other values with the same arrays: as the last ones.
        assert (await operations(device, program, x, count=1))[0] == 2
        y = await device.put(X.astype(np.float32))
        number, result = await operations(device, program, y, 2)
        assert number == 2
        assert result.dtype == "float32"


async def test_nested_results_arrive_unchanged(device: ta.Device) -> None:
    x = await device.put(X)
    async with ta.open_program(device, fns.several) as program:
        for tag in (0.5, 1.5, float("inf"), 2.5):
            number, found = await operations(device, program, x, tag)
        assert number == 1
        assert found["tag"] == 2.5
        assert found["none"] is None
        turned, part = found["both"]
        np.testing.assert_array_equal(await turned.to_host(), X.T)
        np.testing.assert_array_equal(await part.to_host(), X[::2])


@pytest.mark.parametrize("function", [fns.same, fns.kept])
async def test_results_are_arrays_of_their_own(device: ta.Device, function: Callable[[Any], Any]) -> None:
    x = await device.put(np.ones(3))
    async with ta.open_program(device, function) as program:
        results = [await program.ask(x) for _ in range(4)]
        await x.fill(5.0)
        await program.ask(x)
        for result in results:
            np.testing.assert_array_equal(await result.to_host(), np.ones(3))


async def test_a_long_text_is_fetched_and_its_arrays_are_not(device: ta.Device) -> None:
    x = await device.put(X)
    async with ta.open_program(device, fns.wordy) as program:
        for count, expected in ((3000, 3), (3000, 3), (3000, 2), (3, 1), (3000, 2)):
            number, (text, array) = await operations(device, program, x, count)
            assert text == "w" * count
            np.testing.assert_array_equal(await array.to_host(), X + 1)
            assert number == expected


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0, 1]), min_size=3, max_size=3), min_size=1, max_size=12))
def test_a_shape_that_depends_on_the_numbers(calls: list[list[int]]) -> None:
    """After any earlier calls the result is right, and no result expected in vain is left."""

    async def main() -> None:
        async with (
            ta.open_system("test") as system,
            system.open_device("cpu") as device,
            ta.open_program(device, fns.positive) as program,
        ):
            x = await device.put(np.zeros(3))
            used = (await device.statistics()).memory.used
            for numbers in calls:
                values = np.array(numbers, np.float64)
                result = await program.ask(values)
                np.testing.assert_array_equal(await result.to_host(), values[values > 0])
                del result
            await x.to_host()
            assert (await device.statistics()).memory.used == used

    trio.run(main)


async def test_an_error_leaves_nothing_of_an_expected_result(device: ta.Device) -> None:
    x, bad = await device.put(np.ones(1000)), await device.put(np.full(1000, -1.0))
    async with ta.open_program(device, fns.stubborn, intensity=MANY, backoff=AT_ONCE) as program:
        for _ in range(3):
            await program.ask(x)
        used = (await device.statistics()).memory.used
        for _ in range(3):
            with pytest.raises(ta.ActorFailedError, match="a negative number"):
                await program.ask(bad)
        number, result = await operations(device, program, x)
        assert number == 1
        np.testing.assert_array_equal(await result.to_host(), np.full(1000, 2.0))
        del result
        # The frames of an error, and the objects they refer to, are a cycle.
        gc.collect()
        await device.put(np.ones(1))
        assert (await device.statistics()).memory.used == used


async def test_a_result_that_came_with_its_call_is_lost_with_no_context(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process", retry=1)
    async with system.open_device("cpu", options=options) as device:
        x = await device.put(X)
        async with ta.open_program(device, fns.several) as program:
            for _ in range(3):
                await program.ask(x)
            ta.testing.inject_fault(device, program.operation(), kill=True)
            found = await program.ask(x)
            np.testing.assert_array_equal(await found["both"][0].to_host(), X.T)
            assert device.generation == 2


async def test_large_arrays_are_not_expected(device: ta.Device) -> None:
    x = await device.put(np.ones(1))
    async with ta.open_program(device, fns.zeros) as program:
        for count, expected in ((1 << 20, 1), ((64 << 20) + 1, 2)):
            numbers: list[int] = []
            for _ in range(3):
                number, result = await operations(device, program, x, count)
                assert result.shape == (count,)
                numbers.append(number)
                del result
            assert numbers == [2, 2, expected]


async def test_calls_of_long_ago_are_forgotten(device: ta.Device) -> None:
    async with ta.open_program(device, fns.same) as program:
        first = await device.put(np.ones(1000))
        assert [(await operations(device, program, first))[0] for _ in range(3)] == [2, 2, 1]
        for size in range(200):
            await program.ask(np.ones(size))
        assert (await operations(device, program, first))[0] == 2


async def test_a_result_may_be_read_when_the_work_is_done(device: ta.Device) -> None:
    x = await device.put(X)
    total = X.sum() if device.info.backend == "cpu" else 0.0
    async with ta.open_program(device, fns.later, intensity=MANY, backoff=AT_ONCE) as program:
        for _ in range(3):
            number, found = await operations(device, program, x, "plain")
            assert (number, found) == (1, {"total": total, "bytes": b"abc"})
        for what, told in (("bad", "nothing to read"), ("array", "must return no arrays")):
            with pytest.raises(ta.ActorFailedError) as caught:
                await program.ask(x, what)
            assert told in str(caught.value.__cause__)
            # The program is made again, as after any other error of a call.
            assert (await program.ask(x, "plain"))["bytes"] == b"abc"
