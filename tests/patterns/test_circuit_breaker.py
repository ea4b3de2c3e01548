"""The circuit breaker, against a small model of its page."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.patterns import (
    CircuitBreaker,
    CircuitOpenError,
    CircuitState,
    FairScheduler,
    ModelOutputError,
    RateLimitError,
    Submit,
    UnknownTenantError,
    is_failure,
)

SHARE, CALLS, WITHIN, OPEN_FOR = 0.5, 4, 10.0, 5.0


class BoomError(Exception):
    pass


async def act(what: str) -> str:
    """A model that follows its item."""
    await trio.lowlevel.checkpoint()
    if what == "fail":
        raise BoomError
    if what == "wrong":
        raise ValueError("the caller's")
    if what == "hang":
        await trio.sleep_forever()
    return what


@attrs.define
class Expected:
    """The rules of the page, as plainly as possible: every call is remembered for ever."""

    state: CircuitState = CircuitState.CLOSED
    since: float = 0.0
    ended: list[tuple[int, bool]] = attrs.field(factory=list[tuple[int, bool]])

    def at(self, now: float) -> CircuitState:
        if self.state is CircuitState.OPEN and now >= self.since + OPEN_FOR:
            self.state = CircuitState.HALF_OPEN
        return self.state

    def end(self, now: float, *, has_failed: bool) -> None:
        if self.state is CircuitState.HALF_OPEN:
            self.ended.clear()
            self.state, self.since = (CircuitState.OPEN, now) if has_failed else (CircuitState.CLOSED, now)
            return
        # Time is counted in tenths of the window.
        tenth = math.floor(now / (WITHIN / 10))
        self.ended.append((tenth, has_failed))
        recent = [failed for when, failed in self.ended if when > tenth - 10]
        if has_failed and len(recent) >= CALLS and sum(recent) / len(recent) >= SHARE:
            self.ended.clear()
            self.state, self.since = CircuitState.OPEN, now


def breaker_of(**options: Any) -> CircuitBreaker:
    usual: dict[str, Any] = {"share": SHARE, "calls": CALLS, "within": WITHIN, "open_for": OPEN_FOR}
    return CircuitBreaker(**{**usual, **options})


steps = st.lists(
    st.tuples(st.sampled_from(["work", "work", "fail", "fail", "wrong", "cancel"]), st.integers(0, 12)),
    max_size=80,
)


@given(steps)
@settings(max_examples=300, deadline=None)
def test_it_behaves_as_its_page_describes(steps: list[tuple[str, int]]) -> None:
    refusals: list[tuple[CircuitState, float]] = []

    async def main() -> None:
        breaker, expected = breaker_of(), Expected()
        model = breaker.wrap(act)
        for what, pause in steps:
            await trio.sleep(pause / 4)
            now = trio.current_time()
            state = expected.at(now)
            assert breaker.state is state
            with trio.CancelScope() as scope:
                if what == "cancel":
                    scope.cancel()
                try:
                    await model(what)
                    assert state is not CircuitState.OPEN
                    expected.end(now, has_failed=False)
                except CircuitOpenError as error:
                    refusals.append((state, error.retry_after - (expected.since + OPEN_FOR - now)))
                except BoomError:
                    expected.end(now, has_failed=True)
                except ValueError:
                    expected.end(now, has_failed=False)
            assert breaker.state is expected.at(now)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert set(refusals) <= {(CircuitState.OPEN, 0.0)}


async def opened(breaker: CircuitBreaker) -> None:
    """Open a breaker."""
    for _ in range(CALLS):
        with suppress(BoomError):
            await breaker.wrap(act)("fail")
    assert breaker.state is CircuitState.OPEN


async def test_one_call_at_a_time_probes(autojump_clock: MockClock) -> None:
    breaker = breaker_of()
    model = breaker.wrap(act)
    await opened(breaker)
    await trio.sleep(OPEN_FOR)
    assert breaker.state is CircuitState.HALF_OPEN
    async with trio.open_nursery() as nursery:
        nursery.start_soon(model, "hang")
        await wait_all_tasks_blocked()
        for _ in range(3):
            with pytest.raises(CircuitOpenError, match="half-open") as caught:
                await model("work")
            assert caught.value.retry_after == 0.0
        nursery.cancel_scope.cancel()
    # The probe was cancelled without a result, so the next one probes.
    assert breaker.state is CircuitState.HALF_OPEN
    assert await model("work") == "work"
    assert breaker.state is CircuitState.CLOSED
    assert breaker.opened == 1


async def test_calls_from_before_a_change_do_not_count(autojump_clock: MockClock) -> None:
    breaker = breaker_of()
    go_on = trio.Event()

    async def late(item: object) -> None:
        await go_on.wait()
        raise BoomError

    async def call() -> None:
        with suppress(BoomError):
            await breaker.wrap(late)(None)

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(call)
        await wait_all_tasks_blocked()
        await opened(breaker)
        await trio.sleep(OPEN_FOR)
        assert await breaker.wrap(act)("work") == "work"
        go_on.set()
    assert breaker.state is CircuitState.CLOSED
    assert breaker.opened == 1


async def test_many_that_fail_together_open_it_once(autojump_clock: MockClock) -> None:
    breaker = breaker_of()

    async def call() -> None:
        with suppress(BoomError):
            await breaker.wrap(act)("fail")

    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(call)
    assert (breaker.state, breaker.opened) == (CircuitState.OPEN, 1)


@pytest.mark.parametrize("what", ["hang", "work"])
async def test_slow_calls_are_failures_if_so_configured(autojump_clock: MockClock, what: str) -> None:
    async def slow(item: str) -> None:
        await trio.sleep(3.0 if item == "work" else math.inf)

    strict, lenient = breaker_of(slow_after=3.0, within=60.0), breaker_of(within=60.0)
    for breaker in (strict, lenient):
        for _ in range(CALLS):
            with trio.move_on_after(3.5):
                await breaker.wrap(slow)(what)
    assert (strict.opened, lenient.opened) == (1, 0)


async def test_an_early_cancelled_call_does_not_count(autojump_clock: MockClock) -> None:
    breaker = breaker_of(slow_after=3.0)
    for _ in range(100):
        with trio.move_on_after(0.1):
            await breaker.wrap(act)("hang")
    assert breaker.state is CircuitState.CLOSED


async def test_the_program_may_define_failures(autojump_clock: MockClock) -> None:
    def is_wrong(error: Exception) -> bool:
        return isinstance(error, ValueError)

    breaker = breaker_of(counts=is_wrong)
    for _ in range(10):
        with pytest.raises(BoomError):
            await breaker.wrap(act)("fail")
    for _ in range(9):
        with pytest.raises(ValueError, match="the caller's"):
            await breaker.wrap(act)("wrong")
    assert breaker.state is CircuitState.CLOSED
    with pytest.raises(ValueError, match="the caller's"):
        await breaker.wrap(act)("wrong")
    assert breaker.state is CircuitState.OPEN


async def test_a_raising_judge_leaves_no_probe_behind(autojump_clock: MockClock) -> None:
    def broken(error: Exception) -> bool:
        raise OSError("broken")

    breaker = breaker_of(counts=broken, calls=1)
    model = breaker.wrap(act)
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            await model("fail")
        assert breaker.state is CircuitState.OPEN
        await trio.sleep(OPEN_FOR)
    assert await model("work") == "work"


async def test_a_block_is_passed_on(autojump_clock: MockClock) -> None:
    breaker = breaker_of(calls=1)
    with pytest.raises(BoomError), breaker.attempt():
        raise BoomError
    with pytest.raises(CircuitOpenError, match="open for another 5 s"), breaker.attempt():
        raise AssertionError("it went through")
    assert "1 times" in repr(breaker)


async def test_it_works_before_and_after_a_submit_actor(autojump_clock: MockClock, system: ta.System) -> None:
    inner: ta.Ref[FairScheduler[Any, Any]] = await system.spawn(FairScheduler, act, max_in_flight=1)
    breaker = breaker_of()
    outer: ta.Ref[FairScheduler[Any, Any]] = await system.spawn(
        FairScheduler, breaker.wrap(inner), max_in_flight=1
    )
    assert await outer.ask(Submit("work")) == "work"
    for _ in range(CALLS - 1):
        with pytest.raises(BoomError):
            await outer.ask(Submit("fail"))
    with pytest.raises(CircuitOpenError):
        await outer.ask(Submit("work"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError(), False),
        (np.linalg.LinAlgError(), False),
        (TypeError(), False),
        (ModelOutputError(), True),
        (ta.NotSupportedError("no"), False),
        (ta.AskCycleError("", path=""), False),
        (RateLimitError("", retry_after=1.0), False),
        (UnknownTenantError("", path=""), False),
        (CircuitOpenError("", retry_after=1.0), False),
        (ta.ContextPoisonedError("lost"), True),
        (ta.DeviceLostError("gone"), True),
        (ta.ActorFailedError("", path=""), True),
        (ta.MailboxFullError("", path=""), True),
        (trio.TooSlowError(), True),
        (OSError(), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failures(error: Exception, expected: bool) -> None:
    assert is_failure(error) is expected


@pytest.mark.parametrize("value", [0, -1.0, math.nan, -math.inf])
@pytest.mark.parametrize("name", ["share", "within", "open_for", "slow_after", "calls"])
def test_bad_numbers_are_refused(name: str, value: float) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{name} must be"):
        CircuitBreaker(**{name: value})  # type: ignore[arg-type]  # what it is about


@pytest.mark.parametrize("name", ["share", "within", "open_for", "calls"])
def test_infinite_limits_are_refused_too(name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{name} must be"):
        CircuitBreaker(**{name: math.inf})  # type: ignore[arg-type]  # what it is about


def test_an_invalid_model_is_refused() -> None:
    with pytest.raises(TypeError, match="a model is"):
        CircuitBreaker().wrap("model")  # type: ignore[arg-type]  # what it is about
