"""`Cache`: who computes, what is kept and for how long, arrays that are lost, and bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import trio
from chosen import NAME
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.agents import Cache
from trio_accel.patterns import ModelOutputError

any_cache: Any = Cache


async def double(item: int) -> int:
    await trio.lowlevel.checkpoint()
    return 2 * item


class Parked:
    """A model whose calls wait for the test."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.gate = trio.Event()

    async def __call__(self, item: Any) -> Any:
        self.items.append(item)
        await self.gate.wait()
        return [item]


async def test_many_calls_at_once_compute_once_and_get_one_object() -> None:
    model = Parked()
    cache = Cache(model, max_entries=10)
    results: list[Any] = []

    async def ask() -> None:
        results.append(await cache("a"))

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        model.gate.set()
    assert model.items == ["a"]
    assert len(results) == 20
    assert len({id(result) for result in results}) == 1
    counts = cache.statistics()
    assert (counts.computed, counts.shared, counts.hits) == (1, 19, 0)


async def test_waiting_calls_take_over_in_order() -> None:
    model = Parked()
    cache = Cache(model, max_entries=10, key=len)
    scopes = [trio.CancelScope() for _ in range(4)]

    async def ask(number: int) -> None:
        with scopes[number]:
            await cache("abcd"[number])

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(ask, number)
            await wait_all_tasks_blocked()
        scopes[2].cancel()
        await wait_all_tasks_blocked()
        assert model.items == ["a"]
        scopes[0].cancel()
        await wait_all_tasks_blocked()
        scopes[1].cancel()
        await wait_all_tasks_blocked()
        assert model.items == ["a", "b", "d"]
        model.gate.set()
    assert await cache("x") == ["d"]


async def test_a_computing_call_and_a_waiting_call_may_leave_at_once() -> None:
    model = Parked()
    cache = Cache(model, max_entries=10)
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                inner.start_soon(cache, 1)
                inner.start_soon(cache, 1)
                await wait_all_tasks_blocked()
                scope.cancel()
        nursery.start_soon(cache, 1)
        await wait_all_tasks_blocked()
        model.gate.set()
    assert cache.statistics().entries == 1


