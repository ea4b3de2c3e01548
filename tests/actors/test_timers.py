"""Delayed messages of an actor to itself: once, or again and again."""

from __future__ import annotations

import contextvars
import gc
import math
import weakref
from typing import Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_actors import (
    AT_ONCE,
    BoomError,
    Crash,
    Do,
    DoGrouped,
    Echo,
    Events,
    Gate,
    Note,
    Puppet,
    Run,
    crash,
)

from trio_accel.actors import (
    ActorContext,
    ActorFailedError,
    ActorSystem,
    DeferredReply,
    Directive,
    MailboxOptions,
    Message,
    MessageDropped,
    Overflow,
    Policy,
    Ref,
    Timer,
    open_system,
)

wait = trio.testing.wait_all_tasks_blocked
Clock = trio.testing.MockClock


async def notes_of(ref: Ref[Puppet]) -> list[str]:
    async def act(actor: Puppet) -> list[str]:
        return list(actor.notes)

    notes: list[str] = await ref.ask(Do(act))
    return notes


async def after(ref: Ref[Puppet], seconds: float, message: Message[Any]) -> Timer:
    async def act(actor: Puppet) -> Timer:
        return actor.context.after(seconds, message)

    timer: Timer = await ref.ask(Do(act))
    return timer


async def every(ref: Ref[Puppet], seconds: float, message: Message[Any]) -> Timer:
    async def act(actor: Puppet) -> Timer:
        return actor.context.every(seconds, message)

    timer: Timer = await ref.ask(Do(act))
    return timer


def nap(seconds: float, times: list[float] | None = None) -> Run:
    async def act(actor: Puppet) -> None:
        if times is not None:
            times.append(trio.current_time())
        await trio.sleep(seconds)

    return Run(act)


async def test_once_and_not_before(puppet: Ref[Puppet], mock_clock: Clock) -> None:
    await after(puppet, 5.0, Note("late"))
    mock_clock.jump(4.999)
    await wait()
    assert await notes_of(puppet) == []
    mock_clock.jump(0.001)
    await wait()
    assert await notes_of(puppet) == ["late"]
    mock_clock.jump(100)
    await wait()
    assert await notes_of(puppet) == ["late"]


async def test_at_once_means_the_next_turn(puppet: Ref[Puppet], mock_clock: Clock) -> None:
    async def act(actor: Puppet) -> None:
        actor.context.after(0, Note("timer"))
        actor.notes.append("handler")

    await puppet.ask(Do(act))
    await wait()
    assert await notes_of(puppet) == ["handler", "timer"]


@given(delays=st.lists(st.integers(0, 50), max_size=12))
@settings(max_examples=30, deadline=None)
def test_many_timers_fire_at_their_times(delays: list[int]) -> None:
    came: list[tuple[float, str]] = []

    async def main() -> None:
        async with open_system("s") as system:
            puppet = await system.spawn(Puppet)
            begin = trio.current_time()

            def coming(number: int) -> Run:
                async def act(_: Puppet) -> None:
                    came.append((round(trio.current_time() - begin, 6), str(number)))

                return Run(act)

            for number, delay in enumerate(delays):
                await after(puppet, delay, coming(number))
            await trio.sleep(60)

    trio.run(main, clock=Clock(autojump_threshold=0))
    # Ticks at the same time are unordered.
    assert sorted(came) == sorted((delay, str(number)) for number, delay in enumerate(delays))
    assert [at for at, _ in came] == sorted(delays)


@attrs.frozen
class Start(Message[Any]):
    """Begin."""


async def test_again_and_again_without_drift(puppet: Ref[Puppet], autojump_clock: Clock) -> None:
    times: list[float] = []
    begin = trio.current_time()
    timer = await every(puppet, 0.1, nap(0.03, times))
    await trio.sleep(10.05)
    assert timer.cancel()
    assert [at - begin for at in times] == pytest.approx([0.1 * k for k in range(1, 101)])


