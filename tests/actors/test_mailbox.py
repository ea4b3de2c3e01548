"""Mailboxes: order, capacity, the four overflow policies, the control lane, survival of restarts."""

from __future__ import annotations

import gc
from time import process_time
from typing import Any

import pytest
import trio
import trio.testing
from sample_actors import (
    AT_ONCE,
    Asker,
    Crash,
    Do,
    Echo,
    Events,
    Gate,
    Note,
    Puppet,
    Run,
    start_ask,
    started,
)

from trio_accel.actors import (
    ActorFailedError,
    ActorRestartingError,
    ActorStoppedError,
    ActorSystem,
    Backoff,
    MailboxFullError,
    MailboxOptions,
    MessageDropped,
    Overflow,
    Policy,
    Ref,
    Terminated,
)

wait = trio.testing.wait_all_tasks_blocked


async def spawn(
    system: ActorSystem, capacity: int, overflow: Overflow = Overflow.WAIT, **more: Any
) -> Ref[Puppet]:
    options = MailboxOptions(capacity=capacity, overflow=overflow, **more)
    return await system.spawn(Puppet, name="puppet", mailbox=options, policy=AT_ONCE)


async def notes_of(ref: Ref[Puppet]) -> list[str]:
    async def act(actor: Puppet) -> list[str]:
        return list(actor.notes)

    notes: list[str] = await ref.ask(Do(act))
    return notes


async def test_messages_are_served_in_the_order_of_each_sender(system: ActorSystem) -> None:
    ref = await spawn(system, 4)
    received: list[tuple[int, int]] = []

    async def send(sender: int) -> None:
        for number in range(50):

            async def act(actor: Puppet, key: tuple[int, int] = (sender, number)) -> tuple[int, int]:
                received.append(key)
                return key

            assert await ref.ask(Do(act)) == (sender, number)

    async with trio.open_nursery() as nursery:
        for sender in range(8):
            nursery.start_soon(send, sender)
    assert len(received) == 400
    for sender in range(8):
        assert [number for which, number in received if which == sender] == list(range(50))


async def test_told_and_asked_messages_share_one_queue(system: ActorSystem) -> None:
    ref = await spawn(system, 8)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(gate))
        ref.tell_nowait(Note("a"))
        await started(nursery, ref, Echo("b"))
        ref.tell_nowait(Note("c"))
        gate.open.set()
    assert await notes_of(ref) == ["a", "b", "c"]


async def test_wait_senders_wait_for_room_and_enter_in_order(system: ActorSystem) -> None:
    ref = await spawn(system, 2)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(gate))
        for text in "ab":
            ref.tell_nowait(Note(text))
        asked = await started(nursery, ref, Echo("c"))
        told = await started(nursery, ref, Note("d"))
        node = system.tree().find("s/puppet")
        assert (node.mailbox_depth, node.mailbox_waiting, node.mailbox_peak) == (2, 2, 2)
        assert asked.is_waiting
        assert told.is_waiting
        gate.open.set()
    assert (asked.outcome, told.outcome) == ("c", "told")
    assert await notes_of(ref) == ["a", "b", "c", "d"]
    assert system.tree().find("s/puppet").dropped == 0


async def test_a_tell_that_waits_is_admitted_before_its_message_is_served(system: ActorSystem) -> None:
    ref = await spawn(system, 1)
    first, second = Gate(), Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(first))
        await started(nursery, ref, Run(second))
        told = await started(nursery, ref, Note("x"))
        assert told.is_waiting
        first.open.set()
        await second.entered.wait()
        await wait()
        assert told.outcome == "told"
        second.open.set()


async def test_cancelled_while_waiting_for_room_neither_is_sent(system: ActorSystem) -> None:
    ref = await spawn(system, 1)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(gate))
        ref.tell_nowait(Note("a"))
        asked = await started(nursery, ref, Echo("b"))
        told = await started(nursery, ref, Note("c"))
        last = await started(nursery, ref, Note("d"))
        asked.scope.cancel()
        told.scope.cancel()
        await wait()
        assert isinstance(asked.outcome, trio.Cancelled)
        assert isinstance(told.outcome, trio.Cancelled)
        assert system.tree().find("s/puppet").mailbox_waiting == 1
        gate.open.set()
    assert last.outcome == "told"
    assert await notes_of(ref) == ["a", "d"]


