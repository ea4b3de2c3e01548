"""Obstacles of a new user: options checked early, errors that explain the cause, ends that wait."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import trio_accel as ta
from trio_accel.testing import FixedRandom


@attrs.frozen
class Work(ta.Request["Worker", int]):
    pass


@attrs.frozen
class Fail(ta.Request["Worker", None]):
    error: BaseException


@attrs.frozen
class Later(ta.Request["Worker", int]):
    pass


@attrs.frozen
class Beside(ta.Request["Worker", None]):
    pass


@attrs.frozen
class Address(ta.Request["Worker", Any]):
    pass


@attrs.frozen
class Note(ta.Message["Worker"]):
    pass


class Worker(ta.Actor):
    replies: list[ta.DeferredReply[int]]

    @asynccontextmanager
    async def lifespan(self, context: ta.ActorContext) -> AsyncGenerator[None, None]:
        self.replies = []
        LATEST.append(self)
        yield

    @ta.handles(Work)
    async def work(self, message: Work) -> int:
        await trio.sleep_forever()
        return 1

    @ta.handles(Fail)
    async def fail(self, message: Fail) -> None:
        raise message.error

    @ta.handles(Later)
    async def later(self, message: Later) -> ta.DeferredReply[int]:
        reply: ta.DeferredReply[int] = self.context.defer()
        self.replies.append(reply)
        return reply

    @ta.handles(Beside, group="beside", limit=2)
    async def beside(self, message: Beside) -> None:
        await trio.sleep_forever()

    @ta.handles(Note)
    async def note(self, message: Note) -> None:
        await trio.lowlevel.checkpoint()

    @ta.handles(Address)
    async def address(self, message: Address) -> ta.Ref[Any]:
        return self.context.ref


LATEST: list[Worker] = []


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ta.Backoff(initial=50), ValueError, "initial must not be above maximum, got 50 and 30.0"),
        (lambda: ta.Backoff(base=2, maximum=1), ValueError, "base must not be above maximum, got 2 and 1"),
        (lambda: ta.Intensity(1, 0), ValueError, "within must be above 0, got 0"),
        (lambda: ta.Policy(backoff=3), TypeError, "Policy: backoff must be a Backoff, got 3"),
        (lambda: ta.Policy(intensity=3), TypeError, "Policy: intensity must be an Intensity, got 3"),
        (
            lambda: ta.Policy(strategy="one_for_one"),
            TypeError,
            "strategy must be a Strategy, got 'one_for_one'",
        ),
        (lambda: ta.MailboxOptions(overflow="wait"), TypeError, "overflow must be an Overflow, got 'wait'"),
        (lambda: ta.MailboxOptions(on_restart="drop"), ValueError, "'keep' or 'reject', got 'drop'"),
        (
            lambda: ta.SystemOptions(intensity=(3, 5)),
            TypeError,
            r"intensity must be an Intensity, got \(3, 5\)",
        ),
        (lambda: ta.SystemOptions(random=3), TypeError, "SystemOptions: random must be a Random, got 3"),
    ],
)
def test_options_are_checked_when_they_are_made(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_jitter_does_not_exceed_the_maximum() -> None:
    backoff = ta.Backoff(initial=30.0, maximum=30.0, jitter=0.5)
    assert backoff.delay(0, FixedRandom(1.0)) == 30.0
    assert backoff.delay(0, FixedRandom(0.0)) == 15.0


async def test_an_error_group_is_described_by_its_members() -> None:
    async with ta.open_system("s") as system:
        worker = await system.spawn(Worker, name="w")
        group = ExceptionGroup("two", [ValueError("first"), TypeError("second")])
        with pytest.raises(ta.ActorFailedError, match="ValueError: first; TypeError: second"):
            await worker.ask(Fail(group))
        await trio.testing.wait_all_tasks_blocked()
        assert system.tree().find("s/w").last_error == "ValueError: first; TypeError: second"


@pytest.mark.parametrize("restart", list(ta.Restart))
async def test_a_handler_next_to_a_crash_does_not_claim_a_restart(restart: ta.Restart) -> None:
    causes: list[BaseException | None] = []

    async def ask(worker: ta.Ref[Worker]) -> None:
        try:
            await worker.ask(Beside())
        except ta.ActorFailedError as error:
            causes.append(error.__cause__)

    async with ta.open_system("s") as system, trio.open_nursery() as nursery:
        worker = await system.spawn(Worker, name="w", restart=restart)
        nursery.start_soon(ask, worker)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ta.ActorFailedError):
            await worker.ask(Fail(ValueError("boom")))
    [cause] = causes
    assert isinstance(cause, ta.ActorStoppedError)
    assert "another of its messages or a child failed" in str(cause)


async def test_a_temporary_sibling_is_ended_as_fast_as_the_others() -> None:
    async def ask(worker: ta.Ref[Worker]) -> None:
        with pytest.raises(ta.ActorFailedError):
            await worker.ask(Work())

    async with (
        ta.open_system("s") as system,
        system.open_supervisor("all", strategy=ta.Strategy.ONE_FOR_ALL) as supervisor,
        trio.open_nursery() as nursery,
    ):
        crasher = await supervisor.spawn(Worker)
        temporary = await supervisor.spawn(Worker, restart=ta.Restart.TEMPORARY)
        nursery.start_soon(ask, temporary)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ta.ActorFailedError):
            await crasher.ask(Fail(ValueError("boom")))
        # Its grace of 5 s is not waited for: nothing here lets time pass.
        await trio.testing.wait_all_tasks_blocked()
        assert temporary.is_terminated


async def test_an_actor_stopped_during_its_back_off_was_stopped(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with ta.open_system("s") as system:
        policy = ta.Policy(backoff=ta.Backoff(initial=10.0))
        worker = await system.spawn(Worker, policy=policy)
        with pytest.raises(ta.ActorFailedError):
            await worker.ask(Fail(ValueError("boom")))
        await worker.stop()
        ended = await worker.wait_terminated()
        assert ended.reason == "stop was asked for"
        assert isinstance(ended.error, ValueError)
        assert trio.current_time() < 10.0


async def test_draining_waits_for_deferred_replies() -> None:
    replies: list[int] = []

    async def ask(worker: ta.Ref[Worker]) -> None:
        replies.append(await worker.ask(Later()))

    async with ta.open_system("s") as system, trio.open_nursery() as nursery:
        worker = await system.spawn(Worker)
        for _ in range(2):
            nursery.start_soon(ask, worker)
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as stopping:
            stopping.start_soon(lambda: worker.stop(drain=True))
            await trio.testing.wait_all_tasks_blocked()
            first, second = LATEST[-1].replies
            first.set(1)
            await trio.testing.wait_all_tasks_blocked()
            assert not worker.is_terminated
            second.set(2)
    assert sorted(replies) == [1, 2]


async def test_a_supervisor_reports_to_the_observers_when_it_gives_up() -> None:
    events: list[ta.Event] = []
    with pytest.raises(ExceptionGroup):  # noqa: ASYNC401, PT012
        async with ta.open_system("s", options=ta.SystemOptions(intensity=ta.Intensity(0, 5.0))) as system:
            system.subscribe(events.append)
            worker = await system.spawn(Worker, name="w")
            with pytest.raises(ta.ActorFailedError):
                await worker.ask(Fail(ValueError("boom")))
            await trio.sleep_forever()
    [failed] = [event for event in events if isinstance(event, ta.SupervisorFailed)]
    assert failed.path == "s"
    assert isinstance(failed.error.__cause__, ValueError)


async def test_an_actor_can_hand_out_its_own_address() -> None:
    async with ta.open_system("s") as system:
        worker = await system.spawn(Worker, name="w")
        address = await worker.ask(Address())
        assert address.path == worker.path == "s/w"
        with pytest.raises(ta.ActorFailedError):
            await address.ask(Fail(ValueError("the same actor")))


@pytest.mark.parametrize("verb", ["ask", "tell_nowait", "post", "cancel"])
async def test_another_thread_or_run_is_refused_and_harms_nothing(verb: str) -> None:
    async with ta.open_system("s") as system:
        worker = await system.spawn(Worker, name="w")

        def elsewhere() -> None:
            if verb == "ask":
                trio.run(worker.ask, Address())
            elif verb == "post":
                worker.post(Address(), lambda result: None)
            elif verb == "tell_nowait":
                worker.tell_nowait(Note())
            else:
                worker.cancel("from outside")

        word = "tell" if verb == "tell_nowait" else verb
        with pytest.raises(RuntimeError, match=rf"{word}: actor s/w belongs to another thread or Trio run"):
            await trio.to_thread.run_sync(elsewhere)
        assert (await worker.ask(Address())).path == "s/w"
