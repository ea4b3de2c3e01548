"""Batches copied to a device in advance: all of them arrive, in order, in bounded memory."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
from chosen import BACKEND, INLINE
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel.backends.base import Isolation

Host = npt.NDArray[Any]
MIB = 1 << 20


def batches(count: int, size: int = 1000) -> list[Host]:
    return [np.arange(size, dtype="float64") + 1000 * number for number in range(count)]


async def used(device: ta.Device) -> int:
    gc.collect()
    await device.synchronize()
    return (await device.statistics()).memory.used


async def until(holds: Callable[[], bool]) -> None:
    """Wait for the action of a thread."""
    with trio.fail_after(60):
        while not holds():  # noqa: ASYNC110
            await trio.sleep(0.001)


async def test_data_may_be_larger_than_the_device(system: ta.System, isolation: Isolation) -> None:
    options = ta.DeviceOptions(memory_limit=8 * MIB, isolation=isolation)
    data = np.random.default_rng(0).random((64, MIB // 8))
    async with system.open_device(BACKEND, options=options) as device:
        total = 0.0
        async with ta.stream(device, data) as ahead:
            async for x in ahead:
                # A busy machine may take each batch as soon as it is there: the first one waits for others.
                with trio.fail_after(60):
                    while (await device.statistics()).memory.peak < 3 * MIB:  # noqa: ASYNC110
                        await trio.sleep(0.001)
                total += await (await ta.arrays.sum(x)).item()
        assert total == pytest.approx(float(data.sum()), rel=1e-12)
        memory = (await device.statistics()).memory
        # 64 MiB were sent: three batches in advance, the one in use, and batches that a worker has not
        # returned yet.
        assert 3 * MIB <= memory.peak <= 8 * MIB
        if isolation == "inline":
            assert memory.peak < 6 * MIB


async def each(source: list[Host]) -> AsyncGenerator[Host, None]:
    for batch in source:
        await trio.lowlevel.checkpoint()
        yield batch


def one_by_one(source: list[Host]) -> Callable[[], Host | None]:
    left = iter(source)
    return lambda: next(left, None)


SOURCES: dict[str, Callable[[list[Host]], Any]] = {
    "list": list,
    "generator": lambda source: (batch for batch in source),
    "rows": np.stack,
    "async generator": each,
    "callable": one_by_one,
}


@pytest.mark.parametrize("name", SOURCES)
async def test_every_kind_of_source(system: ta.System, name: str) -> None:
    expected = batches(7)
    async with (
        system.open_device(BACKEND) as device,
        ta.stream(device, SOURCES[name](expected), depth=2) as ahead,
    ):
        found = [await x.to_host() async for x in ahead]
        with pytest.raises(StopAsyncIteration):
            await anext(ahead)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


async def test_a_channel_is_a_source(device: ta.Device) -> None:
    send, receive = trio.open_memory_channel[Host](0)

    async def produce() -> None:
        async with send:
            for batch in batches(5):
                await send.send(batch)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(produce)
        async with ta.stream(device, receive) as ahead:
            firsts = [(await x.to_host())[0] async for x in ahead]
    assert firsts == [0, 1000, 2000, 3000, 4000]
    # It is closed, as an iterator is.
    with pytest.raises(trio.ClosedResourceError):
        await receive.receive()


async def test_tuples_and_dicts_keep_their_type(device: ta.Device) -> None:
    pairs = [(np.full((2, 3), number), np.array([number], "int32")) for number in range(4)]
    async with ta.stream(device, pairs) as tuples:
        number = 0
        async for x, y in tuples:
            assert (x.shape, y.dtype) == ((2, 3), ta.DType.int32)
            assert (await x.to_host() == number).all()
            assert await y.item() == number
            number += 1
    assert number == 4
    named = ({"x": x, "y": y} for x, y in pairs)
    async with ta.stream(device, named) as dicts:
        sums = [[(await batch[name].to_host()).sum() for name in ("x", "y")] async for batch in dicts]
    assert sums == [[6 * number, number] for number in range(4)]


kinds = st.sampled_from(["float32", "int8", "complex64", "bool"])
arrays = st.builds(
    lambda shape, kind, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(kind),
    st.lists(st.integers(0, 5), max_size=3),
    kinds,
    st.integers(0, 99),
)
structures = st.one_of(
    arrays, st.lists(arrays, max_size=3).map(tuple), st.dictionaries(st.integers(0, 3), arrays, max_size=3)
)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    return len(found) == len(expected) and all(map(same, found, expected))


async def read(batch: Any) -> Any:
    if isinstance(batch, ta.AccelRef):
        return await batch.to_host()
    if isinstance(batch, dict):
        return {key: await read(item) for key, item in batch.items()}
    return tuple([await read(item) for item in batch])


@settings(max_examples=15, deadline=None)
@given(st.lists(structures, max_size=8), st.integers(1, 9))
def test_shapes_dtypes_and_structures_may_change(expected: list[Any], depth: int) -> None:
    async def program() -> list[Any]:
        async with (
            ta.open_system("test") as system,
            system.open_device(BACKEND, options=INLINE) as device,
            ta.stream(device, expected, depth=depth) as ahead,
        ):
            return [await read(batch) async for batch in ahead]

    found = trio.run(program)
    assert len(found) == len(expected)
    assert all(map(same, found, expected))


@pytest.mark.parametrize("depth", [1, 3])
async def test_the_number_of_batches_in_advance_is_bounded(device: ta.Device, depth: int) -> None:
    asked = made = 0

    def source() -> Generator[Host, None, None]:
        nonlocal made
        for batch in batches(12):
            assert made < asked + depth
            made += 1
            yield batch

    async with ta.stream(device, source(), depth=depth) as ahead:
        while asked < 12:
            # As many as there are to be do come, without being asked for.
            wanted = min(12, asked + depth)
            await until(lambda: made == wanted)  # noqa: B023  # it is awaited here
            asked += 1
            x = await anext(ahead)
            assert (await x.to_host())[0] == 1000 * (asked - 1)


async def test_a_source_may_fill_the_same_memory_again(device: ta.Device) -> None:
    host = device.host_empty(30_000)

    def source() -> Generator[Host, None, None]:
        for number in range(20):
            host[...] = number
            yield host

    async with ta.stream(device, source()) as ahead:
        found = [await x.to_host() async for x in ahead]
    assert [one.min() for one in found] == [one.max() for one in found] == list(range(20))


async def test_arrays_are_the_programs_own(device: ta.Device) -> None:
    async with ta.stream(device, batches(6), depth=1) as ahead:
        kept = [x async for x in ahead]
    assert [(await x.to_host())[0] for x in kept] == [0, 1000, 2000, 3000, 4000, 5000]


async def keep(ahead: Any, kept: list[ta.AccelRef]) -> None:
    # Not a comprehension, because its list would stay with the error.
    async for x in ahead:
        kept.append(x)  # noqa: PERF401


async def test_a_program_that_keeps_all_arrays_gets_an_error(system: ta.System, isolation: Isolation) -> None:
    options = ta.DeviceOptions(memory_limit=4 * MIB, isolation=isolation)
    async with system.open_device(BACKEND, options=options) as device:
        kept: list[ta.AccelRef] = []
        async with ta.stream(device, batches(20, MIB // 8)) as ahead:
            with pytest.raises(ta.OutOfMemoryError) as caught:
                await keep(ahead, kept)
            assert caught.value.__notes__[-1] == "stream: it was batch 4"
            with pytest.raises(StopAsyncIteration):
                await anext(ahead)
        assert [(await x.to_host())[-1] for x in kept] == [MIB // 8 - 1 + 1000 * k for k in range(4)]


class Closed:
    """A source that reports its end; an error takes the place of a batch."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error = count, error
        self.closed: list[str] = []

    def __iter__(self) -> Generator[Host, None, None]:
        try:
            yield from batches(self.count)
            if self.error is not None:
                raise self.error
        finally:
            self.closed.append(threading.current_thread().name)

    async def __aiter__(self) -> AsyncGenerator[Host, None]:
        try:
            for batch in self:
                await trio.lowlevel.checkpoint()
                yield batch
        finally:
            # A source may need a moment, though the program has left.
            await trio.lowlevel.checkpoint()  # noqa: ASYNC102  # the test is about it
            self.closed.append("async")