@pytest.mark.parametrize(
    ("busy", "served"), [(2.5, [1, 4, 7, 10]), (1.0, [1, 3, 5, 7, 9, 11]), (0.5, range(1, 12))]
)
async def test_a_slow_actor_is_not_told_twice(
    puppet: Ref[Puppet], autojump_clock: Clock, busy: float, served: Any
) -> None:
    """The oracle: the next tick is the first multiple of the period at which the last one is over."""
    times: list[float] = []
    begin = trio.current_time()
    await every(puppet, 1.0, nap(busy + 0.001, times))
    await trio.sleep(11.9)
    assert [at - begin for at in times] == pytest.approx(list(served))


async def test_a_note_waiting_in_the_mailbox_is_not_told_twice(
    system: ActorSystem, puppet: Ref[Puppet], autojump_clock: Clock
) -> None:
    await every(puppet, 1.0, Note("tick"))
    gate = Gate()
    await puppet.tell(Run(gate))
    await trio.sleep(5.5)
    assert system.tree().find("s/puppet").mailbox_depth == 1
    gate.open.set()
    await wait()
    assert await notes_of(puppet) == ["tick"]
    await trio.sleep(1)
    assert await notes_of(puppet) == ["tick", "tick"]


async def test_it_follows_the_queued_messages(puppet: Ref[Puppet], autojump_clock: Clock) -> None:
    gate = Gate()
    await puppet.tell(Run(gate))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(puppet.tell, Note("before"))
        await wait()

        async def act(actor: Puppet) -> None:
            actor.context.after(0, Note("timer"))

        await puppet.tell(Run(act))
        gate.open.set()
    await wait()
    await puppet.tell(Note("after"))
    await wait()
    assert await notes_of(puppet) == ["before", "timer", "after"]


@pytest.mark.parametrize("delay", [1.0, 0.0])
async def test_cancel(puppet: Ref[Puppet], mock_clock: Clock, delay: float) -> None:
    timer = await after(puppet, delay, Note("never"))
    assert timer.cancel()
    assert not timer.cancel()
    mock_clock.jump(10)
    await wait()
    assert await notes_of(puppet) == []


@pytest.mark.parametrize("stash", [False, True])
async def test_cancel_takes_it_out_of_the_mailbox(
    system: ActorSystem, puppet: Ref[Puppet], mock_clock: Clock, events: Events, stash: bool
) -> None:
    gate = Gate()

    async def set_aside(actor: Puppet) -> None:
        actor.context.stash(message)

    message = Run(set_aside) if stash else Note("never")
    timer = await after(puppet, 1.0, message)
    if not stash:
        await puppet.tell(Run(gate))
    mock_clock.jump(1.0)
    await wait()
    snapshot = system.tree().find("s/puppet")
    assert (snapshot.stashed if stash else snapshot.mailbox_depth) == 1
    assert timer.cancel()
    snapshot = system.tree().find("s/puppet")
    assert snapshot.stashed + snapshot.mailbox_depth == 0
    gate.open.set()
    assert await notes_of(puppet) == []
    assert not events.of(MessageDropped)


async def test_cancel_while_it_is_served_or_later(puppet: Ref[Puppet], mock_clock: Clock) -> None:
    gate = Gate()
    once, ticks = await after(puppet, 1.0, Run(gate)), await every(puppet, 1.0, Note("tick"))
    mock_clock.jump(1.0)
    await gate.entered.wait()
    assert not once.cancel()
    gate.open.set()
    await wait()
    assert not once.cancel()
    assert await notes_of(puppet) == ["tick"]
    assert ticks.cancel()
    assert not ticks.cancel()


async def test_a_tick_cancels_its_own_timer(puppet: Ref[Puppet], autojump_clock: Clock) -> None:
    timers: list[Timer] = []
    results: list[bool] = []

    async def act(actor: Puppet) -> None:
        actor.notes.append("tick")
        if len(actor.notes) == 3:
            results.append(timers[0].cancel())

    timers.append(await every(puppet, 1.0, Run(act)))
    await trio.sleep(10)
    assert results == [True]
    assert await notes_of(puppet) == ["tick"] * 3


