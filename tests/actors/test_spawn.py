"""Spawning: names, and cancelled, refused or stopped starts."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from sample_actors import AT_ONCE, Do, Echo, Events, Gate, Number, Puppet, crash, shielded

from trio_accel.actors import ActorSystem, Policy, open_system

wait = trio.testing.wait_all_tasks_blocked


async def test_spawn_during_stop_is_refused(system: ActorSystem) -> None:
    caught: list[RuntimeError] = []

    async def end(actor: Puppet) -> None:
        try:
            await actor.context.spawn(Puppet, name="late")
        except RuntimeError as error:
            caught.append(error)

    async def start(actor: Puppet) -> None:
        await actor.context.spawn(Puppet)

    ref = await system.spawn(Puppet, None, start, end, name="p")
    await ref.stop()
    assert str(caught[0]) == "spawn: s/p is stopping and starts no 'late'"


async def test_spawn_by_an_ended_incarnation_is_refused(system: ActorSystem) -> None:
    contexts: list[Any] = []

    async def act(actor: Puppet) -> None:
        contexts.append(actor.context)

    ref = await system.spawn(Puppet, name="p", policy=AT_ONCE)
    await ref.ask(Do(act))
    await crash(ref)
    await ref.ask(Number())
    with pytest.raises(RuntimeError, match="spawn: this incarnation of s/p has ended and starts no Puppet"):
        await contexts[0].spawn(Puppet, name="late")
    await ref.stop()
    with pytest.raises(RuntimeError, match="spawn: this incarnation of s/p has ended"):
        await contexts[0].spawn(Puppet)


async def test_spawn_cancelled_during_the_start_leaves_nothing(system: ActorSystem) -> None:
    gate, cleanup = Gate(), Gate()

    async def start(actor: Puppet) -> None:
        try:
            await gate(actor)
        finally:
            await shielded(actor, cleanup)  # noqa: ASYNC102  # the test is about it

    ended: list[str] = []

    async def spawn() -> None:
        with scope:
            await system.spawn(Puppet, None, start, name="puppet")
        ended.append("spawn")

    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(spawn)
        await gate.entered.wait()
        scope.cancel()
        await wait()
        # It waits until the actor has ended.
        assert ended == []
        assert system.tree().find("s/puppet").state == "starting"
        cleanup.open.set()
    assert system.tree().children == ()


async def test_spawn_cancelled_before_the_start_leaves_nothing(system: ActorSystem, events: Events) -> None:
    gate = Gate()
    with trio.CancelScope() as scope:
        scope.cancel()
        await system.spawn(Puppet, None, gate)
    assert scope.cancelled_caught
    assert system.tree().children == ()
    assert gate.ended in (None, "Cancelled")


async def test_spawn_stopped_during_the_start_gives_the_reason(system: ActorSystem) -> None:
    gate = Gate()
    caught: list[BaseException] = []

    async def spawn() -> None:
        try:
            await system.spawn(Puppet, None, gate, name="puppet")
        except RuntimeError as error:
            caught.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(spawn)
        await gate.entered.wait()
        system._supervisor.children["puppet"].cancel("not wanted")
    assert str(caught[0]) == "spawn: s/puppet was stopped while it started: not wanted"


async def test_a_system_that_closes_during_a_start_ends_it(autojump_clock: trio.testing.MockClock) -> None:
    gate = Gate()
    caught: list[BaseException] = []

    async def spawn(system: ActorSystem) -> None:
        try:
            await system.spawn(Puppet, None, gate, policy=Policy(grace=1.0))
        except RuntimeError as error:
            caught.append(error)

    async with trio.open_nursery() as nursery, open_system("s") as system:
        nursery.start_soon(spawn, system)  # noqa: ASYNC111  # the test is about it
        await gate.entered.wait()
    assert gate.ended == "Cancelled"
    assert len(caught) == 1


async def test_names_are_free_again_after_the_end(system: ActorSystem) -> None:
    for _ in range(3):
        ref = await system.spawn(Puppet, name="puppet")
        assert ref.path == "s/puppet"
        assert await ref.ask(Echo("a")) == "a"
        await ref.stop()
        with pytest.raises(KeyError):
            system.tree().find("s/puppet")


async def test_names_are_made_from_the_class_and_skip_existing_names(system: ActorSystem) -> None:
    await system.spawn(Puppet, name="puppet-1")
    first = await system.spawn(Puppet)
    second = await system.spawn(Puppet)
    assert (first.path, second.path) == ("s/puppet-2", "s/puppet-3")
