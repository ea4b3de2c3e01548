"""Tells: waiting for space, `tell_nowait`, and the destination of a crash."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from sample_actors import (
    AT_ONCE,
    BoomError,
    Do,
    Echo,
    Events,
    Gate,
    Note,
    Number,
    Puppet,
    Run,
    start_ask,
    started,
)

from trio_accel.actors import (
    ActorStoppedError,
    ActorSystem,
    Directive,
    MailboxFullError,
    MailboxOptions,
    Message,
    MessageCompleted,
    MessageFailed,
    MessageStarted,
    Overflow,
    Policy,
    Ref,
)

wait = trio.testing.wait_all_tasks_blocked


async def boom(actor: Puppet) -> None:
    raise BoomError("told")


async def test_a_told_message_is_served(puppet: Ref[Puppet]) -> None:
    gate = Gate()
    gate.open.set()
    await puppet.tell(Run(gate))
    await gate.entered.wait()
    await wait()
    assert gate.ended == "returned"


async def test_tell_is_a_checkpoint_and_can_be_cancelled_before_it_sends(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    with trio.testing.assert_checkpoints():
        await puppet.tell(Note("a"))
    with trio.CancelScope() as scope:
        scope.cancel()
        await puppet.tell(Note("b"))
    assert scope.cancelled_caught
    await wait()
    assert system.tree().find("s/puppet").handled == 1


async def test_ask_is_a_checkpoint(puppet: Ref[Puppet]) -> None:
    with trio.testing.assert_checkpoints():
        await puppet.ask(Echo("a"))


async def test_tell_nowait_raises_would_block_when_tell_would_wait(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, name="puppet", mailbox=MailboxOptions(capacity=1))
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(gate))
        ref.tell_nowait(Note("a"))
        with pytest.raises(trio.WouldBlock):
            ref.tell_nowait(Note("b"))
        gate.open.set()
    await wait()
    ref.tell_nowait(Note("c"))
    assert system.dead_letters == 0


async def test_tell_nowait_to_a_stopping_actor_is_refused_even_if_its_mailbox_is_full(
    system: ActorSystem,
) -> None:
    ref = await system.spawn(Puppet, name="puppet", mailbox=MailboxOptions(capacity=1))
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(gate))
        ref.tell_nowait(Note("a"))
        nursery.start_soon(ref.stop)
        await wait()
        with pytest.raises(ActorStoppedError):
            ref.tell_nowait(Note("b"))
        gate.open.set()


async def test_tell_nowait_reports_an_unknown_message_even_if_the_mailbox_is_full(
    system: ActorSystem,
) -> None:
    class Unknown(Message["Puppet"]):
        pass

    ref = await system.spawn(Puppet, name="puppet", mailbox=MailboxOptions(capacity=1))
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(gate))
        ref.tell_nowait(Note("a"))
        with pytest.raises(TypeError, match="does not handle Unknown"):
            ref.tell_nowait(Unknown())
        gate.open.set()


async def test_tell_to_a_stopped_actor_is_refused_and_counted(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    await puppet.stop()
    with pytest.raises(ActorStoppedError):
        await puppet.tell(Note("a"))
    with pytest.raises(ActorStoppedError):
        puppet.tell_nowait(Note("b"))
    assert system.dead_letters == 2


async def test_a_crash_in_a_told_message_reaches_only_supervision(
    system: ActorSystem, events: Events
) -> None:
    ref = await system.spawn(Puppet, name="puppet", policy=AT_ONCE)
    await ref.tell(Run(boom))
    assert await ref.ask(Number()) == 1
    assert system.tree().find("s/puppet").last_error == "BoomError: told"
    assert [event.message_type for event in events.of(MessageFailed)] == ["Run"]


async def test_resume_a_told_message_that_fails_is_logged(
    system: ActorSystem, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    ref = await system.spawn(Puppet, name="puppet", policy=Policy(directives={BoomError: Directive.RESUME}))
    await ref.tell(Run(boom))
    assert await ref.ask(Number()) == 0
    assert "actor s/puppet goes on after BoomError('told') in Run" in caplog.messages
    assert [event.message_type for event in events.of(MessageFailed)] == ["Run"]


async def test_a_told_message_is_not_cancelled_with_its_teller(puppet: Ref[Puppet]) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        teller = await started(nursery, puppet, Run(gate))
        assert teller.outcome == "told"
        teller.scope.cancel()
        await wait()
        assert gate.ended is None
        gate.open.set()
        await wait()
    assert gate.ended == "returned"


async def test_every_told_message_starts_and_completes_once(puppet: Ref[Puppet], events: Events) -> None:
    for text in "abc":
        puppet.tell_nowait(Note(text))
    await wait()
    assert len(events.of(MessageStarted)) == len(events.of(MessageCompleted)) == 3


async def test_a_teller_that_waits_is_refused_when_the_actor_ends(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, mailbox=MailboxOptions(capacity=1))
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(gate))
        ref.tell_nowait(Note("a"))
        teller = start_ask(nursery, ref, Note("b"))
        await wait()
        ref.cancel("enough")
    assert isinstance(teller.outcome, ActorStoppedError)


async def test_a_message_that_an_observer_refuses_to_see_is_served_all_the_same(
    puppet: Ref[Puppet], system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    def observer(event: object) -> None:
        raise BoomError("observer")

    system.subscribe(observer)
    assert await puppet.ask(Echo("a")) == "a"
    assert "an observer failed on" in caplog.text


async def test_drop_newest_tell_to_a_stopped_actor_is_an_error(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, mailbox=MailboxOptions(overflow=Overflow.DROP_NEWEST))
    await ref.stop()
    with pytest.raises(ActorStoppedError):
        await ref.tell(Note("a"))
    assert not issubclass(ActorStoppedError, MailboxFullError)
