"""Watching other actors' ends."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from sample_actors import AT_ONCE, BoomError, Do, Echo, Events, Gate, Note, Number, Puppet, crash, started

from trio_accel.actors import (
    ActorSystem,
    Directive,
    Message,
    MessageDropped,
    Policy,
    Ref,
    Restart,
    Terminated,
)

wait = trio.testing.wait_all_tasks_blocked


def watching(target: Ref[Puppet], to: Any = None) -> Do:
    async def act(actor: Puppet) -> None:
        actor.context.watch(target, to=to or (lambda ended: Note(f"{ended.path} {ended.reason}")))

    return Do(act)


async def notes_of(ref: Ref[Puppet]) -> list[str]:
    await wait()

    async def act(actor: Puppet) -> list[str]:
        return list(actor.notes)

    notes: list[str] = await ref.ask(Do(act))
    return notes


@pytest.fixture
async def other(system: ActorSystem) -> Ref[Puppet]:
    return await system.spawn(Puppet, name="other", policy=AT_ONCE)


async def test_the_end_is_reported_once(puppet: Ref[Puppet], other: Ref[Puppet]) -> None:
    await puppet.ask(watching(other))
    await other.stop()
    assert await notes_of(puppet) == ["s/other stop was asked for"]


async def test_a_message_instead_of_a_function(puppet: Ref[Puppet], other: Ref[Puppet]) -> None:
    await puppet.ask(watching(other, Note("the other has ended")))
    await other.stop()
    assert await notes_of(puppet) == ["the other has ended"]


async def test_a_restart_is_not_an_end(puppet: Ref[Puppet], other: Ref[Puppet]) -> None:
    await puppet.ask(watching(other))
    await crash(other)
    assert await other.ask(Number()) == 1
    assert await notes_of(puppet) == []


async def test_an_ended_actor_is_reported_at_once(puppet: Ref[Puppet], other: Ref[Puppet]) -> None:
    await other.stop()
    await puppet.ask(watching(other))
    assert await notes_of(puppet) == ["s/other stop was asked for"]


async def test_the_cause_of_a_failure_is_reported(system: ActorSystem, puppet: Ref[Puppet]) -> None:
    other = await system.spawn(Puppet, name="o", policy=Policy(directives={BoomError: Directive.STOP}))
    ends: list[Terminated] = []

    def make(ended: Terminated) -> Note:
        ends.append(ended)
        return Note("ended")

    await puppet.ask(watching(other, make))
    error = BoomError()
    await crash(other, error)
    assert await notes_of(puppet) == ["ended"]
    assert ends == [await other.wait_terminated()]
    assert ends[0].error is error


async def test_unwatch(puppet: Ref[Puppet], other: Ref[Puppet]) -> None:
    async def act(actor: Puppet) -> None:
        actor.context.unwatch(other)
        actor.context.watch(other, to=Note("ended"))
        actor.context.unwatch(other)
        actor.context.unwatch(other)

    await puppet.ask(Do(act))
    await other.stop()
    assert await notes_of(puppet) == []


async def test_a_second_watch_takes_the_place_of_the_first(puppet: Ref[Puppet], other: Ref[Puppet]) -> None:
    await puppet.ask(watching(other, Note("first")))
    await puppet.ask(watching(other, Note("second")))
    await other.stop()
    assert await notes_of(puppet) == ["second"]


async def test_the_watch_ends_with_the_incarnation(system: ActorSystem, other: Ref[Puppet]) -> None:
    puppet = await system.spawn(Puppet, policy=AT_ONCE)
    await puppet.ask(watching(other))
    await crash(puppet)
    await other.stop()
    assert await notes_of(puppet) == []


async def test_a_watch_in_the_lifespan_is_there_in_each_incarnation(
    system: ActorSystem, other: Ref[Puppet]
) -> None:
    async def start(actor: Puppet) -> None:
        actor.context.watch(other, to=Note("ended"))

    puppet = await system.spawn(Puppet, None, start, policy=AT_ONCE)
    await crash(puppet)
    await puppet.ask(Number())
    await other.stop()
    assert await notes_of(puppet) == ["ended"]


async def test_two_watch_each_other(puppet: Ref[Puppet], other: Ref[Puppet], system: ActorSystem) -> None:
    await puppet.ask(watching(other))
    await other.ask(watching(puppet))
    await other.stop()
    assert await notes_of(puppet) == ["s/other stop was asked for"]
    await puppet.stop()


async def test_watchers_of_watchers(system: ActorSystem) -> None:
    """Each ends when the one before has ended."""
    log: list[str] = []

    async def start(actor: Puppet) -> None:
        if refs:
            actor.context.watch(refs[-1], to=Stop())

    class Stop(Message["Follower"]):
        pass

    from trio_accel.actors import handles

    class Follower(Puppet):
        @handles(Stop)
        async def stop(self, message: Stop) -> None:
            self.context.stop()

    refs: list[Ref[Follower]] = []
    for name in "abcd":
        ref = await system.spawn(Follower, log, start, name=name)
        refs.append(ref)
    log.clear()
    await refs[0].stop()
    await refs[-1].wait_terminated()
    assert log == ["-a0", "-b0", "-c0", "-d0"]


async def test_an_actor_watches_its_child(system: ActorSystem) -> None:
    children: list[Ref[Puppet]] = []

    async def start(actor: Puppet) -> None:
        child = await actor.context.spawn(Puppet, name="child", restart=Restart.TEMPORARY)
        actor.context.watch(child, to=lambda ended: Note(repr(ended.error)))
        children.append(child)

    puppet = await system.spawn(Puppet, None, start)
    await crash(children[0])
    await children[0].wait_terminated()
    assert await notes_of(puppet) == ["BoomError('boom')"]


async def test_the_message_of_a_dead_watcher_is_a_dead_letter(
    system: ActorSystem, puppet: Ref[Puppet], other: Ref[Puppet], events: Events
) -> None:
    gate = Gate()
    await puppet.ask(watching(other, Note("ended")))
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, Do(gate))
        nursery.start_soon(puppet.stop)
        await wait()
        await other.stop()
        gate.open.set()
    assert [event.message for event in events.of(MessageDropped)] == [Note("ended")]
    assert system.dead_letters == 1


async def test_an_unknown_message_is_refused_when_the_watch_begins(
    puppet: Ref[Puppet], other: Ref[Puppet]
) -> None:
    class Unknown(Message["Puppet"]):
        pass

    async def act(actor: Puppet) -> str:
        with pytest.raises(TypeError) as caught:
            actor.context.watch(other, to=Unknown())
        return str(caught.value)

    assert "watch: Puppet (s/puppet) does not handle Unknown" in await puppet.ask(Do(act))


async def test_a_request_is_refused_as_the_message_of_a_watch(
    puppet: Ref[Puppet], other: Ref[Puppet]
) -> None:
    async def act(actor: Puppet) -> str:
        with pytest.raises(TypeError) as caught:
            actor.context.watch(other, to=Echo("a"))
        return str(caught.value)

    assert await puppet.ask(Do(act)) == (
        "watch: Echo is a Request, which goes with ask(); here a Message is needed"
    )


@pytest.mark.parametrize("fault", ["raises", "unknown"])
async def test_a_function_that_fails_crashes_the_watcher_and_not_the_watched_s_supervisor(
    system: ActorSystem, other: Ref[Puppet], fault: str
) -> None:
    def make(ended: Terminated) -> Any:
        if fault == "raises":
            raise BoomError("in the function")
        return "no message"

    puppet = await system.spawn(Puppet, name="puppet", policy=AT_ONCE)
    await puppet.ask(watching(other, make))
    await other.stop()
    assert await puppet.ask(Number()) == 1
    error = system.tree().find("s/puppet").last_error
    assert error is not None
    assert error.startswith("BoomError: in the function" if fault == "raises" else "TypeError: watch: ")


async def test_watching_and_unwatching_leaves_nothing(system: ActorSystem, puppet: Ref[Puppet]) -> None:
    long_lived = await system.spawn(Puppet)

    async def act(actor: Puppet) -> int:
        incarnation = actor.context._incarnation
        for _ in range(100):
            child = await actor.context.spawn(Puppet)
            actor.context.watch(child, to=Note("ended"))
            actor.context.watch(long_lived, to=Note("ended"))
            actor.context.unwatch(long_lived)
            await child.stop()
        return len(incarnation.watched or ())

    assert await puppet.ask(Do(act)) == 0
    assert not long_lived._cell._watchers