async def test_a_value_forgotten_during_its_computation_is_not_kept() -> None:
    first, second = Parked(), Parked()
    models = iter([first, second])

    async def model(item: Any) -> Any:
        return await next(models)(item)

    cache: Any = Cache(model, max_entries=10)
    results: list[Any] = []

    async def ask() -> None:
        results.append(await cache("a"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        cache.forget("a")
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        # The older computation ends while the newer one runs, and removes nothing of it.
        first.gate.set()
        await wait_all_tasks_blocked()
        assert (cache.statistics().entries, cache.statistics().nbytes) == (0, 0)
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        assert cache.statistics().shared == 1
        second.gate.set()
    assert (cache.statistics().entries, cache.statistics().computed) == (1, 2)
    assert await cache("a") is results[1] is results[2] is not results[0]


async def test_each_waiting_call_gets_an_error_of_its_own() -> None:
    gate = trio.Event()

    async def fail(item: int) -> int:
        await gate.wait()
        raise OSError(item)

    cache = Cache(fail, max_entries=3)
    errors: list[OSError] = []

    async def ask() -> None:
        try:
            await cache(7)
        except OSError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        gate.set()
    assert [error.args for error in errors] == [(7,)] * 3
    assert len({id(error) for error in errors}) == 3
    assert cache.statistics().entries == 0


async def test_a_released_array_is_computed_again(device: ta.Device) -> None:
    made: list[ta.AccelRef] = []

    async def put(item: int) -> dict[str, tuple[ta.AccelRef, int]]:
        made.append(await device.put(np.full(3, item)))
        return {"array": (made[-1], item)}

    cache = Cache(put, max_entries=3)
    assert (await cache(1))["array"][0] is made[0]
    assert (await cache(1))["array"][0] is made[0]
    assert cache.statistics().nbytes >= made[0].nbytes
    made[0].release()
    np.testing.assert_array_equal(await (await cache(1))["array"][0].to_host(), [1, 1, 1])
    assert len(made) == 2


async def test_an_array_of_a_closed_device_is_computed_again(system: ta.System) -> None:
    devices = [await system.open_device(NAME, name=name) for name in ("one", "two")]
    usable = list(devices)

    async def put(item: float) -> ta.AccelRef:
        return await usable[0].put(np.array([item]))

    cache = Cache(put, max_entries=3)
    assert (await cache(2.0)).device is devices[0]
    await usable.pop(0).close()
    assert (await cache(2.0)).device is devices[1]


@pytest.mark.no_device
async def test_an_array_lost_with_its_context_is_computed_again(system: ta.System) -> None:
    async with system.open_device("cpu", options=ta.DeviceOptions(isolation="inline")) as device:
        cache = Cache[float, ta.AccelRef](lambda item: device.put(np.array([item])), max_entries=3)
        first = await cache(2.0)
        ta.testing.poison(device)
        with trio.fail_after(60):
            while device.generation == 1:
                with suppress(ta.AccelError):
                    await device.put(np.ones(1))
        second = await cache(2.0)
        assert second is not first
        assert await second.item() == 2.0


async def test_a_model_that_asks_for_its_own_key_is_refused() -> None:
    async def ask_again(item: int) -> int:
        return await cache(item)

    cache = Cache[int, int](ask_again, max_entries=3)
    with pytest.raises(RuntimeError, match="would never end"):
        await cache(1)


async def test_a_model_may_ask_for_another_key() -> None:
    async def factorial(item: int) -> int:
        return item * await cache(item - 1) if item else await double(1) // 2

    cache = Cache[int, int](factorial, max_entries=30)
    assert await cache(20) == math.factorial(20)
    assert await cache(12) == math.factorial(12)
    assert cache.statistics().computed == 21


@pytest.mark.parametrize("key", [[1], {}, {1}, np.ones(2), (1, [2])], ids=str)
async def test_keys_that_cannot_be_hashed(key: Any) -> None:
    cache = Cache[Any, int](double, max_entries=3)
    with pytest.raises(TypeError, match=r"Cache: a key must be hashable.*give key="):
        await cache(key)
    with pytest.raises(TypeError, match="Cache: a key must be hashable"):
        cache.forget(key)


async def test_a_model_that_returns_nothing() -> None:
    async def forgetful(item: int) -> None:
        await double(item)

    with pytest.raises(ModelOutputError, match="Cache: the model returned None"):
        await Cache(forgetful, max_entries=3)(1)


async def test_a_synchronous_model_is_refused() -> None:
    with pytest.raises(TypeError, match="must be async"):
        await any_cache(lambda item: item, max_entries=3)(1)


@pytest.mark.parametrize("cost", [-1, math.nan, math.inf, "1", None])
async def test_invalid_costs_are_refused(cost: Any) -> None:
    cache = Cache(double, max_entries=3, cost=lambda value: cost)
    with pytest.raises((TypeError, ValueError), match="Cache: the cost of a value must be a"):
        await cache(1)
    assert cache.statistics().entries == 0


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: any_cache(double, max_entries=0), "Cache: max_entries must be at least 1, got 0"),
        (lambda: any_cache(double, max_entries=1.5), "Cache: max_entries must be an integer, got 1.5"),
        (lambda: any_cache(double, max_entries=1, max_bytes=0), "Cache: max_bytes must be at least 1, got 0"),
        (
            lambda: any_cache(double, max_entries=1, ttl=0),
            "Cache: ttl must be a finite number above 0, got 0",
        ),
        (
            lambda: any_cache(double, max_entries=1, ttl=math.nan),
            "Cache: ttl must be a finite number above 0",
        ),
        (lambda: any_cache(double, max_entries=1, key=3), "Cache: key must be"),
        (lambda: any_cache(3, max_entries=1), "a model is an async callable"),
    ],
)
def test_wrong_options(make: Callable[[], object], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        make()
