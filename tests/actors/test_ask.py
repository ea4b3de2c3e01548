"""Asks: every outcome, cancellation, deadlines."""

from __future__ import annotations

import math
from typing import Any

import attrs
import outcome
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
    crash,
    start_ask,
    started,
)

from trio_accel.actors import (
    Actor,
    ActorFailedError,
    ActorStoppedError,
    ActorSystem,
    Directive,
    MailboxOptions,
    MessageCancelled,
    MessageCompleted,
    MessageDropped,
    MessageEvent,
    MessageStarted,
    Policy,
    Ref,
    Request,
    handles,
)
from trio_accel.actors._messages import cells

wait = trio.testing.wait_all_tasks_blocked


async def returns(value: object) -> Do:
    async def act(actor: Puppet) -> object:
        return value

    return Do(act)


@pytest.mark.parametrize("value", [None, 0, "text", (1, 2), ValueError("a value, not raised")])
async def test_the_reply(puppet: Ref[Puppet], value: object) -> None:
    assert await puppet.ask(await returns(value)) is value


async def test_the_domain_error_is_a_reply_if_the_policy_resumes(system: ActorSystem, events: Events) -> None:
    policy = Policy(directives={LookupError: Directive.RESUME})
    ref = await system.spawn(Puppet, name="puppet", policy=policy)
    ref.tell_nowait(Note("kept"))
    error = KeyError("no such key")
    with pytest.raises(KeyError) as caught:
        await ref.ask(Crash(error))
    assert caught.value is error

    async def notes(actor: Puppet) -> list[str]:
        return actor.notes

    assert await ref.ask(Do(notes)) == ["kept"]
    node = system.tree().find("s/puppet")
    assert (node.restarts, node.failed, node.handled, node.last_error) == (0, 1, 2, None)