async def test_a_withdrawn_message_makes_room_for_a_waiting_message(system: ActorSystem) -> None:
    ref = await spawn(system, 1)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(gate))
        queued = await started(nursery, ref, Echo("a"))
        told = await started(nursery, ref, Note("b"))
        queued.scope.cancel()
        await wait()
        assert told.outcome == "told"
        gate.open.set()
    assert await notes_of(ref) == ["b"]


@pytest.mark.parametrize("overflow", [Overflow.REJECT, Overflow.DROP_NEWEST])
async def test_reject_and_drop_newest_refuse_the_new_ask(
    system: ActorSystem, events: Events, overflow: Overflow
) -> None:
    ref = await spawn(system, 1, overflow)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(gate))
        queued = await started(nursery, ref, Echo("a"))
        with pytest.raises(MailboxFullError, match=r"Echo was .*: the mailbox of s/puppet is full \(1 mess"):
            await ref.ask(Echo("b"))
        gate.open.set()
    assert queued.outcome == "a"
    assert await notes_of(ref) == ["a"]
    assert [event.message for event in events.of(MessageDropped)] == [Echo("b")]
    assert system.tree().find("s/puppet").dropped == system.dead_letters == 1


async def test_reject_a_tell_gets_an_error(system: ActorSystem) -> None:
    ref = await spawn(system, 1, Overflow.REJECT)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(gate))
        await ref.tell(Note("a"))
        with pytest.raises(MailboxFullError):
            await ref.tell(Note("b"))
        with pytest.raises(MailboxFullError):
            ref.tell_nowait(Note("c"))
        gate.open.set()
    assert await notes_of(ref) == ["a"]


async def test_drop_newest_a_tell_ends_silently_and_is_counted(system: ActorSystem, events: Events) -> None:
    ref = await spawn(system, 1, Overflow.DROP_NEWEST)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(gate))
        await ref.tell(Note("a"))
        await ref.tell(Note("b"))
        ref.tell_nowait(Note("c"))
        gate.open.set()
    assert await notes_of(ref) == ["a"]
    assert [event.message for event in events.of(MessageDropped)] == [Note("b"), Note("c")]
    assert system.dead_letters == 2


async def test_drop_oldest_removes_the_oldest_and_its_asker_gets_an_error(
    system: ActorSystem, events: Events
) -> None:
    ref = await spawn(system, 2, Overflow.DROP_OLDEST)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(gate))
        oldest = await started(nursery, ref, Echo("a"))
        kept = await started(nursery, ref, Echo("b"))
        ref.tell_nowait(Note("c"))
        await wait()
        assert isinstance(oldest.outcome, MailboxFullError)
        assert "dropped in favour of a newer message" in str(oldest.outcome)
        assert kept.is_waiting
        gate.open.set()
    assert await notes_of(ref) == ["b", "c"]
    assert [event.message for event in events.of(MessageDropped)] == [Echo("a")]


async def test_drop_oldest_may_hit_a_told_message(system: ActorSystem, events: Events) -> None:
    ref = await spawn(system, 1, Overflow.DROP_OLDEST)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(gate))
        for text in "abc":
            await ref.tell(Note(text))
        gate.open.set()
    assert await notes_of(ref) == ["c"]
    assert [event.message for event in events.of(MessageDropped)] == [Note("a"), Note("b")]