async def test_it_does_not_outlive_a_restart(system: ActorSystem, autojump_clock: Clock) -> None:
    puppet = await system.spawn(Puppet, name="p", policy=AT_ONCE)
    timer = await after(puppet, 1.0, Note("old"))
    ticks = await every(puppet, 0.6, Note("old tick"))
    await crash(puppet)
    assert not timer.cancel()
    assert not ticks.cancel()
    await trio.sleep(5)
    assert await notes_of(puppet) == []


@pytest.mark.parametrize("on_restart", ["keep", "reject"])
async def test_a_tick_in_the_mailbox_does_not_outlive_a_restart(
    system: ActorSystem, autojump_clock: Clock, events: Events, on_restart: Any
) -> None:
    mailbox = MailboxOptions(on_restart=on_restart)
    puppet = await system.spawn(Puppet, name="p", policy=AT_ONCE, mailbox=mailbox)
    gate = Gate()

    async def fail(actor: Puppet) -> None:
        await gate(actor)
        raise BoomError

    await after(puppet, 1.0, Note("old"))
    await every(puppet, 1.0, Note("old tick"))
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(ActorFailedError):
                await puppet.ask(Do(fail))

        nursery.start_soon(ask)
        await trio.sleep(1.5)
        assert system.tree().find("s/p").mailbox_depth == 2
        gate.open.set()
    await trio.sleep(1.5)
    assert await notes_of(puppet) == []
    assert not events.of(MessageDropped)


async def test_in_the_lifespan_each_incarnation_has_it(system: ActorSystem, autojump_clock: Clock) -> None:
    async def start(actor: Puppet) -> None:
        actor.context.every(1.0, Note(actor.tag))

    puppet = await system.spawn(Puppet, None, start, name="p", policy=AT_ONCE)
    await trio.sleep(2.5)
    assert await notes_of(puppet) == ["p0"] * 2
    await crash(puppet)
    await trio.sleep(3.5)
    assert await notes_of(puppet) == ["p1"] * 3


async def test_a_failed_start_leaves_no_timer(system: ActorSystem, autojump_clock: Clock) -> None:
    async def start(actor: Puppet) -> None:
        actor.context.every(1.0, Note("never"))
        actor.context.after(1e6, Note("never"))
        raise BoomError

    with pytest.raises(BoomError):
        await system.spawn(Puppet, None, start)
    assert trio.current_time() < 1e5


@pytest.mark.parametrize("way", ["stop", "drain", "cancel", "crash"])
async def test_an_end_does_not_wait_for_it(
    system: ActorSystem, autojump_clock: Clock, way: str, events: Events
) -> None:
    puppet = await system.spawn(Puppet, name="p", policy=Policy(directives={BoomError: Directive.STOP}))
    await after(puppet, 1e6, Note("never"))
    await every(puppet, 1e6, Note("never"))
    begin = trio.current_time()
    if way == "cancel":
        puppet.cancel("enough")
    elif way == "crash":
        with pytest.raises(ActorFailedError):
            await puppet.ask(Crash())
    else:
        await puppet.stop(drain=way == "drain")
    await puppet.wait_terminated()
    assert trio.current_time() - begin < 1.0
    assert not events.of(MessageDropped)


async def test_it_continues_while_the_actor_drains(system: ActorSystem, autojump_clock: Clock) -> None:
    """An actor keeps its promises by a timer, so a drain must not stop it."""
    puppet = await system.spawn(Puppet, name="p", policy=Policy(grace=10.0))
    replies: list[DeferredReply[Any]] = []

    async def later(actor: Puppet) -> object:
        reply = actor.context.defer()

        async def end(_: Puppet) -> None:
            reply.set("by the timer")

        async def again(actor: Puppet) -> None:
            actor.context.after(1.0, Run(end))

        actor.context.after(1.0, Run(again))
        replies.append(reply)
        return reply

    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            assert await puppet.ask(Do(later)) == "by the timer"

        nursery.start_soon(ask)
        await wait()
        begin = trio.current_time()
        await puppet.stop(drain=True)
        assert trio.current_time() - begin == pytest.approx(2.0)


