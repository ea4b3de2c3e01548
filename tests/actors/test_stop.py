"""Ends: graceful, by cancellation, given up; spawn and its failures."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import ClassVar

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
    crash,
    deferring,
    shielded,
    start_ask,
    started,
)

from trio_accel.actors import (
    Actor,
    ActorContext,
    ActorFailedError,
    ActorStarted,
    ActorStoppedError,
    ActorSystem,
    ActorTerminated,
    Backoff,
    MailboxOptions,
    MessageDropped,
    Policy,
    Ref,
    Terminated,
    open_system,
)

wait = trio.testing.wait_all_tasks_blocked


async def test_stop_finishes_the_message_being_served_and_refuses_the_rest(
    system: ActorSystem, puppet: Ref[Puppet], events: Events
) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        running = await started(nursery, puppet, Do(gate))
        queued = await started(nursery, puppet, Echo("a"))
        nursery.start_soon(puppet.stop)
        await wait()
        assert system.tree().find("s/puppet").state == "stopping"
        assert not puppet.is_terminated
        gate.open.set()
    assert running.outcome == "through the gate"
    assert isinstance(queued.outcome, ActorStoppedError)
    assert puppet.is_terminated
    assert events.of(ActorTerminated) == [
        ActorTerminated(path="s/puppet", reason="stop was asked for", error=None)
    ]


async def test_stop_of_an_idle_actor(puppet: Ref[Puppet]) -> None:
    await wait()
    await puppet.stop()
    assert await puppet.wait_terminated() == Terminated(
        path="s/puppet", reason="stop was asked for", error=None
    )


async def test_stop_twice_and_after_the_end(puppet: Ref[Puppet]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(puppet.stop)
        nursery.start_soon(puppet.stop)
    await puppet.stop()
    assert puppet.is_terminated


async def test_drain_serves_queued_and_waiting_requests_first(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, mailbox=MailboxOptions(capacity=2))
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(gate))
        askers = [await started(nursery, ref, Echo(text)) for text in "abcd"]
        nursery.start_soon(lambda: ref.stop(drain=True))
        await wait()
        with pytest.raises(ActorStoppedError):
            await ref.ask(Echo("too late"))
        gate.open.set()
    assert [asker.outcome for asker in askers] == list("abcd")


async def test_drain_of_an_idle_actor(puppet: Ref[Puppet]) -> None:
    await wait()
    await puppet.stop(drain=True)
    assert puppet.is_terminated


async def test_a_stop_without_drain_overrides_a_drain(puppet: Ref[Puppet]) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, Do(gate))
        queued = await started(nursery, puppet, Echo("a"))
        nursery.start_soon(lambda: puppet.stop(drain=True))
        await wait()
        nursery.start_soon(puppet.stop)
        await wait()
        nursery.start_soon(lambda: puppet.stop(drain=True))
        await wait()
        gate.open.set()
    assert isinstance(queued.outcome, ActorStoppedError)


async def test_a_crash_while_draining_ends_it_and_refuses_the_rest(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    gate = Gate()

    async def act(actor: Puppet) -> None:
        await gate(actor)
        raise BoomError

    async with trio.open_nursery() as nursery:
        crashing = await started(nursery, puppet, Do(act))
        queued = await started(nursery, puppet, Echo("a"))
        nursery.start_soon(lambda: puppet.stop(drain=True))
        await wait()
        gate.open.set()
    assert isinstance(crashing.outcome, ActorFailedError)
    assert isinstance(queued.outcome, ActorStoppedError)
    assert (await puppet.wait_terminated()).reason == "stop was asked for"


async def test_after_its_grace_it_is_cancelled(
    system: ActorSystem, autojump_clock: trio.testing.MockClock
) -> None:
    ref = await system.spawn(Puppet, name="puppet", policy=Policy(grace=3.0))
    gate = Gate()
    async with trio.open_nursery() as nursery:
        running = await started(nursery, ref, Do(gate))
        await ref.stop()
        assert trio.current_time() == pytest.approx(3.0)
    assert gate.ended == "Cancelled"
    assert isinstance(running.outcome, ActorFailedError)
    assert str(running.outcome.__cause__) == (
        "actor s/puppet was cancelled: stop was asked for; it did not stop within its grace of 3 s"
    )
    assert system.quarantined == 0


async def test_an_infinite_grace_waits(system: ActorSystem, autojump_clock: trio.testing.MockClock) -> None:
    ref = await system.spawn(Puppet, policy=Policy(grace=float("inf")))

    async def act(actor: Puppet) -> str:
        await trio.sleep(80_000)
        return "done"

    async with trio.open_nursery() as nursery:
        running = await started(nursery, ref, Do(act))
        await ref.stop()
    assert running.outcome == "done"


async def test_a_grace_of_0_cancels_at_once(
    system: ActorSystem, autojump_clock: trio.testing.MockClock
) -> None:
    ref = await system.spawn(Puppet, policy=Policy(grace=0.0))
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(gate))
        await ref.stop()
        assert gate.ended == "Cancelled"
    assert trio.current_time() == 0.0


async def test_an_endless_actor_is_given_up_logged_counted_and_shown(
    system: ActorSystem, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    ref = await system.spawn(Puppet, name="puppet", policy=Policy(grace=2.0))
    gate = Gate()
    async with trio.open_nursery() as nursery:
        deferred = await started(nursery, ref, deferring([]))
        stuck = await started(nursery, ref, Do(lambda actor: shielded(actor, gate)))
        queued = await started(nursery, ref, Echo("queued"))
        await ref.stop()
        assert trio.current_time() == pytest.approx(4.0)
        assert system.tree().find("s/puppet").state == "quarantined"
        assert system.quarantined == 1
        assert not ref.is_terminated
        assert "actor s/puppet was cancelled and does not end; it is given up" in caplog.messages
        # Nobody waits for it.
        await wait()
        for asker, kind in (
            (stuck, ActorFailedError),
            (deferred, ActorFailedError),
            (queued, ActorStoppedError),
        ):
            assert isinstance(asker.outcome, kind)
            assert "was cancelled and does not end; it is given up" in str(asker.outcome)
        with pytest.raises(ActorStoppedError, match="it is given up"):
            await ref.ask(Echo("a"))
        # Its name is not free, and asking again changes nothing.
        with pytest.raises(ValueError, match="has a child named 'puppet' already"):
            await system.spawn(Puppet, name="puppet")
        await ref.stop()
        assert system.quarantined == 1
        assert caplog.messages.count("actor s/puppet was cancelled and does not end; it is given up") == 1
        gate.open.set()
        assert (await ref.wait_terminated()).path == "s/puppet"
    assert system.tree().children == ()


async def test_the_end_of_the_system_waits_for_actors_given_up(
    autojump_clock: trio.testing.MockClock,
) -> None:
    gate = Gate()

    async def release() -> None:
        await trio.sleep(100.0)
        gate.open.set()

    async with trio.open_nursery() as nursery:
        async with open_system("s") as system:
            ref = await system.spawn(Puppet, name="puppet", policy=Policy(grace=1.0))
            later = await system.spawn(Puppet, name="later")
            await started(nursery, ref, Run(lambda actor: shielded(actor, gate)))
            nursery.start_soon(release)
        assert trio.current_time() == pytest.approx(100.0)
    assert ref.is_terminated
    assert later.is_terminated


async def test_an_actor_given_up_does_not_come_back_as_running(
    system: ActorSystem, autojump_clock: trio.testing.MockClock
) -> None:
    """It is stuck in its start, and gets through in the end."""
    gate = Gate()

    async def start(actor: Puppet) -> None:
        if actor.context.restart.number:
            await shielded(actor, gate)

    ref = await system.spawn(
        Puppet, None, start, name="puppet", policy=Policy(grace=1.0, backoff=AT_ONCE.backoff)
    )
    await crash(ref)
    await gate.entered.wait()
    await ref.stop()
    assert system.tree().find("s/puppet").state == "quarantined"
    gate.open.set()
    await ref.wait_terminated()
    assert system.quarantined == 1


async def test_an_actor_stops_itself_after_the_message_being_served(puppet: Ref[Puppet]) -> None:
    gate = Gate()

    async def act(actor: Puppet) -> str:
        actor.context.stop()
        return "the last reply"

    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, Do(gate))
        last = await started(nursery, puppet, Do(act))
        queued = await started(nursery, puppet, Echo("a"))
        gate.open.set()
    assert last.outcome == "the last reply"
    assert isinstance(queued.outcome, ActorStoppedError)
    ended = await puppet.wait_terminated()
    assert (ended.reason, ended.error) == ("it stopped itself", None)


async def test_an_actor_cannot_wait_for_its_own_end(puppet: Ref[Puppet]) -> None:
    async def act(actor: Puppet) -> str:
        with pytest.raises(RuntimeError) as caught:
            await puppet.stop()
        return str(caught.value)

    assert await puppet.ask(Do(act)) == (
        "stop: actor s/puppet would wait for itself; call self.context.stop() instead"
    )


async def test_a_child_that_stops_its_parent_is_bounded_by_its_grace(
    system: ActorSystem, autojump_clock: trio.testing.MockClock
) -> None:
    children: list[Ref[Puppet]] = []

    async def start(actor: Puppet) -> None:
        children.append(await actor.context.spawn(Puppet, policy=Policy(grace=2.0)))

    parent = await system.spawn(Puppet, None, start)
    async with trio.open_nursery() as nursery:
        asker = start_ask(nursery, children[0], Do(lambda _: parent.stop()))
        await parent.wait_terminated()
    assert isinstance(asker.outcome, ActorFailedError)
    assert trio.current_time() == pytest.approx(2.0)


async def test_cancel_ends_it_now_with_the_reason(
    system: ActorSystem, puppet: Ref[Puppet], events: Events
) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        running = await started(nursery, puppet, Do(gate))
        queued = await started(nursery, puppet, Echo("a"))
        puppet.cancel("not needed")
        puppet.cancel("a second reason is too late")
    assert gate.ended == "Cancelled"
    assert isinstance(running.outcome, ActorFailedError)
    assert isinstance(running.outcome.__cause__, ActorStoppedError)
    assert str(running.outcome.__cause__) == "actor s/puppet was cancelled: not needed"
    assert isinstance(queued.outcome, ActorStoppedError)
    assert await puppet.wait_terminated() == Terminated(path="s/puppet", reason="not needed", error=None)
    assert [event.message for event in events.of(MessageDropped)] == [Echo("a")]


async def test_cancel_of_a_permanent_actor_restarts_nothing(puppet: Ref[Puppet], events: Events) -> None:
    puppet.cancel("enough")
    await puppet.wait_terminated()
    puppet.cancel("again")
    await wait()
    assert len(events.of(ActorStarted)) == 1


async def test_cancel_during_the_back_off(
    system: ActorSystem, autojump_clock: trio.testing.MockClock
) -> None:
    ref = await system.spawn(Puppet, policy=Policy(backoff=Backoff(initial=20.0)))
    await crash(ref)
    await wait()
    ref.cancel("enough")
    await ref.wait_terminated()
    assert trio.current_time() == 0.0


async def test_cancel_during_a_restart_s_start(system: ActorSystem) -> None:
    gate = Gate()

    async def start(actor: Puppet) -> None:
        if actor.context.restart.number:
            await gate(actor)

    ref = await system.spawn(Puppet, None, start, policy=AT_ONCE)
    await crash(ref)
    await gate.entered.wait()
    ref.cancel("enough")
    assert (await ref.wait_terminated()).reason == "enough"
    assert gate.ended == "Cancelled"


async def test_stop_during_a_restart_s_start_waits_for_it(system: ActorSystem, events: Events) -> None:
    gate = Gate()

    async def start(actor: Puppet) -> None:
        if actor.context.restart.number:
            await gate(actor)

    ref = await system.spawn(Puppet, None, start, name="puppet", policy=AT_ONCE)
    await crash(ref)
    await gate.entered.wait()
    async with trio.open_nursery() as nursery:
        queued = await started(nursery, ref, Number())
        nursery.start_soon(ref.stop)
        await wait()
        gate.open.set()
    assert isinstance(queued.outcome, ActorStoppedError)
    assert ref.is_terminated


async def test_wait_terminated_returns_at_once_after_the_end_and_is_a_checkpoint(puppet: Ref[Puppet]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(puppet.wait_terminated)
        nursery.start_soon(puppet.wait_terminated)
        await wait()
        await puppet.stop()
    with trio.testing.assert_checkpoints():
        await puppet.wait_terminated()


async def test_children_end_before_their_parent_s_resources_in_reverse_order(system: ActorSystem) -> None:
    log: list[str] = []

    async def start(actor: Puppet) -> None:
        for name in "abc":
            await actor.context.spawn(Puppet, log, name=name)

    parent = await system.spawn(Puppet, log, start, name="p")
    assert log == ["+a0", "+b0", "+c0", "+p0"]
    log.clear()
    await parent.stop()
    assert log == ["-c0", "-b0", "-a0", "-p0"]


async def test_each_child_has_its_own_grace(
    system: ActorSystem, autojump_clock: trio.testing.MockClock
) -> None:
    refs: list[Ref[Puppet]] = []

    async def sleep(actor: Puppet) -> None:
        await trio.sleep_forever()

    async def start(actor: Puppet) -> None:
        for grace in (1.0, 2.0, 4.0):
            ref = await actor.context.spawn(Puppet, policy=Policy(grace=grace))
            await ref.tell(Run(sleep))
            refs.append(ref)

    parent = await system.spawn(Puppet, None, start, policy=Policy(grace=100.0))
    await parent.stop()
    assert trio.current_time() == pytest.approx(7.0)


class Slow(Actor):
    """Takes a second to end."""

    ends: ClassVar[list[tuple[str, float]]] = []

    @asynccontextmanager
    async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:
        yield
        await trio.sleep(1.0)
        self.ends.append((context.path, trio.current_time()))


class Alike(Slow):
    ends_together = True


async def test_children_that_need_no_sibling_end_at_the_same_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    Slow.ends.clear()
    async with open_system("s") as system:
        for name, kind in {"a": Alike, "b": Alike, "c": Slow, "d": Alike, "e": Alike, "f": Alike}.items():
            await system.spawn(kind, name=name)
        began = trio.current_time()
    # In reverse start order all the same, where another is in between.
    assert sorted(Slow.ends, key=lambda end: (end[1], end[0])) == [
        *((f"s/{name}", began + 1.0) for name in "def"),
        ("s/c", began + 2.0),
        *((f"s/{name}", began + 3.0) for name in "ab"),
    ]


async def test_children_end_with_a_crash_of_their_parent(system: ActorSystem) -> None:
    log: list[str] = []
    children: list[Ref[Puppet]] = []

    async def start(actor: Puppet) -> None:
        children.append(await actor.context.spawn(Puppet, log, name="c"))

    parent = await system.spawn(Puppet, log, start, name="p", policy=AT_ONCE)
    await crash(parent)
    assert await parent.ask(Number()) == 1
    assert log == ["+c0", "+p0", "-c0", "-p0", "+c0", "+p1"]
    assert (await children[0].wait_terminated()).reason == "its supervisor ended"


async def test_children_of_a_start_that_fails_are_ended(system: ActorSystem) -> None:
    log: list[str] = []

    async def start(actor: Puppet) -> None:
        await actor.context.spawn(Puppet, log, name="c")
        raise ValueError("after the child")

    with pytest.raises(ValueError, match="after the child"):
        await system.spawn(Puppet, log, start)
    assert log == ["+c0", "-c0"]


async def test_a_cancelled_stop_takes_effect_all_the_same(puppet: Ref[Puppet]) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, Do(gate))
        with trio.CancelScope() as scope:
            scope.cancel()
            await puppet.stop()
        assert scope.cancelled_caught
        gate.open.set()
        await puppet.wait_terminated()


async def test_a_crash_during_stop_causes_no_restart(
    system: ActorSystem, puppet: Ref[Puppet], events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    gate = Gate()

    async def act(actor: Puppet) -> None:
        await gate(actor)
        raise BoomError("at the last moment")

    async with trio.open_nursery() as nursery:
        crashing = await started(nursery, puppet, Do(act))
        nursery.start_soon(puppet.stop)
        await wait()
        gate.open.set()
    assert isinstance(crashing.outcome, ActorFailedError)
    assert isinstance(crashing.outcome.__cause__, BoomError)
    assert "at the last moment" in caplog.text
    assert len(events.of(ActorStarted)) == 1


async def test_a_ref_prints_its_actor(puppet: Ref[Puppet]) -> None:
    assert repr(puppet) == "<Ref s/puppet (Puppet, running)>"
    await puppet.stop()
    assert repr(puppet) == "<Ref s/puppet (Puppet, terminated)>"


async def test_a_note_told_right_before_the_stop_is_refused(puppet: Ref[Puppet], events: Events) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, Do(gate))
        puppet.tell_nowait(Note("a"))
        nursery.start_soon(puppet.stop)
        await wait()
        gate.open.set()
    assert [event.message for event in events.of(MessageDropped)] == [Note("a")]


async def test_a_finished_actor_serves_its_queue_during_a_drain(puppet: Ref[Puppet]) -> None:
    gate = Gate()

    async def finish(actor: Puppet) -> None:
        await gate(actor)
        actor.context.finish()

    async with trio.open_nursery() as nursery:
        await puppet.tell(Run(finish))
        asker = await started(nursery, puppet, Echo("queued"))
        nursery.start_soon(partial(puppet.stop, drain=True))
        await wait()
        gate.open.set()
    assert asker.outcome == "queued"
