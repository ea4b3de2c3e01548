"""Deferred replies: the handler returns, the envelope stays open."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from sample_actors import (
    AT_ONCE,
    BoomError,
    Do,
    DoGrouped,
    Echo,
    Events,
    Gate,
    Number,
    Puppet,
    Run,
    crash,
    deferring,
    started,
)

from trio_accel.actors import (
    ActorFailedError,
    ActorStoppedError,
    ActorSystem,
    DeferredReply,
    Directive,
    MessageCancelled,
    MessageCompleted,
    MessageFailed,
    Policy,
    Ref,
)

wait = trio.testing.wait_all_tasks_blocked
Replies = list[DeferredReply[Any]]


@pytest.fixture
def replies() -> Replies:
    return []


async def test_the_next_message_is_served_while_the_reply_is_open(
    system: ActorSystem, puppet: Ref[Puppet], replies: Replies
) -> None:
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, deferring(replies))
        assert await puppet.ask(Echo("next")) == "next"
        assert asker.is_waiting
        assert system.tree().find("s/puppet").deferred == 1
        assert not replies[0].is_done
        assert replies[0].set("late")
        assert replies[0].is_done
    assert asker.outcome == "late"
    assert system.tree().find("s/puppet").deferred == 0


async def test_set_and_fail_act_once(puppet: Ref[Puppet], replies: Replies, events: Events) -> None:
    async with trio.open_nursery() as nursery:
        first = await started(nursery, puppet, deferring(replies))
        second = await started(nursery, puppet, deferring(replies))
        assert replies[0].set(1)
        assert not replies[0].set(2)
        assert not replies[0].fail(BoomError())
        error = BoomError("as it is")
        assert replies[1].fail(error)
        assert not replies[1].set(3)
        assert not replies[1].fail_as_crash(BoomError())
    assert first.outcome == 1
    assert second.outcome is error
    assert len(events.of(MessageCompleted)) == 1
    assert [event.error for event in events.of(MessageFailed)] == [error]


async def test_fail_as_crash_resembles_a_crash_without_one(
    system: ActorSystem, puppet: Ref[Puppet], replies: Replies
) -> None:
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, deferring(replies))
        error = BoomError("later")
        assert replies[0].fail_as_crash(error)
    assert isinstance(asker.outcome, ActorFailedError)
    assert asker.outcome.__cause__ is error
    assert system.tree().find("s/puppet").restarts == 0


async def test_a_deferred_reply_survives_a_restart(system: ActorSystem, replies: Replies) -> None:
    ref = await system.spawn(Puppet, policy=AT_ONCE)
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, ref, deferring(replies))
        await crash(ref)
        assert await ref.ask(Number()) == 1
        assert asker.is_waiting
        assert replies[0].set("from before")
    assert asker.outcome == "from before"


async def test_the_death_of_the_cell_fails_open_requests(
    system: ActorSystem, puppet: Ref[Puppet], replies: Replies
) -> None:
    async with trio.open_nursery() as nursery:
        askers = [await started(nursery, puppet, deferring(replies)) for _ in range(3)]
        await puppet.stop()
        await wait()
        for asker in askers:
            assert isinstance(asker.outcome, ActorFailedError)
            assert isinstance(asker.outcome.__cause__, ActorStoppedError)
    assert len({id(asker.outcome) for asker in askers}) == 3
    assert not replies[0].set("too late")
    assert not replies[1].fail(BoomError())
    assert replies[2].is_done


async def test_a_permanent_failure_is_the_cause_for_open_requests(
    system: ActorSystem, replies: Replies
) -> None:
    ref = await system.spawn(Puppet, policy=Policy(directives={BoomError: Directive.STOP}))
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, ref, deferring(replies))
        error = BoomError()
        await crash(ref, error)
    assert isinstance(asker.outcome, ActorFailedError)
    assert asker.outcome.__cause__ is error


async def test_cancelling_the_ask_calls_the_hook_and_waits(
    puppet: Ref[Puppet], replies: Replies, events: Events
) -> None:
    called: list[str] = []
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, deferring(replies, lambda: called.append("hook")))
        assert not replies[0].is_cancelled
        asker.scope.cancel()
        await wait()
        assert called == ["hook"]
        assert replies[0].is_cancelled
        assert asker.is_waiting
        assert replies[0].cancelled()
        assert not replies[0].cancelled()
        assert not replies[0].set("too late")
    assert isinstance(asker.outcome, trio.Cancelled)
    assert called == ["hook"]
    assert len(events.of(MessageCancelled)) == 1


async def test_a_reply_to_a_cancelled_asker_is_delivered(puppet: Ref[Puppet], replies: Replies) -> None:
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, deferring(replies))
        asker.scope.cancel()
        await wait()
        assert replies[0].set("finished all the same")
    assert asker.outcome == "finished all the same"


async def test_the_hook_is_not_called_after_the_reply(puppet: Ref[Puppet], replies: Replies) -> None:
    called: list[str] = []
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, deferring(replies, lambda: called.append("hook")))
        replies[0].set("first")
        asker.scope.cancel()
    assert asker.outcome == "first"
    assert called == []


async def test_abandon_on_cancel_leaves_a_deferred_request_to_itself(
    puppet: Ref[Puppet], replies: Replies
) -> None:
    called: list[str] = []
    async with trio.open_nursery() as nursery:
        request = deferring(replies, lambda: called.append("hook"))
        asker = await started(nursery, puppet, request, abandon=True)
        asker.scope.cancel()
    assert isinstance(asker.outcome, trio.Cancelled)
    assert called == []
    assert replies[0].set("nobody hears it")


async def test_cancelled_while_the_handler_continues_after_defer(
    puppet: Ref[Puppet], replies: Replies
) -> None:
    gate, called = Gate(), []

    async def act(actor: Puppet) -> object:
        replies.append(actor.context.defer(on_cancel=lambda: called.append("hook")))
        await gate(actor)
        return replies[0]

    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, Do(act))
        asker.scope.cancel()
    assert gate.ended == "Cancelled"
    assert called == ["hook"]
    assert isinstance(asker.outcome, trio.Cancelled)
    assert not replies[0].set("too late")


async def test_deferred_by_a_handler_after_its_asker_was_cancelled(
    puppet: Ref[Puppet], replies: Replies
) -> None:
    called: list[str] = []

    async def act(actor: Puppet) -> object:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:  # noqa: ASYNC103  # the test is about it
            replies.append(actor.context.defer(on_cancel=lambda: called.append("hook")))
            return replies[0]  # noqa: ASYNC104  # the test is about it

    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, Do(act))
        asker.scope.cancel()
        await wait()
        assert called == ["hook"]
        replies[0].cancelled()
    assert isinstance(asker.outcome, trio.Cancelled)


async def test_a_handler_that_crashes_after_defer_fails_its_request(
    system: ActorSystem, replies: Replies
) -> None:
    ref = await system.spawn(Puppet, policy=AT_ONCE, name="puppet")

    async def act(actor: Puppet) -> object:
        replies.append(actor.context.defer())
        raise BoomError

    async with trio.open_nursery() as nursery:
        asker = await started(nursery, ref, Do(act))
    assert isinstance(asker.outcome, ActorFailedError)
    assert not replies[0].set("too late")
    assert system.tree().find("s/puppet").deferred == 0


async def test_a_crash_after_the_reply_is_a_crash_and_the_reply_remains(
    system: ActorSystem, events: Events
) -> None:
    ref = await system.spawn(Puppet, name="puppet", policy=AT_ONCE)

    async def act(actor: Puppet) -> object:
        actor.context.defer().set("the reply")
        raise BoomError("after it")

    assert await ref.ask(Do(act)) == "the reply"
    assert await ref.ask(Number()) == 1
    assert len(events.of(MessageCompleted)) == 2
    assert events.of(MessageFailed) == []


async def test_resume_a_handler_that_raises_after_it_replied_is_logged(
    system: ActorSystem, replies: Replies, caplog: pytest.LogCaptureFixture
) -> None:
    ref = await system.spawn(Puppet, name="puppet", policy=Policy(directives={BoomError: Directive.RESUME}))

    async def act(actor: Puppet) -> object:
        actor.context.defer().set("the reply")
        raise BoomError("after it")

    assert await ref.ask(Do(act)) == "the reply"
    assert await ref.ask(Number()) == 0
    assert "actor s/puppet goes on after BoomError('after it') in Do" in caplog.messages


async def test_a_request_is_deferred_once_and_only_while_it_is_served(puppet: Ref[Puppet]) -> None:
    contexts: list[Any] = []

    async def twice(actor: Puppet) -> object:
        contexts.append(actor.context)
        reply = actor.context.defer()
        with pytest.raises(RuntimeError, match="defer: actor s/puppet is serving no request"):
            actor.context.defer()
        reply.set(None)
        return reply

    async def told(actor: Puppet) -> None:
        with pytest.raises(RuntimeError, match="is serving no request that could be deferred"):
            actor.context.defer()
        done.set()

    await puppet.ask(Do(twice))
    with pytest.raises(RuntimeError, match="is serving no request"):
        contexts[0].defer()
    done = trio.Event()
    await puppet.tell(Run(told))
    await done.wait()


async def test_a_task_outside_the_actor_defers_nobodys_request(system: ActorSystem) -> None:
    gate = Gate()
    caught: list[RuntimeError] = []

    async def act(actor: Puppet) -> object:
        async def helper() -> None:
            try:
                actor.context.defer()
            except RuntimeError as error:
                caught.append(error)

        async with trio.open_nursery() as nursery:  # noqa: ASYNC112  # the nursery is what it tests
            nursery.start_soon(helper)
        return "the handler's own reply"

    ref = await system.spawn(Puppet)
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, DoGrouped(gate))
        assert await ref.ask(Do(act)) == "the handler's own reply"
        gate.open.set()
    assert len(caught) == 1


async def test_grouped_handlers_defer_each_their_own(puppet: Ref[Puppet], replies: Replies) -> None:
    def request(text: str) -> DoGrouped:
        async def act(actor: Puppet) -> object:
            reply: DeferredReply[Any] = actor.context.defer()
            await trio.lowlevel.checkpoint()
            replies.append(reply)
            texts.append(text)
            return reply

        return DoGrouped(act)

    texts: list[str] = []
    async with trio.open_nursery() as nursery:
        askers = {text: await started(nursery, puppet, request(text)) for text in "abc"}
        for text, reply in zip(texts, replies, strict=True):
            reply.set(text * 2)
    assert {text: asker.outcome for text, asker in askers.items()} == {"a": "aa", "b": "bb", "c": "cc"}


async def test_a_failing_call_of_cancelled_leaves_the_reply_open(
    system: ActorSystem, puppet: Ref[Puppet], replies: Replies
) -> None:
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, deferring(replies))
        with pytest.raises(RuntimeError, match="the caller is not cancelled"):
            replies[0].cancelled()
        assert system.tree().find("s/puppet").deferred == 1
        await puppet.stop()
    assert isinstance(asker.outcome, ActorFailedError)


async def test_a_hook_that_raises_crashes_the_actor_and_nothing_else(
    system: ActorSystem, replies: Replies, caplog: pytest.LogCaptureFixture
) -> None:
    def hook() -> None:
        raise BoomError("in the hook")

    ref = await system.spawn(Puppet, name="puppet", policy=AT_ONCE)
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, ref, deferring(replies, hook))
        asker.scope.cancel()
        await wait()
        assert system.tree().find("s/puppet").last_error == "BoomError: in the hook"
        assert asker.is_waiting
        assert await ref.ask(Number()) == 1
        replies[0].cancelled()
    assert isinstance(asker.outcome, trio.Cancelled)


async def test_a_hook_of_an_earlier_incarnation_that_raises_is_logged(
    system: ActorSystem, replies: Replies, caplog: pytest.LogCaptureFixture
) -> None:
    def hook() -> None:
        raise BoomError("in the hook")

    ref = await system.spawn(Puppet, name="puppet", policy=AT_ONCE)
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, ref, deferring(replies, hook))
        await crash(ref)
        asker.scope.cancel()
        await wait()
        assert await ref.ask(Number()) == 1
        replies[0].cancelled()
    assert "actor s/puppet: the on_cancel hook of Do failed" in caplog.messages
