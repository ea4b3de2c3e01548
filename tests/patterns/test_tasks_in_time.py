"""Calls that come, fail, leave and meet a crash at random times: each has the one outcome that it must."""

from __future__ import annotations

from functools import partial

import attrs
import hypothesis.strategies as st
import outcome
import trio
from hypothesis import given, settings
from trio.testing import MockClock

import trio_accel as ta
from trio_accel.patterns import Call, TaskServant


@attrs.frozen
class Crash(ta.Message["Worker"]):
    """Crash the actor."""


@attrs.frozen
class Job:
    """A call: when it comes, how long it takes, whether it fails, when its asker leaves."""

    begin: int
    length: int
    fails: bool
    patience: int


class Worker(TaskServant[Job, int]):
    """Takes as long as the job says."""

    async def answer(self, item: Job) -> int:
        await trio.sleep(item.length)
        if item.fails:
            raise KeyError(item.length)
        return item.length

    @ta.handles(Crash)
    async def crash(self, message: Crash) -> None:
        raise OSError("a crash")


def expected(job: Job, crashes: set[int]) -> str:
    end = job.begin + job.length
    leaves = job.begin + job.patience + 0.5
    crash = min((time + 0.25 for time in crashes if time >= job.begin), default=float("inf"))
    if end < min(leaves, crash):
        return "KeyError" if job.fails else "value"
    return "Cancelled" if leaves < crash else "ActorFailedError"


jobs = st.builds(Job, st.integers(0, 9), st.integers(1, 9), st.booleans(), st.integers(0, 9))


@settings(max_examples=60, deadline=None)
@given(st.lists(jobs, max_size=30), st.sets(st.integers(0, 15), max_size=2))
def test_each_call_has_the_one_outcome_that_it_must(calls: list[Job], crashes: set[int]) -> None:
    outcomes: dict[int, list[str]] = {number: [] for number in range(len(calls))}

    async def ask(worker: ta.Ref[Worker], number: int, job: Job) -> None:
        await trio.sleep(job.begin)
        with trio.move_on_after(job.patience + 0.5):
            result = await outcome.acapture(worker.ask, Call(job))
            is_value = isinstance(result, outcome.Value)
            outcomes[number].append("value" if is_value else type(result.error).__name__)

    async def crash(worker: ta.Ref[Worker], time: int) -> None:
        await trio.sleep(time + 0.25)
        await worker.tell(Crash())

    async def main() -> int:
        policy = ta.Policy(backoff=ta.Backoff(base=0.0, jitter=0.0))
        async with ta.open_system("test") as system:
            worker = await system.spawn(Worker, name="worker", policy=policy)
            async with trio.open_nursery() as nursery:
                for number, job in enumerate(calls):
                    nursery.start_soon(ask, worker, number, job)
                for time in crashes:
                    nursery.start_soon(crash, worker, time)
            await worker.stop(drain=True)
            return system.tree().deferred

    assert trio.run(partial(main), clock=MockClock(autojump_threshold=0)) == 0
    assert outcomes == {number: [expected(job, crashes)] for number, job in enumerate(calls)}
