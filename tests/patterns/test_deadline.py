"""A deadline as a value, between processes."""

from __future__ import annotations

import math
import pickle
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

import trio_accel as ta
from trio_accel.patterns import Deadline, FairScheduler, FairSubmit, RetryBudget, retry


async def test_its_scope_ends_at_the_deadline(autojump_clock: MockClock) -> None:
    deadline = Deadline.after(2.0)
    assert (deadline.remaining, deadline.has_passed) == (2.0, False)
    with deadline.scope() as scope:
        await trio.sleep_forever()
    assert scope.cancelled_caught
    assert trio.current_time() == 2.0
    assert (deadline.remaining, deadline.has_passed) == (0.0, True)
    with Deadline.after(0.0).scope() as scope:
        await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_without_a_limit_nothing_gives_up(autojump_clock: MockClock) -> None:
    deadline = Deadline.after(math.inf)
    assert deadline == Deadline(math.inf) == Deadline.current()
    assert deadline.remaining == math.inf
    assert deadline.to_header() is None
    with deadline.scope():
        await trio.sleep(80_000)


async def test_the_current_one_is_that_of_the_nearest_scope(autojump_clock: MockClock) -> None:
    with trio.fail_after(5.0), trio.move_on_after(9.0):
        assert Deadline.current() == Deadline.after(5.0)
        await trio.lowlevel.checkpoint()
    with trio.CancelScope() as scope:
        scope.cancel()
        assert Deadline.current().has_passed
        assert Deadline.current().to_header() == "0.000000"
        await trio.lowlevel.checkpoint()


async def test_deadlines_are_ordered(autojump_clock: MockClock) -> None:
    assert min(Deadline.after(3.0), Deadline.after(2.0), Deadline(math.inf)) == Deadline.after(2.0)


async def test_it_crosses_to_another_process_as_the_rest_of_the_time() -> None:
    """Two runs with unrelated clocks."""

    async def sender() -> str | None:
        deadline = Deadline.after(4.0)
        await trio.sleep(1.5)
        return deadline.to_header()

    async def receiver(header: str | None) -> float:
        await trio.sleep(100.0)
        deadline = Deadline.from_header(header, at_most=60.0)
        begun = trio.current_time()
        with deadline.scope():
            await trio.sleep_forever()
        return trio.current_time() - begun

    def run(function: Any, *arguments: object) -> Any:
        return trio.run(function, *arguments, clock=MockClock(autojump_threshold=0))

    header = await trio.to_thread.run_sync(run, sender)
    assert header == "2.500000"
    assert await trio.to_thread.run_sync(run, receiver, header) == 2.5


@attrs.frozen
class Remaining(ta.Request["Front", tuple[float, float]]):
    """Ask for the rest of the time, as the front and its model see it."""


class Front(ta.Actor):
    def __init__(self, model: ta.Ref[FairScheduler[Any, float]]) -> None:
        self.model = model

    @ta.handles(Remaining)
    async def remaining(self, message: Remaining) -> tuple[float, float]:
        await trio.sleep(1.0)
        behind: float = await self.model.ask(FairSubmit(None, tenant="a"))
        return Deadline.current().remaining, behind


async def test_it_travels_to_the_models_of_a_handler(autojump_clock: MockClock, system: ta.System) -> None:
    async def model(item: object) -> float:
        await trio.sleep(1.0)
        return Deadline.current().remaining

    behind = await system.spawn(FairScheduler, model, max_in_flight=1)
    front = await system.spawn(Front, behind)
    with Deadline.from_header("10").scope():
        assert await front.ask(Remaining()) == (8.0, 8.0)


async def test_a_retry_two_actors_below_does_not_wait_beyond_it(
    autojump_clock: MockClock, system: ta.System
) -> None:
    calls: list[float] = []

    async def model(item: object) -> float:
        calls.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        raise ta.QueueFullError("full")

    backoff = ta.Backoff(initial=3.0, base=3.0, maximum=3.0, jitter=0.0)
    tries = retry(model, budget=RetryBudget(), attempts=9, backoff=backoff)
    front = await system.spawn(Front, await system.spawn(FairScheduler, tries))
    with trio.fail_after(5.0), pytest.raises(ta.ActorFailedError) as caught:
        await front.ask(Remaining())
    assert isinstance(caught.value.__cause__, ta.QueueFullError)
    # The front takes a second; one attempt follows after three, and there is no time for another.
    assert calls == [1.0, 4.0]
    assert trio.current_time() == 4.0


@given(st.floats(0.0, 1e6))
def test_the_receiver_never_has_more(seconds: float) -> None:
    async def main() -> None:
        header = Deadline.after(seconds).to_header()
        received = Deadline.from_header(header).remaining
        assert seconds - 1.001e-6 <= received <= seconds

    trio.run(main, clock=MockClock())


async def test_the_server_grants_at_most_its_own_limit(autojump_clock: MockClock) -> None:
    assert Deadline.from_header("100", at_most=30.0) == Deadline.after(30.0)
    assert Deadline.from_header("7", at_most=30.0) == Deadline.after(7.0)
    assert Deadline.from_header(None, at_most=30.0) == Deadline.after(30.0)
    assert Deadline.from_header(None) == Deadline(math.inf)
    assert Deadline.from_header(" 0.25 ") == Deadline.after(0.25)
    assert Deadline.from_header("0") == Deadline.after(0.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "soon",
        "nan",
        "inf",
        "-1",
        "+1",
        "1e3",
        "1.",
        ".5",
        "1,5",
        "1_0",
        "0x10",
        "٣",
        "1" * 10,
        "1\n2",
    ],
)
async def test_bad_headers_are_refused(autojump_clock: MockClock, text: str) -> None:
    with pytest.raises(ValueError, match="from_header: text must be seconds as a decimal number"):
        Deadline.from_header(text)


@pytest.mark.parametrize("seconds", [-1.0, -math.inf, math.nan])
async def test_bad_seconds_are_refused(autojump_clock: MockClock, seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be at least 0"):
        Deadline.after(seconds)
    with pytest.raises(ValueError, match="seconds must be at least 0"):
        Deadline.from_header("1", at_most=seconds)


@pytest.mark.parametrize("value", ["1", None, True])
async def test_infinite_and_invalid_numbers_are_refused(autojump_clock: MockClock, value: Any) -> None:
    with pytest.raises(TypeError, match="must be a number"):
        Deadline(value)
    with pytest.raises(TypeError, match="must be a number"):
        Deadline.after(value)


def test_nan_is_not_a_time() -> None:
    with pytest.raises(ValueError, match="NaN"):
        Deadline(math.nan)


def test_it_is_not_sent_unchanged() -> None:
    with pytest.raises(TypeError, match="send `to_header"):
        pickle.dumps(Deadline(1.0))
