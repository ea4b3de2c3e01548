"""Results of many items in their order: bounds, errors, cancellation."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import outcome
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.patterns import Submit, SubmitActor, open_results


async def later(item: int) -> int:
    """Items end in another order than they begin."""
    # clock: a mock clock of the caller, or work of any duration
    await trio.sleep(random.Random(item).random())
    if item % 7 == 3:
        raise LookupError(item)
    return item * item


async def test_results_arrive_in_the_order_of_the_items(autojump_clock: MockClock) -> None:
    async with open_results(later, (item for item in range(100) if item % 7 != 3)) as results:
        assert [result async for result in results] == [item * item for item in range(100) if item % 7 != 3]


async def test_an_error_arrives_in_its_position_and_the_next_result_after_it(
    autojump_clock: MockClock,
) -> None:
    async with open_results(later, range(6)) as results:
        assert [await anext(results) for _ in range(3)] == [0, 1, 4]
        with pytest.raises(LookupError, match="3"):
            await anext(results)
        assert [result async for result in results] == [16, 25]
        with pytest.raises(StopAsyncIteration):
            await anext(results)


async def test_a_loop_over_results_ends_with_the_error_unchanged(autojump_clock: MockClock) -> None:
    seen: list[int] = []
    with pytest.raises(LookupError, match="3"):  # noqa: PT012  # in no group
        async with open_results(later, range(6)) as results:
            async for result in results:
                seen.append(result)  # noqa: PERF401  # those before the error count
    assert seen == [0, 1, 4]


async def test_outcomes(autojump_clock: MockClock) -> None:
    async with open_results(later, range(8), outcomes=True) as results:
        found = [result async for result in results]
    assert [result.value if isinstance(result, outcome.Value) else result.error.args for result in found] == [
        *(0, 1, 4, (3,), 16, 25, 36, 49)
    ]


async def test_no_more_items_are_taken_than_the_limit(autojump_clock: MockClock) -> None:
    taken = running = most = 0

    def items() -> Iterator[int]:
        nonlocal taken
        while True:
            taken += 1
            yield taken

    async def model(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(1)
        running -= 1
        return item

    async with open_results(model, items(), limit=5) as results:
        await trio.sleep(10)
        assert (taken, running, most) == (5, 0, 5)
        for read in range(1, 20):
            assert await anext(results) == read
            await wait_all_tasks_blocked()
            assert taken == 5 + read
    await wait_all_tasks_blocked()
    assert most == 5


async def test_open_requests_at_the_end_of_the_block_are_cancelled(autojump_clock: MockClock) -> None:
    begun: list[int] = []
    cancelled: list[int] = []

    async def model(item: int) -> int:
        begun.append(item)
        try:
            await trio.sleep(item)
        except trio.Cancelled:
            cancelled.append(item)
            raise
        return item

    async with open_results(model, range(10), limit=4) as results:
        assert await anext(results) == 0
        assert await anext(results) == 1
        await wait_all_tasks_blocked()
    assert begun == [0, 1, 2, 3, 4, 5]
    assert sorted(cancelled) == [2, 3, 4, 5]


async def test_a_cancelled_read_loses_no_result(autojump_clock: MockClock) -> None:
    async def model(item: int) -> int:
        await trio.sleep(1)
        return item

    found: list[int] = []
    async with open_results(model, range(5), limit=1) as results:
        while len(found) < 5:
            with trio.move_on_after(0.3):
                found.append(await anext(results))
    assert found == list(range(5))


async def test_later_items_and_a_failing_iteration(autojump_clock: MockClock) -> None:
    async def items() -> AsyncGenerator[int, None]:
        for item in range(3):
            await trio.sleep(1)
            yield item
        raise OSError("no more")

    for outcomes in (False, True):
        async with aclosing(items()) as source:
            read: Any = open_results(later, source, outcomes=outcomes)
            async with read as results:
                found = [await anext(results) for _ in range(3)]
                assert [each.value if outcomes else each for each in found] == [0, 1, 4]
                with pytest.raises(OSError, match="no more"):
                    await anext(results)
                with pytest.raises(StopAsyncIteration):
                    await anext(results)


class InOrder(SubmitActor[int, int]):
    """Notes the items as they come."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    async def call(self, item: int) -> int:
        self.seen.append(item)
        await trio.lowlevel.checkpoint()
        return item


async def test_a_submit_actor_gets_the_items_in_their_order(system: ta.System) -> None:
    seen: list[int] = []
    ref = await system.spawn(InOrder, seen)
    async with open_results(ref, range(300), limit=50) as results:
        assert [result async for result in results] == list(range(300))
    assert seen == list(range(300))
    assert await ref.ask(Submit(1)) == 1


untyped: Any = open_results


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: open_results(later, [], limit=0),
            ValueError,
            "open_results: limit must be at least 1, got 0",
        ),
        (lambda: untyped(later, 3), TypeError, "items must be an iterable or an async iterable, got int"),
        (lambda: untyped(3, []), TypeError, "a model is an async callable or the address of an actor"),
    ],
)
def test_bad_arguments(make: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