async def test_a_crash_is_an_actor_failed_error_with_the_original_as_its_cause(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    error = BoomError("what went wrong")
    with pytest.raises(ActorFailedError) as caught:
        await puppet.ask(Crash(error))
    assert caught.value.__cause__ is error
    assert caught.value.path == "s/puppet"
    assert str(caught.value) == (
        "actor s/puppet crashed while serving Crash (it may have been executed): BoomError: what went wrong"
    )
    await wait()
    node = system.tree().find("s/puppet")
    assert (node.restarts, node.failed, node.last_error) == (1, 1, "BoomError: what went wrong")


async def test_a_stopped_actor_refuses_with_the_reason(system: ActorSystem, puppet: Ref[Puppet]) -> None:
    await puppet.stop()
    with pytest.raises(ActorStoppedError) as caught:
        await puppet.ask(Echo("a"))
    assert str(caught.value) == "Echo was not served: actor s/puppet has ended: stop was asked for"
    assert caught.value.path == "s/puppet"


async def test_a_failed_actor_refuses_with_its_failure_as_cause(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, policy=Policy(directives={BoomError: Directive.STOP}), name="puppet")
    error = BoomError("end")
    gate = Gate()

    async def act(actor: Puppet) -> None:
        await gate(actor)
        raise error

    async with trio.open_nursery() as nursery:
        await started(nursery, ref, Do(act))
        queued = await started(nursery, ref, Echo("a"))
        gate.open.set()
    assert isinstance(queued.outcome, ActorStoppedError)
    assert queued.outcome.__cause__ is error
    with pytest.raises(ActorStoppedError, match=r"actor s/puppet has ended: it failed: BoomError: end"):
        await ref.ask(Echo("b"))


async def test_an_ask_of_a_stopping_actor_is_refused_while_its_last_message_runs(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        running = await started(nursery, puppet, Do(gate))
        nursery.start_soon(puppet.stop)
        await wait()
        with pytest.raises(ActorStoppedError, match="is stopping: stop was asked for"):
            await puppet.ask(Echo("a"))
        assert system.tree().find("s/puppet").state == "stopping"
        gate.open.set()
    assert running.outcome == "through the gate"


async def test_an_ask_between_two_incarnations_waits_for_the_next(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, policy=AT_ONCE)
    await crash(ref)
    assert await ref.ask(Number()) == 1


async def test_a_class_instead_of_a_message_or_an_unknown_one_is_refused_at_once(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    @attrs.frozen
    class Other(Request["Puppet", int]):
        pass

    with pytest.raises(TypeError, match=r"Puppet .* does not handle Other"):
        await puppet.ask(Other())
    assert system.dead_letters == 0


# Cancellation


async def test_cancelled_while_queued_it_is_withdrawn_and_never_runs(
    system: ActorSystem, puppet: Ref[Puppet], events: Events
) -> None:
    gate, never = Gate(), Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, Do(gate))
        queued = await started(nursery, puppet, Do(never))
        queued.scope.cancel()
        await wait()
        assert isinstance(queued.outcome, trio.Cancelled)
        assert system.tree().find("s/puppet").mailbox_depth == 0
        gate.open.set()
    assert not never.entered.is_set()
    assert len(events.of(MessageStarted)) == 1


async def test_cancelled_while_running_the_handler_is_cancelled_and_awaited(
    system: ActorSystem, puppet: Ref[Puppet], events: Events
) -> None:
    gate, cleanup = Gate(), Gate()

    async def act(actor: Puppet) -> None:
        try:
            await gate(actor)
        finally:
            with trio.CancelScope(shield=True):
                await cleanup(actor)

    async with trio.open_nursery() as nursery:
        running = await started(nursery, puppet, Do(act))
        running.scope.cancel()
        await wait()
        assert gate.ended == "Cancelled"
        assert running.is_waiting
        cleanup.open.set()
        await wait()
        assert isinstance(running.outcome, trio.Cancelled)
    assert await puppet.ask(Echo("alive")) == "alive"
    assert system.tree().find("s/puppet").restarts == 0
    assert [event.message_type for event in events.of(MessageCancelled)] == ["Do"]


async def test_a_cancelled_handler_that_returns_all_the_same_delivers_its_value(puppet: Ref[Puppet]) -> None:
    async def act(actor: Puppet) -> str:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:  # noqa: ASYNC103  # the test is about it
            return "done in spite of it"  # noqa: ASYNC104  # the test is about it

    async with trio.open_nursery() as nursery:
        running = await started(nursery, puppet, Do(act))
        running.scope.cancel()
    assert running.outcome == "done in spite of it"


async def test_a_cancelled_handler_that_raises_delivers_its_error(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, policy=AT_ONCE)

    async def act(actor: Puppet) -> str:
        try:
            await trio.sleep_forever()
        finally:
            raise BoomError("while unwinding")

    async with trio.open_nursery() as nursery:
        running = await started(nursery, ref, Do(act))
        running.scope.cancel()
    assert isinstance(running.outcome, ActorFailedError)
    assert isinstance(running.outcome.__cause__, BoomError)
    assert await ref.ask(Number()) == 1


async def test_abandon_on_cancel_returns_at_once_and_leaves_the_request_to_itself(
    puppet: Ref[Puppet], events: Events
) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        running = await started(nursery, puppet, Do(gate), abandon=True)
        running.scope.cancel()
        await wait()
        assert isinstance(running.outcome, trio.Cancelled)
        assert gate.ended is None
        gate.open.set()
    assert await puppet.ask(Echo("next")) == "next"
    assert gate.ended == "returned"
    assert len(events.of(MessageCompleted)) == 2


async def test_abandon_on_cancel_withdraws_a_queued_request_too(puppet: Ref[Puppet]) -> None:
    gate, never = Gate(), Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, Do(gate))
        queued = await started(nursery, puppet, Do(never), abandon=True)
        queued.scope.cancel()
        await wait()
        assert isinstance(queued.outcome, trio.Cancelled)
        gate.open.set()
    assert not never.entered.is_set()


async def test_a_crash_of_an_abandoned_request_reaches_only_supervision(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, policy=AT_ONCE)
    gate = Gate()

    async def act(actor: Puppet) -> None:
        await gate(actor)
        raise BoomError

    async with trio.open_nursery() as nursery:
        running = await started(nursery, ref, Do(act), abandon=True)
        running.scope.cancel()
        await wait()
        gate.open.set()
    assert isinstance(running.outcome, trio.Cancelled)
    assert await ref.ask(Number()) == 1


async def test_cancelled_before_it_is_sent_it_never_runs(puppet: Ref[Puppet], events: Events) -> None:
    never = Gate()
    async with trio.open_nursery() as nursery:
        asker = start_ask(nursery, puppet, Do(never))
        asker.scope.cancel()
    assert isinstance(asker.outcome, trio.Cancelled)
    assert await puppet.ask(Echo("a")) == "a"
    assert not never.entered.is_set()
    assert {event.message_type for event in events.of(MessageEvent)} == {"Echo"}


async def test_cancelled_after_the_hand_over_and_before_the_handler_it_never_runs(
    puppet: Ref[Puppet], events: Events
) -> None:
    never = Gate()
    await wait()
    with trio.CancelScope() as scope:
        # The idle actor gets the message in this very step; the cancellation follows before its turn.
        scope.cancel()
        await puppet.ask(Do(never))
    assert scope.cancelled_caught
    assert not never.entered.is_set()
    assert events.of(MessageEvent) == []


async def test_cancelled_when_the_reply_is_on_its_way_the_reply_is_delivered(puppet: Ref[Puppet]) -> None:
    async with trio.open_nursery() as nursery:
        gate = Gate()

        async def act(actor: Puppet) -> str:
            await gate.open.wait()
            # In the same step as the reply, and so before the caller could run.
            trio.lowlevel.current_trio_token().run_sync_soon(asker.scope.cancel)
            return "the reply"

        asker = await started(nursery, puppet, Do(act))
        gate.open.set()
    assert asker.outcome == "the reply"


async def test_a_cancellation_and_a_reply_in_one_step_give_one_outcome(puppet: Ref[Puppet]) -> None:
    async def act(actor: Puppet) -> str:
        asker.scope.cancel()
        return "the reply"

    async with trio.open_nursery() as nursery:
        asker = start_ask(nursery, puppet, Do(act))
    assert asker.outcome == "the reply"


async def test_cancelled_together_with_the_actor_there_is_one_outcome(puppet: Ref[Puppet]) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, Do(gate))
        asker.scope.cancel()
        puppet.cancel("both at once")
    assert gate.ended == "Cancelled"
    assert isinstance(asker.outcome, (trio.Cancelled, ActorFailedError))
    assert (await puppet.wait_terminated()).reason == "both at once"