class OnlyIter:
    def __init__(self, source: Closed) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Host]:
        return iter(self.source)


@pytest.fixture(params=["in a thread", "async"])
def make(request: pytest.FixtureRequest) -> Callable[[Closed], Any]:
    """The same source for both ways."""
    return OnlyIter if request.param == "in a thread" else lambda source: source


Make = Callable[[Closed], Any]


async def test_an_error_of_the_source_follows_the_batches_before(device: ta.Device, make: Make) -> None:
    source = Closed(5, ValueError("torn file"))
    async with ta.stream(device, make(source)) as ahead:
        seen = [await (await anext(ahead)).to_host() for _ in range(5)]
        with pytest.raises(ValueError, match="torn file") as caught:
            await anext(ahead)
        assert caught.value is source.error
        assert caught.value.__notes__[-1] == "stream: it was batch 5"
        with pytest.raises(StopAsyncIteration):
            await anext(ahead)
    assert [one[0] for one in seen] == [0, 1000, 2000, 3000, 4000]
    assert source.closed[-1] != threading.current_thread().name


async def test_the_error_ends_the_program_unchanged(device: ta.Device, make: Make) -> None:
    with pytest.raises(ValueError, match="torn file"):
        async with ta.stream(device, make(Closed(2, ValueError("torn file")))) as ahead:
            await keep(ahead, [])


