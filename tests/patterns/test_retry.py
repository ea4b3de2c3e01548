"""Trying again, within a budget."""

from __future__ import annotations

import math
import random
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

import trio_accel as ta
from trio_accel.patterns import (
    CircuitOpenError,
    FairScheduler,
    FairSubmit,
    RateLimitError,
    RetryBudget,
    UnknownTenantError,
    retry,
    was_never_executed,
)

AT_ONCE = ta.Backoff(initial=0.0, base=0.0, jitter=0.0)


def of_actor(kind: type[ta.ActorError]) -> ta.ActorError:
    return kind("it said so", path="test/a")


NOT_BEGUN = [
    of_actor(ta.ActorStoppedError),
    of_actor(ta.ActorRestartingError),
    of_actor(ta.MailboxFullError),
    ta.QueueFullError("full"),
]
REFUSED = [
    of_actor(ta.AskCycleError),
    of_actor(UnknownTenantError),
    RateLimitError("too many", retry_after=1.0),
    CircuitOpenError("open", retry_after=1.0),
]
PERHAPS_EXECUTED = [
    of_actor(ta.ActorFailedError),
    ta.ContextPoisonedError("lost"),
    ta.CompletionTimeoutError("hung"),
    ta.InputFailedError("its input"),
]
FINAL = [
    ValueError("wrong"),
    OSError("the disk"),
    ta.DeviceLostError("gone"),
    ta.StaleRefError("gone"),
    ta.NotSupportedError("no"),
    ta.OutOfMemoryError("full", requested=2, free=1, total=1),
    ExceptionGroup("several", [of_actor(ta.MailboxFullError)]),
]


@attrs.define
class Model:
    """Fails with the errors in turn, then answers."""

    errors: list[Exception]
    calls: list[float] = attrs.field(factory=list[float])

    async def __call__(self, item: object) -> object:
        self.calls.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        if self.errors:
            raise self.errors.pop(0)
        return item


def plenty() -> RetryBudget:
    return RetryBudget(share=1.0, minimum=1000.0)


@pytest.mark.parametrize("error", NOT_BEGUN, ids=lambda error: type(error).__name__)
async def test_a_request_never_executed_is_tried_again(autojump_clock: MockClock, error: Exception) -> None:
    model = Model([error, error])
    assert was_never_executed(error)
    assert await retry(model, budget=plenty())(5) == 5
    assert len(model.calls) == 3


@pytest.mark.parametrize("error", REFUSED, ids=lambda error: type(error).__name__)
async def test_a_request_refused_for_good_is_not_tried_again(
    autojump_clock: MockClock, error: Exception
) -> None:
    model = Model([error])
    assert was_never_executed(error)
    with pytest.raises(type(error)):
        await retry(model, budget=plenty(), may_run_twice=True)(5)
    assert len(model.calls) == 1


@pytest.mark.parametrize("error", PERHAPS_EXECUTED, ids=lambda error: type(error).__name__)
async def test_a_request_possibly_executed_is_tried_again_only_if_allowed(
    autojump_clock: MockClock, error: Exception
) -> None:
    assert not was_never_executed(error)
    model = Model([error])
    with pytest.raises(type(error)):
        await retry(model, budget=plenty())(5)
    assert len(model.calls) == 1
    model = Model([error])
    assert await retry(model, budget=plenty(), may_run_twice=True)(5) == 5


@pytest.mark.parametrize("error", FINAL, ids=lambda error: type(error).__name__)
async def test_other_errors_are_raised_at_once(autojump_clock: MockClock, error: Exception) -> None:
    model = Model([error])
    assert not was_never_executed(error)
    with pytest.raises(type(error)) as caught:
        await retry(model, budget=plenty(), may_run_twice=True)(5)
    assert caught.value is error
    assert len(model.calls) == 1


