"""Groups: concurrent handlers, up to a limit."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
import trio.testing
from sample_actors import (
    AT_ONCE,
    BoomError,
    Do,
    DoGrouped,
    Echo,
    Gate,
    Note,
    Number,
    Puppet,
    RunGrouped,
    started,
)

from trio_accel.actors import (
    Actor,
    ActorFailedError,
    ActorStoppedError,
    ActorSystem,
    AskCycleError,
    Backoff,
    Directive,
    Policy,
    Ref,
    Request,
    handles,
)

wait = trio.testing.wait_all_tasks_blocked


async def test_handlers_of_a_group_run_concurrently_with_all_others(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    first, second = Gate(), Gate()
    async with trio.open_nursery() as nursery:
        a = await started(nursery, puppet, DoGrouped(first))
        b = await started(nursery, puppet, DoGrouped(second))
        assert first.entered.is_set()
        assert second.entered.is_set()
        assert await puppet.ask(Echo("beside")) == "beside"
        assert system.tree().find("s/puppet").running == 2
        second.open.set()
        await wait()
        assert b.outcome == "through the gate"
        assert a.is_waiting
        first.open.set()


async def test_the_limit_holds_back_the_group_and_later_messages(puppet: Ref[Puppet]) -> None:
    gates = [Gate() for _ in range(3)]
    async with trio.open_nursery() as nursery:
        for gate in gates:
            await started(nursery, puppet, DoGrouped(gate))
        behind = await started(nursery, puppet, Echo("behind"))
        assert [gate.entered.is_set() for gate in gates] == [True, True, False]
        assert behind.is_waiting
        gates[1].open.set()
        await wait()
        assert gates[2].entered.is_set()
        assert behind.outcome == "behind"
        gates[0].open.set()
        gates[2].open.set()


@attrs.frozen
class A(Request["Two", str]):
    gate: Gate


@attrs.frozen
class B(Request["Two", str]):
    gate: Gate


@attrs.frozen
class A2(Request["Two", str]):
    gate: Gate


class Two(Actor):
    """Two groups of one, and two handlers that share the first."""

    @handles(A, group="a", limit=1)
    async def a(self, message: A) -> str:
        return await message.gate(self)  # type: ignore[arg-type]

    @handles(A2, group="a", limit=1)
    async def a2(self, message: A2) -> str:
        return await message.gate(self)  # type: ignore[arg-type]

    @handles(B, group="b", limit=1)
    async def b(self, message: B) -> str:
        return await message.gate(self)  # type: ignore[arg-type]


async def test_each_group_has_its_own_limit_shared_by_its_handlers(system: ActorSystem) -> None:
    ref = await system.spawn(Two)
    gates = {name: Gate() for name in ("A", "B", "A2")}
    async with trio.open_nursery() as nursery:
        for message in (A(gates["A"]), B(gates["B"]), A2(gates["A2"])):
            await started(nursery, ref, message)
        assert {name: gate.entered.is_set() for name, gate in gates.items()} == {
            "A": True,
            "B": True,
            "A2": False,
        }
        gates["B"].open.set()
        await wait()
        assert not gates["A2"].entered.is_set()
        gates["A"].open.set()
        await gates["A2"].entered.wait()
        gates["A2"].open.set()


async def test_cancelled_while_waiting_for_the_group_it_never_runs(puppet: Ref[Puppet]) -> None:
    gates, never = [Gate(), Gate()], Gate()
    async with trio.open_nursery() as nursery:
        for gate in gates:
            await started(nursery, puppet, DoGrouped(gate))
        asker = await started(nursery, puppet, DoGrouped(never))
        behind = await started(nursery, puppet, Echo("behind"))
        asker.scope.cancel()
        await wait()
        assert isinstance(asker.outcome, trio.Cancelled)
        assert behind.outcome == "behind"
        for gate in gates:
            gate.open.set()
    assert not never.entered.is_set()


async def test_cancelled_before_a_full_group_is_reached_it_never_runs(puppet: Ref[Puppet]) -> None:
    gates, never = [Gate(), Gate()], Gate()
    async with trio.open_nursery() as nursery:
        for gate in gates:
            await started(nursery, puppet, DoGrouped(gate))
        with trio.CancelScope() as scope:
            # The idle actor has it in this step, and sees the cancellation at its turn.
            scope.cancel()
            await puppet.ask(DoGrouped(never))
        assert scope.cancelled_caught
        assert await puppet.ask(Echo("alive")) == "alive"
        for gate in gates:
            gate.open.set()
    assert not never.entered.is_set()


async def test_cancelling_the_ask_cancels_only_its_handler(puppet: Ref[Puppet]) -> None:
    first, second = Gate(), Gate()
    async with trio.open_nursery() as nursery:
        a = await started(nursery, puppet, DoGrouped(first))
        b = await started(nursery, puppet, DoGrouped(second))
        a.scope.cancel()
        await wait()
        assert isinstance(a.outcome, trio.Cancelled)
        assert first.ended == "Cancelled"
        assert second.ended is None
        second.open.set()
    assert b.outcome == "through the gate"


async def test_a_crash_ends_the_other_members_with_the_reason(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, policy=AT_ONCE, name="puppet")
    grouped, alone, trigger = Gate(), Gate(), trio.Event()

    async def act(actor: Puppet) -> None:
        await trigger.wait()
        raise BoomError

    async with trio.open_nursery() as nursery:
        crashing = await started(nursery, ref, DoGrouped(act))
        beside = await started(nursery, ref, DoGrouped(grouped))
        current = await started(nursery, ref, Do(alone))
        queued = await started(nursery, ref, Echo("kept"))
        trigger.set()
    assert isinstance(crashing.outcome, ActorFailedError)
    assert isinstance(crashing.outcome.__cause__, BoomError)
    for asker in (beside, current):
        assert isinstance(asker.outcome, ActorFailedError)
        cause = asker.outcome.__cause__
        # Whether it restarts is not decided when they end.
        assert isinstance(cause, ActorStoppedError)
        assert str(cause) == "actor s/puppet ended: another of its messages or a child failed"
    assert queued.outcome == "kept"
    assert await ref.ask(Number()) == 1


async def test_two_crashes_at_once_are_one_failure_of_a_group_of_exceptions(system: ActorSystem) -> None:
    policy = Policy(directives={BoomError: Directive.STOP}, backoff=AT_ONCE.backoff)
    ref = await system.spawn(Puppet, policy=policy)
    trigger = trio.Event()

    def crashing(error: Exception) -> DoGrouped:
        async def act(actor: Puppet) -> None:
            await trigger.wait()
            raise error

        return DoGrouped(act)

    async with trio.open_nursery() as nursery:
        askers = [await started(nursery, ref, crashing(error)) for error in (ValueError(), BoomError())]
        trigger.set()
    for asker in askers:
        assert isinstance(asker.outcome, ActorFailedError)
    ended = await ref.wait_terminated()
    assert isinstance(ended.error, ExceptionGroup)
    assert {type(error) for error in ended.error.exceptions} == {ValueError, BoomError}


async def test_resume_in_a_group_touches_nobody_else(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, policy=Policy(directives={BoomError: Directive.RESUME}))
    gate = Gate()

    async def act(actor: Puppet) -> None:
        raise BoomError

    async with trio.open_nursery() as nursery:
        beside = await started(nursery, ref, DoGrouped(gate))
        with pytest.raises(BoomError):
            await ref.ask(DoGrouped(act))
        assert beside.is_waiting
        gate.open.set()
    assert await ref.ask(Number()) == 0


async def test_a_graceful_stop_waits_for_the_group(puppet: Ref[Puppet]) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, DoGrouped(gate))
        nursery.start_soon(puppet.stop)
        await wait()
        assert not puppet.is_terminated
        gate.open.set()
    assert asker.outcome == "through the gate"
    assert puppet.is_terminated


async def test_cancel_ends_the_group(puppet: Ref[Puppet]) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        asker = await started(nursery, puppet, DoGrouped(gate))
        puppet.cancel("enough")
    assert isinstance(asker.outcome, ActorFailedError)
    assert isinstance(asker.outcome.__cause__, ActorStoppedError)
    assert gate.ended == "Cancelled"


async def test_told_messages_run_in_groups_too(system: ActorSystem, puppet: Ref[Puppet]) -> None:
    gate = Gate()
    await puppet.tell(RunGrouped(gate))
    await gate.entered.wait()
    await puppet.tell(Note("beside"))
    await wait()
    assert system.tree().find("s/puppet").handled == 1
    gate.open.set()
    await wait()
    assert system.tree().find("s/puppet").handled == 2


async def test_an_ask_from_a_grouped_handler_to_its_own_actor_is_a_cycle(puppet: Ref[Puppet]) -> None:
    async def act(actor: Puppet) -> Any:
        with pytest.raises(AskCycleError, match="s/puppet -> s/puppet"):
            await puppet.ask(Echo("to myself"))
        return "refused"

    assert await puppet.ask(DoGrouped(act)) == "refused"


async def test_a_full_group_delays_a_stop_by_at_most_the_grace(
    system: ActorSystem, autojump_clock: trio.testing.MockClock
) -> None:
    ref = await system.spawn(Puppet, policy=Policy(grace=2.0))
    never = Gate()

    async def act(actor: Puppet) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            await started(nursery, ref, DoGrouped(act))
        waiting = await started(nursery, ref, DoGrouped(never))
        await ref.stop()
    assert isinstance(waiting.outcome, ActorStoppedError)
    assert trio.current_time() == pytest.approx(2.0)


async def test_a_message_that_waits_for_its_group_survives_a_crash_like_the_queue(
    system: ActorSystem,
) -> None:
    ref = await system.spawn(Puppet, policy=AT_ONCE, name="puppet")
    trigger, first = trio.Event(), Gate()
    first.open.set()

    async def act(actor: Puppet) -> None:
        await trigger.wait()
        raise BoomError

    async def sleep(actor: Puppet) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for grouped in (act, sleep):
            await started(nursery, ref, DoGrouped(grouped))
        asked = await started(nursery, ref, DoGrouped(first))
        told = await started(nursery, ref, Note("behind"))
        assert told.outcome == "told"
        trigger.set()
    assert asked.outcome == "through the gate"
    assert system.tree().find("s/puppet").handled == 2


async def test_a_message_that_waits_for_its_group_was_never_executed_at_the_end(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, name="puppet")
    gates, never = [Gate(), Gate()], Gate()
    async with trio.open_nursery() as nursery:
        for gate in gates:
            await started(nursery, ref, DoGrouped(gate))
        waiting = await started(nursery, ref, DoGrouped(never))
        ref.cancel("enough")
    assert isinstance(waiting.outcome, ActorStoppedError)
    assert not never.entered.is_set()
    assert system.dead_letters == 1


async def test_a_cancelled_asker_does_not_wait_for_the_restart_when_its_request_waits_for_its_group(
    system: ActorSystem,
) -> None:
    ref = await system.spawn(
        Puppet, policy=Policy(backoff=Backoff(initial=1000.0, maximum=1000.0)), name="puppet"
    )
    gates, never = [Gate(), Gate()], Gate()
    async with trio.open_nursery() as nursery:
        for gate in gates:
            await started(nursery, ref, DoGrouped(gate))
        waiting = await started(nursery, ref, DoGrouped(never))
        ref._cell.incarnation.nursery.cancel_scope.cancel()
        waiting.scope.cancel()
        await wait()
        assert system.tree().find("s/puppet").state == "restarting"
        assert isinstance(waiting.outcome, trio.Cancelled)
    assert not never.entered.is_set()