async def test_drop_oldest_keeps_to_the_capacity_when_an_observer_sends_on_each_drop(
    system: ActorSystem,
) -> None:
    ref = await spawn(system, 2, Overflow.DROP_OLDEST)
    gate = Gate()
    depths: list[int] = []

    def resend(event: object) -> None:
        if isinstance(event, MessageDropped) and event.message == Note("a"):
            ref.tell_nowait(Note("again"))
            depths.append(system.tree().find("s/puppet").mailbox_depth)

    system.subscribe(resend)
    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(gate))
        for text in "abc":
            ref.tell_nowait(Note(text))
        depths.append(system.tree().find("s/puppet").mailbox_depth)
        gate.open.set()
    assert depths == [2, 2]
    assert await notes_of(ref) == ["c", "again"]


async def test_an_idle_actor_takes_a_message_at_any_capacity(system: ActorSystem) -> None:
    ref = await spawn(system, 1, Overflow.REJECT)
    await wait()
    for text in "abc":
        assert await ref.ask(Echo(text)) == text
    assert system.tree().find("s/puppet").mailbox_peak == 0


async def test_the_control_lane_precedes_the_queue_and_exceeds_its_capacity(system: ActorSystem) -> None:
    ref = await spawn(system, 2)
    other = await system.spawn(Puppet, name="other")
    gate = Gate()

    async def act(actor: Puppet) -> None:
        actor.context.watch(other, to=Note("other ended"))
        await gate(actor)

    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(act))
        for text in "ab":
            ref.tell_nowait(Note(text))
        await other.stop()
        gate.open.set()
    assert await notes_of(ref) == ["other ended", "a", "b"]


async def test_a_stop_precedes_the_queue(system: ActorSystem) -> None:
    ref = await spawn(system, 2)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        running = await started(nursery, ref, Do(gate))
        queued = await started(nursery, ref, Echo("a"))
        nursery.start_soon(ref.stop)
        await wait()
        gate.open.set()
    assert running.outcome == "through the gate"
    assert isinstance(queued.outcome, ActorStoppedError)


async def test_the_mailbox_survives_a_restart(system: ActorSystem) -> None:
    ref = await spawn(system, 2)
    gate = Gate()

    async def act(actor: Puppet) -> None:
        await gate(actor)
        raise ValueError("boom")

    async with trio.open_nursery() as nursery:
        crashing = await started(nursery, ref, Do(act))
        ref.tell_nowait(Note("a"))
        queued = await started(nursery, ref, Echo("b"))
        waiting = await started(nursery, ref, Echo("c"))
        gate.open.set()
    assert isinstance(crashing.outcome, ActorFailedError)
    assert (queued.outcome, waiting.outcome) == ("b", "c")
    assert await notes_of(ref) == ["a", "b", "c"]
    assert system.tree().find("s/puppet").restarts == 1


async def test_on_restart_reject_refuses_queued_and_new_messages(
    system: ActorSystem, events: Events, autojump_clock: trio.testing.MockClock
) -> None:
    ref = await system.spawn(
        Puppet,
        name="puppet",
        mailbox=MailboxOptions(capacity=2, on_restart="reject"),
        policy=Policy(backoff=Backoff(initial=1.0, jitter=0.0)),
    )
    gate = Gate()

    async def act(actor: Puppet) -> None:
        await gate(actor)
        raise ValueError("boom")

    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(act))
        askers: list[Asker] = [await started(nursery, ref, Echo(text)) for text in "abc"]
        teller = await started(nursery, ref, Note("d"))
        gate.open.set()
        await wait()
        for asker in (*askers, teller):
            assert isinstance(asker.outcome, ActorRestartingError), asker.outcome
        with pytest.raises(ActorRestartingError, match="Echo was not served: actor s/puppet is restarting"):
            await ref.ask(Echo("e"))
        with pytest.raises(ActorRestartingError):
            await ref.tell(Note("f"))
        with pytest.raises(ActorRestartingError):
            ref.tell_nowait(Note("g"))
    await trio.sleep(1.5)
    assert await ref.ask(Echo("h")) == "h"
    assert await notes_of(ref) == ["h"]
    assert len(events.of(MessageDropped)) == 7