async def test_a_handler_that_catches_the_actors_cancellation_and_continues_replies_first(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    async def act(actor: Puppet) -> str:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:  # noqa: ASYNC103  # the test is about it
            return "a last word"  # noqa: ASYNC104  # the test is about it

    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, Do(act))
        queued = await started(nursery, puppet, Echo("a"))
        puppet.cancel("enough")
    assert asker.outcome == "a last word"
    assert isinstance(queued.outcome, ActorStoppedError)
    assert puppet.is_terminated


# Deadlines


async def test_the_deadline_of_the_asker_reaches_the_handler(
    puppet: Ref[Puppet], mock_clock: trio.testing.MockClock
) -> None:
    seen: list[float] = []

    async def act(actor: Puppet) -> None:
        seen.append(actor.context.deadline)

    await puppet.ask(Do(act))
    with trio.move_on_after(100), trio.move_on_after(7):
        await puppet.ask(Do(act))
        await puppet.ask(DoGrouped(act))
    assert seen == [math.inf, 7.0, 7.0]


async def test_the_handler_is_cancelled_when_the_deadline_of_the_asker_passes(
    puppet: Ref[Puppet], autojump_clock: trio.testing.MockClock
) -> None:
    gate = Gate()
    with pytest.raises(trio.TooSlowError):
        with trio.fail_after(3):
            await puppet.ask(Do(gate))
    assert gate.ended == "Cancelled"
    assert trio.current_time() == pytest.approx(3)


class _At(trio.abc.Instrument):
    """Sets the clock right before a task's next step: later than the deadlines of that pass."""

    def __init__(self, task: trio.lowlevel.Task, clock: trio.testing.MockClock, seconds: float) -> None:
        self.task, self.clock, self.seconds = task, clock, seconds

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.clock.jump(self.seconds)
            trio.lowlevel.remove_instrument(self)


async def test_an_expired_request_is_dropped_at_dequeue_and_counted(
    system: ActorSystem, puppet: Ref[Puppet], events: Events, mock_clock: trio.testing.MockClock
) -> None:
    never = Gate()
    await wait()
    (task,) = [task for task, cell in cells.items() if cell.path == puppet.path]
    with trio.move_on_after(5) as scope:
        trio.lowlevel.add_instrument(_At(task, mock_clock, 6))
        await puppet.ask(Do(never))
    assert scope.cancelled_caught
    assert not never.entered.is_set()
    node = system.tree().find("s/puppet")
    assert (node.expired, node.handled, system.dead_letters) == (1, 0, 1)
    (dropped,) = events.of(MessageEvent)
    assert isinstance(dropped, MessageDropped)
    assert dropped.reason == "its deadline had passed"


async def test_a_request_that_waits_for_its_group_expires_too(
    system: ActorSystem, puppet: Ref[Puppet], autojump_clock: trio.testing.MockClock
) -> None:
    gates, never = [Gate(), Gate()], Gate()
    async with trio.open_nursery() as nursery:
        for gate in gates:
            await started(nursery, puppet, DoGrouped(gate))
        with trio.move_on_after(5) as scope:
            await puppet.ask(DoGrouped(never))
        assert scope.cancelled_caught
        for gate in gates:
            gate.open.set()
    await wait()
    assert not never.entered.is_set()
    assert await puppet.ask(Echo("alive")) == "alive"


async def test_a_request_with_a_moved_deadline_is_asked_again(
    system: ActorSystem, puppet: Ref[Puppet], mock_clock: trio.testing.MockClock
) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, Do(gate))
        asker = start_ask(nursery, puppet, Number())
        asker.scope.deadline = 5.0
        await wait()
        asker.scope.deadline = math.inf
        mock_clock.jump(10)
        gate.open.set()
    assert asker.outcome == 0
    assert system.tree().find("s/puppet").expired == 1


