"""An incarnation that ends on its own: `context.finish()`."""

from __future__ import annotations

import attrs
import pytest
import trio.testing

from trio_accel.actors import (
    Actor,
    ActorContext,
    ActorStoppedError,
    ActorSystem,
    Backoff,
    Message,
    Policy,
    Ref,
    Request,
    Restart,
    Strategy,
    handles,
)

AT_ONCE = Policy(backoff=Backoff(base=0.0, jitter=0.0))


class BoomError(Exception):
    pass


@attrs.frozen
class Finish(Request["Job", int]):
    """End after this reply; with `crash`, ask for a crash too, before or after."""

    crash: str = ""


@attrs.frozen
class Number(Request["Job", int]):
    """Which incarnation is it?"""


@attrs.frozen
class Linger(Message["Job"]):
    """Serve a message concurrently with the others until the event is set."""

    until: trio.Event


class Job(Actor):
    contexts: list[ActorContext]

    def __init__(self, contexts: list[ActorContext] | None = None) -> None:
        self.contexts = [] if contexts is None else contexts

    @handles(Finish)
    async def finish(self, message: Finish) -> int:
        await trio.lowlevel.checkpoint()
        self.contexts.append(self.context)
        if message.crash == "before":
            self.context.crash(BoomError())
        self.context.finish()
        if message.crash == "after":
            self.context.crash(BoomError())
        return self.context.restart.number

    @handles(Number)
    async def number(self, _: Number) -> int:
        await trio.lowlevel.checkpoint()
        return self.context.restart.number

    @handles(Linger, group="lingering", limit=1)
    async def linger(self, message: Linger) -> None:
        await message.until.wait()


async def spawn(system: ActorSystem, restart: Restart) -> tuple[Ref[Job], list[ActorContext]]:
    contexts: list[ActorContext] = []
    return await system.spawn(Job, contexts, name="job", restart=restart, policy=AT_ONCE), contexts


async def test_a_permanent_actor_starts_again_and_keeps_its_mailbox(system: ActorSystem) -> None:
    job, _ = await spawn(system, Restart.PERMANENT)
    numbers: list[int] = []

    async def ask() -> None:
        numbers.append(await job.ask(Number()))

    async with trio.open_nursery() as nursery:
        assert await job.ask(Finish()) == 0
        nursery.start_soon(ask)
    assert numbers == [1]
    assert system.tree().find("s/job").last_error is None


@pytest.mark.parametrize("restart", [Restart.TRANSIENT, Restart.TEMPORARY])
async def test_any_other_ends_for_good_after_its_reply(system: ActorSystem, restart: Restart) -> None:
    job, _ = await spawn(system, restart)
    assert await job.ask(Finish()) == 0
    end = await job.wait_terminated()
    assert (end.reason, end.error) == ("it ended by itself", None)
    with pytest.raises(ActorStoppedError, match="ended by itself"):
        await job.ask(Number())


async def test_concurrent_messages_are_finished(system: ActorSystem) -> None:
    job, _ = await spawn(system, Restart.TRANSIENT)
    until = trio.Event()
    job.tell_nowait(Linger(until))
    assert await job.ask(Finish()) == 0
    await trio.testing.wait_all_tasks_blocked()
    assert not job.is_terminated
    until.set()
    await job.wait_terminated()


async def test_requests_finish_in_the_order_of_asking(system: ActorSystem) -> None:
    job, _ = await spawn(system, Restart.PERMANENT)
    await job.ask(Finish(crash="after"))
    await job.ask(Number())
    assert system.tree().find("s/job").last_error is None
    await job.ask(Finish(crash="before"))
    assert await job.ask(Number()) == 2
    assert system.tree().find("s/job").last_error == "BoomError"


async def test_an_ended_incarnation_finishes_no_other(system: ActorSystem) -> None:
    job, contexts = await spawn(system, Restart.PERMANENT)
    await job.ask(Finish())
    assert await job.ask(Number()) == 1
    contexts[0].finish()
    assert await job.ask(Number()) == 1


async def test_its_siblings_restart_with_it(system: ActorSystem) -> None:
    async with system.open_supervisor("both", strategy=Strategy.ONE_FOR_ALL) as supervisor:
        job = await supervisor.spawn(Job, name="job", policy=AT_ONCE)
        other = await supervisor.spawn(Job, name="other", policy=AT_ONCE)
        await job.ask(Finish())
        await trio.testing.wait_all_tasks_blocked()
        assert [await job.ask(Number()), await other.ask(Number())] == [1, 1]
