"""An actor with calls in tasks of their own."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import cast

import attrs
import outcome
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.actors import ActorFailedError, ActorStoppedError, Message, Policy, handles
from trio_accel.patterns import CallStatistics, GetStatistics, Submit, SubmitActor, TaskSubmitActor

Act = Callable[[], Awaitable[object]]


@attrs.frozen
class Crash(Message["Runner"]):
    """Crash the actor."""


class Runner(TaskSubmitActor[Act, object]):
    """Runs what it is asked to."""

    async def answer(self, item: Act) -> object:
        return await item()

    @handles(Crash)
    async def crash(self, message: Crash) -> None:
        raise OSError("a crash")


class Asker:
    """One ask in a task, and its outcome."""

    def __init__(self, nursery: trio.Nursery, ref: ta.Ref[Runner], act: Act) -> None:
        self.scope = trio.CancelScope()
        self.outcome: object = None
        nursery.start_soon(self._run, ref, act)

    async def _run(self, ref: ta.Ref[Runner], act: Act) -> None:
        with self.scope:
            result = await outcome.acapture(ref.ask, Submit(act))
            self.outcome = result.error if isinstance(result, outcome.Error) else result.value


async def soon(value: object = "soon") -> object:
    await trio.sleep(1)
    return value


@pytest.fixture
async def runner(system: ta.System) -> ta.Ref[Runner]:
    backoff = ta.Backoff(base=0.0, jitter=0.0)
    return await system.spawn(Runner, name="runner", policy=Policy(backoff=backoff))


async def test_calls_run_concurrently(autojump_clock: MockClock, runner: ta.Ref[Runner]) -> None:
    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        askers = [Asker(nursery, runner, soon) for _ in range(100)]
    assert [asker.outcome for asker in askers] == ["soon"] * 100
    assert trio.current_time() - begun == pytest.approx(1.0)


async def test_an_error_reaches_the_asker_unchanged(system: ta.System, runner: ta.Ref[Runner]) -> None:
    error = KeyError("bad item")

    async def fails() -> object:
        raise error

    with pytest.raises(KeyError) as caught:
        await runner.ask(Submit(fails))
    assert caught.value is error
    assert system.tree().find("test/runner").restarts == 0


async def test_a_cancelled_asker_leaves_at_once_and_its_model_is_cancelled(runner: ta.Ref[Runner]) -> None:
    ended: list[str] = []

    async def hangs() -> object:
        try:
            return await trio.sleep_forever()
        finally:
            ended.append("hangs")

    async with trio.open_nursery() as nursery:
        asker, other = Asker(nursery, runner, hangs), Asker(nursery, runner, hangs)
        await wait_all_tasks_blocked()
        asker.scope.cancel()
        await wait_all_tasks_blocked()
        assert isinstance(asker.outcome, trio.Cancelled)
        assert (other.outcome, ended) == (None, ["hangs"])
        other.scope.cancel()


async def test_a_model_that_fails_and_is_cancelled_at_once_does_not_affect_others(
    system: ta.System, autojump_clock: MockClock, runner: ta.Ref[Runner]
) -> None:
    async def fails_at_the_end() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("cannot be closed")

    async def in_tasks() -> object:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails_at_the_end)
            nursery.start_soon(trio.sleep_forever)

    async with trio.open_nursery() as nursery:
        asker, other = Asker(nursery, runner, in_tasks), Asker(nursery, runner, soon)
        await wait_all_tasks_blocked()
        asker.scope.cancel()
    assert pytest.RaisesGroup(ValueError).matches(cast("BaseException", asker.outcome))
    assert other.outcome == "soon"
    assert system.tree().find("test/runner").restarts == 0


async def test_a_value_after_the_cancellation_is_still_the_reply(runner: ta.Ref[Runner]) -> None:
    async def stubborn() -> object:
        try:
            return await trio.sleep_forever()
        except trio.Cancelled:  # noqa: ASYNC103  # just this is tested
            return "after all"  # noqa: ASYNC104

    async with trio.open_nursery() as nursery:
        asker = Asker(nursery, runner, stubborn)
        await wait_all_tasks_blocked()
        asker.scope.cancel()
    assert asker.outcome == "after all"


async def test_a_drain_answers_accepted_requests(autojump_clock: MockClock, runner: ta.Ref[Runner]) -> None:
    async with trio.open_nursery() as nursery:
        asker = Asker(nursery, runner, soon)
        await wait_all_tasks_blocked()
        await runner.stop(drain=True)
    assert asker.outcome == "soon"


async def test_a_stop_fails_running_tasks(runner: ta.Ref[Runner]) -> None:
    async with trio.open_nursery() as nursery:
        asker = Asker(nursery, runner, trio.sleep_forever)
        await wait_all_tasks_blocked()
        await runner.stop()
    assert isinstance(asker.outcome, ActorFailedError)
    assert isinstance(asker.outcome.__cause__, ActorStoppedError)


async def test_a_crash_fails_running_tasks_and_the_next_incarnation_serves(
    autojump_clock: MockClock, runner: ta.Ref[Runner]
) -> None:
    async with trio.open_nursery() as nursery:
        asker = Asker(nursery, runner, trio.sleep_forever)
        await wait_all_tasks_blocked()
        await runner.tell(Crash())
        after = Asker(nursery, runner, soon)
    assert isinstance(asker.outcome, ActorFailedError)
    assert "incarnation" in str(asker.outcome)
    assert after.outcome == "soon"


async def test_it_counts_its_calls(runner: ta.Ref[Runner]) -> None:
    await runner.ask(Submit(trio.lowlevel.checkpoint))
    counted = await runner.ask(GetStatistics())
    assert counted == CallStatistics(answered=1)


async def test_an_actor_without_counts_has_no_statistics(system: ta.System) -> None:
    ref: ta.Ref[SubmitActor[object, object]] = await system.spawn(SubmitActor[object, object])
    assert await ref.ask(GetStatistics()) is None


class NoTask(TaskSubmitActor[int, int]):
    """Does not declare how it serves a call."""


class NoCall(SubmitActor[int, int]):
    """The same, without tasks."""


async def test_a_submit_actor_without_messages_is_refused(system: ta.System) -> None:
    with pytest.raises(NotImplementedError, match="NoTask"):
        await (await system.spawn(NoTask)).ask(Submit(1))
    with pytest.raises(ActorFailedError, match="NoCall"):
        await (await system.spawn(NoCall)).ask(Submit(1))


async def test_a_task_has_its_askers_deadline(autojump_clock: MockClock, runner: ta.Ref[Runner]) -> None:
    async def deadline() -> object:
        return trio.current_effective_deadline()

    now = trio.current_time()
    assert await runner.ask(Submit(deadline)) == math.inf
    with trio.move_on_after(5) as scope:
        assert await runner.ask(Submit(deadline)) == now + 5
        await runner.ask(Submit(trio.sleep_forever))
    assert scope.cancelled_caught
    assert trio.current_time() == now + 5


async def test_a_moved_deadline_is_an_error(autojump_clock: MockClock, runner: ta.Ref[Runner]) -> None:
    async with trio.open_nursery() as nursery:
        asker = Asker(nursery, runner, trio.sleep_forever)
        asker.scope.deadline = trio.current_time() + 1
        await wait_all_tasks_blocked()
        asker.scope.deadline = math.inf
    assert isinstance(asker.outcome, trio.TooSlowError)