async def test_on_restart_reject_gives_way_to_a_stop(system: ActorSystem) -> None:
    ref = await system.spawn(
        Puppet,
        name="puppet",
        mailbox=MailboxOptions(on_restart="reject"),
        policy=Policy(backoff=Backoff(initial=1000.0, maximum=1000.0)),
    )
    with pytest.raises(ActorFailedError):
        await ref.ask(Crash())
    await wait()
    with pytest.raises(ActorRestartingError):
        await ref.ask(Echo("a"))
    await ref.stop()
    with pytest.raises(ActorStoppedError):
        await ref.ask(Echo("b"))


async def test_queued_messages_are_refused_at_the_end_as_never_executed(
    system: ActorSystem, events: Events
) -> None:
    ref = await spawn(system, 1)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        running = await started(nursery, ref, Do(gate))
        queued = await started(nursery, ref, Echo("a"))
        waiting = await started(nursery, ref, Echo("b"))
        teller = await started(nursery, ref, Note("c"))
        ref.cancel("enough")
    assert isinstance(running.outcome, ActorFailedError)
    assert isinstance(running.outcome.__cause__, ActorStoppedError)
    assert "enough" in str(running.outcome.__cause__)
    for asker in (queued, waiting, teller):
        assert isinstance(asker.outcome, ActorStoppedError)
    assert [event.message for event in events.of(MessageDropped)] == [Echo("a"), Echo("b"), Note("c")]
    with pytest.raises(ActorStoppedError, match="actor s/puppet has ended: enough"):
        await ref.ask(Echo("d"))


async def test_an_idle_actor_forgets_its_last_message(system: ActorSystem) -> None:
    import gc
    import weakref

    class Marker:
        pass

    ref = await spawn(system, 2)
    marker = Marker()
    is_alive = weakref.ref(marker)

    async def act(actor: Puppet, marker: Marker = marker) -> None:
        pass

    message = Do(act)
    await ref.ask(message)
    await ref.tell(Run(act))
    await wait()
    del act, marker, message
    gc.collect()
    assert is_alive() is None


async def test_a_watch_message_overtaken_by_a_crash_ends_with_its_incarnation(
    system: ActorSystem, events: Events
) -> None:
    ref = await spawn(system, 2)
    other = await system.spawn(Puppet, name="other")
    gate = Gate()

    async def act(actor: Puppet) -> None:
        actor.context.watch(other, to=lambda ended: Note(ended.path))
        await gate(actor)
        raise ValueError("boom")

    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(act))
        await other.stop()
        gate.open.set()
    assert await notes_of(ref) == []
    assert [event.message for event in events.of(MessageDropped)] == [Note("s/other")]
    assert await other.wait_terminated() == Terminated(
        path="s/other", reason="stop was asked for", error=None
    )


async def test_start_ask_of_a_stopped_actor_leaves_nothing_in_the_mailbox(system: ActorSystem) -> None:
    ref = await spawn(system, 2)
    await ref.stop()
    async with trio.open_nursery() as nursery:
        asker = start_ask(nursery, ref, Echo("late"))
    assert isinstance(asker.outcome, ActorStoppedError)
    assert ref._cell.mailbox.is_empty


async def test_an_asker_that_leaves_costs_the_same_however_many_wait(system: ActorSystem) -> None:
    async def hang(_: Puppet) -> None:
        await trio.sleep_forever()

    async def cost_of_each(count: int) -> float:
        ref = await system.spawn(Puppet, mailbox=MailboxOptions(capacity=count // 2))
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(ref.ask, Do(hang))
            await wait()
            # A collection looks at all that wait, whatever is done to them.
            gc.collect()
            gc.disable()
            began = process_time()
            nursery.cancel_scope.cancel()
            took = process_time() - began
            gc.enable()
        return took / count

    few = min([await cost_of_each(250) for _ in range(3)])
    many = min([await cost_of_each(8000) for _ in range(2)])
    # 32 times as many wait. Looking for each among the others took 20 times as long; caches also cost some.
    assert many < 10 * few
