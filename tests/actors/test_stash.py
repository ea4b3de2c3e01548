"""Stash: setting the message being served aside."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from sample_actors import (
    AT_ONCE,
    Do,
    DoGrouped,
    Echo,
    Events,
    Gate,
    Note,
    Puppet,
    Run,
    crash,
    start_ask,
    started,
)

from trio_accel.actors import (
    Actor,
    ActorFailedError,
    ActorStoppedError,
    ActorSystem,
    MailboxFullError,
    MailboxOptions,
    Message,
    MessageCancelled,
    MessageCompleted,
    MessageDropped,
    MessageEvent,
    MessageStarted,
    Ref,
    Request,
    handles,
)

wait = trio.testing.wait_all_tasks_blocked


class Read(Request["Door", str]):
    pass


class Jot(Message["Door"]):
    pass


class ReadGrouped(Request["Door", str]):
    pass


class Open(Request["Door", None]):
    pass


class OpenGrouped(Request["Door", None]):
    pass


class Slam(Request["Door", str]):
    """Stash, and raise all the same."""


class Linger(Request["Door", str]):
    """Stash, and continue for a while."""


class Door(Actor):
    """Sets what it is asked aside until it is open; an incarnation begins shut."""

    def __init__(self, gate: Gate, served: list[str]) -> None:
        self.is_open = False
        self.gate = gate
        self.served = served

    def _serve(self, message: Request[Door, str] | Message[Door]) -> str:
        if not self.is_open:
            self.context.stash(message)
            return "not this"
        self.served.append(type(message).__name__)
        return f"read {len(self.served)}"

    @handles(Read)
    async def read(self, message: Read) -> str:
        return self._serve(message)

    @handles(Jot)
    async def jot(self, message: Jot) -> None:
        self._serve(message)

    @handles(ReadGrouped, group="g", limit=4)
    async def read_grouped(self, message: ReadGrouped) -> str:
        return self._serve(message)

    @handles(Slam)
    async def slam(self, message: Slam) -> str:
        self._serve(message)
        raise ValueError("slam")

    @handles(Linger)
    async def linger(self, message: Linger) -> str:
        reply = self._serve(message)
        await self.gate(self)  # type: ignore[arg-type]
        return reply

    @handles(Open)
    async def open(self, message: Open) -> None:
        self.is_open = True
        self.context.unstash_all()

    @handles(OpenGrouped, group="g", limit=4)
    async def open_grouped(self, message: OpenGrouped) -> None:
        self.is_open = True
        self.context.unstash_all()


async def spawn(
    system: ActorSystem, *, stash: int = 64, capacity: int = 64
) -> tuple[Ref[Door], Gate, list[str]]:
    gate, served = Gate(), []
    options = MailboxOptions(stash=stash, capacity=capacity)
    return await system.spawn(Door, gate, served, name="door", mailbox=options, policy=AT_ONCE), gate, served


async def test_the_asker_of_a_stashed_request_waits_until_it_is_served(system: ActorSystem) -> None:
    door, _, _ = await spawn(system)
    async with trio.open_nursery() as nursery:
        first = await started(nursery, door, Read())
        second = await started(nursery, door, Read())
        assert first.is_waiting
        assert second.is_waiting
        assert system.tree().find("s/door").stashed == 2
        await door.ask(Open())
    assert (first.outcome, second.outcome) == ("read 1", "read 2")
    assert system.tree().find("s/door").stashed == 0


async def test_stashed_messages_precede_the_queue_and_exceed_its_capacity(system: ActorSystem) -> None:
    door, _, served = await spawn(system, capacity=1)
    async with trio.open_nursery() as nursery:
        for message in (Read(), Jot(), Read()):
            await started(nursery, door, message)
        opening = start_ask(nursery, door, Open())
        await wait()
        assert opening.outcome is None
    assert served == ["Read", "Jot", "Read"]


async def test_served_counts_a_stashed_message_once(system: ActorSystem) -> None:
    door, _, _ = await spawn(system)
    async with trio.open_nursery() as nursery:
        await started(nursery, door, Read())
        assert system.tree().find("s/door").handled == 0
        await door.ask(Open())
    assert system.tree().find("s/door").handled == 2


async def test_observers_see_a_stashed_request_begin_and_end_once(
    system: ActorSystem, events: Events
) -> None:
    door, _, _ = await spawn(system)
    async with trio.open_nursery() as nursery:
        await started(nursery, door, Read())
        await door.ask(Open())
    seen = [(type(event).__name__, event.message_type) for event in events.of(MessageEvent)]
    assert sorted(seen) == [
        ("MessageCompleted", "Open"),
        ("MessageCompleted", "Read"),
        ("MessageStarted", "Open"),
        ("MessageStarted", "Read"),
    ]


async def test_a_restart_puts_stashed_messages_back(system: ActorSystem) -> None:
    door, _, served = await spawn(system)
    async with trio.open_nursery() as nursery:
        reading = await started(nursery, door, Read())
        slamming = await started(nursery, door, Slam())
        assert isinstance(slamming.outcome, ActorFailedError)
        # The next incarnation is shut too, and sets it aside again.
        assert reading.is_waiting
        assert system.tree().find("s/door").stashed == 1
        await door.ask(Open())
    assert reading.outcome == "read 1"
    assert served == ["Read"]


async def test_a_message_stashed_by_a_crashed_handler_is_not_served_again(
    system: ActorSystem,
) -> None:
    door, _, _ = await spawn(system)
    async with trio.open_nursery() as nursery:
        slamming = await started(nursery, door, Slam())
    assert isinstance(slamming.outcome, ActorFailedError)
    assert isinstance(slamming.outcome.__cause__, ValueError)
    node = system.tree().find("s/door")
    assert (node.restarts, node.stashed, node.mailbox_depth) == (1, 0, 0)


async def test_the_end_refuses_stashed_messages(system: ActorSystem, events: Events) -> None:
    door, _, _ = await spawn(system)
    async with trio.open_nursery() as nursery:
        reading = await started(nursery, door, Read())
        await door.stop(drain=True)
    assert isinstance(reading.outcome, ActorStoppedError)
    assert [event.message_type for event in events.of(MessageDropped)] == ["Read"]


async def test_a_stashed_request_is_withdrawn_when_its_asker_is_cancelled(
    system: ActorSystem, events: Events
) -> None:
    door, _, served = await spawn(system)
    async with trio.open_nursery() as nursery:
        reading = await started(nursery, door, Read())
        reading.scope.cancel()
        await wait()
        assert isinstance(reading.outcome, trio.Cancelled)
        await door.ask(Open())
    assert served == []
    assert len(events.of(MessageStarted)) == 2
    assert [event.message_type for event in events.of(MessageCancelled)] == ["Read"]
    assert [event.message_type for event in events.of(MessageCompleted)] == ["Open"]


async def test_cancelled_while_its_handler_continues_after_the_stash(system: ActorSystem) -> None:
    door, gate, served = await spawn(system)
    async with trio.open_nursery() as nursery:
        lingering = await started(nursery, door, Linger())
        lingering.scope.cancel()
        await wait()
        assert gate.ended == "Cancelled"
        assert isinstance(lingering.outcome, trio.Cancelled)
        await door.ask(Open())
    assert served == []


async def test_cancelled_while_its_handler_ignores_it_after_the_stash(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, name="puppet")
    gate = Gate()

    async def act(actor: Puppet) -> None:
        actor.context.stash(message)
        with trio.CancelScope(shield=True):
            await gate(actor)

    message = Do(act)
    async with trio.open_nursery() as nursery:
        asking = await started(nursery, ref, message)
        asking.scope.cancel()
        await wait()
        assert asking.is_waiting
        gate.open.set()
    assert isinstance(asking.outcome, trio.Cancelled)
    assert system.tree().find("s/puppet").stashed == 0


async def test_unstash_all_from_outside_wakes_an_idle_actor(system: ActorSystem) -> None:
    door, _, served = await spawn(system)
    async with trio.open_nursery() as nursery:
        reading = await started(nursery, door, Read())
        second = await started(nursery, door, Read())
        await door.ask(OpenGrouped())
        await wait()
        assert (reading.outcome, second.outcome) == ("read 1", "read 2")
    assert served == ["Read", "Read"]


async def test_a_handler_that_continues_after_the_stash_has_its_message_for_itself(
    system: ActorSystem,
) -> None:
    ref = await system.spawn(Puppet, name="puppet")
    gate = Gate()
    runs: list[int] = []

    async def act(actor: Puppet) -> str:
        runs.append(len(runs))
        if len(runs) == 1:
            actor.context.stash(message)
            await gate(actor)
            return "first"
        return "second"

    async def unstash(actor: Puppet) -> None:
        actor.context.unstash_all()

    message = DoGrouped(act)
    async with trio.open_nursery() as nursery:
        asking = await started(nursery, ref, message)
        await ref.ask(Do(unstash))
        await wait()
        assert runs == [0]
        gate.open.set()
        await wait()
        assert asking.is_waiting
        await ref.ask(Do(unstash))
    assert asking.outcome == "second"
    assert runs == [0, 1]


async def test_the_stash_is_bounded(system: ActorSystem) -> None:
    door, _, _ = await spawn(system, stash=1)
    async with trio.open_nursery() as nursery:
        first = await started(nursery, door, Read())
        second = await started(nursery, door, Read())
        assert isinstance(second.outcome, ActorFailedError)
        cause = second.outcome.__cause__
        assert isinstance(cause, MailboxFullError)
        assert str(cause) == (
            "stash of s/door is full (1 messages); call unstash_all(), or raise MailboxOptions.stash"
        )
        await door.ask(Open())
    assert first.outcome == "read 1"


async def test_the_stash_is_bounded_for_concurrent_handlers(system: ActorSystem) -> None:
    options = MailboxOptions(stash=1)
    ref = await system.spawn(Puppet, name="puppet", mailbox=options, policy=AT_ONCE)
    gates = [Gate(), Gate()]
    errors: list[Exception] = []

    def stashing(gate: Gate) -> DoGrouped:
        async def act(actor: Puppet) -> None:
            try:
                actor.context.stash(message)
            except MailboxFullError as error:
                errors.append(error)
            await gate(actor)

        message = DoGrouped(act)
        return message

    async with trio.open_nursery() as nursery:
        askers = [await started(nursery, ref, stashing(gate)) for gate in gates]
        assert len(errors) == 1
        for gate in gates:
            gate.open.set()
        await wait()
        assert askers[0].is_waiting
        assert askers[1].outcome is None
        await ref.stop()


async def test_only_the_message_being_served_can_be_stashed(system: ActorSystem, puppet: Ref[Puppet]) -> None:
    caught: list[RuntimeError] = []

    async def act(actor: Puppet) -> None:
        try:
            actor.context.stash(Echo("another"))
        except RuntimeError as error:
            caught.append(error)

    await puppet.ask(Do(act))
    assert str(caught[0]) == (
        "stash: actor s/puppet is not serving Echo(text='another'); stash what the handler got"
    )


async def test_a_message_cannot_be_stashed_twice_nor_after_defer(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    async def twice(actor: Puppet) -> None:
        actor.context.stash(first)
        with pytest.raises(RuntimeError, match="is not serving"):
            actor.context.stash(first)
        with pytest.raises(RuntimeError, match="no request that could be deferred"):
            actor.context.defer()

    async def after_defer(actor: Puppet) -> object:
        reply = actor.context.defer()
        with pytest.raises(RuntimeError, match="is not serving"):
            actor.context.stash(second)
        reply.set("done")
        return reply

    first, second = Do(twice), Do(after_defer)
    async with trio.open_nursery() as nursery:
        stashed = await started(nursery, puppet, first)
        assert stashed.is_waiting
        assert await puppet.ask(second) == "done"
        await puppet.stop()


async def test_unstash_all_of_nothing_does_nothing(system: ActorSystem, puppet: Ref[Puppet]) -> None:
    async def act(actor: Puppet) -> None:
        actor.context.unstash_all()

    await puppet.ask(Do(act))
    assert system.tree().find("s/puppet").mailbox_depth == 0


async def test_the_message_outside_a_handler_cannot_be_stashed(system: ActorSystem) -> None:
    async def start(actor: Puppet) -> None:
        actor.context.stash(Note("x"))

    with pytest.raises(RuntimeError, match="is not serving"):
        await system.spawn(Puppet, None, start)


async def test_a_told_message_can_be_stashed(system: ActorSystem) -> None:
    puppet = await system.spawn(Puppet, name="puppet", policy=AT_ONCE)
    runs: list[int] = []

    async def act(actor: Puppet) -> None:
        runs.append(actor.context.restart.number)
        if len(runs) == 1:
            actor.context.stash(message)

    message = Run(act)
    await puppet.tell(message)
    await wait()
    assert runs == [0]
    await crash(puppet)
    await wait()
    assert runs == [0, 1]