class Left(BaseException):
    """Not an error that anything catches, as Ctrl-C is."""


async def leave_by_break(ahead: Any) -> None:
    async for _ in ahead:
        break


async def leave_by_error(ahead: Any) -> None:
    await anext(ahead)
    raise KeyError("of the program")


async def leave_by_ctrl_c(ahead: Any) -> None:
    await anext(ahead)
    raise Left


async def leave_by_cancellation(ahead: Any) -> None:
    await anext(ahead)
    with trio.CancelScope() as scope:
        scope.cancel()
        await anext(ahead)
    # No batch was lost.
    assert (await (await anext(ahead)).to_host())[0] == 1000


async def leave_before(ahead: Any) -> None:
    await trio.lowlevel.checkpoint()


LEAVING = [
    (leave_by_break, None),
    (leave_by_error, KeyError),
    (leave_by_ctrl_c, Left),
    (leave_by_cancellation, None),
    (leave_before, None),
]


@pytest.mark.parametrize(("leave", "error"), LEAVING, ids=lambda value: getattr(value, "__name__", "-"))
async def test_nothing_is_left_behind(
    system: ta.System, make: Make, leave: Callable[[Any], Awaitable[None]], error: type[BaseException] | None
) -> None:
    async with system.open_device(BACKEND, options=INLINE) as device:
        source = Closed(1000)
        raised: BaseException | None = None
        ahead: Any = None
        try:
            async with ta.stream(device, make(source)) as ahead:
                await leave(ahead)
        except BaseException as caught:  # noqa: ASYNC103, BLE001  # a class of its own
            raised = caught
        assert type(raised) is (error or type(None))
        del raised
        if leave is not leave_before:
            assert source.closed
        assert await used(device) == 0
        with pytest.raises(RuntimeError, match="stream: its block has ended"):
            await anext(ahead)


async def test_a_cancelled_program_leaves(device: ta.Device, make: Make) -> None:
    source = Closed(1000)
    with trio.CancelScope() as scope:
        async with ta.stream(device, make(source)) as ahead:
            async for _ in ahead:
                scope.cancel()
    assert scope.cancelled_caught
    assert source.closed


async def test_leaving_waits_for_the_call_that_runs(device: ta.Device) -> None:
    entered, go_on = threading.Event(), threading.Event()
    closed: list[bool] = []

    def source() -> Generator[Host, None, None]:
        try:
            yield np.ones(3)
            entered.set()
            go_on.wait(20)
            yield np.ones(3)
        finally:
            closed.append(go_on.is_set())

    left = trio.Event()

    async def program() -> None:
        async with ta.stream(device, source()) as ahead:
            await anext(ahead)
            await until(entered.is_set)
        left.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(program)
        await until(entered.is_set)
        await trio.testing.wait_all_tasks_blocked()
        assert not left.is_set()
        assert not closed
        go_on.set()
        await left.wait()
    assert closed == [True]


class Stubborn:
    """An iterator with a failing end."""

    def __iter__(self) -> Stubborn:
        return self

    def __next__(self) -> Host:
        return np.ones(3)

    def close(self) -> None:
        raise OSError("cannot be closed")