async def test_a_deadline_moved_forward_cancels_the_asker(
    puppet: Ref[Puppet], autojump_clock: trio.testing.MockClock
) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, Do(gate))
        asker.scope.deadline = 1.0
    assert isinstance(asker.outcome, trio.Cancelled)
    assert gate.ended == "Cancelled"


async def test_tells_carry_no_deadline(
    system: ActorSystem, puppet: Ref[Puppet], mock_clock: trio.testing.MockClock
) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        await started(nursery, puppet, Do(gate))
        with trio.move_on_after(5):
            await puppet.tell(Note("late, and served"))
        mock_clock.jump(10)
        gate.open.set()

    async def notes(actor: Puppet) -> list[str]:
        return actor.notes

    assert await puppet.ask(Do(notes)) == ["late, and served"]


# One outcome only


async def test_an_envelope_is_resolved_once(puppet: Ref[Puppet]) -> None:
    replies: list[Any] = []

    async def act(actor: Puppet) -> object:
        envelope = actor.context._cell.current
        assert envelope is not None
        assert envelope.resolve(outcome.Value("first"))
        replies.append(envelope.resolve(outcome.Value("second")))
        replies.append(envelope.fail(ValueError()))
        return "third"

    assert await puppet.ask(Do(act)) == "first"
    assert replies == [False, False]


async def test_unwinding_a_live_asker_is_an_error(puppet: Ref[Puppet]) -> None:
    async def act(actor: Puppet) -> object:
        reply = actor.context.defer()
        with pytest.raises(RuntimeError, match="the caller is not cancelled"):
            reply.cancelled()
        reply.set("still open")
        return reply

    assert await puppet.ask(Do(act)) == "still open"


# From actors


@attrs.frozen
class Relay(Request["Relayer", Any]):
    request: Request[Puppet, Any]


class Relayer(Actor):
    def __init__(self, target: Ref[Puppet]) -> None:
        self.target = target

    @handles(Relay)
    async def relay(self, message: Relay) -> Any:
        return await self.target.ask(message.request)


async def test_a_cancellation_travels_down_a_chain_of_asks(system: ActorSystem, puppet: Ref[Puppet]) -> None:
    relayer = await system.spawn(Relayer, puppet)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, relayer, Relay(Do(gate)))
        asker.scope.cancel()
    assert gate.ended == "Cancelled"
    assert isinstance(asker.outcome, trio.Cancelled)


async def test_a_deadline_travels_down_a_chain_of_asks_as_cancellation(
    system: ActorSystem, puppet: Ref[Puppet], autojump_clock: trio.testing.MockClock
) -> None:
    relayer = await system.spawn(Relayer, puppet)
    gate = Gate()
    with trio.move_on_after(2) as scope:
        await relayer.ask(Relay(Do(gate)))
    assert scope.cancelled_caught
    assert gate.ended == "Cancelled"


async def test_an_error_travels_up_a_chain_of_asks_by_its_cause(system: ActorSystem) -> None:
    puppet = await system.spawn(Puppet, policy=AT_ONCE, name="puppet")
    relayer = await system.spawn(Relayer, puppet, policy=AT_ONCE, name="relayer")
    with pytest.raises(ActorFailedError) as caught:
        await relayer.ask(Relay(Crash()))
    assert caught.value.path == "s/relayer"
    inner = caught.value.__cause__
    assert isinstance(inner, ActorFailedError)
    assert inner.path == "s/puppet"
    assert isinstance(inner.__cause__, BoomError)


async def test_a_domain_error_may_be_relayed_all_the_way(system: ActorSystem) -> None:
    policy = Policy(directives={BoomError: Directive.RESUME})
    puppet = await system.spawn(Puppet, policy=policy)
    relayer = await system.spawn(Relayer, puppet, policy=policy)
    with pytest.raises(BoomError):
        await relayer.ask(Relay(Crash()))


async def test_10_000_asks_from_8_tasks(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, mailbox=MailboxOptions(capacity=3))
    seen: list[tuple[int, int]] = []

    async def send(sender: int) -> None:
        for number in range(1250):
            assert await ref.ask(Echo(f"{sender} {number}")) == f"{sender} {number}"

    async with trio.open_nursery() as nursery:
        for sender in range(8):
            nursery.start_soon(send, sender)

    async def notes(actor: Puppet) -> list[str]:
        return actor.notes

    texts: list[str] = await ref.ask(Do(notes))
    seen = [(int(sender), int(number)) for sender, number in (text.split() for text in texts)]
    for which in range(8):
        assert [number for sender, number in seen if sender == which] == list(range(1250))
