"""A hash map against a dict: all keys, any order of calls, full tables, kills and cancellations."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import pytest
import trio
from cancel_at import CancelAt, cancelled_at_each_step
from chosen import BACKEND
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from interrupter import Interrupter

import trio_accel as ta
from trio_accel.backends import resolve
from trio_accel.tables import HashMap, TableFullError
from trio_accel.testing import inject_fault

RUNS_KERNELS = resolve(BACKEND)[1].runs_kernels
LEAST, MOST = -(2**63), 2**63 - 1
# Keys that a table might keep for itself, and more than one has room for.
POOL = np.array([LEAST, LEAST + 1, -2, -1, 0, 1, 2, 3, 7, 1 << 32, MOST - 1, MOST])
KEYS = st.lists(st.sampled_from(POOL.tolist()), max_size=9)
KILLS = ta.DeviceOptions(
    isolation="process", retry=1, intensity=ta.Intensity(10_000, 1.0), backoff=ta.Backoff(base=0.0)
)
# The parts of an insertion.
STEPS = (
    ("jit.hash_stamp", "tables.HashMap", "arrays.count_nonzero")
    if RUNS_KERNELS
    else ("tables.HashMap", "arrays.Compress", "arrays.take")
)

Model: TypeAlias = dict[int, int]


def ints(keys: list[int]) -> np.ndarray[Any, Any]:
    return np.array(keys, np.int64)


async def contents(table: HashMap) -> Model:
    """All that the map has of the pool."""
    values, found = await table.lookup(POOL, default=-5)
    numbers, are_there = await values.to_host(), await found.to_host()
    assert np.all(numbers[~are_there] == -5)
    return dict(zip(POOL[are_there].tolist(), numbers[are_there].tolist(), strict=True))


class Life(RuleBasedStateMachine):
    """The events of a map, in any order. It runs in a thread next to Trio's."""

    device: ta.Device
    kills: bool

    @initialize(capacity=st.integers(1, 9))
    def begin(self, capacity: int) -> None:
        self.table, self.model, self.number = HashMap(self.device, capacity), dict[int, int](), 0

    @rule(keys=KEYS)
    def insert(self, keys: list[int]) -> None:
        values = list(range(self.number, self.number + len(keys)))
        self.number += len(keys)
        after = self.model | dict(zip(keys, values, strict=True))
        try:
            new = trio.from_thread.run(self.ask, partial(self.table.insert, ints(keys), ints(values)))
        except TableFullError:
            assert len(after) > self.table.capacity
        else:
            assert len(after) <= self.table.capacity
            assert new == len(after) - len(self.model)
            self.model = after

    @rule(keys=KEYS)
    def erase(self, keys: list[int]) -> None:
        erased = trio.from_thread.run(self.ask, partial(self.table.erase, ints(keys)))
        assert erased == len(self.model.keys() & keys)
        self.model = {key: value for key, value in self.model.items() if key not in keys}

    @rule(capacity=st.one_of(st.none(), st.integers(1, 9)))
    def rehash(self, capacity: int | None) -> None:
        before = self.table.capacity
        try:
            trio.from_thread.run(self.ask, partial(self.table.rehash, capacity))
        except TableFullError:
            assert capacity is not None
            assert len(self.model) > capacity
            assert self.table.capacity == before
        else:
            assert self.table.capacity == capacity or capacity is None

    @rule(keys=KEYS, step=st.integers(1, 40))
    def leave(self, keys: list[int], step: int) -> None:
        """The task that inserts is cancelled somewhere: all of it took place, or nothing."""
        before = self.model
        trio.from_thread.run(self.cancelled, keys, step)
        if self.model == before:
            self.model = trio.from_thread.run(contents, self.table)
            assert self.model in (before, before | dict.fromkeys(keys, 0))

    async def cancelled(self, keys: list[int], step: int) -> None:
        with trio.CancelScope() as scope:
            instrument = CancelAt(scope, step)
            trio.lowlevel.add_instrument(instrument)
            try:
                await self.table.insert(ints(keys), np.zeros(len(keys), np.int64))
            except TableFullError:
                await trio.lowlevel.checkpoint()
            finally:
                trio.lowlevel.remove_instrument(instrument)

    async def ask(self, call: Callable[[], Awaitable[Any]]) -> Any:
        if self.kills:
            inject_fault(self.device, STEPS[self.number % 3], kill=True)
        return await call()

    @invariant()
    def is_as_the_model(self) -> None:
        if hasattr(self, "table"):
            assert trio.from_thread.run(contents, self.table) == self.model
            assert len(self.table) == len(self.model)
            assert 0 <= self.table.load_factor <= 0.75
            keys, values = trio.from_thread.run(self.items)
            assert dict(zip(keys, values, strict=True)) == self.model
            assert keys == sorted(keys)

    async def items(self) -> list[list[int]]:
        return [(await one.to_host()).tolist() for one in await self.table.items()]


