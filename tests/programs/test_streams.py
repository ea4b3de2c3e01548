"""Methods that yield, read item by item, inline and from workers."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streaming_programs import Declared, Plain, Streams, WithoutResume, squares, sum_slowly

import trio_accel as ta
from trio_accel.programs import ItemStream, Program, method, on_progress
from trio_accel.testing import inject_fault


@pytest.fixture
async def rows(any_device: ta.Device) -> ta.AccelRef:
    return await any_device.zeros((4, 2))


@pytest.fixture
async def program(any_device: ta.Device, rows: ta.AccelRef) -> AsyncGenerator[Program[Streams], None]:
    async with ta.open_program(any_device, Streams, rows) as program:
        yield program


@pytest.fixture
async def of_numpy(device: ta.Device) -> AsyncGenerator[Program[Streams], None]:
    """A program with methods that compute by NumPy."""
    async with ta.open_program(device, Streams, await device.zeros((4, 2))) as program:
        yield program


def rows_of(program: Program[Streams]) -> ta.AccelRef:
    return program._opened.state[0].ref


async def read(program: Program[Streams], to: list[Any], name: str, *args: object) -> None:
    """Read a stream to its end."""
    async with program.stream(name, *args) as items:
        async for item in items:
            to.append(item)  # noqa: PERF401  # what was read before an error counts


async def first(program: Program[Streams], name: str, *args: object) -> None:
    """Read one item, and leave by an error."""
    async with program.stream(name, *args) as items:
        await anext(items)
        raise ZeroDivisionError


async def rest(items: ItemStream[Any]) -> list[Any]:
    return [item async for item in items]


async def texts(items: ItemStream[ta.AccelRef]) -> list[list[float]]:
    return [(await item.to_host()).tolist() async for item in items]


async def test_items_are_results_in_order(program: Program[Streams]) -> None:
    async with program.stream(Streams.count, 5) as numbers:
        assert [number async for number in numbers] == [0, 1, 2, 3, 4]
    async with program.stream("everything") as values:
        assert [value async for value in values] == [
            None,
            1,
            2.5,
            "text" * 300,
            b"\xff",
            [1, {"two": (3, 4)}],
        ]
    async with program.stream(Streams.nothing) as numbers:
        assert [number async for number in numbers] == []
    async with program.stream(Streams.shapes) as arrays:
        assert await texts(arrays) == [[float(n)] * n for n in (1, 3, 3, 3, 0, 2)]
    assert program.device.generation == 1


@pytest.mark.parametrize("is_host", [False, True])
async def test_arguments_live_as_long_as_the_stream(of_numpy: Program[Streams], is_host: bool) -> None:
    program = of_numpy
    x: Any = np.arange(4.0) if is_host else await program.device.put(np.arange(4.0))
    put = (await program.device.statistics()).launched
    async with program.stream(Streams.first_of, x) as numbers:
        del x
        found = []
        async for number in numbers:
            # Free memory would be taken by this.
            await program.device.put(np.full(4, 99.0))
            found.append(number)
    assert found == [0.0, 1.0, 2.0, 3.0]
    # Four items and the end, four arrays, and one copy of the argument.
    assert (await program.device.statistics()).launched - put == 9 + is_host
    async with program.stream(Streams.scaled, np.ones(2), [1.0, 2.0]) as arrays:
        assert await texts(arrays) == [[1.0, 1.0], [2.0, 2.0]]


async def test_an_argument_may_be_taken_between_items(program: Program[Streams]) -> None:
    x = await program.device.put(np.arange(3.0))
    async with program.stream(Streams.takes, x) as shapes:
        assert await rest(shapes) == [[3]] * 3


async def test_a_function_is_read_likewise(any_device: ta.Device) -> None:
    async with ta.open_program(any_device, squares) as program:
        async with program.stream(4) as numbers:
            assert [number async for number in numbers] == [0, 1, 4, 9]
        with pytest.raises(
            TypeError, match=r"squares yields, but an ask has a single reply; .*program\.stream"
        ):
            await program.ask(4)


async def test_a_reader_that_never_reads_holds_the_method_back(program: Program[Streams]) -> None:
    async with program.stream(Streams.count, 1000) as numbers:
        # clock: a longer pause only makes it surer
        await trio.sleep(0.1)
        assert (await program.ask(Streams.seen))[0] == 1
        assert await anext(numbers) == 0
        # clock: a longer pause only makes it surer
        await trio.sleep(0.1)
        assert (await program.ask(Streams.seen))[0] == 2


@pytest.mark.parametrize("name", ["refuses_third", "fails_at_third", "stranger"])
async def test_an_error_is_raised_at_its_item(program: Program[Streams], name: str) -> None:
    found: list[int] = []
    with pytest.raises(KeyError if name == "refuses_third" else ta.ActorFailedError) as caught:
        await read(program, found, name)
    assert found == ([1] if name == "stranger" else [1, 2])
    assert "third" in str(caught.value) or "its result must be an array" in str(caught.value)
    async with program.stream(Streams.count, 2) as numbers:
        assert [number async for number in numbers] == [0, 1]


async def test_leaving_closes_the_generator(program: Program[Streams]) -> None:
    async with program.stream(Streams.noting, "left") as numbers:
        assert await anext(numbers) == 0
    with pytest.raises(ZeroDivisionError):
        await first(program, "noting", "raised")
    with trio.move_on_after(0.2) as scope:
        async with program.stream(Streams.noting, "late") as numbers:
            await anext(numbers)
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert await program.ask(Streams.seen) == (0, ["left", "raised", "late"])
    with pytest.raises(trio.ClosedResourceError, match="the block of this stream has ended"):
        await anext(numbers)


async def test_a_producing_program_sees_that_its_reader_has_left(
    program: Program[Streams], tmp_path: Path
) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with trio.fail_after(60):
        async with program.stream(Streams.until_left, str(pipe)) as numbers:
            assert await anext(numbers) == 1
            assert await trio.to_thread.run_sync(pipe.read_text) == "begun"
        assert await program.ask(Streams.seen) == (0, ["left"])


async def test_a_generator_that_cannot_be_closed_in_time_is_closed_later(
    system: ta.System, options: ta.DeviceOptions
) -> None:
    hasty = attrs.evolve(options, close_grace=0.05)
    async with system.open_device("cpu", options=hasty) as device:
        program = await ta.open_program(device, Streams, await device.zeros((4, 2)))
        with ta.cancel_grace(0.0):
            async with program.stream(Streams.slow) as numbers:
                await anext(numbers)
                # clock: the method pauses for thirty times as long
                await trio.sleep(0.05)
        # The next call brings its number along.
        assert program._held
        assert (await program.ask(Streams.seen))[1] == ["slow"]
        assert not program._held


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it also ignores its end
@pytest.mark.parametrize("name", ["goes_on", "fails_at_its_end"])
async def test_an_error_of_closing_is_raised_at_the_end_of_the_block(
    program: Program[Streams], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    stream = program.stream(name)
    assert await anext(await stream.__aenter__()) == 1
    with pytest.raises(ta.ActorFailedError, match=r"at its end|ignored GeneratorExit"):
        await stream.__aexit__(None, None, None)
    # An error of the block itself is above it.
    with pytest.raises(ZeroDivisionError):
        await first(program, name)
    assert "failed while its stream was closed" in caplog.text


async def test_one_task_reads_a_stream(program: Program[Streams]) -> None:
    async with program.stream(Streams.slow) as numbers, trio.open_nursery() as nursery:
        await anext(numbers)

        async def take() -> None:
            assert await anext(numbers) == 2

        nursery.start_soon(take)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError, match="another task reads this stream"):
            await anext(numbers)


async def test_streams_of_one_program_take_turns(program: Program[Streams]) -> None:
    found: list[list[int]] = [[], [], []]

    async def take(to: list[int]) -> None:
        async with program.stream(Streams.count, 20) as numbers:
            async for number in numbers:
                to.append(number)  # noqa: PERF401  # the others look at it meanwhile
        # None runs to its end before the others have begun.
        assert min(map(len, found)) > 5

    async with trio.open_nursery() as nursery:
        for to in found:
            nursery.start_soon(take, to)
    assert found == [list(range(20))] * 3


async def test_items_report_progress(program: Program[Streams]) -> None:
    told: list[object] = []
    with on_progress(told.append):
        async with program.stream(Streams.progress) as numbers:
            assert [number async for number in numbers] == [0, 1, 2]
    assert told == [0, 1, 2]


async def test_updated_state_is_written_between_items(of_numpy: Program[Streams]) -> None:
    program, rows = of_numpy, rows_of(of_numpy)
    async with program.stream(Streams.add, 1.0) as numbers:
        assert await anext(numbers) == 0
    assert (await rows.to_host())[0].tolist() == [1.0, 1.0]
    async with program.stream(Streams.fill, 5.0) as numbers:
        assert [number async for number in numbers] == [0, 1, 2, 3]
    np.testing.assert_array_equal((await rows.to_host())[:, 0], [5.0, 6.0, 7.0, 8.0])
    with pytest.raises(ta.ActorFailedError, match="read-only"):
        await read(program, [], "writes_undeclared")


async def test_an_idempotent_method_may_refuse_half_way(of_numpy: Program[Streams]) -> None:
    program, rows = of_numpy, rows_of(of_numpy)
    with pytest.raises(ValueError, match="a negative value"):
        await program.ask(Streams.fill_some, np.array([1.0, 2.0, -1.0, 4.0]))
    assert not program.is_damaged
    assert (await rows.to_host())[:2, 0].tolist() == [1.0, 2.0]


async def test_declarations_that_cannot_be(any_device: ta.Device, program: Program[Streams]) -> None:
    for unlike in (Declared, WithoutResume, Plain):
        with pytest.raises(TypeError, match=r"leave out= away|must yield, and take an argument resume"):
            await ta.open_program(any_device, unlike)
    with pytest.raises(TypeError, match=r"Streams\.seen does not yield: write await program\.ask"):
        program.stream(Streams.seen)
    with pytest.raises(TypeError, match="resume is the stream's own argument"):
        program.stream(Streams.resumed, 3, resume=[1])
    with pytest.raises(TypeError, match="missing a required argument"):
        program.stream("count")
    for options, error, text in (
        ({"resumes": "items"}, TypeError, 'must be True, False or "count"'),
        ({"prefetch": 0}, ValueError, "prefetch must be an integer from 1"),
        ({"resumes": True, "updates": ["x"]}, TypeError, "resumes only if it is idempotent"),
    ):
        with pytest.raises(error, match=text):
            method(**options)


async def test_a_closed_program_ends_its_streams(program: Program[Streams]) -> None:
    async with program.stream(Streams.count, 5) as numbers:
        assert await anext(numbers) == 0
        await program.aclose()
        with pytest.raises(ta.ActorStoppedError):
            await rest(numbers)


async def test_a_reset_ends_a_stream_that_does_not_resume(program: Program[Streams]) -> None:
    async with program.stream(Streams.count, 9) as numbers, program.stream(Streams.resumed, 9) as others:
        assert (await anext(numbers), await anext(others)) == (0, 0)
        await program.reset()
        with pytest.raises(ta.ContextLostError, match="was lost: the program was made again"):
            await rest(numbers)
        assert [0, *[item async for item in others]] == expected(9)


def expected(count: int) -> list[int]:
    items: list[int] = []
    for _ in range(count):
        items.append((3 * sum(items) + len(items)) % 101)
    return items


RECOVERS = ta.DeviceOptions(
    isolation="process", intensity=ta.Intensity(1000, 60.0), backoff=ta.Backoff(base=0.0)
)


@pytest.fixture
async def survivor(system: ta.System) -> AsyncGenerator[Program[Streams], None]:
    async with system.open_device("cpu", options=RECOVERS) as device:
        yield await ta.open_program(device, Streams, await device.zeros((4, 2)))


async def test_a_stream_continues_after_losses(survivor: Program[Streams]) -> None:
    found: list[int] = []
    async with survivor.stream(Streams.resumed, 30) as numbers:
        async for number in numbers:
            found.append(number)
            if len(found) in {1, 7, 8, 20}:
                inject_fault(survivor.device, survivor.operation(Streams.resumed), kill=True)
    assert found == expected(30)
    assert survivor.device.generation == 5
    x = await survivor.device.put(np.array([1.0, 2.0]))
    inject_fault(survivor.device, survivor.operation(Streams.resumed_at), kill=True)
    async with survivor.stream(Streams.resumed_at, x, 3) as arrays:
        assert await texts(arrays) == [[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]]


async def test_a_loss_ends_a_stream_that_does_not_resume(survivor: Program[Streams]) -> None:
    async with survivor.stream(Streams.count, 9) as plain:
        assert await anext(plain) == 0
        inject_fault(survivor.device, survivor.operation(Streams.count), kill=True)
        with pytest.raises(ta.ContextLostError):
            await rest(plain)
    # Another stream with a generator in that process is lost with it, even if nothing of it ran.
    inject_fault(survivor.device, survivor.operation(Streams.seen), kill=True)
    async with survivor.stream(Streams.resumed, 9) as numbers:
        found = [await anext(numbers)]
        with pytest.raises(ta.ContextLostError):
            await survivor.ask(Streams.seen)
        assert [*found, *[number async for number in numbers]] == expected(9)


async def test_idempotent_updates_are_healed_by_going_on(survivor: Program[Streams]) -> None:
    rows = survivor._opened.state[0].ref
    async with survivor.stream(Streams.fill, 5.0) as numbers:
        found = []
        async for number in numbers:
            found.append(number)
            inject_fault(survivor.device, survivor.operation(Streams.fill), kill=True)
    assert found == [0, 1, 2, 3]
    assert not survivor.is_damaged
    np.testing.assert_array_equal((await rows.to_host())[:, 0], [5.0, 6.0, 7.0, 8.0])
    # A stream without idempotence damages its targets.
    inject_fault(survivor.device, survivor.operation(Streams.add), kill=True)
    with pytest.raises(ta.ContextLostError):
        await read(survivor, [], "add", 5.0)
    assert survivor.is_damaged


async def test_a_stream_overtaken_by_an_idempotent_update_does_not_run_again(
    system: ta.System, tmp_path: Path
) -> None:
    options = attrs.evolve(RECOVERS, retry=2)
    async with system.open_device("cpu", options=options) as device:
        rows = await device.zeros((4, 2))
        program = await ta.open_program(device, Streams, rows)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(overtaken, rows, str(tmp_path / "note"))
                await until(lambda: trio.Path(tmp_path / "note").exists())
                launched = (await device.statistics()).launched
                nursery.start_soon(program.ask, Streams.fill_some, np.full(4, 7.0))

                async def has_begun() -> bool:
                    return (await device.statistics()).launched == launched + 1

                # It waits for the reader of its rows, which may have written to them for all that anybody
                # knows.
                await until(has_begun)
                pids = [one.pid for one in system.tree().find(device.path).walk() if one.pid]
                os.kill(pids[0], signal.SIGKILL)
        np.testing.assert_array_equal(await rows.to_host(), np.full((4, 2), 7.0))


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    while not await holds():  # noqa: ASYNC110  # another process does it
        await trio.sleep(0.01)


async def overtaken(rows: ta.AccelRef, note: str) -> None:
    with pytest.raises(ta.ContextLostError):
        await ta.run(sum_slowly, rows, note)


async def test_a_neighbours_crash_ends_streams_without_resume(program: Program[Streams]) -> None:
    async with program.stream(Streams.count, 9) as numbers, program.stream(Streams.resumed, 9) as others:
        found = [await anext(others)]
        await anext(numbers)
        with pytest.raises(ta.ActorFailedError):
            await read(program, [], "fails_at_third")
        assert [*found, *[item async for item in others]] == expected(9)
        with pytest.raises(ta.ContextLostError, match="made again"):
            await rest(numbers)


async def test_a_stream_lost_again_and_again_ends(survivor: Program[Streams]) -> None:
    inject_fault(survivor.device, survivor.operation(Streams.resumed), kill=True, count=20)
    with pytest.raises(ta.ContextLostError):
        await read(survivor, [], "resumed", 9)
    # It was begun nine times, and the tenth context may not be there yet.
    assert survivor.device.generation in {9, 10}


PLANS = st.lists(
    st.tuples(st.integers(1, 12), st.sets(st.integers(1, 12), max_size=2)), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
@given(PLANS)
def test_many_readers_under_kills_see_each_item_once(plan: list[tuple[int, set[int]]]) -> None:
    async def take(program: Program[Streams], count: int, kills: set[int]) -> None:
        found: list[int] = []
        async with program.stream(Streams.resumed, count) as numbers:
            async for number in numbers:
                found.append(number)
                if len(found) in kills:
                    inject_fault(program.device, program.operation(Streams.resumed), kill=True)
        assert found == expected(count)

    async def main() -> None:
        async with ta.open_system("streams") as system, system.open_device("cpu", options=RECOVERS) as device:
            program = await ta.open_program(device, Streams, await device.zeros((4, 2)))
            async with trio.open_nursery() as nursery:
                for count, kills in plan:
                    nursery.start_soon(take, program, count, kills)

    trio.run(main)