async def test_it_continues_while_a_group_drains(system: ActorSystem, autojump_clock: Clock) -> None:
    puppet = await system.spawn(Puppet, name="p", policy=Policy(grace=10.0))
    gate = Gate()

    async def let_through(_: Puppet) -> None:
        gate.open.set()

    async def act(actor: Puppet) -> str:
        actor.context.after(1.0, Run(let_through))
        return await gate(actor)

    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            assert await puppet.ask(DoGrouped(act)) == "through the gate"

        nursery.start_soon(ask)
        await wait()
        await puppet.stop(drain=True)


async def test_a_tick_does_not_hold_up_a_drain(system: ActorSystem, autojump_clock: Clock) -> None:
    puppet = await system.spawn(Puppet, name="p", policy=Policy(grace=10.0))
    await every(puppet, 0.5, nap(0.4))
    await trio.sleep(1.6)
    begin = trio.current_time()
    await puppet.stop(drain=True)
    assert trio.current_time() - begin < 0.5


@pytest.mark.parametrize("overflow", list(Overflow))
async def test_a_full_mailbox(
    system: ActorSystem, autojump_clock: Clock, events: Events, overflow: Overflow
) -> None:
    mailbox = MailboxOptions(capacity=2, overflow=overflow)
    puppet = await system.spawn(Puppet, name="p", mailbox=mailbox)
    gate = Gate()
    await after(puppet, 1.0, Note("timer"))
    await every(puppet, 1.0, Note("tick"))
    await puppet.tell(Run(gate))
    await trio.sleep(0.5)
    await puppet.tell(Note("a"))
    await puppet.tell(Note("b"))
    await trio.sleep(3.0)
    gate.open.set()
    await wait()
    notes = await notes_of(puppet)
    dropped = [event.message.text for event in events.of(MessageDropped)]
    if overflow is Overflow.WAIT:
        assert [*notes[:2], *sorted(notes[2:])] == ["a", "b", "tick", "timer"]
        assert dropped == []
    elif overflow is Overflow.DROP_OLDEST:
        assert sorted(notes) == ["tick", "timer"]
        assert dropped == ["a", "b"]
    else:
        assert notes == ["a", "b"]
        assert sorted(dropped) == ["tick"] * 3 + ["timer"]
    await trio.sleep(1.0)
    assert await notes_of(puppet) == [*notes, "tick"]
    assert system.tree().find("s/p").dropped == len(dropped)


async def test_a_tick_with_an_ignored_error(system: ActorSystem, autojump_clock: Clock) -> None:
    puppet = await system.spawn(Puppet, name="p", policy=Policy(directives={BoomError: Directive.RESUME}))
    times: list[float] = []

    async def fail(_: Puppet) -> None:
        times.append(trio.current_time())
        raise BoomError

    await every(puppet, 1.0, Run(fail))
    await trio.sleep(3.5)
    assert len(times) == 3


async def test_a_tick_that_crashes_ends_its_timer(system: ActorSystem, autojump_clock: Clock) -> None:
    puppet = await system.spawn(Puppet, name="p", policy=AT_ONCE)
    times: list[float] = []

    async def fail(_: Puppet) -> None:
        times.append(trio.current_time())
        raise BoomError

    await every(puppet, 1.0, Run(fail))
    await trio.sleep(5)
    assert len(times) == 1
    assert system.tree().find("s/p").incarnation == 1


async def test_the_callers_context_variables_are_used(puppet: Ref[Puppet], autojump_clock: Clock) -> None:
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")
    seen: list[str] = []

    async def look(_: Puppet) -> None:
        seen.append(tenant.get())
        tenant.set("changed")

    async def act(actor: Puppet) -> None:
        actor.context.every(1.0, Run(look))

    token = tenant.set("Ann")
    await puppet.ask(Do(act))
    tenant.reset(token)
    await trio.sleep(2.5)
    assert seen == ["Ann", "Ann"]


