"""Observers: every event once, at no cost when nobody listens."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
import trio
import trio.testing
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
    Number,
    Puppet,
    Run,
    crash,
    deferring,
    raises_group,
    start_ask,
    started,
)

from trio_accel.actors import (
    ActorFailedError,
    ActorRestarted,
    ActorStarted,
    ActorSystem,
    ActorTerminated,
    DeferredReply,
    Directive,
    Event,
    Intensity,
    MessageCancelled,
    MessageCompleted,
    MessageDropped,
    MessageEvent,
    MessageFailed,
    MessageStarted,
    MessageWithdrawn,
    Policy,
    Ref,
    Subscription,
    SupervisorFailed,
    SystemOptions,
    around_each_system,
    open_system,
)

wait = trio.testing.wait_all_tasks_blocked


async def test_the_life_of_an_actor(system: ActorSystem, events: Events) -> None:
    ref = await system.spawn(Puppet, name="puppet", policy=AT_ONCE)
    error = BoomError()
    await crash(ref, error)
    await ref.ask(Number())
    await ref.stop()
    assert [event for event in events if not isinstance(event, MessageEvent)] == [
        ActorStarted(path="s/puppet", incarnation=0),
        ActorRestarted(path="s/puppet", error=error, incarnation=1, delay=0.0),
        ActorStarted(path="s/puppet", incarnation=1),
        ActorTerminated(path="s/puppet", reason="stop was asked for", error=None),
    ]


@pytest.mark.parametrize("kind", ["asked", "told", "grouped"])
async def test_a_message_starts_and_completes_once(puppet: Ref[Puppet], events: Events, kind: str) -> None:
    async def act(actor: Puppet) -> None:
        pass

    if kind == "told":
        await puppet.tell(Run(act))
        await wait()
    else:
        await puppet.ask(Do(act) if kind == "asked" else DoGrouped(act))
    assert [type(event) for event in events.of(MessageEvent)] == [MessageStarted, MessageCompleted]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("directive", [Directive.RESTART, Directive.RESUME, Directive.STOP])
async def test_a_message_starts_and_fails_once(
    system: ActorSystem, events: Events, directive: Directive, grouped: bool
) -> None:
    ref = await system.spawn(
        Puppet, policy=Policy(directives={BoomError: directive}, backoff=AT_ONCE.backoff)
    )
    error = BoomError()

    async def act(actor: Puppet) -> None:
        raise error

    with pytest.raises((ActorFailedError, BoomError)):
        await ref.ask(DoGrouped(act) if grouped else Do(act))
    await wait()
    first, second = events.of(MessageEvent)
    assert isinstance(first, MessageStarted)
    assert isinstance(second, MessageFailed)
    assert second.error is error


async def test_a_part_is_reported_as_a_message_to_an_actor_below(
    system: ActorSystem, puppet: Ref[Puppet], events: Events, autojump_clock: trio.testing.MockClock
) -> None:
    variable = ContextVar("variable", default="outside")
    seen: list[str] = []
    error = BoomError()

    async def act(actor: Puppet) -> None:
        for name in ("sleep", "fail"):
            seen.append(variable.get())
            with pytest.RaisesGroup(BoomError) if name == "fail" else nullcontext():
                async with trio.open_nursery() as nursery:
                    with actor.context.part(name, queue_time=2.0):
                        seen.append(variable.get())
                        await trio.sleep(3.0)
                        if name == "fail":
                            nursery.cancel_scope.cancel()
                            raise error
        with trio.move_on_after(1.0), actor.context.part("cancelled"):
            await trio.sleep_forever()
        seen.append(variable.get())

    def set_variable(event: Event) -> None:
        if isinstance(event, MessageStarted) and event.context is not None and event.path != puppet.path:
            event.context.run(variable.set, event.message_type)

    with system.subscribe(set_variable):
        await puppet.ask(Do(act))
    # An observer's settings for a part hold inside of it, and no longer.
    assert seen == ["outside", "sleep", "outside", "fail", "outside"]
    parts = [event for event in events.of(MessageEvent) if event.path != puppet.path]
    times: dict[str, Any] = {"queue_time": 2.0, "run_time": 3.0}
    assert parts == [
        MessageStarted(path="s/puppet/sleep", message_type="sleep", queue_time=2.0),
        MessageCompleted(path="s/puppet/sleep", message_type="sleep", **times),
        MessageStarted(path="s/puppet/fail", message_type="fail", queue_time=2.0),
        MessageFailed(path="s/puppet/fail", message_type="fail", error=error, **times),
        MessageStarted(path="s/puppet/cancelled", message_type="cancelled", queue_time=0.0),
        MessageCancelled(path="s/puppet/cancelled", message_type="cancelled", queue_time=0.0, run_time=1.0),
    ]
    assert len({event.number for event in parts}) == 3


async def test_the_times(
    system: ActorSystem, puppet: Ref[Puppet], events: Events, mock_clock: trio.testing.MockClock
) -> None:
    """The clock begins at 0, which is a time like any other."""
    gate = Gate()
    assert trio.current_time() == 0.0
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, Do(gate))
        await started(nursery, puppet, Note("a"))
        mock_clock.jump(5)
        gate.open.set()
    await wait()
    assert events.of(MessageStarted) == [
        MessageStarted(path="s/puppet", message_type="Do", queue_time=0.0),
        MessageStarted(path="s/puppet", message_type="Note", queue_time=5.0),
    ]
    assert events.of(MessageCompleted) == [
        MessageCompleted(path="s/puppet", message_type="Do", queue_time=0.0, run_time=5.0),
        MessageCompleted(path="s/puppet", message_type="Note", queue_time=5.0, run_time=0.0),
    ]


async def test_the_run_time_continues_until_a_deferred_reply(
    puppet: Ref[Puppet], events: Events, mock_clock: trio.testing.MockClock
) -> None:
    replies: list[DeferredReply[object]] = []
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, deferring(replies))
        assert events.of(MessageCompleted) == []
        mock_clock.jump(3)
        replies[0].set(None)
    (completed,) = events.of(MessageCompleted)
    assert completed.run_time == 3.0


async def test_a_message_sent_before_anyone_observed_has_no_queue_time(
    system: ActorSystem, puppet: Ref[Puppet], mock_clock: trio.testing.MockClock
) -> None:
    gate, seen = Gate(), Events()
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, Do(gate))
        await started(nursery, puppet, Echo("a"))
        mock_clock.jump(5)
        system.subscribe(seen.append)
        gate.open.set()
    # That the first began was not seen, so neither is that it ended.
    assert seen == [
        MessageStarted(path="s/puppet", message_type="Echo", queue_time=0.0),
        MessageCompleted(path="s/puppet", message_type="Echo", queue_time=0.0, run_time=0.0),
    ]


async def test_a_closed_subscription_hears_nothing(system: ActorSystem, puppet: Ref[Puppet]) -> None:
    seen = Events()
    subscription = system.subscribe(seen.append)
    subscription.close()
    subscription.close()
    await puppet.ask(Echo("a"))
    with system.subscribe(seen.append) as opened:
        assert isinstance(opened, Subscription)
        await puppet.ask(Echo("b"))
    await puppet.ask(Echo("c"))
    assert seen.names == ["MessageStarted", "MessageCompleted"]


async def test_a_subscription_is_closed_while_a_message_runs(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    seen, gate = Events(), Gate()
    async with trio.open_nursery() as nursery:
        with system.subscribe(seen.append):
            await started(nursery, puppet, Do(gate))
        gate.open.set()
    assert seen.names == ["MessageStarted"]


async def test_who_wants_no_messages_hears_of_actors_only_and_messages_cost_nothing(
    system: ActorSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []
    monkeypatch.setattr("trio_accel.actors._outcomes.MessageStarted", None)
    with system.subscribe(heard.append, messages=False):
        ref = await system.spawn(Puppet, name="life")
        assert await ref.ask(Echo(5)) == 5
        await ref.stop()
    assert [type(event).__name__ for event in heard] == ["ActorStarted", "ActorTerminated"]
    await system.spawn(Puppet, name="later")
    assert len(heard) == 2


async def test_the_same_observer_twice_hears_twice(system: ActorSystem, puppet: Ref[Puppet]) -> None:
    seen = Events()
    with system.subscribe(seen.append):
        with system.subscribe(seen.append):
            await puppet.ask(Echo("a"))
        await puppet.ask(Echo("b"))
    assert len(seen) == 6


async def test_a_raising_observer_is_logged_and_continues(
    system: ActorSystem, puppet: Ref[Puppet], caplog: pytest.LogCaptureFixture
) -> None:
    seen, calls = Events(), []

    def raising(event: Event) -> None:
        calls.append(event)
        raise BoomError("observer")

    system.subscribe(raising)
    system.subscribe(seen.append)
    assert await puppet.ask(Echo("a")) == "a"
    assert calls == seen
    assert len(seen) == 2
    assert caplog.text.count("an observer failed on MessageStarted") == 1


async def test_subscribing_during_delivery_hears_from_the_next_event_on(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    late = Events()

    def subscribe(event: Event) -> None:
        if isinstance(event, MessageStarted):
            system.subscribe(late.append)

    system.subscribe(subscribe)
    await puppet.ask(Echo("a"))
    assert late.names == ["MessageCompleted"]


async def test_closing_during_delivery_takes_effect_at_once(system: ActorSystem, puppet: Ref[Puppet]) -> None:
    seen = Events()

    def close(event: Event) -> None:
        subscriptions[1].close()

    subscriptions = [system.subscribe(close), system.subscribe(seen.append)]
    await puppet.ask(Echo("a"))
    assert seen == []


async def test_an_observer_may_use_the_system(system: ActorSystem, puppet: Ref[Puppet]) -> None:
    depths: list[int] = []

    def observer(event: Event) -> None:
        depths.append(len(system.tree().children))
        if isinstance(event, MessageCompleted) and event.message_type == "Echo":
            puppet.tell_nowait(Note("seen"))

    system.subscribe(observer)
    await puppet.ask(Echo("a"))
    await wait()
    assert depths == [1] * 4


async def test_an_observer_that_ends_the_actor_in_the_middle(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    def observer(event: Event) -> None:
        if isinstance(event, MessageStarted):
            puppet.cancel("an observer said so")

    system.subscribe(observer)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        asker = start_ask(nursery, puppet, Do(gate))
    assert isinstance(asker.outcome, ActorFailedError)
    assert gate.ended == "Cancelled"
    assert (await puppet.wait_terminated()).reason == "an observer said so"


async def test_an_observer_that_ends_the_actor_instead_of_its_restart(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet)

    def observer(event: Event) -> None:
        if isinstance(event, ActorRestarted):
            ref.cancel("an observer said so")

    system.subscribe(observer)
    await crash(ref)
    assert (await ref.wait_terminated()).reason == "an observer said so"


async def test_nobody_listens_and_nothing_is_made(
    system: ActorSystem, puppet: Ref[Puppet], monkeypatch: pytest.MonkeyPatch
) -> None:
    emitted: list[Event] = []
    made: list[str] = []

    def emit(self: object, event: Event) -> None:
        emitted.append(event)

    monkeypatch.setattr("trio_accel.actors._events.Observers.emit", emit)
    monkeypatch.setattr("trio_accel.actors._events.Observers.emit_life", emit)
    ends = ("MessageCompleted", "MessageFailed", "MessageDropped", "MessageCancelled", "MessageWithdrawn")
    messages = ("MessageStarted", *ends)
    events = [*(f"_outcomes.{name}" for name in messages), "_system.ActorStarted", "_cell.ActorTerminated"]
    for name in (*events, "_supervisor.ActorRestarted", "_supervisor.SupervisorFailed"):
        monkeypatch.setattr(f"trio_accel.actors.{name}", lambda name=name, **_: made.append(name))
    replies: list[DeferredReply[object]] = []
    await puppet.ask(Echo("a"))
    await puppet.tell(Note("b"))
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, deferring(replies))
        replies[0].set(None)
    await crash(puppet)
    await puppet.ask(Number())
    await puppet.stop()
    assert (emitted, made) == ([], [])
    # They are made there: with somebody who listens each of these would have been.
    with system.subscribe(lambda event: None):
        await system.spawn(Puppet, name="heard")
    assert made == ["_system.ActorStarted"]


async def test_dead_letters_are_reported_with_their_reason_and_counted(
    system: ActorSystem, puppet: Ref[Puppet], events: Events
) -> None:
    await puppet.stop()
    with pytest.raises(Exception, match="has ended"):
        await puppet.ask(Echo("a"))
    assert events.of(MessageDropped) == [
        MessageDropped(
            path="s/puppet",
            message_type="Echo",
            reason="actor s/puppet has ended: stop was asked for",
            message=Echo("a"),
        )
    ]
    assert system.dead_letters == 1


async def test_dead_letters_are_counted_when_nobody_listens(system: ActorSystem, puppet: Ref[Puppet]) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, Do(gate))
        for text in "abc":
            puppet.tell_nowait(Note(text))
        puppet.cancel("enough")
    await puppet.wait_terminated()
    assert system.dead_letters == 3


async def test_a_supervisor_that_fails_is_an_event() -> None:
    events = Events()
    with raises_group() as caught:
        async with open_system("s", options=SystemOptions(intensity=Intensity(0))) as system:
            system.subscribe(events.append)
            await crash(await system.spawn(Puppet, name="puppet"))
            await trio.sleep_forever()
    (failed,) = events.of(SupervisorFailed)
    assert failed == SupervisorFailed(path="s", error=caught.value.exceptions[0])


async def test_a_message_overtaken_by_the_end_also_fails_for_the_observers(
    puppet: Ref[Puppet], events: Events
) -> None:
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, Do(Gate()))
        puppet.cancel("enough")
    started_, failed = events.of(MessageEvent)
    assert isinstance(started_, MessageStarted)
    assert isinstance(failed, MessageFailed)
    assert "enough" in str(failed.error)


async def test_a_told_message_overtaken_by_the_end_also_fails_for_the_observers(
    puppet: Ref[Puppet], events: Events
) -> None:
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, Run(Gate()))
        puppet.cancel("enough")
    await puppet.wait_terminated()
    assert [type(event) for event in events.of(MessageEvent)] == [MessageStarted, MessageFailed]


async def test_a_crash_is_counted_once(system: ActorSystem, events: Events) -> None:
    ref = await system.spawn(Puppet, name="puppet", policy=AT_ONCE)
    with pytest.raises(ActorFailedError):
        await ref.ask(Crash())
    await ref.ask(Number())
    assert len(events.of(MessageFailed)) == len(events.of(ActorRestarted)) == 1


async def test_a_withdrawn_request_has_an_event(
    system: ActorSystem, puppet: Ref[Puppet], autojump_clock: trio.testing.MockClock
) -> None:
    heard: list[Event] = []

    async def occupy(actor: Puppet) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(puppet.ask, Do(occupy))
        await wait()
        with system.subscribe(heard.append):
            with trio.move_on_after(2.0):
                await puppet.ask(Echo("never"))
        nursery.cancel_scope.cancel()
    (event,) = [event for event in heard if isinstance(event, MessageWithdrawn)]
    assert (event.path, event.message_type, event.queue_time) == (puppet.path, "Echo", 2.0)
    assert event.context is not None


_VARIABLE: ContextVar[str] = ContextVar("_VARIABLE", default="nothing")


async def test_events_of_a_message_have_one_number_and_the_context_it_is_served_with(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    heard: list[MessageEvent] = []

    def hear(event: Event) -> None:
        assert isinstance(event, MessageEvent)
        heard.append(event)

    _VARIABLE.set("the asker's")
    with system.subscribe(hear):
        for _ in range(3):
            await puppet.ask(Echo("a"))
            await puppet.tell(Note("b"))
        await wait()
    begun, ended = heard[::2], heard[1::2]
    assert [type(event) for event in begun] == [MessageStarted] * 6
    assert [event.number for event in begun] == [event.number for event in ended]
    assert len({event.number for event in begun}) == 6
    assert {event.context[_VARIABLE] for event in heard if event.context} == {"the asker's"}
    assert all(one.context is two.context for one, two in zip(begun, ended, strict=True))


async def test_a_context_that_requests_share_is_a_copy_for_each_while_somebody_observes(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    heard: list[Event] = []
    shared = copy_context()
    with system.subscribe(heard.append):
        for _ in range(2):
            puppet.post(Echo("a"), lambda _: None, context=shared)
            await wait()
    contexts = [event.context for event in heard if isinstance(event, MessageStarted)]
    assert contexts == [shared, shared]  # the same variables
    assert contexts[0] is not shared
    assert contexts[0] is not contexts[1]


async def test_each_system_opened_inside_is_observed(system: ActorSystem) -> None:
    seen: list[str] = []

    @contextmanager
    def inside(opened: ActorSystem) -> Generator[None, None, None]:
        seen.append(f"{opened.name} opens")
        with opened.subscribe(lambda event: seen.append(type(event).__name__)):
            yield
        seen.append(f"{opened.name} has ended")

    with around_each_system(inside):
        async with open_system("one") as one:
            await one.spawn(Puppet, name="puppet")
    async with open_system("two"):
        pass
    assert seen == ["one opens", "ActorStarted", "ActorTerminated", "one has ended"]