async def test_an_error_of_the_sources_end_is_raised_unless_there_is_another(device: ta.Device) -> None:
    with pytest.raises(OSError, match="cannot be closed"):
        async with ta.stream(device, Stubborn()) as ahead:
            await anext(ahead)
    with pytest.raises(KeyError, match="of the program"):
        async with ta.stream(device, Stubborn()) as ahead:
            await leave_by_error(ahead)


async def test_a_source_that_does_not_end_is_left_after_the_grace(system: ta.System) -> None:
    async def source() -> AsyncGenerator[Host, None]:
        try:
            while True:
                yield np.ones(3)
        finally:
            await trio.sleep(1000)  # noqa: ASYNC102  # it is left so

    options = ta.DeviceOptions(isolation="inline", close_grace=0.05)
    async with system.open_device(BACKEND, options=options) as device:
        with trio.fail_after(60):
            async with ta.stream(device, source()) as ahead:
                await anext(ahead)


async def test_several_tasks_share_the_batches(device: ta.Device) -> None:
    found: list[float] = []

    async def work(ahead: Any) -> None:
        found.extend([(await x.to_host())[0] async for x in ahead])

    async with ta.stream(device, batches(30)) as ahead, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(work, ahead)
    assert sorted(found) == [1000 * number for number in range(30)]


async def test_a_device_that_ends_is_an_error_at_its_place(device: ta.Device) -> None:
    await device.close()
    async with ta.stream(device, batches(3)) as ahead:
        with pytest.raises(ta.DeviceLostError):
            await anext(ahead)


async def test_batches_in_advance_outlive_a_worker(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process", retry=2)
    async with system.open_device(BACKEND, options=options) as device:
        async with ta.stream(device, batches(10)) as ahead:
            found: list[float] = []
            async for x in ahead:
                found.append((await x.to_host())[0])
                if len(found) == 3:
                    ta.testing.inject_fault(device, ta.devices.Put, kill=True)
        assert found == [1000 * number for number in range(10)]
        assert device.generation == 2


async def test_a_batch_in_flight_is_lost_with_its_worker_without_retry(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process")
    async with system.open_device(BACKEND, options=options) as device:
        ta.testing.inject_fault(device, ta.devices.Put, kill=True)
        async with ta.stream(device, batches(3)) as ahead:
            with pytest.raises(ta.ContextLostError) as caught:
                await anext(ahead)
        assert caught.value.__notes__[-1] == "stream: it was batch 0"


async def test_inline_batches_in_advance_are_lost_by_name(system: ta.System) -> None:
    made: list[int] = []

    def source() -> Generator[Host, None, None]:
        for number, batch in enumerate(batches(6)):
            made.append(number)
            yield batch

    async with (
        system.open_device(BACKEND, options=INLINE) as device,
        ta.stream(device, source(), depth=2) as ahead,
    ):
        # The third is asked for when the first was taken: both of the ring are on the device.
        first = await anext(ahead)
        await until(lambda: len(made) == 3)
        while (await device.statistics()).memory.blocks < 3:
            pass
        await device.synchronize()
        ta.testing.poison(device)
        with trio.fail_after(60):
            while device.generation == 1:
                with contextlib.suppress(ta.ContextPoisonedError):
                    await device.zeros(3)
        with pytest.raises(ta.StaleRefError):
            await first.to_host()
        for _ in range(2):
            with pytest.raises(ta.StaleRefError):
                await (await anext(ahead)).to_host()
        assert [(await x.to_host())[0] async for x in ahead] == [3000, 4000, 5000]


@pytest.mark.skipif(BACKEND != "cpu", reason="the same on every device")
def test_ctrl_c_ends_the_program(make: Make) -> None:
    source = Closed(1000)

    async def program() -> None:
        async with (
            ta.open_system("test") as system,
            system.open_device("cpu", options=INLINE) as device,
            ta.stream(device, make(source)) as ahead,
        ):
            number = 0
            async for x in ahead:
                assert (await x.to_host())[0] == 1000 * number
                number += 1
                if number == 3:
                    os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)) as caught:  # noqa: ASYNC401  # any group will do
        trio.run(program)
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert type(error) is KeyboardInterrupt
    assert source.closed