async def test_the_program_may_define_safe_failures(autojump_clock: MockClock) -> None:
    model = Model([OSError("the disk"), OSError("the disk")])
    tries = retry(model, budget=plenty(), is_safe=lambda error: isinstance(error, OSError))
    assert await tries(5) == 5


async def test_the_last_error_is_raised_when_there_are_no_attempts_left(autojump_clock: MockClock) -> None:
    errors = [ta.QueueFullError(str(number)) for number in range(5)]
    model = Model(list(errors))
    with pytest.raises(ta.QueueFullError) as caught:
        await retry(model, budget=plenty(), attempts=4)(5)
    assert caught.value is errors[3]
    model = Model(list(errors))
    with pytest.raises(ta.QueueFullError):
        await retry(model, budget=plenty(), attempts=1)(5)
    assert len(model.calls) == 1


async def test_attempts_are_spaced_by_the_back_off(autojump_clock: MockClock) -> None:
    backoff = ta.Backoff(initial=1.0, base=2.0, factor=3.0, maximum=10.0, jitter=0.0)
    model = Model([ta.QueueFullError("full") for _ in range(4)])
    await retry(model, budget=plenty(), attempts=5, backoff=backoff)(5)
    assert model.calls == [0.0, 1.0, 3.0, 9.0, 19.0]


async def test_requests_that_failed_together_do_not_return_together(autojump_clock: MockClock) -> None:
    models = [Model([ta.QueueFullError("full")]) for _ in range(50)]
    budget = plenty()
    async with trio.open_nursery() as nursery:
        for model in models:
            nursery.start_soon(retry(model, budget=budget), 5)
    times = {model.calls[1] for model in models}
    assert len(times) == 50
    assert min(times) >= 0.025
    assert max(times) <= 0.075


async def test_a_late_attempt_is_not_waited_for(autojump_clock: MockClock) -> None:
    backoff = ta.Backoff(initial=5.0, base=5.0, jitter=0.0)
    model = Model([ta.QueueFullError("full")])
    with trio.fail_after(4.0), pytest.raises(ta.QueueFullError):
        await retry(model, budget=plenty(), backoff=backoff)(5)
    assert trio.current_time() == 0.0
    with trio.fail_after(6.0):
        model = Model([ta.QueueFullError("full")])
        assert await retry(model, budget=plenty(), backoff=backoff)(5) == 5


async def test_a_cancelled_call_is_not_tried_again(autojump_clock: MockClock) -> None:
    calls: list[object] = []

    async def hangs(item: object) -> None:
        calls.append(item)
        await trio.sleep_forever()

    with trio.move_on_after(1.0) as scope:
        await retry(hangs, budget=plenty(), is_safe=lambda error: True)(5)
    assert scope.cancelled_caught
    assert calls == [5]


async def test_a_loss_is_followed_by_no_storm(autojump_clock: MockClock) -> None:
    """1000 requests fail together, and continue failing: the model gets a tenth more, not three times."""
    budget = RetryBudget(share=0.1, minimum=1.0, within=10.0)
    calls = 0

    async def lost(item: object) -> None:
        nonlocal calls
        calls += 1
        await trio.sleep(0.5)
        raise ta.ContextPoisonedError("lost")

    tries = retry(lost, budget=budget, attempts=3, may_run_twice=True)
    failed = 0

    async def client() -> None:
        nonlocal failed
        try:
            await tries(5)
        except ta.ContextLostError:
            failed += 1

    async with trio.open_nursery() as nursery:
        for _ in range(1000):
            nursery.start_soon(client)
    assert failed == 1000
    assert calls == 1000 + 100 + 10
    assert budget.denied > 0


