"""The token bucket, against its closed formula in exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.patterns import FairScheduler, RateLimit, RateLimitError, Submit

# Quarters and powers of two: times on the clock are exact.
rates = st.sampled_from([0.5, 1.0, 4.0, 8.0])
bursts = st.sampled_from([1.0, 2.0, 5.0])
requests = st.lists(
    st.tuples(st.integers(0, 40).map(lambda n: n / 4), st.sampled_from([0.25, 0.5, 1.0])), max_size=30
)


def granted_at(rate: float, burst: float, requests: list[tuple[float, float]]) -> list[float]:
    """When each request has its tokens, first come, first served: the recursion of a bucket, in fractions."""
    level, now = Fraction(burst), Fraction(0)
    granted: list[float] = []
    for arrival, cost in requests:
        begun = max(now, Fraction(arrival))
        level = min(Fraction(burst), level + (begun - now) * Fraction(rate))
        wait = max(Fraction(0), (Fraction(cost) - level) / Fraction(rate))
        level += wait * Fraction(rate) - Fraction(cost)
        now = begun + wait
        granted.append(float(now))
    return granted


@given(rates, bursts, requests)
@settings(max_examples=150, deadline=None)
def test_tokens_arrive_at_the_times_of_the_formula(
    rate: float, burst: float, requests: list[tuple[float, float]]
) -> None:
    requests = sorted(requests, key=lambda one: one[0])
    granted: dict[int, float] = {}

    async def main() -> None:
        limit = RateLimit(rate, burst=burst)

        async def ask(number: int, cost: float) -> None:
            await limit.acquire(cost=cost)
            granted[number] = trio.current_time()

        async with trio.open_nursery() as nursery:
            for number, (arrival, cost) in enumerate(requests):
                await trio.sleep_until(arrival)
                nursery.start_soon(ask, number, cost)
                await wait_all_tasks_blocked()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert [granted[number] for number in range(len(requests))] == granted_at(rate, burst, requests)


@given(rates, bursts, requests)
@settings(max_examples=150, deadline=None)
def test_calls_without_waiting_are_refused_by_the_formula(
    rate: float, burst: float, requests: list[tuple[float, float]]
) -> None:
    requests = sorted(requests, key=lambda one: one[0])
    got: list[tuple[bool, float]] = []

    async def main() -> None:
        limit = RateLimit(rate, burst=burst)
        for arrival, cost in requests:
            await trio.sleep_until(arrival)
            delay = limit.delay(cost=cost)
            got.append((limit.try_acquire(cost=cost), delay))

    trio.run(main, clock=MockClock(autojump_threshold=0))
    level, now = Fraction(burst), Fraction(0)
    for (arrival, cost), (had, delay) in zip(requests, got, strict=True):
        level = min(Fraction(burst), level + (Fraction(arrival) - now) * Fraction(rate))
        now = Fraction(arrival)
        missing = max(Fraction(0), Fraction(cost) - level)
        assert had == (missing == 0)
        assert delay == float(missing / Fraction(rate))
        level -= Fraction(cost) if had else 0


async def test_no_stretch_of_time_has_more_than_burst_and_rate_allow(autojump_clock: MockClock) -> None:
    limit = RateLimit(3.0, burst=4.0)
    times: list[float] = []

    async def ask() -> None:
        while trio.current_time() < 20:
            await limit.acquire()
            times.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(ask)
    for first, begun in enumerate(times):
        for last in range(first, len(times)):
            assert last - first + 1 <= 4.0 + 3.0 * (times[last] - begun) + 1e-9
    assert len(times) == pytest.approx(4 + 3 * 20, abs=6)


async def test_who_waits_is_not_overtaken(autojump_clock: MockClock) -> None:
    limit = RateLimit(1.0, burst=4.0)
    order: list[str] = []

    async def ask(name: str, cost: float) -> None:
        await limit.acquire(cost=cost)
        order.append(name)

    async with trio.open_nursery() as nursery:
        await limit.acquire(cost=2.0)
        nursery.start_soon(ask, "large", 4.0)
        await wait_all_tasks_blocked()
        nursery.start_soon(ask, "small", 1.0)
        await wait_all_tasks_blocked()
        assert not limit.try_acquire(cost=1.0)
        assert limit.try_acquire("another key")
    assert order == ["large", "small"]
    assert trio.current_time() == 3.0


async def test_a_cancelled_one_takes_nothing_and_the_next_moves_up(autojump_clock: MockClock) -> None:
    limit = RateLimit(1.0, burst=4.0)
    await limit.acquire(cost=4.0)
    async with trio.open_nursery() as nursery:

        async def next_one() -> None:
            await limit.acquire(cost=2.0)
            assert trio.current_time() == 2.0

        with trio.move_on_after(1.0) as scope:
            nursery.start_soon(next_one)
            await limit.acquire(cost=4.0)
        assert scope.cancelled_caught
    with trio.CancelScope() as cancelled:
        cancelled.cancel()
        await limit.acquire(cost=1.0)
    assert limit.delay(cost=4.0) == 4.0


async def test_each_key_has_its_own_tokens(autojump_clock: MockClock) -> None:
    limit = RateLimit(1.0, burst=2.0)
    assert [limit.try_acquire("a") for _ in range(3)] == [True, True, False]
    assert [limit.try_acquire("b") for _ in range(3)] == [True, True, False]
    await trio.sleep(1.0)
    assert [limit.try_acquire("a") for _ in range(2)] == [True, False]


@pytest.mark.slow
async def test_keys_are_forgotten_when_their_buckets_are_full(autojump_clock: MockClock) -> None:
    limit = RateLimit(1.0, burst=1.0, max_keys=500)
    for number in range(20_000):
        assert limit.try_acquire(f"key {number}")
        await trio.sleep(0.01)
        assert limit.keys <= 500


async def test_keys_are_bounded_when_all_arrive_at_once(autojump_clock: MockClock) -> None:
    limit = RateLimit(1.0, burst=10.0, max_keys=100)
    assert limit.try_acquire("greedy", cost=10.0)
    for number in range(5000):
        assert limit.try_acquire(f"key {number}")
        assert limit.keys <= 100
    # It misses the most tokens, so it is the last to be forgotten.
    assert not limit.try_acquire("greedy")


async def test_who_waits_is_not_forgotten(autojump_clock: MockClock) -> None:
    limit = RateLimit(1.0, burst=1.0, max_keys=10)
    async with trio.open_nursery() as nursery:
        for number in range(30):
            assert limit.try_acquire(number)
            nursery.start_soon(limit.acquire, number)
            await wait_all_tasks_blocked()
        assert limit.keys == 30
        assert not any(limit.try_acquire(number) for number in range(30))
    assert trio.current_time() == 1.0
    for number in range(30, 200):
        limit.try_acquire(number)
    assert limit.keys <= 12


async def double(item: float) -> float:
    return 2 * item


async def test_a_model_that_waits(autojump_clock: MockClock) -> None:
    limit = RateLimit(1.0, burst=2.0)
    model = limit.wrap(double, cost=lambda item: item)
    assert [await model(2.0), await model(2.0)] == [4.0, 4.0]
    assert trio.current_time() == 2.0


async def test_a_refusing_model_reports_when_to_ask_again(autojump_clock: MockClock) -> None:
    limit = RateLimit(0.5, burst=1.0)
    model = limit.wrap(double, key=int, wait=False)
    assert await model(3.0) == 6.0
    with pytest.raises(RateLimitError, match="no 1 tokens for 3: ask again in 2 s") as caught:
        await model(3.0)
    assert caught.value.retry_after == 2.0
    assert await model(4.0) == 8.0
    await trio.sleep(2.0)
    assert await model(3.0) == 6.0


async def test_a_submit_actor_may_be_the_model_and_have_it(
    autojump_clock: MockClock, system: ta.System
) -> None:
    inner: ta.Ref[FairScheduler[Any, Any]] = await system.spawn(FairScheduler, double, max_in_flight=1)
    model = RateLimit(1.0).wrap(inner)
    outer: ta.Ref[FairScheduler[Any, Any]] = await system.spawn(FairScheduler, model, max_in_flight=1)
    assert [await outer.ask(Submit(n)) for n in range(3)] == [0, 2, 4]
    assert trio.current_time() == 2.0


async def test_a_block_takes_one_token(autojump_clock: MockClock) -> None:
    limit = RateLimit(1.0)
    for _ in range(3):
        async with limit:
            pass
    assert trio.current_time() == 2.0


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, -math.inf, 1e-7, 1e10, 10**400])
def test_bad_rates_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"the rate (must be|is too large)"):
        RateLimit(value)
    with pytest.raises(ValueError, match=r"the burst (must be|is too large)"):
        RateLimit(1.0, burst=value)


@pytest.mark.parametrize("value", ["1", None, True, 1j])
def test_infinite_and_invalid_numbers_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="the rate must be a number"):
        RateLimit(value)


@pytest.mark.parametrize("cost", [0, -1.0, math.nan, math.inf, 2.5])
async def test_bad_costs_are_refused(autojump_clock: MockClock, cost: float) -> None:
    limit = RateLimit(1.0, burst=2.0)
    ways: list[Callable[..., object]] = [limit.try_acquire, limit.delay]
    for way in ways:
        with pytest.raises(ValueError, match="the cost must be a finite number above 0 and at most 2"):
            way(cost=cost)
    with pytest.raises(ValueError, match="the cost"):
        await limit.acquire(cost=cost)
    assert limit.try_acquire(cost=2.0)


def test_bad_limits_of_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="max_keys"):
        RateLimit(1.0, max_keys=0)
    with pytest.raises(TypeError, match="a model is"):
        RateLimit(1.0).wrap(3)  # type: ignore[arg-type]  # what it is about