@pytest.mark.parametrize("verb", ["after", "every"])
@pytest.mark.parametrize("seconds", [-1, -0.001, math.nan, math.inf, -math.inf, "1", None, True])
async def test_bad_seconds(puppet: Ref[Puppet], verb: str, seconds: Any) -> None:
    async def act(actor: Puppet) -> None:
        error = ValueError if isinstance(seconds, (int, float)) and seconds is not True else TypeError
        with pytest.raises(error, match=f"^{verb}: seconds must be a "):
            getattr(actor.context, verb)(seconds, Note("never"))

    await puppet.ask(Do(act))


async def test_seconds_may_be_any_number(puppet: Ref[Puppet], autojump_clock: Clock) -> None:
    await after(puppet, 2, Note("whole"))
    await after(puppet, np.float64(1.0), Note("NumPy's"))
    await trio.sleep(3)
    assert await notes_of(puppet) == ["NumPy's", "whole"]


async def test_a_period_of_zero(puppet: Ref[Puppet]) -> None:
    async def act(actor: Puppet) -> None:
        with pytest.raises(ValueError, match=r"^every: seconds must be a finite number above 0, got 0$"):
            actor.context.every(0, Note("never"))

    await puppet.ask(Do(act))


@pytest.mark.parametrize("verb", ["after", "every"])
async def test_bad_messages(puppet: Ref[Puppet], verb: str) -> None:
    async def act(actor: Puppet) -> None:
        for message in (Start(), Echo("asked"), Note, "text"):
            with pytest.raises(TypeError, match=f"^{verb}: "):
                getattr(actor.context, verb)(1.0, message)

    await puppet.ask(Do(act))


async def test_an_ended_incarnation_makes_no_timers(system: ActorSystem, autojump_clock: Clock) -> None:
    contexts: list[ActorContext] = []

    async def start(actor: Puppet) -> None:
        contexts.append(actor.context)

    async def end(actor: Puppet) -> None:
        with pytest.raises(RuntimeError, match="has ended and serves no Note"):
            actor.context.after(1.0, Note("never"))

    puppet = await system.spawn(Puppet, None, start, end, name="p", policy=AT_ONCE)
    await crash(puppet)
    await wait()
    with pytest.raises(RuntimeError, match=r"^every: this incarnation of s/p has ended and serves no Note$"):
        contexts[0].every(1.0, Note("never"))


async def test_from_another_thread(puppet: Ref[Puppet], autojump_clock: Clock) -> None:
    timer = await after(puppet, 1.0, Note("late"))
    contexts: list[ActorContext] = []

    async def act(actor: Puppet) -> None:
        contexts.append(actor.context)

    await puppet.ask(Do(act))

    def elsewhere() -> None:
        with pytest.raises(RuntimeError, match="belongs to another thread"):
            timer.cancel()
        with pytest.raises(RuntimeError, match="belongs to another thread"):
            contexts[0].after(1.0, Note("never"))

    await trio.to_thread.run_sync(elsewhere)
    await trio.sleep(2)
    assert await notes_of(puppet) == ["late"]


async def test_one_task_each_and_nothing_is_kept(puppet: Ref[Puppet], autojump_clock: Clock) -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    kept: list[weakref.ref[Timer]] = []

    async def act(actor: Puppet) -> None:
        timers = [actor.context.after(number, Note(str(number))) for number in range(1, 101)]
        kept.extend(map(weakref.ref, timers))

    await puppet.ask(Do(act))
    assert trio.lowlevel.current_statistics().tasks_living == before + 100
    await trio.sleep(200)
    assert len(await notes_of(puppet)) == 100
    assert trio.lowlevel.current_statistics().tasks_living == before
    gc.collect()
    assert not [timer for timer in kept if timer() is not None]


async def test_its_text_names_actor_and_message(puppet: Ref[Puppet]) -> None:
    once, ticks = await after(puppet, 100, Note("a")), await every(puppet, 2.5, Note("b"))
    assert repr(once) == "<Timer of s/puppet: Note(text='a'), once>"
    assert repr(ticks) == "<Timer of s/puppet: Note(text='b'), every 2.5 s>"