@pytest.mark.parametrize("kills", [False, True])
def test_any_order(kills: bool) -> None:
    async def main() -> None:
        options = KILLS if kills else ta.DeviceOptions(isolation="inline")
        async with (
            ta.open_system("test") as system,
            system.open_device(BACKEND, options=options) as Life.device,
        ):
            Life.kills = kills
            wide = settings(max_examples=3 if kills else 40, stateful_step_count=8 if kills else 20)
            await trio.to_thread.run_sync(partial(run_state_machine_as_test, Life, settings=wide))
            assert (Life.device.generation > 1) == kills

    trio.run(main)


async def test_many_keys_with_equal_ones(device: ta.Device) -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.integers(LEAST, MOST, 30_000), rng.random(30_000)
    keys[rng.integers(0, 30_000, 9_000)] = keys[:9_000]
    expected = dict(zip(keys.tolist(), values.tolist(), strict=True))
    table = HashMap(device, len(expected), "float64")
    assert await table.insert(await device.put(keys), values) == len(expected) == len(table)
    others = np.concatenate([keys, rng.integers(LEAST, MOST, 30_000)]).reshape(2, 100, 300)
    found = await table.lookup(others, default=np.nan)
    wanted = [expected.get(key, np.nan) for key in others.flat]
    np.testing.assert_array_equal(await found.values.to_host(), np.reshape(wanted, others.shape))
    np.testing.assert_array_equal(await found.found.to_host(), ~np.isnan(wanted).reshape(others.shape))
    # All occupied slots belong to keys: they may have other values.
    assert await table.insert(keys, values[::-1].copy()) == 0


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "float16", "bfloat16", "uint64", "complex64"])
async def test_values_of_any_dtype(device: ta.Device, dtype: str) -> None:
    values = np.array([0, 1, 1, 0, 1]).astype(ta.DType.of(dtype).dtype)
    table = HashMap(device, 5, dtype)
    await table.insert(np.arange(5), values)
    found = await table.lookup(np.arange(6), default=1)
    assert found.values.dtype == ta.DType.of(dtype) == table.dtype
    np.testing.assert_array_equal(await found.values.to_host(), np.append(values, values[1]))


async def test_views_and_calls_are_operands(device: ta.Device) -> None:
    table = HashMap(device, 10)
    x = await device.put(np.arange(12).reshape(3, 4))
    await table.insert(x[:, 1], x[:, 2])
    values, _ = await table.lookup(x[:, ::2] + 1)
    np.testing.assert_array_equal(await values.to_host(), [[2, 0], [6, 0], [10, 0]])
    assert await table.erase(x.T[1]) == 3
    assert await table.insert(x[:0, 0], x[:0, 0]) == await table.erase(np.zeros(0, np.int64)) == 0
    assert (await table.lookup(np.zeros((2, 0), np.int64))).values.shape == (2, 0)


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    table, three = HashMap(device, 10, "float64"), np.arange(3)
    refused: list[tuple[Callable[[], Awaitable[object]], type[Exception], str]] = [
        (
            lambda: table.insert(three * np.nan, three * 1.0),
            TypeError,
            "keys must have dtype int64, got float64; use cast",
        ),
        (lambda: table.lookup(three.astype(np.int32)), TypeError, "keys must have dtype int64, got int32"),
        (lambda: table.erase(cast("Any", [1])), TypeError, "keys must be an AccelRef or a NumPy array"),
        (lambda: table.insert(three, three), TypeError, "values must be float64, got int64; use cast"),
        (lambda: table.insert(three[:2], three * 1.0), ValueError, "keys have shape .2,., and values .3,."),
        (lambda: table.lookup(three, 1j), TypeError, "default 1j is complex, the array is float64"),
        (lambda: HashMap(device, 3).lookup(three, 0.5), ValueError, "default 0.5 is not an integer"),
        (lambda: table.rehash(0), ValueError, "capacity must be at least 1, got 0"),
        (lambda: table.insert(np.arange(11), np.zeros(11)), TableFullError, "11 new keys beside 0 are more"),
    ]
    for ask, error, told in refused:
        with pytest.raises(error, match=rf"^tables\.HashMap.*: {told}"):
            await ask()
    assert len(table) == 0
    for wrong in (0, -1, True, 2.5, "2"):
        with pytest.raises((TypeError, ValueError), match="HashMap: capacity must be"):
            HashMap(device, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="HashMap: device must be an open Device, got str"):
        HashMap("cpu", 3)  # type: ignore[arg-type]


