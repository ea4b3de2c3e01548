"""Calling an actor that waits for a message, in place of its own task."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from sample_actors import BoomError, Do, Echo, Events, Gate, Number, Puppet, crash, started

from trio_accel.actors import (
    ActorFailedError,
    ActorSystem,
    DirectReply,
    Ref,
    idle_actor,
)

wait = trio.testing.wait_all_tasks_blocked


class Told(DirectReply):
    """Keeps what it delivers."""

    __slots__ = ("delivered",)

    def __init__(self) -> None:
        super().__init__(Echo("a test"))
        self.delivered: list[BaseException | None] = []

    def deliver(self, error: BaseException | None) -> None:
        self.delivered.append(error)


def resting(ref: Ref[Puppet]) -> Puppet:
    actor = idle_actor(ref, Told())
    assert actor is not None
    return actor


async def test_an_actor_that_serves_is_not_at_rest(puppet: Ref[Puppet]) -> None:
    await wait()
    assert isinstance(idle_actor(puppet, Told()), Puppet)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, Do(gate))
        assert idle_actor(puppet, Told()) is None
        gate.open.set()
    await wait()
    assert idle_actor(puppet, Told()) is not None


async def test_an_observed_actor_is_not_at_rest(puppet: Ref[Puppet], system: ActorSystem) -> None:
    await wait()
    with system.subscribe(Events().append):
        assert idle_actor(puppet, Told()) is None
    assert idle_actor(puppet, Told()) is not None


async def test_an_actor_with_a_message_or_a_crash_ahead_is_not_at_rest(puppet: Ref[Puppet]) -> None:
    await wait()
    outcomes: list[object] = []
    puppet.post(Echo("first"), outcomes.append)
    assert idle_actor(puppet, Told()) is None
    await wait()
    assert outcomes
    resting(puppet).context.crash(BoomError())
    assert idle_actor(puppet, Told()) is None
    await wait()
    # The next incarnation.
    assert await puppet.ask(Number()) == 1


async def test_an_ended_actor_is_not_at_rest(puppet: Ref[Puppet]) -> None:
    await wait()
    await puppet.stop()
    assert idle_actor(puppet, Told()) is None


async def test_a_direct_request_counts_and_the_actor_replies(
    puppet: Ref[Puppet], system: ActorSystem
) -> None:
    await wait()
    reply = Told()
    reply.served(resting(puppet).context)
    node = system.tree().find("s/puppet")
    assert (node.handled, node.failed, node.deferred) == (1, 0, 1)
    assert reply.set()
    assert not reply.set()
    assert not reply.fail(BoomError())
    assert not reply.fail_as_crash(BoomError())
    assert reply.delivered == [None]
    assert system.tree().find("s/puppet").deferred == 0


async def test_a_request_failed_at_once_is_not_open(puppet: Ref[Puppet], system: ActorSystem) -> None:
    await wait()
    reply, error = Told(), BoomError()
    reply.fail(error)
    reply.served(resting(puppet).context)
    node = system.tree().find("s/puppet")
    assert (node.handled, node.deferred) == (1, 0)
    assert reply.delivered == [error]


async def test_a_reply_outlives_a_crash_and_fails_at_the_end(
    puppet: Ref[Puppet], system: ActorSystem
) -> None:
    await wait()
    first, second = Told(), Told()
    first.served(resting(puppet).context)
    second.served(resting(puppet).context)
    await crash(puppet)
    assert not first.delivered
    assert first.set()
    await puppet.stop()
    [error] = second.delivered
    assert isinstance(error, ActorFailedError)
    assert first.delivered == [None]


async def test_an_actor_can_crash_over_a_direct_request(puppet: Ref[Puppet], system: ActorSystem) -> None:
    await wait()
    reply, boom = Told(), BoomError("a test")
    reply.served(resting(puppet).context, boom)
    [error] = reply.delivered
    assert isinstance(error, ActorFailedError)
    assert error.__cause__ is boom
    assert "Echo" in str(error)
    await wait()
    node = system.tree().find("s/puppet")
    assert (node.handled, node.failed, node.restarts) == (0, 1, 1)
    assert await puppet.ask(Echo("again")) == "again"


async def test_a_graceful_end_waits_for_it(puppet: Ref[Puppet]) -> None:
    await wait()
    reply = Told()
    reply.served(resting(puppet).context)
    async with trio.open_nursery() as nursery:

        async def stop() -> None:
            await puppet.stop(drain=True)
            assert reply.delivered == [None]

        nursery.start_soon(stop)
        await wait()
        assert not reply.delivered
        reply.set()


async def test_a_caller_waits_for_a_later_reply(puppet: Ref[Puppet]) -> None:
    await wait()
    reply, later = DirectReply(Echo("a test")), DirectReply(Echo("another"))
    for one in (reply, later):
        one.served(resting(puppet).context)
    told: list[object] = []

    async def ask() -> None:
        told.append(await reply.wait())
        with pytest.raises(BoomError):
            await later.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait()
        assert reply.set()
        await wait()
        assert told == [None]
        assert later.fail(BoomError())


async def test_a_cancelled_request_waits_until_it_is_let_go(puppet: Ref[Puppet]) -> None:
    await wait()
    reply = DirectReply(Echo("a test"))
    reply.served(resting(puppet).context)
    asked: list[object] = []
    reply.on_cancel = asked.append
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with trio.CancelScope() as scope:
                nursery.start_soon(cancel, scope)
                await reply.wait()
            assert scope.cancelled_caught

        async def cancel(scope: trio.CancelScope) -> None:
            scope.cancel()
            await wait()
            assert len(asked) == 1
            assert reply.is_cancelled
            assert reply.cancelled()
            assert not reply.cancelled()

        nursery.start_soon(ask)


async def test_one_polls_before_it_parks(puppet: Ref[Puppet]) -> None:
    await wait()
    reply = DirectReply(Echo("a test"))
    reply.served(resting(puppet).context)

    def look() -> None:
        reply.fail(BoomError())

    assert reply.poll_once_more(look)
    with pytest.raises(BoomError):
        await reply.wait()