async def test_layers_with_one_budget_count_a_request_once(
    autojump_clock: MockClock, system: ta.System
) -> None:
    """Also when the inner one is in front of an actor. Without a budget, one would become 27 calls."""
    budget = RetryBudget(share=0.5, minimum=0.0)
    calls = 0

    async def fails(item: object) -> None:
        nonlocal calls
        calls += 1
        await trio.lowlevel.checkpoint()
        raise ta.QueueFullError("full")

    inner = retry(fails, budget=budget, backoff=AT_ONCE)
    fair: ta.Ref[FairScheduler[Any, Any]] = await system.spawn(FairScheduler, inner, max_in_flight=5)

    async def through_the_actor(item: object) -> object:
        result: object = await fair.ask(FairSubmit(item, tenant=1))
        return result

    middle = retry(through_the_actor, budget=budget, backoff=AT_ONCE)
    outer = retry(middle, budget=budget, backoff=AT_ONCE)
    for _ in range(100):
        with pytest.raises(ta.QueueFullError):
            await outer(1)
    assert calls == 150


@given(
    st.lists(st.tuples(st.sampled_from(["request", "retry", "sleep"]), st.integers(1, 30)), max_size=60),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.sampled_from([0.0, 0.5, 3.0]),
)
@settings(max_examples=200, deadline=None)
def test_retries_of_a_window_are_bounded(steps: list[tuple[str, int]], share: float, minimum: float) -> None:
    within = 10.0
    requests: list[float] = []
    retries: list[float] = []

    async def main() -> None:
        budget = RetryBudget(share=share, minimum=minimum, within=within)
        for kind, count in steps:
            if kind == "sleep":
                await trio.sleep(count / 4)
            for _ in range(count if kind == "request" else 0):
                budget.note_request()
                requests.append(trio.current_time())
            allowed = sum(budget.try_retry() for _ in range(count if kind == "retry" else 0))
            retries.extend([trio.current_time()] * allowed)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    for last in retries:
        # At least nine tenths of the window are looked at, and at most all of it.
        spent = sum(last - 0.9 * within < moment <= last for moment in retries)
        counted = sum(last - within < moment <= last for moment in requests)
        assert spent <= share * counted + minimum * within + 1e-6


async def test_a_budget_comes_back_with_time(autojump_clock: MockClock) -> None:
    budget = RetryBudget(share=0.0, minimum=0.5, within=10.0)
    assert budget.remaining == 5.0
    assert [budget.try_retry() for _ in range(6)] == [True] * 5 + [False]
    assert (budget.remaining, budget.denied) == (0.0, 1)
    await trio.sleep(10.0)
    assert [budget.try_retry() for _ in range(6)] == [True] * 5 + [False]


async def test_a_share_is_exact(autojump_clock: MockClock) -> None:
    for count in range(0, 300, 10):
        budget = RetryBudget(share=0.1, minimum=0.0)
        for _ in range(count):
            budget.note_request()
        assert sum(budget.try_retry() for _ in range(100)) == count // 10


async def test_the_memory_of_a_budget_is_bounded(autojump_clock: MockClock) -> None:
    budget = RetryBudget()
    source = random.Random(1)
    for _ in range(2000):
        budget.note_request()
        budget.try_retry()
        await trio.sleep(source.random())
        assert len(budget._counts._slots) <= 10  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"share": -0.1}, ValueError),
        ({"share": 1.1}, ValueError),
        ({"share": math.nan}, ValueError),
        ({"share": "1"}, TypeError),
        ({"minimum": -1.0}, ValueError),
        ({"minimum": math.nan}, ValueError),
        ({"minimum": math.inf}, ValueError),
        ({"within": 0.0}, ValueError),
        ({"within": math.inf}, ValueError),
        ({"within": math.nan}, ValueError),
    ],
)
def test_bad_budgets_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="must be"):
        RetryBudget(**options)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"attempts": 0}, ValueError),
        ({"attempts": 1.5}, TypeError),
        ({"budget": 3}, TypeError),
        ({"backoff": 1.0}, TypeError),
        ({"model": "model"}, TypeError),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    usual: dict[str, Any] = {"model": Model([]), "budget": RetryBudget()}
    with pytest.raises(error):
        retry(**{**usual, **arguments})