async def test_tasks_that_insert_at_once(device: ta.Device) -> None:
    table = HashMap(device, 400)

    async def insert(first: int) -> None:
        await table.insert(np.arange(first, first + 10), np.full(10, first))

    async with trio.open_nursery() as nursery:
        for first in range(0, 400, 10):
            nursery.start_soon(insert, first)
    assert len(table) == 400
    values, _ = await table.lookup(np.arange(400))
    np.testing.assert_array_equal(await values.to_host(), np.arange(400) // 10 * 10)


async def test_a_cancelled_call_takes_place_as_a_whole_or_not_at_all(device: ta.Device) -> None:
    table = HashMap(device, 100)
    await table.insert(POOL, POOL)
    expected = {key: int(key) for key in POOL.tolist()}
    count = 0

    async def attempt() -> None:
        await table.erase(POOL[::2])
        await table.insert(POOL[::2], POOL[::2])

    async for is_cancelled in cancelled_at_each_step(attempt):
        now = await contents(table)
        assert now in (expected, {key: key for key in POOL[1::2].tolist()})
        await table.insert(POOL[::2], POOL[::2])
        count += is_cancelled
    assert count > 4
    assert await contents(table) == expected


@pytest.mark.parametrize("step", STEPS)
async def test_a_loss_without_a_retry_changes_nothing(system: ta.System, step: str) -> None:
    options = ta.DeviceOptions(isolation="process", backoff=ta.Backoff(base=0.0))
    async with system.open_device(BACKEND, options=options) as device:
        table = HashMap(device, 3)
        await table.insert(np.array([1, 2]), np.array([10, 20]))
        inject_fault(device, step, kill=True)
        with pytest.raises(ta.ContextLostError):
            await table.insert(np.array([2, 3]), np.array([21, 30]))
        assert await contents(table) == {1: 10, 2: 20}
        await table.insert(np.array([2, 3]), np.array([21, 30]))
        assert await contents(table) == {1: 10, 2: 21, 3: 30}
        assert device.generation == 2


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "cpu", reason="no driver is to be met in the middle")
def test_ctrl_c_at_any_line_from_which_the_program_continues() -> None:
    before, after, hits = {1: 10, 2: 20}, {1: 10, 2: 20, 4: 40, 5: 50, 6: 60}, 0

    async def attempt(interrupter: Interrupter) -> bool:
        async with ta.open_system("test") as system, system.open_device("cpu") as device:
            table, is_hit = HashMap(device, 5), False
            await table.insert(np.array([1, 2, 3]), np.array([10, 20, 30]))
            await table.erase(np.array([3]))
            sys.settrace(interrupter)
            try:
                await table.insert(np.array([4, 5, 6]), np.array([40, 50, 60]))
                await table.rehash(40)
                await table.rehash(6)
                # clock: any moment will do
                await trio.sleep(0.001)
            except KeyboardInterrupt:
                is_hit = True
            finally:
                sys.settrace(None)
            values, _ = await table.lookup(np.arange(8))
            found = {key: value for key, value in enumerate((await values.to_host()).tolist()) if value}
            assert found in (before, after)
            assert len(table) == len(found)
            room = table.capacity - len(table)
            assert await table.insert(np.arange(100, 100 + room), np.arange(room)) == room
            with pytest.raises(TableFullError):
                await table.insert(np.array([-1]), np.array([-1]))
            return is_hit

    whole = Interrupter(("tables",), 0)
    assert not trio.run(attempt, whole)
    assert whole.lines > 60
    for at in range(1, whole.lines):
        hits += trio.run(attempt, Interrupter(("tables",), at))
    assert hits == whole.lines - 1


async def test_keys_of_another_device(system: ta.System) -> None:
    async with system.open_device(BACKEND) as device, system.open_device("cpu", name="other") as other:
        table = HashMap(device, 3)
        with pytest.raises(ValueError, match=r"keys is on .*other, this runs on"):
            await table.lookup(await other.put(POOL))
